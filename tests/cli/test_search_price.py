"""The price of ``fdp search`` stays with its runs: while it runs, after an error, after its end, and in a copy."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fdp.cli import search_runs, session
from fdp.cli.extend import find_extended
from fdp.cli.model_and_data import earlier_guarantees, export_model
from fdp.cli.search_promise import Price
from fdp.cli.train_options import ModelOptions
from fdp.foreign.hub import hugging_face
from fdp.ledger.book import Book
from fdp.ledger.data_key import load_key
from fdp.privacy.guarantee import MARKER, RELATION, Guarantee, marker_text, read_marker
from fdp.privacy.shown_numbers import shown_epsilon
from fdp.report.headline import headline
from fdp.report.privacy_numbers import rounded_up
from fdp.report.run_facts import read_facts
from fdp.report.search_price import find_search, price_promises, write_price
from fdp.run.run_folder import read_run_folder
from fdp.types import FdpError
from tests.cli.test_search import PUBLIC, SMALL, draw_three
from tests.cli.train_runs import call, interrupt_after, last_json, train
from tests.conftest import coarse_groups

PRICE = Price(noise_multiplier=1.0, epsilon=40.0, delta=1e-6)
ONE_RUN = Guarantee(2.5, 1e-6, RELATION, "one record", (), 3, "run1", ("k-a",), accountant="PLD")


@pytest.fixture(scope="module", autouse=True)
def _coarse_groups() -> Iterator[None]:
    with coarse_groups():
        yield


@pytest.fixture(autouse=True)
def _three_runs_at_a_known_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw three runs, and leave out the seconds that it takes to find the noise."""
    draw_three(monkeypatch)
    monkeypatch.setattr(search_runs, "find_price", lambda *given: PRICE)


def fail_after(number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise ``error`` in run ``number`` of a search, after it has written its files."""
    train = session.train

    def failing(options, **more):
        code = train(options, **more)
        if options.output.out.name == f"trial-{number}":
            raise error
        return code

    monkeypatch.setattr(session, "train", failing)


def copy_of(folder: Path, name: str | None = None) -> Path:
    """Copy a run to where no search is."""
    return Path(shutil.copytree(folder, folder.parent.parent / "elsewhere" / (name or folder.name)))


def statement_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert call("statement", str(folder), "--ledger", "off") == 0
    return " ".join(capsys.readouterr().out.split())


def assert_no_epsilon(folder: Path) -> None:
    """Assert that no epsilon is stated for the model of a run, nor taken over by a run that extends it."""
    facts = read_facts(read_run_folder(folder))
    assert facts.search is not None
    assert "has not ended" in facts.search.sentence()
    assert not facts.total.private
    assert "No epsilon can be stated for the model" in headline(facts)[0]
    assert not find_extended(str(folder)).chain[-1].private


def write_trial(search: Path, **result: Any) -> Path:
    """Write a search with one run, whose model promises the epsilon of that run; return the folder of the model."""
    model = search / "trial-1" / "model"
    model.mkdir(parents=True)
    (model / MARKER).write_text(marker_text([ONE_RUN]))
    one = {"folder": "trial-1", "score": 1.0}
    found = {"epsilon": 40.0, "delta": 1e-6, "trials_mean": 2.0, "trials": [one], "best": one}
    (search / "search.json").write_text(json.dumps(found | result))
    return model


def test_summary_and_report_of_a_chosen_run_have_the_totals_of_its_statement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mutation: with the total that the run stated when it began, the choice would cost nothing."""
    assert train(tmp_path / "before") == 0
    out = tmp_path / "search"
    capsys.readouterr()
    assert call(*SMALL, *PUBLIC, "--out", str(out)) == 0
    best = Path(last_json(capsys.readouterr().out)["best"]["folder"])
    assert call("statement", str(best), "--format", "json") == 0
    shown = capsys.readouterr()
    stated = json.loads(shown.out)
    assert shown.err == f'{best}: the run that the search "search" chose\n', (
        "named as the user does, beside the statement"
    )
    assert best.name not in shown.out, "the number would tell how many runs there were"
    on_data = stated["other_runs"]["on_this_data"]
    summary = json.loads((best / "summary.json").read_text())
    assert (summary["epsilon_of_model"], summary["delta_of_model"]) == (PRICE.epsilon, PRICE.delta)
    assert summary["epsilon_of_model"] == stated["guarantee"]["epsilon"]
    assert (summary["epsilon_on_this_data"], summary["delta_on_this_data"]) == tuple(on_data.values())
    assert on_data["epsilon"] > PRICE.epsilon
    assert call("report", str(best), "--json") == 0
    (shown,) = last_json(capsys.readouterr().out)["runs"]
    warning = shown["results"]["warning"]
    assert warning == summary["warning"]
    assert "at the price of the search: epsilon 40.000 at delta 1e-06" in warning
    assert f"together with this one: epsilon {rounded_up(on_data['epsilon'], 4)} at delta 2e-06" in warning
    assert "`fdp ledger` states the same total" in warning
    assert shown_epsilon(summary["epsilon"]) not in warning, "this run alone"
    for trial in out.glob("trial-*"):
        words = statement_of(trial, capsys)
        other = f'Privacy statement for the run {trial.name} of the search "search", which did not choose it ='
        title = 'Privacy statement for the run that the search "search" chose =' if trial == best else other
        assert words.startswith(title)
        assert ("does not say which run of the search it is" in words) == (trial == best)
        summary = json.loads((trial / "summary.json").read_text())
        assert summary["epsilon_of_model"] == read_marker(trial)[-1].epsilon == PRICE.epsilon
        assert summary["epsilon_on_this_data"] == on_data["epsilon"]


def test_the_summary_of_a_run_has_no_epsilon_of_the_model_until_the_search_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(tmp_path / "before") == 0
    seen, started = [], session.train

    def look(options, **more):
        code = started(options, **more)
        seen.append(json.loads((options.output.out / "summary.json").read_text()))
        return code

    monkeypatch.setattr(session, "train", look)
    fail_after(2, FdpError("full"), monkeypatch)
    out = tmp_path / "search"
    assert call(*SMALL, *PUBLIC, "--out", str(out)) == 2
    left = [json.loads((out / f"trial-{number}" / "summary.json").read_text()) for number in (1, 2)]
    for summary in (*seen, *left):
        assert (summary["epsilon_of_model"], summary["delta_of_model"]) == (None, None)
        assert "epsilon_on_this_data" not in summary
        assert "has not ended" in summary["warning"]
    assert "No total with it can be stated" in left[0]["warning"]


def test_the_report_of_a_run_of_a_search_by_an_older_fdp_leaves_its_total_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "search"
    assert call(*SMALL, *PUBLIC, "--out", str(out)) == 0
    best = Path(last_json(capsys.readouterr().out)["best"]["folder"])
    summary = json.loads((best / "summary.json").read_text())
    old = {key: value for key, value in summary.items() if not key.endswith("_of_model")} | {"warning": "epsilon 1.645"}
    (best / "summary.json").write_text(json.dumps(old))
    assert call("report", str(best), "--json") == 0
    (shown,) = last_json(capsys.readouterr().out)["runs"]
    assert "fdp statement states the total" in shown["results"]["warning"]


def test_a_search_says_once_before_its_first_run_what_is_protected_and_what_was_spent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "before") == 0
    capsys.readouterr()
    assert call(*SMALL, *PUBLIC, "--out", str(tmp_path / "search")) == 0
    text = capsys.readouterr().out
    shown, result = " ".join(text.replace("│", " ").split()), last_json(text)
    before, _, after = shown.partition("run 1: ")
    for said in (
        "fdp search",
        "unit of privacy one labelled image",
        "budget epsilon 40.000 at delta 1e-06 for the model and its settings",
        "3 runs, a number drawn at random with mean 2",
        "settings drawn from --lr 0.01,0.1",
        "The one with the lowest held-out loss is exported",
        "this search: epsilon 40.000 at delta 1e-06",
        "on this data 1 private run began before",
    ):
        assert before.count(said) == 1, said
        assert said not in after
    best = Path(result["best"]["folder"])
    total = json.loads((best / "summary.json").read_text())["epsilon_on_this_data"]
    assert f"together epsilon {shown_epsilon(total)} at delta" in before, "as it is stated in the end"
    assert "Poisson, 32 of 1,500 expected" in before
    assert f"held-out loss {result['best']['score']:.4f} (lower is better)" in after
    assert " score " not in shown


@pytest.mark.parametrize("error", [FdpError("full"), OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_after_an_error_in_a_search_no_run_states_the_epsilon_of_one_run(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after(2, error, monkeypatch)
    out = tmp_path / "search"
    assert call(*SMALL, *PUBLIC, "--out", str(out)) in (2, 130)
    found = json.loads((out / "search.json").read_text())
    assert (found["private"], found["epsilon"], found["best"], found["exit_code"]) == (False, None, None, None)
    for number in (1, 2):
        assert_no_epsilon(out / f"trial-{number}")
        assert_no_epsilon(copy_of(out / f"trial-{number}"))
    assert call(*SMALL, *PUBLIC, "--out", str(out)) == 2, "a search cannot go on"


def test_a_search_that_is_killed_leaves_its_runs_without_an_epsilon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be written then: what is there before the first run has to say it, and what a run writes itself."""
    out, seen, train = tmp_path / "search", [], session.train

    def look(options, **more):
        seen.append(json.loads((out / "search.json").read_text()))
        code = train(options, **more)
        assert (out / "search.json").stat().st_mode & 0o777 == 0o600
        assert_no_epsilon(options.output.out)
        return code

    monkeypatch.setattr(session, "train", look)
    assert call(*SMALL, *PUBLIC, "--out", str(out)) == 0
    assert len(seen) == 3
    for found in seen:
        assert (found["private"], found["epsilon"], found["best"], found["exit_code"]) == (False, None, None, None)
        assert "has not ended" in found["statement"][0]
        assert [Path(trial["folder"]).name for trial in found["trials"]] == ["trial-1", "trial-2", "trial-3"]
    assert json.loads((out / "search.json").read_text())["exit_code"] == 0
    assert (out / "search.json").stat().st_mode & 0o777 == 0o600


def test_a_run_of_an_interrupted_search_states_no_epsilon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever interrupts may have seen the scores, and may take a run by its score."""
    interrupt_after(2, monkeypatch)
    assert call(*SMALL, *PUBLIC, "--out", str(tmp_path / "search")) == 130
    trial = tmp_path / "search" / "trial-1"
    for folder in (trial, copy_of(trial)):
        assert_no_epsilon(folder)
        said = statement_of(folder, capsys)
        assert "No epsilon can be stated for the model" in said
        assert "The search has not ended, or was interrupted" in said
        assert said.startswith(
            'Privacy statement for a run of the search "search", which has not ended, or was interrupted ='
        )
        assert "differentially private with epsilon" not in said


def test_every_run_of_a_search_carries_its_price_also_in_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "search"
    assert call(*SMALL, *PUBLIC, "--out", str(out)) == 0
    best = Path(last_json(capsys.readouterr().out)["best"]["folder"]).name
    alone = []
    for number in (1, 2, 3):
        trial = out / f"trial-{number}"
        copy = copy_of(trial)
        assert [one.epsilon for one in read_marker(copy)] == [PRICE.epsilon]
        assert (copy / MARKER).stat().st_mode & 0o777 == 0o600
        facts, there = read_facts(read_run_folder(copy)), read_facts(read_run_folder(trial))
        assert facts.priced == there.priced == read_marker(trial)[-1]
        assert (facts.promise, facts.chosen, facts.name) == (there.promise, there.chosen, there.name)
        assert find_extended(str(copy)).chain == find_extended(str(trial)).chain == (facts.priced,)
        stated = f"private with epsilon = {shown_epsilon(40.0)} and"
        assert (stated in headline(facts)[0]) == (trial.name == best)
        assert headline(facts) == headline(there)
        alone.append(facts.promise)
    assert "Chosen by fdp search" in statement_of(copy_of(out / best, "again"), capsys)
    ledger = Path(os.environ["FDP_LEDGER"])
    counted = [entry.promise for entry in Book(ledger, load_key(ledger, create=False)).runs()]
    assert counted == alone, "the ledger counts every run with its own steps"
    assert all(one.releases is not None and (one.epsilon or 0) < 40 for one in alone)


def test_the_marker_of_a_run_does_not_tell_how_many_runs_a_search_made(tmp_path: Path) -> None:
    assert call(*SMALL, *PUBLIC, "--out", str(tmp_path / "search")) == 0
    texts = [(tmp_path / "search" / f"trial-{number}" / MARKER).read_text() for number in (1, 2, 3)]
    names = [read_marker(tmp_path / "search" / f"trial-{number}")[-1].run for number in (1, 2, 3)]
    for text, own in zip(texts, names):
        assert [name for name in names if name is not None and name in text] == [own]
        assert "score" not in text


def test_a_run_that_did_not_finish_keeps_the_promise_by_which_the_ledger_knows_it(tmp_path: Path) -> None:
    trial = write_trial(tmp_path / "search", epsilon=None, best=None, exit_code=None).parent
    (trial / MARKER).write_text(marker_text([ONE_RUN]))
    write_price(trial)
    assert read_marker(trial) == (ONE_RUN,)
    copy = copy_of(trial)
    there = find_search(trial)
    assert there is not None
    assert find_search(copy) == there._replace(runs=frozenset())
    assert not price_promises(copy, read_marker(copy))[-1].private
    assert not read_marker(copy / "model")[-1].private


@pytest.mark.parametrize(
    ("result", "epsilon"),
    [({}, 40.0), ({"best": None}, 40.0), ({"epsilon": None}, None), ({"exit_code": None}, None), ({"trials": []}, 2.5)],
    ids=["chosen", "not chosen", "unknown", "not ended", "of another search"],
)
def test_a_model_that_a_search_trained_is_trained_again_at_the_price_of_the_search(
    result: dict[str, Any], epsilon: float | None, tmp_path: Path
) -> None:
    """Also if an older fdp wrote the folders, in which the model promises the epsilon of one run."""
    model = write_trial(tmp_path / "search", **result)
    (found,) = earlier_guarantees(ModelOptions(model=str(model)))
    assert found.epsilon == epsilon
    assert (found.unit, found.steps, found.run, found.data) == (ONE_RUN.unit, 3, "run1", ("k-a",))
    assert (found.releases is None) == (epsilon != 2.5)
    (copy,) = earlier_guarantees(ModelOptions(model=str(shutil.copytree(model, tmp_path / "copy"))))
    assert copy == ONE_RUN, "a marker of an older fdp stays readable"


def test_a_marker_that_was_written_while_the_search_ran_has_the_price_after_its_end(tmp_path: Path) -> None:
    model = write_trial(tmp_path / "search")
    (model / MARKER).write_text(marker_text([ONE_RUN._replace(epsilon=None, delta=None, relation=None)]))
    (found,) = earlier_guarantees(ModelOptions(model=str(model)))
    assert (found.epsilon, found.delta, found.relation) == (40.0, 1e-6, RELATION)


def test_a_run_of_its_own_does_not_read_a_search_json_beside_it(tmp_path: Path) -> None:
    """A file of another program must not end a run that has to export its model."""
    (tmp_path / "search.json").write_text("[of another program")
    assert price_promises(tmp_path / "notes", [ONE_RUN]) == (ONE_RUN,)


def test_a_model_that_a_search_exports_while_it_runs_promises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, written = write_trial(tmp_path / "search", epsilon=None, best=None, exit_code=None), {}
    monkeypatch.setattr(hugging_face, "save", lambda folder, params, *, source, files: written.update(files))
    export_model({}, ModelOptions(model=str(model)), model.parent, guarantees=[ONE_RUN])
    (promise,) = json.loads(written[MARKER])["runs"]
    assert (promise["epsilon"], promise["delta"], promise["releases"], promise["run"]) == (None, None, None, "run1")
    export_model({}, ModelOptions(model=str(model)), tmp_path / "alone", guarantees=[ONE_RUN])
    assert written[MARKER] == marker_text([ONE_RUN])


def write_tiny_model(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, **sizes)).save_pretrained(folder)


@pytest.mark.long
def test_the_folder_of_every_model_of_a_search_carries_the_price(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_model(tmp_path / "tiny")
    letters, out = tmp_path / "letters.jsonl", tmp_path / "search"
    letters.write_text("\n".join(json.dumps({"text": f"letter {i} of many"}) for i in range(60)))
    tiny = shlex.split("--tokenizer bytes --context 8 --unit record --batch-size 8 --microbatch 8 --steps 2")
    tiny += ["--data", str(letters), "--eval-fraction", "0.2"]
    running, train = [], session.train

    def look(options, **more):
        code = train(options, **more)
        running.append(read_marker(options.output.out / "model")[-1].private)
        return code

    with monkeypatch.context() as patch:
        patch.setattr(session, "train", look)
        words = ["search", "--model", str(tmp_path / "tiny"), "--lr", "1e-2,1e-1", "--seed", "1", "--json"]
        assert call(*words, *tiny, "--out", str(out)) == 0
    assert running == [False] * 3, "no promise while the search runs"
    best = Path(last_json(capsys.readouterr().out)["best"]["folder"])
    assert read_marker(out / "model") == read_marker(best / "model")
    for number in (1, 2, 3):
        (promise,) = read_marker(out / f"trial-{number}" / "model")
        assert (promise.epsilon, promise.delta, promise.releases) == (PRICE.epsilon, PRICE.delta, None)
        assert promise.relation == RELATION
    copy = copy_of(out / "trial-1")
    words = ["train", "--model", str(copy / "model"), "--noise-multiplier", "1", "--out", str(tmp_path / "again")]
    assert call(*words, *tiny, "--quiet", "--json") == 0
    found = last_json(capsys.readouterr().out)
    assert [one["epsilon"] for one in found["trained_before"]] == [PRICE.epsilon]
    assert found["epsilon_if_on_the_same_data_before"] > 40
