"""K-FAC for private training: its maps are roots, applied before clipping and again after the noise.

    every sample    U_L G_b U_R, clipped, summed, noised           by the step, ``precondition=sides_of``
    the mean        U_L (...) U_R                                  by the optimizer: (U (x) U)^2 = (F + damping)^-1

Curvature comes from a public source or from statistics released with noise, and from nothing else: neither function
here is given the batch of a step.

    >>> k = private_kfac(model, microbatch, learning_rate=0.5, config=KfacConfig(damping=1e-2), largest=4096)
    >>> step = make_train_step(model, k.optimizer, mechanism=mechanism, plan=plan, precondition=sides_of)
    >>> state = refresh_public(k, state, source, key, t)                             # free
    >>> state = refresh_noised(k, state, batch, key, t, mechanism=mechanism, scales={})   # charged for by epsilon(...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fdp import keys, tree
from fdp.fingerprint import fingerprint
from fdp.gradients.linear_maps import Sides
from fdp.kfac.config import KfacConfig
from fdp.kfac.forms import Form
from fdp.kfac.invert.inverse import Damping, Via, invert_or_keep
from fdp.kfac.invert.woodbury import Power
from fdp.kfac.optimizer import Kfac, kfac
from fdp.kfac.policy import Choice, Options, Policy
from fdp.kfac.private.noised_factors import clipped_statistics, release
from fdp.kfac.private.public_data import Public, draw
from fdp.kfac.private.separate_biases import separate_biases
from fdp.kfac.refresh import is_due, refresh
from fdp.kfac.slots import Kept, Side, added, factor_of, fitted
from fdp.kfac.state import find, replaced
from fdp.kfac.types import Curvature, Factor
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
    """:func:`fdp.kfac.optimizer.kfac` as private training takes it: roots, by eigenvalues; each bias by itself.

    Sides of up to ``largest`` features are dense, others diagonal; ``options`` are those of ``kfac``.
    """
    config = replace(
        config, power=Power.ROOT, via=Via.EIGEN, method=Damping.PI, policy=dense_or_diagonal(largest=largest)
    )
    return kfac(model, microbatch, learning_rate=learning_rate, config=config, view=separate_biases, **options)


def dense_or_diagonal(*, largest: int) -> Policy:
    """Sides of up to ``largest`` features dense, others diagonal: forms that have roots, and can be noised."""
    if largest < 1:
        raise FdpError(f"largest: expected at least 1 feature, got {largest}; 4096 takes a second to decompose")
    return lambda options: [_choose(each, largest) for each in options]


def sides_of(state: TrainState) -> dict[Path, Sides]:
    """What the step multiplies gradients by, ``make_train_step(..., precondition=sides_of)``: the state's own maps."""
    found: dict[Path, Sides] = {}
    for path, placed in find(state.opt).maps.items():
        if not isinstance(placed, Sides):
            raise FdpError(
                f"{path}: expected a map for each side, got {type(placed).__name__}; make the optimizer by private_kfac"
            )
        found[path] = Sides(*placed)
    return found


def refresh_public(
    k: Kfac, state: TrainState, source: Public, key: Key, step: int, *, donate: bool = False
) -> TrainState:
    """The state before step ``step`` with curvature of public data at the present parameters, where it is due.

    ``key`` is the root of the run.
    """
    _check_roots(k)
    if not is_due(k.plan.config, step):
        return state
    key = keys.step_key(key, "curvature", step)
    sharding = k.plan.sharding
    rank, ranks = (0, 1) if sharding is None else (sharding.rank, sharding.ranks)
    device = state.step.device  # where steps compute, wherever the optimizer is kept
    samples = k.plan.known.plan.batch_size
    data, mask = draw(source, samples=samples, key=keys.fold_in(key, "draw"), rank=rank, ranks=ranks)
    data, mask = tree.map(lambda leaf: leaf.to(device), (data, mask))
    common = {"plan": k.plan, "memory": k.memory, "runner": k.runner, "donate": donate}
    return refresh(state, data, mask, keys.fold_in(key, "labels").to(device), step, **common)


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
    """The state before step ``step`` with noised curvature of private data, where ``mechanism.statistics`` says so.

    ``batch()`` draws by ``mechanism.statistics.sampling`` for ``purpose=STATISTICS``; it is not called where nothing is
    due. ``key`` is the root of the run, for labels and noise.

    Guarantees:
      - a release happens exactly where the accountant counts one, with the bound and the noise it is given;
      - its samples are a draw of their own, for this very step; no two releases, nor a step, share its noise.
    """
    _check_roots(k)
    more = mechanism.statistics
    if more is None:
        raise FdpError(
            "mechanism.statistics: expected what is released of the private data, so that it is accounted for, got "
            "None; give Mechanism(..., statistics(...)), or refresh_public from public data"
        )
    if not more.due(step):
        return state
    plan, here = k.plan, localize(state)
    forms = {layer: (left.form, right.form) for layer, (left, right, _) in plan.layers.items()}
    kf = find(here.opt)
    common = {"statistics": more, "known": plan.known, "forms": forms, "scales": scales}
    key = keys.step_key(key, f"statistics {fingerprint(plan.model.identity, plan.config, mechanism)}", step)
    drawn = batch()
    check_step(drawn, step)
    total = clipped_statistics(
        plan.model,
        here.params,
        drawn,
        fisher=plan.config.fisher,
        key=keys.fold_in(key, "labels"),
        sharding=plan.sharding,
        memory=k.memory,
        sharing=plan.config.sharing,
        **common,
    )
    curvatures = release(total, key=keys.fold_in(key, "noise"), **common)
    factors, maps, failed = dict(kf.factors), dict(kf.maps), 0
    for layer, (left, right, _) in plan.layers.items():
        old, rho = kf.factors[layer.weight], plan.config.decay
        new = curvatures[layer]
        kept = (_added(old[0], new.left, left, rho), _added(old[1], new.right, right, rho))
        inverse, ok = _inverse(kept, (left, right), k)
        factors[layer.weight] = kept
        maps[layer.weight] = fitted(inverse, like=kf.maps[layer.weight]) if ok else kf.maps[layer.weight]
        failed += not ok
    after = kf._replace(factors=factors, maps=maps, measured=kf.measured + 1, failures=kf.failures + failed)
    if donate:
        tree.map(lambda a, b: a.copy_(b), kf, after)
        return state
    return globalize(here._replace(opt=replaced(here.opt, after)), like=state)


def _check_roots(k: Kfac) -> None:
    joint = [layer for layer in k.plan.layers if layer.bias is not None]
    if k.plan.config.power is not Power.ROOT or joint:
        raise FdpError(
            "private K-FAC: expected roots, applied before clipping and after the noise, and biases as layers of their "
            "own; make the optimizer by fdp.kfac.private.refresh.private_kfac"
        )


def _added(kept: Kept | None, new: Factor | None, side: Side, rho: float) -> Kept | None:
    return None if kept is None or new is None else added(kept, new, side, rho=rho)


def _inverse(kept: tuple[Kept | None, Kept | None], sides: tuple[Side, Side], k: Kfac) -> tuple[Any, bool]:
    config = k.plan.config
    both = [None if one is None else factor_of(one, at, device=one[0].device) for one, at in zip(kept, sides)]
    return invert_or_keep(
        Curvature(*both),
        None,
        damping=config.damping,
        method=Damping.PI,
        via=Via.EIGEN,
        max_condition=config.max_condition,
        power=Power.ROOT,
    )


def _choose(options: Options, largest: int) -> Choice:
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
