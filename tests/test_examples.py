"""The examples run, their written-out steps equal the composed step, and their headers state true numbers."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fdp import keys, tree
from fdp.privacy.sampling import sample_batch
from fdp.stages import make_stages
from fdp.step import init_state, join
from fdp.types import Tree

ROOT = Path(__file__).parent.parent
NUMBERS = {"logistic": r"test accuracy ([\d.]+)", "digits_cnn": r"test accuracy ([\d.]+)"}
NUMBERS |= {"nano_gpt": r"held-out loss ([\d.]+) at", "own_layer": r"test accuracy ([\d.]+)"}
NUMBERS |= {"finetune_hf": r"([\d.]+) (?:with LoRA|in full) at"}
BUDGETS = {
    "logistic": [3.0],
    "digits_cnn": [3.0, 8.0],
    "nano_gpt": [8.0],
    "own_layer": [4.0],
    "finetune_hf": [8.0, 8.0],
}
LOSSES = ("nano_gpt", "finetune_hf")
TINY = {"logistic": ["--steps", "2"], "digits_cnn": ["--steps", "2"]}
TINY |= {"nano_gpt": ["--steps", "2", "--batch-size", "24"], "own_layer": ["--steps", "2"]}
TINY |= {"finetune_hf": ["--steps", "2", "--batch-size", "16", "--public-steps", "1"]}


class Ran(NamedTuple):
    """The output of an example, and its variables at the end."""

    shown: str
    variables: dict[str, Any]


@cache
def tiny(name: str) -> Ran:
    """Run the example from top to bottom, in this process, for two steps."""
    arguments, printed = sys.argv, io.StringIO()
    sys.argv = [name, *TINY[name]]
    try:
        with contextlib.redirect_stdout(printed):
            variables = runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = arguments
    return Ran(printed.getvalue(), variables)


@pytest.mark.parametrize("name", NUMBERS)
def test_an_example_runs_and_stays_within_its_budget(name: str) -> None:
    shown = tiny(name).shown
    spent = [float(value) for value in re.findall(r"epsilon ([\d.]+)", shown)]
    assert len(spent) == len(BUDGETS[name])
    assert all(0.9 * budget < value <= budget for value, budget in zip(spent, BUDGETS[name]))
    assert len(re.findall(NUMBERS[name], shown)) == len(spent)


@pytest.mark.parametrize("name", ["logistic", "nano_gpt"])
def test_the_written_out_step_equals_the_composed_step(name: str) -> None:
    example = tiny(name).variables
    model, mechanism, plan, optimizer = (example[part] for part in ("model", "mechanism", "plan", "optimizer"))
    settings = f"{mechanism.noise_multiplier}, clipped to {example['MAX_NORM']}"  # as add_gaussian has it
    train_step = join(make_stages(model, optimizer, mechanism=mechanism, plan=plan, settings=settings))
    state = init_state(model, first_params(name, example), optimizer, mechanism)
    samples = example["train"] if name == "logistic" else example["dataset"]
    for step in range(2):
        key, size = example["key"], plan.batch_size
        batch = sample_batch(samples, mechanism.sampling, key, step=step, microbatch_size=size)
        state, _ = train_step(state, batch, key)
    composed = tree.flatten(state.params)
    for path, leaf in tree.flatten(example["state"].params).items():
        torch.testing.assert_close(leaf, composed[path], msg=lambda text, path=path: f"{path}: {text}")


def test_an_operation_without_a_rule_is_refused_and_a_wrong_rule_is_caught() -> None:
    refused, caught = (re.search(rf"^{word}: (.*)$", tiny("own_layer").shown, re.M) for word in ("refused", "caught"))
    assert refused is not None
    assert "prototypes.weight: used by" in refused[1]
    assert caught is not None
    assert "per-sample gradient differs" in caught[1]


def test_transformers_loads_the_fine_tuned_models() -> None:
    differences = re.findall(
        r"(\w+): reloaded, largest difference of a sample's loss ([\d.e+-]+)", tiny("finetune_hf").shown
    )
    assert [name for name, _ in differences] == ["lora", "full"]
    assert all(float(apart) < 1e-5 for _, apart in differences)


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_the_header_states_the_numbers_that_are_printed(name: str) -> None:
    script = ROOT / "examples" / f"{name}.py"
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stated, shown = (
        [float(value) for value in re.findall(NUMBERS[name], text)]
        for text in (script.read_text().split('"""')[1], done.stdout)
    )
    assert len(stated) == len(BUDGETS[name])
    # Other processors and thread counts round differently: a few test images, a few hundredths of a nat.
    assert shown == pytest.approx(stated, abs=0.03 if name in LOSSES else 0.012)


def first_params(name: str, example: dict[str, Any]) -> Tree:
    """Return the parameters that the example starts from."""
    if name == "logistic":
        return tree.map(torch.zeros_like, example["params"])
    return example["model"].init(keys.fold_in(example["key"], "init"))
