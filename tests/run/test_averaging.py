"""The average of the parameters: its weights, from the first step on."""

from __future__ import annotations

import pytest
import torch

from fdp.run.averaging import average_weight, check_decay, replace_leaves, start_average, update_average
from fdp.types import FdpError

STEPS = [torch.tensor([float(2**t), -1.0]) for t in range(1, 7)]


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999])
def test_the_average_weighs_every_step_by_a_power_of_the_decay(decay: float) -> None:
    average = start_average({"w": torch.zeros(2)}, {"w"})
    for t, leaf in enumerate(STEPS, start=1):
        average = update_average(average, {"w": leaf}, decay=decay, step=t)
        weights = torch.tensor([decay ** (t - s) for s in range(1, t + 1)], dtype=torch.float64)
        expected = (weights[:, None] * torch.stack(STEPS[:t]).double()).sum(0) / weights.sum()
        assert torch.allclose(average["w"].double(), expected, rtol=1e-6)


def test_after_one_step_it_is_the_parameters_and_a_leaf_that_never_changes_stays() -> None:
    leaf = torch.randn(5)
    average = update_average(start_average({"w": torch.zeros(5)}, {"w"}), {"w": leaf}, decay=0.99, step=1)
    assert torch.equal(average["w"], leaf)
    for t in range(2, 9):
        average = update_average(average, {"w": leaf}, decay=0.99, step=t)
        assert torch.equal(average["w"], leaf)


def test_it_is_a_copy_of_the_trained_leaves_alone() -> None:
    params = {"w": torch.ones(2), "frozen": torch.ones(3)}
    average = start_average(params, {"w"})
    assert set(average) == {"w"}
    average = update_average(average, params, decay=0.9, step=1)
    params["w"].zero_()  # as a step that writes in place does
    assert average["w"].tolist() == [1.0, 1.0]
    assert replace_leaves(params, average)["w"] is average["w"]
    assert replace_leaves(params, average)["frozen"] is params["frozen"]


def test_a_decay_or_step_out_of_range_is_refused() -> None:
    for decay in (-0.1, 1.0, float("nan")):
        with pytest.raises(FdpError, match="--ema: expected a decay of at least 0 and below 1"):
            check_decay(decay)
    with pytest.raises(FdpError, match="from 1 on, got 0"):
        average_weight(0.9, 0)
