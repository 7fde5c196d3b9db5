"""The stages of a step and how they are chosen: which gradient, which reduction, which end. ``fdp.step`` joins them.

>>> stages = make_stages(model, optimizer, mechanism=mechanism, plan=plan, execution=execution)
>>> part = stages.gradient(weights, state.clip, data, mask, {})                  # one microbatch
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fdp import keys, tree
from fdp.checks.gate import check_settings
from fdp.equal_rounding import compiler_options
from fdp.fast.fused_update import FusedUpdate
from fdp.fingerprint import fingerprint
from fdp.finish import Finish, plain_finish
from fdp.gradients.accumulate import (
    NO_PRECONDITIONERS,
    Gradient,
    Preconditioners,
    add_outside,
    clipped_gradient,
    plain_gradient,
)
from fdp.gradients.clipped_sum import clipped_sum, lazy_clipped_sum, lazy_plain_sum, plain_sum
from fdp.gradients.costs import SumBy
from fdp.gradients.execution import LOCAL, Execution
from fdp.gradients.per_sample import widest
from fdp.gradients.plan import Plan
from fdp.gradients.precondition import check_preconditioned, check_sides
from fdp.gradients.rules import HALF, SAMPLES_PER_FLOAT32_SUM
from fdp.gradients.scores import score_moments
from fdp.gradients.taps import batch_size_of
from fdp.model import Model
from fdp.optimizers import Optimizer
from fdp.parallel.gather_reduce import gather_all, reduce_all
from fdp.parallel.sharding import Reduce, Sharding, Zero, gathered_view
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import Poisson
from fdp.privacy.sum_rounding import Rounding, rounding_slack
from fdp.types import ClippedSum, FdpError, Key, TrainState, Tree

Precondition: TypeAlias = Callable[[TrainState], Preconditioners]
"""Linear maps of per-sample gradients, leaf by leaf, from a state that has seen private data only through noise."""


class Stages(NamedTuple):
    """The stages of a step, all on this rank's shards as plain tensors; :func:`fdp.step.join` runs them in order.

    ``prepare(params)`` runs before a step, also before a CUDA graph is replayed. ``weights(params, device)`` are the
    parameters that microbatches compute with. ``preconditioners(state)`` map gradients before they are clipped.
    ``gradient`` is the work on one microbatch; ``reduce(total)`` the sum over all ranks; ``key(root, step)`` the key of
    the step's noise; ``finish`` noise, mean and update. ``scores(weights, data)`` are three numbers per sample about
    the forward pass, for :mod:`fdp.run.compare`. ``repeatable``: gradients have the same bits each time, since a
    second backward must reproduce what the first one measured, or since the execution says so. ``sampling``: the
    sampling that must have drawn a batch; None if the step is not private. ``rounding(device)``: where a private sum is
    rounded to less than float64, if microbatches are on that device; ``slack(device)``: by what fraction the noise is
    larger for it. ``rounded``: the slack that is part of the key.
    """

    prepare: Callable[[Tree], None]
    weights: Callable[[Tree, torch.device], Tree]
    preconditioners: Precondition
    gradient: Gradient
    reduce: Callable[[ClippedSum], ClippedSum]
    key: Callable[[Key, Tensor], Key]
    finish: Finish
    scores: Callable[[Tree, Tree], Tensor | None]
    execution: Execution
    repeatable: bool
    sampling: Poisson | None
    rounding: Callable[[torch.device], Rounding]
    slack: Callable[[torch.device], float]
    rounded: str


def make_stages(
    model: Model,
    optimizer: Optimizer,
    *,
    mechanism: Mechanism,
    plan: Plan,
    execution: Execution = LOCAL,
    donate: Sequence[str] = (),
    precondition: Precondition | None = None,
    settings: str | None = None,
    least_slack: float = 0.0,
) -> Stages:
    """Return the stages of a step, for ``make_train_step`` and for those who want to look between them.

    ``settings`` are folded into the key of the noise; default: a fingerprint of model, optimizer and mechanism. The
    noise is larger by ``least_slack`` at least, for a run whose earlier steps were computed with more slack.
    """
    sharding = execution.sharding
    check_settings(model, optimizer, mechanism, plan, sharding)
    _check_wishes(donate, precondition, plan, execution)
    settings = fingerprint(model.identity, optimizer, mechanism, precondition) if settings is None else settings
    rounding = _roundings(plan, execution)
    slack = _slacks(mechanism, rounding, least_slack)
    rounded = _rounded_words(mechanism, rounding(torch.device("cpu")), plan)
    inside = execution._replace(sharding=_gathered_once(sharding))
    fused = _make_fused_update(model, optimizer, mechanism, plan, execution) if donate else None

    def weights(params: Tree, device: torch.device) -> Tree:
        if fused is not None:
            fused.refresh_copies(params)
            return fused.compute_weights(params)
        if inside.sharding is sharding:
            return params
        return gather_all(sharding, model, params, dtype=plan.dtype, device=device)

    def prepare(params: Tree) -> None:
        if fused is not None and execution.cuda_graph:  # a replay runs no Python
            fused.refresh_copies(params)
            fused.reserve()

    gradient = _make_gradient(model, mechanism, plan, inside, lazy=fused is not None and fused.takes_lazy_sums)
    finish = plain_finish(model, optimizer, mechanism, execution) if fused is None else fused.finish
    finish = _write_in_place(finish) if donate and fused is None else finish
    gradient, finish = _compile_parts(gradient, finish, plan, execution)
    return Stages(
        prepare=prepare,
        weights=weights,
        preconditioners=partial(_preconditioners, model, precondition),
        gradient=gradient,
        reduce=_make_reduce(model, sharding, slack),
        key=partial(_noise_key, f"noise {settings}{rounded}"),
        finish=finish,
        scores=lambda params, data: score_moments(model, params, data, plan.of_size(batch_size_of(data)), inside),
        execution=execution,
        repeatable=execution.repeatable or any(choice.sum is SumBy.SECOND_BACKWARD for choice in plan.choices.values()),
        sampling=mechanism.sampling if plan.private else None,
        rounding=rounding,
        slack=slack,
        rounded=rounded,
    )


def _compile_parts(gradient: Gradient, finish: Finish, plan: Plan, execution: Execution) -> tuple[Gradient, Finish]:
    """Return both as one full graph each, if that is asked for.

    Sums of microbatches are added outside, so that one graph serves all.
    """
    if execution.compile_step is None:
        return gradient, finish
    backend = execution.compile_step
    options = compiler_options(backend, one_order=execution.repeatable or execution.sharding is not None)
    graph = partial(torch.compile, fullgraph=True, dynamic=False, backend=backend, options=options)
    dtype = execution.memory.sum_dtype if plan.private else widest(plan.dtype)
    return add_outside(graph(gradient), dtype), finish._replace(run=graph(finish.run))


def _preconditioners(model: Model, precondition: Precondition | None, state: TrainState) -> Preconditioners:
    return NO_PRECONDITIONERS if precondition is None else check_sides(precondition(state), model)


def _rounded_words(mechanism: Mechanism, rounding: Rounding, plan: Plan) -> str:
    """Return the slack, and the dtype of stored gradients, in the words that noise is drawn for.

    Another slack has other noise: the same noise, scaled by two numbers, could be solved for. So have gradients that
    are rounded otherwise, of these leaves or of others, as measured times decide: with the same noise, the difference
    of two runs would have none. Only slack that is asked for counts, not that of a GPU's kernels, so that a run has the
    same noise on every device.
    """
    stored = "" if plan.stored_dtype is None else f", stored in {plan.stored_dtype} {fingerprint(plan.rounded)}"
    if rounding.sum_dtype == torch.float64:
        return stored
    return f", rounded {rounding_slack(mechanism.sampling, rounding)!r}{stored}"


def _slacks(
    mechanism: Mechanism, rounding: Callable[[torch.device], Rounding], least: float
) -> Callable[[torch.device], float]:
    """Return by what fraction of C noise covers the rounding of sums, by the device of the microbatches."""
    found = {kind: rounding_slack(mechanism.sampling, rounding(torch.device(kind))) for kind in ("cpu", "cuda")}
    return lambda device: max(least, found["cuda" if device.type == "cuda" else "cpu"])


def _noise_key(purpose: str, root: Key, count: Tensor) -> Key:
    return keys.step_key(root, purpose, count)


def _make_gradient(model: Model, mechanism: Mechanism, plan: Plan, execution: Execution, *, lazy: bool) -> Gradient:
    if plan.private:
        return clipped_gradient(model, mechanism, plan, execution, lazy_clipped_sum if lazy else clipped_sum)
    return plain_gradient(model, plan, execution, lazy_plain_sum if lazy else plain_sum)


def _make_reduce(
    model: Model, sharding: Sharding | None, slack: Callable[[torch.device], float]
) -> Callable[[ClippedSum], ClippedSum]:
    """Return the sum over all ranks, whose sensitivity covers what was rounded until then, and on the way."""

    def reduce(total: ClippedSum) -> ClippedSum:
        total = total._replace(sensitivity=total.sensitivity * (1 + slack(total.sensitivity.device)))
        if sharding is None or sharding.reduce is not Reduce.PER_STEP:
            return total
        return total._replace(value=reduce_all(sharding, model, total.value))

    return reduce


def _roundings(plan: Plan, execution: Execution) -> Callable[[torch.device], Rounding]:
    """Return where a private sum is rounded, by the device on which microbatches are computed."""
    memory, sharding = execution.memory, execution.sharding
    uses = Counter(use.path for block in plan.uses for use in block)
    most = min(SAMPLES_PER_FLOAT32_SUM, memory.microbatch_size or SAMPLES_PER_FLOAT32_SUM)
    reduced = torch.float64
    if sharding is not None and sharding.ranks > 1:
        reduced = sharding.reduce_dtype or (memory.sum_dtype if sharding.reduce is Reduce.PER_STEP else torch.float64)

    def rounding(device: torch.device) -> Rounding:
        if not plan.private:
            return Rounding()
        return Rounding(
            memory.sum_dtype,
            memory.microbatch_size,
            reduced,
            1 if sharding is None else sharding.ranks,
            most if plan.dtype in HALF and device.type == "cuda" else 0,
            tied=any(count > 1 for count in uses.values()),
        )

    return rounding


def _gathered_once(sharding: Sharding | None) -> Sharding | None:
    """Return the sharding that microbatches see: ZeRO-2 that reduces once per step gathers leaves before them."""
    if sharding is not None and sharding.reduce is Reduce.PER_STEP and sharding.zero is Zero.TWO:
        return gathered_view(sharding)
    return sharding


def _make_fused_update(
    model: Model, optimizer: Optimizer, mechanism: Mechanism, plan: Plan, execution: Execution
) -> FusedUpdate | None:
    """Return noise and update as one pass over every leaf; None if the optimizer or the execution does not allow it."""
    if optimizer.rule is None or not execution.runner.compiles:
        return None
    if execution.sharding is not None or any(execution.memory.offload):
        return None
    return FusedUpdate(model, optimizer.rule, mechanism, plan.dtype)


def _check_wishes(donate: Sequence[str], precondition: Precondition | None, plan: Plan, execution: Execution) -> None:
    if set(donate) - {"state"}:
        raise FdpError(f"donate: expected ('state',) or (), got {tuple(donate)}")
    if execution.cuda_graph and not donate:
        raise FdpError("cuda_graph: expected donate=('state',), since a recorded step writes where it was recorded")
    if execution.cuda_graph and any(execution.memory.offload):
        parts = [name for name, there in execution.memory.offload._asdict().items() if there]
        raise FdpError(
            f"cuda_graph: expected the whole state on the GPU, got {', '.join(parts)} in CPU memory; a recorded step "
            "runs nothing on the CPU: leave out cuda_graph or offload"
        )
    if precondition is not None:
        check_preconditioned(plan.private, execution.sharding)


def _write_in_place(finish: Finish) -> Finish:
    def run(state: TrainState, *rest: Any) -> TrainState:
        tree.map(lambda old, new: old.copy_(new), state, finish.run(state, *rest))
        return state

    return finish._replace(run=run)
