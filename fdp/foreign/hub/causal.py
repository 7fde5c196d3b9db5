"""Causal language models of ``transformers`` as stacks: GPT-2, Llama, Qwen, Gemma, Mistral, OPT and similar ones.

    loss_b = mean_t -log softmax(W features_bt)[token_b,t+1]            data as in ``fdp.models.language``

The head is a ``LossHead``; a placeholder in place of the module's last linear layer finds its input. A model that
changes its logits (a bias, a cap) has no ``LossHead`` and runs as it is.

    >>> model = causal_lm(module)                                        # a GPT2LMHeadModel, a LlamaForCausalLM, ...
    >>> losses = model.loss(params_of(module, model), {"tokens": tokens})
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fdp.foreign.find_stack import AUTO, NotAStack
from fdp.foreign.hub.masks import causal_caller, is_none_mask, tokens_only
from fdp.foreign.hub.rotary import FixedLengthCaller, rotary_tables, with_fixed_tables
from fdp.foreign.leaves import foreign_model, leaf_paths
from fdp.foreign.placeholders import IdentityHead
from fdp.foreign.stack.block_functions import AfterLayers, Caller
from fdp.foreign.stack.fast_paths import without_fast_paths
from fdp.foreign.stack.layer_calls import returns_output_of
from fdp.foreign.stack.one_block import ModuleLoss, one_block, one_block_remark
from fdp.foreign.stack.stack_blocks import stack_blocks
from fdp.model import Block, Likelihood, Model, Outputs
from fdp.models.language import head_block, present_of, targets_of, token_losses, weights_of, window_inputs_of
from fdp.types import FdpError, Tree

CONTEXT_SETTINGS = ("max_position_embeddings", "max_seq_len", "context_length", "seq_length")
"""Configuration entries that may hold the longest context."""
EXAMPLE_TOKENS = 32
"""Tokens of the default example, if no layer has a window."""


def causal_lm(
    module: nn.Module,
    *,
    context: int | None = None,
    example: Tree | None = None,
    pattern: str = AUTO,
    prefix: int = 0,
) -> Model:
    """Return the model of a ``...ForCausalLM``: the part before its layers, the layers, the head with the loss.

    Leaves have the module's names. ``context`` is the length of samples, by default the longest the module takes.
    ``example`` is a batch with the entries of the data to come, by default tokens alone; give one if the data will be
    packed documents or windows of users. ``prefix`` is the number of additional keys and values that
    ``fdp.foreign.adapters.prefix`` gives to the layers.

    Guarantees:
      - a rotary table that would depend on the longest position of all samples is fixed to that of a full row;
      - a module that cannot be treated layer by layer is one block, and the model's ``remark`` says why.
    """
    _check_no_prompt(module)
    module = without_fast_paths(module)
    head, name = _find_head(module)
    config: Any = module.config
    context = int(
        context
        or next((getattr(config, name) for name in CONTEXT_SETTINGS if getattr(config, name, None)), EXAMPLE_TOKENS)
    )
    length = prefix + (context if example is None else window_inputs_of(example).shape[-1])
    example = _default_example(config, context) if example is None else example
    tables, module = rotary_tables(module), with_fixed_tables(module, length=length)

    def fixed(call: Caller) -> Caller:
        return FixedLengthCaller(call, tables, length, prefix) if tables else call

    fields: dict[str, Any] = {"context": context, "vocab_size": config.vocab_size}
    try:
        call = fixed(causal_caller(module, example, pattern=pattern, prefix=prefix))
        blocks = _stack_with_head(module, head, name, call, example, pattern)
    except NotAStack as error:
        if prefix or pattern != AUTO:
            raise
        blocks = (_single_block(module, fixed(tokens_only(module, example)), example),)
        fields["remark"] = one_block_remark(module, error)
    return foreign_model(module, blocks, **fields)


def _stack_with_head(
    module: nn.Module, head: nn.Module, name: str, call: Caller, example: Tree, pattern: str
) -> tuple[Block, ...]:
    """Return the part before the layers, the layers, and the head with the loss."""
    common: dict[str, Any] = {"call": call, "example": example, "pattern": pattern, "absent": is_none_mask}
    if type(head) is nn.Linear and head.bias is None and returns_output_of(module, name, call, _logits, example):
        *blocks, last = stack_blocks(module, finish=_logits, parts={name: IdentityHead(head)}, **common)
        return *blocks, head_block({**last.params, "weight": leaf_paths(module)[f"{name}.weight"]}, last.apply)
    *blocks, last = stack_blocks(module, finish=_losses, **common)
    assert isinstance(last.apply, AfterLayers)
    return *blocks, last._replace(name="head", outputs=_outputs(replace(last.apply, finish=_logits)))


def _single_block(module: nn.Module, call: Caller, example: Tree) -> Block:
    """Return the module as one block with its loss."""
    block = one_block(module, call=call, finish=_losses, example=example)
    assert isinstance(block.apply, ModuleLoss)
    return block._replace(outputs=_outputs(replace(block.apply, finish=_logits)))


def _outputs(scores: Any) -> Outputs:
    return Outputs(scores, Likelihood.SOFTMAX, targets_of, weights=weights_of, present=present_of)


def _check_no_prompt(module: Any) -> None:
    wrapped = getattr(module, "active_peft_config", None)
    if wrapped is not None and wrapped.is_prompt_learning:
        raise FdpError(
            f"{type(module).__name__}: expected adapters inside the layers, such as LoRA, got "
            f"{wrapped.peft_type.value}, which puts something before the tokens; use from_module(module, loss=..., "
            f"call=...), or fdp.foreign.prefix_tuning"
        )


def _find_head(module: nn.Module) -> tuple[nn.Module, str]:
    find = getattr(module, "get_output_embeddings", None)
    head = None if find is None else find()
    names = [name for name, part in module.named_modules() if part is head]
    if head is None or not names:
        raise FdpError(
            f"{type(module).__name__}: expected a language model of transformers with an output layer, got none; use "
            f"from_module(module, loss=...)"
        )
    return head, names[0]


def _default_example(config: Any, context: int) -> Tree:
    """Return an example long enough for a sliding window of attention to matter."""
    window = getattr(config, "sliding_window", None)
    length = min(context, EXAMPLE_TOKENS) if window is None or context < window else context
    return {"tokens": torch.zeros(2, length + 1, dtype=torch.int64)}


def _logits(out: Any, data: Tree) -> Tensor:
    return out.logits


def _losses(out: Any, data: Tree) -> Tensor:
    return token_losses(out.logits, data)
