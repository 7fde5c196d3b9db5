"""The Gaussian mechanism: ``value + noise_multiplier * sensitivity * N(0, I)``, one draw per global element.

Noise is a function of (key, path, element index): added once, after the sum over microbatches and ranks, and the same
for every way of cutting the batch or the parameters.

    noisy = g round((value + s z) / g),     g = 2^(floor(log2 s) - 20),     s = noise_multiplier * sensitivity

z has 64 random bits and all is in float64. The low bits of a floating-point sum tell what was added to what (Mironov
2012): the noised value is therefore rounded to a grid of public width g, about a millionth of s, before anything else
is made of it. Within a step of the grid lie 2^31 possible values of s z, so that whatever the value, every point of
the grid has the probability that the Gaussian law gives it, to about one part in 2^30.

    >>> noisy = add_gaussian(total, key=key, noise_multiplier=1.1)          # total: ClippedSum
    >>> mean = scale(noisy, 1 / expected_batch_size)                        # a public constant, after the noise
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import keys
from fdp.types import ClippedSum, FdpError, Flat, Key, Path, Place

GRID_BITS = 20
"""The grid that noised values are rounded to is finer than the noise by this many powers of two."""


def add_gaussian(
    total: ClippedSum, *, key: Key, noise_multiplier: float, places: Mapping[Path, Place] | None = None
) -> Flat:
    """``total.value + noise_multiplier * total.sensitivity * N(0, I)``.

    ``places`` says where in its leaf each value sits, if they are parts; a part gets its part of the leaf's noise.

    Guarantees:
      - the scale comes from ``total.sensitivity``: nothing but a ClippedSum is accepted;
      - every value returned is a multiple of ``grid_of(scale)``, a power of two: its low bits tell nothing;
      - each element's noise is drawn from (key, path, index), so no two elements or keys share a draw.
    """
    if not isinstance(total, ClippedSum):
        raise FdpError(
            f"add_gaussian: expected a ClippedSum, which carries its sensitivity, got {type(total).__name__}"
        )
    if not 0 <= noise_multiplier < math.inf:
        raise FdpError(f"noise_multiplier: expected a finite number, 0 or more, got {noise_multiplier}")
    if noise_multiplier == 0:
        return total.value
    deviation = noise_multiplier * total.sensitivity.double()
    return {
        path: noised(value, deviation, keys.fold_in(key, path), None if places is None else places[path])
        for path, value in total.value.items()
    }


def noised(
    value: Float[Tensor, " *shape"], deviation: Float[Tensor, ""], key: Key, place: Place | None = None
) -> Float[Tensor, " *shape"]:
    """``value + deviation * N(0, I)`` in float64, rounded to the grid; element ``i`` takes draw ``i`` of the key."""
    shape, window = (tuple(value.shape), None) if place is None else place
    deviation = deviation.to(value.device, torch.float64)
    draw = keys.normal(key, shape, dtype=torch.float64, window=window).to(value.device)
    return rounded(value.double() + draw * deviation, grid_of(deviation))


def grid_of(deviation: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """``2^(floor(log2 deviation) - 20)``: exact, from the exponent of the number alone."""
    power = (deviation.double().view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    return power * 2.0**-GRID_BITS


def rounded(value: Float[Tensor, " *shape"], grid: Float[Tensor, ""]) -> Float[Tensor, " *shape"]:
    """The nearest multiple of ``grid``, a power of two: exact in float64."""
    return (value / grid).round() * grid


def scale(tree: Flat, factor: float) -> Flat:
    """Every leaf times a public constant."""
    return {path: leaf * factor for path, leaf in tree.items()}
