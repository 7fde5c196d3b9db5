"""What happens before the first step is said while it lasts, also in a log and in a dry run."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from fdp.cli import progress
from fdp.run import prepare_run
from tests.cli.train_runs import train


def test_a_dry_run_in_a_log_says_what_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = prepare_run.check_model

    def slow(*args: object, **options: object) -> None:
        time.sleep(0.5)
        real(*args, **options)  # pyright: ignore

    monkeypatch.setattr(progress, "PATIENCE_S", 0.2)
    monkeypatch.setattr(prepare_run, "check_model", slow)
    assert train(tmp_path / "run", "--dry-run") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "checking that the loss of a sample depends on that sample alone (about 50 forward passes of logistic" in said
    )
    assert "so far" in said
