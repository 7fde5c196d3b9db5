"""K-FAC for private training: inverse roots, applied before clipping and again after the noise.

    every sample    U_L G_b U_R, clipped, summed, noised           by the step, ``precondition=sides_of``
    the mean        U_L (...) U_R                                  by the optimizer: (U (x) U)^2 = (F + damping)^-1

Curvature comes from public data or from statistics released with noise, and from nothing else: no function here is
given the batch of a step.

    >>> k = private_kfac(model, microbatch, learning_rate=0.5, config=KfacConfig(damping=1e-2), largest=4096)
    >>> step = make_train_step(model, k.optimizer, mechanism=mechanism, plan=plan, precondition=sides_of)
    >>> state = refresh_public(k, state, source, key, t)                                 # costs no privacy
    >>> state = refresh_noised(k, state, batch, key, t, mechanism=mechanism, scales={})  # included in epsilon(...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fdp import keys, tree
from fdp.fingerprint import fingerprint
from fdp.gradients.linear_maps import Sides
from fdp.kfac.config import KfacConfig
from fdp.kfac.factor_forms import Form
from fdp.kfac.form_policy import FormChoice, LayerOptions, Policy
from fdp.kfac.inversion.damped_inverse import Damping, invert_or_keep
from fdp.kfac.inversion.one_side import Via
from fdp.kfac.inversion.woodbury import Power
from fdp.kfac.measure.estimator import shard_of_samples
from fdp.kfac.optimizer import Kfac, kfac_from_plan
from fdp.kfac.private.noised_factors import clipped_statistics, release
from fdp.kfac.private.public_data import Public, draw
from fdp.kfac.private.separate_biases import separate_biases
from fdp.kfac.refresh import is_measured, refresh
from fdp.kfac.state import KfacPlan, KfacState, find_kfac_state, plan_kfac, replace_kfac_state
from fdp.kfac.state_slots import FactorSlot, SideSpec, add_to_slot, fit_to_slot, read_slot
from fdp.kfac.types import Curvature, Factor, Layer, Preconditioner
from fdp.model import Model
from fdp.optimizers import Schedule
from fdp.parallel.dtensors import globalize, localize
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import check_step
from fdp.types import Batch, FdpError, Key, Path, TrainState, Tree


def private_kfac(
    model: Model,
    microbatch: Tree,
    *,
    learning_rate: float | Schedule,
    config: KfacConfig,
    largest: int,
    **options: Any,
) -> Kfac:
    """Return :func:`fdp.kfac.optimizer.kfac` for private training: roots by eigenvalues, and separate biases.

    Sides of up to ``largest`` features are dense, others diagonal; ``options`` are those of ``kfac``.
    """
    config = replace(
        config, power=Power.ROOT, via=Via.EIGEN, method=Damping.PI, policy=dense_or_diagonal(largest=largest)
    )
    plan = plan_kfac(model, microbatch, config=config, view=separate_biases, **options)
    return kfac_from_plan(plan, learning_rate=learning_rate)


def dense_or_diagonal(*, largest: int) -> Policy:
    """Store sides of up to ``largest`` features dense and others diagonal: forms that have roots and can be noised."""
    if largest < 1:
        raise FdpError(f"largest: expected at least 1 feature, got {largest}; 4096 takes a second to decompose")
    return lambda options: [_choose(each, largest) for each in options]


def sides_of(state: TrainState) -> dict[Path, Sides]:
    """Return the state's preconditioners by leaf, for ``make_train_step(..., precondition=sides_of)``."""
    found: dict[Path, Sides] = {}
    for path, slot in find_kfac_state(state.opt).maps.items():
        if not isinstance(slot, Sides):
            raise FdpError(
                f"{path}: expected one map per side, got {type(slot).__name__}; create the optimizer with private_kfac"
            )
        found[path] = Sides(*slot)
    return found


def refresh_public(
    k: Kfac, state: TrainState, source: Public, key: Key, step: int, *, donate: bool = False
) -> TrainState:
    """Return the state before step ``step`` with curvature of public data at the current parameters, if it is due.

    ``key`` is the root key of the run.
    """
    _check_private(k)
    if not is_measured(k.plan.config, step):
        return state
    key = keys.step_key(key, "curvature", step)
    rank, ranks = shard_of_samples(k.plan.sharding)
    device = state.step.device  # where steps compute, even if the optimizer is offloaded
    samples = k.plan.survey.plan.batch_size
    data, mask = draw(source, samples=samples, key=keys.fold_in(key, "draw"), rank=rank, ranks=ranks)
    data, mask = tree.map(lambda leaf: leaf.to(device), (data, mask))
    return refresh(state, data, mask, keys.fold_in(key, "labels").to(device), step, plan=k.plan, donate=donate)


def refresh_noised(
    k: Kfac,
    state: TrainState,
    batch: Callable[[], Batch],
    key: Key,
    step: int,
    *,
    mechanism: Mechanism,
    scales: Mapping[str, float],
    donate: bool = False,
) -> TrainState:
    """Return the state before step ``step`` with noised curvature of private data, if ``mechanism.statistics`` is due.

    ``batch()`` draws by ``mechanism.statistics.sampling`` for ``purpose=STATISTICS``; it is not called if nothing is
    due. ``key`` is the root key of the run, for labels and noise.

    Guarantees:
      - a release happens exactly where the accountant counts one, with the bound and the noise it is given;
      - its samples are a draw of their own, for this step; no other release and no step shares its noise.
    """
    _check_private(k)
    statistics = mechanism.statistics
    if statistics is None:
        raise FdpError(
            "mechanism.statistics: expected the statistics to release, so that they are accounted for, got None; use "
            "Mechanism(..., statistics(...)), or refresh_public with public data"
        )
    if not statistics.due(step):
        return state
    plan, local = k.plan, localize(state)
    before = find_kfac_state(local.opt)
    key = keys.step_key(key, f"statistics {fingerprint(plan.model.identity, plan.config, mechanism)}", step)
    drawn = batch()
    check_step(drawn, step)
    common = {"estimator": plan.slot_estimator, "statistics": statistics, "scales": scales}
    labels, execution = keys.fold_in(key, "labels"), plan.execution
    total = clipped_statistics(plan.model, local.params, drawn, key=labels, execution=execution, **common)
    after = _add_and_invert(before, release(total, key=keys.fold_in(key, "noise"), **common), plan)
    if donate:
        tree.map(lambda a, b: a.copy_(b), before, after)
        return state
    return globalize(local._replace(opt=replace_kfac_state(local.opt, after)), like=state)


def _add_and_invert(kf: KfacState, curvatures: Mapping[Layer, Curvature], plan: KfacPlan) -> KfacState:
    """Add released factors to the state and invert; a layer whose inversion fails keeps its last preconditioner."""
    factors, maps, failed = dict(kf.factors), dict(kf.maps), 0
    for layer, (left, right, _) in plan.layers.items():
        old, rho = kf.factors[layer.weight], plan.config.decay
        new = curvatures[layer]
        slots = (_add(old[0], new.left, left, rho), _add(old[1], new.right, right, rho))
        inverse, ok = _invert(slots, (left, right), plan.config)
        factors[layer.weight] = slots
        maps[layer.weight] = fit_to_slot(inverse, like=kf.maps[layer.weight]) if ok else kf.maps[layer.weight]
        failed += not ok
    return kf._replace(factors=factors, maps=maps, measured=kf.measured + 1, failures=kf.failures + failed)


def _check_private(k: Kfac) -> None:
    joint = [layer for layer in k.plan.layers if layer.bias is not None]
    if k.plan.config.power is not Power.ROOT or joint:
        raise FdpError(
            "private K-FAC: expected roots, applied before clipping and after the noise, and biases as layers of their "
            "own; create the optimizer with fdp.kfac.private.refresh.private_kfac"
        )


def _add(slot: FactorSlot | None, new: Factor | None, side: SideSpec, rho: float) -> FactorSlot | None:
    return None if slot is None or new is None else add_to_slot(slot, new, side, rho=rho)


def _invert(
    slots: tuple[FactorSlot | None, FactorSlot | None], sides: tuple[SideSpec, SideSpec], config: KfacConfig
) -> tuple[Preconditioner, bool]:
    both = [None if slot is None else read_slot(slot, side, device=slot[0].device) for slot, side in zip(slots, sides)]
    return invert_or_keep(
        Curvature(*both),
        None,
        damping=config.damping,
        method=Damping.PI,
        via=Via.EIGEN,
        max_condition=config.max_condition,
        power=Power.ROOT,
    )


def _choose(options: LayerOptions, largest: int) -> FormChoice:
    dense = [Form.DENSE if size <= largest else Form.DIAGONAL for size in options.shape]
    dense[0] = Form.DIAGONAL if options.of_tokens is Form.DIAGONAL else dense[0]  # which is exact
    wishes = [
        (dense[0], dense[1]),
        (Form.DIAGONAL, Form.DIAGONAL),
        (Form.DIAGONAL, Form.SKIP),
        (Form.SKIP, Form.SKIP),
    ]
    both = next(wish for wish in wishes if wish in options.allowed)
    return both, f"dense up to {largest} features"
