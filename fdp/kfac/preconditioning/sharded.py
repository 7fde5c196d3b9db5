"""Preconditioning of sharded gradients: gather a layer, multiply, and return this rank's shard.

    G = [weight, bias], gathered over ``shard`` and ``tensor``;   L^-1 G R^-1;   this rank's shard of it

A Kronecker factor mixes all rows, or all columns, of a layer, so no rank can precondition its shard by itself. Only one
layer at a time is gathered.

    >>> gradients = precondition_sharded(inverses, gradients, sharding, shapes=survey.shapes, apply=precondition)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from fdp.kfac.layers import to_leaves, to_matrix
from fdp.kfac.types import Layer
from fdp.parallel import collectives
from fdp.parallel.gather_reduce import PendingGather, finish_gather, start_gather
from fdp.parallel.sharding import Sharding
from fdp.types import Axis, FdpError, Flat, Path

P = TypeVar("P")


def precondition_sharded(
    preconditioners: Mapping[Layer, P],
    shards: Flat,
    sharding: Sharding | None,
    *,
    shapes: Mapping[Layer, tuple[int, int]],
    apply: Callable[[P, Tensor], Tensor],
) -> Flat:
    """Return this rank's shard of ``apply(preconditioner, G)`` for every layer, where G is its full gradient matrix.

    ``shards`` are this rank's shards of the gradients, summed over all samples; ``shapes`` the (rows, columns) of the
    layers, of full leaves. Leaves that belong to no layer are returned unchanged. The next layer is gathered while one
    is preconditioned.

    Guarantees:
      - equal to the shard of the result of one rank that has all of G, on every mesh and ZeRO stage.
    """
    layers = list(preconditioners)
    _check(layers, shards)
    pending = [_start(layer, shards, sharding) for layer in layers[:1]]
    done: Flat = {}
    for i, layer in enumerate(layers):
        pending += [_start(next_layer, shards, sharding) for next_layer in layers[i + 1 : i + 2]]
        gathered = finish_gather(sharding, pending.pop(0))
        full = {path: _gather_tensor_axis(x, path, sharding) for path, x in gathered.items()}
        gradient = apply(preconditioners[layer], to_matrix(layer, shapes[layer], full))
        done |= {path: _shard(x, path, sharding) for path, x in to_leaves(layer, gradient, full).items()}
    return {path: done.get(path, shard) for path, shard in shards.items()}


def _check(layers: list[Layer], shards: Flat) -> None:
    paths = [path for layer in layers for path in layer if path is not None]
    if missing := sorted(set(paths) - set(shards)):
        raise FdpError(f"precondition_sharded: expected a gradient for every leaf of a layer, got none for {missing}")
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise FdpError(f"precondition_sharded: expected every leaf in one layer only, got {twice} in several")


def _start(layer: Layer, shards: Flat, sharding: Sharding | None) -> PendingGather:
    paths = [path for path in layer if path is not None]
    first = shards[layer.weight]
    return start_gather(sharding, paths, shards, dtype=first.dtype, device=first.device, token=())


def _gather_tensor_axis(x: Tensor, path: Path, sharding: Sharding | None) -> Tensor:
    for axis, dim in () if sharding is None else sharding.leaves[path].sharded_dims:
        x = _gather_dim(x, axis, dim) if axis.name == "tensor" else x
    return x


def _shard(x: Tensor, path: Path, sharding: Sharding | None) -> Tensor:
    for dim, (start, length) in enumerate(() if sharding is None else sharding.leaves[path].window):
        x = x.narrow(dim, start, length)
    return x.contiguous()


def _gather_dim(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Concatenate equal parts along ``dim``, in the order of ranks."""
    flat = collectives.wait(collectives.all_gather(x.flatten(), axis))
    return torch.cat(list(flat.view(axis.size, *x.shape)), dim)
