"""Sharding: which part of every leaf this rank holds, and how a block's whole weights are made from the parts.

A leaf of shape (n, ...) is cut along dim 0 into chunks of ``ceil(n / size)`` rows over the axis ``shard``, the last
ones shorter or empty, as DTensor does; over ``replicate`` it is repeated. The leaves of one block travel together: one
gather, one reduce-scatter.

    ZeRO-0   parameters whole on every rank;   sums all-reduced
    ZeRO-2   parameters and state in parts;    gathered once per step, sums reduce-scattered      2 units of traffic
    ZeRO-3   the same;  gathered for the forward and again for the backward                        3 units of traffic

Rajbhandari et al. 2020, arXiv 1910.02054.

    >>> sharding = make_sharding(model, mesh, zero=Zero.THREE)
    >>> params = init_params(model, key, sharding)                    # DTensors; only this rank's part is ever drawn
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fdp import collectives, keys, tree
from fdp.collectives import Axis
from fdp.init import Window
from fdp.model import Model
from fdp.types import Flat, Key, Path, Place, Tree


class Zero(Enum):
    """How much is cut into parts; the value is the stage."""

    NONE = 0
    TWO = 2
    THREE = 3


class Sharding(NamedTuple):
    """The static plan of a sharded run."""

    mesh: DeviceMesh
    zero: Zero
    replicate: Axis
    shard: Axis
    shapes: dict[Path, tuple[int, ...]]

    @property
    def ranks(self) -> int:
        """Ranks that hold different samples."""
        return self.replicate.size * self.shard.size

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.replicate.rank * self.shard.size + self.shard.rank


def make_sharding(model: Model, mesh: DeviceMesh, *, zero: Zero) -> Sharding:
    """Every leaf of ``model`` in its place on ``mesh``."""
    shapes = {path: leaf.shape for path, leaf in model.leaves.items()}
    return Sharding(mesh, zero, collectives.axis_of(mesh, "replicate"), collectives.axis_of(mesh, "shard"), shapes)


def is_cut(sharding: Sharding, path: Path) -> bool:
    """Whether the ranks of ``shard`` hold different parts of the leaf. A scalar cannot be cut."""
    return sharding.zero is not Zero.NONE and sharding.shard.size > 1 and sharding.shapes[path] != ()


def window(sharding: Sharding, path: Path) -> Window:
    """The part of a leaf that this rank holds: (start, length) per dim."""
    shape = sharding.shapes[path]
    if not is_cut(sharding, path):
        return tuple((0, n) for n in shape)
    chunk = _chunk(shape[0], sharding.shard.size)
    start = min(sharding.shard.rank * chunk, shape[0])
    return ((start, min(chunk, shape[0] - start)), *((0, n) for n in shape[1:]))


def places(sharding: Sharding) -> dict[Path, Place]:
    """Where this rank's part of every leaf sits."""
    return {path: Place(shape, window(sharding, path)) for path, shape in sharding.shapes.items()}


def init_params(model: Model, key: Key, sharding: Sharding, *, dtype: torch.dtype = torch.float32) -> Tree:
    """The parameters of ``model.init(key)`` as DTensors; each rank draws its own part and nothing else."""
    local = {
        path: leaf.init(keys.fold_in(key, path), leaf.shape, dtype=dtype, window=window(sharding, path))
        for path, leaf in model.leaves.items()
    }
    return tree.nest({path: as_dtensor(leaf, path, sharding) for path, leaf in local.items()})


def as_dtensor(local: Tensor, path: Path, sharding: Sharding) -> DTensor:
    """This rank's part as a DTensor of the whole leaf."""
    shape = torch.Size(sharding.shapes[path])
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    placements: tuple[Placement, Placement] = (Replicate(), Shard(0) if is_cut(sharding, path) else Replicate())
    return DTensor.from_local(local, sharding.mesh, placements, run_check=False, shape=shape, stride=stride)


def localize(state: Tree) -> Tree:
    """Every DTensor of a tree as this rank's plain part; what is not a DTensor stays."""
    return tree.map(lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf, state)


def globalize_state(state: Tree, sharding: Sharding) -> Tree:
    """Optimizer state as DTensors wherever a leaf of it is shaped and named like this rank's part of a parameter."""
    flat = {}
    for name, leaf in tree.flatten(state).items():
        path = next((p for p in sharding.shapes if name == p or name.endswith(f".{p}")), None)
        like = path is not None and tuple(leaf.shape) == tuple(length for _, length in window(sharding, path))
        flat[name] = as_dtensor(leaf, path, sharding) if like and path is not None else leaf
    return tree.unflatten(state, flat)


def globalize(parts: Tree, like: Tree) -> Tree:
    """The inverse: parts become DTensors wherever ``like``, a tree of the same structure, has one."""

    def wrap(part: Tensor, old: Tensor) -> Tensor:
        if not isinstance(old, DTensor):
            return part
        return DTensor.from_local(
            part, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
        )

    return tree.map(wrap, parts, like)


class Pending(NamedTuple):
    """A block's weights on their way: those that are whole already, and the bucket of all ranks' parts of the rest."""

    whole: Flat
    cut: tuple[Path, ...]
    bucket: Tensor | None


def start_gather(
    sharding: Sharding | None, paths: Sequence[Path], parts: Flat, *, dtype: torch.dtype, token: Tree
) -> Pending:
    """Begin to make the whole leaves ``paths`` in the compute dtype; one collective for all of them.

    The cast comes first, so that what travels is of the compute dtype. ``token`` is an activation that must exist
    before the gather may start: it keeps the gather at its place in a compiled graph.
    """
    local = {path: parts[path].to(dtype) for path in paths}
    cut = tuple(path for path in local if sharding is not None and is_cut(sharding, path))
    whole = {path: leaf for path, leaf in local.items() if path not in cut}
    if sharding is None or not cut:
        return Pending(whole, (), None)
    bucket = torch.cat([_padded(local[path], _part_size(path, sharding)) for path in cut])
    tokens = [leaf for leaf in tree.leaves(token) if isinstance(leaf, Tensor)]
    bucket = collectives.after(bucket, tokens[0]) if tokens else bucket
    return Pending(whole, cut, collectives.all_gather(bucket, sharding.shard))


def finish_gather(sharding: Sharding | None, pending: Pending) -> Flat:
    """The whole leaves, once they have arrived."""
    if sharding is None or pending.bucket is None:
        return pending.whole
    bucket = collectives.wait(pending.bucket).view(sharding.shard.size, -1)
    arrived = {}
    for path, part in zip(pending.cut, bucket.split([_part_size(path, sharding) for path in pending.cut], dim=1)):
        shape = sharding.shapes[path]
        arrived[path] = part.reshape(-1)[: math.prod(shape)].view(shape)
    return pending.whole | arrived


def reduce_scatter(sharding: Sharding | None, sums: Flat) -> Flat:
    """This rank's part of the **sum** over all ranks with different samples, for the leaves of one block.

    One reduce-scatter over ``shard`` for the leaves that are cut, an all-reduce for those that are not, and an
    all-reduce over ``replicate`` if there is such an axis. On one device: the sums themselves.
    """
    if sharding is None:
        return sums
    cut = [path for path in sums if is_cut(sharding, path)]
    whole = [path for path in sums if path not in cut]
    local: Flat = {}
    if cut:
        ranks = sharding.shard.size
        columns = [_padded(sums[path], ranks * _part_size(path, sharding)).view(ranks, -1) for path in cut]
        reduced = collectives.wait(collectives.reduce_scatter(torch.cat(columns, dim=1).flatten(), sharding.shard))
        reduced = _all_reduced(reduced, (sharding.replicate,))
        for path, part in zip(cut, reduced.split([_part_size(path, sharding) for path in cut])):
            size = tuple(length for _, length in window(sharding, path))
            local[path] = part[: math.prod(size)].view(size)
    if whole:
        reduced = _all_reduced(
            torch.cat([sums[path].flatten() for path in whole]), (sharding.shard, sharding.replicate)
        )
        for path, part in zip(whole, reduced.split([sums[path].numel() for path in whole])):
            local[path] = part.view(sums[path].shape)
    return {path: local[path] for path in sums}


def sum_over_samples(sharding: Sharding | None, x: Tensor) -> Tensor:
    """The sum of ``x`` over all ranks that hold different samples."""
    return x if sharding is None else _all_reduced(x, (sharding.shard, sharding.replicate))


def gather_samples(sharding: Sharding | None, x: Tensor) -> Tensor:
    """Per-sample values ``(microbatches, this rank's samples)`` as ``(microbatches, all samples)``, in global order."""
    if sharding is None or sharding.ranks == 1:
        return x
    columns = x.t().contiguous()
    for axis in (sharding.shard, sharding.replicate):
        if axis.size > 1:
            shape = (axis.size * columns.shape[0], columns.shape[1])
            columns = collectives.wait(collectives.all_gather(columns.flatten(), axis)).view(shape)
    return columns.t()


def _all_reduced(x: Tensor, axes: Sequence[Axis]) -> Tensor:
    for axis in axes:
        x = collectives.wait(collectives.all_reduce(x, axis)) if axis.size > 1 else x
    return x


def _chunk(rows: int, ranks: int) -> int:
    return -(-rows // ranks)


def _part_size(path: Path, sharding: Sharding) -> int:
    """Elements of a full part: every rank sends as many, the last ones with padding."""
    shape = sharding.shapes[path]
    return _chunk(shape[0], sharding.shard.size) * math.prod(shape[1:])


def _padded(x: Tensor, size: int) -> Tensor:
    return torch.cat([x.flatten(), x.new_zeros(size - x.numel())]) if x.numel() < size else x.flatten()
