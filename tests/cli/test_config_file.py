"""``--config``: a file gives the same options as the command line, and what a run saves repeats it."""

from __future__ import annotations

import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdp.cli.config_file import EXCLUSIVE, config_text, merge, read_config, sections, settle
from fdp.cli.options import OptionField, build, options_of, to_dict
from fdp.cli.train_options import TrainOptions
from fdp.types import FdpError
from tests.cli.train_runs import SMALL, call, last_json, train

NOT_PRIVATE = "--model logistic --data digits --method none --batch-size 32 --steps 2"
LETTERS = st.characters(exclude_categories=("Cs",))


def values_of(option: OptionField) -> st.SearchStrategy[Any]:
    """Return values of the option's type, unusual ones too."""
    some: dict[type, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.integers(-(2**62), 2**62),
        float: st.floats(allow_nan=False),
        str: st.text(LETTERS),
        Path: st.text(LETTERS, min_size=1).map(Path),
    }
    value = some.get(option.value_type, st.lists(st.text(LETTERS), min_size=1))
    return st.none() | value if option.default is None else value


ALL_OPTIONS = st.fixed_dictionaries(
    {}, optional={key: values_of(each) for key, each in options_of(TrainOptions).items()}
)


@given(values=ALL_OPTIONS)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]) -> None:
    for other in (*(last for _, last in EXCLUSIVE), "extend"):
        values.pop(other, None)
    options = build(TrainOptions, values)
    path = tmp_path_factory.mktemp("config") / "run.toml"
    path.write_text(config_text(to_dict(options), heading="The settings."), encoding="utf-8")
    assert build(TrainOptions, read_config(path)) == options


def test_an_option_without_a_value_is_a_comment_so_none_must_be_its_default() -> None:
    for option in options_of(TrainOptions).values():
        assert option.default is None or option.check(option.default) is not None
        with pytest.raises(FdpError) if option.default is not None else pytest.MonkeyPatch.context():
            option.check(None)


def test_the_text_names_every_option_with_its_help() -> None:
    text = " ".join(config_text(to_dict(TrainOptions())).replace("#", " ").split())
    for key, option in options_of(TrainOptions).items():
        assert f"{key} =" in text
        assert " ".join(option.flag.help.split()[:6]) in text


def test_flat_keys_and_sections_give_the_same(tmp_path: Path) -> None:
    (tmp_path / "flat.toml").write_text("model = 'mlp'\nbatch-size = 32\nkfac_damping = 1\njson = true\n")
    (tmp_path / "sections.toml").write_text(
        "[model]\nmodel = 'mlp'\n[training]\nbatch_size = 32\n[kfac]\ndamping = 1\n[output]\nas_json = true\n"
    )
    flat, nested = read_config(tmp_path / "flat.toml"), read_config(tmp_path / "sections.toml")
    assert flat == nested == {"model": "mlp", "batch_size": 32, "kfac_damping": 1, "as_json": True}
    assert "kfac" in sections()


def test_the_file_in_the_documentation_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    (tmp_path / "run.toml").write_text(page.split("```toml\n")[1].split("```")[0])
    assert read_config(tmp_path / "run.toml")["kfac_damping"] == 0.1
    named = page.split("The sections have the names of the groups:")[1].split(".")[0]
    assert {word.strip(" `\n") for word in named.split(",")} == set(sections())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_sise = 3", "run.toml: expected the name of an option, got 'batch_sise'; did you mean 'batch_size'?"),
        ("zzzzzz = 3", "got 'zzzzzz'; fdp train --show-config lists all of them"),
        ("steps = 'many'", "run.toml, steps: --steps: expected a whole number, got 'many'"),
        ("[training]\nstpes = 3", "expected the name of an option, got 'stpes'; did you mean 'steps'?"),
        ("[trainin]\nsteps = 3", "got [trainin]; did you mean 'training'?"),
        ("[privacy]\nlr = 3", "expected lr in the section [training], got it in [privacy]"),
        ("steps = 3\n[training]\nsteps = 4", "expected every option once, got steps twice"),
        ("steps = 3\nepochs = 1", "run.toml: expected either --steps or --epochs, got both; leave one out"),
        ("epsilon = 3\nnoise_multiplier = 1", "expected either --epsilon or --noise-multiplier, got both"),
        ("steps 3", "expected a TOML file, got an error when reading"),
    ],
)
def test_a_mistake_in_a_file_names_the_file_and_the_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(FdpError) as caught:
        read_config(tmp_path / "run.toml")
    assert message in str(caught.value)


def test_a_file_that_is_not_there_and_a_folder_are_explained(tmp_path: Path) -> None:
    with pytest.raises(FdpError, match="does not exist"):
        read_config(tmp_path / "run.toml")
    with pytest.raises(FdpError, match=r"did you mean .*config\.toml\?"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FdpError, match=r"a run's settings are in its config\.toml"):
        read_config(tmp_path / "config.json")


def test_flags_replace_settings_and_what_they_exclude() -> None:
    file = {
        "epochs": 3.0,
        "noise_multiplier": 1.0,
        "lora": 4,
        "lora_alpha": 8.0,
        "mesh": "shard=2",
        "nproc": 2,
        "lr": 1.0,
    }
    assert merge(file, {}) == file
    assert merge(file, {"steps": 5, "epsilon": 2.0, "lr": 0.1}) == {
        "lora": 4, "lora_alpha": 8.0, "mesh": "shard=2", "nproc": 2, "lr": 0.1, "steps": 5, "epsilon": 2.0,
    }  # fmt: skip
    assert merge(file, {"train_only": "*bias", "nproc": 4}).keys() & {"lora", "lora_alpha", "mesh"} == set()
    with pytest.raises(FdpError, match="command line: expected either --steps or --epochs, got both"):
        settle(None, {"steps": 5, "epochs": 1.0})
    assert settle(None, {"nproc": 2}) == {"nproc": 2, "mesh": "shard=2"}
    assert settle(None, {"nproc": 2, "mesh": "replicate=2"}) == {"nproc": 2, "mesh": "replicate=2"}
    assert settle(None, {"nproc": 1}) == {"nproc": 1}


def test_a_saved_extension_takes_model_and_data_from_its_run(tmp_path: Path) -> None:
    options = build(TrainOptions, {"extend": "runs/a", "model": "mlp", "data": "digits", "steps": 7})
    (tmp_path / "run.toml").write_text(config_text(to_dict(options)))
    found = read_config(tmp_path / "run.toml")
    assert (found["extend"], found["steps"]) == ("runs/a", 7)
    assert "model" not in found
    assert "data" not in found


def test_a_saved_config_repeats_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "first"
    assert train(out, "--seed", "3", "--schedule", "linear", "--quiet", "--json") == 0
    first = last_json(capsys.readouterr().out)
    assert tomllib.loads((out / "config.toml").read_text())["schedule"] == "linear"
    assert call("train", "--config", str(out / "config.toml"), "--out", str(tmp_path / "second")) == 0
    assert last_json(capsys.readouterr().out)["parameter_sha256"] == first["parameter_sha256"]
    settings = [tomllib.loads((tmp_path / name / "config.toml").read_text()) for name in ("first", "second")]
    assert settings[0] == settings[1] | {"quiet": True}
    words = ["--config", str(out / "config.toml"), "--out", str(tmp_path / "third"), "--seed", "4"]
    assert call("train", *words) == 0
    assert last_json(capsys.readouterr().out)["parameter_sha256"] != first["parameter_sha256"]


def test_the_header_says_where_the_settings_are_and_whether_the_noise_is_new(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "a", steps=2) == 0
    said = f"fdp train --config {tmp_path / 'a' / 'config.toml'} repeats the run with new noise, since it has no --seed"
    assert f"{said}, and spends its epsilon again\n" in capsys.readouterr().out
    assert train(tmp_path / "b", "--seed", "1", steps=2) == 0
    assert "repeats the run with the same noise\n" in capsys.readouterr().out
    assert call("train", *shlex.split(NOT_PRIVATE), "--out", str(tmp_path / "c")) == 0
    assert "repeats the run with new draws, since it has no --seed\n" in capsys.readouterr().out


def test_the_command_that_repeats_a_run_works_as_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my run"
    assert train(folder, "--save-every", "2", steps=2) == 0
    shown = capsys.readouterr().out
    printed = shown.partition("config.toml; ")[2].partition(" repeats the run")[0]
    words = shlex.split(printed)
    assert words[:2] == ["fdp", "train"]
    heading = (folder / "config.toml").read_text().partition("\n\n")[0].replace("\n# ", " ")
    assert printed in heading
    assert call(*words[1:]) == 0
    assert (tmp_path / "my run-again" / "summary.json").exists()


def test_show_config_prints_a_file_and_trains_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("train", *SMALL, "--steps", "7", "--show-config") == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert (shown["steps"], shown["model"], shown["noise_multiplier"]) == (7, "logistic", 1.0)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_makes_the_checks_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    assert train(tmp_path / "run", "--dry-run") == 0
    assert "dry run: every check passed" in capsys.readouterr().out
    assert not list((tmp_path / "run").iterdir())
    assert train(tmp_path / "run", "--dry-run", "--json", "--batch-size", "5000") == 2


def test_a_dry_run_shows_what_evaluation_would_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "--dry-run", "--eval-fraction", "0.1") == 0
    assert "evaluation" in capsys.readouterr().out


def test_epochs_count_passes_over_the_public_population(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL[:-2], "--epochs", "0.1", "--json", "--save-every", "1", "--out", str(tmp_path / "run")]
    assert call("train", *words, "--dry-run", "--steps", "3") == 2
    assert "expected either --steps or --epochs, got both" in last_json(capsys.readouterr().out)["error"]
    assert call("train", *words) == 0
    assert last_json(capsys.readouterr().out)["steps"] == 5  # ceil(0.1 * 1500 / 32): of the population, not of 1437
    saved = (tmp_path / "run" / "config.toml").read_text()
    assert tomllib.loads(saved)["epochs"] == 0.1
    assert "# steps = 5    (follows from epochs)" in saved


def test_a_run_of_epochs_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.cli.train_runs import interrupt_after

    words = [*SMALL[:-2], "--epochs", "0.1", "--json", "--seed", "1", "--save-every", "1"]
    assert call("train", *words, "--out", str(tmp_path / "whole")) == 0
    whole = last_json(capsys.readouterr().out)
    with monkeypatch.context() as patch:
        interrupt_after(2, patch)
        assert call("train", *words, "--out", str(tmp_path / "parts")) == 130
    capsys.readouterr()
    assert call("train", *words, "--out", str(tmp_path / "parts"), "--batch-size", "33") == 2
    assert "--batch-size 32 there, 33 here" in last_json(capsys.readouterr().out)["error"]
    assert call("train", *words, "--out", str(tmp_path / "parts")) == 0
    assert last_json(capsys.readouterr().out)["parameter_sha256"] == whole["parameter_sha256"]
