"""Tiles of two products, the same in every kernel that needs them, and how their operands are handed over.

    outer(b, i, j) = g_b[:, tile i]^T x_b[:, tile j]     (P, D)   summed over tokens, BLOCK_T at a time
    inner(b, i, j) = z_b[tile i] z_b[tile j]^T           (R, R)   summed over features, in chunks

Operands are bfloat16, float16 or float32 (products of float32 are never rounded to tf32), sums float32. The order of
summation depends on the depth of a step alone, so ``direct`` measures bit for bit what ``weighted`` adds. Operands are
read through tensor descriptors (TMA) of three dims: what is beyond a sample's last token is zero, never the next
sample's first token.

    >>> g, x = described(g, (1, 64, 128)), described(x, (1, 64, 256))
    >>> acc = outer(g, x, b, i, j, T, BLOCK_P=128, BLOCK_D=256, BLOCK_T=64)             # in a body

Matrices of a block are often too small for a device: 200 tiles on 132 multiprocessors take as long as 264. So kernels
take the pairs of up to FOUR matrices, alike in samples and tokens, and a program picks its own.

Letters: B samples, T tokens, P (p) output features, D (d) input features, K a step in depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fdp_kernels.op import jit, tl


class Tile(NamedTuple):
    """A tile of ``rows x columns`` outputs, ``depth`` deep at a time, and how it is run.

    ``per_sm`` = 0: one program a tile; otherwise that many programs on every multiprocessor, each of which takes
    tile after tile and fetches the next one's operands while it ends the last.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    per_sm: int = 0
    group: int = 8


class Row(NamedTuple):
    """A row of a table of tiles: taken if it makes at least ``programs`` tiles of the problem."""

    programs: int
    tile: Tile


FLOAT32 = Tile(64, 64, 32, warps=8, stages=2)
"""For float32, which has no exact tensor cores."""


def choose(table: Sequence[Row], dtype: torch.dtype, count: Callable[[Tile], int]) -> Tile:
    """The first tile of the table of which the problem has enough; the last one if none."""
    if dtype == torch.float32:
        return FLOAT32
    return next((tile for least, tile in table if count(tile) >= least), table[-1].tile)


def tiles(n: int, block: int) -> int:
    return -(-n // block)


def tiles_of(g_BTP: Tensor, x_BTD: Tensor, tile: Tile) -> int:
    """Of a sample's gradient."""
    return tiles(g_BTP.shape[-1], tile.rows) * tiles(x_BTD.shape[-1], tile.columns)


FOUR = 4
"""Pairs that one launch takes."""


def fours(items: Sequence[Any]) -> list[slice]:
    """Where the items of every launch are."""
    return [slice(i, i + FOUR) for i in range(0, len(items), FOUR)]


def filled(items: Sequence[Any]) -> list[Any]:
    """Up to four arguments as exactly four; no program picks one that was filled in."""
    return [*items, *[items[0]] * (FOUR - len(items))]


def chunks_of(width: int, depth: int, chunk: int) -> tuple[int, int]:
    """How :func:`inner` cuts features: chunks, and features of one."""
    chunks = tiles(width, chunk)
    return chunks, min(width, tiles(tiles(width, depth), chunks) * depth)


# ---------------------------------------------------------------- operands


def check_pair(g_BTP: Tensor, x_BTD: Tensor) -> None:
    """Two tensors of three dims that agree in samples, tokens, dtype and device."""
    same = g_BTP.shape[:-1] == x_BTD.shape[:-1] and g_BTP.dtype == x_BTD.dtype and g_BTP.device == x_BTD.device
    if g_BTP.ndim != 3 or x_BTD.ndim != 3 or not same or not g_BTP.is_floating_point():
        got = (f"{name} {tuple(z.shape)} {z.dtype} {z.device}" for name, z in (("g", g_BTP), ("x", x_BTD)))
        raise ValueError(
            "expected g (batch, tokens, outputs) and x (batch, tokens, inputs) of one floating dtype on one device, "
            f"got {' and '.join(got)}"
        )


def check_pairs(gs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """One pair or more, alike in all but their numbers of features."""
    if len(gs) != len(xs) or not gs:
        raise ValueError(f"expected as many g as x, and one at least, got {len(gs)} and {len(xs)}")
    for g, x in zip(gs, xs):
        check_pair(g, x)
    if len({(g.shape[:2], g.dtype, g.device) for g in gs}) > 1:
        got = ", ".join(f"{tuple(g.shape)} {g.dtype} {g.device}" for g in gs)
        raise ValueError(f"expected pairs alike in samples, tokens, dtype and device, got g {got}")


def launchable(*operands: Tensor) -> bool:
    """What the bodies can take; float64 and empty operands are left to the reference."""
    return all(z.numel() > 0 and z.dtype in (torch.bfloat16, torch.float16, torch.float32) for z in operands)


def aligned(z_BTK: Tensor) -> Tensor:
    """``z``, or a copy of it that a tensor descriptor can address: 16-byte aligned rows, features side by side.

    An odd number of features (a vocabulary of 50257) costs a copy here; a caller who can choose gives its rows a
    padded stride and passes the view.
    """
    unit = 16 // z_BTK.element_size()
    steps = [step for size, step in zip(z_BTK.shape[:-1], z_BTK.stride()) if size > 1]
    if (
        (z_BTK.stride(-1) == 1 or z_BTK.shape[-1] == 1)
        and z_BTK.data_ptr() % 16 == 0
        and all(step > 0 and step % unit == 0 for step in steps)
    ):
        return z_BTK
    width = z_BTK.shape[-1]
    return F.pad(z_BTK, (0, -width % unit)).clone(memory_format=torch.contiguous_format)[..., :width]


def described(z_BTK: Tensor, block: Sequence[int]) -> Any:
    """A tensor descriptor of an :func:`aligned` tensor, made on the host and passed by value: safe in a CUDA graph."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    unit = 16 // z_BTK.element_size()
    row = (
        -(-z_BTK.shape[-1] // unit) * unit
    )  # dims of one element may have any stride; a descriptor wants an aligned one
    strides = [step if size > 1 else row for size, step in zip(z_BTK.shape[:-1], z_BTK.stride())]
    return TensorDescriptor(z_BTK, list(z_BTK.shape), [*strides, 1], list(block))


def described_pairs(gs: Sequence[Tensor], xs: Sequence[Tensor], tile: Tile) -> list[Any]:
    """Descriptors of four g, then of four x, for ``outer``."""
    lefts = [described(aligned(g), (1, tile.depth, tile.rows)) for g in gs]
    rights = [described(aligned(x), (1, tile.depth, tile.columns)) for x in xs]
    return filled(lefts) + filled(rights)


def extents(gs: Sequence[Tensor], xs: Sequence[Tensor], counts: Sequence[int]) -> list[int]:
    """Output features of four, input features of four, and where the programs of the first three end: for ``which``."""
    ends = list(accumulate(counts))
    widths = filled([g.shape[-1] for g in gs]) + filled([x.shape[-1] for x in xs])
    return widths + [*ends, *ends[-1:] * FOUR][: FOUR - 1]


@cache
def _multiprocessors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def programs(total: int, tile: Tile, device: torch.device) -> int:
    """How many programs share ``total`` tiles."""
    if tile.per_sm == 0:
        return total
    processors = _multiprocessors(device.index) if device.type == "cuda" else 2  # the interpreter walks several tiles
    return min(total, tile.per_sm * processors)


# ---------------------------------------------------------------- bodies


@jit
def pick(use, first, second, third, fourth):
    """The ``use``-th of four arguments of one type: descriptors, pointers or numbers."""
    if use == 0:
        found = first
    elif use == 1:
        found = second
    elif use == 2:
        found = third
    else:
        found = fourth
    return found


@jit
def which(index, end0, end1, end2):
    """The use whose programs, in turn, the index is one of."""
    return (index >= end0).to(tl.int32) + (index >= end1).to(tl.int32) + (index >= end2).to(tl.int32)


@jit
def place(index, rows, columns, GROUP: tl.constexpr):
    """Row and column of the index-th tile, GROUP rows at a time, so that neighbours in time share operands in L2."""
    whole = GROUP * columns
    first = index // whole * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = index % whole
    return first + within % height, within // height


@jit
def outer(g, x, b, i, j, tokens, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr):
    """``g_b[:, tile i]^T x_b[:, tile j]`` in float32."""
    acc = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for step in tl.range(0, tl.cdiv(tokens, BLOCK_T)):
        g_TP = g.load([b, step * BLOCK_T, i * BLOCK_P]).reshape(BLOCK_T, BLOCK_P)
        x_TD = x.load([b, step * BLOCK_T, j * BLOCK_D]).reshape(BLOCK_T, BLOCK_D)
        acc = tl.dot(tl.trans(g_TP), x_TD, acc, input_precision="ieee")
    return acc


@jit
def inner(z, b, i, j, width, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr):
    """``z_b[tile i] z_b[tile j]^T`` in float32.

    About CHUNK features go into one accumulator, and the accumulators into the sum: rounding grows with their number
    and not with that of the features. See :func:`chunks_of`.
    """
    chunks = tl.cdiv(width, CHUNK)
    steps = tl.cdiv(tl.cdiv(width, BLOCK_K), chunks)
    total = tl.zeros((BLOCK_R, BLOCK_R), tl.float32)
    for chunk in tl.range(0, chunks, flatten=True):
        acc = tl.zeros((BLOCK_R, BLOCK_R), tl.float32)
        for step in tl.range(0, steps):
            z_RK = z.load([b, i * BLOCK_R, (chunk * steps + step) * BLOCK_K]).reshape(BLOCK_R, BLOCK_K)
            z_SK = z.load([b, j * BLOCK_R, (chunk * steps + step) * BLOCK_K]).reshape(BLOCK_R, BLOCK_K)
            acc = tl.dot(z_RK, tl.trans(z_SK), acc, input_precision="ieee")
        total += acc
    return total


@jit
def sum_of_squares(z):
    """Of all elements: rows in float32, at most 256 columns each, their sum in float64; rounded up, never understated.

    A sum of n numbers that are not negative loses at most (n - 1) 2^-24 of itself: 2^-15 more covers the squares too.
    Conversions to float64 are slow, and so are these a row and not an element at a time. (Elements below 1e-19, whose
    squares float32 does not hold, count as 0.)
    """
    wide = z.to(tl.float32)
    return tl.sum(tl.sum(wide * wide, 1).to(tl.float64)) * (1 + 2.0**-15)
