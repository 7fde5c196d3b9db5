"""Rules: what one use of a parameter contributes to each sample's gradient, and four things to do with it.

A use is recorded in one of two forms.

- ``Pair(left, right)``: the gradient of sample b is ``G_b = left_b^T right_b``, a sum of outer products over tokens.
  A linear layer has (left, right) = (output gradient, input); an embedding has a one-hot left side, kept as ids; a
  convolution is a linear layer on unfolded patches, one group at a time.
- ``Dense(gradient)``: ``G_b`` itself, for small parameters and for anything without structure.

In half precision on a GPU the products run by the kernels of ``fdp_kernels``, each of which says what rounding it
leaves; everywhere else all that bears on privacy is done in float64.

On either form:  ``per_sample_gradient``  G_b;  ``squared_norm``  |G_b|^2, from G_b or from Gram matrices without
forming it (Goodfellow 2015, arXiv 1510.01799; Li et al. 2022, arXiv 2110.05679);  ``cross_term``  <G_b, H_b> of two
uses of one leaf, because |G + H|^2 = |G|^2 + 2<G, H> + |H|^2;  ``weighted_gradient``  sum_b c_b G_b.

A new operation needs a :class:`Rule`, two functions; :func:`check_rule` compares it with ``vmap(grad)``:

    >>> LINEAR = Rule("linear", forward=F.linear, record=lambda x, g, shape: Pair(rows(g), rows(x), shape))
    >>> check_rule(LINEAR, x, weight)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
from fdp_kernels.direct import direct
from fdp_kernels.embedding import embedding_norms, embedding_sum
from fdp_kernels.ghost import ghost
from fdp_kernels.keep import keep, squared_norms, weighted_sum
from fdp_kernels.stored_gram import stored_gram
from fdp_kernels.weighted import weighted
from jaxtyping import Float, Int
from torch import Tensor

from fdp.types import FdpError


class OneHot(NamedTuple):
    """Rows that are zero but for a one at ``ids``; never formed."""

    ids: Int[Tensor, "batch tokens"]


class Pair(NamedTuple):
    """``G_b = left_b^T right_b`` per group, in the leaf's shape."""

    left: Float[Tensor, "batch groups tokens rows"] | OneHot
    right: Float[Tensor, "batch groups tokens columns"]
    shape: tuple[int, ...]


class Dense(NamedTuple):
    """``G_b`` itself; ``squares``, where its maker had them at hand, add up to its squared norm."""

    gradient: Float[Tensor, " batch *shape"]
    squares: Float[Tensor, "batch parts"] | None = None


Record: TypeAlias = Pair | Dense

HALF = (torch.bfloat16, torch.float16)
TOGETHER = 64
"""Samples whose gradients a kernel adds up in float32; sums of more are added in float64."""
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


def rows(x: Float[Tensor, " batch *tokens features"]) -> Float[Tensor, "batch 1 tokens features"]:
    """Any input rank as (batch, one group, tokens, features)."""
    return x.reshape(x.shape[0], 1, -1, x.shape[-1])


def per_sample_gradient(record: Record) -> Float[Tensor, " batch *shape"]:
    """``G_b`` for every sample, in the dtype of the record."""
    if isinstance(record, Dense):
        return record.gradient
    left, right, shape = record
    batch = right.shape[0]
    if isinstance(left, OneHot):
        table = right.new_zeros(batch, shape[0], right.shape[-1])
        index = left.ids.unsqueeze(-1).expand(-1, -1, right.shape[-1])
        return table.scatter_add(1, index, right.squeeze(1)).reshape(batch, *shape)
    return (left.transpose(-1, -2) @ right).reshape(batch, *shape)


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


def squared_norm(record: Record) -> Float[Tensor, " batch"]:
    """``|G_b|^2`` from ``G_b``, accumulated in float64."""
    return _sum_of_squares(per_sample_gradient(record))


def direct_squared_norm(record: Record) -> Float[Tensor, " batch"]:
    """``|G_b|^2`` of exactly what ``weighted_gradient`` adds for the sample, ``G_b`` not stored where a kernel can.

    Float32 pairs are multiplied out in float64 by the sum, and so here.
    """
    if not has_kernels(record):
        return squared_norm(widened(record))
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


def gram_squared_norm(record: Record) -> Float[Tensor, " batch"]:
    """``|G_b|^2 = <left left^T, right right^T>`` without forming ``G_b``."""
    return cross_term(record, record)


def cross_term(a: Record, b: Record) -> Float[Tensor, " batch"]:
    """``<G_b, H_b>`` of two uses of one leaf.

    For pairs it is ``sum_{t,s} (left_t . left'_s) (right_t . right'_s)``. The terms can cancel (nearly constant
    inputs, output gradients that sum to zero; two uses of a leaf against each other), so all is done in float64 and
    stays there until the terms of a leaf are added: in float32 norms were seen wrong by 4e-4, in bfloat16 by half.
    """
    if isinstance(a, Pair) and isinstance(b, Pair):
        right = a.right.double() @ b.right.double().transpose(-1, -2)
        return (_left_products(a.left, b.left) * right).sum((1, 2, 3))
    G, H = per_sample_gradient(a), per_sample_gradient(b)
    return (G.double() * H.double()).reshape(len(G), -1).sum(1)


def gram_rounding(records: Sequence[Record]) -> Float[Tensor, " batch"]:
    """What rounding may take from a squared norm by Gram matrices: ``n eps (sum_t |left_t| |right_t|)^2`` in float64.

    Nothing beside an ordinary norm, but all of the norm of a sample whose tokens cancel: it is added, so that a norm is
    never understated.
    """
    depth, total = 0, torch.zeros((), dtype=torch.float64)
    for record in records:
        if isinstance(record, Dense):
            total = total + squared_norm(record).sqrt()
            continue
        right = torch.linalg.vector_norm(record.right, dim=-1, dtype=torch.float64)
        one_hot = isinstance(record.left, OneHot)
        left = 1.0 if one_hot else torch.linalg.vector_norm(record.left, dim=-1, dtype=torch.float64)
        total = total + (left * right).sum((1, 2))
        width = record.right.shape[-1] + (1 if isinstance(record.left, OneHot) else record.left.shape[-1])
        depth = max(depth, record.right.shape[-2] + width)
    return depth * torch.finfo(torch.float64).eps * total.square()


def widened(record: Record) -> Record:
    """The record in float64, the precision of the sum."""
    if isinstance(record, Dense):
        return Dense(record.gradient.double())
    left = record.left if isinstance(record.left, OneHot) else record.left.double()
    return Pair(left, record.right.double(), record.shape)


def weighted_gradient(record: Record, factors: Float[Tensor, " batch"]) -> Float[Tensor, " *shape"]:
    """``sum_b factors_b G_b`` in float64.

    In float32 the rounding of a matrix product can exceed the clipping bound: a sample whose tokens cancel leaves
    ``eps sum_t |left_t| |right_t|``, and everyone else's part is rounded to its size; and a sum over thousands of
    samples is rounded to the size of all. In float64 neither matters. Pairs in half precision on a GPU are summed in
    float32 by kernels, in the order in which ``direct_squared_norm`` measured them: what cancels in the one cancels in
    the other. The sum of at most 64 samples is rounded to its size: (64 + 3)^2 2^-24, 3e-4, of one sample's bound at
    the worst.

    Guarantees:
      - a sample whose factor is 0 contributes exactly 0, even if its gradient is NaN or infinite;
      - factors are never rounded to the record's dtype.
    """
    factors = factors.double()
    if isinstance(record, Dense):
        flat = weighted_sum(record.gradient.reshape(len(factors), -1), factors, torch.float64)
        return flat.view(record.gradient.shape[1:])
    if has_kernels(record):
        return _half_weighted(record, factors)
    left, right, shape = record
    if isinstance(left, OneHot):
        table = right.new_zeros(shape[0], right.shape[-1], dtype=torch.float64)
        return table.index_add(0, left.ids.flatten(), _scaled(right, factors).flatten(0, 2)).reshape(shape)
    left, right = _scaled(left, factors), _scaled(right, (factors > 0).double())
    groups = left.shape[1]
    left, right = (z.transpose(0, 1).reshape(groups, -1, z.shape[-1]) for z in (left, right))
    return (left.transpose(-1, -2) @ right).reshape(shape)


def _half_weighted(record: Pair, factors: Tensor) -> Tensor:
    left, right, shape = record
    if len(right) > TOGETHER:  # float32 rounds a sum of many samples to the size of all: add up few at a time
        parts = zip(_samples(left), right.split(TOGETHER), factors.split(TOGETHER))
        return sum(_half_weighted(Pair(g, x, shape), c).double() for g, x, c in parts)  # type: ignore[return-value]
    if isinstance(left, OneHot):
        return embedding_sum(left.ids, right.squeeze(1), factors, shape[0]).reshape(shape)
    groups = [weighted(g, x, factors.float()) for g, x in zip(left.unbind(1), right.unbind(1))]
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
    square = _sum_of_squares(truth)
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


def _left_products(a: Tensor | OneHot, b: Tensor | OneHot) -> Tensor:
    """``left_t . left'_s`` for all t, s, in float64: (batch, groups, tokens, tokens')."""
    if isinstance(a, OneHot) and isinstance(b, OneHot):
        return (a.ids.unsqueeze(2) == b.ids.unsqueeze(1)).unsqueeze(1).double()
    if isinstance(a, OneHot):
        return _left_products(b, a).transpose(-1, -2)
    if isinstance(b, OneHot):
        index = b.ids[:, None, None, :].expand(-1, a.shape[1], a.shape[2], -1)
        return a.gather(3, index).double()
    return a.double() @ b.double().transpose(-1, -2)


def _scaled(x: Tensor, factors: Tensor) -> Tensor:
    """``factors_b x_b`` in the factors' dtype; exactly 0 where the factor is 0, whatever x holds there."""
    factors = factors.view(-1, *[1] * (x.ndim - 1))
    return torch.where(factors > 0, x * factors, factors.new_zeros(()))


def _sum_of_squares(gradient: Tensor) -> Tensor:
    # In float64: squares of small float32 numbers are zero in float32, and its vector_norm is 2e-3 off at 10M elements.
    return squared_norms(gradient.reshape(len(gradient), -1))
