"""Per-sample squared norms of a matrix that is a head and an embedding at once (tied weights), never understated.

    G_b = sum_t g_bt x_bt^T + sum_s onehot(id_bs) e_bs^T          g (B, T, P), x (B, T, D), ids (B, S), e (B, S, D)

    |G_b|^2 = |head|^2 + |embedding|^2 + 2 sum_{t,s} g_bt[id_bs] <x_bt, e_bs>                     ->  n (B,) float64

The first term is ``ghost``, the second ``embedding_norms``. The third needs one product of x and e, (B, T, S) float32,
and reads one entry of g for each of its entries: no matrix of P x D numbers is formed for any sample. ``weighted``
and then ``add_embedding_sum_`` onto it give the clipped sum.

    >>> n = tied_norms(g, x, ids, e)
    >>> factors = (C / n.sqrt()).clamp(max=1).float()
    >>> total = weighted(g, x, factors)
    >>> add_embedding_sum_(total, ids, e, factors)

If the head's gradients H_b are stored (``keep``), the third term reads only the rows of the sample's words, and
``weighted_sum`` takes the place of ``weighted``:

    |G_b|^2 = |H_b|^2 + |embedding|^2 + 2 sum_s <H_b[id_bs], e_bs>                                H (B, P, D)

    >>> n = stored_tied_norms(H, squared_norms(H), ids, e)

The same holds if they are stored in 8 bits (``keep_int8``), as integers with exponents:

    >>> n = stored_tied_norms(q, parts.sum(1), ids, e, exponents)

Rounding, with E_b the error that ``weighted`` makes (step 5 of ``ghost``, included in its norm):

  1. The float32 products <x_t, e_s> lose at most ``c u |x_t| |e_s|`` (step 1 of ``ghost``), hence the third term at
     most ``2 c u sum_{t,s} |g_t[id_s]| |x_t| |e_s|``, which is added.
  2. What is added to the sum is G_b + E_b. Its squared norm exceeds the sum of the three terms by at most
     ``2 |embedding| |E_b|``, which is added.
  3. Head and embedding are summed in two accumulators, the head's in float32, the embedding's in float64, each rounded
     to its own size. If they cancel, that size is not bounded by |G_b|. So the result is at least
     ``(|head|^2 + |embedding|^2) / 2``: after clipping to C, neither part exceeds sqrt(2) C, and the slack of
     ``weighted`` and ``add_embedding_sum_`` grows by that factor only. (The half is reached only if the angle between
     the two parts is wide: a cosine below -1/2 for parts of equal norm.) The sum of both is rounded to float32 once.
  4. With a stored head there is no E_b, and all products are in float64: they lose at most ``(S + D) 2^-52 sum_s
     |H_b[id_s]| |e_s|``, which is added. The half of step 3 stays.

Guarantees:
  - the result is at least the squared norm of what ``weighted`` (of a stored head: ``weighted_sum``) and
    ``add_embedding_sum_`` together add for the sample, before the sum over samples is rounded to float32;
  - a sample with a NaN or infinite token has a NaN or infinite norm; no other sample has (see ``ghost``).

Letters: B samples, T and S tokens, P outputs (the vocabulary), D inputs; R x C a tile of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdp_kernels.embedding import embedding_norms_reference, launch_embedding_norms
from fdp_kernels.ghost import SLACK, UNIT, ghost_reference, launch_norms_and_errors, rounding_steps
from fdp_kernels.keep_int8 import COLUMNS, widen_int8
from fdp_kernels.op import define, jit, tl
from fdp_kernels.stored_gram import DEPTH, SPLITS, launch_token_norms, underflow_floors
from fdp_kernels.tile_gemm import can_launch, cdiv, check_pair

ROWS = 8
"""Rows of a load; it has the columns that share an exponent of stored integers."""


def tied_norms_reference(g_BTP: Tensor, x_BTD: Tensor, ids_BS: Tensor, e_BSD: Tensor) -> Tensor:
    """Return ``|G_b|^2`` in float64 with the bounds for float64, and at least half the squares of the two parts."""
    _check(g_BTP, x_BTD, ids_BS, e_BSD)
    head, rows = ghost_reference(g_BTP, x_BTD), embedding_norms_reference(ids_BS, e_BSD)
    x, e = x_BTD.double(), e_BSD.double()
    A_BTS = g_BTP.gather(2, ids_BS[:, None, :].expand(-1, g_BTP.shape[1], -1)).double()
    cross = (A_BTS * torch.bmm(x, e.mT)).sum((1, 2))
    sizes = torch.linalg.vector_norm(x, dim=-1)[:, :, None] * torch.linalg.vector_norm(e, dim=-1)[:, None, :]
    depth = x.shape[1] + e.shape[1] + x.shape[2]
    lost = depth * torch.finfo(torch.float64).eps * (A_BTS.abs() * sizes).sum((1, 2))
    return torch.maximum(head + rows + 2 * (cross + lost), (head + rows) / 2)


def stored_tied_norms_reference(
    H_BPD: Tensor, squares_B: Tensor, ids_BS: Tensor, e_BSD: Tensor, exponents_BPJ: Tensor | None = None
) -> Tensor:
    """Return ``|G_b|^2`` in float64 from a stored head and its squared norms, at least half the squares of both parts.

    Words outside of H (on another rank) have no third term here. With exponents, H holds integers of ``keep_int8``.
    """
    _check_stored(H_BPD, squares_B, ids_BS, e_BSD, exponents_BPJ)
    if exponents_BPJ is not None:
        H_BPD = widen_int8(H_BPD, exponents_BPJ, torch.float64)
    inside_BS = (ids_BS >= 0) & (ids_BS < H_BPD.shape[1])
    index_BSD = torch.where(inside_BS, ids_BS, 0)[:, :, None].expand_as(e_BSD)
    H_BSD = H_BPD.gather(1, index_BSD).double() * inside_BS[:, :, None]
    e_BSD_wide = e_BSD.double()
    cross = (H_BSD * e_BSD_wide).sum((1, 2))
    lost = (torch.linalg.vector_norm(H_BSD, dim=-1) * torch.linalg.vector_norm(e_BSD_wide, dim=-1)).sum(1)
    return _join_stored(squares_B, embedding_norms_reference(ids_BS, e_BSD), cross, lost, e_BSD)


def _join_stored(squares: Tensor, rows: Tensor, cross: Tensor, lost: Tensor, e_BSD: Tensor) -> Tensor:
    depth = e_BSD.shape[1] + e_BSD.shape[2]
    total = squares + rows + 2 * (cross + depth * torch.finfo(torch.float64).eps * lost)
    return torch.maximum(total, (squares + rows) / 2)


# ---------------------------------------------------------------- Triton


@jit
def _stored_cross_body(
    H_ptr, exponent_ptr, ids_ptr, e_ptr, cross_ptr, lost_ptr, S, P, D, row_tiles,
    R: tl.constexpr, C: tl.constexpr, INT8: tl.constexpr,
):  # fmt: skip
    """Sum ``<H[id_s], e_s>`` and ``|H[id_s]| |e_s|`` over R tokens of one sample."""
    sample, row = (tl.program_id(0) // row_tiles).to(tl.int64), tl.program_id(0) % row_tiles
    s = row * R + tl.arange(0, R)
    ids = tl.load(ids_ptr + sample * S + s, mask=s < S, other=0)
    inside = ((s < S) & (ids >= 0) & (ids < P))[:, None]
    H_row, e_row = H_ptr + (sample * P + ids[:, None]) * D, e_ptr + (sample * S + s[:, None]) * D
    cross = tl.zeros((R, C), tl.float64)
    H_squares = tl.zeros((R, C), tl.float64)
    e_squares = tl.zeros((R, C), tl.float64)
    first = 0
    while first < D:
        d = first + tl.arange(0, C)[None, :]
        H_RC = tl.load(H_row + d, mask=inside & (d < D), other=0).to(tl.float32).to(tl.float64)
        if INT8:  # C columns share an exponent; the largest numbers are 2^128, which float32 has not
            place = (sample * P + ids[:, None]) * tl.cdiv(D, C) + first // C
            exponent = tl.load(exponent_ptr + place, mask=inside, other=0).to(tl.int32)
            H_RC *= ((exponent + 127) << 23).to(tl.float32, bitcast=True).to(tl.float64)
        e_RC = tl.load(e_row + d, mask=inside & (d < D), other=0.0).to(tl.float32).to(tl.float64)
        cross += H_RC * e_RC
        H_squares += H_RC * H_RC
        e_squares += e_RC * e_RC
        first += C
    tl.store(cross_ptr + tl.program_id(0), tl.sum(cross))
    tl.store(lost_ptr + tl.program_id(0), tl.sum(tl.sqrt(tl.sum(H_squares, 1)) * tl.sqrt(tl.sum(e_squares, 1))))


def launch_stored_tied_norms(
    H_BPD: Tensor, squares_B: Tensor, ids_BS: Tensor, e_BSD: Tensor, exponents_BPJ: Tensor | None = None
) -> Tensor:
    """Evaluate :func:`stored_tied_norms_reference` on the device."""
    _check_stored(H_BPD, squares_B, ids_BS, e_BSD, exponents_BPJ)
    operands = [e_BSD] if exponents_BPJ is not None else [H_BPD, e_BSD]
    if not can_launch(*operands) or H_BPD.numel() == 0:
        return stored_tied_norms_reference(H_BPD, squares_B, ids_BS, e_BSD, exponents_BPJ)
    (batch, p, d), tokens = H_BPD.shape, e_BSD.shape[1]
    exponents = H_BPD if exponents_BPJ is None else exponents_BPJ.contiguous()
    tiles = cdiv(tokens, ROWS)
    cross, lost = torch.empty((2, batch, tiles), dtype=torch.float64, device=H_BPD.device)
    _stored_cross_body[(batch * tiles,)](
        H_BPD.contiguous(), exponents, ids_BS.contiguous(), e_BSD.contiguous(), cross, lost, tokens, p, d, tiles,
        R=ROWS, C=COLUMNS, INT8=exponents_BPJ is not None, num_warps=4,
    )  # fmt: skip
    return _join_stored(squares_B, launch_embedding_norms(ids_BS, e_BSD), cross.sum(1), lost.sum(1), e_BSD)


@jit
def _cross_body(
    g_ptr, ids_ptr, X_ptr, x_norm_ptr, e_norm_ptr, cross_ptr, lost_ptr, T, S, P, stride_b, stride_t, row_tiles, floor,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Sum ``g_t[id_s] X_ts`` and ``|g_t[id_s]| |x_t| |e_s|`` over R tokens t and all s of one sample."""
    sample, row = (tl.program_id(0) // row_tiles).to(tl.int64), tl.program_id(0) % row_tiles
    t = row * R + tl.arange(0, R)
    x_R = tl.load(x_norm_ptr + sample * T + t, mask=t < T, other=0.0)[:, None]
    cross = tl.zeros((R, C), tl.float64)
    lost = tl.zeros((R, C), tl.float64)
    first = 0
    while first < S:
        s = first + tl.arange(0, C)
        ids = tl.load(ids_ptr + sample * S + s, mask=s < S, other=0)
        e_C = tl.load(e_norm_ptr + sample * S + s, mask=s < S, other=0.0)[None, :]
        inside = (t < T)[:, None] & ((s < S) & (ids >= 0) & (ids < P))[None, :]
        entry = g_ptr + sample * stride_b + t[:, None].to(tl.int64) * stride_t + ids[None, :]
        A_RC = tl.load(entry, mask=inside, other=0.0).to(tl.float32)
        X_RC = tl.load(X_ptr + (sample * T + t[:, None]) * S + s[None, :], mask=inside, other=0.0)
        cross += A_RC.to(tl.float64) * X_RC.to(tl.float64)
        lost += (tl.abs(A_RC) * tl.maximum(x_R * e_C, floor)).to(tl.float64)
        first += C
    tl.store(cross_ptr + tl.program_id(0), tl.sum(cross))
    tl.store(lost_ptr + tl.program_id(0), tl.sum(lost))


def launch_cross(g_BTP: Tensor, x_BTD: Tensor, ids_BS: Tensor, e_BSD: Tensor) -> Tensor:
    """Return ``sum_{t,s} g_t[id_s] <x_t, e_s>`` plus its rounding bound: (B,) float64."""
    (batch, tokens, p), (_, others, d) = g_BTP.shape, e_BSD.shape
    x, e = x_BTD.contiguous(), e_BSD.contiguous()
    g = g_BTP if g_BTP.stride(2) == 1 else g_BTP.contiguous()
    X = _products(x, e)
    units = SLACK * UNIT * (rounding_steps(min(d, DEPTH), x.dtype) + SPLITS + cdiv(d, DEPTH))
    x_norms, e_norms = launch_token_norms(x, e) if tokens == others else (_token_norms(x), _token_norms(e))
    tiles = cdiv(tokens, ROWS)
    cross, lost = torch.empty((2, batch, tiles), dtype=torch.float64, device=g.device)
    _cross_body[(batch * tiles,)](
        g, ids_BS.contiguous(), X, x_norms, e_norms, cross, lost, tokens, others, p, g.stride(0), g.stride(1), tiles,
        underflow_floors(p, d, units, units)[1], R=ROWS, C=COLUMNS, num_warps=4,
    )  # fmt: skip
    return cross.sum(1) + units * lost.sum(1)


def _products(x_BTD: Tensor, e_BSD: Tensor) -> Tensor:
    """Return ``x e^T`` in float32, DEPTH features at a time."""
    wide: dict[str, Any] = {} if x_BTD.dtype == torch.float32 else {"out_dtype": torch.float32}
    total = None
    for x, e in zip(x_BTD.split(DEPTH, dim=-1), e_BSD.split(DEPTH, dim=-1)):
        part = torch.bmm(x, e.mT, **wide)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _token_norms(z_BTD: Tensor) -> Tensor:
    return launch_token_norms(z_BTD, z_BTD)[0]


def launch_tied_norms(g_BTP: Tensor, x_BTD: Tensor, ids_BS: Tensor, e_BSD: Tensor) -> Tensor:
    """Evaluate :func:`tied_norms_reference` on the device, with the bounds for float32 products."""
    _check(g_BTP, x_BTD, ids_BS, e_BSD)
    if not can_launch(g_BTP, x_BTD, e_BSD):
        return tied_norms_reference(g_BTP, x_BTD, ids_BS, e_BSD)
    (head,), (errors,) = launch_norms_and_errors([g_BTP], [x_BTD])
    rows = launch_embedding_norms(ids_BS, e_BSD)
    cross = launch_cross(g_BTP, x_BTD, ids_BS, e_BSD)
    return torch.maximum(head + rows + 2 * (cross + rows.sqrt() * errors), (head + rows) / 2)


# ---------------------------------------------------------------- op


def _check(g: Tensor, x: Tensor, ids: Tensor, e: Tensor) -> None:
    check_pair(g, x)
    if e.ndim != 3 or e.shape[0] != g.shape[0] or e.shape[2] != x.shape[2] or ids.shape != e.shape[:2]:
        got = ", ".join(f"{name} {tuple(z.shape)}" for name, z in (("x", x), ("ids", ids), ("e", e)))
        raise ValueError(f"expected ids (batch, tokens) and e (batch, tokens, inputs) beside x, got {got}")
    if e.dtype != x.dtype:
        raise ValueError(f"expected e in the dtype of x, {x.dtype}, got {e.dtype}")


def _check_stored(H: Tensor, squares: Tensor, ids: Tensor, e: Tensor, exponents: Tensor | None) -> None:
    fits = H.ndim == 3 and e.ndim == 3 and e.shape[::2] == H.shape[::2] and ids.shape == e.shape[:2]
    if exponents is not None and (
        H.dtype != torch.int8 or exponents.shape != (*H.shape[:2], cdiv(H.shape[2], COLUMNS))
    ):
        raise ValueError(
            f"stored_tied_norms: expected H in int8 and an exponent for {COLUMNS} columns, got {H.dtype} and exponents "
            f"{tuple(exponents.shape)}"
        )
    dtype = e.dtype if exponents is not None else H.dtype
    if not fits or squares.shape != H.shape[:1] or squares.dtype != torch.float64 or dtype != e.dtype:
        got = ", ".join(f"{name} {tuple(z.shape)} {z.dtype}" for name, z in zip(("H", "e", "ids"), (H, e, ids)))
        raise ValueError(
            "stored_tied_norms: expected H (batch, outputs, inputs), a squared norm per sample in float64, ids (batch, "
            f"tokens) and e (batch, tokens, inputs) in the dtype of H, got {got}, squares {tuple(squares.shape)} "
            f"{squares.dtype}"
        )


tied_norms = define(
    "tied_norms",
    "Tensor g, Tensor x, Tensor ids, Tensor e -> Tensor",
    reference=tied_norms_reference,
    cuda=launch_tied_norms,
    fake=lambda g, x, ids, e: g.new_empty(g.shape[0], dtype=torch.float64),
)
"""``(g_BTP, x_BTD, ids_BS, e_BSD)``: as :func:`tied_norms_reference`, and never below it."""
stored_tied_norms = define(
    "stored_tied_norms",
    "Tensor H, Tensor squares, Tensor ids, Tensor e, Tensor? exponents=None -> Tensor",
    reference=stored_tied_norms_reference,
    cuda=launch_stored_tied_norms,
    fake=lambda H, squares, ids, e, exponents=None: squares.new_empty(squares.shape),
)
"""``(H_BPD, squares_B, ids_BS, e_BSD, exponents_BPJ=None)``: as :func:`stored_tied_norms_reference`; ``squares_B`` may
be overstated."""
