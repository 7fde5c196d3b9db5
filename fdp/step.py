"""The private step, and nothing but: Algorithm 1 of Abadi et al. 2016 (arXiv 1607.00133) as one pure function.

sum     S = sum_b min(1, C / |G_b|) G_b                 over all samples of all microbatches
        of U G_b V for G_b, where gradients are preconditioned by maps that know nothing of the private data
noise   S + z C N(0, I)                                 one draw per element, once per step
mean    / B                                             the public expected batch size
update  params + optimizer(mean)

>>> step = make_train_step(model, adamw(1e-3), mechanism=mechanism, plan=plan)
>>> state = init_state(model, params, optimizer, mechanism)
>>> batch = sample_batch(dataset, mechanism.sampling, key, step=t, microbatch_size=64)
>>> state, metrics = step(state, batch, key)                                     # key: one for the whole run
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fdp import keys, tree
from fdp.checks.first_call import Checks, FirstCall
from fdp.checks.gate import Gate, check_settings
from fdp.fast.compiled import Blocks
from fdp.fast.cuda_graph import captured
from fdp.fast.fused_update import FusedUpdate
from fdp.fingerprint import fingerprint
from fdp.gradients.accumulate import Part, everyones, joined, plain_part
from fdp.gradients.block_loop import Memory
from fdp.gradients.costs import SumBy
from fdp.gradients.linear_maps import Sides
from fdp.gradients.per_sample import as_it_is, clipped_sum, per_sample_norms
from fdp.gradients.plan import Plan
from fdp.gradients.precondition import check_preconditioned, check_sides, map_record
from fdp.gradients.scores import score_moments
from fdp.model import Model, check_params
from fdp.ops import fast_attention
from fdp.optimizers import LOCAL, Optimizer, apply_updates
from fdp.parallel.dtensors import as_dtensor, globalize, globalize_state, localize
from fdp.parallel.gather_reduce import gather_all, reduce_all, sum_over_samples
from fdp.parallel.offload import CPU, NO_OFFLOAD, Offload, place_state
from fdp.parallel.sharded_norms import sharded_reductions
from fdp.parallel.sharding import Reduce, Sharding, Zero, check_placement, gathered_view, reduce_slack, shard_windows
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.noise import add_noise, expected_mean
from fdp.privacy.sampling import Poisson
from fdp.types import Batch, ClippedSum, FdpError, Flat, Key, Metrics, Path, Step, TrainState, Tree, Weighted

Precondition: TypeAlias = Callable[[TrainState], Mapping[Path, Sides]]
"""What every sample's gradient is multiplied by before it is clipped, leaf by leaf: out of the state, which has seen
private data only through noise; leaves that are not named stay as they are."""

NO_SIDES: Mapping[Path, Sides] = {}


class Compile(Enum):
    """What torch.compile is given: nothing; one block of every kind; or a microbatch's whole work, and the update's."""

    NONE = "none"
    BLOCK = "block"
    STEP = "step"


class Stages(NamedTuple):
    """A step in pieces, all on this rank's plain parts; ``make_train_step`` puts them together.

    ``weights(params, device)`` is what the microbatches compute with; ``scores(weights, data)`` what the forward of one
    comes to, in three numbers per sample; ``sides(state)`` what gradients are multiplied by before they are clipped;
    ``gradient(weights, clip_state, data, mask, sides)`` a microbatch's part; ``reduce(total)`` the sum over all ranks;
    ``key(root, step)`` the key of the step's noise; ``noise(total, key)`` the noised sum; ``mean(noisy, params)`` that
    over the expected batch size, as the optimizer takes it; ``update(state, mean, tally, key)`` the next state.
    ``fused``, where there is one, does all after ``reduce`` in one pass over every leaf, in place, on sums that
    ``gradient`` then leaves to be made. ``repeats``: a second backward must find what the first one measured.
    ``sampling`` is who must have drawn a batch; None: anyone, since the step is not private.
    """

    weights: Callable[[Tree, torch.device], Tree]
    scores: Callable[[Tree, Tree], Tensor | None]
    sides: Precondition
    gradient: Callable[..., Part]
    reduce: Callable[[ClippedSum], ClippedSum]
    key: Callable[[Key, Tensor], Key]
    noise: Callable[[ClippedSum, Key], Flat]
    mean: Callable[[Flat, Tree], Flat]
    update: Callable[[TrainState, Flat, Tensor, Key], TrainState]
    sharding: Sharding | None
    compile: Compile
    fused: FusedUpdate | None
    repeats: bool
    sampling: Poisson | None


def init_state(
    model: Model,
    params: Tree,
    optimizer: Optimizer,
    mechanism: Mechanism,
    *,
    sharding: Sharding | None = None,
    offload: Offload = NO_OFFLOAD,
    device: torch.device | None = None,
) -> TrainState:
    """The state before the first step. The optimizer sees the trainable leaves only, by path.

    ``device`` is where steps will compute; default: where the parameters are.
    """
    check_params(model, params)
    local = tree.flatten(localize(params))
    there = next(iter(local.values())).device if device is None else device
    clip = tree.map(lambda leaf: leaf.to(there), mechanism.clip.init())
    trained = _trained(model, local)
    reductions = LOCAL if sharding is None else sharded_reductions(sharding)
    opt = optimizer.init(trained, reductions)
    state = TrainState(tree.unflatten(params, local), opt, clip, torch.zeros((), dtype=torch.int64, device=there))
    state = place_state(state, offload, there)
    if sharding is None:
        return state
    shapes = optimizer.init({path: torch.empty(model.leaves[path].shape, device="meta") for path in trained})
    flat = {path: as_dtensor(leaf, path, sharding) for path, leaf in tree.flatten(state.params).items()}
    return state._replace(params=tree.unflatten(params, flat), opt=globalize_state(state.opt, shapes, sharding))


def make_train_step(
    model: Model,
    optimizer: Optimizer,
    *,
    mechanism: Mechanism,
    plan: Plan,
    sharding: Sharding | None = None,
    offload: Offload = NO_OFFLOAD,
    checkpoint_activations: bool = False,
    donate: Sequence[str] = (),
    compile: Compile = Compile.NONE,
    cuda_graph: bool = False,
    precondition: Precondition | None = None,
    checks: Checks = Checks.FIRST_CALL,
) -> Step:
    """Compose ``step(state, batch, key) -> (state, metrics)``; ``key`` is the root of the run, the same at every step.

    ``donate=("state",)`` lets the step write the new state into the tensors of the old one. ``Compile.BLOCK`` compiles
    one block of every kind and, for a donated state on one device with an optimizer that has a ``rule`` (AdamW, K-FAC
    with momentum), leaves the rest to kernels: the quickest start and step. ``Compile.STEP`` makes one full graph of
    the work on a microbatch and one of the update, so that any number of microbatches needs no new graph;
    ``torch.compile(step, fullgraph=True)`` of the whole step works as well, with one graph per number. ``cuda_graph``
    records the whole step once and replays it; the state must be donated. With ``sharding``, the state is of DTensors
    and the batch holds this rank's samples; every rank calls the step. ``checkpoint_activations`` keeps only every
    block's input and runs its forward again, as ZeRO-3 always does. ``precondition`` maps every sample's gradient
    before it is clipped; the noise is isotropic after that map. At its first call a private step checks, on a few of
    the samples and on made-up ones, that samples are independent and, for up to 20 million parameters, that norms are
    right (``fdp.checks.first_call``); ``Checks.SKIPPED`` takes the model at your word.

    Guarantees:
      - the update depends on the data only through one noised sum per step (and the noised count of an adaptive
        clipping style), which are the events the accountant is given;
      - the batch was drawn by the mechanism's sampling for this very step, or it is refused;
      - no two steps share noise, nor two runs of one key that differ in model, optimizer or mechanism;
      - the microbatch size, the number of ranks, offload and activation checkpoints change nothing but rounding;
      - no input is modified unless donated.
    """
    stages = make_stages(
        model,
        optimizer,
        mechanism=mechanism,
        plan=plan,
        sharding=sharding,
        offload=offload,
        checkpoint_activations=checkpoint_activations,
        compile=compile,
        precondition=precondition,
    )
    look = FirstCall(model, plan, sharding) if plan.private and checks is Checks.FIRST_CALL else None
    return compose(stages, donate=donate, cuda_graph=cuda_graph, look=look)


def compose(
    stages: Stages,
    *,
    donate: Sequence[str] = (),
    cuda_graph: bool = False,
    look: Callable[[Tree, Batch], None] | None = None,
) -> Step:
    """The pieces of a step, one after the other; ``donate`` and ``cuda_graph`` as in ``make_train_step``.

    ``look(params, batch)`` is called before anything is computed of a batch that was let in.
    """
    if set(donate) - {"state"}:
        raise FdpError(f"donate: expected ('state',) or (), got {tuple(donate)}")
    if cuda_graph and not donate:
        raise FdpError("cuda_graph: expected donate=('state',), since a recorded step writes where it was recorded")
    compiled, fused = stages.compile is Compile.STEP, stages.fused if donate else None

    def finish(state: TrainState, total: ClippedSum, tally: Tensor, key: Key) -> TrainState:
        mean = _noisy_mean(stages.noise, stages.mean, total, key, state.params, release=not compiled)
        after = stages.update(state, mean, tally, key)
        return _write_into(state, after) if donate else after

    if compiled:
        stages = stages._replace(gradient=torch.compile(stages.gradient, fullgraph=True, dynamic=False))
        finish = torch.compile(finish, fullgraph=True, dynamic=False)

    gate = Gate(stages.sampling)

    def body(here: TrainState, batch: Batch, key: Key) -> tuple[TrainState, Metrics]:
        total, tally, metrics = all_microbatches(stages, here, batch)
        total = gate.bounded(stages.reduce(total), here.step, batch)
        last = finish if fused is None else fused
        after = last(here, total, tally, stages.key(key, here.step))
        return after, everyones(metrics, batch.mask.shape, stages.sharding)

    run = captured(body) if cuda_graph else body

    def train_step(state: TrainState, batch: Batch, key: Key) -> tuple[TrainState, Metrics]:
        check_placement(state, batch, stages.sharding)
        here = localize(state)
        turn = gate.check(here.step, batch)
        if look is not None:
            look(state.params, batch)
        if fused is not None and cuda_graph:
            fused.attend(here.params)  # a replay does not
            fused.reserve()
        after, metrics = run(here, batch, key)
        gate.passed(after.step, turn)
        return globalize(after, like=state), metrics

    return train_step


def make_stages(
    model: Model,
    optimizer: Optimizer,
    *,
    mechanism: Mechanism,
    plan: Plan,
    sharding: Sharding | None = None,
    offload: Offload = NO_OFFLOAD,
    checkpoint_activations: bool = False,
    compile: Compile = Compile.NONE,
    precondition: Precondition | None = None,
    settings: str | None = None,
) -> Stages:
    """The pieces of the step, for ``make_train_step`` and for those who want to look between them.

    ``settings`` are folded into the key of the noise; default: a fingerprint of model, optimizer and mechanism.
    """
    check_settings(model, optimizer, mechanism, plan, sharding)
    if precondition is not None:
        check_preconditioned(plan.private, sharding)
    z, expected = mechanism.noise_multiplier, mechanism.sampling.expected_batch_size
    once = sharding is not None and sharding.reduce is Reduce.PER_STEP
    gathers_once = once and sharding is not None and sharding.zero is Zero.TWO
    inside = gathered_view(sharding) if sharding is not None and gathers_once else sharding
    where = None if sharding is None else shard_windows(sharding)
    reductions = LOCAL if sharding is None else sharded_reductions(sharding)
    memory = Memory(checkpoint_activations, offload.params, CPU if offload.grads else None)
    blocks = Blocks() if compile is Compile.BLOCK else None
    settings = fingerprint(model.identity, optimizer, mechanism, precondition) if settings is None else settings
    rule = optimizer.rule
    fused = None
    if compile is Compile.BLOCK and rule is not None and sharding is None and not any(offload):
        fused = FusedUpdate(
            model,
            rule,
            mechanism,
            plan.dtype,
            mean=lambda total, key, params: _noisy_mean(noise, mean_of, total, key, params, release=True),
        )
    made = fused is None or rule is not optimizer.adamw

    def weights(params: Tree, device: torch.device) -> Tree:
        if fused is not None:
            fused.attend(params)
            return fused.compute_weights(params)
        return gather_all(sharding, model, params, dtype=plan.dtype, device=device) if gathers_once else params

    def sides_of(state: TrainState) -> Mapping[Path, Sides]:
        return NO_SIDES if precondition is None else check_sides(precondition(state), model)

    def gradient(
        params: Tree, clip_state: Tree, data: Tree, mask: Tensor, sides: Mapping[Path, Sides] = NO_SIDES
    ) -> Part:
        if not plan.private:
            return plain_part(model, plan, params, data, mask, inside, memory, blocks, made=made)
        mapped = partial(map_record, sides) if sides else as_it_is
        losses, norms, stash = per_sample_norms(
            model, params, data, plan=plan, sharding=inside, memory=memory, blocks=blocks, mapped=mapped
        )
        clip = mechanism.clip.clip(norms, clip_state).masked(mask)
        total = clipped_sum(stash, clip, made=made, release=compile is not Compile.STEP)
        tally = mechanism.clip.tally(norms, mask, clip_state)
        return Part(total, tally, Metrics(losses, norms.total(), clip.smallest(), mask))

    def reduce(total: ClippedSum) -> ClippedSum:
        total = total._replace(sensitivity=total.sensitivity * (1 + reduce_slack(sharding, expected)))
        return total._replace(value=reduce_all(sharding, model, total.value)) if once else total

    def noise(total: ClippedSum, key: Key) -> Flat:
        home = CPU if offload.optimizer else key.device
        value = {path: leaf.to(home) for path, leaf in total.value.items()}
        if z == 0:  # asked for: see check_settings
            return value
        return add_noise(total._replace(value=value), key=key.to(home), noise_multiplier=z, shard_windows=where)

    def mean_of(noisy: Flat, params: Tree) -> Flat:
        flat = tree.flatten(params)
        wide = {path: torch.promote_types(flat[path].dtype, torch.float32) for path in noisy}
        return {path: leaf.to(wide[path]) for path, leaf in expected_mean(noisy, mechanism.sampling).items()}

    def update(state: TrainState, mean: Flat, tally: Tensor, key: Key) -> TrainState:
        flat = tree.flatten(state.params)
        trained = {path: leaf.to(mean[path].device) for path, leaf in _trained(model, flat).items()}
        updates, opt = optimizer.update(mean, state.opt, trained, reductions)
        changed = {path: leaf.to(flat[path].device) for path, leaf in apply_updates(trained, updates).items()}
        params = tree.unflatten(state.params, flat | changed)
        clip = mechanism.clip.update(state.clip, sum_over_samples(sharding, tally), key, expected)
        return TrainState(params, opt, clip, state.step + 1)

    return Stages(
        weights=weights,
        scores=lambda params, data: score_moments(model, params, data, plan, inside, memory, blocks),
        sides=sides_of,
        gradient=gradient,
        reduce=reduce,
        key=lambda root, count: keys.step_key(root, f"noise {settings}", count),
        noise=noise,
        mean=mean_of,
        update=update,
        sharding=sharding,
        compile=compile,
        fused=fused,
        repeats=any(choice.sum is SumBy.SECOND for choice in plan.choices.values()),
        sampling=mechanism.sampling if plan.private else None,
    )


def _noisy_mean(
    noise: Callable[[ClippedSum, Key], Flat],
    mean: Callable[[Flat, Tree], Flat],
    total: ClippedSum,
    key: Key,
    params: Tree,
    *,
    release: bool,
) -> Flat:
    """Leaf by leaf, each wide sum released as soon as it is noised."""
    made: Flat = {}
    for path in list(total.value):
        value = total.value.pop(path) if release else total.value[path]
        value = value.total() if isinstance(value, Weighted) else value
        made |= mean(noise(total._replace(value={path: value}), key), params)
        del value
    return made


def all_microbatches(stages: Stages, here: TrainState, batch: Batch) -> Part:
    """This rank's part of a step: the sum over its microbatches. What they compute with is released with them."""
    device = batch.mask.device
    weights = stages.weights(here.params, device)
    sides = tree.map(lambda leaf: leaf.to(device), stages.sides(here))
    count = batch.mask.shape[0]
    with fast_attention(device, repeatable=stages.repeats):
        parts = (
            stages.gradient(weights, here.clip, tree.map(lambda leaf: leaf[i], batch.data), batch.mask[i], sides)  # noqa: B023
            for i in range(count)
        )
        return joined(parts, several=count > 1)


def _trained(model: Model, flat: Flat) -> Flat:
    return {path: leaf for path, leaf in flat.items() if path in model.trainable}


def _write_into(before: TrainState, after: TrainState) -> TrainState:
    tree.map(lambda old, new: old.copy_(new), before, after)
    return before
