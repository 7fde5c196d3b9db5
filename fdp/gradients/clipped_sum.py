"""The clipped sum of per-sample gradients, from what the norm pass stored, and the plain sum without privacy.

    sum_b c_b G_b per leaf, block by block               from stored gradients or pairs, or by a second backward

>>> losses, norms, stash = per_sample_norms(model, params, data, plan=plan)
>>> total = clipped_sum(stash, clip_to(norms, max_norm=1.0))                  # ClippedSum(value, sensitivity)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.gradients.beside import Beside
from fdp.gradients.block_loop import NOTHING_SAVED, Saved, Weights, backward, forward, make_weights
from fdp.gradients.costs import SumBy
from fdp.gradients.eight_bits import StoredRecord, not_rounded
from fdp.gradients.execution import LOCAL, Execution
from fdp.gradients.launches import add_parts, weighted_parts
from fdp.gradients.lazy_sum import LazySum, add_onto, check_leaves, single_row, take, with_bound_of
from fdp.gradients.per_sample import Stash, single_dense_records, widen, widest
from fdp.gradients.plan import Plan
from fdp.gradients.random_draws import check_same_outputs
from fdp.gradients.sample_gradients import Pair, weighted_gradient_of_uses
from fdp.gradients.shared_leaves import weighted_parts_of_shared
from fdp.model import Model
from fdp.parallel.gather_reduce import owned_paths, reduce_stream
from fdp.parallel.offload import wait_for_copies
from fdp.parallel.sharding import Reduce, Sharding
from fdp.types import NO_SAMPLES, Clip, ClippedSum, FdpError, Flat, Path, Tree


def clipped_sum(stash: Stash, clip: Clip, onto: ClippedSum | None = None) -> ClippedSum:
    """Return ``sum_b factor_b G_b`` per leaf over this rank's samples, plus ``onto``: the sum of earlier samples.

    A sum is computed in float64 and stored in ``Memory.sum_dtype``, in the tensors of ``onto`` if it has any. Uses up
    the stash: a block's records are freed when the next block's are summed. If sums are reduced in every microbatch,
    the result is this rank's shard of the sum over all ranks' samples; each block's sums travel while the next block's
    are computed, so that at most two blocks' full gradients exist at a time.

    Guarantees:
      - every leaf in the norms is in the sum, scaled by its own factor;
      - a sample whose factor is 0 contributes exactly 0, even if its gradient is NaN or infinite;
      - the sensitivity is the larger one of ``clip`` and ``onto``, and nobody vouches for the sum if nobody does for
        one of the two.
    """
    return _collect(stash, clip, _evaluated_sums, NO_SAMPLES if onto is None else onto)


def lazy_clipped_sum(stash: Stash, clip: Clip, onto: ClippedSum | None = None) -> ClippedSum:
    """Return the sum of :func:`clipped_sum`, every leaf a :class:`LazySum` for whoever adds the noise in the same pass.

    The sums of stored per-sample gradients are not evaluated here; all others are rows of one. With ``onto``, the sum
    of earlier samples (``NO_SAMPLES`` if there are none yet), everything is evaluated, block by block.
    """
    return _collect(stash, clip, _lazy_sums, onto)


def plain_sum(
    model: Model,
    params: Tree,
    data: Tree,
    mask: Float[Tensor, " batch"],
    *,
    plan: Plan,
    execution: Execution = LOCAL,
    onto: Flat | None = None,
) -> tuple[Float[Tensor, " batch"], dict[Path, Any]]:
    """Return losses and ``sum_b mask_b G_b``, plus ``onto``: the same loop without privacy, one ordinary backward."""
    weights = make_weights(model, params, data, plan, execution)
    # Two leaves may have one gradient tensor, which must not be added to.
    return _plain(weights, data, mask, plan, lambda leaf: leaf.to(widest(leaf.dtype), copy=onto is not None), onto)


def lazy_plain_sum(
    model: Model,
    params: Tree,
    data: Tree,
    mask: Float[Tensor, " batch"],
    *,
    plan: Plan,
    execution: Execution = LOCAL,
    onto: Flat | None = None,
) -> tuple[Float[Tensor, " batch"], dict[Path, Any]]:
    """Return losses and the sum of :func:`plain_sum`; without ``onto`` as lazy sums, in the dtype of the gradients."""
    one = torch.ones(1, dtype=widest(plan.dtype), device=mask.device)
    weights = make_weights(model, params, data, plan, execution)
    return _plain(weights, data, mask, plan, lambda leaf: single_row(leaf, one), onto)


BLOCKS_BESIDE = 4
"""Blocks whose sums share two streams; their records are freed together."""

_BlockSums: TypeAlias = Callable[[dict[Path, list[StoredRecord]], Clip, set[Path]], dict[Path, Any]]
"""Weighted sums of a block's stored records: ``sums(records, clip, used several times)``."""


def _collect(stash: Stash, clip: Clip, block_sums: _BlockSums, onto: ClippedSum | None) -> ClippedSum:
    if onto is not None:
        _check_onto(onto, clip)
    stream = _weighted_blocks(stash, clip, block_sums)
    total = _add_blocks(
        stream, stash.weights, None if onto is None else onto.value, stash.weights.execution.memory.sum_dtype
    )
    if set(total) != set(clip.factors):
        raise FdpError(f"clipped_sum: leaves {sorted(set(total) ^ set(clip.factors))} are in the norms or the sum only")
    found = ClippedSum({path: total[path] for path in clip.factors}, clip.sensitivity, clip.bound)
    return found if onto is None else with_bound_of(onto, found)


def _check_onto(onto: ClippedSum, clip: Clip) -> None:
    if not isinstance(onto, ClippedSum):
        raise FdpError(
            f"clipped_sum: expected onto, the sum of earlier samples, as a ClippedSum, got {type(onto).__name__}: the "
            "noise must cover the bound that those samples were clipped to. Give what the last clipped_sum returned"
        )
    check_leaves("clipped_sum", onto, clip.factors)


def _add_blocks(
    stream: Iterator[dict[Path, Any]], weights: Weights, onto: Flat | None, dtype: torch.dtype
) -> dict[Path, Any]:
    """Return all blocks' sums, each added to ``onto`` in ``dtype`` as soon as it is there; as they are without it."""
    execution = weights.execution
    sharding, device = _reduced_per_microbatch(execution.sharding), execution.memory.sums_device
    if onto is None:
        return reduce_stream(sharding, stream, device=device)
    total = reduce_stream(sharding, stream, device=None, store=partial(add_onto, onto, dtype=dtype, device=device))
    if device is not None:
        wait_for_copies(weights.device)
    return total


def _reduced_per_microbatch(sharding: Sharding | None) -> Sharding | None:
    """Return the sharding by which a block's sums are reduced at once; None if they stay this rank's own."""
    return sharding if sharding is not None and sharding.reduce is Reduce.PER_MICROBATCH else None


def _weighted_blocks(stash: Stash, clip: Clip, block_sums: _BlockSums) -> Iterator[dict[Path, Any]]:
    """Yield, block by block, the weighted sums of the leaves that are complete with it."""
    weights, plan = stash.weights, stash.plan
    clip = clip.double()
    blocks = range(len(weights.model.blocks))
    times = Counter(use.path for uses in plan.uses for use in uses)
    several = {path for path, count in times.items() if count > 1}
    if stash.carries:
        sums: Flat = {}
        *carries, losses = stash.carries
        saved, see = [NOTHING_SAVED for _ in blocks], check_same_outputs(weights.model, [*carries[1:], losses])
        stash.carries.clear()  # a second sum would count every sample twice
        del losses
        factors = next(iter(clip.factors.values()))
        for i, records in backward(weights, None, saved, carries, stash.data, plan, token=factors, see=see):
            second = {path: of for path, of in records.items() if plan.choices[path].sum is SumBy.SECOND_BACKWARD}
            again: dict[Path, list[StoredRecord]] = {
                path: [stash.transform(path, record) for record in of] for path, of in second.items()
            }
            for path, part in _sums(again, clip, several, _wide_parts).items():
                sums[path] = sums[path] + part.double() if path in sums else part.double()
            del second, again  # freed before the block before is pulled back
            done = [path for path in owned_paths(weights.model, i) if path in sums]
            yield {path: sums.pop(path) for path in done}
    yield from _stored_blocks(stash, lambda stored: block_sums(stored, clip, several), lazy=block_sums is _lazy_sums)


def _stored_blocks(
    stash: Stash, sums: Callable[[dict[Path, list[StoredRecord]]], dict[Path, Any]], *, lazy: bool
) -> Iterator[dict[Path, Any]]:
    """Yield the sums of stored records. Lazy sums stay on this device: those of every other block run beside the rest.

    What runs beside is yielded, and its records are freed, when the main stream has waited for it. The first block
    comes last, when the records of all others are free: its sum, with an embedding's table, is the largest.
    """
    model, beside = stash.weights.model, Beside(stash.weights.device)
    held: list[dict[Path, list[StoredRecord]]] = []
    waiting: list[dict[Path, Any]] = []
    for i in reversed(range(len(model.blocks))):
        stored = {path: take(stash.records, path) for path in owned_paths(model, i) if path in stash.records}
        with beside.branch() if lazy and i % 2 == 1 and _outweigh_sums(stored) else nullcontext():
            waiting.append(sums(stored))
        held.append(stored)
        stored = {}
        if not beside.is_open or len(held) == BLOCKS_BESIDE or i <= 1:
            beside.join()
            held.clear()
            while waiting:
                yield waiting.pop(0)


def _outweigh_sums(records: dict[Path, list[StoredRecord]]) -> bool:
    """Return True if stored pairs take more memory than their sums: what a second stream allocates stays its own."""
    pairs = [record for of in records.values() for record in of if isinstance(record, Pair)]
    sums = sum(4 * math.prod(pair.shape) for pair in pairs)
    return sums < sum(side.nbytes for pair in pairs for side in pair[:2] if isinstance(side, Tensor))


def _evaluated_sums(records: dict[Path, list[StoredRecord]], clip: Clip, several: set[Path]) -> dict[Path, Any]:
    return {path: total.double() for path, total in _sums(records, clip, several).items()}


def _lazy_sums(records: dict[Path, list[StoredRecord]], clip: Clip, several: set[Path]) -> dict[Path, Any]:
    dense = single_dense_records(records)
    sums = _sums_in_parts({path: of for path, of in records.items() if path not in dense}, clip, several)
    lazy = {path: LazySum(of.gradient, clip.factors[path]) for path, of in dense.items()}
    ones: dict[int, Tensor] = {}
    for path, parts in sums.items():
        if len(parts) not in ones:
            ones[len(parts)] = parts.new_ones(len(parts), dtype=torch.float64)
        lazy[path] = LazySum(parts, ones[len(parts)])
    return {path: lazy[path] for path in records}


def _plain(
    weights: Weights,
    data: Tree,
    mask: Float[Tensor, " batch"],
    plan: Plan,
    finished: Callable[[Tensor], Any],
    onto: Flat | None,
) -> tuple[Float[Tensor, " batch"], dict[Path, Any]]:
    counted = (mask > 0).to(torch.float32)
    losses, saved, carries = forward(weights, data, plan, gradient=counted)
    stream = _plain_blocks(weights, counted.to(losses.dtype), saved, carries, data, plan, finished, token=losses)
    total = _add_blocks(stream, weights, onto, widest(plan.dtype))
    return losses.to(widest(losses.dtype)), {path: total[path] for path in weights.shards if path in plan.trainable}


def _plain_blocks(
    weights: Weights,
    gradient: Tensor,
    saved: list[Saved],
    carries: list[Tree],
    data: Tree,
    plan: Plan,
    finished: Callable[[Tensor], Any],
    *,
    token: Tree,
) -> Iterator[dict[Path, Any]]:
    sums: Flat = {}
    for i, found in backward(weights, gradient, saved, carries, data, plan, token=token):
        for path, leaf in found.items():
            sums[path] = widen(sums[path]) + widen(leaf) if path in sums else leaf
        done = [path for path in owned_paths(weights.model, i) if path in sums]
        yield {path: finished(sums.pop(path)) for path in done}


def _wide_parts(records: list[StoredRecord], factors: Tensor) -> Tensor:
    return weighted_gradient_of_uses(not_rounded(records), factors).unsqueeze(0)


def _sums(
    records: dict[Path, list[StoredRecord]],
    clip: Clip,
    several: set[Path],
    sum_uses: Callable[[list[StoredRecord], Tensor], Tensor] = weighted_parts_of_shared,
) -> Flat:
    """Return the weighted sum of every leaf; single pairs share launches. ``sum_uses`` sums a leaf used several times.

    The norm of uses that are met one by one, in a second backward, is in float64, and so is their sum.
    """
    return {path: add_parts(parts) for path, parts in _sums_in_parts(records, clip, several, sum_uses).items()}


def _sums_in_parts(
    records: dict[Path, list[StoredRecord]],
    clip: Clip,
    several: set[Path],
    sum_uses: Callable[[list[StoredRecord], Tensor], Tensor] = weighted_parts_of_shared,
) -> Flat:
    """Return the sums of :func:`_sums` in parts that are still to be added: ``(parts, *shape)``."""
    single = [path for path in records if path not in several]
    found = weighted_parts([records[path][0] for path in single], [clip.factors[path] for path in single])
    sums = dict(zip(single, found))
    return {path: sums[path] if path in sums else sum_uses(of, clip.factors[path]) for path, of in records.items()}
