"""Equal runs are found equal, stage by stage; planted faults are found at the stage where they were planted."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fdp import keys, optimizers, step, tree
from fdp.data.windows import windows
from fdp.fast.compile_modes import Compile
from fdp.fast.fused_update import FusedUpdate
from fdp.fast.noisy_update import NoisyUpdate
from fdp.gradients.lazy_sum import LazySum
from fdp.gradients.plan import Method
from fdp.models import GPTConfig, gpt
from fdp.parallel import collectives, gather_reduce, sharded_init, sharding
from fdp.parallel.sharding import Data, Reduce, Zero
from fdp.privacy import clipping, noise
from fdp.run.compare import Difference, Seen, Stage, compare, first_over, observe, read, relative_difference, write
from fdp.run.prepare_run import prepare
from fdp.run.run_config import Layout, RunConfig
from fdp.run.training_run import draw_batch, steps
from fdp.types import ClippedSum, FdpError, Norms
from tests.ranks import run_on_ranks

TOLERANCE = 1e-5
STEPS = 2
IN_A_STEP = [Stage.FORWARD, Stage.LOSS, Stage.NORMS, Stage.SUM, Stage.NOISE, Stage.UPDATE]
MODEL = GPTConfig(layers=1, width=8, heads=2, context=5, vocab_size=7, tied=True)
LEAF = "blocks.0.up"


def config(**changes: Any) -> RunConfig:
    tokens = torch.randint(0, 7, (40 * 6,), generator=torch.Generator().manual_seed(3)).numpy()
    plain = RunConfig(
        model=gpt(MODEL),
        dataset=windows(tokens, context=5, vocab_size=7, where="here"),
        method=Method.MATERIALIZE,
        clip=clipping.flat(max_norm=0.5),
        noise_multiplier=1.0,
        epsilon=None,
        delta=1e-5,
        batch_size=7,
        steps=STEPS,
        optimizer=optimizers.adamw(1e-2),
        seed=0,
        dtype=torch.float32,
        microbatch_size=5,
        memory_budget=None,
        compile=Compile.NONE,
        device=torch.device("cpu"),
    )
    return dataclasses.replace(plain, **changes)


def observed(*, settings: str | None = None, **changes: Any) -> list[Seen]:
    return list(observe(*prepare(config(**changes), settings=settings)))


@pytest.fixture(scope="module")
def one_rank() -> list[Seen]:
    return observed()


def found_first(a: list[Seen], b: list[Seen]) -> Difference | None:
    return first_over(compare(a, b), tolerance=TOLERANCE)


# What two tensors are to each other


finite = st.floats(-1e6, 1e6, width=32)


@given(a=st.lists(finite, min_size=3, max_size=3), b=st.lists(finite, min_size=3, max_size=3))
def test_a_difference_is_the_largest_gap_over_the_largest_value_of_b(a: list[float], b: list[float]) -> None:
    got = relative_difference(torch.tensor(a), torch.tensor(b))
    gap, size = max(abs(x - y) for x, y in zip(a, b)), max(map(abs, b))
    assert got == pytest.approx(gap / size if size else (math.inf if gap else 0.0))


def test_only_one_side_not_a_number_is_infinite_and_both_alike_is_nothing() -> None:
    nan, inf = torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf])
    one = torch.ones(2)
    for bad in (nan, inf, -inf):
        assert relative_difference(bad, bad) == 0
        assert relative_difference(bad, one) == relative_difference(one, bad) == math.inf
    assert relative_difference(inf, -inf) == relative_difference(inf, nan) == math.inf
    assert relative_difference(torch.tensor([1.5, math.nan]), nan) == 0.5


def test_other_shapes_are_infinitely_different_and_nothing_is_not() -> None:
    assert relative_difference(torch.ones(2, 1), torch.ones(2)) == math.inf
    assert relative_difference(torch.ones(0), torch.ones(0)) == 0
    assert relative_difference(torch.zeros(3), torch.zeros(3)) == 0
    assert relative_difference(torch.tensor(1e-30), torch.tensor(0.0)) == math.inf
    assert relative_difference(torch.tensor(1, dtype=torch.float64), torch.tensor(1.0)) == 0


# What two observations are to each other


def stage_of(apart: dict[str, float] | None = None, **values: float) -> Seen:
    return Seen(1, Stage.SUM, {name: torch.tensor([value, 4.0]) for name, value in values.items()}, apart or {})


def test_the_leaf_with_the_largest_difference_is_named() -> None:
    (found,) = compare([stage_of(a=1.0, b=3.0, c=2.0)], [stage_of(a=1.0, b=2.0, c=2.5)])
    assert found == Difference(1, Stage.SUM, "b", 0.25)
    assert [*compare([stage_of(a=1.0)], [stage_of(a=1.0)])] == [Difference(1, Stage.SUM, "", 0.0)]


def test_a_leaf_that_only_one_has_is_infinitely_different() -> None:
    for pair in ([stage_of(a=1.0)], [stage_of(a=1.0, b=1.0)]), ([stage_of(a=1.0, b=1.0)], [stage_of(a=1.0)]):
        assert [*compare(*pair)] == [Difference(1, Stage.SUM, "b", math.inf)]


def test_copies_that_differ_within_one_run_are_a_difference() -> None:
    drifted = [stage_of({"b": 0.5}, a=1.0, b=1.0)]
    for pair in (drifted, [stage_of(a=1.0, b=1.0)]), ([stage_of(a=1.0, b=1.0)], drifted):
        assert [*compare(*pair)] == [Difference(1, Stage.SUM, "b", 0.5)]


def test_other_steps_cannot_be_compared() -> None:
    with pytest.raises(FdpError, match="same steps"):
        list(compare([stage_of(a=1.0)], [stage_of(a=1.0)._replace(step=2)]))
    with pytest.raises(ValueError, match="shorter"):
        list(compare([stage_of(a=1.0)], []))


def test_the_first_over_tolerance_is_found_and_equal_to_it_is_not_over() -> None:
    differences = [Difference(1, Stage.LOSS, "x", value) for value in (0.0, 0.1, 0.3, 0.2)]
    assert first_over(differences, tolerance=0.1) == differences[2]
    assert first_over(differences, tolerance=0.3) is None
    assert first_over([Difference(1, Stage.LOSS, "x", math.inf)], tolerance=1e300) is not None


# What is seen of a run


def test_an_observation_is_the_run_of_fdp_train(one_rank: list[Seen]) -> None:
    assert [(seen.step, seen.stage) for seen in one_rank] == [
        (0, Stage.INIT),
        *((t, stage) for t in range(1, STEPS + 1) for stage in IN_A_STEP),
    ]
    run, state = prepare(config())
    assert set(one_rank[0].values) == set(run.config.model.leaves)
    for t, (after, record) in enumerate(steps(run, state)):
        _, losses, norms, total, _, params = (seen.values for seen in one_rank[1 + 6 * t :][:6])
        assert [*losses] == [*norms] == [f"sample {i}" for i in range(record.samples)]
        assert record.loss == pytest.approx(float(torch.cat([*losses.values()]).mean()))
        assert record.norm_q50 == pytest.approx(float(torch.cat([*norms.values()]).quantile(0.5)))
        assert set(total) == run.config.model.trainable
        expected = tree.flatten(after.params)
        assert all(torch.equal(params[path], leaf) for path, leaf in expected.items())


def test_the_forward_seen_is_that_of_the_logits(one_rank: list[Seen]) -> None:
    """Mean, standard deviation and sum over all samples, positions and classes, against the model itself."""
    run, state = prepare(config())
    batch = draw_batch(run, 0)
    params = tree.flatten(state.params)
    logits = []
    for rows, mask in zip(batch.data["tokens"], batch.mask):
        carry: Any = ()
        for block in run.config.model.blocks[:-1]:
            carry = block.apply(tree.select(params, block.params), carry, {"tokens": rows})
        last = run.config.model.blocks[-1]
        assert last.outputs is not None
        logits.append(last.outputs.scores(tree.select(params, last.params), carry, {"tokens": rows})[mask > 0])
    z = torch.cat(logits).double()
    expected = [z.mean(), z.std(correction=0), z.sum()]
    names = ["mean of the logits", "standard deviation of the logits", "sum of the logits"]
    (seen,) = [one for one in one_rank if (one.step, one.stage) == (1, Stage.FORWARD)]
    assert list(seen.values) == names
    torch.testing.assert_close([value[0] for value in seen.values.values()], expected, rtol=1e-6, atol=1e-9)
    size = z.square().mean().sqrt()  # what a difference is relative to, however logits cancel
    scales = [value[-1] for name, value in seen.values.items() if "deviation" not in name]
    torch.testing.assert_close(scales, [size, z.numel() * size], rtol=1e-6, atol=1e-9)


def test_a_model_that_names_no_logits_has_nothing_to_show_of_its_forward() -> None:
    plain = gpt(MODEL)
    *blocks, last = plain.blocks
    seen = observed(model=plain._replace(blocks=(*blocks, last._replace(outputs=None))))
    assert [one.values for one in seen if one.stage is Stage.FORWARD] == [{}] * STEPS


def test_the_noise_seen_is_what_was_added(one_rank: list[Seen]) -> None:
    added = one_rank[5]
    run, state = prepare(config())
    key = keys.fold_in(run.stages.key(run.key, state.step), LEAF)
    drawn = 0.5 * keys.normal(key, tuple(added.values[LEAF].shape), dtype=torch.float64)
    assert relative_difference(added.values[LEAF], drawn) < 1e-6  # rounded to the grid


@pytest.mark.parametrize(
    "changes",
    [
        {"method": Method.GHOST},
        {"method": Method.GHOST_BK},
        {"microbatch_size": 3, "checkpoint_activations": True},
        {"microbatch_size": 40},
    ],
    ids=str,
)
def test_how_a_run_computes_makes_no_difference(one_rank: list[Seen], changes: dict[str, Any]) -> None:
    assert found_first(observed(**changes), one_rank) is None


@pytest.mark.parametrize(
    ("changes", "number", "stage"),
    [
        ({"clip": clipping.flat(max_norm=0.4)}, 1, Stage.SUM),
        ({"noise_multiplier": 1.1}, 1, Stage.NOISE),
        ({"optimizer": optimizers.adamw(1.1e-2)}, 1, Stage.UPDATE),
        ({"optimizer": optimizers.sgd(lambda t: torch.where(t > 0, 0.2, 0.1))}, 2, Stage.UPDATE),
        ({"seed": 1}, 0, Stage.INIT),
    ],
    ids=["clip", "noise", "optimizer", "schedule", "seed"],
)
def test_the_first_stage_that_a_change_affects_is_named(changes: dict[str, Any], number: int, stage: Stage) -> None:
    reference = {"optimizer": optimizers.sgd(0.1)} if number == 2 else {}
    first = found_first(observed(settings="compare", **changes), observed(settings="compare", **reference))
    assert first is not None
    assert (first.step, first.stage) == (number, stage)


def test_runs_of_other_settings_share_no_noise_unless_they_are_made_to_be_compared(one_rank: list[Seen]) -> None:
    other = observed(clip=clipping.flat(max_norm=0.4))
    a, b = one_rank[4].values[LEAF].flatten(), other[4].values[LEAF].flatten()
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.2
    compared = [observed(settings="compare", clip=clipping.flat(max_norm=norm)) for norm in (0.4, 0.5)]
    a, b = (seen[4].values[LEAF].flatten() for seen in compared)
    assert float(torch.corrcoef(torch.stack([a, b]))[0, 1]) > 0.999


def test_without_noise_the_noise_is_equal_and_plain_training_can_be_compared() -> None:
    # Adam would divide a gradient that is 0 but for rounding by itself
    plain: dict[str, Any] = {"method": Method.NONE, "noise_multiplier": None, "optimizer": optimizers.sgd(0.1)}
    found = list(compare(observed(**plain), observed(**plain, microbatch_size=3)))
    assert first_over(found, tolerance=TOLERANCE) is None
    assert [one.value for one in found if one.stage is Stage.NOISE] == [0.0] * STEPS


def test_a_step_without_samples_is_a_step_like_any_other() -> None:
    few: dict[str, Any] = {"batch_size": 1, "steps": 6}
    seen = observed(**few)
    counts = [len(one.values) for one in seen if one.stage is Stage.LOSS]
    assert 0 in counts
    assert found_first(seen, observed(**few, microbatch_size=2)) is None


def test_an_observation_is_read_as_it_was_written(tmp_path, one_rank: list[Seen]) -> None:
    drifted = one_rank[-1]._replace(rank_differences={LEAF: math.inf})
    write([*one_rank[:-1], drifted], tmp_path)
    again = list(read(tmp_path))
    assert [seen[:2] + (seen.rank_differences,) for seen in again[:-1]] == [seen[:2] + ({},) for seen in one_rank[:-1]]
    assert again[-1].rank_differences == drifted.rank_differences
    assert {one.value for one in compare(again[:-1], one_rank[:-1])} == {0.0}


# The fused step: compiled blocks, lazy sums, noise and AdamW in one pass


FUSED: dict[str, Any] = {"method": Method.AUTO, "compile": Compile.BLOCK, "compile_backend": "eager"}


@pytest.mark.long
def test_the_fused_step_is_observed_as_it_trains(one_rank: list[Seen]) -> None:
    calls, real = [], FusedUpdate.__call__
    with mock.patch.object(FusedUpdate, "__call__", lambda self, *args: calls.append(0) or real(self, *args)):
        seen = observed(**FUSED)
    assert len(calls) == STEPS
    assert found_first(seen, one_rank) is None
    run, state = prepare(config(**FUSED))
    trained = [tree.map(torch.clone, after.params) for after, _ in steps(run, state)]
    for one, params in zip([one for one in seen if one.stage is Stage.UPDATE], trained, strict=True):
        assert all(torch.equal(one.values[path], leaf) for path, leaf in tree.flatten(params).items())


def half_the_deviation(total: ClippedSum, noise_multiplier: float) -> torch.Tensor:
    return noise.noise_deviation(total, noise_multiplier) / 2


def draws_of_another_leaf(self: Any, key: Any, paths: Any) -> torch.Tensor:
    return CHILDREN(self, key, list(reversed(paths)))


def less_of_the_last_sample(rows: torch.Tensor, factors: torch.Tensor) -> LazySum:
    return LazySum(rows, torch.cat([factors[:-1], factors[-1:] / 2]))


CHILDREN = NoisyUpdate._children  # as it is before anyone puts a fault in its place
IN_THE_PASS: dict[str, tuple[str, Any, Stage]] = {
    "less noise": ("fdp.fast.fused_update.noise_deviation", half_the_deviation, Stage.NOISE),
    "noise of another leaf": ("fdp.fast.noisy_update.NoisyUpdate._children", draws_of_another_leaf, Stage.NOISE),
    "a lazy sum": ("fdp.gradients.clipped_sum.LazySum", less_of_the_last_sample, Stage.SUM),
}


FIRST_IN_THE_PASS, *LATER_IN_THE_PASS = IN_THE_PASS


@pytest.mark.parametrize(
    "fault", [FIRST_IN_THE_PASS, *(pytest.param(fault, marks=pytest.mark.long) for fault in LATER_IN_THE_PASS)]
)
def test_a_fault_planted_in_the_fused_pass_is_found_at_its_stage(one_rank: list[Seen], fault: str) -> None:
    target, wrong, stage = IN_THE_PASS[fault]
    with mock.patch(target, wrong):
        first = found_first(observed(**FUSED), one_rank)
    assert first is not None
    assert (first.step, first.stage) == (1, stage)


# On several ranks: equal where it should be, and faults planted one at a time


gather_metrics = step.gather_metrics
LAYOUTS = {
    "zero-0": Layout({"shard": 2}, Zero.NONE),
    "zero-2": Layout({"shard": 2}, Zero.TWO),
    "zero-3": Layout({"shard": 2}, Zero.THREE),
    "replicate": Layout({"replicate": 2}, Zero.THREE, reduce=Reduce.PER_STEP),
    "tensor": Layout({"tensor": 2}, Zero.THREE),
    "same-data": Layout({"shard": 2}, Zero.THREE, data=Data.REPLICATED),
}


def norms_over_the_data_axis(plan: sharding.Sharding | None, norms: Norms) -> Norms:
    """The fault of system S1: squared norms of different samples added up."""
    assert plan is not None
    summed = (collectives.wait(collectives.all_reduce(square, plan.shard)) for square in norms.squared.values())
    return Norms(dict(zip(norms.squared, summed)))


def noise_of_the_part(total: ClippedSum, *, key: Any, noise_multiplier: float, shard_windows: Any) -> Any:
    """Every rank draws for its part as if it were the leaf."""
    return noise.add_noise(total, key=key, noise_multiplier=noise_multiplier)


def noise_of_the_rank(total: ClippedSum, *, key: Any, noise_multiplier: float, shard_windows: Any) -> Any:
    """The last rank adds noise of its own."""
    key = keys.fold_in(key, "own") if dist.get_rank() else key
    return noise.add_noise(total, key=key, noise_multiplier=noise_multiplier, shard_windows=shard_windows)


def all_but_one_reduced(plan: Any, model: Any, sums: Any) -> Any:
    """One leaf keeps this rank's sum."""
    return gather_reduce.reduce_all(plan, model, sums) | {LEAF: sums[LEAF]}


INIT_PARAMS = sharded_init.init_params  # as it is before anyone puts a fault in its place


def init_of_the_rank(model: Any, key: Any, plan: Any) -> Any:
    """The last rank's values are a little larger; the first one is as it should be."""
    return tree.map(lambda leaf: leaf * (1 + 0.1 * dist.get_rank()), INIT_PARAMS(model, key, plan))


def weights_of_the_rank(plan: Any, pending: Any) -> Any:
    """The last rank computes with values that are a little larger than those it was sent."""
    return {
        path: leaf * (1 + 0.5 * dist.get_rank()) for path, leaf in gather_reduce.finish_gather(plan, pending).items()
    }


def losses_of_the_rank(metrics: Any, shape: Any, plan: Any) -> Any:
    """The last rank's samples report half their losses."""
    return gather_metrics(metrics._replace(losses=metrics.losses / (1 + dist.get_rank())), shape, plan)


FAULTS: dict[str, tuple[str, str, Callable[..., Any], int, Stage]] = {
    "norms over the data axis": (
        "zero-3",
        "fdp.gradients.per_sample.sum_over_tensor_axis",
        norms_over_the_data_axis,
        1,
        Stage.NORMS,
    ),
    "noise by part": ("zero-3", "fdp.finish.add_noise", noise_of_the_part, 1, Stage.NOISE),
    "noise by rank": ("zero-0", "fdp.finish.add_noise", noise_of_the_rank, 1, Stage.NOISE),
    "a leaf not reduced": ("zero-0", "fdp.stages.reduce_all", all_but_one_reduced, 1, Stage.SUM),
    "init by rank, in parts": ("zero-3", "fdp.parallel.sharded_init.init_params", init_of_the_rank, 0, Stage.INIT),
    "init by rank, in copies": ("zero-0", "fdp.parallel.sharded_init.init_params", init_of_the_rank, 0, Stage.INIT),
    "weights of the other rank": (
        "zero-3",
        "fdp.gradients.block_loop.finish_gather",
        weights_of_the_rank,
        1,
        Stage.FORWARD,
    ),
    "losses of the other rank": ("zero-3", "fdp.step.gather_metrics", losses_of_the_rank, 1, Stage.LOSS),
}


def observed_on_this_rank() -> dict[str, list[Seen]]:
    seen = {name: observed(layout=layout) for name, layout in LAYOUTS.items()}
    for name, (layout, target, fault, _, _) in FAULTS.items():
        with mock.patch(target, fault):
            seen[name] = observed(layout=LAYOUTS[layout])
    return seen


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, list[Seen]]]:
    return run_on_ranks(observed_on_this_rank, 2)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_are_one_rank(one_rank: list[Seen], two_ranks: list[dict[str, list[Seen]]], layout: str) -> None:
    seen, others = (rank[layout] for rank in two_ranks)
    assert found_first(seen, one_rank) is None
    assert found_first(one_rank, seen) is None
    assert not any(one.rank_differences for one in seen)
    assert not any(one.values for one in others if one.stage not in (Stage.FORWARD, Stage.LOSS, Stage.NORMS))


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_at_its_stage(
    one_rank: list[Seen], two_ranks: list[dict[str, list[Seen]]], fault: str
) -> None:
    *_, number, stage = FAULTS[fault]
    first = found_first(two_ranks[0][fault], one_rank)
    assert first is not None
    assert (first.step, first.stage) == (number, stage)
    assert first.value > 0.05
    like = {Stage.FORWARD: 1, Stage.LOSS: 2, Stage.NORMS: 2}.get(stage, 0)
    assert first.where in one_rank[like].values
    if fault == "a leaf not reduced":
        assert first.where == LEAF
