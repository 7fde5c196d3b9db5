"""Microbatches of several sizes: one sample moves the sum by at most its bound, wherever it lies, and sizes only round.

A draw of 11 samples in microbatches of 8, 4 and 2 is 8 + 2 + 2 rows: its end has samples of a smaller microbatch, and
padding. The checks run on mutants as well, which they must catch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fdp import keys, tree
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fast.compiled import CompiledRunner
from fdp.gradients.lazy_sum import evaluate
from fdp.gradients.plan import Method, Plan, add_smaller_sizes, make_plan
from fdp.models import GPTConfig, gpt
from fdp.optimizers import adamw, sgd
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.microbatches import split_microbatches
from fdp.privacy.sampling import poisson, sample, sample_batch
from fdp.stages import make_stages
from fdp.step import init_state, make_train_step, sum_over_microbatches
from fdp.types import Batch, RowGroups

SIZES, C = (8, 4, 2), 0.3
MODEL = gpt(GPTConfig(layers=1, width=8, heads=2, context=6, vocab_size=13, tied=True))
PARAMS = tree.map(torch.Tensor.double, MODEL.init(keys.key(0)))
TOKENS = torch.randint(0, 13, (40, 7), generator=torch.Generator().manual_seed(2))
SAMPLING = poisson(40, expected_batch_size=12)
METHODS = [Method.AUTO, Method.GHOST, Method.GHOST_BK, Method.FLASH_BK, Method.MATERIALIZE]


@cache
def plan_of(method: Method, sizes: tuple[int, ...]) -> Plan:
    example = {"tokens": TOKENS[: sizes[0]]}
    plan = make_plan(MODEL, PARAMS, example, method=method, dtype=torch.float64)
    return add_smaller_sizes(plan, MODEL, PARAMS, example, sizes=sizes[1:])


def total_of(which: Sequence[int], method: Method, sizes: tuple[int, ...] = SIZES) -> dict[str, torch.Tensor]:
    """Return the clipped sum of these samples, as a step computes it before the noise."""
    mechanism = Mechanism(SAMPLING, clipping.flat(max_norm=C), 1.0)
    stages = make_stages(MODEL, sgd(0.1), mechanism=mechanism, plan=plan_of(method, sizes))
    everyone = poisson(len(which), expected_batch_size=len(which), population=len(which))
    batch = sample_batch({"tokens": TOKENS[list(which)]}, everyone, keys.key(1), step=0, microbatch_size=sizes)
    assert int(batch.mask.sum()) == len(which)
    state = init_state(MODEL, PARAMS, sgd(0.1), mechanism)
    return evaluate(sum_over_microbatches(stages, state, batch).total).value


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([(a[path] - b[path]).square().sum() for path in a]).sum().sqrt())


def check_bound(method: Method = Method.AUTO) -> None:
    """Remove samples of the large microbatch, of the tail, and next to padding: the sum moves by at most C."""
    present = total_of(range(11), method)
    moved = [distance(present, total_of([i for i in range(11) if i != gone], method)) for gone in (0, 7, 8, 9, 10)]
    assert max(moved) <= C * (1 + 1e-6), moved
    assert min(moved) > 0.9 * C, "a sample was not clipped, or is not in the sum"


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.value)
def test_one_sample_moves_the_sum_by_at_most_its_bound_wherever_it_lies(method):
    check_bound(method)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.value)
def test_sizes_change_nothing_but_rounding(method):
    for count in (1, 7, 11):
        one, several = (total_of(range(count), method, sizes) for sizes in ((16,), SIZES))
        assert distance(one, several) <= 1e-12 * count


def without_the_tail(batch: Batch) -> list[tuple[Any, torch.Tensor]]:
    return [(tree.map(lambda leaf: leaf[:4].flatten(0, 1), batch.data), batch.mask[:4].flatten(0, 1))]


def unmasked(batch: Batch) -> list[tuple[Any, torch.Tensor]]:
    """Count padding, which is copies of sample 0, as samples."""
    return [(data, torch.ones_like(mask)) for data, mask in split_microbatches(batch)]


def twice(batch: Batch) -> list[tuple[Any, torch.Tensor]]:
    """Compute the last microbatch once more."""
    found = split_microbatches(batch)
    return [*found, found[-1]]


@pytest.mark.parametrize("mutant", [twice, without_the_tail, unmasked], ids=lambda mutant: mutant.__name__)
def test_the_check_of_the_bound_catches(mutant, monkeypatch):
    monkeypatch.setattr("fdp.step.split_microbatches", mutant)
    with pytest.raises(AssertionError):
        check_bound()


@settings(max_examples=25, deadline=None)
@given(
    step=st.integers(0, 10_000),
    sizes=st.sampled_from([(8,), (8, 4), (8, 4, 2), (8, 4, 2, 1), (18, 16, 14, 8, 4, 2), (8, 7, 4, 2, 1)]),
    ranks=st.sampled_from([1, 2, 3]),
)
def test_all_sizes_and_ranks_have_the_same_draw_and_the_same_sequence(step, sizes, ranks):
    root = keys.key(5)
    shares = [
        sample_batch({"i": torch.arange(40)}, SAMPLING, root, step=step, microbatch_size=sizes, rank=rank, ranks=ranks)
        for rank in range(ranks)
    ]
    assert len({(share.groups, tuple(share.mask.shape)) for share in shares}) == 1
    assert (shares[0].groups is None) == (len(sizes) == 1)
    found = torch.cat([share.data["i"][share.mask > 0] for share in shares]).sort().values
    one = sample_batch({"i": torch.arange(40)}, SAMPLING, root, step=step, microbatch_size=40)
    assert torch.equal(found, one.data["i"][one.mask > 0])


@pytest.mark.parametrize("compile", [Compile.NONE, Compile.BLOCK], ids=lambda compile: compile.value)
def test_a_run_with_several_sizes_takes_the_steps_of_one_size(compile, monkeypatch):
    """Draws of 5 to 20 samples, of 0 and of 40, with noise and AdamW; block: the fused update, with lazy sums."""
    monkeypatch.setattr(CompiledRunner, "_compile_as", lambda self, name, run: run)  # the rest is what is tested
    found = []
    for sizes, how in (((40,), Compile.NONE), (SIZES, compile)):
        optimizer, clip = adamw(1e-2, eps=1e-3), clipping.per_layer(max_norm=C)
        mechanism, donate = Mechanism(SAMPLING, clip, 0.5), ("state",) if how is Compile.BLOCK else ()
        step = make_train_step(
            MODEL,
            optimizer,
            mechanism=mechanism,
            plan=plan_of(Method.AUTO, sizes),
            execution=make_execution(compile=how),
            donate=donate,
        )
        state, seen = init_state(MODEL, tree.map(torch.clone, PARAMS), optimizer, mechanism), []
        for t in range(4):
            batch = sample_batch({"tokens": TOKENS}, SAMPLING, keys.key(3), step=t, microbatch_size=sizes)
            if t == 2:  # nobody was drawn
                batch = empty(batch, sizes)
            state, metrics = step(state, batch, keys.key(3))
            seen.append(metrics.norms[metrics.mask > 0])
        found.append((tree.flatten(state.params), seen))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-9)
    assert len(seen[2]) == 0


def empty(batch: Batch, sizes: Sequence[int]) -> Batch:
    rows = tree.map(lambda leaf: leaf[:1], batch._replace(drawn=None, groups=None))
    groups = RowGroups((1,)) if len(sizes) > 1 else None
    assert batch.drawn is not None
    stamp = replace(batch.drawn.stamp, shape=(1, sizes[-1]))
    return rows._replace(mask=torch.zeros(1, sizes[-1]), groups=groups, drawn=batch.drawn._replace(stamp=stamp))


def test_a_draw_of_nobody_is_drawn_as_one_small_microbatch_of_padding():
    few = poisson(40, expected_batch_size=1e-9)
    assert len(sample(few, keys.key(0))) == 0
    batch = sample_batch({"tokens": TOKENS}, few, keys.key(0), step=0, microbatch_size=SIZES)
    assert batch.groups == RowGroups((1,))
    assert batch.mask.tolist() == [[0.0, 0.0]]
