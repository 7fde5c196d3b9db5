"""A weighted sum of rows, Gaussian noise, the mean, AdamW and the cast: one in-place pass over every leaf.

    sum_i   = Σ_s factors[s] rows[s, i]                          float64; a row with factor 0 is not read
    noisy_i = grid round((sum_i + noise_scale z_i) / grid)       float64; z_i = normal(key of the leaf)[first + i]
    g_i     = float32(inverse_batch noisy_i)
    m       = m + (1 - b1) (g - m)        v = v + (1 - b2) (g² - v)                                   float32 from here
    p       = p - learning_rate (m mean_factor / (√max(v square_factor - noise_std², eps_root²) + eps) + weight_decay p)
    copy    = p in the compute dtype

Without a second moment (``b2`` and ``square`` None) it is momentum:

    m = b1 m + g          p = p - learning_rate (m + weight_decay p)

Nothing is rounded to less than float64 before the noise is added. The noised sum is rounded to a public grid, a power
of two, before it is used; without noise nothing is rounded to the grid. Values that change from step to step are read
from a float64 tensor on the device, ``scalars`` = (noise_scale, inverse_batch, mean_factor, square_factor,
learning_rate, grid, step), so that a captured graph can be replayed. All leaves with equal dtypes, number of rows and
alignment share one launch (``launch_tables.py``).

    >>> tables = LaunchTables()                                  # held by the caller, from step to step
    >>> leaves = [Leaf(rows_SI, factors_S, param_I, mean_I, square_I, copy_I, first=0, decay=True), ...]
    >>> update_leaves_(leaves, keys_LK, scalars, hyper, tables)  # keys None: no noise
    >>> noisy_adamw_(rows, factors, params, ...)                 # the same as one op; builds its tables every time

Letters: L leaves, S rows, I elements of a leaf (any shape), K = 8 key words. rows bfloat16, float32 or float64; factors
float32 or float64; param float32; mean, square float32, or both bfloat16: then they are computed in float32, used, and
rounded stochastically (``stochastic_rounding.py``); copy any float. Bytes per element: S rows + 24 (16) + copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fdp_kernels.chacha20 import ELEMENTS_PER_BLOCK, MAX_BLOCKS
from fdp_kernels.keep import weighted_sum_reference
from fdp_kernels.launch_tables import LaunchTables, Leaf, can_update
from fdp_kernels.normal import normal
from fdp_kernels.normal_triton import ratio, wide_normal_tile
from fdp_kernels.op import define, jit, tl, triton
from fdp_kernels.stochastic_rounding import random_bits, random_bits_reference, round_by_bits, round_reference

SCALARS = 7
"""Length of ``scalars``."""
REGISTERS = 128
"""Registers of a thread: then 16 warps share a multiprocessor, and some load while others compute noise."""


class Hyper(NamedTuple):
    """Hyperparameters that stay the same from step to step. ``b2`` None: no second moment."""

    b1: float
    b2: float | None
    eps: float
    weight_decay: float
    noise_std: float
    eps_root: float


# ---------------------------------------------------------------- reference


def update_leaf_reference_(leaf: Leaf, noise: Tensor | None, scalars: Tensor, hyper: Hyper) -> None:
    """Update one leaf, given its noise. Parameters may have any dtype; moments are float32, or float64 for float64.

    Moments in bfloat16 are rounded stochastically.
    """
    if leaf.mean.dtype == torch.bfloat16:
        _update_narrow_(leaf, noise, scalars, hyper)
        return
    noise_scale, inverse_batch, mean_factor, square_factor, learning_rate, grid, _ = scalars.unbind()
    total = weighted_sum_reference(leaf.rows, leaf.factors, torch.float64)
    if noise is not None:
        total = ((total + noise_scale * noise.double()) / grid).round() * grid
    g = (total * inverse_batch).to(leaf.mean.dtype)
    if hyper.b2 is None or leaf.square is None:
        u = leaf.mean.mul_(hyper.b1).add_(g)
    else:
        leaf.mean.lerp_(g, 1 - hyper.b1)
        leaf.square.lerp_(g.square_(), 1 - hyper.b2)
        moment = (leaf.square * square_factor).sub_(hyper.noise_std**2).clamp_(min=hyper.eps_root**2)
        u = (leaf.mean * mean_factor).div_(moment.sqrt_().add_(hyper.eps))
    if leaf.decay:
        u = u.add(leaf.param.to(u.dtype), alpha=hyper.weight_decay)
    leaf.param.add_((u * -learning_rate).to(leaf.param.dtype))
    if leaf.copy is not None:
        leaf.copy.copy_(leaf.param)


def _update_narrow_(leaf: Leaf, noise: Tensor | None, scalars: Tensor, hyper: Hyper) -> None:
    """Update with moments widened to float32, then store them, rounded by random bits."""
    square = None if leaf.square is None else leaf.square.float()
    wide = leaf._replace(mean=leaf.mean.float(), square=square)
    update_leaf_reference_(wide, noise, scalars, hyper)
    bits = random_bits_reference(leaf.param.numel(), leaf.first, scalars[6])
    for target, value, own in zip((leaf.mean, leaf.square), (wide.mean, square), bits):
        if target is not None and value is not None:
            target.copy_(round_reference(value, own.view(value.shape)))


def noisy_adamw_reference_(leaves: Sequence[Leaf], keys_LK: Tensor | None, scalars: Tensor, hyper: Hyper) -> None:
    """Update leaf by leaf; ``keys_LK`` None adds no noise."""
    for i, leaf in enumerate(leaves):
        noise, count = None, leaf.param.numel()
        if keys_LK is not None:
            box = ([leaf.first + count], [leaf.first], [count])
            noise = normal(keys_LK[i], *box, -torch.inf, torch.inf, torch.float64).view(leaf.param.shape)
        update_leaf_reference_(leaf, noise, scalars, hyper)


# ---------------------------------------------------------------- Triton
# A program is a tile of 8 COUNTERS elements that begins on a ChaCha20 block of the full leaf.


@jit
def _pointer(fields, FIELD: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(fields + FIELD).to(tl.pointer_type(DTYPE))  # pyright: ignore
    # 16 bytes are eight elements in half precision: the layout of every tile, and of the noise.
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer  # pyright: ignore


@jit
def _lerp(a, b, WEIGHT: tl.constexpr):
    if WEIGHT < 0.5:
        return a + WEIGHT * (b - a)
    else:
        return b - (b - a) * (1.0 - WEIGHT)


@jit
def _load_row(row, factor_ptr, inside):
    counts = tl.where(tl.load(factor_ptr) != 0.0, 1, 0) > 0  # factor 0: not read, exactly 0
    return tl.load(row, mask=inside & counts, other=0.0)


@jit
def _times_factor(row, factor_ptr):
    return tl.load(factor_ptr).to(tl.float64) * row.to(tl.float64)


@jit
def _load_row_below(rows, factors, s, stride, inside, S: tl.constexpr):
    """Load row s as :func:`_load_row` does; zeros from row S on."""
    counts = tl.where(tl.load(factors + s, mask=s < S, other=0.0) != 0.0, 1, 0) > 0
    return tl.load(rows + s * stride, mask=inside & counts, other=0.0)


@jit
def _times_factor_below(row, factors, s, S: tl.constexpr):
    return tl.load(factors + s, mask=s < S, other=0.0).to(tl.float64) * row.to(tl.float64)


@jit
def _noisy_adamw_body(
    tiles_ptr,
    leaves_ptr,
    keys_ptr,
    scalars_ptr,
    eps,
    weight_decay,
    noise_square,
    floor,
    S: tl.constexpr,
    ROW: tl.constexpr,
    FACTOR: tl.constexpr,
    COPY: tl.constexpr,
    MOMENT: tl.constexpr,
    NARROW: tl.constexpr,  # moments are bfloat16
    NOISE: tl.constexpr,
    ALIGNED: tl.constexpr,
    MEAN_WEIGHT: tl.constexpr,
    SQUARE_WEIGHT: tl.constexpr,  # None: no second moment
    COUNTERS: tl.constexpr,
):
    entry = tl.load(tiles_ptr + tl.program_id(0))
    leaf = entry >> 32
    fields = leaves_ptr + leaf * 10
    tile = entry & 0xFFFFFFFF
    first = tl.load(fields + 7)
    count = tl.load(fields + 6)
    stride = tl.load(fields + 8)
    index = tile * (8 * COUNTERS) + tl.arange(0, 8 * COUNTERS)
    if ALIGNED:  # full groups of 8 elements at 16-byte addresses: 16-byte loads
        count = tl.multiple_of(count, 8)
        stride = tl.multiple_of(stride, 8)
        inside = index < count
    else:
        index -= first % 8
        inside = (index >= 0) & (index < count)
    rows = _pointer(fields, 0, ROW, ALIGNED) + index
    params = _pointer(fields, 2, tl.float32, ALIGNED) + index
    means = _pointer(fields, 3, MOMENT, ALIGNED) + index
    factors = _pointer(fields, 1, FACTOR, False)

    # Issue all loads first, so that they overlap with the noise.
    p = tl.load(params, mask=inside, other=0.0)
    m = tl.load(means, mask=inside, other=0.0).to(tl.float32)
    if SQUARE_WEIGHT is not None:
        squares = _pointer(fields, 4, MOMENT, ALIGNED) + index
        v = tl.load(squares, mask=inside, other=0.0).to(tl.float32)
    row_0 = _load_row(rows, factors, inside)
    if S > 1:
        row_1 = _load_row(rows + stride, factors + 1, inside)
    if S > 2:
        row_2 = _load_row(rows + 2 * stride, factors + 2, inside)
    if S > 3:
        row_3 = _load_row(rows + 3 * stride, factors + 3, inside)
    total = tl.zeros((8 * COUNTERS,), tl.float64)
    if NOISE:
        total += tl.load(scalars_ptr) * wide_normal_tile(keys_ptr + leaf * 8, first // 8 + tile * COUNTERS, COUNTERS)
    total += _times_factor(row_0, factors)
    if S > 1:
        total += _times_factor(row_1, factors + 1)
    if S > 2:
        total += _times_factor(row_2, factors + 2)
    if S > 3:
        total += _times_factor(row_3, factors + 3)
    for s in range(4, S, 8):  # eight loads at a time are on their way
        row_0 = _load_row_below(rows, factors, s, stride, inside, S)
        row_1 = _load_row_below(rows, factors, s + 1, stride, inside, S)
        row_2 = _load_row_below(rows, factors, s + 2, stride, inside, S)
        row_3 = _load_row_below(rows, factors, s + 3, stride, inside, S)
        row_4 = _load_row_below(rows, factors, s + 4, stride, inside, S)
        row_5 = _load_row_below(rows, factors, s + 5, stride, inside, S)
        row_6 = _load_row_below(rows, factors, s + 6, stride, inside, S)
        row_7 = _load_row_below(rows, factors, s + 7, stride, inside, S)
        total += _times_factor_below(row_0, factors, s, S)
        total += _times_factor_below(row_1, factors, s + 1, S)
        total += _times_factor_below(row_2, factors, s + 2, S)
        total += _times_factor_below(row_3, factors, s + 3, S)
        total += _times_factor_below(row_4, factors, s + 4, S)
        total += _times_factor_below(row_5, factors, s + 5, S)
        total += _times_factor_below(row_6, factors, s + 6, S)
        total += _times_factor_below(row_7, factors, s + 7, S)
    if NOISE:  # round to the grid: float64 has no finer digits at 1.5 * 2^52 times the grid width
        coarse = tl.load(scalars_ptr + 5) * 6755399441055744.0
        total = (total + coarse) - coarse
    g = (total * tl.load(scalars_ptr + 1)).to(tl.float32)

    if SQUARE_WEIGHT is None:
        m = m * (1.0 - MEAN_WEIGHT) + g
        u = m
    else:
        m = _lerp(m, g, MEAN_WEIGHT)
        v = _lerp(v, g * g, SQUARE_WEIGHT)
        moment = v * tl.load(scalars_ptr + 3).to(tl.float32) - noise_square
        moment = tl.maximum(moment, floor, propagate_nan=tl.PropagateNan.ALL)
        u = ratio(m * tl.load(scalars_ptr + 2).to(tl.float32), tl.sqrt(moment) + eps)
    decay = tl.where(tl.load(fields + 9) > 0, weight_decay, 0.0)
    p -= tl.load(scalars_ptr + 4).to(tl.float32) * (u + decay * p)
    tl.store(params, p, mask=inside)
    if NARROW:
        low, high = random_bits(first + index, tl.load(scalars_ptr + 6).to(tl.int64))
        m = round_by_bits(m, low)
        if SQUARE_WEIGHT is not None:
            v = round_by_bits(v, high)
    tl.store(means, m.to(MOMENT), mask=inside)
    if SQUARE_WEIGHT is not None:
        tl.store(squares, v.to(MOMENT), mask=inside)
    if COPY is not None:
        tl.store(_pointer(fields, 5, COPY, ALIGNED) + index, p.to(COPY), mask=inside)


# ---------------------------------------------------------------- launch


def launch_noisy_adamw_(
    leaves: Sequence[Leaf], keys_LK: Tensor | None, scalars: Tensor, hyper: Hyper, tables: LaunchTables
) -> None:
    """Evaluate :func:`noisy_adamw_reference_`, one launch per group."""
    table = tables.pointers(leaves)
    keys_LK = scalars if keys_LK is None else keys_LK.contiguous()
    for tiles, constants in tables.groups(leaves):
        if len(tiles):
            with torch.cuda.device_of(tiles):
                _noisy_adamw_body[(len(tiles),)](
                    tiles,
                    table,
                    keys_LK,
                    scalars,
                    hyper.eps,
                    hyper.weight_decay,
                    hyper.noise_std**2,
                    hyper.eps_root**2,
                    NOISE=keys_LK is not scalars,
                    MEAN_WEIGHT=1 - hyper.b1,
                    SQUARE_WEIGHT=None if hyper.b2 is None else 1 - hyper.b2,
                    num_warps=constants["COUNTERS"] // 32,
                    maxnreg=REGISTERS,
                    **constants,
                )


def update_leaves_(
    leaves: Sequence[Leaf], keys_LK: Tensor | None, scalars: Tensor, hyper: Hyper, tables: LaunchTables
) -> None:
    """Update leaves on one device: launch on CUDA, otherwise call the reference.

    Guarantees:
      - the sum of each element is formed, and its noise added, in float64;
      - a row with factor 0 changes nothing, even if it holds NaN or infinities;
      - element ``i`` of leaf ``l`` gets the draw ``first + i`` of key ``l``, the same bits on every device;
      - same inputs give the same bits; nothing waits for the host, so a call can be captured after one like it.
    """
    _check(leaves, keys_LK, scalars, hyper)
    if scalars.is_meta:
        return  # the kernel allocates nothing
    if triton is not None and scalars.is_cuda and leaves:
        launch_noisy_adamw_(leaves, keys_LK, scalars.contiguous(), hyper, tables)
    else:
        noisy_adamw_reference_(leaves, keys_LK, scalars, hyper)


def _check(leaves: Sequence[Leaf], keys_LK: Tensor | None, scalars: Tensor, hyper: Hyper) -> None:
    if scalars.dtype != torch.float64 or scalars.shape != (SCALARS,):
        raise ValueError(f"scalars: expected float64 of shape ({SCALARS},), got {scalars.dtype} {tuple(scalars.shape)}")
    if keys_LK is not None and (keys_LK.shape != (len(leaves), 8) or keys_LK.dtype != torch.int64):
        raise ValueError(
            f"keys: expected int64 of shape ({len(leaves)}, 8), got {keys_LK.dtype} {tuple(keys_LK.shape)}"
        )
    for i, leaf in enumerate(leaves):
        shape, rows = leaf.param.shape, leaf.rows.shape[0]
        copy = shape if leaf.copy is None else leaf.copy.shape
        if (leaf.square is None) != (hyper.b2 is None):
            raise ValueError(f"leaf {i}: expected a second moment if hyper.b2 is given, and none if it is None")
        square = shape if leaf.square is None else leaf.square.shape
        if leaf.rows.shape[1:] != shape or leaf.factors.shape != (rows,):
            raise ValueError(
                f"leaf {i}: expected rows (S, {', '.join(map(str, shape))}) and factors (S,), got "
                f"{tuple(leaf.rows.shape)} and {tuple(leaf.factors.shape)}"
            )
        if not leaf.mean.shape == square == copy == shape:
            raise ValueError(f"leaf {i}: expected moments and copy of the parameter's shape {tuple(shape)}")
        if not can_update(leaf) or leaf.param.device != scalars.device:
            raise ValueError(
                f"leaf {i}: expected dense tensors on {scalars.device}, float32 parameters, and moments in "
                "float32 or bfloat16"
            )
        if not 0 <= leaf.first <= MAX_BLOCKS * ELEMENTS_PER_BLOCK - leaf.param.numel():
            raise ValueError(f"leaf {i}: expected at most 2^35 elements per key, got the first at {leaf.first}")


def _update_lists(
    rows: list[Tensor],
    factors: list[Tensor],
    params: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    copies: list[Tensor],
    firsts: list[int],
    decays: list[bool],
    keys_LK: Tensor | None,
    scalars: Tensor,
    *hyper: float,
) -> None:
    optional_copies = copies or [None] * len(params)
    leaves = [Leaf(*fields) for fields in zip(rows, factors, params, means, squares, optional_copies, firsts, decays)]
    update_leaves_(leaves, keys_LK, scalars, Hyper(*hyper), LaunchTables())


noisy_adamw_ = define(
    "noisy_adamw_",
    "Tensor[] rows, Tensor[] factors, Tensor(a!)[] params, Tensor(b!)[] means, Tensor(c!)[] squares, "
    "Tensor(d!)[] copies, SymInt[] firsts, bool[] decays, Tensor? keys, Tensor scalars, "
    "float b1, float b2, float eps, float weight_decay, float noise_std, float eps_root -> ()",
    reference=_update_lists,
    fake=lambda *args: None,
)
"""Takes lists of the fields of :class:`Leaf` (``copies`` may be empty), keys, scalars, the fields of :class:`Hyper`."""
