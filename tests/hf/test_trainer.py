"""``PrivateTrainer``: the words of transformers, on tiny models built from configs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fdp
from fdp.hf.training_words import REFUSED, count_steps, make_schedule, training_words, warmup_steps
from fdp.privacy.guarantee import read_marker

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # TrainingArguments ask for it

from fdp.hf import PrivateTrainer  # noqa: E402


def arguments(folder: Path, **changes: Any) -> Any:
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
    }
    return transformers.TrainingArguments(**given | changes)


def causal() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=32, n_positions=16)
    config.bos_token_id = config.eos_token_id = 0
    return transformers.GPT2LMHeadModel(config)


def texts(samples: int = 40) -> list[dict[str, Any]]:
    tokens = torch.randint(1, 32, (samples, 8), generator=torch.Generator().manual_seed(0)).tolist()
    return [
        {"text": "private", "input_ids": row[: 4 + i % 5], "labels": row[: 4 + i % 5]} for i, row in enumerate(tokens)
    ]


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    length = max(len(sample["input_ids"]) for sample in samples)

    def rows(name: str, fill: int) -> torch.Tensor:
        return torch.tensor([sample[name] + [fill] * (length - len(sample[name])) for sample in samples])

    ids = rows("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": rows("labels", -100)}


class Recorder(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(f"step {state.global_step}")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.events.append(f"log {sorted(logs)[0]}")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append("evaluate")


@pytest.mark.long
def test_a_causal_model_is_trained_logged_evaluated_saved_and_resumed(tmp_path: Path):
    model, seen = causal(), Recorder()
    before = model.transformer.wte.weight.detach().clone()
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=2)
    trainer = PrivateTrainer(model, args, texts(), texts(10), pad, callbacks=[seen], epsilon=3, delta=1e-6)
    assert len(trainer.run.config.model.blocks) == 4  # layer by layer
    result = trainer.train()
    assert result.global_step == 3
    assert result.metrics["epsilon"] == pytest.approx(3, abs=0.05)
    assert result.guarantee.epsilon == pytest.approx(3, abs=0.05)
    assert seen.events == ["step 1", "log clipped_fraction", "step 2", "log clipped_fraction", "step 3"] + [
        "log clipped_fraction",
        "log eval_loss",
        "evaluate",
    ]
    assert [record["step"] for record in trainer.state.log_history] == [1, 2, 3, 3]
    assert not torch.equal(model.transformer.wte.weight, before)
    folder = trainer.save_model()
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again.transformer.wte.weight, model.transformer.wte.weight)
    assert read_marker(folder) == (result.guarantee,)
    assert (tmp_path / "checkpoint-2" / "config.json").exists()
    resumed = PrivateTrainer(causal(), args, texts(), None, pad, epsilon=3, delta=1e-6, callbacks=[Stop()])
    assert resumed.train(resume_from_checkpoint=True).global_step == 3
    embeddings = [each.state_dict()["transformer.wte.weight"] for each in (resumed.model, model)]
    assert torch.equal(*embeddings)


class Stop(transformers.TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_training_stop, control.should_evaluate = True, False
        return control


def test_it_logs_evaluates_and_saves_when_it_was_asked_to(tmp_path: Path):
    """Every evaluation without noise tells something of the people in it."""
    args = arguments(tmp_path, max_steps=7, logging_steps=3, eval_strategy="steps", eval_steps=4)
    args.save_strategy, args.save_steps = "steps", 3
    trainer = PrivateTrainer(causal(), args, texts(), texts(10), pad, noise_multiplier=1.0)
    trainer.train()
    history = trainer.state.log_history
    assert [record["step"] for record in history if "loss" in record] == [3, 6]
    assert [record["step"] for record in history if "eval_loss" in record] == [4, 7], "and at the end"
    assert {path.name for path in tmp_path.glob("checkpoint-*")} <= {"checkpoint-3", "checkpoint-6", "checkpoint-7"}


def test_the_state_of_another_run_is_neither_overwritten_nor_resumed_by_mistake(tmp_path: Path):
    args = arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    first = PrivateTrainer(causal(), args, texts(), None, pad, noise_multiplier=1.0)
    first.train()
    other = PrivateTrainer(causal(), args, texts(), None, pad, noise_multiplier=1.0)
    with pytest.raises(fdp.FdpError, match="got those of another run"):
        other.train()
    assert int(other.run.state.step) == 0
    with pytest.raises(fdp.FdpError, match="got those of another run"):
        other.run.save_checkpoint(tmp_path / "fdp_state")
    assert other.train(resume_from_checkpoint=True).global_step == 2


def test_a_classifier_reports_its_accuracy(tmp_path: Path):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=32, num_labels=3
    )
    model = transformers.BertForSequenceClassification(config)
    rows = [{"input_ids": [1 + i % 7] * 4 + [1 + i], "attention_mask": [1] * 5, "label": i % 3} for i in range(30)]
    trainer = PrivateTrainer(model, arguments(tmp_path, max_steps=2), rows, rows[:6], noise_multiplier=1.0)
    trainer.train()
    metrics = trainer.evaluate()
    assert set(metrics) == {"eval_loss", "eval_accuracy"}
    model.eval()
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([row["input_ids"] for row in rows[:6]])).logits
    right = scores.argmax(1) == torch.tensor([row["label"] for row in rows[:6]])
    assert metrics["eval_accuracy"] == pytest.approx(float(right.float().mean()))


def test_a_callback_stops_a_run_early(tmp_path: Path):
    trainer = PrivateTrainer(
        causal(), arguments(tmp_path), texts(), None, pad, callbacks=[Stop()], noise_multiplier=1.0
    )
    result = trainer.train()
    assert result.global_step == 1
    assert result.metrics["epsilon"] < (result.guarantee.epsilon or 0)


def test_words_are_translated(tmp_path: Path):
    args = arguments(tmp_path, bf16=False, warmup_steps=2, lr_scheduler_type="linear", max_grad_norm=0.5)
    words = training_words(args, steps=10)
    assert (words["batch_size"], words["microbatch"], words["max_norm"]) == (8, 4, 0.5)
    rates = [float(make_schedule(args, steps=10)(torch.tensor(t))) for t in range(11)]
    assert rates[:3] == pytest.approx([5e-3, 1e-2, 1e-2])
    assert rates[-1] == pytest.approx(0)
    epochs = arguments(tmp_path, max_steps=-1, num_train_epochs=3)
    assert count_steps(epochs, 80) == 30
    assert warmup_steps(arguments(tmp_path, warmup_steps=0.1), steps=30) == 3
    assert "seed" not in words


def test_the_seed_of_the_arguments_is_not_that_of_the_noise(tmp_path: Path):
    runs = [
        PrivateTrainer(causal(), arguments(tmp_path, seed=42), texts(), None, pad, noise_multiplier=1.0).run
        for _ in range(2)
    ]
    assert runs[0].run.root.tolist() != runs[1].run.root.tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dataloader_drop_last", True),
        ("auto_find_batch_size", True),
        ("label_smoothing_factor", 0.1),
        ("neftune_noise_alpha", 5.0),
        ("train_sampling_strategy", "group_by_length"),
        ("lr_scheduler_type", "polynomial"),
        ("optim", "lion_32bit"),
    ],
)
def test_words_without_a_meaning_are_refused_by_name(tmp_path: Path, name: str, value: Any):
    with pytest.raises(fdp.FdpError, match=f"TrainingArguments {name}: expected"):
        training_words(arguments(tmp_path, **{name: value}), steps=3)


def test_every_refused_word_names_a_remedy():
    assert all(len(remedy) > 10 for remedy in REFUSED.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_dataset": None}, "train_dataset: expected samples"),
        ({"train_dataset": [{"input_ids": [1, 2]}] * 9, "data_collator": None}, "labels"),
        ({"epsilon": 3.0}, "expected either epsilon or noise_multiplier"),
    ],
)
def test_mistakes_are_refused(tmp_path: Path, changes: dict[str, Any], words: str):
    given = {"train_dataset": texts(), "data_collator": pad, "noise_multiplier": 1.0} | changes
    with pytest.raises(fdp.FdpError, match=words):
        PrivateTrainer(causal(), arguments(tmp_path), **given)
