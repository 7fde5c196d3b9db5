"""The statement of a run: true for every kind of run, and free of anything private."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fdp.privacy.guarantee import MARKER, RELATION, Guarantee, marker_text, read_marker
from fdp.privacy.releases import GRADIENTS, Release, composed_epsilon
from fdp.privacy.shown_numbers import shown_epsilon
from fdp.report.checklists import ASK
from fdp.report.documents import as_markdown, as_text
from fdp.report.promise import promise
from fdp.report.run_facts import read_facts, unit_note
from fdp.report.scope import ANY_ORDER
from fdp.report.statement import make_statement
from fdp.run.run_folder import read_run_folder
from fdp.run.step_record import record_to_json
from fdp.types import FdpError
from tests.conftest import coarse_groups
from tests.report.run_folders import make_records

SAMPLES = 1437
SEED = 90210
SETTINGS = {
    "model": "logistic",
    "data": "secret/patients.jsonl",
    "batch_size": 32,
    "clip": "flat",
    "max_norm": 1.0,
    "optimizer": "adamw",
    "method": "auto",
    "dtype": "float32",
    "seed": None,
    "population": None,
    "unit": "record",
}
RELEASES = (Release(GRADIENTS, 32 / 1500, 1.0, 40),)
EPSILON = composed_epsilon(RELEASES, delta=1e-6)
UNIT = "one record (its first 128 bytes)"
PROMISE = Guarantee(
    EPSILON,
    1e-6,
    RELATION,
    UNIT,
    RELEASES,
    40,
    "run1",
    ("k-a",),
    "2026-11-16T10:00:00+00:00",
    "0.1",
    "PLD, dp-accounting 0.6",
)


@pytest.fixture(scope="module", autouse=True)
def _coarse_groups() -> Iterator[None]:
    with coarse_groups():
        yield


def write_run(folder: Path, *, promises=(PROMISE,), summary: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Write the folder of a run as ``fdp train`` does, with private counts in its summary."""
    folder.mkdir(parents=True)
    config = {
        "settings": SETTINGS | settings,
        "noise_multiplier": 1.0,
        "sampling_rate": 32 / 1500,
        "population": 1500,
        "statistics": None,
        "versions": {"fdp": "0.1", "torch": "2", "numpy": "2", "dp-accounting": "0.6", "python": "3.11"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    if promises:
        (folder / MARKER).write_text(marker_text(promises))
    known = {"steps": 40, "steps_planned": 40, "samples": SAMPLES, "loss_last": 0.123457, "unit": PROMISE.unit}
    known |= {"epsilon": EPSILON, "delta": 1e-6, "epsilon_if_stop_was_decided_in_advance": EPSILON}
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(known | summary))
    return folder


def text_of(folder: Path, **options: Any) -> str:
    statement = make_statement(read_facts(read_run_folder(folder)), **options)
    json.dumps(statement.facts, allow_nan=False)
    return " ".join(as_text(statement.document).split())


def test_noise_is_rounded_up(tmp_path):
    """Both in words, from config.json, and in the table, from the promise."""
    releases = tuple(each._replace(noise_multiplier=1.2345612) for each in PROMISE.releases or ())
    run = write_run(tmp_path / "run", promises=(PROMISE._replace(releases=releases),), summary={}, steps=40)
    config = json.loads((run / "config.json").read_text()) | {"noise_multiplier": 1.2345612, "delta": 1e-6}
    (run / "config.json").write_text(json.dumps(config))
    text = text_of(run)
    assert text.count("1.23457") == 2
    assert "1.23456" not in text
    assert "Gaussian noise of 1.235 times the clipping bound" in promise(read_run_folder(run))


def test_the_statement_holds_the_guarantee_the_mechanism_and_both_checklists(tmp_path):
    text = text_of(write_run(tmp_path / "run", summary={}))
    assert f"epsilon = {shown_epsilon(EPSILON)} and delta = 1e-06" in text
    assert "Unit: one record (its first 128 bytes). For people: the whole record is protected" in text
    assert RELATION in text
    for words in ("Poisson sampling", "multiplier z = 1,", "40 planned", "dp_accounting", "mu = ", "false negatives"):
        assert words in text
    assert "How to DP-fy ML" in text
    assert "NIST SP 800-226" in text
    assert text.count(ASK.removesuffix(".")) >= 5


def test_the_statement_holds_nothing_private(tmp_path):
    """No count of samples, no loss, no path of the data, no seed: also not in JSON."""
    run = write_run(tmp_path / "run", summary={}, seed=SEED)
    statement = make_statement(read_facts(read_run_folder(run)), records_per_person=3)
    for text in (as_text(statement.document), as_markdown(statement.document), json.dumps(statement.facts)):
        for private in (str(SAMPLES), f"{SAMPLES:,}", "0.123457", "patients", "secret", str(SEED)):
            assert private not in text
        assert "fixed seed" in text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip": "flat"}, "over all trained parameters together, is scaled down to norm C = 1 if it is longer"),
        ({"clip": "per-layer"}, "parameter by parameter, each to its own share of the bound"),
        ({"clip": "automatic"}, "multiplied by C / (its norm + 0.01)"),
        ({"clip": "quantile"}, "C starts at 1 and follows the median of the norms, by a noised count"),
        ({"optimizer": "kfac", "kfac_data": "synthetic"}, "The curvature is measured on synthetic samples"),
        ({"optimizer": "kfac", "kfac_data": "noised"}, "these releases are part of the accounting"),
        ({"optimizer": "kfac", "kfac_data": "open.txt"}, "measured on data that was given as public"),
        ({"lora": 8}, "LoRA adapters of rank 8"),
        ({"model": "models/gpt2"}, "The first parameters came from an earlier training"),
        ({"dtype": "bfloat16"}, "moves the sum by at most C, up to rounding of 1e-6 C"),
        ({"public_data": "wiki.txt"}, "Samples that were given as public are among the samples"),
        ({"population": 1500}, "1500 is a number that was announced as public"),
        ({"population": None}, "1500 is the number of samples rounded up to two digits and a multiple of 10"),
    ],
)
def test_every_kind_of_run_has_its_own_words(tmp_path, settings, words):
    run = read_facts(read_run_folder(write_run(tmp_path / "run", summary={}, **settings)))
    from fdp.report.mechanism_words import describe_mechanism

    assert words in " ".join(describe_mechanism(run))


@pytest.mark.parametrize("name", ["flat", "per-layer", "automatic", "quantile"])
def test_every_clipping_style_of_the_command_line_has_words(name):
    from fdp.cli.configure import make_clip_style
    from fdp.cli.train_options import PrivacyOptions
    from fdp.report.mechanism_words import CLIPPING

    make_clip_style(PrivacyOptions(clip=name), batch_size=32)
    assert name in CLIPPING


def test_a_run_that_stopped_early_or_diverged_or_never_finished_says_so(tmp_path):
    stopped = {"steps": 12, "epsilon_if_stop_was_decided_in_advance": 0.4321}
    text = text_of(write_run(tmp_path / "a", summary=stopped))
    assert "12 were made. The stated epsilon is that of all planned steps" in text
    assert "If the number of steps was decided before the run, epsilon is 0.433" in text
    text = text_of(write_run(tmp_path / "b", summary=stopped | {"diverged": {"step": 12}}))
    assert "was ended because its loss diverged, and exported no model" in text
    assert "decided before the run" not in text, "the loss decided"
    text = text_of(write_run(tmp_path / "c"))
    assert "The run has not finished. This is the guarantee of all its planned steps" in text


def test_a_run_without_privacy_says_so_plainly_and_nothing_else(tmp_path):
    promise = Guarantee(None, None, None, "one record")
    text = text_of(write_run(tmp_path / "run", promises=(promise,), summary={"epsilon": None, "delta": None}))
    assert "This run is not differentially private: no noise was added" in text
    assert "NIST" not in text


def test_a_run_of_an_older_fdp_is_rebuilt_from_its_settings(tmp_path):
    new = write_run(tmp_path / "new", summary={}, clip="flat")
    old = write_run(tmp_path / "old", promises=(), summary={}, clip="flat")
    assert read_facts(read_run_folder(old)).promise.releases == read_facts(read_run_folder(new)).promise.releases
    unfinished = write_run(tmp_path / "unfinished", promises=())
    with pytest.raises(FdpError, match="the command that began it can finish it"):
        read_facts(read_run_folder(unfinished))


def test_people_with_several_records_have_an_epsilon_of_their_own(tmp_path):
    run = read_facts(read_run_folder(write_run(tmp_path / "run", summary={})))
    facts = make_statement(run, records_per_person=4).facts
    assert facts["person_epsilon"] == facts["group_epsilon"]["4"] > 2 * EPSILON
    assert make_statement(run).facts["person_epsilon"] is None
    assert make_statement(run, records_per_person=1).facts["person_epsilon"] == EPSILON
    user = run._replace(promise=run.promise._replace(unit="one user (up to 8 windows of 128 bytes)"))
    assert make_statement(user).facts["person_epsilon"] == EPSILON
    row = run._replace(promise=run.promise._replace(unit="one packed row of anyone's records (up to 128 bytes)"))
    statement = make_statement(row, records_per_person=4)
    assert statement.facts["person_epsilon"] is None
    assert "A person is no group of rows" in as_text(statement.document)
    with pytest.raises(FdpError, match=r"--records-per-person: expected 1 to 200, got 0"):
        make_statement(run, records_per_person=0)


@pytest.mark.long
def test_the_epsilon_of_a_person_counts_units_that_were_held_out(tmp_path):
    """One record trained on and one held out: both reach the outside, so the evaluations count."""
    evaluations = (Release("evaluations", 1.0, 0.8, 5),)
    run = read_facts(read_run_folder(write_run(tmp_path / "run", summary={}, eval_fraction=0.1)))
    run = run._replace(promise=run.promise._replace(evaluations=evaluations), evaluation_costs=frozenset({"noised"}))
    one_each = composed_epsilon([*RELEASES, *evaluations], delta=1e-6)
    plain = make_statement(run._replace(promise=PROMISE), records_per_person=2).facts["person_epsilon"]
    assert plain < one_each <= make_statement(run, records_per_person=2).facts["person_epsilon"]
    held_out = composed_epsilon(evaluations, delta=1e-6)
    assert make_statement(run).facts["guarantee"]["epsilon_held_out"] == pytest.approx(held_out)
    said = f"Units that were held out have epsilon = {shown_epsilon(held_out)} at the same delta instead"
    assert said in " ".join(as_text(make_statement(run).document).split())
    assert make_statement(run, records_per_person=1).facts["person_epsilon"] == pytest.approx(held_out)
    text = " ".join(as_text(make_statement(run).document).split())
    assert "a person with several units may have some on both sides" in text
    assert "people are disjoint" not in text
    given = run._replace(settings=run.settings | {"eval_fraction": None, "eval_data": "others.jsonl"})
    assert "for the author to confirm" in " ".join(as_text(make_statement(given).document).split())
    user = run._replace(
        promise=run.promise._replace(unit="one user (up to 8 windows of 128 bytes)"),
        evaluation_costs=frozenset({"outside"}),
    )
    text = " ".join(as_text(make_statement(user).document).split())
    assert "the stated epsilon holds for a person who was trained on" in text
    assert "Nothing is promised to people who were held out" in text


@pytest.mark.parametrize("cost", ["public", "outside"])
def test_samples_that_are_evaluated_and_trained_on_are_told_without_their_number(tmp_path, cost):
    number = 4711
    folder = write_run(tmp_path / "run", summary={}, eval_data="secret/others.jsonl")
    records = make_records(4, evaluate_every=2, cost=cost)
    apart = "\n".join(json.dumps(record_to_json(each)) for each in records)
    (folder / "metrics.jsonl").write_text(apart)
    assert "trained on too" not in text_of(folder)
    (folder / "metrics.jsonl").write_text(apart.replace('"shared": 0', f'"shared": {number}'))
    facts = read_facts(read_run_folder(folder))
    text, found = text_of(folder), make_statement(facts).facts
    measured = text[text.index("Evaluation: - ") : text.index("Hyper-parameters")]
    assert "Some of the samples are trained on too" in measured
    assert "the held-out loss is lower than on new samples" in measured
    assert ("their exact losses are released, which their epsilon does not cover" in measured) == (cost == "outside")
    assert ("no epsilon covers their exact losses" in text) == (cost == "outside")
    assert "some of whose samples are trained on too" in text[text.index("Data accesses") :]
    assert "how the run ended, and of samples that are evaluated and trained on" in text
    assert found["covered"][-1].endswith("and of samples that are evaluated and trained on")
    assert str(number) not in text + json.dumps(found)


def test_an_epsilon_in_words_is_rounded_up(tmp_path):
    stopped = {"steps": 12, "epsilon_if_stop_was_decided_in_advance": 0.43211}
    assert "decided before the run, epsilon is 0.433" in text_of(write_run(tmp_path / "a", summary=stopped))


def test_a_delta_in_words_is_rounded_up(tmp_path):
    run = read_facts(read_run_folder(write_run(tmp_path / "run", summary={})))
    text = as_text(make_statement(run._replace(promise=PROMISE._replace(delta=1.0049e-6))).document)
    assert "delta = 1.01e-06" in " ".join(text.split())
    assert "1.00e-06" not in text
    assert ", 1.01e-06)-differential privacy" in " ".join(text.split())


def test_other_runs_are_composed_if_data_and_unit_are_the_same(tmp_path):
    run = read_facts(read_run_folder(write_run(tmp_path / "run", summary={})))
    twice = composed_epsilon([*RELEASES, *RELEASES], delta=1e-6)
    found = make_statement(run, others=[PROMISE._replace(run="run2")]).facts["other_runs"]
    assert found["on_this_data"]["epsilon"] == pytest.approx(twice)
    longer = PROMISE._replace(run="run2", unit="one record (its first 256 bytes)")
    assert make_statement(run, others=[longer]).facts["other_runs"]["on_this_data"] == found["on_this_data"]
    others = [
        PROMISE,  # this run itself
        PROMISE._replace(run="run3", data=("k-other",)),
        PROMISE._replace(run="run4", unit="one user"),
        Guarantee(None, None, None, "one record", run="run5", data=("k-a",)),
    ]
    statement = make_statement(run, others=others)
    found = statement.facts["other_runs"]
    assert found["on_this_data"] is None
    assert (found["other_units_on_this_data"], found["not_private_on_this_data"]) == (1, 1)
    text = " ".join(as_text(statement.document).split())
    assert "1 other private run on the same data protects another unit: such epsilons do not add up" in text


def test_runs_of_another_search_are_said_to_count_by_their_own_noise(tmp_path):
    run = read_facts(read_run_folder(write_run(tmp_path / "run", summary={})))
    others = [PROMISE._replace(run="run2"), PROMISE._replace(run="run3"), PROMISE._replace(run="far", data=("k-far",))]
    statement = make_statement(run, others=others, searches={"run2": "tune", "run3": "tune", "far": "elsewhere"})
    assert statement.facts["other_runs"]["searches_by_their_own_noise"] == ["tune"]
    text = " ".join(as_text(statement.document).split())
    assert 'Runs of the search "tune" count by their own noise here.' in text
    assert "`fdp ledger` states a total that may be larger." in text
    assert "by their own noise" not in " ".join(as_text(make_statement(run, others=others).document).split())


def test_evaluations_of_this_data_by_runs_on_other_data_are_composed(tmp_path):
    run = read_facts(read_run_folder(write_run(tmp_path / "run", summary={})))
    evaluations = (Release("evaluations", 1.0, 0.8, 5),)
    other = PROMISE._replace(run="run2", data=("k-other",), evaluations=evaluations, evaluated=("k-a",))
    statement = make_statement(run, others=[other])
    both = composed_epsilon([*RELEASES, *evaluations], delta=1e-6)
    assert statement.facts["other_runs"]["on_this_data"]["epsilon"] == pytest.approx(both)
    assert "No other run on the same data is known" not in " ".join(as_text(statement.document).split())


def test_a_choice_by_held_out_samples_in_another_run_is_stated(tmp_path):
    run = read_facts(read_run_folder(write_run(tmp_path / "run", summary={})))
    statement = make_statement(run, others=[PROMISE._replace(run="run2", held_out_choice=True)])
    assert statement.facts["other_runs"]["choices_by_held_out_samples"] == 1
    said = "The loss of held-out samples, without noise, decided what 1 earlier run exported: for samples held out"
    assert said in " ".join(as_text(statement.document).split())
    quiet = make_statement(run, others=[PROMISE._replace(run="run2", held_out_choice=False)])
    assert said not in " ".join(as_text(quiet.document).split())


def test_noise_that_another_run_drew_too_is_stated(tmp_path):
    folder = write_run(tmp_path / "run", summary={})
    (folder / MARKER).write_text(marker_text([PROMISE._replace(noise="k-one")]))
    statement = make_statement(
        read_facts(read_run_folder(folder)), others=[PROMISE._replace(run="run2", noise="k-one")]
    )
    assert statement.facts["other_runs"]["runs_that_share_noise"] == ("run1", "run2")
    said = " ".join(as_text(statement.document).split())
    assert "Runs run1 and run2 drew the same samples and noise, from one --seed: publish at most one of them" in said


def test_runs_that_another_run_links_to_the_data_are_composed(tmp_path):
    run = read_facts(read_run_folder(write_run(tmp_path / "run", summary={})))
    between, far = PROMISE._replace(run="run2", data=("k-a", "k-b")), PROMISE._replace(run="run3", data=("k-b",))
    found = make_statement(run, others=[far, between]).facts["other_runs"]
    assert found["other_runs_on_this_data"] == 2
    assert found["on_this_data"]["epsilon"] == pytest.approx(composed_epsilon([*RELEASES] * 3, delta=1e-6))
    assert make_statement(run, others=[far]).facts["other_runs"]["on_this_data"] is None
    linked = make_statement(run, others=[far], links=[between]).facts["other_runs"]
    assert linked["other_runs_on_this_data"] == 1, "the run between did not begin, and costs nothing"


@pytest.mark.parametrize(
    ("epsilon", "delta", "seed", "words"),
    [
        (2.5, 1e-6, None, ()),
        (12.0, 1e-6, None, ("Caution: an epsilon of 10 or more promises little by itself",)),
        (2.5, 0.01, None, ("Caution: delta 0.01 is not below 1 / samples", "No: one over the public number")),
        (2.5, 1e-6, 3, ("Not covered: the noise, towards whoever knows or guesses the seed",)),
    ],
)
def test_what_makes_a_guarantee_weak_is_said_with_it(tmp_path, epsilon, delta, seed, words):
    run = read_facts(read_run_folder(write_run(tmp_path / "run", summary={})))
    promise, settings = PROMISE._replace(epsilon=epsilon, delta=delta), run.settings | {"seed": seed}
    text = " ".join(as_text(make_statement(run._replace(promise=promise, settings=settings)).document).split())
    first = text[: text.index("2. Mechanism")]
    assert all(said in text for said in words)
    assert ("Caution" in first or "Not covered" in first) == bool(words)
    assert "can hardly tell" not in text
    assert ("Yes: one over the public number" in text) == (delta == 1e-6)


def test_a_statement_names_the_parameters_and_lists_noised_evaluations(tmp_path):
    evaluations = (Release("evaluations", 1.0, 4.0, 5),)
    promises = (PROMISE._replace(evaluations=evaluations, date="2026-11-18T10:00:00+00:00"),)
    run = read_facts(
        read_run_folder(write_run(tmp_path / "run", promises=promises, summary={"parameter_sha256": "ab12"}))
    )
    text = " ".join(as_text(make_statement(run).document).split())
    assert "The run began at 2026-11-18T10:00:00+00:00." in text
    assert "as in summary.json, is ab12." in text
    assert re.search(r"evaluations, of held-out units +1 +4 +5", text)
    average = write_run(tmp_path / "average", summary={"parameter_sha256": "ab12"}, ema=0.9)
    assert read_facts(read_run_folder(average)).parameter_digest is None, "what is exported are not the last parameters"


def test_a_statement_names_the_files_that_its_reader_can_check(tmp_path):
    digests = {"model/model-1.safetensors": "ab12", "model/model-2.safetensors": "cd34"}
    run = write_run(tmp_path / "run", summary={"parameter_sha256": "ef56", "file_sha256": digests}, ema=0.9)
    (run / "model.safetensors").write_bytes(b"what somebody put there later")
    statement = make_statement(read_facts(read_run_folder(run)))
    assert statement.facts["file_sha256"] == digests
    text = " ".join(as_text(statement.document).split())
    assert text.count("SHA-256") == 2
    for name, digest in digests.items():
        assert f"The SHA-256 of {name}, as sha256sum prints it, is {digest}." in text


def test_an_extended_run_states_the_chain(tmp_path):
    chain = (PROMISE, PROMISE._replace(run="run2"), PROMISE._replace(run="run3"))
    text = text_of(write_run(tmp_path / "run", promises=chain, summary={}))
    total = composed_epsilon([*RELEASES] * 3, delta=1e-6)
    assert "The first parameters came from 2 earlier private runs" in text
    assert "All of them and this run together, on the same data, by their fingerprint: epsilon" in text
    assert f"epsilon {total:.3f}"[:-1] in text


@pytest.mark.parametrize("data", [(), ("other-a",)])
def test_the_total_on_the_data_holds_every_run_that_the_guarantee_of_the_model_holds(tmp_path, data):
    first = PROMISE._replace(run="first", data=data)
    facts = read_facts(read_run_folder(write_run(tmp_path / "run", promises=(first, PROMISE), summary={})))
    statement = make_statement(facts, others=[PROMISE._replace(run="run2")])
    found, thrice = statement.facts["other_runs"], composed_epsilon([*RELEASES] * 3, delta=1e-6)
    assert found["on_this_data"]["epsilon"] == pytest.approx(thrice)
    assert (found["other_runs_on_this_data"], found["assumed_on_this_data"]) == (1, 1)
    text = " ".join(as_text(statement.document).split())
    assert "names 1 other private run on the same data with the same unit. For" in text
    assert "together with this one and with 1 earlier run assumed to be on the same data: epsilon" in text


def test_a_ledger_that_was_not_read_is_said_not_to_be(tmp_path):
    run = write_run(tmp_path / "run", summary={})
    assert "No other run on the same data is known" in text_of(run)
    text = text_of(run, ledger_read=False)
    assert "The ledger of this run was not read" in text
    assert "No other run on the same data is known" not in text
    facts = read_facts(read_run_folder(run))
    assert make_statement(facts).facts["other_runs"]["ledger_read"]
    assert not make_statement(facts, ledger_read=False).facts["other_runs"]["ledger_read"]
    again = write_run(tmp_path / "again", promises=(PROMISE, PROMISE._replace(run="run2")), summary={})
    assert "The ledger of this run was not read" in text_of(again, ledger_read=False), "also if the model names runs"


def test_the_chain_is_read_from_the_folder(tmp_path):
    run = write_run(tmp_path / "run", promises=(PROMISE, PROMISE._replace(run="run2")), summary={})
    assert read_facts(read_run_folder(run)).before == read_marker(run)[:1]
    shutil.rmtree(run)


def test_tuning_is_what_the_author_says_or_is_asked_for(tmp_path):
    run = write_run(tmp_path / "run", summary={})
    assert "chosen on public data" in text_of(run, tuning="The learning rate was chosen on public data.")
    asked = text_of(run)
    assert "Choosing them on the private data costs privacy, too" in asked
    assert asked.count("how many runs were tried, with fdp statement --tuning") == 3
    assert "please state, with fdp statement --records-per-person" in asked
    answered = text_of(run, tuning="The defaults.", records_per_person=3)
    assert "--tuning" not in answered
    assert "--records-per-person" not in answered


def test_every_unit_has_a_note():
    assert "all of a user's records are one sample" in unit_note("one user (up to 8 windows of 129 bytes)")
    assert "a longer text is in several windows" in unit_note("one window of 129 bytes")
    assert unit_note("one record of the private data").endswith("the public data is not protected")
    assert unit_note("one sample") == "the dataset decides what a sample contains"


def test_a_run_that_a_search_chose_states_the_price_of_the_choice_and_no_score(tmp_path):
    run = write_run(tmp_path / "search" / "trial-1", summary={})
    found = {
        "epsilon": 4.5671,
        "delta": 1e-6,
        "trials_mean": 8.0,
        "trials": [{"folder": "x/trial-1", "score": 0.98765}],
        "best": {"folder": "x/trial-1", "score": 0.98765},
    }
    (tmp_path / "search" / "search.json").write_text(json.dumps(found))
    text = text_of(run)
    assert text.count("the chosen model has epsilon 4.568 at delta 1e-06") >= 2, "beside the guarantee, and as tuning"
    assert "0.98765" not in text
    assert text.count("Of a search, or of an earlier run, only epsilon and delta are known") == 2, "curve, and groups"
    facts = read_facts(read_run_folder(run))
    assert make_statement(facts, records_per_person=4).facts["person_epsilon"] is None
    assert make_statement(facts, records_per_person=1).facts["person_epsilon"] == 4.5671
    extended = facts._replace(before=(PROMISE._replace(run="first"),))
    chain = make_statement(extended).facts["other_runs"]["with_runs_before"]
    assert chain["epsilon"] > 4.5671, "the price of the choice is part of the total"
    assert "said otherwise" in text_of(run, tuning="said otherwise")
    (tmp_path / "search" / "search.json").write_text(json.dumps(found | {"epsilon": None}))
    assert "no epsilon can be stated for the chosen model" in text_of(run)
    (tmp_path / "search" / "search.json").write_text(json.dumps(found | {"trials": []}))
    assert "fdp search" not in text_of(run), "a search of other runs"


@pytest.mark.parametrize(
    ("device", "repeatable", "said"), [("cuda", False, True), ("cuda", True, False), ("cpu", False, False)]
)
def test_what_attention_rounds_on_a_gpu_is_said_to_be_left_out_unless_it_adds_in_one_order(
    tmp_path, device, repeatable, said
):
    run = read_facts(read_run_folder(write_run(tmp_path / "run", summary={})))
    run = run._replace(config=run.config | {"device": device}, settings=run.settings | {"repeatable": repeatable})
    text = " ".join(as_text(make_statement(run).document).split())
    assert (" ".join(ANY_ORDER.split()) in text) is said
