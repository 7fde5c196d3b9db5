"""Measuring and inverting, between the steps: every ``factor_period`` and every ``inverse_period`` steps, and before
steps 1, 2, 4, 8, ... of the first period, in which curvature changes most.

    collect (this rank's samples)  ->  over ranks  ->  decayed sums  ->  damped inverses  ->  their place in the state

What is not finite is not added, nor a measurement without any token, as of an empty Poisson batch; and an inverse that
cannot be made is not replaced: the last one stays, and ``KfacState.failures`` counts the layers, each once. With dense
and diagonal sides and Cholesky the host waits for the device twice, however many layers there are: for what is not
finite, and for what has no inverse.

    gather    columns of all ranks on every rank; every rank inverts everything
    owner     the same columns; every inverse is made by one rank, and sent to all
    ring      columns stay with their rank: sums travel, and small matrices

    >>> state = refresh(state, data, mask, key, step, plan=plan)          # pure; every rank calls it
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.gradients.execution import EAGER, STORE_ALL, Memory, Runner
from fdp.gradients.linear_maps import Sides
from fdp.kfac.config import Distribution, KfacConfig
from fdp.kfac.factors import CurvatureError
from fdp.kfac.invert.batched_inverse import invert_many
from fdp.kfac.invert.foreach import copy_into, decayed_sums, finite_each
from fdp.kfac.invert.inverse import Damping, Via, invert_or_keep
from fdp.kfac.measure.collect import collect
from fdp.kfac.measure.sums import present_of
from fdp.kfac.policy import forms_of
from fdp.kfac.ranks.add_factors import sum_totals, with_all_columns
from fdp.kfac.ranks.owner import invert_owned
from fdp.kfac.ranks.ring import RingSides, invert_ring
from fdp.kfac.slots import Kept, Side, Window, added, condensed, factor_of, fitted
from fdp.kfac.state import KfacPlan, KfacState, LayerPlan, find, replaced
from fdp.kfac.types import Curvature, DenseFactor, DiagonalFactor, Factor, Layer, Preconditioner
from fdp.model import Model
from fdp.parallel.dtensors import globalize, localize
from fdp.parallel.gather_reduce import sum_over_samples
from fdp.parallel.sharding import Sharding
from fdp.types import FdpError, Key, Path, TrainState, Tree

Sum: TypeAlias = DenseFactor | DiagonalFactor


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
    memory: Memory = STORE_ALL,
    runner: Runner = EAGER,
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
    kf, failed = _measured(find(here.opt), here.params, data, mask, key, plan, memory, runner)
    if is_inverted(plan.config, step):
        kf, broken = _inverted(kf, plan, mask.device)
        failed |= broken
    kf = kf._replace(failures=kf.failures + len(failed))
    if donate:
        copy_into(tree.leaves(find(here.opt)), tree.leaves(kf))
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
    runner: Runner,
) -> tuple[KfacState, set[Layer]]:
    """The state with what was measured added, and the layers of which it could not be."""
    new = measure(params, data, mask, key, plan=plan, memory=memory, runner=runner)
    failed = _unusable(new, _tokens(plan.model, data, mask), plan.sharding)
    factors = kf.factors | _added(kf, {layer: both for layer, both in new.items() if layer not in failed}, plan)
    return kf._replace(factors=factors, measured=kf.measured + 1), failed


def measure(
    params: Tree,
    data: Tree,
    mask: Float[Tensor, " batch"],
    key: Key,
    *,
    plan: KfacPlan,
    memory: Memory = STORE_ALL,
    runner: Runner = EAGER,
) -> dict[Layer, tuple[Factor | None, Factor | None]]:
    """Both sides of every layer in the forms they are kept in: sums of all ranks' samples, and this rank's columns.

    Nothing is decided by a value, so that it runs on tensors without any (:mod:`fdp.estimate.estimate`).
    """
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
        runner=runner,
    )

    def summed(factor: Factor | None, side: Side) -> Factor | None:
        return None if factor is None else sum_totals(condensed(factor, side), sharding)

    new: dict[Layer, tuple[Factor | None, Factor | None]] = {}
    for layer, (left, right, _) in plan.layers.items():
        curvature = found.pop(layer)
        new[layer] = summed(curvature.left, left), summed(curvature.right, right)
    return new


def _tokens(model: Model, data: Tree, mask: Float[Tensor, " batch"]) -> Float[Tensor, ""]:
    """How many tokens of this rank's samples count, those that are padding left out; of images, how many samples."""
    present = present_of(model, data)
    keep = mask > 0
    return (keep if present is None else keep[:, None] & (present > 0)).sum(dtype=torch.float64)


def _unusable(trees: Mapping[Layer, Tree], tokens: Float[Tensor, ""], sharding: Sharding | None) -> set[Layer]:
    """The layers whose numbers are not finite on some rank, or all of them where no rank has a token.

    Columns are each rank's own, and all must decide alike: one collective and one wait for all layers.
    """
    leaves = {layer: tree.leaves(each) for layer, each in trees.items()}
    if not leaves:
        return set()
    spoiled = (~finite_each([leaf for each in leaves.values() for leaf in each])).double()
    everyone, *rest = sum_over_samples(sharding, torch.cat([tokens.reshape(1).to(spoiled), spoiled])).tolist()
    if everyone == 0:
        return set(leaves)
    flags = iter(rest)
    return {layer for layer, each in leaves.items() if any([next(flags) for _ in each])}


def _added(
    kf: KfacState, new: Mapping[Layer, tuple[Factor | None, Factor | None]], plan: KfacPlan
) -> dict[Path, tuple[Kept | None, Kept | None]]:
    """What is kept of each layer, decayed, and what is new: sums on one device in one dtype all at once.

    Columns come from the other ranks here, those of one side at a time.
    """
    config = plan.config
    rho, ring = config.decay, config.distribution is Distribution.RING
    done: dict[tuple[Layer, int], Kept | None] = {}
    alike: dict[tuple[Layer, int], tuple[Sum, Sum]] = {}
    for layer, both in new.items():
        for i, (old, factor, side) in enumerate(zip(kf.factors[layer.weight], both, plan.layers[layer][:2])):
            if old is None or factor is None:
                done[layer, i] = None
            elif isinstance(old, Sum) and isinstance(factor, type(old)) and _beside(old, factor):
                alike[layer, i] = old, factor
            else:
                cap = side.columns or config.cap
                whole = factor if ring else with_all_columns(factor, plan.sharding, cap=cap)
                done[layer, i] = added(old, whole, side, rho=rho, sharding=plan.sharding if ring else None)
    olds, news = ([x for pair in alike.values() for x in pair[which]] for which in (0, 1))
    sums = iter(decayed_sums(olds, news, rho=rho))
    done |= {where: type(old)(next(sums), next(sums)) for where, (old, _) in alike.items()}
    return {layer.weight: (done[layer, 0], done[layer, 1]) for layer in new}


def _beside(a: Factor, b: Factor) -> bool:
    return all(x.device == y.device and x.dtype == y.dtype for x, y in zip(a, b))


def _inverted(kf: KfacState, plan: KfacPlan, device: torch.device) -> tuple[KfacState, set[Layer]]:
    """The state with new inverses, and the layers that keep their last."""
    made = {
        Distribution.GATHER: _everywhere,
        Distribution.OWNER: _owned,
        Distribution.RING: _around,
    }[plan.config.distribution](kf, plan, device)
    good = {layer: inverse for layer, inverse in made.items() if inverse is not None}
    maps = {layer.weight: fitted(inverse, like=kf.maps[layer.weight]) for layer, inverse in good.items()}
    return kf._replace(maps=kf.maps | maps), {layer for layer in made if layer not in good}


def _curvature(kept: tuple[Kept | None, Kept | None], layer: LayerPlan, device: torch.device | None) -> Curvature:
    """What is kept as factors, on ``device``; None: where they wait."""
    sides = zip(kept, (layer.left, layer.right))
    return Curvature(*(None if k is None else factor_of(k, side, device=device or k[0].device) for k, side in sides))


def _everywhere(kf: KfacState, plan: KfacPlan, device: torch.device) -> dict[Layer, Preconditioner | None]:
    """Those that can be, together; the others one by one, so that the columns of one at a time are on the device."""
    kept = {layer: kf.factors[layer.weight] for layer in plan.layers}
    sums = {layer: both for layer, both in kept.items() if not any(isinstance(side, Window) for side in both)}
    waiting = {layer: _curvature(both, plan.layers[layer], None) for layer, both in sums.items()}
    made = _inverses(waiting, plan, device)
    for layer in [layer for layer in kept if layer not in sums]:
        made |= _inverses({layer: _curvature(kept[layer], plan.layers[layer], device)}, plan, device)
    return made


def _inverses(
    curvatures: Mapping[Layer, Curvature], plan: KfacPlan, device: torch.device
) -> dict[Layer, Preconditioner | None]:
    """By batches where the settings allow it; what that leaves over one by one, and None where that fails, too."""
    config = plan.config
    made: dict[Layer, Preconditioner | None] = dict.fromkeys(curvatures)
    if config.via is Via.CHOLESKY:  # which has neither another damping nor another power
        made |= invert_many(curvatures, damping=config.damping, device=device)
    for layer in [layer for layer, inverse in made.items() if inverse is None]:
        inverse, ok = invert_or_keep(
            tree.map(lambda x: x.to(device), curvatures[layer]),
            None,
            damping=config.damping,
            method=Damping.PRODUCT if plan.layers[layer].product else Damping.PI,
            via=config.via,
            max_condition=config.max_condition,
            power=config.power,
        )
        made[layer] = inverse if ok else None
    return made


def _owned(kf: KfacState, plan: KfacPlan, device: torch.device) -> dict[Layer, Preconditioner | None]:
    curvatures = {layer: _curvature(kf.factors[layer.weight], how, device) for layer, how in plan.layers.items()}

    def invert(own: Mapping[Layer, Curvature]) -> dict[Layer, Preconditioner]:
        return {layer: inverse or Sides(None, None) for layer, inverse in _inverses(own, plan, device).items()}

    made = invert_owned(curvatures, invert, plan.sharding)
    return {layer: None if not tree.leaves(inverse) else inverse for layer, inverse in made.items()}


def _around(kf: KfacState, plan: KfacPlan, device: torch.device) -> dict[Layer, RingSides | None]:
    """Totals and weights that are kept are those of all ranks already: only one of them brings them to a sum.

    What fails is tried again in float64, as the other distributions do; all ranks fail alike.
    """
    made: dict[Layer, RingSides | None] = {}
    for layer, how in plan.layers.items():
        curvature = _curvature(kf.factors[layer.weight], how, device)
        mine = Curvature(*(_once(factor, plan) for factor in curvature))
        made[layer] = _ring_inverse(mine, plan)
        if made[layer] is None:
            made[layer] = _ring_inverse(tree.map(Tensor.double, mine), plan)
    return made


def _ring_inverse(mine: Curvature, plan: KfacPlan) -> RingSides | None:
    try:
        inverse = invert_ring(mine, plan.sharding, damping=plan.config.damping, via=plan.config.via)
    except CurvatureError:
        return None
    finite = finite_each([x for x in tree.leaves(inverse) if isinstance(x, Tensor)])
    return inverse if bool(finite.all()) else None


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
