"""Prompts are read and not learned; padding, and samples in which nothing counts, change nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fdp import tree
from fdp.data import chat, corpus, text
from fdp.fast.compiled import CompiledRunner
from fdp.gradients.clipped_sum import clipped_sum, plain_sum
from fdp.gradients.costs import NormBy
from fdp.gradients.execution import EAGER, Execution
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.kfac.measure.fisher import losses_by_terms
from fdp.model import Model
from fdp.models import GPTConfig, LlamaConfig, gpt, llama
from fdp.privacy.clipping import clip_to
from fdp.types import FdpError, Tree
from tests.conftest import random_like
from tests.data.test_text import TEMPLATE, make_tokenizer, write

CONTEXT, VOCAB = 5, 7
MODELS: dict[str, Model] = {
    "gpt": gpt(GPTConfig(layers=1, width=8, heads=2, context=CONTEXT, vocab_size=VOCAB)),
    "llama": llama(LlamaConfig(layers=1, width=8, heads=4, key_heads=2, hidden=9, context=CONTEXT, vocab_size=VOCAB)),
}
TOKENS = torch.randint(0, VOCAB, (3, CONTEXT + 1), generator=torch.Generator().manual_seed(2))
MASK = torch.tensor([[0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
DATA = {"tokens": TOKENS, "loss_mask": MASK}
METHODS = [method for method in Method if method is not Method.NONE]


def test_prompts_are_masked_and_the_end_counts(tmp_path: Path) -> None:
    tokenizer = text.BYTES._replace(end=0)
    path = write(tmp_path / "chat.jsonl", {"prompt": "ab", "completion": "cd"}, {"prompt": "abcdef", "completion": "g"})
    dataset = corpus.load(path, context=5, vocab_size=256, tokenizer=tokenizer)
    rows = dataset.fetch(np.array([0, 1]))
    assert rows["tokens"].tolist() == [[*b"abcd", 0, 0], [*b"abcdef"]]
    assert rows["loss_mask"].int().tolist() == [[0, 1, 1, 1, 0], [0, 0, 0, 0, 0]]  # targets: b c d end pad
    assert (dataset.reading.silent, dataset.reading.cut, dataset.reading.unlearned, len(dataset)) == (1, 1, 1, 2)


def test_conversations_by_lines() -> None:
    said = [("system", "be"), ("user", "hi"), ("assistant", "ho"), ("user", "x"), ("assistant", "y")]
    record = {"messages": [{"role": role, "content": content} for role, content in said]}
    found = chat.message_pieces(record["messages"], text.BYTES, "here")
    assert "".join(words for words, _ in found) == "system: be\nuser: hi\nassistant: ho\nuser: x\nassistant: y\n"
    assert [words for words, counts in found if counts] == ["ho\n", "y\n"]


def test_conversations_by_the_tokenizers_template(tmp_path: Path) -> None:
    tokenizer = text.load_tokenizer(make_tokenizer(tmp_path / "tokenizer", template=TEMPLATE))
    said = [("user", "hello"), ("assistant", "how are you"), ("user", "fine thanks"), ("assistant", "bye")]
    record = {"messages": [{"role": role, "content": content} for role, content in said]}
    path = write(tmp_path / "chat.jsonl", record)
    documents, _ = corpus.read(path, tokenizer)
    whole = "<user> hello <end> <assistant> how are you <end> <user> fine thanks <end> <assistant> bye <end>"
    assert documents.tokens.tolist() == tokenizer.encode(whole)
    counted = [word for word, counts in zip(whole.split(), documents.counted) if counts]
    assert counted == ["how", "are", "you", "<end>", "bye", "<end>"]


def test_a_template_that_rewrites_is_refused(tmp_path: Path) -> None:
    last = "{{ messages[-1].content }}{% if add_generation_prompt %} <assistant> {% endif %}"
    tokenizer = text.load_tokenizer(make_tokenizer(tmp_path, template=last))
    said = [("user", "hello"), ("assistant", "fine")]
    record = {"messages": [{"role": role, "content": content} for role, content in said]}
    with pytest.raises(FdpError, match="here, message 2: expected a chat template that only adds"):
        chat.conversation_tokens(record, tokenizer, "here")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "completion": 3}, "expected text in 'prompt' and 'completion'"),
        ({"messages": []}, "expected a list of messages"),
        ({"messages": "hi"}, "expected a list of messages"),
        ({"messages": [{"role": "user"}]}, "message 1: expected an object with text in 'role' and 'content'"),
        ({"messages": ["hi"]}, "message 1: expected an object"),
        ({"prompt": "a"}, "or a list in 'messages'"),
    ],
)
def test_records_that_are_no_conversation_are_refused(record: dict, message: str, tmp_path: Path) -> None:
    with pytest.raises(FdpError, match=message):
        corpus.read(write(tmp_path / "chat.jsonl", record), text.BYTES)


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_the_mean_over_the_tokens_that_count(name: str) -> None:
    model = MODELS[name]
    params = random_like(model)
    plain = {"tokens": TOKENS}
    outputs = model.blocks[-1].outputs
    assert outputs is not None
    carry: Tree = ()
    for block in model.blocks[:-1]:
        carry = block.apply(_select(params, block.params), carry, plain)
    logits = outputs.scores(_select(params, model.blocks[-1].params), carry, plain)
    each = F.cross_entropy(logits.transpose(1, 2), TOKENS[:, 1:], reduction="none")
    expected = torch.stack([each[0, 1:3].mean(), each.new_zeros(()), each[2].mean()])
    torch.testing.assert_close(model.loss(params, DATA), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(model.loss(params, plain), each.mean(1), rtol=1e-12, atol=0)
    terms = losses_by_terms(outputs, _select(params, model.blocks[-1].params), carry, DATA)
    torch.testing.assert_close(terms, expected, rtol=1e-12, atol=0)


def _select(params: Tree, paths: Tree) -> Tree:
    return tree.select(tree.flatten(params), paths)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_after_the_last_counted_one_change_nothing(name: str) -> None:
    model = MODELS[name]
    params = random_like(model)
    other = TOKENS.clone()
    other[0, 4:] = (other[0, 4:] + 1) % VOCAB  # targets 3 and 4 of sample 0 do not count
    other[1] = (other[1] + 3) % VOCAB
    plan = make_plan(model, params, DATA, method=Method.GHOST_BK, dtype=torch.float64)
    (losses, norms, _), (again, moved, _) = (
        per_sample_norms(model, params, {"tokens": tokens, "loss_mask": MASK}, plan=plan) for tokens in (TOKENS, other)
    )
    assert torch.equal(losses, again)
    torch.testing.assert_close(norms.total(), moved.total(), rtol=1e-12, atol=0)
    assert float(losses[1]) == 0
    assert float(norms.total()[1]) <= 1e-12
    assert float(norms.total()[0]) > 0


@pytest.mark.parametrize("method", METHODS)
def test_norms_and_sums_with_a_mask_are_those_of_single_backwards(method: Method) -> None:
    model = MODELS["gpt"]
    params = random_like(model)
    plan = make_plan(model, params, DATA, method=method, dtype=torch.float64)
    _, norms, stash = per_sample_norms(model, params, DATA, plan=plan)
    total = clipped_sum(stash, clip_to(norms, max_norm=0.05)).value
    alone = make_plan(model, params, _one(0), method=Method.MATERIALIZE, dtype=torch.float64)
    found = [per_sample_norms(model, params, _one(b), plan=alone) for b in range(3)]
    torch.testing.assert_close(norms.total(), torch.cat([each.total() for _, each, _ in found]), rtol=1e-8, atol=1e-10)
    parts = [clipped_sum(left, clip_to(each, max_norm=0.05)).value for _, each, left in found]
    for path, value in total.items():
        torch.testing.assert_close(value, sum(part[path] for part in parts), rtol=1e-8, atol=1e-12)


def _one(b: int) -> dict[str, torch.Tensor]:
    return {name: leaf[b : b + 1] for name, leaf in DATA.items()}


@pytest.mark.long
def test_a_fused_head_applies_the_loss_mask() -> None:
    model = MODELS["gpt"]
    params = random_like(model)
    plan = make_plan(model, params, DATA, method=Method.AUTO, dtype=torch.float64)
    head = model.blocks[-1].params["weight"]
    plan = plan._replace(choices=plan.choices | {head: plan.choices[head]._replace(norm=NormBy.KEEP)})
    blocks = CompiledRunner(backend="aot_eager")
    found = []
    for way in (blocks, None):
        losses, norms, stash = per_sample_norms(
            model, params, DATA, plan=plan, execution=Execution(runner=way or EAGER)
        )
        found.append((losses, norms.squared, clipped_sum(stash, clip_to(norms, max_norm=0.05)).value))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)
    none, mask = make_plan(model, params, DATA, method=Method.NONE, dtype=torch.float64), torch.tensor([1.0, 1.0, 0.0])
    plain = [
        plain_sum(model, params, DATA, mask, plan=none, execution=Execution(runner=way or EAGER))
        for way in (blocks, None)
    ]
    torch.testing.assert_close(*plain, rtol=1e-10, atol=1e-12)
