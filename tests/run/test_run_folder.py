"""Reading the folder of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fdp.run.run_folder import read_records, read_run_folder
from fdp.run.step_record import Evaluation, StepRecord, record_from_json, record_to_json
from fdp.types import FdpError

RECORD = StepRecord(1, 2.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, samples=8, seconds=2.0)


def write_run(folder: Path, lines: str) -> None:
    (folder / "config.json").write_text(json.dumps({"settings": {"lr": 0.1}}))
    (folder / "metrics.jsonl").write_text(lines)


def test_a_record_survives_a_line_of_json_with_and_without_an_evaluation() -> None:
    evaluated = RECORD._replace(evaluation=Evaluation(1.5, None, "public", ("a", "b")))
    for record in (RECORD, evaluated):
        assert record_from_json(json.loads(json.dumps(record_to_json(record)))) == record
    assert "evaluation" not in record_to_json(RECORD)


def test_a_folder_is_read_up_to_the_first_line_that_was_cut_short(tmp_path: Path) -> None:
    write_run(tmp_path, json.dumps(record_to_json(RECORD)) + '\n{"step": 2, "lo')
    run = read_run_folder(tmp_path)
    assert run.records == [RECORD]
    assert run.settings == {"lr": 0.1}
    assert not run.finished
    assert read_records(tmp_path, upto=0) == []


def test_a_folder_without_a_run_and_a_damaged_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(FdpError, match="expected the folder of a run"):
        read_run_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(FdpError, match=r"config\.json: expected a JSON file that fdp wrote"):
        read_run_folder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FdpError, match="a file of another kind"):
        read_run_folder(tmp_path)
