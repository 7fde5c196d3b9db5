"""``fdp compare``: run the same training in two ways, and find the first stage at which they differ.

    fdp compare ranks=1 ranks=4,zero=3
    fdp compare method=materialize method=ghost --model mlp --data digits
    fdp compare ranks=2,zero=0 replicate=2,shard=2,zero=2,offload=params+grads --steps 5

A and B are lists of ``name=value`` on top of the common options: ``ranks`` or the axes ``replicate``, ``shard`` and
``tensor``, and the options of ``fdp train`` that do not change the data. Each side runs in its own processes, on the
same samples and with the same noise. The difference of a leaf is ``max |a - b| / max |b|``, that of a sample's loss or
norm ``|a - b| / |b|``; the mean, standard deviation and sum of a step's logits are compared in units of their root mean
square. The default optimizer is SGD: Adam's first update divides every element of the gradient by its own size, which
magnifies rounding in elements that are nearly 0.

Exit code 0: equal within ``--tolerance`` at every stage; 3: not, and the last line says where first. What is printed is
computed on the data and not covered by any budget.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Exit

from fdp.cli.options import Flag, build, expand_groups, options_of, parse_value, to_dict
from fdp.cli.train_options import OutputOptions, TrainOptions, train_flag

if TYPE_CHECKING:
    from fdp.run.compare import Difference

EXIT_DIFFERENT = 3
AXES = ("replicate", "shard", "tensor")
SAME_ON_BOTH_SIDES = {"model", "data", "field", "context", "batch_size", "population", "steps", "seed", "timeout"}
"""Options that decide which samples are seen, or how long to wait for them."""
NOT_ACCEPTED = {"mesh", "epsilon", "delta", *options_of(OutputOptions)}
"""Options of ``fdp train`` without a meaning here: axes are given one by one, the noise directly; nothing is saved."""
NOT_COVERED = "computed on the data without noise: covered by no budget"
CONTEXT_TOKENS = 32
"""Default context of a language model: a comparison should take seconds, not minutes."""


@dataclass(frozen=True)
class CommonOptions:
    """The options of ``fdp train`` that both sides share, with defaults for a comparison that takes seconds."""

    model: Annotated[str, train_flag("model")] = "gpt-nano"
    data: Annotated[str, train_flag("data")] = "stdlib"
    context: Annotated[int | None, train_flag("context", default_text=str(CONTEXT_TOKENS))] = None
    steps: Annotated[int, train_flag("steps")] = 3
    seed: Annotated[int, train_flag("seed", help="Seed of the samples, the noise and the initial parameters.")] = 0
    batch_size: Annotated[int, train_flag("batch_size")] = 8
    microbatch: Annotated[int, train_flag("microbatch")] = 8
    noise_multiplier: Annotated[
        float | None, train_flag("noise_multiplier", help="Noise as a multiple of C.", default_text="1; method none: 0")
    ] = None
    max_norm: Annotated[float, train_flag("max_norm")] = 1.0
    clip: Annotated[str, train_flag("clip")] = "flat"
    method: Annotated[str, train_flag("method")] = "auto"
    lr: Annotated[float, train_flag("lr")] = 0.1
    optimizer: Annotated[str, train_flag("optimizer")] = "sgd"
    dtype: Annotated[str, train_flag("dtype")] = "float32"
    device: Annotated[str, train_flag("device")] = "auto"
    timeout: Annotated[float, train_flag("timeout")] = 600.0


@dataclass(frozen=True)
class CompareOptions:
    """The tolerance, and the form of the result."""

    tolerance: Annotated[float, Flag("The largest relative difference that counts as equal.")] = 1e-5
    as_json: Annotated[bool, Flag("Print the result as one JSON object, last.", name="--json")] = False


@expand_groups
def compare_command(
    a: Annotated[str, Argument(metavar="A", help="name=value,... such as ranks=1 or method=materialize.")],
    b: Annotated[str, Argument(metavar="B", help="name=value,... such as ranks=4,zero=3 or method=ghost.")],
    common: CommonOptions,
    options: CompareOptions,
) -> None:
    """Run A and B on the same data; say where they first differ. Exit code 0: nowhere, 3: somewhere."""
    # torch takes seconds to import; --help and mistakes on the command line should not wait for it.
    from fdp.parallel import launch
    from fdp.run.compare import compare, first_over, read
    from fdp.types import FdpError

    if launch.started_by_torchrun():
        raise FdpError("fdp compare starts the ranks itself; expected to be started alone, not by torchrun")
    if not 0 <= options.tolerance < math.inf:
        raise FdpError(f"--tolerance: expected a finite number, 0 or more, got {options.tolerance}")
    texts = {"A": a, "B": b}
    sides = {name: side_options(name, text, to_dict(common)) for name, text in texts.items()}
    for name, settings in sides.items():
        _check_side(name, settings)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="fdp-compare-") as temporary:
        folders = {name: Path(temporary) / name for name in sides}
        for name, settings in sides.items():
            with console.status(f"running {name}"):
                run_side(name, settings, folders[name])
        found = list(compare(*(read(folder) for folder in folders.values())))
    first = first_over(found, tolerance=options.tolerance)
    console.print(_table(found, texts, options.tolerance))
    verdict = Text(_verdict(first, options.tolerance), style="green" if first is None else "red")
    console.print(verdict, soft_wrap=True)
    if options.as_json:
        result = {
            "a": a,
            "b": b,
            "tolerance": options.tolerance,
            "equal": first is None,
            "first": None if first is None else _as_json(first),
            "differences": [_as_json(difference) for difference in found],
        }
        print(json.dumps(result))
    if first is not None:
        raise Exit(EXIT_DIFFERENT)


def side_options(side: str, text: str, common: Mapping[str, Any]) -> TrainOptions:
    """Return the options of ``fdp train`` for ``text`` on top of the common ones; one rank has no mesh."""
    from fdp.models import LANGUAGE

    own, axes = _parse_side(side, text)
    options = build(TrainOptions, {"compile": "none", **common, **own})
    axes = {"shard" if name == "ranks" else name: size for name, size in axes.items() if size > 1}
    mesh = ",".join(f"{axis}={size}" for axis, size in axes.items()) or None
    ranks = replace(options.ranks, mesh=mesh, offload=options.ranks.offload.replace("+", ","))
    data, privacy = options.data, options.privacy
    if data.context is None and options.model.model in LANGUAGE:
        data = replace(data, context=CONTEXT_TOKENS)
    if privacy.noise_multiplier is None:
        privacy = replace(privacy, noise_multiplier=0.0 if privacy.method == "none" else 1.0)
    return replace(options, data=data, privacy=privacy, ranks=ranks)


def _parse_side(side: str, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the options and the sizes of the axes in ``name=value,...``."""
    from fdp.types import FdpError

    train = options_of(TrainOptions)
    known = ["ranks", *AXES, *sorted(set(train) - SAME_ON_BOTH_SIDES - NOT_ACCEPTED)]
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
            axes[name] = parse_value(value, int, where=side, name=name)
        else:
            own[name] = parse_value(value, train[name].value_type, where=side, name=name)
    if "ranks" in axes and len(axes) > 1:
        raise FdpError(f"{side}: expected either ranks or the axes {', '.join(AXES)}, got both in {text!r}")
    if any(size < 1 for size in axes.values()):
        raise FdpError(f"{side}: expected at least 1 rank along every axis, got {text!r}")
    return own, axes


def run_side(side: str, options: TrainOptions, folder: Path) -> None:
    """Run a side in its own processes, which write what they observe to ``folder``."""
    from fdp.types import FdpError

    folder.mkdir()
    file = folder / "settings.json"
    file.write_text(json.dumps(to_dict(options)))
    ranks = _rank_count(options)
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
    """Run one process of :func:`run_side`: join the other ranks, observe the run, and write down a mistake."""
    import torch

    from fdp.cli.configure import configure
    from fdp.parallel import launch
    from fdp.run.compare import observe, write
    from fdp.run.prepare_run import prepare
    from fdp.types import FdpError

    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
    options = build(TrainOptions, json.loads(file.read_text()))
    group = nullcontext()
    if launch.started_by_torchrun():
        torch.set_num_threads(1)  # the ranks share the cores of one machine
        group = launch.join_ranks(launch.device_type(options.compute.device), timeout=options.ranks.timeout)
    try:
        with group:
            # The same settings in the key on both sides: they use the same samples and noise, whatever else differs.
            write(observe(*prepare(configure(options), settings="compare")), file.parent)
    except FdpError as error:
        (file.parent / f"mistake-{launch.rank():04}").write_text(str(error))
        return 2
    return 0


def _check_side(side: str, options: TrainOptions) -> None:
    """Raise if a side's options are wrong, before the first side runs."""
    import torch

    from fdp.cli.configure import configure
    from fdp.parallel import launch
    from fdp.types import FdpError

    try:
        configure(replace(options, ranks=replace(options.ranks, mesh=None)))
    except FdpError as error:
        raise FdpError(f"{side}: {error}") from error
    ranks = _rank_count(options)
    if launch.device_type(options.compute.device) == "cuda" and torch.cuda.device_count() < ranks:
        raise FdpError(
            f"{side}: expected a GPU for each of the {ranks} ranks, found {torch.cuda.device_count()}; "
            f"use --device cpu, or fewer ranks"
        )


def _rank_count(options: TrainOptions) -> int:
    from fdp.cli.names import parse_mesh

    return 1 if options.ranks.mesh is None else math.prod(parse_mesh(options.ranks.mesh).values())


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
    """Return a difference for JSON, which has no infinity: null is "not comparable", such as NaN on one side only."""
    step, stage, where, value = difference
    number = value if math.isfinite(value) else None
    return {"step": step, "stage": stage.value, "where": where, "difference": number}


if __name__ == "__main__":
    sys.exit(_observe(Path(sys.argv[1])))
