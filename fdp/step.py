"""The private step: Algorithm 1 of Abadi et al. 2016 (arXiv 1607.00133) as one pure function.

sum     S = sum_b min(1, C / |G_b|) G_b                 over all samples of all microbatches
        of U G_b V instead of G_b, if gradients are preconditioned by maps that know nothing of the private data
noise   S + z C N(0, I)                                 one draw per element, once per step
mean    / B                                             the public expected batch size
update  params + optimizer(mean)

>>> step = make_train_step(model, adamw(1e-3), mechanism=mechanism, plan=plan)
>>> state = init_state(model, params, optimizer, mechanism)
>>> batch = sample_batch(dataset, mechanism.sampling, key, step=t, microbatch_size=64)
>>> state, metrics = step(state, batch, key)                                     # key: one for the whole run
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.attention import fast_attention
from fdp.checks.equal_sizes import SamplePart, without_zeros
from fdp.checks.first_call import Checks, FirstCall
from fdp.checks.gate import Gate
from fdp.equal_rounding import whole_sums
from fdp.fast.cuda_graph import StepParts, capture
from fdp.fast.out_of_memory import EndMark, explain_out_of_memory
from fdp.gradients.accumulate import MicrobatchSum, Preconditioners, add_microbatches, gather_metrics
from fdp.gradients.execution import LOCAL, Execution
from fdp.gradients.plan import Plan
from fdp.model import Model, check_params
from fdp.optimizers import LOCAL as LOCAL_REDUCTIONS
from fdp.optimizers import Optimizer
from fdp.parallel.dtensors import as_dtensor, globalize, globalize_state, localize
from fdp.parallel.offload import place_state
from fdp.parallel.sharded_norms import sharded_reductions
from fdp.parallel.sharding import check_placement
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.microbatches import split_microbatches
from fdp.stages import Precondition, Stages, make_stages
from fdp.types import Batch, ClippedSum, Key, Metrics, Step, TrainState, Tree


def make_train_step(
    model: Model,
    optimizer: Optimizer,
    *,
    mechanism: Mechanism,
    plan: Plan,
    execution: Execution = LOCAL,
    donate: Sequence[str] = (),
    precondition: Precondition | None = None,
    checks: Checks = Checks.FIRST_CALL,
) -> Step:
    """Return ``step(state, batch, key) -> (state, metrics)``; ``key`` is the root of the run, the same at every step.

    ``execution`` says how the step is computed (sharded, offloaded, compiled, recorded), see
    :class:`fdp.gradients.execution.Execution`. If it is sharded, the state is of DTensors, the batch holds this rank's
    samples, and every rank calls the step. ``donate=("state",)`` lets the step write the new state into the tensors of
    the old one; with a compiled runner on one device and an optimizer that has a ``rule`` (AdamW, K-FAC with momentum),
    noise and update then become one pass over every leaf. ``torch.compile(step, fullgraph=True)`` works as well.
    ``precondition`` maps every sample's gradient before it is clipped; the noise is isotropic after that map. At its
    first call a private step checks, on a few of the samples and on synthetic ones, that samples are independent, up to
    20 million parameters that norms are right and, if the plan has several sizes of microbatches, that a sample adds
    the same in all (``fdp.checks.first_call``); ``Checks.SKIPPED`` trusts the model.

    Guarantees:
      - the update depends on the data only through one noised sum per step (and the noised count of an adaptive
        clipping style), which are the events the accountant is given;
      - the batch was drawn by the mechanism's sampling for this very step, or it is refused;
      - no two steps share noise, nor two runs of one key that differ in mechanism, numbers of the optimizer, or
        identity of the model (``Model.identity``); buffers and dtypes are not part of it (docs/guarantees.md);
      - the microbatch size and the execution change nothing but rounding;
      - no input is modified unless donated.
    """
    stages = make_stages(
        model,
        optimizer,
        mechanism=mechanism,
        plan=plan,
        execution=execution,
        donate=donate,
        precondition=precondition,
    )
    first_call = FirstCall(model, plan, execution.sharding) if plan.private and checks is Checks.FIRST_CALL else None
    return join(stages, first_call=first_call)


def join(
    stages: Stages,
    *,
    first_call: FirstCall | None = None,
) -> Step:
    """Return the stages as one step; ``first_call`` checks the model once a batch is accepted, before the rest."""
    step = join_observed(stages, lambda total: (), first_call=first_call)

    def train_step(state: TrainState, batch: Batch, key: Key) -> tuple[TrainState, Metrics]:
        after, metrics, _ = step(state, batch, key)
        return after, metrics

    return train_step


def join_observed(
    stages: Stages,
    observe: Callable[[ClippedSum], Tree],
    *,
    first_call: FirstCall | None = None,
) -> Callable[[TrainState, Batch, Key], tuple[TrainState, Metrics, Tree]]:
    """Return the step with a third result, ``observe(total)``: what is to be seen of the clipped sum before the noise.

    That is private data. It must be copies: the end of the step uses up ``total``.
    """
    sharding = stages.execution.sharding
    gate, mark = Gate(stages.sampling, stages.rounding, sharding), EndMark()

    def end(state: TrainState, total: ClippedSum, tally: Tensor, key: Key) -> tuple[TrainState, Tree]:
        mark.set()
        total = stages.reduce(total)  # a SUM over all ranks' samples
        seen = observe(total)
        after = stages.finish.run(state, total, tally, stages.key(key, state.step))  # noise, mean, update
        return after, seen

    def algorithm_1(state: TrainState, batch: Batch, key: Key) -> tuple[TrainState, Metrics, Tree]:
        total, tally, metrics = sum_over_microbatches(stages, state, batch)  # sum_b min(1, C / |G_b|) G_b
        total = gate.check_compiled(total, state.step, batch)
        after, seen = end(state, total, tally, key)
        return after, metrics, seen

    parts = StepParts(partial(begin, stages), partial(microbatch_sum, stages), end, mark.set)
    run = capture(parts) if stages.execution.cuda_graph else algorithm_1

    def checked_step(state: TrainState, batch: Batch, key: Key) -> tuple[TrainState, Metrics, Tree]:
        check_placement(state, batch, sharding)
        local = localize(state)
        step_number = gate.check(local.step, batch)
        if first_call is not None:
            first_call(state.params, batch, lambda: stages.key(key, local.step), lambda: sample_part(stages, state))
        stages.prepare(local.params)
        gate.enter()
        after, metrics, seen = run(local, batch, key)
        metrics = gather_metrics(metrics, batch.mask.shape, sharding)
        gate.leave()
        gate.remember(after.step, step_number)
        return globalize(after, like=state), metrics, seen

    return explain_out_of_memory(checked_step, mark)


def sum_over_microbatches(stages: Stages, state: TrainState, batch: Batch) -> MicrobatchSum:
    """Return this rank's part of a step: the sum over its microbatches. Gathered weights are freed at its end."""
    work, microbatches = begin(stages, state, batch.mask.device), split_microbatches(batch)
    return add_microbatches(
        lambda i, onto: microbatch_sum(stages, work, state, *microbatches[i], onto), len(microbatches)
    )


def begin(stages: Stages, state: TrainState, device: torch.device) -> tuple[Tree, Preconditioners]:
    """Return what all microbatches of a step compute with: weights, gathered once or block by block, and maps."""
    maps = tree.map(lambda leaf: leaf.to(device), stages.preconditioners(state))
    return stages.weights(state.params, device), maps


def microbatch_sum(
    stages: Stages,
    work: tuple[Tree, Preconditioners],
    state: TrainState,
    data: Tree,
    mask: Float[Tensor, " batch"],
    onto: ClippedSum | None = None,
) -> MicrobatchSum:
    """Return the clipped sum of one microbatch, added to ``onto``, with its tally and metrics."""
    weights, maps = work
    with fast_attention(mask.device, repeatable=stages.repeatable), whole_sums(mask.device):
        return stages.gradient(weights, state.clip, data, mask, maps, onto=onto)


def sample_part(stages: Stages, state: TrainState) -> SamplePart:
    """Return ``add(data, mask)``, the work on a microbatch as a step computes it, for checks of its sizes.

    Leaves of the parameters that are all 0 have other numbers, so that there is a gradient below them.
    """
    local = localize(state)
    local = local._replace(params=tree.map(without_zeros, local.params))

    def add(data: Tree, mask: Float[Tensor, " batch"]) -> MicrobatchSum:
        return microbatch_sum(stages, begin(stages, local, mask.device), local, data, mask)

    return add


def init_state(
    model: Model,
    params: Tree,
    optimizer: Optimizer,
    mechanism: Mechanism,
    *,
    execution: Execution = LOCAL,
    device: torch.device | None = None,
) -> TrainState:
    """Return the state before the first step. The optimizer sees the trainable leaves only, by path.

    ``device`` is where steps will compute; default: where the parameters are.
    """
    check_params(model, params)
    sharding = execution.sharding
    local = tree.flatten(localize(params))
    there = next(iter(local.values())).device if device is None else device
    clip = tree.map(lambda leaf: leaf.to(there), mechanism.clip.init())
    trained = {path: leaf for path, leaf in local.items() if path in model.trainable}
    reductions = LOCAL_REDUCTIONS if sharding is None else sharded_reductions(sharding)
    opt = optimizer.init(trained, reductions)
    state = TrainState(tree.unflatten(params, local), opt, clip, torch.zeros((), dtype=torch.int64, device=there))
    state = place_state(state, execution.memory.offload, there)
    if sharding is None:
        return state
    shapes = optimizer.init({path: torch.empty(model.leaves[path].shape, device="meta") for path in trained})
    flat = {path: as_dtensor(leaf, path, sharding) for path, leaf in tree.flatten(state.params).items()}
    return state._replace(params=tree.unflatten(params, flat), opt=globalize_state(state.opt, shapes, sharding))
