"""Norms, sums and means of full leaves, computed from the shards that ranks hold.

    ||w||^2 = sum over ranks of [this copy counts] ||shard||^2         mean(w, dim) = (sum over ranks of sums) / length

A leaf is sharded over some axes of the mesh and repeated over the others; of the copies, the one at coordinate 0
counts. Which rank adds what depends only on the plan, so every rank runs the same collectives: one for the norms of
all leaves together, one per axis for the means.

This is the sharded implementation of ``fdp.optimizers.leaf_reductions.Reductions``.

    >>> reductions = sharded_reductions(sharding)
    >>> updates, state = optimizer.update(grads, state, params, reductions)      # LAMB, Adafactor: exact on shards
    >>> norm = sharded_global_norm(grads, sharding)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.optimizers.leaf_reductions import Reductions, squared_norm
from fdp.parallel import collectives
from fdp.types import Axis, FdpError, Flat, Path


class Leaf(Protocol):
    """The global shape of a leaf, and the (axis, dim) pairs that shard it."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def sharded_dims(self) -> tuple[tuple[Axis, int], ...]: ...


class Placements(Protocol):
    """The parts of a ``Sharding`` read here: every leaf's plan, the axes of more than one rank, and all ranks."""

    @property
    def leaves(self) -> Mapping[Path, Leaf]: ...

    @property
    def axes(self) -> tuple[Axis, ...]: ...

    @property
    def world(self) -> Axis: ...


def sharded_reductions(sharding: Placements) -> Reductions:
    """Return the reductions for an optimizer whose leaves, ``{path: shard}``, are sharded as ``sharding`` says.

    Every rank must call them, with the same paths. A mean is over a dim that is not reduced yet; the other dim may be.

    Guarantees:
      - each equals ``LOCAL`` on the full leaves up to rounding, and is the same on all ranks that hold the same shard;
      - a leaf repeated on several ranks counts once;
      - a sum of squares of any number of leaves is one collective, a mean at most one per axis.
    """
    return Reductions(
        sum_of_squares=partial(_sum_of_squares, sharding),
        size=lambda parts: {path: math.prod(_leaf(sharding, path).shape) for path in parts},
        mean=lambda parts, dim: _mean(sharding, parts, dim, lambda part: part),
        mean_of_squares=lambda parts, dim: _mean(sharding, parts, dim, torch.square),
    )


def sharded_global_norm(parts: Flat, sharding: Placements) -> Float[Tensor, ""]:
    """Return ``sqrt(sum of squares)`` over all full leaves, in float64; one collective. Every rank must call it.

    Guarantees:
      - the same on every rank, and ``tree.global_norm`` of the full leaves up to rounding;
      - NaN or infinite where any shard that counts is.
    """
    return _all_reduce(_squares(sharding, parts).sum(), sharding.world).sqrt()


def _sum_of_squares(sharding: Placements, parts: Flat) -> Flat:
    totals = _all_reduce(_squares(sharding, parts), sharding.world)
    return {path: total.to(parts[path].dtype) for path, total in zip(sorted(parts), totals.unbind())}


def _squares(sharding: Placements, parts: Flat) -> Float[Tensor, " leaves"]:
    """Return this rank's term of each leaf's sum of squares, in path order; a copy that does not count adds exactly 0.

    Multiplying by 0 instead would turn a NaN into NaN.
    """

    def term(path: Path, part: Tensor) -> Tensor:
        return squared_norm(part) if _counts(sharding, path) else part.new_zeros((), dtype=torch.float64)

    return torch.stack([term(path, parts[path]) for path in sorted(parts)])


def _counts(sharding: Placements, path: Path) -> bool:
    """Return True if this rank is the first of those that hold the same shard."""
    sharded = {axis.name for axis, _ in _leaf(sharding, path).sharded_dims}
    return all(axis.rank == 0 for axis in sharding.axes if axis.name not in sharded)


def _mean(sharding: Placements, parts: Flat, dim: int, of: Callable[[Tensor], Tensor]) -> Flat:
    """Return ``of(full leaf).mean(dim, keepdim=True)`` for matrices, and ``of(part)`` for anything else."""
    # The sum of a shard without rows is 0; its mean would be NaN.
    sums = {path: of(parts[path]).sum(dim, keepdim=True) for path in sorted(parts) if parts[path].ndim > 1}
    for axis in sharding.axes:
        sums |= _sum_over({path: s for path, s in sums.items() if _is_sharded(sharding, path, axis, dim)}, axis)
    return {
        path: sums[path] / _leaf(sharding, path).shape[dim] if path in sums else of(part)
        for path, part in parts.items()
    }


def _is_sharded(sharding: Placements, path: Path, by: Axis, dim: int) -> bool:
    leaf = _leaf(sharding, path)
    return any(axis.name == by.name and sharded - len(leaf.shape) == dim for axis, sharded in leaf.sharded_dims)


def _sum_over(flat: Flat, axis: Axis) -> Flat:
    """Sum every leaf over the ranks of ``axis`` in one float64 collective; no collective if there are no leaves."""
    if not flat:
        return {}
    bucket = torch.cat([leaf.to(torch.float64).flatten() for leaf in flat.values()])
    sums = _all_reduce(bucket, axis).split([leaf.numel() for leaf in flat.values()])
    return {path: total.view(leaf.shape).to(leaf.dtype) for (path, leaf), total in zip(flat.items(), sums)}


def _all_reduce(x: Tensor, axis: Axis) -> Tensor:
    return collectives.wait(collectives.all_reduce(x, axis))


def _leaf(sharding: Placements, path: Path) -> Leaf:
    if path not in sharding.leaves:
        known = list(sharding.leaves)[:4]
        raise FdpError(
            f"{path}: expected the path of a leaf of the sharding ({', '.join(known)}, ...), got an unknown path; "
            "reductions take flat dictionaries {path: shard}, see fdp.tree.flatten"
        )
    return sharding.leaves[path]
