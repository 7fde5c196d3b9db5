"""The experts of ``transformers``, computed so that every use of their matrices is seen.

They choose among three ways. ``W[ids]`` and a batched product copy a matrix for every token. If tokens are sorted by
expert, over all samples, for a grouped product, nobody sees which row is whose. If a loop over experts skips those
without tokens, shapes depend on the data. In a copy of a module they do what ``fdp.foreign.uses.routing`` does, token
by token in the order they came in.

    >>> module = with_routed_experts(module)
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn

from fdp.foreign.placeholders import copied_with
from fdp.foreign.uses.routing import ROUTED, pack
from fdp.foreign.uses.watch import operation, rule


@operation
def _product(packed: Tensor, weight: Tensor, *, turned: bool) -> Tensor:
    return ROUTED.forward(packed, weight, turned=turned)


rule(_product)(ROUTED)


def routed(x: Tensor, ids: Tensor, weight: Tensor, *, turned: bool = False) -> Tensor:
    """``W_id x`` for every row of ``x`` and its id; ``turned``: the matrices of ``weight`` are (inputs, outputs)."""
    return _product(pack(x, ids), weight, turned=turned)


class RoutedExperts:
    """Instead of the forward of experts of ``transformers``: the same function, by :func:`routed`."""

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
        y = routed(x, ids, getattr(self, name), turned=self.is_transposed)
        return y + getattr(self, f"{name}_bias")[ids] if self.has_bias else y


class LoopedExperts:
    """Instead of their forward: the loop over experts that each class of them comes with."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        return type(self).looped.__wrapped__(self, *args, **kwargs)


def with_routed_experts(module: nn.Module) -> nn.Module:
    """The module itself if it has no experts of ``transformers``, else a copy that shares its tensors."""
    return copied_with(module, has_experts, lambda part: _as(RoutedExperts, part))


def with_looped_experts(module: nn.Module) -> nn.Module:
    """As :func:`with_routed_experts`, by loops over the experts: in any dtype, for one sample at a time."""
    return copied_with(module, has_experts, lambda part: _as(LoopedExperts, part))


def has_experts(part: nn.Module) -> bool:
    """Whether a part is what ``transformers`` calls experts, whichever way it was told to compute them."""
    flags = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")
    if not all(isinstance(getattr(part, flag, None), bool) for flag in flags):
        return False
    return hasattr(type(part).forward, "__wrapped__") and not part._is_expert_parallel


def _as(how: type, part: nn.Module) -> None:
    part.__class__ = _mixed(how, type(part))


@cache
def _mixed(how: type, kind: type) -> type:
    return type(kind.__name__, (how, kind), {"looped": kind.forward})
