"""Meshes: how the ranks of a run are arranged, by name and always explicit.

    replicate x tensor x shard = world size

The *data* axes, ``replicate`` and ``shard``, hold different samples; ``shard`` also cuts the parameters. Ranks along
``tensor`` hold the same samples and different parts of the same layers. An axis is an axis of the mesh, a dim a
dimension of a tensor.

    >>> mesh = make_mesh({"replicate": 2, "shard": 4}, device_type="cuda")          # 8 ranks, started by torchrun
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fdp.types import FdpError

AXES = ("replicate", "tensor", "shard")
"""In the order in which they cut a dim that two of them share: ``tensor`` first, then ``shard``, as DTensor does."""


def make_mesh(sizes: Mapping[str, int], *, device_type: str) -> DeviceMesh:
    """A mesh of all ranks with the named axes; axes left out have size 1.

    Neighbouring ranks, which are usually the best connected, lie along ``tensor``, then along ``shard``.
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
    return DeviceMesh(device_type, ranks, mesh_dim_names=AXES)
