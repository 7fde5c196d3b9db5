"""``fdp plan``: its tables, its JSON result and its verdict."""

from __future__ import annotations

import json
import time

import pytest
import typer
from typer.testing import CliRunner

import fdp.finish
from fdp import models
from fdp.cli.plan import plan_command
from fdp.cli.plan_tables import HINTS, RESERVED_GIB
from fdp.estimate.ledger import MemoryKind
from fdp.types import FdpError

GIB = 2**30
NANO = "--model gpt-nano --dtype float32 --microbatch 4"


@pytest.fixture
def run():
    app = typer.Typer()
    app.command("plan")(plan_command)
    return lambda words: CliRunner().invoke(app, words.split(), env={"COLUMNS": "200"})


@pytest.fixture
def one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give gpt-nano one layer, for plans that are compared with each other."""
    monkeypatch.setitem(models.LANGUAGE, "gpt-nano", models.LANGUAGE["gpt-nano"]._replace(layers=1))


def result(answer) -> dict:
    assert answer.exit_code == 0, answer.output
    return json.loads(answer.stdout.strip().splitlines()[-1])


def test_tables_and_json_say_the_same(run):
    answer = run(f"{NANO} --world 8 --zero 3 --batch 12 --json")
    got = result(answer)
    assert got["parameters"] == 842_496
    assert sum(got["by_kind"].values()) == got["peak_bytes"] == max(got["phases"].values())
    assert set(got["by_kind"]) == {kind.value for kind in MemoryKind} == set(HINTS)
    assert got["fits"] is True
    assert got["spare_gib"] == pytest.approx(80 - RESERVED_GIB - got["peak_bytes"] / GIB)
    assert got["axes"] == {"shard": 8}
    assert got["flops"]["float32"] > 0
    words = ("gpt-nano: 0.001 billion parameters", "shard 8", "3 microbatches of 4 in float32", "kept pairs", "update")
    for word in (*words, "reduce-scatter", "shard (8)", "blocks.*.qkv", "keep", "Tflop", "fits: "):
        assert word in answer.stdout


def test_a_step_in_place_with_float32_sums_and_narrow_moments_holds_what_it_should(run):
    words = "--model llama-nano --context 8 --microbatch 1 --batch 2 --json"
    lean = result(run(f"{words} --compile block --sum-dtype float32 --moments bfloat16"))
    size = lean["parameters"]
    assert lean["by_kind"]["parameters"] == pytest.approx(4 * size, rel=0.01)
    assert lean["by_kind"]["optimizer"] == pytest.approx(4 * size, rel=0.01)  # two moments of 2 bytes
    assert lean["by_kind"]["gathered"] == pytest.approx(2 * size, rel=0.01)  # the copy in bfloat16
    assert lean["by_kind"]["gradients"] == pytest.approx(4 * size, rel=0.01)
    assert lean["peak_bytes"] < 0.6 * result(run(words))["peak_bytes"]


def test_narrow_moments_need_adamw(run):
    with pytest.raises(FdpError, match="--moments: expected --optimizer adamw"):
        raise run(f"{NANO} --optimizer sgd --moments bfloat16").exception


@pytest.mark.parametrize("more", ["--method none --kfac-policy all --kfac-distribution ring", "--method auto"])
def test_kfac_adds_a_phase(run, more):
    answer = run(f"{NANO} --world 2 --optimizer kfac {more} --json")
    got = result(answer)
    assert next(iter(got["phases"])) == "curvature"
    assert sum(got["by_kind"].values()) == got["peak_bytes"]
    assert got["measurement_flops"]["float32"] > 0
    assert "curvature, each time it is measured" in answer.stdout


@pytest.mark.usefixtures("one_layer")
def test_traffic_grows_with_the_batch_under_zero_3_only(run):
    units = {
        (zero, batch): result(run(f"{NANO} --world 8 --zero {zero} --batch {batch} --json"))["units"]
        for zero in (2, 3)
        for batch in (4, 8)
    }
    assert units[2, 8] == pytest.approx(units[2, 4], rel=1e-3)
    assert units[3, 8] == pytest.approx(2 * units[3, 4], rel=1e-3)


def test_what_does_not_fit_says_by_how_much_and_what_to_try(run):
    answer = run("--model gpt2 --world 1 --gpu 2 --json")
    got = result(answer)
    assert got["fits"] is False
    assert got["traffic"] == []
    assert "does not fit: " in answer.stdout
    most = max(got["by_kind"], key=lambda kind: got["by_kind"][kind])
    assert f"{-got['spare_gib']:.1f} GiB more than 2 GiB less 1.5" in answer.stdout
    assert f"Most are {most}: try {HINTS[most]}" in answer.stdout


@pytest.mark.usefixtures("one_layer")
@pytest.mark.parametrize("parts", ["optimizer", "all"])
def test_the_noise_of_large_offloaded_leaves_is_estimated_too(run, parts, monkeypatch):
    here = result(run(f"{NANO} --offload {parts} --json"))
    monkeypatch.setattr(fdp.finish, "ELEMENTS_AT_A_TIME", 4000)  # as of leaves that are noised in pieces
    assert result(run(f"{NANO} --offload {parts} --json"))["host_bytes"] == here["host_bytes"] > 0


@pytest.mark.usefixtures("one_layer")
def test_offload_budget_checkpoints_and_axes_reach_the_plan(run):
    got = result(run(f"{NANO} --mesh replicate=2,shard=2,tensor=2 --offload all --checkpoint-activations --json"))
    assert got["host_bytes"] > 3 * 4 * got["parameters"] / 4
    assert {each["axis"] for each in got["traffic"]} >= {"replicate", "shard", "tensor"}
    assert got["kept_bytes"] > 0
    for method in ("auto", "flash"):
        tight = result(run(f"{NANO} --world 2 --method {method} --memory-budget 0.0001 --json"))
        assert tight["kept_bytes"] == 0
    assert result(run(f"{NANO} --world 2 --method flash --json"))["kept_bytes"] > 0
    plain = run(f"{NANO} --world 2 --method none")
    assert plain.exit_code == 0
    assert "norm by" not in plain.stdout


@pytest.mark.parametrize(("words", "message"), [
    ("--model gpt3-176b", "--model: expected one of .*Did you mean 'gpt3-175b'"),
    ("--model mlp", "--model: expected one of gpt-nano"),
    ("--gpu h1000", "--gpu: expected one of .*Did you mean 'h100'"),
    ("--gpu 1", "--gpu: expected a name, or a number of GiB above 1.5, got 1"),
    ("--zero 1", "--zero: expected one of 0, 2, 3"),
    ("--method gost", "--method: expected one of .*Did you mean 'ghost'"),
    ("--optimizer adan", "--optimizer: expected one of .*Did you mean 'adam"),
    ("--offload some", "--offload: expected one of"),
    ("--world 8 --mesh shard=4", "--mesh: expected sizes that multiply to the 8 ranks of --world, got shard=4"),
    ("--world 0", "--world: expected at least 1 rank, got 0"),
    ("--mesh expert=8", "--mesh: expected one of replicate, tensor, shard; got 'expert'"),
    ("--kfac-policy all", "--kfac-policy, --kfac-distribution: expected --optimizer kfac with them, got adamw"),
    ("--optimizer kfac --kfac-policy some", "--kfac-policy: expected one of auto, all"),
    ("--optimizer kfac --kfac-policy all", "--kfac-policy: expected --method none to go with it"),
    ("--optimizer kfac --kfac-distribution ring", "--kfac-distribution: expected gather or owner with a private"),
    ("--microbatch 0", "--microbatch and --batch of at least 1, got 0"),
    ("--memory-budget 0", "--memory-budget: expected a positive number of GiB"),
    ("--memory-budget 1 --method ghost", "--memory-budget: expected --method auto or flash to go with it, got ghost"),
])  # fmt: skip
def test_mistakes_are_explained(run, words, message):
    with pytest.raises(FdpError, match=message):
        raise run(f"{words} --context 8" if "--model" in words else f"--model gpt-nano {words}").exception


@pytest.mark.slow
@pytest.mark.parametrize(("words", "billions", "fits"), [
    ("--model llama-13b --world 8 --zero 3 --method auto --context 2048 --microbatch 1 --dtype bfloat16", 13.0, None),
    ("--model gpt3-175b --world 128 --method auto --memory-budget 8 --gpu h100", 174.6, True),
    ("--model gpt-1t --world 256 --mesh shard=32,tensor=8 --method ghost --offload all --gpu h100", 1008.0, True),
])  # fmt: skip
def test_large_models_are_planned_in_under_two_minutes(run, words, billions, fits):
    start = time.process_time()
    got = result(run(f"{words} --json"))
    assert time.process_time() - start < 120
    assert got["parameters"] / 1e9 == pytest.approx(billions, rel=0.002)
    assert fits is None or got["fits"] is fits
