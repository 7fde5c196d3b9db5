"""The Gaussian mechanism: ``value + noise_multiplier * sensitivity * N(0, I)``, one draw per global element.

Noise is a function of (key, path, element index): added once, after the sum over microbatches and ranks, and the same
for every way of cutting the batch or the parameters.

    >>> noisy = add_gaussian(total, key=key, noise_multiplier=1.1)          # total: ClippedSum
    >>> mean = scale(noisy, 1 / expected_batch_size)                        # a public constant, after the noise
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fdp import keys
from fdp.types import ClippedSum, FdpError, Flat, Key, Path, Place


def add_gaussian(
    total: ClippedSum, *, key: Key, noise_multiplier: float, places: Mapping[Path, Place] | None = None
) -> Flat:
    """``total.value + noise_multiplier * total.sensitivity * N(0, I)``.

    ``places`` says where in its leaf each value sits, if they are parts; a part gets its part of the leaf's noise.

    Guarantees:
      - the scale comes from ``total.sensitivity``: nothing but a ClippedSum is accepted;
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
    noisy = {}
    for path, value in total.value.items():
        shape, window = (tuple(value.shape), None) if places is None else places[path]
        draw = keys.normal(keys.fold_in(key, path), shape, dtype=torch.float32, window=window)
        noisy[path] = value + draw.to(value) * (noise_multiplier * total.sensitivity).to(value)
    return noisy


def scale(tree: Flat, factor: float) -> Flat:
    """Every leaf times a public constant."""
    return {path: leaf * factor for path, leaf in tree.items()}
