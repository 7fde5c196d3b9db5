"""``fdp compare``: two ways to run the same training, and the first stage at which they differ.

    fdp compare ranks=1 ranks=4,zero=3
    fdp compare method=materialize method=ghost --model mlp --data digits
    fdp compare ranks=2,zero=0 replicate=2,shard=2,zero=2,offload=params+grads --steps 5

A and B are lists of ``name=value`` on top of the common options: ``ranks`` or the axes ``replicate``, ``shard`` and
``tensor``, and the options of ``fdp train`` that leave the data as they are. Each runs in processes of its own, on the
same samples and with the same noise. A difference is ``max |a - b| / max |b|`` of a leaf, and ``|a - b| / |b|`` of a
sample's loss or norm; the mean, the standard deviation and the sum of a step's logits differ in units of their root
mean square. The optimizer is SGD unless told otherwise: Adam's first update divides every element of the gradient by
its own size, which makes a difference of what was rounding in the elements that are nearly 0.

Exit code 0: equal within ``--tolerance`` at every stage; 3: not, and the last line says where first. What is printed
is computed on the data and not covered by any budget.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Exit, Option

from fdp.cli.train import train_command

if TYPE_CHECKING:
    from fdp.run.compare import Difference

DIFFERENT = 3
AXES = ("replicate", "shard", "tensor")
OF_BOTH = {"model", "data", "field", "context", "batch_size", "population", "steps", "seed", "timeout"}
"""Options that decide which samples are seen, or how long to wait for them: the same on both sides."""
OF_TRAIN = {"mesh", "epsilon", "delta", "save_every", "keep", "out", "quiet", "as_json"}
"""Options of ``fdp train`` without a meaning here: axes are given one by one, noise as it is, and nothing is kept."""
NOT_COVERED = "computed on the data without noise: covered by no budget"
CONTEXT = 32
"""Tokens that a language model sees unless told otherwise: a comparison takes seconds, not minutes."""


def compare_command(
    a: Annotated[str, Argument(metavar="A", help="name=value,... such as ranks=1 or method=materialize.")],
    b: Annotated[str, Argument(metavar="B", help="name=value,... such as ranks=4,zero=3 or method=ghost.")],
    model: Annotated[str, Option(help="A preset, such as gpt-nano or mlp.")] = "gpt-nano",
    data: Annotated[str, Option(help="stdlib, digits, or a path, as for fdp train.")] = "stdlib",
    context: Annotated[int | None, Option(help=f"Tokens a language model sees; default: {CONTEXT}.")] = None,
    steps: Annotated[int, Option(help="Steps.")] = 3,
    seed: Annotated[int, Option(help="Of the samples, the noise and the first parameters.")] = 0,
    batch_size: Annotated[int, Option(help="Expected samples per step (Poisson).")] = 8,
    microbatch: Annotated[int, Option(help="Samples computed at once.")] = 8,
    noise_multiplier: Annotated[
        float | None, Option(help="Noise as a multiple of C; default: 1, for method none 0.")
    ] = None,
    max_norm: Annotated[float, Option(help="C: the most one sample can add to the sum.")] = 1.0,
    clip: Annotated[str, Option(help="flat, per-layer, automatic or quantile.")] = "flat",
    method: Annotated[str, Option(help="auto, ghost, ghost_bk, materialize or none.")] = "auto",
    lr: Annotated[float, Option(help="Peak learning rate.")] = 0.1,
    optimizer: Annotated[str, Option(help="Any of fdp train's: sgd, adamw, adagrad, kfac, ...")] = "sgd",
    dtype: Annotated[str, Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    timeout: Annotated[float, Option(help="Seconds to wait for a rank that does not answer.")] = 600.0,
    tolerance: Annotated[float, Option(help="The largest relative difference that counts as equal.")] = 1e-5,
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object, last.")] = False,
) -> None:
    """Run A and B on the same data; say where they first differ. Exit code 0: nowhere, 3: somewhere."""
    common = dict(locals())
    texts = {"A": common.pop("a"), "B": common.pop("b")}
    # torch takes seconds to import, and --help and mistakes on the command line should not.
    from fdp.parallel import launch
    from fdp.run.compare import compare, first_over, read
    from fdp.types import FdpError

    if launch.started_by_torchrun():
        raise FdpError("fdp compare starts the ranks itself; expected to be started alone, not by torchrun")
    if not 0 <= tolerance < math.inf:
        raise FdpError(f"--tolerance: expected a finite number, 0 or more, got {tolerance}")
    sides = {name: settings_of(name, text, common) for name, text in texts.items()}
    for name, settings in sides.items():
        _check(name, settings)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="fdp-compare-") as temporary:
        folders = {name: Path(temporary) / name for name in sides}
        for name, settings in sides.items():
            with console.status(f"running {name}"):
                observed(name, settings, folders[name])
        found = list(compare(*(read(folder) for folder in folders.values())))
    first = first_over(found, tolerance=tolerance)
    console.print(_table(found, texts, tolerance))
    console.print(Text(_verdict(first, tolerance), style="green" if first is None else "red"), soft_wrap=True)
    if as_json:
        result = {
            "a": a,
            "b": b,
            "tolerance": tolerance,
            "equal": first is None,
            "first": None if first is None else _as_json(first),
            "differences": [_as_json(difference) for difference in found],
        }
        print(json.dumps(result))
    if first is not None:
        raise Exit(DIFFERENT)


def settings_of(side: str, text: str, common: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of ``fdp train`` for ``text`` on top of the common options; ``mesh`` None: one rank, no group."""
    from fdp.models import LANGUAGE
    from fdp.types import FdpError

    defaults = {name: parameter.default for name, parameter in inspect.signature(train_command).parameters.items()}
    kinds = get_type_hints(train_command)
    known = ["ranks", *AXES, *sorted(set(defaults) - OF_BOTH - OF_TRAIN)]
    axes: dict[str, int] = {}
    own: dict[str, Any] = {}
    for part in text.split(",") if text else []:
        name, equals, value = (word.strip() for word in part.partition("="))
        name = name.replace("-", "_")
        if not equals or name not in known or name in own or name in axes:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]}=...?" if near and near[0] != name else ""
            names = ", ".join(known)
            raise FdpError(f"{side}: expected name=value,... with each name once of {names}; got {part!r}.{hint}")
        if name == "ranks" or name in AXES:
            axes[name] = _parsed(side, name, value, int)
        else:
            own[name] = _parsed(side, name, value, kinds[name])
    if "ranks" in axes and len(axes) > 1:
        raise FdpError(f"{side}: expected either ranks or the axes {', '.join(AXES)}, got both in {text!r}")
    if any(size < 1 for size in axes.values()):
        raise FdpError(f"{side}: expected at least 1 rank along every axis, got {text!r}")
    settings = defaults | {name: value for name, value in common.items() if name in defaults} | own
    axes = {"shard" if name == "ranks" else name: size for name, size in axes.items() if size > 1}
    settings["mesh"] = ",".join(f"{axis}={size}" for axis, size in axes.items()) or None
    settings["offload"] = settings["offload"].replace("+", ",")
    if settings["context"] is None and settings["model"] in LANGUAGE:
        settings["context"] = CONTEXT
    if settings["noise_multiplier"] is None:
        settings["noise_multiplier"] = 0.0 if settings["method"] == "none" else 1.0
    return settings


def observed(side: str, settings: Mapping[str, Any], folder: Path) -> None:
    """Run the settings in processes of their own, and leave what was seen in ``folder``."""
    from fdp.types import FdpError

    folder.mkdir()
    file = folder / "settings.json"
    file.write_text(json.dumps(settings))
    ranks = _ranks(settings)
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *start, "-m", "fdp.cli.compare", str(file)]
    # They import what this process does, wherever it was started from.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if mistakes := sorted(folder.glob("mistake-*")):
        raise FdpError(f"{side}: {mistakes[0].read_text()}")
    if done.returncode != 0:
        raise RuntimeError(f"{side} ended with code {done.returncode}:\n{done.stdout}{done.stderr}")


def _observe(file: Path) -> int:
    """One process of :func:`observed`: join the others, if there are any, observe, and say what was wrong if it was."""
    import torch

    from fdp.cli.configure import configure
    from fdp.parallel import launch
    from fdp.run.compare import observe, write
    from fdp.run.training_run import prepare
    from fdp.types import FdpError

    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    settings = json.loads(file.read_text())
    group = nullcontext()
    if launch.started_by_torchrun():
        torch.set_num_threads(1)  # the ranks share the cores of one machine
        group = launch.join_ranks(launch.device_type(settings["device"]), timeout=settings["timeout"])
    try:
        with group:
            # One text for both sides: what they compute with is the same samples and noise, whatever else differs.
            write(observe(*prepare(configure(settings), settings="compare")), file.parent)
    except FdpError as error:
        (file.parent / f"mistake-{launch.rank():04}").write_text(str(error))
        return 2
    return 0


def _check(side: str, settings: Mapping[str, Any]) -> None:
    """Mistakes in either side's settings, before the first one runs."""
    import torch

    from fdp.cli.configure import configure
    from fdp.parallel import launch
    from fdp.types import FdpError

    try:
        configure({**settings, "mesh": None})
    except FdpError as error:
        raise FdpError(f"{side}: {error}") from error
    ranks = _ranks(settings)
    if launch.device_type(settings["device"]) == "cuda" and torch.cuda.device_count() < ranks:
        raise FdpError(
            f"{side}: expected a GPU for each of the {ranks} ranks, found {torch.cuda.device_count()}; "
            f"use --device cpu, or fewer ranks"
        )


def _ranks(settings: Mapping[str, Any]) -> int:
    from fdp.cli.configure import mesh_axes

    return 1 if settings["mesh"] is None else math.prod(mesh_axes(settings["mesh"]).values())


def _parsed(side: str, name: str, text: str, kind: Any) -> Any:
    """``text`` as a value of the option's kind."""
    from fdp.types import FdpError

    kind = next(one for one in (get_args(kind) or (kind,)) if one is not NoneType)
    truths = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    try:
        return truths[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        words = {bool: "true or false", int: "a whole number", float: "a number"}
        raise FdpError(f"{side}: expected {name}={words.get(kind, kind.__name__)}, got {text!r}") from None


def _table(found: Sequence[Difference], texts: Mapping[str, str], tolerance: float) -> Table:
    title = Text(" against ".join(text or "the common options" for text in texts.values()))
    table = Table(title=title, caption=NOT_COVERED)
    table.add_column("step", justify="right")
    table.add_column("stage")
    table.add_column("largest relative difference", justify="right")
    table.add_column("where", overflow="fold")
    for step, stage, where, value in found:
        over = value > tolerance
        words = ("" if step == 0 else str(step), stage.value, _number(value) + (" !" if over else "  "), where)
        table.add_row(*map(Text, words), style="red" if over else None)
    return table


def _verdict(first: Difference | None, tolerance: float) -> str:
    if first is None:
        return f"equal within {tolerance:g} at every stage"
    when = f"step {first.step}, " if first.step else ""
    return f"first difference: {when}{first.stage.value}, {first.where}: {_number(first.value)}"


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _as_json(difference: Difference) -> dict[str, Any]:
    """JSON has no infinity: null is "not comparable", such as NaN on one side only."""
    step, stage, where, value = difference
    number = value if math.isfinite(value) else None
    return {"step": step, "stage": stage.value, "where": where, "difference": number}


if __name__ == "__main__":
    sys.exit(_observe(Path(sys.argv[1])))
