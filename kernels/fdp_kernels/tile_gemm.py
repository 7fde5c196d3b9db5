"""Tiles of the two matrix products that the linear-layer kernels share, and how their operands are passed.

    outer(b, i, j) = g_b[:, tile i]^T x_b[:, tile j]     (P, D)   summed over tokens, BLOCK_T at a time
    inner(b, i, j) = z_b[tile i] z_b[tile j]^T           (R, R)   summed over features, in chunks

Operands are bfloat16, float16 or float32 (float32 products are never rounded to TF32); sums are float32. The order of
summation depends only on the depth of a step, so ``direct`` measures bit for bit what ``weighted`` adds. Operands are
read through tensor descriptors (TMA) with three dims: reads past a sample's last token give zero, never the next
sample's first token.

    >>> g, x = make_descriptor(g, (1, 64, 128)), make_descriptor(x, (1, 64, 256))
    >>> acc = outer(g, x, b, i, j, T, BLOCK_P=128, BLOCK_D=256, BLOCK_T=64)             # in a body

The matrices of a block are often too small to fill a device: 200 tiles on 132 multiprocessors take as long as 264. So
one launch takes the pairs of up to MATRICES_PER_LAUNCH matrices with equal samples and tokens, and each program picks
its own.

Letters: B samples, T tokens, P (p) output features, D (d) input features, K a step in depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fdp_kernels.op import jit, tl


class Tile(NamedTuple):
    """A tile of ``rows x columns`` outputs, computed ``depth`` at a time, and its launch options.

    If ``per_sm`` is 0, every tile has its own program. Otherwise each multiprocessor runs that many programs, which
    loop over tiles and prefetch the next tile's operands while they finish the last.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    per_sm: int = 0
    group: int = 8


class TileChoice(NamedTuple):
    """An entry of a table of tiles: chosen if it cuts the problem into at least ``min_tiles`` tiles."""

    min_tiles: int
    tile: Tile


FLOAT32_TILE = Tile(64, 64, 32, warps=8, stages=2)
"""The tile for float32, which has no exact tensor cores."""


def choose_tile(table: Sequence[TileChoice], dtype: torch.dtype, count: Callable[[Tile], int]) -> Tile:
    """Return the first tile of the table that gives enough tiles, else the last."""
    if dtype == torch.float32:
        return FLOAT32_TILE
    return next((tile for least, tile in table if count(tile) >= least), table[-1].tile)


def cdiv(n: int, block: int) -> int:
    """Return ``ceil(n / block)``."""
    return -(-n // block)


def tiles_per_sample(g_BTP: Tensor, x_BTD: Tensor, tile: Tile) -> int:
    """Return the number of tiles in one sample's gradient."""
    return cdiv(g_BTP.shape[-1], tile.rows) * cdiv(x_BTD.shape[-1], tile.columns)


def count_tiles(gs: Sequence[Tensor], xs: Sequence[Tensor], times: int, tile: Tile) -> list[int]:
    """Return the number of tiles of every pair, each computed for ``times`` samples or parts."""
    return [times * tiles_per_sample(g, x, tile) for g, x in zip(gs, xs)]


MATRICES_PER_LAUNCH = 4
"""Pairs (g, x) that one launch takes."""


def slices_of_four(items: Sequence[Any]) -> list[slice]:
    """Return the slice of items that each launch takes."""
    return [slice(i, i + MATRICES_PER_LAUNCH) for i in range(0, len(items), MATRICES_PER_LAUNCH)]


def pad_to_four(items: Sequence[Any]) -> list[Any]:
    """Repeat the first item until there are four; no program picks a repeated one."""
    return [*items, *[items[0]] * (MATRICES_PER_LAUNCH - len(items))]


def launch_by_four(launch: Callable[..., Iterable[Any]], *operands: Any) -> list[Any]:
    """Call ``launch`` with up to four items of every operand at a time; return the results of all calls in order."""
    return [out for four in slices_of_four(operands[0]) for out in launch(*(items[four] for items in operands))]


def outer_options(tile: Tile) -> dict[str, int]:
    """Return the constants and launch options of a body that calls :func:`outer`."""
    blocks = {"BLOCK_P": tile.rows, "BLOCK_D": tile.columns, "BLOCK_T": tile.depth, "GROUP": tile.group}
    return {**blocks, "num_warps": tile.warps, "num_stages": tile.stages}


def chunk_features(width: int, depth: int, chunk: int) -> tuple[int, int]:
    """Return how :func:`inner` splits features: the number of chunks, and the features of one."""
    chunks = cdiv(width, chunk)
    return chunks, min(width, cdiv(cdiv(width, depth), chunks) * depth)


# ---------------------------------------------------------------- operands


def check_pair(g_BTP: Tensor, x_BTD: Tensor) -> None:
    """Check that g and x have three dims and equal samples, tokens, dtype and device."""
    same = g_BTP.shape[:-1] == x_BTD.shape[:-1] and g_BTP.dtype == x_BTD.dtype and g_BTP.device == x_BTD.device
    if g_BTP.ndim != 3 or x_BTD.ndim != 3 or not same or not g_BTP.is_floating_point():
        got = (f"{name} {tuple(z.shape)} {z.dtype} {z.device}" for name, z in (("g", g_BTP), ("x", x_BTD)))
        raise ValueError(
            "expected g (batch, tokens, outputs) and x (batch, tokens, inputs) of one floating dtype on one device, "
            f"got {' and '.join(got)}"
        )


def check_pairs(gs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """Check that there is at least one pair, and that pairs differ only in their numbers of features."""
    if len(gs) != len(xs) or not gs:
        raise ValueError(f"expected as many g as x, and at least one, got {len(gs)} and {len(xs)}")
    for g, x in zip(gs, xs):
        check_pair(g, x)
    if len({(g.shape[:2], g.dtype, g.device) for g in gs}) > 1:
        got = ", ".join(f"{tuple(g.shape)} {g.dtype} {g.device}" for g in gs)
        raise ValueError(f"expected pairs with equal samples, tokens, dtype and device, got g {got}")


def can_launch(*operands: Tensor) -> bool:
    """Return True if the bodies take these operands; float64 and empty ones need the reference."""
    return all(z.numel() > 0 and z.dtype in (torch.bfloat16, torch.float16, torch.float32) for z in operands)


def align_rows(z_BTK: Tensor) -> Tensor:
    """Return ``z``, or a copy, with contiguous features and 16-byte aligned rows, as a tensor descriptor needs.

    An odd number of features (a vocabulary of 50257) costs a copy here. To avoid it, allocate rows with a padded stride
    and pass the view.
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


def make_descriptor(z_BTK: Tensor, block: Sequence[int]) -> Any:
    """Return a tensor descriptor of a tensor from :func:`align_rows`: made on the host, passed by value, graph-safe."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(z_BTK, list(z_BTK.shape), descriptor_strides(z_BTK), list(block))


def descriptor_strides(z_BTK: Tensor) -> list[int]:
    """Return the strides of a tensor from :func:`align_rows`; a dim of one element, whose own may be unaligned, too."""
    unit = 16 // z_BTK.element_size()
    row = cdiv(z_BTK.shape[-1], unit) * unit
    return [*(step if size > 1 else row for size, step in zip(z_BTK.shape[:-1], z_BTK.stride())), 1]


def pair_descriptors(gs: Sequence[Tensor], xs: Sequence[Tensor], tile: Tile) -> list[Any]:
    """Return descriptors of four g, then of four x, for ``outer``."""
    lefts = [make_descriptor(align_rows(g), (1, tile.depth, tile.rows)) for g in gs]
    rights = [make_descriptor(align_rows(x), (1, tile.depth, tile.columns)) for x in xs]
    return pad_to_four(lefts) + pad_to_four(rights)


def widths_and_ends(gs: Sequence[Tensor], xs: Sequence[Tensor], counts: Sequence[int]) -> list[int]:
    """Return output features of four, input features of four, and where the programs of the first three end."""
    widths = pad_to_four([g.shape[-1] for g in gs]) + pad_to_four([x.shape[-1] for x in xs])
    return widths + first_ends(counts)


def first_ends(counts: Sequence[int]) -> list[int]:
    """Return where the programs of the first three matrices end: those of a missing one where the last do."""
    ends = list(accumulate(counts))
    return [*ends, *ends[-1:] * MATRICES_PER_LAUNCH][: MATRICES_PER_LAUNCH - 1]


def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; 2 in the interpreter."""
    return _multiprocessors(device.index) if device.type == "cuda" else 2


@cache
def _multiprocessors(index: int | None) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_programs(total: int, tile: Tile, device: torch.device) -> int:
    """Return the number of programs that share ``total`` tiles."""
    if tile.per_sm == 0:
        return total
    return min(total, tile.per_sm * multiprocessors(device))


# ---------------------------------------------------------------- bodies


@jit
def pick(matrix, first, second, third, fourth):
    """Return the argument of one of four matrices: descriptors, pointers or numbers."""
    if matrix == 0:
        picked = first
    elif matrix == 1:
        picked = second
    elif matrix == 2:
        picked = third
    else:
        picked = fourth
    return picked


@jit
def matrix_index(index, end0, end1, end2):
    """Return the matrix to which the index-th program belongs."""
    return (index >= end0).to(tl.int32) + (index >= end1).to(tl.int32) + (index >= end2).to(tl.int32)


@jit
def tile_position(index, rows, columns, GROUP: tl.constexpr):
    """Return row and column of the index-th tile, GROUP rows at a time: concurrent tiles share operands in L2."""
    per_group = GROUP * columns
    first = index // per_group * GROUP
    height = tl.minimum(rows - first, GROUP)
    within = index % per_group
    return first + within % height, within // height


@jit
def outer(g, x, b, i, j, tokens, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return ``g_b[:, tile i]^T x_b[:, tile j]`` in float32."""
    acc = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for step in tl.range(0, tl.cdiv(tokens, BLOCK_T)):
        g_TP = g.load([b, step * BLOCK_T, i * BLOCK_P]).reshape(BLOCK_T, BLOCK_P)
        x_TD = x.load([b, step * BLOCK_T, j * BLOCK_D]).reshape(BLOCK_T, BLOCK_D)
        acc = tl.dot(tl.trans(g_TP), x_TD, acc, input_precision="ieee")
    return acc


@jit
def inner(z, b, i, j, width, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, CHUNK: tl.constexpr):
    """Return ``z_b[tile i] z_b[tile j]^T`` in float32.

    Each accumulator takes about CHUNK features, and the accumulators are then added: rounding grows with their number,
    not with the number of features. See :func:`chunk_features`.
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
    """Return the sum of squares of all elements, rounded up, so never understated.

    Rows (at most 256 columns) are summed in float32 and the row sums in float64: conversions to float64 are slow, so
    there is one per row, not one per element. A float32 sum of n non-negative numbers loses at most (n - 1) 2^-24 of
    itself; adding 2^-15 covers that and the rounding of the squares. (Elements below 1e-19 count as 0, because float32
    cannot hold their squares.)
    """
    wide = z.to(tl.float32)
    return tl.sum(tl.sum(wide * wide, 1).to(tl.float64)) * (1 + 2.0**-15)
