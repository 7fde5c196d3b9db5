"""Per-sample norms in one backward, and the clipped sum from what it left behind.

norms      |G_b|^2 per leaf from its records                                  all uses of a tied leaf together
           |U G_b V|^2 where gradients are mapped first: the records are, so that norm and sum see the same numbers
sum        sum_b c_b G_b per leaf, block by block                             from kept gradients or kept pairs, or
                                                                              by a second backward, as planned

>>> losses, norms, stash = per_sample_norms(model, params, data, plan=plan)
>>> total = clipped_sum(stash, clip_to(norms, max_norm=1.0))                  # ClippedSum(value, sensitivity)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from fdp_kernels.keep import squared_parts
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.fast.compiled import Blocks
from fdp.gradients.block_loop import ALL_KEPT, NOTHING_LEFT, Left, Memory, Weights, backward, forward, make_weights
from fdp.gradients.costs import SQUARED_NORMS, Choice, NormBy, SumBy
from fdp.gradients.launches import kept_gradients, weighted_gradients
from fdp.gradients.plan import Plan
from fdp.gradients.sample_gradients import (
    Dense,
    Record,
    cross_term,
    direct_squared_norm_of_uses,
    gram_rounding,
    gram_squared_norm,
    per_sample_gradient,
    spread,
    weighted_gradient_of_uses,
)
from fdp.model import Model
from fdp.parallel.gather_reduce import owned_paths, reduce_stream, sum_over_tensor_axis
from fdp.parallel.sharding import Reduce, Sharding
from fdp.types import Clip, ClippedSum, FdpError, Flat, Norms, Path, Tree, Weighted

SMALL = 1 << 16
"""Elements of a leaf up to which per-sample gradients wait for others of their size before their norms are taken."""


RecordMap: TypeAlias = Callable[[Path, Record], Record]
"""A linear map of a leaf's gradient, done on what one use of it left. It must not depend on the data."""


class Stash(NamedTuple):
    """What the norm pass keeps for the sum: records by leaf, and the input of every block for a second backward.

    ``mapped`` is what records of a second backward still have to go through; kept ones have.
    """

    records: dict[Path, list[Record]]
    carries: tuple[Tree, ...]
    weights: Weights
    data: Tree
    plan: Plan
    mapped: RecordMap


def as_it_is(path: Path, record: Record) -> Record:
    """The gradient itself."""
    return record


def per_sample_norms(
    model: Model,
    params: Tree,
    data: Tree,
    *,
    plan: Plan,
    sharding: Sharding | None = None,
    memory: Memory = ALL_KEPT,
    blocks: Blocks | None = None,
    mapped: RecordMap = as_it_is,
) -> tuple[Float[Tensor, " batch"], Norms, Stash]:
    """Losses, squared gradient norms per sample and leaf, and what the clipped sum needs. One forward, one backward.

    With ``sharding``, ``params`` are this rank's parts and ``data`` this rank's samples. A sample's norm needs nothing
    from ranks with other samples; what ranks along ``tensor`` found of it is added up, leaf by leaf. ``mapped`` is what
    becomes of every gradient before anything is measured: norms and sum are then those of the mapped gradients.

    Guarantees:
      - what is measured is what the clipped sum adds, mapped and rounded alike;
      - every trainable leaf is in the norms, all its uses together (cross terms included);
      - sums of squares are accumulated in float64, whatever the compute dtype.
    """
    weights = make_weights(model, params, data, plan, sharding, memory, blocks)
    losses, opened, carries = forward(weights, data, plan)
    second = any(choice.sum is SumBy.SECOND for choice in plan.choices.values())
    inputs = tuple(carries) if second else ()
    waiting = _count_uses(model, plan)
    open_records: dict[Path, list[Record]] = {}
    kept: dict[Path, list[Record]] = {}
    squared: dict[Path, Tensor] = {}
    small: Flat = {}
    squares: Flat = {}
    for _, records in backward(weights, None, opened, carries, data, plan, token=losses):
        done: dict[Path, list[Record]] = {}
        for path, found in _kept(plan, {p: [mapped(p, record) for record in of] for p, of in records.items()}).items():
            open_records[path] = _merge(open_records.get(path, []) + found, plan.choices[path])
            waiting[path] -= 1
            if waiting[path] == 0:
                done[path] = open_records.pop(path)
        alone = _alone(done)
        squared |= _squared_norms(plan, {path: of for path, of in done.items() if path not in alone})
        for path, of in alone.items():
            if of.gradient[0].numel() <= SMALL:
                small[path] = of.gradient
            elif of.squares is not None:
                squares[path] = of.squares
            else:
                squares[path] = squared_parts(of.gradient.reshape(plan.batch_size, -1))
        kept |= {path: of for path, of in done.items() if plan.choices[path].sum is not SumBy.SECOND}
    squared |= _together(small, lambda these: torch.linalg.vector_norm(these, dim=-1, dtype=torch.float64).square())
    squared |= _together(squares, lambda parts: parts.sum(-1))
    norms = Norms({path: squared[path] for path in weights.parts if path in plan.trainable})
    stash = Stash(kept, inputs, weights, data, plan, mapped)
    return losses.to(_wide(losses.dtype)), sum_over_tensor_axis(sharding, norms), stash


def clipped_sum(stash: Stash, clip: Clip, *, made: bool = True, release: bool = False) -> ClippedSum:
    """``sum_b factor_b G_b`` per leaf, in float64, over this rank's samples.

    With ``made=False`` the sums of kept per-sample gradients are left to be made, for who adds noise in the same pass.
    With ``release`` the stash lets go of a block's records as it comes to the next, and is not to be summed again.

    Where sums are reduced in every microbatch, over all ranks' samples, and this rank's part of it: each block's sums
    travel while the next block's are made, so that no more than two blocks' whole gradients are alive at a time.

    Guarantees:
      - every leaf in the norms is in the sum, scaled by its own factor;
      - a sample whose factor is 0 contributes exactly 0, even if its gradient is NaN or infinite.
    """
    sharding, memory = stash.weights.sharding, stash.weights.memory
    total = reduce_stream(_reducing(sharding), _weighted_blocks(stash, clip, made, release), device=memory.sums_on)
    if set(total) != set(clip.factors):
        raise FdpError(f"clipped_sum: leaves {sorted(set(total) ^ set(clip.factors))} are in the norms or the sum only")
    return ClippedSum({path: total[path] for path in clip.factors}, clip.sensitivity, clip.bound)


def plain_sum(
    model: Model,
    params: Tree,
    data: Tree,
    mask: Float[Tensor, " batch"],
    *,
    plan: Plan,
    sharding: Sharding | None = None,
    memory: Memory = ALL_KEPT,
    blocks: Blocks | None = None,
    made: bool = True,
) -> tuple[Float[Tensor, " batch"], dict[Path, Any]]:
    """Losses and ``sum_b mask_b G_b``: the same loop without privacy, one ordinary backward.

    With ``made=False`` the sums are left in the dtype they were computed in, as in ``clipped_sum``.
    """
    weights = make_weights(model, params, data, plan, sharding, memory, blocks)
    counted = (mask > 0).to(torch.float32)
    losses, opened, carries = forward(weights, data, plan, gradient=counted)
    start = counted.to(losses.dtype)
    stream = _plain_blocks(weights, start, opened, carries, data, plan, made, token=losses)
    total = reduce_stream(_reducing(sharding), stream, device=memory.sums_on)
    return losses.to(_wide(losses.dtype)), {path: total[path] for path in weights.parts if path in plan.trainable}


def losses_of(
    model: Model, params: Tree, data: Tree, *, plan: Plan, sharding: Sharding | None = None
) -> Float[Tensor, " batch"]:
    """The loss of every sample, by the same loop: one block's whole weights at a time."""
    weights = make_weights(model, params, data, plan, sharding, Memory(recompute=True, refetch=True))
    return forward(weights, data, plan)[0].detach()


def _reducing(sharding: Sharding | None) -> Sharding | None:
    """The plan by which a block's sums are reduced as soon as they are made; None: they stay this rank's own."""
    return sharding if sharding is not None and sharding.reduce is Reduce.PER_MICROBATCH else None


def _weighted_blocks(stash: Stash, clip: Clip, made: bool, release: bool) -> Iterator[dict[Path, Any]]:
    """Block by block, the weighted sums of the leaves that are complete with it."""
    weights, plan = stash.weights, stash.plan
    clip = _wide_factors(clip)
    blocks = range(len(weights.model.blocks))
    times = Counter(use.path for uses in plan.uses for use in uses)
    several = {path for path, count in times.items() if count > 1}
    if stash.carries:
        whole: Flat = {}
        opened, carries = [NOTHING_LEFT for _ in blocks], list(stash.carries)
        factors = next(iter(clip.factors.values()))
        for i, records in backward(weights, None, opened, carries, stash.data, plan, token=factors):
            second = {path: of for path, of in records.items() if plan.choices[path].sum is SumBy.SECOND}
            again = {path: [stash.mapped(path, record) for record in of] for path, of in second.items()}
            for path, part in _sums(again, clip, several).items():
                whole[path] = whole[path] + part.double() if path in whole else part.double()
            done = [path for path in owned_paths(weights.model, i) if path in whole]
            yield {path: whole.pop(path) for path in done}
    for i in blocks:
        kept = {path: stash.records[path] for path in owned_paths(weights.model, i) if path in stash.records}
        for path in kept if release else ():
            del stash.records[path]
        alone = {} if made else _alone(kept)
        to_weigh = {path: Weighted(of.gradient, clip.factors[path]) for path, of in alone.items()}
        sums = _sums({path: of for path, of in kept.items() if path not in to_weigh}, clip, several)
        yield {path: to_weigh[path] if path in to_weigh else _made(sums[path], made) for path in kept}


def _wide_factors(clip: Clip) -> Clip:
    """The factors in float64, in which everything is summed; one tensor stays one, and is not cast leaf by leaf."""
    first, *rest = clip.factors.values()
    if all(f is first for f in rest):
        return clip._replace(factors=dict.fromkeys(clip.factors, first.double()))
    return clip._replace(factors={path: f.double() for path, f in clip.factors.items()})


def _plain_blocks(
    weights: Weights,
    start: Tensor,
    opened: list[Left],
    carries: list[Tree],
    data: Tree,
    plan: Plan,
    made: bool,
    *,
    token: Tree,
) -> Iterator[dict[Path, Any]]:
    whole: Flat = {}
    one = start.new_ones(1, dtype=_wide(plan.dtype))
    for i, found in backward(weights, start, opened, carries, data, plan, token=token):
        for path, leaf in found.items():
            whole[path] = _widened(whole[path]) + _widened(leaf) if path in whole else leaf
        done = [path for path in owned_paths(weights.model, i) if path in whole]
        if made:
            yield {path: _widened(whole.pop(path)) for path in done}
        else:
            yield {path: Weighted(whole.pop(path).unsqueeze(0), one) for path in done}


def _merge(records: list[Record], choice: Choice) -> list[Record]:
    """Records of one leaf so far: one running per-sample gradient if that is what is kept, else the pairs."""
    if choice.norm not in (NormBy.KEEP, NormBy.VMAP) or len(records) == 1:
        return records
    first, *rest = [per_sample_gradient(record) for record in records]
    return [Dense(sum(rest, start=first))]


def _kept(plan: Plan, records: dict[Path, list[Record]]) -> dict[Path, list[Record]]:
    """A block's records, with the gradients in place of those that are kept by a gradient each."""
    paths = [path for path, of in records.items() if len(of) == 1 and plan.choices[path].norm is NormBy.KEEP]
    made: dict[Path, list[Record]] = {}
    for path, gradient in zip(paths, kept_gradients([records[path][0] for path in paths])):
        made[path] = [gradient]
    return records | made


def _squared_norms(plan: Plan, records: dict[Path, list[Record]]) -> Flat:
    """Of the leaves that are complete with a block, those of single pairs together."""
    found: Flat = {}
    for by, norms in SQUARED_NORMS.items():
        paths = [path for path, of in records.items() if len(of) == 1 and plan.choices[path].norm is by]
        found |= zip(paths, norms([records[path][0] for path in paths]))
    return found | {path: _squared(of, plan.choices[path]) for path, of in records.items() if path not in found}


def _squared(records: list[Record], choice: Choice) -> Tensor:
    """The squared norm, in float64, of exactly what the sum will add for each sample, several uses of it together."""
    if choice.norm in (NormBy.GRAM, NormBy.SYMMETRIC):
        total = sum(gram_squared_norm(record) for record in records)
        crossed = [(a, b) for i, a in enumerate(records) for b in records[:i]]
        square = torch.as_tensor(total + 2 * sum(cross_term(a, b) for a, b in crossed))
        square = square.clamp_min(0) + gram_rounding(records)
    else:
        square = direct_squared_norm_of_uses(records)
    return square + _apart_rounding(records) if choice.sum is SumBy.SECOND and len(records) > 1 else square


def _apart_rounding(records: list[Record]) -> Tensor:
    """Bound what a sample may leave in a sum whose uses are added up apart, over all samples: ``(k A_b)^2``.

    A second backward comes to the uses of a leaf in different blocks, and adds each to a sum of its own. Two uses of B
    samples, each at most ``c_b A_b <= C / k``, are rounded by ``4 B^2 u C / k`` (u = 2^-53): with ``k = 2^24 B^2 u``,
    at most 2.4e-7 C. ``A_b`` (:func:`fdp.gradients.sample_gradients.spread`) bounds every partial sum.
    """
    bound = spread(records)
    return (2.0**-29 * len(bound) ** 2 * bound).square()


def _together(leaves: Flat, norms: Callable[[Tensor], Tensor]) -> Flat:
    """``norms`` of many leaves, (batch, ...) each: those of equal size in one go, not leaf by leaf."""
    by_size: dict[tuple[int, torch.dtype], list[Path]] = {}
    for path, leaf in leaves.items():
        by_size.setdefault((leaf[0].numel(), leaf.dtype), []).append(path)
    found: Flat = {}
    for paths in by_size.values():
        stacked = torch.stack([leaves[path].reshape(len(leaves[path]), -1) for path in paths])
        found |= dict(zip(paths, norms(stacked).unbind()))
    return found


def _alone(records: dict[Path, list[Record]]) -> dict[Path, Dense]:
    """The per-sample gradients that are all there is of their leaf."""
    return {path: of[0] for path, of in records.items() if len(of) == 1 and isinstance(of[0], Dense)}


def _made(total: Tensor, made: bool) -> Any:
    """A sum in float64; or as one that is left to be made, in which it is added to others in float64."""
    return total.double() if made else Weighted(total.unsqueeze(0), total.new_ones(1, dtype=torch.float64))


def _sums(records: dict[Path, list[Record]], clip: Clip, several: set[Path]) -> Flat:
    """The weighted sum of every leaf, those of single pairs together.

    The norm of several uses together is that of their sum in float64: so must the sum be, not by kernels in float32.
    """
    single = [path for path in records if path not in several]
    found = weighted_gradients([records[path][0] for path in single], [clip.factors[path] for path in single])
    sums = dict(zip(single, found))
    return {
        path: sums[path] if path in sums else weighted_gradient_of_uses(of, clip.factors[path])
        for path, of in records.items()
    }


def _count_uses(model: Model, plan: Plan) -> dict[Path, int]:
    """In how many blocks each trainable leaf appears: its norm is complete when all have been pulled."""
    counts = dict.fromkeys(plan.trainable, 0)
    for block, uses in zip(model.blocks, plan.uses):
        by_vmap = [p for p in tree.leaves(block.params) if p in plan.choices and plan.choices[p].norm is NormBy.VMAP]
        for path in {use.path for use in uses} | set(by_vmap):
            counts[path] += 1
    return counts


def _widened(leaf: Tensor) -> Tensor:
    return leaf.to(_wide(leaf.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
