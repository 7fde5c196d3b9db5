"""The files of a run, none of which another run ever overwrites.

    DIR/config.json          every setting, and the versions of the libraries
    DIR/config.toml          every setting, commented, for ``fdp train --config``
    DIR/plan.json            per layer, how the norms and the sum of its gradients are computed
    DIR/metrics.jsonl        one line per step, written when the step ends
    DIR/released_evaluations.json    of a resumed run: noised evaluations of steps that it makes again
    DIR/summary.json         the result
    DIR/model.safetensors    the trained parameters: float32 leaves by path; for a folder of transformers: DIR/model
    DIR/report.png           loss, epsilon, and the norms of the gradients against C (:mod:`fdp.report.figure`)

The privacy budget covers the parameters; ``config.json`` and ``plan.json`` hold nothing of the data. All
other files are readable by their owner alone.

    >>> folder = create_folder(out, model="gpt-nano", data="stdlib")
    >>> for state, record in write_metrics(steps(run, state), folder): ...
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from fdp.cli.config_file import config_text
from fdp.cli.formatting import package_version
from fdp.gradients.plan import explain_rows
from fdp.privacy.guarantee import MARKER, RELATION
from fdp.run.prepare_run import Run, extra_noise
from fdp.run.run_folder import is_run_folder
from fdp.run.same_noise import rounding_record
from fdp.run.step_record import StepRecord, record_to_json
from fdp.storage.dcp import digest_of
from fdp.storage.private_files import disk_errors, open_private, write_private
from fdp.types import FdpError, Key, TrainState

SETTINGS = "config.toml"
RELEASED = "released_evaluations.json"
SYNC_SECONDS = 1.0
"""Time after which records are flushed to the disk, which may take longer than a step."""
FILES = (
    "config.json",
    SETTINGS,
    "plan.json",
    "fdp_privacy.json",
    "metrics.jsonl",
    RELEASED,
    "summary.json",
    "model.safetensors",
    "model",
    "report.png",
    "tensorboard",
    "wandb",
)


def check_free(out: Path, *, hint: str = "") -> None:
    """Raise if ``out`` already holds a run, or other files of such names, or is not a directory."""
    if out.exists() and not out.is_dir():
        raise FdpError(f"--out: expected a directory, got the file {out}")
    if found := [name for name in FILES if (out / name).exists()]:
        if not is_run_folder(out):
            raise FdpError(
                f"--out: expected a new or empty directory, got {out}, which is not empty and holds names that a run "
                f"writes ({', '.join(found)}); give another directory"
            )
        done = _finished_words(out)
        raise FdpError(f"--out: {out} already holds a run ({', '.join(found)}){done}; give another directory{hint}")


def create_folder(out: Path | None, *, model: str, data: str) -> Path:
    """Create and return the folder of a run: ``out``, or the first free one of ``runs/<model>-<data>-1, -2, ...``."""
    if out is not None:
        check_free(out)
        with disk_errors(out):
            out.mkdir(parents=True, exist_ok=True)
        return out
    with disk_errors(Path("runs")):
        Path("runs").mkdir(exist_ok=True)
    for number in count(1):
        folder = Path("runs", f"{Path(model).name}-{Path(data).stem}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:  # taken, perhaps by a run that started a moment ago
            continue
        return folder
    raise AssertionError


def remove_settings(folder: Path) -> None:
    """Remove what is written before a run is recorded, so that another run may begin in the folder."""
    for name in ("config.json", SETTINGS, "plan.json", MARKER):
        (folder / name).unlink(missing_ok=True)


def write_config(folder: Path, settings: Mapping[str, Any], run: Run) -> None:
    """Write ``config.json``: every setting as given, what follows from them, and the versions of the libraries.

    ``config.toml`` has the settings alone, for ``fdp train --config``.
    """
    write_settings(folder, settings)
    versions = {name: package_version(name) for name in ("fdp", "torch", "numpy", "dp-accounting")}
    _write_json(
        folder / "config.json",
        {
            "settings": {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
            "delta": run.config.delta,
            "noise_multiplier": run.mechanism.noise_multiplier,
            "extra_noise": extra_noise(run),
            **rounding_record(run),
            "epsilon": run.config.epsilon,
            "epsilon_planned": None if run.epsilons is None else float(run.epsilons[-1]),
            "statistics": statistics_settings(run),
            "relation": RELATION,
            "population": run.mechanism.sampling.population,
            "sampling_rate": run.mechanism.sampling.rate,
            "device": run.config.device.type,
            "key_check": key_digest(run.root),
            "versions": versions | {"python": platform.python_version()},
        },
    )


def write_plan(folder: Path, run: Run) -> None:
    """Write ``plan.json``: the choices for every trainable leaf, from names and shapes alone."""
    plan = run.plan
    rows = [
        {
            "leaf": use.path,
            "use": use.rule,
            "shape": list(use.leaf_shape),
            "input_shape": list(use.input_shape),
            "norm": choice.norm.value,
            "sum": choice.sum.value,
            "stored_bytes": choice.stored_bytes,
            "predicted_seconds": choice.seconds if math.isfinite(choice.seconds) else None,
        }
        for use, choice in explain_rows(plan)
    ]
    about = {
        "method": plan.method.value,
        "microbatch": plan.batch_size,
        "dtype": str(plan.dtype).removeprefix("torch."),
    }
    _write_json(folder / "plan.json", about | {"stored_bytes": plan.stored_bytes, "rows": rows})


def write_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write ``config.toml``: every setting with its help."""
    heading = (
        f"The settings of {folder}, written by fdp {package_version('fdp')}. To repeat the run: "
        f"{repeat_command(folder, saves=settings['save_every'] is not None)}. Flags replace settings. Paths are "
        f"relative to the folder that fdp is started in."
    )
    with disk_errors(folder / SETTINGS):
        write_private(folder / SETTINGS, config_text(settings, heading=heading, saved=True))


def repeat_command(folder: Path, *, saves: bool) -> str:
    """Return the command that repeats a run, for a shell; one that saves checkpoints needs a new ``--out`` for them."""
    out = f" --out {shlex.quote(f'{folder}-again')}" if saves else ""
    return f"fdp train --config {shlex.quote(str(folder / SETTINGS))}{out}"


def key_digest(root: Key) -> str:
    """Return a digest that identifies a key without revealing it."""
    return hashlib.sha256(b"fdp key " + json.dumps(root.tolist()).encode()).hexdigest()


def statistics_settings(run: Run) -> dict[str, Any] | None:
    """Return the public settings of K-FAC's noised statistics, which the budget pays for; None without them."""
    statistics = run.mechanism.statistics
    return None if statistics is None else statistics.public()


def count_metrics(folder: Path) -> int:
    """Return the number of steps in ``metrics.jsonl``."""
    path = folder / "metrics.jsonl"
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def write_metrics(
    stream: Iterable[tuple[TrainState, StepRecord]],
    folder: Path,
    *,
    earlier: Sequence[StepRecord] = (),
    sync_after: Callable[[int], bool] = lambda step: True,
) -> Iterator[tuple[TrainState, StepRecord]]:
    """Pass the stream on, and write each record to ``metrics.jsonl`` before the next one is asked for.

    A killed process loses none. A machine that loses its power loses those of ``SYNC_SECONDS`` at most, and none up to
    a step for which ``sync_after(step)`` is true. ``earlier`` are the records of a run that is resumed. Lines of steps
    after its checkpoint are dropped.
    """
    write_private(folder / "metrics.jsonl", "".join(_json_line(record) for record in earlier))
    synced = time.monotonic()
    with open_private(folder / "metrics.jsonl", "a") as lines:
        for state, record in stream:
            lines.write(_json_line(record))
            lines.flush()
            if sync_after(record.step) or time.monotonic() - synced > SYNC_SECONDS:
                os.fsync(lines.fileno())
                synced = time.monotonic()
            yield state, record
        os.fsync(lines.fileno())


def digests_of(model: Path, folder: Path) -> dict[str, str]:
    """Return the SHA-256 of an exported file, or of each safetensors file of an exported folder, by name in ``folder``.

    The statement of the run gives them: whoever has the model can check them.
    """
    files = sorted(model.glob("*.safetensors")) if model.is_dir() else [model]
    return {str(path.relative_to(folder)): digest_of(path) for path in files}


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write ``summary.json``."""
    _write_json(folder / "summary.json", summary)


def _finished_words(folder: Path) -> str:
    """Return how many steps the run in a folder has made, if it made all of them; else nothing."""
    try:
        summary = json.loads((folder / "summary.json").read_text())
        made, planned = int(summary["steps"]), int(summary["steps_planned"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f", which is finished ({made} of {planned} steps)" if made == planned else ""


def _json_line(record: StepRecord) -> str:
    return json.dumps(record_to_json(record), allow_nan=False) + "\n"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    with disk_errors(path):
        write_private(path, json.dumps(value, indent=2, allow_nan=False) + "\n")
