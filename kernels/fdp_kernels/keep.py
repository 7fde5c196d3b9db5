"""Per-sample weight gradients of a linear layer, stored; the norms of exactly the stored numbers; their weighted sum.

    keep           G_b = round(sum_t g_bt x_bt^T), n_b in parts     g (B, T, P), x (B, T, D) -> G (B, P, D), (B, parts)
    squared_norms  n_b = |G_b|^2                                    G (B, ...)               -> n (B,)
    squared_parts  n_b in parts                                     G (B, ...)               -> (B, parts)
    weighted_sum   W = sum_b c_b G_b (+ V)                          G (B, ...), c (B,)       -> W (...)

G is summed in float32 and stored in the dtype of g. Squares, norms and weighted sums are float64; a weighted sum is
rounded once at the end. Parts add up to n_b: a caller with many leaves adds them all at once. ``keep`` is one kernel;
``keep_by_matmul`` is ``torch.bmm`` and a pass over G. Callers choose the faster one by measurement.

    >>> G, parts = keep(g, x)                                    # 2 B T P D flops
    >>> factors = (C / parts.sum(1).sqrt()).clamp(max=1).float()
    >>> total = weighted_sum(G, factors, torch.float32)          # bandwidth only

``foreach_keep`` stores the gradients of several matrices, four per launch.

    >>> G, H, parts_of_G, parts_of_H = foreach_keep([g, h], [x, y])

Guarantees:
  - the norm is that of the stored, rounded numbers, to float64 rounding; from ``keep``, and from ``squared_parts`` of
    large float32 gradients on a CPU, at least that, and at most 2^-14 of its square more (in ``keep``, elements below
    1e-19 count as 0);
  - a sample with factor 0 adds exactly 0 (it is not read), even if its gradient is NaN or infinite;
  - factors are float32 or float64; the sum, with what it is added to, is formed in float64 and rounded once.

Letters: B samples, T tokens, P output features, D input features, N elements of a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from fdp_kernels import keep_hopper
from fdp_kernels.direct import TILES
from fdp_kernels.keep_cpu import rounded_up_squared_norms, squared_norms_cpu, wide_weighted_sum
from fdp_kernels.op import define, jit, tl
from fdp_kernels.tile_gemm import (
    Tile,
    can_launch,
    cdiv,
    check_pair,
    check_pairs,
    choose_tile,
    count_tiles,
    launch_by_four,
    make_descriptor,
    matrix_index,
    num_programs,
    outer,
    outer_options,
    pad_to_four,
    pair_descriptors,
    pick,
    slices_of_four,
    sum_of_squares,
    tile_position,
    tiles_per_sample,
    widths_and_ends,
)

CHUNK, STEPS = 4096, 8
"""Elements per load, and loads per program, of ``squared_norms``."""
BLOCK = 1024
"""Elements per program of ``weighted_sum``."""
SMALL, SMALL_BLOCK, SMALL_SAMPLES = 1 << 14, 32, 64
"""A gradient of at most so many elements, as of a bias, has smaller programs, which read many samples at a time: a few
programs that wait for one sample after the other would take the time of a large gradient."""


# ---------------------------------------------------------------- references


def keep_reference(g_BTP: Tensor, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients (B, P, D) and their squared norms in parts (B, parts)."""
    G_BPD, parts = foreach_keep_reference([g_BTP], [x_BTD])
    return G_BPD, parts


def foreach_keep_reference(gs: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
    """Return the gradients of all matrices, then the parts of all."""
    check_pairs(gs, xs)
    wide = torch.float64 if gs[0].dtype == torch.float64 else torch.float32
    gradients = [torch.bmm(g.to(wide).mT, x.to(wide)).to(g.dtype) for g, x in zip(gs, xs)]
    parts = [_pad_parts(squared_norms_reference(G), size) for G, size in zip(gradients, _keep_parts(gs, xs))]
    return [*gradients, *parts]


def squared_norms_reference(G_BN: Tensor) -> Tensor:
    """Return ``|G_b|^2``: (B,), computed in float64."""
    return torch.linalg.vector_norm(G_BN.reshape(len(G_BN), -1), dim=1, dtype=torch.float64).square()


def squared_parts_cpu(G_BN: Tensor) -> Tensor:
    """Evaluate :func:`squared_parts_reference`, rounded up as ``keep`` does if G is large and float32."""
    return _pad_parts(rounded_up_squared_norms(G_BN), _num_parts(G_BN))


def squared_parts_reference(G_BN: Tensor) -> Tensor:
    """Return ``|G_b|^2`` in the first part and 0 in the others: (B, parts)."""
    return _pad_parts(squared_norms_reference(G_BN), _num_parts(G_BN))


def _pad_parts(squared_B: Tensor, parts: int) -> Tensor:
    return torch.nn.functional.pad(squared_B.unsqueeze(1), (0, parts - 1))


def _num_parts(G_BN: Tensor) -> int:
    return cdiv(G_BN.numel() // len(G_BN), CHUNK * STEPS)


def _choose_tile(gs: list[Tensor], xs: list[Tensor]) -> Tile:
    """Return the tile of one launch of the body here."""
    return choose_tile(TILES, gs[0].dtype, lambda tile: sum(count_tiles(gs, xs, len(gs[0]), tile)))


def _keep_parts(gs: list[Tensor], xs: list[Tensor]) -> list[int]:
    """Return the number of parts of each matrix: one per tile, or as ``keep_hopper`` has them, launch by launch."""
    return [parts for four in slices_of_four(gs) for parts in _parts_of_four(gs[four], xs[four])]


def _parts_of_four(gs: list[Tensor], xs: list[Tensor]) -> list[int]:
    hopper_tile = keep_hopper.choose_tile(gs, xs)
    if hopper_tile is not None:
        return [keep_hopper.num_parts(g, x, hopper_tile) for g, x in zip(gs, xs)]
    tile = _choose_tile(gs, xs)
    return [tiles_per_sample(g, x, tile) for g, x in zip(gs, xs)]


def weighted_sum_reference(G_BN: Tensor, factors_B: Tensor, dtype: torch.dtype, onto_N: Tensor | None = None) -> Tensor:
    """Return ``sum_b c_b G_b``, plus ``onto_N`` if given: computed in float64, then rounded to ``dtype``."""
    _check_sum(G_BN, factors_B, dtype, onto_N)
    zero = factors_B.view(-1, *[1] * (G_BN.ndim - 1)) == 0
    total = torch.tensordot(factors_B.double(), G_BN.double().masked_fill(zero, 0.0), dims=1)
    return (total if onto_N is None else onto_N + total).to(dtype)


def weighted_sum_cpu(G_BN: Tensor, factors_B: Tensor, dtype: torch.dtype, onto_N: Tensor | None = None) -> Tensor:
    """Evaluate :func:`weighted_sum_reference`; rows with factor 0 are left out instead of replaced by zeros."""
    _check_sum(G_BN, factors_B, dtype, onto_N)
    total = wide_weighted_sum(G_BN, factors_B)
    return (total if onto_N is None else onto_N + total).to(dtype)


# ---------------------------------------------------------------- bodies


@jit
def _keep_body(
    g0, g1, g2, g3, x0, x1, x2, x3, out0, out1, out2, out3, partial_ptr0, partial_ptr1, partial_ptr2, partial_ptr3,
    p0, p1, p2, p3, d0, d1, d2, d3, end0, end1, end2, count, tokens,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr, GROUP: tl.constexpr,
    DESCRIPTOR: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = BLOCK_D // 2
    # If every tile has its own program, the loop runs once.
    for index in tl.range(tl.program_id(0), count, tl.num_programs(0), flatten=True):  # pyright: ignore
        matrix = matrix_index(index, end0, end1, end2)
        own = index - pick(matrix, 0, end0, end1, end2)
        p, d = pick(matrix, p0, p1, p2, p3), pick(matrix, d0, d1, d2, d3)
        rows, columns = tl.cdiv(p, BLOCK_P), tl.cdiv(d, BLOCK_D)
        b = own // (rows * columns)
        i, j = tile_position(own % (rows * columns), rows, columns, GROUP)
        g, x, out = pick(matrix, g0, g1, g2, g3), pick(matrix, x0, x1, x2, x3), pick(matrix, out0, out1, out2, out3)
        acc_PD = outer(g, x, b, i, j, tokens, BLOCK_P, BLOCK_D, BLOCK_T)
        # Half a tile at a time: one half is written to memory while the other is rounded and squared.
        left_PH, right_PH = tl.split(tl.permute(tl.reshape(acc_PD, (BLOCK_P, 2, HALF)), (0, 2, 1)))
        squares = _store(out, left_PH, b, i * BLOCK_P, j * BLOCK_D, p, d, BLOCK_P, HALF, DESCRIPTOR)
        squares += _store(out, right_PH, b, i * BLOCK_P, j * BLOCK_D + HALF, p, d, BLOCK_P, HALF, DESCRIPTOR)
        tl.store(pick(matrix, partial_ptr0, partial_ptr1, partial_ptr2, partial_ptr3) + own, squares)


@jit
def _store(
    out, acc_PH, b, row, column, p, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DESCRIPTOR: tl.constexpr
):  # fmt: skip
    """Round and store a tile; return the squares of what was stored. ``out`` is a pointer if rows are not aligned."""
    if DESCRIPTOR:
        stored_PH = acc_PH.to(out.dtype)
        out.store([b, row, column], stored_PH.reshape(1, ROWS, COLUMNS))
    else:
        stored_PH = acc_PH.to(out.dtype.element_ty)
        rows, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
        offset = (b.to(tl.int64) * p + rows[:, None]) * d + columns[None, :]
        tl.store(out + offset, stored_PH, mask=(rows < p)[:, None] & (columns < d)[None, :])
    return sum_of_squares(stored_PH)


@jit
def _squares_body(G_ptr, partial_ptr, n, chunks, CHUNK: tl.constexpr, STEPS: tl.constexpr):
    index = tl.program_id(0)
    b, first = index // chunks, (index % chunks).to(tl.int64) * (CHUNK * STEPS)
    total = tl.zeros((CHUNK,), tl.float64)
    for step in tl.static_range(STEPS):
        element = first + step * CHUNK + tl.arange(0, CHUNK)
        value = tl.load(G_ptr + b.to(tl.int64) * n + element, mask=element < n, other=0.0)
        wide = value.to(tl.float32).to(tl.float64)
        total += wide * wide
    tl.store(partial_ptr + index, tl.sum(total))


@jit
def _sum_body(
    G_ptr, factor_ptr, onto_ptr, out_ptr, batch, n,
    ONTO: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """Sum BLOCK elements over all samples, SAMPLES of them at a time."""
    element, sample = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, SAMPLES)
    here = G_ptr + sample[:, None].to(tl.int64) * n + element[None, :]
    total_SB = tl.zeros((SAMPLES, BLOCK), tl.float64)
    for b in tl.range(0, batch, SAMPLES, loop_unroll_factor=UNROLL):
        factor_S = tl.load(factor_ptr + b + sample, mask=b + sample < batch, other=0.0).to(tl.float64)
        value_SB = tl.load(here, mask=(element < n)[None, :] & (factor_S != 0)[:, None], other=0.0)
        here += SAMPLES * n  # from samples to the next: an offset over all samples may exceed 2^31
        total_SB += factor_S[:, None] * value_SB.to(tl.float32).to(tl.float64)
    total = tl.sum(total_SB, 0)
    if ONTO:
        total += tl.load(onto_ptr + element, mask=element < n, other=0.0).to(tl.float64)
    tl.store(out_ptr + element, total.to(out_ptr.dtype.element_ty), mask=element < n)


# ---------------------------------------------------------------- launches


def launch_keep(g_BTP: Tensor, x_BTD: Tensor, *, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Evaluate :func:`keep_reference` with one kernel; ``tile`` overrides the table, and the body for Hopper."""
    G, parts = launch_foreach_keep([g_BTP], [x_BTD], tile=tile)
    return G, parts


def launch_foreach_keep(gs: list[Tensor], xs: list[Tensor], *, tile: Tile | None = None) -> list[Tensor]:
    """Evaluate :func:`foreach_keep_reference` with the kernel, four matrices per launch."""
    check_pairs(gs, xs)
    if not can_launch(*gs, *xs):
        return foreach_keep_reference(gs, xs)
    pairs = launch_by_four(partial(_launch_four, tile=tile), gs, xs)
    return [G for G, _ in pairs] + [parts for _, parts in pairs]


def _launch_four(gs: list[Tensor], xs: list[Tensor], tile: Tile | None) -> Iterable[tuple[Tensor, Tensor]]:
    hopper_tile = keep_hopper.choose_tile(gs, xs) if tile is None else None
    if hopper_tile is not None:
        return keep_hopper.launch_four(gs, xs, hopper_tile)
    tile = tile or _choose_tile(gs, xs)
    (batch, tokens, _), dtype, device = gs[0].shape, gs[0].dtype, gs[0].device
    outs = [torch.empty(batch, g.shape[-1], x.shape[-1], dtype=dtype, device=device) for g, x in zip(gs, xs)]
    parts = [tiles_per_sample(g, x, tile) for g, x in zip(gs, xs)]
    partials = [torch.empty(batch, size, dtype=torch.float64, device=device) for size in parts]
    addressable = all(x.shape[-1] * dtype.itemsize % 16 == 0 for x in xs)
    half = (1, tile.rows, tile.columns // 2)
    total = batch * sum(parts)
    _keep_body[(num_programs(total, tile, device),)](
        *pair_descriptors(gs, xs, tile), *pad_to_four([make_descriptor(G, half) if addressable else G for G in outs]),
        *pad_to_four(partials), *widths_and_ends(gs, xs, [batch * size for size in parts]), total, tokens,
        DESCRIPTOR=addressable, **outer_options(tile),
    )  # fmt: skip
    return zip(outs, partials)


def launch_squared_norms(G_BN: Tensor) -> Tensor:
    """Evaluate :func:`squared_norms_reference`, reading G once."""
    return launch_squared_parts(G_BN).sum(1)


def launch_squared_parts(G_BN: Tensor) -> Tensor:
    """Return ``n_b`` in parts, to be summed over dim 1."""
    if not can_launch(G_BN):
        return squared_parts_reference(G_BN)
    batch, n = len(G_BN), G_BN[0].numel()
    parts = torch.empty(batch, _num_parts(G_BN), dtype=torch.float64, device=G_BN.device)
    _squares_body[(parts.numel(),)](G_BN.contiguous(), parts, n, parts.shape[1], CHUNK=CHUNK, STEPS=STEPS, num_warps=8)
    return parts


def launch_weighted_sum(G_BN: Tensor, factors_B: Tensor, dtype: torch.dtype, onto_N: Tensor | None = None) -> Tensor:
    """Evaluate :func:`weighted_sum_reference`, reading G once."""
    _check_sum(G_BN, factors_B, dtype, onto_N)
    if not can_launch(G_BN):
        return weighted_sum_reference(G_BN, factors_B, dtype, onto_N)
    out = torch.empty(G_BN.shape[1:], dtype=dtype, device=G_BN.device)
    before = out if onto_N is None else onto_N.contiguous()
    _launch_sum(G_BN, factors_B, before, out, onto=onto_N is not None)
    return out


def add_weighted_sum_reference_(onto_N: Tensor, G_BN: Tensor, factors_B: Tensor) -> None:
    """Add ``sum_b c_b G_b`` to ``onto_N`` in place: in float64, rounded once to its dtype."""
    onto_N.copy_(weighted_sum_cpu(G_BN, factors_B, onto_N.dtype, onto_N))


def launch_add_weighted_sum_(onto_N: Tensor, G_BN: Tensor, factors_B: Tensor) -> None:
    """Evaluate :func:`add_weighted_sum_reference_`, reading G and ``onto_N`` once."""
    _check_sum(G_BN, factors_B, onto_N.dtype, onto_N)
    if not can_launch(G_BN) or not onto_N.is_contiguous():
        onto_N.copy_(weighted_sum_reference(G_BN, factors_B, onto_N.dtype, onto_N))
        return
    _launch_sum(G_BN, factors_B, onto_N, onto_N, onto=True)


def _launch_sum(G: Tensor, factors: Tensor, before: Tensor, out: Tensor, *, onto: bool) -> None:
    n, options = out.numel(), sum_options(out.numel(), len(G))
    _sum_body[(cdiv(n, options["BLOCK"]),)](
        G.contiguous(), factors.contiguous(), before, out, len(G), n, ONTO=onto, **options, num_warps=4
    )


def sum_options(elements: int, samples: int) -> dict[str, int]:
    """Return the constants of the body of ``weighted_sum`` for gradients of so many elements and so many samples."""
    if elements <= SMALL and samples > 1:
        return {"SAMPLES": SMALL_SAMPLES, "BLOCK": SMALL_BLOCK, "UNROLL": 1}
    return {"SAMPLES": 1, "BLOCK": BLOCK, "UNROLL": 4}


def _check_sum(G: Tensor, factors: Tensor, dtype: torch.dtype, onto: Tensor | None) -> None:
    wide = (torch.float32, torch.float64)
    if factors.shape != G.shape[:1] or factors.dtype not in wide or dtype not in wide:
        raise ValueError(
            f"weighted_sum: expected {len(G)} factors and a sum in float32 or float64, got factors of shape "
            f"{tuple(factors.shape)} in {factors.dtype} and a sum in {dtype}"
        )
    if onto is not None and (onto.shape != G.shape[1:] or onto.dtype not in wide):
        raise ValueError(
            f"weighted_sum: expected to add to {tuple(G.shape[1:])} in float32 or float64, got {tuple(onto.shape)} in "
            f"{onto.dtype}"
        )


# ---------------------------------------------------------------- ops


def _keep_fake(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    G, parts = _foreach_keep_fake([g], [x])
    return G, parts


def _foreach_keep_fake(gs: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
    gradients = [g.new_empty(g.shape[0], g.shape[2], x.shape[2]) for g, x in zip(gs, xs)]
    parts = [g.new_empty(g.shape[0], size, dtype=torch.float64) for g, size in zip(gs, _keep_parts(gs, xs))]
    return gradients + parts


keep = define(
    "keep",
    "Tensor g, Tensor x -> (Tensor, Tensor)",
    reference=keep_reference,
    cuda=launch_keep,
    fake=_keep_fake,
)
"""``(g_BTP, x_BTD)``: as :func:`keep_reference`."""
foreach_keep = define(
    "foreach_keep",
    "Tensor[] gs, Tensor[] xs -> Tensor[]",
    reference=foreach_keep_reference,
    cuda=launch_foreach_keep,
    fake=_foreach_keep_fake,
)
"""``(gs, xs)``: as :func:`foreach_keep_reference`; all pairs have equal samples and tokens."""
squared_norms = define(
    "squared_norms",
    "Tensor G -> Tensor",
    reference=squared_norms_reference,
    cuda=launch_squared_norms,
    cpu=squared_norms_cpu,
    fake=lambda G: G.new_empty(G.shape[0], dtype=torch.float64),
)
"""``(G_BN)``: as :func:`squared_norms_reference`."""
squared_parts = define(
    "squared_parts",
    "Tensor G -> Tensor",
    reference=squared_parts_reference,
    cuda=launch_squared_parts,
    cpu=squared_parts_cpu,
    fake=lambda G: G.new_empty(G.shape[0], _num_parts(G), dtype=torch.float64),
)
"""``(G_BN)``: as :func:`squared_parts_reference`; the sum over parts is :func:`squared_norms`, or slightly more."""
weighted_sum = define(
    "weighted_sum",
    "Tensor G, Tensor factors, ScalarType dtype, Tensor? onto=None -> Tensor",
    reference=weighted_sum_reference,
    cuda=launch_weighted_sum,
    cpu=weighted_sum_cpu,
    fake=lambda G, factors, dtype, onto=None: G.new_empty(G.shape[1:], dtype=dtype),
)
"""``(G_BN, factors_B, dtype, onto_N=None)``: as :func:`weighted_sum_reference`."""
add_weighted_sum_ = define(
    "add_weighted_sum_",
    "Tensor(a!) onto, Tensor G, Tensor factors -> ()",
    reference=add_weighted_sum_reference_,
    cuda=launch_add_weighted_sum_,
    fake=lambda onto, G, factors: None,
)
"""``(onto_N, G_BN, factors_B)``: as :func:`add_weighted_sum_reference_`."""


def keep_by_matmul(g_BTP: Tensor, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Evaluate :func:`keep` with ``torch.bmm`` and :func:`squared_parts`."""
    check_pair(g_BTP, x_BTD)
    G_BPD = torch.bmm(g_BTP.mT, x_BTD)
    return G_BPD, squared_parts(G_BPD)
