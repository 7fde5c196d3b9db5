"""Records of per-sample gradients, one per use of a parameter, with norms and sums over a leaf's uses in float64.

A record has one of two forms.

- ``Pair(left, right)``: the gradient of sample b is ``G_b = left_b^T right_b``, a sum of outer products over tokens.
  A linear layer has (left, right) = (output gradient, input). An embedding has a one-hot left side, stored as ids. A
  convolution is a linear layer on unfolded patches, one group at a time.
- ``Dense(gradient)``: ``G_b`` itself, for small parameters and for anything without structure.

Two rules keep a sample within its bound even if its tokens, or its uses of a leaf, cancel. With u = 2^-53, T tokens and
``A_b = sum_t |left_t| |right_t|``, which no partial sum of G_b exceeds:

- Every sample has its own accumulator: ``G_b`` is summed over its tokens and over all uses of the leaf before it is
  added to other samples. Its rounding error is at most T u A_b. The sum over samples is one of B matrices of norm at
  most C, with a rounding error of B^2 u C. With T = 1 that sum is one product.
- Every norm of pairs has a floor: ``|G_b|^2 + 2 n u A_b^2`` (:func:`gram_rounding`), n >= T, so that
  ``factor_b (|G_b| + 2 T u A_b) <= C (1 + T u)``: the sample's rounding error, in its norm or its sum, is within C.

    >>> square = direct_squared_norm_of_uses([Pair(g, x, shape), Dense(h)])
    >>> total = weighted_gradient_of_uses([Pair(g, x, shape), Dense(h)], factors)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch
from fdp_kernels.keep import squared_norms, weighted_sum
from jaxtyping import Float, Int
from torch import Tensor

ELEMENTS_AT_ONCE, ELEMENTS_AT_ONCE_GPU = 1 << 22, 1 << 25
"""Elements of per-sample gradients formed in float64 at a time (32 and 256 MiB), but at least one sample's."""


class OneHot(NamedTuple):
    """One-hot rows with a one at ``ids``; the rows are never formed."""

    ids: Int[Tensor, "batch tokens"]


class Pair(NamedTuple):
    """``G_b = left_b^T right_b`` per group, in the leaf's shape."""

    left: Float[Tensor, "batch groups tokens rows"] | OneHot
    right: Float[Tensor, "batch groups tokens columns"]
    shape: tuple[int, ...]


class Dense(NamedTuple):
    """``G_b`` itself. ``squares``, if its kernel computed them, add up to its squared norm."""

    gradient: Float[Tensor, " batch *shape"]
    squares: Float[Tensor, "batch parts"] | None = None


Record: TypeAlias = Pair | Dense


def rows(x: Float[Tensor, " batch *tokens features"]) -> Float[Tensor, "batch 1 tokens features"]:
    """Reshape an input of any rank to (batch, one group, tokens, features)."""
    return x.reshape(x.shape[0], 1, -1, x.shape[-1])


def per_sample_gradient(record: Record) -> Float[Tensor, " batch *shape"]:
    """Return ``G_b`` for every sample, in the dtype of the record, the wider one of its two sides."""
    if isinstance(record, Dense):
        return record.gradient
    left, right, shape = record
    batch = right.shape[0]
    if isinstance(left, OneHot):
        table = right.new_zeros(batch, shape[0], right.shape[-1])
        index = left.ids.unsqueeze(-1).expand(-1, -1, right.shape[-1])
        return table.scatter_add(1, index, right.squeeze(1)).reshape(batch, *shape)
    wide = torch.promote_types(left.dtype, right.dtype)  # a router may compute in float32 inside a wider model
    return (left.to(wide).transpose(-1, -2) @ right.to(wide)).reshape(batch, *shape)


def squared_norm(record: Record) -> Float[Tensor, " batch"]:
    """Return ``|G_b|^2`` from ``G_b``, accumulated in float64."""
    return sum_of_squares(per_sample_gradient(record))


def direct_squared_norm_of_uses(records: Sequence[Record]) -> Float[Tensor, " batch"]:
    """Return ``|sum of all uses|^2`` of a leaf from per-sample gradients in float64, a few samples at a time.

    Guarantees:
      - the norm of what ``weighted_gradient_of_uses`` adds for a sample is no larger, even if tokens or uses cancel.
    """
    if (table := _single_embedding(records)) is not None:
        square = sum_of_squares(sample_rows(table.left.ids, table.right.double())[1])
    else:
        square = torch.cat([sum_of_squares(_wide_gradient(few)) for few in _chunk_samples(records)])
    return square + gram_rounding(records)


def gram_squared_norm(record: Record) -> Float[Tensor, " batch"]:
    """Return ``|G_b|^2 = <left left^T, right right^T>`` without forming ``G_b``."""
    return cross_term(record, record)


def floored_gram_squared_norm(record: Record) -> Float[Tensor, " batch"]:
    """Return ``|G_b|^2`` from Gram matrices, with the floor of :func:`gram_rounding`: it is never understated.

    Of a single token ``|G_b| = |left| |right|``, which is also its spread: the floor is a part of the square itself,
    twice ``n eps`` of it, since the square is rounded as well.
    """
    pair = _single_token([record])
    if pair is None or max(pair.left.shape[1], pair.right.shape[1]) > 1:
        return gram_squared_norm(record).clamp_min(0) + gram_rounding([record])
    return gram_squared_norm(record) * (1 + 2 * _depth(record) * torch.finfo(torch.float64).eps)


def cross_term(a: Record, b: Record) -> Float[Tensor, " batch"]:
    """Return ``<G_b, H_b>`` of two uses of one leaf, in float64.

    For pairs it is ``sum_{t,s} (left_t . left'_s) (right_t . right'_s)``. The terms can cancel (nearly constant
    inputs, output gradients that sum to zero, two opposite uses of a leaf), which float32 is not precise enough for.
    """
    if isinstance(a, Pair) and isinstance(b, Pair):
        return (_left_products(a.left, b.left) * _inner_products(a.right, b.right)).sum((1, 2, 3))
    # The sum multiplies pairs in float64; a product in the record's dtype would be a different number.
    G, H = per_sample_gradient(widen_record(a)), per_sample_gradient(widen_record(b))
    return (G * H).reshape(len(G), -1).sum(1)


def gram_rounding(records: Sequence[Record]) -> Float[Tensor, " batch"]:
    """Bound the rounding error of a squared norm in float64: ``n eps (sum_t |left_t| |right_t|)^2``.

    The sum is over the tokens of all uses of a leaf. The bound is negligible for an ordinary norm, and dominates if a
    sample's tokens cancel. Added to a squared norm, it is the floor that keeps the norm from being understated.
    """
    depth = max(_depth(record) for record in records)
    return depth * torch.finfo(torch.float64).eps * spread(records).square()


def spread(records: Sequence[Record]) -> Float[Tensor, " batch"]:
    """Return ``A_b = sum_t |left_t| |right_t|`` over all uses of a leaf: no partial sum of ``G_b`` exceeds it."""
    return sum((_spread(record) for record in records), start=torch.zeros((), dtype=torch.float64))


def _spread(record: Record) -> Tensor:
    if isinstance(record, Dense):
        return squared_norm(record).sqrt()
    right = torch.linalg.vector_norm(record.right, dim=-1, dtype=torch.float64)
    if isinstance(record.left, OneHot):
        return right.sum((1, 2))
    return (torch.linalg.vector_norm(record.left, dim=-1, dtype=torch.float64) * right).sum((1, 2))


def _depth(record: Record) -> int:
    """Return how many numbers are added for an entry of a Gram matrix and a norm from it, or for a cross term."""
    if isinstance(record, Dense):
        return record.gradient[0].numel()
    width = record.right.shape[-1] + (1 if isinstance(record.left, OneHot) else record.left.shape[-1])
    return record.right.shape[-2] + width


def widen_record(record: Record) -> Record:
    """Return the record in float64, the precision of the sum."""
    if isinstance(record, Dense):
        return Dense(record.gradient.double())
    left = record.left if isinstance(record.left, OneHot) else record.left.double()
    return Pair(left, record.right.double(), record.shape)


def weighted_gradient_of_uses(records: Sequence[Record], factors: Float[Tensor, " batch"]) -> Float[Tensor, " *shape"]:
    """Return ``sum_b factors_b (sum of all uses of the leaf by sample b)`` in float64, a few samples at a time.

    Guarantees:
      - those of :func:`fdp.gradients.rules.weighted_gradient`;
      - all uses of a sample are summed before they are added to another sample's.
    """
    factors, total, start = factors.double(), None, 0
    if (table := _single_embedding(records)) is not None:
        ids, rows = sample_rows(table.left.ids, table.right.double())
        total = rows.new_zeros(table.shape[0], rows.shape[-1])
        return total.index_add(0, ids.flatten(), _scale(rows, factors).flatten(0, 1)).view(table.shape)
    if (pair := _single_token(records)) is not None:
        left, counts = _scale(pair.left.double(), factors), (factors > 0).view(-1, 1, 1, 1)
        right = pair.right.where(counts, pair.right.new_zeros(())).double()
        if left.shape[1] == right.shape[1] == 1:
            return (left.flatten(1).t() @ right.flatten(1)).reshape(pair.shape)
        return (left.squeeze(2).permute(1, 2, 0) @ right.squeeze(2).transpose(0, 1)).reshape(pair.shape)
    for few in _chunk_samples(records):
        rows = few[0].gradient if len(few) == 1 and isinstance(few[0], Dense) else _wide_gradient(few)
        end, shape = start + len(rows), rows.shape[1:]
        total = weighted_sum(rows.reshape(len(rows), -1), factors[start:end], torch.float64, total)
        start = end
    assert total is not None
    return total.view(shape)


def sample_rows(
    ids: Int[Tensor, "batch tokens"], right: Float[Tensor, "batch 1 tokens columns"]
) -> tuple[Int[Tensor, "batch tokens"], Float[Tensor, "batch tokens columns"]]:
    """Sum each sample's rows with equal ids: an embedding's ``G_b`` without its rows of zeros.

    Row ``k`` of a sample is its part of row ``ids[k]`` of the leaf. Each id appears at most once; rows left over are
    zero and have id 0.
    """
    ordered, order = ids.sort(dim=1, stable=True)
    new = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0))
    slots = torch.zeros_like(ids).scatter(1, order, new.long().cumsum(1))
    rows = right.squeeze(1)
    summed = torch.zeros_like(rows).scatter_add(1, slots.unsqueeze(-1).expand_as(rows), rows)
    return torch.zeros_like(ids).scatter(1, slots, ids), summed


class _Embedding(NamedTuple):
    left: OneHot
    right: Tensor
    shape: tuple[int, ...]


def _single_embedding(records: Sequence[Record]) -> _Embedding | None:
    """Return the record if the leaf's only use is an embedding, for which no table per sample is formed; else None."""
    first, *rest = records
    if rest or not isinstance(first, Pair) or not isinstance(first.left, OneHot):
        return None
    return _Embedding(first.left, first.right, first.shape)


class _Product(NamedTuple):
    left: Tensor
    right: Tensor
    shape: tuple[int, ...]


def _single_token(records: Sequence[Record]) -> _Product | None:
    """Return the record if the leaf's only use has one token per sample, so that no sum over tokens needs its own
    accumulator; else None."""
    first, *rest = records
    if rest or not isinstance(first, Pair) or isinstance(first.left, OneHot) or first.right.shape[-2] != 1:
        return None
    return _Product(first.left, first.right, first.shape)


def _wide_gradient(records: Sequence[Record]) -> Tensor:
    """Return the per-sample gradient summed over all uses, in float64."""
    first, *rest = records
    total = per_sample_gradient(widen_record(first))
    for record in rest:
        total = total + per_sample_gradient(widen_record(record))
    return total


def _chunk_samples(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Split the records of a leaf into chunks of samples whose gradients in float64 take little memory."""
    sizes = [math.prod(r.shape) if isinstance(r, Pair) else math.prod(r.gradient.shape[1:]) for r in records]
    if all(isinstance(record, Dense) for record in records):
        few = len(_any_side(records[0]))  # no product is formed
    else:
        most = ELEMENTS_AT_ONCE_GPU if _any_side(records[0]).is_cuda else ELEMENTS_AT_ONCE
        few = max(1, most // max(1, *sizes))
    for start in range(0, max(1, len(_any_side(records[0]))), few):
        yield [_slice_samples(record, start, start + few) for record in records]


def _any_side(record: Record) -> Tensor:
    return record.gradient if isinstance(record, Dense) else record.right


def _slice_samples(record: Record, start: int, end: int) -> Record:
    if isinstance(record, Dense):
        return Dense(record.gradient[start:end])
    left = record.left
    left = OneHot(left.ids[start:end]) if isinstance(left, OneHot) else left[start:end]
    return Pair(left, record.right[start:end], record.shape)


def _left_products(a: Tensor | OneHot, b: Tensor | OneHot) -> Tensor:
    """Return ``left_t . left'_s`` for all t, s, in float64: (batch, groups, tokens, tokens')."""
    if isinstance(a, OneHot) and isinstance(b, OneHot):
        return (a.ids.unsqueeze(2) == b.ids.unsqueeze(1)).unsqueeze(1).double()
    if isinstance(a, OneHot):
        return _left_products(b, a).transpose(-1, -2)
    if isinstance(b, OneHot):
        index = b.ids[:, None, None, :].expand(-1, a.shape[1], a.shape[2], -1)
        return a.gather(3, index).double()
    return _inner_products(a, b)


def _inner_products(a: Tensor, b: Tensor) -> Float[Tensor, "batch groups tokens tokens2"]:
    """Return ``a_t . b_s`` for all t, s in float64; of single tokens without a matrix product for every sample."""
    wide = a.double()
    other = wide if a is b else b.double()
    if a.shape[-2] == b.shape[-2] == 1:
        return (wide * other).sum(-1, keepdim=True)
    return wide @ other.transpose(-1, -2)


def _scale(x: Tensor, factors: Tensor) -> Tensor:
    """Return ``factors_b x_b`` in the factors' dtype; exactly 0 where the factor is 0, even if x is NaN there."""
    factors = factors.view(-1, *[1] * (x.ndim - 1))
    return torch.where(factors > 0, x * factors, factors.new_zeros(()))


def sum_of_squares(gradient: Tensor) -> Tensor:
    """Return the squared norm per sample in float64: float32 squares of small numbers underflow to zero."""
    return squared_norms(gradient.reshape(len(gradient), -1))
