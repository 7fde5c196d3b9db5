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

Guarantees:
  - the result is at least the squared norm of what ``weighted`` and ``add_embedding_sum_`` together add for the sample;
  - a sample with a NaN or infinite token has a NaN or infinite norm; no other sample has (see ``ghost``).

Letters: B samples, T and S tokens, P outputs (the vocabulary), D inputs; R x C a tile of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdp_kernels.embedding import embedding_norms_reference, launch_embedding_norms
from fdp_kernels.ghost import SLACK, UNIT, ghost_reference, launch_norms_and_errors, rounding_steps
from fdp_kernels.op import define, jit, tl
from fdp_kernels.stored_gram import DEPTH, SPLITS, launch_token_norms, underflow_floors
from fdp_kernels.tile_gemm import can_launch, cdiv, check_pair

ROWS, COLUMNS = 8, 128
"""Rows and columns of a load."""


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


# ---------------------------------------------------------------- Triton


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


tied_norms = define(
    "tied_norms",
    "Tensor g, Tensor x, Tensor ids, Tensor e -> Tensor",
    reference=tied_norms_reference,
    cuda=launch_tied_norms,
    fake=lambda g, x, ids, e: g.new_empty(g.shape[0], dtype=torch.float64),
)
"""``(g_BTP, x_BTD, ids_BS, e_BSD)``: as :func:`tied_norms_reference`, and never below it."""
