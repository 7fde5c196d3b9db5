"""Compare two runs stage by stage: where they first differ, and by how much.

    init -> forward -> loss -> norms -> clipped sum -> noise -> update -> ...       per leaf: max |a - b| / max |b|

A run on several ranks must equal the run on one, a ghost norm the norm of the gradient, a compiled step the eager one.
If they do not, the final parameters show it but not why: one wrong norm changes everything after it. So we look between
the stages of the very step that trains, gather what passes between them to full leaves, and report the first stage at
which two runs differ.

    >>> seen = observe(*prepare(config))                                # on every rank; one stage at a time
    >>> found = list(compare(observe(*prepare(a)), observe(*prepare(b))))
    >>> first_over(found, tolerance=1e-5)                               # Difference(2, Stage.NORMS, 'sample 3', 0.41)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.attention import fast_attention
from fdp.equal_rounding import whole_sums
from fdp.gradients.lazy_sum import evaluate
from fdp.parallel import agree
from fdp.parallel.dtensors import as_dtensor, full_tensor, localize
from fdp.parallel.gather_reduce import gather_samples
from fdp.parallel.sharding import Sharding
from fdp.privacy.microbatches import split_microbatches
from fdp.run.prepare_run import Run
from fdp.run.training_run import draw_batch, refresh_curvature
from fdp.stages import Stages
from fdp.step import join_observed
from fdp.types import Batch, ClippedSum, FdpError, Flat, TrainState


class Stage(Enum):
    """Stages of a step, in the order in which they are computed."""

    INIT = "init"
    FORWARD = "forward"
    LOSS = "loss"
    NORMS = "norms"
    SUM = "clipped sum"
    NOISE = "noise"
    UPDATE = "update"


class Seen(NamedTuple):
    """The result of one stage of one step: full leaves by path, or one number per sample, ``sample 0, sample 1, ...``.

    Steps count from 1; step 0 is before the first. ``forward`` is the mean, the standard deviation and the sum of the
    logits of all samples, nothing for a model that does not name its logits (``fdp.model.Outputs``); ``noise`` is what
    was added, ``update`` the parameters after it.
    ``rank_differences`` says how far copies differ that should be equal on all ranks; equal copies are left out.
    """

    step: int
    stage: Stage
    values: Flat
    rank_differences: dict[str, float]


class Difference(NamedTuple):
    """The largest relative difference of a stage, and the leaf or sample that has it; '' if nothing differs."""

    step: int
    stage: Stage
    where: str
    value: float


def observe(run: Run, state: TrainState) -> Iterator[Seen]:
    """Yield every stage of the steps of ``fdp.run.training_run.steps``: the same samples, noise and code.

    The step is the run's own, as it trains: fused, compiled, recorded as a CUDA graph, whatever its execution. Between
    its stages the clipped sum is copied, and the noise is what its end added to that sum. Every rank of the run calls
    this and goes through it to the end; only the first one is given full leaves.

    Guarantees:
      - the parameters after every step are those of ``fdp.run.training_run.steps``;
      - samples are in the order of the data, padding left out, however they lie on ranks and in microbatches;
      - ranks that should hold the same values, and do not, are found out.
    """
    config, sharding, stages = run.config, run.sharding, run.stages
    root = run.key.to(config.device)
    step = join_observed(stages, _copy_of_sum)
    yield Seen(0, Stage.INIT, *_full_leaves(tree.flatten(localize(state.params)), sharding))
    for t in range(int(state.step), config.steps):
        batch = draw_batch(run, t)
        state = refresh_curvature(run, state, batch, t)
        before = tree.map(torch.clone, localize(state))
        yield Seen(t + 1, Stage.FORWARD, *_logits(stages, before, batch))
        state, metrics, total = step(state, batch, root)
        after = localize(state)
        real = metrics.mask > 0
        yield Seen(t + 1, Stage.LOSS, *_sample_values(metrics.losses[real]))
        yield Seen(t + 1, Stage.NORMS, *_sample_values(metrics.norms[real]))
        yield Seen(t + 1, Stage.SUM, *_full_leaves(total.value, sharding))
        added = stages.finish.noise_added(before, total, stages.key(root, before.step), after)
        yield Seen(t + 1, Stage.NOISE, *_full_leaves(added, sharding))
        yield Seen(t + 1, Stage.UPDATE, *_full_leaves(tree.flatten(after.params), sharding))


def _copy_of_sum(total: ClippedSum) -> ClippedSum:
    """Return the sum evaluated, in tensors that the rest of the step does not write to."""
    return tree.map(torch.clone, evaluate(total))


def compare(a: Iterable[Seen], b: Iterable[Seen]) -> Iterator[Difference]:
    """Yield, stage by stage, the leaf or sample with the largest :func:`relative_difference`; the first of equals.

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
            value = max(value, one.rank_differences.get(name, 0.0), other.rank_differences.get(name, 0.0))
            if value > largest:
                where, largest = name, value
        yield Difference(one.step, one.stage, where, largest)


def relative_difference(a: Float[Tensor, " *shape"], b: Float[Tensor, " *shape"]) -> float:
    """``max |a - b| / max |b|``, computed in float64; 0 if both are the same, zeros and NaN included.

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
    """Return the first stage that differs by more than ``tolerance``; None if the runs are equal within it."""
    return next((difference for difference in differences if difference.value > tolerance), None)


def write(seen: Iterable[Seen], folder: Path) -> None:
    """Write an observation to ``folder``, one file per stage. Every rank calls it; the first one writes."""
    for i, (number, stage, values, differences) in enumerate(seen):
        if agree.rank_in(None) == 0:
            torch.save((number, stage.value, values, differences), folder / f"{i:06}.pt")


def read(folder: Path) -> Iterator[Seen]:
    """Yield what :func:`write` wrote, one stage at a time."""
    for path in sorted(folder.glob("*.pt")):
        number, stage, values, differences = torch.load(path, weights_only=True)
        yield Seen(number, Stage(stage), values, differences)


def _logits(stages: Stages, here: TrainState, batch: Batch) -> tuple[Flat, dict[str, float]]:
    """Return statistics of all samples' logits, summed in the order of the data, and how far the ranks differ.

    Mean and sum may be next to nothing because logits cancel. The root mean square stands beside them, so that a
    difference is relative to the size of the logits, and rounding does not pass for one.
    """
    device = batch.mask.device
    weights = stages.weights(here.params, device)
    with fast_attention(device, repeatable=stages.repeatable), whole_sums(device):
        found = [stages.scores(weights, data) for data, _ in split_microbatches(batch)]
    each = [moments for moments in found if moments is not None]
    if not each:
        return {}, {}
    mask = gather_samples(stages.execution.sharding, batch.mask) > 0
    joined = torch.cat(each, 1).unflatten(1, batch.mask.shape)
    every = (gather_samples(stages.execution.sharding, part.contiguous()) for part in joined)
    total, squares, number = (part[mask].sum().cpu() for part in every)
    mean, square = (part / number.clamp(min=1) for part in (total, squares))
    size = square.sqrt()
    values = {
        "mean of the logits": torch.stack([mean, size]),
        "standard deviation of the logits": (square - mean.square()).clamp(min=0).sqrt().reshape(1),
        "sum of the logits": torch.stack([total, number * size]),
    }
    copies = agree.gather_values(values, None)
    sizes = {name: _largest_difference([copy[name] for copy in copies]) for name in values}
    return values, {name: size for name, size in sizes.items() if size > 0}


def _sample_values(values: Float[Tensor, " samples"]) -> tuple[Flat, dict[str, float]]:
    """Return one number per sample, and how far the ranks' copies differ."""
    values = values.detach().cpu()
    copies = agree.gather_values(values, None) if _differing_names({"": _digest(values)}) else [values]
    names = [f"sample {i}" for i in range(len(values))]
    by_sample = {name: [copy[i : i + 1] for copy in copies] for i, name in enumerate(names)}
    sizes = {name: _largest_difference(each) for name, each in by_sample.items()}
    differing = {name: size for name, size in sizes.items() if size > 0}
    return {name: each[0] for name, each in by_sample.items()}, differing


def _full_leaves(parts: Flat, sharding: Sharding | None) -> tuple[Flat, dict[str, float]]:
    """Return every full leaf, from this rank's shard of it, and how far the ranks' copies differ.

    One leaf at a time, so that only the first rank ever holds all of them.
    """

    def leaf(path: str) -> Tensor:
        part = parts[path]
        return (
            (part if sharding is None else full_tensor(as_dtensor(part, path, sharding))).detach().to("cpu", copy=True)
        )

    leaves, digests = {}, {}
    for path in parts:
        one = leaf(path)
        digests[path] = _digest(one)
        leaves |= {path: one} if agree.rank_in(None) == 0 else {}
    return leaves, {
        path: _largest_difference(agree.gather_values(leaf(path), None)) for path in _differing_names(digests)
    }


def _digest(copy: Tensor) -> bytes:
    return hashlib.sha256(copy.contiguous().view(-1).view(torch.uint8).numpy().data).digest()


def _differing_names(digests: Mapping[str, bytes]) -> list[str]:
    """Return the names whose copies are not equal on all ranks, in the same order on every rank."""
    per_rank = agree.gather_values(dict(digests), None)
    return [name for name, digest in per_rank[0].items() if any(other.get(name) != digest for other in per_rank)]


def _largest_difference(copies: Sequence[Tensor]) -> float:
    """Return how far any rank's copy differs from the first one's."""
    return max(relative_difference(copy, copies[0]) for copy in copies)
