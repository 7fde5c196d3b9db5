"""``fdp train --extend``: a new run from an old one, within one budget, without a draw of noise in common."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from fdp import tree
from fdp.cli.configure import configure
from fdp.cli.extend import continue_state, extend_settings, find_extended, restart_schedule
from fdp.cli.model_and_data import export_model
from fdp.cli.options import build
from fdp.cli.train_options import TrainOptions
from fdp.optimizers.transforms import ScheduleState
from fdp.privacy.guarantee import read_marker
from fdp.privacy.releases import composed_epsilon
from fdp.privacy.sampling import sample
from fdp.privacy.several_runs import compose
from fdp.privacy.shown_numbers import shown_epsilon
from fdp.run.prepare_run import prepare
from fdp.storage.safetensors import import_safetensors
from fdp.types import FdpError
from tests.cli.train_runs import call, interrupt_after, last_json, train


def extend(run: Path, out: Path, *words: str) -> dict[str, Any]:
    """Extend a run and return its summary."""
    assert call("train", "--extend", str(run), "--out", str(out), "--microbatch", "16", *words) == 0
    return json.loads((out / "summary.json").read_text())


def prepared(run: Path, **given: Any):
    options = build(TrainOptions, extend_settings({"extend": str(run), "microbatch": 16} | given))
    found, state = prepare(configure(options))
    return found, continue_state(options, found, state)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, without checkpoints."""
    out = tmp_path_factory.mktemp("runs") / "first"
    assert train(out, "--seed", "3", "--ledger", "off", steps=4) == 0
    return out


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a checkpoint of its last step."""
    out = tmp_path_factory.mktemp("runs") / "saved"
    assert train(out, "--save-every", "2", "--ledger", "off", steps=4) == 0
    return out


def test_a_chain_of_extensions_composes(first, tmp_path, capsys):
    second = extend(first, tmp_path / "b", "--steps", "3")
    shown = " ".join(capsys.readouterr().out.split())
    said = f"this model: epsilon {shown_epsilon(second['epsilon_total'])} at delta 1e-06, of this run and 1 earlier run"
    assert shown.index(said) < shown.index("step 1/3"), "before the first step"
    assert f"this run: epsilon {shown_epsilon(second['epsilon'])} at delta 1e-06, of its own steps alone" in shown
    third = extend(tmp_path / "b", tmp_path / "c", "--steps", "2")
    chain = read_marker(tmp_path / "c")
    assert [one.steps for one in chain] == [4, 3, 2]
    assert len({one.run for one in chain}) == 3
    assert (second["epsilon_total"], second["delta_total"]) == compose(chain[:2])
    assert (second["epsilon_of_model"], second["delta_of_model"]) == compose(chain[:2])
    releases = [release for one in chain for release in one.releases or ()]
    assert third["epsilon_total"] == pytest.approx(composed_epsilon(releases, delta=chain[0].delta or 0))
    assert third["epsilon"] < second["epsilon_total"] < third["epsilon_total"]
    assert {one.releases[0].noise_multiplier for one in chain if one.releases} == {1.0}, "the noise is kept"


def test_every_place_shows_the_epsilon_of_the_chain_first(first, tmp_path, capsys):
    """The result panel, the statement and the report: the model was trained on the same people all along."""
    found = extend(first, tmp_path / "b", "--steps", "2")
    total, alone = shown_epsilon(found["epsilon_total"]), shown_epsilon(found["epsilon"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    done = shown[shown.index(" done ") :]
    assert f"privacy epsilon {total} at delta" in done
    assert "of this run and 1 earlier run whose parameters it started from" in done
    assert f"this run epsilon {alone} at delta" in done
    assert done.count(f"epsilon {total} at delta") == done.count(f"epsilon {alone} at delta") == 1, "each figure once"
    assert call("statement", str(tmp_path / "b"), "--ledger", "off") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"differentially private with epsilon = {total} and" in said
    assert f"differential privacy with epsilon = {alone}" not in said
    assert "this is assumed" not in said, "--extend goes on with the data of the run"
    assert call("report", str(tmp_path / "b"), "--json") == 0
    (shown_run,) = last_json(capsys.readouterr().out)["runs"]
    assert shown_run["results"]["epsilon_total"] == found["epsilon_total"]
    assert f"with epsilon = {total} and" in shown_run["statement"]


@pytest.mark.long
def test_an_extension_of_a_run_without_privacy_has_no_epsilon(tmp_path, capsys):
    assert train(tmp_path / "a", "--method", "none", "--noise-multiplier", "0", "--ledger", "off") == 0
    words = ("--method", "auto", "--noise-multiplier", "1", "--delta", "1e-6", "--steps", "2")
    capsys.readouterr()
    assert extend(tmp_path / "a", tmp_path / "b", *words)["epsilon_of_model"] is None
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    done = shown[shown.index(" done ") :]
    assert "privacy none for the model: 1 earlier run that it started from used the same data without privacy" in done
    assert "covered the parameters" not in done.replace("not covered", "")
    assert call("statement", str(tmp_path / "b"), "--ledger", "off") == 0
    assert "No epsilon can be stated for the model" in capsys.readouterr().out


@pytest.mark.long
def test_the_total_stays_within_the_budget(first, tmp_path):
    """Mutation: noise for a budget of the new part alone would give a total well above it."""
    spent = json.loads((first / "summary.json").read_text())["epsilon"]
    found = extend(first, tmp_path / "b", "--steps", "5", "--epsilon", f"{spent + 0.2}")
    assert spent < found["epsilon_total"] <= spent + 0.2
    assert found["epsilon_total"] > spent + 0.19, "tight"
    again = extend(tmp_path / "b", tmp_path / "c", "--steps", "5", "--epsilon", f"{spent + 0.4}")
    assert spent + 0.39 < again["epsilon_total"] <= spent + 0.4


def test_a_budget_that_is_spent_already_is_refused(first, tmp_path, capsys):
    assert call("train", "--extend", str(first), "--out", str(tmp_path / "b"), "--epsilon", "0.1") == 2
    assert "expected more than the" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_it_starts_from_the_last_parameters(first, saved):
    for folder in (first, saved):
        _, state = prepared(folder)
        stored = tree.flatten(import_safetensors(folder / "model.safetensors", state.params))
        for path, leaf in tree.flatten(state.params).items():
            assert torch.equal(leaf, stored[path])
        assert int(state.step) == 0


def test_no_samples_and_no_noise_are_drawn_twice(first):
    """With the same seed, steps and settings too: the extended run is folded into the key."""
    options = build(TrainOptions, json.loads((first / "config.json").read_text())["settings"])
    then, _ = prepare(configure(options))
    now, _ = prepared(first, seed=3)
    free, _ = prepared(first)
    assert torch.equal(then.root, now.root), "the seed is the same"
    assert not torch.equal(then.root, free.root), "without a seed, the key is new"
    for run in (now, free):
        assert not torch.equal(then.key, run.key)
        drawn = [sample(each.mechanism.sampling, each.key) for each in (then, run)]
        assert drawn[0].tolist() != drawn[1].tolist()


def test_a_chain_with_one_seed_shares_no_key(saved, tmp_path):
    """Mutation: without the extended run in the key, every link of the chain would draw the same noise."""
    extend(saved, tmp_path / "b", "--seed", "3", "--save-every", "2", "--steps", "4")
    runs = [prepared(folder, seed=3, steps=4)[0] for folder in (saved, tmp_path / "b")]
    assert torch.equal(runs[0].root, runs[1].root)
    assert not torch.equal(runs[0].key, runs[1].key)


def test_the_state_of_the_optimizer_goes_on_and_the_schedule_begins_again(saved):
    _, state = prepared(saved)
    moments, *_, schedule = state.opt
    assert int(moments.step) == 4
    assert any(bool((leaf != 0).any()) for leaf in tree.leaves(moments.mean))
    assert int(schedule.step) == 0
    assert restart_schedule((moments, ScheduleState(torch.tensor(7))))[0] is not None
    other = find_extended(str(saved), optimizer="sgd")
    assert other.checkpoint is None, "another optimizer has no state there"


def test_an_interrupted_run_is_extended_from_its_checkpoint(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert train(tmp_path / "a", "--save-every", "1", steps=4) == 130
    found = extend(tmp_path / "a", tmp_path / "b", "--steps", "2")
    chain = read_marker(tmp_path / "b")
    assert [one.steps for one in chain] == [4, 2], "the steps that were planned count"
    assert found["epsilon_total"] == (compose(chain) or (0,))[0]


def test_an_extension_resumes(saved, tmp_path, monkeypatch):
    words = ("--extend", str(saved), "--out", str(tmp_path / "b"), "--microbatch", "16", "--steps", "4")
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert call("train", *words, "--save-every", "1") == 130
    assert call("train", *words, "--save-every", "1") == 0
    assert len(read_marker(tmp_path / "b")) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "stdlib"), "expected --data to be that of the run"),
        (("--model", "mlp"), "expected --model to be that of the run"),
        (("--unit", "record"), "expected --unit to be that of the run"),
    ],
)
def test_other_data_or_another_model_is_refused(first, tmp_path, capsys, words, message):
    assert call("train", "--extend", str(first), "--out", str(tmp_path / "b"), *words) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FdpError, match="expected the folder of a run of fdp train"):
        find_extended(str(tmp_path))


def test_a_run_without_parameters_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert train(tmp_path / "a", "--save-every", "3", steps=6) == 130
    for path in (tmp_path / "a" / "checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    with pytest.raises(FdpError, match="expected a run with a checkpoint of its last step, or a model"):
        find_extended(str(tmp_path / "a"))


def test_a_run_without_privacy_has_no_budget_to_share(tmp_path, capsys):
    assert train(tmp_path / "a", "--method", "none", "--noise-multiplier", "0") == 0
    capsys.readouterr()
    words = ("--extend", str(tmp_path / "a"), "--out", str(tmp_path / "b"), "--epsilon", "3", "--method", "auto")
    assert call("train", *words) == 2
    assert "trained without privacy: no budget covers it" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="full", marks=pytest.mark.slow),
        pytest.param(["--lora", "2"], id="lora", marks=pytest.mark.slow),
        pytest.param(["--lora", "2", "--save-every", "2"], id="saved"),
    ],
)
def test_a_folder_of_transformers_is_extended(words, tmp_path):
    """The whole model, merged adapters, and adapters that go on from a checkpoint."""
    transformers = pytest.importorskip("transformers")
    model, notes = tmp_path / "tiny", tmp_path / "notes.jsonl"
    torch.manual_seed(0)
    sizes = {"n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=256, **sizes)).save_pretrained(model)
    notes.write_text("\n".join(json.dumps({"text": f"{i} abc " * (3 + i % 5)}) for i in range(40)))
    tiny = shlex.split(
        "--tokenizer bytes --noise-multiplier 1 --batch-size 8 --microbatch 8 --steps 2 --context 8 --unit record"
    )
    a = tmp_path / "a"
    assert call("train", "--model", str(model), "--data", str(notes), "--out", str(a), *tiny, *words) == 0
    options = build(TrainOptions, extend_settings({"extend": str(a), "microbatch": 8}))
    run, state = prepare(configure(options))
    state = continue_state(options, run, state)
    (tmp_path / "same").mkdir()
    export_model(state.params, options.model, tmp_path / "same", guarantees=[])
    then, now = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
        for folder in (a, tmp_path / "same")
    )
    assert then.keys() == now.keys()
    for name, leaf in then.items():
        assert torch.allclose(leaf, now[name], atol=1e-6), "it starts where the run ended"
    found = extend(a, tmp_path / "b", "--steps", "2")
    chain = read_marker(tmp_path / "b" / "model")
    assert len(chain) == 2
    assert chain == read_marker(tmp_path / "b")
    assert (found["epsilon_total"], found["delta_total"]) == compose(chain)
    assert found["epsilon_on_this_data"] == found["epsilon_total"], "recognised, whatever the model"


def test_a_run_that_a_search_chose_is_extended_with_the_price_of_the_choice(first, tmp_path):
    trial = tmp_path / "search" / "trial-1"
    shutil.copytree(first, trial)
    one = {"folder": "trial-1", "score": 1.0}
    found = {"epsilon": 50.0, "delta": 1e-6, "trials_mean": 8.0, "trials": [one], "best": one}
    (trial.parent / "search.json").write_text(json.dumps(found))
    (promise,) = find_extended(str(trial)).chain
    assert (promise.epsilon, promise.releases) == (50.0, None)
    total = compose([promise, *find_extended(str(first)).chain])
    assert total is not None
    assert total[0] >= 50, "one run is one run, whatever it is called"
    with pytest.raises(FdpError, match="or a search chose"):
        prepared(trial, epsilon=60.0)
    (trial.parent / "search.json").write_text(json.dumps(found | {"best": None}))
    assert find_extended(str(trial)).chain == (promise,), "whoever goes on from another run has seen the search"
    (trial.parent / "search.json").write_text(json.dumps(found | {"epsilon": None}))
    assert not find_extended(str(trial)).chain[0].private
