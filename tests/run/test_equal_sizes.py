"""Several sizes of microbatches are used only if a sample adds the same to the sum in all of them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from fdp import stages as stages_module
from fdp import tree
from fdp.checks import equal_sizes
from fdp.checks.first_call import Checks
from fdp.fast.out_of_memory import OutOfMemory
from fdp.gradients.accumulate import MicrobatchSum
from fdp.gradients.lazy_sum import evaluate
from fdp.optimizers import sgd
from fdp.parallel.sharding import Zero
from fdp.privacy import clipping
from fdp.privacy.microbatches import check_sizes
from fdp.run.equal_sizes import REPETITIONS, RoundingWarning, join_sizes, usable_sizes
from fdp.run.prepare_run import Run, prepare
from fdp.run.run_config import Layout, RunConfig
from fdp.run.run_plan import first_examples
from fdp.run.smaller_microbatches import MemoryWarning
from fdp.run.training_run import draw_batch, steps
from fdp.stages import Stages
from fdp.step import init_state, make_train_step, sample_part, sum_over_microbatches
from fdp.types import FdpError, NotRepeatable, TrainState
from tests.ranks import run_on_ranks
from tests.run.test_smaller_microbatches import CONFIG, Images

SIZES = (8, 4, 2, 1)


def sizes_agree(stages: Stages, state: TrainState, examples: Any, *, sizes: tuple[int, ...]) -> bool:
    found = equal_sizes.differences(sample_part(stages, state), examples, sizes=sizes, sharded=False)
    return all(by <= equal_sizes.TOLERANCE for by in found.values())


def prepared(config: RunConfig = CONFIG) -> tuple[Run, TrainState, Any]:
    run, state = prepare(config)
    return run, state, first_examples(run.config, SIZES[0])


def rounded_otherwise(stages: Stages, size: int, by: float, leaf: str | None = None) -> Stages:
    """Return stages in which the gradients of a microbatch of ``size`` are larger by a factor ``1 + by``."""
    real = stages.gradient

    def gradient(weights: Any, clip: Any, data: Any, mask: Tensor, *rest: Any, onto: Any = None) -> MicrobatchSum:
        if len(mask) != size:
            return real(weights, clip, data, mask, *rest, onto=onto)
        found = real(weights, clip, data, mask, *rest)
        total = evaluate(found.total)
        value = {path: part * (1 + by * (leaf is None or path == leaf)) for path, part in total.value.items()}
        value = {path: part + ({} if onto is None else onto.value).get(path, 0) for path, part in value.items()}
        return found._replace(total=total._replace(value=value))

    return stages._replace(gradient=gradient)


def test_sizes_agree_if_a_sample_adds_the_same_in_all_of_them():
    run, state, examples = prepared()
    assert run.sizes == SIZES
    assert sizes_agree(run.stages, state, examples, sizes=SIZES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_one_size_a_sample_adds_the_same_first_and_last_and_beside_others(dtype):
    """In the compute dtype of a run, in which nothing is exact: the last of nine is not left over for other code."""
    config = dataclasses.replace(CONFIG, dtype=dtype, microbatch_size=9, smaller_microbatches=False)
    run, state = prepare(config)
    assert sizes_agree(run.stages, state, first_examples(config, 9), sizes=(9, 9))


@pytest.mark.parametrize("size", SIZES)
def test_one_size_that_rounds_otherwise_is_found(size):
    run, state, examples = prepared()
    assert not sizes_agree(rounded_otherwise(run.stages, size, 1e-5), state, examples, sizes=SIZES)
    assert sizes_agree(rounded_otherwise(run.stages, size, 1e-7), state, examples, sizes=SIZES)


def test_the_difference_of_every_size_is_a_fraction_of_what_the_sample_adds():
    run, state, examples = prepared()
    part = sample_part(rounded_otherwise(run.stages, 2, 1e-3), state)
    found = equal_sizes.differences(part, examples, sizes=SIZES, sharded=False)
    assert list(found) == [8, 4, 2, 1]
    assert found[8] == 0
    assert found[2] == pytest.approx(1e-3, rel=1e-3)
    assert max(found[4], found[1]) <= equal_sizes.TOLERANCE


def test_parameters_that_are_zero_hide_nothing():
    """A head of zeros has no gradient below it: how the blocks round would not be seen."""
    run, state, examples = prepared()
    last = [path for path in tree.flatten(state.params) if path.startswith("head")]
    first = next(path for path in tree.flatten(state.params) if path not in last)
    flat = {path: leaf * (path not in last) for path, leaf in tree.flatten(state.params).items()}
    state = state._replace(params=tree.unflatten(state.params, flat))
    before = {path: leaf.clone() for path, leaf in tree.flatten(state.params).items()}
    assert last
    assert not sizes_agree(rounded_otherwise(run.stages, 4, 1e-4, first), state, examples, sizes=SIZES)
    assert all(torch.equal(before[path], leaf) for path, leaf in tree.flatten(state.params).items()), "unchanged"


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_without_a_gradient_that_can_be_compared_the_answer_is_no(value):
    run, state, examples = prepared()
    stages = run.stages
    for size in SIZES:
        stages = rounded_otherwise(stages, size, value - 1)
    assert not sizes_agree(stages, state, examples, sizes=SIZES)
    with pytest.raises(FdpError, match="no sample was found whose gradient is finite and not 0"):
        equal_sizes.check_sizes(sample_part(stages, state), examples, sizes=SIZES, sharded=False)


def test_no_two_sizes_of_a_step_of_ones_own_differ_by_more_than_is_stated():
    """Each differs from the largest by less than that, one up and one down, and they from each other by more."""
    run, state, examples = prepared()
    by = 0.9 * equal_sizes.TOLERANCE
    part = sample_part(rounded_otherwise(rounded_otherwise(run.stages, 4, by), 2, -by), state)
    with pytest.raises(FdpError, match="rounds a sample's gradient otherwise"):
        equal_sizes.check_sizes(part, examples, sizes=SIZES, sharded=False)


def adding_in_any_order(
    stages: Stages, monkeypatch: pytest.MonkeyPatch, by: float, otherwise: dict[int, float] | None = None
) -> Stages:
    """Return stages whose gradients change each time by a random fraction, of ``by``, unless they must be repeatable.

    ``otherwise`` gives sizes in which the attention that adds in any order is larger by a factor.
    """
    draw, real, repeatable = torch.Generator().manual_seed(0), stages.gradient, [False]

    @contextmanager
    def watched(device: torch.device, **options: bool) -> Iterator[None]:
        repeatable.append(options["repeatable"])
        yield

    def gradient(weights: Any, clip: Any, data: Any, mask: Tensor, *rest: Any, onto: Any = None) -> MicrobatchSum:
        found = real(weights, clip, data, mask, *rest, onto=onto)
        if repeatable[-1]:
            return found
        size = 1 + (otherwise or {}).get(len(mask), 0.0)
        total = evaluate(found.total)
        value = {
            path: part * size * (1 + by * torch.randn(part.shape, generator=draw)) for path, part in total.value.items()
        }
        return found._replace(total=total._replace(value=value))

    monkeypatch.setattr("fdp.step.fast_attention", watched)
    return stages._replace(gradient=gradient)


def test_the_order_of_additions_keeps_no_size_from_being_used(monkeypatch):
    run, state, _ = prepared()
    stages = adding_in_any_order(run.stages, monkeypatch, 1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert usable_sizes(CONFIG, stages, state) == SIZES


def rounded_otherwise_once(stages: Stages, call: int) -> Stages:
    """Return stages of which one gradient, that of the ``call``-th size, is larger by a ten-thousandth."""
    wrong, calls = rounded_otherwise(stages, SIZES[call], 1e-4), iter(range(1000))

    def gradient(*values: Any, **options: Any) -> MicrobatchSum:
        return (wrong if next(calls) == call else stages).gradient(*values, **options)

    return stages._replace(gradient=gradient)


@pytest.mark.parametrize("call", range(len(SIZES)))
def test_a_difference_that_comes_and_goes_keeps_no_size_from_being_used(call):
    """In whichever of the first comparisons it came, in a run and in a step of one's own."""
    run, state, examples = prepared()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert usable_sizes(CONFIG, rounded_otherwise_once(run.stages, call), state) == SIZES
    part = sample_part(rounded_otherwise_once(run.stages, call), state)
    equal_sizes.check_sizes(part, examples, sizes=SIZES, sharded=False)


@pytest.mark.parametrize("size", SIZES)
def test_a_step_of_ones_own_refuses_a_size_that_rounds_otherwise_each_time(size):
    run, state, examples = prepared()
    part = sample_part(rounded_otherwise(run.stages, size, 1e-5), state)
    with pytest.raises(FdpError, match="this device rounds a sample's gradient otherwise in some of them"):
        equal_sizes.check_sizes(part, examples, sizes=SIZES, sharded=False)


@pytest.mark.parametrize("fails", [2, 3])
def test_comparisons_with_different_sizes_are_not_mixed(fails, monkeypatch):
    """If the largest size runs out of memory in a later comparison, 4 is the largest, from which 2 always differs.

    The third comparison is that with attention in one order.
    """
    monkeypatch.setattr(equal_sizes, "COMPARISONS", 2)
    run, state, _ = prepared()
    stages = rounded_otherwise(run.stages, 4, 1e-4)  # so 8 and 2 agree, and 4 differs from both
    if fails == 3:
        stages = adding_in_any_order(stages, monkeypatch, 1e-4)
    real, tries = stages.gradient, [0]

    def gradient(weights: Any, clip: Any, data: Any, mask: Tensor, *rest: Any, **options: Any) -> MicrobatchSum:
        largest = len(mask) == 8
        tries[0] += largest
        before = {2: 1, 3: 2 + REPETITIONS}[fails]
        if largest and tries[0] > before:
            raise torch.OutOfMemoryError("no room")
        return real(weights, clip, data, mask, *rest, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        used = usable_sizes(CONFIG, stages._replace(gradient=gradient), state)
    assert used == ((4,) if fails == 2 else (8,))


def test_infinite_differences_are_not_put_down_to_the_order_of_additions(monkeypatch):
    """Also if what is compared after the largest with itself, in one order, agrees."""
    run, state, _ = prepared()
    found = [float("inf")]

    def broken(*values: Any, sizes: Any, **options: Any) -> dict[int, float]:
        if len(set(sizes)) == 1:
            return {sizes[0]: found.pop()}
        return dict.fromkeys(sizes, found[0] if found else 0.0) | {sizes[0]: 0.0}

    monkeypatch.setattr("fdp.run.equal_sizes.differences", broken)
    with pytest.warns(RoundingWarning):
        assert usable_sizes(CONFIG, run.stages, state) == (8,)
    assert not found, "the largest was compared with itself"


@pytest.mark.parametrize("also_in_order", [True, False])
def test_a_size_that_rounds_otherwise_is_found_behind_the_order_of_additions(also_in_order, monkeypatch):
    """Find it whether attention in any order rounds otherwise, or all else does."""
    run, state, _ = prepared()
    stages = rounded_otherwise(run.stages, 2, 1e-5) if also_in_order else run.stages
    stages = adding_in_any_order(stages, monkeypatch, 1e-4, {} if also_in_order else {2: 1e-2})
    with pytest.warns(RoundingWarning, match="microbatches of 8, 4 and 1 samples are used, not of 2"):
        assert usable_sizes(CONFIG, stages, state) == (8, 4, 1)


def test_without_repeatable_gradients_what_was_compared_counts(monkeypatch):
    run, state, _ = prepared()
    stages = adding_in_any_order(run.stages, monkeypatch, 1e-4)

    @contextmanager
    def refuses(device: torch.device, *, repeatable: bool) -> Iterator[None]:
        if repeatable:
            raise NotRepeatable("no such algorithm")
        yield

    monkeypatch.setattr("fdp.step.fast_attention", refuses)
    with pytest.warns(RoundingWarning, match="microbatches of 8 samples are used, not of 4, 2 and 1"):
        assert usable_sizes(CONFIG, stages, state) == (8,)


def limited(
    most: int, inner: Callable[..., MicrobatchSum], *, failures: int | None = None
) -> Callable[..., MicrobatchSum]:
    """Return the gradient, which runs out of memory with more than ``most`` samples, ``failures`` times or always."""
    left = float("inf") if failures is None else failures

    def gradient(weights: Any, clip: Any, data: Any, mask: Tensor, *rest: Any, **options: Any) -> MicrobatchSum:
        nonlocal left
        if len(mask) > most and left > 0:
            left -= 1
            raise torch.OutOfMemoryError("no room")
        return inner(weights, clip, data, mask, *rest, **options)

    return gradient


def test_sizes_without_memory_are_not_compared_and_not_used():
    run, state, examples = prepared()
    part = sample_part(run.stages._replace(gradient=limited(4, run.stages.gradient)), state)
    assert equal_sizes.differences(part, examples, sizes=SIZES, sharded=False).keys() == {4, 2, 1}
    with pytest.raises(OutOfMemory, match="out of memory with 8 samples at once"):
        equal_sizes.check_sizes(part, examples, sizes=SIZES, sharded=False)
    small = run.stages._replace(gradient=limited(4, run.stages.gradient))
    with pytest.warns(MemoryWarning, match="out of memory with microbatches of 8 samples; steps have at most 4"):
        assert usable_sizes(CONFIG, small, state) == (4, 2, 1)
    wrong = rounded_otherwise(small, 2, 1e-5)
    with pytest.warns(RoundingWarning), pytest.warns(MemoryWarning):
        assert usable_sizes(CONFIG, wrong, state) == (4, 1)
    nothing = run.stages._replace(gradient=limited(0, run.stages.gradient))
    assert usable_sizes(CONFIG, nothing, state) == (1,), "the first step says that nothing fits"


def test_a_size_that_does_not_fit_at_first_is_compared_when_free_memory_was_given_back():
    """Else it would not be compared, and used all the same once there is room."""
    run, state, examples = prepared()
    wrong = rounded_otherwise(run.stages, 8, 1e-2)
    part = sample_part(wrong._replace(gradient=limited(4, wrong.gradient, failures=1)), state)
    found = equal_sizes.differences(part, examples, sizes=SIZES, sharded=False)
    assert found.keys() == set(SIZES)
    assert found[4] == pytest.approx(1e-2, rel=0.02)


def test_memory_that_runs_out_on_a_rank_is_an_error_since_others_wait(monkeypatch):
    run, state, examples = prepared()
    monkeypatch.setattr(equal_sizes, "gather_values", lambda value, _: [value])
    part = sample_part(run.stages._replace(gradient=limited(4, run.stages.gradient)), state)
    with pytest.raises(OutOfMemory, match="8 samples"):
        equal_sizes.differences(part, examples, sizes=SIZES, sharded=True)


def test_norms_are_compared_where_nothing_is_clipped():
    """Mutation: norms that are larger in one size change no part of a sample below the bound; of others they do."""
    run, state, examples = prepared(dataclasses.replace(CONFIG, clip=clipping.flat(max_norm=1e6)))
    real = run.stages.gradient

    def gradient(weights: Any, clip: Any, data: Any, mask: Tensor, *rest: Any, **options: Any) -> MicrobatchSum:
        found = real(weights, clip, data, mask, *rest, **options)
        norms = found.metrics.norms * (1 + 1e-3 * (len(mask) == 4))
        return found._replace(metrics=found.metrics._replace(norms=norms))

    part = sample_part(run.stages._replace(gradient=gradient), state)
    found = equal_sizes.differences(part, examples, sizes=SIZES, sharded=False)
    assert found[4] == pytest.approx(1e-3, rel=1e-2)
    assert max(found[2], found[1]) <= equal_sizes.TOLERANCE


@pytest.mark.parametrize(
    ("here", "elsewhere", "found"), [(0.0, float("nan"), False), (9e-7, 9e-7, False), (0.0, 0.0, True)]
)
def test_the_differences_of_all_ranks_are_counted_together(here, elsewhere, found, monkeypatch):
    """One NaN on any rank is found, and so are shards that are off by less than the tolerance each."""
    run, state, examples = prepared()
    told = iter([[1.0, 0.0]] + [[here, elsewhere]] * 6)
    monkeypatch.setattr(equal_sizes, "gather_values", lambda *_: next(told))
    by = equal_sizes.differences(sample_part(run.stages, state), examples, sizes=SIZES, sharded=True)
    assert all(each <= equal_sizes.TOLERANCE for each in by.values()) is found


@pytest.mark.parametrize(
    ("wrong", "used"), [(4, (8, 2, 1)), (1, (8, 4, 2)), (2, (8, 4, 1))], ids=["middle", "smallest", "another"]
)
def test_a_run_does_without_sizes_that_disagree_and_says_so(monkeypatch, wrong, used):
    real = prepare.__globals__["make_stages"]
    monkeypatch.setitem(
        prepare.__globals__,
        "make_stages",
        lambda *args, **options: rounded_otherwise(real(*args, **options), wrong, 1e-5),
    )
    with pytest.warns(RoundingWarning, match=rf"samples are used, not of {wrong}: this device .* by up to 1.0e-05"):
        run, state = prepare(CONFIG)
    assert run.sizes == used
    rows = [draw_batch(run, t).mask.shape[1] for t in range(CONFIG.steps)]
    assert rows == [used[-1]] * CONFIG.steps
    assert len(list(steps(run, state))) == CONFIG.steps


def test_sizes_that_need_a_smaller_one_are_left_out_with_it():
    config = dataclasses.replace(CONFIG, batch_size=8, microbatch_size=10)
    run, state, _ = prepared(config)
    assert run.sizes == (10, 9, 8, 7, 4, 1)
    with pytest.warns(
        RoundingWarning, match="microbatches of 10 samples are used, not of 9, 8, 7, 4 and 1: this device"
    ):
        assert usable_sizes(config, rounded_otherwise(run.stages, 1, 1e-5), state) == (10,)


def test_together_samples_of_other_sizes_move_the_sum_by_no_more_than_a_millionth_of_the_bound(monkeypatch):
    """A sample may be off by 1e-6 / 8 at most if the largest size is 8, less half of it for a third size."""
    run, state, _ = prepared()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RoundingWarning)
        assert usable_sizes(CONFIG, run.stages, state) == SIZES
    with pytest.warns(RoundingWarning):
        assert usable_sizes(CONFIG, rounded_otherwise(run.stages, 4, 2e-7), state) == (8, 2, 1)


@pytest.mark.parametrize(
    ("some", "joined"),
    [
        ((64, 32, 16), (64, 32, 16)),
        ((64, 16, 8), (64, 16, 8)),
        ((80, 72, 64, 56, 32, 8), (80, 72, 64, 56, 32, 8)),
        ((80, 72, 64, 56, 32), (80,)),
        ((80, 64, 16), (80, 64, 16)),
        ((5,), (5,)),
    ],
)
def test_sizes_are_multiples_of_the_smallest_and_the_largest_is_among_them(some, joined):
    assert join_sizes(some) == joined
    check_sizes(joined)


def test_other_processes_are_asked_only_if_the_run_is_sharded(monkeypatch):
    """A process may train on its own beside others, which would not answer."""
    run, state, examples = prepared()
    monkeypatch.setattr(equal_sizes, "gather_values", lambda *_: pytest.fail("asked other ranks"))
    assert sizes_agree(run.stages, state, examples, sizes=SIZES)


def sizes_on_this_rank(wrong_on: int | None) -> tuple[int, ...]:
    """Return the sizes that a run of two ranks uses if one rank rounds otherwise in microbatches of 2."""
    real, rank = prepare.__globals__["make_stages"], torch.distributed.get_rank()

    def make(*args: Any, **options: Any) -> Stages:
        stages = real(*args, **options)
        return rounded_otherwise(stages, 2, 1e-5) if rank == wrong_on else stages

    layout = Layout({"shard": 2}, Zero.THREE)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setitem(prepare.__globals__, "make_stages", make)
        warnings.simplefilter("ignore", RoundingWarning)
        return prepare(dataclasses.replace(CONFIG, layout=layout))[0].sizes


@pytest.mark.ranks
def test_all_ranks_use_the_same_sizes():
    assert run_on_ranks(sizes_on_this_rank, 2, None) == [SIZES, SIZES]
    assert run_on_ranks(sizes_on_this_rank, 2, 1) == [(8, 4, 1)] * 2


def test_a_step_of_ones_own_with_sizes_that_disagree_is_refused_at_its_first_call(monkeypatch):
    run, state = prepare(CONFIG)
    mechanism, plan, real = run.mechanism, run.plan, stages_module._make_gradient
    assert plan is not None

    def make(by: float, checks: Checks = Checks.FIRST_CALL) -> Any:
        def gradient(*args: Any, **options: Any) -> Any:
            inner = run.stages._replace(gradient=real(*args, **options))
            return rounded_otherwise(inner, 2, by).gradient

        monkeypatch.setattr(stages_module, "_make_gradient", gradient)
        return make_train_step(CONFIG.model, sgd(0.1), mechanism=mechanism, plan=plan, checks=checks)

    batch, key = draw_batch(run, 0), run.key
    state = init_state(CONFIG.model, state.params, sgd(0.1), mechanism)
    make(1e-8)(state, batch, key)
    make(1e-4, Checks.SKIPPED)(state, batch, key)
    with pytest.raises(FdpError, match=r"microbatch sizes \(8, 4, 2, 1\): expected that a sample adds the same"):
        make(1e-4)(state, batch, key)


class WithoutGradient(Images):
    """Sixty samples, before which one more may be that has a gradient of 0: its image is 0."""

    def __init__(self, more: bool) -> None:
        self.more = more

    def __len__(self) -> int:
        return 60 + self.more

    def fetch(self, indices: Any) -> Any:
        rows = torch.as_tensor(indices) - int(self.more)
        data = super().fetch(rows.clamp_min(0))
        return {"image": data["image"] * (rows >= 0)[:, None], "label": data["label"]}


@pytest.mark.parametrize("wrong", [False, True])
def test_a_sample_that_adds_nothing_moves_the_sum_by_nothing(wrong):
    """Mutation: with sizes that round otherwise and no check, the samples behind it move the sum."""
    sums = []
    for more in (False, True):
        # All samples are drawn: 61 instead of 60 samples end in microbatches of other sizes.
        config = dataclasses.replace(CONFIG, dataset=WithoutGradient(more), batch_size=60 + more, population=60 + more)
        run, state = prepare(config)
        stages = rounded_otherwise(run.stages, 4, 1e-3) if wrong else run.stages
        batch = draw_batch(run, 0)
        assert int(batch.mask.sum()) == 60 + more
        sums.append(evaluate(sum_over_microbatches(stages, state, batch).total).value)
    weights = [path for path in sums[0] if sums[0][path].ndim == 2]  # a bias has a gradient although its input is 0
    moved = torch.stack([(sums[0][path] - sums[1][path]).norm() for path in weights]).norm()
    assert weights
    assert (float(moved) > 1e-5) == wrong
