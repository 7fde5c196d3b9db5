"""A run is a function of its seed, spends what it says, and records what it saw."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fdp import init, keys, model, optimizers
from fdp.fast.compile_modes import Compile
from fdp.gradients.plan import Method, make_plan
from fdp.privacy import accounting, clipping, sampling
from fdp.run.prepare_run import prepare
from fdp.run.run_config import RunConfig
from fdp.run.step_metrics import parameter_digest, summarise
from fdp.run.step_record import StepRecord
from fdp.run.training_run import draw_batch, steps
from fdp.step import init_state, make_train_step
from fdp.types import FdpError, TrainState, Tree

SIZE, WIDTH = 60, 5


class Rows:
    """Samples ``x`` held in memory."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return len(self.x)

    def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
        return {"x": self.x[torch.as_tensor(indices, dtype=torch.int64)]}


def rows(size: int = SIZE) -> Rows:
    return Rows(torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(0)))


def squares(params: Tree, batch: Tree) -> Tensor:
    """``|x - w|^2 / 2`` per sample, whose gradient is ``w - x``."""
    return (batch["x"] - params["w"]).square().sum(1) / 2


def mean_model(loss=squares, *, start: float = 0.0, width: int = WIDTH) -> model.Model:
    built = model.from_loss(loss, {"w": torch.zeros(width)}, name="mean")
    return built._replace(leaves={"w": model.LeafSpec((width,), init.constant(start))})


def config(**changes: Any) -> RunConfig:
    plain = RunConfig(
        model=mean_model(),
        dataset=rows(),
        method=Method.MATERIALIZE,
        clip=clipping.flat(max_norm=1.0),
        noise_multiplier=1.0,
        epsilon=None,
        delta=1e-5,
        batch_size=12,
        steps=4,
        optimizer=optimizers.sgd(0.5),
        seed=1,
        dtype=torch.float32,
        microbatch_size=4,
        memory_budget=None,
        compile=Compile.NONE,
        device=torch.device("cpu"),
    )
    return dataclasses.replace(plain, **changes)


def finish(settings: RunConfig) -> tuple[TrainState, list[StepRecord], dict[str, Any]]:
    run, first = prepare(settings)
    states, records = zip(*steps(run, first))
    return states[-1], list(records), summarise(run, states[-1], records)


def test_the_same_seed_gives_the_same_states_and_another_seed_others() -> None:
    first, second, other = (finish(config(seed=seed))[2]["parameter_sha256"] for seed in (1, 1, 2))
    assert first == second != other


def test_without_a_seed_every_run_differs_and_says_so() -> None:
    (_, _, first), (_, _, second) = finish(config(seed=None)), finish(config(seed=None))
    assert first["parameter_sha256"] != second["parameter_sha256"]
    assert first["seed"] == "os"


def test_the_microbatch_size_changes_nothing_but_rounding() -> None:
    states = [finish(config(microbatch_size=size))[0] for size in (1, 7, 60)]
    for state in states[1:]:
        assert torch.allclose(state.params["w"], states[0].params["w"], atol=1e-5)


def test_a_run_is_the_step_with_the_documented_keys() -> None:
    settings = config(steps=3)
    ran, _, _ = finish(settings)
    root, (run, _) = keys.key(settings.seed), prepare(settings)
    assert isinstance(settings.optimizer, optimizers.Optimizer)
    params = settings.model.init(keys.fold_in(root, "init"))
    plan = make_plan(settings.model, params, settings.dataset.fetch(np.arange(4)), method=settings.method)
    step = make_train_step(settings.model, settings.optimizer, mechanism=run.mechanism, plan=plan)
    state = init_state(settings.model, params, settings.optimizer, run.mechanism)
    for t in range(3):
        batch = sampling.sample_batch(settings.dataset, run.mechanism.sampling, run.key, step=t, microbatch_size=4)
        state, _ = step(state, batch, run.key)
    assert torch.equal(ran.params["w"], state.params["w"])


@pytest.mark.filterwarnings("ignore::fdp.run.repeated_samples.RepeatsWarning")
def test_the_noise_has_the_stated_scale() -> None:
    width, z, max_norm, batch = 4000, 3.0, 0.5, 12
    wide = {
        "model": mean_model(width=width),
        "dataset": Rows(torch.zeros(SIZE, width)),
        "clip": clipping.flat(max_norm=max_norm),
        "optimizer": optimizers.sgd(1.0),
        "steps": 1,
    }
    state, _, _ = finish(config(noise_multiplier=z, **wide))
    assert float(state.params["w"].std()) == pytest.approx(z * max_norm / batch, rel=0.05)


def test_a_record_says_what_the_batch_held() -> None:
    settings = config(steps=1, clip=clipping.flat(max_norm=2.0))
    _, [record], _ = finish(settings)
    batch = draw_batch(prepare(settings)[0], 0)
    x = batch.data["x"][batch.mask > 0]
    norms = x.norm(dim=1)
    assert record.samples == len(x) > 0
    assert record.loss == pytest.approx(float((norms**2 / 2).mean()), rel=1e-5)
    quantiles = (record.norm_q10, record.norm_q50, record.norm_q90)
    assert quantiles == pytest.approx(np.quantile(norms.numpy(), (0.1, 0.5, 0.9)), rel=1e-5)
    assert record.clipped_fraction == pytest.approx(float((norms > 2.0).float().mean()))
    assert 0 < float((norms > 2.0).float().mean()) < 1
    assert record.max_norm == 2.0


def test_an_empty_batch_is_a_step_like_any_other() -> None:
    _, records, summary = finish(config(batch_size=1, steps=12))
    empty = [record for record in records if record.samples == 0]
    assert 0 < len(empty) < 12
    assert all(record.loss is record.norm_q50 is record.clipped_fraction is None for record in empty)
    assert all(math.isfinite(record.loss) for record in records if record.loss is not None)
    assert all(record.epsilon is not None for record in records)
    json.dumps([record._asdict() for record in records] + [summary], allow_nan=False)


@pytest.mark.filterwarnings("ignore::fdp.run.repeated_samples.RepeatsWarning")
def test_a_sample_that_is_not_finite_leaves_the_other_samples_figures() -> None:
    spoiled = rows()
    spoiled.x[40:] = math.nan  # not in the example that is looked at before the run
    state, records, _ = finish(config(dataset=spoiled, batch_size=30, microbatch_size=8))
    assert torch.isfinite(state.params["w"]).all()
    assert all(record.loss is not None and math.isfinite(record.loss) for record in records)


def test_epsilon_never_falls_and_ends_where_the_accountant_says() -> None:
    settings = config(steps=20)
    run, _ = prepare(settings)
    _, records, summary = finish(settings)
    spent = [record.epsilon for record in records if record.epsilon is not None]
    assert len(spent) == 20
    assert all(a <= b for a, b in pairwise(spent))
    assert summary["epsilon"] == accounting.epsilon(run.mechanism, steps=20, delta=settings.delta)
    for step in (1, 10):
        assert spent[step - 1] >= accounting.epsilon(run.mechanism, steps=step, delta=settings.delta) * (1 - 1e-9)


def test_a_target_epsilon_is_kept() -> None:
    _, _, summary = finish(config(noise_multiplier=None, epsilon=2.0))
    assert 1.9 < summary["epsilon"] <= 2.0
    assert summary["private"]


@pytest.mark.parametrize(
    "changes",
    [
        {"method": Method.NONE, "noise_multiplier": None},
        {"method": Method.NONE, "noise_multiplier": 0.0},
        {"noise_multiplier": 0.0},
    ],
)
def test_a_run_without_noise_is_not_called_private(changes: dict[str, Any]) -> None:
    _, records, summary = finish(config(**changes))
    assert summary["private"] is False
    assert summary["epsilon"] is None
    assert summary["delta"] is None
    assert all(record.epsilon is None for record in records)


def test_adaptive_clipping_records_the_bound_it_used() -> None:
    style = clipping.quantile(max_norm=0.1, target_quantile=0.5, learning_rate=0.5, count_noise=1.0)
    _, records, _ = finish(config(clip=style, steps=6))
    bounds = [record.max_norm for record in records]
    assert bounds[0] == pytest.approx(0.1)
    assert bounds[-1] is not None
    assert bounds[-1] > 0.15  # nearly every norm is above 0.1, so C rises


@pytest.mark.parametrize("style", [clipping.per_layer(max_norm=2.0), clipping.automatic(max_norm=2.0)])
def test_every_static_style_records_its_sensitivity(style: clipping.ClipStyle) -> None:
    _, [record], _ = finish(config(clip=style, steps=1))
    assert record.max_norm == pytest.approx(2.0)


def test_the_summary_is_of_the_last_state_and_all_records() -> None:
    state, records, summary = finish(config())
    assert summary["loss_first"] == records[0].loss
    assert summary["loss_last"] == records[-1].loss
    assert summary["steps"] == 4
    assert summary["parameter_count"] == WIDTH
    assert summary["parameter_norm"] == pytest.approx(float(state.params["w"].norm()), rel=1e-6)
    assert summary["parameter_sha256"] == hashlib.sha256(state.params["w"].numpy().tobytes()).hexdigest()
    assert (summary["method"], summary["world_size"], summary["seed"]) == ("materialize", 1, 1)
    assert summary["peak_memory_bytes"] > 2**20
    assert summary["seconds_per_step"] > 0


def test_the_parameter_digest_is_of_float32_leaves_in_path_order() -> None:
    a, b = torch.arange(3.0), torch.ones(2, 2)
    expected = hashlib.sha256(a.numpy().tobytes() + b.numpy().tobytes()).hexdigest()
    assert parameter_digest({"b": b, "a": a}) == parameter_digest({"a": a.bfloat16(), "b": b.double()}) == expected
    assert parameter_digest({"a": a, "b": b + 1e-7}) != expected
    assert parameter_digest({"a": b, "b": a}) != expected


def test_plain_training_is_gradient_descent_on_the_mean() -> None:
    settings = config(method=Method.NONE, noise_multiplier=None, batch_size=SIZE, steps=1)
    state, _, _ = finish(settings)
    mean = settings.dataset.fetch(np.arange(SIZE))["x"].mean(0)
    assert torch.allclose(state.params["w"], 0.5 * mean, atol=1e-6)


def test_any_bound_can_be_recorded():
    _, [record], _ = finish(config(clip=clipping.flat(max_norm=1e300), noise_multiplier=0.0, steps=1))
    assert record.max_norm == 1e300


def test_a_dataset_of_one_sample_can_be_trained_on():
    run, state = prepare(config(dataset=rows(1), batch_size=1, microbatch_size=1, delta=0.5))
    assert len(list(steps(run, state))) == 4


def test_parameters_that_stop_being_finite_end_the_run_at_that_step() -> None:
    explodes = optimizers.sgd(optimizers.piecewise(1.0, factors={2: 1e38}))
    stream = steps(*prepare(config(optimizer=explodes, noise_multiplier=1000.0)))
    assert [next(stream)[1].step for _ in range(2)] == [1, 2]
    with pytest.raises(FdpError, match="step 3: w became NaN or infinite"):
        next(stream)
