"""``fdp train`` on a GPU, as it is typed: methods x compilation x recording, with numbers of microbatches that vary."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from fdp.cli import session
from tests.cli.train_runs import call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# Poisson batches of 6 expected samples in microbatches of 4: 0 to 5 microbatches a step.
TINY = shlex.split(
    "--model gpt-nano --context 32 --batch-size 6 --microbatch 4 --steps 8 --warmup 1 --seed 3 --lr 1e-3"
)
SPEEDS = {
    "eager": "--compile none",
    "block": "--compile block",
    "recorded": "--compile none --cuda-graph",
    "block, recorded": "--compile block --cuda-graph",
    "by default": "",
}


LONG = shlex.split(
    "train --model gpt-nano --context 1024 --batch-size 12 --microbatch 8 --steps 4 --seed 3 --lr 1e-3 "
    "--ledger off --quiet"
)


def losses(*words: str) -> list[float | None]:
    """Run the command in a folder of its own and return the losses of its steps."""
    out = Path(mkdtemp()) / "run"
    assert call("train", *TINY, "--out", str(out), "--ledger", "off", "--quiet", *words) == 0
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@cache
def on_the_cpu(words: str) -> list[float | None]:
    return losses("--device", "cpu", "--dtype", "float32", *shlex.split(words))


def assert_close(found: list[float | None], expected: list[float | None], tolerance: float) -> None:
    assert [loss is None for loss in found] == [loss is None for loss in expected]
    for got, wanted in zip(found, expected):
        assert got == pytest.approx(wanted, rel=tolerance)


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("method", ["none", "auto", "ghost_bk"])
def test_every_way_to_run_gives_the_losses_of_the_cpu(method: str, speed: str) -> None:
    privacy = "--method none" if method == "none" else f"--method {method} --noise-multiplier 0.5"
    found = losses(*shlex.split(privacy), *shlex.split(SPEEDS[speed]))
    assert_close(found, on_the_cpu(privacy), 2e-2)


@pytest.mark.parametrize("style", ["per-layer", "automatic", "quantile"])
def test_every_clipping_style_runs_by_default(style: str) -> None:
    words = f"--clip {style} --noise-multiplier 0.5"
    assert_close(losses(*shlex.split(words)), on_the_cpu(words), 2e-2)


@pytest.mark.parametrize("optimizer", ["sgd", "lamb", "adafactor"])
def test_optimizers_without_a_fused_update_run_by_default(optimizer: str) -> None:
    words = f"--optimizer {optimizer} --noise-multiplier 0.5"
    assert_close(losses(*shlex.split(words)), on_the_cpu(words), 2e-2)


def test_a_whole_step_is_compiled_and_recorded() -> None:
    words = "--noise-multiplier 0.5 --dtype float32"
    assert_close(losses(*shlex.split(words), "--compile", "step", "--cuda-graph"), on_the_cpu(words), 1e-3)


def test_kfac_lora_and_offload_run_by_default() -> None:
    for words in (
        "--optimizer kfac --kfac-data synthetic --noise-multiplier 0.5 --lr 0.05",
        "--lora 4 --noise-multiplier 0.5",
        "--offload all --noise-multiplier 0.5",
    ):
        assert_close(losses(*shlex.split(words)), on_the_cpu(words), 5e-2)


def test_an_interrupted_run_resumes_to_the_same_losses(tmp_path: Path) -> None:
    words = shlex.split("--noise-multiplier 0.5 --save-every 2")
    out = tmp_path / "run"
    whole = losses(*words)
    call("train", *TINY, "--ledger", "off", "--quiet", "--out", str(out), *words)
    checkpoints = sorted((out / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    for name in ("summary.json", "model.safetensors", "report.png"):
        (out / name).unlink(missing_ok=True)
    assert call("train", *TINY, "--ledger", "off", "--quiet", "--out", str(out), *words) == 0
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert_close([json.loads(line)["loss"] for line in lines], whole, 1e-3)


@pytest.mark.parametrize(
    "words",
    [
        "--noise-multiplier 0.5",
        "--noise-multiplier 0.5 --dtype float32 --method ghost_bk",
        "--method none",
        "--noise-multiplier 0.5 --optimizer kfac --kfac-data synthetic",
        "--noise-multiplier 0.5 --stored-dtype int8",
        "--noise-multiplier 0.5 --offload all",
        "--noise-multiplier 0.5 --compile step",
        "--noise-multiplier 0.5 --compile step --stored-dtype int8",
    ],
)
def test_repeatable_runs_have_the_same_bits(words: str, tmp_path: Path) -> None:
    """Each in a process of its own, as a user repeats one; both at once, so that they disturb each other."""
    outs = [tmp_path / "one", tmp_path / "two"]
    commands = [[*LONG, "--repeatable", *shlex.split(words), "--out", str(out)] for out in outs]
    runs = [subprocess.Popen([sys.executable, "-m", "fdp", *command]) for command in commands]
    assert [run.wait() for run in runs] == [0, 0]
    one, two = ((out / "model.safetensors").read_bytes() for out in outs)
    assert one == two


@pytest.mark.parametrize("words", ["--noise-multiplier 0.5", "--clip quantile --noise-multiplier 0.5 --save-every 3"])
def test_a_run_that_launches_steps_ahead_records_what_one_does_that_waits(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = losses(*shlex.split(words))
    monkeypatch.setattr(session, "can_run_ahead", lambda run: False)
    assert_close(ahead, losses(*shlex.split(words)), 5e-3)


def test_a_run_without_a_seed_stores_gradients_in_8_bits_and_goes_on_so(tmp_path: Path) -> None:
    words = ["train", "--model", "gpt-nano", "--context", "512", "--batch-size", "24", "--microbatch", "16"]
    words += shlex.split("--steps 6 --warmup 1 --lr 1e-3 --noise-multiplier 0.5 --save-every 4 --ledger off --quiet")
    out = tmp_path / "run"
    assert call(*words, "--out", str(out)) == 0
    before = json.loads((out / "config.json").read_text())
    assert ("stored in torch.int8" in before["rounded"]) == bool(before["rounded_leaves"]), "as measured times decide"
    for name in ("summary.json", "model.safetensors", "report.png"):
        (out / name).unlink(missing_ok=True)
    assert call(*words, "--out", str(out)) == 0
    after = json.loads((out / "config.json").read_text())
    assert [after[name] for name in ("rounded", "rounded_leaves")] == [
        before[name] for name in ("rounded", "rounded_leaves")
    ]
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 6
