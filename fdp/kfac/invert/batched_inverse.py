"""Inverses of many layers at once: factors of one form and size are stacked and inverted as a batch.

    (L_i + sqrt(damping) / pi_i I)^-1,   (R_i + sqrt(damping) pi_i I)^-1        for all layers i of a kind

What :func:`fdp.kfac.invert.inverse.invert` gives for ``Damping.PI``, ``Via.CHOLESKY`` and ``Power.INVERSE`` on dense
and diagonal sides. That function looks at every number it decides by, and a GPU stands still each time. Here a flag per
layer says whether all of that was in order, and the flags of all layers are waited for once, at the end. A layer whose
flag is down is the affair of the other function, which knows what to blame and what to try next.

Matrices are inverted in float64 on CUDA, where a batch takes hardly longer, and in their own dtype elsewhere.

    >>> made = invert_many({layer: curvature}, damping=1e-3, device=device)     # {layer: Sides, or None}
    >>> todo = [layer for layer, sides in made.items() if sides is None]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fdp.gradients.linear_maps import Map, MatrixMap, Sides, diagonal_map
from fdp.kfac.factors import size
from fdp.kfac.invert.woodbury import check_damping
from fdp.kfac.types import Curvature, DenseFactor, DiagonalFactor, Factor, Layer

ENTRIES = 1 << 25
"""Of the matrices that are stacked: 256 MiB in float64, about six times that while they are inverted."""
WIDE = (torch.float32, torch.float64)


def takes(curvature: Curvature) -> bool:
    """Whether a layer can be one of many: sides that are dense, diagonal or None, in float32 or float64."""
    sides = [side for side in curvature if side is not None]
    return bool(sides) and all(isinstance(s, DenseFactor | DiagonalFactor) and s.total.dtype in WIDE for s in sides)


def invert_many(
    curvatures: Mapping[Layer, Curvature], *, damping: float, device: torch.device
) -> dict[Layer, Sides | None]:
    """The inverse of every layer's damped curvature on ``device``; None for what is to be looked at by itself.

    Factors may wait elsewhere: they are moved a stack at a time.

    Guarantees:
      - equal to ``invert`` up to rounding, finite, symmetric and positive, wherever it is not None;
      - None wherever ``invert`` would refuse the factors, and for layers without curvature; no layer spoils another;
      - the device is waited for once, however many layers there are.
    """
    check_damping(damping)
    made: dict[Layer, Sides | None] = dict.fromkeys(curvatures)
    done: dict[Layer, Sides] = {}
    flags: list[Tensor] = []
    for layers in _alike(curvatures):
        sides, sound = _invert_alike([curvatures[layer] for layer in layers], damping=damping, device=device)
        done.update(zip(layers, sides))
        flags.append(sound)
    good = torch.cat(flags).tolist() if flags else []  # the one place that waits
    made.update({layer: sides for (layer, sides), fine in zip(done.items(), good) if fine})
    return made


def _alike(curvatures: Mapping[Layer, Curvature]) -> list[list[Layer]]:
    """Layers that can be stacked, as many as may be at a time."""
    kinds: dict[tuple[object, ...], list[Layer]] = {}
    for layer, curvature in curvatures.items():
        if takes(curvature):
            kinds.setdefault(tuple(_kind(side) for side in curvature), []).append(layer)
    parts = []
    for layers in kinds.values():
        entries = sum(side[0].numel() for side in curvatures[layers[0]] if side is not None)
        many = max(1, ENTRIES // max(1, entries))
        parts += [layers[start : start + many] for start in range(0, len(layers), many)]
    return parts


def _kind(side: Factor | None) -> tuple[object, ...] | None:
    return None if side is None else (type(side), size(side), *((x.dtype, x.device) for x in side))


def _invert_alike(
    curvatures: Sequence[Curvature], *, damping: float, device: torch.device
) -> tuple[list[Sides], Bool[Tensor, " layers"]]:
    stacks = [_stacked(sides, device) for sides in zip(*curvatures)]
    there = [stack for stack in stacks if stack is not None]
    dtype = max((total.dtype for total, _ in there), key=lambda d: d.itemsize)
    sound = torch.stack([_sound(*stack) for stack in there]).all(0)
    shares = [sound.new_full(sound.shape, damping, dtype=torch.float64)] * 2
    if len(there) == 2:
        left, right = (_mean_traces(*stack) for stack in there)
        sound = sound & (left > 0) & (right > 0)  # else there is no pi
        pi = right.sqrt() / left.sqrt()
        shares = [math.sqrt(damping) / pi, math.sqrt(damping) * pi]
    maps: list[Sequence[Map | None]] = []
    for stack, share in zip(stacks, shares):
        if stack is None:
            maps.append([None] * len(curvatures))
            continue
        inverses, fine = _inverses(*stack, share, sound)
        sound = sound & fine & (_largest(inverses) <= torch.finfo(dtype).max)
        # Copies: a state is kept and written leaf by leaf, and no leaf should hold the memory of others.
        maps.append([_map(inverse.to(dtype, copy=True)) for inverse in inverses])
    return [Sides(left, right) for left, right in zip(*maps)], sound


def _stacked(sides: Sequence[Factor | None], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Totals and weights, moved together."""
    there = [side for side in sides if isinstance(side, DenseFactor | DiagonalFactor)]
    if not there:
        return None
    return torch.stack([s.total for s in there]).to(device), torch.stack([s.weight for s in there]).to(device)


def _sound(total: Float[Tensor, "layers ..."], weight: Float[Tensor, " layers"]) -> Bool[Tensor, " layers"]:
    """What :func:`fdp.kfac.factors.check_factor` lets through."""
    largest = _largest(total)
    sound = (weight > 0) & (weight < math.inf) & (largest < math.inf) & (_diagonals(total).amin(1) >= 0)
    if total.ndim == 3:
        gap = _largest(total - total.mT)
        sound = sound & (gap <= math.sqrt(torch.finfo(total.dtype).eps) * largest)
    return sound


def _mean_traces(total: Float[Tensor, "layers ..."], weight: Float[Tensor, " layers"]) -> Float[Tensor, " layers"]:
    return _diagonals(total).double().mean(1) / weight


def _largest(stack: Float[Tensor, "layers ..."]) -> Float[Tensor, " layers"]:
    """The largest ``|entry|`` of each in float64; NaN where there is one, which is below nothing."""
    return torch.linalg.vector_norm(stack.flatten(1), math.inf, dim=1).double()


def _diagonals(total: Float[Tensor, "layers ..."]) -> Float[Tensor, "layers n"]:
    return total.diagonal(dim1=1, dim2=2) if total.ndim == 3 else total


def _inverses(
    total: Float[Tensor, "layers ..."],
    weight: Float[Tensor, " layers"],
    share: Float[Tensor, " layers"],
    sound: Bool[Tensor, " layers"],
) -> tuple[Float[Tensor, "layers ..."], Bool[Tensor, " layers"]]:
    """``(M + share I)^-1``, and for which it could be made; the identity stands for what is not sound."""
    if total.ndim == 2:
        return (total.double() / weight.double()[:, None] + share[:, None]).reciprocal(), sound
    wide = torch.float64 if total.is_cuda else total.dtype
    m = total.to(wide) / weight.to(wide)[:, None, None]
    m = (m + m.mT) / 2
    m.diagonal(dim1=1, dim2=2).add_(share.to(wide)[:, None])
    eye = torch.eye(m.shape[1], dtype=wide, device=m.device)
    lower, info = torch.linalg.cholesky_ex(torch.where(sound[:, None, None], m, eye))
    fine = info == 0
    # A solver may raise for all where one has a zero on its diagonal.
    lower = torch.where(fine[:, None, None], lower, eye)
    return (from_lower(lower) if lower.is_cuda else torch.cholesky_inverse(lower)), fine


def from_lower(lower: Float[Tensor, "layers n n"]) -> Float[Tensor, "layers n n"]:
    """``(L L^T)^-1 = L^-T L^-1`` by a triangular solve and a product, which CUDA does for a whole batch.

    ``torch.cholesky_inverse`` goes through a batch one by one there: five times as long for 24 matrices of 1025.
    """
    eye = torch.eye(lower.shape[1], dtype=lower.dtype, device=lower.device)
    half = torch.linalg.solve_triangular(lower, eye.expand_as(lower), upper=False)
    done = half.mT @ half
    return (done + done.mT) / 2


def _map(inverse: Tensor) -> Map:
    return MatrixMap(inverse) if inverse.ndim == 2 else diagonal_map(inverse)
