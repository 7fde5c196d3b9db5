"""Rotary tables that depend on the longest position: fixed by the length of a row, whatever the microbatch holds."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fdp import keys, tree
from fdp.foreign.adapters.prefix import prefix_tuning
from fdp.foreign.hub.causal import causal_lm
from fdp.foreign.hub.classification import classifier
from fdp.foreign.hub.rotary import rotary_tables, with_fixed_tables
from fdp.foreign.leaves import params_of
from fdp.foreign.module import from_module
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.privacy.clipping import clip_to
from fdp.types import FdpError, Tree

transformers = pytest.importorskip("transformers")

WORDS, SHORT, CONTEXT = 31, 4, 10
ROPES: dict[str, dict[str, Any]] = {
    "longrope": {
        "short_factor": [1.0] * 2,
        "long_factor": [4.0, 6.0],
        "original_max_position_embeddings": SHORT,
        "factor": 8.0,
    },
    "dynamic": {"factor": 2.0},
}
FAMILIES = [("Llama", "longrope"), ("Phi3", "longrope"), ("Llama", "dynamic"), ("Gemma3", "longrope")]


def make(family: str, rope: str) -> Any:
    """A module whose table changes beyond ``SHORT`` positions."""
    torch.manual_seed(0)
    parameters = {"rope_type": rope, "rope_theta": 10000.0} | ROPES[rope]
    config = {
        "vocab_size": WORDS,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": SHORT if rope == "dynamic" else 64,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "Gemma3":
        kinds = ["sliding_attention", "full_attention"]
        plain = {"rope_type": "default", "rope_theta": 10000.0}
        layers = {"layer_types": kinds, "rope_parameters": dict(zip(kinds, (plain, parameters)))}
        made = transformers.Gemma3TextConfig(**config | layers | {"head_dim": 4, "sliding_window": 5})
    else:
        more = {"original_max_position_embeddings": SHORT} if family == "Phi3" else {}
        made = getattr(transformers, f"{family}Config")(**config | more | {"rope_parameters": parameters})
    module = getattr(transformers, f"{family}ForCausalLM")(made).double().eval()
    with torch.no_grad():
        for leaf in module.parameters():
            leaf.add_(torch.randn_like(leaf), alpha=0.3)
    return module


def packed(*lengths: list[int]) -> dict[str, Tensor]:
    """Rows of documents of these lengths, then padding."""
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, WORDS, (len(lengths), CONTEXT + 1), generator=draw)
    segments = torch.zeros(len(lengths), CONTEXT + 1, dtype=torch.int64)
    for row, sizes in zip(segments, lengths):
        numbers = torch.repeat_interleave(torch.arange(1, len(sizes) + 1), torch.tensor(sizes))
        row[: len(numbers)] = numbers
    mask = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return {"tokens": torch.where(segments > 0, tokens, 0), "segments": segments[:, :-1], "loss_mask": mask}


def full_row_losses(module: Any, data: Tree) -> Tensor:
    """The module's own losses of plain rows."""
    logits = module(input_ids=data["tokens"][:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.transpose(1, 2), data["tokens"][:, 1:], reduction="none").mean(1)


FULL, LONG = [3, 4, 4], [2, 9]


@pytest.mark.parametrize(("family", "rope"), FAMILIES)
def test_adding_one_user_moves_the_sum_by_at_most_the_clip_norm(family: str, rope: str) -> None:
    """A long document beside short ones: no sample that was there before is noticed to have changed."""
    module = make(family, rope)
    data = packed(LONG, *[FULL] * 8)
    model = causal_lm(module, context=CONTEXT, example={name: leaf[1:3] for name, leaf in data.items()})
    params = params_of(module, model)

    def clipped(data: Tree) -> Tensor:
        plan = make_plan(model, params, data, method=Method.GHOST_BK, dtype=torch.float64)
        _, norms, stash = per_sample_norms(model, params, data, plan=plan)
        total = tree.flatten(clipped_sum(stash, clip_to(norms, max_norm=1.0)).value)
        return torch.cat([total[path].flatten() for path in sorted(total)])

    without = {name: leaf[1:] for name, leaf in data.items()}
    assert float((clipped(data) - clipped(without)).norm()) <= 1 + 1e-6
    torch.testing.assert_close(model.loss(params, data)[1:], model.loss(params, without), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("family", "rope"), FAMILIES)
@pytest.mark.parametrize("context", [SHORT - 1, CONTEXT])
def test_rows_without_documents_have_the_losses_of_the_module(family: str, rope: str, context: int) -> None:
    module = make(family, rope)
    tokens = torch.randint(0, WORDS, (3, context + 1), generator=torch.Generator().manual_seed(1))
    for example in (None, {"tokens": tokens}, {"tokens": tokens, "segments": torch.ones_like(tokens[:, :-1])}):
        model = causal_lm(module, context=context, example=example)
        data = {"tokens": tokens} if example is None else example
        got = model.loss(params_of(module, model), data)
        torch.testing.assert_close(got, full_row_losses(make(family, rope), data), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("family", "rope"), FAMILIES)
def test_the_module_is_unchanged_and_earlier_calls_make_no_difference(family: str, rope: str) -> None:
    module, called = make(family, rope), make(family, rope)
    called(input_ids=torch.zeros(1, 3 * CONTEXT, dtype=torch.int64), use_cache=False)
    data = packed(FULL, LONG)
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    one, other = (causal_lm(part, context=CONTEXT, example=data) for part in (module, called))
    assert torch.equal(one.loss(params_of(module, one), data), other.loss(params_of(called, other), data))
    assert all(torch.equal(buffer, before[name]) for name, buffer in module.named_buffers())
    assert [table.limit for table in rotary_tables(module)] == [SHORT]
    assert not rotary_tables(with_fixed_tables(module, length=CONTEXT))
    assert module.model.rotary_emb.rope_type != "default"


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_the_positions_of_a_prefix_count_towards_the_length(family: str) -> None:
    """Rows that are short enough for one table, and too long for it with the virtual tokens before them."""
    module, virtual, length = make(family, "longrope"), 2, SHORT - 1
    tokens = torch.randint(0, WORDS, (3, length + 1), generator=torch.Generator().manual_seed(1))
    ones = torch.ones(3, length, dtype=torch.int64)
    for data in ({"tokens": tokens}, {"tokens": tokens, "segments": ones, "loss_mask": ones}):
        model, params = prefix_tuning(module, tokens=virtual, key=keys.key(0), context=length, example=data)
        pairs = [tuple(params["prefix"][i].expand(3, -1, -1, -1, -1).unbind(1)) for i in range(2)]
        out = module(input_ids=tokens[:, :-1], past_key_values=transformers.DynamicCache(pairs))
        expected = F.cross_entropy(out.logits.transpose(1, 2), tokens[:, 1:], reduction="none").mean(1)
        torch.testing.assert_close(model.loss(params, data), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("rope", ROPES)
def test_rows_of_another_length_are_refused_if_their_table_differs(rope: str) -> None:
    module = make("Llama", rope)
    model = causal_lm(module, context=CONTEXT)
    params = params_of(module, model)
    with pytest.raises(FdpError, match=rf"expected rows of 10 tokens, .*'{rope}'.* got rows of 3; .* context=3"):
        model.loss(params, {"tokens": torch.zeros(2, 4, dtype=torch.int64)})
    short = causal_lm(module, context=SHORT)
    tokens = torch.randint(0, WORDS, (3, 3), generator=torch.Generator().manual_seed(1))
    expected = full_row_losses(module, {"tokens": tokens})
    torch.testing.assert_close(short.loss(params, {"tokens": tokens}), expected, rtol=1e-10, atol=1e-12)


def test_tables_that_do_not_depend_on_positions_are_unchanged() -> None:
    module = transformers.LlamaModel(
        transformers.LlamaConfig(
            num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=2, vocab_size=8
        )
    )
    assert with_fixed_tables(module, length=3) is module


# ---------------------------------------------------------------- as any module, with positions of its own


def next_token(out: Any, data: Tree) -> Tensor:
    each = F.cross_entropy(out.logits[:, :-1].transpose(1, 2), data["input_ids"][:, 1:], reduction="none")
    return each.mean(1)


def call(module: Any, data: Tree) -> Any:
    return module(input_ids=data["input_ids"], position_ids=data["position_ids"], use_cache=False)


def short_documents(length: int = CONTEXT) -> dict[str, Tensor]:
    """Three rows of documents of three tokens: what comes first in a file, and shows no long position."""
    tokens = torch.randint(0, WORDS, (3, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "position_ids": torch.arange(length).expand(3, -1) % 3}


@pytest.mark.parametrize(("family", "rope"), FAMILIES)
def test_a_table_that_depends_on_other_samples_is_refused_by_name(family: str, rope: str) -> None:
    named = rf"The rotary table of this model \(model.rotary_emb, rope_type '{rope}'\) depends on the longest position"
    refused = "(not independent|changes this tensor when it is called)"
    with pytest.raises(FdpError, match=rf"{refused} .*{named} .* rows of at most {SHORT} positions"):
        from_module(make(family, rope), loss=next_token, call=call, example=short_documents())


def test_a_table_is_refused_by_name_even_if_no_synthetic_sample_shows_it() -> None:
    def strict(module: Any, data: Tree) -> Any:
        if int(data["position_ids"].max()) > 2:
            raise ValueError("no such position here")
        return call(module, data)

    refused = (
        r"(position_ids: expected rows of at most 4 positions, got rows of 10|changes this tensor when it is called)"
    )
    with pytest.raises(FdpError, match=rf"{refused}.*longrope"):
        from_module(make("Llama", "longrope"), loss=next_token, call=strict, example=short_documents())


@pytest.mark.long
@pytest.mark.parametrize("family", ["Llama", "Phi3"])
def test_the_remedies_that_the_error_names_work(family: str) -> None:
    """Rows within the original positions, if the table is not written again all the same, or a plain table."""
    if tuple(map(int, version("transformers").split(".")[:2])) < (5, 23):
        from_module(make(family, "longrope"), loss=next_token, call=call, example=short_documents(SHORT))
    module = make(family, "longrope")
    module.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    from_module(type(module)(module.config).double(), loss=next_token, call=call, example=short_documents())


def test_a_classifier_that_branches_on_positions_is_one_block_and_refused_with_a_reason() -> None:
    config = make("Llama", "dynamic").config
    config.num_labels, config.pad_token_id = 3, 0
    module = transformers.LlamaForSequenceClassification(config).eval()
    data = {"tokens": torch.ones(2, CONTEXT, dtype=torch.int64), "label": torch.zeros(2).long()}
    model = classifier(module, example=data)
    assert model.remark is not None
    assert "a branch that depends on the data" in model.remark
    assert "rope_type 'dynamic'" in model.remark
    params = params_of(module, model)
    with pytest.raises(FdpError, match=r"a branch that depends on the data.*'materialize'"):
        make_plan(model, params, data)
    per_sample_norms(model, params, data, plan=make_plan(model, params, data, method=Method.MATERIALIZE))
