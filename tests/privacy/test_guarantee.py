"""The promise of a run, and its marker."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdp.privacy.guarantee import (
    MARKER,
    RELATION,
    Guarantee,
    default_delta,
    delta_advice,
    guarantee_from_json,
    guarantee_to_json,
    marker_text,
    promise_about,
    read_marker,
)
from fdp.privacy.releases import Release, composed_epsilon
from fdp.privacy.several_runs import compose
from fdp.types import FdpError

ONE = Guarantee(3.0, 1e-6, RELATION, "one user")
OPEN = Guarantee(None, None, None, "one user")


def test_delta_advice():
    assert delta_advice(1000, 1e-4) is None
    assert "publishing one sample" in str(delta_advice(1000, 1e-3))


@given(population=st.integers(1, 10**10))
def test_the_default_delta_is_at_most_a_hundredth_of_one_over_the_population(population):
    delta = default_delta(population)
    assert population * delta <= 0.01 * (1 + 1e-12)
    assert delta >= min(1e-6, 0.01 / population) / 2
    assert len(f"{delta:.15g}".split("e")[0].rstrip("0").rstrip(".")) == 1 or delta >= 1e-4
    assert delta_advice(population, delta) is None


def test_the_default_delta_in_numbers():
    found = [default_delta(size) for size in (1, 100, 10_000, 11_000, 20_000, 10**9)]
    assert found == [1e-6, 1e-6, 1e-6, 9e-7, 5e-7, 1e-11]


EVALUATED = Guarantee(
    composed_epsilon((Release("steps", 0.05, 3.0, 20),), delta=1e-6),
    1e-6,
    RELATION,
    "one user",
    (Release("steps", 0.05, 3.0, 20),),
    20,
    "a",
    ("k-trained",),
    evaluations=(Release("evaluations", 1.0, 1.0, 3),),
    evaluated=("k-held",),
)


def test_evaluations_of_other_data_are_charged_to_that_data():
    assert promise_about(EVALUATED, ["k-other"]) is None
    trained, held_out = promise_about(EVALUATED, ["k-trained"]), promise_about(EVALUATED, ["k-held"])
    assert trained is not None
    assert held_out is not None
    assert compose([trained]) == (pytest.approx(EVALUATED.epsilon), 1e-6)
    assert compose([held_out]) == (pytest.approx(composed_epsilon(EVALUATED.evaluations, delta=1e-6)), 1e-6)
    assert held_out.data == ("k-held",)
    within = EVALUATED._replace(evaluated=())
    assert promise_about(within, ["k-trained"]) == within, "held out of the data itself"
    not_private = EVALUATED._replace(epsilon=None, delta=None, relation=None, releases=None)
    assert promise_about(not_private, ["k-held"]) == held_out
    assert promise_about(not_private, ["k-trained"]) == not_private._replace(evaluations=(), evaluated=())


def test_data_that_chose_without_noise_what_was_exported_is_promised_nothing():
    chose = EVALUATED._replace(evaluations=(), held_out_choice=True)
    held_out, trained = promise_about(chose, ["k-held"]), promise_about(chose, ["k-trained"])
    assert held_out is not None
    assert trained is not None
    assert (held_out.private, held_out.data, held_out.releases) == (False, ("k-held",), None)
    assert (trained.epsilon, trained.held_out_choice) == (EVALUATED.epsilon, None), "its people chose nothing"
    within = chose._replace(evaluated=())
    assert promise_about(within, ["k-trained"]) == within
    assert guarantee_from_json(json.loads(json.dumps(guarantee_to_json(chose)))) == chose


def test_data_that_is_trained_on_and_evaluated_on_pays_for_both():
    both = EVALUATED._replace(evaluated=("k-held", "k-trained"))
    assert promise_about(both, ["k-trained"]) == both
    total = composed_epsilon([*(both.releases or ()), *both.evaluations], delta=1e-6)
    assert compose([both]) == (pytest.approx(total), 1e-6)


def test_a_promise_of_an_older_fdp_has_no_evaluation_data():
    values = guarantee_to_json(EVALUATED)
    assert guarantee_from_json(json.loads(json.dumps(values))) == EVALUATED
    older = {name: value for name, value in values.items() if name not in ("evaluated", "noise")}
    assert guarantee_from_json(older) == EVALUATED._replace(evaluated=())


def test_a_marker_is_read_as_it_was_written_and_holds_nothing_else(tmp_path):
    assert read_marker(tmp_path) == ()
    (tmp_path / MARKER).write_text(marker_text([ONE, OPEN]))
    assert read_marker(tmp_path) == (ONE, OPEN)
    for run in json.loads((tmp_path / MARKER).read_text())["runs"]:
        assert set(run) == set(Guarantee._fields)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"runs": [{"epsilon": 1}]}', '{"runs": 3}', "{"])
def test_an_invalid_marker_is_refused(tmp_path, text):
    (tmp_path / MARKER).write_text(text)
    with pytest.raises(FdpError, match=r"fdp_privacy.json: expected the promises that fdp wrote"):
        read_marker(tmp_path)
