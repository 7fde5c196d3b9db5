"""Rules: what one use of a parameter contributes to each sample's gradient, and four things to do with it.

The forms of a record, and what a sample's uses of a leaf add up to in float64, are in
``fdp.gradients.sample_gradients``. In half precision on a GPU the products run by the kernels of ``fdp_kernels``, each
of which says what rounding it leaves; everywhere else all that bears on privacy is done in float64.

On either form:  ``per_sample_gradient``  G_b;  ``squared_norm``  |G_b|^2, from G_b or from Gram matrices without
forming it (Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679);  ``cross_term``  <G_b, H_b> of two
uses of one leaf, because |G + H|^2 = |G|^2 + 2<G, H> + |H|^2;  ``weighted_gradient``  sum_b c_b G_b.

A new operation needs a :class:`Rule`, two functions; :func:`check_rule` compares it with ``vmap(grad)``:

    >>> LINEAR = Rule("linear", forward=F.linear, record=lambda x, g, shape: Pair(rows(g), rows(x), shape))
    >>> check_rule(LINEAR, x, weight)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeGuard

import torch
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
    gram_rounding,
    gram_squared_norm,
    per_sample_gradient,
    rows,
    squared_norm,
    sum_of_squares,
    weighted_gradient_of_uses,
    widened,
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
    "gram_rounding",
    "gram_squared_norm",
    "has_kernels",
    "kept",
    "kept_by_kernel",
    "kernel_factors",
    "per_sample_gradient",
    "rows",
    "squared_norm",
    "stored_squared_norm",
    "symmetric_squared_norm",
    "weighted_gradient",
    "widened",
]


HALF = (torch.bfloat16, torch.float16)
TOGETHER = 64
"""Samples whose gradients a kernel adds up in float32; sums of more are added in float64."""
LEAST_FACTOR = 2.0**-100
"""Factors below it are 0 to a kernel: near the smallest numbers of float32 their rounding would exceed the slack."""
LONG, LARGE = 2048, 1 << 23
"""Tokens and elements of a gradient from which on the library's product and a pass over it keep it faster than a kernel
that does both; of smaller gradients from twice the tokens on. Measured on an H200: 4 x 2048 tokens, 1280 -> 5120: 161
and 156 us; 4 x 4096: 297 and 324; 8 x 2048, 2048 -> 8192: 787 and, by an earlier kernel, 895."""


class Rule(NamedTuple):
    """An operation ``y = forward(x, weight, **options)`` and how a use of it is recorded.

    ``record(x, g, shape, **options)`` gets the input, the output gradient (same shape as ``y``) and the weight's
    shape; samples are dimension 0 of both. It returns a :class:`Pair` or a :class:`Dense`.
    """

    name: str
    forward: Callable[..., Tensor]
    record: Callable[..., Record]


def kept(record: Record) -> Dense:
    """``G_b`` of a record, to be kept.

    Of short sequences and small matrices by a kernel that has the squares at hand; of others the library's product and
    a pass over it take less.
    """
    if isinstance(record, Dense):
        return record
    left, right, shape = record
    if isinstance(left, OneHot) or not kept_by_kernel(record):
        return Dense(per_sample_gradient(record))
    gradient, squares = keep(left.squeeze(1), right.squeeze(1))
    return Dense(gradient.view(-1, *shape), squares)


def kept_by_kernel(record: Record) -> bool:
    """Whether a kernel keeps the gradients of the record faster than the library and a pass over them."""
    if not has_kernels(record) or isinstance(record.left, OneHot):
        return False
    long = LONG if math.prod(record.shape) >= LARGE else 2 * LONG
    return record.left.shape[1] == 1 and record.left.shape[2] < long


def direct_squared_norm(record: Record) -> Float[Tensor, " batch"]:
    """``|G_b|^2`` of what ``weighted_gradient`` adds for the sample, ``G_b`` not stored where a kernel can.

    Float32 pairs are multiplied out in float64 by the sum, and so here; rounding never understates the norm.
    """
    if not has_kernels(record):
        return direct_squared_norm_of_uses([record])
    if isinstance(record.left, OneHot):
        return embedding_norms(record.left.ids, record.right.squeeze(1))
    return _over_groups(direct, record)


def symmetric_squared_norm(record: Record) -> Float[Tensor, " batch"]:
    """``|G_b|^2`` by half the tiles of both Gram matrices, none stored; never understated by rounding."""
    if not has_kernels(record):
        return stored_squared_norm(record)
    return direct_squared_norm(record) if isinstance(record.left, OneHot) else _over_groups(ghost, record)


def stored_squared_norm(record: Record) -> Float[Tensor, " batch"]:
    """``|G_b|^2`` by Gram matrices, stored; never understated by rounding."""
    if not has_kernels(record):
        return gram_squared_norm(record).clamp_min(0) + gram_rounding([record])
    return direct_squared_norm(record) if isinstance(record.left, OneHot) else _over_groups(stored_gram, record)


def has_kernels(record: Record) -> TypeGuard[Pair]:
    """Whether the record is a pair in half precision on a GPU: there the products run by kernels, in float32.

    So also where a GPU is only imagined, as ``fdp plan`` does.
    """
    if not isinstance(record, Pair):
        return False
    return record.right.device.type in ("cuda", "meta") and record.right.dtype in HALF


def _over_groups(norms: Callable[[Tensor, Tensor], Tensor], record: Pair) -> Float[Tensor, " batch"]:
    """Squared norms add up over groups, which a kernel sees as samples."""
    left, right = record.left, record.right
    assert isinstance(left, Tensor)
    return norms(left.flatten(0, 1), right.flatten(0, 1)).view(left.shape[:2]).sum(1)


def weighted_gradient(record: Record, factors: Float[Tensor, " batch"]) -> Float[Tensor, " *shape"]:
    """``sum_b factors_b G_b`` in float64.

    In float32 the rounding of a matrix product can exceed the clipping bound: a sample whose tokens cancel leaves
    ``eps sum_t |left_t| |right_t|``, and everyone else's part is rounded to its size; and a sum over thousands of
    samples is rounded to the size of all. In float64, with an accumulator for every sample, neither matters. Pairs in
    half precision on a GPU are summed in float32 by kernels, in the order in which ``direct_squared_norm`` measured
    them: what cancels in the one cancels in the other. The sum of at most 64 samples is rounded to its size:
    (64 + 3)^2 2^-24, 3e-4, of one sample's bound at the worst.

    Guarantees:
      - a sample whose factor is 0 contributes exactly 0, even if its gradient is NaN or infinite;
      - a sample's tokens are added up before they meet another sample's;
      - factors are never rounded to the record's dtype.
    """
    factors = factors.double()
    if has_kernels(record):
        return _half_weighted(record, factors)
    return weighted_gradient_of_uses([record], factors)


def kernel_factors(factors: Float[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """Factors in float32, as kernels take them; 0 below ``LEAST_FACTOR``, where float32 has no digits left."""
    return torch.where(factors < LEAST_FACTOR, torch.zeros_like(factors), factors).float()


def _half_weighted(record: Pair, factors: Tensor) -> Tensor:
    left, right, shape = record
    if len(right) > TOGETHER:  # float32 rounds a sum of many samples to the size of all: add up few at a time
        parts = zip(_samples(left), right.split(TOGETHER), factors.split(TOGETHER))
        return sum(_half_weighted(Pair(g, x, shape), c).double() for g, x, c in parts)  # type: ignore[return-value]
    if isinstance(left, OneHot):
        return embedding_sum(left.ids, right.squeeze(1), factors, shape[0]).reshape(shape)
    groups = [weighted(g, x, kernel_factors(factors)) for g, x in zip(left.unbind(1), right.unbind(1))]
    return (groups[0] if len(groups) == 1 else torch.cat(groups)).reshape(shape)


def _samples(left: Tensor | OneHot) -> list[Tensor | OneHot]:
    if isinstance(left, OneHot):
        return [OneHot(ids) for ids in left.ids.split(TOGETHER)]
    return list(left.split(TOGETHER))


def check_rule(rule: Rule, x: Tensor, weight: Tensor, *, tolerance: float = 1e-4, **options: Any) -> None:
    """Compare a rule with ``vmap(grad)`` on the given input and weight; raise an error that says what differs.

    Runs in float64 on a random output gradient that is the same for all forms. Checks that samples do not mix, the
    per-sample gradient, both norms, the cross term with itself and the weighted sum (with a factor of zero in it).
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
    alone = torch.cat([rule.forward(x[b : b + 1], weight, **options) for b in range(x.shape[0])])
    mean = torch.einsum("b,b...->...", factors, truth)
    results: dict[str, tuple[Callable[[], Tensor], Tensor]] = {
        "output of one sample alone": (lambda: alone, y),
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
