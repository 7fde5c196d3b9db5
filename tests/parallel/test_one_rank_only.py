"""Ranks that differ, and a step that fails on one rank only: no sample may come into a sum twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fdp_kernels import cpu_library

from fdp import keys, tree
from fdp.checks.first_call import Checks
from fdp.gradients.execution import Execution
from fdp.gradients.plan import make_plan
from fdp.model import Model
from fdp.models import mlp
from fdp.optimizers import sgd
from fdp.parallel.dtensors import localize
from fdp.parallel.mesh import make_mesh
from fdp.parallel.sharded_init import init_params
from fdp.parallel.sharding import Sharding, Zero, abstract_params, make_sharding
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism, without_noise
from fdp.privacy.sampling import poisson, sample_batch
from fdp.step import init_state, make_train_step
from fdp.types import Batch, FdpError, TrainState
from tests.ranks import run_on_ranks

MODEL = mlp(widths=(5, 4), classes=3)
DATA = {
    "image": torch.randn(40, 5, generator=torch.Generator().manual_seed(0)),
    "label": torch.arange(40) % 3,
}
SAMPLING = poisson(40, expected_batch_size=16)
CLIP, ROOT = flat(max_norm=0.5), keys.key(1)


def prepared(
    model: Model, mechanism: Mechanism, sharding: Sharding, key: torch.Tensor, checks: Checks
) -> tuple[Any, TrainState, Batch]:
    execution, optimizer = Execution(sharding), sgd(1.0)
    batch = sample_batch(DATA, SAMPLING, key, step=0, microbatch_size=4, rank=sharding.rank, ranks=sharding.ranks)
    example = tree.map(lambda leaf: leaf[0], batch.data)
    plan = make_plan(model, abstract_params(model, sharding), example)
    step = make_train_step(model, optimizer, mechanism=mechanism, plan=plan, execution=execution, checks=checks)
    state = init_state(model, init_params(model, ROOT, sharding), optimizer, mechanism, execution=execution)
    return step, state, batch


def other_on_one_rank(what: str) -> str:
    """Return what a step says if the second rank has another key, bound or noise."""
    sharding = make_sharding(MODEL, make_mesh({"shard": 2}, device_type="cpu"), zero=Zero.THREE)
    other = what if sharding.rank == 1 else "nothing"
    mechanism = Mechanism(SAMPLING, flat(max_norm=5.0 if other == "bound" else 0.5), 2.0 if other == "noise" else 1.0)
    key = keys.key(2) if other == "key" else ROOT
    step, state, batch = prepared(MODEL, mechanism, sharding, key, Checks.FIRST_CALL)
    if other == "loops":
        cpu_library.library = lambda: None  # pyright: ignore
    if other == "samples":
        batch = sample_batch(DATA, SAMPLING, keys.key(7), step=0, microbatch_size=4, rank=1, ranks=2)
    try:
        state, _ = step(state, batch, key)
    except FdpError as error:
        return str(error)
    return f"step {int(state.step)}"


@pytest.mark.ranks
@pytest.mark.parametrize("what", ["key", "bound", "noise", "samples", "loops", "nothing"])
def test_ranks_with_another_key_or_mechanism_are_refused(what: str) -> None:
    words = "expected the same key, mechanism, optimizer and model on every rank, got another one on some"
    if what == "loops":
        words = "expected compiled loops on every rank or on none, got none on [1]: parameters"
    for said in run_on_ranks(other_on_one_rank, 2, what):
        assert said == "step 1" if what == "nothing" else words in said


def failing_once(model: Model, failing: list[bool], calls: int) -> Model:
    """Return the model, whose first block raises once, at its ``calls``-th run, on the rank that says so."""
    first, *rest = model.blocks
    count = [0]

    def apply(params: Any, carry: Any, data: Any) -> Any:
        count[0] += 1
        if failing[0] and count[0] == calls:
            raise OSError("a disk was gone for a moment")
        return first.apply(params, carry, data)

    return model._replace(blocks=(first._replace(apply=apply), *rest))


def step_again_on_one_rank() -> tuple[str, float]:
    """Return what is said on this rank, and how far its parameters are from those of a step that did not fail."""
    sharding = make_sharding(MODEL, make_mesh({"shard": 2}, device_type="cpu"), zero=Zero.THREE)
    mechanism = without_noise(SAMPLING, CLIP)
    step, state, batch = prepared(MODEL, mechanism, sharding, ROOT, Checks.SKIPPED)
    expected = localize(step(state, batch, ROOT)[0].params)
    failing = [False]
    model = failing_once(MODEL, failing, calls=4)
    step, state, batch = prepared(model, mechanism, sharding, ROOT, Checks.SKIPPED)
    failing[0], said = sharding.rank == 0, ""
    for _ in range(2):
        try:
            after = localize(step(state, batch, ROOT)[0].params)
        except Exception as error:
            said = str(error)
            continue
        return "made", float(tree.global_norm(tree.map(lambda a, b: a - b, expected, after)))
    return said, 0.0


def step_again_alone() -> float:
    """Return how far the parameters of a step that failed at first are from those of one that did not."""
    sharding = make_sharding(MODEL, make_mesh({"shard": 1}, device_type="cpu"), zero=Zero.THREE)
    step, state, batch = prepared(MODEL, without_noise(SAMPLING, CLIP), sharding, ROOT, Checks.SKIPPED)
    expected = localize(step(state, batch, ROOT)[0].params)
    model = failing_once(MODEL, [True], calls=4)
    step, state, batch = prepared(model, without_noise(SAMPLING, CLIP), sharding, ROOT, Checks.SKIPPED)
    with pytest.raises(OSError, match="a disk was gone"):
        step(state, batch, ROOT)
    after = localize(step(state, batch, ROOT)[0].params)
    return float(tree.global_norm(tree.map(lambda a, b: a - b, expected, after)))


@pytest.mark.ranks
def test_one_rank_alone_may_make_a_failed_step_again() -> None:
    assert run_on_ranks(step_again_alone, 1) == [0.0]


@pytest.mark.ranks
def test_a_step_that_failed_on_one_rank_is_not_made_again() -> None:
    """The other rank waits with a part of the sum: it would add the samples of the first one again."""
    first, second = run_on_ranks(step_again_on_one_rank, 2)
    assert "the last step on this rank came to its end, got one that failed" in first[0]
    assert second[0] != "made"
