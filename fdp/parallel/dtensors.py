"""DTensors and the plain shards inside them: wrap, unwrap, locate, and gather.

>>> leaf = as_dtensor(shard, "head.weight", sharding)
>>> local_shard(leaf), full_tensor(leaf)               # this rank's part, all of it (a collective)
>>> globalize(localize(params), like=params)           # whole trees, there and back
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fdp import tree
from fdp.parallel.collectives import all_gather, axis_of, wait
from fdp.parallel.mesh import AXES
from fdp.parallel.sharding import ShardedDims, Sharding
from fdp.types import Axis, FdpError, Path, ShardWindow, Tree


def as_dtensor(local: Tensor, path: Path, sharding: Sharding) -> DTensor:
    """Wrap this rank's shard as a DTensor with the global shape of the leaf at ``path``."""
    leaf = sharding.leaves[path]
    return _wrap(local, leaf.shape, leaf.sharded_dims, sharding)


def shard_leaf(full: Tensor, path: Path, sharding: Sharding) -> DTensor:
    """Copy this rank's shard out of a full leaf, as a DTensor."""
    leaf = sharding.leaves[path]
    if tuple(full.shape) != leaf.shape:
        raise FdpError(f"{path}: expected shape {leaf.shape}, got {tuple(full.shape)}")
    for dim, (start, length) in enumerate(leaf.window):
        full = full.narrow(dim, start, length)
    return as_dtensor(full.clone(memory_format=torch.contiguous_format), path, sharding)


def shard_like(leaf: Tensor, part: Tensor) -> Tensor:
    """Return ``part`` as this rank's shard of a DTensor sharded like ``leaf``, without moving it to another device.

    ``DTensor.from_local`` would move it to the device of the mesh. If ``leaf`` is a plain tensor, so is the result.
    """
    return DTensor(part, leaf._spec, requires_grad=False) if isinstance(leaf, DTensor) else part


def local_shard(leaf: Tensor) -> Tensor:
    """Return this rank's shard of a leaf, detached; a plain tensor is its own shard."""
    return (leaf.to_local() if isinstance(leaf, DTensor) else leaf).detach()


def shard_window(leaf: Tensor) -> ShardWindow:
    """Return the position of this rank's shard in the leaf; a plain tensor is the full leaf."""
    if not isinstance(leaf, DTensor):
        return ShardWindow(tuple(leaf.shape), tuple((0, n) for n in leaf.shape))
    sizes, starts = compute_local_shape_and_global_offset(leaf.shape, leaf.device_mesh, leaf.placements)
    return ShardWindow(tuple(leaf.shape), tuple(zip(starts, sizes)))


def full_tensor(leaf: Tensor) -> Tensor:
    """Gather all of a leaf on every rank, by fdp's own :func:`fdp.parallel.collectives.all_gather`."""
    if not isinstance(leaf, DTensor):
        return leaf
    part, mesh, shape, splits = local_shard(leaf), leaf.device_mesh, list(leaf.shape), []
    for axis, placement in zip(mesh.mesh_dim_names or (), leaf.placements):
        if isinstance(placement, Shard):
            splits.append((axis_of(mesh, axis), placement.dim, shape[placement.dim]))
            shape[placement.dim] = _local_length(shape[placement.dim], splits[-1][0])
        elif not isinstance(placement, Replicate):
            raise FdpError(f"expected a leaf that is sharded or replicated along {axis}, got {placement}")
    for axis, dim, length in reversed(splits):
        part = part.movedim(dim, 0)
        padded = part.new_zeros((-(-length // axis.size), *part.shape[1:]))
        padded[: len(part)] = part
        part = wait(all_gather(padded, axis))[:length].movedim(0, dim)
    return part


def localize(state: Tree) -> Tree:
    """Replace every DTensor of a tree by this rank's plain shard."""
    return tree.map(lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf, state)


def globalize(parts: Tree, like: Tree) -> Tree:
    """Undo ``localize``: shards become DTensors wherever ``like``, a tree of the same structure, has one."""

    def wrap(part: Tensor, old: Tensor) -> Tensor:
        if not isinstance(old, DTensor):
            return part
        return DTensor.from_local(
            part, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
        )

    return tree.map(wrap, parts, like)


def globalize_state(state: Tree, shapes: Tree, sharding: Sharding) -> Tree:
    """Wrap the optimizer state of every parameter as DTensors; ``shapes`` has the global shapes.

    A dim as long as the parameter's is sharded like the parameter's; a dim that was reduced to 1 is not.
    """
    flat = {}
    global_shapes = tree.flatten(shapes)
    for name, part in tree.flatten(state).items():
        owners = [path for path in sharding.leaves if name == path or name.endswith(f".{path}")]
        shape = tuple(global_shapes[name].shape)
        if not owners or len(shape) != len(sharding.leaves[max(owners, key=len)].shape) or math.prod(shape) == 0:
            flat[name] = part
            continue
        leaf = sharding.leaves[max(owners, key=len)]
        dims = tuple((axis, dim) for axis, dim in leaf.sharded_dims if shape[dim] == leaf.shape[dim])
        flat[name] = _wrap(part, shape, dims, sharding)
    return tree.unflatten(state, flat)


def _wrap(local: Tensor, shape: tuple[int, ...], sharded_dims: ShardedDims, sharding: Sharding) -> DTensor:
    dims = {axis.name: dim for axis, dim in sharded_dims}
    placements: list[Placement] = [Shard(dims[name]) if name in dims else Replicate() for name in AXES]
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    mesh = sharding.host if local.device.type == "cpu" else sharding.mesh
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _local_length(length: int, axis: Axis) -> int:
    """Return this rank's share of ``length``: even chunks, of which the last ones may be short or empty."""
    chunk = -(-length // axis.size)
    return max(0, min(chunk, length - axis.rank * chunk))
