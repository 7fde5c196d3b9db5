"""``fdp inspect``: it shows every leaf, block, tie and refusal, and the right memory."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from torch import nn
from typer.testing import CliRunner

from fdp import models
from fdp.cli.inspect import inspect_command
from fdp.foreign.inspect import inspect_model
from fdp.foreign.module import from_module
from fdp.foreign.uses.custom_rules import operation
from fdp.gradients.plan import Method
from fdp.optimizers import adamw, sgd
from fdp.types import FdpError
from tests.foreign_models import LAYERS, make


@pytest.fixture
def run():
    app = typer.Typer()
    app.command("inspect")(inspect_command)
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


def result(answer) -> dict:
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout.strip().splitlines()[-1])


def saved(tmp_path, name: str):
    make(name, dtype=torch.float32).save_pretrained(tmp_path / name)
    return tmp_path / name


def test_a_folder_of_transformers_is_shown(run, tmp_path):
    answer = run(saved(tmp_path, "gpt2"), "--batch-size", 4, "--context", 8, "--json")
    got = result(answer)
    module = make("gpt2")
    assert {row["path"] for row in got["leaves"]} == {name for name, _ in module.named_parameters()}
    assert got["parameters"] == got["trainable"] == sum(leaf.numel() for leaf in module.parameters())
    (tied,) = (row for row in got["leaves"] if row["tied"])
    assert (tied["path"], tied["also"]) == ("transformer.wte.weight", ["lm_head.weight"])
    assert tied["rules"] == ["embedding", "linear"]
    kinds = [row["kind"] for row in got["blocks"]]
    assert len(kinds) == LAYERS + 2
    assert len(set(kinds[1:-1])) == 1, "layers are of one kind"
    assert not any(row["refusal"] or row["frozen"] or row["materialized"] for row in got["leaves"])
    memory = got["memory_bytes"]
    assert memory["parameters"] == 4 * got["parameters"]
    assert memory["per_sample"] == 4 * 4 * got["parameters"]
    for word in ("transformer.h.*.attn.c_attn.weight", "matmul", "lm_head.weight", "fused head", "state of adamw"):
        assert word in answer.stdout


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_classifiers_are_shown_with_data_of_their_kind(run, tmp_path, name):
    got = result(run(saved(tmp_path, name), "--json"))
    assert all(row["rules"] for row in got["leaves"])


def test_a_preset_is_shown_without_its_weights(run):
    got = result(run("gpt2-xl", "--method", "ghost", "--json"))
    assert got["parameters"] == sum(torch.Size(leaf.shape).numel() for leaf in models.build("gpt2-xl").leaves.values())
    assert {row["norm_by"] for row in got["leaves"] if row["rules"] == ["linear"]} == {"gram"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "PATH: expected a preset (gpt-nano, "),
        (["google/gemma-3-1b"], "hf download google/gemma-3-1b --local-dir models/gemma-3-1b"),
        (["cnn", "--batch-size", "0"], "--batch-size"),
        (["cnn", "--method", "x"], "x"),
    ],
)
def test_a_mistake_is_explained(run, words, message):
    answer = run(*words)
    assert isinstance(answer.exception, FdpError)
    assert message in str(answer.exception)


@operation
def unknown(x, weight):
    return x * weight.sum() + x @ weight


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.odd, self.fixed = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        return self.second(unknown(self.first(x), self.odd) * self.fixed)


def inspected(batch_size: int = 5, **options):
    data = {"x": torch.randn(batch_size, 4)}
    model, _ = from_module(Odd(), loss=lambda out, data: out.square().sum(1), check=False)
    settings = {"method": Method.AUTO, "dtype": torch.float32, "optimizer": adamw(1e-3)} | options
    return inspect_model(model, data, **settings)


def test_a_use_without_a_rule_says_what_to_do():
    found = inspected()
    (row,) = found.refused
    assert row.path == "odd"
    assert row.refusal is not None
    assert all(word in row.refusal for word in ("odd", "unknown", "Freeze", "a rule", "materialize"))
    assert all(row.materialized for row in found.leaves if not row.frozen), "the block that holds it goes with it"
    assert [row.path for row in found.leaves if row.frozen] == ["fixed"]


def test_memory_counts_trained_leaves_and_grows_with_the_batch():
    few, many = inspected().memory, inspected(batch_size=10, optimizer=sgd(1e-3)).memory
    trained = 20 + 15 + 16
    assert few.parameters == many.parameters == 4 * (trained + 4)
    assert many.per_sample == 2 * few.per_sample == 2 * 5 * 4 * trained
    assert few.kept == few.per_sample, "all is materialised"
    assert few.optimizer >= 2 * 4 * trained > many.optimizer
