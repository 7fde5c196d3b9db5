"""Measuring and inverting, between the steps: every ``factor_period`` and every ``inverse_period`` steps, and before
steps 1, 2, 4, 8, ... of the first period, in which curvature changes most.

    collect (this rank's samples)  ->  over ranks  ->  decayed sums  ->  damped inverses  ->  their place in the state

What is not finite is not added, and an inverse that cannot be made is not replaced: the last one stays, and
``KfacState.failures`` counts the layers.

    gather    columns of all ranks on every rank; every rank inverts everything
    owner     the same columns; every inverse is made by one rank, and sent to all
    ring      columns stay with their rank: sums travel, and small matrices

    >>> state = refresh(state, data, mask, key, step, plan=plan)          # pure; every rank calls it
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.block_loop import ALL_KEPT, Memory
from fdp.compiled import Blocks
from fdp.kfac.collect import collect
from fdp.kfac.config import Distribution, KfacConfig
from fdp.kfac.exchange import gather, sum_totals
from fdp.kfac.factors import CurvatureError
from fdp.kfac.inverse import Damping, invert_or_keep
from fdp.kfac.owner import invert_owned
from fdp.kfac.places import Kept, Side, added, condensed, factor_of, fitted
from fdp.kfac.policy import forms_of
from fdp.kfac.ring import RingSides, invert_ring
from fdp.kfac.state import KfacPlan, KfacState, LayerPlan, find, replaced
from fdp.kfac.types import Curvature, Factor, Layer, Preconditioner, Sides
from fdp.sharding import globalize, localize
from fdp.traffic import sum_over_samples
from fdp.types import FdpError, Key, TrainState, Tree


def is_due(config: KfacConfig, step: int) -> bool:
    """Whether factors are measured before step ``step``, from 0."""
    return step % config.factor_period == 0 or _early(config, step)


def is_inverted(config: KfacConfig, step: int) -> bool:
    """Whether they are inverted then, too."""
    return step % config.inverse_period == 0 or _early(config, step)


def _early(config: KfacConfig, step: int) -> bool:
    return step < config.inverse_period and step.bit_count() == 1


def refresh(
    state: TrainState,
    data: Tree,
    mask: Float[Tensor, " batch"],
    key: Key,
    step: int,
    *,
    plan: KfacPlan,
    memory: Memory = ALL_KEPT,
    blocks: Blocks | None = None,
    donate: bool = False,
) -> TrainState:
    """The state before step ``step`` with factors, and inverses, of this microbatch at the present parameters.

    ``data`` and ``mask`` are this rank's samples. Nothing happens where nothing is due. ``donate`` writes into the
    tensors of ``state``.

    Guarantees:
      - parameters, moments and the step are untouched;
      - structure, shapes, dtypes and devices of the state stay what they were;
      - the same on every rank, but for the columns of a ring.
    """
    if not is_due(plan.config, step):
        return state
    _check(plan, data, mask)
    here = localize(state)
    kf = _measured(find(here.opt), here.params, data, mask, key, plan, memory, blocks)
    if is_inverted(plan.config, step):
        kf = _inverted(kf, plan, mask.device)
    if donate:
        tree.map(lambda old, new: old.copy_(new), find(here.opt), kf)
        return state
    return globalize(here._replace(opt=replaced(here.opt, kf)), like=state)


def _measured(
    kf: KfacState,
    params: Tree,
    data: Tree,
    mask: Tensor,
    key: Key,
    plan: KfacPlan,
    memory: Memory,
    blocks: Blocks | None,
) -> KfacState:
    config, sharding = plan.config, plan.sharding
    found = collect(
        plan.model,
        params,
        data,
        mask,
        forms=forms_of(plan.rows),
        fisher=config.fisher,
        sharing=config.sharing,
        key=key,
        known=plan.known,
        sharding=sharding,
        memory=memory,
        blocks=blocks,
    )

    def over_ranks(factor: Factor | None, side: Side) -> Factor | None:
        if factor is None:
            return None
        factor = condensed(factor, side)
        if config.distribution is Distribution.RING:
            return sum_totals(factor, sharding)
        return gather(factor, sharding, cap=side.columns or config.cap)

    factors, bad = dict(kf.factors), []
    for layer, (left, right, _) in plan.layers.items():
        curvature = found.pop(layer)
        both = over_ranks(curvature.left, left), over_ranks(curvature.right, right)
        finite = torch.stack([x.isfinite().all() for x in tree.leaves(both)]).all()
        # Columns of a ring differ between ranks, and all must decide alike.
        wrong = sum_over_samples(sharding, (~finite).double().reshape(1)) > 0
        bad.append(wrong)
        if not bool(wrong):
            old = kf.factors[layer.weight]
            factors[layer.weight] = (_added(old[0], both[0], left, config), _added(old[1], both[1], right, config))
    failures = kf.failures + sum(int(wrong) for wrong in bad)
    return kf._replace(factors=factors, measured=kf.measured + 1, failures=failures)


def _added(kept: Kept | None, new: Factor | None, side: Side, config: KfacConfig) -> Kept | None:
    return None if kept is None or new is None else added(kept, new, side, rho=config.decay)


def _inverted(kf: KfacState, plan: KfacPlan, device: torch.device) -> KfacState:
    made = {
        Distribution.GATHER: _everywhere,
        Distribution.OWNER: _owned,
        Distribution.RING: _around,
    }[plan.config.distribution](kf, plan, device)
    maps, failed = dict(kf.maps), 0
    for layer, inverse in made.items():
        if inverse is None:
            failed += 1
        else:
            maps[layer.weight] = fitted(inverse, like=kf.maps[layer.weight])
    return kf._replace(maps=maps, failures=kf.failures + failed)


def _curvature(kept: tuple[Kept | None, Kept | None], layer: LayerPlan, device: torch.device) -> Curvature:
    sides = zip(kept, (layer.left, layer.right))
    return Curvature(*(None if k is None else factor_of(k, side, device=device) for k, side in sides))


def _attempt(config: KfacConfig, layer: LayerPlan) -> Callable[[Curvature], tuple[Preconditioner, bool]]:
    def attempt(curvature: Curvature) -> tuple[Preconditioner, bool]:
        return invert_or_keep(
            curvature,
            None,
            damping=config.damping,
            method=Damping.PRODUCT if layer.product else Damping.PI,
            via=config.via,
            max_condition=config.max_condition,
            power=config.power,
        )

    return attempt


def _everywhere(kf: KfacState, plan: KfacPlan, device: torch.device) -> dict[Layer, Preconditioner | None]:
    made: dict[Layer, Preconditioner | None] = {}
    for layer, how in plan.layers.items():
        inverse, ok = _attempt(plan.config, how)(_curvature(kf.factors[layer.weight], how, device))
        made[layer] = inverse if ok else None
    return made


def _owned(kf: KfacState, plan: KfacPlan, device: torch.device) -> dict[Layer, Preconditioner | None]:
    curvatures = {layer: _curvature(kf.factors[layer.weight], how, device) for layer, how in plan.layers.items()}
    how_of = {id(curvatures[layer]): how for layer, how in plan.layers.items()}

    def attempt(curvature: Curvature) -> Tree:
        inverse, ok = _attempt(plan.config, how_of[id(curvature)])(curvature)
        return inverse if ok else Sides(None, None)

    made = invert_owned(curvatures, attempt, plan.sharding)
    return {layer: None if not tree.leaves(inverse) else inverse for layer, inverse in made.items()}


def _around(kf: KfacState, plan: KfacPlan, device: torch.device) -> dict[Layer, RingSides | None]:
    """Totals and weights that are kept are those of all ranks already: only one of them brings them to a sum."""
    made: dict[Layer, RingSides | None] = {}
    for layer, how in plan.layers.items():
        curvature = _curvature(kf.factors[layer.weight], how, device)
        mine = Curvature(*(_once(factor, plan) for factor in curvature))
        try:
            inverse = invert_ring(mine, plan.sharding, damping=plan.config.damping, via=plan.config.via)
        except CurvatureError:
            made[layer] = None
            continue
        finite = all(bool(x.isfinite().all()) for x in tree.leaves(inverse) if isinstance(x, Tensor))
        made[layer] = inverse if finite else None
    return made


def _once(factor: Factor | None, plan: KfacPlan) -> Factor | None:
    if factor is None or plan.sharding is None or plan.sharding.rank == 0:
        return factor
    fields = {name: torch.zeros_like(value) for name, value in factor._asdict().items() if name != "columns"}
    return factor._replace(**fields)


def _check(plan: KfacPlan, data: Tree, mask: Tensor) -> None:
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.flatten(data).items()}
    if shapes != plan.shapes:
        raise FdpError(
            f"data: expected a microbatch of the shapes K-FAC was made for, {plan.shapes}, got {shapes}; give "
            "kfac(...) an example of the same shape"
        )
    if tuple(mask.shape) != (plan.known.plan.batch_size,):
        raise FdpError(f"mask: expected shape ({plan.known.plan.batch_size},), got {tuple(mask.shape)}")
