"""``fdp train --sum-dtype float32``: trains, says how much more noise it adds, and keeps to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.train_runs import call, last_json, train


def test_float32_sums_train_and_say_how_much_noise_covers_their_rounding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert train(out, "--sum-dtype", "float32", "--save-every", "2", "--json") == 0
    shown = capsys.readouterr().out
    assert "more, which covers the rounding of float32 sums" in " ".join(shown.replace("│", " ").split())
    assert last_json(shown)["private"] is True
    extra = json.loads((out / "config.json").read_text())["extra_noise"]
    assert 0 < extra < 1e-3
    assert call("statement", str(out)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"so the noise is z C (1 + {extra:.3g})" in said


def test_float64_sums_add_no_noise_and_are_the_default(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", steps=2) == 0
    assert "rounding" not in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "config.json").read_text())["extra_noise"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--sum-dtype", "bfloat16"), "--sum-dtype: expected one of float64, float32"),
        (("--sum-dtype", "float32", "--noise-multiplier", "0", "--method", "none"), "--sum-dtype: expected a --method"),
    ],
)
def test_mistakes_name_the_flag(
    words: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())
