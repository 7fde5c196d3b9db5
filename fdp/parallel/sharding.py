"""Sharding: which part of every leaf this rank holds, decided once, before anything exists.

A leaf of shape (n, ...) is cut first over ``tensor`` along the dim its model names, then over ``shard`` along dim 0
into chunks of ``ceil(n / size)`` rows, the last ones shorter or empty, as DTensor does; over ``replicate`` it is
repeated.

    ZeRO-0   parameters whole on every rank;   sums all-reduced
    ZeRO-2   parameters and state in parts;    gathered once per step, sums reduce-scattered      2 units of traffic
    ZeRO-3   the same;  gathered for the forward and again for the backward                        3 units of traffic

Rajbhandari et al. 2020, arXiv 1910.02054.

    >>> sharding = make_sharding(model, mesh, zero=Zero.THREE)
    >>> params = init_params(model, key, sharding)                    # DTensors; only this rank's part is ever drawn
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fdp import keys, tree
from fdp.init import Init, Window
from fdp.model import Model
from fdp.parallel import collectives
from fdp.parallel.mesh import AXES, on_device
from fdp.types import Axis, Batch, FdpError, Key, Path, Place, Share, TrainState, Tree


class Zero(Enum):
    """How much is cut into parts; the value is the stage."""

    NONE = 0
    TWO = 2
    THREE = 3


class Data(Enum):
    """Whether ranks along the data axes hold different samples, or all the same ones."""

    SPLIT = "split"
    REPLICATED = "replicated"


class Reduce(Enum):
    """When sums of gradients travel: once per step, held whole until then, or block by block in every microbatch."""

    PER_STEP = "step"
    PER_MICROBATCH = "microbatch"


class LeafPlan(NamedTuple):
    """One leaf's place: its shape, the (axis, dim) pairs that cut it, and what this rank has of it.

    ``whole`` is the shape a block computes with, after a gather over ``shard``; ``window`` is this rank's part of the
    leaf; ``padded`` the elements that every rank sends for it, the last ones with padding. The first of ``blocks``
    owns the leaf; it is tied to the others.
    """

    shape: tuple[int, ...]
    cuts: tuple[tuple[Axis, int], ...]
    whole: tuple[int, ...]
    window: Window
    padded: int
    blocks: tuple[str, ...]
    frozen: bool

    @property
    def part(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return tuple(length for _, length in self.window)

    def cut_by(self, axis: str) -> bool:
        return any(by.name == axis for by, _ in self.cuts)


class Sharding(NamedTuple):
    """The static plan of a sharded run. ``reduce_dtype`` None: sums travel in the dtype they are made in.

    ``host`` is the mesh of the same ranks for what is kept on the CPU.
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
        """The axes along which there is more than one rank."""
        return tuple(axis for axis in (self.replicate, self.tensor, self.shard) if axis.size > 1)

    @property
    def ranks(self) -> int:
        """How many different shares of a batch there are."""
        return self.replicate.size * self.shard.size if self.data is Data.SPLIT else 1

    @property
    def rank(self) -> int:
        """Which of them is this rank's."""
        return self.replicate.rank * self.shard.size + self.shard.rank if self.data is Data.SPLIT else 0


def reduce_slack(sharding: Sharding | None, expected_batch_size: float) -> float:
    """Bound, as a share of C, how much further one sample can move a private sum that travels in less than float64.

    Rounding each of R ranks' sums, and adding them up, errs by at most ``R u B C`` for B samples, with one of them more
    or less twice that: ``2 (R + 1) u B``, u = 2^-24 in float32. B is taken as ``expected + 10 sqrt(expected) + 100``,
    a public number that a Poisson draw exceeds with probability below 1e-22.
    """
    if sharding is None or sharding.reduce_dtype in (None, torch.float64):
        return 0.0
    most = expected_batch_size + 10 * math.sqrt(expected_batch_size) + 100
    return 2 * (sharding.ranks + 1) * torch.finfo(sharding.reduce_dtype).eps / 2 * most


def make_sharding(
    model: Model,
    mesh: DeviceMesh,
    *,
    zero: Zero,
    data: Data = Data.SPLIT,
    reduce: Reduce | None = None,
    reduce_dtype: torch.dtype | None = None,
) -> Sharding:
    """Every leaf of ``model`` in its place on ``mesh``.

    ``reduce`` defaults to once per step, for ZeRO-3 to every microbatch, where no whole gradient fits. Sums of private
    gradients are float64; sending them in a narrower ``reduce_dtype`` halves the traffic and rounds them, which
    :func:`reduce_slack` bounds.

    Guarantees:
      - every leaf is in exactly one place: a leaf that no block uses, or a block's leaf that the model does not have,
        is an error that names it.
    """
    if not model.leaves:
        raise FdpError(f"{model.name}: expected a model with parameters to shard, got one without")
    if mesh.mesh_dim_names != AXES:
        raise FdpError(f"mesh: expected the axes {AXES}, got {mesh.mesh_dim_names}; use make_mesh")
    replicate, tensor, shard = (collectives.axis_of(mesh, name) for name in AXES)
    if (
        tensor.size > 1
        and model.tensor != tensor
        and any(leaf.tensor_dim is not None for leaf in model.leaves.values())
    ):
        raise FdpError(
            f"{model.name}: expected the model with its layers cut over the {tensor.size} ranks of the mesh's tensor "
            f"axis, got one cut over {model.tensor}; call over_tensor_axis(model, mesh) first"
        )
    users: dict[Path, list[str]] = {path: [] for path in model.leaves}
    for block in model.blocks:
        for path in dict.fromkeys(tree.leaves(block.params)):
            if path not in users:
                raise FdpError(f"{model.name}: block {block.name} uses {path!r}, which is not a leaf of the model")
            users[path].append(block.name)
    if orphans := [path for path, blocks in users.items() if not blocks]:
        raise FdpError(f"{model.name}: no block uses {orphans}; name them in a block or remove them")
    leaves = {}
    for path, spec in model.leaves.items():
        shape = tuple(spec.shape)
        cuts = []
        if spec.tensor_dim is not None and tensor.size > 1:
            if shape[spec.tensor_dim] % tensor.size:
                raise FdpError(
                    f"{path}: expected dim {spec.tensor_dim} of {shape} to be a multiple of the {tensor.size} ranks "
                    f"of the tensor axis; use another mesh"
                )
            cuts.append((tensor, spec.tensor_dim))
        whole = _whole(shape, cuts)
        if zero is not Zero.NONE and shard.size > 1 and whole and whole[0] > 1:
            cuts.append((shard, 0))
        padded = math.prod((_chunk(whole[0], shard.size), *whole[1:])) if whole else 1
        leaves[path] = LeafPlan(
            shape, tuple(cuts), whole, _window(shape, cuts), padded, tuple(users[path]), path in model.frozen
        )
    world = dist.group.WORLD
    everyone = Axis("world", dist.get_world_size(), dist.get_rank(), world.group_name if world else "")
    when = reduce or (Reduce.PER_MICROBATCH if zero is Zero.THREE else Reduce.PER_STEP)
    return Sharding(
        mesh, on_device(mesh, "cpu"), zero, replicate, tensor, shard, everyone, leaves, data, when, reduce_dtype
    )


def over_tensor_axis(model: Model, mesh: DeviceMesh) -> Model:
    """The model with its layers cut over the mesh's tensor axis; itself if that axis has one rank."""
    axis = collectives.axis_of(mesh, "tensor")
    if axis.size == 1:
        return model
    if model.parallel is None:
        raise FdpError(
            f"{model.name}: has no tensor-parallel form, as adapters and models from elsewhere have none; expected a "
            f"mesh with tensor=1, got {axis.size}; put these ranks on the axis 'shard', which cuts any model"
        )
    return model.parallel(axis)


def gathered_view(sharding: Sharding) -> Sharding:
    """The same plan once the parts along ``shard`` have been gathered: every leaf cut over ``tensor`` only."""
    leaves = {}
    for path, leaf in sharding.leaves.items():
        cuts = tuple(cut for cut in leaf.cuts if cut[0].name != "shard")
        leaves[path] = leaf._replace(cuts=cuts, window=_window(leaf.shape, cuts))
    return sharding._replace(leaves=leaves)


def abstract_params(model: Model, sharding: Sharding | None, *, device: torch.device | str = "cpu") -> Tree:
    """Parameters without memory, in the shapes that blocks compute with: what ``make_plan`` needs to know."""
    shapes = {
        path: leaf.shape if sharding is None else sharding.leaves[path].whole for path, leaf in model.leaves.items()
    }
    return tree.nest({path: torch.empty((), device=device).expand(shape) for path, shape in shapes.items()})


def places(sharding: Sharding) -> dict[Path, Place]:
    """Where this rank's part of every leaf sits."""
    return {path: Place(leaf.shape, leaf.window) for path, leaf in sharding.leaves.items()}


def drawn_params(model: Model, sharding: Sharding | None, key: Key) -> Tree:
    """The parameters that ``model`` draws from ``key``: whole, or this rank's parts as DTensors."""
    return model.init(key) if sharding is None else init_params(model, key, sharding)


def init_params(
    model: Model,
    key: Key,
    sharding: Sharding,
    *,
    dtype: torch.dtype = torch.float32,
    inits: Mapping[Path, Init] | None = None,
) -> Tree:
    """The parameters of ``model.init(key)`` as DTensors; each rank draws its own part and nothing else.

    ``inits`` replaces the initialiser of the leaves it names.

    Guarantees:
      - keys that differ between ranks, from which samples would be drawn twice and noise not be shared, are refused.
    """
    _check_shared(key, sharding)
    own = {} if inits is None else dict(inits)
    if unknown := sorted(set(own) - set(model.leaves)):
        raise FdpError(f"inits: expected paths of leaves of {model.name}, got {unknown}")
    flat = {}
    for path, leaf in model.leaves.items():
        window = sharding.leaves[path].window
        local = own.get(path, leaf.init)(keys.fold_in(key, path), leaf.shape, dtype=dtype, window=window)
        flat[path] = as_dtensor(local, path, sharding)
    return tree.nest(flat)


def shared_key(key: Key, sharding: Sharding) -> Key:
    """The first rank's key, on every rank. A key from the system differs from process to process."""
    return collectives.wait(collectives.broadcast(key, sharding.world))


def _check_shared(key: Key, sharding: Sharding) -> None:
    differs = (shared_key(key, sharding) != key).any().long().reshape(1)
    if bool(collectives.wait(collectives.all_reduce(differs, sharding.world))):
        raise FdpError("key: expected the same key on every rank, got different ones; use shared_key(key, sharding)")


def cut_out(whole: Tensor, path: Path, sharding: Sharding) -> DTensor:
    """This rank's part of a whole leaf, copied out of it, as a DTensor."""
    leaf = sharding.leaves[path]
    if tuple(whole.shape) != leaf.shape:
        raise FdpError(f"{path}: expected shape {leaf.shape}, got {tuple(whole.shape)}")
    for dim, (start, length) in enumerate(leaf.window):
        whole = whole.narrow(dim, start, length)
    return as_dtensor(whole.clone(memory_format=torch.contiguous_format), path, sharding)


def as_dtensor(local: Tensor, path: Path, sharding: Sharding) -> DTensor:
    """This rank's part as a DTensor of the whole leaf."""
    leaf = sharding.leaves[path]
    return _wrap(local, leaf.shape, leaf.cuts, sharding)


def localize(state: Tree) -> Tree:
    """Every DTensor of a tree as this rank's plain part; what is not a DTensor stays."""
    return tree.map(lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf, state)


def globalize_state(state: Tree, shapes: Tree, sharding: Sharding) -> Tree:
    """Optimizer state as DTensors wherever a leaf of it belongs to a parameter; ``shapes`` has the global shapes.

    A dim that is as long as the parameter's is cut as the parameter's is; one that was reduced to 1 is not.
    """
    flat = {}
    wholes = tree.flatten(shapes)
    for name, part in tree.flatten(state).items():
        owners = [path for path in sharding.leaves if name == path or name.endswith(f".{path}")]
        shape = tuple(wholes[name].shape)
        if not owners or len(shape) != len(sharding.leaves[max(owners, key=len)].shape) or math.prod(shape) == 0:
            flat[name] = part
            continue
        leaf = sharding.leaves[max(owners, key=len)]
        cuts = tuple((axis, dim) for axis, dim in leaf.cuts if shape[dim] == leaf.shape[dim])
        flat[name] = _wrap(part, shape, cuts, sharding)
    return tree.unflatten(state, flat)


def check_placed(state: TrainState, batch: Batch, sharding: Sharding | None) -> None:
    """Refuse a state that is not placed as the step expects, and another rank's samples."""
    for path, leaf in tree.flatten(state.params).items():
        if isinstance(leaf, DTensor) and sharding is None:
            raise FdpError(
                f"{path}: expected a plain tensor, since the step has no sharding and every rank would clip and noise "
                f"on its own, got a DTensor; give make_train_step the sharding of the state"
            )
        part = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if sharding is not None and tuple(part.shape) != sharding.leaves[path].part:
            raise FdpError(
                f"{path}: expected a part of shape {sharding.leaves[path].part}, got {tuple(part.shape)}; give "
                f"init_state and make_train_step the same sharding"
            )
    mine = Share(0, 1) if sharding is None else Share(sharding.rank, sharding.ranks)
    if batch.share != mine:
        raise FdpError(
            f"batch: expected the share of rank {mine.rank} of {mine.ranks}, got that of rank {batch.share.rank} of "
            f"{batch.share.ranks}; call sample_batch(..., rank=sharding.rank, ranks=sharding.ranks)"
        )


def globalize(parts: Tree, like: Tree) -> Tree:
    """The inverse of ``localize``: parts become DTensors wherever ``like``, a tree of the same structure, has one."""

    def wrap(part: Tensor, old: Tensor) -> Tensor:
        if not isinstance(old, DTensor):
            return part
        return DTensor.from_local(
            part, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
        )

    return tree.map(wrap, parts, like)


def _wrap(local: Tensor, shape: tuple[int, ...], cuts: tuple[tuple[Axis, int], ...], sharding: Sharding) -> DTensor:
    dims = {axis.name: dim for axis, dim in cuts}
    placements: list[Placement] = [Shard(dims[name]) if name in dims else Replicate() for name in AXES]
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    mesh = sharding.host if local.device.type == "cpu" else sharding.mesh
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _whole(shape: tuple[int, ...], cuts: list[tuple[Axis, int]]) -> tuple[int, ...]:
    return tuple(length for _, length in _window(shape, cuts))


def _window(shape: tuple[int, ...], cuts: list[tuple[Axis, int]] | tuple[tuple[Axis, int], ...]) -> Window:
    """(start, length) per dim of this rank's part, the cuts made one after the other."""
    window = [(0, n) for n in shape]
    for axis, dim in cuts:
        start, length = window[dim]
        chunk = _chunk(length, axis.size)
        first = min(axis.rank * chunk, length)
        window[dim] = (start + first, min(chunk, length - first))
    return tuple(window)


def _chunk(rows: int, ranks: int) -> int:
    return -(-rows // ranks)
