"""A step that does not fit is made again with smaller microbatches, on the same draw; half a step is never made."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fdp import keys, tree
from fdp.checks.gate import Gate
from fdp.fast.compile_modes import Compile
from fdp.fast.out_of_memory import EndMark, OutOfMemory, explain_out_of_memory, is_out_of_memory
from fdp.gradients import accumulate
from fdp.gradients.plan import Method
from fdp.models import mlp
from fdp.optimizers import adamw
from fdp.privacy import clipping
from fdp.run.prepare_run import prepare
from fdp.run.run_config import RunConfig
from fdp.run.smaller_microbatches import MemoryWarning, limit_groups
from fdp.run.training_run import steps
from fdp.types import Batch, FdpError, RowGroups
from tests.fake_graphs import install


class Images:
    """Sixty samples."""

    def __len__(self) -> int:
        return 60

    def fetch(self, indices: Any) -> Any:
        rows = torch.as_tensor(indices)
        image = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
        return {"image": image[rows], "label": rows % 3}


CONFIG = RunConfig(
    model=mlp(widths=(6, 5), classes=3),
    dataset=Images(),
    method=Method.AUTO,
    clip=clipping.flat(max_norm=0.5),
    noise_multiplier=1.0,
    epsilon=None,
    delta=1e-3,
    batch_size=14,
    steps=5,
    optimizer=adamw(1e-2, eps=1e-3),
    seed=4,
    dtype=torch.float64,  # in float32 some CPUs round otherwise in some of the sizes, which are then not used
    microbatch_size=8,
    smaller_microbatches=True,
    memory_budget=None,
    compile=Compile.NONE,
    device=torch.device("cpu"),
)


def trained(config: RunConfig, before_steps: Callable[[], Any] = lambda: None) -> dict[str, torch.Tensor]:
    run, state = prepare(config)
    before_steps()
    *_, (state, _) = steps(run, state)
    return {path: leaf.clone() for path, leaf in tree.flatten(state.params).items()}


def no_room_for(monkeypatch: pytest.MonkeyPatch, least: int, tried: list[int]) -> None:
    """Let the norms of ``least`` samples or more run out of memory from now on; the sizes come into ``tried``."""
    norms = accumulate.per_sample_norms

    def limited(model: Any, params: Any, data: Any, **options: Any) -> Any:
        tried.append(len(data["label"]))
        if len(data["label"]) >= least:
            raise torch.OutOfMemoryError("no room")
        return norms(model, params, data, **options)

    monkeypatch.setattr(accumulate, "per_sample_norms", limited)


@pytest.mark.parametrize("recorded", [False, True])
def test_a_run_goes_on_with_the_next_smaller_size_and_the_same_numbers(recorded, monkeypatch):
    expected = trained(dataclasses.replace(CONFIG, microbatch_size=60, smaller_microbatches=False))
    if recorded:
        install(monkeypatch)
    tried: list[int] = []
    with pytest.warns(MemoryWarning, match=r"out of memory with microbatches of 8 samples; .* made with 4") as said:
        found = trained(dataclasses.replace(CONFIG, cuda_graph=recorded), lambda: no_room_for(monkeypatch, 8, tried))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert tried.count(8) == 1, "expected the size that does not fit to be tried once"
    assert len(said) == 1


def test_a_run_in_which_the_largest_size_does_not_fit_from_the_start_makes_all_steps_with_smaller_ones(monkeypatch):
    expected = trained(dataclasses.replace(CONFIG, microbatch_size=60, smaller_microbatches=False))
    tried: list[int] = []
    no_room_for(monkeypatch, 8, tried)
    with pytest.warns(
        MemoryWarning, match="out of memory with microbatches of 8 samples; steps have at most 4"
    ) as said:
        found = trained(CONFIG, tried.clear)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert set(tried) <= {4, 2, 1}
    assert len(said) == 1


def test_if_no_size_fits_the_error_names_one_to_give_and_nothing_is_done(monkeypatch):
    no_room_for(monkeypatch, 3, [])
    run, state = prepare(dataclasses.replace(CONFIG, microbatch_size=12))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryWarning)
        with pytest.raises(OutOfMemory, match=r"microbatch_size: out of memory with 3 samples at once; .*give 1"):
            next(steps(run, state))
    assert int(state.step) == 0
    one = dataclasses.replace(CONFIG, smaller_microbatches=False)
    run, state = prepare(one)
    with pytest.raises(OutOfMemory, match=r"with 8 samples at once; .*give 4"):
        next(steps(run, state))


def test_memory_that_runs_out_in_the_update_is_no_reason_to_repeat_the_step(monkeypatch):
    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("fdp.finish.next_params", fails)
    run, state = prepare(CONFIG)
    with pytest.raises(
        FdpError, match=r"out of memory in or after the update.* resume from the last checkpoint"
    ) as error:
        next(steps(run, state))
    assert not isinstance(error.value, OutOfMemory)


@pytest.mark.parametrize("failing", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [3, 14], ids=["one", "several"])
@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_runs_out_after_the_update_is_no_reason_to_repeat_the_step(
    recorded, batch_size, failing, monkeypatch
):
    calls = []

    def fails_once(metrics: Any, *given: Any) -> Any:
        calls.append(1)
        if len(calls) == failing:
            raise torch.OutOfMemoryError("no room")
        return metrics

    install(monkeypatch)
    monkeypatch.setattr("fdp.step.gather_metrics", fails_once)
    monkeypatch.setattr(Gate, "check", lambda self, count, batch: None)  # so that nothing else refuses to repeat it
    size = 16 if batch_size == 3 else 8
    config = dataclasses.replace(CONFIG, cuda_graph=recorded, batch_size=batch_size, microbatch_size=size)
    run, state = prepare(config)
    made = []
    with pytest.raises(FdpError, match=r"step was made, .* last checkpoint with --microbatch \d+, or") as error:
        made.extend(steps(run, state))
    assert not isinstance(error.value, OutOfMemory)
    assert len(calls) == failing
    assert int(state.step) == (failing if recorded else 0), "expected a recorded step to write its state in place"


def test_only_errors_of_memory_are_explained():
    mark = EndMark()

    def end() -> None:
        mark.set()
        raise torch.OutOfMemoryError("no room")

    def step(state: Any, batch: Any, key: Any) -> None:
        if key is None:
            raise KeyError("other")
        if int(key[0]) == 0:
            try:
                raise torch.OutOfMemoryError("no room")
            except torch.OutOfMemoryError:
                raise RuntimeError("the recording failed")  # noqa: B904
        end()

    explained = explain_out_of_memory(step, mark)
    batch = Batch({"x": torch.zeros(3, 2)}, torch.ones(3, 2), groups=RowGroups((2, 1)))
    with pytest.raises(KeyError):
        explained(None, batch, None)
    with pytest.raises(OutOfMemory, match=r"with 4 samples") as error:
        explained(None, batch, torch.tensor([0]))
    assert is_out_of_memory(error.value)
    with pytest.raises(FdpError, match=r"step was made, at least in part") as late:
        explained(None, batch, torch.tensor([1]))
    assert not isinstance(late.value, OutOfMemory)
    with pytest.raises(OutOfMemory):  # the mark is that of one step
        explained(None, batch, torch.tensor([0]))
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


@pytest.mark.parametrize(
    ("sizes", "rows", "expected"),
    [
        ((8, 8, 1), (4, 2, 1), (4, 4, 4, 4, 1)),
        ((4, 2), (1,), (1,) * 6),
        ((2, 1), (4, 2, 1), (2, 1)),
        ((8,), (8, 4, 2, 1), (8,)),
        ((9, 7), (8, 7, 4, 1), (8, 1, 7)),
        ((9, 7), (4, 1), (4, 4, 1, 4, 1, 1, 1)),
    ],
)
def test_larger_groups_are_cut_into_the_sizes_of_the_plan(sizes, rows, expected):
    batch = Batch({"x": torch.zeros(sum(sizes), 2)}, torch.ones(sum(sizes), 2), groups=RowGroups(sizes))
    assert limit_groups(batch, rows).groups == RowGroups(expected)
    whole = Batch(batch.data, batch.mask)
    assert limit_groups(whole, rows) is whole


@pytest.mark.parametrize("least", [8, 5])
def test_sizes_that_are_no_powers_of_two_become_sizes_of_the_plan(least, monkeypatch):
    """Ten rows are cut into eight and two of one: no plan has two."""
    config = dataclasses.replace(CONFIG, batch_size=8, microbatch_size=10)
    assert config.microbatch_sizes == (10, 9, 8, 7, 4, 1)
    expected = trained(dataclasses.replace(config, microbatch_size=60, smaller_microbatches=False))
    tried: list[int] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MemoryWarning)
        found = trained(config, lambda: no_room_for(monkeypatch, least, tried))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert set(tried) <= {10, 9, 8, 7, 4, 1}
    assert {size for size in tried if size >= least}, "some did not fit"


def test_keys_of_the_steps_do_not_depend_on_the_sizes():
    runs = [prepare(dataclasses.replace(CONFIG, smaller_microbatches=some))[0] for some in (False, True)]
    assert torch.equal(runs[0].key, runs[1].key)
    a, b = (run.stages.key(keys.key(0), torch.tensor(3)) for run in runs)
    assert torch.equal(a, b)
