"""Reductions over whole leaves of which every rank holds a part, derived from the placements alone.

    ||w||^2 = sum over ranks of [this copy counts] ||part||^2          mean(w, dim) = (sum over ranks of sums) / length

A leaf is cut by some axes of the mesh and repeated over the others; of the repetitions the one at coordinate 0
counts. Which ranks add what depends on the plan only, so that every rank runs the same collectives: one for the
norms of all leaves together, one per axis for the means.

    >>> reductions = sharded_reductions(sharding)
    >>> updates, state = optimizer.update(grads, state, params, reductions)      # LAMB, Adafactor: exact on parts
    >>> norm = global_norm(grads, sharding)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.optimizers.reductions import Reductions, squared_norm
from fdp.parallel import collectives
from fdp.types import Axis, FdpError, Flat, Path


class Leaf(Protocol):
    """The shape of a whole leaf, and the axes that cut it with the dim that each cuts."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def cuts(self) -> tuple[tuple[Axis, int], ...]: ...


class Placements(Protocol):
    """What is read of a ``Sharding``: every leaf's cuts, the axes of more than one rank, all ranks as one axis."""

    @property
    def leaves(self) -> Mapping[Path, Leaf]: ...

    @property
    def axes(self) -> tuple[Axis, ...]: ...

    @property
    def world(self) -> Axis: ...


def sharded_reductions(sharding: Placements) -> Reductions:
    """The reductions of an optimizer whose leaves, ``{path: this rank's part}``, are cut as ``sharding`` says.

    Every rank must call them, with the same paths. A mean is over a dim that is not reduced yet; the other dim may be.

    Guarantees:
      - each equals ``LOCAL`` on the whole leaves up to rounding, and is the same on all ranks that share its place;
      - a leaf repeated on several ranks counts once;
      - a sum of squares of any number of leaves is one collective, a mean at most one per axis.
    """
    return Reductions(
        sum_of_squares=partial(_sum_of_squares, sharding),
        size=lambda parts: {path: math.prod(_leaf(sharding, path).shape) for path in parts},
        mean=lambda parts, dim: _mean(sharding, parts, dim, lambda part: part),
        mean_of_squares=lambda parts, dim: _mean(sharding, parts, dim, torch.square),
    )


def global_norm(parts: Flat, sharding: Placements) -> Float[Tensor, ""]:
    """``sqrt(sum of squares)`` over all whole leaves, in float64; one collective. Every rank must call it.

    Guarantees:
      - the same on every rank, and ``tree.global_norm`` of the whole leaves up to rounding;
      - NaN or infinite where any part that counts is.
    """
    return _all_reduced(_squares(sharding, parts).sum(), sharding.world).sqrt()


def _sum_of_squares(sharding: Placements, parts: Flat) -> Flat:
    totals = _all_reduced(_squares(sharding, parts), sharding.world)
    return {path: total.to(parts[path].dtype) for path, total in zip(sorted(parts), totals.unbind())}


def _squares(sharding: Placements, parts: Flat) -> Float[Tensor, " leaves"]:
    """What this rank adds to the sum of squares of every leaf, in path order. A 0 is a 0, also in place of a NaN."""

    def share(path: Path, part: Tensor) -> Tensor:
        return squared_norm(part) if _counts(sharding, path) else part.new_zeros((), dtype=torch.float64)

    return torch.stack([share(path, parts[path]) for path in sorted(parts)])


def _counts(sharding: Placements, path: Path) -> bool:
    """Whether this rank is the first of those that hold the same part."""
    cutting = {axis.name for axis, _ in _leaf(sharding, path).cuts}
    return all(axis.rank == 0 for axis in sharding.axes if axis.name not in cutting)


def _mean(sharding: Placements, parts: Flat, dim: int, of: Callable[[Tensor], Tensor]) -> Flat:
    """``of(whole leaf).mean(dim, keepdim=True)`` of matrices; of anything else, ``of(part)``."""
    # The sum of a part without rows is 0; its mean would be NaN.
    sums = {path: of(parts[path]).sum(dim, keepdim=True) for path in sorted(parts) if parts[path].ndim > 1}
    for axis in sharding.axes:
        sums |= _summed({path: s for path, s in sums.items() if _is_cut(sharding, path, axis, dim)}, axis)
    return {
        path: sums[path] / _leaf(sharding, path).shape[dim] if path in sums else of(part)
        for path, part in parts.items()
    }


def _is_cut(sharding: Placements, path: Path, by: Axis, dim: int) -> bool:
    leaf = _leaf(sharding, path)
    return any(axis.name == by.name and cut - len(leaf.shape) == dim for axis, cut in leaf.cuts)


def _summed(flat: Flat, axis: Axis) -> Flat:
    """The sum of every leaf over the ranks of ``axis``: one collective, in float64 whatever the dtypes; or none."""
    if not flat:
        return {}
    bucket = torch.cat([leaf.to(torch.float64).flatten() for leaf in flat.values()])
    sums = _all_reduced(bucket, axis).split([leaf.numel() for leaf in flat.values()])
    return {path: total.view(leaf.shape).to(leaf.dtype) for (path, leaf), total in zip(flat.items(), sums)}


def _all_reduced(x: Tensor, axis: Axis) -> Tensor:
    return collectives.wait(collectives.all_reduce(x, axis))


def _leaf(sharding: Placements, path: Path) -> Leaf:
    if path not in sharding.leaves:
        known = list(sharding.leaves)[:4]
        raise FdpError(
            f"{path}: expected the path of a leaf of the sharding ({', '.join(known)}, ...), got a path it does not "
            "know; reductions take flat dictionaries {path: part}, see fdp.tree.flatten"
        )
    return sharding.leaves[path]
