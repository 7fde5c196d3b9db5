"""Build what is measured: a case (a model and its batch) in a mode, fdp's or a baseline's, as ``step(tokens, key)``.

fdp is built only through its public interface. A baseline is built by its case. Tokens and keys are the same for all.

    >>> tokens, step_keys = feed(case.model, case.batch_size, device)
    >>> losses = build(case, "auto", device).step(tokens[0], step_keys[0])
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fdp import keys, tree
from fdp.checks.first_call import Checks
from fdp.fast.compile_modes import Compile, make_execution
from fdp.gradients import timing
from fdp.gradients.costs import NormBy, SumBy
from fdp.gradients.plan import BUDGETED_METHODS, TIMED_METHODS, Method, Plan, make_plan
from fdp.gradients.rules import HALF
from fdp.model import Model
from fdp.optimizers import Optimizer, adamw
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism, without_noise
from fdp.privacy.sampling import poisson, trusted_batch
from fdp.step import init_state, make_train_step
from fdp.types import Flat, Key, Step, Tree

Row: TypeAlias = dict[str, Any]

METHODS = ("none", "materialize", "ghost", "ghost_bk", "flash", "flash_bk", "auto")
LEAN = "auto_lean"
"""The fastest plan of ``auto`` whose stored bytes fit ``Case.memory_budget``, if one backward pass is enough for it."""
INT8 = "auto_int8"
"""``auto`` that may also store gradients in 8 bits: ``fdp train`` on a Hopper GPU, unless ``--seed`` is given."""
OURS = (*METHODS, LEAN, INT8)
STORED_DTYPES = {INT8: torch.int8}
"""The ``stored_dtype`` of a mode's plan, where it is not None. Noise of its own goes with it."""
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 0.0, 0.1, 1.0
"""The learning rate is 0 in every mode and baseline unless a case says otherwise, though all work is done. At its
power limit a GPU multiplies some numbers faster than others, and learned parameters are different numbers from noised
ones: at a positive rate, private and plain modes multiply different numbers, which changes their times by a few per
cent."""
BATCHES, MAX_STEPS = 16, 300
CHECKED_SAMPLES = 8
HALVINGS = 5
"""Steps of the search for the leanest plan."""


class Candidate(NamedTuple):
    """A mode that has been built. ``step(tokens, key)`` trains one step and returns losses; the rest describe it.

    A step takes any number of samples that the size of a microbatch divides.
    """

    step: Callable[[Tensor, Key], Tensor]
    norms: Callable[[], Tensor] | None = None
    params: Callable[[], Flat] | None = None
    graph: bool = False
    choices: dict[str, str] | None = None
    by_gram: bool = False
    stored_bytes: float | None = None


class Speed(NamedTuple):
    """Speed options of fdp's step: what is compiled, whether it is captured, whether choices are timed first."""

    compile: Compile
    cuda_graph: bool
    timed_plan: bool


EAGER = Speed(Compile.NONE, False, False)
FAST = Speed(Compile.BLOCK, True, True)


class Case(NamedTuple):
    """A model and its batch size. ``small`` is the slice to check: few layers and tokens, same widths.

    ``baseline(mode, model, batch_size, device, params)`` builds a mode that is not fdp's; with params, for a check. A
    private step of fdp splits the batch into ``microbatches``; the clipped sum and the noise stay the same. If a step
    has more ``samples`` than the batch, it is many such batches.
    """

    regime: str
    layers: int
    model: Model
    small: Model
    batch_size: int
    speed: Speed
    dtype: torch.dtype = torch.bfloat16
    memory_budget: float | None = None
    microbatches: int = 1
    learning_rate: float = LEARNING_RATE
    samples: int | None = None
    baseline: Callable[[str, Model, int, torch.device, Tree | None], Candidate] | None = None

    @property
    def cell(self) -> Row:
        """Return the fields of a row that identify the case."""
        return {
            "regime": self.regime,
            "context": self.model.context,
            "batch_size": self.batch_size,
            "layers": self.layers,
        }

    @property
    def slice(self) -> str:
        """Return a description of what is checked: cases with the same slice are checked once."""
        cut = self.microbatches if self.samples is None else "several"
        return f"{self.small.name}, {self.small.settings}, {min(self.batch_size, CHECKED_SAMPLES)} samples, cut: {cut}"

    def microbatches_of(self, mode: str) -> int:
        """Return the number of microbatches of a step in this mode."""
        if self.samples is not None:
            return self.samples // self.batch_size
        return 1 if mode == "none" else self.microbatches


def make_our_plan(
    model: Model, params: Tree, microbatch: Tree, *, method: Method, dtype: torch.dtype, speed: Speed, **options: Any
) -> Plan:
    """Return fdp's plan, refined by timings on the device if the method has choices."""
    make = partial(make_plan, model, params, microbatch, method=method, dtype=dtype)
    plan = make(**options)
    if not speed.timed_plan or method not in TIMED_METHODS:
        return plan
    uses, norms = [use for block in plan.uses for use in block], timing.timed_norms(options.get("stored_dtype"))
    device, store = tree.leaves(microbatch)[0].device, timing.default_store()
    return make(timings=timing.measure(uses, dtype=dtype, device=device, store=store, norms=norms), **options)


def make_lean_plan(make: Callable[..., Plan], budget: float) -> Plan:
    """Return ``make(memory_budget=budget)`` or, if that needs a second backward, the leanest plan that does not."""
    plan = make(memory_budget=budget)
    if not goes_back_twice(plan):
        return plan
    plan = make(memory_budget=None)
    low, high = budget, plan.stored_bytes
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        leaner = make(memory_budget=middle)
        if goes_back_twice(leaner):
            low = middle
        else:
            plan, high = leaner, min(middle, leaner.stored_bytes)
    return plan


def goes_back_twice(plan: Plan) -> bool:
    return any(choice.sum is SumBy.SECOND_BACKWARD for choice in plan.choices.values())


def make_our_step(model: Model, optimizer: Optimizer, *, mechanism: Mechanism, plan: Plan, speed: Speed) -> Step:
    """Return fdp's step."""
    return make_train_step(
        model,
        optimizer,
        mechanism=mechanism,
        plan=plan,
        donate=("state",),
        execution=make_execution(compile=speed.compile, cuda_graph=speed.cuda_graph),
        checks=Checks.SKIPPED,  # the first step is timed too
    )


def our_mode(
    model: Model,
    mode: str,
    *,
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    optimizer: Optimizer | None = None,
    max_norm: float = MAX_NORM,
    noise_multiplier: float = 1.0,
    memory_budget: float | None = None,
    microbatches: int = 1,
    stored_dtype: torch.dtype | None = None,
    speed: Speed,
) -> Candidate:
    """Build fdp's mode through its public interface; parameters are drawn on the device.

    ``stored_dtype`` gives a mode that rounds nothing the noise that goes with such rounding.
    """
    method = Method.AUTO if mode in (LEAN, INT8) else Method(mode)
    if batch_size % microbatches:
        raise ValueError(f"{microbatches} microbatches: expected a divisor of the batch of {batch_size}")
    size = batch_size // microbatches
    noise = 0.0 if method is Method.NONE else noise_multiplier
    sampling, clip = poisson(1 << 20, expected_batch_size=batch_size), flat(max_norm=max_norm)
    mechanism = Mechanism(sampling, clip, noise) if noise else without_noise(sampling, clip)
    opt = adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY) if optimizer is None else optimizer
    assert model.context is not None
    params = model.init(keys.key(0).to(device))
    example = torch.zeros((), dtype=torch.int64, device=device).expand(size, model.context + 1)
    microbatch, budget = {"tokens": example}, memory_budget if method in BUDGETED_METHODS else None
    stored = STORED_DTYPES.get(mode)
    make = partial(make_our_plan, model, params, microbatch, method=method, dtype=dtype, speed=speed)
    make = partial(make, stored_dtype=stored)
    plan = make_lean_plan(make, budget) if mode == LEAN and budget is not None else make(memory_budget=budget)
    if stored_dtype is not None:
        plan = plan._replace(stored_dtype=stored_dtype)
    run = make_our_step(model, opt, mechanism=mechanism, plan=plan, speed=speed)
    state = init_state(model, params, opt, mechanism)
    del params
    seen: Any = None

    def step(tokens: Tensor, key: Key) -> Tensor:
        nonlocal state, seen
        data = {"tokens": tokens.unflatten(0, (-1, size))}
        mask = torch.ones(data["tokens"].shape[:2], device=device)
        batch = trusted_batch(data, mask, sampling, step=None)
        state, seen = run(state, batch, key)
        return seen.losses

    return Candidate(
        step,
        norms=(lambda: seen.norms) if plan.private else None,
        params=lambda: tree.flatten(state.params),
        graph=speed.cuda_graph,
        choices=summarize_choices(plan) if plan.choices else None,
        by_gram=has_rounding_cover(plan),
        stored_bytes=plan.stored_bytes if plan.private else None,
    )


def has_rounding_cover(plan: Plan) -> bool:
    """Return True if norms include a rounding bound: those from half-precision Gram matrices, except embeddings."""
    uses = (use for block in plan.uses for use in block if plan.private and use.rule != "embedding")
    return plan.dtype in HALF and any(plan.choices[use.path].norm in (NormBy.GRAM, NormBy.SYMMETRIC) for use in uses)


def summarize_choices(plan: Plan) -> dict[str, str]:
    """Return the plan's choice for every kind of leaf: ``{"blocks.qkv": "keep, reuse"}``."""
    found: dict[str, Counter[str]] = {}
    for path, choice in plan.choices.items():
        kind = re.sub(r"\.\d+\.", ".", path)
        found.setdefault(kind, Counter())[f"{choice.norm.value}, {choice.sum.value}"] += 1
    return {
        kind: "; ".join(how if len(ways) == 1 else f"{how} ({n})" for how, n in ways.most_common())
        for kind, ways in found.items()
    }


def build(case: Case, mode: str, device: torch.device) -> Candidate:
    """Build the mode at full size."""
    if mode in OURS:
        return our_mode(
            case.model,
            mode,
            batch_size=case.samples or case.batch_size,
            device=device,
            dtype=case.dtype,
            memory_budget=case.memory_budget,
            microbatches=case.microbatches_of(mode),
            optimizer=adamw(case.learning_rate, weight_decay=WEIGHT_DECAY),
            speed=case.speed,
        )
    if case.baseline is None:
        raise ValueError(f"{case.regime}: no mode {mode!r}; expected one of {', '.join(OURS)}")
    return case.baseline(mode, case.model, case.batch_size, device, None)


def feed(model: Model, batch_size: int, device: torch.device, *, batches: int = BATCHES) -> tuple[Tensor, Tensor]:
    """Return random tokens (batches, batch, context + 1) and keys on the device, the same for every mode."""
    assert model.context is not None
    assert model.vocab_size is not None
    draw = torch.Generator(device).manual_seed(0)
    shape = (batches, batch_size, model.context + 1)
    tokens = torch.randint(model.vocab_size, shape, generator=draw, device=device)
    return tokens, keys.split(keys.key(1).to(device), MAX_STEPS)
