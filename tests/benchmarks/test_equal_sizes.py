"""The benchmark of what a sample adds in smaller microbatches, on a model of no size, and its page."""

from __future__ import annotations

import json

from benchmarks import equal_sizes
from fdp.models import GPTConfig

TINY = GPTConfig(layers=1, width=8, heads=2, context=6, vocab_size=13, tied=True)


def test_it_compares_all_sizes_and_writes_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(equal_sizes, "GPT2", TINY)
    monkeypatch.setattr(equal_sizes, "BATCHES", {6: 4})
    source = tmp_path / "rows.json"
    words = ["--device", "cpu", "--layers", "1", "--compile", "none", "--dtypes", "float32", "--heads", "untied"]
    equal_sizes.main(["--json", str(source), *words])
    assert "untied, float32, eager, expected 6: 4: 0.0e+00, 2: " in capsys.readouterr().out
    (row,) = json.loads(source.read_text())["rows"]
    assert row["sizes"] == [4, 2, 1]
    assert row["used"][0] == 4
    assert list(row["differences"]) == ["4", "2", "1"]
    assert all(0 <= by <= 1e-6 for by in row["differences"].values())
    monkeypatch.setattr(equal_sizes, "RESULTS", tmp_path)
    equal_sizes.main(["--render", str(source)])
    (written,) = tmp_path.glob("equal_sizes_*.md")
    assert "| gpt2_untied | float32, eager | 6 | 4: 0.0e+00, 2: " in written.read_text()
