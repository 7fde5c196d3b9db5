"""Batched inverses: factors of the same form and size are stacked and inverted together.

    (L_i + sqrt(damping) / pi_i I)^-1,   (R_i + sqrt(damping) pi_i I)^-1        for all layers i of a kind

The result is that of :func:`fdp.kfac.inversion.damped_inverse.invert` for ``Damping.PI``, ``Via.CHOLESKY`` and
``Power.INVERSE`` on dense and diagonal sides. ``invert`` reads numbers back to the host, and the GPU idles each time.
Here each layer has a flag that says whether its inverse is valid, and all flags are read once, at the end. Layers whose
flag is False are left to ``invert``, which raises a precise error or retries.

Matrices are inverted in float64 on CUDA, where a batch takes hardly longer, and in their own dtype elsewhere.

    >>> inverses = invert_batched({layer: curvature}, damping=1e-3, device=device)     # {layer: Sides, or None}
    >>> todo = [layer for layer, inverse in inverses.items() if inverse is None]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fdp.gradients.linear_maps import Map, MatrixMap, Sides, diagonal_map
from fdp.kfac.factors import size
from fdp.kfac.inversion.woodbury import check_damping
from fdp.kfac.types import Curvature, DenseFactor, DiagonalFactor, Factor, Layer

BATCH_ENTRIES = 1 << 25
"""Entries of the matrices of a batch: 256 MiB in float64, and about six times that during inversion."""
WIDE = (torch.float32, torch.float64)


def can_batch(curvature: Curvature) -> bool:
    """Return True if all sides are dense, diagonal or None, in float32 or float64, and not all are None."""
    sides = [side for side in curvature if side is not None]
    return bool(sides) and all(isinstance(s, DenseFactor | DiagonalFactor) and s.total.dtype in WIDE for s in sides)


def invert_batched(
    curvatures: Mapping[Layer, Curvature], *, damping: float, device: torch.device
) -> dict[Layer, Sides | None]:
    """Return the inverse of every layer's damped curvature on ``device``; None if ``invert`` must handle the layer.

    Factors may be on another device: they are moved one batch at a time.

    Guarantees:
      - equal to ``invert`` up to rounding, finite, symmetric and positive, if not None;
      - None if ``invert`` would refuse the factors or a layer has no curvature; other layers are not affected;
      - waits for the device once, however many layers there are.
    """
    check_damping(damping)
    inverses: dict[Layer, Sides | None] = dict.fromkeys(curvatures)
    done: dict[Layer, Sides] = {}
    flags: list[Tensor] = []
    for layers in _batches(curvatures):
        sides, valid = _invert_batch([curvatures[layer] for layer in layers], damping=damping, device=device)
        done.update(zip(layers, sides))
        flags.append(valid)
    good = torch.cat(flags).tolist() if flags else []  # the only wait for the device
    inverses.update({layer: sides for (layer, sides), fine in zip(done.items(), good) if fine})
    return inverses


def _batches(curvatures: Mapping[Layer, Curvature]) -> list[list[Layer]]:
    """Group layers that can be stacked, within ``BATCH_ENTRIES``."""
    kinds: dict[tuple[object, ...], list[Layer]] = {}
    for layer, curvature in curvatures.items():
        if can_batch(curvature):
            kinds.setdefault(tuple(_kind(side) for side in curvature), []).append(layer)
    parts = []
    for layers in kinds.values():
        entries = sum(side[0].numel() for side in curvatures[layers[0]] if side is not None)
        many = max(1, BATCH_ENTRIES // max(1, entries))
        parts += [layers[start : start + many] for start in range(0, len(layers), many)]
    return parts


def _kind(side: Factor | None) -> tuple[object, ...] | None:
    return None if side is None else (type(side), size(side), *((x.dtype, x.device) for x in side))


def _invert_batch(
    curvatures: Sequence[Curvature], *, damping: float, device: torch.device
) -> tuple[list[Sides], Bool[Tensor, " layers"]]:
    stacks = [_stack(sides, device) for sides in zip(*curvatures)]
    there = [stack for stack in stacks if stack is not None]
    dtype = max((total.dtype for total, _ in there), key=lambda d: d.itemsize)
    valid = torch.stack([_is_valid(*stack) for stack in there]).all(0)
    shares = [valid.new_full(valid.shape, damping, dtype=torch.float64)] * 2
    if len(there) == 2:
        left, right = (_mean_traces(*stack) for stack in there)
        valid = valid & (left > 0) & (right > 0)  # else pi is undefined
        pi = right.sqrt() / left.sqrt()
        shares = [math.sqrt(damping) / pi, math.sqrt(damping) * pi]
    maps: list[Sequence[Map | None]] = []
    for stack, share in zip(stacks, shares):
        if stack is None:
            maps.append([None] * len(curvatures))
            continue
        inverses, fine = _inverses(*stack, share, valid)
        valid = valid & fine & (_largest(inverses) <= torch.finfo(dtype).max)
        # Copy, so that no leaf of the state holds on to the memory of the whole batch.
        maps.append([_map(inverse.to(dtype, copy=True)) for inverse in inverses])
    return [Sides(left, right) for left, right in zip(*maps)], valid


def _stack(sides: Sequence[Factor | None], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Stack totals and weights, and move each stack in one copy."""
    there = [side for side in sides if isinstance(side, DenseFactor | DiagonalFactor)]
    if not there:
        return None
    return torch.stack([s.total for s in there]).to(device), torch.stack([s.weight for s in there]).to(device)


def _is_valid(total: Float[Tensor, "layers ..."], weight: Float[Tensor, " layers"]) -> Bool[Tensor, " layers"]:
    """Return True for factors that pass :func:`fdp.kfac.factors.check_factor`."""
    largest = _largest(total)
    valid = (weight > 0) & (weight < math.inf) & (largest < math.inf) & (_diagonals(total).amin(1) >= 0)
    if total.ndim == 3:
        gap = _largest(total - total.mT)
        valid = valid & (gap <= math.sqrt(torch.finfo(total.dtype).eps) * largest)
    return valid


def _mean_traces(total: Float[Tensor, "layers ..."], weight: Float[Tensor, " layers"]) -> Float[Tensor, " layers"]:
    return _diagonals(total).double().mean(1) / weight


def _largest(stack: Float[Tensor, "layers ..."]) -> Float[Tensor, " layers"]:
    """Return the largest ``|entry|`` of each layer in float64; NaN (which fails every comparison) if there is one."""
    return torch.linalg.vector_norm(stack.flatten(1), math.inf, dim=1).double()


def _diagonals(total: Float[Tensor, "layers ..."]) -> Float[Tensor, "layers n"]:
    return total.diagonal(dim1=1, dim2=2) if total.ndim == 3 else total


def _inverses(
    total: Float[Tensor, "layers ..."],
    weight: Float[Tensor, " layers"],
    share: Float[Tensor, " layers"],
    valid: Bool[Tensor, " layers"],
) -> tuple[Float[Tensor, "layers ..."], Bool[Tensor, " layers"]]:
    """Return ``(M + share I)^-1`` and whether it exists; invalid matrices are replaced by the identity."""
    if total.ndim == 2:
        return (total.double() / weight.double()[:, None] + share[:, None]).reciprocal(), valid
    wide = torch.float64 if total.is_cuda else total.dtype
    m = total.to(wide) / weight.to(wide)[:, None, None]
    m = (m + m.mT) / 2
    m.diagonal(dim1=1, dim2=2).add_(share.to(wide)[:, None])
    eye = torch.eye(m.shape[1], dtype=wide, device=m.device)
    lower, info = torch.linalg.cholesky_ex(torch.where(valid[:, None, None], m, eye))
    fine = info == 0
    # A solver may raise for the whole batch if one matrix has a zero on its diagonal.
    lower = torch.where(fine[:, None, None], lower, eye)
    return (cholesky_inverse_batched(lower) if lower.is_cuda else torch.cholesky_inverse(lower)), fine


def cholesky_inverse_batched(lower: Float[Tensor, "layers n n"]) -> Float[Tensor, "layers n n"]:
    """Return ``(L L^T)^-1 = L^-T L^-1`` by a triangular solve and a product.

    CUDA batches both, while ``torch.cholesky_inverse`` loops over the batch there.
    """
    eye = torch.eye(lower.shape[1], dtype=lower.dtype, device=lower.device)
    half = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    done = half.mT @ half
    return (done + done.mT) / 2


def _map(inverse: Tensor) -> Map:
    return MatrixMap(inverse) if inverse.ndim == 2 else diagonal_map(inverse)
