"""The model and the data of ``fdp train``: folders of transformers, adapters and units of privacy."""

from __future__ import annotations

import inspect
import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fdp.cli.configure import configure
from fdp.cli.main import main
from fdp.fingerprint import fingerprint
from fdp.privacy.guarantee import MARKER
from fdp.privacy.shown_numbers import shown_epsilon
from fdp.run.prepare_run import prepare
from tests.cli.train_runs import small_options

transformers = pytest.importorskip("transformers")

TINY = shlex.split(
    "--context 8 --steps 2 --warmup 1 --batch-size 8 --microbatch 4 --noise-multiplier 0.5 --lr 0.1 --seed 0 --quiet "
    "--json --schedule constant --tokenizer bytes"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    path = tmp_path_factory.mktemp("models") / "tiny"
    transformers.GPT2LMHeadModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "letters.jsonl"
    mail = [{"sender": f"s{i % 12}", "text": f"letter {i} of many"} for i in range(60)]
    path.write_text("\n".join(map(json.dumps, mail)))
    return path


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chat.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{i}+1=", "completion": str(i + 1)}) for i in range(30)))
    return path


def train(out: Path, *words: str, code: int = 0) -> dict[str, Any]:
    with pytest.raises(SystemExit) as caught:
        main(["train", *TINY, "--out", str(out), *words])
    assert int(caught.value.code or 0) == code
    return json.loads((out / "summary.json").read_text()) if code == 0 else {}


def weights(path: Path) -> dict[str, torch.Tensor]:
    return transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()


@pytest.mark.long
def test_training_a_private_model_again_adds_up_the_guarantees(folder, letters, tmp_path, capsys):
    """The exported folder records the guarantee, and nothing about the data; the next run reads it."""
    words = ["--data", str(letters), "--unit", "record"]
    first = train(tmp_path / "first", "--model", str(folder), *words)
    assert "trained_before" not in first
    marker = json.loads((tmp_path / "first" / "model" / MARKER).read_text())
    (promised,) = marker["runs"]
    names = ("epsilon", "delta", "relation", "unit", "run")
    assert {name: promised[name] for name in names} == {name: first[name] for name in names}
    capsys.readouterr()
    again = train(tmp_path / "again", "--model", str(tmp_path / "first" / "model"), *words)
    assert [run["run"] for run in again["trained_before"]] == [first["run"]]
    total = again["epsilon_if_on_the_same_data_before"]
    assert max(first["epsilon"], again["epsilon"]) < total < first["epsilon"] + again["epsilon"]
    assert again["delta_if_on_the_same_data_before"] == first["delta"]
    assert again["epsilon_on_this_data"] == total, "the ledger and the model name the same run: it counts once"
    assert (again["epsilon_of_model"], again["delta_of_model"]) == (total, first["delta"])
    assert (first["epsilon_of_model"], first["delta_of_model"]) == (first["epsilon"], first["delta"])
    assert "On this data 1 private run began before" in again["warning"]
    assert f"together epsilon {shown_epsilon(total)}" in again["warning"]
    capsys.readouterr()
    loud = [word for word in TINY if word not in ("--quiet", "--json")]
    with pytest.raises(SystemExit):
        main(["train", *loud, "--model", str(tmp_path / "first" / "model"), *words, "--out", str(tmp_path / "loud")])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    loud = json.loads((tmp_path / "loud" / "summary.json").read_text())
    assert "On this data 2 private runs began before" in loud["warning"]
    assert "drew the same samples and noise" in loud["warning"], "with the seed of the run before"
    assert shown.count("on this data 2 private runs began before") == 2, "in the header and at the end"
    model = f"this model: epsilon {shown_epsilon(loud['epsilon_of_model'])} at delta"
    assert shown.index(model) < shown.index("step 1/"), "before the first step"
    plain = ["--method", "none", "--noise-multiplier", "0"]
    third = train(tmp_path / "third", "--model", str(tmp_path / "again" / "model"), *words, *plain)
    assert len(third["trained_before"]) == 2
    assert "this run is not private" in third["warning"]
    assert third["epsilon_if_on_the_same_data_before"] is None
    assert (third["epsilon_of_model"], third["delta_of_model"]) == (None, None)
    runs = json.loads((tmp_path / "third" / "model" / MARKER).read_text())["runs"]
    assert [run["epsilon"] is None for run in runs] == [False, False, True]
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "third" / "model") is not None


@pytest.mark.parametrize(
    "words", [pytest.param([], id="full"), pytest.param(["--lora", "2"], id="lora", marks=pytest.mark.long)]
)
def test_a_folder_is_exported_as_a_folder_that_transformers_reads(words, folder, letters, tmp_path, capsys):
    train(tmp_path / "run", "--model", str(folder), "--data", str(letters), *words)
    before, after = weights(folder), weights(tmp_path / "run" / "model")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    blocks = {name for name in before if ".h." in name and name.endswith("weight") and before[name].ndim == 2}
    assert before.keys() == after.keys()
    assert changed == (blocks if words else set(before)), "all of it, or what adapters were merged into"


def test_a_run_of_a_folder_is_named_after_it_and_overwrites_no_model(folder, letters, tmp_path, capsys, monkeypatch):
    """An existing model folder is refused at the start, not when training is done."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["train", *TINY, "--model", str(folder), "--data", str(letters)])
    assert not caught.value.code
    assert (tmp_path / "runs" / "tiny-letters-1" / "model").is_dir()
    (tmp_path / "taken" / "model").mkdir(parents=True)
    train(tmp_path / "taken", "--model", str(folder), "--data", str(letters), code=2)


def test_a_run_cut_short_at_its_end_is_resumed_and_exported_again(folder, letters, tmp_path, capsys, monkeypatch):
    words = ["--model", str(folder), "--data", str(letters), "--save-every", "1"]
    with monkeypatch.context() as patch:
        patch.setattr("fdp.report.figure.write_report", lambda *_, **__: 1 / 0)  # after the model, before the summary
        with pytest.raises(ZeroDivisionError):
            main(["train", *TINY, "--out", str(tmp_path / "run"), *words])
    assert (tmp_path / "run" / "model").is_dir()
    train(tmp_path / "run", *words)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_a_prefix_is_exported_as_a_folder_that_peft_reads(folder, letters, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    words = ["--model", str(folder), "--data", str(letters), "--prefix", "3"]
    train(tmp_path / "run", *words)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tuned = peft.PeftModel.from_pretrained(module, tmp_path / "run" / "model")
    values = tuned.prompt_encoder["default"].embedding.weight
    assert tuple(values.shape) == (3, 2 * 2 * 8)
    assert float(values.detach().std()) > 0.05, "it was trained away from where it began"
    assert not (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_prefix_trains_with_users_as_samples(folder, letters, tmp_path, capsys):
    user = ["--unit", "user", "--user-field", "sender", "--windows-per-user", "2", "--prefix", "3"]
    assert train(tmp_path / "run", "--model", str(folder), "--data", str(letters), *user)["samples"] == 12


def test_train_only_freezes_the_rest(folder, letters, tmp_path, capsys):
    train(tmp_path / "run", "--model", str(folder), "--data", str(letters), "--train-only", "*.bias")
    before, after = weights(folder), weights(tmp_path / "run" / "model")
    assert {name for name in before if not torch.equal(before[name], after[name])} == {
        name for name in before if name.endswith(".bias")
    }


@pytest.mark.long
def test_unit_defines_the_samples(folder, letters, chat, tmp_path, capsys):
    model = ["--model", str(folder)]
    record = train(tmp_path / "record", *model, "--data", str(letters), "--unit", "record")
    user = ["--unit", "user", "--user-field", "sender", "--windows-per-user", "3"]
    by_user = train(tmp_path / "user", *model, "--data", str(letters), *user)
    packed = train(tmp_path / "packed", *model, "--data", str(letters), *user, "--pack")
    masked = train(tmp_path / "chat", *model, "--data", str(chat), "--unit", "record")
    assert [run["samples"] for run in (record, by_user, packed, masked)] == [60, 12, 12, 30]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--unit", "person"], "--unit: expected one of window, record, user, row"),
        (["--unit", "person"], "if a person is to be protected, give --unit user, and --user-field with the field"),
        (["--unit", "user"], "--unit user: expected --user-field, the field of a record that names the person"),
        (["--form", "csv"], "--form: expected one of auto, text, completion, messages, file, got 'csv'"),
        (["--form", "messages"], "--form messages: expected --unit record or user to go with it"),
        (
            ["--unit", "record", "--form", "messages"],
            "line 1: expected a list of messages in 'messages', got no such field",
        ),
        (["--data", "stdlib", "--form", "text"], "--form: expected --data of texts or records to go with it"),
        (["--unit", "record", "--form", "file", "--field", "body"], "--field: expected --data of records"),
        (["--lora", "2", "--train-only", "*bias"], "--lora and --train-only: expected one of them, got 2"),
        (["--lora", "2", "--prefix", "3"], "--lora and --prefix: expected one of them, got 2"),
        (["--prefix", "0"], "--prefix: expected a whole number of at least 1, got 0"),
        (["--prefix", "9"], "fit into the model's 16 positions, or into its sliding window"),
        (["--prefix", "3", "--model", "gpt-nano"], "--prefix: expected --model to be a folder of transformers"),
        (["--lora", "0"], "--lora: expected a whole number of at least 1, got 0"),
        (["--model", "no/such/folder"], "--model"),
    ],
)
def test_mistakes_are_explained(words, message, folder, letters, tmp_path, capsys):
    train(tmp_path / "run", "--model", str(folder), "--data", str(letters), *words, code=2)
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "change", ["weights", *(pytest.param(name, marks=pytest.mark.long) for name in ("heads", "nothing"))]
)
def test_other_content_of_the_model_folder_is_other_noise_of_the_same_seed(change, folder, letters, tmp_path):
    """The path stays the same, so only the files can tell the runs apart."""
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    options = {"model": str(model), "data": str(letters), "unit": "record", "context": 8, "tokenizer": "bytes"}
    options |= {"batch_size": 8, "noise_multiplier": 1.0, "epsilon": None, "steps": 2, "warmup": 1}
    given = small_options(**options, seed=3)
    before, unseeded = configure(given), configure(replace(given, training=replace(given.training, seed=None)))
    if change == "weights":
        stored = load_file(model / "model.safetensors")
        stored["transformer.wte.weight"][100, 3] += 1
        save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    elif change == "heads":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"n_head": 4}))
    after = configure(given)
    assert (fingerprint(before.values) == fingerprint(after.values)) == (change == "nothing")
    keys = [prepare(config)[0].key for config in (before, after)]
    assert torch.equal(*keys) == (change == "nothing")
    assert "content" not in inspect.getclosurevars(unseeded.values).nonlocals, "expected no digest without a seed"
