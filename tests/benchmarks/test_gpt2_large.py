"""Tests of the benchmark harness on the CPU: rows, checks, resuming, pages. The figures mean nothing."""

from __future__ import annotations

import importlib
import json
import re
import sys
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from fdp_kernels.ghost import UNIT, rounding_steps

from benchmarks import gpt2_large, harness, mode_checks, modes, regimes, run_all
from benchmarks.baselines import Setup, module_of
from benchmarks.device import GIB
from benchmarks.harness import sweep
from benchmarks.measure import Limits, kernel_class, measure, step_peak
from benchmarks.mode_checks import SLACK, Checker, WrongError, check_norms
from benchmarks.modes import EAGER, Case
from benchmarks.report import Report, overstatements
from fdp import keys, tree
from fdp.gradients import per_sample
from fdp.gradients.plan import Method, make_plan
from fdp.models import GPTConfig, gpt
from tests.conftest import randn

CPU = torch.device("cpu")
TINY = GPTConfig(layers=1, width=8, heads=2, context=6, vocab_size=11, tied=False)
QUICK = Limits(seconds=0.0, least=3, cap=0.5)
SETTINGS = {"sdpa": "default", "compile": "none", "cuda_graph": False, "timed_plan": False}
MODES = ("none", "ghost_bk")


@pytest.fixture(scope="module")
def case() -> Case:
    return gpt2_large.make_case(TINY, batch_size=3, speed=EAGER, dtype=torch.float32)


def new_report(path) -> Report:
    return Report(path, benchmark="gpt2_large", device=CPU, **SETTINGS)


@pytest.fixture(scope="module")
def measured(case, tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "rows.json"
    sweep(new_report(path), [case], MODES, device=CPU, limits=QUICK)
    return path


def test_a_sweep_writes_one_row_per_mode(measured):
    content = json.loads(measured.read_text())
    assert content.keys() >= {"hardware", "versions", "commit", "command", "date"}
    assert [row["mode"] for row in content["rows"]] == list(MODES)
    for row in content["rows"]:
        assert (row["context"], row["batch_size"], row["layers"]) == (6, 3, 1)
        assert 0 < row["ms_p20"] <= row["ms"] <= row["ms_p80"]
        assert row["tokens_per_second"] == pytest.approx(18 / row["ms"] * 1e3)
        assert row["first_step_s"] > 0
        assert row["steps"] == 3
    private = content["rows"][1]
    assert len(private["norms"]) == 6  # of two steps
    assert private["check"]["norms"] < 1e-5
    assert private["check"]["update"] < 1e-4


def test_a_second_sweep_runs_only_what_is_missing(case, measured, tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    path.write_text(measured.read_text())
    ran = []
    monkeypatch.setattr(harness, "measure", lambda case, mode, *a, **k: ran.append(mode) or fake_row(case, mode))
    monkeypatch.setattr(Checker, "check", lambda *a: {})
    sweep(new_report(path), [case], (*MODES, "auto"), device=CPU)
    assert ran == ["auto"]
    assert [row["mode"] for row in json.loads(path.read_text())["rows"]] == [*MODES, "auto"]
    sweep(new_report(path), [case], (*MODES, "auto"), device=CPU)
    assert ran == ["auto"]


def test_a_slice_is_checked_once_per_commit(case, tmp_path, monkeypatch):
    found = {"losses": 0.0, "norms": 1e-3}
    report = Report(tmp_path / "rows.json", benchmark="gpt2_large", device=CPU, commit="abc1234", **SETTINGS)
    report.add(fake_row(case, "ghost_bk") | {"check": found, "slice": case.slice})
    assert report.checked(case, "ghost_bk") == found
    assert report.checked(case, "auto") is None
    report.commit = "def5678"
    assert report.checked(case, "ghost_bk") is None
    for report.commit in ("unknown", "abc1234+"):  # which may be two states of the code
        report.add(fake_row(case, "ghost_bk") | {"check": found, "slice": case.slice})
        assert report.checked(case, "ghost_bk") is None


def test_no_cell_is_started_after_the_budget(case, tmp_path):
    report = new_report(tmp_path / "rows.json")
    sweep(report, [case], MODES, device=CPU, budget=-1.0)
    assert report.rows == []


def test_rows_of_other_hardware_or_settings_are_refused(measured, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(measured.read_text())
    with pytest.raises(ValueError, match="choose another file"):
        Report(path, benchmark="gpt2_large", device=CPU, **SETTINGS | {"sdpa": "cudnn"})


def fake_row(case: Case, mode: str, ms: float = 2.0, gib: float | None = 3.0) -> dict:
    times = {"ms": ms, "ms_p20": ms, "ms_p80": ms, "peak_gib": gib, "tokens_per_second": 1.0, "first_step_s": 1.0}
    return {"mode": mode, **case.cell, **times}


def wrong_norms(monkeypatch) -> None:
    """Make norms a tenth too small, as an understated Gram matrix would."""
    right = per_sample.per_sample_norms

    def understated(model, params, data, *, plan, **options):
        losses, norms, stash = right(model, params, data, plan=plan, **options)
        factor = 1.0 if plan.method.value == "materialize" else 0.81
        return losses, norms._replace(squared={path: s * factor for path, s in norms.squared.items()}), stash

    monkeypatch.setattr("fdp.gradients.accumulate.per_sample_norms", understated)


def test_a_mode_with_wrong_norms_is_not_timed_and_is_reported(case, tmp_path, monkeypatch):
    wrong_norms(monkeypatch)
    report = new_report(tmp_path / "rows.json")
    sweep(report, [case], ["ghost_bk"], device=CPU, limits=QUICK)
    (row,) = report.rows
    assert "ms" not in row
    assert row["failed"].startswith("wrong: on the slice, against materialize: norms off by 1")


@pytest.mark.parametrize("by_gram", [True, False])
@pytest.mark.parametrize(
    ("tokens", "off", "refused"),
    [
        (512, 0.015, False), (512, 0.03, True), (2048, 0.065, False), (2048, 0.1, True), (8192, 0.28, False),
        (8192, 0.6, True), (8192, -0.03, True), (8192, torch.nan, True),
    ],
)  # fmt: skip
def test_norms_by_gram_matrices_may_be_above_the_reference_and_never_below(tokens, off, refused, by_gram):
    expected = torch.tensor([1.0, 2.0])
    wrong = refused or (not by_gram and off > SLACK)
    with pytest.raises(WrongError, match="norms off") if wrong else nullcontext():
        found = check_norms(expected * (1 + torch.tensor([off, 0.0])), expected, tokens=tokens, by_gram=by_gram)
        assert found == pytest.approx(off, abs=1e-6)


@pytest.mark.parametrize("tokens", [256, 512])
def test_the_rounding_cover_is_what_kernels_add_for_independent_tokens(tokens):
    g, x = randn(tokens, 1024, seed=1), randn(tokens, 1024, seed=2)
    (a, b), (A, X) = (g.norm(dim=1), x.norm(dim=1)), (g @ g.T, x @ x.T)
    lost = UNIT * rounding_steps(1024, torch.bfloat16) * ((a.outer(a) * X.abs()).sum() + (b.outer(b) * A.abs()).sum())
    truth = (A * X).sum()
    norm = (truth + lost).sqrt() + UNIT * rounding_steps(tokens, torch.bfloat16) * (a * b).sum()
    assert float(norm / truth.sqrt() - 1) == pytest.approx(mode_checks.rounding_cover(tokens), rel=0.1)


@pytest.mark.parametrize(
    ("mode", "dtype", "covered"),
    [
        ("ghost_bk", torch.bfloat16, True), ("flash_bk", torch.bfloat16, True), ("ghost_bk", torch.float32, False),
        ("flash", torch.bfloat16, False), ("materialize", torch.bfloat16, False), ("none", torch.bfloat16, False),
    ],
)  # fmt: skip
def test_only_half_precision_gram_matrices_have_a_rounding_cover(case, mode, dtype, covered):
    data = {"tokens": torch.zeros(3, 7, dtype=torch.int64)}
    plan = make_plan(case.model, case.model.init(keys.key(0)), data, method=Method(mode), dtype=dtype)
    assert modes.has_rounding_cover(plan) == covered


def test_row_and_page_say_by_how_much_norms_are_overstated(case, tmp_path, monkeypatch):
    half = case._replace(dtype=torch.bfloat16)
    exact = measure(half, "materialize", CPU, limits=QUICK)["norms"]
    monkeypatch.setattr(mode_checks, "rounding_cover", lambda tokens: 0.1)
    above = measure(half, "ghost_bk", CPU, limits=QUICK, expected_norms=[n / 1.3 for n in exact])
    assert above["overstated"] == pytest.approx(0.3, abs=0.03)
    assert "overstated" not in measure(half, "ghost_bk", CPU, limits=QUICK, expected_norms=exact)
    with pytest.raises(WrongError, match="norms off"):
        measure(half, "flash", CPU, limits=QUICK, expected_norms=[n / 1.3 for n in exact])
    report = new_report(tmp_path / "rows.json")
    report.add(fake_row(case, "ghost_bk") | {"overstated": 0.276})
    report.add(fake_row(case, "flash"))
    lines = gpt2_large.table(report.rows, TINY.context)
    assert lines[-1].endswith("exceed the reference by up to (gpt2_large, T = 6, ghost_bk: 28 %).")
    assert not overstatements(report.rows[1:])


def test_flash_is_measured_within_the_memory_budget_as_auto_is(case):
    small = case._replace(memory_budget=1.0)
    for mode in ("auto", "flash"):
        row = measure(small, mode, CPU, limits=QUICK)
        assert row["memory_budget_gib"] == 1.0 / GIB
        assert all(how.endswith("second backward") for how in row["choices"].values())
    assert "memory_budget_gib" not in measure(small, "ghost_bk", CPU, limits=QUICK)


def test_wrong_norms_at_full_size_are_found_against_the_row_of_materialize(case, tmp_path, monkeypatch):
    report = new_report(tmp_path / "rows.json")
    report.add(fake_row(case, "materialize") | {"norms": [1.0] * 6})
    monkeypatch.setattr(Checker, "check", lambda *a: {})
    sweep(report, [case], ["ghost_bk"], device=CPU, limits=QUICK)
    assert report.rows[-1]["failed"].startswith("wrong: at full size, against the reference: norms off by")


@pytest.mark.parametrize("fault", ["noise", "update"])
def test_a_mode_with_another_noise_or_update_is_refused(case, monkeypatch, fault):
    right = modes.make_our_step

    def wrong(model, optimizer, *, mechanism, plan, speed):
        mine = plan.method is not Method.MATERIALIZE
        if mine and fault == "noise":
            mechanism = mechanism._replace(noise_multiplier=2 * mechanism.noise_multiplier)
        step = right(model, optimizer, mechanism=mechanism, plan=plan, speed=speed)

        def lazy(state, batch, key):
            after, metrics = step(state, batch, key)
            return after._replace(params=tree.map(lambda leaf: leaf * 1.001, after.params)), metrics

        return lazy if mine and fault == "update" else step

    monkeypatch.setattr(modes, "make_our_step", wrong)
    with pytest.raises(WrongError, match="update off by"):
        Checker(CPU).check(case, "ghost_bk")


def test_a_mode_with_noise_of_its_own_is_compared_with_steps_of_the_same_noise(case):
    assert max(Checker(CPU).check(case, modes.INT8).values()) < 1e-3


def test_a_mode_that_raises_has_a_row_that_says_so_and_can_be_tried_again(case, tmp_path, capsys):
    report = new_report(tmp_path / "rows.json")
    sweep(report, [case], ["magic"], device=CPU, limits=QUICK)
    assert report.rows[0]["failed"] == "KeyError: 'magic'"
    assert "KeyError" in capsys.readouterr().err
    cells = len(report.rows)
    sweep(report, [case], ["magic"], device=CPU, limits=QUICK, retry=True)
    assert len(report.rows) == cells


def test_the_module_computes_what_the_model_computes():
    model = gpt(TINY._replace(layers=2))
    params = model.init(keys.key(3))
    tokens = torch.randint(0, 11, (3, 7), generator=torch.Generator().manual_seed(0))
    module = module_of(Setup(TINY._replace(layers=2), 3, CPU, torch.float32, False, params))
    logits = module(tokens[:, :-1]).transpose(1, 2)
    losses = torch.nn.functional.cross_entropy(logits, tokens[:, 1:], reduction="none").mean(1)
    torch.testing.assert_close(losses, model.loss(params, {"tokens": tokens}))


@pytest.mark.parametrize("mode", ["module", "opacus", "opacus_ghost"])
def test_baselines_compute_the_losses_and_norms_of_materialize(case, mode):
    if mode != "module":
        pytest.importorskip("opacus")
    errors = Checker(CPU).check(case, mode)
    assert errors.keys() == ({"losses"} if mode == "module" else {"losses", "norms"})
    assert max(errors.values()) < 1e-4


def test_the_regimes_are_built_and_checked_alike(monkeypatch):
    monkeypatch.setitem(regimes.REGIMES, "lora", regimes.REGIMES["lora"]._replace(config=TINY, batch_size=2))
    case = regimes.make_case("lora", speed=EAGER, dtype=torch.float32)
    assert {path.rpartition("_")[2] for path in case.model.trainable} == {"a", "b"}
    assert max(Checker(CPU).check(case, "auto").values()) < 1e-3


@pytest.mark.parametrize(
    ("name", "millions"),
    [("large_batch", 838), ("llama_1b", 1104), ("llama_1b_tied", 1236), ("llama_3b", 3016), ("lora", 851)],
)
def test_the_regimes_have_the_sizes_they_say(name, millions):
    model = regimes.make_case(name).model
    size = sum(torch.Size(leaf.shape).numel() for leaf in model.leaves.values())
    assert size / 1e6 == pytest.approx(millions, rel=0.01)


def test_the_page_and_the_plot_are_made_from_the_rows(case, tmp_path):
    report = new_report(tmp_path / "rows.json")
    report.head |= {"hardware": "NVIDIA H200", "date": "2026-11-15"}
    long = case._replace(model=case.model._replace(context=512))
    times = {"none": 30.0, "auto": 31.0, "ghost_bk": 60.0, "flash": 50.0, "module_graphs": 35.0, "opacus": 290.0}
    for mode, ms in times.items():
        report.add(fake_row(long, mode, ms) | {"profile_ms": {"by_class": {"gemm": 1.0}, "longest": {}}})
    report.add({"mode": "materialize", **long.cell, "failed": "out of memory"})
    report.first_steps.append({"mode": "auto", **long.cell, "layers": 36, "first_step_s": 71.0})
    report.write()
    page = gpt2_large.render(report.path, tmp_path / "results")
    assert page.name == "gpt2_large_h200_202611.md"
    text = page.read_text()
    assert "| speed, `auto` / `none`, T = 512 | >= 0.95 | 0.9677 | met |" in text
    assert "| speed, `auto` / fastest nn.Module, T = 512 | >= 1 | 1.1290 (module_graphs) | met |" in text
    assert "| speed, `auto` / best Opacus, T = 512 | >= 6 | 9.3548 (opacus) | met |" in text
    assert "| speed, `flash_bk` / `ghost_bk`, T = 512 | >= 1 | not measured |  |" in text
    assert "T = 512 | <= 60 | 71.0 | **short** |" in text
    assert "| materialize | not timed: out of memory | | | | | | " in text
    assert "Tests on this GPU" not in text
    assert "| fastDP, measured earlier (1) | 152 |" in text
    assert (page.parent / "gpt2_large_h200_202611.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((page.parent / "gpt2_large_h200_202611.json").read_text())["rows"] == report.rows


def test_the_page_of_the_regimes(tmp_path):
    report = Report(tmp_path / "rows.json", benchmark="regimes", device=CPU, **SETTINGS)
    case = regimes.make_case("large_batch")
    for mode, ms, gib in (("none", 90.0, 50.0), ("auto", 100.0, 60.0)):
        report.add(fake_row(case, mode, ms, gib))
    text = regimes.render(report.path, tmp_path / "results").read_text()
    assert "| speed, `auto` / `none`, large_batch | >= 0.92 | 0.9000 | **short** |" in text
    assert "| peak memory, `auto` / `none`, large_batch | <= 1.15 | 1.2000 | **short** |" in text
    assert "| speed, `auto` / `none`, llama_1b | >= 0.92 | not measured | |" in text


def test_the_peak_of_a_captured_step_is_that_of_its_capture():
    assert step_peak([40.0, 30.0, 10.0, 10.0], 10.0, graph=True) == 30.0
    assert step_peak([40.0, 10.0], 10.0, graph=False) == 10.0
    assert step_peak([10.0, 10.0], 10.0, graph=True) == 10.0
    assert step_peak([None], None, graph=True) is None


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention"),
        ("triton_per_fused__to_copy_add_native_layer_norm_3", "elementwise, norm layers"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise, norm layers"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "noise + update"),
        ("_noisy_adamw_body", "noise + update"),
        ("wide_normal_body", "noise + update"),
        ("_keep_body", "gemm"),
        ("_weighted_hopper_body", "gemm"),
        ("_sum_body", "norms, clipped sums"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        ("something_else", "other"),
    ],
)
def test_kernels_are_classified_by_name(kernel, kind):
    assert kernel_class(kernel) == kind


# ------------------------------------------------------------------------------------------------------------ run_all
def part(name: str, code: str, seconds: float = 1.0, background: tuple = ()) -> run_all.Part:
    return run_all.Part(name, seconds, (sys.executable, "-c", code), background)


def test_finished_parts_are_not_run_again_at_the_same_commit(tmp_path):
    todo = [part("good", "print('seen')"), part("bad one", "raise SystemExit(3)")]
    once = partial(run_all.run_parts, todo, tmp_path, seconds=100.0, now=lambda: 0.0)
    assert once(commit="a") == ["good: done, 0 s", "bad one: ended with 3, 0 s"]
    assert (tmp_path / "good.txt").read_text() == "seen\n"
    assert (tmp_path / "bad_one.txt").exists()
    assert once(commit="a") == ["good: done before", "bad one: ended with 3, 0 s"]
    assert once(commit="b")[0] == "good: done, 0 s"


def test_a_part_without_enough_time_is_not_started_and_a_stuck_one_is_stopped(tmp_path):
    forever = (sys.executable, "-c", "import time; time.sleep(600)")
    todo = [part("long", "print()", seconds=11.0), part("stuck", forever[-1], seconds=0.25, background=(forever,))]
    lines = run_all.run_parts(todo, tmp_path, seconds=10.0, commit="a", now=lambda: 0.0)
    assert lines == ["long: not started, needs about 11 s, 10 s left", "stuck: stopped, 0 s"]
    assert not (tmp_path / "done.json").exists()


def test_background_commands_have_their_own_timing_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FDP_CACHE", "shared")
    where, code = tmp_path / "where", "import os, sys; open(sys.argv[1], 'w').write(os.environ['FDP_CACHE'])"
    wait = f"import os, time\nwhile not os.path.exists({str(where)!r}): time.sleep(0.01)\ntime.sleep(0.1)"
    background = ((sys.executable, "-c", code, str(where)),)
    run_all.run_parts([part("own", wait, 60.0, background)], tmp_path, seconds=90.0, commit="a", now=lambda: 0.0)
    assert where.read_text() == str(tmp_path / "background")


def test_rows_of_another_learning_rate_are_named(case, tmp_path):
    report = new_report(tmp_path / "gpt2_large.json")
    report.add(fake_row(case, "none", 30.0) | {"learning_rate": 0.0})
    assert gpt2_large.other_rates(report.rows) == []
    report.add(fake_row(case, "auto", 31.0) | {"learning_rate": 1e-4})
    assert f"{report.commit} (0.0001)" in gpt2_large.other_rates(report.rows)[0]


def test_the_first_page_says_how_the_tests_ended(case, tmp_path, monkeypatch):
    report = new_report(tmp_path / "gpt2_large.json")
    report.head |= {"hardware": "NVIDIA H200", "date": "2026-11-15"}
    report.add(fake_row(case._replace(model=case.model._replace(context=512)), "none", 30.0))
    report.write()
    (tmp_path / "done.json").write_text('{"tests": "abc"}')
    (tmp_path / "tests.txt").write_text("...\n===== 7 passed, 2 skipped in 3.00s =====\n")
    monkeypatch.setattr(run_all.subprocess, "run", lambda *_, **__: None)
    run_all.pages(tmp_path)
    content = json.loads(report.path.read_text())
    assert content["tests"] == "`pytest -m gpu` at abc: 7 passed, 2 skipped in 3.00s."
    assert "Tests on this GPU: `pytest -m gpu` at abc: 7 passed" in gpt2_large.page(content, name="x")


def test_every_part_is_a_valid_command_of_its_benchmark(tmp_path, monkeypatch, capsys):
    todo = run_all.parts(tmp_path, "abc")
    assert len({p.name for p in todo}) == len(todo)
    for p in todo:
        python, flag, module, *options = p.command
        assert (python, flag) == (sys.executable, "-m")
        if module != "pytest":
            monkeypatch.setattr(sys, "argv", [module, "--help"])
            with pytest.raises(SystemExit):
                importlib.import_module(module).main()
            known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
            assert {option for option in options if option.startswith("--")} <= known
