"""``fdp compare``: its table, verdict and exit codes, and mistakes that are found before any run."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fdp.cli import compare as command
from fdp.cli.compare import (
    AXES,
    EXIT_DIFFERENT,
    NOT_ACCEPTED,
    NOT_COVERED,
    SAME_ON_BOTH_SIDES,
    compare_command,
    side_options,
)
from fdp.cli.options import to_dict
from fdp.run.compare import Difference, Stage
from fdp.types import FdpError

DIGITS = "--model logistic --data digits --steps 2 --device cpu"
COMMON: dict[str, Any] = {"model": "gpt-nano", "context": None, "noise_multiplier": None, "method": "auto", "lr": 0.1}

Call = Callable[[str], Any]


@pytest.fixture
def call() -> Call:
    app = typer.Typer()
    app.command("compare")(compare_command)
    return lambda words: CliRunner().invoke(app, words.split(), env={"COLUMNS": "200"})


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Run both sides in this process, and return the commands that would have started them."""
    commands: list[list[str]] = []

    def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(words)
        return subprocess.CompletedProcess(words, command._observe(Path(words[-1])), "", "")

    monkeypatch.setattr(command.subprocess, "run", run)
    return commands


def result(answer: Any) -> dict[str, Any]:
    return json.loads(answer.stdout.strip().splitlines()[-1])


def test_equal_runs_exit_with_0(call: Call, in_process: list[list[str]]) -> None:
    answer = call(f"method=ghost method=materialize,microbatch=3 {DIGITS} --json")
    assert answer.exit_code == 0, answer.output
    assert "equal within 1e-05 at every stage" in answer.stdout
    assert "method=ghost against method=materialize,microbatch=3" in answer.stdout
    got = result(answer)
    assert (got["equal"], got["first"], got["tolerance"]) == (True, None, 1e-5)
    stages = [stage.value for stage in Stage]
    assert [(one["step"], one["stage"]) for one in got["differences"]] == [
        (0, "init"),
        *((t, stage) for t in (1, 2) for stage in stages[1:]),
    ]
    assert all(one["difference"] < 1e-5 for one in got["differences"])
    assert [words[:-1] for words in in_process] == [[sys.executable, "-m", "fdp.cli.compare"]] * 2
    assert not any(Path(words[-1]).exists() for words in in_process)  # sums without noise are deleted


def test_the_first_difference_names_its_leaf_and_exits_with_3(call: Call, in_process: list[list[str]]) -> None:
    answer = call(f"max_norm=1 max-norm=0.5 {DIGITS} --json")
    assert answer.exit_code == EXIT_DIFFERENT == 3
    got = result(answer)
    first = got["first"]
    assert (got["equal"], first["step"], first["stage"]) == (False, 1, "clipped sum")
    assert first["where"] in ("head.bias", "head.weight")
    line = answer.stdout.strip().splitlines()[-2]
    assert line == f"first difference: step 1, clipped sum, {first['where']}: {first['difference']:.1e}"
    assert call(f"max_norm=1 max_norm=0.5 {DIGITS} --tolerance 1e9").exit_code == 0


def test_not_comparable_is_null_in_json_and_inf_on_the_screen(call: Call, in_process: list[list[str]]) -> None:
    answer = call(f"method=none method=ghost,noise_multiplier=0 {DIGITS} --json")
    assert answer.exit_code == EXIT_DIFFERENT
    assert result(answer)["first"] == {"step": 1, "stage": "norms", "where": "sample 0", "difference": None}
    assert "first difference: step 1, norms, sample 0: inf" in answer.stdout


def test_a_difference_before_the_first_step_names_no_step() -> None:
    assert command._verdict(Difference(0, Stage.INIT, "a.b", 0.25), 1e-5) == "first difference: init, a.b: 2.5e-01"
    assert command._verdict(None, 1e-3) == "equal within 0.001 at every stage"


@pytest.mark.slow
@pytest.mark.ranks
def test_one_rank_equals_two_ranks_in_separate_processes(call: Call) -> None:
    answer = call(f"ranks=1 ranks=2,zero=3,offload=params+grads {DIGITS} --json")
    assert answer.exit_code == 0, (answer.output, answer.exception)
    got = result(answer)
    assert got["equal"]
    assert len(got["differences"]) == 1 + 2 * 6  # the first state, and six stages of two steps


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("b", ["ranks=4,zero=3", "replicate=2,shard=2,zero=2", "shard=2,tensor=2,method=ghost"])
def test_one_rank_equals_four_ranks_with_the_defaults(call: Call, b: str) -> None:
    answer = call(f"ranks=1 {b} --device cpu")
    assert answer.exit_code == 0, (answer.output, answer.exception)


@pytest.mark.slow
def test_eager_equals_compiled(call: Call) -> None:
    answer = call(f"compile=none compile=step {DIGITS}")
    assert answer.exit_code == 0, (answer.output, answer.exception)


def test_samples_are_the_same_with_and_without_privacy(call: Call, in_process: list[list[str]]) -> None:
    """There are 1437 of them; both sides round the number for the rate, or neither."""
    answer = call(f"method=none method=materialize {DIGITS} --batch-size 300 --json")
    first = result(answer)["first"]  # without privacy there are no norms; the losses before that are the same
    assert (answer.exit_code, first["step"], first["stage"]) == (EXIT_DIFFERENT, 1, "norms")
    assert NOT_COVERED in answer.stdout


# The meaning of A and B


def test_names_set_the_options_of_train_with_their_types() -> None:
    text = "replicate=2,shard=4,tensor=1,zero=2,offload=params+grads,checkpoint-activations=yes,lr=2,warmup=1"
    got = to_dict(side_options("A", text, COMMON))
    assert {name: got[name] for name in ("mesh", "zero", "offload", "checkpoint_activations", "lr", "warmup")} == {
        "mesh": "replicate=2,shard=4",
        "zero": 2,
        "offload": "params,grads",
        "checkpoint_activations": True,
        "lr": 2.0,
        "warmup": 1,
    }
    assert type(got["lr"]) is float


def test_one_rank_has_no_mesh_and_several_are_shards() -> None:
    assert [side_options("A", text, COMMON).ranks.mesh for text in ("", "ranks=1", "shard=1,tensor=1")] == [None] * 3
    assert side_options("A", "ranks=4", COMMON).ranks.mesh == "shard=4"


def test_options_that_are_not_given_have_small_common_defaults() -> None:
    got = side_options("A", "", COMMON)
    assert (got.training.lr, got.data.context, got.privacy.noise_multiplier, got.ranks.zero) == (0.1, 32, 1.0, 3)
    assert side_options("A", "method=none", COMMON).privacy.noise_multiplier == 0
    assert side_options("A", "method=none,noise_multiplier=2", COMMON).privacy.noise_multiplier == 2
    assert side_options("A", "", COMMON | {"model": "mlp"}).data.context is None
    assert side_options("A", "", COMMON | {"context": 7}).data.context == 7


def test_every_option_of_train_is_on_one_side_or_on_both() -> None:
    known = set(to_dict(side_options("A", "", COMMON)))
    assert known > SAME_ON_BOTH_SIDES | NOT_ACCEPTED
    assert not SAME_ON_BOTH_SIDES & NOT_ACCEPTED
    for name in (SAME_ON_BOTH_SIDES | NOT_ACCEPTED) - {"mesh"}:
        with pytest.raises(FdpError, match="expected name=value"):
            side_options("A", f"{name}=1", COMMON)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rank=2", r"A: .*; got 'rank=2'\. Did you mean ranks=\.\.\.\?"),
        ("ranks", r"A: expected name=value"),
        ("ranks=2,,zero=3", r"got ''"),
        ("zero=2,zero=3", r"each name once"),
        ("ranks=2,tensor=2", r"either ranks or the axes replicate, shard, tensor"),
        ("ranks=0", r"at least 1 rank"),
        ("ranks=two", r"A: expected ranks=a whole number, got 'two'"),
        ("lr=fast", r"A: expected lr=a number, got 'fast'"),
        ("replicate_data=maybe", r"A: expected replicate_data=true or false, got 'maybe'"),
        ("seed=3", r"A: expected name=value"),
    ],
)
def test_mistakes_in_a_side_are_explained(text: str, words: str) -> None:
    with pytest.raises(FdpError, match=words):
        side_options("A", text, COMMON)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ranks=1 method=gohst", r"B: --method: expected one of .* Did you mean 'ghost'"),
        ("zero=1 ranks=2", r"A: --zero: expected one of 0, 2, 3"),
        ("method=none,noise_multiplier=1 ranks=1", "A: --method none"),
        ("ranks=1 ranks=1 --tolerance -1", "--tolerance: expected a finite number"),
    ],
)
def test_mistakes_name_their_side_and_are_found_early(
    call: Call, in_process: list[list[str]], words: str, message: str
) -> None:
    answer = call(f"{words} {DIGITS}")
    assert isinstance(answer.exception, FdpError)
    with pytest.raises(FdpError, match=message):
        raise answer.exception
    assert not in_process  # no process was started for it


def test_under_torchrun_it_is_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "starts the ranks itself" in str(call("ranks=1 ranks=2").exception)


def test_more_ranks_than_gpus_are_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    answer = call("ranks=1 ranks=4 --device cuda")
    assert "B: expected a GPU for each of the 4 ranks, found 1" in str(answer.exception)


def test_a_process_that_crashes_is_an_error_with_its_output(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        command.subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 1, "out", "Traceback")
    )
    answer = call(f"ranks=1 ranks=2 {DIGITS}")
    assert type(answer.exception) is RuntimeError
    assert "A ended with code 1:\noutTraceback" in str(answer.exception)


def test_several_ranks_are_started_by_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(words)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(command.subprocess, "run", run)
    settings = side_options("A", "replicate=2,shard=3", COMMON)
    command.run_side("A", settings, tmp_path / "A")
    assert commands[0][1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "6"]
    assert json.loads((tmp_path / "A" / "settings.json").read_text())["mesh"] == "replicate=2,shard=3"


def test_the_axes_are_those_of_the_mesh() -> None:
    from fdp.parallel import mesh

    assert set(AXES) == set(mesh.AXES)
    assert command._as_json(Difference(1, Stage.SUM, "x", math.inf))["difference"] is None
