"""Runs that compute something else draw something else, and what cannot be trained is refused before the first step."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fdp import model, optimizers
from fdp.data.windows import windows
from fdp.fast.compile_modes import Compile
from fdp.gradients.plan import Method
from fdp.parallel.offload import Offload
from fdp.privacy import clipping
from fdp.run.prepare_run import prepare
from fdp.types import FdpError, Tree
from tests.run.test_training_run import SIZE, WIDTH, Rows, config, mean_model, rows, squares

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
    long = windows(np.zeros(400, dtype=np.uint8), context=9, vocab_size=256, where="here")
    with pytest.raises(FdpError, match="at most the 8 tokens of mean's context, got 9"):
        prepare(config(model=short, dataset=long))


def test_noise_too_small_for_an_epsilon_is_refused():
    with pytest.raises(FdpError, match="expected enough noise for a finite epsilon, got 1e-09"):
        prepare(config(noise_multiplier=1e-9))


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(FdpError, match="expected the axes of a mesh"):
        prepare(config())


@pytest.mark.parametrize(
    ("changes", "in_place"),
    [({}, False), ({"compile": Compile.BLOCK}, True), ({"offload": Offload(True, True, True)}, True)],
)
def test_a_run_says_whether_its_steps_write_in_place(changes: dict[str, Any], in_place: bool) -> None:
    """Whoever is interrupted in the middle of such a step has no state to save: part of it may be written."""
    assert prepare(config(**changes))[0].in_place is in_place
