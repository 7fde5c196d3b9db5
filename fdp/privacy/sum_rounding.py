"""The rounding of a private sum, as part of its sensitivity: ``C (1 + slack)``, so that the noise covers it.

A step adds up clipped gradients, each of norm at most C, and may round the sum to float32 on the way. Rounding moves
every number by at most ``u = 2^-24`` of itself, hence a vector by at most u of its Euclidean norm, and a partial sum of
n samples has norm at most ``n C``. So the distance between the computed and the exact sum is at most E C, where E adds

    kernels          n u (b/2 + 3)       n samples in half precision on a GPU, of which a kernel adds b, at most 64, in
                                         float32 before a float64 sum takes over (``fdp_kernels.weighted``); 3 times
                                         that if a leaf is a head and an embedding at once (``fdp_kernels.tied``)
    microbatches     u N_k               every time the sum over the first k microbatches, of N_k samples, is stored in
                                         float32; the next one is added in float64 and the result is rounded once
    reduction        (R + 1) u N         if R ranks' sums are added in float32 (rounded, then R - 1 additions)

and errors made before are rounded with the sum: :func:`relative_error` adds them up one microbatch after the other.
Neighbouring datasets differ by one sample. If it is drawn, all samples after it move up by one place, so microbatches
differ from there on and their roundings may be anything. The sums differ by at most C, plus E C for each of them:

    sensitivity <= C (1 + slack),     slack = 2 E

Norms are never below what is added (``fdp.gradients.rules``), stored gradients are weighted and added in float64 (those
of a head, with its embedding, are rounded to float32 for every b samples, and those in 8 bits are added in float32, b
at a time: the term of kernels covers both), the noise is added in float64, and what was rounded to float32 before is
read exactly. A kernel adds an embedding's rows in float64; if rows of a sample cancel, their size may exceed C so far
that float64 rounds b samples by ``b^2 2^-25 C`` (``fdp_kernels.embedding``), which the term of kernels covers. What
float64 rounds elsewhere is below 1e-6 C and not in the slack; nor are numbers below 2^-126, which can add 1e-28 to a
sum.

**The slack is a public number**: the noise is scaled by it. It bounds the number of samples by
``expected + 10 sqrt(expected) + 100``, which a Poisson draw exceeds with probability below 1e-22, and the number of
microbatches by that many samples in microbatches of the public size, and 3 for a tail in smaller ones. A step with more
is refused (:func:`check_draw`); that it was refused is then all that is released. So the promise of a run of t steps is
(epsilon, delta + 1e-22 t).

    >>> slack = rounding_slack(mechanism.sampling, Rounding(torch.float32, microbatch_size=16))
    >>> total = total._replace(sensitivity=total.sensitivity * (1 + slack))
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fdp.privacy.sampling import Poisson
from fdp.types import FdpError

UNIT = 2.0**-24
"""The most that rounding to float32 moves a number, as a fraction of it."""
SMALLER_MICROBATCHES = 3
"""Microbatches of a step that are smaller than the others, at most (``fdp.privacy.microbatches``)."""
TIED = 3
"""Head and embedding of a tied leaf are two sums of norm sqrt(2) n C at most."""


class Rounding(NamedTuple):
    """The places where a private sum is rounded to less than float64; by default there are none.

    ``sum_dtype``: of the sum over microbatches; if float32, ``microbatch_size`` (samples of all ranks) is needed.
    ``reduce_dtype``: of the sum over ``ranks``. ``kernel_samples``: samples that kernels add up in float32. ``tied``:
    a leaf is a head and an embedding.
    """

    sum_dtype: torch.dtype = torch.float64
    microbatch_size: int | None = None
    reduce_dtype: torch.dtype = torch.float64
    ranks: int = 1
    kernel_samples: int = 0
    tied: bool = False

    @property
    def exact(self) -> bool:
        """Return True if nothing is rounded to less than float64."""
        return self.sum_dtype == self.reduce_dtype == torch.float64 and self.kernel_samples == 0


def check_rounding(rounding: Rounding) -> None:
    """Refuse dtypes too narrow for a private sum, and float32 sums over microbatches of unknown size."""
    for name, dtype in (("sum_dtype", rounding.sum_dtype), ("reduce_dtype", rounding.reduce_dtype)):
        if dtype not in (torch.float32, torch.float64):
            raise FdpError(
                f"{name}: expected float64 or float32 for private sums, got {dtype}: rounding by 2^-8 of a sum is more "
                f"than one sample may move it"
            )
    if rounding.sum_dtype == torch.float32 and not rounding.microbatch_size:
        raise FdpError(
            "sum_dtype: expected Memory(sum_dtype=torch.float32, microbatch_size=...): the number of microbatches "
            "decides how often a sum is rounded, and so how much noise covers it; got no microbatch_size"
        )


def most_samples(sampling: Poisson) -> float:
    """Return ``expected + 10 sqrt(expected) + 100``, or the size that draws are truncated to, if that is less."""
    expected, limit = sampling.expected_batch_size, sampling.max_batch_size
    most = expected + 10 * math.sqrt(expected) + 100
    return most if limit is None else min(most, limit)


def most_microbatches(sampling: Poisson, microbatch_size: int) -> int:
    """Return the largest number of microbatches of a step that :func:`check_draw` lets pass."""
    return math.ceil(most_samples(sampling) / microbatch_size) + SMALLER_MICROBATCHES


def rounding_slack(sampling: Poisson, rounding: Rounding) -> float:
    """Return ``2 E``: how much rounding adds to the sensitivity of a sum, as a fraction of C; 0 in float64.

    Guarantees:
      - a function of public numbers, whatever was drawn;
      - neighbouring batches that :func:`check_draw` lets pass have computed sums at most ``C (1 + slack)`` apart.
    """
    check_rounding(rounding)
    return 0.0 if rounding.exact else 2 * relative_error(most_samples(sampling), rounding)


def relative_error(samples: float, rounding: Rounding) -> float:
    """Return E: the distance of the computed sum of this many samples from the exact one, as a fraction of C, at most.

    The number of microbatches is that of :func:`most_microbatches`; the first ones are full, which rounds most.
    """
    error = samples * UNIT * (rounding.kernel_samples / 2 + 3) if rounding.kernel_samples else 0.0
    error *= TIED if rounding.tied else 1
    if rounding.sum_dtype == torch.float32:
        assert rounding.microbatch_size is not None
        for k in range(1, math.ceil(samples / rounding.microbatch_size) + SMALLER_MICROBATCHES + 1):
            error += UNIT * (min(k * rounding.microbatch_size, samples) + error)
    times = 0
    if rounding.reduce_dtype == torch.float32:
        times = rounding.ranks + 1
    elif rounding.sum_dtype == torch.float32 and rounding.ranks > 1:  # reduced in float64, stored in float32 again
        times = 1
    for _ in range(times):
        error += UNIT * (samples + error)
    return error


def check_draw(samples: int, microbatches: int, sampling: Poisson, rounding: Rounding) -> None:
    """Refuse a step of more samples or microbatches than the slack covers, before anything of it is released.

    ``samples`` may be an upper bound. Nothing is refused if nothing is rounded.
    """
    if rounding.exact:
        return
    # The error says that there were too many and not how many, which is private.
    limit = most_samples(sampling)
    advice = "announce a larger population (--population) if it is below the number of samples"
    if rounding.sum_dtype == torch.float32:
        advice += ", or sum in float64 (--sum-dtype float64)"
    if samples > limit:
        raise FdpError(
            f"batch: expected at most {limit:.0f} samples in a step that expects {sampling.expected_batch_size:g}, got "
            f"more, which happens by chance with probability below 1e-22; the noise would not cover the rounding of "
            f"their sum. Nothing was released. To go on, {advice}"
        )
    if rounding.sum_dtype == torch.float64:
        return
    assert rounding.microbatch_size is not None
    most = most_microbatches(sampling, rounding.microbatch_size)
    if microbatches > most:
        raise FdpError(
            f"batch: expected at most {most} microbatches, as of {rounding.microbatch_size} samples, got more; the "
            f"noise would not cover the rounding of their float32 sum. Give the size that is used as --microbatch "
            f"(in Python: sample_batch and Memory the same microbatch_size), or sum in float64"
        )
