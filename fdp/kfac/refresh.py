"""Measurement and inversion of factors between the steps.

Factors are measured every ``factor_period`` steps and inverted every ``inverse_period`` steps, and both before steps 1,
2, 4, 8, ... of the first period, in which curvature changes most.

    collect (this rank's samples)  ->  sum over ranks  ->  decayed sums  ->  damped inverses  ->  slots of the state

A measurement that is not finite, or that has no tokens (an empty Poisson batch), is not added. If an inversion fails,
the last inverse stays. ``KfacState.failures`` counts these layers, each once. With dense and diagonal sides and
Cholesky the host waits for the device twice, however many layers there are: to find out what is not finite, and what
has no inverse.

    gather    every rank has the columns of all ranks and inverts every layer
    owner     the same columns; one rank inverts a layer and broadcasts the result
    ring      columns stay on their rank; ranks exchange sums and small matrices

    >>> state = refresh(state, data, mask, key, step, plan=plan)          # pure; called on every rank
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.gradients.linear_maps import Sides
from fdp.kfac.config import Distribution, KfacConfig
from fdp.kfac.factors import CurvatureError
from fdp.kfac.foreach import foreach_copy, foreach_decayed_add, foreach_is_finite
from fdp.kfac.inversion.batched_inverse import invert_batched
from fdp.kfac.inversion.damped_inverse import Damping, invert_or_keep
from fdp.kfac.inversion.one_side import Via
from fdp.kfac.measure.accumulate import present_tokens
from fdp.kfac.measure.collect import collect
from fdp.kfac.ranks.owner_inverse import invert_by_owner
from fdp.kfac.ranks.ring_inverse import RingPreconditioner, invert_ring
from fdp.kfac.ranks.sum_factors import gather_factor_columns, sum_totals
from fdp.kfac.state import KfacPlan, KfacState, LayerPlan, find_kfac_state, replace_kfac_state
from fdp.kfac.state_slots import ColumnWindow, FactorSlot, SideSpec, add_to_slot, fit_to_slot, read_slot, to_slot_form
from fdp.kfac.types import Curvature, DenseFactor, DiagonalFactor, Factor, Layer, Preconditioner
from fdp.model import Model
from fdp.parallel.dtensors import globalize, localize
from fdp.parallel.gather_reduce import sum_over_samples
from fdp.parallel.sharding import Sharding
from fdp.types import FdpError, Key, Path, TrainState, Tree

SumFactor: TypeAlias = DenseFactor | DiagonalFactor
FactorPair: TypeAlias = tuple[Factor | None, Factor | None]
SlotPair: TypeAlias = tuple[FactorSlot | None, FactorSlot | None]


def is_measured(config: KfacConfig, step: int) -> bool:
    """Return True if factors are measured before step ``step`` (counted from 0)."""
    return step % config.factor_period == 0 or _is_early(config, step)


def is_inverted(config: KfacConfig, step: int) -> bool:
    """Return True if factors are inverted before step ``step`` (counted from 0)."""
    return step % config.inverse_period == 0 or _is_early(config, step)


def _is_early(config: KfacConfig, step: int) -> bool:
    return step < config.inverse_period and step.bit_count() == 1


def refresh(
    state: TrainState,
    data: Tree,
    mask: Float[Tensor, " batch"],
    key: Key,
    step: int,
    *,
    plan: KfacPlan,
    donate: bool = False,
) -> TrainState:
    """Return the state before step ``step`` with factors and inverses of this microbatch at the current parameters.

    ``data`` and ``mask`` are this rank's samples. If nothing is due, the state is returned unchanged. ``donate`` writes
    into the tensors of ``state``.

    Guarantees:
      - parameters, moments and the step are unchanged;
      - structure, shapes, dtypes and devices of the state are unchanged;
      - the result is the same on every rank, except for the columns of a ring.
    """
    if not is_measured(plan.config, step):
        return state
    _check(plan, data, mask)
    local = localize(state)
    before = find_kfac_state(local.opt)
    after, failed = _measure_and_add(before, local.params, data, mask, key, plan)
    if is_inverted(plan.config, step):
        after, not_inverted = _invert(after, plan, mask.device)
        failed |= not_inverted
    after = after._replace(failures=after.failures + len(failed))
    if donate:
        foreach_copy(tree.leaves(before), tree.leaves(after))
        return state
    return globalize(local._replace(opt=replace_kfac_state(local.opt, after)), like=state)


def _measure_and_add(
    kf: KfacState, params: Tree, data: Tree, mask: Tensor, key: Key, plan: KfacPlan
) -> tuple[KfacState, set[Layer]]:
    """Return the state with a measurement added, and the layers whose measurement is unusable."""
    new = measure(params, data, mask, key, plan=plan)
    failed = _find_unusable(new, _count_tokens(plan.model, data, mask), plan.sharding)
    factors = kf.factors | _add(kf, {layer: both for layer, both in new.items() if layer not in failed}, plan)
    return kf._replace(factors=factors, measured=kf.measured + 1), failed


def measure(
    params: Tree, data: Tree, mask: Float[Tensor, " batch"], key: Key, *, plan: KfacPlan
) -> dict[Layer, FactorPair]:
    """Return both factors of every layer in the form of their slots: sums over all ranks, and this rank's columns.

    No decision depends on a value, so that it runs on fake tensors (:mod:`fdp.estimate.estimate`).
    """
    found = collect(plan.model, params, data, mask, estimator=plan.estimator, key=key, execution=plan.execution)

    def sum_side(factor: Factor | None, side: SideSpec) -> Factor | None:
        return None if factor is None else sum_totals(to_slot_form(factor, side), plan.sharding)

    new: dict[Layer, FactorPair] = {}
    for layer, (left, right, _) in plan.layers.items():
        curvature = found.pop(layer)
        new[layer] = sum_side(curvature.left, left), sum_side(curvature.right, right)
    return new


def _count_tokens(model: Model, data: Tree, mask: Float[Tensor, " batch"]) -> Float[Tensor, ""]:
    """Return how many tokens of this rank's samples are not padding; if samples have no tokens, count samples."""
    present = present_tokens(model, data)
    keep = mask > 0
    return (keep if present is None else keep[:, None] & (present > 0)).sum(dtype=torch.float64)


def _find_unusable(trees: Mapping[Layer, Tree], tokens: Float[Tensor, ""], sharding: Sharding | None) -> set[Layer]:
    """Return the layers whose numbers are not finite on some rank; all layers if no rank has a token.

    Ranks have different columns but must decide alike, so this takes one collective and one wait for all layers.
    """
    leaves = {layer: tree.leaves(each) for layer, each in trees.items()}
    if not leaves:
        return set()
    not_finite = (~foreach_is_finite([leaf for each in leaves.values() for leaf in each])).double()
    total, *rest = sum_over_samples(sharding, torch.cat([tokens.reshape(1).to(not_finite), not_finite])).tolist()
    if total == 0:
        return set(leaves)
    flags = iter(rest)
    return {layer for layer, each in leaves.items() if any([next(flags) for _ in each])}


def _add(kf: KfacState, new: Mapping[Layer, FactorPair], plan: KfacPlan) -> dict[Path, SlotPair]:
    """Return the slots of each layer, decayed, plus its measurement; sums of one device and dtype share a launch.

    Columns are gathered from the other ranks here, one side at a time.
    """
    config = plan.config
    rho, ring = config.decay, config.distribution is Distribution.RING
    done: dict[tuple[Layer, int], FactorSlot | None] = {}
    alike: dict[tuple[Layer, int], tuple[SumFactor, SumFactor]] = {}
    for layer, both in new.items():
        for i, (old, factor, side) in enumerate(zip(kf.factors[layer.weight], both, plan.layers[layer][:2])):
            if old is None or factor is None:
                done[layer, i] = None
            elif isinstance(old, SumFactor) and isinstance(factor, type(old)) and _are_alike(old, factor):
                alike[layer, i] = old, factor
            else:
                cap = side.columns or config.cap
                full = factor if ring else gather_factor_columns(factor, plan.sharding, cap=cap)
                done[layer, i] = add_to_slot(old, full, side, rho=rho, sharding=plan.sharding if ring else None)
    olds, news = ([x for pair in alike.values() for x in pair[which]] for which in (0, 1))
    sums = iter(foreach_decayed_add(olds, news, rho=rho))
    done |= {where: type(old)(next(sums), next(sums)) for where, (old, _) in alike.items()}
    return {layer.weight: (done[layer, 0], done[layer, 1]) for layer in new}


def _are_alike(a: Factor, b: Factor) -> bool:
    return all(x.device == y.device and x.dtype == y.dtype for x, y in zip(a, b))


def _invert(kf: KfacState, plan: KfacPlan, device: torch.device) -> tuple[KfacState, set[Layer]]:
    """Return the state with new inverses, and the layers whose inversion failed."""
    inverses = {
        Distribution.GATHER: _invert_on_every_rank,
        Distribution.OWNER: _invert_by_owner,
        Distribution.RING: _invert_in_ring,
    }[plan.config.distribution](kf, plan, device)
    good = {layer: inverse for layer, inverse in inverses.items() if inverse is not None}
    maps = {layer.weight: fit_to_slot(inverse, like=kf.maps[layer.weight]) for layer, inverse in good.items()}
    return kf._replace(maps=kf.maps | maps), {layer for layer in inverses if layer not in good}


def _read_curvature(slots: SlotPair, layer: LayerPlan, device: torch.device | None) -> Curvature:
    """Return the factors of a layer's slots on ``device`` (None: where they are stored)."""
    sides = zip(slots, (layer.left, layer.right))
    return Curvature(*(None if s is None else read_slot(s, side, device=device or s[0].device) for s, side in sides))


def _invert_on_every_rank(kf: KfacState, plan: KfacPlan, device: torch.device) -> dict[Layer, Preconditioner | None]:
    """Invert dense and diagonal layers together, and layers with columns one by one to limit memory on the device."""
    slots = {layer: kf.factors[layer.weight] for layer in plan.layers}
    sums = {layer: both for layer, both in slots.items() if not any(isinstance(side, ColumnWindow) for side in both)}
    stored = {layer: _read_curvature(both, plan.layers[layer], None) for layer, both in sums.items()}
    inverses = _invert_layers(stored, plan, device)
    for layer in [layer for layer in slots if layer not in sums]:
        curvature = _read_curvature(slots[layer], plan.layers[layer], device)
        inverses |= _invert_layers({layer: curvature}, plan, device)
    return inverses


def _invert_layers(
    curvatures: Mapping[Layer, Curvature], plan: KfacPlan, device: torch.device
) -> dict[Layer, Preconditioner | None]:
    """Invert in batches if the settings allow it, then one by one what is left; None if that fails too."""
    config = plan.config
    inverses: dict[Layer, Preconditioner | None] = dict.fromkeys(curvatures)
    if config.via is Via.CHOLESKY:  # which implies Damping.PI and Power.INVERSE
        inverses |= invert_batched(curvatures, damping=config.damping, device=device)
    for layer in [layer for layer, inverse in inverses.items() if inverse is None]:
        inverse, ok = invert_or_keep(
            tree.map(lambda x: x.to(device), curvatures[layer]),
            None,
            damping=config.damping,
            method=Damping.PRODUCT if plan.layers[layer].product else Damping.PI,
            via=config.via,
            max_condition=config.max_condition,
            power=config.power,
        )
        inverses[layer] = inverse if ok else None
    return inverses


def _invert_by_owner(kf: KfacState, plan: KfacPlan, device: torch.device) -> dict[Layer, Preconditioner | None]:
    layers = plan.layers.items()
    curvatures = {layer: _read_curvature(kf.factors[layer.weight], each, device) for layer, each in layers}

    def invert(own: Mapping[Layer, Curvature]) -> dict[Layer, Preconditioner]:
        return {layer: inverse or Sides(None, None) for layer, inverse in _invert_layers(own, plan, device).items()}

    inverses = invert_by_owner(curvatures, invert, plan.sharding)
    return {layer: None if not tree.leaves(inverse) else inverse for layer, inverse in inverses.items()}


def _invert_in_ring(kf: KfacState, plan: KfacPlan, device: torch.device) -> dict[Layer, RingPreconditioner | None]:
    """Invert in a ring. A layer that fails is retried in float64; all ranks fail alike."""
    inverses: dict[Layer, RingPreconditioner | None] = {}
    for layer, each in plan.layers.items():
        curvature = _read_curvature(kf.factors[layer.weight], each, device)
        own = Curvature(*(_zero_totals(factor, plan.sharding) for factor in curvature))
        inverses[layer] = _invert_ring_or_none(own, plan)
        if inverses[layer] is None:
            inverses[layer] = _invert_ring_or_none(tree.map(Tensor.double, own), plan)
    return inverses


def _invert_ring_or_none(own: Curvature, plan: KfacPlan) -> RingPreconditioner | None:
    try:
        inverse = invert_ring(own, plan.sharding, damping=plan.config.damping, via=plan.config.via)
    except CurvatureError:
        return None
    finite = foreach_is_finite([x for x in tree.leaves(inverse) if isinstance(x, Tensor)])
    return inverse if bool(finite.all()) else None


def _zero_totals(factor: Factor | None, sharding: Sharding | None) -> Factor | None:
    """Zero totals and weights except on rank 0: stored ones are sums over ranks, and a ring sums them again."""
    if factor is None or sharding is None or sharding.rank == 0:
        return factor
    fields = {name: torch.zeros_like(value) for name, value in factor._asdict().items() if name != "columns"}
    return factor._replace(**fields)


def _check(plan: KfacPlan, data: Tree, mask: Tensor) -> None:
    shapes = {path: tuple(leaf.shape) for path, leaf in tree.flatten(data).items()}
    if shapes != plan.shapes:
        raise FdpError(
            f"data: expected a microbatch of the shapes given to kfac(...), {plan.shapes}, got {shapes}; give "
            "kfac(...) an example of the same shapes"
        )
    if tuple(mask.shape) != (plan.survey.plan.batch_size,):
        raise FdpError(f"mask: expected shape ({plan.survey.plan.batch_size},), got {tuple(mask.shape)}")
