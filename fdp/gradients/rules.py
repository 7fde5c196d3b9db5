"""Rules of operations: how one use of a parameter is recorded, and its per-sample gradient, norm and weighted sum.

    per_sample_gradient   G_b
    squared_norm          |G_b|^2, from G_b or from Gram matrices (Goodfellow 2015, arXiv 1510.01799; Li et al. 2022,
                          arXiv 2110.05679)
    cross_term            <G_b, H_b> of two uses of one leaf: |G + H|^2 = |G|^2 + 2 <G, H> + |H|^2
    weighted_gradient     sum_b c_b G_b

The two forms of a record, and sums over several uses of a leaf, are in ``fdp.gradients.sample_gradients``. Pairs in
half precision on a GPU are multiplied by the kernels of ``fdp_kernels``, each of which states its rounding error.
Everything else that affects privacy is computed in float64.

A new operation needs a :class:`Rule`, two functions; :func:`check_rule` compares it with ``vmap(grad)``:

    >>> LINEAR = Rule("linear", forward=F.linear, record=lambda x, g, shape: Pair(rows(g), rows(x), shape))
    >>> check_rule(LINEAR, x, weight)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
from fdp_kernels import keep_hopper
from fdp_kernels.direct import direct
from fdp_kernels.embedding import embedding_norms, embedding_sum
from fdp_kernels.ghost import ghost
from fdp_kernels.keep import keep
from fdp_kernels.stored_gram import stored_gram
from fdp_kernels.weighted import weighted
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.sample_gradients import (
    Dense,
    OneHot,
    Pair,
    Record,
    cross_term,
    direct_squared_norm_of_uses,
    floored_gram_squared_norm,
    gram_rounding,
    gram_squared_norm,
    per_sample_gradient,
    rows,
    squared_norm,
    sum_of_squares,
    weighted_gradient_of_uses,
    widen_record,
)
from fdp.types import FdpError

__all__ = [
    "Dense",
    "OneHot",
    "Pair",
    "Record",
    "Rule",
    "check_rule",
    "cross_term",
    "direct_squared_norm",
    "drop_tiny_factors",
    "gram_rounding",
    "gram_squared_norm",
    "has_kernels",
    "kernel_factors",
    "kernel_stores_faster",
    "per_sample_gradient",
    "rows",
    "split_samples",
    "squared_norm",
    "store_gradient",
    "stored_squared_norm",
    "symmetric_squared_norm",
    "weighted_gradient",
    "widen_record",
]


HALF = (torch.bfloat16, torch.float16)
SAMPLES_PER_FLOAT32_SUM = 64
"""Most samples that a kernel sums in float32; partial sums of this many samples are added in float64."""
MIN_FACTOR = 2.0**-100
"""Kernels treat smaller factors as 0: near the smallest float32 numbers, rounding would exceed the slack."""
LONG_SEQUENCE_TOKENS, LARGE_GRADIENT_ELEMENTS = 2048, 1 << 23
"""``bmm`` plus a norm pass beats the Triton body of our fused kernel for gradients of at least this many elements and
sequences of at least this many tokens; for smaller gradients, from twice as many tokens. The body for Hopper is as fast
as ``bmm`` at 2048 tokens, and four times as fast for a vocabulary of odd size."""


class Rule(NamedTuple):
    """An operation ``y = forward(x, weight, **options)`` and the function that records a use of it.

    ``record(x, g, shape, **options)`` gets the input, the output gradient (same shape as ``y``) and the weight's
    shape; samples are dimension 0 of both. It returns a :class:`Pair` or a :class:`Dense`.
    """

    name: str
    forward: Callable[..., Tensor]
    record: Callable[..., Record]


def store_gradient(record: Record) -> Dense:
    """Return ``G_b`` as a dense record to store until the sum, with its squares if our kernel computes it."""
    if isinstance(record, Dense):
        return record
    left, right, shape = record
    if isinstance(left, OneHot) or not kernel_stores_faster(record):
        return Dense(per_sample_gradient(record))
    gradient, squares = keep(left.squeeze(1), right.squeeze(1))
    return Dense(gradient.view(-1, *shape), squares)


def kernel_stores_faster(record: Record) -> bool:
    """Return True if our fused kernel beats ``bmm`` plus a norm pass for this shape."""
    if not has_kernels(record) or isinstance(record.left, OneHot) or record.left.shape[1] > 1:
        return False
    long = LONG_SEQUENCE_TOKENS if math.prod(record.shape) >= LARGE_GRADIENT_ELEMENTS else 2 * LONG_SEQUENCE_TOKENS
    if record.left.shape[2] < long:
        return True
    return keep_hopper.choose_tile([record.left.squeeze(1)], [record.right.squeeze(1)]) is not None


def direct_squared_norm(record: Record) -> Float[Tensor, " batch"]:
    """Return ``|G_b|^2`` of what ``weighted_gradient`` adds for the sample; kernels do not store ``G_b``.

    Float32 pairs are multiplied in float64, as in the sum. Rounding never understates the norm.
    """
    if not has_kernels(record):
        return direct_squared_norm_of_uses([record])
    if isinstance(record.left, OneHot):
        return embedding_norms(record.left.ids, record.right.squeeze(1))
    return _sum_over_groups(direct, record)


def symmetric_squared_norm(record: Record) -> Float[Tensor, " batch"]:
    """Return ``|G_b|^2`` from half the tiles of both Gram matrices, which are not stored.

    Rounding never understates the norm.
    """
    if not has_kernels(record):
        return stored_squared_norm(record)
    return direct_squared_norm(record) if isinstance(record.left, OneHot) else _sum_over_groups(ghost, record)


def stored_squared_norm(record: Record) -> Float[Tensor, " batch"]:
    """Return ``|G_b|^2`` from stored Gram matrices. Rounding never understates the norm."""
    if not has_kernels(record):
        return floored_gram_squared_norm(record)
    return direct_squared_norm(record) if isinstance(record.left, OneHot) else _sum_over_groups(stored_gram, record)


def has_kernels(record: Record) -> TypeGuard[Pair]:
    """Return True for a pair in half precision on a GPU, whose products are computed by kernels, in float32.

    Meta tensors count as being on a GPU: ``fdp plan`` uses them for one that need not be there.
    """
    if not isinstance(record, Pair):
        return False
    left, right = record.left, record.right
    alike = isinstance(left, OneHot) or left.dtype == right.dtype
    return alike and right.device.type in ("cuda", "meta") and right.dtype in HALF


def _sum_over_groups(norms: Callable[[Tensor, Tensor], Tensor], record: Pair) -> Float[Tensor, " batch"]:
    """Return the sum of squared norms over groups; the kernel gets groups as samples."""
    left, right = record.left, record.right
    assert isinstance(left, Tensor)
    return norms(left.flatten(0, 1), right.flatten(0, 1)).view(left.shape[:2]).sum(1)


def weighted_gradient(record: Record, factors: Float[Tensor, " batch"]) -> Float[Tensor, " *shape"]:
    """Return ``sum_b factors_b G_b`` in float64.

    In float32 the rounding of a matrix product can exceed the clipping bound. A sample whose tokens cancel leaves an
    error of ``eps sum_t |left_t| |right_t|``, and rounds the other samples' parts to its size. A sum over thousands of
    samples is rounded to the size of that sum. In float64, with one accumulator per sample, neither matters.

    Pairs in half precision on a GPU are summed in float32 by kernels, in the order in which ``direct_squared_norm``
    measured them, so that the same terms cancel in both. At most 64 samples are summed in float32; the rounding is then
    at most (64 + 3)^2 2^-24, or 3e-4, of one sample's bound.

    Guarantees:
      - a sample whose factor is 0 contributes exactly 0, even if its gradient is NaN or infinite;
      - a sample's tokens are added up before they meet another sample's;
      - factors are never rounded to the record's dtype.
    """
    factors = factors.double()
    if has_kernels(record):
        return _weighted_gradient_half(record, factors)
    return weighted_gradient_of_uses([record], factors)


def kernel_factors(factors: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Return the factors in float32 for kernels, without the tiny ones."""
    return drop_tiny_factors(factors).float()


def drop_tiny_factors(factors: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Return the factors, those below ``MIN_FACTOR`` as 0."""
    return torch.where(factors < MIN_FACTOR, 0.0, factors)


def _weighted_gradient_half(record: Pair, factors: Tensor) -> Tensor:
    left, right, shape = record
    if len(right) > SAMPLES_PER_FLOAT32_SUM:  # in float32 a sum of many samples is rounded to its own size
        parts = zip(split_samples(record), factors.split(SAMPLES_PER_FLOAT32_SUM))
        return sum(_weighted_gradient_half(part, c).double() for part, c in parts)  # type: ignore[return-value]
    if isinstance(left, OneHot):
        return embedding_sum(left.ids, right.squeeze(1), factors, shape[0]).reshape(shape)
    groups = [weighted(g, x, kernel_factors(factors)) for g, x in zip(left.unbind(1), right.unbind(1))]
    return (groups[0] if len(groups) == 1 else torch.cat(groups)).reshape(shape)


def split_samples(record: Pair) -> list[Pair]:
    """Return the pairs of at most ``SAMPLES_PER_FLOAT32_SUM`` samples each."""
    left, right, shape = record
    ids = left.ids if isinstance(left, OneHot) else left
    lefts = [OneHot(part) if isinstance(left, OneHot) else part for part in ids.split(SAMPLES_PER_FLOAT32_SUM)]
    return [Pair(one, other, shape) for one, other in zip(lefts, right.split(SAMPLES_PER_FLOAT32_SUM))]


def check_rule(rule: Rule, x: Tensor, weight: Tensor, *, tolerance: float = 1e-4, **options: Any) -> None:
    """Compare a rule with ``vmap(grad)`` on the given input and weight; raise an error that says what differs.

    Runs in float64 with one random output gradient. Checks that samples do not mix, the per-sample gradient, both
    norms, the cross term with itself and the weighted sum (with one factor of zero).
    """
    x = x.double() if x.is_floating_point() else x
    weight = weight.double()
    generator = torch.Generator().manual_seed(7_046_029)  # not a seed that x may come from
    y = rule.forward(x, weight, **options)
    g = torch.randn(y.shape, dtype=y.dtype, generator=generator)
    factors = torch.rand(x.shape[0], dtype=y.dtype, generator=generator)
    factors[0] = 0.0

    def dot(weight: Tensor, x1: Tensor, g1: Tensor) -> Tensor:
        return (rule.forward(x1.unsqueeze(0), weight, **options) * g1.unsqueeze(0)).sum()

    truth = torch.func.vmap(torch.func.grad(dot), in_dims=(None, 0, 0))(weight, x, g)
    square = sum_of_squares(truth)
    record = rule.record(x, g, tuple(weight.shape), **options)
    separate = torch.cat([rule.forward(x[b : b + 1], weight, **options) for b in range(x.shape[0])])
    mean = torch.einsum("b,b...->...", factors, truth)
    results: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "output of one sample alone": (lambda: separate, y),
        "per-sample gradient": (lambda: per_sample_gradient(record), truth),
        "squared norm": (lambda: squared_norm(record), square),
        "squared norm by Gram": (lambda: gram_squared_norm(record), square),
        "cross term": (lambda: cross_term(record, record), square),
        "weighted gradient": (lambda: weighted_gradient(record, factors), mean),
    }
    for what, (compute, expected) in results.items():
        got = compute()
        if got.shape != expected.shape:
            raise FdpError(f"rule {rule.name}: {what}: expected shape {tuple(expected.shape)}, got {tuple(got.shape)}")
        error = float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
        if not error <= tolerance:
            raise FdpError(f"rule {rule.name}: {what} differs from vmap(grad) by {error:.2e} (allowed {tolerance:.0e})")
