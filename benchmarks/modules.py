"""GPT and Llama as an ``nn.Module``, in the shapes of ``fdp.models.gpt`` and ``fdp.models.llama``, for the baselines.

They are built from the layers that Opacus has rules for, and hold no buffers, which it refuses.

    >>> module = make_module(config, device)
    >>> load(module, tree.flatten(params), config)          # fdp's parameters, by their paths
    >>> logits = module(ids)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from fdp.models import GPTConfig, LlamaConfig
from fdp.models.llama import rotary, rotate
from fdp.types import Flat

Config = GPTConfig | LlamaConfig


class Layer(nn.Module):
    """The layer of ``fdp.models.gpt`` as a module."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, h: Float[Tensor, "batch tokens width"]) -> Float[Tensor, "batch tokens width"]:
        B, T, D = h.shape
        q, k, v = (
            z.view(B, T, self.heads, D // self.heads).transpose(1, 2) for z in self.qkv(self.norm1(h)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
        h = h + self.out(mixed)
        return h + self.down(F.gelu(self.up(self.norm2(h)), approximate="tanh"))


class LlamaLayer(nn.Module):
    """The layer of ``fdp.models.llama`` as a module."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.features = config.width // config.heads
        shared = config.key_heads * self.features
        self.norm1, self.norm2 = nn.RMSNorm(config.width, eps=1e-6), nn.RMSNorm(config.width, eps=1e-6)
        self.query, self.key, self.value, self.out = (
            nn.Linear(config.width, rows, bias=False) for rows in (config.width, shared, shared, config.width)
        )
        self.gate, self.up = (nn.Linear(config.width, config.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(
        self, h: Float[Tensor, "batch tokens width"], cos: Tensor, sin: Tensor
    ) -> Float[Tensor, "batch tokens width"]:
        B, T, D = h.shape
        n = self.norm1(h)
        q, k, v = (
            project(n).view(B, T, -1, self.features).transpose(1, 2) for project in (self.query, self.key, self.value)
        )
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q, k, shared = rotate(q, cos, sin), rotate(k, cos, sin), q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
        h = h + self.out(mixed.transpose(1, 2).reshape(B, T, D))
        m = self.norm2(h)
        return h + self.down(F.silu(self.gate(m)) * self.up(m))


class GPT(nn.Module):
    """The model of ``fdp.models.gpt``. ``per_sample`` looks up positions for every sample, as Opacus needs."""

    def __init__(self, config: GPTConfig, *, per_sample: bool = False):
        super().__init__()
        self.per_sample = per_sample
        tokens, positions = nn.Embedding(config.vocab_size, config.width), nn.Embedding(config.context, config.width)
        self.embed = nn.ModuleDict({"tokens": tokens, "positions": positions})
        self.blocks = nn.ModuleList(Layer(config.width, config.heads) for _ in range(config.layers))
        self.head = _head(config, nn.LayerNorm(config.width), tokens)
        _draw_weights(self)

    def forward(self, ids: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens vocab"]:
        places = torch.arange(ids.shape[1], device=ids.device)
        if self.per_sample:
            places = places.repeat(ids.shape[0], 1)
        h = self.embed["tokens"](ids) + self.embed["positions"](places)
        for block in self.blocks:
            h = block(h)
        return self.head["weight"](self.head["norm"](h))


class Llama(nn.Module):
    """The model of ``fdp.models.llama``."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.features, self.rope_base = config.width // config.heads, config.rope_base
        self.embed = nn.ModuleDict({"tokens": nn.Embedding(config.vocab_size, config.width)})
        self.blocks = nn.ModuleList(LlamaLayer(config) for _ in range(config.layers))
        self.head = _head(config, nn.RMSNorm(config.width, eps=1e-6), self.embed["tokens"])
        _draw_weights(self)

    def forward(self, ids: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens vocab"]:
        h = self.embed["tokens"](ids)
        cos, sin = rotary(ids.shape[1], self.features, base=self.rope_base, like=h)
        for block in self.blocks:
            h = block(h, cos, sin)
        return self.head["weight"](self.head["norm"](h))


def _head(config: Config, norm: nn.Module, tokens: nn.Module) -> nn.ModuleDict:
    head = nn.ModuleDict({"norm": norm, "weight": nn.Linear(config.width, config.vocab_size, bias=False)})
    if config.tied:
        head["weight"].weight = tokens.weight
    return head


def _draw_weights(module: nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, nn.Linear | nn.Embedding):
            nn.init.normal_(each.weight, std=0.02)
        if isinstance(each, nn.Linear) and each.bias is not None:
            nn.init.zeros_(each.bias)


def make_module(config: Config, device: torch.device, *, per_sample: bool = False) -> GPT | Llama:
    """Return the module of this shape on its device, with weights that torch draws."""
    with torch.device(device):
        return GPT(config, per_sample=per_sample) if isinstance(config, GPTConfig) else Llama(config)


def load(module: nn.Module, params: Flat, config: Config) -> None:
    """Copy fdp's parameters: ``qkv`` becomes ``qkv.weight`` and ``qkv_bias`` ``qkv.bias``, with rows reordered."""
    for name, p in module.named_parameters():
        leaf = params[name.removesuffix(".weight").replace(".bias", "_bias")]
        if ".qkv." in name:  # fdp stores q, k, v head by head; here all of q, then k, then v
            rows = leaf.view(config.heads, 3, -1, *leaf.shape[1:])
            leaf = rows.transpose(0, 1).reshape(leaf.shape)
        with torch.no_grad():
            p.copy_(leaf)
