"""The benchmark of drawn steps, on a model of no size, and its page."""

from __future__ import annotations

import json

import pytest

from benchmarks import poisson_steps
from fdp.models import GPTConfig

TINY = GPTConfig(layers=1, width=8, heads=2, context=6, vocab_size=13, tied=True)


@pytest.mark.parametrize("mode", [pytest.param("none", marks=pytest.mark.long), "auto"])
def test_it_times_both_kinds_of_step_and_writes_a_page(mode, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(poisson_steps, "GPT2", TINY)
    monkeypatch.setattr(poisson_steps, "STEPS", {8: 2})
    source = tmp_path / "rows.json"
    words = ["--device", "cpu", "--microbatch", "4", "--layers", "1", "--context", "6", "--batches", "8"]
    poisson_steps.main(["--json", str(source), "--modes", mode, *words])
    assert "ratio" in capsys.readouterr().out
    (row,) = json.loads(source.read_text())["rows"]
    assert row["ratio"] > 0
    assert row["steps"] == 6
    assert list(row["tail_ms"]) == ["4", "2", "1", "8", "6", "5"]
    monkeypatch.setattr(poisson_steps, "RESULTS", tmp_path)
    poisson_steps.main(["--render", str(source)])
    (written,) = tmp_path.glob("poisson_steps_*.md")
    assert f"| {mode} | 8 |" in written.read_text()
