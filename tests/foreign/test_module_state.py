"""State that a forward leaves behind, and samples that change rows: refused, or without effect; the module is
unchanged.
"""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fdp
from benchmarks.zoo.hold import digest
from benchmarks.zoo.written import Grows
from fdp import optimizers, tree
from fdp.checks.model_checks import check_rows
from fdp.fast.compiled import CompiledRunner
from fdp.foreign.module import from_module
from fdp.foreign.module_state import ModuleBackup, state_of
from fdp.foreign.perturb_samples import paddings_of, perturb_samples
from fdp.foreign.uses import watch
from fdp.gradients.execution import EAGER, Execution
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import make_plan
from fdp.model import Model
from fdp.privacy import clipping
from fdp.types import FdpError, Tree
from tests.foreign_cases import Foreign, assert_exact, ids, randn, randomize_parameters

X = {"x": randn(4, 6, 5)}


def squares(out: Tensor, data: Any = None) -> Tensor:
    return out.reshape(len(out), -1).square().sum(1)


def norms_of(model: Model, params: Tree, data: Tree, blocks: CompiledRunner | None = None) -> Tensor:
    plan = make_plan(model, params, data, dtype=torch.float64)
    return per_sample_norms(model, params, data, plan=plan, execution=Execution(runner=blocks or EAGER))[1].total()


def norms_alone(module: nn.Module, data: dict[str, Tensor]) -> Tensor:
    """Return every sample's gradient norm, by a backward of a copy of the module."""
    module = copy.deepcopy(module)
    rows = []
    for b in range(len(next(iter(data.values())))):
        loss = squares(module(**{name: leaf[b : b + 1] for name, leaf in data.items()})).sum()
        slopes = torch.autograd.grad(loss, [leaf for leaf in module.parameters() if leaf.requires_grad])
        rows.append(torch.cat([slope.flatten() for slope in slopes]).norm())
    return torch.stack(rows)


# ---------------------------------------------------------------- state that is written


class Tagger(nn.Module):
    """A layer that stores something as ``write(self, h)`` does."""

    def __init__(self, write: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 4), nn.Linear(4, 2)
        self.last = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(4))
        self.plain, self.held = torch.zeros(4), {"one": [torch.zeros(4)]}
        self.write: Any = write

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).tanh()[:, -1]
        with torch.no_grad():
            self.write(self, h)
        return self.head(h)


def set_data(m: Any, h: Tensor) -> None:
    m.last.data = 0.9 * m.last.data + 0.1 * h.detach().mean(0)


def set_when_large(m: Any, h: Tensor) -> None:
    if x := h.abs().max() > 2:
        m.seen.data = h.mean(0) * x


def by_numpy(m: Any, h: Tensor) -> None:
    m.seen.numpy()[:] += 1.0


WRITES: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "frozen": (lambda m, h: m.last.copy_(h.mean(0)), r"last: the module changes this tensor .*\(by torch.Tensor.copy_"),
    "average": (lambda m, h: m.last.mul_(0.9).add_(0.1 * h.mean(0)), "last: the module changes this tensor"),
    "data": (set_data, r"last: the module changes this tensor .*\(by tensor.data = ...\)"),
    "through data": (lambda m, h: m.last.data.copy_(h.mean(0)), "last: the module changes this tensor"),
    "view of data": (lambda m, h: m.last.data[1:].mul_(2.0).add_(1.0), "last: the module changes this tensor"),
    "buffer": (lambda m, h: m.seen.add_(1.0), "seen: the module changes this tensor"),
    "view": (lambda m, h: m.seen[:2].fill_(1.0), "seen: the module changes this tensor"),
    "item": (lambda m, h: m.seen.__setitem__(0, 1.0), "seen: the module changes this tensor"),
    "out": (lambda m, h: torch.mean(h, 0, out=m.seen), "seen: the module changes this tensor"),
    "operator": (lambda m, h: torch.ops.aten.copy_(m.seen, h.mean(0)), "seen: the module changes this tensor"),
    "lists": (lambda m, h: torch._foreach_add_([m.seen], 1.0), "seen: the module changes this tensor"),
    "in place": (lambda m, h: F.relu(m.seen.sub_(1.0), inplace=True), "seen: the module changes this tensor"),
    "attribute": (lambda m, h: m.plain.copy_(h.mean(0)), "plain: the module changes this tensor"),
    "in a list": (lambda m, h: m.held["one"][0].copy_(h[0]), "held.one.0: the module changes this tensor"),
    "trained": (lambda m, h: m.head.bias.mul_(0.9), "head.bias: the module changes this tensor"),
    "trained data": (lambda m, h: m.head.weight.data.clamp_(-0.1, 0.1), "head.weight: the module changes this tensor"),
    "by numpy": (by_numpy, "seen: the module changes this tensor .*something that torch does not see"),
}


@pytest.mark.parametrize("materialize", [(), ("*",)], ids=["rules", "materialised"])
@pytest.mark.parametrize("name", WRITES)
def test_a_forward_that_writes_into_the_module_is_refused_and_leaves_it_as_it_was(name, materialize):
    write, message = WRITES[name]
    module = randomize_parameters(Tagger(write))
    before = digest(module)
    with pytest.raises(FdpError, match=message):
        from_module(module, loss=squares, example=X, materialize=materialize)
    assert digest(module) == before


def test_making_a_plan_refuses_a_write_without_any_check():
    model, params = from_module(randomize_parameters(Tagger(set_data)), loss=squares, check=False)
    with pytest.raises(FdpError, match="last: the module changes this tensor"):
        norms_of(model, params, X)


def test_a_write_that_depends_on_the_data_is_refused_when_it_happens():
    module: Any = randomize_parameters(Tagger(set_when_large))
    model, params = from_module(module, loss=squares, example=X, materialize=("*",))
    before = digest(module)
    module.layer.bias.data.fill_(9.0)
    module.head.weight.data.mul_(1.0)
    assert norms_of(model, params, X).isfinite().all()  # tanh: never above 1
    module.write = lambda m, h: m.seen.add_(h[0])
    with pytest.raises(FdpError, match="seen: the module changes this tensor"):
        norms_of(model, params, X)
    assert digest(module) != before
    assert module.seen.eq(0).all()


@pytest.mark.slow
def test_replacing_tensor_data_is_refused_and_does_not_crash():
    program = (
        "import torch, fdp\nfrom torch import nn\n"
        "class M(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.l, self.mem = nn.Linear(5, 5), nn.Parameter(torch.zeros(5), requires_grad=False)\n"
        "    def forward(self, x):\n"
        "        h = self.l(x)\n"
        "        self.mem.data = 0.9 * self.mem.data + 0.1 * h.detach().mean((0, 1))\n"
        "        return h.tanh()\n"
        "x = torch.randn(4, 6, 5).double()\n"
        "fdp.from_module(M().double(), loss=lambda o, d: o.square().sum((1, 2)), example={'x': x})\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert found.returncode == 1
    assert "FdpError: mem: the module changes this tensor when it is called (by tensor.data = ...)" in found.stderr


def test_an_embedding_with_max_norm_is_refused_and_the_remedy_changes_no_row_at_learning_rate_0():
    module: Any = nn.Sequential(nn.Embedding(13, 4, max_norm=1.0), nn.Flatten(), nn.Linear(8, 2))
    with torch.no_grad():
        module[0].weight.mul_(5)
    before = digest(module)
    example = {"input": torch.tensor([[3, 3], [4, 4]])}
    every: list[dict[str, Any]] = [{}, {"materialize": ("*",)}, {"frozen": ("0.weight",)}, {"check": False}]
    for options in every:
        with pytest.raises(FdpError, match=r"0: max_norm=1.0 renormalises every row .*Set max_norm=None"):
            from_module(module, loss=squares, example=example, **options)
    assert digest(module) == before
    module[0].max_norm = None
    model, params = from_module(module, loss=squares, example=example)
    data = {"input": torch.tensor([[7, 9]] * 20)}
    sampling = fdp.poisson(20, expected_batch_size=10)
    mechanism, optimizer = fdp.Mechanism(sampling, clipping.flat(max_norm=1.0), 1.0), optimizers.sgd(0.0)
    batch = fdp.sample_batch(data, sampling, fdp.key(0), step=0, microbatch_size=4)
    plan = make_plan(model, params, {"input": batch.data["input"][0]})
    step = fdp.make_train_step(model, optimizer, mechanism=mechanism, plan=plan)
    state = fdp.init_state(model, params, optimizer, mechanism)
    weights = {path: leaf.clone() for path, leaf in tree.flatten(state.params).items()}
    state, _ = step(state, batch, fdp.key(1))
    assert all(torch.equal(leaf, weights[path]) for path, leaf in tree.flatten(state.params).items())


# ---------------------------------------------------------------- attributes that change


class Tables(nn.Module):
    """Tables in a dictionary, by length; and the last activations in an object, which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.tables, self.box = nn.Linear(6, 6), {}, SimpleNamespace()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] not in self.tables:
            self.tables[x.shape[1]] = torch.arange(1.0, 1.0 + x.shape[1])[:, None].double()
        self.box.last = self.l(x) * self.tables[x.shape[1]]
        return self.box.last.tanh()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", [Grows, Tables])
def test_a_table_that_grows_is_exact_and_the_module_keeps_its_own(kind, compiled):
    module = randomize_parameters(kind())
    before = digest(module)
    model, params = from_module(module, loss=squares, example={"x": randn(4, 6, 6)})
    for tokens in (9, 4, 11):
        data = {"x": randn(3, tokens, 6, seed=tokens)}
        norms = norms_of(model, params, data, CompiledRunner(backend="aot_eager") if compiled else None)
        torch.testing.assert_close(norms, norms_alone(module, data))
        assert type(norms) is Tensor
        assert digest(module) == before
    assert type(module(data["x"])) is Tensor


class Stacked(nn.Module):
    """Layers whose tables grow, taken one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Grows() for _ in range(2)]), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x.tanh())


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_layers_whose_tables_grow_are_exact_as_blocks(compiled):
    module = randomize_parameters(Stacked())
    before = digest(module)
    example, data = {"x": randn(4, 6, 6)}, {"x": randn(3, 9, 6)}
    model, params = from_module(module, loss=squares, example=example, blocks="layers.*")
    norms = norms_of(model, params, data, CompiledRunner(backend="aot_eager") if compiled else None)
    torch.testing.assert_close(norms, norms_alone(module, data))
    assert digest(module) == before


@functools.cache
def table(length: int) -> Tensor:
    return torch.arange(1.0, 1.0 + length)[:, None].double()


class Elsewhere(nn.Module):
    """A table in a cache outside of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) * table(x.shape[1])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch, of a fake tensor
def test_a_table_outside_the_module_is_exact_or_refused():
    table.cache_clear()
    module = randomize_parameters(Elsewhere())
    model, params = from_module(module, loss=squares, example={"x": randn(4, 6, 6)})
    torch.testing.assert_close(
        norms_of(model, params, {"x": randn(3, 6, 6)}), norms_alone(module, {"x": randn(3, 6, 6)})
    )
    with pytest.raises(
        FdpError, match="Elsewhere: expected a result with values, got one without: the module keeps a table outside"
    ):
        norms_of(model, params, {"x": randn(3, 8, 6)})
    table.cache_clear()


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.memory = nn.Linear(6, 6), torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x) + self.memory
        self.memory = h.detach().mean((0, 1))
        return h


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(x) * numpy.random.uniform(1, 2)


def test_state_that_the_next_call_reads_is_refused_and_restored():
    module: Any = randomize_parameters(Remembers())
    with pytest.raises(
        FdpError,
        match=r"got other losses from a second call with the same samples: .* stores something in \['memory'\]",
    ):
        from_module(module, loss=squares, example={"x": randn(4, 3, 6)})
    assert module.memory.eq(0).all()
    with pytest.raises(
        FdpError, match="got other losses from a second call with the same samples: the module draws random numbers"
    ):
        from_module(randomize_parameters(Draws()), loss=squares, example={"x": randn(4, 3, 6)})


class Undecided(nn.Module):
    """Draws a number to decide whether to skip a layer, and in eval() does not ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        chance = torch.rand([])
        return x if self.training and chance < 0.1 else self.l(x)


def test_an_unused_random_number_is_allowed_and_not_drawn():
    module, before = randomize_parameters(Undecided()), torch.get_rng_state()
    assert_exact(Foreign(module, {"x": randn(3, 6)}, {"loss": squares}))
    assert_exact(Foreign(module, {"x": randn(3, 6)}, {"loss": squares}), blocks=CompiledRunner(backend="aot_eager"))
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(FdpError, match=r"torch.rand: expected a forward that gives the same result twice"):
        from_module(module.train(), loss=squares, example={"x": randn(3, 6)})


def test_everything_that_a_module_holds_is_recorded_and_restored():
    module: Any = Tagger(lambda m, h: None)
    before, kept = digest(module), ModuleBackup(module)
    assert {"last", "seen", "plain", "held.one.0", "layer.weight"} <= set(state_of(module).tensors)
    module.plain, module.new, module.held["two"] = torch.ones(4), 3, []
    module.held["one"].append(4)
    module.register_buffer("more", torch.zeros(2))
    module.layer.weight.data.add_(1.0)
    module.seen.fill_(float("nan"))
    module.eval()
    assert set(kept.restore_values()) == {"layer.weight", "seen"}
    assert digest(module) == before


# ---------------------------------------------------------------- samples in another order


class LongestFirst(nn.Module):
    """Sorts a batch by length and puts it back in order: no sample sees another, but rows are moved."""

    def __init__(self, padding: int = 0) -> None:
        super().__init__()
        self.padding = padding
        self.e, self.h, self.o = nn.Embedding(13, 8, padding_idx=padding), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = (x != self.padding).sum(1).argsort(descending=True, stable=True)
        h = self.h(self.e(self.ordered(x, order))).tanh().sum(1)
        return self.o(h[order.argsort()])

    def ordered(self, x: Tensor, order: Tensor) -> Tensor:
        return x[order]


class ByMatrix(LongestFirst):
    def ordered(self, x: Tensor, order: Tensor) -> Tensor:
        return (F.one_hot(order, len(x)).double() @ x.double()).long()


class BySelection(LongestFirst):
    def ordered(self, x: Tensor, order: Tensor) -> Tensor:
        return x.index_select(0, order)


class ByGathering(LongestFirst):
    def ordered(self, x: Tensor, order: Tensor) -> Tensor:
        return x.gather(0, order[:, None].expand_as(x))


EQUAL = {"x": ids(4, 6, below=12)}
ORDER = "e.weight: used on samples in an order that the data decide"


@pytest.mark.parametrize("kind", [LongestFirst, ByMatrix, BySelection, ByGathering])
def test_samples_reordered_by_data_are_refused_whatever_the_example(kind):
    # No number of the example stands for padding: every sample that could be made up of it is as long.
    module = randomize_parameters(kind(padding=12))
    with pytest.raises(FdpError, match=ORDER):
        from_module(module, loss=squares, example=EQUAL)
    model, params = from_module(module, loss=squares, check=False)
    with pytest.raises(FdpError, match=ORDER):
        make_plan(model, params, EQUAL)


def test_reordered_samples_are_exact_if_materialised():
    module, data = randomize_parameters(LongestFirst()), {"x": ids(4, 6)}
    data["x"][0, 1:], data["x"][1, 3:] = 0, 0
    model, params = from_module(module, loss=squares, example=EQUAL, materialize=("e.weight",))
    torch.testing.assert_close(norms_of(model, params, data), norms_alone(module, data))


@pytest.mark.parametrize("padding", [0, 12])
def test_a_reordering_that_operations_do_not_show_is_found_by_perturbed_samples(padding, monkeypatch):
    monkeypatch.setattr(watch, "note_reordering", lambda *_: None)
    with pytest.raises(FdpError, match=r"to have the same norm in a batch|changed another sample"):
        from_module(randomize_parameters(LongestFirst(padding)), loss=squares, example=EQUAL)


def test_a_reordering_that_only_a_real_microbatch_shows_is_refused_at_the_first_step(monkeypatch):
    monkeypatch.setattr(watch, "note_reordering", lambda *_: None)
    module = randomize_parameters(LongestFirst(12))
    model, params = from_module(module, loss=squares, check=False)  # never looked at
    data = {"x": EQUAL["x"].repeat(3, 1)}
    data["x"][7, 2:], data["x"][8, 4:] = 12, 12  # nothing to be seen in the first samples
    sampling = fdp.poisson(12, expected_batch_size=11.99)
    mechanism, optimizer = fdp.Mechanism(sampling, clipping.flat(max_norm=1.0), 1.0), optimizers.sgd(0.1)
    batch = fdp.sample_batch(data, sampling, fdp.key(0), step=0, microbatch_size=12)
    plan = make_plan(model, params, {"x": batch.data["x"][0]}, dtype=torch.float64)
    step = fdp.make_train_step(model, optimizer, mechanism=mechanism, plan=plan)
    with pytest.raises(FdpError, match="changing only the rows of some samples changed the loss of another"):
        step(fdp.init_state(model, params, optimizer, mechanism), batch, fdp.key(1))


def test_samples_in_their_own_rows_pass(monkeypatch):
    monkeypatch.setattr(watch, "note_reordering", lambda *_: None)
    model, params = from_module(randomize_parameters(LongestFirst(12)), loss=squares, check=False)
    check_rows(model, params, EQUAL, plan=make_plan(model, params, EQUAL, dtype=torch.float64))
    unequal = {"x": EQUAL["x"].clone()}
    unequal["x"][0, 3:] = 12
    with pytest.raises(FdpError, match="changed the loss of another"):
        check_rows(model, params, unequal, plan=make_plan(model, params, unequal, dtype=torch.float64))


def test_selecting_a_token_of_each_sample_is_no_reordering():
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.o = nn.Embedding(13, 8, padding_idx=0), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            last = (x != 0).sum(1).clamp_min(1) - 1
            h = self.e(x).tanh()
            return self.o(h[torch.arange(len(x)), last] + h.gather(1, last[:, None, None].expand(-1, 1, 8))[:, 0])

    data = {"x": ids(4, 6)}
    data["x"][1, 2:] = 0
    assert_exact(Foreign(randomize_parameters(Last()), data, {"loss": squares, "check": True}))


def test_perturbed_samples_have_unequal_lengths_and_scales():
    data = {"x": ids(4, 6), "mask": torch.ones(4, 6, dtype=torch.long), "v": randn(4, 6, 2), "label": torch.arange(4)}
    found = perturb_samples(data, (0, 12))
    cut, scaled = found[:8], found[8:]
    lengths = [int(sample.data["mask"].sum()) for sample in cut]
    assert sorted(set(lengths)) == [1, 2, 3, 4]
    assert any(bool((sample.data["x"] == 12).any()) for sample in cut)
    assert all(int(sample.data["label"]) == b % 4 for b, sample in enumerate(found))
    assert len({round(float(s.data["v"].norm() / data["v"][b].norm()), 6) for b, s in enumerate(scaled)}) == 4
    assert paddings_of(LongestFirst(12)) == (0, 12)


# ---------------------------------------------------------------- what is refused at the door


def traced() -> Any:
    return torch.jit.trace(nn.Linear(6, 5), torch.zeros(1, 6))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.ReLU()), "Sequential: expected a module with parameters to train, got"),
        (
            lambda: nn.Linear(6, 5).requires_grad_(False),
            "Linear: expected a parameter to train, got 2 that are all fro",
        ),
        (lambda: nn.DataParallel(nn.Linear(6, 5)), "DataParallel: expected the module itself.*give module.module"),
        (lambda: torch.compile(nn.Linear(6, 5), backend="eager"), "expected the module itself.*give module._orig_mod"),
        (
            lambda: nn.ModuleList([traced()]),
            "0: expected an nn.Module in Py",
        ),
        (lambda: nn.LazyLinear(5), "weight: expected a parameter with a shape, got a lazy one; call the module once"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_unsupported_modules_are_refused_before_anything_runs(make, message):
    with pytest.raises(FdpError, match=message):
        from_module(make(), loss=squares, example={"input": randn(4, 6)}, call=lambda m, d: m(d["input"]))


@pytest.mark.parametrize("samples", [0, 1])
def test_an_example_of_fewer_than_two_samples_is_refused(samples):
    with pytest.raises(FdpError, match=f"example: expected a batch of at least 2 samples, .* got {samples}"):
        from_module(nn.Linear(6, 5), loss=squares, example={"input": torch.zeros(samples, 6)})


def test_a_plan_for_no_samples_is_refused():
    model, params = from_module(nn.Linear(6, 5), loss=squares, example={"input": torch.randn(4, 6)})
    with pytest.raises(FdpError, match="microbatch: expected at least one sample, got none"):
        make_plan(model, params, {"input": torch.zeros(0, 6)})


# ---------------------------------------------------------------- dtypes, activations in place


class Layers(nn.Module):
    """A stack whose layers own all parameters: nothing comes before or after them that has any."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)])

    def forward(self, input: Tensor) -> Tensor:
        for layer in self.layers:
            input = layer(input)
        return input


@pytest.mark.parametrize("given", [torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_layers_that_own_all_parameters_are_exact_in_every_dtype(dtype, given):
    module, data = Layers().to(dtype), {"input": randn(4, 6).to(given)}
    model, params = from_module(module, loss=squares, example=data, blocks="layers.*")
    plan = make_plan(model, params, data, dtype=dtype)
    norms = per_sample_norms(model, params, data, plan=plan)[1].total()
    expected = norms_alone(module, {"input": data["input"].to(dtype)}).double()
    torch.testing.assert_close(norms.double(), expected, rtol=3e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_in_place_activations_are_exact(compiled):
    layers = [nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 5, bias=False), nn.LeakyReLU(inplace=True)]
    foreign = Foreign(
        randomize_parameters(nn.Sequential(*layers, nn.Linear(5, 3))), {"input": randn(4, 6)}, {"loss": squares}
    )
    assert_exact(foreign, blocks=CompiledRunner(backend="aot_eager") if compiled else None)


def test_an_input_that_is_overwritten_after_its_use_is_refused():
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.b(h) + h.mul_(2.0)

    model, params = from_module(randomize_parameters(Overwrites()), loss=squares, check=False)
    with pytest.raises(FdpError, match=r"b.weight: its input is written in place after it was used"):
        make_plan(model, params, {"x": randn(4, 6)})
