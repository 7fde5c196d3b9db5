"""Preconditioning of gradients that are cut into parts, and rows of features that are.

    G = [weight part, bias part] gathered over ``shard`` and ``tensor``;   L^-1 G R^-1;   this rank's part of it

A Kronecker factor mixes all rows, or all columns, of a layer: no rank can precondition its part alone. One layer at a
time is whole. Along ``tensor``, a layer's rows or columns are cut and with them its output gradients or its inputs:
:func:`whole_features` makes them whole before a factor is formed of them, so factors are whole on every rank, whatever
the mesh.

    >>> gradients = precondition_parts(inverses, gradients, sharding, shapes=known.shapes, apply=precondition)
    >>> left = dense(whole_features(g, sharding, layer.weight, dim=0), weight=tokens)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.kfac.layers import joined, parted
from fdp.kfac.types import Layer
from fdp.parallel import collectives
from fdp.parallel.gather_reduce import PendingGather, finish_gather, start_gather
from fdp.parallel.sharding import Sharding
from fdp.types import Axis, FdpError, Flat, Path

P = TypeVar("P")


def precondition_parts(
    preconditioners: Mapping[Layer, P],
    parts: Flat,
    sharding: Sharding | None,
    *,
    shapes: Mapping[Layer, tuple[int, int]],
    apply: Callable[[P, Tensor], Tensor],
) -> Flat:
    """``apply(preconditioner, G)`` of every layer, G its whole gradient as a matrix (``fdp.kfac.layers.joined``).

    ``parts`` is what this rank has of every leaf's gradient, already summed over all samples; ``shapes`` has the
    layers' (rows, columns), of whole leaves. Leaves of no layer are returned as they are. While one layer is
    preconditioned, the next is on its way.

    Guarantees:
      - this rank's part of what one rank with all of G would have; on every mesh and ZeRO stage.
    """
    layers = list(preconditioners)
    _check(layers, parts)
    flying = [_start(layer, parts, sharding) for layer in layers[:1]]
    done: Flat = {}
    for i, layer in enumerate(layers):
        flying += [_start(next_layer, parts, sharding) for next_layer in layers[i + 1 : i + 2]]
        whole = {path: _whole(x, path, sharding) for path, x in finish_gather(sharding, flying.pop(0)).items()}
        gradient = apply(preconditioners[layer], joined(layer, shapes[layer], whole))
        done |= {path: _part(x, path, sharding) for path, x in parted(layer, gradient, whole).items()}
    return {path: done.get(path, part) for path, part in parts.items()}


def whole_features(
    rows: Float[Tensor, "*tokens part"], sharding: Sharding | None, path: Path, *, dim: int
) -> Float[Tensor, "*tokens whole"]:
    """The features of all ranks of ``tensor``, if they cut ``dim`` of the leaf ``path``; else ``rows`` as they are.

    ``dim`` 0 is the side of output gradients, the leaf's rows; 1 that of inputs, its columns.
    """
    if sharding is None or (sharding.tensor, dim) not in sharding.leaves[path].sharded_dims:
        return rows
    return _gather_dim(rows, sharding.tensor, rows.ndim - 1)


def _check(layers: list[Layer], parts: Flat) -> None:
    paths = [path for layer in layers for path in layer if path is not None]
    if missing := sorted(set(paths) - set(parts)):
        raise FdpError(f"precondition_parts: expected a gradient for every leaf of a layer, got none for {missing}")
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        raise FdpError(f"precondition_parts: expected every leaf in one layer, got {twice} in several")


def _start(layer: Layer, parts: Flat, sharding: Sharding | None) -> PendingGather:
    paths = [path for path in layer if path is not None]
    first = parts[layer.weight]
    return start_gather(sharding, paths, parts, dtype=first.dtype, device=first.device, token=())


def _whole(x: Tensor, path: Path, sharding: Sharding | None) -> Tensor:
    for axis, dim in () if sharding is None else sharding.leaves[path].sharded_dims:
        x = _gather_dim(x, axis, dim) if axis.name == "tensor" else x
    return x


def _part(x: Tensor, path: Path, sharding: Sharding | None) -> Tensor:
    for dim, (start, length) in enumerate(() if sharding is None else sharding.leaves[path].window):
        x = x.narrow(dim, start, length)
    return x.contiguous()


def _gather_dim(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Equal parts along ``dim``, one after the other in the order of ranks."""
    flat = collectives.wait(collectives.all_gather(x.flatten(), axis))
    return torch.cat(list(flat.view(axis.size, *x.shape)), dim)
