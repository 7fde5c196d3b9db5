"""The first figure of a statement and a report: that of the model, with earlier runs and the search that chose it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fdp.privacy.guarantee import MARKER, Guarantee, marker_text
from fdp.privacy.releases import composed_epsilon
from fdp.privacy.shown_numbers import shown_epsilon
from fdp.report.contents import Contents, read_contents
from fdp.report.page import make_page
from fdp.report.promise import statement_words
from fdp.report.run_facts import read_facts
from fdp.report.statement import make_statement
from fdp.run.run_folder import read_run_folder
from tests.conftest import coarse_groups
from tests.report.run_folders import make_records
from tests.report.run_folders import write_run as write_recorded_run
from tests.report.test_statement import EPSILON, PROMISE, RELEASES, UNIT, text_of, write_run

FIRST, SECOND = PROMISE._replace(run="first"), PROMISE._replace(run="second")
TOTAL = composed_epsilon([*RELEASES] * 3, delta=1e-6)
SEARCH_EPSILON = 4.5671


@pytest.fixture(scope="module", autouse=True)
def _coarse_groups() -> Iterator[None]:
    with coarse_groups():
        yield


def json_of(folder: Path, **options: Any) -> dict[str, Any]:
    return make_statement(read_facts(read_run_folder(folder)), **options).facts


def write_search(folder: Path, *, epsilon: float | None = SEARCH_EPSILON, **settings: Any) -> tuple[Path, Path]:
    """Write a search of two runs, the first of which is chosen."""
    chosen = write_run(folder / "trial-1", summary={}, **settings)
    other = write_run(folder / "trial-2", promises=(PROMISE._replace(run="run2"),), summary={}, **settings)
    trials = [{"folder": f"elsewhere/{each.name}", "score": 0.98765} for each in (chosen, other)]
    found = {"epsilon": epsilon, "delta": 1e-6, "trials_mean": 8.0, "trials": trials, "best": trials[0]}
    (folder / "search.json").write_text(json.dumps(found))
    return chosen, other


def test_an_extended_run_states_the_epsilon_of_the_chain_first_and_everywhere(tmp_path):
    """Mutation: with the epsilon of this run in any of these places, the model would be promised too much."""
    run = write_run(tmp_path / "run", promises=(FIRST, SECOND, PROMISE), summary={})
    text, shown = text_of(run, records_per_person=4), shown_epsilon(TOTAL)
    assert f"Training the model was (epsilon, delta)-differentially private with epsilon = {shown} and" in text
    assert "composition of this run and of 2 earlier runs whose parameters it started from, on the same data." in text
    assert f"({shown}, 1e-06)-differential privacy for the unit and adjacency above, at all 120 planned steps" in text
    assert f"epsilon {shown}, delta 1e-06. Yes: one over the public number of samples" in text
    assert text.count(shown_epsilon(EPSILON)) == 1, "this run alone, in second place"
    assert f"The steps of this run alone have epsilon {shown_epsilon(EPSILON)} at delta 1e-06." in text
    assert text.count("sums of clipped gradients 0.0213333 1 40") == 3, "the accounting lists all of them"
    facts, alone = json_of(run, records_per_person=4), json_of(write_run(tmp_path / "alone", summary={}))
    assert facts["guarantee"]["epsilon"] == pytest.approx(TOTAL)
    assert facts["this_run"]["epsilon"] == EPSILON
    assert facts["epsilon_at_delta"]["1e-06"] == pytest.approx(TOTAL, rel=1e-3)
    for name in ("delta_at_epsilon", "group_epsilon"):
        for key, value in alone[name].items():
            assert facts[name][key] is None or facts[name][key] >= value
    assert facts["delta_at_epsilon"]["2"] > 10 * alone["delta_at_epsilon"]["2"]
    assert facts["false_negatives_at_false_positives"]["0.1"] < alone["false_negatives_at_false_positives"]["0.1"]
    assert facts["mu_bound"] > alone["mu_bound"]
    assert facts["group_epsilon"]["2"] > 1.3 * alone["group_epsilon"]["2"]
    assert facts["person_epsilon"] == facts["group_epsilon"]["4"]


def test_what_a_stop_would_have_saved_is_said_of_this_run_alone(tmp_path):
    stopped = {"steps": 12, "epsilon_if_stop_was_decided_in_advance": 0.4321}
    text = text_of(write_run(tmp_path / "run", promises=(FIRST, PROMISE), summary=stopped))
    assert "If the number of steps was decided before the run, epsilon of this run alone is 0.433" in text


@pytest.mark.parametrize("other", [{"data": ("k-other",)}, {"unit": "one user (up to 8 windows of 128 bytes)"}])
def test_a_run_from_other_data_or_another_unit_speaks_of_its_own_steps_only(tmp_path, other):
    text = text_of(write_run(tmp_path / "run", promises=(FIRST._replace(**other), PROMISE), summary={}))
    assert f"The steps of this run were (epsilon, delta)-differentially private with epsilon = {EPSILON:.3f}" in text
    assert "Training the model was" not in text
    assert "The figure is for the steps of this run only. The first parameters came from 1 earlier run on other" in text
    assert "at all 40 planned steps of this run, not of the earlier runs that it started from." in text
    partly = (FIRST._replace(**other), SECOND, PROMISE)
    text = text_of(write_run(tmp_path / "partly", promises=partly, summary={}))
    assert "The figure is for the steps of this run and of 1 earlier run on the same data only." in text
    assert "The first parameters came from 1 more earlier run on other" in text


def test_runs_before_with_another_unit_are_not_composed(tmp_path):
    users = FIRST._replace(unit="one user (up to 8 windows of 128 bytes)")
    text = text_of(write_run(tmp_path / "run", promises=(users, PROMISE), summary={}))
    assert "came from 1 earlier private run, of which 1 protects another unit: their epsilons do not add up" in text
    assert "All of them and this run together" not in text
    assert (
        json_of(write_run(tmp_path / "again", promises=(users, PROMISE), summary={}))["other_runs"]["with_runs_before"]
        is None
    )


def test_data_that_is_not_on_record_is_assumed_to_be_the_same(tmp_path):
    unknown = FIRST._replace(data=())
    text = text_of(write_run(tmp_path / "run", promises=(unknown, PROMISE), summary={}))
    assert "on the same data (this is assumed: it is not on record for all of them)" in text
    text = text_of(write_run(tmp_path / "b", promises=(unknown, PROMISE), summary={}, extend="runs/a"))
    assert "this is assumed" not in text


def test_a_model_from_the_same_data_without_privacy_has_no_epsilon(tmp_path):
    before = Guarantee(None, None, None, UNIT, run="plain", data=("k-a",))
    run = write_run(tmp_path / "run", promises=(before, PROMISE), summary={})
    text = text_of(run, records_per_person=4)
    assert "No epsilon can be stated for the model: its first parameters were trained on the same data without" in text
    assert "Training the model was" not in text
    assert "Formal statement. What exactly is guaranteed, with epsilon and delta? -- None for the model" in text
    assert text.count("These are the figures of the steps of this run alone") == 2, "curve, and groups"
    facts = json_of(run, records_per_person=4)
    assert (facts["private"], facts["guarantee"]["epsilon"], facts["person_epsilon"]) == (False, None, None)


def contents_of(folder: Path, promises: tuple[Guarantee, ...]) -> Contents:
    run = write_recorded_run(folder, make_records(5))
    (run / MARKER).write_text(marker_text(promises))
    found = read_run_folder(run)
    return read_contents(found, settings=(), statement=statement_words(found))


def test_the_page_of_an_extended_run_shows_the_epsilon_of_the_model(tmp_path):
    alone = contents_of(tmp_path / "alone", (PROMISE,))
    chained = contents_of(tmp_path / "chained", (FIRST, SECOND, PROMISE))
    assert alone.results["epsilon_total"] is None
    assert chained.results["epsilon_total"] == pytest.approx(TOTAL)
    page = make_page([chained])
    assert "Epsilon of the model" in page
    assert f'<div class="value">{shown_epsilon(TOTAL)}</div>' in page
    assert "with 2 earlier runs whose parameters it started from; this run alone: 8.000 of 8.000" in page
    assert f"private with epsilon = {shown_epsilon(TOTAL)} and" in page
    assert "Epsilon of the model" not in make_page([alone])
    both = make_page([alone, chained])
    assert "epsilon of the model, with earlier runs" in both
    assert f'<td class="number">{shown_epsilon(TOTAL)}</td>' in both
    assert "each run alone" in both


def test_the_page_of_a_model_without_an_epsilon_says_none(tmp_path):
    before = Guarantee(None, None, None, UNIT, run="plain", data=("k-a",))
    page = make_page([contents_of(tmp_path / "run", (before, PROMISE))])
    assert '<div class="value">none</div>' in page
    assert "its first parameters were trained on the same data without privacy; this run alone" in page


def test_the_chosen_run_of_a_search_states_the_epsilon_of_the_search_everywhere(tmp_path):
    chosen, _ = write_search(tmp_path / "search")
    text = text_of(chosen)
    assert "Training the model was (epsilon, delta)-differentially private with epsilon = 4.568 and delta" in text
    assert "(4.568, 1e-06)-differential privacy for the unit and adjacency above" in text
    assert "epsilon 4.568, delta 1e-06. Yes: one over the public number of samples" in text
    assert text.count(shown_epsilon(EPSILON)) == 1, "one run alone, in second place"
    facts = json_of(chosen)
    assert facts["guarantee"]["epsilon"] == SEARCH_EPSILON
    assert facts["epsilon_at_delta"]["1e-06"] == pytest.approx(SEARCH_EPSILON, rel=1e-3)
    assert facts["epsilon_at_delta"]["1e-07"] is None, "nothing is known of smaller deltas"
    assert facts["false_negatives_at_false_positives"]["0.001"] == pytest.approx(0.904, abs=0.01)
    assert (facts["mu_bound"], facts["mu_central_limit"]) == (None, None)


def test_a_run_that_the_search_did_not_choose_says_so(tmp_path):
    """Mutation: a run that is merely listed in search.json would be called the chosen one."""
    _, other = write_search(tmp_path / "search")
    text = text_of(other)
    assert "Chosen by fdp search" not in text
    assert "4.568" not in text
    assert "One of the runs of fdp search" in text
    assert "not the run that was chosen. The stated epsilon is that of its own steps." in text
    assert "sees more than the guarantee of the search covers" in text
    assert f"private with epsilon = {shown_epsilon(EPSILON)} and" in text


def test_the_statement_does_not_tell_how_many_runs_a_search_made(tmp_path):
    chosen, other = write_search(tmp_path / "search")
    ledger = [PROMISE._replace(run="run2"), PROMISE._replace(run="before the search")]
    for run in (chosen, other):
        facts = json_of(run, others=[*ledger, PROMISE])
        assert facts["other_runs"]["other_runs_on_this_data"] == 1, "that of another day"
        text = text_of(run, others=[*ledger, PROMISE])
        assert "names 1 other private run on the same data" in text
        assert "the number of its runs is not covered, and is not stated" in text
    total = json_of(chosen, others=ledger)["other_runs"]["on_this_data"]["epsilon"]
    assert total > SEARCH_EPSILON, "the price of the search, with the other run"
    assert text_of(chosen).startswith('Privacy statement for the run that the search "search" chose '), "not its number"


def test_a_choice_that_nothing_covers_leaves_no_epsilon(tmp_path):
    chosen, other = write_search(tmp_path / "search", epsilon=None)
    assert "No epsilon can be stated for the model: it was chosen among several runs by data" in text_of(chosen)
    assert json_of(chosen)["guarantee"]["epsilon"] is None
    assert f"private with epsilon = {shown_epsilon(EPSILON)} and" in text_of(other)
    result = tmp_path / "search" / "search.json"
    result.write_text(json.dumps(json.loads(result.read_text()) | {"exit_code": None}))
    assert "No epsilon can be stated for the model: it may have been chosen among the runs" in text_of(other)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"keep_best": True}, "which step is exported."),
        ({"patience": 3}, "when training stops."),
        ({"keep_best": True, "patience": 3}, "which step is exported and when training stops."),
    ],
)
@pytest.mark.parametrize("source", [{"eval_fraction": 0.1}, {"eval_data": "secret/others.jsonl"}])
def test_a_step_that_held_out_people_chose_without_noise_is_said_not_to_be_covered(tmp_path, settings, source, words):
    run = write_run(tmp_path / "run", summary={}, **settings, **source)
    text, words = text_of(run), f"held out for evaluation: their loss, without noise, decided {words}"
    assert text.count(words) == 2, "beside the guarantee, and under what is not covered"
    assert text.count("no epsilon covers them") == 2
    assert "others.jsonl" not in text
    assert any(words in each for each in json_of(run)["not_covered"])
    assert f"Not covered: the people who were {words}" in statement_words(read_run_folder(run)), "so does the report"


@pytest.mark.parametrize(
    "settings",
    [
        {"eval_fraction": 0.1},
        {"eval_fraction": 0.1, "keep_best": True, "eval_epsilon": 1.0},
        {"eval_data": "open.txt", "patience": 3, "eval_public": True},
        {"keep_best": False, "patience": None},
    ],
)
def test_a_choice_by_nobody_by_public_data_or_by_noised_numbers_is_not_called_uncovered(tmp_path, settings):
    assert "no epsilon covers them" not in text_of(write_run(tmp_path / "run", summary={}, **settings))


def test_a_search_by_held_out_people_says_that_they_are_not_covered(tmp_path):
    chosen, other = write_search(tmp_path / "search", eval_fraction=0.1)
    assert "their loss, without noise, decided which run of the search is chosen." in text_of(chosen)
    assert "no epsilon covers them" not in text_of(other)
