"""The settings by which cuBLAS and torch.compile round a sample in one way, however many there are and on all ranks."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import fdp.equal_rounding
from fdp.attention import attention, fast_attention
from fdp.equal_rounding import (
    HALF_PRECISION_SUMS,
    WORKSPACE,
    WORKSPACES,
    compiler_options,
    limit_workspaces,
    whole_sums,
)
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fast.compiled import CompiledRunner
from fdp.gradients import timing
from fdp.gradients.plan import Method
from fdp.run.prepare_run import prepare
from fdp.run.training_run import steps
from fdp.types import FdpError, NotRepeatable
from tests.run.test_smaller_microbatches import CONFIG


@pytest.mark.parametrize("given", [None, ":4096:8"])
def test_importing_fdp_gives_cublas_a_small_workspace_unless_the_environment_says_otherwise(given):
    before = {name: value for name, value in os.environ.items() if name not in WORKSPACES}
    more = {} if given is None else {"CUBLAS_WORKSPACE_CONFIG": given}
    program = "import fdp, os, sys; print(os.environ['CUBLAS_WORKSPACE_CONFIG'], 'torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", program], env=before | more, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == [given or ":16:8", "False"], "expected torch not to be imported yet"


def test_all_workspaces_are_limited(monkeypatch):
    monkeypatch.setattr(fdp.equal_rounding, "RESERVED", {})
    for name in WORKSPACES:
        monkeypatch.delenv(name, raising=False)
    limit_workspaces()
    assert {name: os.environ[name] for name in WORKSPACES} == WORKSPACES == fdp.equal_rounding.RESERVED


def test_a_workspace_that_is_changed_later_is_refused(monkeypatch):
    with whole_sums(torch.device("cuda")):
        pass
    monkeypatch.setenv(WORKSPACE, ":8192:8")
    with pytest.raises(FdpError, match=r"as when fdp was imported, got :8192:8.*before the program starts"):
        whole_sums(torch.device("cuda")).__enter__()
    with whole_sums(torch.device("cpu")):
        pass


@pytest.mark.parametrize("given", [":16:8", ":4096:8"])
def test_the_workspace_stays_as_it_was_allocated(given, monkeypatch):
    """Torch reads its size again at every product: a larger one than was allocated is memory of others."""
    monkeypatch.setenv(WORKSPACE, given)
    for repeatable in (False, True):
        with fast_attention(torch.device("cuda"), repeatable=repeatable):
            assert os.environ[WORKSPACE] == given
        assert os.environ[WORKSPACE] == given


@pytest.mark.parametrize("given", [":0:0", ":4096:2:16:8", None])
def test_gradients_are_not_computed_twice_with_a_workspace_that_may_split_sums_anew(given, monkeypatch):
    if given is None:
        monkeypatch.delenv(WORKSPACE)
    else:
        monkeypatch.setenv(WORKSPACE, given)
    check = fast_attention(torch.device("cuda"), repeatable=True)
    with pytest.raises(FdpError, match=rf"expected :16:8 or :4096:8, got {given}.*unset it"), check:
        pass
    assert os.environ.get(WORKSPACE) == given


def test_an_operation_without_a_deterministic_algorithm_is_named():
    device, before = torch.device("cuda"), torch.are_deterministic_algorithms_enabled()
    says = r"leave out --repeatable.*torch says: some_op does not have a deterministic"
    with pytest.raises(NotRepeatable, match=says), fast_attention(device, repeatable=True):
        raise RuntimeError("some_op does not have a deterministic implementation")
    with pytest.raises(RuntimeError, match="another error"), fast_attention(device, repeatable=True):
        raise RuntimeError("another error")
    assert torch.are_deterministic_algorithms_enabled() == before


@pytest.mark.parametrize("given", [(True, True), (False, False), (False, True)])
def test_no_sum_is_rounded_to_half_precision_inside_and_the_setting_is_put_back(given):
    """Keep the second of two settings, whether sums may be split: torch forgets it if the first is set."""
    options = torch.backends.cuda.matmul

    def settings() -> list[tuple[bool, bool]]:
        return [(getattr(options, name), getattr(options, f"{name}_split_k")) for name in HALF_PRECISION_SUMS]

    before = settings()
    try:
        for name in HALF_PRECISION_SUMS:
            setattr(options, name, given)
        with whole_sums(torch.device("cuda")):
            assert settings() == [(False, given[1])] * 2
        assert settings() == [given] * 2
        with whole_sums(torch.device("cpu")):
            assert settings() == [given] * 2
    finally:
        for name, setting in zip(HALF_PRECISION_SUMS, before):
            setattr(options, name, setting)


def test_ranks_do_not_choose_the_order_of_a_sum_by_the_time_it_takes():
    """One device may; other backends have no such options."""
    from torch._inductor import config

    found = compiler_options("inductor", one_order=True)
    assert found is not None
    assert found["deterministic"] is True
    assert all(hasattr(config, name) for name in found)
    assert compiler_options("inductor", one_order=False) is None
    assert compiler_options("aot_eager", one_order=True) is None


def test_a_sharded_or_repeatable_execution_compiles_with_these_options():
    any_order, one_order = CompiledRunner(), CompiledRunner(one_order=True)
    assert (any_order.options, one_order.options) == (None, compiler_options("inductor", one_order=True))
    made = make_execution(compile=Compile.BLOCK).runner
    again = make_execution(compile=Compile.BLOCK, repeatable=True).runner
    assert isinstance(made, CompiledRunner)
    assert isinstance(again, CompiledRunner)
    assert (made.options, again.options) == (any_order.options, one_order.options)


def test_a_repeatable_run_computes_in_one_order_and_does_not_choose_by_times(monkeypatch):
    """Each is what makes the bits of a run its seed's: deterministic algorithms, and a plan without measured times."""
    ways = []

    @contextmanager
    def watched(device: torch.device, *, repeatable: bool) -> Iterator[None]:
        ways.append(repeatable)
        yield

    def measured(*_: object, **__: object) -> None:
        ways.append("timed")

    monkeypatch.setattr("fdp.step.fast_attention", watched)
    monkeypatch.setattr(timing, "is_worth_timing", lambda *_: True)
    monkeypatch.setattr(timing, "measure", measured)
    for repeatable in (False, True):
        run, state = prepare(dataclasses.replace(CONFIG, method=Method.AUTO, steps=1, repeatable=repeatable))
        list(steps(run, state))
        seen = set(ways)
        assert seen == ({True} if repeatable else {False, "timed"})
        ways.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("documents", [1, 3])
def test_repeatable_attention_has_the_same_bits_each_time(dtype, documents):
    shape, device = (4, 8, 1024, 64), torch.device("cuda")
    segments = None if documents == 1 else torch.randint(documents, (4, 1024), device=device).sort().values
    q, k, v, g = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    leaves = [leaf.requires_grad_() for leaf in (q, k, v)]
    with fast_attention(device, repeatable=True):
        first, *others = [torch.autograd.grad(attention(*leaves, segments=segments), leaves, g) for _ in range(20)]
    assert all(torch.equal(one, two) for other in others for one, two in zip(first, other))
