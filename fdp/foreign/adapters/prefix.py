"""Prefix tuning: train keys and values of virtual tokens in front of every layer's own; the model is frozen.

    attention(q, [P_k; k], [P_v; v])  in every layer            Li and Liang 2021, arXiv 2101.00190

``P = prefix.<layer>`` (2, key heads, tokens, features) is all that is trained, so it is all that is in a sample's norm,
in the clipped sum and in the noise. Real tokens come after the virtual ones: their positions begin at ``tokens``, as in
``peft``, which can read what is saved (``fdp.foreign.adapters.prefix_save``).

    >>> model, params = prefix_tuning(module, tokens=8, key=key, context=64)              # a LlamaForCausalLM, ...
    >>> save_prefix("runs/prefix", params, base="models/tiny")
    >>> peft.PeftModel.from_pretrained(module, "runs/prefix")
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from fdp import keys, tree
from fdp.foreign.call_template import replace_instances
from fdp.foreign.hub.causal import causal_lm
from fdp.foreign.hub.prefix_cache import PrefixCache
from fdp.foreign.leaves import params_of
from fdp.foreign.stack.block_functions import LayerBlock
from fdp.gradients.tape import Watched
from fdp.gradients.taps import batch_size_of
from fdp.init import normal
from fdp.model import LeafSpec, Model
from fdp.types import FdpError, Key, Path, Tree

PREFIX = "prefix"
INITIAL_STD = 0.02
"""Standard deviation of the initial values: small, so that a virtual token adds little but takes a share of the
attention.
"""


def prefix_tuning(
    module: nn.Module, *, tokens: int, key: Key, context: int | None = None, example: Tree | None = None
) -> tuple[Model, Tree]:
    """Return the model of a ``...ForCausalLM`` with a prefix, and the parameters of the module and the prefix.

    Each leaf of the prefix is drawn from (key, path). See ``causal_lm`` for ``context`` and ``example``.
    """
    model = prefix_model(module, tokens=tokens, context=context, example=example)
    flat = tree.flatten(params_of(module, without_prefix(model)))
    like = next(iter(flat.values()))
    for path in sorted(model.trainable):
        spec = model.leaves[path]
        flat[path] = spec.init(keys.fold_in(key, path), spec.shape, dtype=like.dtype).to(like.device)
    return model, tree.nest(flat)


def prefix_model(module: nn.Module, *, tokens: int, context: int | None = None, example: Tree | None = None) -> Model:
    """Return the same model without values.

    Guarantees:
      - every leaf of the module is frozen; the trainable leaves are exactly the prefix, one per layer;
      - a layer that does not ask for the prefix is an error.
    """
    config: Any = module.config
    if tokens < 1:
        raise FdpError(f"prefix: expected at least 1 virtual token, got {tokens}")
    limits = [getattr(config, name, None) for name in ("max_position_embeddings", "sliding_window")]
    room = min([limit for limit in limits if limit is not None], default=None)
    left = context if room is None else room - tokens if context is None else context
    if room is not None and left is not None and not 1 <= left <= room - tokens:
        raise FdpError(
            f"prefix: expected virtual and real tokens that fit into the model's {room} positions, or into its sliding "
            f"window if it has one, got {tokens} and {left}; give a shorter prefix or context"
        )
    base = causal_lm(module, context=left, example=example, prefix=tokens)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    features = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    spec = LeafSpec((2, heads, tokens, features), normal(INITIAL_STD))
    shared: dict[LayerBlock, _PrefixedLayer] = {}  # equal blocks share one apply, so that they are compiled once
    leaves, blocks = dict(base.leaves), []
    for block in base.blocks:
        if isinstance(block.apply, LayerBlock):
            path = f"{PREFIX}.{len(leaves) - len(base.leaves)}"
            leaves[path] = spec
            apply = shared.setdefault(block.apply, _PrefixedLayer(block.apply))
            block = block._replace(params={"base": block.params, "prefix": path}, apply=apply)
        blocks.append(block)
    frozen = frozenset(base.leaves)
    return base._replace(name=f"{base.name}+prefix", leaves=leaves, blocks=tuple(blocks), frozen=frozen)


def prefix_paths(leaves: Collection[Path]) -> list[Path]:
    """Return the leaves of the prefix, layer by layer."""
    found = [path for path in leaves if path.rpartition(".")[0] == PREFIX]
    if not found:
        raise FdpError(f"prefix: expected leaves {PREFIX}.0, {PREFIX}.1, ..., got {list(leaves)[:4]}...")
    return sorted(found, key=lambda path: int(path.rpartition(".")[2]))


def without_prefix(model: Model) -> Model:
    """Return the model with only the leaves that its module has, to read their values."""
    mine = set(prefix_paths(model.leaves))
    return model._replace(leaves={path: leaf for path, leaf in model.leaves.items() if path not in mine})


class _PrefixedLayer:
    """A layer applied to {"base": its leaves by name, "prefix": keys and values}."""

    def __init__(self, layer: LayerBlock):
        self.layer = layer

    def __call__(self, params: Tree, carry: Tree, data: Tree) -> Tree:
        leaf = params["prefix"]
        size = (batch_size_of(data), *leaf.shape)
        copies = leaf.tape.expand(leaf) if isinstance(leaf, Watched) else leaf.expand(size)
        given = PrefixCache(leaf.shape[2], copies[:, 0], copies[:, 1])
        out = self.layer.call_with(
            replace_instances(self.layer.template, PrefixCache, given), params["base"], carry, data
        )
        if given.asked != 1:
            raise FdpError(
                f"prefix: expected a layer that asks its cache for keys and values once, got {given.asked} times from "
                f"{type(self.layer.module).__name__}; use LoRA instead"
            )
        return out
