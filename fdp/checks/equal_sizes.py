"""Sizes of microbatches that may stand side by side: a sample adds the same to the sum in all of them.

    batch       | 64 samples | 64 samples | 8 |           one more sample, before all others, and these move up by one:
    batch'      | 64 samples | 64 samples | 16    |       eight samples are now in a microbatch of another size

A library may compute a product of other sizes with another kernel, which rounds otherwise. If that changed what these
samples add, the sum would move by more than the new sample's part, which is what the noise covers. So several sizes are
used only if one real sample, alone in the sum, adds the same in each of them, at another place and beside other
samples, to 1e-6: float32 on a CPU may differ by a few roundings. That is a spot check, of the kernels that a device
chooses for a size, in whatever order they add. With one sample more, at most m samples, one microbatch, change their
size, so what the check lets pass moves a sum by at most m 1e-6 C. That is not in the slack: the noise of one seed must
not have a scale that depends on how a step is computed.

    >>> add = sample_part(stages, state)                     # fdp.step: (data, mask) -> the clipped sum
    >>> check_sizes(add, examples, sizes=(64, 32, 16, 8), sharded=False)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.fast.out_of_memory import is_out_of_memory
from fdp.gradients.lazy_sum import LazySum
from fdp.gradients.taps import batch_size_of
from fdp.parallel.agree import gather_values
from fdp.types import ClippedSum, FdpError, Tree

TOLERANCE = 1e-6
"""The most, as a fraction of it, by which what a sample adds may differ."""
SAMPLES_TRIED = 4
"""Samples that are tried until one has a gradient."""
ELEMENTS_COMPARED = 1 << 12
"""Elements of every leaf that are compared: what rounds otherwise does so all over a leaf."""


SamplePart: TypeAlias = Callable[[Tree, Float[Tensor, " batch"]], ClippedSum]
"""``add(data, mask)``: the clipped sum of a microbatch."""


def check_sizes(add: SamplePart, examples: Tree, *, sizes: Sequence[int], sharded: bool) -> None:
    """Raise :class:`FdpError` if a sample adds something else to the sum in microbatches of some of the ``sizes``."""
    by = disagreement(add, examples, sizes=sizes, sharded=sharded)
    if by is not None:
        raise FdpError(
            f"microbatch sizes {tuple(sizes)}: expected that a sample adds the same to the sum in each, to "
            f"{TOLERANCE:g}, but {explain_difference(by)}. One sample more or less could move the gradients of others. "
            "Make the plan for one size, without add_smaller_sizes"
        )


def disagreement(add: SamplePart, examples: Tree, *, sizes: Sequence[int], sharded: bool) -> float | None:
    """Return the first difference above the tolerance (see :func:`differences`), or None: all sizes may be used."""
    found = differences(add, examples, sizes=sizes, sharded=sharded)
    return next((by for _, by in found if not by <= TOLERANCE), None)


def differences(add: SamplePart, examples: Tree, *, sizes: Sequence[int], sharded: bool) -> Iterator[tuple[int, float]]:
    """Yield smaller sizes and by how much a sample adds something else in them, as a fraction of what it adds:

        ||part in a microbatch of this size - part in the largest|| / ||part in the largest||

    ``add(data, mask)`` is the clipped sum of a microbatch, ``sizes`` are this rank's, largest first, and ``examples``
    are as many samples as the largest has. A size for which there is no memory is left out. If ``sharded``, every rank
    takes part, with the same sizes, and gets the same numbers: the greatest over the ranks.

    Guarantees:
      - if no sample that is tried has a gradient that is finite and not 0, the difference is infinite.
    """

    def of_all_ranks(value: float) -> list[float]:
        return gather_values(value, None) if sharded else [value]

    try:
        for which in range(min(SAMPLES_TRIED, batch_size_of(examples))):
            parts = _parts(add, examples, which, sizes, sharded=sharded)
            if (found := next(parts, None)) is None:
                return  # nothing fits; the first step will say so
            first = found[1]
            norms = of_all_ranks(float(first.norm()))
            if max(norms) > 0 and all(map(math.isfinite, norms)):
                for size, part in parts:
                    yield size, max(of_all_ranks(float((part - first).norm()))) / max(norms)
                return
        yield sizes[-1], math.inf
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # a recorded step has memory of its own


def explain_difference(by: float) -> str:
    """Return in words what a difference above the tolerance says."""
    if math.isfinite(by):
        return f"in a microbatch of another size this device rounds a sample's gradient otherwise, by {by:.1e} of it"
    return f"the gradients of the first {SAMPLES_TRIED} samples are 0 or not finite, which does not show how it rounds"


def _parts(
    add: SamplePart, examples: Tree, which: int, sizes: Sequence[int], *, sharded: bool
) -> Iterator[tuple[int, Float[Tensor, " elements"]]]:
    """Yield sizes, and what one sample adds to the sum: first in one of the largest size, then last in each other.

    The smallest comes next, since it is the likeliest to differ, and each size may have to be compiled.
    """
    count, device, place = batch_size_of(examples), tree.leaves(examples)[0].device, 0
    largest, *others = sizes
    for size in (largest, *reversed(others)):
        rows = (torch.arange(size, device=device) + which + 1) % count
        rows[place] = which
        mask = torch.zeros(size, device=device)
        mask[place] = 1
        try:
            part = _some_elements(add(tree.map(lambda leaf, at=rows: leaf[at], examples), mask))
        except Exception as error:
            if sharded or not is_out_of_memory(error):
                raise
            continue
        place = -1
        yield size, part


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
