"""Private training of any ``nn.Module`` in a few lines: a thin layer over :mod:`fdp.run.training_run`.

    >>> run = fdp.private(module, dataset, loss=nn.CrossEntropyLoss(), epsilon=3, delta=1e-6, epochs=3)
    >>> for metrics in run: print(metrics.step, metrics.loss, metrics.epsilon)         # or run.fit()
    >>> run.write_back()                                                               # parameters into the module
    >>> run.save("trained")

Everything that decides the result is in ``run.config``, and the state is ``run.state``. Samples are drawn by Poisson
sampling with the expected batch size, whatever a ``DataLoader`` would do.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from fdp import tree
from fdp.arguments import whole_number
from fdp.data.units import dataset_unit
from fdp.fast.compile_modes import Compile
from fdp.fast.out_of_memory import OutOfMemory
from fdp.foreign.leaves import leaf_paths
from fdp.model import Model
from fdp.parallel.agree import group_size
from fdp.parallel.dtensors import full_tensor
from fdp.privacy.clipping import ClipStyle
from fdp.privacy.guarantee import Guarantee
from fdp.privacy.several_runs import training_again
from fdp.privacy.shown_numbers import round_up, shown_delta, shown_epsilon
from fdp.run.collated_samples import Collate
from fdp.run.module_model import Scores, Subject
from fdp.run.other_arguments import explain_arguments
from fdp.run.own_samples import as_samples
from fdp.run.prepare_run import Run, prepare
from fdp.run.private_options import PrivateOptions, configure
from fdp.run.run_checkpoint import load_checkpoint, save_checkpoint
from fdp.run.run_config import RunConfig
from fdp.run.sample_losses import Loss
from fdp.run.save_module import save_module, save_params
from fdp.run.spent import spent
from fdp.run.step_metrics import guarantee_of
from fdp.run.step_record import Evaluation, StepRecord
from fdp.run.trained_runs import TrainedRun
from fdp.run.training_run import steps
from fdp.types import Key, TrainState, Tree

Callback: TypeAlias = Callable[["PrivateRun", StepRecord], Any]
"""Called after every step; returning False ends :meth:`PrivateRun.fit`."""


@explain_arguments
def private(
    module: nn.Module | Model,
    dataset: Any,
    *,
    loss: Loss | None = None,
    epsilon: float | None = None,
    delta: float | None = None,
    noise_multiplier: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float | Callable[[Tensor], Tensor] | None = None,
    optimizer: Any = "adamw",
    weight_decay: float | None = None,
    max_norm: float = 1.0,
    clip: str | ClipStyle = "flat",
    collate_fn: Collate | None = None,
    population: int | None = None,
    microbatch: int | str = "auto",
    materialize: Sequence[str] = (),
    compile: str | Compile = "none",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    mesh: Mapping[str, int] | None = None,
    seed: int | None = None,
) -> PrivateRun:
    """Return a private training run of ``module`` on ``dataset``; nothing is trained yet.

    The arguments are described in docs/python.md. Give ``epsilon`` or ``noise_multiplier``, and ``epochs`` or
    ``steps``; ``batch_size`` is the expected number of samples per step.

    Guarantees:
      - the parameters after any step are (epsilon, delta)-private for one sample of ``dataset``, added or removed;
      - what would break that (batch norm, a loss over the batch, padding that shows) is refused before any noise.
    """
    options = PrivateOptions(**locals())
    config, subject = configure(options)
    return PrivateRun(config, options, subject)


class PrivateRun:
    """A private training run: an iterator over its steps, and its parameters on the way back into the module.

    ``config`` decides everything, ``state`` is the state after the last step, ``history`` the metrics of all steps,
    ``evaluations`` pairs of a step and what ``evaluate`` returned after it.
    """

    def __init__(self, config: RunConfig, options: PrivateOptions, subject: Subject) -> None:
        self.options, self.subject = options, subject
        self.module = options.module if isinstance(options.module, nn.Module) else None
        self._name = secrets.token_hex(8)  # a run that a folder and this process both name counts once
        self._trained = None if self.module is None else TrainedRun(self.module)
        self.run: Run
        self.state: TrainState
        self.run, self.state = self._prepare(config)
        self.history: list[StepRecord] = []
        self.evaluations: list[tuple[int, Any]] = []

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        return self.run.config

    @property
    def epsilon(self) -> float:
        """The epsilon spent so far, from the steps that the state counts."""
        return spent(self.state, self.run.mechanism, delta=self.config.delta)

    @property
    def guarantee(self) -> Guarantee:
        """The promise about the data: the epsilon of all planned steps."""
        return guarantee_of(self.run)._replace(run=self._name)

    @property
    def noise_multiplier(self) -> float:
        """The noise as a multiple of the clipping norm."""
        return self.run.mechanism.noise_multiplier

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps that draw every sample once, on average."""
        return max(1, round(1 / self.run.mechanism.sampling.rate))

    def __len__(self) -> int:
        return self.config.steps

    def __iter__(self) -> Iterator[StepRecord]:
        """Make one step after another and yield its metrics; a second loop continues where the first one stopped."""
        stream = steps(self.run, self.state)
        while True:
            try:
                made = next(stream, None)
            except (torch.OutOfMemoryError, OutOfMemory):
                if not self._halve_microbatch():
                    raise
                stream = steps(self.run, self.state)
                continue
            if made is None:
                return
            self.state, record = made
            self.history.append(record)
            yield record

    def fit(
        self, *, callback: Callback | None = None, evaluate: Any = None, evaluate_every: int | None = None
    ) -> PrivateRun:
        """Make the remaining steps, write the parameters back into the module, and return the run.

        ``callback(run, metrics)`` is called after every step, and ends the run by returning False. ``evaluate`` is a
        dataset, or a function of the module; it is used every ``evaluate_every`` steps (default: an epoch) and at the
        end. Ending early because of the metrics uses the data to decide: the promise stays that of all planned steps.
        """
        every = self.steps_per_epoch if evaluate_every is None else whole_number("evaluate_every", evaluate_every)
        for metrics in self:
            last = metrics.step == self.config.steps
            if evaluate is not None and (last or metrics.step % every == 0):
                metrics = self._record_evaluation(metrics, evaluate)
            if callback is not None and callback(self, metrics) is False:
                break
        self.write_back()
        return self

    def evaluate(self, dataset: Any, *, collate_fn: Collate | None = None, cost: str = "outside") -> Evaluation:
        """Return the mean loss and, for classifiers, the accuracy on data that is not trained on.

        The numbers are not noised. ``cost`` says why they may be known: ``public`` data, or ``outside`` the guarantee,
        which promises nothing to the people in ``dataset``. The parameters are written back into the module first.
        """
        samples = as_samples(dataset, collate_fn=collate_fn or self.options.collate_fn)
        self.write_back()
        found: list[Scores] = []
        for start in range(0, len(samples), self.config.microbatch_size):
            rows = np.arange(start, min(start + self.config.microbatch_size, len(samples)))
            found.append(self._measure(samples.fetch(rows)))
        correct = [scores.correct for scores in found if scores.correct is not None]
        return Evaluation(
            loss=float(torch.cat([scores.losses for scores in found]).double().mean()),
            accuracy=float(torch.cat(correct).double().mean()) if correct else None,
            cost=cost,
        )

    def params(self) -> dict[str, Tensor]:
        """Return the current value of every leaf, full, by its name; every rank calls it."""
        values = {path: full_tensor(leaf).detach() for path, leaf in tree.flatten(self.state.params).items()}
        self._remember_values(values, {path: path for path in values})
        return values

    def state_dict(self) -> dict[str, Tensor]:
        """Return the module's ``state_dict`` with the trained parameters, tied ones under all their names."""
        values = self.params()
        if self.module is None:
            return values
        own, paths = self.module.state_dict(), leaf_paths(self.module)
        found = {name: values[paths[name]].to(old) if paths.get(name) in values else old for name, old in own.items()}
        self._remember_values(found, paths)
        return found

    def _remember_values(self, values: Mapping[str, Tensor], paths: Mapping[str, str]) -> None:
        """Remember values that are given away, so that a run which begins with them counts this one."""
        if self._trained is None or int(self.state.step) == 0:
            return
        trained = {name: leaf for name, leaf in values.items() if paths.get(name) in self.config.model.trainable}
        self._trained.remember_values(trained, self.guarantee)

    def write_back(self) -> nn.Module | None:
        """Copy the trained parameters into the module, in its dtypes and on its devices, and return it.

        Frozen parameters and buffers stay as they are. A model of fdp has no module: see :meth:`params`.
        """
        if self.module is None:
            return None
        values, model = self.params(), self.config.model
        with torch.no_grad():
            for name, leaf in self.module.named_parameters():
                if name in model.trainable:
                    leaf.copy_(values[name])
        if self._trained is not None and int(self.state.step) > 0:
            self._trained.remember(self.module, model.trainable, self.guarantee)
        return self.module

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the trained model and its privacy guarantee into a new folder; see ``fdp.run.save_module``."""
        guarantees = [*self.config.before, self.guarantee]
        if self.write_back() is None:
            return save_params(self.state.params, folder, guarantees=guarantees)
        assert self.module is not None
        return save_module(self.module, folder, guarantees=guarantees)

    def save_checkpoint(self, folder: str | os.PathLike[str]) -> Path:
        """Write the state, from which :meth:`load_checkpoint` resumes. It holds the key of the noise: keep it safe."""
        return save_checkpoint(self.run, self.state, folder)

    def load_checkpoint(self, folder: str | os.PathLike[str]) -> PrivateRun:
        """Resume from the newest checkpoint of a run made with the same arguments and data, and return the run."""
        self.run, self.state = load_checkpoint(self.run, self.state, folder)
        return self

    def _record_evaluation(self, metrics: StepRecord, evaluate: Any) -> StepRecord:
        if callable(evaluate) and not hasattr(evaluate, "__getitem__"):
            module = self.write_back()
            found = evaluate(self if module is None else module)
        else:
            found = self.evaluate(evaluate)
            metrics = metrics._replace(evaluation=found)
            self.history[-1] = metrics
        self.evaluations.append((metrics.step, found))
        return metrics

    def _measure(self, batch: Tree) -> Scores:
        """Return the losses of a batch, and which samples are classified correctly, without dropout."""
        if self.module is None or self.subject.measure is None:
            data = tree.map(lambda leaf: leaf.to(self.config.device), batch)
            with torch.no_grad():
                return Scores(self.config.model.loss(self.state.params, data), None)
        device = next(self.module.parameters()).device
        modes = {part: part.training for part in self.module.modules()}
        self.module.eval()
        try:
            with torch.no_grad():
                return self.subject.measure(self.module, tree.map(lambda leaf: leaf.to(device), batch))
        finally:
            for part, mode in modes.items():
                part.training = mode

    def _halve_microbatch(self) -> bool:
        """Begin again with half the microbatch, if nothing was trained yet; samples and noise stay the same.

        Not on several ranks: others would wait in the step that this one left.
        """
        size = self.config.microbatch_size
        if group_size(None) > 1:
            return False
        if self.options.microbatch != "auto" or int(self.state.step) > 0 or size == 1:
            return False
        config, root = replace(self.config, microbatch_size=size // 2), self.run.root
        del self.run, self.state
        torch.cuda.empty_cache()
        self.run, self.state = self._prepare(config, root)
        return True

    def _prepare(self, config: RunConfig, root: Key | None = None) -> tuple[Run, TrainState]:
        """Prepare the run, with a smaller microbatch if it may be chosen and one does not fit, on several ranks."""
        while True:
            try:
                return prepare(config, root=root)
            except OutOfMemory:
                if self.options.microbatch != "auto" or config.microbatch_size == 1:
                    raise
            torch.cuda.empty_cache()
            config = replace(config, microbatch_size=config.microbatch_size // 2)

    def __repr__(self) -> str:
        promise, mechanism, done = self.guarantee, self.run.mechanism, int(self.state.step)
        unit, again = dataset_unit(self.config.dataset).one, training_again(self.config.before, promise)
        return (
            f"PrivateRun of {self.config.model.name}: epsilon {shown_epsilon(promise.epsilon or 0.0)} at delta "
            f"{shown_delta(self.config.delta)} for {unit}, added or removed; {done} of {self.config.steps} steps made, "
            f"epsilon {shown_epsilon(self.epsilon)} spent; noise multiplier {round_up(mechanism.noise_multiplier, 4)}, "
            f"expected batch size {mechanism.sampling.expected_batch_size:g} of {mechanism.sampling.population}"
            + ("" if again is None else f"; {again}")
        )
