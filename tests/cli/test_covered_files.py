"""The result of ``fdp train`` names the files that are there, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from fdp.cli.covered_files import METRICS, PARAMETERS, describe_covered, describe_not_covered
from fdp.cli.run_files import FILES
from tests.cli.train_runs import train

PUBLIC = {"config.json", "config.toml", "plan.json", "fdp_privacy.json"}
REPORT = "and any report made of them (fdp report)"


def test_every_file_of_a_run_that_is_not_public_is_covered_or_not() -> None:
    assert {*PARAMETERS, *METRICS} == {*FILES, "report.html"} - PUBLIC


def test_a_run_names_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "plain") == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "covered the parameters: model.safetensors, and everything computed" in shown
    assert f"and time: metrics.jsonl, report.png, summary.json, this screen, {REPORT}" in shown
    assert "checkpoints" not in shown
    assert "report.html" not in shown
    assert train(tmp_path / "saved", "--save-every", "2") == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "on the private data; and checkpoints/, which hold the key of the noise. Guard them" in shown


def test_folders_have_a_slash(tmp_path: Path) -> None:
    for name in ("model", "wandb", "checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "report.html").touch()
    assert describe_covered(tmp_path) == "the parameters: model/, and everything computed from them alone"
    assert f": report.html, wandb/, this screen, {REPORT}" in describe_not_covered(tmp_path)
    assert "; and checkpoints/" in describe_not_covered(tmp_path)
