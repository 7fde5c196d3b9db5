"""Baselines that fdp is compared with: GPT and Llama as an ``nn.Module``, trained plainly and with Opacus 1.6.

| mode                   | step                                                                                   |
|------------------------|----------------------------------------------------------------------------------------|
| `module`               | the whole model and its loss in one torch.compile graph, fused AdamW                   |
| `module_graphs`        | the same, and the whole step (forward, backward, AdamW) in one CUDA graph              |
| `module_blocks_graphs` | as `module_graphs`, but every layer compiled on its own: compiles faster               |
| `opacus`               | Opacus, per-sample gradients by hooks; eager, because its hooks do not compile         |
| `opacus_ghost`         | Opacus, fast gradient clipping (ghost norms, two backwards); eager                     |

A step takes one or several microbatches, whose gradients or clipped sums are added up in float32. All have float32
master weights, bfloat16 autocast with torch's fused attention, and torch's fused AdamW. Opacus is set
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
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.modes import LEARNING_RATE, MAX_NORM, WEIGHT_DECAY, Candidate
from benchmarks.modules import GPT, Config, Llama, load, make_module
from fdp import tree
from fdp.types import Tree

WARM_UP_STEPS = 3


class Setup(NamedTuple):
    """Arguments of a baseline. Without ``params``, torch draws the weights.

    A step takes any number of samples that ``batch_size``, the size of a microbatch, divides. ``samples`` is the
    expected number of samples of a step; default: one microbatch.
    """

    config: Config
    batch_size: int
    device: torch.device
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = True
    params: Tree | None = None
    learning_rate: float = LEARNING_RATE
    samples: int | None = None


def module_of(setup: Setup, *, per_sample: bool = False) -> GPT | Llama:
    """Return the module on its device, with ``setup.params`` if given."""
    module = make_module(setup.config, setup.device, per_sample=per_sample)
    if setup.params is not None:
        load(module, tree.flatten(setup.params), setup.config)
    return module


def autocast(setup: Setup, *, cached: bool = True) -> torch.autocast:
    """Return an autocast to ``setup.dtype``; a CUDA graph must not use casts that were cached before it."""
    enabled = setup.dtype != torch.float32
    return torch.autocast(setup.device.type, torch.bfloat16, enabled=enabled, cache_enabled=cached)


def make_adamw(module: nn.Module, setup: Setup, **options: Any) -> torch.optim.AdamW:
    rate = setup.learning_rate
    return torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=WEIGHT_DECAY, fused=True, **options)


def module_loss(setup: Setup, *, by_block: bool = False) -> tuple[GPT | Llama, Callable[[Tensor], Tensor]]:
    """Return the module and its mean loss of (batch, tokens + 1), compiled."""
    module = module_of(setup)
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
    optimizer = make_adamw(module, setup)

    def step(tokens: Tensor, key: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        microbatches, losses = tokens.split(setup.batch_size), []
        for each in microbatches:
            loss = loss_of(each)
            (loss / len(microbatches)).backward()
            losses.append(loss.detach())
        optimizer.step()
        return torch.stack(losses)

    return Candidate(step)


def graphed(setup: Setup, *, by_block: bool = False) -> Candidate:
    """Build ``module_graphs``: the whole step is captured after three steps on a side stream, then replayed."""
    if setup.samples not in (None, setup.batch_size):
        return graphed_microbatches(setup, by_block=by_block)
    module, loss_of = module_loss(setup, by_block=by_block)
    optimizer = make_adamw(module, setup, capturable=True)
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


def graphed_microbatches(setup: Setup, *, by_block: bool) -> Candidate:
    """Build ``module_graphs`` for steps of several microbatches: one graph for a microbatch and one for AdamW.

    Gradients are added up in float32, where they stay allocated between the graphs.
    """
    module, loss_of = module_loss(setup, by_block=by_block)
    optimizer = make_adamw(module, setup, capturable=True)
    assert setup.samples is not None
    share = setup.batch_size / setup.samples
    tokens_in = torch.zeros(setup.batch_size, setup.config.context + 1, dtype=torch.int64, device=setup.device)
    graphs = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
    out: list[Tensor] = []

    def microbatch() -> Tensor:
        loss = loss_of(tokens_in)
        (share * loss).backward()
        return loss.detach()

    def finish() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    def capture() -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_STEPS):
                microbatch()
                finish()
        torch.cuda.current_stream().wait_stream(side)
        gc.collect()
        torch.cuda.empty_cache()
        with torch.cuda.graph(graphs[0]):
            out.append(microbatch())
        with torch.cuda.graph(graphs[1], pool=graphs[0].pool()):
            finish()

    def step(tokens: Tensor, key: Tensor) -> Tensor:
        losses = []
        for each in tokens.split(setup.batch_size):
            tokens_in.copy_(each)
            if not out:
                capture()
            graphs[0].replay()
            losses.append(out[0].clone())
        graphs[1].replay()
        return torch.stack(losses)

    return Candidate(step, graph=True)


def opacus(setup: Setup, *, ghost: bool) -> Candidate:
    """Build ``opacus`` or ``opacus_ghost``."""
    return private_by_opacus(module_of(setup, per_sample=True), setup, logits_of=lambda m, ids: m(ids), ghost=ghost)


def private_by_opacus(
    base: nn.Module, setup: Setup, *, logits_of: Callable[[nn.Module, Tensor], Tensor], ghost: bool
) -> Candidate:
    """Train a module, called by ``logits_of(module, ids)``, with Opacus, on the same batches as every other mode.

    A step does what Opacus' ``BatchMemoryManager`` does with a logical batch: every microbatch but the last signals to
    skip the update, so that clipped sums are added up, and the last one adds noise and updates.
    """
    from opacus import PrivacyEngine  # pyright: ignore[reportMissingImports] (the extra `bench` installs it)

    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    samples = setup.samples or setup.batch_size
    private: Any = PrivacyEngine().make_private(
        module=base,
        optimizer=make_adamw(base, setup),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(torch.zeros(samples, 1)), batch_size=samples),
        noise_multiplier=1.0,
        max_grad_norm=MAX_NORM,
        poisson_sampling=False,
        grad_sample_mode="ghost" if ghost else "hooks",
    )
    module, optimizer, criterion = private[:3] if ghost else (*private[:2], nn.CrossEntropyLoss())

    def step(tokens: Tensor, key: Tensor) -> Tensor:
        microbatches, losses = tokens.split(setup.batch_size), []
        for i, each in enumerate(microbatches):
            optimizer.signal_skip_step(do_skip=i + 1 < len(microbatches))
            optimizer.zero_grad(set_to_none=True)
            with autocast(setup):
                logits = logits_of(module, each[:, :-1].contiguous())  # Opacus takes views of its inputs
                shape = {"shape": logits.shape} if ghost else {}
                loss = criterion(logits.flatten(0, 1), each[:, 1:].flatten(), **shape)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            del logits, loss
        return torch.stack(losses)

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
