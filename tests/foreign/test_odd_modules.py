"""Odd modules: norms and sums are exact, or an error names what is odd; never another function in silence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fdp.fast.compiled import CompiledRunner
from fdp.foreign.module import from_module
from fdp.foreign.stack.fast_paths import reference_module
from fdp.foreign.uses import dropout
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.keys import key
from fdp.types import FdpError
from tests.foreign_cases import (
    LABEL,
    Foreign,
    Probe,
    assert_exact,
    ids,
    labels,
    next_token,
    probe,
    randn,
    randomize_parameters,
)

X = {"x": randn(3, 5, 4)}
IDS = {"ids": ids(3, 5, below=7)}


def squares(out: Tensor, data: Any = None) -> Tensor:
    return out.reshape(len(out), -1).square().sum(1)


def heads(x: Tensor) -> Tensor:
    return x.unsqueeze(1).expand(-1, 2, -1, -1)


def three(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, x, x


def by_out(m: Probe, x: Tensor) -> Tensor:
    rows = torch.empty(len(x) * 5, 4, dtype=torch.float64)
    with torch.no_grad():
        torch.mul(x.reshape(-1, 4), 2.0, out=rows)
    return F.linear(rows, m.w).tanh().view(len(x), 5, -1)


def by_index_put(m: Probe, x: Tensor) -> Tensor:
    rows = torch.zeros(len(x) * 5, 4, dtype=torch.float64)
    torch.index_put_(rows, (torch.arange(len(x) * 5),), x.reshape(-1, 4))
    return F.linear(rows, m.w).tanh().view(len(x), 5, -1)


def flattened_constant(m: Probe, x: Tensor) -> Tensor:
    kept = torch.arange(len(x) * 5).unsqueeze(1) % 5 > 1
    return torch.where(kept, x.reshape(-1, 4), m.g).mul(m.g).view(x.shape).sin()


class LearnedMask(nn.Module):
    """Attention whose mask is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.mask = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]


def normalised_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    parametrizations.weight_norm(layer.linear1)
    return layer


EXACT: dict[str, Callable[[], Foreign]] = {
    "mask of attention without heads": lambda: probe(
        lambda m, x: F.scaled_dot_product_attention(*three(x), attn_mask=m.w), X, w=(5, 5)
    ),
    "mask of flattened heads": lambda: probe(
        lambda m, x: F.scaled_dot_product_attention(*three(heads(x).reshape(-1, 5, 4)), attn_mask=m.w).view(
            -1, 2, 5, 4
        ),
        X,
        w=(5, 5),
    ),
    "mask of windows": lambda: probe(
        lambda m, x: F.scaled_dot_product_attention(
            *three(heads(x).repeat_interleave(2, 0)), attn_mask=m.w.unsqueeze(0)
        ).unflatten(0, (-1, 2)),
        X,
        w=(2, 5, 5),
    ),
    "mask of one sample": lambda: probe(
        lambda m, x: F.scaled_dot_product_attention(*three(heads(x)), attn_mask=m.w), {"x": randn(1, 5, 4)}, w=(5, 5)
    ),
    "learned query": lambda: probe(lambda m, x: F.scaled_dot_product_attention(m.q, x, x), X, q=(2, 4)),
    "learned mask": lambda: Foreign(randomize_parameters(LearnedMask()), X, {"loss": squares}),
    "constant among flattened rows": lambda: probe(flattened_constant, X, g=(4,)),
    "written by out": lambda: probe(by_out, X, w=(5, 4)),
    "written by a function": lambda: probe(by_index_put, X, w=(5, 4)),
    "a list of rows": lambda: probe(lambda m, x: x * m.w[[0, 1]].sum() * m.w[:, [0, 2]].sum(), X, w=(3, 3)),
    "matrix by vector": lambda: probe(lambda m, x: torch.mv(x.reshape(-1, 4), m.w).view(len(x), -1).sin(), X, w=(4,)),
    "dot": lambda: probe(lambda m, x: (x * torch.dot(m.w, m.v)).sin(), X, w=(4,), v=(4,)),
    "inner": lambda: probe(lambda m, x: torch.inner(x, m.w).tanh(), X, w=(5, 4)),
    "numbers by ids": lambda: probe(lambda m, i: m.t[i].sin(), IDS, t=(7,)),
    "rows by ids": lambda: probe(lambda m, i: m.t.index_select(0, i.flatten()).view(*i.shape, -1).sin(), IDS, t=(7, 4)),
    "filled": lambda: probe(lambda m, x: x.masked_fill(x > 0, m.s).sin(), X, s=()),
    "polar": lambda: probe(
        lambda m, x: torch.view_as_real(
            torch.view_as_complex(x.unflatten(-1, (2, 2))) * torch.polar(torch.ones(2, dtype=torch.float64), m.f)
        ).tanh(),
        X,
        f=(2,),
    ),
    "Cayley": lambda: probe(
        lambda m, x: x @ torch.linalg.solve(torch.eye(4).double() + m.w, torch.eye(4).double()), X, w=(4, 4)
    ),
    "spectral norm": lambda: Foreign(
        randomize_parameters(parametrizations.spectral_norm(nn.Linear(4, 5))), {"input": randn(3, 4)}, {"loss": squares}
    ),
    "parametrised encoder": lambda: Foreign(
        randomize_parameters(normalised_encoder()), {"src": X["x"]}, {"loss": squares}
    ),
    "tied, the head detached": lambda: probe(
        lambda m, i: F.linear(F.embedding(i, m.w).tanh(), m.w.detach()), IDS, w=(7, 4)
    ),
}


@pytest.mark.parametrize("method", [Method.AUTO, Method.GHOST])
@pytest.mark.parametrize("name", EXACT)
def test_odd_uses_are_exact(name, method):
    assert_exact(EXACT[name](), method)


HIDDEN = "parametrised encoder"
"""torch.compile hides two of its uses (weight norm inside of MultiheadAttention): noticed, and refused."""


@pytest.mark.slow
@pytest.mark.parametrize("name", EXACT)
def test_odd_uses_are_exact_if_compiled_or_refused(name):
    refused = pytest.raises(Exception, match=r"as planned, got .*do not compile it")
    with refused if name == HIDDEN else nullcontext():
        assert_exact(EXACT[name](), blocks=partial(CompiledRunner, backend="aot_eager")())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 5, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.w).abs()


def added_out(m: Probe, x: Tensor) -> Tensor:
    return torch.mul(x, m.g, out=torch.empty_like(x))


class OldSquare(torch.autograd.Function):
    """A function whose forward takes ctx, which torch.func cannot differentiate."""

    @staticmethod
    def forward(ctx, x):  # pyright: ignore
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):  # pyright: ignore
        return 2 * g * ctx.saved_tensors[0]


REFUSED: dict[str, tuple[Callable[[], Foreign], str]] = {
    "samples in another dim": (
        lambda: probe(
            lambda m, x: F.scaled_dot_product_attention(*three(x.unsqueeze(0)), attn_mask=m.w)[0], X, w=(5, 5)
        ),
        r"w: used by F.scaled_dot_product_attention, whose other operands do not all have samples in dim 0 on",
    ),
    "dropout in place": (
        lambda: probe(lambda m, x: torch.dropout_(F.linear(x, m.w), 0.5, True), dropout.with_keys(X, key(1)), w=(5, 4)),
        r"dropout_: expected a forward that gives the same result twice",
    ),
    "batch norm without parameters": (
        lambda: probe(lambda m, x: F.batch_norm(F.linear(x, m.w), None, None, training=True), X, w=(5, 4)),
        r"batch_norm: expected fixed statistics, got statistics of the batch",
    ),
    "complex": (
        lambda: Foreign(Complex(), X, {"loss": squares}),
        r"w: expected a floating-point parameter, got .*complex",
    ),
    "out": (lambda: probe(added_out, X, g=(4,)), r"g: used by .*mul with out= on"),
    "checkpoint": (
        lambda: probe(lambda m, x: checkpoint(lambda z: F.linear(z, m.w).tanh(), x, use_reentrant=False), X, w=(5, 4)),  # pyright: ignore
        r"expected a (forward|block) without torch.utils.checkpoint",
    ),
    # Its recomputation would save the same shapes, and read the weights that the module was made with.
    "checkpoint of a scale": (
        lambda: probe(lambda m, x: checkpoint(lambda z: (z * m.g).tanh(), x, use_reentrant=False), X, g=(4,)),  # pyright: ignore
        r"expected a (forward|block) without torch.utils.checkpoint",
    ),
    "checkpoint after a custom function": (
        lambda: probe(
            lambda m, x: checkpoint(torch.tanh, OldSquare.apply(F.linear(x, m.w)), use_reentrant=False),  # pyright: ignore
            X,
            w=(5, 4),
            options={"materialize": ("w",)},
        ),
        r"expected a (forward|block) without torch.utils.checkpoint",
    ),
    "reentrant checkpoint": (
        lambda: probe(lambda m, x: checkpoint(torch.tanh, F.linear(x, m.w), use_reentrant=True), X, w=(5, 4)),  # pyright: ignore
        r"expected a block without torch.utils.checkpoint",
    ),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # by the reentrant checkpoint
@pytest.mark.parametrize("name", REFUSED)
def test_odd_modules_are_refused_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(FdpError, match=message):
        assert_exact(make())


def test_a_sample_without_gradient_has_norm_zero():
    def run(m: Probe, x: Tensor) -> Tensor:
        return F.linear(x, m.w) if float(x.sum()) > 0 else torch.zeros(len(x), 2, dtype=x.dtype)

    data = {"x": torch.stack([torch.ones(4), -torch.ones(4), 2 * torch.ones(4)]).double()}
    model, params = probe(run, data, w=(2, 4), options={"materialize": ("w",)}).model()
    plan = make_plan(model, params, data, dtype=torch.float64)
    squared = per_sample_norms(model, params, data, plan=plan)[1].squared["w"]
    assert squared[1] == 0
    assert squared[0] > 0


def test_a_module_whose_mode_changes_afterwards_is_refused():
    # Frozen batch normalisation: no use of a parameter would show that it is by statistics of the batch again.
    module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double().eval()
    module[1].requires_grad_(False)
    data = {"input": randn(4, 4)}
    model, params = from_module(module, loss=squares, example=data)
    model.loss(params, data)
    module[1].train()
    with pytest.raises(FdpError, match=r"Sequential: expected its parts in the train\(\) or eval\(\) mode they had"):
        model.loss(params, data)


# ---------------------------------------------------------------- families of transformers

LAYERS: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDS: dict[str, Any] = {"vocab_size": 13, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Phi": ("Phi", LAYERS),
    "GPT-NeoX": ("GPTNeoX", LAYERS),
    "Falcon": ("Falcon", {**LAYERS, "alibi": True}),
    "Qwen3": ("Qwen3", {**LAYERS, "num_key_value_heads": 1, "head_dim": 4}),
    "Gemma2": ("Gemma2", {**LAYERS, "num_key_value_heads": 1, "head_dim": 4}),
    "Mamba": ("Mamba", {"hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2}),
    "Bloom": ("Bloom", {"hidden_size": 8, "n_layer": 2, "n_head": 2}),
    "Mixtral": ("Mixtral", {**LAYERS, "num_key_value_heads": 1, "num_local_experts": 2}),
}
"""Name and configuration."""


def family(name: str) -> Foreign:
    import transformers

    kind, sizes = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**WORDS, **sizes)
    if kind != "Mamba":
        config._attn_implementation = "eager"
    module = randomize_parameters(getattr(transformers, f"{kind}ForCausalLM")(config))
    return Foreign(module, {"input_ids": ids(3, 6)}, {"loss": next_token})


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_families_are_exact(name):
    foreign = family(name)
    made = foreign.model(check=True)
    assert_exact(foreign._replace(module=reference_module(foreign.module)), made=made)


@pytest.mark.slow
def test_shared_layers_are_exact_as_one_block_and_refused_as_a_stack():
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(**LAYERS, vocab_size=13, num_labels=3, embedding_size=4, max_position_embeddings=16)  # pyright: ignore
    data = {"input_ids": ids(3, 6), "label": LABEL}
    foreign = Foreign(randomize_parameters(AlbertForSequenceClassification(config)), data, {"loss": labels})
    assert_exact(foreign)
    with pytest.raises(FdpError, match="once and in order"):
        foreign.model(blocks="auto")


# ---------------------------------------------------------------- modules that mix samples where it is hard to see


class MixesBackward(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):  # pyright: ignore
        return g + 0.1 * g.mean(0)


def linear(m: Probe, x: Tensor) -> Tensor:
    return F.linear(x, m.w)


def by_size(m: Probe, x: Tensor) -> Tensor:
    order = x.square().sum((1, 2)).argsort()
    return F.linear(x[order], m.w)[order.argsort()].tanh() + m.b


ALIKE = {"x": randn(1, 5, 4).expand(4, -1, -1).clone()}
"""Samples that are all the same: no norm shows which is whose."""
MIXING: dict[str, tuple[Callable[[], Foreign], str]] = {
    "another order": (
        lambda: probe(lambda m, x: linear(m, x.flip(0)).flip(0).tanh() + m.b, ALIKE, w=(5, 4), b=(5,)),
        "changed another sample: its loss",
    ),
    "sorted": (lambda: probe(by_size, X, w=(5, 4), b=(5,)), "w: used on samples in an order that the data decide"),
    "in the backward": (
        lambda: probe(lambda m, x: MixesBackward.apply(linear(m, x)).tanh(), ALIKE, w=(5, 4)),  # pyright: ignore
        "changed another sample: a gradient",
    ),
    "of outliers": (
        lambda: probe(
            lambda m, x: torch.where(linear(m, x).amax() > 50, x.amax(), 1.0) * linear(m, x).tanh(), X, w=(5, 4)
        ),
        "changed by .* as large as can be",
    ),
    "alike": (
        lambda: probe(lambda m, x: (linear(m, x) - 0.5 * linear(m, x).mean(0)).tanh(), ALIKE, w=(5, 4)),
        "not independent|changed another sample",
    ),
    "in larger batches": (
        lambda: probe(lambda m, x: (linear(m, x) - x.mean() if len(x) > 3 else linear(m, x)).tanh(), X, w=(5, 4)),
        "changed by .* beside 10 others",
    ),
    "by flattened tokens": (
        lambda: probe(
            lambda m, x: linear(m, x.transpose(0, 1).reshape(-1, 4)).view(5, len(x), -1).transpose(0, 1).sin(),
            {"x": randn(4, 5, 4)},
            w=(5, 4),
        ),
        "the gradient of sample|changed another sample",
    ),
}


@pytest.mark.parametrize("name", MIXING)
def test_hidden_mixing_of_samples_is_refused(name):
    make, message = MIXING[name]
    with pytest.raises(FdpError, match=message):
        make().model(check=True)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().sum(-1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_a_loss_divided_by_the_tokens_of_the_batch_is_refused_even_if_nothing_is_masked(dtype):
    def loss(out: Tensor, data: Any) -> Tensor:
        return (out * data["mask"]).sum(1) / data["mask"].sum() * len(out)

    data = X | {"mask": torch.ones(3, 5, dtype=dtype)}
    with pytest.raises(FdpError, match=r"sample 0 of the data has one loss alone and another beside .*padding"):
        from_module(randomize_parameters(Tokens()), loss=loss, example=data)
    own = lambda out, data: (out * data["mask"]).sum(1) / data["mask"].sum(1).clamp_min(1)  # noqa: E731
    from_module(randomize_parameters(Tokens()), loss=own, example=data)


class UpToTheLongest(nn.Module):
    """A mean over as many tokens as the longest sample of the batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        kept = (torch.arange(ids.shape[1]) < (ids != 0).sum(1).max()).double().unsqueeze(1)
        return self.head((self.table(ids) * kept).sum(1) / kept.sum())


def test_a_length_taken_over_the_batch_is_refused_even_if_all_samples_have_it():
    with pytest.raises(FdpError, match=r"changed by .*then padding\) has one loss alone and another beside sample 0"):
        from_module(randomize_parameters(UpToTheLongest()), loss=squares, example=IDS)
