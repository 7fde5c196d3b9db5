"""The settings of a run's evaluations: on which data, how often, and at what cost.

public    the data is public: evaluating on it costs nothing
outside   private data of people who are not trained on, without noise: nothing is promised to them
noised    the same, each evaluation released with noise, all together within a budget of their own

>>> EvaluationConfig(dataset, data_digest(dataset), Cost.OUTSIDE, every=20)
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

from fdp.privacy.microbatches import Dataset
from fdp.types import FdpError


class Cost(Enum):
    """The privacy cost of an evaluation."""

    PUBLIC = "public"
    OUTSIDE = "outside"
    NOISED = "noised"


class Budget(NamedTuple):
    """The budget of noised evaluations: every held-out sample is covered by (``epsilon``, ``delta``).

    ``population`` is the public number of samples that sums are divided by. ``max_loss`` is the public bound to which
    every sample's loss is clipped; None: the logarithm of the number of classes or tokens, the loss of a uniform guess.
    """

    epsilon: float
    delta: float
    population: int
    max_loss: float | None = None


class EvaluationConfig(NamedTuple):
    """Evaluations after every ``every`` steps and after the last.

    ``budget`` is given if the cost is ``NOISED``. ``digest`` is :func:`fdp.data.digest.data_digest` of the dataset.
    ``keep_best``: the result of the run is the parameters with the lowest loss. ``patience``: the run ends after as
    many evaluations without a lower one. ``shared`` samples are trained on too.
    """

    dataset: Dataset
    digest: str
    cost: Cost
    every: int
    budget: Budget | None = None
    keep_best: bool = False
    patience: int | None = None
    shared: int = 0


def planned_steps(every: int, steps: int) -> tuple[int, ...]:
    """Return the steps after which there is an evaluation: every ``every`` steps, and the last."""
    return (*range(every, steps, every), steps)


def default_every(steps: int) -> int:
    """Return the steps between about ten evaluations."""
    return max(1, steps // 10)


def check_evaluation(config: EvaluationConfig) -> None:
    """Refuse settings that do not fit together, or that do not protect."""
    if config.every < 1:
        raise FdpError(f"evaluation: expected at least 1 step between evaluations, got {config.every}")
    if len(config.dataset) < 1:
        raise FdpError("evaluation: expected at least one held-out sample, got none")
    if (config.cost is Cost.NOISED) != (config.budget is not None):
        raise FdpError("evaluation: expected a budget if, and only if, evaluations are noised")
    if config.patience is not None and config.patience < 1:
        raise FdpError(f"patience: expected at least 1 evaluation without improvement, got {config.patience}")
    if config.budget is None:
        return
    epsilon, delta, population, max_loss = config.budget
    if not 0 < epsilon < math.inf:
        raise FdpError(f"epsilon of the evaluations: expected a finite number above 0, got {epsilon}")
    if not 0 < delta < 1:
        raise FdpError(f"delta of the evaluations: expected a number in (0, 1), got {delta}")
    if population < 1:
        raise FdpError(f"population of the held-out data: expected 1 or more, got {population}")
    if max_loss is not None and not 0 < max_loss < math.inf:
        raise FdpError(f"largest loss of an evaluation: expected a finite number above 0, got {max_loss}")
