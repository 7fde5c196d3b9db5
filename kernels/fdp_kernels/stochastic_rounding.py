"""Stochastic rounding of float32 to bfloat16: up or down at random, so that the average is right.

    r_i     = 16 bits of hash(first + i, step)                     a counter-based hash, the same on every device
    y_i     = upper 16 bits of (bits(x_i) + r_i)                   bfloat16;   E[y_i] = x_i

A running mean that moves by less than 2^-9 of itself per step stands still if it is rounded to the nearest bfloat16
(Adam's second moment, with 1 - b2 = 1e-3); rounded at random, it moves on average. The bits decide nothing but a
rounding, of numbers that were noised before: they need not be secret.

    >>> low, high = random_bits_reference(count, first, step)      # two streams of 16 bits
    >>> narrow = round_reference(x, low)

NaN and infinities stay what they are. Guarantees:
  - the result is one of the two neighbours of x in bfloat16, x itself if it is one;
  - over all 2^16 values of the bits the mean is x exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fdp_kernels.op import jit, tl

WORD = 0xFFFFFFFF


def random_bits_reference(count: int, first: int, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return two streams of 16 bits for elements ``first`` to ``first + count``, int64; ``step`` is a 0-d tensor."""
    index = torch.arange(first, first + count, device=step.device)
    h = (index * 0x9E3779B1 + step.long() * 0x85EBCA77) & WORD  # products wrap at 2^64, which leaves 32 bits right
    h = ((h ^ (h >> 16)) * 0x21F0AAAD) & WORD
    h = ((h ^ (h >> 15)) * 0x735A2D97) & WORD
    h = h ^ (h >> 15)
    return h & 0xFFFF, h >> 16


def round_reference(x: Tensor, bits: Tensor) -> Tensor:
    """Return float32 ``x`` rounded to bfloat16 by the random ``bits`` (int64 below 2^16, of the same shape)."""
    raw = x.view(torch.int32).long() & WORD
    up = (raw + bits) & 0xFFFF0000
    cut = torch.where(up >= 1 << 31, up - (1 << 32), up).to(torch.int32).view(torch.float32)
    return torch.where(x.isfinite(), cut, x).to(torch.bfloat16)


@jit
def random_bits(index, step):
    """Return the two streams of :func:`random_bits_reference`, uint32, for int64 ``index`` and a scalar ``step``."""
    h = index.to(tl.uint32) * 0x9E3779B1 + step.to(tl.uint32) * 0x85EBCA77
    h = (h ^ (h >> 16)) * 0x21F0AAAD
    h = (h ^ (h >> 15)) * 0x735A2D97
    h = h ^ (h >> 15)
    return h & 0xFFFF, h >> 16


@jit
def round_by_bits(x, bits):
    """Return :func:`round_reference` as float32, whose lower 16 bits are 0: the cast to bfloat16 is exact."""
    raw = x.to(tl.uint32, bitcast=True)
    finite = (raw & 0x7F800000) != 0x7F800000
    return tl.where(finite, ((raw + bits) & 0xFFFF0000).to(tl.float32, bitcast=True), x)
