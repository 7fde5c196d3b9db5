"""Tiny modules from elsewhere in float64, with data, and their per-sample gradients computed by the module itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdp.fast.compiled import CompiledRunner
from fdp.foreign.leaves import leaf_paths
from fdp.foreign.module import from_module
from fdp.foreign.uses.dropout import DROPOUT_KEYS, keys_of
from fdp.foreign.uses.tracking import CallTrace
from fdp.foreign.uses.watch import WatchMode
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.execution import EAGER, Execution
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.model import Model
from fdp.privacy.clipping import clip_to
from fdp.types import Flat, Tree

SAMPLES, TOKENS, VOCAB = 3, 6, 13
METHODS = [
    Method.MATERIALIZE,
    Method.GHOST,
    Method.GHOST_BK,
    Method.FLASH,
    Method.FLASH_BK,
    Method.AUTO,
]


class Foreign(NamedTuple):
    """A module, its data, and the options with which it becomes a model."""

    module: nn.Module
    data: dict[str, Tensor]
    options: dict[str, Any]

    def model(self, **more: Any) -> tuple[Model, Tree]:
        return from_module(self.module, **({"example": self.data, "check": False} | self.options | more))


class Probe(nn.Module):
    """A module whose ``forward(self, **data)`` is ``run(self, **data)``, for any function of parameters and data."""

    def __init__(self, run: Callable[..., Tensor], **shapes: tuple[int, ...]):
        super().__init__()
        draw = torch.Generator().manual_seed(len(shapes))
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(0.5 * torch.randn(shape, dtype=torch.float64, generator=draw)))
        self.run = run

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def forward(self, x: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        return self.run(self, x if ids is None else ids)


def probe(run: Callable[..., Tensor], data: dict[str, Tensor], *, options: Any = None, **shapes: Any) -> Foreign:
    """Return a case whose loss is the sum of squares of each sample's output."""
    made = {"loss": lambda out, _: out.reshape(len(out), -1).square().sum(1)} | (options or {})
    return Foreign(Probe(run, **shapes), data, made)


def gradients(foreign: Foreign, model: Model) -> Flat:
    """Return every sample's gradient of every leaf: one backward of the module called with that sample alone."""
    module, data, options = foreign
    call = options.get("call") or (lambda m, d: m(**{k: v for k, v in d.items() if k in _takes(module)}))
    paths = leaf_paths(module)
    leaves = {path: leaf for path, leaf in module.named_parameters() if paths[path] in model.trainable}
    rows: dict[str, list[Tensor]] = {path: [] for path in leaves}
    for b in range(len(next(iter(data.values())))):
        one = {name: leaf[b : b + 1] for name, leaf in data.items()}
        with WatchMode(CallTrace(None, 1, batch_first=True, keys=keys_of(one))):
            out = call(module, {name: leaf for name, leaf in one.items() if name != DROPOUT_KEYS})
        loss = options["loss"](out, one) if "loss" in options else out
        slopes = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
        for (path, leaf), slope in zip(leaves.items(), slopes):
            rows[path].append(torch.zeros_like(leaf) if slope is None else slope.detach())
    return {path: torch.stack(found) for path, found in rows.items()}


def _takes(module: nn.Module) -> list[str]:
    import inspect

    return list(inspect.signature(module.forward).parameters)


def assert_exact(
    foreign: Foreign,
    method: Method = Method.AUTO,
    *,
    blocks: CompiledRunner | None = None,
    made: Any = None,
    truth: Any = None,
) -> None:
    """Compare losses, norms of every leaf, and a clipped sum with the module's own backwards (1e-8)."""
    model, params = foreign.model() if made is None else made
    plan = make_plan(model, params, foreign.data, method=method, dtype=torch.float64)
    _, norms, stash = per_sample_norms(
        model, params, foreign.data, plan=plan, execution=Execution(runner=blocks or EAGER)
    )
    reference = gradients(foreign, model) if truth is None else truth
    assert set(norms.squared) == set(reference)
    squares = {path: G.reshape(len(G), -1).square().sum(1) for path, G in reference.items()}
    whole = torch.stack(list(squares.values())).sum(0)
    for path, square in squares.items():
        error = ((norms.squared[path] - square).abs() / (square + 1e-6 * whole)).max()
        assert error < 1e-8, f"{path}: squared norms {norms.squared[path]}, expected {square}"
    clip = clip_to(norms, max_norm=float(norms.total().median()))  # one sample below, one at, one above the bound
    total = clipped_sum(stash, clip)
    for path, G in reference.items():
        expected = torch.einsum("b,b...->...", clip.factors[path].double(), G)
        torch.testing.assert_close(total.value[path], expected, rtol=1e-8, atol=1e-9, msg=lambda m, p=path: f"{p}: {m}")


def randn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def ids(*shape: int, below: int = VOCAB, seed: int = 2) -> Tensor:
    return torch.randint(1, below, shape, generator=torch.Generator().manual_seed(seed))


def randomize_parameters(module: nn.Module) -> nn.Module:
    """Return the module in float64 and eval(), with no parameter left at a zero or one that hides a mistake."""
    module = module.double().eval()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64, generator=draw))
    return module


# ---------------------------------------------------------------- language models, classifiers


def next_token(outputs: Any, data: Tree) -> Tensor:
    tokens = data["input_ids"]
    losses = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return losses.view(len(tokens), -1).mean(1)


def labels(outputs: Any, data: Tree) -> Tensor:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    return F.cross_entropy(logits, data["label"], reduction="none")


LABEL = torch.tensor([0, 2, 1])
_BASE = {"vocab_size": VOCAB, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LLAMA = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
_SDPA: dict[str, Any] = {"attn_implementation": "sdpa"}
_BERT = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}


def _language(name: str, **config: Any) -> Foreign:
    import transformers

    made = getattr(transformers, f"{name}Config")(**_BASE, **config, **_SDPA)
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    module = randomize_parameters(getattr(transformers, head)(made))
    return Foreign(module, {"input_ids": ids(SAMPLES, TOKENS)}, {"loss": next_token})


def _gpt2(tied: bool) -> Foreign:
    return _language("GPT2", n_embd=8, n_layer=2, n_head=2, n_positions=16, tie_word_embeddings=tied)


def _opt() -> Foreign:
    sizes = {"hidden_size": 8, "ffn_dim": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    return _language("OPT", **sizes, max_position_embeddings=16, word_embed_proj_dim=8)


def _bert() -> Foreign:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {**_BERT, "vocab_size": VOCAB, "num_labels": 3, "pad_token_id": 0}
    config = BertConfig(**sizes, **_SDPA)
    data = {"input_ids": ids(SAMPLES, TOKENS), "label": LABEL}
    data["input_ids"][:, -1] = 0  # padding, whose row is not trained
    return Foreign(randomize_parameters(BertForSequenceClassification(config)), data, {"loss": labels})


def _vit() -> Foreign:
    from transformers import ViTConfig, ViTForImageClassification

    sizes: dict[str, Any] = {**_BERT, "image_size": 8, "patch_size": 4, "num_labels": 3}
    config = ViTConfig(**sizes, **_SDPA)
    data = {"pixel_values": randn(SAMPLES, 3, 8, 8), "label": LABEL}
    return Foreign(randomize_parameters(ViTForImageClassification(config)), data, {"loss": labels})


# ---------------------------------------------------------------- other networks


class Residual(nn.Module):
    """A small residual network with group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(2, 8)
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2)
        self.norm2 = nn.GroupNorm(4, 8)
        self.same = nn.Conv2d(8, 8, (3, 2), padding="same", dilation=(1, 2))
        self.head = nn.Linear(8, 3)

    def forward(self, image: Tensor) -> Tensor:
        h = self.norm(self.stem(image)).relu()
        h = self.norm2(self.down(h)).relu()
        h = h + self.same(h).relu()
        return self.head(h.mean((2, 3)))


class Recurrent(nn.Module):
    """A recurrent network between an embedding and a head."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 5)
        self.layers = kind(5, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(tokens))[0][:, -1])


class Experts(nn.Module):
    """Two experts: all computed and weighted (``dense``), or each on the tokens routed to it."""

    def __init__(self, *, dense: bool) -> None:
        super().__init__()
        self.router = nn.Linear(6, 2)
        self.up = nn.Parameter(torch.randn(2, 6, 7))
        self.down = nn.Parameter(torch.randn(2, 7, 6))
        self.head = nn.Linear(6, 3)
        self.dense = dense

    def forward(self, x: Tensor) -> Tensor:
        share = self.router(x).softmax(-1)
        if self.dense:
            hidden = torch.einsum("btd,edf->btef", x, self.up).tanh()
            out = torch.einsum("btef,efd->bted", hidden, self.down)
            return self.head((out * share.unsqueeze(-1)).sum(2).mean(1))
        out = torch.zeros_like(x)
        for e in range(2):
            where = (share.argmax(-1) == e).nonzero(as_tuple=True)
            out[where] = ((x[where] @ self.up[e]).tanh() @ self.down[e]) * share[..., e][where].unsqueeze(-1)
        return self.head(out.mean(1))


class Attention(nn.Module):
    """An encoder layer, then a decoder's attention to learned tokens, tokens first or samples first."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=batch_first, norm_first=not batch_first)
        self.query = nn.Parameter(torch.randn(2, 8))
        self.cross = nn.MultiheadAttention(8, 2, kdim=8, vdim=8, add_bias_kv=True, batch_first=batch_first)
        self.other = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, add_zero_attn=True, batch_first=batch_first)
        self.narrow = nn.Linear(8, 6)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        h = self.layer(x, src_key_padding_mask=padding)
        size = len(padding)
        q = self.query.expand(size, -1, -1) if self.batch_first else self.query.unsqueeze(1).expand(-1, size, -1)
        causal = torch.ones(2, 5, dtype=torch.bool).triu(3)
        h = self.cross(q, h, h, attn_mask=causal, need_weights=False)[0]
        memory = self.narrow(h)
        h = h + self.other(h, memory, memory)[0]
        return self.head(h.mean(1 if self.batch_first else 0))


def _attention(batch_first: bool) -> Foreign:
    padding = torch.zeros(SAMPLES, 5, dtype=torch.bool)
    padding[1, -2:] = True
    data = {"x": randn(SAMPLES, 5, 8), "padding": padding, "label": LABEL}
    return Foreign(
        randomize_parameters(Attention(batch_first=batch_first)), data, {"loss": labels, "batch_first": batch_first}
    )


CASES: dict[str, Callable[[], Foreign]] = {
    "gpt2": lambda: _gpt2(tied=True),
    "gpt2-untied": lambda: _gpt2(tied=False),
    "llama": lambda: _language("Llama", **_LLAMA),
    "qwen2": lambda: _language("Qwen2", **_LLAMA),
    "gemma": lambda: _language("Gemma", **_LLAMA, head_dim=4),
    "mistral": lambda: _language("Mistral", **_LLAMA, sliding_window=4),
    "opt": _opt,
    "bert": _bert,
    "vit": _vit,
    "resnet": lambda: Foreign(
        randomize_parameters(Residual()), {"image": randn(3, 3, 6, 6), "label": LABEL}, {"loss": labels}
    ),
    "lstm": lambda: Foreign(
        randomize_parameters(Recurrent(nn.LSTM)), {"tokens": ids(3, 5), "label": LABEL}, {"loss": labels}
    ),
    "gru": lambda: Foreign(
        randomize_parameters(Recurrent(nn.GRU)), {"tokens": ids(3, 5), "label": LABEL}, {"loss": labels}
    ),
    "experts": lambda: Foreign(
        randomize_parameters(Experts(dense=True)), {"x": randn(3, 5, 6), "label": LABEL}, {"loss": labels}
    ),
    "routed": lambda: Foreign(
        randomize_parameters(Experts(dense=False)),
        {"x": randn(3, 5, 6), "label": LABEL},
        {"loss": labels, "materialize": ("up", "down")},
    ),
    "attention": lambda: _attention(batch_first=True),
    "attention-tokens-first": lambda: _attention(batch_first=False),
}


@cache
def case_named(name: str) -> Foreign:
    return CASES[name]()


@cache
def model_named(name: str) -> tuple[Model, Tree]:
    return case_named(name).model()


@cache
def gradients_named(name: str) -> Flat:
    return gradients(case_named(name), model_named(name)[0])
