"""The static sharding plan: which shard of every leaf this rank holds, decided before any tensor exists.

A leaf of shape (n, ...) is split first over ``tensor`` along the dim its model names, then over ``shard`` along dim 0
into chunks of ``ceil(n / size)`` rows, the last ones shorter or empty, as DTensor does. It is repeated over
``replicate``.

    ZeRO-0   parameters replicated;            sums all-reduced
    ZeRO-2   parameters and state sharded;     gathered once per step, sums reduce-scattered      2 units of traffic
    ZeRO-3   the same;  gathered for the forward and again for the backward                        3 units of traffic

Rajbhandari et al. 2020, arXiv 1910.02054.

    >>> sharding = make_sharding(model, mesh, zero=Zero.THREE)
    >>> params = init_params(model, key, sharding)                   # DTensors; each rank draws its own shard only
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fdp import tree
from fdp.keys import Window
from fdp.model import LeafSpec, Model
from fdp.parallel import collectives
from fdp.parallel.mesh import AXES, on_device
from fdp.types import Axis, Batch, BatchShare, FdpError, Path, ShardWindow, TrainState, Tree

ShardedDims: TypeAlias = tuple[tuple[Axis, int], ...]
"""The (mesh axis, tensor dim) pairs that split a leaf, in the order in which they are applied."""


class Zero(Enum):
    """The ZeRO stage: how much of the training state is sharded."""

    NONE = 0
    TWO = 2
    THREE = 3


class Data(Enum):
    """The samples of ranks along the data axes: different ones, or the same on all."""

    SPLIT = "split"
    REPLICATED = "replicated"


class Reduce(Enum):
    """The time at which gradient sums are reduced: once per step, or block by block in every microbatch."""

    PER_STEP = "step"
    PER_MICROBATCH = "microbatch"


class LeafPlan(NamedTuple):
    """The plan of one leaf: its global shape, the axes that split it, and this rank's shard.

    ``gathered_shape`` is the shape a block computes with, after the gather over ``shard``. ``window`` is this rank's
    shard within the leaf. ``padded_numel`` is the number of elements that every rank sends for it, padding included.
    The first of ``blocks`` owns the leaf; a leaf with several blocks is tied.
    """

    shape: tuple[int, ...]
    sharded_dims: ShardedDims
    gathered_shape: tuple[int, ...]
    window: Window
    padded_numel: int
    blocks: tuple[str, ...]
    frozen: bool

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of this rank's shard."""
        return tuple(length for _, length in self.window)

    def is_sharded_over(self, axis: str) -> bool:
        """Return True if the mesh axis named ``axis`` splits this leaf."""
        return any(by.name == axis for by, _ in self.sharded_dims)


class Sharding(NamedTuple):
    """The static plan of a sharded run.

    ``host`` is the mesh of the same ranks for tensors on the CPU. If ``reduce_dtype`` is None, sums are reduced in
    the dtype they were computed in.
    """

    mesh: DeviceMesh
    host: DeviceMesh
    zero: Zero
    replicate: Axis
    tensor: Axis
    shard: Axis
    world: Axis
    leaves: dict[Path, LeafPlan]
    data: Data
    reduce: Reduce
    reduce_dtype: torch.dtype | None

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes with more than one rank."""
        return tuple(axis for axis in (self.replicate, self.tensor, self.shard) if axis.size > 1)

    @property
    def ranks(self) -> int:
        """The number of different shares of a batch."""
        return self.replicate.size * self.shard.size if self.data is Data.SPLIT else 1

    @property
    def rank(self) -> int:
        """The index of this rank's share of a batch."""
        return self.replicate.rank * self.shard.size + self.shard.rank if self.data is Data.SPLIT else 0


def make_sharding(
    model: Model,
    mesh: DeviceMesh,
    *,
    zero: Zero,
    data: Data = Data.SPLIT,
    reduce: Reduce | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Sharding:
    """Plan the shards of every leaf of ``model`` on ``mesh``.

    ``reduce`` defaults to once per step, and to every microbatch for ZeRO-3, where the full gradients need not fit.
    Sums of private gradients are float64, unless ``Memory.sum_dtype`` says otherwise. Reducing them in float32 halves
    the traffic and rounds them; the rounding is part of the sensitivity (``fdp.privacy.sum_rounding``).

    Guarantees:
      - every leaf has exactly one plan: a leaf that no block uses, or a block's leaf that the model does not have,
        is an error that names it.
    """
    if not model.leaves:
        raise FdpError(f"{model.name}: expected a model with parameters to shard, got one without")
    if mesh.mesh_dim_names != AXES:
        raise FdpError(f"mesh: expected the axes {AXES}, got {mesh.mesh_dim_names}; use make_mesh")
    replicate, tensor, shard = (collectives.axis_of(mesh, name) for name in AXES)
    _check_tensor_form(model, tensor)
    blocks = _blocks_by_leaf(model)
    by_shard = None if zero is Zero.NONE else shard
    leaves = {
        path: _plan_leaf(path, spec, tensor, shard, by_shard, blocks[path], frozen=path in model.frozen)
        for path, spec in model.leaves.items()
    }
    world = dist.group.WORLD
    everyone = Axis("world", dist.get_world_size(), dist.get_rank(), world.group_name if world else "")
    when = reduce or (Reduce.PER_MICROBATCH if zero is Zero.THREE else Reduce.PER_STEP)
    return Sharding(
        mesh, on_device(mesh, "cpu"), zero, replicate, tensor, shard, everyone, leaves, data, when, reduce_dtype
    )


def over_tensor_axis(model: Model, mesh: DeviceMesh) -> Model:
    """Return the model with its layers split over the mesh's tensor axis, or itself if that axis has one rank."""
    axis = collectives.axis_of(mesh, "tensor")
    if axis.size == 1:
        return model
    if model.parallel is None:
        raise FdpError(
            f"{model.name}: has no tensor-parallel form, like all adapters and models from elsewhere; expected a "
            f"mesh with tensor=1, got {axis.size}; put these ranks on the axis 'shard', which splits any model"
        )
    return model.parallel(axis)


def gathered_view(sharding: Sharding) -> Sharding:
    """Return the plan after a gather over ``shard``: every leaf is split over ``tensor`` only."""
    leaves = {}
    for path, leaf in sharding.leaves.items():
        dims = tuple((axis, dim) for axis, dim in leaf.sharded_dims if axis.name != "shard")
        leaves[path] = leaf._replace(sharded_dims=dims, window=_window(leaf.shape, dims))
    return sharding._replace(leaves=leaves)


def abstract_params(model: Model, sharding: Sharding | None, *, device: torch.device | str = "cpu") -> Tree:
    """Return parameters without memory, in the shapes that blocks compute with, for ``make_plan``."""
    shapes = {
        path: leaf.shape if sharding is None else sharding.leaves[path].gathered_shape
        for path, leaf in model.leaves.items()
    }
    return tree.nest({path: torch.empty((), device=device).expand(shape) for path, shape in shapes.items()})


def shard_windows(sharding: Sharding) -> dict[Path, ShardWindow]:
    """Return the position of this rank's shard in every leaf."""
    return {path: ShardWindow(leaf.shape, leaf.window) for path, leaf in sharding.leaves.items()}


def check_placement(state: TrainState, batch: Batch, sharding: Sharding | None) -> None:
    """Refuse a state that is not sharded as the step expects, and another rank's samples."""
    for path, leaf in tree.flatten(state.params).items():
        if isinstance(leaf, DTensor) and sharding is None:
            raise FdpError(
                f"{path}: expected a plain tensor, since the step has no sharding and every rank would clip and noise "
                f"on its own, got a DTensor; give make_train_step the sharding of the state"
            )
        part = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if sharding is not None and tuple(part.shape) != sharding.leaves[path].local_shape:
            raise FdpError(
                f"{path}: expected a shard of shape {sharding.leaves[path].local_shape}, got {tuple(part.shape)}; "
                f"give init_state and make_train_step the same sharding"
            )
    mine = BatchShare(0, 1) if sharding is None else BatchShare(sharding.rank, sharding.ranks)
    if batch.share != mine:
        raise FdpError(
            f"batch: expected the share of rank {mine.rank} of {mine.ranks}, got that of rank {batch.share.rank} of "
            f"{batch.share.ranks}; call sample_batch(..., rank=sharding.rank, ranks=sharding.ranks)"
        )


def _check_tensor_form(model: Model, tensor: Axis) -> None:
    """Refuse a model whose layers are not split over the mesh's tensor axis although some of its leaves are."""
    splits = any(leaf.tensor_dim is not None for leaf in model.leaves.values())
    if tensor.size > 1 and model.tensor != tensor and splits:
        raise FdpError(
            f"{model.name}: expected the model with its layers split over the {tensor.size} ranks of the mesh's "
            f"tensor axis, got one split over {model.tensor}; call over_tensor_axis(model, mesh) first"
        )


def _blocks_by_leaf(model: Model) -> dict[Path, tuple[str, ...]]:
    """Return the names of the blocks that use each leaf; refuse a leaf without a block, or a block's unknown leaf."""
    blocks: dict[Path, list[str]] = {path: [] for path in model.leaves}
    for block in model.blocks:
        for path in dict.fromkeys(tree.leaves(block.params)):
            if path not in blocks:
                raise FdpError(f"{model.name}: block {block.name} uses {path!r}, which is not a leaf of the model")
            blocks[path].append(block.name)
    if orphans := [path for path, names in blocks.items() if not names]:
        raise FdpError(f"{model.name}: no block uses {orphans}; name them in a block or remove them")
    return {path: tuple(names) for path, names in blocks.items()}


def _plan_leaf(
    path: Path,
    spec: LeafSpec,
    tensor: Axis,
    shard: Axis,
    by_shard: Axis | None,
    blocks: tuple[str, ...],
    *,
    frozen: bool,
) -> LeafPlan:
    """Split one leaf over ``tensor``, then over ``by_shard`` unless that is None."""
    shape = tuple(spec.shape)
    dims: list[tuple[Axis, int]] = []
    if spec.tensor_dim is not None and tensor.size > 1:
        if shape[spec.tensor_dim] % tensor.size:
            raise FdpError(
                f"{path}: expected dim {spec.tensor_dim} of {shape} to be a multiple of the {tensor.size} ranks "
                f"of the tensor axis; use another mesh"
            )
        dims.append((tensor, spec.tensor_dim))
    gathered = tuple(length for _, length in _window(shape, dims))
    if by_shard is not None and by_shard.size > 1 and gathered and gathered[0] > 1:
        dims.append((by_shard, 0))
    padded = math.prod((_chunk(gathered[0], shard.size), *gathered[1:])) if gathered else 1
    return LeafPlan(shape, tuple(dims), gathered, _window(shape, dims), padded, blocks, frozen)


def _window(shape: tuple[int, ...], sharded_dims: Sequence[tuple[Axis, int]]) -> Window:
    """Return (start, length) per dim of this rank's shard, splitting by one axis after the other."""
    window = [(0, n) for n in shape]
    for axis, dim in sharded_dims:
        start, length = window[dim]
        chunk = _chunk(length, axis.size)
        first = min(axis.rank * chunk, length)
        window[dim] = (start + first, min(chunk, length - first))
    return tuple(window)


def _chunk(rows: int, ranks: int) -> int:
    return -(-rows // ranks)
