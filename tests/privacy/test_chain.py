"""The promise about parameters that several runs trained: which runs are part of it, and which are left out."""

from __future__ import annotations

import pytest

from fdp.privacy.chain import compose_chain
from fdp.privacy.guarantee import RELATION, Guarantee
from fdp.privacy.releases import EVALUATIONS, GRADIENTS, Release, composed_epsilon
from fdp.privacy.several_runs import compose

RELEASES = (Release(GRADIENTS, 0.02, 1.0, 40),)
LAST = Guarantee(
    composed_epsilon(RELEASES, delta=1e-6), 1e-6, RELATION, "one record", RELEASES, 40, "last", ("k-a", "k-b")
)
FIRST = LAST._replace(run="first")
NOT_PRIVATE = Guarantee(None, None, None, "one record", run="plain", data=("k-a",))


def test_a_run_that_starts_from_nothing_promises_what_it_promises_alone():
    chain = compose_chain((), LAST, extends=False)
    assert (chain.total, chain.earlier, chain.left_out) == (LAST, (), ())
    assert (chain.releases, chain.opaque) == (RELEASES, ())


@pytest.mark.parametrize(
    ("first", "extends", "assumed"),
    [
        (FIRST, False, False),
        (FIRST._replace(data=("k-b", "k-c")), False, False),
        (FIRST._replace(data=("k-z",)), True, False),  # --extend goes on with the same data, whatever its fingerprint
        (FIRST._replace(data=("other-z",)), True, False),  # the same, with a new key of the ledger
        (FIRST._replace(data=("other-z",)), False, True),  # fingerprints of different keys cannot be compared
        (FIRST._replace(data=("other-a", "other-b")), False, True),
        (FIRST._replace(data=()), False, True),
    ],
)
def test_an_earlier_run_is_part_of_the_total_unless_it_is_known_to_be_on_other_data(first, extends, assumed):
    chain = compose_chain((first,), LAST, extends=extends)
    assert (chain.total.epsilon, chain.total.delta) == compose([first, LAST])
    assert chain.total.epsilon == pytest.approx(composed_epsilon([*RELEASES, *RELEASES], delta=1e-6))
    assert (chain.total.epsilon or 0.0) > (LAST.epsilon or 0.0)
    assert (chain.total.steps, chain.total.releases) == (80, RELEASES * 2)
    assert (chain.earlier, chain.left_out, chain.assumed) == ((first,), (), assumed)


def test_all_links_of_a_chain_of_extensions_are_part_of_the_total():
    """The first run shares no fingerprint with the last, but with the run between them."""
    first, second = FIRST._replace(data=("k-y", "k-z")), FIRST._replace(run="second", data=("k-z",))
    chain = compose_chain((first, second), LAST, extends=True)
    assert chain.earlier == (first, second)
    assert (chain.total.epsilon, chain.total.delta) == compose([first, second, LAST])


@pytest.mark.parametrize("extends", [True, False])
def test_runs_that_were_recorded_under_different_keys_are_all_part_of_the_total(extends):
    """``--extend`` vouches for the last run before only; of the others nothing is known."""
    before = (FIRST._replace(data=("first-z",)), FIRST._replace(run="second", data=("second-z",)))
    chain = compose_chain(before, LAST, extends=extends)
    assert (chain.earlier, chain.left_out, chain.assumed) == (before, (), True)
    assert (chain.total.epsilon, chain.total.delta) == compose([*before, LAST])


def test_a_run_on_other_data_than_the_extended_run_is_left_out():
    """The first two runs have a key in common, and the second is on the data of the last."""
    first, second = FIRST._replace(data=("other-y",)), FIRST._replace(run="second", data=("other-z",))
    chain = compose_chain((first, second), LAST, extends=True)
    assert (chain.earlier, chain.left_out, chain.assumed) == ((second,), (first,), False)


@pytest.mark.parametrize("other", [{"data": ("k-z",)}, {"unit": "one user"}, {"relation": "replace one sample"}])
def test_other_data_another_unit_and_other_neighbours_are_left_out(other):
    chain = compose_chain((FIRST._replace(**other),), LAST, extends=False)
    assert (chain.total, chain.earlier) == (LAST, ())
    assert chain.left_out == (FIRST._replace(**other),)


def test_nothing_is_promised_if_the_same_data_was_trained_on_without_privacy():
    chain = compose_chain((NOT_PRIVATE,), LAST, extends=False)
    assert not chain.total.private
    assert chain.total.releases is None
    public = NOT_PRIVATE._replace(data=())  # such as a model that was trained on public data
    assert compose_chain((public,), LAST, extends=False).total == LAST
    assert not compose_chain((public,), LAST, extends=True).total.private


def test_a_run_of_which_only_the_pair_is_known_is_composed_by_it():
    chain = compose_chain((FIRST._replace(releases=None, epsilon=3.0),), LAST, extends=False)
    assert chain.total.releases is None
    assert chain.opaque == ((3.0, 1e-6),)
    assert (chain.total.epsilon or 0.0) > 3


def test_noised_evaluations_of_several_runs_are_part_of_the_total():
    noised = LAST._replace(evaluations=(Release(EVALUATIONS, 1.0, 5.0, 3),))
    chain = compose_chain((FIRST,), noised, extends=False)
    assert chain.releases == (*RELEASES, *RELEASES, *noised.evaluations)
    assert chain.total.epsilon == pytest.approx(composed_epsilon(chain.releases, delta=1e-6))
    assert compose_chain((), noised, extends=False).releases == RELEASES


def test_a_run_that_is_listed_twice_is_counted_once():
    assert compose_chain((FIRST, FIRST, LAST), LAST, extends=False).earlier == (FIRST,)
