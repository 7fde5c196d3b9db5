"""``fdp train --optimizer kfac``: it trains, resumes, says what it keeps, and refuses what it should."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from fdp import run as runs
from fdp.cli.configure import LEARNING_RATES, kfac_config, learning_rate
from fdp.cli.main import main
from fdp.kfac.config import Distribution, KfacConfig
from fdp.kfac.fisher import Fisher

SMALL = shlex.split(
    "train --model mlp --data digits --optimizer kfac --method none --batch-size 32 --microbatch 32 --warmup 1 --seed 1"
)


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main([*SMALL, *words])
    return int(caught.value.code or 0)


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())


def test_it_trains_and_says_what_it_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--steps", "21", "--kfac-policy", "all", "--out", str(tmp_path / "run")) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "21 steps of kfac, learning rate 0.1 (cosine)" in text
    assert (
        "sampled Fisher information, damping 0.03, every 10 steps; layers: 1 dense x dense, 1 softmax x dense" in text
    )
    found = summary(tmp_path / "run")
    assert found["loss_last"] < 0.3 * found["loss_first"]
    assert (found["kfac_measured"], found["kfac_failures"], found["private"]) == (3, 0, False)


def test_an_interrupted_run_resumes_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--steps", "5", "--kfac-period", "2", "--save-every", "1", "--quiet")
    assert call(*words, "--out", str(tmp_path / "whole")) == 0
    record_of, made = runs.record_of, []

    def interrupting(*args: Any, **kwargs: Any) -> Any:
        made.append(1)
        if len(made) == 4:
            raise KeyboardInterrupt
        return record_of(*args, **kwargs)

    monkeypatch.setattr(runs, "record_of", interrupting)
    assert call(*words, "--out", str(tmp_path / "halves")) == 130
    monkeypatch.setattr(runs, "record_of", record_of)
    assert call(*words, "--out", str(tmp_path / "halves")) == 0
    whole, halves = summary(tmp_path / "whole"), summary(tmp_path / "halves")
    assert whole["parameter_sha256"] == halves["parameter_sha256"]
    assert whole["kfac_measured"] == halves["kfac_measured"] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--kfac-damping 0", "damping: expected a finite number above 0"),
        ("--kfac-damping -1", "damping: expected a finite number above 0"),
        ("--kfac-period 0", "--kfac-period: expected at least 1 step, got 0"),
        ("--kfac-policy auot", "--kfac-policy: expected one of auto, all; got 'auot'. Did you mean 'auto'?"),
        ("--kfac-fisher true", "--kfac-fisher: expected one of empirical, sampled, exact"),
        ("--kfac-distribution gram", "--kfac-distribution: expected one of gather, ring, owner"),
    ],
)
def test_mistakes_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert call("--out", str(tmp_path / "run"), *shlex.split(words)) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_a_private_run_without_public_factors_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--method", "ghost_bk", "--noise-multiplier", "1", "--out", str(tmp_path / "run")) == 2
    assert "private data without noise" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_options_become_settings_and_the_rest_is_by_default() -> None:
    given = {
        "kfac_damping": 0.5,
        "kfac_period": 3,
        "kfac_policy": "all",
        "kfac_fisher": "exact",
        "kfac_distribution": "owner",
        "weight_decay": 0.25,
    }
    config = kfac_config(given)
    assert (config.damping, config.factor_period, config.inverse_period, config.weight_decay) == (0.5, 3, 3, 0.25)
    assert (config.fisher, config.distribution) == (Fisher.EXACT, Distribution.OWNER)
    assert (config.cap, config.kl_clip, config.momentum) == (KfacConfig().cap, KfacConfig().kl_clip, 0.9)


def test_the_learning_rate_is_the_optimizers_own_unless_given() -> None:
    assert learning_rate({"optimizer": "kfac", "lr": None}) == LEARNING_RATES["kfac"]
    assert learning_rate({"optimizer": "adamw", "lr": None}) == 4e-3
    assert learning_rate({"optimizer": "kfac", "lr": 0.5}) == 0.5
