"""Tests of the benchmark of private training's batch sizes, on the CPU with tiny models. The figures mean nothing."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from benchmarks import large_steps, modes, real_runs
from benchmarks.baselines import BASELINES, Setup, module_of
from benchmarks.device import GIB
from benchmarks.modes import EAGER, LEAN, build
from benchmarks.regimes import Regime, ratios_to
from benchmarks.report import Report
from fdp import keys, tree
from fdp.gradients.costs import SumBy
from fdp.models import GPTConfig, LlamaConfig, gpt, llama

CPU = torch.device("cpu")
TINY = GPTConfig(layers=1, width=8, heads=2, context=6, vocab_size=11, tied=False)
LLAMA = LlamaConfig(layers=2, width=8, heads=4, key_heads=2, hidden=9, context=6, vocab_size=11)
SETTINGS = {"sdpa": "default", "compile": "none", "cuda_graph": False, "timed_plan": False}


@pytest.fixture
def _tiny(monkeypatch):
    """Make every model tiny, and every microbatch of a large step 4 samples."""
    for name, regime in real_runs.REGIMES.items():
        config = (TINY if regime.make is gpt else LLAMA)._replace(tied=regime.config.tied)
        monkeypatch.setitem(real_runs.REGIMES, name, regime._replace(config=config, batch_size=2))
    for name, step in real_runs.STEPS.items():
        config = (TINY if step.regime.make is gpt else LLAMA)._replace(tied=step.regime.config.tied)
        small = step._replace(regime=step.regime._replace(config=config, batch_size=4), sizes=(4,))
        monkeypatch.setitem(real_runs.STEPS, name, small)
    monkeypatch.setattr(large_steps, "REPEATS", 1)
    monkeypatch.setattr(large_steps, "LONG", 3)


def new_report(path) -> Report:
    return Report(path, benchmark="real_runs", device=CPU, **SETTINGS)


def options(*regimes: str, modes: list[str] | None = None) -> argparse.Namespace:
    return argparse.Namespace(
        regimes=regimes, modes=modes, layers=None, memory_budget=None, samples=8, compile="none",
        no_cuda_graph=True, no_timed_plan=True,
    )  # fmt: skip


def step_row(regime: str, mode: str, size: int, rate: float | None, *, gib: float = 3.0) -> dict:
    row = {"mode": mode, **real_runs.make_case(regime, microbatch=size).cell}
    if rate is None:
        return row | {"failed": large_steps.OUT_OF_MEMORY}
    ms = 1024 / rate * 1e3
    return row | {
        "samples": 1024, "microbatches_timed": 1024 // size, "ms": ms, "ms_p20": ms, "ms_p80": ms, "peak_gib": gib,
        "samples_per_second": rate, "tokens_per_second": rate * 6, "first_step_s": 1.0, "cell_s": 1.0,
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.usefixtures("_tiny")
def test_every_row_but_those_of_cuda_graphs_runs_from_the_command_line(tmp_path, capsys):
    pytest.importorskip("opacus")
    path = tmp_path / "rows.json"
    eager = ["--compile", "none", "--no-cuda-graph", "--no-timed-plan", "--device", "cpu", "--samples", "8"]
    which = ["--regimes", "gpt2_tied_512", "step_llama_1b"]
    some = ["--modes", "none", "auto", LEAN, "opacus", "opacus_ghost"]
    real_runs.main(["--json", str(path), *eager, *which, *some, "--cap", "0.1"])
    rows = json.loads(path.read_text())["rows"]
    assert [row for row in rows if "failed" in row] == []
    assert {(row["regime"], row["mode"]) for row in rows} == {
        *(("gpt2_tied_512", mode) for mode in ("none", "auto")),
        *(("step_llama_1b", mode) for mode in ("none", "auto", "opacus", "opacus_ghost")),
    }
    assert {row["learning_rate"] for row in rows} == {1e-4}
    assert {row["batch_size"] for row in rows if row["regime"].startswith("step")} == {4}
    assert capsys.readouterr().out.count(" ms ") == len(rows)
    text = real_runs.render(path, tmp_path / "results").read_text()
    assert "| step_llama_1b | 6 | opacus |" in text
    assert "python -m benchmarks.real_runs" in text
    assert "Learning rate 0.0001, not 0: " in text


@pytest.mark.parametrize("mode", ["none", "auto", "module", "opacus", "opacus_ghost"])
@pytest.mark.parametrize("name", ["step_gpt2", "step_llama_1b_tied"])
@pytest.mark.usefixtures("_tiny")
def test_a_step_of_several_microbatches_trains_as_one_of_a_single_one(name, mode, monkeypatch):
    if "opacus" in mode:
        pytest.importorskip("opacus")
    if (name, mode) == ("step_llama_1b_tied", "opacus_ghost"):
        pytest.skip("Opacus refuses tied weights in this mode")
    monkeypatch.setattr(real_runs, "RATE", 1e-2)
    tokens, seen = torch.randint(11, (8, 7), generator=torch.Generator().manual_seed(0)), []
    for size in (8, 2):
        case = real_runs.make_case(name, microbatch=size, samples=8, speed=EAGER, dtype=torch.float32)
        torch.manual_seed(0)  # of the weights of modules, and of Opacus' noise
        candidate = build(case, mode, CPU)
        losses = [candidate.step(tokens, key).mean() for key in keys.split(keys.key(1), 3)]
        seen.append(torch.stack(losses))
    assert seen[0][2] != seen[0][0]
    torch.testing.assert_close(*seen, rtol=2e-5, atol=0.0)


@pytest.mark.parametrize("tied", [False, True])
def test_the_llama_module_computes_what_the_model_computes(tied):
    config = LLAMA._replace(tied=tied)
    model = llama(config)
    params = model.init(keys.key(3))
    tokens = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(0))
    module = module_of(Setup(config, 3, CPU, torch.float32, False, params))
    assert sum(p.numel() for p in module.parameters()) == sum(leaf.numel() for leaf in tree.leaves(params))
    logits = module(tokens[:, :-1]).transpose(1, 2)
    losses = torch.nn.functional.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)
    torch.testing.assert_close(losses, model.loss(params, {"tokens": tokens}))


def test_opacus_refuses_a_tied_head_in_its_ghost_mode():
    pytest.importorskip("opacus")
    candidate = BASELINES["opacus_ghost"](Setup(TINY._replace(tied=True), 2, CPU, torch.float32, False))
    with pytest.raises(NotImplementedError, match="tying"):
        candidate.step(torch.zeros(2, 7, dtype=torch.int64), keys.key(0))


# The search for the best microbatch


@pytest.mark.parametrize(
    ("rates", "visited"),
    [
        ({64: 5.0, 128: 4.0, 32: 4.5}, [64, 128, 32]),  # the first is best
        ({64: 5.0, 128: 6.0}, [64, 128]),
        ({64: 5.0, 128: None, 32: 6.0, 16: 7.0, 8: 6.0}, [64, 128, 32, 16, 8]),
        ({64: None, 32: None, 16: 2.0, 8: 1.0}, [64, 32, 16, 8]),  # out of memory
        ({64: "NotImplementedError"}, [64]),
    ],
)
def test_microbatches_are_tried_upwards_then_downwards_while_they_help(tmp_path, rates, visited):
    report = new_report(tmp_path / "rows.json")
    case_at = lambda size: real_runs.make_case("step_gpt2", microbatch=size)  # noqa: E731
    tried = []
    for case, mode in large_steps.climb(report, case_at, "auto", start=64, sizes=(8, 16, 32, 64, 128)):
        tried.append(case.batch_size)
        rate = rates[case.batch_size]
        if isinstance(rate, str):
            report.add({"mode": mode, **case.cell, "failed": rate})
        else:
            report.add(step_row("step_gpt2", mode, case.batch_size, rate))
    assert tried == visited


@pytest.mark.usefixtures("_tiny")
def test_a_long_step_is_extrapolated_and_counts_the_update_once(monkeypatch):
    case = real_runs.make_case("step_gpt2", microbatch=1, samples=32, speed=EAGER, dtype=torch.float32)
    lengths = []

    def pretend(step, inputs, device):
        lengths.append(len(inputs[0][0]))
        return [100.0 + 10.0 * len(tokens) for tokens, _ in inputs]

    monkeypatch.setattr(large_steps, "time_steps", pretend)
    row = large_steps.measure_large_step(case, "none", CPU, whole_s=0.1)
    assert lengths == [2, 3]
    assert row["ms"] == pytest.approx(100.0 + 10.0 * 32)
    assert row["microbatches_timed"] == 3
    lengths.clear()
    row = large_steps.measure_large_step(case, "none", CPU, whole_s=1e3)
    assert lengths == [2, 32]
    assert row["samples_per_second"] == pytest.approx(32 / 0.42)


# The plan that stores less


def test_the_lean_plan_is_measured_where_auto_takes_too_much_memory(tmp_path):
    report = new_report(tmp_path / "rows.json")
    case = real_runs.make_case("gpt2_tied_512")

    def budget(gib: float) -> float | None:
        for mode, peak in (("none", 10.0), ("auto", gib)):
            report.add({"mode": mode, **case.cell, "peak_gib": peak, "stored_gib": 5.0})
        return real_runs.lean_budget(report, case, most=1.15)

    assert budget(11.4) is None
    assert budget(12.5) == pytest.approx(4.0 * GIB)
    assert budget(30.0) == 0.0
    asked = options("gpt2_tied_512", modes=["none", "auto", LEAN])
    assert [(c.memory_budget, mode) for c, mode in real_runs.cells(report, asked)][2] == (0.0, LEAN)
    assert [mode for _, mode in real_runs.cells(new_report(tmp_path / "none.json"), asked)] == ["none", "auto"]


@pytest.mark.usefixtures("_tiny")
def test_the_lean_plan_stores_as_little_as_one_backward_pass_allows(monkeypatch):
    seen = []
    right = modes.make_our_step
    monkeypatch.setattr(modes, "make_our_step", lambda *a, plan, **k: seen.append(plan) or right(*a, plan=plan, **k))
    case = real_runs.make_case("gpt2_untied_512", speed=EAGER, dtype=torch.float32)
    fastest, lean = build(case, "auto", CPU), build(case._replace(memory_budget=1.0), LEAN, CPU)
    assert fastest.stored_bytes is not None
    assert lean.stored_bytes is not None
    assert lean.stored_bytes <= fastest.stored_bytes
    assert all(choice.sum is not SumBy.SECOND_BACKWARD for choice in seen[1].choices.values())
    ample = build(case._replace(memory_budget=fastest.stored_bytes), LEAN, CPU)
    assert ample.stored_bytes == fastest.stored_bytes


# The page


def test_the_page_compares_with_targets_and_with_opacus(tmp_path):
    report = new_report(tmp_path / "rows.json")
    for mode, size, rate in [
        ("auto", 64, 1000.0), ("auto", 128, 900.0), ("opacus", 64, 240.0), ("opacus", 128, None),
        ("opacus_ghost", 64, 220.0), ("none", 64, 1100.0),
    ]:  # fmt: skip
        report.add(step_row("step_gpt2", mode, size, rate, gib=12.25))
    report.add(step_row("step_gpt2_tied", "opacus_ghost", 64, None) | {"failed": "NotImplementedError: tying"})
    times = {"ms_p20": 1.0, "ms_p80": 2.0, "tokens_per_second": 1.0, "first_step_s": 1.0}
    for regime, mode, ms, gib in [
        ("gpt2_tied_512", "none", 50.0, 10.0), ("gpt2_tied_512", "auto", 55.0, 12.0),
        ("gpt2_tied_512", LEAN, 60.0, 11.0), ("gpt2_tied_512", "ghost_bk", 80.0, 11.0),
        ("gpt2_untied_512", "ghost_bk", 75.0, 11.0),
    ]:  # fmt: skip
        cell = real_runs.make_case(regime).cell
        report.add({"mode": mode, **cell, "ms": ms, "peak_gib": gib, **times})
    text = real_runs.page(json.loads(report.path.read_text()), name="x")
    for line in [
        "| step_gpt2 | 512 | auto | 64 | 1,000.0 | 6,000 | 1.02 | 12.2 | 1.00 | 64: 1,000.0 (12.2); 128: 900.0 (12.2)",
        "| step_gpt2 | 512 | opacus | 64 | 240.0 | 1,440 | 4.27 | 12.2 | 4.17 | 64: 240.0 (12.2); 128: out of memory |",
        "| step_gpt2_tied | 512 | opacus_ghost | not timed | | | | | | 64: NotImplementedError: tying | |",
        "| samples/s, `auto` / best Opacus (opacus), step_gpt2 | >= 4 | 4.1667 | met |",
        "| samples/s, `auto` / best Opacus, step_llama_1b | >= 4 | not measured | |",
        "| speed, `auto` / `none`, gpt2_tied_512 | >= 0.9 | 0.9091 | met |",
        "| peak memory, `auto` / `none`, gpt2_tied_512 | <= 1.15 | 1.2000 | **short** |",
        "| peak memory, `auto_lean` / `none`, gpt2_tied_512 | <= 1.15 | 1.1000 | met |",
        "| time, `ghost_bk`, gpt2_tied_512 / gpt2_untied_512 | <= 1.1 | 1.0667 | met |",
    ]:
        assert line in text


def test_every_regime_has_its_place_in_the_order_and_in_the_docstring():
    assert sorted(real_runs.ORDER) == sorted([*real_runs.REGIMES, *real_runs.STEPS])
    assert all(f"| `{name}`" in (real_runs.__doc__ or "") for name in real_runs.ORDER)
    assert isinstance(real_runs.STEPS["step_gpt2"].regime, Regime)


def test_speed_is_relative_to_plain_training_of_the_same_run() -> None:
    plain, private = {"ms": 50.0, "peak_gib": 10.0}, {"ms": 66.0, "peak_gib": 11.0}
    assert ratios_to(private, plain) == (50.0 / 66.0, 1.1)
    assert ratios_to(private | {"plain_ms": 60.0}, plain) == (60.0 / 66.0, 1.1)
    assert ratios_to(private, None) == (None, None)
