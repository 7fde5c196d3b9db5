"""Sizes of microbatches that may stand side by side: a sample adds the same to the sum in all of them.

    batch       | 64 samples | 64 samples | 8 |           one more sample, before all others, and these move up by one:
    batch'      | 64 samples | 64 samples | 16    |       eight samples are now in a microbatch of another size

A library may compute a product of other sizes with another kernel, which rounds otherwise. If that changed what these
samples add, the sum would move by more than the new sample's part, which is what the noise covers. So several sizes are
used only if one real sample, alone in the sum, adds the same in each of them, at another place and beside other
samples, and has the same norm. That is a spot check, of the kernels that a device chooses for a size, in whatever order
they add. With one sample more, at most m samples, one microbatch, change their size, so what a tolerance lets pass
moves a sum by at most m tolerance C. That is not in the slack: the noise of one seed must not have a scale that depends
on how a step is computed. A run has the tolerance 1e-6 / m (:mod:`fdp.run.equal_sizes`).

    >>> add = sample_part(stages, state)                     # fdp.step: (data, mask) -> the sum of a microbatch
    >>> check_sizes(add, examples, sizes=(64, 32, 16, 8), sharded=False)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.fast.out_of_memory import OutOfMemory, is_out_of_memory
from fdp.gradients.accumulate import MicrobatchSum
from fdp.gradients.lazy_sum import LazySum
from fdp.gradients.taps import batch_size_of
from fdp.parallel.agree import gather_values
from fdp.types import ClippedSum, FdpError, Tree

TOLERANCE = 1e-6
"""The most, as a fraction of it, by which what a sample adds may differ between two sizes in a step of one's own:
float32 on a CPU may differ by a few roundings. From the largest size it may differ by half of that."""
SAMPLES_TRIED = 4
"""Samples that are tried until one has a gradient."""
ELEMENTS_COMPARED = 1 << 12
"""Elements of every leaf that are compared: what rounds otherwise does so all over a leaf."""
COMPARISONS = 3
"""How often sizes are compared if they differ: attention's backward may add in any order, so that a sample differs from
itself now and then. A size that rounds otherwise differs each time."""


SamplePart: TypeAlias = Callable[[Tree, Float[Tensor, " batch"]], MicrobatchSum]
"""``add(data, mask)``: the clipped sum of a microbatch, with its metrics."""


class _Part(NamedTuple):
    """Some elements of what a sample adds, and its norm before clipping."""

    elements: Float[Tensor, " elements"]
    norm: float


def check_sizes(add: SamplePart, examples: Tree, *, sizes: Sequence[int], sharded: bool) -> None:
    """Raise :class:`FdpError` unless a sample adds the same to the sum, to ``TOLERANCE``, in microbatches of all sizes.

    If it does not, they are compared again. A size that does not fit into memory is an error as well.
    """

    def too_large(by: dict[int, float]) -> list[float]:
        return [difference for difference in by.values() if not difference <= TOLERANCE / 2]

    found = least_differences(
        lambda: differences(add, examples, sizes=sizes, sharded=sharded), agree=lambda by: not too_large(by)
    )
    if unfit := [size for size in sizes if size not in found]:
        raise OutOfMemory(unfit[0])
    if wrong := too_large(found):
        raise FdpError(
            f"microbatch sizes {tuple(sizes)}: expected that a sample adds the same to the sum in each, to "
            f"{TOLERANCE:g}, but {explain_difference(wrong)}. One sample more or less could move the gradients of "
            "others. Make the plan for one size, without add_smaller_sizes, or, if it is attention that adds in any "
            "order on a GPU, compute in one order: make_execution(repeatable=True)"
        )


def differences(add: SamplePart, examples: Tree, *, sizes: Sequence[int], sharded: bool) -> dict[int, float]:
    """Return, for every size that fits into memory, by how much a sample adds something else than in the largest one:

        ||part in a microbatch of this size - part in the largest|| / ||part in the largest||

    or by how much its norm differs, if that is more: if it is below the bound, nothing is clipped, and the part does
    not show it. ``sizes`` are this rank's, largest first, and ``examples`` are as many samples as the largest has. Of
    a size that is there several times, the largest difference is returned. If ``sharded``, every rank calls this, with
    the same sizes, and gets the same numbers.

    Guarantees:
      - if no sample that is tried has a gradient that is finite and not 0, all differences but the first are infinite;
      - in a sharded run, where others wait, memory that runs out is an error (:class:`OutOfMemory`).
    """

    def of_all_ranks(value: float) -> list[float]:
        return gather_values(value, None) if sharded else [value]

    try:
        found: dict[int, float] = {}
        for which in range(min(SAMPLES_TRIED, batch_size_of(examples))):
            parts = _parts(add, examples, which, sizes, sharded=sharded)
            if (of_largest := next(parts, None)) is None:
                return {}
            largest, first = of_largest
            length = math.hypot(*of_all_ranks(float(first.elements.norm())))
            if 0 < length < math.inf:
                found = {largest: 0.0}
                for size, part in parts:
                    moved = math.hypot(*of_all_ranks(float((part.elements - first.elements).norm()))) / length
                    moved = math.hypot(moved, *of_all_ranks(_relative_difference(part.norm, first.norm)))
                    found[size] = max(found.get(size, 0.0), math.inf if math.isnan(moved) else moved)
                return found
            found = dict.fromkeys((largest, *(size for size, _ in parts)), math.inf) | {largest: 0.0}
        return found
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # a recorded step has memory of its own


def least_differences(
    compare: Callable[[], dict[int, float]], *, agree: Callable[[dict[int, float]], bool]
) -> dict[int, float]:
    """Return the differences that ``compare`` finds; if they do not agree, the least of up to ``COMPARISONS`` times."""
    by = compare()
    for _ in range(COMPARISONS - 1):
        if not agree(by):
            by = smaller_differences(by, compare())
    return by


def smaller_differences(by: dict[int, float], again: dict[int, float]) -> dict[int, float]:
    """Return the smaller difference of every size; ``again`` if it is from another size, since memory ran out."""
    if next(iter(by)) != next(iter(again), None):
        return again
    return {size: min(difference, again.get(size, difference)) for size, difference in by.items()}


def explain_difference(by: Sequence[float]) -> str:
    """Return in words what differences above the tolerance say."""
    if all(map(math.isfinite, by)):
        return f"this device rounds a sample's gradient otherwise in some of them, by up to {max(by):.1e} of it"
    return "no sample was found whose gradient is finite and not 0 in each of them, so how they round is not known"


def _relative_difference(norm: float, expected: float) -> float:
    """Return ``|norm - expected| / expected``; 0 if they are equal, also if both are 0 or infinite."""
    if norm == expected:
        return 0.0
    return abs(norm - expected) / expected if expected else math.inf


def _parts(
    add: SamplePart, examples: Tree, which: int, sizes: Sequence[int], *, sharded: bool
) -> Iterator[tuple[int, _Part]]:
    """Yield sizes that fit, and what one sample adds: as the first sample of the first, as the last of all others."""
    count, device, place = batch_size_of(examples), tree.leaves(examples)[0].device, 0
    for size in sizes:
        rows = (torch.arange(size, device=device) + which + 1) % count
        rows[place] = which
        mask = torch.zeros(size, device=device)
        mask[place] = 1
        part = _part(add, tree.map(lambda leaf, at=rows: leaf[at], examples), mask, place, sharded=sharded)
        if part is not None:
            place = -1
            yield size, part


def _part(add: SamplePart, data: Tree, mask: Float[Tensor, " batch"], place: int, *, sharded: bool) -> _Part | None:
    """Return what the sample at ``place`` adds; None if there is no memory for it, also after all that is free was
    given back."""
    for _ in range(2):
        try:
            found = add(data, mask)
            return _Part(_some_elements(found.total), float(found.metrics.norms[place]))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if sharded:
                raise OutOfMemory(len(mask)) from error
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return None


def _some_elements(total: ClippedSum) -> Float[Tensor, " elements"]:
    """Return elements of every leaf, evenly spaced, in float64."""
    found = []
    for leaf in total.value.values():
        rows = leaf.rows.flatten(1) if isinstance(leaf, LazySum) else leaf.flatten()[None]
        some = rows[:, :: max(1, rows.shape[1] // ELEMENTS_COMPARED | 1)].contiguous()
        found.append(LazySum(some, leaf.factors).evaluate().double() if isinstance(leaf, LazySum) else some[0].double())
    return torch.cat(found)


def without_zeros(leaf: Tensor) -> Tensor:
    """Return the leaf or, if all of it is 0, other numbers: a head of zeros would hide how the blocks below round."""
    if not leaf.is_floating_point() or bool(leaf.any()):
        return leaf
    index = torch.arange(leaf.numel(), device=leaf.device, dtype=torch.float32)
    return (0.02 * index.sin()).to(leaf.dtype).view(leaf.shape)
