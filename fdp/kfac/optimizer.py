"""K-FAC: the mean gradient times the inverse of a Kronecker-factored Fisher information, as an optimizer.

    g^ = F^-1 g,   nu = min(1, sqrt(kl_clip / (lr^2 g^T g^))),   m <- mu m + nu g^,   w <- w - lr (m + lambda w)

Martens and Grosse 2015, arXiv 1503.05671; the trust region on the predictions' change: Ba et al. 2017 (ICLR). The
inverses are part of the state: identities, until ``refresh`` measures and inverts between the steps. Leaves of no layer
go by their gradients.

    >>> k = kfac(model, microbatch, learning_rate=0.3, config=KfacConfig(damping=1e-2))
    >>> state = k.settled(init_state(model, params, k.optimizer, mechanism))
    >>> state = k.refresh(state, microbatch, mask, key, t)          # before step t; where nothing is due, nothing
    >>> state, metrics = step(state, batch, key)                    # a step made with k.optimizer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import keys, tree
from fdp.gradients.execution import EAGER, STORE_ALL, Memory, Runner
from fdp.kfac.config import Distribution, KfacConfig
from fdp.kfac.factors import HALF
from fdp.kfac.full_gradients import precondition_whole
from fdp.kfac.invert.apply import precondition, trust_dot
from fdp.kfac.invert.woodbury import Power
from fdp.kfac.layers import Survey
from fdp.kfac.ranks.ring import RingSides, precondition_ring
from fdp.kfac.ranks.sharded_gradients import precondition_parts
from fdp.kfac.refresh import refresh
from fdp.kfac.slots import Placed, ring_sides
from fdp.kfac.state import KfacPlan, KfacState, init, plan_kfac, settled
from fdp.kfac.types import Layer
from fdp.model import Model
from fdp.optimizers import LOCAL, Optimizer, Reductions, Schedule, add_decayed_weights, chain, scale_by_learning_rate
from fdp.optimizers import trace as momentum_trace
from fdp.optimizers.base import Momentum, once
from fdp.optimizers.schedules import as_schedule
from fdp.optimizers.transforms import times_all
from fdp.parallel.sharding import Sharding
from fdp.types import FdpError, Key, TrainState, Tree


class Kfac(NamedTuple):
    """An optimizer, and what keeps its curvature up to date between steps."""

    optimizer: Optimizer
    plan: KfacPlan
    memory: Memory
    runner: Runner

    def refresh(
        self, state: TrainState, data: Tree, mask: Float[Tensor, " batch"], key: Key, step: int, *, donate: bool = False
    ) -> TrainState:
        """The state before step ``step`` with newer curvature, where it is due: :func:`fdp.kfac.refresh.refresh`.

        ``key`` is the root of the run.

        Guarantees:
          - roots, which map gradients in a private step, are refused: whose data this is cannot be told.
        """
        plan, memory, runner = self.plan, self.memory, self.runner
        if plan.config.power is Power.ROOT:
            raise FdpError(
                "refresh: expected K-FAC for training without privacy, got roots for a private step: curvature of a "
                "batch without noise may reveal it. Use fdp.kfac.private.refresh: refresh_public, or refresh_noised"
            )
        labels = keys.step_key(key, "curvature", step)
        return refresh(state, data, mask, labels, step, plan=plan, memory=memory, runner=runner, donate=donate)

    def settled(self, state: TrainState) -> TrainState:
        """The state with everything where it is kept; once, after ``init_state``."""
        return settled(state, self.plan)


def kfac(
    model: Model,
    microbatch: Tree,
    *,
    learning_rate: float | Schedule,
    config: KfacConfig,
    sharding: Sharding | None = None,
    dtype: torch.dtype = torch.float32,
    memory: Memory = STORE_ALL,
    runner: Runner = EAGER,
    view: Callable[[Survey], Survey] = lambda known: known,
) -> Kfac:
    """K-FAC for ``model`` on microbatches of the shapes, and on the device, of ``microbatch``: this rank's samples.

    ``dtype`` is what the model computes in while factors are measured; ``memory`` and ``runner`` as in a step;
    ``view`` as in :func:`fdp.kfac.state.plan_kfac`.
    """
    plan = plan_kfac(model, microbatch, config=config, sharding=sharding, dtype=dtype, view=view)
    front = scale_by_kfac(plan, learning_rate=learning_rate, runner=runner)
    parts = [front]
    parts += [momentum_trace(config.momentum)] if config.momentum else []
    parts += [add_decayed_weights(config.weight_decay)] if config.weight_decay else []
    optimizer = chain(*parts, scale_by_learning_rate(learning_rate))
    if config.momentum:
        known = Momentum(front, learning_rate, config.momentum, config.weight_decay, optimizer.update)
        optimizer = optimizer._replace(descent=known)
    return Kfac(optimizer, plan, memory, runner)


def scale_by_kfac(plan: KfacPlan, *, learning_rate: float | Schedule, runner: Runner = EAGER) -> Optimizer:
    """``u = nu F^-1 g``; the learning rate is for the scale ``nu`` only. A compiled ``runner`` compiles layers too.

    Guarantees:
      - a private step takes no other power than the root, whose curvature is public or noised.
    """
    config, rate = plan.config, as_schedule(learning_rate)
    rounded, root = plan.known.plan.dtype in HALF, config.power is Power.ROOT
    skipped = sorted(plan.model.trainable - {path for layer in plan.layers for path in layer if path is not None})

    def begin(params: Tree, reductions: Reductions = LOCAL) -> KfacState:
        first = tree.leaves(params)[0]
        return init(plan, dtype=first.dtype, device=first.device)

    def update(grads: Tree, state: KfacState, params: Tree, reductions: Reductions = LOCAL) -> tuple[Tree, KfacState]:
        flat, dots = tree.flatten(grads), []

        def apply(preconditioner: Placed, gradient: Tensor) -> Tensor:
            if isinstance(preconditioner, RingSides):
                done = precondition_ring(preconditioner, gradient, plan.sharding)
            else:
                done = precondition(preconditioner, gradient, rounded=rounded)
            dots.append(trust_dot(gradient, done, root=root))  # of the whole layer, on every rank
            return done

        maps = {layer: _ready(state.maps[layer.weight], layer, plan) for layer in plan.layers}
        shapes = plan.known.shapes
        if runner.compiles and plan.sharding is None and config.distribution is not Distribution.RING:
            whole = {layer: placed for layer, placed in maps.items() if not isinstance(placed, RingSides)}
            done, dots = precondition_whole(whole, flat, shapes=shapes, rounded=rounded, root=root, runner=runner)
        else:
            done = precondition_parts(maps, flat, plan.sharding, shapes=shapes, apply=apply)
        if config.kl_clip is not None:
            squares = reductions.sum_of_squares({path: flat[path] for path in skipped}) if skipped else {}
            dot = torch.stack([*dots, *(square.double() for square in squares.values())]).sum()
            most = (config.kl_clip / (rate(state.step).square() * dot.abs())).sqrt()
            factor = once(most.clamp(max=1))
            done = dict(zip(done, times_all(list(done.values()), factor)))
        return tree.unflatten(grads, done), state._replace(step=state.step + 1)

    return Optimizer(begin, update, measures=config.power is Power.INVERSE, settings=(learning_rate, config))


def _ready(placed: Placed, layer: Layer, plan: KfacPlan) -> Placed:
    if plan.config.distribution is not Distribution.RING:
        return placed
    assert isinstance(placed, RingSides)
    left, right, _ = plan.layers[layer]
    return ring_sides(placed, left, right)
