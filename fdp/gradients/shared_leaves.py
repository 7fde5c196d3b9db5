"""Norms and sums of a leaf that is used several times (a tied head, a shared layer), by kernels where they run.

    G_b = sum over uses of left_b^T right_b

Uses of one kind are one pair with more tokens: ``[left; left']^T [right; right']``. So a leaf has at most one pair with
full rows (a linear layer) and one with one-hot rows (an embedding), and their norm has a closed form
(``fdp_kernels.tied``): no per-sample gradient is formed. If the plan stores a head's per-sample gradients, in the
compute dtype or in 8 bits, the rows of the embedding are kept beside them. Other leaves are treated in float64, a few
samples at a time (:mod:`fdp.gradients.sample_gradients`).

    >>> square = squared_norm_by_kernels(records)                  # None if the kernels do not take these records
    >>> parts = weighted_parts_of_shared(records, factors)         # by kernels if and only if the norm was

Guarantees:
  - norm and sum are computed by kernels for the same records, or both in float64;
  - the norm is at least that of what the sum adds for a sample, all uses together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from fdp_kernels.embedding import add_embedding_sum_
from fdp_kernels.keep import weighted_sum
from fdp_kernels.tied import stored_tied_norms, tied_norms
from jaxtyping import Float
from torch import Tensor

from fdp.gradients import launches
from fdp.gradients.eight_bits import Rounded, StoredRecord, not_rounded
from fdp.gradients.launches import part_size, weighted_parts
from fdp.gradients.rules import drop_tiny_factors, has_kernels, squared_norm, symmetric_squared_norm
from fdp.gradients.sample_gradients import Dense, OneHot, Pair, weighted_gradient_of_uses


class MergedUses(NamedTuple):
    """All uses of a leaf as at most two records: one of full rows, perhaps stored, and one of one-hot rows."""

    linear: Pair | Dense | Rounded | None
    embedding: Pair | None


def has_stored_head(records: Sequence[StoredRecord]) -> bool:
    """Return True for stored per-sample gradients and, beside them, uses as an embedding, which the kernels take.

    A table of the embedding's gradient for every sample, most of it zeros, need not be formed then.
    """
    heads = [record for record in records if isinstance(record, Dense | Rounded)]
    rest = [record for record in records if not isinstance(record, Dense | Rounded)]
    if len(heads) != 1 or not rest:
        return False
    (head,) = heads
    shape = head.shape if isinstance(head, Rounded) else head.gradient.shape[1:]
    alike = [isinstance(head, Rounded) or record.right.dtype == head.gradient.dtype for record in rest]
    return all(alike) and all(has_kernels(r) and isinstance(r.left, OneHot) and r.shape == shape for r in rest)


def merge_uses(records: Sequence[StoredRecord]) -> MergedUses | None:
    """Return the uses of a leaf as at most two records; None if the kernels do not take all of them."""
    if has_stored_head(records):
        (head,) = [record for record in records if isinstance(record, Dense | Rounded)]
        return MergedUses(head, _concatenate([record for record in records if isinstance(record, Pair)]))
    pairs = [record for record in records if isinstance(record, Pair) and has_kernels(record)]
    if len(pairs) < len(records) or len({pair.right.dtype for pair in pairs}) > 1:
        return None
    if any(isinstance(pair.left, Tensor) and pair.left.shape[1] > 1 for pair in pairs):  # groups of a convolution
        return None
    linear = [pair for pair in pairs if not isinstance(pair.left, OneHot)]
    embeddings = [pair for pair in pairs if isinstance(pair.left, OneHot)]
    return MergedUses(_concatenate(linear), _concatenate(embeddings))


def squared_norm_by_kernels(records: Sequence[StoredRecord]) -> Float[Tensor, " batch"] | None:
    """Return the squared norm over all uses of a leaf, in float64; None if the kernels do not take the records."""
    merged = merge_uses(records)
    if merged is None:
        return None
    linear, embedding = merged
    if linear is None or embedding is None:
        (pair,) = (record for record in merged if record is not None)
        assert isinstance(pair, Pair)
        return symmetric_squared_norm(pair)
    assert isinstance(embedding.left, OneHot)
    if isinstance(linear, Rounded):
        ids, rows = embedding.left.ids, embedding.right.squeeze(1)
        return stored_tied_norms(linear.integers, linear.squares.sum(1), ids, rows, linear.exponents)
    if isinstance(linear, Dense):
        squares = squared_norm(linear) if linear.squares is None else linear.squares.sum(1)
        H = linear.gradient.flatten(2)
        return stored_tied_norms(H, squares, embedding.left.ids, embedding.right.squeeze(1))
    assert isinstance(linear.left, Tensor)
    return tied_norms(linear.left.squeeze(1), linear.right.squeeze(1), embedding.left.ids, embedding.right.squeeze(1))


def weighted_parts_of_shared(
    records: Sequence[StoredRecord], factors: Float[Tensor, " batch"]
) -> Float[Tensor, " parts *shape"]:
    """Return ``sum_b factors_b G_b`` over all uses in parts, still to be added in float64 (``launches.add_parts``).

    The embedding's rows are added to the parts of the head, for the same samples: a table of its own would take as much
    memory as the head, most of it for words that never occur.
    """
    merged = merge_uses(records)
    if merged is None:
        return weighted_gradient_of_uses(not_rounded(records), factors).unsqueeze(0)
    first, *rest = (record for record in merged if record is not None)
    parts = _parts_of_stored(first, factors) if isinstance(first, Dense) else weighted_parts([first], [factors])[0]
    for embedding in rest:
        _add_embedding_(parts, embedding, factors)
    return parts


def _parts_of_stored(head: Dense, factors: Float[Tensor, " batch"]) -> Float[Tensor, " parts *shape"]:
    """Return the weighted sum of stored gradients in parts of as many samples as a kernel sums in float32."""
    rows, count = head.gradient.flatten(1), -(-len(factors) // launches.SAMPLES_PER_FLOAT32_SUM)
    size = part_size(len(factors), count)
    split = zip(rows.split(size), drop_tiny_factors(factors).split(size))
    return torch.stack([weighted_sum(few, of, torch.float32) for few, of in split]).view(-1, *head.gradient.shape[1:])


def _add_embedding_(
    parts: Float[Tensor, " parts *shape"], embedding: StoredRecord, factors: Float[Tensor, " batch"]
) -> None:
    """Add the embedding's weighted sum to the parts in place; a factor that the head's kernel takes for 0 is 0 here."""
    assert isinstance(embedding, Pair)
    assert isinstance(embedding.left, OneHot)
    factors = drop_tiny_factors(factors)
    size = part_size(len(factors), len(parts))
    split = (of.split(size) for of in (embedding.left.ids, embedding.right.squeeze(1), factors))
    for part, ids, rows, few in zip(parts, *split, strict=True):
        add_embedding_sum_(part.view(len(part), -1), ids, rows, few)


def _concatenate(pairs: Sequence[Pair]) -> Pair | None:
    """Return one pair with the tokens of all; None if there is none."""
    if len(pairs) <= 1:
        return pairs[0] if pairs else None
    right = torch.cat([pair.right for pair in pairs], dim=2)
    if isinstance(pairs[0].left, OneHot):
        ids = [pair.left.ids for pair in pairs if isinstance(pair.left, OneHot)]
        return Pair(OneHot(torch.cat(ids, dim=1)), right, pairs[0].shape)
    lefts = [pair.left for pair in pairs if isinstance(pair.left, Tensor)]
    return Pair(torch.cat(lefts, dim=2), right, pairs[0].shape)
