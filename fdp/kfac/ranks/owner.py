"""Every inverse computed once: layers divided among the ranks by cost, each inverse made by its owner and sent to all.

    owner(layer) = the rank with the least work so far, layers taken from the most costly down       (Graham 1969, LPT)

so that no rank has more than 4/3 of the work it would have in the best of divisions. Preconditioners are sent, not the
gradients they make: an inverse of p^2 + d^2 numbers is used for as many steps as lie between two updates, a gradient of
p d numbers is new in every one, and its parts would have to reach the owner first.

    >>> preconditioners = invert_owned(curvatures, invert_all, sharding)             # {layer: ...}, on all ranks
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


def cost(curvature: Curvature) -> float:
    """About how many operations its inverse takes: n^3 of a dense side, ``k^2 (n + k)`` of k columns, n of a diagonal.

    From k = n columns on the n x n matrix is the smaller system.
    """
    return sum(_cost(side) for side in curvature if side is not None)


def assign(costs: Mapping[Layer, float], *, ranks: int) -> dict[Layer, int]:
    """The owner of every layer.

    Guarantees:
      - the same on every rank and in every run: ties go by path, and to the first of the ranks that have least to do;
      - the most that any rank has to do is at most ``(4 - 1 / ranks) / 3`` of the least possible.
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


def invert_owned(
    curvatures: Mapping[Layer, Curvature],
    invert: Callable[[Mapping[Layer, Curvature]], Mapping[Layer, Preconditioner]],
    sharding: Sharding | None,
) -> dict[Layer, Preconditioner]:
    """``invert`` of every layer's curvature, which must be that of all ranks' samples (``exchange``), once per layer.

    ``invert`` is given all the layers that a rank owns together.

    Guarantees:
      - the same on every rank, bit for bit, and equal to inverting everything everywhere;
      - if an inverse fails on its owner, every rank raises.
    """
    if sharding is None or sharding.world.size == 1:
        return dict(invert(curvatures))
    owners = assign({layer: cost(curvature) for layer, curvature in curvatures.items()}, ranks=sharding.world.size)
    me = sharding.world.rank
    own = run_in_unison(lambda: invert({layer: curvatures[layer] for layer in curvatures if owners[layer] == me}), None)
    # The form of an inverse is the affair of `invert`: its owner tells structure, shapes and dtypes.
    shapes = {layer: tree.map(_abstract, made) for layer, made in own.items()}
    known = {layer: made for theirs in gather_values(shapes, None) for layer, made in theirs.items()}
    pending: dict[Layer, Preconditioner] = {}
    for layer, curvature in curvatures.items():
        device = _device(curvature)
        made = own.get(layer)
        if made is None:
            made = tree.map(lambda x, at=device: torch.empty(x.shape, dtype=x.dtype, device=at), known[layer])
        source = owners[layer]
        pending[layer] = tree.map(
            lambda x, source=source: collectives.broadcast_into(x.contiguous(), source, sharding.world), made
        )
    return {layer: tree.map(collectives.wait, made) for layer, made in pending.items()}


def _cost(factor: Factor) -> float:
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


def _abstract(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _device(curvature: Curvature) -> torch.device:
    for side in curvature:
        if side is not None:
            return side.weight.device
    return torch.device("cpu")
