"""Two runs held against each other, stage by stage: where they first part, and by how much.

    init -> forward -> loss -> norms -> clipped sum -> noise -> update -> ...       per leaf: max |a - b| / max |b|

A run on several ranks must be the run on one, a ghost norm the norm of the gradient, a compiled step the eager one. If
they are not, the end shows it and does not say why: one wrong norm moves everything after it. So the pieces of the
step are run one by one, what passes between them is put together to whole leaves, and the first stage at which two
runs differ is where to look.

    >>> seen = observe(*prepare(config))                                # on every rank; one stage at a time
    >>> found = list(compare(observe(*prepare(a)), observe(*prepare(b))))
    >>> first_over(found, tolerance=1e-5)                               # Difference(2, Stage.NORMS, 'sample 3', 0.41)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import step, tree
from fdp.ops import fast_attention
from fdp.parallel import agree
from fdp.parallel.dtensors import as_dtensor, full_tensor, globalize, localize
from fdp.parallel.gather_reduce import gather_samples
from fdp.parallel.sharding import Sharding
from fdp.run.training_run import Run, draw_batch, refreshed
from fdp.types import Batch, FdpError, Flat, TrainState


class Stage(Enum):
    """What is looked at, in the order in which it comes to be."""

    INIT = "init"
    FORWARD = "forward"
    LOSS = "loss"
    NORMS = "norms"
    SUM = "clipped sum"
    NOISE = "noise"
    UPDATE = "update"


class Seen(NamedTuple):
    """What one stage of one step gave: whole leaves by path, or one number per sample, as ``sample 0, sample 1, ...``.

    Steps count from 1; step 0 is before the first. ``forward`` is the mean, the standard deviation and the sum of the
    logits of all samples, nothing for a model that does not name its logits (``fdp.model.Outputs``); ``noise`` is what
    was added, ``update`` the parameters after it.
    ``apart`` says by how much the copies of ranks differ that should all hold the same; copies that agree are left out.
    """

    step: int
    stage: Stage
    values: Flat
    apart: dict[str, float]


class Difference(NamedTuple):
    """The largest relative difference of a stage, and the leaf or the sample that has it; '' if nothing differs."""

    step: int
    stage: Stage
    where: str
    value: float


def observe(run: Run, state: TrainState) -> Iterator[Seen]:
    """Every stage of the steps that ``fdp.run.training_run.steps`` would make, on the same samples and with the same
    noise.

    Every rank of the run calls it and goes through it to the end; only the first one is given whole leaves.

    Guarantees:
      - the parameters after every step are those of ``fdp.run.training_run.steps``;
      - samples are in the order of the data, padding left out, however they lie on ranks and in microbatches;
      - ranks that should hold the same values, and do not, are found out.
    """
    config, sharding = run.config, run.sharding
    root = run.key.to(config.device)
    stages = _compiled(run.stages) if config.compile is step.Compile.STEP else run.stages
    yield Seen(0, Stage.INIT, *_wholes(tree.flatten(localize(state.params)), sharding))
    for t in range(int(state.step), config.steps):
        batch = draw_batch(run, t)
        state = refreshed(run, state, batch, t)
        here = localize(state)
        yield Seen(t + 1, Stage.FORWARD, *_logits(stages, here, batch))
        total, tally, metrics = step.all_microbatches(stages, here, batch)
        metrics = step.everyones(metrics, batch.mask.shape, sharding)
        real = metrics.mask > 0
        yield Seen(t + 1, Stage.LOSS, *_samples(metrics.losses[real]))
        yield Seen(t + 1, Stage.NORMS, *_samples(metrics.norms[real]))
        total = stages.reduce(total).made()
        yield Seen(t + 1, Stage.SUM, *_wholes(total.value, sharding))
        key = stages.key(root, here.step)
        noisy = stages.noise(total, key)
        added = {path: leaf - total.value[path].to(leaf) for path, leaf in noisy.items()}
        yield Seen(t + 1, Stage.NOISE, *_wholes(added, sharding))
        mean = stages.mean(noisy, here.params)
        state = globalize(stages.update(here, mean, tally, key), like=state)
        yield Seen(t + 1, Stage.UPDATE, *_wholes(tree.flatten(localize(state.params)), sharding))


def compare(a: Iterable[Seen], b: Iterable[Seen]) -> Iterator[Difference]:
    """Stage by stage, the leaf or sample with the largest :func:`relative_difference`; the first of equal ones.

    Guarantees:
      - a leaf or sample that only one of the two has counts as infinitely different;
      - where the ranks of one run hold different copies of a leaf or sample, it differs by at least as much.
    """
    for one, other in zip(a, b, strict=True):
        if (one.step, one.stage) != (other.step, other.stage):
            raise FdpError(f"expected two runs over the same steps, got {one[:2]} beside {other[:2]}")
        where, largest = "", 0.0
        for name in one.values | other.values:
            both = name in one.values and name in other.values
            value = relative_difference(one.values[name], other.values[name]) if both else math.inf
            value = max(value, one.apart.get(name, 0.0), other.apart.get(name, 0.0))
            if value > largest:
                where, largest = name, value
        yield Difference(one.step, one.stage, where, largest)


def relative_difference(a: Float[Tensor, " *shape"], b: Float[Tensor, " *shape"]) -> float:
    """``max |a - b| / max |b|``, computed in float64; 0 where both are the same, zeros and NaN included.

    Infinite if the shapes differ, if one is NaN or infinite where the other is not, and if only b is all zeros.
    """
    if a.shape != b.shape:
        return math.inf
    a, b = a.detach().double(), b.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    gap = float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf, posinf=math.inf).max())
    size = float(torch.where(b.isfinite(), b.abs(), 0.0).max())
    return gap / size if size > 0 else math.inf


def first_over(differences: Iterable[Difference], *, tolerance: float) -> Difference | None:
    """The first stage that differs by more than ``tolerance``; None: the runs are equal within it."""
    return next((difference for difference in differences if difference.value > tolerance), None)


def write(seen: Iterable[Seen], folder: Path) -> None:
    """Leave an observation in ``folder``, one file per stage. Every rank calls it, the first one writes."""
    for i, (number, stage, values, apart) in enumerate(seen):
        if agree.rank_in(None) == 0:
            torch.save((number, stage.value, values, apart), folder / f"{i:06}.pt")


def read(folder: Path) -> Iterator[Seen]:
    """What :func:`write` left, one stage at a time."""
    for path in sorted(folder.glob("*.pt")):
        number, stage, values, apart = torch.load(path, weights_only=True)
        yield Seen(number, Stage(stage), values, apart)


def _compiled(stages: step.Stages) -> step.Stages:
    """Each compiled stage of ``fdp.step.compose`` as a graph of its own; noise and update are one there."""
    graph = partial(torch.compile, fullgraph=True, dynamic=False)
    return stages._replace(gradient=graph(stages.gradient), noise=graph(stages.noise), update=graph(stages.update))


def _logits(stages: step.Stages, here: TrainState, batch: Batch) -> tuple[Flat, dict[str, float]]:
    """What all samples' logits come to, added up in the order of the data, and by how much the ranks differ in it.

    Mean and sum may be next to nothing because logits cancel. The root mean square stands beside them, so that a
    difference is relative to the size of the logits, and rounding does not pass for one.
    """
    weights = stages.weights(here.params, batch.mask.device)
    count = batch.mask.shape[0]
    with fast_attention(batch.mask.device, repeatable=stages.repeats):
        found = [stages.scores(weights, tree.map(lambda leaf, i=i: leaf[i], batch.data)) for i in range(count)]
    each = [moments for moments in found if moments is not None]
    if not each:
        return {}, {}
    mask = gather_samples(stages.sharding, batch.mask) > 0
    every = (gather_samples(stages.sharding, part.contiguous()) for part in torch.stack(each, 1))
    total, squares, number = (part[mask].sum().cpu() for part in every)
    mean, square = (part / number.clamp(min=1) for part in (total, squares))
    size = square.sqrt()
    values = {
        "mean of the logits": torch.stack([mean, size]),
        "standard deviation of the logits": (square - mean.square()).clamp(min=0).sqrt().reshape(1),
        "sum of the logits": torch.stack([total, number * size]),
    }
    copies = agree.gather_values(values, None)
    sizes = {name: _apart([copy[name] for copy in copies]) for name in values}
    return values, {name: size for name, size in sizes.items() if size > 0}


def _samples(values: Float[Tensor, " samples"]) -> tuple[Flat, dict[str, float]]:
    """One number per sample, and by how much the ranks' differ."""
    values = values.detach().cpu()
    copies = agree.gather_values(values, None) if _drifted({"": _digest(values)}) else [values]
    names = [f"sample {i}" for i in range(len(values))]
    cut = {name: [copy[i : i + 1] for copy in copies] for i, name in enumerate(names)}
    sizes = {name: _apart(each) for name, each in cut.items()}
    return {name: each[0] for name, each in cut.items()}, {name: size for name, size in sizes.items() if size > 0}


def _wholes(parts: Flat, sharding: Sharding | None) -> tuple[Flat, dict[str, float]]:
    """Every leaf whole, from this rank's part of it, and by how much the ranks' differ.

    One leaf at a time, so that only the first rank ever holds all of them.
    """

    def leaf(path: str) -> Tensor:
        part = parts[path]
        return (part if sharding is None else full_tensor(as_dtensor(part, path, sharding))).detach().cpu()

    leaves, digests = {}, {}
    for path in parts:
        one = leaf(path)
        digests[path] = _digest(one)
        leaves |= {path: one} if agree.rank_in(None) == 0 else {}
    return leaves, {path: _apart(agree.gather_values(leaf(path), None)) for path in _drifted(digests)}


def _digest(copy: Tensor) -> bytes:
    return hashlib.sha256(copy.contiguous().view(-1).view(torch.uint8).numpy().data).digest()


def _drifted(digests: Mapping[str, bytes]) -> list[str]:
    """What not all ranks have the same copy of; in the same order on every rank."""
    everyones = agree.gather_values(dict(digests), None)
    return [name for name, digest in everyones[0].items() if any(other.get(name) != digest for other in everyones)]


def _apart(copies: Sequence[Tensor]) -> float:
    """By how much any rank's copy differs from the first's."""
    return max(relative_difference(copy, copies[0]) for copy in copies)
