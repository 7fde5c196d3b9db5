"""Tiny random ``transformers`` models of families that are written differently than GPT-2 and Llama."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from fdp.types import Tree

WORDS, TOKENS = 256, 8
_WORDS: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
_PADDED = _WORDS | {"pad_token_id": 1, "num_labels": 3}
_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
_FEWER = {"num_key_value_heads": 1}
_OLD: dict[str, Any] = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 32}
_ENCODER = _SIZES | {"vocab_size": WORDS, "num_labels": 3}
_IMAGES: dict[str, Any] = {"num_channels": 3, "image_size": 16, "num_labels": 3}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 8,
    "kv_lora_rank": 4,
    "q_lora_rank": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "qk_nope_head_dim": 4,
}
_GEMMA3N: dict[str, Any] = {
    "head_dim": 8,
    "vocab_size_per_layer_input": WORDS,
    "hidden_size_per_layer_input": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0, 0.0],
    "sliding_window": 4,
}
_SEGFORMER: dict[str, Any] = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
}
_CONVNEXT: dict[str, Any] = {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2}
_MOE: dict[str, Any] = {"num_experts_per_tok": 2}
_OPT = {name: size for name, size in _SIZES.items() if name != "intermediate_size"} | {"ffn_dim": 24}


def _made(family: str, purpose: str, config: dict[str, Any], *, part: str = "") -> nn.Module:
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}{part}Config")(**config)
    return getattr(transformers, f"{family}{purpose}")(made)


_causal, _texts = partial(_made, purpose="ForCausalLM"), partial(_made, purpose="ForSequenceClassification")
_images = partial(_made, purpose="ForImageClassification")
MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt-j": lambda: _causal("GPTJ", config=_WORDS | _OLD | {"rotary_dim": 4}),
    "gpt-neo": lambda: _causal(
        "GPTNeo",
        config=_WORDS
        | {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 32, "window_size": 4}
        | {"attention_types": [[["global", "local"], 1]]},
    ),
    "codegen": lambda: _causal("CodeGen", config=_WORDS | _OLD | {"n_embd": 32, "n_head": 4, "rotary_dim": 4}),
    "mpt": lambda: _causal("Mpt", config=_WORDS | {"d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 32}),
    "bloom": lambda: _causal("Bloom", config=_WORDS | {"hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "mixtral": lambda: _causal("Mixtral", config=_WORDS | _SIZES | _FEWER | _MOE | {"num_local_experts": 4}),
    "deepseek": lambda: _causal("DeepseekV3", config=_WORDS | _SIZES | _DEEPSEEK),
    "gpt-oss": lambda: _causal(
        "GptOss",
        config=_WORDS | _SIZES | _FEWER | _MOE | {"head_dim": 8, "num_local_experts": 4, "sliding_window": 4},
    ),
    "qwen3-moe": lambda: _causal(
        "Qwen3Moe",
        config=_WORDS | _SIZES | _FEWER | _MOE | {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 8},
    ),
    "mamba": lambda: _causal(
        "Mamba", config=_WORDS | {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2}
    ),
    "gemma2": lambda: _causal("Gemma2", config=_WORDS | _SIZES | _FEWER | {"head_dim": 8, "sliding_window": 4}),
    "gemma-3n": lambda: _causal("Gemma3n", config=_WORDS | _SIZES | _FEWER | _GEMMA3N, part="Text"),
    "llama classifier": lambda: _texts("Llama", config=_PADDED | _SIZES | _FEWER),
    "gpt2 classifier": lambda: _texts("GPT2", config=_PADDED | _OLD),
    "mistral classifier": lambda: _texts("Mistral", config=_PADDED | _SIZES | _FEWER | {"sliding_window": 4}),
    "opt classifier": lambda: _texts("OPT", config=_PADDED | _OPT | {"word_embed_proj_dim": 16}),
    "albert": lambda: _texts("Albert", config=_ENCODER | {"embedding_size": 8}),
    "convnext": lambda: _images("ConvNext", config=_IMAGES | _CONVNEXT),
    "segformer": lambda: _images("Segformer", config=_IMAGES | _SEGFORMER),
    "swin": lambda: _images(
        "Swin",
        config=_IMAGES | {"patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 2},
    ),
}
ONE_BLOCK = ("bloom", "gemma-3n", "opt classifier", "albert", "convnext", "segformer", "swin")
"""Families that cannot be treated layer by layer."""
COARSE = ("gpt-j", "gpt-neo", "codegen", "deepseek")
"""Families that compute scores, or a router, in float32 whatever their dtype."""
NARROW = ("mamba",)
"""Families that cannot compute in float64."""


def make(name: str) -> Any:
    """Return a module in eval mode, with parameters moved away from their initial values."""
    made: Any = MODELS[name]()
    module = made.to(torch.float32 if name in NARROW else torch.float64).eval()
    with torch.no_grad():
        for leaf in module.parameters():
            leaf.add_(torch.randn_like(leaf), alpha=0.1)
    return module


def save(name: str, where: Path) -> Path:
    """Save a model in float32; return its folder."""
    folder = where / name.replace(" ", "-")
    made: Any = MODELS[name]()
    made.save_pretrained(folder)
    return folder


def data_for(module: Any, samples: int = 3) -> dict[str, Tensor]:
    """Return samples for a model; some labelled texts are padded."""
    draw, label = torch.Generator().manual_seed(1), torch.arange(samples) % 3
    dtype = next(module.parameters()).dtype
    if module.main_input_name == "pixel_values":
        return {"image": torch.randn(samples, 3, 16, 16, generator=draw, dtype=dtype), "label": label}
    if "Classification" not in type(module).__name__:
        return {"tokens": torch.randint(2, WORDS, (samples, TOKENS + 1), generator=draw)}
    mask = (torch.arange(TOKENS) < torch.tensor([TOKENS, 5, 3])[torch.arange(samples) % 3, None]).long()
    tokens = torch.randint(2, WORDS, (samples, TOKENS), generator=draw)
    return {"tokens": torch.where(mask > 0, tokens, 1), "mask": mask, "label": label}


def own_losses(module: Any, data: Tree) -> Tensor:
    """Return the losses by the module itself, called as its users call it."""
    if "image" in data:
        return F.cross_entropy(module(pixel_values=data["image"]).logits, data["label"], reduction="none")
    if "label" in data:
        scores = module(input_ids=data["tokens"], attention_mask=data["mask"]).logits
        return F.cross_entropy(scores, data["label"], reduction="none")
    scores = module(input_ids=data["tokens"][:, :-1]).logits
    return F.cross_entropy(scores.transpose(1, 2), data["tokens"][:, 1:], reduction="none").mean(1)
