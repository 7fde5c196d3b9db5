"""Operands and checks of the kernels that ``benchmarks.kernels`` measures.

    near:   |found - expected| <= relative max |expected|
    norms:  | |found| - |exact| | <= 1.25 max(16, T) 2^-23 sum_t |g_t| |x_t|      rounding of float32 sums

Operands are random or, with ``cancelling``, sum to nearly nothing over tokens, which shows errors that random operands
hide. The exact result is computed in float64, one sample at a time. Samples differ in size, so that exchanging two of
them shows.

    >>> inputs = pair(Shape(batch=4, tokens=512, d=1280, p=5120), cancelling=True)
    >>> check_direct(inputs, launch_direct(*inputs))
    True
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from fdp_kernels import cross_entropy, embedding, noisy_adamw, token_sums
from fdp_kernels.direct import direct_reference, launch_direct
from fdp_kernels.keep import squared_norms_reference, weighted_sum_reference
from fdp_kernels.launch_tables import LaunchTables, Leaf
from fdp_kernels.weighted import launch_weighted
from torch import Tensor

VOCABULARY = 50257
DEVICE, DTYPE = "cuda", torch.bfloat16


class Shape(NamedTuple):
    """A problem of one matrix with ``d`` inputs and ``p`` outputs."""

    batch: int
    tokens: int
    d: int
    p: int

    @property
    def label(self) -> str:
        return f"{self.batch} x {self.tokens}, {self.d} -> {self.p}"


class Block(NamedTuple):
    """A problem of several matrices, (d, p) each, with equal samples and tokens."""

    batch: int
    tokens: int
    widths: tuple[tuple[int, int], ...]

    @property
    def label(self) -> str:
        return f"{self.batch} x {self.tokens}, a block"

    @property
    def matrices(self) -> list[Shape]:
        return [Shape(self.batch, self.tokens, d, p) for d, p in self.widths]


# ---------------------------------------------------------------- operands


def pair(shape: Shape, cancelling: bool = False) -> tuple[Tensor, Tensor]:
    """Return g (B, T, p), every sample larger than the one before, and x (B, T, d).

    If ``cancelling``, x is nearly constant over tokens and g sums to nearly 0.
    """
    batch, tokens, d, p = shape
    growing = 1 + torch.arange(batch, device=DEVICE, dtype=DTYPE) / batch
    g = torch.randn(batch, tokens, p, device=DEVICE, dtype=DTYPE) * growing[:, None, None]
    x = torch.randn(batch, tokens, d, device=DEVICE, dtype=DTYPE)
    if cancelling:
        g = g - g.mean(1, keepdim=True)
        x = 3 * x[:, :1] + 0.01 * x
    return g, x


def factors(batch: int) -> Tensor:
    return torch.rand(batch, device=DEVICE) + 0.1


def pair_and_factors(shape: Shape, cancelling: bool = False) -> tuple[Tensor, ...]:
    return *pair(shape, cancelling), factors(shape.batch)


def stored_gradients(shape: Shape, cancelling: bool = False) -> tuple[Tensor]:
    return (torch.randn(shape.batch, shape.p, shape.d, device=DEVICE, dtype=DTYPE),)


def random_ids(shape: Shape) -> Tensor:
    return torch.randint(0, VOCABULARY, (shape.batch, shape.tokens), device=DEVICE)


# ---------------------------------------------------------------- checks


def sizes(g: Tensor, x: Tensor) -> Tensor:
    norms = (torch.linalg.vector_norm(z, dim=-1, dtype=torch.float64) for z in (g, x))
    return math.prod(norms).sum(1)  # pyright: ignore


def exact_norms(g: Tensor, x: Tensor) -> Tensor:
    return torch.cat([direct_reference(g[b : b + 1], x[b : b + 1]) for b in range(len(g))])


def rounding_loss(g: Tensor) -> float:
    """Return the rounding bound of float32 sums over tokens, relative to ``sizes``; see ``fdp_kernels.ghost``."""
    return 1.25 * max(16, g.shape[1]) * 2**-23


def near(found: Tensor, expected: Tensor, relative: float) -> bool:
    return bool(((found - expected).abs() <= relative * expected.abs().max()).all())


def check_direct(inputs: tuple, found: Tensor) -> bool:
    """Check against the rounding of float32; above, also allow what ``tile_gemm.sum_of_squares`` rounds up."""
    g, x = inputs
    norms, exact, slack = found.sqrt(), exact_norms(g, x).sqrt(), rounding_loss(g) * sizes(g, x)
    return bool(((norms >= exact - slack) & (norms <= exact * (1 + 2.0**-15) + slack)).all())


def check_ghost(inputs: tuple, found: Tensor) -> bool:
    """Check: not below the exact norm, nor below what ``weighted`` adds; above by at most twice the rounding bound."""
    g, x = inputs
    exact, size = exact_norms(g, x), sizes(g, x)
    above = exact + (2 * rounding_loss(g) * size + 1e-6 * size).square() + 2 * 2.0e-4 * size.square()
    return bool((found >= exact).all() and (found >= launch_direct(g, x)).all() and (found <= 1.5 * above).all())


def check_keep(inputs: tuple, found: tuple[Tensor, Tensor]) -> bool:
    (g, x), (G, parts) = inputs, found
    squared, exact = parts.sum(1), squared_norms_reference(G)
    good = bool((squared >= exact * (1 - 1e-12)).all() and (squared <= exact * (1 + 2.0**-14)).all())
    for b, size in enumerate(sizes(g, x)):
        exact = g[b].double().mT @ x[b].double()
        good = good and bool((G[b].double() - exact).norm() <= 2**-8 * exact.norm() + rounding_loss(g) * size)
    return good


def check_weighted(inputs: tuple, found: Tensor) -> bool:
    """Check against the exact sum; and one sample's part against ``direct``, which rounds up."""
    g, x, c = inputs
    exact = sum(c[b].double() * (g[b].double().mT @ x[b].double()) for b in range(len(g)))
    close = (found.double() - exact).norm() <= (rounding_loss(g) + 2**-20) * (c * sizes(g, x)).sum()
    one_hot = (torch.arange(len(g), device=DEVICE) == len(g) - 1).float()
    single, measured = launch_weighted(g, x, one_hot).double().square().sum(), launch_direct(g, x)[-1]
    return bool(close) and bool((measured >= single * (1 - 1e-12)) & (measured <= single * (1 + 2.0**-14)))


def check_stored_norms(inputs: tuple, found: Tensor) -> bool:
    return near(found, squared_norms_reference(inputs[0]), 1e-12)


def check_stored_sum(inputs: tuple, found: Tensor) -> bool:
    G, c = inputs
    return near(found, weighted_sum_reference(G, c, torch.float32), 1e-7)


def check_token_sums(inputs: tuple, found: tuple[Tensor, Tensor]) -> bool:
    reference = token_sums.token_sums_reference if len(inputs) == 1 else token_sums.token_product_sums_reference
    sums, squares = found
    size = math.prod(z.double().abs() for z in inputs).sum(1)  # pyright: ignore
    close = (sums - reference(*(z.double() for z in inputs))[0]).abs() <= 2**-17 * size
    return bool(close.all()) and near(squares.sum(1), sums.double().square().sum(1), 1e-12)


def check_embedding_norms(inputs: tuple, found: Tensor) -> bool:
    return near(found, embedding.embedding_norms_reference(*inputs), 1e-5)


def check_embedding_sum(inputs: tuple, found: Tensor) -> bool:
    ids, g, c = inputs
    return near(found, embedding.embedding_sum_reference(ids, g, c, VOCABULARY), 1e-5)


# ---------------------------------------------------------------- other kernels' operands and runs


def logits_and_targets(shape: Shape, cancelling: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    rows = shape.batch * shape.tokens
    logits = torch.randn(rows, shape.p, device=DEVICE, dtype=DTYPE)
    return logits, torch.randint(0, shape.p, (rows,), device=DEVICE), logits.clone()


def check_softmax_gradient(inputs: tuple, losses: Tensor) -> bool:
    gradient, targets, logits = inputs
    rows = slice(0, 512)
    wide = logits[rows].double()
    expected = cross_entropy.softmax_gradient_reference(wide, targets[rows], None, 1.0)
    return near(losses[rows].double(), expected, 1e-5) and near(gradient[rows].double(), wide, 2**-8)


class Update(NamedTuple):
    """One leaf for AdamW, a copy for the reference, and torch's optimizer on a third copy."""

    leaf: Any
    twin: Any
    tables: Any
    keys: Tensor
    scalars: Tensor
    fused: torch.optim.AdamW
    cast: Tensor


HYPER = noisy_adamw.Hyper(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.01, noise_std=0.0, eps_root=0.0)


def make_update(shape: Shape, cancelling: bool = False) -> tuple[Update]:
    size = shape.p, shape.d
    rows, param = torch.randn(1, *size, device=DEVICE), torch.randn(size, device=DEVICE)

    def leaf() -> Any:
        copy = torch.empty(size, device=DEVICE, dtype=DTYPE)
        mean, square = torch.zeros(size, device=DEVICE), torch.zeros(size, device=DEVICE)
        ones = torch.ones(1, device=DEVICE)
        return Leaf(rows, ones, param.clone(), mean, square, copy, first=0, decay=True)

    plain = param.clone().requires_grad_()
    plain.grad = rows[0].clone()
    optimizer = torch.optim.AdamW([plain], lr=1e-3, fused=True, capturable=DEVICE == "cuda")
    keys = torch.randint(0, 1 << 32, (1, 8), device=DEVICE)
    scalars = torch.tensor([1.0, 0.25, 10.0, 1000.0, 1e-3, 2.0**-20, 0], dtype=torch.float64, device=DEVICE)
    cast = torch.empty(size, device=DEVICE, dtype=DTYPE)
    return (Update(leaf(), leaf(), LaunchTables(), keys, scalars, optimizer, cast),)


def run_update(update: Update) -> None:
    noisy_adamw.update_leaves_([update.leaf], update.keys, update.scalars, HYPER, update.tables)


def run_fused_adamw(update: Update) -> None:
    update.fused.step()
    update.cast.copy_(update.fused.param_groups[0]["params"][0].detach())


def check_update(inputs: tuple, found: None) -> bool:
    (update,) = inputs
    noisy_adamw.noisy_adamw_reference_([update.twin], update.keys, update.scalars, HYPER)
    return near(update.leaf.param, update.twin.param, 1e-5)
