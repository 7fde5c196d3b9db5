"""Times are measured once per shape, option, device and version, cached on disk, and override predictions."""

from __future__ import annotations

import json
import os

import pytest
import torch

import fdp.gradients.timing
from fdp import ops
from fdp.gradients.costs import NormBy
from fdp.gradients.plan import Method, explain, make_plan
from fdp.gradients.rules import OneHot, Pair, per_sample_gradient
from fdp.gradients.tape import EXPANDED, Use
from fdp.gradients.timing import default_store, load_times, measure, option_runs, signature
from fdp.model import from_loss
from fdp.types import FdpError
from tests.conftest import randn

CPU = torch.device("cpu")
LINEAR = Use("w#0", "w", "linear", (2, 3, 5), (2, 3, 4), (4, 5))
EMBEDDING = Use("e#0", "e", "embedding", (2, 3), (2, 3, 5), (7, 5))
BIAS = Use("b", "b", EXPANDED, (2, 4), (2, 4), (4,))
TIMED = (NormBy.KEEP, NormBy.DIRECT, NormBy.SYMMETRIC, NormBy.GRAM)


@pytest.fixture
def store(tmp_path):
    return tmp_path / "cache" / "timings.json"


@pytest.fixture
def taken(monkeypatch):
    """Return which measurements were taken; each is one second longer than the one before."""
    seen: list[str] = []

    def time(use, by, dtype, device, seconds):
        seen.append(signature(use, by, dtype))
        return float(len(seen))

    monkeypatch.setattr(fdp.gradients.timing, "_time", time)
    return seen


def test_every_option_is_timed_for_real(store):
    times = measure([LINEAR, EMBEDDING, BIAS], dtype=torch.float32, device=CPU, store=store, seconds=1e-6)
    expected = {signature(use, by, torch.float32) for use in (LINEAR, EMBEDDING) for by in TIMED}
    assert set(times) == expected
    assert all(0 < seconds < 1 for seconds in times.values())
    assert load_times(CPU, store=store) == times


def test_a_signature_names_everything_a_time_depends_on():
    name = signature(LINEAR, NormBy.KEEP, torch.bfloat16)
    assert name == "keep linear B=2 T=3 p=4 d=5 bfloat16"
    others = [
        signature(LINEAR, NormBy.GRAM, torch.bfloat16),
        signature(LINEAR, NormBy.KEEP, torch.float32),
        signature(EMBEDDING, NormBy.KEEP, torch.bfloat16),
        signature(LINEAR._replace(input_shape=(3, 3, 5), output_shape=(3, 3, 4)), NormBy.KEEP, torch.bfloat16),
        signature(LINEAR._replace(input_shape=(2, 9, 5), output_shape=(2, 9, 4)), NormBy.KEEP, torch.bfloat16),
        signature(LINEAR._replace(output_shape=(2, 3, 8), leaf_shape=(8, 5)), NormBy.KEEP, torch.bfloat16),
        signature(LINEAR._replace(input_shape=(2, 3, 8), leaf_shape=(4, 8)), NormBy.KEEP, torch.bfloat16),
    ]
    assert len({name, *others}) == 8


def test_cached_times_are_not_measured_again(store, taken):
    first = measure([LINEAR, LINEAR._replace(name="v#0", path="v")], dtype=torch.float32, device=CPU, store=store)
    assert len(taken) == len(first) == 4  # two layers of one shape are one measurement
    again = measure([LINEAR], dtype=torch.float32, device=CPU, store=store)
    assert len(taken) == 4
    assert again == first
    more = measure([LINEAR, EMBEDDING], dtype=torch.float32, device=CPU, store=store)
    assert len(taken) == 8
    assert first.items() <= more.items()
    measure([LINEAR], dtype=torch.bfloat16, device=CPU, store=store)
    assert len(taken) == 12


def test_without_a_store_nothing_is_written(taken, tmp_path, monkeypatch):
    monkeypatch.setenv("FDP_CACHE", str(tmp_path))
    for count in (4, 8):
        measure([LINEAR], dtype=torch.float32, device=CPU, store=None)
        assert len(taken) == count
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '{"cpu": 3}', "\x00\x01", '"times"'])
def test_a_file_that_cannot_be_read_is_ignored_and_replaced(text, store, taken):
    store.parent.mkdir()
    store.write_text(text)
    assert load_times(CPU, store=store) == {}
    times = measure([LINEAR], dtype=torch.float32, device=CPU, store=store)
    assert len(taken) == 4
    assert load_times(CPU, store=store) == times


def test_times_of_this_device_that_are_no_table_are_ignored(store, taken):
    store.parent.mkdir()
    store.write_text(json.dumps({fdp.gradients.timing._device_and_versions(CPU): 3}))
    assert load_times(CPU, store=store) == {}
    measure([LINEAR], dtype=torch.float32, device=CPU, store=store)
    assert len(taken) == 4


def test_times_of_another_device_or_version_are_not_used_and_not_lost(store, taken, monkeypatch):
    mine = measure([LINEAR], dtype=torch.float32, device=CPU, store=store)
    real = fdp.gradients.timing._device_and_versions
    for other in ("NVIDIA H200, torch 9, triton 9, fdp 9", real(CPU).replace("torch ", "torch 1")):
        monkeypatch.setattr(fdp.gradients.timing, "_device_and_versions", lambda _, other=other: other)
        assert load_times(CPU, store=store) == {}
        before = len(taken)
        theirs = measure([LINEAR], dtype=torch.float32, device=CPU, store=store)
        assert len(taken) == before + 4
        assert theirs != mine
    monkeypatch.setattr(fdp.gradients.timing, "_device_and_versions", real)
    assert load_times(CPU, store=store) == mine
    assert len(json.loads(store.read_text())) == 3
    assert [path.name for path in store.parent.iterdir()] == ["timings.json"]


def test_the_device_and_the_versions_are_named():
    from importlib.metadata import version

    who = fdp.gradients.timing._device_and_versions(CPU)
    assert who.startswith(f"cpu, torch {torch.__version__}, triton ")
    assert who.endswith(f"fdp {version('fdp')}")


def test_an_option_that_runs_out_of_memory_has_no_time(store, monkeypatch):
    real = fdp.gradients.timing._median

    def median(run, device, seconds):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(fdp.gradients.timing, "_median", median)
    assert measure([LINEAR], dtype=torch.float32, device=CPU, store=store) == {}
    assert not store.exists()
    monkeypatch.setattr(fdp.gradients.timing, "_median", real)
    assert len(measure([LINEAR], dtype=torch.float32, device=CPU, store=store, seconds=1e-6)) == 4


def test_a_measurement_of_zero_seconds_is_refused():
    with pytest.raises(FdpError, match="positive time"):
        measure([LINEAR], dtype=torch.float32, device=CPU, store=None, seconds=0)


def test_times_are_stored_in_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FDP_CACHE", str(tmp_path))
    assert default_store() == tmp_path / "timings.json"
    monkeypatch.delenv("FDP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_store() == tmp_path / "fdp" / "timings.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_store() == tmp_path / ".cache" / "fdp" / "timings.json"


@pytest.mark.parametrize("left", [randn(3, 1, 6, 4), OneHot(torch.tensor([[0, 1, 1, 3, 2, 0]] * 3))])
def test_every_option_computes_the_same(left):
    record = Pair(left, randn(3, 1, 6, 5, seed=2), (4, 5))
    factors = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)
    G = per_sample_gradient(record)
    total, square = torch.einsum("b,bpd->pd", factors, G), G.square().sum((1, 2))
    twice = record._replace(right=2 * record.right)
    for by, run in option_runs([record, twice], factors).items():
        if by is NormBy.KEEP_INT8 and isinstance(left, OneHot):
            continue  # not an option of an embedding
        rounded = by is NormBy.KEEP_INT8
        for times, squares, made in zip((1, 2), *run(), strict=True):  # type: ignore[misc]
            squares = squares.sum(1) if squares.ndim == 2 else squares
            share, least = (2e-2, 0.0) if rounded else (1e-10, 1e-12)
            torch.testing.assert_close(squares, times**2 * square, rtol=share, atol=least, msg=by.value)
            # An update reads rows with factors: of a sum that is made, one row with the first factor.
            read = times * total if by is NormBy.KEEP else 0.5 * times * total
            near = 2e-2 * float(read.abs().max()) if rounded else 1e-6
            torch.testing.assert_close(made.view(4, 5).double(), read, rtol=1e-6, atol=near, msg=by.value)


# ---------------------------------------------------------------- what plans make of them


def plan_with(times, method=Method.AUTO, memory_budget=None):
    params = {"w": torch.zeros(4, 5)}
    model = from_loss(lambda p, d: ops.linear(d["x"], p["w"]).sum((1, 2)), params)
    data = {"x": torch.zeros(2, 3, 5)}
    return make_plan(model, params, data, method=method, timings=times, memory_budget=memory_budget)


@pytest.mark.parametrize("best", TIMED)
def test_measured_times_decide_the_choice(best):
    times = {signature(LINEAR, by, torch.float32): 1.0 if by is best else 2.0 for by in TIMED}
    plan = plan_with(times)
    assert plan.choices["w"].norm is best
    assert plan.choices["w"].measured == plan.choices["w"].price == 1.0
    assert (
        plan.choices["w"].seconds == plan_with({}).choices["w"].seconds or best is not plan_with({}).choices["w"].norm
    )
    assert "1000.000" in explain(plan)


def test_of_options_with_about_equal_times_the_one_that_stores_least_is_chosen():
    """Per-sample gradients of 2 x 4 x 5 elements here, pairs of 2 x 3 x (4 + 5)."""
    times = {signature(LINEAR, by, torch.float32): 1.0 if by is NormBy.DIRECT else 2.0 for by in TIMED}
    keep = signature(LINEAR, NormBy.KEEP, torch.float32)
    assert plan_with(times | {keep: 1.05}).choices["w"].norm is NormBy.KEEP
    assert plan_with(times | {keep: 1.2}).choices["w"].norm is NormBy.DIRECT
    times |= {keep: 1.0, signature(LINEAR, NormBy.DIRECT, torch.float32): 0.95}
    assert plan_with(times).choices["w"].norm is NormBy.KEEP


@pytest.mark.parametrize("best", [NormBy.DIRECT, NormBy.SYMMETRIC])
def test_flash_bk_and_flash_under_a_budget_choose_between_two_options_by_time(best):
    times = {signature(LINEAR, by, torch.float32): 1.0 if by is best else 2.0 for by in TIMED}
    times |= {signature(LINEAR, by, torch.float32): 0.1 for by in (NormBy.KEEP, NormBy.GRAM)}
    assert plan_with(times, Method.FLASH_BK).choices["w"].norm is best
    assert plan_with(times, Method.FLASH, memory_budget=0.0).choices["w"].norm is best


def test_flash_stores_gradients_whatever_the_times_say():
    times = {signature(LINEAR, by, torch.float32): 2.0 if by is NormBy.KEEP else 1.0 for by in TIMED}
    assert plan_with(times, Method.FLASH).choices["w"].norm is NormBy.KEEP


def test_times_of_other_shapes_and_dtypes_count_for_nothing():
    other = LINEAR._replace(input_shape=(2, 9, 5), output_shape=(2, 9, 4))
    times = {signature(other, by, torch.float32): 1e-9 for by in TIMED}
    times |= {signature(LINEAR, by, torch.bfloat16): 1e-9 for by in TIMED}
    assert plan_with(times) == plan_with(None)
    assert plan_with(times).choices["w"].measured is None


def test_one_measured_time_is_compared_with_predictions_of_the_others():
    free = plan_with(None).choices["w"]
    slow = {signature(LINEAR, free.norm, torch.float32): 10.0}
    assert plan_with(slow).choices["w"].norm is not free.norm


def test_the_part_file_is_this_process_s_own(store, taken, monkeypatch):
    """Two runs at once leave the times of one, never a mixture."""
    seen = []
    real = os.getpid()
    monkeypatch.setattr(fdp.gradients.timing.FilePath, "replace", lambda self, target: seen.append((self.name, target)))
    measure([LINEAR], dtype=torch.float32, device=CPU, store=store)
    assert seen == [(f"timings.{real}.part", store)]
