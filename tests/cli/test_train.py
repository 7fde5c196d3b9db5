"""``fdp train``: its files, output and exit codes, and mistakes that leave nothing behind."""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fdp.cli import display, run_files, session
from fdp.cli.configure import configure
from fdp.cli.main import main
from fdp.cli.options import build
from fdp.cli.tour import TOUR
from fdp.cli.train_options import TrainOptions
from fdp.cli.unused_options import check_unused
from fdp.optimizers import Optimizer
from fdp.parallel.launch import join_ranks
from fdp.privacy.guarantee import RELATION
from fdp.run import training_run as runs
from fdp.run.step_metrics import parameter_digest
from fdp.run.step_record import StepRecord
from fdp.types import FdpError
from tests.cli.train_runs import FILES, SMALL, call, last_json, small_options, train


@pytest.mark.paints
def test_a_run_writes_its_six_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert train(out, "--json", "--seed", "3") == 0
    text = capsys.readouterr().out
    printed = last_json(text)
    assert display.FIXED_SEED in " ".join(text.split())
    assert {path.name for path in out.iterdir()} == FILES
    summary = json.loads((out / "summary.json").read_text())
    assert printed == summary | {"out": str(out)}
    assert " ".join(summary) == (
        "loss_first loss_last private epsilon epsilon_if_stop_was_decided_in_advance delta relation unit "
        "noise_multiplier steps steps_planned samples reading parameter_count "
        "parameter_norm parameter_sha256 seconds_per_step peak_memory_bytes method world_size seed run "
        "epsilon_of_model delta_of_model file_sha256"
    )
    checked = subprocess.run(["sha256sum", out / "model.safetensors"], capture_output=True, text=True, check=True)
    assert summary["file_sha256"] == {"model.safetensors": checked.stdout.split()[0]}
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert set(lines[0]) == set(StepRecord._fields) - {"evaluation"}, "only evaluated steps have one"
    assert (lines[0]["loss"], lines[-1]["loss"]) == (summary["loss_first"], summary["loss_last"])
    assert lines[-1]["epsilon"] == summary["epsilon"]
    assert lines[-1]["parameter_norm"] == summary["parameter_norm"]
    assert len({line["parameter_norm"] for line in lines}) == 3  # each step has its own
    assert {line["kfac_failures"] for line in lines} == {None}
    config = json.loads((out / "config.json").read_text())
    given = config["settings"]
    assert (given["model"], given["seed"], given["steps"], config["population"]) == ("logistic", 3, 3, 1500)
    assert (config["relation"], config["sampling_rate"]) == (RELATION, 32 / 1500)
    assert summary["relation"] == RELATION
    assert "1437" not in (out / "config.json").read_text(), "the number of samples is private"
    assert torch.__version__.startswith(config["versions"]["torch"])
    picture = (out / "report.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert b"IEND" in picture[-12:]
    leaves = load_file(out / "model.safetensors")
    assert all(leaf.dtype == torch.float32 for leaf in leaves.values())
    assert (
        parameter_digest({path.replace(".", "/"): leaf for path, leaf in leaves.items()}) == summary["parameter_sha256"]
    )


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_files_computed_on_private_data_are_readable_by_their_owner_alone(
    umask: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for losses, norms and the key of the noise, for every umask, from the moment a file exists."""
    out, seen = tmp_path / "run", {}

    def watched(run, state, **options):
        for made, record in runs.steps(run, state, **options):
            seen[record.step] = stat.S_IMODE((out / "metrics.jsonl").stat().st_mode)
            yield made, record

    out.mkdir()
    monkeypatch.setattr(session, "steps", watched)
    before = os.umask(umask)
    try:
        assert train(out, "--save-every", "2", steps=2) == 0
    finally:
        os.umask(before)
    assert set(seen.values()) == {0o600}
    files = {path for path in out.rglob("*") if path.is_file() and path.name != "model.safetensors"}
    assert {"config.json", "metrics.jsonl", "summary.json", "report.png", ".metadata"} <= {path.name for path in files}
    assert {path: oct(stat.S_IMODE(path.stat().st_mode)) for path in files} == dict.fromkeys(files, oct(0o600))
    folders = {path for path in (out / "checkpoints").rglob("*") if path.is_dir()} | {out / "checkpoints"}
    assert {path: stat.S_IMODE(path.stat().st_mode) & 0o077 for path in folders} == dict.fromkeys(folders, 0)


def test_a_seed_repeats_a_run_and_quiet_prints_only_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hashes = []
    for name in ("a", "b"):
        assert train(tmp_path / name, "--quiet", "--json", "--seed", "1", steps=2) == 0
        printed = capsys.readouterr()
        assert len(printed.out.splitlines()) == 1
        assert printed.err == ""
        hashes.append(last_json(printed.out)["parameter_sha256"])
    assert hashes[0] == hashes[1]


def test_an_out_that_holds_a_run_is_refused_and_untouched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert train(out, "--quiet", steps=2) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert train(out, "--json", steps=2) == 2
    printed = capsys.readouterr()
    assert "already holds a run" in last_json(printed.out)["error"]
    assert "already holds a run" in printed.err.replace("\n", " ")
    assert "which is finished (2 of 2 steps); give another directory" in last_json(printed.out)["error"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_folder_with_other_files_is_not_called_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "notes.jsonl").write_text("")
    assert train(tmp_path, "--quiet", steps=2) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "which is not empty and holds names that a run writes (model); give another directory" in said
    assert "holds a run" not in said


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_directory_with_any_file_of_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    assert train(tmp_path, "--quiet", steps=2) == 2
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_without_out_runs_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("train", *SMALL, "--steps", "2", "--quiet") == 0
    assert run_files.create_folder(None, model="logistic", data="digits") == Path("runs/logistic-digits-2")
    assert run_files.create_folder(None, model="gpt-nano", data="/some/where/notes.jsonl") == Path(
        "runs/gpt-nano-notes-1"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "gpt-nan"], "Did you mean 'gpt-nano'?"),
        (["--method", "gost"], "Did you mean 'ghost'?"),
        (["--clip", "automatc"], "Did you mean 'automatic'?"),
        (["--optimizer", "adamm"], "Did you mean 'adam"),
        (["--schedule", "cosin"], "Did you mean 'cosine'?"),
        (["--dtype", "float3"], "Did you mean 'float32'?"),
        (["--dtype", "xyz"], "expected one of float32, bfloat16; got 'xyz'."),
        (["--compile", "stp"], "Did you mean 'step'?"),
        (["--device", "cud"], "Did you mean 'cuda'?"),
        (["--data", "digit"], "Did you mean 'digits'?"),
        (["--max-norm", "0"], "--max-norm: expected a finite number above 0, got 0"),
        (["--max-norm", "nan"], "--max-norm: expected a finite number above 0, got nan"),
        (["--delta", "1.5"], "--delta: expected a number between 0 and 1, got 1.5"),
        (["--epsilon", "3"], "either --epsilon or --noise-multiplier"),
        (["--noise-multiplier", "-1"], "--noise-multiplier: expected a finite number of 0 or more, got -1"),
        (
            ["--batch-size", "5000"],
            "--batch-size: expected at most the population 1500, which is the number of samples rounded up, got 5000. "
            "Lower it, for example to --batch-size 375, a quarter of the population",
        ),
        (
            ["--population", "20"],
            "--batch-size: expected at most the population 20, got 32, the default. Lower it, for example to "
            "--batch-size 5, a quarter of the population, or check that --population counts samples, not batches",
        ),
        (["--batch-size", "0"], "--batch-size: expected a whole number of at least 1, got 0"),
        (["--steps", "0"], "--steps: expected a whole number of at least 1, got 0"),
        (["--warmup", "3"], "--warmup: expected fewer than the 3 steps"),
        (["--microbatch", "0"], "--microbatch: expected a whole number of at least 1, got 0"),
        (["--lr", "-1"], "--lr: expected a finite number of 0 or more, got -1"),
        (["--weight-decay", "-1"], "--weight-decay: expected a finite number of 0 or more, got -1"),
        (["--memory-budget", "0"], "--memory-budget: expected a finite number above 0"),
        (["--memory-budget", "inf"], "--memory-budget: expected a finite number above 0"),
        (["--noise-multiplier", "1e-9"], "--noise-multiplier: expected enough noise"),
        (["--context", "8"], "a classifier has no"),
        (["--data", "stdlib"], "expected a language model"),
        (["--method", "none"], "trains without privacy"),
        (["--steps", "many"], "--steps"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_a_mistake_is_explained_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], message: str
) -> None:
    out = tmp_path / "run"
    assert train(out, "--json", *words) == 2
    printed = capsys.readouterr()
    assert message in last_json(printed.out)["error"]
    assert printed.err.startswith("fdp: ")
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "partner"),
    [
        ("--lora-alpha 3", "--lora"),
        ("--lora-targets w", "--lora"),
        ("--windows-per-user 3", "--unit user"),
        ("--pack", "--unit user"),
        ("--field body", "--data of records"),
        ("--keep 3", "--save-every"),
        ("--method none --noise-multiplier 0 --clip quantile", "a --method other than none"),
        ("--method none --noise-multiplier 0 --max-norm 2", "a --method other than none"),
        ("--method none --noise-multiplier 0 --delta 1e-5", "a --method other than none"),
        ("--method ghost --memory-budget 1", "--method auto or flash"),
        ("--kfac-damping 1", "--optimizer kfac"),
        ("--kfac-period 5", "--optimizer kfac"),
        ("--kfac-policy all", "--optimizer kfac"),
        ("--kfac-fisher exact", "--optimizer kfac"),
        ("--kfac-distribution ring", "--optimizer kfac"),
        ("--kfac-max-norm 2", "--kfac-data noised"),
        ("--kfac-noise 2", "--kfac-data noised"),
        ("--zero 2", "several ranks"),
        ("--reduce step", "several ranks"),
        ("--reduce-dtype float32", "several ranks"),
        ("--replicate-data", "several ranks"),
        ("--timeout 5", "several ranks"),
    ],
)
def test_an_option_without_effect_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, partner: str
) -> None:
    assert train(tmp_path / "run", "--json", *shlex.split(words)) == 2
    option = next(word for word in reversed(words.split()) if word.startswith("--"))
    assert f"{option}: expected {partner}" in last_json(capsys.readouterr().out)["error"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["auto", "flash"])
def test_a_memory_budget_is_accepted_with_the_methods_that_use_it(method: str) -> None:
    check_unused(build(TrainOptions, {"data": "text", "method": method, "memory_budget": 1.0}))


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_must_be_positive_and_finite(timeout: float) -> None:
    with (
        pytest.raises(FdpError, match="timeout: expected a positive number of seconds"),
        join_ranks("cpu", timeout=timeout),
    ):
        pass


def test_an_unreachable_epsilon_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--model",
        "logistic",
        "--data",
        "digits",
        "--epsilon",
        "1e7",
        "--json",
        "--out",
        str(tmp_path / "run"),
    ]
    assert call("train", *words) == 2
    assert "epsilon" in last_json(capsys.readouterr().out)["error"]
    assert not (tmp_path / "run").exists()


def test_a_text_file_trains_a_language_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "notes.jsonl"
    text.write_text("\n".join(json.dumps({"body": f"note {i} says nothing"}) for i in range(40)))
    words = shlex.split("--context 8 --batch-size 8 --microbatch 8 --steps 2 --warmup 0 --epsilon 5 --field body")
    assert call("train", "--data", str(text), *words, "--out", str(tmp_path / "run"), "--json") == 0
    printed = capsys.readouterr().out
    assert 4.5 < last_json(printed)["epsilon"] <= 5
    assert "one window of 9 bytes, added or removed; a longer text is in several windows" in " ".join(
        printed.replace("│", " ").split()
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "empty"), (b"\xff" * 100, "UTF-8"), (b"short", "at least one window of 129")],
)
def test_a_file_that_is_not_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    assert call("train", "--data", str(tmp_path / "text.txt"), "--out", str(tmp_path / "run"), "--json") == 2
    assert message in last_json(capsys.readouterr().out)["error"]


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "tokens.npy", np.full(1000, 256, dtype=np.uint16))
    assert call("train", "--data", str(tmp_path / "tokens.npy"), "--out", str(tmp_path / "run"), "--json") == 2
    assert "from 0 to 255, got another at position 0" in last_json(capsys.readouterr().out)["error"]


def test_a_run_without_privacy_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split("--model mlp --data digits --method none --steps 3 --warmup 0 --batch-size 64 --json")
    assert call("train", *words, "--out", str(tmp_path / "run")) == 0
    printed = capsys.readouterr().out
    assert "not private" in printed
    assert "unit of privacy" not in printed
    summary = last_json(printed)
    assert summary["private"] is False
    assert summary["epsilon"] is None
    assert summary["method"] == "none"


@pytest.mark.parametrize("clip", ["flat", "per-layer", "automatic", "quantile"])
def test_every_clip_style_has_a_name(clip: str) -> None:
    assert configure(small_options(clip=clip)).clip.name == clip


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "lamb", "adafactor", "adagrad", "adadelta", "adamax"])
def test_every_optimizer_follows_the_schedule_and_decays(optimizer: str) -> None:
    built = configure(small_options(optimizer=optimizer, weight_decay=0.1, lr=0.01, warmup=2, steps=6)).optimizer
    assert isinstance(built, Optimizer)
    params = {"w": torch.ones(3)}
    state, sizes = built.init(params), []
    for _ in range(7):
        updates, state = built.update({"w": torch.zeros(3)}, state, params)
        sizes.append(float(updates["w"].abs().max()))
    assert 0 < sizes[0] < sizes[1]  # no gradient: what moves is decay, and it warms up
    assert sizes[-1] < 1e-6  # a cosine ends at 0


def test_options_of_several_ranks_are_checked_before_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, message in (
        (["--mesh", "shard=2"], "add --nproc 2 to start 2 on this machine"),
        (["--mesh", "shard"], "expected axes with sizes"),
        (["--mesh", "sharp=1"], "Did you mean 'shard'?"),
        (["--mesh", "shard=1", "--zero", "1"], "--zero: expected one of 0, 2, 3"),
        (["--offload", "weights"], "--offload: expected one of"),
        (["--offload", "all,params"], "expected none or all alone"),
        (["--reduce", "never"], "--reduce: expected one of"),
        (["--reduce-dtype", "int8"], "--reduce-dtype: expected one of"),
        (["--save-every", "0"], "at least 1"),
    ):
        assert train(tmp_path / "run", "--json", *words) == 2
        assert message in last_json(capsys.readouterr().out)["error"]
    assert not (tmp_path / "run").exists()
    assert call("train", *SMALL, "--json", "--save-every", "2") == 2
    assert "--out" in last_json(capsys.readouterr().out)["error"]


def test_offload_and_activation_checkpoints_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = set()
    for number, words in enumerate(
        ([], ["--offload", "all"], ["--offload", "params,grads"], ["--checkpoint-activations"])
    ):
        assert train(tmp_path / str(number), "--json", "--seed", "3", *words) == 0
        sums.add(last_json(capsys.readouterr().out)["parameter_sha256"])
    assert len(sums) == 1


def test_a_run_that_fails_midway_keeps_its_metrics_and_has_no_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--optimizer", "sgd", "--lr", "1e38", "--noise-multiplier", "1e4", "--warmup", "0"]
    assert train(tmp_path / "run", "--json", *words, steps=9) == 2
    assert "became NaN or infinite" in last_json(capsys.readouterr().out)["error"]
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert found == {"config.json", "config.toml", "plan.json", "fdp_privacy.json", "metrics.jsonl"}


def test_a_path_that_cannot_be_written_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert train(tmp_path / "file", "--json") == 2
    assert "expected a directory" in last_json(capsys.readouterr().out)["error"]
    assert train(tmp_path / "file" / "below", "--json") == 2
    assert f"{tmp_path / 'file' / 'below'}: could not be written" in last_json(capsys.readouterr().out)["error"]


def test_a_bug_in_fdp_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config, **options):
        raise ValueError("a fault")

    monkeypatch.setattr(session, "prepare", broken)
    with pytest.raises(ValueError, match="a fault"):
        main(["train", *SMALL, "--out", str(tmp_path / "run")])


def test_without_a_command_a_tour_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 0
    printed = capsys.readouterr()
    assert printed.out == TOUR + "\n"
    assert printed.err == ""
    assert call("--help") == 0
    assert "inspect" in capsys.readouterr().out


def test_help_and_version_do_not_load_torch() -> None:
    code = "import sys, fdp.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=None, check=False).returncode == 0


@pytest.mark.long
def test_commands_that_compute_no_step_do_not_load_torchs_compiler() -> None:
    code = "import sys, fdp.cli.ledger_totals, fdp.run.run_folder; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=None, check=False).returncode == 0


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "fdp", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("fdp ")
