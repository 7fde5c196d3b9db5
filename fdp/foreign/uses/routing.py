"""Route tokens to experts: ``y_t = W_{e(t)} x_t``, one matrix of a stack for every token.

    G_b[e] = sum of g_t x_t^T over the tokens t of sample b with e(t) = e            a pair per expert, zeros elsewhere

A use records one tensor, so the expert numbers travel with the tokens, as two columns of whole numbers up to 256, which
every dtype holds exactly.

    >>> ops.use(ROUTED, pack(x, ids), weight, transposed=False)         # weight (experts, outputs, inputs)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fdp.gradients.rules import Pair, Rule

DIGIT = 256
"""Whole numbers up to this one are exact in half precision."""
GROUPED = (torch.bfloat16,)
"""Dtypes for which torch has a grouped product on a GPU."""


def pack(x: Float[Tensor, "*rows inputs"], ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows packed"]:
    """Append two columns to ``x`` that hold the digits of ``ids``."""
    digits = torch.stack([ids // DIGIT, ids % DIGIT], dim=-1)
    return torch.cat([x, digits.to(x.dtype)], dim=-1)


def unpack(packed: Float[Tensor, "*rows packed"]) -> tuple[Float[Tensor, "*rows inputs"], Int[Tensor, "*rows"]]:
    """Return ``x`` and ``ids``."""
    high, low = packed.detach()[..., -2:].long().unbind(-1)
    return packed[..., :-2], high * DIGIT + low


def _forward(packed: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
    """Compute the product. If ``transposed``, the matrices of ``weight`` are (inputs, outputs)."""
    x, ids = unpack(packed)
    weight = weight if transposed else weight.transpose(1, 2)
    if x.is_cuda and x.dtype in GROUPED and hasattr(F, "grouped_mm"):
        return _grouped(x.reshape(-1, x.shape[-1]), ids.flatten(), weight).view(*x.shape[:-1], weight.shape[-1])
    y = x.new_zeros(*x.shape[:-1], weight.shape[-1])
    for expert, matrix in enumerate(weight.unbind(0)):
        y = torch.where((ids == expert).unsqueeze(-1), x @ matrix, y)
    return y


def _grouped(x: Tensor, ids: Tensor, weight: Tensor) -> Tensor:
    """Sort rows by expert, multiply each group by its matrix, and restore the order."""
    ordered, order = ids.sort(stable=True)
    experts = torch.arange(len(weight), device=ids.device)
    ends = torch.searchsorted(ordered, experts, right=True).to(torch.int32)
    back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return F.grouped_mm(x[order].contiguous(), weight, offs=ends)[back]


def _record(packed: Tensor, g: Tensor, shape: Sequence[int], *, transposed: bool) -> Pair:
    """Pair all tokens with every expert; output gradients are zero for tokens of other experts."""
    x, ids = unpack(packed)
    batch, experts = len(x), torch.arange(shape[0], device=ids.device)
    mine = ids.reshape(batch, 1, -1, 1) == experts.view(1, -1, 1, 1)
    of_g = torch.where(mine, g.reshape(batch, 1, -1, g.shape[-1]), g.new_zeros(()))
    of_x = x.reshape(batch, 1, -1, x.shape[-1]).expand(-1, shape[0], -1, -1)
    return Pair(of_x, of_g, tuple(shape)) if transposed else Pair(of_g, of_x, tuple(shape))


ROUTED = Rule("routed", _forward, _record)
