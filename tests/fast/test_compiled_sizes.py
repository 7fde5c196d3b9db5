"""Compiled blocks for microbatches of several sizes: one compilation, for the largest, and the gradients of each."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from torch import nn

from fdp import keys, tree
from fdp.fast.compiled import CompiledRunner
from fdp.foreign import from_module
from fdp.gradients.execution import EAGER as PLAIN
from fdp.gradients.plan import Method, make_plan
from fdp.gradients.taps import tapped_vjp
from fdp.models import GPTConfig, gpt
from tests.conftest import Case, case_named, randn
from tests.fast.test_compiled import MODELS, as_tensors, assert_equal_trees, through
from tests.fast.test_compiled import data_of as data_of_model


class Counting:
    """A backend of torch.compile that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs: list[Any] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs.append(graph)
        return graph.forward


def runner_of(backend: Any) -> CompiledRunner:
    return CompiledRunner(backend=backend)  # a backend may be a function


def first(case: Case, size: int) -> Case:
    return case._replace(data=tree.map(lambda leaf: leaf[:size], case.data))


def case_of(name: str) -> Case:
    """Return six samples of a model, in float64."""
    model = MODELS[name]
    params = tree.map(lambda leaf: leaf.double(), model.init(keys.key(0)))
    data = tree.map(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, data_of_model(model, 6))
    return Case(model, params, data)


def assert_gradients(case: Case, blocks: CompiledRunner, *, private: bool) -> None:
    """Assert that compiled blocks have the gradients of eager ones."""
    model = case.model
    if private:
        plan = make_plan(*case, method=Method.GHOST_BK, dtype=torch.float64)
        kept = plan.trainable
        compiled = through(case, lambda i, b, w, c, d: blocks.tapped_vjp(b, w, c, d, plan.uses[i], kept))
        plain = through(case, lambda i, b, w, c, d: tapped_vjp(b, w, c, d, plan.uses[i], kept))
    else:
        compiled = through(case, lambda i, b, w, c, d: blocks.plain_vjp(b, w, c, d, model.trainable))
        plain = through(case, lambda i, b, w, c, d: PLAIN.plain_vjp(b, w, c, d, model.trainable))
    assert_equal_trees(as_tensors(compiled), as_tensors(plain))


@pytest.mark.parametrize("private", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", list(MODELS))
def test_smaller_microbatches_run_the_code_of_the_largest(name, private):
    case, backend = case_of(name), Counting()
    blocks = runner_of(backend)
    assert_gradients(case, blocks, private=private)
    compiled = len(backend.graphs)
    assert compiled == len(blocks.code)
    for size in (5, 4, 3, 2):
        assert_gradients(first(case, size), blocks, private=private)
    assert len(backend.graphs) == compiled


@pytest.mark.parametrize("frozen", [(), pytest.param(("blocks.0.*", "blocks.1.*"), marks=pytest.mark.long)])
def test_code_for_few_samples_does_not_serve_more(frozen):
    """It may have been tuned for few; that for more serves them from then on."""
    case, backend = case_of("gpt"), Counting()
    leaves = [path for path in case.model.leaves if any(fnmatch(path, pattern) for pattern in frozen)]
    case = case._replace(model=case.model._replace(frozen=frozenset(leaves)))
    blocks = runner_of(backend)
    counts = []
    for size in (3, 6, 3, 2, 6):
        assert_gradients(first(case, size), blocks, private=True)
        counts.append((len(backend.graphs), *(code.samples for code in blocks.code.values())))
    assert counts == [(3, 3, 3, 3), *[(6, 6, 6, 6)] * 4]
    calls = {code.run: 0 for code in blocks.code.values()}

    def counted(run: Any) -> Any:
        def call(*values: Any) -> Any:
            calls[run] += 1
            return run(*values)

        return call

    blocks.code = {alike: code._replace(run=counted(code.run)) for alike, code in blocks.code.items()}
    assert_gradients(first(case, 3), blocks, private=True)
    assert all(calls.values()), "expected three samples to run the code for six"


def test_a_first_call_that_fails_is_compiled_for_any_size_when_it_is_made_again():
    case, backend = case_of("gpt"), Counting()
    blocks, fails = runner_of(lambda graph, inputs: backend(graph, inputs) if not fails.pop() else None), [False] * 3
    fails[-1] = True
    with pytest.raises(Exception, match="did not return callable"):
        assert_gradients(case, blocks, private=True)
    fails[:] = [False] * 9
    for size in (6, 4, 2):
        assert_gradients(first(case, size), blocks, private=True)
    assert len(backend.graphs) == len(blocks.code) == 3


@pytest.mark.long
def test_code_that_other_settings_compile_again_is_for_any_size_too():
    """A step sets how products are rounded (``fdp.equal_rounding.whole_sums``), what came before it may not have."""
    case, backend, options = case_of("gpt"), Counting(), torch.backends.cuda.matmul
    blocks, before = runner_of(backend), options.allow_bf16_reduced_precision_reduction
    assert_gradients(case, blocks, private=True)
    try:
        options.allow_bf16_reduced_precision_reduction = not before
        for size in (6, 4, 2):
            assert_gradients(first(case, size), blocks, private=True)
    finally:
        options.allow_bf16_reduced_precision_reduction = before
    assert len(backend.graphs) == 2 * len(blocks.code) == 6


@pytest.mark.parametrize("private", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.long), 2])
def test_data_anywhere_in_its_batch_runs_the_same_code(size, private):
    """A microbatch is a part of a batch, and while a CUDA graph is recorded, which must not compile, a copy of it."""
    case, backend = case_of("gpt"), Counting()
    blocks = runner_of(backend)
    for start in (6 - size, 0, 1):
        part = tree.map(lambda leaf, at=start: leaf[at : at + size], case.data)
        assert_gradients(case._replace(data=part), blocks, private=private)
    columns = tree.map(lambda leaf: leaf[:size].mT.contiguous().mT, case.data)
    assert_gradients(case._replace(data=columns), blocks, private=private)
    assert len(backend.graphs) == len(blocks.code) == 3


SHORT, WHOLE = ((1, 2, 1), [3, 6, 6]), ((1, 2, 6, 1, 2), [3, 6, 9, 9, 9])


@pytest.mark.parametrize(("sizes", "graphs"), [SHORT, pytest.param(*WHOLE, marks=pytest.mark.long)])
@pytest.mark.parametrize("private", [True, pytest.param(False, marks=pytest.mark.long)])
def test_one_sample_runs_the_code_that_it_ran_before_larger_sizes_came(private, sizes, graphs):
    """Whatever has run once may be recorded as a CUDA graph, and is not compiled again then."""
    case, backend = case_of("gpt"), Counting()
    blocks = runner_of(backend)
    counts = []
    for size in sizes:
        assert_gradients(first(case, size), blocks, private=private)
        counts.append(len(backend.graphs))
    assert counts == graphs


@pytest.mark.long
def test_no_mark_stays_on_the_data():
    case = case_of("gpt")
    before = dict(case.data["tokens"].__dict__)
    assert_gradients(case, runner_of(Counting()), private=True)
    assert case.data["tokens"].__dict__ == before


@pytest.mark.long
def test_as_many_samples_as_tokens_or_as_other_sizes_are_still_told_apart():
    """Six samples of six tokens: only the dimension of samples varies."""
    model = gpt(GPTConfig(layers=1, width=6, heads=2, context=6, vocab_size=6))
    params = tree.map(lambda leaf: leaf.double(), model.init(keys.key(0)))
    tokens = torch.randint(0, 6, (6, 7), generator=torch.Generator().manual_seed(0))
    backend = Counting()
    blocks = runner_of(backend)
    for size in (6, 4, 2):
        assert_gradients(Case(model, params, {"tokens": tokens[:size]}), blocks, private=True)
    assert len(backend.graphs) == len(blocks.code) == 3


@pytest.mark.parametrize("private", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name",
    [
        "loop",
        pytest.param("scales", marks=pytest.mark.long),
        "all-ways",
        pytest.param("convolutions", marks=pytest.mark.long),
    ],
)
def test_rarer_uses_have_the_gradients_of_every_size(name, private):
    """Compare all sizes, whether they share code or not."""
    case = case_named(name)
    blocks = CompiledRunner(backend="aot_eager")
    for size in range(len(tree.leaves(case.data)[0]), 0, -1):
        assert_gradients(first(case, size), blocks, private=private)


class Flattened(nn.Module):
    """A linear map of all tokens of all samples as one matrix: no shape inside begins with the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = x.shape
        return self.map(x.reshape(samples * tokens, width)).tanh().reshape(samples, tokens * 4).square().sum(1)


def test_a_module_that_joins_samples_and_tokens_has_the_gradients_of_every_size():
    data = {"x": randn(6, 5, 3)}
    torch.manual_seed(0)
    model, params = from_module(Flattened().double(), example=data)
    blocks = CompiledRunner(backend="aot_eager")
    for size in (6, 5, 2):
        assert_gradients(first(Case(model, params, data), size), blocks, private=True)


class Mixed(nn.Module):
    """Layers of a transformer without attention, and a loss for every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(self.norm(self.up(x)).relu())).square().mean((1, 2))


def test_blocks_of_a_module_share_code_as_well():
    data, backend = {"x": randn(6, 5, 3)}, Counting()
    torch.manual_seed(0)
    model, params = from_module(Mixed().double(), example=data)
    blocks = runner_of(backend)
    for size in (6, 4, 3):
        assert_gradients(first(Case(model, params, data), size), blocks, private=True)
    assert len(backend.graphs) == len(blocks.code) == 1


class OneByOne(nn.Module):
    """A loop over samples: the number of them is fixed where it is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.map(x).square()
        return torch.stack([y[i].sum() for i in range(len(y))])


@pytest.mark.long
@pytest.mark.parametrize("private", [True, False])
def test_code_that_fixes_the_number_of_samples_is_compiled_for_as_many_sizes_as_there_are(private):
    """Torch compiles a function eight times at most."""
    data = {"x": randn(12, 5, 3)}
    torch.manual_seed(0)
    model, params = from_module(OneByOne().double(), example=tree.map(lambda leaf: leaf[:3], data))
    backend = Counting()
    blocks = runner_of(backend)
    for _ in range(2):
        for size in range(12, 1, -1):
            assert_gradients(first(Case(model, params, data), size), blocks, private=private)
    assert len(backend.graphs) == 11
