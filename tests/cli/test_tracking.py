"""``--tensorboard`` and ``--wandb``: what they write, who can read it, and how a resumed run continues."""

from __future__ import annotations

import importlib.util
import json
import socket
import stat
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fdp.cli import tracking
from fdp.cli.tracked_values import NAMES, tracked_values
from fdp.cli.tracking import check_tracking, is_online
from fdp.cli.tracking_options import TrackingOptions
from fdp.cli.weights_and_biases import NOT_SENT, QUIET, sent_settings
from fdp.run.run_folder import read_records
from fdp.types import FdpError
from tests.cli.train_runs import interrupt_after, last_json, train
from tests.report.run_folders import make_records


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return every scalar in every event file of a folder, as written: nothing is purged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util import tensor_util
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("tensor") and value.tensor.dtype == 1:
                    found.setdefault(value.tag, []).append((event.step, float(tensor_util.make_ndarray(value.tensor))))
    return found


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


def stored_records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a file of Weights & Biases: a header of 7 bytes, then a LevelDB log in blocks of 32 KiB."""
    place, block, record = 7, 32768, b""
    while place + 7 <= len(data):
        left = block - place % block
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        if left < 7 or kind == 0:
            place += left
            continue
        record, place = record + data[place + 7 : place + 7 + length], place + 7 + length
        if kind in (1, 4):  # a whole record, or the end of one
            yield record
            record = b""


def logged_rows(folder: Path) -> list[dict[str, Any]]:
    """Return every row of history in the files of Weights & Biases below ``folder``."""
    from wandb.proto import wandb_internal_pb2

    make_record: Any = vars(wandb_internal_pb2)["Record"]
    rows = []
    for path in folder.rglob("*.wandb"):
        for data in stored_records(path.read_bytes()):
            record = make_record()
            record.ParseFromString(data)
            if record.history.item:
                items = {each.key or "/".join(each.nested_key): each.value_json for each in record.history.item}
                rows.append({key: json.loads(value) for key, value in items.items()})
    return rows


def test_tracked_values_leave_out_what_a_step_does_not_have() -> None:
    record = make_records(10, evaluate_every=10)[-1]
    values = tracked_values(record)
    assert values["loss/train"] == record.loss
    assert values["loss/held_out"] == pytest.approx(record.loss + 0.1 if record.loss else None)
    assert values["speed/samples_per_second"] == record.samples / record.seconds
    assert "accuracy/held_out" not in values
    assert "kfac/failures" not in values
    assert set(NAMES) <= set(record._fields)
    assert "privacy/epsilon" not in tracked_values(record._replace(epsilon=None))


def test_tensorboard_has_every_step_once_also_if_the_run_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    out, words = tmp_path / "run", ("--tensorboard", "--save-every", "2", "--quiet")
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        assert train(out, *words, steps=5) == 130
    assert [step for step, _ in events(out / "tensorboard")["loss/train"]] == [1, 2, 3]
    assert train(out, *words, steps=5) == 0
    found, records = events(out / "tensorboard"), read_records(out)
    assert [step for step, _ in found["loss/train"]] == [1, 2, 3, 4, 5]
    assert [value for _, value in found["loss/train"]] == pytest.approx([record.loss for record in records], rel=1e-6)
    assert {"privacy/epsilon", "clipping/norm_q50", "clipping/max_norm", "speed/samples_per_second"} <= set(found)
    assert modes(out / "tensorboard") == {0o600}
    assert stat.S_IMODE((out / "tensorboard").stat().st_mode) == 0o700


def test_wandb_offline_logs_every_step_once_and_nothing_that_reveals_the_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    out, words = tmp_path / "run", ("--wandb", "--save-every", "2", "--quiet", "--seed", "827120643915")
    with monkeypatch.context() as patch:
        interrupt_after(3, patch)
        assert train(out, *words, steps=4) == 130
    assert train(out, *words, steps=4) == 0
    rows = logged_rows(out / "wandb")
    assert [row["_step"] for row in rows] == [1, 2, 3, 4]
    assert [row["loss/train"] for row in rows] == [record.loss for record in read_records(out)]
    assert stat.S_IMODE((out / "wandb").stat().st_mode) == 0o700
    sent = b"".join(path.read_bytes() for path in (out / "wandb").rglob("*.wandb"))
    for hidden in ("827120643915", str(tmp_path), f'"{socket.gethostname()}"'):
        assert hidden.encode() not in sent


def test_wandb_online_needs_agreement_and_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    assert is_online()
    with pytest.raises(FdpError, match="--wandb-online, by which you agree that losses and norms leave this machine"):
        check_tracking(TrackingOptions(wandb="fdp"))
    monkeypatch.setattr(tracking, "_has_key", lambda: False)
    with pytest.raises(FdpError, match="run wandb login first"):
        check_tracking(TrackingOptions(wandb="fdp", wandb_online=True))
    monkeypatch.setattr(tracking, "_has_key", lambda: True)
    check_tracking(TrackingOptions(wandb="fdp", wandb_online=True))
    for mode in ("offline", "disabled"):
        monkeypatch.setenv("WANDB_MODE", mode)
        check_tracking(TrackingOptions(wandb="fdp"))
        with pytest.raises(FdpError, match=f"got WANDB_MODE={mode}"):
            check_tracking(TrackingOptions(wandb="fdp", wandb_online=True))


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_a_missing_package_is_an_error_before_anything_is_written(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(tracking, "find_spec", lambda name: None if name == package else real(name))
    assert train(tmp_path / "run", f"--{package}", "--json") == 2
    assert f"pip install 'fdp[{package}]'" in last_json(capsys.readouterr().out)["error"]
    assert not (tmp_path / "run").exists()


def test_wandb_online_alone_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--wandb-online", "--json") == 2
    assert "--wandb-online: expected --wandb to go with it" in last_json(capsys.readouterr().out)["error"]


def test_settings_are_sent_without_seed_and_folders() -> None:
    given = {"seed": 3, "out": Path("/home/ann/x"), "data": "/home/ann/notes.jsonl", "lr": 0.1, "model": "gpt-nano"}
    assert sent_settings(given) == {"data": "notes.jsonl", "lr": 0.1, "model": "gpt-nano"}
    assert "seed" in NOT_SENT
    assert QUIET["console"] == "off"
