"""Evaluate the parameters of a run on held-out data.

    loss       = mean over samples of loss_b                    a sample's loss is the model's own: for a language
                                                                model the mean over its tokens that count
    token_loss = sum_b n_b loss_b / sum_b n_b                   n_b tokens of sample b count; perplexity = exp of it
    accuracy   = the share of samples whose highest score is their label's (classifiers)

Samples in which no token counts are left out of every mean. Each rank evaluates its share of the samples, and the sums
are added up in float64. What the numbers cost is in :mod:`fdp.run.evaluation_config`; with noise, only ``loss`` and
``accuracy`` are released (:mod:`fdp.run.noised_evaluation`).

    >>> evaluator = make_evaluator(run)                              # None if the run has no evaluations
    >>> for state, record in attach_evaluations(steps(run, state), run, evaluator, state): record.evaluation
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from fdp import keys, tree
from fdp.fingerprint import fingerprint
from fdp.gradients.block_loop import Weights
from fdp.model import Likelihood, Model
from fdp.parallel.agree import check_agreement, gather_values
from fdp.parallel.gather_reduce import sum_over_samples
from fdp.parallel.sharding import over_tensor_axis
from fdp.privacy.microbatches import fetch_rows, pad_to_microbatches
from fdp.run.evaluation_config import EvaluationConfig, check_evaluation, planned_steps
from fdp.run.forward import forward_weights, losses_and_scores, sample_losses
from fdp.run.kept import Kept, evaluated_params, is_exhausted, judge, keep_up
from fdp.run.noised_evaluation import Release, contributions
from fdp.run.prepare_run import Run
from fdp.run.step_record import Evaluation, StepRecord
from fdp.types import FdpError, TrainState, Tree

MOST_SCORES = 1 << 28
"""Scores (samples x tokens x vocabulary) that an evaluation computes at a time, on one rank: 1 GiB in float32."""


class Evaluator(NamedTuple):
    """Everything that stays the same from one evaluation of a run to the next. ``release`` adds noise, if any."""

    run: Run
    config: EvaluationConfig
    model: Model
    steps: tuple[int, ...]
    microbatch_size: int
    release: Release | None


class SampleResults(NamedTuple):
    """The results of this rank's samples: the loss, whether it is right (classifiers), and the tokens that count."""

    losses: Float[Tensor, " samples"]
    correct: Bool[Tensor, " samples"] | None
    tokens: Float[Tensor, " samples"]


def make_evaluator(run: Run) -> Evaluator | None:
    """Return what the evaluations of a run need, or None if it has none. Every rank calls it.

    Guarantees:
      - noise is drawn from a key of its own, of which the settings and the held-out data are a part: neither the noise
        of a step nor that of evaluations with other settings or data is ever used again.
    """
    config = run.config.evaluation
    if config is None:
        return None
    check_evaluation(config)
    model = run.config.model if run.sharding is None else over_tensor_axis(run.config.model, run.sharding.mesh)
    steps = planned_steps(config.every, run.config.steps)
    evaluator = Evaluator(run, config, model, steps, _microbatch_size(run, config), None)
    if run.sharding is not None:
        check_agreement({"content of the held-out data": config.digest, "budget of the evaluations": config.budget})
    if config.budget is None:
        return evaluator
    classes = _classes(model)
    bound = config.budget.max_loss or (math.log(classes) if classes else None)
    if bound is None:
        raise FdpError(
            f"{run.config.model.name}: expected a model that names its scores, or a public bound on a sample's loss "
            "for noised evaluations, got neither; give --eval-max-loss"
        )
    settings = fingerprint(model.identity, config.digest, tuple(config.budget), steps, bound, run.config.ema)
    key = keys.fold_in(run.key.cpu(), f"evaluation {settings}{run.stages.rounded}")
    entries = 2 if _classifies(model) else 1
    release = Release(config.budget, steps=steps, entries=entries, max_loss=bound, key=key)
    return evaluator._replace(release=release)


def attach_evaluations(
    stream: Iterable[tuple[TrainState, StepRecord]],
    run: Run,
    evaluator: Evaluator | None,
    start: TrainState,
    *,
    released: Mapping[int, Evaluation] = MappingProxyType({}),
) -> Iterator[tuple[TrainState, StepRecord]]:
    """Pass the stream on; evaluate after every planned step, and put the result into the step's record.

    ``start`` is the state that the stream goes on from, with what is kept beside it (:mod:`fdp.run.kept`); the states
    that are passed on have the same beside them. The stream ends when ``patience`` is exhausted, on all ranks at the
    same step, since all have the same numbers. ``released`` are noised evaluations, by step, that were released before:
    they stand, and are not computed again.
    """
    kept = start.opt if isinstance(start.opt, Kept) else None
    if is_exhausted(run, start):
        return
    for state, record in stream:
        if kept is not None:
            kept = keep_up(run, kept, state)
            state = state._replace(opt=kept)
        if evaluator is not None and record.step in evaluator.steps:
            params = evaluated_params(state)
            found = released.get(record.step) or evaluate(evaluator, params, step=record.step)
            record = record._replace(evaluation=found)
            if kept is not None:
                kept = judge(kept, params, found, step=record.step)
                state = state._replace(opt=kept)
        yield state, record
        if is_exhausted(run, state):
            return


def evaluate(evaluator: Evaluator, params: Tree, *, step: int) -> Evaluation:
    """Return the evaluation of ``params`` after ``step`` steps. Every rank calls it, and all return the same."""
    results = _evaluate_share(evaluator, params)
    sharding, cost = evaluator.run.sharding, evaluator.config.cost.value
    counted = results.tokens > 0
    if evaluator.release is not None:
        each = contributions(results.losses, results.correct, counted, max_loss=evaluator.release.max_loss)
        means = evaluator.release(sum_over_samples(sharding, each.sum(0)), step=step)
        found = Evaluation(means[0], means[1] if len(means) > 1 else None, cost)
    else:
        found = _exact_means(sum_over_samples(sharding, _totals(results)), evaluator)
    return gather_values(found, None)[0]  # equal up to rounding on all ranks; decisions need equal bits


def _evaluate_share(evaluator: Evaluator, params: Tree) -> SampleResults:
    """Return the results of this rank's share of the samples, padding left out."""
    run, config = evaluator.run, evaluator.config
    device, sharding = run.config.device, run.sharding
    rank, ranks = (0, 1) if sharding is None else (sharding.rank, sharding.ranks)
    size = evaluator.microbatch_size
    # Rows of all ranks' samples: every rank runs as many forward passes, since each gathers weights from all.
    everyone = torch.arange(len(config.dataset))
    matrix, mask = pad_to_microbatches(everyone, microbatch_size=size * ranks)
    mine = slice(rank * size, (rank + 1) * size)
    weights = forward_weights(evaluator.model, params, dtype=run.config.dtype, device=device, sharding=sharding)
    found = [_evaluate_rows(weights, fetch_rows(config.dataset, row[None, mine])) for row in matrix]
    kept = mask[:, mine].flatten() > 0
    columns = zip(*found)
    losses, correct, tokens = ([part for part in column if part is not None] for column in columns)
    return SampleResults(
        torch.cat(losses)[kept], torch.cat(correct)[kept] if correct else None, torch.cat(tokens)[kept]
    )


def _evaluate_rows(weights: Weights, rows: Tree) -> SampleResults:
    """Return the results of one microbatch, (1, samples, ...), on the CPU."""
    data = tree.map(lambda leaf: leaf[0].to(weights.device), rows)
    outputs = weights.model.blocks[-1].outputs
    correct = None
    if outputs is not None and _classifies(weights.model):
        losses, scores = losses_and_scores(weights, data)
        correct = (scores.argmax(-1) == outputs.targets(data)).cpu()
    else:
        losses = sample_losses(weights, data)
    tokens = torch.ones(len(losses), dtype=torch.float64)
    if outputs is not None and outputs.weights is not None:
        tokens = (outputs.weights(data) != 0).flatten(1).sum(1).double().cpu()
    return SampleResults(losses.double().cpu(), correct, tokens)


def _totals(results: SampleResults) -> Float[Tensor, " 5"]:
    """Return the sums of losses, samples, token losses, tokens and right answers over samples in which tokens count."""
    counted = results.tokens > 0
    losses = torch.where(counted, results.losses, 0.0)
    right = torch.zeros(()) if results.correct is None else results.correct[counted].sum()
    parts = [losses.sum(), counted.sum(), (losses * results.tokens).sum(), results.tokens.sum(), right]
    return torch.stack([part.double() for part in parts])


def _exact_means(totals: Float[Tensor, " 5"], evaluator: Evaluator) -> Evaluation:
    loss, samples, token_loss, tokens, right = totals.tolist()
    is_language = evaluator.model.vocab_size is not None
    return Evaluation(
        _finite(loss / samples) if samples else None,
        right / samples if samples and _classifies(evaluator.model) else None,
        evaluator.config.cost.value,
        token_loss=_finite(token_loss / tokens) if tokens and is_language else None,
        shared=evaluator.config.shared,
    )


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _classifies(model: Model) -> bool:
    """Return True if the scores of a sample are one row, one score per class."""
    outputs = model.blocks[-1].outputs
    return model.vocab_size is None and outputs is not None and outputs.likelihood is Likelihood.SOFTMAX


def _classes(model: Model) -> int | None:
    """Return the number of classes, or of tokens of a language model; None if the model does not tell."""
    last = model.blocks[-1]
    if model.vocab_size is not None:
        return model.vocab_size
    if last.outputs is None or last.outputs.weight is None:
        return None
    return model.leaves[last.params[last.outputs.weight]].shape[0]


def _microbatch_size(run: Run, config: EvaluationConfig) -> int:
    """Return how many samples a rank computes at once: as many as in training, unless their scores need too much."""
    ranks = 1 if run.sharding is None else run.sharding.ranks
    size = -(-run.config.microbatch_size // ranks)
    if run.config.model.vocab_size is None:
        return size
    example = config.dataset.fetch(np.arange(1))
    each = run.config.model.vocab_size * max(leaf.numel() for leaf in tree.leaves(example))
    return max(1, min(size, MOST_SCORES // each))
