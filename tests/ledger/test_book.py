"""The ledger file: every run that was started, under parallel writers, crashes, edits and wrong keys."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from fdp.ledger.book import LEDGER_FILE, Book
from fdp.ledger.data_key import KEY_FILE, load_key
from fdp.privacy.guarantee import RELATION, Guarantee
from fdp.privacy.releases import GRADIENTS, Release
from fdp.types import FdpError

RELEASES = (Release(GRADIENTS, 0.05, 1.0, 10),)


def promise(name: str, **changes) -> Guarantee:
    known = Guarantee(
        2.0, 1e-6, RELATION, "one record", RELEASES, 10, name, ("k-a", "k-b"), "2026-11-16T10:00:00+00:00"
    )
    return known._replace(**changes)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path, load_key(tmp_path))


def write_runs(folder: Path, name: str, count: int) -> None:
    book = Book(folder, load_key(folder))
    for number in range(count):
        book.start(promise(f"{name}{number}"), folder=folder)
        book.end(f"{name}{number}", steps=number, how="finished")


def test_a_run_is_read_as_it_was_written(book, tmp_path):
    assert book.runs() == []
    book.start(promise("one"), folder=tmp_path / "out")
    (entry,) = book.runs()
    assert entry.promise == promise("one")
    assert (entry.folder, entry.steps, entry.how, entry.began) == (str(tmp_path / "out"), None, None, True)
    book.end("one", steps=4, how="interrupted")
    (entry,) = book.runs()
    assert (entry.steps, entry.how) == (4, "interrupted")
    assert entry.made().releases == (RELEASES[0]._replace(count=4),)
    assert book.path.stat().st_mode & 0o777 == 0o600


def test_a_run_that_goes_on_is_one_run_whose_end_is_open_again(book, tmp_path):
    book.start(promise("one"), folder=tmp_path)
    book.end("one", steps=4, how="interrupted")
    book.start(promise("one"), folder=tmp_path)
    (entry,) = book.runs()
    assert (entry.steps, entry.how) == (None, None)
    book.end("one", steps=10, how="finished")
    (entry,) = book.runs()
    assert (entry.steps, entry.how) == (10, "finished")


@pytest.mark.parametrize("steps", [0, 3])
def test_a_run_that_goes_on_and_breaks_off_at_once_keeps_its_steps(book, tmp_path, steps):
    book.start(promise("one"), folder=tmp_path)
    book.end("one", steps=4, how="interrupted")
    book.start(promise("one"), folder=tmp_path)
    book.end("one", steps=steps, how="failed")
    (entry,) = book.runs()
    assert (entry.steps, entry.how, entry.began) == (4, "failed", True)


def test_a_run_that_was_killed_counts_although_it_breaks_off_when_it_is_started_again(book, tmp_path):
    book.start(promise("one"), folder=tmp_path)
    book.start(promise("one"), folder=tmp_path)
    book.end("one", steps=0, how="failed")
    assert book.runs()[0].began


def test_a_run_that_ended_before_its_first_step_spent_nothing(book, tmp_path):
    book.start(promise("one"), folder=tmp_path)
    book.end("one", steps=0, how="failed")
    assert not book.runs()[0].began


@pytest.mark.parametrize("change", [{"data": ("k-c",)}, {"releases": RELEASES * 2}, {"steps": 11}, {"noise": "k-n"}])
def test_a_run_does_not_go_on_with_another_promise(book, tmp_path, change):
    """Its entry would not count what is spent now."""
    begun = promise("one", noise="k-m")
    book.start(begun, folder=tmp_path)
    with pytest.raises(FdpError, match="expected run one to go on with the data, noise and steps that it began with"):
        book.start(begun._replace(**change), folder=tmp_path)
    book.start(begun._replace(date="2026-11-17T10:00:00+00:00", fdp="9"), folder=tmp_path)
    assert [entry.promise for entry in book.runs()] == [begun]


def test_parallel_writers_lose_nothing(tmp_path):
    load_key(tmp_path)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_runs, args=(tmp_path, name, 12)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    runs = Book(tmp_path, load_key(tmp_path)).runs()
    assert {entry.promise.run for entry in runs} == {f"{name}{number}" for name in "abcd" for number in range(12)}
    assert all(entry.how == "finished" for entry in runs)


@pytest.mark.parametrize("cut", [1, 20])
def test_what_a_crash_leaves_of_a_line_is_passed_over_and_then_removed(book, tmp_path, cut):
    book.start(promise("one"), folder=tmp_path)
    whole = book.path.read_bytes()
    book.start(promise("two"), folder=tmp_path)
    book.path.write_bytes(whole + book.path.read_bytes()[len(whole) : -cut])
    assert [entry.promise.run for entry in book.runs()] == ["one"]
    book.start(promise("three"), folder=tmp_path)
    assert [entry.promise.run for entry in book.runs()] == ["one", "three"]


def remove_line(lines: list[str]) -> list[str]:
    return [lines[0], *lines[2:]]


def remove_first(lines: list[str]) -> list[str]:
    return lines[1:]


def exchange(lines: list[str]) -> list[str]:
    return [lines[1], lines[0], *lines[2:]]


def lower_epsilon(lines: list[str]) -> list[str]:
    return [line.replace('"epsilon": 2.0', '"epsilon": 0.2') for line in lines]


def more_noise(lines: list[str]) -> list[str]:
    return [line.replace('"noise_multiplier": 1.0', '"noise_multiplier": 9.0') for line in lines]


def garbage(lines: list[str]) -> list[str]:
    return [*lines[:1], "not json", *lines[1:]]


def no_object(lines: list[str]) -> list[str]:
    return ["[]", *lines]


@pytest.mark.parametrize("change", [remove_line, remove_first, exchange, lower_epsilon, more_noise, garbage, no_object])
def test_a_ledger_that_was_changed_is_refused_with_a_remedy(book, tmp_path, change):
    for name in ("one", "two", "three"):
        book.start(promise(name), folder=tmp_path)
    book.path.write_text("\n".join(change(book.path.read_text().splitlines())) + "\n")
    with pytest.raises(FdpError, match=r"ledger.jsonl, line \d: .* put a good copy back"):
        book.runs()
    with pytest.raises(FdpError, match="put a good copy back"):
        book.start(promise("four"), folder=tmp_path)


def test_a_ledger_of_another_key_is_refused(book, tmp_path):
    book.start(promise("one"), folder=tmp_path)
    other = tmp_path / "other"
    load_key(other)
    (other / LEDGER_FILE).write_bytes(book.path.read_bytes())
    with pytest.raises(FdpError, match=r"line 1: .* a key other than the one it was written with"):
        Book(other, load_key(other)).runs()
    (other / KEY_FILE).write_bytes((tmp_path / KEY_FILE).read_bytes())
    assert len(Book(other, load_key(other)).runs()) == 1


def test_no_content_of_data_is_in_it(book, tmp_path):
    book.start(promise("one"), folder=tmp_path)
    line = json.loads(book.path.read_text())
    assert set(line) == {"event", "run", "date", "promise", "folder", "mac"}
    assert set(line["promise"]) == set(Guarantee._fields)
