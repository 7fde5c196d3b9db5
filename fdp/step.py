"""The private step, and nothing but: Algorithm 1 of Abadi et al. 2016 (arXiv 1607.00133) as one pure function.

sum     S = sum_b min(1, C / |G_b|) G_b                 over all samples of all microbatches
noise   S + z C N(0, I)                                 one draw per element, once per step
mean    / B                                             the public expected batch size
update  params + optimizer(mean)

>>> step = make_train_step(model, adamw(1e-3), mechanism=mechanism, plan=plan)
>>> state = init_state(model, params, optimizer, mechanism)
>>> state, metrics = step(state, batch, key)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fdp import tree
from fdp.mechanism import Mechanism
from fdp.methods import Plan
from fdp.model import Model, check_params
from fdp.noise import add_gaussian, scale
from fdp.optimizers import Optimizer, apply_updates
from fdp.per_sample import clipped_sum, per_sample_norms, plain_sum
from fdp.sharding import (
    Sharding,
    gather_samples,
    globalize,
    globalize_state,
    is_cut,
    localize,
    places,
    sum_over_samples,
)
from fdp.types import Batch, ClippedSum, FdpError, Flat, Key, Metrics, Step, TrainState, Tree


class Part(NamedTuple):
    """What a microbatch adds: its clipped sum, its tally for adaptive clipping, its metrics."""

    total: ClippedSum
    tally: Tensor
    metrics: Metrics


def init_state(
    model: Model, params: Tree, optimizer: Optimizer, mechanism: Mechanism, *, sharding: Sharding | None = None
) -> TrainState:
    """The state before the first step. The optimizer sees the trainable leaves only, by path."""
    check_params(model, params)
    local = localize(params)
    device = tree.leaves(local)[0].device
    clip = tree.map(lambda leaf: leaf.to(device), mechanism.clip.init())
    opt = optimizer.init(_trained(model, tree.flatten(local)))
    opt = opt if sharding is None else globalize_state(opt, sharding)
    return TrainState(params, opt, clip, torch.zeros((), dtype=torch.int64, device=device))


def make_train_step(
    model: Model,
    optimizer: Optimizer,
    *,
    mechanism: Mechanism,
    plan: Plan,
    sharding: Sharding | None = None,
    donate: Sequence[str] = (),
    compiled: bool = False,
) -> Step:
    """Compose ``step(state, batch, key) -> (state, metrics)``.

    ``donate=("state",)`` lets the step write the new state into the tensors of the old one. ``compiled`` makes one
    full graph of the work on a microbatch and one of the update, so that any number of microbatches needs no new
    graph; ``torch.compile(step, fullgraph=True)`` of the whole step works as well, with one graph per number.
    With ``sharding``, the state is of DTensors and the batch holds this rank's samples; every rank calls the step.

    Guarantees:
      - the update depends on the data only through one noised sum per step (and the noised count of an adaptive
        clipping style), which are the events the accountant is given;
      - the microbatch size and the number of ranks change nothing but rounding;
      - no input is modified unless donated.
    """
    if set(donate) - {"state"}:
        raise FdpError(f"donate: expected ('state',) or (), got {tuple(donate)}")
    if plan.trainable != model.trainable:
        raise FdpError("plan: made for other trainable leaves than the model's; call make_plan with this model")
    if not plan.private and mechanism.noise_multiplier != 0:
        raise FdpError("method none trains without privacy and adds no noise; expected noise_multiplier 0")
    if sharding is not None and not optimizer.exact_on_parts and any(is_cut(sharding, path) for path in model.leaves):
        raise FdpError(
            "optimizer: expected one that is exact on parts of a leaf, got one that needs norms or means of whole "
            "leaves; give it sharded reductions, or keep parameters whole (Zero.NONE)"
        )
    z, expected = mechanism.noise_multiplier, mechanism.sampling.expected_batch_size
    where = None if sharding is None else places(sharding)

    def gradient_of(params: Tree, clip_state: Tree, data: Tree, mask: Tensor) -> Part:
        if not plan.private:
            return _plain_part(model, plan, params, data, mask, sharding)
        losses, norms, stash = per_sample_norms(model, params, data, plan=plan, sharding=sharding)
        clip = mechanism.clip.clip(norms, clip_state).masked(mask)
        total = clipped_sum(stash, clip)  # with sharding: over all ranks' samples, this rank's part
        tally = mechanism.clip.tally(norms, mask, clip_state)
        return Part(total, tally, Metrics(losses, norms.total(), clip.smallest(), mask))

    def update(state: TrainState, total: ClippedSum, tally: Tensor, key: Key) -> TrainState:
        noisy = add_gaussian(total, key=key, noise_multiplier=z, places=where)
        mean = scale(noisy, 1 / expected)
        flat = tree.flatten(state.params)
        trained = _trained(model, flat)
        updates, opt = optimizer.update(mean, state.opt, trained)
        params = tree.unflatten(state.params, flat | apply_updates(trained, updates))
        clip = mechanism.clip.update(state.clip, sum_over_samples(sharding, tally), key, expected)
        after = TrainState(params, opt, clip, state.step + 1)
        return _write_into(state, after) if donate else after

    if compiled:
        gradient_of = torch.compile(gradient_of, fullgraph=True, dynamic=False)
        update = torch.compile(update, fullgraph=True, dynamic=False)

    def train_step(state: TrainState, batch: Batch, key: Key) -> tuple[TrainState, Metrics]:
        here = localize(state)
        parts = [
            gradient_of(here.params, here.clip, tree.map(lambda leaf: leaf[i], batch.data), batch.mask[i])  # noqa: B023
            for i in range(batch.mask.shape[0])
        ]
        total, tally, metrics = _joined(parts)
        after = globalize(update(here, total, tally, key), like=state)
        return after, _everyones(metrics, batch.mask.shape, sharding)

    return train_step


def _plain_part(model: Model, plan: Plan, params: Tree, data: Tree, mask: Tensor, sharding: Sharding | None) -> Part:
    losses, value = plain_sum(model, params, data, mask, plan=plan, sharding=sharding)
    metrics = Metrics(losses, torch.full_like(losses, torch.nan), torch.ones_like(losses), mask)
    return Part(ClippedSum(value, losses.new_tensor(torch.inf)), losses.new_zeros(()), metrics)


def _joined(parts: list[Part]) -> Part:
    """The sum of all microbatches, which hold different samples."""
    first, *rest = parts
    total, tally = first.total, first.tally
    for part in rest:
        total, tally = total.plus(part.total), tally + part.tally
    metrics = Metrics(*(torch.cat(fields) for fields in zip(*(part.metrics for part in parts))))
    return Part(total, tally, metrics)


def _everyones(metrics: Metrics, shape: Sequence[int], sharding: Sharding | None) -> Metrics:
    """The metrics of all ranks' samples, in global order."""
    if sharding is None:
        return metrics
    return Metrics(*(gather_samples(sharding, field.view(*shape)).flatten() for field in metrics))


def _trained(model: Model, flat: Flat) -> Flat:
    return {path: leaf for path, leaf in flat.items() if path in model.trainable}


def _write_into(before: TrainState, after: TrainState) -> TrainState:
    tree.map(lambda old, new: old.copy_(new), before, after)
    return before
