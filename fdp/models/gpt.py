"""GPT-2 style decoder: learned positions, pre-norm blocks, GELU, biases, and an optionally tied head.

    h = E[tokens] + P;   h += W_o attention(LN(h));   h += W_2 gelu(W_1 LN(h));   logits = LN(h) W_head^T
    loss_b = mean over tokens of the cross-entropy of the next token

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".

    >>> model = gpt(GPTConfig(layers=4, width=128, heads=4, context=128, vocab_size=256))
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from fdp import ops
from fdp.init import constant, normal
from fdp.model import Block, LeafSpec, Model
from fdp.models.language import attend, check_divides, head_block, places_of, project, window_inputs_of
from fdp.parallel.tensor_parallel import enter
from fdp.types import Axis, FdpError, Path, Tree


class GPTConfig(NamedTuple):
    layers: int
    width: int
    heads: int
    context: int
    vocab_size: int
    tied: bool = True


def gpt(config: GPTConfig, *, name: str = "gpt", tensor: Axis | None = None) -> Model:
    """Return the model as a stack: embed, ``layers`` equal blocks, head with the loss.

    With ``tensor`` the heads and hidden units of the layers are split over that axis; embedding and head are not.
    """
    c = config
    check_divides(tensor, heads=c.heads)
    leaves: dict[Path, LeafSpec] = {
        "embed.tokens": LeafSpec((c.vocab_size, c.width), normal(0.02)),
        "embed.positions": LeafSpec((c.context, c.width), normal(0.01)),
    }
    apply_layer = partial(_layer, heads=c.heads, tensor=tensor)
    layers = []
    for i in range(c.layers):
        specs = _layer_leaves(c)
        leaves |= {f"blocks.{i}.{leaf}": spec for leaf, spec in specs.items()}
        layers.append(Block(f"blocks.{i}", {leaf: f"blocks.{i}.{leaf}" for leaf in specs}, apply_layer))
    leaves |= {
        "head.norm": LeafSpec((c.width,), constant(1.0)),
        "head.norm_bias": LeafSpec((c.width,), constant(0.0)),
    }
    head = {"norm": "head.norm", "norm_bias": "head.norm_bias", "weight": "embed.tokens"}
    if not c.tied:
        leaves["head.weight"] = LeafSpec((c.vocab_size, c.width), normal(0.02))
        head["weight"] = "head.weight"
    embed = Block("embed", {"tokens": "embed.tokens", "positions": "embed.positions"}, _embed)
    blocks = (embed, *layers, head_block(head, _features))
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


def _parallel(config: GPTConfig, name: str, axis: Axis | None) -> Model:
    return gpt(config, name=name, tensor=axis)


def _layer_leaves(c: GPTConfig) -> dict[str, LeafSpec]:
    one, zero = constant(1.0), constant(0.0)
    out = normal(0.02 / math.sqrt(2 * c.layers))
    return {
        "norm1": LeafSpec((c.width,), one),
        "norm1_bias": LeafSpec((c.width,), zero),
        "qkv": LeafSpec((3 * c.width, c.width), normal(0.02), tensor_dim=0),  # head by head: its q, its k, its v
        "qkv_bias": LeafSpec((3 * c.width,), zero, tensor_dim=0),
        "out": LeafSpec((c.width, c.width), out, tensor_dim=1),
        "out_bias": LeafSpec((c.width,), zero),
        "norm2": LeafSpec((c.width,), one),
        "norm2_bias": LeafSpec((c.width,), zero),
        "up": LeafSpec((4 * c.width, c.width), normal(0.02), tensor_dim=0),
        "up_bias": LeafSpec((4 * c.width,), zero, tensor_dim=0),
        "down": LeafSpec((c.width, 4 * c.width), out, tensor_dim=1),
        "down_bias": LeafSpec((c.width,), zero),
    }


def _embed(p: Tree, carry: Tree, data: Tree) -> Float[Tensor, "batch tokens width"]:
    tokens, context = window_inputs_of(data), p["positions"].shape[0]
    if tokens.shape[-1] != context:
        raise FdpError(
            f"tokens: expected {context} inputs and a target, the model's context, got {tokens.shape[-1]} inputs"
        )
    h = ops.embedding(tokens, p["tokens"])
    if "segments" in data:
        return (h + ops.embedding(places_of(data["segments"]), p["positions"])).flatten(1, -2)
    return ops.add(h, p["positions"]).flatten(1, -2)


def _layer(p: Tree, h: Tensor, data: Tree, *, heads: int, tensor: Axis | None) -> Float[Tensor, "batch tokens width"]:
    B, T, D = h.shape
    n = enter(ops.layer_norm(h, p["norm1"], p["norm1_bias"]), tensor)
    q, k, v = ops.linear(n, p["qkv"], p["qkv_bias"]).reshape(B, T, -1, 3, D // heads).transpose(1, 2).unbind(3)
    mixed = attend(q, k, v, data).transpose(1, 2).reshape(B, T, -1)
    h = h + project(mixed, p["out"], p["out_bias"], tensor)
    m = enter(ops.layer_norm(h, p["norm2"], p["norm2_bias"]), tensor)
    up = ops.linear(m, p["up"], p["up_bias"])
    return h + project(ops.gelu(up), p["down"], p["down_bias"], tensor)


def _features(p: Tree, h: Tensor, data: Tree) -> Float[Tensor, "batch tokens width"]:
    return ops.layer_norm(h, p["norm"], p["norm_bias"])
