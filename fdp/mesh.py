"""Meshes: how the ranks of a run are arranged, by name and always explicit.

    replicate x shard x tensor = world size

The *data* axes, ``replicate`` and ``shard``, hold different samples; ``shard`` also cuts the parameters. Ranks along
``tensor`` hold the same samples. An axis is an axis of the mesh, a dim a dimension of a tensor.

    >>> mesh = make_mesh({"replicate": 2, "shard": 4})          # 8 ranks, started by torchrun
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fdp.types import FdpError

AXES = ("replicate", "shard")


def make_mesh(sizes: Mapping[str, int], *, device_type: str) -> DeviceMesh:
    """A mesh of all ranks with the named axes, in the order of ``AXES``; axes left out have size 1."""
    if unknown := sorted(set(sizes) - set(AXES)):
        raise FdpError(f"mesh: expected axes among {AXES}, got {unknown}")
    if bad := {axis: size for axis, size in sizes.items() if size < 1}:
        raise FdpError(f"mesh: expected sizes of at least 1, got {bad}")
    if not dist.is_initialized():
        raise FdpError("mesh: expected several ranks, found no process group; start with torchrun")
    full = {axis: sizes.get(axis, 1) for axis in AXES}
    if math.prod(full.values()) != dist.get_world_size():
        raise FdpError(f"mesh: expected sizes that multiply to the {dist.get_world_size()} ranks, got {dict(sizes)}")
    return init_device_mesh(device_type, tuple(full.values()), mesh_dim_names=tuple(full))
