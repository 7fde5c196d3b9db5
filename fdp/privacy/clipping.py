"""Clipping: per-sample factors from per-sample norms, and the sensitivity that they establish.

A style bounds how far one sample can move the sum. Let n_b be the norm of sample b's gradient and C the bound.

- ``flat``       factor ``min(1, C / n_b)``                          (Abadi et al. 2016, arXiv 1607.00133)
- ``per_layer``  the same in every group of leaves with its own C_k;  total sensitivity ``sqrt(sum_k C_k^2)``
- ``automatic``  factor ``C / (n_b + gamma)``, no threshold           (Bu et al. 2023, arXiv 2206.07136)
- ``quantile``   flat, with C following a quantile of the norms      (Andrew et al. 2021, arXiv 1905.03871)

    >>> clip = clip_to(norms, max_norm=1.0)              # Clip(factors, sensitivity)
    >>> style = per_layer(max_norm=1.0)                  # a style to put into a Mechanism
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import keys
from fdp.arguments import positive_number, probability
from fdp.privacy.noise import noised
from fdp.types import A_TENSOR, OWN_FACTORS, Bound, Clip, FdpError, Key, Norms, Path, Tree

# One float32 rounding of the quotient and one of each product may go up; two units in the last place compensate.
COUNT_NOISE_SHARE = 20
"""Quantile clipping of fdp train: the noise on its count is the batch size over this (Andrew et al. 2021)."""
_ROUND_DOWN = 1.0 - 2.0**-22


class ClipStyle(NamedTuple):
    """A way of clipping, as pure functions over its own state (``()`` for the static styles).

    ``tally`` is summed over the samples of a step; ``update`` uses only its noised total. ``count_noise`` is the
    standard deviation of the noise on that total, whose sensitivity is 1/2; None if only the sum is released.
    """

    name: str
    init: Callable[[], Tree]
    clip: Callable[[Norms, Tree], Clip]
    tally: Callable[[Norms, Tensor, Tree], Tensor]
    update: Callable[[Tree, Tensor, Key, float], Tree]
    count_noise: float | None


def clip_factors(norms: Float[Tensor, " batch"], *, max_norm: float | Tensor) -> Float[Tensor, " batch"]:
    """Return ``min(1, max_norm / norm)`` per sample, and 0 where the norm is not finite.

    Guarantees:
      - a gradient of the given norm, times its factor, has norm at most ``max_norm``;
      - a sample whose norm is NaN or infinite has factor exactly 0;
      - a sample whose norm is at most ``max_norm`` has factor exactly 1.
    """
    factors = torch.where(norms <= max_norm, torch.ones_like(norms), max_norm / norms * _ROUND_DOWN)
    return torch.where(torch.isfinite(norms) & torch.isfinite(factors), factors, torch.zeros_like(norms))


def normalising_factors(
    norms: Float[Tensor, " batch"], *, max_norm: float | Tensor, gamma: float
) -> Float[Tensor, " batch"]:
    """Return ``max_norm / (norm + gamma)`` per sample, and 0 where the norm is not finite.

    Guarantees:
      - a gradient of the given norm, times its factor, has norm below ``max_norm``;
      - a sample whose norm is NaN or infinite has factor exactly 0.
    """
    factors = max_norm / (norms + gamma) * _ROUND_DOWN
    return torch.where(torch.isfinite(norms) & torch.isfinite(factors), factors, torch.zeros_like(norms))


def clip_to(norms: Norms, *, max_norm: float | Tensor) -> Clip:
    """Clip each sample's full gradient to ``max_norm``.

    Guarantees:
      - one sample moves the sum by at most ``max_norm``, which is the Clip's sensitivity.
    """
    if not isinstance(max_norm, Tensor):
        _positive("max_norm", max_norm)
    total = norms.total()
    factors = clip_factors(total, max_norm=max_norm)
    # Filled on the device: a copy from the host could not be captured in a CUDA graph.
    bound = max_norm.to(total, copy=True) if isinstance(max_norm, Tensor) else total.new_full((), max_norm)
    said = A_TENSOR if isinstance(max_norm, Tensor) else f"{float(max_norm)}"
    return Clip(dict.fromkeys(norms.squared, factors), bound, bound=Bound(f"clipped to {said}"))


def declare_clip(factors: dict[Path, Float[Tensor, " batch"]], sensitivity: Float[Tensor, ""]) -> Clip:
    """Return clip factors of your own, with the sensitivity that you state, unchecked; for a ``ClipStyle`` of your own.

    Nothing checks that every sample's gradient, each leaf times its factor, has norm at most ``sensitivity``, nor that
    a sample's factors depend on no other sample. The stated epsilon holds only if both are true.
    """
    if not isinstance(sensitivity, Tensor) or sensitivity.ndim or not sensitivity.is_floating_point():
        got = (
            f"{sensitivity.dtype} of shape {tuple(sensitivity.shape)}"
            if isinstance(sensitivity, Tensor)
            else (f"a {type(sensitivity).__name__}")
        )
        raise FdpError(f"sensitivity: expected a floating point tensor of one number, got {got}; torch.tensor(1.0)")
    return Clip(factors, sensitivity.clone(), bound=Bound(OWN_FACTORS))


def flat(*, max_norm: float) -> ClipStyle:
    """Clip each sample's full gradient to ``max_norm``. Sensitivity ``max_norm``."""
    max_norm = _positive("max_norm", max_norm)
    return _static("flat", lambda norms: clip_to(norms, max_norm=max_norm))


def automatic(*, max_norm: float, gamma: float = 0.01) -> ClipStyle:
    """Scale each sample's full gradient to just under ``max_norm``. Sensitivity ``max_norm``."""
    max_norm, gamma = _positive("max_norm", max_norm), _positive("gamma", gamma)

    def clip(norms: Norms) -> Clip:
        total = norms.total()
        factors = normalising_factors(total, max_norm=max_norm, gamma=gamma)
        bound = Bound(f"normalised to {float(max_norm)}, {float(gamma)}")
        return Clip(dict.fromkeys(norms.squared, factors), total.new_full((), max_norm), bound=bound)

    return _static("automatic", clip)


def per_group(*, groups: Mapping[str, Sequence[Path]], max_norms: Mapping[str, float]) -> ClipStyle:
    """Clip every group of leaves on its own. Sensitivity ``sqrt(sum_k max_norms[k]^2)``.

    Every leaf must be in exactly one group; a leaf in none or in two is an error that names it.
    """
    if set(groups) != set(max_norms):
        raise FdpError(f"groups: expected a max_norm for each of {sorted(groups)}, got {sorted(max_norms)}")
    max_norms = {group: _positive(f"max_norms[{group!r}]", max_norm) for group, max_norm in max_norms.items()}
    if empty := sorted(group for group, paths in groups.items() if not paths):
        raise FdpError(f"groups: expected at least one leaf in every group, got none in {empty}")
    members = [path for group in groups.values() for path in group]
    if twice := sorted({path for path in members if members.count(path) > 1}):
        raise FdpError(f"groups: expected every leaf in one group, got {twice} in two")

    def clip(norms: Norms) -> Clip:
        if odd := sorted(set(members) ^ set(norms.squared)):
            raise FdpError(f"groups: expected to cover exactly the trainable leaves; missing or unknown: {odd}")
        parts = {
            group: clip_to(Norms({path: norms.squared[path] for path in paths}), max_norm=max_norms[group])
            for group, paths in groups.items()
        }
        return _joined(norms, list(parts.values()))

    return _static("per-group", clip)


def per_layer(*, max_norm: float) -> ClipStyle:
    """Clip every leaf on its own to ``max_norm / sqrt(number of leaves)``. Sensitivity ``max_norm``."""
    max_norm = _positive("max_norm", max_norm)

    def clip(norms: Norms) -> Clip:
        share = max_norm / math.sqrt(len(norms.squared))
        return _joined(norms, [clip_to(Norms({path: sq}), max_norm=share) for path, sq in norms.squared.items()])

    return _static("per-layer", clip)


def quantile(*, max_norm: float, target_quantile: float, learning_rate: float, count_noise: float) -> ClipStyle:
    """Clip as ``flat`` does, with a bound that starts at ``max_norm`` and follows the ``target_quantile`` of the norms.

    With ``b = sum_i (1[n_i <= C] - 1/2)``, sensitivity 1/2, released with noise of standard deviation ``count_noise``:
    ``C <- C exp(-learning_rate ((b + noise) / B + 1/2 - target_quantile))``, B the expected batch size.

    Guarantees:
      - the sum's sensitivity is the C that clipped it;
      - the next C depends on the data only through the noised count, which the accountant charges for.
    """
    max_norm, count_noise = _positive("max_norm", max_norm), _positive("count_noise", count_noise)
    learning_rate = _positive("learning_rate", learning_rate)
    target_quantile = probability("target_quantile", target_quantile)

    def clip(norms: Norms, bound: Tensor) -> Clip:
        return clip_to(norms, max_norm=bound)

    def tally(norms: Norms, mask: Tensor, bound: Tensor) -> Tensor:
        inside = (norms.total() <= bound).float() - 0.5
        return torch.where(mask > 0, inside, torch.zeros_like(inside)).sum()

    def update(bound: Tensor, total: Tensor, key: Key, expected_batch_size: float) -> Tensor:
        # Fold in a number, not a path, so that no leaf's noise shares the draw.
        deviation = torch.full((), count_noise, dtype=torch.float64, device=total.device)
        fraction = noised(total, deviation, keys.fold_in(key, 0)) / expected_batch_size + 0.5
        return bound * torch.exp(-learning_rate * (fraction - target_quantile)).to(bound.dtype)

    return ClipStyle("quantile", lambda: torch.tensor(float(max_norm)), clip, tally, update, count_noise)


def _static(name: str, clip: Callable[[Norms], Clip]) -> ClipStyle:
    """Return a style without state."""

    def tally(norms: Norms, mask: Tensor, state: Tree) -> Tensor:
        return torch.zeros((), device=mask.device)

    def update(state: Tree, total: Tensor, key: Key, expected_batch_size: float) -> Tree:
        return state

    return ClipStyle(name, lambda: (), lambda norms, state: clip(norms), tally, update, None)


def _joined(norms: Norms, parts: Sequence[Clip]) -> Clip:
    """Join the clips of disjoint groups: the sensitivity is the root of the sum of their squares."""
    finite = torch.isfinite(norms.total())  # a sample that is not finite in one leaf contributes to none
    factors = {path: factor * finite for part in parts for path, factor in part.factors.items()}
    bound = torch.stack([part.sensitivity for part in parts]).square().sum().sqrt()
    said = Bound(f"groups: {'; '.join(part.bound.by for part in parts if part.bound is not None)}")
    return Clip({path: factors[path] for path in norms.squared}, bound, bound=said)


def _positive(name: str, value: float) -> float:
    return positive_number(name, value, advice="; it bounds what one sample can do")
