"""Precondition per-sample gradients before they are clipped, by mapping the records of the taps.

    U_L G_b U_R = sum_t (g_t U_L)^T (x_t U_R):    the ghost norm of (g U_L, x U_R) is the norm of U_L G_b U_R

for symmetric maps, so every method for norms works on mapped records and no per-sample gradient is formed. The maps may
depend on private data only through noise: K-FAC takes them from a public or synthetic batch, or from noised statistics
(``fdp.kfac.private``). The sensitivity stays C, because norms and sum use the same mapped records. The optimizer may
apply the maps again after the noise, which is post-processing. (Precondition, then privatise: molinamarcvdb/DP-KFC,
2026, with per-sample gradients.)

    >>> step = make_train_step(..., precondition=lambda state: {"head.weight": Sides(left, right)})
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.eight_bits import Rounded, StoredRecord, stored_gradient
from fdp.gradients.linear_maps import GroupedMap, LowRankMap, Map, MatrixMap, Sides, apply_left, apply_right, apply_rows
from fdp.gradients.rules import Dense, OneHot, Pair, per_sample_gradient
from fdp.model import Model
from fdp.parallel.sharding import Sharding
from fdp.types import FdpError, Path


def map_record(sides: Mapping[Path, Sides], path: Path, record: StoredRecord) -> StoredRecord:
    """Return the record of ``left G right`` from that of G, mapped in float32 at least, in the record's dtype.

    Gradients that a fused head stored in 8 bits become dense, in float32.

    A one-hot side stays one-hot under a diagonal map, which scales the other side. Under any other map its rows become
    rows of the map, which take as much memory as a head's scores.

    Guarantees:
      - linear in G and the same for all uses of a leaf, so that uses of a tied leaf add up as they should;
      - sample b of the result depends on sample b alone.
    """
    left, right = sides.get(path, Sides(None, None))
    if left is None and right is None:
        return record
    if isinstance(record, Dense | Rounded):
        return Dense(_map_gradient(left, right, stored_gradient(record)))
    if left is not None and map_size(left) != _row_count(record):  # a map of single elements, not of rows
        return Dense(_map_gradient(left, right, per_sample_gradient(record)))
    rows = record.right if right is None else _map_rows(right, record.right)
    if left is None:
        return record._replace(right=rows)
    if isinstance(record.left, OneHot):
        return _map_one_hot(left, record.left, rows, record.shape)
    return Pair(_map_groups(left, record.left, path), rows, record.shape)


def check_sides(sides: Mapping[Path, Sides], model: Model) -> Mapping[Path, Sides]:
    """Return the maps; raise if one is not of a trainable leaf or does not fit its shape."""
    for path, (left, right) in sides.items():
        if path not in model.trainable:
            raise FdpError(f"precondition: expected maps of trainable leaves of {model.name}, got one of {path}")
        shape = model.leaves[path].shape
        both = [(math.prod(shape[:k]), math.prod(shape[k:])) for k in range(1, 1 + len(shape))] or [(1, 1)]
        sizes = [None if side is None else map_size(side) for side in (left, right)]
        if isinstance(right, GroupedMap):  # one map per group of rows
            sizes[1] = right.diagonal.shape[1]
        if not any(all(got in (None, n) for got, n in zip(sizes, each)) for each in both):
            raise FdpError(
                f"{path}: expected maps of {shape[0]} rows and {math.prod(shape) // shape[0]} columns, or one of all "
                f"its {math.prod(shape)} elements, got {sizes[0]} and {sizes[1]}; a bias is a leaf of its own here "
                f"(fdp.kfac.private.separate_biases)"
            )
    return sides


def check_preconditioned(private: bool, sharding: Sharding | None) -> None:
    """Refuse preconditioning if no gradients are clipped, or if a tensor axis splits their rows."""
    if not private:
        raise FdpError(
            "precondition: maps each sample's gradient before it is clipped, and method none has no per-sample "
            "gradients and no clipping; expected None, and the optimizer to do all of the preconditioning"
        )
    if sharding is not None and sharding.tensor.size > 1:
        raise FdpError(
            f"precondition: expected full rows of gradients and inputs on every rank, got a mesh whose axis 'tensor' "
            f"splits them over {sharding.tensor.size} ranks; use the axes 'shard' and 'replicate'"
        )


def map_size(map: Map) -> int:
    """Return ``n`` of a map's (n, n) matrix."""
    if isinstance(map, GroupedMap):
        return map.diagonal.numel()
    return (map.matrix if isinstance(map, MatrixMap) else map.diagonal).shape[0]


def _row_count(record: Pair) -> int:
    """Return the number of rows of the gradient, over all groups."""
    return record.shape[0] if isinstance(record.left, OneHot) else record.left.shape[1] * record.left.shape[3]


def _map_gradient(
    left: Map | None, right: Map | None, gradient: Float[Tensor, " batch *shape"]
) -> Float[Tensor, " batch *shape"]:
    columns = None if right is None else right.diagonal.shape[1] if isinstance(right, GroupedMap) else map_size(right)
    rows = gradient.shape[1] if columns is None else gradient[0].numel() // columns
    rows = rows if left is None else map_size(left)
    wide = gradient.reshape(len(gradient), rows, -1).to(torch.promote_types(gradient.dtype, torch.float32))
    wide = wide if right is None else apply_right(right, wide)
    wide = wide if left is None else apply_left(left, wide)
    return wide.reshape(gradient.shape).to(gradient.dtype)


def _map_one_hot(left: Map, rows: OneHot, right: Tensor, shape: tuple[int, ...]) -> Pair:
    if _is_diagonal(left):
        each = left.diagonal[rows.ids][:, None, :, None]
        wide = torch.promote_types(torch.promote_types(right.dtype, each.dtype), torch.float32)
        return Pair(rows, (right.to(wide) * each).to(right.dtype), shape)
    if isinstance(left, MatrixMap):
        found = left.matrix[rows.ids]
    else:
        assert isinstance(left, LowRankMap)  # an embedding has no groups
        found = (left.columns[rows.ids] @ left.core) @ left.columns.mT
        found = found.scatter_add(-1, rows.ids.unsqueeze(-1), left.diagonal[rows.ids].unsqueeze(-1))
    return Pair(found.unsqueeze(1).to(right.dtype), right, shape)


def _map_rows(map: Map, rows: Float[Tensor, "batch groups tokens n"]) -> Float[Tensor, "batch groups tokens n"]:
    """Return each row times the map, or times the map of its group."""
    if not isinstance(map, GroupedMap):
        return apply_rows(map, rows)
    wide = torch.promote_types(torch.promote_types(rows.dtype, map.diagonal.dtype), torch.float32)
    return (rows.to(wide) * map.diagonal[:, None, :]).to(rows.dtype)


def _map_groups(left: Map, rows: Float[Tensor, "batch groups tokens rows"], path: Path) -> Tensor:
    groups = rows.shape[1]
    if groups == 1 or isinstance(left, GroupedMap):
        return _map_rows(left, rows)
    if not _is_diagonal(left):
        raise FdpError(
            f"{path}: every group of a convolution of {groups} groups has its own inputs, so a map that mixes rows of "
            f"different groups cannot be applied; expected a diagonal left map, got a {type(left).__name__}"
        )
    wide = torch.promote_types(torch.promote_types(rows.dtype, left.diagonal.dtype), torch.float32)
    return (rows.to(wide) * left.diagonal.view(groups, 1, -1)).to(rows.dtype)


def _is_diagonal(map: Map) -> TypeGuard[LowRankMap]:
    return isinstance(map, LowRankMap) and map.columns.shape[1] == 0
