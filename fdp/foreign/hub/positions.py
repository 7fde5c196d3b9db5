"""The longest context of a model of ``transformers``, by its configuration.

    positions = max_position_embeddings (or n_positions, max_seq_len, ...)
    positions x factor, if rotary positions are scaled and the configuration states the length before scaling

A model without a table of positions that ends (ALiBi, state space models) has no longest context.

    >>> longest_context(module.config)
    1024
"""

from __future__ import annotations

from typing import Any

SETTINGS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "context_length", "n_ctx")
"""Entries of a configuration that may hold the number of positions."""
PADDED_FAMILIES = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "xmod")
"""Families whose first positions, up to that of padding, stand for no token."""


def longest_context(config: Any) -> int | None:
    """Return the largest number of tokens that a model has positions for; None without a limit."""
    found = next((int(value) for name in SETTINGS if (value := getattr(config, name, None))), None)
    if found is None or _has_no_table(config):
        return None
    if getattr(config, "model_type", None) in PADDED_FAMILIES:
        return found - (getattr(config, "pad_token_id", None) or 0) - 1
    scaling = getattr(config, "rope_scaling", None) or getattr(config, "rope_parameters", None) or {}
    before = scaling.get("original_max_position_embeddings") or found
    return found if before < found else int(found * float(scaling.get("factor") or 1))


def _has_no_table(config: Any) -> bool:
    """Return True if attention is biased by distance (ALiBi), which has no last position."""
    attention = getattr(config, "attn_config", None)
    return bool(getattr(config, "alibi", False) or getattr(attention, "alibi", False))
