"""``fdp report``: the page of a real run, where it goes, who can read it, and mistakes."""

from __future__ import annotations

import json
import stat
import webbrowser
from pathlib import Path

import pytest

from fdp.cli.report import settings_of
from fdp.run.run_folder import read_run_folder
from tests.cli.train_runs import call, last_json, train
from tests.report.run_folders import make_records, write_run


def test_a_run_is_trained_reported_and_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert train(out, "--quiet", "--max-norm", "0.5") == 0
    plan = json.loads((out / "plan.json").read_text())
    assert {row["leaf"] for row in plan["rows"]} == {"bias", "weight"} or len(plan["rows"]) >= 2
    assert set(plan["rows"][0]) == {
        "leaf", "use", "shape", "input_shape", "norm", "sum", "stored_bytes", "predicted_seconds"
    }  # fmt: skip
    assert call("report", str(out)) == 0
    page = out / "report.html"
    assert "not covered by the budget" in " ".join(capsys.readouterr().out.split())
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert "logistic on digits" in page.read_text()
    assert call("report", str(out)) == 0, "an earlier page is replaced"
    assert call("report", str(out), "--json") == 0
    (run,) = last_json(capsys.readouterr().out)["runs"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert run["curves"]["loss"]["value"] == pytest.approx([line["loss"] for line in lines], rel=1e-5)
    assert run["results"]["epsilon_spent"] == lines[-1]["epsilon"]
    assert run["changed_settings"]["max_norm"] == 0.5
    assert run["plan"] == plan
    assert run["state"] == "finished"
    assert len(run["curves"]["learning_rate"]["step"]) == 3


def test_json_writes_no_page_unless_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", make_records(5))
    assert call("report", str(run), "--json") == 0
    assert last_json(capsys.readouterr().out)["out"] is None
    assert not (run / "report.html").exists()
    assert call("report", str(run), "--json", "--out", str(tmp_path / "page.html")) == 0
    assert (tmp_path / "page.html").exists()


def test_several_runs_go_to_one_page_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a" / "run", make_records(5))
    write_run(tmp_path / "b" / "run", make_records(5))
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert call("report", "a/run", "b/run", "--open") == 0
    assert opened == [(tmp_path / "report.html").as_uri()]
    text = (tmp_path / "report.html").read_text()
    assert "a/run, training" in text, "runs of the same name are told apart by their paths"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: expected the folder of a run of fdp train, with a config.json, got none there"),
        (["run", "--out", "notes.txt"], "--out: expected a new file or an earlier report, got notes.txt"),
        (["run", "--out", "run/config.json"], "--out: expected a new file or an earlier report, got run/config.json"),
    ],
)
def test_mistakes_name_the_remedy_and_change_nothing(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", make_records(3))
    (tmp_path / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert call("report", *words) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_settings_have_their_flags_and_defaults(tmp_path: Path) -> None:
    run = read_run_folder(write_run(tmp_path / "run", make_records(3), batch_size=128))
    found = {each.key: each for each in settings_of(run)}
    assert (found["batch_size"].flag, found["batch_size"].default, found["batch_size"].changed) == (
        "--batch-size", 32, True
    )  # fmt: skip
    assert found["as_json"].flag == "--json"
    assert not found["max_norm"].changed
