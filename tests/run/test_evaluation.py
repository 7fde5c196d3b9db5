"""Evaluations on several ranks, with K-FAC, adapters and sharded averages; the best parameters."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from fdp.cli.configure import configure
from fdp.parallel.sharding import Zero
from fdp.run.evaluation import attach_evaluations, make_evaluator
from fdp.run.kept import exported, plain, start_keeping
from fdp.run.prepare_run import prepare
from fdp.run.run_config import Layout
from fdp.run.step_metrics import parameter_digest
from fdp.run.step_record import Evaluation
from fdp.run.training_run import steps
from fdp.tree import flatten
from tests.cli.train_runs import small_options
from tests.ranks import run_on_ranks

TINY: dict[str, Any] = {
    "eval_fraction": 0.05,
    "eval_every": 2,
    "seed": 3,
    "batch_size": 16,
    "microbatch": 8,
    "ema": 0.5,
    "keep_best": True,
    "lr": 0.05,
}


def evaluate_run(changes: dict[str, Any], layout: Layout | None = None) -> tuple[list[Evaluation], dict[str, Any]]:
    """Return the evaluations of a run of four steps, and its result by leaf."""
    config = replace(configure(small_options(**TINY | changes)), layout=layout)
    run, state = prepare(config)
    state = start = start_keeping(run, state)
    evaluator, found = make_evaluator(run), []
    for state, record in attach_evaluations(steps(run, plain(start)), run, evaluator, start):  # noqa: B007
        found += [record.evaluation] if record.evaluation is not None else []
    result = exported(run, state).params
    full = {path: getattr(leaf, "full_tensor", lambda leaf=leaf: leaf)() for path, leaf in flatten(result).items()}
    return found, {path: leaf.detach().clone() for path, leaf in full.items()} | {"": parameter_digest(result)}


def on_two_ranks(changes: dict[str, Any]) -> tuple[list[Evaluation], dict[str, Any]]:
    return evaluate_run(changes, Layout({"shard": 2}, Zero.THREE))


@pytest.mark.ranks
@pytest.mark.parametrize("more", [{}, {"eval_epsilon": 1.0}], ids=["exact", "noised"])
def test_two_ranks_find_the_numbers_and_the_result_of_one(more: dict[str, Any]) -> None:
    alone, leaves = evaluate_run(more)
    first, second = run_on_ranks(on_two_ranks, 2, more)
    assert first[0] == second[0], "every rank has the same bits"
    for one, two in zip(alone, first[0], strict=True):
        assert (one.loss, one.accuracy) == (pytest.approx(two.loss, rel=1e-5), pytest.approx(two.accuracy))
    assert set(leaves) == set(first[1])
    for path in set(leaves) - {""}:
        assert torch.allclose(leaves[path], first[1][path], atol=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "not private": {"method": "none", "noise_multiplier": None},
    "kfac": {"optimizer": "kfac", "method": "none", "noise_multiplier": None, "lr": 0.01},
    "lora": {"model": "mlp", "lora": 2, "lora_targets": "layers.*.weight"},
    "in place": {"offload": "all"},
    "language": {"model": "gpt-nano", "data": "text", "context": 8, "eval_fraction": 0.1, "batch_size": 4},
}


@pytest.mark.parametrize("name", sorted(CASES))
def test_every_kind_of_run_is_evaluated_averaged_and_keeps_its_best(name: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(99)))
    changes = CASES[name] | ({"data": str(tmp_path / "text.txt")} if name == "language" else {})
    found, leaves = evaluate_run(changes)
    assert len(found) == 2
    assert all(each.loss is not None and each.cost == "outside" for each in found)
    again, same = evaluate_run(changes)
    assert again == found
    assert same[""] == leaves[""]


def test_the_result_is_the_parameters_of_the_best_evaluation() -> None:
    """A learning rate that grows far too large: the first evaluation is the best."""
    config = configure(small_options(**TINY | {"ema": None, "lr": 50.0, "warmup": 0, "schedule": "constant"}))
    run, state = prepare(config)
    state = start = start_keeping(run, state)
    evaluator, seen = make_evaluator(run), {}
    for state, record in attach_evaluations(steps(run, plain(start)), run, evaluator, start):
        seen[record.step] = (record.evaluation, parameter_digest(state.params))
    losses = {step: found.loss for step, (found, _) in seen.items() if found is not None}
    best = min(losses, key=lambda step: losses[step])
    assert parameter_digest(exported(run, state).params) == seen[best][1]
    assert len({digest for _, digest in seen.values()}) == 4


def test_patience_ends_the_run_and_a_run_without_kept_values_has_a_plain_state() -> None:
    bad = TINY | {"lr": 500.0, "warmup": 0, "schedule": "constant", "ema": None, "patience": 1, "eval_every": 1}
    run, state = prepare(configure(small_options(**bad, steps=30)))
    state = start = start_keeping(run, state)
    evaluator = make_evaluator(run)
    losses = []
    for state, record in attach_evaluations(steps(run, plain(start)), run, evaluator, start):  # noqa: B007
        losses.append(record.evaluation.loss if record.evaluation else None)
    assert 2 <= len(losses) < 30
    assert losses[-1] >= min(losses[:-1])
    assert all(later < earlier for earlier, later in pairwise(losses[:-1]))
    nothing = list(attach_evaluations(steps(run, plain(state)), run, evaluator, state))
    assert nothing == [], "a run that is resumed after its patience ended makes no further step"
    run, state = prepare(configure(small_options()))
    assert start_keeping(run, state) is state
