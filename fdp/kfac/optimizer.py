"""K-FAC as an optimizer: the mean gradient times the inverse of a Kronecker-factored Fisher information.

    g^ = F^-1 g,   nu = min(1, sqrt(kl_clip / (lr^2 g^T g^))),   m <- mu m + nu g^,   w <- w - lr (m + lambda w)

Martens and Grosse 2015, arXiv 1503.05671; the bound nu on the change of predictions is from Ba et al. 2017 (ICLR). The
inverses are part of the state, and are identities until ``refresh`` measures and inverts between the steps. Leaves that
belong to no layer use their plain gradients.

    >>> k = kfac(model, microbatch, learning_rate=0.3, config=KfacConfig(damping=1e-2))
    >>> state = k.place(init_state(model, params, k.optimizer, mechanism))
    >>> state = k.refresh(state, microbatch, mask, key, t)          # before step t; does nothing if nothing is due
    >>> state, metrics = step(state, batch, key)                    # a step made with k.optimizer
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import keys, tree
from fdp.gradients.execution import LOCAL as ON_ONE_DEVICE
from fdp.gradients.execution import Execution
from fdp.kfac.config import Distribution, KfacConfig
from fdp.kfac.factors import HALF
from fdp.kfac.inversion.woodbury import Power
from fdp.kfac.preconditioning.compiled import precondition_compiled
from fdp.kfac.preconditioning.one_layer import precondition, trust_dot
from fdp.kfac.preconditioning.sharded import precondition_sharded
from fdp.kfac.ranks.ring_inverse import RingPreconditioner, precondition_ring
from fdp.kfac.refresh import refresh
from fdp.kfac.state import KfacPlan, KfacState, init_kfac_state, place_kfac_state, plan_kfac
from fdp.kfac.state_slots import PreconditionerSlot, read_ring_slot
from fdp.kfac.types import Layer
from fdp.model import Model
from fdp.optimizers import LOCAL, Optimizer, Reductions, Schedule, add_decayed_weights, chain, scale_by_learning_rate
from fdp.optimizers import trace as momentum_trace
from fdp.optimizers.base import Momentum, once
from fdp.optimizers.schedules import as_schedule
from fdp.optimizers.transforms import times_all
from fdp.types import FdpError, Key, TrainState, Tree


class Kfac(NamedTuple):
    """An optimizer, and the plan by which its curvature is refreshed between steps."""

    optimizer: Optimizer
    plan: KfacPlan

    def refresh(
        self, state: TrainState, data: Tree, mask: Float[Tensor, " batch"], key: Key, step: int, *, donate: bool = False
    ) -> TrainState:
        """Return the state before step ``step`` with new curvature, if it is due: :func:`fdp.kfac.refresh.refresh`.

        ``key`` is the root key of the run.

        Guarantees:
          - K-FAC for a private step (``Power.ROOT``) is refused, because ``data`` might be private.
        """
        if self.plan.config.power is Power.ROOT:
            raise FdpError(
                "refresh: expected K-FAC for training without privacy, got roots for a private step: curvature of a "
                "batch without noise may reveal it. Use refresh_public or refresh_noised of fdp.kfac.private.refresh"
            )
        labels = keys.step_key(key, "curvature", step)
        return refresh(state, data, mask, labels, step, plan=self.plan, donate=donate)

    def place(self, state: TrainState) -> TrainState:
        """Move factors to their storage device and shard ring columns. Call it once, after ``init_state``."""
        return place_kfac_state(state, self.plan)


def kfac(
    model: Model,
    microbatch: Tree,
    *,
    learning_rate: float | Schedule,
    config: KfacConfig,
    execution: Execution = ON_ONE_DEVICE,
    dtype: torch.dtype = torch.float32,
) -> Kfac:
    """Return K-FAC for ``model``, measured on this rank's microbatches of the shapes and device of ``microbatch``.

    ``execution`` is that of the step; ``dtype`` is the compute dtype of a measurement.
    """
    plan = plan_kfac(model, microbatch, config=config, execution=execution, dtype=dtype)
    return kfac_from_plan(plan, learning_rate=learning_rate)


def kfac_from_plan(plan: KfacPlan, *, learning_rate: float | Schedule) -> Kfac:
    """Return the optimizer of a plan: K-FAC, momentum, weight decay and the learning rate."""
    config = plan.config
    front = scale_by_kfac(plan, learning_rate=learning_rate)
    parts = [front]
    parts += [momentum_trace(config.momentum)] if config.momentum else []
    parts += [add_decayed_weights(config.weight_decay)] if config.weight_decay else []
    optimizer = chain(*parts, scale_by_learning_rate(learning_rate))
    if config.momentum:
        descent = Momentum(front, learning_rate, config.momentum, config.weight_decay, optimizer.update)
        optimizer = optimizer._replace(descent=descent)
    return Kfac(optimizer, plan)


def scale_by_kfac(plan: KfacPlan, *, learning_rate: float | Schedule) -> Optimizer:
    """Scale gradients by ``u = nu F^-1 g``; the learning rate affects ``nu`` only.

    Guarantees:
      - a private step accepts no power but the root, whose curvature is public or noised.
    """
    config, rate, runner = plan.config, as_schedule(learning_rate), plan.execution.runner
    rounded, root = plan.survey.plan.dtype in HALF, config.power is Power.ROOT
    skipped = sorted(plan.model.trainable - {path for layer in plan.layers for path in layer if path is not None})

    def begin(params: Tree, reductions: Reductions = LOCAL) -> KfacState:
        first = tree.leaves(params)[0]
        return init_kfac_state(plan, dtype=first.dtype, device=first.device)

    def update(grads: Tree, state: KfacState, params: Tree, reductions: Reductions = LOCAL) -> tuple[Tree, KfacState]:
        flat, dots = tree.flatten(grads), []

        def apply(preconditioner: PreconditionerSlot, gradient: Tensor) -> Tensor:
            if isinstance(preconditioner, RingPreconditioner):
                done = precondition_ring(preconditioner, gradient, plan.sharding)
            else:
                done = precondition(preconditioner, gradient, rounded=rounded)
            dots.append(trust_dot(gradient, done, root=root))  # of the full layer, on every rank
            return done

        maps = {layer: _read_preconditioner(state.maps[layer.weight], layer, plan) for layer in plan.layers}
        shapes = plan.survey.shapes
        if runner.compiles and plan.sharding is None and config.distribution is not Distribution.RING:
            full = {layer: each for layer, each in maps.items() if not isinstance(each, RingPreconditioner)}
            done, dots = precondition_compiled(full, flat, shapes=shapes, rounded=rounded, root=root, runner=runner)
        else:
            done = precondition_sharded(maps, flat, plan.sharding, shapes=shapes, apply=apply)
        if config.kl_clip is not None:
            squares = reductions.sum_of_squares({path: flat[path] for path in skipped}) if skipped else {}
            dot = torch.stack([*dots, *(square.double() for square in squares.values())]).sum()
            most = (config.kl_clip / (rate(state.step).square() * dot.abs())).sqrt()
            factor = once(most.clamp(max=1))
            done = dict(zip(done, times_all(list(done.values()), factor)))
        return tree.unflatten(grads, done), state._replace(step=state.step + 1)

    return Optimizer(begin, update, measures=config.power is Power.INVERSE, settings=(learning_rate, config))


def _read_preconditioner(slot: PreconditionerSlot, layer: Layer, plan: KfacPlan) -> PreconditionerSlot:
    if plan.config.distribution is not Distribution.RING:
        return slot
    assert isinstance(slot, RingPreconditioner)
    left, right, _ = plan.layers[layer]
    return read_ring_slot(slot, left, right)
