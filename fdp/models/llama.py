"""Llama style decoder: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases.

    h += W_o attention(rope(W_q n), rope(W_k n), W_v n),  n = RMS(h);   h += W_2 (silu(W_1 m) * W_3 m),  m = RMS(h)

Touvron et al. 2023, arXiv 2302.13971; rotary positions: Su et al. 2021, arXiv 2104.09864.

    >>> model = llama(LlamaConfig(layers=4, width=128, heads=4, key_heads=2, hidden=344, context=128, vocab_size=256))
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fdp import ops
from fdp.init import constant, normal
from fdp.model import Block, LeafSpec, Model
from fdp.models.language import attend, check_divides, head_block, project, window_inputs_of, windows_of
from fdp.parallel.tensor_parallel import enter
from fdp.types import Axis, Path, Tree


class LlamaConfig(NamedTuple):
    layers: int
    width: int
    heads: int
    key_heads: int
    hidden: int
    context: int
    vocab_size: int
    tied: bool = False
    rope_base: float = 10_000.0


def llama(config: LlamaConfig, *, name: str = "llama", tensor: Axis | None = None) -> Model:
    """Return the model as a stack: embed, ``layers`` equal blocks, head with the loss.

    With ``tensor`` the heads and hidden units of the layers are split over that axis; embedding and head are not.
    """
    c = config
    check_divides(tensor, heads=c.heads, key_heads=c.key_heads, hidden=c.hidden)
    leaves: dict[Path, LeafSpec] = {"embed.tokens": LeafSpec((c.vocab_size, c.width), normal(0.02))}
    apply_layer = partial(_layer, config=c, tensor=tensor)
    layers = []
    for i in range(c.layers):
        specs = _layer_leaves(c)
        leaves |= {f"blocks.{i}.{leaf}": spec for leaf, spec in specs.items()}
        layers.append(Block(f"blocks.{i}", {leaf: f"blocks.{i}.{leaf}" for leaf in specs}, apply_layer))
    leaves["head.norm"] = LeafSpec((c.width,), constant(1.0))
    head = {"norm": "head.norm", "weight": "embed.tokens"}
    if not c.tied:
        leaves["head.weight"] = LeafSpec((c.vocab_size, c.width), normal(0.02))
        head["weight"] = "head.weight"
    blocks = (Block("embed", {"tokens": "embed.tokens"}, _embed), *layers, head_block(head, _features))
    parallel = partial(_parallel, config, name)
    return Model(
        name,
        leaves,
        blocks,
        context=c.context,
        vocab_size=c.vocab_size,
        parallel=parallel,
        tensor=tensor,
        settings=str(config),
    )


def _parallel(config: LlamaConfig, name: str, axis: Axis | None) -> Model:
    return llama(config, name=name, tensor=axis)


def _layer_leaves(c: LlamaConfig) -> dict[str, LeafSpec]:
    features = c.width // c.heads
    out = normal(0.02 / math.sqrt(2 * c.layers))
    return {
        "norm1": LeafSpec((c.width,), constant(1.0)),
        "query": LeafSpec((c.heads * features, c.width), normal(0.02), tensor_dim=0),
        "key": LeafSpec((c.key_heads * features, c.width), normal(0.02), tensor_dim=0),
        "value": LeafSpec((c.key_heads * features, c.width), normal(0.02), tensor_dim=0),
        "out": LeafSpec((c.width, c.heads * features), out, tensor_dim=1),
        "norm2": LeafSpec((c.width,), constant(1.0)),
        "gate": LeafSpec((c.hidden, c.width), normal(0.02), tensor_dim=0),
        "up": LeafSpec((c.hidden, c.width), normal(0.02), tensor_dim=0),
        "down": LeafSpec((c.width, c.hidden), out, tensor_dim=1),
    }


def _embed(p: Tree, carry: Tree, data: Tree) -> Float[Tensor, "batch tokens width"]:
    return ops.embedding(window_inputs_of(data), p["tokens"]).flatten(1, -2)


def _layer(
    p: Tree, h: Tensor, data: Tree, *, config: LlamaConfig, tensor: Axis | None
) -> Float[Tensor, "batch tokens width"]:
    B, T, D = h.shape
    n = enter(ops.rms_norm(h, p["norm1"]), tensor)
    q, k, v = (
        ops.linear(n, p[w]).reshape(B, T, -1, D // config.heads).transpose(1, 2) for w in ("query", "key", "value")
    )
    windows = windows_of(data)  # segments change nothing here: only the distance between two tokens matters
    cos, sin = rotary(T // windows, D // config.heads, base=config.rope_base, like=h)
    if windows > 1:
        cos, sin = cos.repeat(windows, 1), sin.repeat(windows, 1)
    mixed = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, data).transpose(1, 2).reshape(B, T, -1)
    h = h + project(mixed, p["out"], None, tensor)
    m = enter(ops.rms_norm(h, p["norm2"]), tensor)
    return h + project(F.silu(ops.linear(m, p["gate"])) * ops.linear(m, p["up"]), p["down"], None, tensor)


def _features(p: Tree, h: Tensor, data: Tree) -> Float[Tensor, "batch tokens width"]:
    return ops.rms_norm(h, p["norm"])


def rotary(tokens: int, features: int, *, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of ``position * base^(-2i / features)``, both (tokens, features), the halves repeated."""
    frequency = base ** (-torch.arange(0, features, 2, dtype=torch.float32, device=like.device) / features)
    angle = torch.outer(torch.arange(tokens, dtype=torch.float32, device=like.device), frequency).repeat(1, 2)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + features/2}) by their angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
