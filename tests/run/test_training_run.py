"""A run is a function of its seed, spends what it says, records what it saw, refuses what it cannot train."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fdp import init, keys, model, optimizers
from fdp.data import datasets
from fdp.fast.compile_modes import Compile
from fdp.gradients.plan import Method, make_plan
from fdp.parallel.offload import Offload
from fdp.privacy import accounting, clipping, sampling
from fdp.run.run_config import RunConfig
from fdp.run.step_metrics import StepRecord, parameter_digest, summarise
from fdp.run.training_run import draw_batch, prepare, steps
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


WHAT: dict[str, dict[str, Any]] = {
    "clip norm": {"clip": clipping.flat(max_norm=1.1)},
    "clip style": {"clip": clipping.automatic(max_norm=1.0)},
    "noise": {"noise_multiplier": 1.1},
    "budget": {"noise_multiplier": None, "epsilon": 3.0},
    "batch size": {"batch_size": 13},
    "population": {"population": 61},
    "learning rate": {"optimizer": optimizers.sgd(0.6)},
    "schedule": {"optimizer": optimizers.sgd(optimizers.cosine(0.5, steps=9))},
    "optimizer": {"optimizer": optimizers.adamw(0.5)},
    "one sample": {"dataset": Rows(torch.cat([rows().x[:-1], torch.ones(1, WIDTH)]))},
    "one sample less": {"dataset": rows(SIZE - 1)},
    "loss": {"model": mean_model(lambda params, batch: 2 * squares(params, batch))},
    "seed": {"seed": 2},
}
HOW: dict[str, dict[str, Any]] = {
    "method": {"method": Method.MATERIALIZE},
    "microbatch": {"microbatch_size": 7},
    "offload": {"offload": Offload(True, True, True)},
    "compile": {"compile": Compile.BLOCK},
    "checkpoints": {"checkpoint_activations": True},
    "delta": {"delta": 1e-6},
    "dtype": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("what", WHAT)
def test_runs_of_one_seed_that_compute_something_else_share_neither_samples_nor_noise(what) -> None:
    """Else the difference of the two would be that of their sums, without noise. The first parameters are the same."""
    (here, state), (there, other) = prepare(config()), prepare(config(**WHAT[what]))
    assert not torch.equal(here.key, there.key)
    assert torch.equal(state.params["w"], other.params["w"])
    noise = [run.stages.key(run.key, torch.tensor(0)) for run in (here, there)]
    assert not torch.equal(*noise)


@pytest.mark.parametrize("how", HOW)
def test_runs_of_one_seed_that_compute_the_same_in_another_way_share_both(how) -> None:
    (here, _), (there, _) = prepare(config()), prepare(config(**HOW[how]))
    assert torch.equal(here.key, there.key)
    assert torch.equal(*(run.stages.key(run.key, torch.tensor(3)) for run in (here, there)))


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


@pytest.mark.filterwarnings("ignore::fdp.run.repeated_samples.RepeatsWarning")
def test_the_rate_of_a_private_run_is_of_a_rounded_or_announced_number() -> None:
    """The number of samples changes between neighbours, the rate and with it noise and epsilon must not."""
    for size in (31, 40):
        rows = Rows(torch.zeros(size, 5))
        run, _ = prepare(config(dataset=rows, batch_size=8))
        assert (run.mechanism.sampling.rate, run.mechanism.sampling.dataset_size) == (8 / 40, size)
        run, _ = prepare(config(dataset=rows, batch_size=8, population=35))
        assert run.mechanism.sampling.rate == 8 / 35
        plain, _ = prepare(config(dataset=rows, batch_size=8, method=Method.NONE, noise_multiplier=None))
        assert plain.mechanism.sampling.rate == 8 / 40, "the same samples as with privacy: they can be compared"


def test_plain_training_is_gradient_descent_on_the_mean() -> None:
    settings = config(method=Method.NONE, noise_multiplier=None, batch_size=SIZE, steps=1)
    state, _, _ = finish(settings)
    mean = settings.dataset.fetch(np.arange(SIZE))["x"].mean(0)
    assert torch.allclose(state.params["w"], 0.5 * mean, atol=1e-6)


def batch_norm(params: Tree, batch: Tree) -> Tensor:
    x = batch["x"] - batch["x"].mean(0)
    return (x - params["w"]).square().sum(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 1.0}, "either an epsilon or a noise multiplier, got both or neither"),
        ({"noise_multiplier": None}, "got both or neither"),
        ({"noise_multiplier": -1.0}, "0 or more, got -1"),
        ({"noise_multiplier": math.nan}, "0 or more, got nan"),
        ({"noise_multiplier": None, "epsilon": 0.0}, "epsilon: expected"),
        ({"noise_multiplier": None, "epsilon": 1e6}, "epsilon: expected a target"),
        ({"method": Method.NONE}, "method none trains without privacy"),
        ({"delta": 0.0}, r"delta: expected a probability in \(0, 1\), got 0"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"steps": 0}, "steps: expected a whole number, 1 or more"),
        ({"microbatch_size": 0}, "microbatch_size: expected a whole number, 1 or more"),
        ({"batch_size": SIZE + 1}, "batch larger than the data"),
        ({"seed": -1}, "seed"),
        ({"model": mean_model(start=math.nan)}, "w: holds NaN or infinity"),
        ({"dataset": Rows(torch.full((SIZE, WIDTH), math.inf))}, "data x: holds NaN or infinity"),
        ({"model": mean_model(lambda p, b: squares(p, b).mean())}, r"shape \(4,\), got \(\)"),
        ({"model": mean_model(batch_norm)}, "samples are not independent"),
    ],
)
def test_settings_that_cannot_be_trained_are_refused_before_the_first_step(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(FdpError, match=message):
        prepare(config(**changes))


class Documents(Rows):
    """Samples of documents of two tokens each."""

    def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
        places = torch.arange(8).expand(len(indices), -1)
        return super().fetch(indices) | {"segments": 1 + places // 2}


@pytest.mark.parametrize("method", [Method.NONE, Method.MATERIALIZE])
def test_a_model_that_looks_at_the_longest_document_of_a_microbatch_is_refused_though_all_are_short(method) -> None:
    def loss(params: Tree, batch: Tree, *, across: bool) -> Tensor:
        same = batch["segments"][:, :, None] == batch["segments"][:, None]
        longest = same.sum(2).amax(1)
        return squares(params, batch) * (1.0 + ((longest.amax() if across else longest) > 4))

    noise = None if method is Method.NONE else 1.0
    common = {"dataset": Documents(rows().x), "method": method, "noise_multiplier": noise}
    prepare(config(model=mean_model(partial(loss, across=False)), **common))
    with pytest.raises(
        FdpError, match=r"beside a synthetic sample \(one long document\), so samples are not independent"
    ):
        prepare(config(model=mean_model(partial(loss, across=True)), **common))


def test_integer_parameters_are_refused() -> None:
    whole = model.LeafSpec((WIDTH,), lambda key, shape, **_: torch.zeros(shape, dtype=torch.int64))
    with pytest.raises(FdpError, match=r"w: expected a floating-point parameter, got torch\.int64"):
        prepare(config(model=mean_model()._replace(leaves={"w": whole})))


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    short = mean_model()._replace(context=8)
    long = datasets.windows(np.zeros(400, dtype=np.uint8), context=9, vocab_size=256, where="here")
    with pytest.raises(FdpError, match="at most the 8 tokens of mean's context, got 9"):
        prepare(config(model=short, dataset=long))


def test_any_bound_can_be_recorded():
    _, [record], _ = finish(config(clip=clipping.flat(max_norm=1e300), noise_multiplier=0.0, steps=1))
    assert record.max_norm == 1e300


def test_noise_too_small_for_an_epsilon_is_refused():
    with pytest.raises(FdpError, match="expected enough noise for a finite epsilon, got 1e-09"):
        prepare(config(noise_multiplier=1e-9))


def test_a_dataset_of_one_sample_can_be_trained_on():
    run, state = prepare(config(dataset=rows(1), batch_size=1, microbatch_size=1, delta=0.5))
    assert len(list(steps(run, state))) == 4


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(FdpError, match="expected the axes of a mesh"):
        prepare(config())


def test_parameters_that_stop_being_finite_end_the_run_at_that_step() -> None:
    explodes = optimizers.sgd(optimizers.piecewise(1.0, factors={2: 1e38}))
    stream = steps(*prepare(config(optimizer=explodes, noise_multiplier=1000.0)))
    assert [next(stream)[1].step for _ in range(2)] == [1, 2]
    with pytest.raises(FdpError, match="step 3: w became NaN or infinite"):
        next(stream)


@pytest.mark.parametrize(
    ("changes", "in_place"),
    [({}, False), ({"compile": Compile.BLOCK}, True), ({"offload": Offload(True, True, True)}, True)],
)
def test_a_run_says_whether_its_steps_write_in_place(changes: dict[str, Any], in_place: bool) -> None:
    """Whoever is interrupted in the middle of such a step has no state to save: part of it may be written."""
    assert prepare(config(**changes))[0].in_place is in_place
