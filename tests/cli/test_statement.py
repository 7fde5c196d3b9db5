"""``fdp statement`` as a user meets it: the ledger that it reads, and what it says if it cannot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fdp.privacy.guarantee import read_marker
from fdp.privacy.several_runs import compose, key_names
from fdp.privacy.shown_numbers import shown_epsilon
from fdp.report.privacy_numbers import rounded_up
from tests.cli.train_runs import call, train

NOT_READ = "The ledger of this run was not read"
NONE_KNOWN = "No other run on the same data is known"


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two runs, a and b, on the same data, and the ledger that both were recorded in."""
    folder = tmp_path_factory.mktemp("team")
    for name in ("a", "b"):
        assert train(folder / name, "--ledger", str(folder / "ledger"), steps=2) == 0
    return folder


@pytest.fixture
def copy(team: Path, tmp_path: Path) -> Path:
    """Return a copy of the runs and of their ledger, to be changed; the runs still name the ledger of the team."""
    return Path(shutil.copytree(team, tmp_path / "copy"))


def statement_text(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> str:
    """Return the text of ``fdp statement`` in one line."""
    capsys.readouterr()
    assert call("statement", str(run), *words) == 0
    return " ".join(capsys.readouterr().out.split())


def test_the_ledger_that_the_run_was_recorded_in_is_read_by_default(team, capsys, tmp_path):
    """Mutation: the ledger of the environment, which does not know the runs, would say that there is no other."""
    total = compose([*read_marker(team / "a"), *read_marker(team / "b")])
    assert total is not None
    assert train(tmp_path / "c", steps=2) == 0, "another ledger, that of the environment, with another key"
    text = statement_text(capsys, team / "a")
    assert "names 1 other private run on the same data with the same unit" in text
    assert f"together with this one: epsilon {rounded_up(total[0], 4)} at" in text
    assert NOT_READ not in text
    assert statement_text(capsys, team / "a", "--ledger", str(team / "ledger")) == text


def test_a_run_without_a_ledger_of_its_own_is_looked_up_in_that_of_the_environment(capsys, tmp_path):
    assert train(tmp_path / "a", steps=2) == 0
    text = statement_text(capsys, tmp_path / "a")
    assert NONE_KNOWN in text
    assert NOT_READ not in text


def test_a_ledger_that_cannot_know_the_other_runs_is_not_said_to_know_none(team, capsys, tmp_path, monkeypatch):
    assert train(tmp_path / "c", "--ledger", str(tmp_path / "other"), steps=2) == 0
    for given in ("off", str(tmp_path / "nowhere"), str(tmp_path / "other")):
        text = statement_text(capsys, team / "a", "--ledger", given)
        assert NOT_READ in text, given
        assert NONE_KNOWN not in text, given
    monkeypatch.setenv("FDP_LEDGER", str(team / "ledger"))
    assert train(tmp_path / "d", "--ledger", "off", steps=2) == 0
    assert NOT_READ in statement_text(capsys, tmp_path / "d"), "it was recorded in none"
    text = statement_text(capsys, tmp_path / "d", "--ledger", str(team / "ledger"))
    assert NOT_READ in text, "the run has no fingerprint to look up"


def test_a_ledger_with_the_same_key_that_does_not_hold_the_run_is_another_one(copy, capsys):
    """As with a key that was copied to a second machine, or a ledger that lost its last lines."""
    book = copy / "ledger" / "ledger.jsonl"
    book.write_text("".join(book.read_text().splitlines(keepends=True)[:2]))
    text = statement_text(capsys, copy / "b", "--ledger", str(copy / "ledger"))
    assert "names 1 other private run on the same data" in text, "what it knows is counted"
    assert NOT_READ in text


def test_a_chain_of_extensions_under_different_keys_states_the_epsilon_of_all_of_them(capsys, tmp_path):
    assert train(tmp_path / "a", "--ledger", str(tmp_path / "first"), steps=2) == 0
    for before, name, ledger in (("a", "b", "second"), ("b", "c", "third")):
        words = ("--extend", str(tmp_path / before), "--ledger", str(tmp_path / ledger), "--steps", "2")
        assert call("train", *words, "--out", str(tmp_path / name)) == 0
    promises = read_marker(tmp_path / "c")
    assert len(set().union(*(key_names(one.data) for one in promises))) == 3, "a key each"
    total = compose(promises)
    assert total is not None
    text = statement_text(capsys, tmp_path / "c")
    assert f"differentially private with epsilon = {shown_epsilon(total[0])} and" in text
    assert "and of 2 earlier runs whose parameters it started from, on the same data (this is assumed" in text
