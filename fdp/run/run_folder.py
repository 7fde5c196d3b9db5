"""Read the folder of a run: its settings, its metrics, its summary.

    DIR/config.json          every setting, and the versions of the libraries
    DIR/metrics.jsonl        one line per step
    DIR/summary.json         the result; a folder with a summary is a finished run

``fdp report``, ``fdp statement``, ``fdp generate`` and ``fdp train --extend`` start from here. :mod:`fdp.cli.run_files`
writes the files.

    >>> run = read_run_folder(Path("runs/notes"))
    >>> run.settings["lr"], run.finished, [record.loss for record in run.records]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from fdp.run.step_record import StepRecord, record_from_json
from fdp.types import FdpError

SEARCH_RESULT = "search.json"
"""The file that ``fdp search`` writes beside the folders of its runs."""


class RunFolder(NamedTuple):
    """The files of a run, as read. ``summary`` is None if the run has not finished."""

    path: Path
    config: dict[str, Any]
    records: list[StepRecord]
    summary: dict[str, Any] | None

    @property
    def settings(self) -> dict[str, Any]:
        """The value of every option, by its name in Python: ``settings["batch_size"]``."""
        return self.config["settings"]

    @property
    def finished(self) -> bool:
        """True if the run ended and wrote its result."""
        return self.summary is not None


def is_run_folder(folder: Path) -> bool:
    """Return True if ``config.json`` in a folder has the settings of a run, and is not that of a model."""
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "settings" in found


def read_run_folder(folder: Path) -> RunFolder:
    """Return the contents of a run's folder, or raise an error that says what is missing."""
    if not (folder / "config.json").is_file():
        expected = f"{folder}: expected the folder of a run of fdp train, with a config.json, got "
        if (folder / SEARCH_RESULT).is_file():
            chosen = chosen_run(folder)
            go_on = (
                "its runs are in the folders trial-1, trial-2, ..."
                if chosen is None
                else f"name its chosen run, {chosen}"
            )
            raise FdpError(f"{expected}that of a search; {go_on}")
        raise FdpError(f"{expected}none there; name the --out of the run, by default a folder in runs/")
    config = _read_json(folder / "config.json")
    summary = _read_json(folder / "summary.json") if (folder / "summary.json").is_file() else None
    if "settings" not in config:
        raise FdpError(f"{folder / 'config.json'}: expected the settings of a run, got a file of another kind")
    return RunFolder(folder, config, read_records(folder), summary)


def chosen_run(search: Path) -> Path | None:
    """Return the folder of the run that a search chose, also if the search was moved; None if it chose none."""
    best = _read_json(search / SEARCH_RESULT).get("best")
    return None if best is None else search / Path(best["folder"]).name


def read_records(folder: Path, *, upto: int | None = None) -> list[StepRecord]:
    """Return the records in ``metrics.jsonl``, or the first ``upto`` of them, as far as they can be read."""
    path = folder / "metrics.jsonl"
    records: list[StepRecord] = []
    for line in path.read_text().splitlines()[:upto] if path.exists() else []:
        try:
            records.append(record_from_json(json.loads(line)))
        except (ValueError, TypeError):  # the line was being written when the machine stopped
            break
    return records


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FdpError(
            f"{path}: expected a JSON file that fdp wrote, got {type(error).__name__} when reading"
        ) from error
    if not isinstance(found, dict):
        raise FdpError(f"{path}: expected a JSON object that fdp wrote, got a {type(found).__name__}")
    return found
