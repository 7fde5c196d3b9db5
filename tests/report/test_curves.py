"""Curves: read from records, smoothed, thinned without losing a spike."""

from __future__ import annotations

import numpy as np

from fdp.report.curves import Curve, average, curve, held_out, sample_at, smooth, thin
from tests.report.run_folders import make_records


def test_smoothing_keeps_the_length_and_skips_missing_values() -> None:
    values = np.array([1.0, np.nan, 3.0, 5.0])
    assert smooth(values).tolist() == [1.0, 2.0, 4.0, 4.0]
    assert len(smooth(np.arange(100.0))) == 100


def test_a_curve_has_nan_where_a_record_has_none() -> None:
    records = make_records(3)
    records[1] = records[1]._replace(loss=None, norm_q50=float("inf"))
    assert np.isnan(curve(records, "loss").values).tolist() == [False, True, False]
    assert np.isnan(curve(records, "norm_q50").values).tolist() == [False, True, False]
    assert curve(records, "loss").as_json()["value"][1] is None


def test_held_out_losses_are_those_of_the_steps_that_have_one() -> None:
    records = make_records(10, evaluate_every=5)
    assert held_out(records, "loss").steps.tolist() == [5, 10]
    assert len(held_out(records, "accuracy").steps) == 0


def test_thinning_keeps_the_ends_every_spike_and_every_gap() -> None:
    values = np.sin(np.arange(10_000.0))
    values[1234], values[7000:7400] = 99.0, np.nan
    short = thin(Curve(np.arange(10_000.0), values), limit=200)
    assert len(short.steps) <= 200
    assert (short.steps[0], short.steps[-1]) == (0, 9999)
    assert 99.0 in short.values
    assert np.isnan(short.values).any()
    assert (np.diff(short.steps) > 0).all()
    few = Curve(np.arange(5.0), np.ones(5))
    assert thin(few, limit=5) is few
    assert thin(Curve(np.arange(500.0), np.full(500, np.nan)), limit=20).steps[-1] == 499


def test_averages_do_not_follow_one_step_of_a_jumping_curve() -> None:
    jumping = Curve(np.arange(1000.0), np.tile([0.0, 2.0], 500))
    jumping.values[200:220] = np.nan
    few = average(jumping, limit=50)
    assert len(few.steps) == 50
    assert np.isnan(few.values).sum() == 1
    assert np.nanmax(np.abs(few.values - 1.0)) < 0.1


def test_sampling_is_even_and_keeps_the_ends() -> None:
    long = Curve(np.arange(1000.0), np.arange(1000.0))
    assert sample_at(long, limit=4).steps.tolist() == [0, 333, 666, 999]
    assert len(sample_at(Curve(np.array([]), np.array([])), limit=4).steps) == 0
