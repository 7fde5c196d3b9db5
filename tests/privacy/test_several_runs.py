"""The sum of several promises, and the warning before training again."""

from __future__ import annotations

import json

import pytest

from fdp.data.units import UnitKind, beside_public, privacy_unit
from fdp.privacy.guarantee import RELATION, Guarantee, guarantee_from_json, guarantee_to_json, held_out_epsilon
from fdp.privacy.releases import Release, composed_epsilon
from fdp.privacy.several_runs import (
    WHOLE_UNITS,
    choices_sentence,
    compose,
    count_choices,
    releases_the_same,
    same_unit,
    training_again,
    unit_kind,
)
from fdp.types import FdpError

ONE = Guarantee(3.0, 1e-6, RELATION, "one user")
OTHER = Guarantee(1.2341, 2e-6, RELATION, "one user")
OPEN = Guarantee(None, None, None, "one user")


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
