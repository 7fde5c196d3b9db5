"""Less common uses of parameters: exact against single-sample backwards, by every form of the rule, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdp.fast.compiled import CompiledRunner
from fdp.foreign.module import from_module
from fdp.foreign.stack.experts import routed_product
from fdp.foreign.uses.rarer_products import BILINEAR
from fdp.foreign.uses.routing import DIGIT, ROUTED, pack, unpack
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.gradients.rules import check_rule
from fdp.ops import CONV_TRANSPOSE1D, CONV_TRANSPOSE2D, CONV_TRANSPOSE3D
from fdp.types import FdpError
from tests.foreign_cases import CASES as MODULES
from tests.foreign_cases import Foreign, Probe, assert_exact, ids, next_token, probe, randn, randomize_parameters

slow = pytest.mark.slow
ROW, ROWS, LINE, PLANE, CUBE = randn(3, 4), randn(3, 5, 4), randn(3, 4, 7), randn(3, 4, 6, 6), randn(3, 4, 3, 4, 3)
IDS = ids(3, 5, below=9)
IDS[:2, 1] = 3  # padding


class Using(nn.Module):
    """One module, used as ``run`` says."""

    def __init__(self, part: nn.Module, run: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        self.part, self.run = part, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.part, x)


def squares(out: Tensor, _: Any) -> Tensor:
    return out.reshape(len(out), -1).square().sum(1)


def using(part: nn.Module, x: Tensor, run: Callable[[Any, Tensor], Tensor] = lambda part, x: part(x)) -> Foreign:
    return Foreign(randomize_parameters(Using(part, run)), {"x": x}, {"loss": squares})


def of(run: Callable[[Any, Tensor], Tensor], x: Tensor, **shapes: tuple[int, ...]) -> Foreign:
    return probe(run, {"x": x}, **shapes)


def twice(cell: Any, x: Tensor) -> Tensor:
    state = cell(x[:, 1], cell(x[:, 0]))
    return state if isinstance(state, Tensor) else torch.cat(state, -1)


def gates(m: Probe, x: Tensor, **scales: Any) -> Tensor:
    """Heads with matrices and biases of their own, tokens of all samples in a row, as RecurrentGemma has them."""
    heads = x.reshape(-1, 2, 2).permute(1, 0, 2)
    return torch.baddbmm(m.b[:, None], heads, m.w, **scales).permute(1, 0, 2).reshape(*x.shape[:-1], 6)


def choice(x: Tensor) -> Tensor:
    return (x.reshape(-1, x.shape[-1])[:, 0] > 0).long() + (x.reshape(-1, x.shape[-1])[:, 1] > 1).long()


CASES: dict[str, tuple[Callable[[], Foreign], tuple[str, ...]]] = {
    "conv_transpose1d": (
        lambda: using(nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1), LINE),
        ("conv_transpose1d", "expanded"),
    ),
    "conv_transpose1d, padded by more than a stride": (
        lambda: using(nn.ConvTranspose1d(4, 2, 2, stride=1, dilation=3, padding=2, output_padding=2), LINE),
        ("conv_transpose1d", "expanded"),
    ),
    "conv_transpose2d": (
        lambda: using(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, dilation=2), PLANE),
        ("conv_transpose2d", "expanded"),
    ),
    "conv_transpose3d": (lambda: using(nn.ConvTranspose3d(4, 2, 2, bias=False), CUBE), ("conv_transpose3d",)),
    "conv_transpose of a made weight": (
        lambda: of(lambda m, x: F.conv_transpose2d(x, m.w * 2, m.b.exp()), PLANE, w=(4, 3, 2, 2), b=(3,)),
        ("expanded", "expanded"),
    ),
    "bag, mean": (lambda: using(nn.EmbeddingBag(9, 4, padding_idx=3), IDS), ("embedding",)),
    "bag, sum": (lambda: using(nn.EmbeddingBag(9, 4, mode="sum", padding_idx=3), IDS), ("embedding",)),
    "bag, max": (lambda: using(nn.EmbeddingBag(9, 4, mode="max", padding_idx=3), IDS), ("embedding",)),
    "bilinear": (
        lambda: using(nn.Bilinear(4, 4, 3), ROWS, lambda part, x: part(x, x.tanh())),
        ("bilinear", "expanded"),
    ),
    "bilinear of a made weight": (
        lambda: of(lambda m, x: F.bilinear(x, x, m.w.exp()), ROWS, w=(2, 4, 4)),
        ("expanded",),
    ),
    "lstm cell": (lambda: using(nn.LSTMCell(4, 5), ROWS, twice), ("linear", "expanded") * 2 + ("linear",) * 2),
    "gru cell": (lambda: using(nn.GRUCell(4, 5), ROWS, twice), ("linear", "expanded") * 2 + ("linear",) * 2),
    "rnn cell": (
        lambda: using(nn.RNNCell(4, 5, nonlinearity="relu"), ROWS, twice),
        ("linear", "expanded") * 2 + ("linear",) * 2,
    ),
    "rnn cell without biases": (lambda: using(nn.RNNCell(4, 5, bias=False), ROWS, twice), ("linear",) * 4),
    "aten.linear": (
        lambda: of(lambda m, x: torch.ops.aten.linear(x, m.w, m.b), ROWS, w=(3, 4), b=(3,)),
        ("linear", "expanded"),
    ),
    "aten.addmm": (
        lambda: of(lambda m, x: torch.ops.aten.addmm.default(m.b, x, m.w), ROW, w=(4, 3), b=(3,)),
        ("matmul", "expanded"),
    ),
    "aten.embedding": (
        lambda: probe(lambda m, x: torch.ops.aten.embedding(m.w, x, 3), {"ids": IDS}, w=(9, 4)),
        ("embedding",),
    ),
    "padded weight": (lambda: of(lambda m, x: F.linear(x, F.pad(m.w, (0, 1, 2, 0))), ROWS, w=(3, 3)), ("expanded",)),
    "constant ids": (lambda: of(lambda m, x: x + m.w[torch.arange(x.shape[1])], ROWS, w=(9, 4)), ("expanded",)),
    "property": (lambda: of(lambda m, x: x + m.w.T, ROWS, w=(4, 1)), ("expanded",)),
    "baddbmm": (lambda: of(gates, ROWS, w=(2, 2, 3), b=(2, 3)), ("experts", "expanded")),
    "baddbmm, scaled": (
        lambda: of(lambda m, x: gates(m, x, beta=0.5, alpha=2.0), ROWS, w=(2, 2, 3), b=(2, 3)),
        ("experts", "expanded"),
    ),
    "baddbmm of scores": (
        lambda: of(lambda m, x: torch.baddbmm(m.b.expand(len(x), 5, 5), x, x.mT, beta=0.5), ROWS, b=(5, 5)),
        ("expanded",),
    ),
    "addmm, scaled": (
        lambda: of(lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0), ROW, w=(4, 3), b=(3,)),
        ("matmul", "expanded"),
    ),
    "experts by a copy per token": (
        lambda: of(
            lambda m, x: torch.bmm(m.w[choice(x)], x.reshape(-1, 4, 1)).reshape(*x.shape[:2], 2), ROWS, w=(3, 2, 4)
        ),
        ("routed",),
    ),
    "experts by a copy per token, turned": (
        lambda: of(
            lambda m, x: (x.reshape(-1, 1, 4) @ m.w[choice(x)].transpose(1, 2)).reshape(*x.shape[:2], 2),
            ROWS,
            w=(3, 2, 4),
        ),
        ("routed",),
    ),
    "an expert per sample": (lambda: of(lambda m, x: x @ m.w[(x[:, 0, 0] > 0).long()], ROWS, w=(2, 4, 3)), ("routed",)),
    "routed": (
        lambda: of(
            lambda m, x: routed_product(x.reshape(-1, 4), choice(x), m.w).reshape(*x.shape[:2], 2), ROWS, w=(3, 2, 4)
        ),
        ("routed",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rarer_uses_are_exact(name):
    case, rules = CASES[name]
    foreign = case()
    made = foreign.model()
    plan = make_plan(*made, foreign.data, dtype=torch.float64)
    assert tuple(use.rule for uses in plan.uses for use in uses) == rules
    for method in (Method.AUTO, Method.GHOST_BK):
        assert_exact(foreign, method, made=made)


@slow
@pytest.mark.parametrize("name", CASES)
def test_rarer_uses_are_checked_by_from_module_and_exact_by_every_method(name):
    foreign = CASES[name][0]()
    made = foreign.model(check=True)
    for method in (Method.GHOST, Method.FLASH, Method.MATERIALIZE):
        assert_exact(foreign, method, made=made)


@slow
@pytest.mark.parametrize("name", CASES)
def test_rarer_uses_are_exact_if_compiled_or_refused(name):
    foreign, blocks = CASES[name][0](), CompiledRunner(backend="aot_eager")
    if name in ("padded weight", "property"):
        with pytest.raises(FdpError, match="does not show"):
            assert_exact(foreign, blocks=blocks)
    else:
        assert_exact(foreign, blocks=blocks)


CONV = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 3, "output_padding": 2}, {"padding": 1, "groups": 2}, {"dilation": 2, "output_padding": 1}],
)
def test_transposed_convolutions_agree_with_vmap_grad(options):
    options = CONV | options
    out = 6 // options["groups"]
    check_rule(CONV_TRANSPOSE1D, randn(2, 4, 5), randn(4, out, 3), tolerance=1e-12, **options)
    check_rule(CONV_TRANSPOSE2D, randn(2, 4, 5, 3), randn(4, out, 3, 2), tolerance=1e-12, **options)
    check_rule(CONV_TRANSPOSE3D, randn(2, 4, 3, 3, 3), randn(4, out, 2, 2, 2), tolerance=1e-12, **options)


def test_bilinear_forms_agree_with_vmap_grad():
    check_rule(BILINEAR, randn(3, 5, 6), randn(4, 2, 3), tolerance=1e-12)


@pytest.mark.parametrize("transposed", [True, False])
def test_routed_experts_agree_with_vmap_grad(transposed):
    packed = pack(randn(3, 7, 4), ids(3, 7, below=5))
    check_rule(ROUTED, packed, randn(5, 4, 6) if transposed else randn(5, 6, 4), tolerance=1e-12, transposed=transposed)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_expert_numbers_are_packed_exactly(dtype):
    numbers = torch.arange(DIGIT**2 - 1).view(3, -1)
    x, back = unpack(pack(torch.randn(*numbers.shape, 2).to(dtype), numbers))
    assert torch.equal(back, numbers)
    assert x.shape == (*numbers.shape, 2)


def test_a_nan_token_affects_only_the_norm_of_its_sample():
    """A token that is not a number makes its own sample's norm not a number, and no other's."""
    x, numbers = randn(2, 3, 4), torch.tensor([[0, 1, 1], [1, 1, 0]])
    x[0, 0] = torch.nan
    record: Any = ROUTED.record(pack(x, numbers), randn(2, 3, 5), (2, 5, 4), transposed=False)
    norms = (record.left.transpose(-1, -2) @ record.right).flatten(1).square().sum(1)
    assert norms[0].isnan()
    assert norms[1].isfinite()


class Grouped(nn.Module):
    """Tokens of all samples sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.w = nn.Parameter(torch.randn(2, 16, 16, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 16)
        order = (rows[:, 0] > 0).long().sort(stable=True)
        ends = torch.stack([(order.values <= e).sum() for e in range(2)]).int()
        y = F.grouped_mm(rows[order.indices], self.w, offs=ends)
        return torch.zeros_like(y).index_copy(0, order.indices, y).reshape(x.shape)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_grouped_products_are_refused_and_materialised():
    data = {"x": torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(1))}
    with pytest.raises(FdpError, match=r"w: used by .*grouped_mm.*materialize=\('w',\)"):
        from_module(Grouped(), loss=squares, example=data)
    model, params = from_module(Grouped(), loss=squares, example=data, materialize=("w",))
    plan = make_plan(model, params, data)
    squared = per_sample_norms(model, params, data, plan=plan)[1].squared["w"]
    for b in range(3):
        module = Grouped()
        squares(module(data["x"][b : b + 1]), None).sum().backward()
        assert module.w.grad is not None
        torch.testing.assert_close(squared[b].sqrt(), module.w.grad.double().norm())


def test_dora_adapters_are_exact():
    """DoRA: Liu et al. 2024, arXiv 2402.09353."""
    peft = pytest.importorskip("peft")
    language = MODULES["llama"]()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], use_dora=True)
    module = randomize_parameters(peft.get_peft_model(language.module, config))
    options = {"loss": next_token, "call": lambda module, data: module(input_ids=data["input_ids"])}
    foreign = Foreign(module, language.data, options)
    assert_exact(foreign, made=foreign.model(check=True))


@pytest.mark.parametrize("training", [True, False])
def test_gradient_checkpointing_of_a_module_is_disabled(training):
    language = MODULES["llama"]()
    module: Any = language.module
    module.gradient_checkpointing_enable()
    module.train(training)
    made = language.model(check=training)
    assert_exact(language, made=made)
    assert module.model.layers[0].gradient_checkpointing, "the module itself is left as it was"
