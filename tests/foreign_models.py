"""Tiny random ``transformers`` models, one of each architecture; none is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

WORDS, TOKENS, LAYERS = 31, 8, 3
_NONE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
_GPT2 = {"n_embd": 16, "n_head": 2, "n_layer": LAYERS, "vocab_size": WORDS, "n_positions": 32} | _NONE
_LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
} | _NONE
_NEOX = {name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"}
_BERT = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "num_labels": 3,
}
_VIT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "num_labels": 3,
}
_OPT = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "ffn_dim": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "word_embed_proj_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 1,
}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: _made("GPT2", "LMHeadModel", _GPT2),
    "gpt2-untied": lambda: _made("GPT2", "LMHeadModel", _GPT2, tie_word_embeddings=False),
    "gpt2-by-depth": lambda: _made("GPT2", "LMHeadModel", _GPT2, scale_attn_by_inverse_layer_idx=True),
    "llama": lambda: _made("Llama", "ForCausalLM", _LLAMA),
    "qwen2": lambda: _made("Qwen2", "ForCausalLM", _LLAMA),
    "qwen3": lambda: _made("Qwen3", "ForCausalLM", _LLAMA, head_dim=4),
    "phi3": lambda: _made("Phi3", "ForCausalLM", _LLAMA),
    "gpt-neox": lambda: _made("GPTNeoX", "ForCausalLM", _NEOX),
    "olmo2": lambda: _made("Olmo2", "ForCausalLM", _LLAMA),
    "gemma": lambda: _made("Gemma", "ForCausalLM", _LLAMA, head_dim=4),
    "gemma2": lambda: _made("Gemma2", "ForCausalLM", _LLAMA, head_dim=4, sliding_window=4),
    "gemma3": lambda: _made("Gemma3", "ForCausalLM", _LLAMA, part="Text", head_dim=4, sliding_window=4),
    "mistral": lambda: _made("Mistral", "ForCausalLM", _LLAMA, sliding_window=4),
    "opt": lambda: _made("OPT", "ForCausalLM", _OPT),
    "bert": lambda: _made("Bert", "ForSequenceClassification", _BERT),
    "roberta": lambda: _made("Roberta", "ForSequenceClassification", _BERT),
    "vit": lambda: _made("ViT", "ForImageClassification", _VIT),
}
CAUSAL = [name for name in MODELS if name not in ("bert", "roberta", "vit")]


def make(name: str, *, dtype: torch.dtype = torch.float64) -> Any:
    """Return a module in eval mode, the same every time, with parameters moved away from their initial values."""
    torch.manual_seed(0)
    module = MODELS[name]().to(dtype).eval()
    with torch.no_grad():
        for leaf in module.parameters():
            leaf.add_(torch.randn_like(leaf), alpha=0.1)
    return module


def _made(family: str, purpose: str, config: dict[str, Any], *, part: str = "", **more: Any) -> nn.Module:
    made = getattr(transformers, f"{family}{part}Config")(**config | more)
    return getattr(transformers, f"{family}{purpose}")(made)
