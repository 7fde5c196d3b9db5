"""The ledger as a user meets it: ``fdp train`` states what was spent on the same data, ``fdp ledger`` lists it."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from fdp.cli import session
from fdp.cli.ledger import shorten_path
from fdp.ledger.book import Book
from fdp.ledger.data_key import load_key
from fdp.privacy.guarantee import read_marker
from fdp.privacy.several_runs import compose
from fdp.privacy.shown_numbers import shown_epsilon
from fdp.run import prepare_run, training_run
from fdp.types import FdpError
from tests.cli.train_runs import call, interrupt_after, last_json, train

pytestmark = pytest.mark.usefixtures("shallow_nano")


def ledger_runs():
    folder = Path(os.environ["FDP_LEDGER"])
    return Book(folder, load_key(folder)).runs()


def test_training_again_on_the_same_data_states_the_composed_epsilon_before_the_run(tmp_path, capsys):
    """Another model, another noise: the data is recognised by its fingerprint."""
    assert train(tmp_path / "a") == 0
    assert "on this data" not in capsys.readouterr().out
    assert train(tmp_path / "b", "--model", "mlp", "--noise-multiplier", "2", "--json") == 0
    text = capsys.readouterr().out
    summary, shown = last_json(text), " ".join(text.replace("│", " ").split())
    (first,), (second,) = read_marker(tmp_path / "a"), read_marker(tmp_path / "b")
    total = compose([first, second])
    assert total is not None
    assert (summary["epsilon_of_model"], summary["delta_of_model"]) == (summary["epsilon"], summary["delta"])
    assert (summary["epsilon_on_this_data"], summary["delta_on_this_data"]) == total
    said = f"on this data 1 private run began before ({(first.date or '')[:10]}): with this one, together epsilon"
    assert f"{said} {shown_epsilon(total[0])} at delta" in shown
    assert shown.index(said) < shown.index("step 1/3"), "before the run"
    assert [(entry.steps, entry.how) for entry in ledger_runs()] == [(3, "finished")] * 2
    assert call("ledger", "--json") == 0
    found = last_json(capsys.readouterr().out)
    assert [run["run"] for run in found["runs"]] == [first.run, second.run]
    assert [(each["epsilon"], each["runs"]) for each in found["totals"]] == [(total[0], 2)]


def test_a_dry_run_states_the_total_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = Path(os.environ["FDP_LEDGER"])
    assert train(tmp_path / "a", "--dry-run") == 0
    assert not ledger.exists() or not any(ledger.iterdir())
    assert train(tmp_path / "a") == 0
    capsys.readouterr()
    before = {path: path.read_bytes() for path in [*ledger.iterdir(), *tmp_path.rglob("*")] if path.is_file()}
    assert train(tmp_path / "b", "--dry-run") == 0
    assert "on this data 1 private run began before" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert {path: path.read_bytes() for path in [*ledger.iterdir(), *tmp_path.rglob("*")] if path.is_file()} == before


def test_an_interrupted_run_is_in_the_ledger_with_the_steps_it_made(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert train(tmp_path / "a", "--save-every", "1", steps=4) == 130
    assert [(entry.steps, entry.how) for entry in ledger_runs()] == [(2, "interrupted")]
    name = ledger_runs()[0].promise.run
    assert train(tmp_path / "a", "--save-every", "1", steps=4) == 0
    assert [(entry.promise.run, entry.steps, entry.how) for entry in ledger_runs()] == [(name, 4, "finished")]


def test_a_run_that_fails_before_it_goes_on_keeps_what_it_spent(tmp_path, monkeypatch, capsys):
    """A disk, or a tracker, that refuses after the start of the run was recorded, and before its next step."""
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert train(tmp_path / "a", "--save-every", "1", steps=4) == 130

    def refuse(*_, **__):
        raise FdpError("no space is left")

    with monkeypatch.context() as patch:
        patch.setattr(session.tracking, "track", refuse)
        assert train(tmp_path / "a", "--save-every", "1", steps=4) == 2
    (line,) = (Path(os.environ["FDP_LEDGER"]) / "ledger.jsonl").read_text().splitlines()[-1:]
    assert json.loads(line)["steps"] == 2
    assert [(entry.steps, entry.how, entry.began) for entry in ledger_runs()] == [(2, "failed", True)]
    capsys.readouterr()
    assert train(tmp_path / "b") == 0
    assert "on this data 1 private run began before" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("seed", "runs"), [((), 2), (("--seed", "5"), 1)])
def test_an_attempt_whose_noise_is_lost_is_a_run_of_its_own(tmp_path, monkeypatch, capsys, seed, runs):
    """It broke off before its first checkpoint. The next attempt draws other noise: both were shown."""

    def fail(run, state, **options):
        for number, found in enumerate(training_run.steps(run, state, **options)):
            if number == 2:
                raise FdpError("the disk is full")
            yield found

    words = ("--save-every", "4", *seed)
    with monkeypatch.context() as patch:
        patch.setattr(session, "steps", fail)
        assert train(tmp_path / "a", *words, steps=5) == 2
    capsys.readouterr()
    assert train(tmp_path / "a", *words, steps=5) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert [entry.how for entry in ledger_runs()] == ["failed", "finished"][-runs:]
    assert ("on this data 1 private run began before" in shown) == (runs == 2)


@pytest.mark.parametrize("changed", ["nothing", "data", "noise"])
def test_a_seeded_run_that_starts_again_with_other_data_or_noise_is_a_run_of_its_own(tmp_path, monkeypatch, changed):
    """It broke off before its first checkpoint: the ledger must hold what both attempts spent, each on its data."""
    notes = tmp_path / "notes.jsonl"
    words = "--model gpt-nano --context 8 --unit record --noise-multiplier 1 --batch-size 4 --microbatch 4 --epochs 1"
    words += f" --warmup 0 --seed 7 --save-every 100 --data {notes} --out {tmp_path / 'a'}"

    def write_notes(word: str, count: int) -> None:
        notes.write_text("\n".join(json.dumps({"text": f"{word} {i} " * 9}) for i in range(count)))

    def fail(run, state, **options):
        yield next(iter(training_run.steps(run, state, **options)))
        raise FdpError("the disk is full")

    write_notes("note", 12)
    with monkeypatch.context() as patch:
        patch.setattr(session, "steps", fail)
        assert call("train", *shlex.split(words)) == 2
    if changed == "data":
        write_notes("other", 40)
    if changed == "noise":  # as if the model's folder held other first parameters now
        monkeypatch.setattr(prepare_run, "fingerprint", lambda *_: "other settings")
    assert call("train", *shlex.split(words)) == 0
    *earlier, last = ledger_runs()
    assert [entry.how for entry in earlier] == ([] if changed == "nothing" else ["failed"])
    assert (last.steps, last.how) == (last.promise.steps, "finished")
    assert read_marker(tmp_path / "a") == (last.promise,)
    for entry in earlier:
        assert entry.promise.run != last.promise.run
        assert bool(set(entry.promise.data) & set(last.promise.data)) == (changed == "noise")


def test_a_run_that_breaks_off_is_in_the_ledger_with_the_step_it_broke_at(tmp_path, capsys):
    words = ("--optimizer", "sgd", "--schedule", "constant", "--lr", "1e39", "--warmup", "0")
    assert train(tmp_path / "a", *words, steps=5) == 2
    assert [(entry.steps, entry.how) for entry in ledger_runs()] == [(1, "failed")]
    words = ("--optimizer", "sgd", "--schedule", "constant", "--lr", "1e6", "--warmup", "0")
    assert train(tmp_path / "b", *words, steps=30) == 4
    ((steps, how),) = [(entry.steps, entry.how) for entry in ledger_runs()[1:]]
    assert how == "diverged"
    assert steps is not None
    assert 0 < steps < 30


def test_without_a_ledger_nothing_is_recorded_and_no_key_is_drawn(tmp_path, monkeypatch):
    assert train(tmp_path / "a", "--ledger", "off") == 0
    assert not Path(os.environ["FDP_LEDGER"]).exists()
    (promise,) = read_marker(tmp_path / "a")
    assert promise.data == ()
    monkeypatch.delenv("FDP_LEDGER")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    assert train(tmp_path / "b") == 0
    assert not (tmp_path / "home").exists(), "digits is public"


def test_the_ledger_filters_by_data_and_finds_it_under_another_name(tmp_path, capsys):
    notes, copy = tmp_path / "notes.jsonl", tmp_path / "copy.jsonl"
    notes.write_text("\n".join(json.dumps({"text": f"note {i} " * 9}) for i in range(40)))
    copy.write_bytes(notes.read_bytes())
    words = shlex.split("--model gpt-nano --noise-multiplier 1 --batch-size 4 --microbatch 4 --steps 1 --warmup 0")
    for out, unit in (("a", "record"), ("b", "window")):
        files = ["--data", str(notes), "--unit", unit, "--context", "8", "--out", str(tmp_path / out)]
        assert call("train", *words, *files) == 0
    assert train(tmp_path / "c") == 0
    capsys.readouterr()
    assert call("ledger", "--data", str(copy), "--json") == 0
    text = capsys.readouterr().out
    found = last_json(text)
    assert [Path(run["folder"]).name for run in found["runs"]] == ["a", "b"]
    assert [total["runs"] for total in found["totals"]] == [1, 1], "units do not add up"
    assert "different units do not add up" in text
    assert "note 1" not in text
    assert call("ledger", "--data", str(tmp_path / "none")) == 2
    assert call("ledger", "--ledger", "off") == 2
    copy.write_text(json.dumps({"text": "another note"}))
    capsys.readouterr()
    assert call("ledger", "--data", str(copy)) == 0
    assert "no run on this data, and 3 on other data" in " ".join(capsys.readouterr().out.split())


def test_runs_with_another_context_protect_the_same_users(tmp_path, capsys):
    notes = tmp_path / "notes.jsonl"
    notes.write_text("\n".join(json.dumps({"text": f"note {i} " * 9, "author": i}) for i in range(40)))
    words = shlex.split("--model gpt-nano --noise-multiplier 1 --batch-size 4 --microbatch 4 --steps 1 --warmup 0")
    words += ["--data", str(notes), "--unit", "user", "--user-field", "author", "--windows-per-user", "2"]
    for context in ("8", "12"):
        assert call("train", *words, "--context", context, "--out", str(tmp_path / context), "--json") == 0
    summary = last_json(capsys.readouterr().out)
    assert call("ledger", "--json") == 0
    text = capsys.readouterr().out
    (total,) = last_json(text)["totals"]
    assert (total["unit"], total["runs"], total["epsilon"]) == (
        "one user, named by author",
        2,
        summary["epsilon_on_this_data"],
    )
    assert "different units" not in text


def test_a_damaged_ledger_stops_a_run_before_anything_is_spent(tmp_path, capsys):
    assert train(tmp_path / "a") == 0
    path = Path(os.environ["FDP_LEDGER"]) / "ledger.jsonl"
    path.write_text(path.read_text().replace('"steps": 3', '"steps": 0'))
    capsys.readouterr()
    assert train(tmp_path / "b") == 2
    assert "ledger.jsonl, line" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("out", ["new", "empty"])
def test_a_ledger_that_cannot_be_made_leaves_no_files_that_block_the_next_command(tmp_path, monkeypatch, capsys, out):
    folder = tmp_path / out
    if out == "empty":
        folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("fdp.cli.bookkeeping.check_writable", lambda place: None)  # as in /proc, which looks writable
        assert train(folder, "--ledger", "/proc/nope") == 2
    assert "/proc/nope: expected a folder for your ledger" in " ".join(capsys.readouterr().err.split())
    assert folder.exists() == (out == "empty")
    assert not folder.exists() or not any(folder.iterdir())
    assert train(folder) == 0


def test_the_total_of_one_run_covers_the_people_it_held_out(tmp_path, capsys):
    words = ("--noise-multiplier", "3", "--eval-fraction", "0.5", "--eval-epsilon", "8", "--eval-every", "1")
    assert train(tmp_path / "a", *words) == 0
    capsys.readouterr()
    assert call("ledger", "--json") == 0
    text = capsys.readouterr().out
    found = last_json(text)
    ((run,), (total,)) = found["runs"], found["totals"]
    assert run["epsilon"] < 1
    assert total["epsilon"] == pytest.approx(8, rel=1e-3) == run["epsilon_held_out"]
    assert f"1 run, together epsilon {shown_epsilon(total['epsilon'])} at delta" in text
    assert call("statement", str(tmp_path / "a")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Units that were held out have epsilon = {shown_epsilon(total['epsilon'])} at the same delta" in said


@pytest.mark.long
def test_a_choice_by_held_out_people_without_noise_stays_on_record(tmp_path, capsys):
    """The epsilon of the first run does not cover those it held out, and the second trains on them."""
    evaluated = ("--eval-fraction", "0.5", "--eval-every", "1")
    assert train(tmp_path / "seen", *evaluated) == 0
    assert train(tmp_path / "kept", *evaluated, "--keep-best") == 0
    assert train(tmp_path / "paid", *evaluated, "--keep-best", "--eval-epsilon", "8") == 0
    capsys.readouterr()
    assert [entry.promise.held_out_choice for entry in ledger_runs()] == [False, True, False]
    assert train(tmp_path / "later", "--json") == 0
    said = "held-out samples, without noise, decided what 1 earlier run exported: for samples held out then, no epsilon"
    assert said in last_json(capsys.readouterr().out)["warning"]
    assert call("ledger", "--json") == 0
    text = capsys.readouterr().out
    assert said in text
    assert [total["choices_by_held_out_samples"] for total in last_json(text)["totals"]] == [1]
    assert call("statement", str(tmp_path / "later")) == 0
    assert said in " ".join(capsys.readouterr().out.split())


def test_runs_of_one_seed_that_share_their_noise_are_named_wherever_a_total_is(tmp_path, capsys):
    """The seed does not tell dtypes apart (docs/guarantees.md), so the noise of both runs is the same."""
    assert train(tmp_path / "wide", "--seed", "1") == 0
    assert train(tmp_path / "other", "--seed", "2") == 0
    capsys.readouterr()
    said = "drew the same samples and noise, from one --seed: publish at most one of them"
    assert call("ledger", "--json") == 0
    text = capsys.readouterr().out
    assert said not in text
    assert [total["runs_that_share_noise"] for total in last_json(text)["totals"]] == [[]]
    assert train(tmp_path / "narrow", "--seed", "1", "--dtype", "bfloat16", "--json") == 0
    assert said in last_json(capsys.readouterr().out)["warning"]
    assert call("ledger", "--json") == 0
    text = capsys.readouterr().out
    assert said in " ".join(text.split())
    wide, _, narrow = (str(entry.promise.run) for entry in ledger_runs())
    assert [total["runs_that_share_noise"] for total in last_json(text)["totals"]] == [[wide[:8], narrow[:8]]]
    assert f"runs {wide[:8]} and {narrow[:8]} drew" in text
    assert call("statement", str(tmp_path / "narrow")) == 0
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.long
def test_noised_evaluations_on_other_data_are_charged_to_that_data(tmp_path, capsys):
    words = shlex.split("--model gpt-nano --context 8 --unit record --noise-multiplier 2 --batch-size 4 --steps 1")
    for name in ("one", "two", "held"):
        lines = (json.dumps({"text": f"{name} {i} " * 9}) for i in range(40))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    held = str(tmp_path / "held.jsonl")

    def run(out: str, data: str, *more: str) -> dict:
        files = ["--data", str(tmp_path / f"{data}.jsonl"), "--out", str(tmp_path / out)]
        assert call("train", *words, "--microbatch", "4", "--warmup", "0", *files, *more, "--json") == 0
        return last_json(capsys.readouterr().out)

    run("a", "one", "--eval-data", held, "--eval-epsilon", "5")
    summary = run("b", "two", "--eval-data", held, "--eval-epsilon", "5")
    assert "On the evaluation data 1 private run began before" in summary["warning"]
    assert 5 < summary["epsilon_on_evaluation_data"] < 10
    assert "epsilon_on_this_data" not in summary
    summary = run("c", "held")
    assert "On this data 2 private runs began before" in summary["warning"]
    assert call("ledger", "--data", held, "--json") == 0
    found = last_json(capsys.readouterr().out)
    assert [Path(each["folder"]).name for each in found["runs"]] == ["a", "b", "c"]
    ((count, epsilon),) = [(total["runs"], total["epsilon"]) for total in found["totals"]]
    assert (count, epsilon) == (3, summary["epsilon_on_this_data"])
    assert epsilon > 7
    assert call("ledger", "--json") == 0
    totals = last_json(capsys.readouterr().out)["totals"]
    assert sorted((total["runs"], total["epsilon"] < 2) for total in totals) == [(1, True), (1, True), (3, False)]


def test_the_summary_of_a_model_trained_again_counts_the_evaluations_of_this_run(tmp_path, capsys):
    assert train(tmp_path / "a", "--eval-fraction", "0.5") == 0
    words = ("--extend", str(tmp_path / "a"), "--eval-fraction", "0.5", "--eval-epsilon", "4", "--eval-every", "1")
    capsys.readouterr()
    assert call("train", *words, "--steps", "2", "--out", str(tmp_path / "b"), "--json") == 0
    summary = last_json(capsys.readouterr().out)
    total = compose(read_marker(tmp_path / "b"))
    assert total is not None
    assert total[0] > 4
    assert (summary["epsilon_if_on_the_same_data_before"], summary["delta_if_on_the_same_data_before"]) == total
    assert summary["epsilon_total"] == summary["epsilon_of_model"] == total[0]


@pytest.mark.parametrize("file", ["ledger.jsonl", "ledger.key"])
def test_the_ledger_is_readable_by_its_owner_only(tmp_path, file):
    assert train(tmp_path / "a") == 0
    assert (Path(os.environ["FDP_LEDGER"]) / file).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("columns", [80, 400])
def test_every_run_has_one_line_and_only_units_and_folders_make_room(tmp_path, capsys, monkeypatch, columns):
    folder = tmp_path / "a folder with a long name, of many runs" / "first"
    assert train(folder) == 0
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", str(columns))
    assert call("ledger") == 0
    _, headings, run, *rest = capsys.readouterr().out.splitlines()
    (entry,) = ledger_runs()
    assert len(run.rstrip()) <= columns
    assert run.split()[1] == (entry.promise.run or "")[:8]
    assert run.rstrip().endswith("first")
    assert (str(folder) in run) == ("unit" in headings.split()) == (columns == 400)
    assert headings.split()[:7] == ["date", "run", "data", "epsilon", "delta", "steps", "ended"]
    assert entry.promise.unit in " ".join(rest), "the total states the unit"


@pytest.mark.parametrize("columns", [30, 60, 80, 150])
def test_figures_are_never_cut_in_a_narrow_window(tmp_path, capsys, monkeypatch, columns):
    plain = ("--method", "none", "--noise-multiplier", "0")
    words = ("--noise-multiplier", "3", "--eval-fraction", "0.5", "--eval-epsilon", "8", "--eval-every", "50")
    assert train(tmp_path / "first run", *words, steps=50) == 0
    assert train(tmp_path / "second run", *plain, steps=12) == 0
    capsys.readouterr()
    monkeypatch.setenv("COLUMNS", str(columns))
    assert call("ledger") == 0
    _, headings, *rows = capsys.readouterr().out.splitlines()
    shown = headings.split()
    figures, words = ["date", "run", "epsilon", "delta", "steps"], {30: [], 60: [], 80: ["ended", "folder"]}
    assert [name for name in shown if name in figures] == figures
    assert [name for name in shown if name not in figures] == words.get(columns, ["data", "ended", "folder"])
    private, held_out, without, caption = rows[:4]
    (first, second), date = ledger_runs(), slice(0, 10)
    for line, entry in ((private, first), (without, second)):
        assert line[date] == (entry.promise.date or "")[:10]
        assert (entry.promise.run or "")[:8] in line.split()
        assert f" {entry.steps} of {entry.promise.steps or '?'}" in line
        assert len(line) <= max(columns, 60)
        assert ("folder" in shown) == line.endswith(" run")
    assert shown_epsilon(first.promise.epsilon or 0) in private.split()
    assert held_out.strip().endswith(" held out")
    assert "not private" in without
    assert "Not shown for want of room: " in caption


@pytest.fixture(scope="module")
def ledger_of_a_wide_fixture() -> str | None:
    """Return the ledger that a fixture of a whole file writes to."""
    return os.environ.get("FDP_LEDGER")


def test_no_fixture_writes_to_the_home_folder(ledger_of_a_wide_fixture, tmp_path_factory):
    assert ledger_of_a_wide_fixture is not None
    assert Path(ledger_of_a_wide_fixture).is_relative_to(tmp_path_factory.getbasetemp())


@pytest.mark.parametrize(
    ("path", "width", "shown"),
    [
        ("/tmp/m2/w/runs/u1", 12, "…/w/runs/u1"),
        ("/tmp/m2/w/runs/u1", 8, "…/u1"),
        ("/tmp/m2/w/runs/u1", 9, "…/runs/u1"),
        ("/tmp/m2/w/runs/u1", 17, "/tmp/m2/w/runs/u1"),
        ("runs/u1", 7, "runs/u1"),
        ("runs/a-very-long-name", 12, "…y-long-name"),
    ],
)
def test_a_path_is_cut_at_a_slash(path, width, shown):
    assert shorten_path(path, width) == shown
    assert len(shown) <= width


def test_the_ledger_cuts_folders_at_a_slash(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert train(tmp_path / "folder-of-projects" / "runs" / "u1") == 0
    capsys.readouterr()
    assert call("ledger") == 0
    assert any(line.endswith("  …/runs/u1") for line in capsys.readouterr().out.splitlines())
