"""Inversion by owners: each layer is assigned to one rank, which inverts it and broadcasts the result.

    owner(layer) = the rank with the least work so far, layers sorted by decreasing cost       (Graham 1969, LPT)

With this rule no rank has more than 4/3 of the work it would have under the best assignment. Owners send inverses
rather than preconditioned gradients: an inverse of p^2 + d^2 numbers is used until the next update, while a gradient of
p d numbers changes every step and would have to be gathered on its owner first.

    >>> preconditioners = invert_by_owner(curvatures, invert_all, sharding)             # {layer: ...}, on all ranks
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fdp import tree
from fdp.kfac.factors import size
from fdp.kfac.types import ColumnsFactor, Curvature, DenseFactor, Factor, Layer, Preconditioner, SoftmaxFactor
from fdp.parallel import collectives
from fdp.parallel.agree import gather_values, run_in_unison
from fdp.parallel.sharding import Sharding
from fdp.types import FdpError


def inversion_cost(curvature: Curvature) -> float:
    """Return the approximate flops of inverting a layer: n^3 (dense), ``k^2 (n + k)`` (k columns) or n (diagonal).

    If there are k >= n columns, the n x n matrix is the smaller system, and n and k swap.
    """
    return sum(_side_cost(side) for side in curvature if side is not None)


def assign_owners(costs: Mapping[Layer, float], *, ranks: int) -> dict[Layer, int]:
    """Return the owner of every layer.

    Guarantees:
      - the same on every rank and in every run: ties are broken by path, and by the number of the rank;
      - the largest load of a rank is at most ``(4 - 1 / ranks) / 3`` times the smallest possible.
    """
    if ranks < 1:
        raise FdpError(f"ranks: expected at least 1, got {ranks}")
    load = [(0.0, rank) for rank in range(ranks)]
    owners = {}
    for layer in sorted(costs, key=lambda layer: (-costs[layer], layer.weight, layer.bias or "")):
        done, rank = heapq.heappop(load)
        owners[layer] = rank
        heapq.heappush(load, (done + costs[layer], rank))
    return {layer: owners[layer] for layer in costs}


def invert_by_owner(
    curvatures: Mapping[Layer, Curvature],
    invert: Callable[[Mapping[Layer, Curvature]], Mapping[Layer, Preconditioner]],
    sharding: Sharding | None,
) -> dict[Layer, Preconditioner]:
    """Invert each layer on its owner and broadcast the result. Curvatures must be those of all ranks' samples.

    ``invert`` receives all layers that a rank owns in one call.

    Guarantees:
      - the same bits on every rank, and equal to inverting every layer on every rank;
      - if an inverse fails on its owner, every rank raises.
    """
    if sharding is None or sharding.world.size == 1:
        return dict(invert(curvatures))
    owners = assign_owners(
        {layer: inversion_cost(curvature) for layer, curvature in curvatures.items()}, ranks=sharding.world.size
    )
    me = sharding.world.rank
    own = run_in_unison(lambda: invert({layer: curvatures[layer] for layer in curvatures if owners[layer] == me}), None)
    # Only the owner knows the structure, shapes and dtypes of an inverse.
    shapes = {layer: tree.map(_to_meta, inverse) for layer, inverse in own.items()}
    all_shapes = {layer: shape for theirs in gather_values(shapes, None) for layer, shape in theirs.items()}
    pending: dict[Layer, Preconditioner] = {}
    for layer, curvature in curvatures.items():
        device = _device(curvature)
        inverse = own.get(layer)
        if inverse is None:
            inverse = tree.map(lambda x, at=device: torch.empty(x.shape, dtype=x.dtype, device=at), all_shapes[layer])
        source = owners[layer]
        pending[layer] = tree.map(
            lambda x, source=source: collectives.broadcast_into(x.contiguous(), source, sharding.world), inverse
        )
    return {layer: tree.map(collectives.wait, each) for layer, each in pending.items()}


def _side_cost(factor: Factor) -> float:
    n = size(factor)
    match factor:
        case DenseFactor():
            return float(n) ** 3
        case ColumnsFactor() | SoftmaxFactor():
            k = factor.columns.shape[1]
            less, more = min(n, k), max(n, k)
            return float(less) ** 2 * (more + less)
        case _:
            return float(n)


def _to_meta(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _device(curvature: Curvature) -> torch.device:
    for side in curvature:
        if side is not None:
            return side.weight.device
    return torch.device("cpu")
