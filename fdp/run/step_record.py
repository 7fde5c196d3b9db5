"""The record of a step, a line of ``metrics.jsonl``, and of an evaluation.

>>> line = json.dumps(record_to_json(record))
>>> record_from_json(json.loads(line)) == record
True
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Evaluation(NamedTuple):
    """The result of evaluating the parameters after a step on data that is not trained on.

    ``loss`` and ``accuracy`` are means over the samples; accuracy is for classifiers. ``cost`` says what the numbers
    cost: ``public`` (computed on public data), ``outside`` (on private data of other people: nothing is promised to
    them) or ``noised`` (released with noise, within the budget of ``--eval-epsilon``). ``texts`` are generated.
    ``token_loss`` is the mean over all tokens that count, of language models; None if the numbers are noised.
    ``shared`` samples of the data are trained on after all.
    """

    loss: float | None
    accuracy: float | None
    cost: str
    texts: tuple[str, ...] = ()
    token_loss: float | None = None
    shared: int = 0  # absent from older metrics files

    @property
    def perplexity(self) -> float | None:
        """``exp(token_loss)``; of noised evaluations ``exp(loss)``, which weighs samples and not tokens equally."""
        loss = self.loss if self.token_loss is None else self.token_loss
        return None if loss is None or self.accuracy is not None else math.exp(min(loss, 700.0))


class StepRecord(NamedTuple):
    """The metrics of one step.

    ``loss`` and the norms are over the samples with finite values, None if there are none. ``max_norm`` is the bound C
    that the step clipped to, None if it did not clip. The budget covers ``step``, ``epsilon``, ``parameter_norm`` (of
    all parameters after the step) and ``kfac_failures`` (how often so far a layer's curvature could not be used and
    the last one was kept; None without K-FAC). ``peak_memory_bytes`` is this process's highest so far. The
    rest is computed on private data outside the budget.
    """

    step: int
    loss: float | None
    epsilon: float | None
    clipped_fraction: float | None
    norm_q10: float | None
    norm_q50: float | None
    norm_q90: float | None
    max_norm: float | None
    samples: int
    seconds: float
    parameter_norm: float | None = None  # absent from older metrics files
    kfac_failures: int | None = None
    evaluation: Evaluation | None = None
    peak_memory_bytes: int | None = None


def record_to_json(record: StepRecord) -> dict[str, Any]:
    """Return a record as a line of ``metrics.jsonl``, without the evaluation that a step did not have."""
    values = record._asdict()
    evaluation = values.pop("evaluation")
    return values if evaluation is None else values | {"evaluation": evaluation._asdict()}


def record_from_json(values: dict[str, Any]) -> StepRecord:
    """Return the record of a line of ``metrics.jsonl``."""
    found = dict(values)
    if (evaluation := found.pop("evaluation", None)) is not None:
        evaluation = Evaluation(**{**evaluation, "texts": tuple(evaluation["texts"])})
    return StepRecord(**found, evaluation=evaluation)
