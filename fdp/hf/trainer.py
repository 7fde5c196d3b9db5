"""A private trainer with the words of ``transformers``: TrainingArguments, data collators, callbacks.

    >>> args = TrainingArguments(output_dir="out", per_device_train_batch_size=32, gradient_accumulation_steps=8)
    >>> trainer = PrivateTrainer(model, args, train_dataset=dataset, data_collator=collator, epsilon=3, delta=1e-6)
    >>> result = trainer.train()
    >>> result.guarantee, trainer.evaluate(held_out)

One element of ``train_dataset`` is one sample, which is what epsilon protects. The loss of a sample is the mean over
its own labels. The model is trained without dropout.
"""

from __future__ import annotations

import inspect
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from fdp.extras import missing_package
from fdp.hf.training_words import count_steps, expected_batch_size, make_schedule, training_words
from fdp.optimizers import Optimizer
from fdp.privacy.guarantee import Guarantee
from fdp.privacy.sampling import rounded_population
from fdp.run.labelled_batches import LABELS
from fdp.run.private_run import PrivateRun, private
from fdp.run.run_checkpoint import check_folder
from fdp.run.sample_losses import Loss
from fdp.run.step_record import StepRecord
from fdp.types import FdpError

STATES = "fdp_state"
"""The folder in ``output_dir`` from which training resumes. It holds the key of the noise: do not publish it."""


class PrivateTrainOutput(NamedTuple):
    """The result of training, as transformers' ``TrainOutput``, and the promise about the data."""

    global_step: int
    training_loss: float
    metrics: dict[str, float]
    guarantee: Guarantee


class Columns:
    """A dataset without the entries that the model does not take, such as texts."""

    def __init__(self, source: Any, kept: frozenset[str]) -> None:
        self.source, self.kept = source, kept

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        sample = self.source[index]
        if not isinstance(sample, Mapping):
            return sample
        return {name: value for name, value in sample.items() if name in self.kept}


class PrivateTrainer:
    """Trains a model of transformers privately. ``run`` is the :class:`fdp.PrivateRun` that does it.

    ``epsilon`` or ``noise_multiplier`` is required. ``compute_loss(model, batch)`` returns the loss of every sample;
    default: that of the labels. ``noise_seed`` makes a run repeatable, for experiments; default: 256 bits of the
    operating system.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        train_dataset: Any,
        eval_dataset: Any = None,
        data_collator: Any = None,
        processing_class: Any = None,
        callbacks: Sequence[Any] = (),
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        population: int | None = None,
        compute_loss: Loss | None = None,
        optimizer: Optimizer | None = None,
        noise_seed: int | None = None,
    ) -> None:
        self.model, self.args, self.eval_dataset, self.processing_class = model, args, eval_dataset, processing_class
        self.data_collator = data_collator or _default_collator(processing_class)
        if train_dataset is None:
            raise FdpError("train_dataset: expected samples to train on, got None")
        samples = self._columns(train_dataset)
        public = rounded_population(max(1, _length(samples))) if population is None else population
        words = training_words(args, steps=count_steps(args, public))
        words |= {} if optimizer is None else {"optimizer": optimizer}
        budget = {"epsilon": epsilon, "delta": delta, "noise_multiplier": noise_multiplier, "population": public}
        given = {"loss": compute_loss, "collate_fn": self.data_collator, "seed": noise_seed}
        self.run: PrivateRun = private(model, samples, **words, **budget, **given)
        self.schedule = None if optimizer is not None else make_schedule(args, steps=len(self.run))
        callbacks_of = _trainer_callbacks()
        self.state, self.control = callbacks_of.TrainerState(), callbacks_of.TrainerControl()
        every = [callbacks_of.DefaultFlowCallback(), *callbacks]
        self.callback_handler = callbacks_of.CallbackHandler(every, model, processing_class, None, None)

    def train(self, resume_from_checkpoint: bool = False) -> PrivateTrainOutput:
        """Make all steps, write the parameters into the model, and return the metrics and the guarantee."""
        self._begin(resume_from_checkpoint)
        steps = iter(self.run)
        while not self.control.should_training_stop:
            # It also takes back what an earlier step asked for: to log, to evaluate, to save.
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            if (metrics := next(steps, None)) is None:
                break
            self._after_step(metrics)
        self.run.write_back()
        self.control = self._call("on_train_end")
        losses = [metrics.loss for metrics in self.run.history if metrics.loss is not None]
        mean = sum(losses) / len(losses) if losses else math.nan
        promised = self.run.guarantee
        metrics = {
            "train_loss": mean,
            "epsilon": self.run.epsilon,
            "delta": self.run.config.delta,
            "noise_multiplier": self.run.noise_multiplier,
            "expected_batch_size": float(expected_batch_size(self.args)),
        }
        return PrivateTrainOutput(int(self.run.state.step), mean, metrics, promised)

    def evaluate(self, eval_dataset: Any = None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Return the loss and, for classifiers, the accuracy on other data; nothing is promised to people in it."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise FdpError("eval_dataset: expected samples that are not trained on, got none; give eval_dataset")
        found = self.run.evaluate(self._columns(dataset), collate_fn=self.data_collator)
        named = {"loss": found.loss, "accuracy": found.accuracy}
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in named.items() if value is not None}
        self.log(metrics)
        self.control = self._call("on_evaluate", metrics=metrics)
        return metrics

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Write the model as it is now in the format of transformers, with its tokenizer and its guarantee."""
        folder = Path(output_dir or self.args.output_dir) / ("model" if output_dir is None else "")
        path = self.run.save(folder)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(path)
        return path

    def log(self, logs: Mapping[str, float]) -> None:
        """Add a record to ``state.log_history`` and call ``on_log``."""
        record = {**logs, "step": self.state.global_step, "epoch": self.state.epoch}
        self.state.log_history.append(record)
        self.control = self._call("on_log", logs=dict(logs))

    def _begin(self, resume: bool) -> None:
        states = Path(self.args.output_dir) / STATES
        if resume:
            self.run.load_checkpoint(states)
        else:
            check_folder(self.run.run, states)
        state, total = self.state, len(self.run)
        state.max_steps, state.num_train_epochs = total, math.ceil(total / self.run.steps_per_epoch)
        for name in ("logging_steps", "eval_steps", "save_steps"):
            value = getattr(self.args, name) or 0
            setattr(state, name, math.ceil(value * total) if 0 < value < 1 else int(value))
        state.global_step, state.epoch = int(self.run.state.step), 0.0
        self.control = self._call("on_train_begin")

    def _after_step(self, metrics: StepRecord) -> None:
        state = self.state
        state.global_step, state.epoch = metrics.step, metrics.step / self.run.steps_per_epoch
        self.control = self._call("on_step_end")
        if metrics.step % self.run.steps_per_epoch == 0:
            self.control = self._call("on_epoch_end")
        if self.control.should_log:
            named = {"loss": metrics.loss, "epsilon": metrics.epsilon, "clipped_fraction": metrics.clipped_fraction}
            if self.schedule is not None:
                named["learning_rate"] = float(self.schedule(self.run.state.step - 1))
            self.log({name: value for name, value in named.items() if value is not None})
        if self.control.should_evaluate:
            self.evaluate()
        if self.control.should_save:
            self._save_checkpoint(metrics.step)

    def _save_checkpoint(self, step: int) -> None:
        """Write ``checkpoint-<step>``, and the state to resume from beside it; remove old ones."""
        out = Path(self.args.output_dir)
        shutil.rmtree(out / f"checkpoint-{step}", ignore_errors=True)
        self.save_model(out / f"checkpoint-{step}")
        self.run.save_checkpoint(out / STATES)
        if limit := self.args.save_total_limit:
            found = sorted(out.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
            for old in found[:-limit]:
                shutil.rmtree(old)
        self.control = self._call("on_save")

    def _call(self, event: str, **values: Any) -> Any:
        return self.callback_handler.call_event(event, self.args, self.state, self.control, **values)

    def _columns(self, dataset: Any) -> Any:
        """Return the dataset with the entries that the model takes, unless ``remove_unused_columns`` is False."""
        if not self.args.remove_unused_columns or not hasattr(dataset, "__getitem__"):
            return dataset
        model: Any = self.model
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        taken = inspect.signature(base.forward).parameters
        return Columns(dataset, frozenset(taken) | frozenset(LABELS))


def _length(samples: Any) -> int:
    return len(samples) if hasattr(samples, "__len__") else 1


def _trainer_callbacks() -> Any:
    try:
        from transformers import trainer_callback
    except ImportError:
        raise missing_package("transformers", purpose="for PrivateTrainer") from None
    return trainer_callback


def _default_collator(processing_class: Any) -> Any:
    """Return the collator that transformers would take: one that pads, if there is a tokenizer."""
    try:
        from transformers import DataCollatorWithPadding, default_data_collator
    except ImportError:
        raise missing_package("transformers", purpose="for PrivateTrainer") from None
    return default_data_collator if processing_class is None else DataCollatorWithPadding(processing_class)
