"""The files a run leaves, none of which another run ever overwrites.

    DIR/config.json          every setting, and the versions it ran with
    DIR/metrics.jsonl        one line per step, written as the step ends
    DIR/summary.json         the result
    DIR/model.safetensors    the trained parameters: float32 leaves by path; of a folder of transformers: DIR/model
    DIR/report.png           loss, epsilon, and the norms of the gradients against C

Only the parameters are covered by the privacy budget. All files but theirs can be read by their owner alone.

    >>> folder = claim(out, model="gpt-nano", data="stdlib")
    >>> for record in write_metrics(records, folder): ...
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from fdp.cli import version_of
from fdp.gradients.plan import Method
from fdp.privacy.guarantee import RELATION
from fdp.run.step_metrics import Record
from fdp.run.training_run import Run
from fdp.storage.checkpoint import writing
from fdp.storage.private_files import open_private, write_private
from fdp.types import FdpError, Key, TrainState

FILES = ("config.json", "metrics.jsonl", "summary.json", "model.safetensors", "model", "report.png")
LEFT, MIDDLE, QUIET = "#0b7285", "#d9480f", "#868e96"


def check_free(out: Path, *, hint: str = "") -> None:
    """Refuse a directory that already holds a run, or a path that is no directory."""
    if out.exists() and not out.is_dir():
        raise FdpError(f"--out: expected a directory, got the file {out}")
    if held := [name for name in FILES if (out / name).exists()]:
        raise FdpError(f"--out: {out} already holds a run ({', '.join(held)}); give another directory{hint}")


def claim(out: Path | None, *, model: str, data: str) -> Path:
    """The directory of this run, made now: ``out`` or the first free of ``runs/<model>-<data>-1, -2 ...``."""
    if out is not None:
        check_free(out)
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
        return out
    with writing(Path("runs")):
        Path("runs").mkdir(exist_ok=True)
    for number in count(1):
        folder = Path("runs", f"{Path(model).name}-{Path(data).stem}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:  # taken, perhaps by a run that started a moment ago
            continue
        return folder
    raise AssertionError


def write_config(folder: Path, settings: Mapping[str, Any], run: Run) -> None:
    """``config.json``: every setting as given, what followed from them, and the versions it ran with."""
    versions = {name: version_of(name) for name in ("fdp", "torch", "numpy", "dp-accounting")}
    _write_json(
        folder / "config.json",
        {
            "settings": {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
            "delta": run.config.delta,
            "noise_multiplier": run.mechanism.noise_multiplier,
            "epsilon": run.config.epsilon,
            "statistics": statistics_of(run),
            "relation": RELATION,
            "population": run.mechanism.sampling.population,
            "sampling_rate": run.mechanism.sampling.rate,
            "device": run.config.device.type,
            "key_check": key_check(run.root),
            "versions": versions | {"python": platform.python_version()},
        },
    )


def key_check(root: Key) -> str:
    """A digest by which a key can be recognised and from which it cannot be found."""
    return hashlib.sha256(b"fdp key " + json.dumps(root.tolist()).encode()).hexdigest()


def count_metrics(folder: Path) -> int:
    """How many steps ``metrics.jsonl`` tells of."""
    path = folder / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def statistics_of(run: Run) -> dict[str, Any] | None:
    """What is released of the private data beside the steps' sums, and paid for out of the same budget, in numbers."""
    more = run.mechanism.statistics
    return None if more is None else more.public()


def read_metrics(folder: Path, *, upto: int) -> list[Record]:
    """The records of the first ``upto`` steps of a run that is taken up again, as far as they can be read."""
    path = folder / "metrics.jsonl"
    records: list[Record] = []
    for line in path.read_text().splitlines()[:upto] if path.exists() else []:
        try:
            records.append(Record(**json.loads(line)))
        except (ValueError, TypeError):  # a line that was being written when the machine stopped
            break
    return records


def write_metrics(
    stream: Iterable[tuple[TrainState, Record]], folder: Path, *, kept: Sequence[Record] = ()
) -> Iterator[tuple[TrainState, Record]]:
    """The same stream, each record also a line of ``metrics.jsonl``, on disk before the next step begins.

    ``kept`` are the records of a run that is taken up again; lines of steps that were made and lost are dropped.
    """
    write_private(folder / "metrics.jsonl", "".join(_line(record) for record in kept))
    with open_private(folder / "metrics.jsonl", "a") as lines:
        for state, record in stream:
            lines.write(_line(record))
            lines.flush()
            os.fsync(lines.fileno())
            yield state, record


def _line(record: Record) -> str:
    return json.dumps(record._asdict(), allow_nan=False) + "\n"


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """``summary.json``."""
    _write_json(folder / "summary.json", summary)


def write_report(folder: Path, run: Run, records: Sequence[Record], *, title: str) -> None:
    """``report.png``: three panels over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = np.array([record.step for record in records])

    def series(name: str) -> np.ndarray:
        values = [getattr(record, name) for record in records]
        return np.array([math.nan if value is None else value for value in values], dtype=float)

    figure = Figure(figsize=(13, 4), dpi=130, layout="constrained")
    loss, epsilon, norms = figure.subplots(1, 3)

    losses = series("loss")
    loss.plot(steps, losses, color=LEFT, alpha=0.3, linewidth=1)
    loss.plot(steps, smooth(losses), color=LEFT, linewidth=2)
    loss.set_title("loss per sample")

    if run.epsilons is None:
        epsilon.text(0.5, 0.5, "not private", ha="center", va="center", transform=epsilon.transAxes, color=QUIET)
    else:
        epsilon.plot(steps, series("epsilon"), color=MIDDLE, linewidth=2)
        epsilon.set_ylim(bottom=0)
    epsilon.set_title(f"epsilon spent at delta {run.config.delta:.3g}")

    low, middle, high = (series(name) for name in ("norm_q10", "norm_q50", "norm_q90"))
    norms.fill_between(steps, low, high, color=LEFT, alpha=0.2, linewidth=0, label="10 % to 90 %")
    norms.plot(steps, middle, color=LEFT, linewidth=1.5, label="median")
    if run.config.method is not Method.NONE:
        norms.plot(steps, series("max_norm"), color=MIDDLE, linewidth=1.5, linestyle="--", label="C")
    if np.nanmin(low, initial=math.inf) > 0 and np.isfinite(low).any():
        norms.set_yscale("log")
    norms.set_title("gradient norm of a sample")
    norms.legend(frameon=False)

    for axes in (loss, epsilon, norms):
        axes.set_xlabel("step")
        axes.grid(alpha=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12)
    note = "losses and norms are computed on private data: the budget covers the parameters only"
    figure.supxlabel(note if run.epsilons is None else f"{note} ({RELATION})", fontsize=8)
    with open_private(folder / "report.png", "xb") as file:
        FigureCanvasAgg(figure).print_png(file)


def smooth(values: np.ndarray) -> np.ndarray:
    """Running mean over a twentieth of the steps, centred, missing values left out."""
    half = max(1, len(values) // 40)
    present = np.isfinite(values)
    kernel = np.ones(2 * half + 1)
    total = np.convolve(np.where(present, values, 0.0), kernel)[half:-half]
    weight = np.convolve(present.astype(float), kernel)[half:-half]
    return np.divide(total, weight, out=np.full(len(values), math.nan), where=weight > 0)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with writing(path):
        write_private(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
