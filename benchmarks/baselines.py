"""Baselines that fdp is compared with: GPT-2 as an ``nn.Module``, trained plainly and with Opacus 1.6.

| mode                   | step                                                                                   |
|------------------------|----------------------------------------------------------------------------------------|
| `module`               | the whole model and its loss in one torch.compile graph, fused AdamW                   |
| `module_graphs`        | the same, and the whole step (forward, backward, AdamW) in one CUDA graph              |
| `module_blocks_graphs` | as `module_graphs`, but every layer compiled on its own: compiles faster               |
| `opacus`               | Opacus, per-sample gradients by hooks; eager, because its hooks do not compile         |
| `opacus_ghost`         | Opacus, fast gradient clipping (ghost norms, two backwards); eager                     |

All have float32 master weights, bfloat16 autocast with torch's fused attention, and torch's fused AdamW. Opacus is set
up by its own ``PrivacyEngine.make_private``; its noise comes from torch's generator (``secure_mode`` off, the fast
default).

    >>> candidate = BASELINES["module"](Setup(config, batch_size=4, device=device))
    >>> losses = candidate.step(tokens, key)
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.modes import LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, Candidate
from fdp import tree
from fdp.models import GPTConfig, LlamaConfig
from fdp.types import Flat, Tree

WARM_UP_STEPS = 3


class Setup(NamedTuple):
    """Arguments of a baseline. Without ``params``, torch draws the weights."""

    config: GPTConfig | LlamaConfig
    batch_size: int
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = True
    params: Tree | None = None


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


class GPT(nn.Module):
    """The model of ``fdp.models.gpt``, untied. ``per_sample`` looks up positions for every sample, as Opacus needs."""

    def __init__(self, config: GPTConfig, *, per_sample: bool = False):
        super().__init__()
        self.per_sample = per_sample
        tokens, positions = nn.Embedding(config.vocab_size, config.width), nn.Embedding(config.context, config.width)
        self.embed = nn.ModuleDict({"tokens": tokens, "positions": positions})
        self.blocks = nn.ModuleList(Layer(config.width, config.heads) for _ in range(config.layers))
        norm, weight = nn.LayerNorm(config.width), nn.Linear(config.width, config.vocab_size, bias=False)
        self.head = nn.ModuleDict({"norm": norm, "weight": weight})
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, ids: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens vocab"]:
        places = torch.arange(ids.shape[1], device=ids.device)
        if self.per_sample:
            places = places.repeat(ids.shape[0], 1)
        h = self.embed["tokens"](ids) + self.embed["positions"](places)
        for block in self.blocks:
            h = block(h)
        return self.head["weight"](self.head["norm"](h))


def make_module(setup: Setup, *, per_sample: bool = False) -> GPT:
    """Return the module on its device, with ``setup.params`` if given."""
    assert isinstance(setup.config, GPTConfig)
    with torch.device(setup.device):
        module = GPT(setup.config, per_sample=per_sample)
    if setup.params is not None:
        load(module, tree.flatten(setup.params), heads=setup.config.heads)
    return module


def load(module: GPT, params: Flat, *, heads: int) -> None:
    """Copy fdp's parameters: ``qkv`` becomes ``qkv.weight`` and ``qkv_bias`` ``qkv.bias``, with rows reordered."""
    for name, p in module.named_parameters():
        leaf = params[name.removesuffix(".weight").replace(".bias", "_bias")]
        if ".qkv." in name:  # fdp stores q, k, v head by head; here all of q, then k, then v
            rows = leaf.view(heads, 3, -1, *leaf.shape[1:])
            leaf = rows.transpose(0, 1).reshape(leaf.shape)
        with torch.no_grad():
            p.copy_(leaf)


def autocast(setup: Setup, *, cached: bool = True) -> torch.autocast:
    """Return an autocast to ``setup.dtype``; a CUDA graph must not use casts that were cached before it."""
    enabled = setup.dtype != torch.float32
    return torch.autocast(setup.device.type, torch.bfloat16, enabled=enabled, cache_enabled=cached)


def make_adamw(module: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True, **options)


def module_loss(setup: Setup, *, by_block: bool = False) -> tuple[GPT, Callable[[Tensor], Tensor]]:
    """Return the module and its mean loss of (batch, tokens + 1), compiled."""
    module = make_module(setup)
    if setup.compiled and by_block:
        for block in module.blocks:
            block.compile(fullgraph=True, dynamic=False)

    def loss(tokens: Tensor) -> Tensor:
        with autocast(setup, cached=False):
            return F.cross_entropy(module(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    if setup.compiled and not by_block:
        return module, torch.compile(loss, fullgraph=True, dynamic=False)
    return module, loss


def plain(setup: Setup) -> Candidate:
    """Build ``module``: no CUDA graph."""
    module, loss_of = module_loss(setup)
    optimizer = make_adamw(module)

    def step(tokens: Tensor, key: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return Candidate(step)


def graphed(setup: Setup, *, by_block: bool = False) -> Candidate:
    """Build ``module_graphs``: the whole step is captured after three steps on a side stream, then replayed."""
    module, loss_of = module_loss(setup, by_block=by_block)
    optimizer = make_adamw(module, capturable=True)
    tokens_in = torch.zeros(setup.batch_size, setup.config.context + 1, dtype=torch.int64, device=setup.device)
    graph = torch.cuda.CUDAGraph()
    out: list[Tensor] = []

    def one() -> Tensor:
        loss = loss_of(tokens_in)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def capture() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                one()
        torch.cuda.current_stream().wait_stream(side)
        gc.collect()
        torch.cuda.empty_cache()  # the graph has its own pool, as large as what the warm-up leaves in the cache
        with torch.cuda.graph(graph):
            out.append(one())

    def step(tokens: Tensor, key: Tensor) -> Tensor:
        tokens_in.copy_(tokens)
        if not out:
            capture()
        graph.replay()
        return out[0]

    return Candidate(step, graph=True)


def opacus(setup: Setup, *, ghost: bool) -> Candidate:
    """Build ``opacus`` or ``opacus_ghost``."""
    return private_by_opacus(make_module(setup, per_sample=True), setup, logits_of=lambda m, ids: m(ids), ghost=ghost)


def private_by_opacus(
    base: nn.Module, setup: Setup, *, logits_of: Callable[[nn.Module, Tensor], Tensor], ghost: bool
) -> Candidate:
    """Train a module, called by ``logits_of(module, ids)``, with Opacus, on the same batches as every other mode."""
    from opacus import PrivacyEngine  # pyright: ignore[reportMissingImports] (the extra `bench` installs it)

    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    example = TensorDataset(torch.zeros(setup.batch_size, 1))
    private: Any = PrivacyEngine().make_private(
        module=base,
        optimizer=make_adamw(base),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(example, batch_size=setup.batch_size),
        noise_multiplier=1.0,
        max_grad_norm=MAX_NORM,
        poisson_sampling=False,
        grad_sample_mode="ghost" if ghost else "hooks",
    )
    module, optimizer, criterion = private[:3] if ghost else (*private[:2], nn.CrossEntropyLoss())

    def step(tokens: Tensor, key: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with autocast(setup):
            logits = logits_of(module, tokens[:, :-1].contiguous())  # Opacus takes views of its inputs
            shape = {"shape": logits.shape} if ghost else {}
            loss = criterion(logits.flatten(0, 1), tokens[:, 1:].flatten(), **shape)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def norms() -> Tensor:
        if ghost:
            return module.per_sample_gradient_norms
        return torch.stack([g.float().flatten(1).norm(dim=1) for g in optimizer.grad_samples]).norm(dim=0)

    return Candidate(step, norms=norms)


BASELINES: dict[str, Callable[[Setup], Candidate]] = {
    "module": plain,
    "module_graphs": graphed,
    "module_blocks_graphs": partial(graphed, by_block=True),
    "opacus": partial(opacus, ghost=False),
    "opacus_ghost": partial(opacus, ghost=True),
}
