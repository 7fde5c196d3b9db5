"""Tests of the worst-sample command: tables, rows, and its exit code."""

from __future__ import annotations

import json

import pytest

import fdp.types
from benchmarks import worst_sample
from tests.adversary import ARENAS, MAGNITUDES, attacks_on


def run(monkeypatch, tmp_path, *more: str) -> tuple[object, dict]:
    out = tmp_path / "deep" / "rows.json"
    words = ["worst_sample", "--quick", "--minutes", "0.03", "--dtype", "float32", "--out", str(out), *more]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as end:
        worst_sample.main()
    return end.value.code, json.loads(out.read_text())


def test_the_command_writes_the_worst_of_every_attack(monkeypatch, tmp_path, capsys):
    code, content = run(monkeypatch, tmp_path)
    assert code == 0
    assert content.keys() >= {"hardware", "versions", "commit", "command", "rows"}
    kinds = {row["kind"] for row in content["rows"]}
    assert "search" in kinds
    assert "tokens that cancel" in kinds
    assert all(0 <= row["ratio"] <= row["allowed"] == 1 + 1e-6 for row in content["rows"])
    assert sum(row["cases"] for row in content["rows"]) > 50
    assert "worst ratio" in capsys.readouterr().out


def test_the_command_fails_and_shows_the_sample_if_one_breaks_the_bound(monkeypatch, tmp_path, capsys):
    real = fdp.types.Norms.total
    monkeypatch.setattr("fdp.types.Norms.total", lambda self: real(self) / 2)
    code, content = run(monkeypatch, tmp_path)
    assert code not in (0, None)
    broken = [row for row in content["rows"] if row["ratio"] > row["allowed"]]
    assert broken
    assert any(row["sample"] for row in broken)
    assert "broken:" in capsys.readouterr().out


def test_every_named_attack_has_a_kind():
    names = attacks_on(ARENAS["linear+add"]().leaves["w"], worst_sample.torch.float32)
    kinds = {name: worst_sample.class_of(name) for name in names}
    assert kinds["uses +-1e+20"] == "uses of a leaf that cancel"
    assert kinds["tokens +-1e+20"] == "tokens that cancel"
    assert kinds["one nan token"] == kinds["one -inf gradient"] == "not finite"
    assert kinds["up-rounded squares of 1 less 1"] == "squares that round the most"
    assert max(MAGNITUDES) == 1e30
