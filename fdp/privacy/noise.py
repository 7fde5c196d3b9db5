"""The Gaussian mechanism: ``value + noise_multiplier * sensitivity * N(0, I)``, one draw per global element.

Noise is a function of (key, path, element index): added once, after the sum over microbatches and ranks, and the same
for every way of splitting the batch or sharding the parameters.

    noisy = g round((value + s x) / g),     g = 2^(floor(log2 s) - 20),     s = noise_multiplier * sensitivity

x is a standard normal draw with 64 random bits; all is in float64. The low bits of a floating-point sum reveal its
terms (Mironov 2012), so the noised value is rounded to a grid of public width g, about a millionth of s, before
anything else is computed from it. Each step of the grid holds 2^31 possible values of s x: for any value, every grid
point has its Gaussian probability to about one part in 2^30.

The scale s = z C is computed in one place, :func:`noise_deviation`; the fused update of ``fdp.fast`` calls it too.

    >>> noisy = add_gaussian(total, key=key, step=t, noise_multiplier=1.1)  # total: ClippedSum; key: the run's
    >>> mean = expected_mean(noisy, sampling)                               # over a public constant, after the noise
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from fdp_kernels import cpu_library
from fdp_kernels.cpu_library import addresses_of, dense
from fdp_kernels.plain import are_plain
from jaxtyping import Float, Int
from torch import Tensor

from fdp import keys
from fdp.arguments import positive_number
from fdp.types import Bound, ClippedSum, FdpError, Flat, Key, Path, ShardWindow

GRID_BITS = 20
"""Noised values are rounded to a grid that is finer than the noise by this many powers of two."""

LEAST_DEVIATION = 2.0**-900
"""Below this deviation, one over the grid might be infinite: leaves are noised one by one."""

ELEMENTS_IN_CACHE = 1 << 16
"""Elements that are rounded at a time on a CPU: half a MB, which stays in its cache between the operations."""


class Expecting(Protocol):
    """A sampling with a public expected batch size, such as ``fdp.privacy.sampling.Poisson``."""

    @property
    def expected_batch_size(self) -> float: ...


def add_gaussian(
    total: ClippedSum,
    *,
    key: Key,
    step: int | Int[Tensor, ""],
    noise_multiplier: float,
    shard_windows: Mapping[Path, ShardWindow] | None = None,
) -> Flat:
    """Return ``total.value + noise_multiplier * total.sensitivity * N(0, I)``; ``key`` is the root of the run.

    If the values are shards, ``shard_windows`` gives their positions; a shard gets its part of the leaf's noise.

    Guarantees:
      - the scale comes from ``total.sensitivity``: only a ClippedSum is accepted, made by ``clipped_sum`` or by
        :func:`declare_sensitivity`;
      - every value returned is a multiple of ``grid_of(scale)``, a power of two: its low bits reveal nothing;
      - each element's noise is drawn from (key, step, path, index): no two elements, steps or keys share a draw, nor do
        two clip norms or noise multipliers under one key. (torch.compile cannot read a clip norm that is a tensor, or
        that came with factors made by hand: there such norms are not told apart.)
    """
    _check(total, noise_multiplier)
    assert total.bound is not None
    purpose = f"noise {float(noise_multiplier)}, {total.bound.by}"
    if total.bound.unnamed and not torch.compiler.is_compiling():
        purpose += f", {float(total.sensitivity)}"
    return add_noise(
        total, key=keys.step_key(key, purpose, step), noise_multiplier=noise_multiplier, shard_windows=shard_windows
    )


def add_noise(
    total: ClippedSum, *, key: Key, noise_multiplier: float, shard_windows: Mapping[Path, ShardWindow] | None = None
) -> Flat:
    """Add noise as :func:`add_gaussian` does, but from the key of this release, which must not be used for another."""
    _check(total, noise_multiplier)
    deviation = noise_deviation(total, noise_multiplier)
    on_cpu = all(value.device.type == "cpu" for value in total.value.values())
    if shard_windows is None and on_cpu and not torch.compiler.is_compiling():
        return noised_leaves(total.value, deviation, key)
    return {
        path: noised(value, deviation, keys.fold_in(key, path), None if shard_windows is None else shard_windows[path])
        for path, value in total.value.items()
    }


def noise_deviation(total: ClippedSum, noise_multiplier: float) -> Float[Tensor, ""]:
    """Return the standard deviation ``noise_multiplier * sensitivity`` (z C) of the noise, in float64."""
    return noise_multiplier * total.sensitivity.double()


def noised(
    value: Float[Tensor, " *shape"], deviation: Float[Tensor, ""], key: Key, place: ShardWindow | None = None
) -> Float[Tensor, " *shape"]:
    """Return ``value + deviation * N(0, I)`` in float64, rounded to the grid; element i takes draw i of the key."""
    shape, window = (tuple(value.shape), None) if place is None else place
    deviation = deviation.to(value.device, torch.float64)
    draw = keys.normal(key, shape, dtype=torch.float64, window=window).to(value.device)
    return rounded(value.double() + draw * deviation, grid_of(deviation))


def noised_leaves(values: Flat, deviation: Float[Tensor, ""], key: Key) -> Flat:
    """Return :func:`noised` of every full leaf, on the CPU, in one pass over all of them.

    Guarantees:
      - leaf ``path`` is ``noised(values[path], deviation, fold_in(key, path))``, bit for bit, whichever leaves share
        the pass.
    """
    if float(deviation) < LEAST_DEVIATION:
        return {path: noised(value, deviation, keys.fold_in(key, path)) for path, value in values.items()}
    sizes = [value.numel() for value in values.values()]
    drawn = keys.normals(keys.fold_in_nonces(key, keys.path_nonces(tuple(values))), sizes)
    deviation = deviation.to(drawn)
    grid = grid_of(deviation)
    units = 1 / grid  # a power of two: in units of the grid, the bits are the same
    noisy = {path: part.view(value.shape) for (path, value), part in zip(values.items(), drawn.split(sizes))}
    if are_plain([drawn, *values.values()]) and (loops := cpu_library.library()) is not None:
        wide = [dense(value.double()) for value in values.values()]
        numbers, table = torch.stack([deviation * units, units, grid]), addresses_of((leaf,) for leaf in wide)
        loops.add_on_grid(drawn, table, torch.tensor(sizes, device="cpu"), numbers, len(wide))
        return noisy
    drawn.mul_(deviation * units)
    for path, value in values.items():
        noisy[path].addcmul_(value.double(), units)
    for some in drawn.split(ELEMENTS_IN_CACHE):
        some.round_().mul_(grid)
    return noisy


def grid_of(deviation: Float[Tensor, ""]) -> Float[Tensor, ""]:
    """Return ``2^(floor(log2 deviation) - 20)``, exactly, from the exponent of the number."""
    power = (deviation.double().view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    return power * 2.0**-GRID_BITS


def rounded(value: Float[Tensor, " *shape"], grid: Float[Tensor, ""]) -> Float[Tensor, " *shape"]:
    """Round to the nearest multiple of ``grid``, a power of two: exact in float64."""
    return (value / grid).round() * grid


def declare_sensitivity(value: Flat, sensitivity: float | Float[Tensor, ""]) -> ClippedSum:
    """Return a sum that you clipped yourself, with the sensitivity that you state, unchecked.

    Nothing checks that adding or removing one sample moves ``value`` by at most ``sensitivity``, in the Euclidean norm
    over all leaves together. The stated epsilon holds only if that is true.

    A tensor is read, since two sensitivities must not share their noise: it cannot be one that a compiler traces.
    """
    if isinstance(sensitivity, Tensor) and sensitivity.ndim:
        raise FdpError(f"sensitivity: expected a number, got a tensor of shape {tuple(sensitivity.shape)}")
    number = positive_number("sensitivity", float(sensitivity) if isinstance(sensitivity, Tensor) else sensitivity)
    first = next(iter(value.values()))
    bound = torch.full((), number, dtype=torch.float64, device=first.device)
    return ClippedSum(value, bound, Bound(f"declared {number}"))


def expected_mean(noisy: Flat, sampling: Expecting) -> Flat:
    """Divide the noisy sum by the expected batch size of ``sampling``: a public constant, not the number drawn.

    Guarantees:
      - the divisor does not depend on the batch.
    """
    if not hasattr(sampling, "expected_batch_size"):
        raise FdpError(
            f"expected_mean: expected the sampling of the mechanism, got {type(sampling).__name__}: the number of "
            f"samples that were drawn is private, and dividing by it would reveal it. Give mechanism.sampling"
        )
    return {path: leaf * (1 / sampling.expected_batch_size) for path, leaf in noisy.items()}


def _check(total: ClippedSum, noise_multiplier: float) -> None:
    if not isinstance(total, ClippedSum):
        raise FdpError(
            f"add_gaussian: expected a ClippedSum, which carries its sensitivity, got {type(total).__name__}"
        )
    if total.bound is None:
        raise FdpError(
            "add_gaussian: expected a ClippedSum that fdp.clipped_sum made, got one made by hand, or of a Clip made by "
            "hand: nothing vouches for its sensitivity, which scales the noise. Use clipped_sum(stash, clip); or, for "
            "a sum that you clipped yourself, fdp.privacy.noise.declare_sensitivity(value, sensitivity)"
        )
    positive_number(
        "noise_multiplier",
        noise_multiplier,
        advice=". A sum without noise is not private; if that is what you want, use total.value",
    )
