"""The examples run as they stand, their written-out steps are the composed step, their headers are true."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fdp import keys, tree
from fdp.sampling import sample_batch
from fdp.step import init_state, make_train_step
from fdp.types import Tree

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
NUMBERS = {"logistic": r"test accuracy ([\d.]+)", "digits_cnn": r"test accuracy ([\d.]+)"}
NUMBERS |= {"nano_gpt": r"held-out loss ([\d.]+) at"}
BUDGETS = {"logistic": [3.0], "digits_cnn": [3.0, 8.0], "nano_gpt": [8.0]}


def run(name: str, *arguments: str) -> str:
    """What the example prints, in a fresh process where every warning is an error."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    strict = ["-W", "error", "-W", "ignore:.*torch.jit.*:DeprecationWarning"]
    command = [sys.executable, *strict, str(EXAMPLES / f"{name}.py"), *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NUMBERS)
def test_it_runs_and_stays_within_its_budget(name: str) -> None:
    shown = run(name, "--steps", "2")
    spent = [float(value) for value in re.findall(r"epsilon ([\d.]+)", shown)]
    assert len(spent) == len(BUDGETS[name])
    assert all(0.9 * budget < value <= budget for value, budget in zip(spent, BUDGETS[name]))
    assert len(re.findall(NUMBERS[name], shown)) == len(spent)


@pytest.mark.parametrize("name", ["logistic", "nano_gpt"])
def test_the_step_written_out_is_the_composed_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--steps", "2"])
    example = runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    model, mechanism, key = example["model"], example["mechanism"], example["key"]
    train_step = make_train_step(model, example["optimizer"], mechanism=mechanism, plan=example["plan"])
    state = init_state(model, first_params(name, example), example["optimizer"], mechanism)
    samples = example["train"] if name == "logistic" else example["dataset"]
    for step in range(2):
        step_key = keys.fold_in(key, step)
        sample_key, noise_key = keys.fold_in(step_key, "sample"), keys.fold_in(step_key, "noise")
        size = example["plan"].batch_size
        batch = sample_batch(samples, mechanism.sampling, sample_key, microbatch_size=size)
        state, _ = train_step(state, batch, noise_key)
    composed = tree.flatten(state.params)
    for path, leaf in tree.flatten(example["params"]).items():
        torch.testing.assert_close(leaf, composed[path], msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_the_header_states_the_number_you_see(name: str) -> None:
    header = (EXAMPLES / f"{name}.py").read_text().split('"""')[1]
    stated = [float(value) for value in re.findall(NUMBERS[name], header)]
    shown = [float(value) for value in re.findall(NUMBERS[name], run(name))]
    assert len(stated) == len(BUDGETS[name])
    # Other processors and thread counts round differently: a few test images, a few hundredths of a nat.
    assert shown == pytest.approx(stated, abs=0.03 if name == "nano_gpt" else 0.012)


def first_params(name: str, example: dict[str, object]) -> Tree:
    """The parameters the example starts from."""
    if name == "logistic":
        return {path: torch.zeros_like(leaf) for path, leaf in tree.flatten(example["params"]).items()}
    return example["model"].init(keys.fold_in(example["key"], "init"))  # type: ignore[attr-defined]
