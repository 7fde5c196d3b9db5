"""Tiny random ``transformers`` models, as whole modules or as stacks; and ``peft`` adapters in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.zoo.draws import WORDS, integers, normal
from benchmarks.zoo.hold import Case, Draw, Kind
from fdp.foreign.hub.hugging_face import model_of
from fdp.foreign.leaves import params_of
from fdp.types import Tree

CONTEXT, CLASSES = 6, 3
SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
WORDY: dict[str, Any] = {
    "vocab_size": WORDS,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 16}
GPT: dict[str, Any] = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16}
IMAGES: dict[str, Any] = {**SIZES, "image_size": 8, "patch_size": 4, "num_labels": CLASSES}
WHOLE = {"materialize": ("*",)}
EAGER = {"attn_implementation": "eager"}


def tokens(n: int, g: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": integers(g, n, CONTEXT)}


def labelled(n: int, g: torch.Generator) -> dict[str, Tensor]:
    return tokens(n, g) | {"label": integers(g, n, below=CLASSES, least=0)}


def images(n: int, g: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": normal(g, n, 3, 8, 8), "label": integers(g, n, below=CLASSES, least=0)}


def next_token(outputs: Any, data: Tree) -> Tensor:
    ids = data["input_ids"]
    logits = outputs.logits[:, -ids.shape[1] :]  # prompts that are learned come before
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(1)


def by_label(outputs: Any, data: Tree) -> Tensor:
    return F.cross_entropy(outputs.logits, data["label"], reduction="none")


def first_of(outputs: Any, data: Tree) -> Tensor:
    """Return the loss of a model without a head: the sum of squares of its hidden state."""
    hidden = outputs.last_hidden_state
    return hidden.reshape(len(hidden), -1).square().sum(1)


def make(family: str, config: Mapping[str, Any], *, head: str = "ForCausalLM", part: str = "") -> nn.Module:
    """Return a ``transformers`` model of these sizes, in eval()."""
    import transformers

    made = getattr(transformers, f"{family}{part}Config")(**config)
    return getattr(transformers, f"{family}{head}")(made).eval()


def _kind(
    name: str,
    config: Mapping[str, Any],
    *,
    head: str = "ForCausalLM",
    part: str = "",
    draw: Draw = tokens,
    loss: Any = next_token,
    family: str | None = None,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Kind:
    own = {**(WORDY if head != "ForImageClassification" else {}), **config}
    made = lambda: make(family or name, own, head=head, part=part)  # noqa: E731
    return Kind(name, lambda: Case(made(), draw, loss=loss, options=options or {}), **more)


def _classifier(name: str, config: Mapping[str, Any], **more: Any) -> Kind:
    own = {**config, "num_labels": CLASSES}
    return _kind(
        f"{name}, sequences", own, family=name, head="ForSequenceClassification", draw=labelled, loss=by_label, **more
    )


def _image(name: str, config: Mapping[str, Any], **more: Any) -> Kind:
    return _kind(name, config, head="ForImageClassification", draw=images, loss=by_label, **more)


def _language(name: str, config: Mapping[str, Any], **more: Any) -> Kind:
    """Return a language model as ``fdp train --model FOLDER`` loads it, layer by layer if possible."""

    def take(module: nn.Module, example: Tree) -> Any:
        model = model_of(module)
        return model, params_of(module, model)

    def draw(n: int, g: torch.Generator) -> dict[str, Tensor]:
        return {"tokens": integers(g, n, CONTEXT + 1)}

    def call(module: Any, data: Tree) -> Any:
        return module(input_ids=data["tokens"][:, :-1])

    def loss(outputs: Any, data: Tree) -> Tensor:
        ids = data["tokens"]
        losses = F.cross_entropy(outputs.logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return losses.view(len(ids), -1).mean(1)

    def case() -> Case:
        return Case(make(name, {**WORDY, **config}).double(), draw, loss=loss, take=take, call=call)

    return Kind(f"{name}, as a folder's", case, **more)


ROUTES: dict[str, Any] = {"num_experts_per_tok": 1, "experts_implementation": "eager"}
"""The other implementations of experts do not run in float64; fdp does not depend on which one is set."""
EXPERTS = {**ROUTES, "num_local_experts": 2}
PICTURES: dict[str, Any] = {"image_size": 8, "num_labels": CLASSES}
ENCODERS = {**SIZES, "max_position_embeddings": 16}
FAMILIES: list[Kind] = [
    _kind("GPT2", GPT, head="LMHeadModel", compiled=True),
    _kind("GPT2, untied", {**GPT, "tie_word_embeddings": False}, family="GPT2", head="LMHeadModel"),
    _kind("Llama", GROUPED, compiled=True),
    _kind(
        "Llama, layer by layer", GROUPED, family="Llama", options={"blocks": "model.layers.*"}, mend={"blocks": None}
    ),
    _kind("Qwen2", GROUPED),
    _kind("Qwen3", {**GROUPED, "head_dim": 4}),
    _kind("Mistral", {**GROUPED, "sliding_window": 4}),
    _kind("Gemma", {**GROUPED, "head_dim": 4}),
    _kind("Gemma2", {**GROUPED, "head_dim": 4}, compiled=True),
    _kind("Gemma3", {**GROUPED, "head_dim": 4}, part="Text"),
    _kind("Phi", SIZES),
    _kind("Phi3", {**GROUPED, "pad_token_id": 0}),
    _kind("OPT", {**SIZES, "ffn_dim": 12, "word_embed_proj_dim": 8, "max_position_embeddings": 16}),
    _kind("GPTNeoX", {**SIZES, "max_position_embeddings": 16}),
    _kind("GPTJ", {**GPT, "rotary_dim": 2}),
    _kind(
        "GPTNeo",
        {
            "hidden_size": 8,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 16,
        },
    ),
    _kind("CodeGen", {**GPT, "rotary_dim": 2, "n_head": 4}),
    _kind("Bloom", {"hidden_size": 8, "n_layer": 2, "n_head": 2}, mend=WHOLE),
    _kind("Falcon", {**SIZES, "alibi": True}),
    _kind("Mpt", {"d_model": 8, "n_layers": 2, "n_heads": 2, "expansion_ratio": 2, "max_seq_len": 16}),
    _kind("StableLm", GROUPED),
    _kind("Starcoder2", GROUPED),
    _kind("Olmo", GROUPED),
    _kind("Olmo2", GROUPED),
    _kind("Cohere", GROUPED),
    _kind("Granite", GROUPED),
    _kind("Nemotron", GROUPED),
    _kind("Mamba", {"hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 2}, mend=WHOLE),
    _kind("Mixtral", {**GROUPED, "num_local_experts": 2, "experts_implementation": "eager"}, mend=WHOLE),
    _classifier("Bert", ENCODERS, compiled=True),
    _classifier("Roberta", {**ENCODERS, "max_position_embeddings": 20}),
    _classifier("DistilBert", {"dim": 8, "hidden_dim": 12, "n_layers": 2, "n_heads": 2, "max_position_embeddings": 16}),
    _classifier("Albert", {**ENCODERS, "embedding_size": 4}),
    _classifier("Electra", {**ENCODERS, "embedding_size": 8}),
    _classifier("MPNet", {**ENCODERS, "max_position_embeddings": 20}),
    _classifier("XLMRoberta", {**ENCODERS, "max_position_embeddings": 20}),
    _classifier("ModernBert", {**ENCODERS, "pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2}, mend=WHOLE),
    _image("ViT", IMAGES, compiled=True),
    _image("DeiT", IMAGES),
    _image("Beit", IMAGES, mend=WHOLE),
    _image("Dinov2", {**IMAGES, "mlp_ratio": 2}, mend={"frozen": ("dinov2.embeddings.mask_token",)}),
    _language("Llama", GROUPED, compiled=True),
    _language("Qwen2", GROUPED, compiled=True),
    _language("Mistral", GROUPED, compiled=True),
    _language("Bloom", {"hidden_size": 8, "n_layer": 2, "n_head": 2}),
    _language("Mpt", {"d_model": 8, "n_layers": 2, "n_heads": 2, "expansion_ratio": 2, "max_seq_len": 16}),
    _language("Mixtral", {**GROUPED, **EXPERTS}, compiled=True),
    _language("Qwen3Moe", {**GROUPED, "head_dim": 4, "num_experts": 2, **ROUTES, "moe_intermediate_size": 4}),
    _language("GptOss", {**GROUPED, **EXPERTS, "head_dim": 4, "sliding_window": 4}),
    _image("ConvNext", {**PICTURES, "hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2}),
    _image(
        "Segformer",
        {
            **PICTURES,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [4, 8],
            "patch_sizes": [3, 3],
            "strides": [2, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
        },
    ),
]


# ---------------------------------------------------------------- adapters of peft


def _adapter(name: str, config: Callable[[], Any], **more: Any) -> Kind:
    def case() -> Case:
        import peft

        base: Any = make("Llama", {**WORDY, **GROUPED})
        return Case(peft.get_peft_model(base, config()).eval(), tokens, loss=next_token, call=_by_ids)

    return Kind(name, case, **more)


def _by_ids(module: Any, data: Tree) -> Any:
    return module(input_ids=data["input_ids"])


def _config(kind: str, **options: Any) -> Callable[[], Any]:
    def made() -> Any:
        import peft

        return getattr(peft, kind)(task_type="CAUSAL_LM", **options)

    return made


TARGETS = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
ADAPTERS: list[Kind] = [
    _adapter("LoRA", _config("LoraConfig", r=2, init_lora_weights=False, **TARGETS), compiled=True),
    _adapter("LoRA, rank stabilised", _config("LoraConfig", r=2, use_rslora=True, init_lora_weights=False, **TARGETS)),
    _adapter("LoRA with embeddings", _config("LoraConfig", r=2, target_modules=["embed_tokens", "q_proj"]), mend=WHOLE),
    _adapter("LoRA and a trained head", _config("LoraConfig", r=2, modules_to_save=["lm_head"], **TARGETS)),
    _adapter("DoRA", _config("LoraConfig", r=2, use_dora=True, **TARGETS), mend=WHOLE),
    _adapter("IA3", _config("IA3Config", feedforward_modules=["down_proj"], **TARGETS), compiled=True),
    _adapter("AdaLoRA", _config("AdaLoraConfig", init_r=3, target_r=2, total_step=10, **TARGETS), mend=WHOLE),
    _adapter("LoHa", _config("LoHaConfig", r=2, **TARGETS), mend=WHOLE),
    _adapter("LoKr", _config("LoKrConfig", r=2, **TARGETS), mend=WHOLE),
    _adapter("OFT", _config("OFTConfig", r=0, oft_block_size=4, **TARGETS), mend=WHOLE),
    _adapter(
        "BOFT",
        _config("BOFTConfig", boft_block_size=4, target_modules=["q_proj"]),
        refusal="used by torch.functional.block_diag",
        mend=WHOLE,
    ),
    _adapter("VeRA", _config("VeraConfig", r=2, target_modules=["q_proj", "o_proj"]), mend=WHOLE),
    _adapter("prompt tuning", _config("PromptTuningConfig", num_virtual_tokens=2), mend=WHOLE),
    _adapter("prefix tuning", _config("PrefixTuningConfig", num_virtual_tokens=2), mend=WHOLE),
    _adapter("P-tuning", _config("PromptEncoderConfig", num_virtual_tokens=2, encoder_hidden_size=8), mend=WHOLE),
    _adapter("LayerNorm tuning", _config("LNTuningConfig", target_modules=["input_layernorm", "norm"])),
]
