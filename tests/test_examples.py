"""The examples run, their written-out steps equal the composed step, and their headers state true numbers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.example_seeds import PRINTED, RESULTS, SEEDS
from fdp import keys, tree
from fdp.privacy.sampling import sample_batch
from fdp.stages import make_stages
from fdp.step import init_state, join
from fdp.types import Tree

ROOT = Path(__file__).parent.parent
NUMBERS = PRINTED
MEASURED: list[dict[str, Any]] = json.loads(RESULTS.read_text())["rows"]
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


def header(name: str) -> str:
    return (ROOT / "examples" / f"{name}.py").read_text().split('"""')[1]


@pytest.mark.parametrize("name", NUMBERS)
def test_the_header_states_the_means_over_the_seeds(name: str) -> None:
    rows = [row for row in MEASURED if row["example"] == name]
    assert all(len(row["values"]) == len(SEEDS) for row in rows)
    stated = [float(value) for value in re.findall(NUMBERS[name], header(name))]
    assert stated == [round(statistics.mean(row["values"]), 3) for row in rows]
    assert RESULTS.name in header(name)


def test_the_header_of_the_convolutional_net_counts_its_parameters() -> None:
    leaves = tree.flatten(tiny("digits_cnn").variables["params"]).values()
    shown = re.search(r"([\d,]+) parameters", (ROOT / "examples" / "digits_cnn.py").read_text())
    assert shown is not None
    assert int(shown[1].replace(",", "")) == sum(leaf.numel() for leaf in leaves)


@pytest.mark.slow
@pytest.mark.parametrize("name", NUMBERS)
def test_an_example_prints_the_measured_numbers(name: str) -> None:
    script = ROOT / "examples" / f"{name}.py"
    env = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = [float(value) for value in re.findall(NUMBERS[name], done.stdout)]
    measured = [row["values"][0] for row in MEASURED if row["example"] == name]
    # Other processors and thread counts round differently: a few test images, a few hundredths of a nat.
    assert shown == pytest.approx(measured, abs=0.03 if name in LOSSES else 0.012)


def test_the_notes_are_as_many_as_the_header_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """examples/make_notes.py writes records that fdp reads and a folder that transformers reads."""
    transformers = pytest.importorskip("transformers")
    script = ROOT / "examples" / "make_notes.py"
    monkeypatch.setattr(sys, "argv", ["make_notes", "--folder", str(tmp_path), "--public-steps", "1"])
    runpy.run_path(str(script), run_name="__main__")
    records = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    stated = re.search(r"([\d,]+) patients, ([\d,]+) notes; and a public model of ([\d,]+)", script.read_text())
    assert stated is not None
    module = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    found = len({record["patient"] for record in records}), len(records), sum(p.numel() for p in module.parameters())
    assert [f"{number:,}" for number in found] == list(stated.groups())
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer("Slept well.")["input_ids"]) == "Slept well."


def first_params(name: str, example: dict[str, Any]) -> Tree:
    """Return the parameters that the example starts from."""
    if name == "logistic":
        return tree.map(torch.zeros_like, example["params"])
    return example["model"].init(keys.fold_in(example["key"], "init"))
