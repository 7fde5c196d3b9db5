"""Per-sample gradient norms in one backward, which stores what the clipped sum needs.

|G_b|^2 per leaf from its records                                  all uses of a tied leaf together
|U G_b V|^2 if gradients are preconditioned                        records are transformed first: norm and sum agree

>>> losses, norms, stash = per_sample_norms(model, params, data, plan=plan)
>>> total = clipped_sum(stash, clip_to(norms, max_norm=1.0))                  # ClippedSum(value, sensitivity)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from fdp_kernels.keep import squared_parts
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.gradients.block_loop import Weights, backward, forward, make_weights
from fdp.gradients.costs import SQUARED_NORMS, Choice, NormBy, SumBy
from fdp.gradients.eight_bits import (
    Rounded,
    StoredRecord,
    is_product,
    not_rounded,
    store_rounded,
    stored_gradient,
)
from fdp.gradients.execution import LOCAL, Execution, Memory
from fdp.gradients.launches import store_gradients
from fdp.gradients.plan import Plan
from fdp.gradients.sample_gradients import (
    Dense,
    Record,
    cross_term,
    direct_squared_norm_of_uses,
    gram_rounding,
    gram_squared_norm,
    spread,
)
from fdp.gradients.shared_leaves import has_stored_head, squared_norm_by_kernels
from fdp.model import Model
from fdp.parallel.gather_reduce import sum_over_tensor_axis
from fdp.parallel.sharding import Sharding
from fdp.types import Flat, Norms, Path, Tree

SMALL_LEAF_ELEMENTS, SMALL_LEAF_ELEMENTS_CPU = 1 << 16, 1 << 10
"""Per-sample gradients of leaves up to this size wait for others of their size, and their norms are taken together. On
a CPU, copying larger ones side by side costs more than it saves."""

Transform: TypeAlias = Callable[[Path, StoredRecord], StoredRecord]
"""A linear map of a leaf's gradient, applied to the record of one use. It must not depend on the data."""


class Stash(NamedTuple):
    """Values that the norm pass stores for the sum: records by leaf, and every block's input for a second backward.

    Stored records are transformed already; those of a second backward still have to go through ``transform``.
    """

    records: dict[Path, list[StoredRecord]]
    carries: list[Tree]
    weights: Weights
    data: Tree
    plan: Plan
    transform: Transform

    def copy(self) -> Stash:
        """Return a stash of the same records, for a second sum: summing uses up a stash."""
        return self._replace(records=dict(self.records), carries=list(self.carries))


def identity(path: Path, record: StoredRecord) -> StoredRecord:
    """Return the record itself: gradients are not preconditioned."""
    return record


def per_sample_norms(
    model: Model,
    params: Tree,
    data: Tree,
    *,
    plan: Plan,
    execution: Execution = LOCAL,
    transform: Transform = identity,
) -> tuple[Float[Tensor, " batch"], Norms, Stash]:
    """Return losses, squared gradient norms per sample and leaf, and what the clipped sum needs.

    Runs one forward and one backward. If the model is sharded, ``params`` are this rank's shards and ``data`` this
    rank's samples. A sample's norm needs nothing from ranks with other samples; ranks of the ``tensor`` axis add up
    their parts of it, leaf by leaf. Every gradient goes through ``transform`` before anything is measured.

    Guarantees:
      - what is measured is what the clipped sum adds, transformed and rounded alike;
      - every trainable leaf is in the norms, all its uses together (cross terms included);
      - sums of squares are accumulated in float64, whatever the compute dtype.
    """
    weights = make_weights(model, params, data, plan, execution)
    losses, saved, carries = forward(weights, data, plan)
    second = any(choice.sum is SumBy.SECOND_BACKWARD for choice in plan.choices.values())
    carried = [*carries, losses] if second else []
    found = _NormAccumulator(model, plan)
    for _, records in backward(weights, None, saved, carries, data, plan, token=losses):
        found.add({path: [transform(path, record) for record in of] for path, of in records.items()})
    squared = found.squared_norms()
    norms = Norms({path: squared[path] for path in weights.shards if path in plan.trainable})
    stash = Stash(found.stored, carried, weights, data, plan, transform)
    return losses.to(widest(losses.dtype)), sum_over_tensor_axis(execution.sharding, norms), stash


class _NormAccumulator:
    """Squared norms of leaves as their records become complete, and the records that the sum will need.

    A leaf is complete when every block that uses it has been pulled back. Single dense gradients are collected by
    size, so that one launch takes the norms of many.
    """

    def __init__(self, model: Model, plan: Plan) -> None:
        self.plan = plan
        self.stored: dict[Path, list[StoredRecord]] = {}
        self._missing = _count_uses(model, plan)
        self._incomplete: dict[Path, list[StoredRecord]] = {}
        self._squared: Flat = {}
        self._small_gradients: Flat = {}
        self._partial_squares: Flat = {}

    def add(self, records: dict[Path, list[StoredRecord]]) -> None:
        """Take in the records of one block."""
        done = self._complete(_store_gradients(self.plan, records, self._incomplete))
        single, rounded = single_dense_records(done), _single_rounded_records(done)
        rest = {path: of for path, of in done.items() if path not in single and path not in rounded}
        self._squared |= _squared_norms(self.plan, rest)
        self._partial_squares |= {path: record.squares for path, record in rounded.items()}
        for path, record in single.items():
            on_cpu = record.gradient.device.type == "cpu"
            if math.prod(record.gradient.shape[1:]) <= (SMALL_LEAF_ELEMENTS_CPU if on_cpu else SMALL_LEAF_ELEMENTS):
                self._small_gradients[path] = record.gradient
            elif record.squares is not None:
                self._partial_squares[path] = record.squares
            else:
                self._partial_squares[path] = squared_parts(record.gradient.reshape(self.plan.batch_size, -1))
        self.stored |= {
            path: of for path, of in done.items() if self.plan.choices[path].sum is not SumBy.SECOND_BACKWARD
        }

    def squared_norms(self) -> Flat:
        """Return every leaf's squared norms, ``(batch,)`` each, in float64."""
        small = _by_size(
            self._small_gradients, lambda these: torch.linalg.vector_norm(these, dim=-1, dtype=torch.float64).square()
        )
        return self._squared | small | _by_size(self._partial_squares, lambda parts: parts.sum(-1))

    def _complete(self, records: dict[Path, list[StoredRecord]]) -> dict[Path, list[StoredRecord]]:
        """Return the leaves of which these records were the last."""
        done: dict[Path, list[StoredRecord]] = {}
        for path, found in records.items():
            self._incomplete[path] = _merge(self._incomplete.get(path, []) + found, self.plan.choices[path])
            self._missing[path] -= 1
            if self._missing[path] == 0:
                done[path] = self._incomplete.pop(path)
        return done


def losses_of(
    model: Model, params: Tree, data: Tree, *, plan: Plan, sharding: Sharding | None = None
) -> Float[Tensor, " batch"]:
    """Return the loss of every sample, by the same loop: one block's full weights at a time."""
    execution = Execution(sharding, Memory(recompute=True, refetch=True))
    return forward(make_weights(model, params, data, plan, execution), data, plan)[0].detach()


def single_dense_records(records: dict[Path, list[StoredRecord]]) -> dict[Path, Dense]:
    """Return the leaves whose only record is a dense per-sample gradient."""
    return {path: of[0] for path, of in records.items() if len(of) == 1 and isinstance(of[0], Dense)}


def _single_rounded_records(records: dict[Path, list[StoredRecord]]) -> dict[Path, Rounded]:
    return {path: of[0] for path, of in records.items() if len(of) == 1 and isinstance(of[0], Rounded)}


def _merge(records: list[StoredRecord], choice: Choice) -> list[StoredRecord]:
    """Return a leaf's records so far: one running per-sample gradient if the plan stores that, else the pairs.

    An embedding's rows stay beside the stored gradients of its head, where kernels take both.
    """
    stored = choice.norm in (NormBy.KEEP, NormBy.KEEP_INT8, NormBy.VMAP)
    if not stored or len(records) == 1 or has_stored_head(records):
        return records
    first, *rest = [stored_gradient(record) for record in records]
    return [Dense(sum(rest, start=first))]


def _store_gradients(
    plan: Plan, records: dict[Path, list[StoredRecord]], before: dict[Path, list[StoredRecord]]
) -> dict[Path, list[StoredRecord]]:
    """Replace the records of leaves that the plan stores as per-sample gradients by those gradients.

    ``before`` are the records of earlier blocks. An embedding whose head is stored already is left as it is.
    """
    single = {
        path: of[0]
        for path, of in records.items()
        if len(of) == 1 and not isinstance(of[0], Rounded) and not has_stored_head(before.get(path, []) + of)
    }
    found: dict[Path, list[StoredRecord]] = {}
    paths = [path for path in single if plan.choices[path].norm is NormBy.KEEP]
    for path, gradient in zip(paths, store_gradients([single[path] for path in paths])):
        found[path] = [gradient]
    rounded = {path: of for path, of in single.items() if plan.choices[path].norm is NormBy.KEEP_INT8}
    pairs = {path: of for path, of in rounded.items() if is_product(of)}
    for path, gradient in zip(pairs, store_rounded(list(pairs.values()))):
        found[path] = [gradient]
    return records | found


def _squared_norms(plan: Plan, records: dict[Path, list[StoredRecord]]) -> Flat:
    """Return the squared norms of complete leaves; single pairs share launches."""
    found: Flat = {}
    for by, norms in SQUARED_NORMS.items():
        paths = [path for path, of in records.items() if len(of) == 1 and plan.choices[path].norm is by]
        found |= zip(paths, norms(not_rounded([records[path][0] for path in paths])))
    return found | {path: _squared(of, plan.choices[path]) for path, of in records.items() if path not in found}


def _squared(stored: list[StoredRecord], choice: Choice) -> Tensor:
    """Return the squared norm, in float64, of exactly what the sum will add for each sample, all uses together.

    A second backward adds the uses one by one in float64, so its norms are in float64 too.
    """
    if choice.sum is not SumBy.SECOND_BACKWARD and (found := squared_norm_by_kernels(stored)) is not None:
        return found
    records = not_rounded(stored)
    if choice.norm in (NormBy.GRAM, NormBy.SYMMETRIC):
        total = sum(gram_squared_norm(record) for record in records)
        crossed = [(a, b) for i, a in enumerate(records) for b in records[:i]]
        square = torch.as_tensor(total + 2 * sum(cross_term(a, b) for a, b in crossed))
        square = square.clamp_min(0) + gram_rounding(records)
    else:
        square = direct_squared_norm_of_uses(records)
    return square + _separate_rounding(records) if choice.sum is SumBy.SECOND_BACKWARD and len(records) > 1 else square


def _separate_rounding(records: list[Record]) -> Tensor:
    """Bound what a sample may leave in a sum if its uses are summed separately over all samples: ``(k A_b)^2``.

    A second backward meets the uses of a leaf in different blocks and adds each to its own sum. Two uses of B
    samples, each at most ``c_b A_b <= C / k``, are rounded by ``4 B^2 u C / k`` (u = 2^-53): with ``k = 2^24 B^2 u``,
    at most 2.4e-7 C. ``A_b`` (:func:`fdp.gradients.sample_gradients.spread`) bounds every partial sum.
    """
    bound = spread(records)
    return (2.0**-29 * len(bound) ** 2 * bound).square()


def _by_size(leaves: Flat, norms: Callable[[Tensor], Tensor]) -> Flat:
    """Return ``norms`` of many leaves, (batch, ...) each; leaves of equal size share a launch."""
    by_size: dict[tuple[int, torch.dtype], list[Path]] = {}
    for path, leaf in leaves.items():
        by_size.setdefault((math.prod(leaf.shape[1:]), leaf.dtype), []).append(path)
    found: Flat = {}
    for paths in by_size.values():
        stacked = torch.stack([leaves[path].reshape(len(leaves[path]), -1) for path in paths])
        found |= dict(zip(paths, norms(stacked).unbind()))
    return found


def _count_uses(model: Model, plan: Plan) -> dict[Path, int]:
    """Return in how many blocks each trainable leaf appears: its norm is complete when all have been pulled back."""
    counts = dict.fromkeys(plan.trainable, 0)
    for block, uses in zip(model.blocks, plan.uses):
        by_vmap = [p for p in tree.leaves(block.params) if p in plan.choices and plan.choices[p].norm is NormBy.VMAP]
        for path in {use.path for use in uses} | set(by_vmap):
            counts[path] += 1
    return counts


def widen(leaf: Tensor) -> Tensor:
    """Return the leaf in the dtype of :func:`widest`."""
    return leaf.to(widest(leaf.dtype))


def widest(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, else float32: the dtype in which losses and plain sums are returned."""
    return torch.float64 if dtype == torch.float64 else torch.float32
