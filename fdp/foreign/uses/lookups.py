"""Rows and matrices of a parameter selected by ids of samples: embeddings, bags of embeddings, indexing.

embedding(ids, W)       W_id          embedding_bag(ids, W)   sum, mean or maximum of W_id
W[ids] x                a matrix of a stack for every token, never copied (``fdp.foreign.uses.routing``)

>>> embedding(trace, ids, weight)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fdp import ops
from fdp.foreign.uses.operands import Operand, no_rule_error
from fdp.foreign.uses.pointwise import apply_to_parameters
from fdp.foreign.uses.routing import ROUTED, pack
from fdp.foreign.uses.tracking import ALWAYS_FIRST, CallTrace, SelectedMatrices, Tracked


def embedding(
    trace: CallTrace,
    input: Operand,
    weight: Operand,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``F.embedding``."""
    if scale_grad_by_freq:
        raise no_rule_error("F.embedding with scale_grad_by_freq", (input, weight))
    if isinstance(input, Tracked) or not isinstance(weight, Tracked):
        raise no_rule_error("F.embedding by ids that depend on parameters", (input, weight))
    first, back = trace.with_samples_first(input, path=weight.path, dims=2)
    if weight.leaf is not None and not weight.transposed:
        return back(ops.embedding(first, weight.leaf, padding_idx=padding_idx))
    found = torch.func.vmap(lambda ids, table: table[ids])(first, weight.copies())
    if padding_idx is not None:  # its row is not trained
        padding = (first == padding_idx % weight.shape[0]).unsqueeze(-1)
        found = torch.where(padding, found.detach(), found)
    return back(found)


def getitem(trace: CallTrace, x: Operand, index: Any) -> Any:
    """``w[ids]`` for ids of samples, and any other indexing of a parameter by constants."""
    entries = index if isinstance(index, list) else [index]
    held = [e for e in entries if isinstance(e, Tracked) or (isinstance(e, Tensor) and not trace.is_constant(e))]
    if isinstance(x, Tracked) and not held:
        return apply_to_parameters(
            trace, torch.Tensor.__getitem__, (x, tuple(index) if isinstance(index, list) else index), {}
        )
    ids = index if isinstance(index, Tensor) and not index.is_floating_point() else None
    if isinstance(x, Tracked) and _is_stack(x) and ids is not None and ids.ndim == 1 and ids.dtype != torch.bool:
        return _register_selected(trace, SelectedMatrices(_nan_like(x, len(ids), *x.shape[1:]), x, ids))
    if isinstance(x, Tracked) and len(x.shape) == 2 and ids is not None and ids.dtype != torch.bool:
        return embedding(trace, ids, x)
    if isinstance(x, Tracked) and len(x.shape) == 1 and ids is not None and ids.dtype != torch.bool:
        return embedding(trace, ids, trace.resolve(apply_to_parameters(trace, torch.unsqueeze, (x, 1), {}))).squeeze(-1)
    raise no_rule_error("indexing", (x, *held))


def index_select(trace: CallTrace, input: Operand, dim: int, index: Tensor) -> Tensor:
    """``torch.index_select``: rows of a table by ids of samples, or any part of a parameter by constants."""
    if isinstance(input, Tracked) and trace.is_constant(index):
        return apply_to_parameters(trace, torch.index_select, (input, dim, index), {})
    if isinstance(input, Tracked) and len(input.shape) == 2 and dim in (0, -2):
        return embedding(trace, index, input)
    raise no_rule_error("torch.index_select", (input, index))


PRODUCTS = (torch.bmm, torch.Tensor.bmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
TRANSPOSES = (torch.transpose, torch.Tensor.transpose, torch.swapaxes, torch.Tensor.swapaxes)


def apply_to_selected(
    trace: CallTrace, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor:
    """Apply a function to matrices that ids of samples selected: transpose them, or multiply them with rows."""
    chosen = next(a for a in args if isinstance(a, SelectedMatrices))
    if func in TRANSPOSES and chosen is args[0] and {dim % 3 for dim in args[1:]} == {1, 2}:
        transposed = SelectedMatrices(
            chosen.value.transpose(1, 2), chosen.weight, chosen.ids, transposed=not chosen.transposed
        )
        return _register_selected(trace, transposed)
    if func in PRODUCTS and len(args) == 2 and not kwargs:
        x = args[1] if chosen is args[0] else args[0]
        if isinstance(x, Tensor) and x.ndim == 3 and len(x) == len(chosen.ids):
            first = chosen is args[0]  # W_id x: treat the columns of x as rows, with transposed matrices
            rows = x.transpose(1, 2) if first else x
            ids = chosen.ids.unsqueeze(1).expand(rows.shape[:2])
            y = _routed_product(trace, pack(rows, ids), chosen, transposed=chosen.transposed == first)
            return y.transpose(1, 2) if first else y
    raise no_rule_error("a function of W[ids] other than a product of 3-d tensors", (chosen.weight, *args))


def _is_stack(x: Tracked) -> bool:
    return len(x.shape) == 3 and x.leaf is not None and not x.transposed


def _nan_like(x: Tracked, *shape: int) -> Tensor:
    """Return NaN without memory, so that a use that is not seen cannot go unnoticed."""
    return x.value.new_full((), float("nan")).expand(shape)


def _register_selected(trace: CallTrace, made: SelectedMatrices) -> Tensor:
    trace.tracked[made.value] = made
    return made.value


def _routed_product(trace: CallTrace, packed: Tensor, chosen: SelectedMatrices, *, transposed: bool) -> Tensor:
    first, back = trace.with_samples_first(packed, path=chosen.path, dims=ALWAYS_FIRST)
    return back(ops.use(ROUTED, first, chosen.weight.leaf, transposed=transposed))  # pyright: ignore[reportArgumentType]


def embedding_bag(
    trace: CallTrace,
    input: Operand,
    weight: Operand,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Operand | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """``F.embedding_bag`` of (bags, ids of a bag)."""
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise no_rule_error("F.embedding_bag with max_norm, scale_grad_by_freq or sparse", (input, weight))
    if not isinstance(input, Tensor) or input.ndim != 2 or isinstance(per_sample_weights, Tracked):
        raise no_rule_error("F.embedding_bag by offsets, or with weights that are parameters", (input, weight))
    found = embedding(trace, input, weight)
    if isinstance(trace.resolve(found), Tracked):
        raise no_rule_error("F.embedding_bag of ids that hold no samples", (input, weight))
    if per_sample_weights is not None:
        found = found * per_sample_weights.unsqueeze(-1)
    there = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        there = input != padding_idx % weight.shape[0]
    if mode == "max":
        most = found.masked_fill(~there.unsqueeze(-1), -torch.inf).max(1).values
        return torch.where(there.any(1, keepdim=True), most, torch.zeros_like(most))
    total = found.masked_fill(~there.unsqueeze(-1), 0.0).sum(1)
    return total / there.sum(1, keepdim=True).clamp_min(1) if mode == "mean" else total


def aten_embedding(
    trace: CallTrace,
    weight: Operand,
    indices: Operand,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``torch.ops.aten.embedding``: the table comes first, and -1 means no padding."""
    padding = None if padding_idx < 0 else padding_idx
    return embedding(trace, indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)
