"""The promise of a run, and the sum of several promises."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdp.data.units import UnitKind, beside_public, privacy_unit
from fdp.privacy.guarantee import (
    MARKER,
    RELATION,
    WHOLE_UNITS,
    Guarantee,
    choices_sentence,
    compose,
    count_choices,
    default_delta,
    delta_advice,
    guarantee_from_json,
    guarantee_to_json,
    held_out_epsilon,
    marker_text,
    promise_about,
    read_marker,
    releases_the_same,
    same_unit,
    training_again,
    unit_kind,
)
from fdp.privacy.releases import Release, composed_epsilon
from fdp.types import FdpError

ONE = Guarantee(3.0, 1e-6, RELATION, "one user")
OTHER = Guarantee(1.2341, 2e-6, RELATION, "one user")
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


def test_guarantees_add_up():
    assert compose([ONE, OTHER]) == (pytest.approx(4.2341), pytest.approx(3e-6))
    assert compose([ONE, OPEN]) is None
    assert compose([ONE._replace(delta=0.7)] * 2) == (6.0, 1.0)


def test_noised_evaluations_count_as_soon_as_there_is_another_run():
    """Whoever is held out in one run may be trained on in another."""
    releases = (Release("steps", 0.05, 1.0, 20),)
    one = Guarantee(composed_epsilon(releases, delta=1e-6), 1e-6, RELATION, "one user", releases, 20, "a")
    evaluated = one._replace(run="b", evaluations=(Release("evaluations", 1.0, 8.0, 3),))
    assert compose([evaluated]) == (pytest.approx(one.epsilon), 1e-6)
    both = composed_epsilon([*releases, *releases, *evaluated.evaluations], delta=1e-6)
    assert compose([one, evaluated]) == (pytest.approx(both), 1e-6)
    assert guarantee_from_json(json.loads(json.dumps(guarantee_to_json(evaluated)))) == evaluated


@pytest.mark.parametrize("known", [True, False])
def test_the_total_of_one_run_covers_whoever_was_held_out(known):
    """Held-out people are others than those trained on: the total is the larger epsilon, not the sum."""
    releases, evaluations = (Release("steps", 0.05, 3.0, 20),), (Release("evaluations", 1.0, 1.0, 3),)
    trained = composed_epsilon(releases, delta=1e-6)
    held_out = composed_epsilon(evaluations, delta=1e-6)
    run = Guarantee(trained, 1e-6, RELATION, "one user", releases if known else None, 20, "a", evaluations=evaluations)
    assert trained < 1 < held_out
    assert compose([run, run]) == (pytest.approx(held_out), 1e-6)
    assert held_out_epsilon(run) == pytest.approx(held_out)
    assert held_out_epsilon(run._replace(evaluations=())) is None


def test_evaluations_of_runs_of_which_only_the_promise_is_known_count_beside_other_runs():
    evaluations = (Release("evaluations", 1.0, 0.5, 3),)
    total = compose([ONE, OTHER._replace(evaluations=evaluations)])
    assert total is not None
    assert total[0] >= composed_epsilon(evaluations, delta=total[1])


def test_noised_evaluations_count_beside_a_run_of_which_only_the_promise_is_known():
    """Trained on in one run and held out in the other: the evaluations alone cost more than both promises."""
    releases = (Release("steps", 0.05, 1.0, 20),)
    evaluations = (Release("evaluations", 1.0, 0.5, 3),)
    one = Guarantee(composed_epsilon(releases, delta=1e-6), 1e-6, RELATION, "one user", releases, 20, "a")
    total = compose([ONE, one._replace(evaluations=evaluations)])
    assert total is not None
    assert total[0] >= composed_epsilon(evaluations, delta=total[1]) > (ONE.epsilon or 0) + (one.epsilon or 0)


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


def test_a_model_that_held_out_samples_chose_says_so_when_it_is_trained_again():
    later = OTHER._replace(run="later")
    for chose, runs in ((True, "1 earlier run exported"), (False, None), (None, None)):
        said = training_again([ONE._replace(run="a", held_out_choice=chose)], later)
        assert said is not None
        assert ("for samples held out then, no epsilon holds" in said) == (runs is not None)
        assert runs is None or runs in said
    chosen = ONE._replace(held_out_choice=True)
    assert count_choices([chosen._replace(run="a"), chosen._replace(run="a"), chosen._replace(run="b"), later]) == 2
    assert "2 earlier runs exported" in choices_sentence(2)


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


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("one user (up to 2 windows of 17 bytes)", "one user (up to 3 windows of 25 bytes)", True),
        ("one user (up to 2 windows of 17 bytes)", "one user (up to 2 windows of 17 bytes) of the private data", True),
        ("one user, named by patient (up to 2 windows)", "one user, named by patient (up to 3 windows)", True),
        ("one user, named by patient (up to 2 windows)", "one user, named by doctor (up to 2 windows)", False),
        ("one user, a folder of texts (up to 2 windows)", "one user, a folder of texts (up to 9 windows)", True),
        ("one user, a folder of texts (up to 2 windows)", "one user, named by patient (up to 2 windows)", False),
        ("one record (its first 17 bytes)", "one record (its first 3 windows of 25 bytes)", True),
        ("one file (its first 17 bytes)", "one file (its first 25 tokens)", True),
        ("one user (up to 2 windows of 17 bytes)", "one record (its first 17 bytes)", False),
        ("one file (its first 17 bytes)", "one record (its first 17 bytes)", False),
        ("one window of 17 bytes", "one window of 25 bytes", False),
        ("one window of 17 bytes", "one window of 17 bytes", True),
        ("one window of 17 bytes", "one window of 17 bytes of the private data", True),
        (
            "one packed row of anyone's records (up to 17 bytes)",
            "one packed row of anyone's records (up to 9 bytes)",
            False,
        ),
        ("one labelled image", "one labelled image", True),
    ],
)
def test_a_unit_that_is_protected_as_a_whole_is_the_same_however_much_of_it_is_used(one, other, same):
    assert same_unit(ONE._replace(unit=one), ONE._replace(unit=other)) == same
    assert ("The units differ" in str(training_again([ONE._replace(unit=one)], OTHER._replace(unit=other)))) == (
        not same
    )


def test_the_kinds_of_units_are_those_of_the_data():
    for kind in UnitKind:
        told = privacy_unit(kind, tokens=17)
        assert unit_kind(beside_public(told).one) == unit_kind(told.one)
    wholes = {unit_kind(privacy_unit(kind, tokens=17).one) for kind in (UnitKind.USER, UnitKind.RECORD, UnitKind.FILE)}
    assert wholes == set(WHOLE_UNITS)


def test_an_attempt_is_the_same_run_if_data_releases_and_noise_are_the_same():
    releases = (Release("steps", 0.05, 1.0, 20),)
    one = Guarantee(1.0, 1e-6, RELATION, "one user", releases, 20, "a", ("k-a",), noise="k-n")
    assert releases_the_same(one, one._replace(run="b", date="later", fdp="2", epsilon=1.0 + 1e-12))
    assert releases_the_same(one._replace(noise=None), one), "an older fdp did not record the noise"
    assert releases_the_same(one, one._replace(held_out_choice=True)), "nor a choice by held-out samples"
    assert not releases_the_same(one._replace(held_out_choice=False), one._replace(held_out_choice=True))
    changes = {"data": ("k-b",), "releases": releases * 2, "steps": 21, "noise": "k-m", "evaluations": releases}
    for field, value in changes.items():
        assert not releases_the_same(one, one._replace(**{field: value}))


def test_promises_about_different_neighbours_are_not_added_up():
    with pytest.raises(FdpError, match="expected one neighbour relation"):
        compose([ONE, OTHER._replace(relation="replace one sample")])


def test_training_again_is_a_warning_with_the_numbers():
    assert training_again([], ONE) is None
    said = str(training_again([ONE], OTHER))
    assert "trained privately before, with epsilon 3.000 at delta 1e-06" in said
    assert "at most epsilon 4.235 at delta 3e-06, not the 1.235 of this run alone" in said
    assert "units differ" not in said
    assert "at most epsilon 7.235" in str(training_again([ONE, ONE], OTHER))
    assert "The units differ (one user; one record)" in str(training_again([ONE], OTHER._replace(unit="one record")))
    assert "this run is not private" in str(training_again([ONE], OPEN))
    assert "before without privacy: nothing is promised" in str(training_again([ONE, OPEN], OTHER))


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
