"""``fdp ledger`` marks the runs of a search, and states no total below the one of the model that was chosen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fdp.cli import search_runs
from fdp.cli.ledger_totals import find_searches, total_in_words, total_of
from fdp.cli.search_promise import Price
from fdp.ledger.book import Entry
from fdp.privacy.guarantee import MARKER, RELATION, Guarantee, marker_text
from fdp.privacy.releases import GRADIENTS, Release, composed_epsilon
from fdp.privacy.several_runs import compose
from fdp.privacy.shown_numbers import shown_epsilon
from tests.cli.test_search import PUBLIC, SMALL, draw_three, interrupt_while
from tests.cli.train_runs import call, last_json, train
from tests.conftest import coarse_groups

DELTA = 1e-6


@pytest.fixture(scope="module", autouse=True)
def _coarse_groups() -> Iterator[None]:
    with coarse_groups():
        yield


def promise(name: str) -> Guarantee:
    releases = (Release(GRADIENTS, 0.05, 1.0, 50),)
    epsilon = composed_epsilon(releases, delta=DELTA)
    return Guarantee(epsilon, DELTA, RELATION, "one record", releases, 50, name, ("k-samples",))


def write_search(folder: Path, *, epsilon: float | None, runs: int = 2, code: int | None = 0) -> list[Entry]:
    """Write a search of some runs, of which the first was chosen, and return its entries of the ledger."""
    trials = [folder / f"trial-{number}" for number in range(1, runs + 1)]
    promises = [promise(f"{folder.name}{number}") for number in range(1, runs + 1)]
    for trial, one in zip(trials, promises):
        trial.mkdir(parents=True)
        (trial / MARKER).write_text(marker_text([one]))
    found: dict[str, Any] = {"epsilon": epsilon, "delta": DELTA, "trials_mean": 2.0, "exit_code": code}
    found |= {"trials": [{"folder": str(trial)} for trial in trials], "best": {"folder": str(trials[0])}}
    (folder / "search.json").write_text(json.dumps(found))
    return [Entry(one, str(trial), 50, "finished", folder.name) for trial, one in zip(trials, promises)]


ALONE = Entry(promise("alone"), "elsewhere", 50, "finished")


def total_and_words(entries: list[Entry]) -> tuple[dict[str, Any], str]:
    total = total_of(entries, find_searches(entries))
    return total, total_in_words(total)


def priced(epsilon: float) -> Guarantee:
    return promise("priced")._replace(epsilon=epsilon, releases=None)


def test_a_search_counts_at_its_price_if_that_is_more_than_the_noise_of_its_runs(tmp_path: Path) -> None:
    """Mutation: with every run by its own noise, the total would be lower than that of the chosen model."""
    entries = [ALONE, *write_search(tmp_path / "sweep", epsilon=8.0)]
    total, said = total_and_words(entries)
    assert (total["epsilon"], total["delta"]) == compose([ALONE.promise, priced(8.0)])
    assert total["epsilon_of_every_run"] < total["epsilon"]
    assert f"3 runs, together epsilon {shown_epsilon(total['epsilon'])} at delta 2e-06" in said
    assert '2 runs of the search "sweep" counted at the price of the search, epsilon 8.000 at delta 1e-06' in said
    assert shown_epsilon(total["epsilon_of_every_run"]) not in said, "nobody can quote the lower figure"


def test_every_run_of_a_search_counts_if_that_is_more_than_its_price(tmp_path: Path) -> None:
    total, said = total_and_words([ALONE, *write_search(tmp_path / "sweep", epsilon=1.0, runs=9)])
    of_model = compose([ALONE.promise, priced(1.0)])
    assert of_model is not None
    assert of_model == (total["epsilon_with_chosen_models"], total["delta_with_chosen_models"])
    assert total["epsilon"] == total["epsilon_of_every_run"] > of_model[0]
    assert f"10 runs, together epsilon {shown_epsilon(total['epsilon'])} at delta 1e-06" in said
    assert f"only the model that it chose: epsilon {shown_epsilon(of_model[0])} at delta 2e-06" in said


def test_with_two_searches_the_total_is_at_least_that_of_the_statement_of_either(tmp_path: Path) -> None:
    """A statement has its own search at the price, and every run of the other by its own noise."""
    dear = write_search(tmp_path / "dear", epsilon=8.0, runs=1)
    cheap = write_search(tmp_path / "cheap", epsilon=0.1, runs=9)
    total, said = total_and_words([*dear, *cheap])
    stated = compose([priced(8.0), *(entry.promise for entry in cheap)])
    assert stated is not None
    assert total["epsilon"] == pytest.approx(stated[0])
    assert total["epsilon"] > max(total["epsilon_of_every_run"], total["epsilon_with_chosen_models"])
    assert '1 run of the search "dear" and 9 runs of the search "cheap"' in said


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"code": 130}, 'the search "sweep" has not ended, or was interrupted'),
        ({"code": None}, 'the search "sweep" has not ended, or was interrupted'),
        ({}, 'the choice of the search "sweep" used data and is covered by nothing'),
        (None, 'the folder of the search "sweep" is gone'),
    ],
    ids=["interrupted", "running", "not private", "removed"],
)
def test_without_a_price_no_total_is_stated(changed: dict[str, Any] | None, why: str, tmp_path: Path) -> None:
    entries = [ALONE, *write_search(tmp_path / "sweep", epsilon=None, **changed or {})]
    if changed is None:
        shutil.rmtree(tmp_path / "sweep")
    total, said = total_and_words(entries)
    assert (total["epsilon"], total["delta"]) == (None, None)
    alone = shown_epsilon(total["epsilon_of_every_run"])
    assert said.index(f"no total can be stated for whoever sees a model of a search: {why}") < said.index(alone)
    assert "together" not in said


def test_a_folder_that_holds_another_run_by_now_is_no_search_of_the_earlier_run(tmp_path: Path) -> None:
    first, *_ = write_search(tmp_path / "sweep", epsilon=8.0)
    other = first._replace(promise=promise("other"), search=None)
    assert list(find_searches([first, other])) == [first.promise.run]
    assert "searches" not in total_of([other], find_searches([other]))


def test_the_ledger_states_the_total_of_the_statement_of_the_chosen_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_three(monkeypatch)
    monkeypatch.setattr(search_runs, "find_price", lambda *given: Price(1.0, 40.0, DELTA))
    out = tmp_path / "sweep"
    assert train(tmp_path / "before") == 0
    assert call(*SMALL, *PUBLIC, "--out", str(out)) == 0
    best = last_json(capsys.readouterr().out)["best"]["folder"]
    assert call("statement", best, "--format", "json") == 0
    stated = json.loads(capsys.readouterr().out)["other_runs"]["on_this_data"]
    assert call("ledger", "--json") == 0
    text = capsys.readouterr().out
    found = last_json(text)
    (total,) = found["totals"]
    assert {name: total[name] for name in ("epsilon", "delta")} == stated
    assert f"4 runs, together epsilon {shown_epsilon(stated['epsilon'])} at delta" in text
    assert "such as a search, adds its delta" in text.splitlines()[-2]
    assert call("statement", best) == 0
    assert "such as a search, adds its delta)." in " ".join(capsys.readouterr().out.split())
    assert [run["search"] for run in found["runs"]] == [None, "sweep", "sweep", "sweep"]
    *rows, caption, _, _ = text.splitlines()[2:]
    assert [" (search)" in row for row in rows] == [False, True, True, True]
    assert "(search): a run of fdp search" in caption
    shutil.rmtree(out)
    assert call("ledger", "--json") == 0
    text = capsys.readouterr().out
    assert 'the folder of the search "sweep" is gone' in text
    assert last_json(text)["totals"][0]["epsilon"] is None


@pytest.mark.long
def test_the_ledger_states_no_total_for_a_search_that_was_interrupted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_three(monkeypatch)
    monkeypatch.setattr(search_runs, "find_price", lambda *given: Price(1.0, 40.0, DELTA))
    interrupt_while(2, training=True, monkeypatch=monkeypatch)
    assert call(*SMALL, *PUBLIC, "--out", str(tmp_path / "sweep")) == 130
    capsys.readouterr()
    assert call("ledger") == 0
    assert "no total can be stated for whoever sees a model of a search" in capsys.readouterr().out
