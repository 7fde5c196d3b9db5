"""Tests of the benchmark of foreign models on the CPU, with tiny shapes: checked rows, resuming, the page."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import foreign
from benchmarks.mode_checks import Checker
from benchmarks.modes import EAGER
from benchmarks.report import Report
from fdp.models import LlamaConfig, gpt, llama
from tests.benchmarks.test_gpt2_large import CPU, QUICK, SETTINGS, TINY, fake_row

pytest.importorskip("transformers")

TINY_LLAMA = LlamaConfig(layers=1, width=8, heads=4, key_heads=2, hidden=12, context=6, vocab_size=11)


@pytest.fixture
def tiny_shapes(monkeypatch):
    """Replace the shapes of the benchmark by tiny ones in float32."""
    shapes = {"gpt2_large": foreign.Shape(gpt, TINY, 3), "llama_1b": foreign.Shape(llama, TINY_LLAMA, 3)}
    monkeypatch.setattr(foreign, "SHAPES", shapes)
    monkeypatch.setattr(foreign, "make_cases", partial(foreign.make_cases, dtype=torch.float32))
    monkeypatch.setattr(foreign, "Limits", lambda cap: QUICK)


@pytest.mark.parametrize("shape", ["gpt2_large", "llama_1b"])
def test_a_foreign_model_has_the_shape_of_our_own(tiny_shapes, shape):
    own, theirs = foreign.make_cases(shape)
    sizes = [sorted(torch.Size(leaf.shape).numel() for leaf in case.model.leaves.values()) for case in (own, theirs)]
    if shape == "llama_1b":
        assert sizes[0] == sizes[1]
    assert sum(sizes[0]) == sum(sizes[1])
    assert own.cell | {"regime": theirs.regime} == theirs.cell
    module: Any = foreign.make_module(foreign.SHAPES[shape].config)
    assert module.config._attn_implementation == "sdpa"


@pytest.mark.long
@pytest.mark.parametrize("shape", ["gpt2_large", pytest.param("llama_1b", marks=pytest.mark.slow)])
def test_the_sweep_writes_checked_rows_and_resumes(tiny_shapes, shape, tmp_path):
    path = tmp_path / "rows.json"
    words = "--device cpu --compile none --no-cuda-graph --no-timed-plan --modes none auto"
    words = [*words.split(), "--shapes", shape, "--json", str(path)]
    foreign.main([*words, "--budget", "0"])
    assert not path.exists()
    foreign.main(words)
    rows = json.loads(path.read_text())["rows"]
    cells = [(f"{shape}, {whose}", mode) for whose in ("own", "transformers") for mode in ("none", "auto")]
    assert [(row["regime"], row["mode"]) for row in rows] == cells
    for row in rows:
        assert row["ms"] > 0
        assert row["check"]["update"] < 1e-4
        assert row["mode"] == "none" or row["check"]["norms"] < 1e-5
    foreign.main(words)
    assert json.loads(path.read_text())["rows"] == rows


@pytest.mark.parametrize("mode", ["opacus", "opacus_ghost"])
@pytest.mark.parametrize("shape", ["gpt2_large", pytest.param("llama_1b", marks=pytest.mark.slow)])
def test_opacus_on_a_foreign_module_computes_the_losses_and_norms_of_materialize(tiny_shapes, shape, mode):
    pytest.importorskip("opacus")
    _, case = foreign.make_cases(shape, speed=EAGER)
    errors = Checker(CPU).check(case, mode)
    assert errors.keys() == {"losses", "norms"}
    assert max(errors.values()) < 1e-4


def test_the_page_of_foreign_models(tiny_shapes, tmp_path):
    report = Report(tmp_path / "rows.json", benchmark="foreign", device=CPU, **SETTINGS)
    own, theirs = foreign.make_cases("gpt2_large")
    for case, mode, ms in ((own, "none", 50.0), (own, "auto", 54.0), (theirs, "none", 55.0), (theirs, "auto", 72.0)):
        report.add(fake_row(case, mode, ms))
    report.add(fake_row(theirs, "opacus_ghost", 216.0))
    report.add({"mode": "opacus", **theirs.cell, "failed": "out of memory"})
    text = foreign.render(report.path, tmp_path / "results").read_text()
    assert "| speed, `auto` of transformers / own, gpt2_large | >= 0.9 | 0.7500 | **short** |" in text
    assert "| speed, `none` of transformers / own, gpt2_large | >= 0.9 | 0.9091 | met |" in text
    assert "| speed, `auto` of transformers / best Opacus (opacus_ghost), gpt2_large | >= 1 | 3.0000 | met |" in text
    assert "| speed, `auto` of transformers / own, llama_1b | >= 0.9 | not measured | |" in text
    assert "| gpt2_large, transformers | 1 | 3 | 6 | opacus | not timed: out of memory | | | | | |" in text
