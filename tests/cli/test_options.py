"""Options are declared once: the command line, a dict and ``config.json`` agree."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pytest
import typer
from typer.testing import CliRunner

from fdp.cli.compare import CommonOptions
from fdp.cli.main import app
from fdp.cli.needs import Needs
from fdp.cli.options import Flag, build, expand_groups, options_of, to_dict
from fdp.cli.train_options import KfacOptions, OutputOptions, TrainOptions
from fdp.cli.unused_options import CONDITIONS
from fdp.privacy.sampling import rounded_population
from fdp.types import FdpError


@dataclass(frozen=True)
class Inner:
    panel: ClassVar[str] = "Inside"
    key_prefix: ClassVar[str] = "inner_"

    size: Annotated[int, Flag("A size.")] = 3
    on: Annotated[bool, Flag("A switch.", name="--switch")] = False


@dataclass(frozen=True)
class Outer:
    inner: Inner
    name: Annotated[str, Flag("A name.")]
    rate: Annotated[float | None, Flag("A rate.", default_text="computed")] = None


def test_a_command_takes_one_option_per_field() -> None:
    seen: list[tuple[str, Outer]] = []
    command = typer.Typer()

    @command.command()
    @expand_groups
    def run(path: Annotated[str, typer.Argument()], outer: Outer) -> None:
        """Run."""
        seen.append((path, outer))

    words = ["here", "--inner-size", "5", "--switch", "--name", "a"]
    assert CliRunner().invoke(command, words).exit_code == 0
    assert seen == [("here", Outer(Inner(5, True), "a", None))]
    shown = CliRunner().invoke(command, ["--help"], env={"COLUMNS": "100"}).stdout
    for word in ("Inside", "--inner-size", "A size. [default: 3]", "--switch", "A rate. [default: (computed)]"):
        assert word in shown
    assert "--no-switch" not in shown
    assert CliRunner().invoke(command, ["here"]).exit_code == 2, "--name has no default"


def test_a_dict_gives_the_same_group_as_the_command_line() -> None:
    options = build(Outer, {"inner_size": 5, "name": "a", "rate": 2})
    assert options == Outer(Inner(5), "a", 2.0)
    assert to_dict(options) == {"inner_size": 5, "inner_on": False, "name": "a", "rate": 2.0}
    assert build(Outer, to_dict(options)) == options
    assert build(OutputOptions, {"out": "runs/a"}).out == Path("runs/a")


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        (TrainOptions, {"kfac_damping": "high"}, "--kfac-damping: expected a number, got 'high'"),
        (TrainOptions, {"steps": 2.5}, "--steps: expected a whole number, got 2.5"),
        (TrainOptions, {"steps": True}, "--steps: expected a whole number, got True"),
        (TrainOptions, {"steps": None}, "--steps: expected a whole number, got None"),
        (TrainOptions, {"as_json": 1}, "--json: expected true or false, got 1"),
        (TrainOptions, {"epsilonn": 3}, "epsilonn: expected the name of an option, got 'epsilonn'; did you mean 'eps"),
        (Inner, {"zzz": 3}, "zzz: expected the name of an option, got 'zzz'; the options are inner_size, inner_on"),
        (Outer, {}, "--name: expected a text, got nothing"),
    ],
)
def test_mistakes_in_a_dict_name_the_option(group: type, values: dict[str, object], message: str) -> None:
    with pytest.raises(FdpError) as caught:
        build(group, values)
    assert message in str(caught.value)


def test_every_default_is_of_its_type_and_every_option_has_help() -> None:
    for option in options_of(TrainOptions).values():
        assert option.check(option.default) == option.default
        assert option.flag.help.endswith(".")
        assert option.default is None or option.flag.default_text is None
    assert build(TrainOptions, {}) == TrainOptions()


def test_every_condition_can_be_checked_and_is_used() -> None:
    assert set(CONDITIONS) == set(Needs)
    assert {option.flag.needs for option in options_of(TrainOptions).values()} - {None} == set(Needs)


def test_options_of_kfac_have_its_prefix() -> None:
    assert all(key.startswith("kfac_") for key in options_of(KfacOptions))


def test_the_common_options_of_a_comparison_are_options_of_train() -> None:
    train = options_of(TrainOptions)
    for key, option in options_of(CommonOptions).items():
        assert (option.name, option.value_type) == (train[key].name, train[key].value_type)


@pytest.mark.parametrize("command", ["train", "epsilon", "plan", "compare", "inspect"])
def test_every_command_explains_itself(command: str) -> None:
    answer = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "160"})
    assert answer.exit_code == 0
    assert "--json" in answer.stdout


def test_the_help_of_population_says_how_it_is_rounded() -> None:
    said = options_of(TrainOptions)["population"].flag.default_text or ""
    assert "rounded up to two digits and a multiple of 10" in said
    assert [rounded_population(size) for size in (51, 3, 48_211)] == [60, 10, 49_000]
