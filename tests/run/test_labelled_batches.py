"""Modules of transformers with labels: the loss of a sample is that of the module, called with the sample alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fdp
from fdp.run.labelled_batches import labelled_batches
from fdp.run.module_model import make_subject
from fdp.run.own_samples import as_samples

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 24}


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=24, n_positions=16)
    config.bos_token_id = config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config)


def bert(kind: str) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, kind)(transformers.BertConfig(**SIZES, max_position_embeddings=16, num_labels=3))


def rows(labels: str, samples: int = 12) -> list[dict[str, list[int]]]:
    tokens = torch.randint(1, 24, (samples, 9), generator=torch.Generator().manual_seed(0)).tolist()
    made = []
    for i, row in enumerate(tokens):
        ids = row[: 3 + i % 6]
        wanted = {"tokens": ids, "classes": i % 3, "tags": [token % 3 for token in ids]}[labels]
        made.append({"input_ids": ids, "labels": wanted})
    return made


def pad(samples: list[dict[str, Any]], **more: bool) -> dict[str, torch.Tensor]:
    length = max(len(sample["input_ids"]) for sample in samples)

    def padded(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([sample[name] + [fill] * (length - len(sample[name])) for sample in samples])

    ids = padded("input_ids", 0)
    classes = isinstance(samples[0]["labels"], int)
    labels = torch.tensor([sample["labels"] for sample in samples]) if classes else padded("labels", -100)
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}
    return batch | ({"token_type_ids": torch.zeros_like(ids)} if more else {})


CASES = {
    "causal": (gpt2, "tokens", {}, 4),
    "classifier": (lambda: bert("BertForSequenceClassification"), "classes", {}, 4),
    "classifier with more entries": (lambda: bert("BertForSequenceClassification"), "classes", {"more": True}, 1),
    "tags": (lambda: bert("BertForTokenClassification"), "tags", {}, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_of_a_sample_is_that_of_the_module_alone(name: str):
    make, labels, more, blocks = CASES[name]
    module, samples = make().eval(), rows(labels)
    subject = make_subject(module, as_samples(samples, collate_fn=lambda batch: pad(batch, **more)), loss=None)
    assert len(subject.model.blocks) == blocks
    params = subject.values(subject.model, None, fdp.key(0))
    losses = subject.model.loss(params, subject.dataset.fetch(np.arange(12)))
    with torch.no_grad():
        alone = torch.stack([module(**pad([sample], **more)).loss for sample in samples])
    torch.testing.assert_close(losses, alone, rtol=1e-4, atol=1e-5)
    assert subject.measure is not None
    torch.testing.assert_close(subject.measure(module, pad(samples, **more)).losses, alone, rtol=1e-4, atol=1e-5)


def test_adapters_of_peft_are_trained_alone():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    module = peft.get_peft_model(gpt2(), config)
    run = fdp.private(module, rows("tokens"), collate_fn=pad, noise_multiplier=1.0, steps=2, batch_size=4)
    assert all("lora_" in path for path in run.config.model.trainable)
    before = module.get_base_model().transformer.wte.weight.detach().clone()
    run.fit()
    assert torch.equal(module.get_base_model().transformer.wte.weight, before)
    assert any(bool((leaf != 0).any()) for name, leaf in module.named_parameters() if "lora_B" in name)


def left(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: leaf.flip(1) for name, leaf in pad(samples).items()}


def unmasked(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Padding is attended to: the loss of a sample depends on how far it is padded."""
    batch = pad(samples)
    return {"input_ids": batch["input_ids"], "labels": batch["labels"]}


@pytest.mark.parametrize(
    ("make", "labels", "collate", "words"),
    [
        (gpt2, "tokens", left, "padding_side = 'right'"),
        (gpt2, "tags", pad, "the tokens of input_ids"),
        (lambda: bert("BertForSequenceClassification"), "classes", unmasked, "padding that does not change the loss"),
    ],
)
def test_what_would_couple_samples_is_refused(make: Any, labels: str, collate: Any, words: str):
    with pytest.raises(fdp.FdpError, match=words):
        make_subject(make(), as_samples(rows(labels), collate_fn=collate), loss=None)


def test_labels_are_asked_for():
    with pytest.raises(fdp.FdpError, match=r"expected an entry labels.*mlm=False"):
        labelled_batches(gpt2(), {"input_ids": torch.ones(2, 3)})
    assert labelled_batches(torch.nn.Linear(1, 1), {"input_ids": torch.ones(2, 3)}) is None
