"""Turn the options about evaluation into held-out data and an :class:`~fdp.run.evaluation_config.EvaluationConfig`.

>>> training, held_out, shared = split_data(options, dataset, model)
>>> evaluation = make_evaluation(options, held_out, population=population, delta=delta, shared=shared)
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path

from fdp.cli.evaluation_options import EvaluationOptions
from fdp.cli.model_and_data import load_dataset
from fdp.cli.train_options import TrainOptions
from fdp.data import datasets
from fdp.data.digest import data_digest
from fdp.data.held_out import split_held_out
from fdp.data.mixed import Mixed
from fdp.data.overlap import count_shared
from fdp.data.users import Users
from fdp.model import Model
from fdp.privacy.microbatches import Dataset
from fdp.privacy.sampling import rounded_population
from fdp.run.averaging import check_decay
from fdp.run.evaluation_config import Budget, Cost, EvaluationConfig, default_every
from fdp.run.smaller_microbatches import RunWarning
from fdp.types import FdpError

DIGITS_TEST = "digits-test"


class OverlapWarning(RunWarning):
    """Some samples of the held-out data are trained on too."""


def split_data(options: TrainOptions, dataset: Dataset, model: Model) -> tuple[Dataset, Dataset | None, int]:
    """Return the data to train on, the held-out data (None without evaluation), and how many samples are in both."""
    given = options.evaluation
    _check(options)
    if given.eval_fraction is not None:
        return *split_held_out(dataset, given.eval_fraction), 0
    if given.eval_data is None:
        return dataset, None, 0
    if given.eval_data == DIGITS_TEST:
        if model.context is not None:
            raise FdpError(f"--eval-data {DIGITS_TEST}: is images: expected a classifier, got {model.name}")
        return dataset, datasets.digits()[1], 0
    held_out = load_dataset(options, model, source=given.eval_data)
    if not given.eval_public:
        _check_other_people(given.eval_data, dataset, held_out)
    return dataset, held_out, _check_other_samples(given, dataset, held_out)


def make_evaluation(
    options: TrainOptions, held_out: Dataset | None, *, population: int, delta: float, shared: int = 0
) -> EvaluationConfig | None:
    """Return the settings of the evaluations; ``population`` is the public number of samples to train on.

    ``shared`` is the number of held-out samples that are trained on too.
    """
    given = options.evaluation
    if held_out is None:
        return None
    steps, digest = options.training.steps, data_digest(held_out)
    every = default_every(steps) if given.eval_every is None else given.eval_every
    if given.eval_epsilon is None:
        cost = Cost.PUBLIC if given.eval_public else Cost.OUTSIDE
        return EvaluationConfig(held_out, digest, cost, every, None, given.keep_best, given.patience, shared)
    mixed = options.reading.public_data is not None  # only private samples are held out, and counted
    number = _public_number(given, held_out, None if mixed else population)
    budget = Budget(given.eval_epsilon, delta, number, given.eval_max_loss)
    return EvaluationConfig(held_out, digest, Cost.NOISED, every, budget, given.keep_best, given.patience)


def _public_number(given: EvaluationOptions, held_out: Dataset, population: int | None) -> int:
    """Return the public number of held-out samples; with a fraction it does not depend on the held-out ones."""
    if given.eval_population is not None:
        return given.eval_population
    if given.eval_fraction is not None and population is not None:
        return max(1, round(population * given.eval_fraction / (1 - given.eval_fraction)))
    return rounded_population(len(held_out))


def _check(options: TrainOptions) -> None:
    """Refuse numbers out of range, and options that contradict each other."""
    given = options.evaluation
    if given.ema is not None:
        check_decay(given.ema)
    if given.patience is not None and given.patience < 1:
        raise FdpError(f"--patience: expected at least 1 evaluation without improvement, got {given.patience}")
    if given.eval_data is not None and given.eval_fraction is not None:
        raise FdpError(
            "--eval-data and --eval-fraction: expected one of them, got both; each names the held-out data: "
            "leave one out"
        )
    if given.eval_fraction is not None and not 0 < given.eval_fraction < 1:
        raise FdpError(f"--eval-fraction: expected a number between 0 and 1, such as 0.1, got {given.eval_fraction:g}")
    if given.eval_every is not None and not 1 <= given.eval_every <= options.training.steps:
        raise FdpError(
            f"--eval-every: expected 1 to the {options.training.steps} steps of the run, got {given.eval_every}"
        )
    for name in ("eval_epsilon", "eval_max_loss"):
        value = getattr(given, name)
        if value is not None and not 0 < value < math.inf:
            raise FdpError(f"--{name.replace('_', '-')}: expected a finite number above 0, got {value:g}")
    if given.eval_population is not None and given.eval_population < 1:
        raise FdpError(f"--eval-population: expected 1 or more samples, got {given.eval_population}")
    if given.eval_public and given.eval_epsilon is not None:
        raise FdpError(
            "--eval-public and --eval-epsilon: expected one of them, got both; public data needs no noise: "
            "leave one out"
        )
    if given.eval_data is not None and _same_source(given.eval_data, options.data.data):
        raise FdpError(
            f"--eval-data {given.eval_data}: expected data that is not trained on, got --data itself; hold out a part "
            "of it with --eval-fraction 0.1"
        )


def _check_other_people(source: str, dataset: Dataset, held_out: Dataset) -> None:
    """Refuse held-out users who are trained on too: nothing that is said about the cost would be true for them."""
    data = _private(dataset)
    if not isinstance(data, Users) or not isinstance(held_out, Users):
        return
    if set(data.documents.owners) & set(held_out.documents.owners):
        raise FdpError(
            f"--eval-data {source}: expected other users than those of --data, got some who are in both; take them "
            "out of one, or hold out users of --data with --eval-fraction 0.1"
        )


def _check_other_samples(given: EvaluationOptions, dataset: Dataset, held_out: Dataset) -> int:
    """Refuse a copy of the training data, and samples on both sides if evaluations are noised; else warn of them.

    Returns how many samples are on both sides. Public samples may be trained on too, but not all of the private data
    can be public.
    """
    data = _private(dataset)
    shared, number = count_shared(held_out, data), len(held_out)
    if shared == 0 or (given.eval_public and (shared < number or number != len(data))):
        return shared
    if shared == number:
        raise FdpError(
            f"--eval-data {given.eval_data}: expected data that is not trained on, got {number} samples, all of which "
            "are in --data too; hold out a part of --data with --eval-fraction 0.1"
        )
    advice = "take them out of one, or hold out a part of --data with --eval-fraction 0.1"
    found = f"--eval-data {given.eval_data}: expected samples that are not in --data, got {shared} of {number} in both"
    if given.eval_epsilon is not None:
        raise FdpError(
            f"{found}: these would pay for training and for --eval-epsilon, and each is stated for one alone; {advice}"
        )
    warnings.warn(
        f"{found}: exact losses of samples that are trained on are released, which their epsilon does not cover, and "
        f"the held-out loss looks better than it is; {advice}",
        OverlapWarning,
        stacklevel=2,
    )
    return shared


def _private(dataset: Dataset) -> Dataset:
    return dataset.private if isinstance(dataset, Mixed) else dataset


def _same_source(one: str, other: str) -> bool:
    if one == other:
        return True
    return Path(one).exists() and Path(other).exists() and Path(one).resolve() == Path(other).resolve()
