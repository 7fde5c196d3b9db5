"""Tiny models with every kind of sharing between leaves, and helpers that many test files use."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import pytest
import torch
import typer.main

if not torch.cuda.is_available():  # before anything imports Triton: kernel bodies then run on the CPU
    os.environ["TRITON_INTERPRET"] = "1"

from fdp_kernels import cpu_library
from hypothesis import settings

import fdp.privacy.curves
import fdp.report.figure
from fdp import ops, tree
from fdp.checks.model_checks import reference_gradients
from fdp.gradients.clipped_sum import clipped_sum, lazy_clipped_sum
from fdp.gradients.execution import Execution, Runner
from fdp.gradients.lazy_sum import evaluate
from fdp.gradients.per_sample import Stash
from fdp.model import Model, from_loss
from fdp.models import LANGUAGE, GPTConfig, LlamaConfig, cnn, gpt, llama, mlp
from fdp.types import Clip, ClippedSum, Flat, Tree
from tests.interpreter import speed_up_interpreter

speed_up_interpreter()
typer.main.get_command = cache(typer.main.get_command)  # else every command that a test runs reads all options again
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # also fills torch.empty with NaN: an unwritten output cannot pass
settings.register_profile("fdp", deadline=None, derandomize=True)
settings.load_profile("fdp")

SAMPLES = 3


@pytest.fixture(autouse=True, scope="session")
def _ledger_of_wide_fixtures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the runs of fixtures that serve a whole file, which begin before ``_own_ledger``, out of the home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FDP_LEDGER", str(tmp_path_factory.getbasetemp() / "ledger-of-fixtures"))
        yield


@pytest.fixture(autouse=True)
def _own_ledger(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep every test's ledger to itself: none writes to the home folder, or reads what another test spent."""
    monkeypatch.setenv("FDP_LEDGER", str(tmp_path_factory.getbasetemp() / f"ledger-{secrets.token_hex(4)}"))


@pytest.fixture(autouse=True)
def _unpainted_reports(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not draw ``report.png``, which takes a third of a small run; see the marker `paints`."""
    if request.node.get_closest_marker("paints") is None:
        monkeypatch.setattr(fdp.report.figure, "draw_report", lambda *_, **__: None)
        monkeypatch.setattr(fdp.report.figure, "save_png", lambda _, file: file.write(b"\x89PNG not painted"))


@pytest.fixture(params=["compiled", "torch"])
def cpu_loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run a test with the compiled loops, and again without them. Return True if they are used."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_library, "library", lambda: None)
    elif cpu_library.library() is None:
        pytest.skip("no C compiler")
    return request.param == "compiled"


@pytest.fixture(scope="module")
def shallow_nano() -> Iterator[None]:
    """Give gpt-nano one narrow layer instead of four in all tests of a file, if they look at files and words only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LANGUAGE, "gpt-nano", LANGUAGE["gpt-nano"]._replace(layers=1, width=32))
        yield


@contextmanager
def coarse_groups() -> Iterator[None]:
    """Compute the epsilon of groups on a grid of a quarter of the points: still an upper bound, under 1% higher."""
    curves = fdp.privacy.curves
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "_GROUP_POINTS", curves._GROUP_POINTS // 4)
        curves._group_epsilon.cache_clear()
        yield
        curves._group_epsilon.cache_clear()


def summed(stash: Stash, clip: Clip, *, lazy: bool = False) -> ClippedSum:
    """Return the clipped sum, evaluated at once or later; the stash can be summed again."""
    return evaluate((lazy_clipped_sum if lazy else clipped_sum)(stash.copy(), clip))


def share(execution: Execution, runner: Runner) -> Execution:
    """Return the execution with ``runner`` for its own, if it compiles blocks: each kind is then compiled once."""
    return execution._replace(runner=runner) if execution.runner.compiles else execution


class Case(NamedTuple):
    """A model, parameters and a microbatch of ``SAMPLES`` samples, all in float64."""

    model: Model
    params: Tree
    data: Tree


def cast(values: Tree, dtype: torch.dtype) -> Tree:
    """Floating-point leaves in another dtype."""
    return tree.map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, values)


def random_like(model: Model, *, std: float = 0.5, seed: int = 0) -> Tree:
    """Random values for every leaf, so that no zero bias or unit scale hides a mistake."""
    draw = torch.Generator().manual_seed(seed)
    flat = {
        path: std * torch.randn(spec.shape, dtype=torch.float64, generator=draw) for path, spec in model.leaves.items()
    }
    return tree.nest(flat)


def randn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _tokens(context: int, vocab_size: int) -> Tree:
    tokens = torch.randint(0, vocab_size, (SAMPLES, context + 1), generator=torch.Generator().manual_seed(2))
    tokens[:, 1] = tokens[:, 0]  # a token twice in a row: repeated rows, and an input that is also its target
    return {"tokens": tokens}


def _gpt(tied: bool) -> Case:
    model = gpt(GPTConfig(layers=2 if tied else 1, width=8, heads=2, context=5, vocab_size=7, tied=tied))
    return Case(model, random_like(model), _tokens(5, 7))


def _llama(tied: bool) -> Case:
    config = LlamaConfig(layers=1, width=8, heads=4, key_heads=2, hidden=9, context=5, vocab_size=7, tied=tied)
    model = llama(config)
    return Case(model, random_like(model), _tokens(5, 7))


def _images(*shape: int) -> Tree:
    return {"image": randn(SAMPLES, *shape), "label": torch.tensor([0, 3, 1])}


def _mlp() -> Case:
    model = mlp(widths=(6, 5, 7), classes=4)
    return Case(model, random_like(model), _images(2, 3))


def _cnn() -> Case:
    model = cnn(channels=(3, 4), side=5, classes=4)
    return Case(model, random_like(model), _images(1, 5, 5))


def _of(loss: Callable[[Tree, Tree], torch.Tensor], shapes: dict[str, tuple[int, ...]], data: Tree) -> Case:
    params = {path: 0.5 * randn(*shape, seed=len(path)) for path, shape in shapes.items()}
    return Case(from_loss(loss, params), params, data)


def _loop() -> Case:
    """One weight and one bias used three times in a row."""

    def loss(p: Tree, data: Tree) -> torch.Tensor:
        h = data["x"]
        for _ in range(3):
            h = ops.linear(h, p["weight"], p["bias"]).tanh()
        return h.square().sum((1, 2))

    return _of(loss, {"weight": (4, 4), "bias": (4,)}, {"x": randn(SAMPLES, 6, 4)})


def _scales() -> Case:
    """Scales and biases of several ranks, each used twice."""

    def loss(p: Tree, data: Tree) -> torch.Tensor:
        h = ops.scale(data["x"], p["scale"]).tanh()
        h = ops.add(ops.scale(h, p["scale"]), p["table"]).tanh()
        h = ops.add(ops.rms_norm(h, p["norm"]), p["table"])
        return ops.scale(ops.layer_norm(h, p["norm"], p["shift"]).square(), p["one"]).sum((1, 2))

    shapes = {"scale": (4,), "table": (6, 4), "norm": (4,), "shift": (4,), "one": (1, 1)}
    return _of(loss, shapes, {"x": randn(SAMPLES, 6, 4)})


def _all_ways() -> Case:
    """One leaf as an embedding table, as a linear weight and, expanded, as an addend."""

    def loss(p: Tree, data: Tree) -> torch.Tensor:
        h = ops.add(ops.embedding(data["ids"], p["w"]), p["w"]).tanh()
        return ops.linear(h, p["w"]).sin().sum((1, 2))

    ids = torch.tensor([[0, 1, 1, 4, 2], [3, 3, 3, 3, 3], [4, 0, 2, 1, 3]])
    return _of(loss, {"w": (5, 4)}, {"ids": ids})


def _convolutions() -> Case:
    """A grouped convolution weight used twice, with other options, and a one-dimensional one."""

    def loss(p: Tree, data: Tree) -> torch.Tensor:
        h = ops.conv2d(data["x"], p["kernel"], p["bias"], padding=1, groups=2).tanh()
        h = ops.conv2d(h, p["kernel"], p["bias"], stride=2, dilation=2, padding=2, groups=2).tanh()
        return ops.conv1d(h.flatten(2), p["line"], stride=2, padding=1).square().sum((1, 2))

    shapes = {"kernel": (4, 2, 3, 3), "bias": (4,), "line": (3, 4, 3)}
    return _of(loss, shapes, {"x": randn(SAMPLES, 4, 5, 6)})


CASES: dict[str, Callable[[], Case]] = {
    "gpt": lambda: _gpt(tied=True),
    "gpt-untied": lambda: _gpt(tied=False),
    "llama-tied": lambda: _llama(tied=True),
    "llama": lambda: _llama(tied=False),
    "mlp": _mlp,
    "cnn": _cnn,
    "loop": _loop,
    "scales": _scales,
    "all-ways": _all_ways,
    "convolutions": _convolutions,
}


@cache
def case_named(name: str) -> Case:
    return CASES[name]()


@cache
def reference_of(name: str) -> Flat:
    """Every sample's gradient of every leaf, in float64, by the definition."""
    return reference_gradients(*case_named(name))


@pytest.fixture(params=CASES)
def case_name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def case(case_name: str) -> Case:
    return case_named(case_name)


@pytest.fixture
def reference(case_name: str) -> Flat:
    return reference_of(case_name)
