"""Compute the experts of ``transformers`` so that every use of their matrices is recorded.

``transformers`` has three implementations. A batched product with ``W[ids]`` copies a matrix for every token. A grouped
product sorts tokens by expert across all samples, so that rows can no longer be assigned to samples. A loop that skips
experts without tokens has shapes that depend on the data. In a copy of the module, experts are computed as in
``fdp.foreign.uses.routing`` instead: token by token, in their original order.

    >>> module = with_routed_experts(module)
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn

from fdp.foreign.placeholders import copy_with_changes
from fdp.foreign.uses.custom_rules import operation, rule
from fdp.foreign.uses.routing import ROUTED, pack


@operation
def _routed_product(packed: Tensor, weight: Tensor, *, transposed: bool) -> Tensor:
    return ROUTED.forward(packed, weight, transposed=transposed)


rule(_routed_product)(ROUTED)


def routed_product(x: Tensor, ids: Tensor, weight: Tensor, *, transposed: bool = False) -> Tensor:
    """Return ``W_id x`` for every row of ``x`` and its id.

    If ``transposed``, the matrices of ``weight`` are (inputs, outputs).
    """
    return _routed_product(pack(x, ids), weight, transposed=transposed)


class RoutedExperts:
    """A mixin that computes the forward of ``transformers`` experts by :func:`routed_product`."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        tokens, chosen = len(hidden_states), top_k_index.shape[-1]
        ids = top_k_index.reshape(-1)
        x = hidden_states.repeat_interleave(chosen, dim=0)
        first = "gate_up_proj" if self.has_gate else "up_proj"
        x = self._routed(x, ids, first)
        x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
        x = self._routed(x, ids, "down_proj")
        x = self.post_expert_norm(x) if self.has_post_expert_norm else x
        x = x * top_k_weights.reshape(-1, 1)
        return x.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)

    def _routed(self: Any, x: Tensor, ids: Tensor, name: str) -> Tensor:
        y = routed_product(x, ids, getattr(self, name), transposed=self.is_transposed)
        return y + getattr(self, f"{name}_bias")[ids] if self.has_bias else y


class LoopedExperts:
    """A mixin that replaces the forward of ``transformers`` experts by the loop that each class defines."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return type(self).looped.__wrapped__(self, *args, **kwargs)


def with_routed_experts(module: nn.Module) -> nn.Module:
    """Return the module itself if it has no ``transformers`` experts, else a copy that shares its tensors."""
    return copy_with_changes(module, has_experts, lambda part: _mix_in(RoutedExperts, part))


def with_looped_experts(module: nn.Module) -> nn.Module:
    """Return the module with experts computed by loops over them: any dtype, one sample at a time."""
    return copy_with_changes(module, has_experts, lambda part: _mix_in(LoopedExperts, part))


def has_experts(part: nn.Module) -> bool:
    """Return True if a module is what ``transformers`` calls experts, whichever implementation it uses."""
    flags = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    if not all(isinstance(getattr(part, flag, None), bool) for flag in flags):
        return False
    return hasattr(type(part).forward, "__wrapped__") and not part._is_expert_parallel


def _mix_in(how: type, part: nn.Module) -> None:
    part.__class__ = _mixed_class(how, type(part))


@cache
def _mixed_class(how: type, kind: type) -> type:
    return type(kind.__name__, (how, kind), {"looped": kind.forward})
