"""Names that people try are understood, or answered by what fdp calls them; errors name the flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from fdp import models
from fdp.cli import choices, configure, model_and_data, names
from fdp.cli.flag_names import FLAGS, name_flag
from fdp.cli.leaf_names import lora_targets
from fdp.cli.main import app
from fdp.cli.options import options_of
from fdp.cli.other_names import COMMANDS, MEANT, WHY, answer
from fdp.cli.start_options import StartOptions
from fdp.cli.tour import TOUR
from fdp.cli.train_options import TrainOptions
from fdp.data import datasets
from fdp.data.files import RecordForm
from fdp.data.user_fields import user_fields
from fdp.fast.compile_modes import Compile
from fdp.gradients.plan import Method
from fdp.optimizers import by_name
from fdp.types import FdpError
from tests.cli.train_runs import call, last_json, small_options, train
from tests.test_readme import parse

TRAIN_FLAGS = {each.name for group in (TrainOptions, StartOptions) for each in options_of(group).values()}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--learning-rate", "no such option --learning-rate: fdp calls it --lr"),
        ("--batch", "fdp calls it --batch-size"),
        ("--bs", "fdp calls it --batch-size"),
        ("--max-grad-norm", "no such option --max-grad-norm: fdp calls it --max-norm"),
        ("--max_grad_norm", "no such option --max_grad_norm: fdp calls it --max-norm"),
        ("--batch_size", "no such option --batch_size: fdp calls it --batch-size"),
        ("--output-dir", "fdp calls it --out"),
        ("--num-epochs", "fdp calls it --epochs"),
        ("--num_train_epochs", "fdp calls it --epochs"),
        ("--gradient-accumulation-steps", "--batch-size is the batch of a step, --microbatch is what fits at once"),
        ("--bf16", "fdp calls it --dtype bfloat16"),
        ("--fp16", "use --dtype bfloat16. float16 overflows"),
        ("--per-device-train-batch-size", "fdp calls it --microbatch"),
        ("--lr-scheduler-type", "fdp calls it --schedule"),
        ("--target-epsilon", "fdp calls it --epsilon"),
        ("--noise", "fdp calls it --noise-multiplier"),
        ("--sigma", "fdp calls it --noise-multiplier"),
        ("--disable-dp", "fdp calls it --method none"),
        ("--nonsense", "No such option: --nonsense"),
    ],
)
def test_an_option_of_another_tool_is_answered(
    option: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--json", option, "1") == 2
    assert message in last_json(capsys.readouterr().out)["error"]


def test_every_answer_names_an_option_that_there_is_and_no_option_is_answered() -> None:
    assert set(MEANT.values()) <= TRAIN_FLAGS
    assert not (MEANT.keys() | WHY.keys()) & TRAIN_FLAGS
    assert not MEANT.keys() & WHY.keys()
    for option in (*MEANT, *WHY):
        assert answer(option, TRAIN_FLAGS) is not None, option
    assert answer("--sigma", {"--noise-multiplier"}) is not None
    assert answer("--sigma", {"--world"}) is None
    assert answer("--nonsense", TRAIN_FLAGS) is None


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("resume", "no such command resume: fdp train resumes"),
        ("extend", "fdp train --extend RUN"),
        ("check-data", "fdp inspect --data FILE"),
        ("check_data", "no such command check_data: fdp inspect --data FILE"),
        ("nonsense", "No such command 'nonsense'"),
    ],
)
def test_a_command_that_people_try_is_answered(command: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(command, "runs/notes", "--json") == 2
    assert message in last_json(capsys.readouterr().out)["error"]


def test_every_answer_to_a_command_names_one_that_there_is() -> None:
    commands: Any = getattr(typer.main.get_command(app), "commands", {})
    assert not COMMANDS.keys() & commands.keys()
    for said in COMMANDS.values():
        words = said.split()
        flags = {word for word in words if word.startswith("--")} - {"--version", "--help"}
        assert words[0] == "fdp"
        if words[1] in commands:
            assert flags <= {flag for option in commands[words[1]].params for flag in option.opts}
        else:
            assert words[1] in ("--version", "--help")


def test_other_commands_are_answered_with_their_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("epsilon", "--sigma", "1", "--json") == 2
    assert "fdp calls it --noise-multiplier" in last_json(capsys.readouterr().out)["error"]
    assert call("inspect", "gpt2", "--sigma", "1", "--json") == 2
    assert "fdp calls it" not in last_json(capsys.readouterr().out)["error"]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("peak: expected a number", "--lr: expected a number"),
        ("noise multiplier: expected enough noise", "--noise-multiplier: expected enough noise"),
        ("noise_multiplier: expected a number", "--noise-multiplier: expected a number"),
        ("expected_batch_size: expected at most", "--batch-size: expected at most"),
        ("rank 1: delta: expected a probability", "rank 1: --delta: expected a probability"),
        ("model mlp: a classifier has no context", "--model mlp: a classifier has no context"),
        ("statistics.period: expected", "--kfac-period: expected"),
        ("fraction held out: expected", "--eval-fraction: expected"),
        ("kfac: expected a source of curvature", "--optimizer kfac: expected a source of curvature"),
        ("data 'digits' is images: expected a classifier", "--data 'digits' is images: expected a classifier"),
        ("rank 1 of 2 has ended: start again", "rank 1 of 2 has ended: start again"),
        ("step 7: w became NaN", "step 7: w became NaN"),
        ("notes.jsonl: expected text", "notes.jsonl: expected text"),
        ("/data/steps: expected text", "/data/steps: expected text"),
        ("--lr: expected", "--lr: expected"),
        ("expected two of them", "expected two of them"),
    ],
)
def test_an_error_of_the_library_names_the_flag(message: str, named: str) -> None:
    assert name_flag(message, TRAIN_FLAGS) == named
    assert name_flag(message, set()) == message


def test_every_renamed_setting_has_a_flag() -> None:
    assert {flag.split()[0] for flag in FLAGS.values()} - {"--count-noise"} <= TRAIN_FLAGS


# Values


def test_names_for_completion_are_the_names_that_are_accepted() -> None:
    assert set(choices.MODELS) == set(models.PRESETS)
    assert choices.DATA == datasets.NAMES
    assert set(choices.FORMS) == set(names.by_value(RecordForm))
    assert choices.UNITS == model_and_data.UNITS
    assert set(choices.METHODS) == set(names.by_value(Method))
    assert set(choices.OPTIMIZERS) == {*by_name.OPTIMIZERS, "kfac"}
    assert set(choices.DTYPES) == {"auto", *names.DTYPES}
    assert set(choices.STORED_DTYPES) == {"auto", *configure.STORED_DTYPES}
    assert set(choices.COMPILE) == {"auto", *names.by_value(Compile)}
    for schedule in choices.SCHEDULES:
        configure.make_schedule(small_options(schedule=schedule).training)
    for clip in choices.CLIPS:
        configure.make_clip_style(small_options(clip=clip).privacy, batch_size=32)
    for device in choices.DEVICES[:2]:
        configure.make_device(small_options(device=device).compute)


def test_a_linear_schedule_falls_to_zero_after_the_warm_up() -> None:
    import torch

    rate = configure.make_schedule(small_options(schedule="linear", lr=1.0, steps=6, warmup=2).training)
    assert [round(float(rate(torch.tensor(step))), 6) for step in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "meta-llama/Llama-3.2-1B",
            "download it first: hf download meta-llama/Llama-3.2-1B --local-dir models/Llama-3.2-1B; then give "
            "models/Llama-3.2-1B",
        ),
        ("gpt-2", "Did you mean 'gpt2'?"),
        ("gtp2", "Did you mean 'gpt2'?"),
        ("GPT2-Large", "Did you mean 'gpt2-large'?"),
        ("distilgpt2", "hf download distilgpt2 --local-dir models/distilgpt2"),
    ],
)
def test_a_model_of_the_hub_is_to_be_downloaded_first(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", "--json", "--model", name) == 2
    assert message in last_json(capsys.readouterr().out)["error"]


@pytest.mark.parametrize("name", ["./my-modle", "my-modle", "my-moddle/", "../here/my-modle"])
def test_a_mistyped_folder_of_a_model_is_answered(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("my-model", "my-modles"):
        (tmp_path / "here" / folder).mkdir(parents=True)
    (tmp_path / "here" / "my-model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(FdpError) as caught:
        model_and_data.check_model_name(name)
    assert "my-model'?" in str(caught.value)
    assert ("hf download" in str(caught.value)) == (name[0] != ".")


def test_the_folder_of_a_run_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text('{"settings": {}}')
    for words in (["train", "--model", str(run)], ["inspect", str(run)]):
        assert call(*words, "--json") == 2
        error = last_json(capsys.readouterr().out)["error"]
        assert f"got {run}, that of a run; fdp train --extend {run} goes on training from it" in error
    (run / "model").mkdir()
    with pytest.raises(FdpError, match=f"its model is {run / 'model'}"):
        model_and_data.check_model_name(str(run))


@pytest.mark.parametrize("config", ["{}", "{", '{"model_type": "nonsense"}'])
@pytest.mark.parametrize("context", [[], ["--context", "8"]])
def test_a_configuration_that_transformers_cannot_read_is_explained(
    config: str, context: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(config)
    assert call("train", "--model", str(tmp_path), *context, "--json") == 2
    error = last_json(capsys.readouterr().out)["error"]
    assert "config.json: expected the configuration of a model of transformers, as save_pretrained writes it" in error


@pytest.mark.parametrize("name", ["notes", "notes.jsonl"])
def test_data_given_to_inspect_as_a_model_is_answered(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    Path("notes.jsonl").write_text('{"text": "a"}')
    assert call("inspect", name, "--json") == 2
    assert last_json(capsys.readouterr().out)["error"].endswith(f"if it is data: fdp inspect --data {name}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "notes"], "got notes without one; give data with --data, a model with --model"),
        (["advise", "notes", "more"], "got notes more without one; give data with --data, a model with --model"),
        (["generate", "runs/a", "--prompt", "The", "patient"], "got patient without one; put a value with spaces in"),
        (["statement"], "RUN: expected it on the command line, got none; add it (The folder of a run of fdp train)"),
        (["generate"], "expected it on the command line, got none; add it (The folder of a finished run or search"),
        (["report"], "RUNS: expected it on the command line, got none; add it (Folders of runs, finished or not)"),
    ],
)
def test_missing_words_and_words_too_many_are_explained(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(*words) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_mistyped_in_two_parts_is_answered_and_another_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    (tmp_path / "models" / "weights.bin").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert model_and_data.near_model_folder("modles/tny") == "models/tiny"
    assert model_and_data.near_model_folder(str(tmp_path / "models" / "tinny")) == str(tmp_path / "models" / "tiny")
    assert model_and_data.near_model_folder("models/other") is None
    with pytest.raises(FdpError, match=r"/nope/x', which is neither\. Check the path"):
        model_and_data.check_model_name("/nope/x")
    with pytest.raises(FdpError, match=r"which is a file; give the folder with config\.json"):
        model_and_data.check_model_name("models/weights.bin")


@pytest.mark.parametrize("name", ["bf16", "float16", "fp16", "half"])
def test_other_names_of_dtypes_are_answered(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--json", "--dtype", name) == 2
    error = last_json(capsys.readouterr().out)["error"]
    assert "bfloat16" in error
    assert ("float16 overflows" in error) == (name != "bf16")


def test_lora_targets_are_names_or_patterns() -> None:
    llama, gpt = models.build("llama-nano", context=8), models.build("gpt-nano", context=8)
    layers = sorted({int(path.split(".")[1]) for path in llama.leaves if path.startswith("blocks.")})
    named = [f"blocks.{layer}.{name}" for name in ("query", "value") for layer in layers]
    assert lora_targets(llama, "query, value") == tuple(named)
    assert lora_targets(llama, "blocks.*.query") == ("blocks.*.query",)
    assert lora_targets(gpt, "all-linear") == lora_targets(gpt, None)
    assert all("norm" not in path and "bias" not in path for path in lora_targets(gpt, None))
    with pytest.raises(FdpError) as caught:
        lora_targets(gpt, "q_proj,v_proj")
    assert "--lora-targets: expected a name or a pattern of leaves" in str(caught.value)
    assert "'q_proj', which fits none; there are embed.tokens, embed.positions, blocks.*.qkv, blocks.*.out" in str(
        caught.value
    )
    with pytest.raises(FdpError, match="got none"):
        lora_targets(gpt, ",")


def test_module_names_of_transformers_select_the_same_matrices_as_peft(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from fdp.cli.model_and_data import load_model

    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
        max_position_embeddings=32,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    options = small_options(model=str(tmp_path), lora=2, lora_targets="q_proj,v_proj", context=8)
    model = load_model(options).model
    adapted = {path.removesuffix("_lora_a").split(".")[-2] for path in model.trainable if path.endswith("_lora_a")}
    assert adapted == {"q_proj", "v_proj"}
    assert len(model.trainable) == 8


# The unit of a person


def notes(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_missing_user_field_is_answered_by_the_fields_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"ward": "B", "patient_id": 4711 + i, "text": "slept well", f"Canary{i}": "x"} for i in range(5)]
    path = notes(tmp_path / "notes.jsonl", *rows)
    words = ["--model", "gpt-nano", "--context", "8", "--data", str(path), "--json"]
    assert train(tmp_path / "run", *words, "--unit", "user") == 2
    error = last_json(capsys.readouterr().out)["error"]
    assert "--unit user: expected --user-field" in error
    assert "it could be patient_id or ward. For example: --user-field patient_id" in error
    assert "4711" not in error
    assert "Canary" not in error
    assert train(tmp_path / "run", *words, "--user-field", "ward") == 2
    error = last_json(capsys.readouterr().out)["error"]
    assert "--user-field: expected --unit user to go with it, got --unit window" in error


def test_only_fields_of_every_record_are_shown_and_never_values(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    assert user_fields(notes(path, {"by": "Ann", "text": "a"}, {"by": "Bob", "text": "b"}), text_field="text") == (
        "by",
    )
    assert user_fields(notes(path, {"Ann": "x", "text": "a"}), text_field="text") == ()  # one record could be a secret
    rows = ({"by": "Ann", "Ann": 1, "text": "a"}, {"by": "Bob", "text": "b"}, {"by": "Eve", "text": "c"})
    assert user_fields(notes(path, *rows), text_field="text") == ("by",)
    assert (
        user_fields(notes(path, {"long": "a" * 300, "body": "b"}, {"long": "c", "body": "d"}), text_field="body") == ()
    )
    path.write_text('{"broken')
    assert user_fields(path, text_field="text") == ()
    assert user_fields(tmp_path / "nothing", text_field="text") == ()


# The tour and the shell


def test_every_command_of_the_tour_parses() -> None:
    commands = [line.strip().split("  ")[0] for line in TOUR.splitlines() if line.startswith("  fdp ")]
    assert len(commands) == 5
    for command in commands:
        parse(command.split(" > ")[0].split()[1:])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("fdp train --method gh", {"ghost", "ghost_bk"}),
        ("fdp train --model gpt2-", {"gpt2-medium", "gpt2-large", "gpt2-xl"}),
        ("fdp train --schedule ", {"constant", "cosine", "linear"}),
        ("fdp train --data no", {"notes.jsonl", "novels/"}),
        ("fdp train --data novels/a", {"novels/a.txt"}),
        ("fdp train --conf", {"--config"}),
    ],
)
def test_a_shell_completes_options_names_and_paths(line: str, found: set[str], tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("")
    (tmp_path / "novels").mkdir()
    (tmp_path / "novels" / "a.txt").write_text("")
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": str(root), "_FDP_COMPLETE": "complete_bash", "COMP_WORDS": line}
    env["COMP_CWORD"] = str(len(line.split(" ")) - 1)
    code = "import sys; from fdp.cli.main import main\ntry: main([])\nfinally: assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert set(done.stdout.split()) == found, done.stderr


def test_completion_can_be_shown() -> None:
    group: Any = typer.main.get_command(app)
    assert {"--install-completion", "--show-completion"} <= {flag for each in group.params for flag in each.opts}
