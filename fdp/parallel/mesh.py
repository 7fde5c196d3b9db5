"""The device mesh: ranks arranged along named axes.

    replicate x tensor x shard = world size

The *data* axes, ``replicate`` and ``shard``, hold different samples; ``shard`` also splits the parameters. Ranks along
``tensor`` hold the same samples and different parts of the same layers. *Axis* always means an axis of the mesh,
*dim* a dimension of a tensor.

    >>> mesh = make_mesh({"replicate": 2, "shard": 4}, device_type="cuda", timeout=600)  # 8 ranks, started by torchrun
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fdp.types import FdpError

AXES = ("replicate", "tensor", "shard")
"""The axes in the order in which they split a dim they share: ``tensor`` first, then ``shard``, as DTensor does."""


def make_mesh(sizes: Mapping[str, int], *, device_type: str, timeout: float | None = None) -> DeviceMesh:
    """Return a mesh of all ranks with the named axes; axes left out have size 1.

    Collectives along an axis wait at most ``timeout`` seconds (None: torch's default). Neighbouring ranks, which
    are usually the best connected, lie along ``tensor``, then along ``shard``.
    """
    if unknown := sorted(set(sizes) - set(AXES)):
        raise FdpError(f"mesh: expected axes among {', '.join(sorted(AXES))}, got {', '.join(unknown)}")
    if bad := {axis: size for axis, size in sizes.items() if size < 1}:
        raise FdpError(f"mesh: expected sizes of at least 1, got {bad}")
    if not dist.is_initialized():
        raise FdpError("mesh: expected several ranks, found no process group; start with torchrun")
    replicate, tensor, shard = (sizes.get(axis, 1) for axis in AXES)
    if math.prod((replicate, tensor, shard)) != dist.get_world_size():
        raise FdpError(f"mesh: expected sizes that multiply to the {dist.get_world_size()} ranks, got {dict(sizes)}")
    ranks = torch.arange(dist.get_world_size()).view(replicate, shard, tensor).transpose(1, 2)
    groups = [_group(ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]), timeout) for dim in range(ranks.ndim)]
    return DeviceMesh.from_group(groups, device_type, ranks.contiguous(), mesh_dim_names=AXES)


def on_device(mesh: DeviceMesh, device_type: str) -> DeviceMesh:
    """Return a mesh of the same ranks and groups for tensors on another device."""
    if mesh.device_type == device_type:
        return mesh
    return DeviceMesh.from_group(mesh.get_all_groups(), device_type, mesh.mesh, mesh_dim_names=AXES)


def _group(rows: torch.Tensor, timeout: float | None) -> ProcessGroup:
    """Create a group per row of ranks and return this rank's own; DeviceMesh would create them without a timeout."""
    patience = None if timeout is None else timedelta(seconds=timeout)
    groups = [dist.new_group(row, timeout=patience) for row in rows.tolist()]
    own = next(group for group, row in zip(groups, rows.tolist()) if dist.get_rank() in row)
    assert isinstance(own, ProcessGroup)
    return own
