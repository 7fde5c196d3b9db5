"""Norms and sums of a leaf that is used several times (a tied head, a shared layer), by kernels where they run.

    G_b = sum over uses of left_b^T right_b

Uses of one kind are one pair with more tokens: ``[left; left']^T [right; right']``. So a leaf has at most one pair with
full rows (a linear layer) and one with one-hot rows (an embedding), and their norm has a closed form
(``fdp_kernels.tied``): no per-sample gradient is formed. Other leaves are treated in float64, a few samples at a time
(:mod:`fdp.gradients.sample_gradients`).

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
from fdp_kernels.tied import tied_norms
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.launches import part_size, weighted_parts
from fdp.gradients.rules import drop_tiny_factors, has_kernels, symmetric_squared_norm
from fdp.gradients.sample_gradients import OneHot, Pair, Record, weighted_gradient_of_uses


class MergedUses(NamedTuple):
    """All uses of a leaf as at most two pairs: one of full rows and one of one-hot rows."""

    linear: Pair | None
    embedding: Pair | None

    @property
    def pairs(self) -> list[Pair]:
        return [pair for pair in self if pair is not None]


def merge_uses(records: Sequence[Record]) -> MergedUses | None:
    """Return the uses of a leaf as at most two pairs; None if the kernels do not take all of them."""
    pairs = [record for record in records if isinstance(record, Pair) and has_kernels(record)]
    if len(pairs) < len(records) or len({pair.right.dtype for pair in pairs}) > 1:
        return None
    if any(isinstance(pair.left, Tensor) and pair.left.shape[1] > 1 for pair in pairs):  # groups of a convolution
        return None
    linear = [pair for pair in pairs if not isinstance(pair.left, OneHot)]
    embeddings = [pair for pair in pairs if isinstance(pair.left, OneHot)]
    return MergedUses(_concatenate(linear), _concatenate(embeddings))


def squared_norm_by_kernels(records: Sequence[Record]) -> Float[Tensor, " batch"] | None:
    """Return the squared norm over all uses of a leaf, in float64; None if the kernels do not take the records."""
    merged = merge_uses(records)
    if merged is None:
        return None
    linear, embedding = merged
    if linear is None or embedding is None:
        (pair,) = merged.pairs
        return symmetric_squared_norm(pair)
    assert isinstance(linear.left, Tensor)
    assert isinstance(embedding.left, OneHot)
    return tied_norms(linear.left.squeeze(1), linear.right.squeeze(1), embedding.left.ids, embedding.right.squeeze(1))


def weighted_parts_of_shared(
    records: Sequence[Record], factors: Float[Tensor, " batch"]
) -> Float[Tensor, " parts *shape"]:
    """Return ``sum_b factors_b G_b`` over all uses in parts, still to be added in float64 (``launches.add_parts``).

    The embedding's rows are added to the parts of the head, for the same samples: a table of its own would take as much
    memory as the head, most of it for words that never occur.
    """
    merged = merge_uses(records)
    if merged is None:
        return weighted_gradient_of_uses(records, factors).unsqueeze(0)
    first, *rest = merged.pairs
    (parts,) = weighted_parts([first], [factors])
    for embedding in rest:
        _add_embedding_(parts, embedding, factors)
    return parts


def _add_embedding_(parts: Float[Tensor, " parts *shape"], embedding: Pair, factors: Float[Tensor, " batch"]) -> None:
    """Add the embedding's weighted sum to the parts in place; a factor that the head's kernel takes for 0 is 0 here."""
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
