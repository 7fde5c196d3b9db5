"""The benchmark of 8 billion parameters: its shape, its page, and a whole run of a tiny one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import llama_8b
from fdp.models import llama

ROW = {
    "mode": "none", "tokens_per_second": 9000.0, "seconds": 1.8, "fastest_seconds": 1.8, "peak_gib": 121.0,
    "state_gib": 75.0, "stored_gib": 0.0, "init_seconds": 1.0, "first_step_seconds": 60.0, "extra_noise": 0.0,
    "losses": [11.0], "choices": {},
}  # fmt: skip


def content(auto: float) -> dict:
    rows = [ROW, ROW | {"mode": "auto", "tokens_per_second": auto, "extra_noise": 0.001, "choices": {"keep, reuse": 3}}]
    settings = {"parameters": 8_030_261_248, "context": 2048, "microbatch": 1, "microbatches": 8}
    head = {"command": "python", "commit": "abc", "hardware": "NVIDIA H200", "versions": {"torch": "2"}}
    return head | {"benchmark": "llama_8b", "date": "2026-11-16", "settings": settings, "rows": rows}


def test_the_shape_is_that_of_llama_3_1_8b():
    model = llama(llama_8b.config_of(llama_8b.parse([])))
    assert sum(torch.Size(leaf.shape).numel() for leaf in model.leaves.values()) == 8_030_261_248
    assert model.context == 2048


def test_the_page_says_which_targets_are_met():
    good, slow = llama_8b.page(content(8500.0), name="x"), llama_8b.page(content(5000.0), name="x")
    assert "at least 0.9: 0.944" in good
    assert "not met" not in good
    assert slow.count("not met") == 2


@pytest.mark.slow
def test_a_tiny_run_writes_the_rows_of_both_modes(tmp_path: Path):
    words = "--layers 1 --width 32 --vocab 64 --context 8 --device cpu --microbatches 3 --steps 1"
    llama_8b.main([*words.split(), "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["mode"] for row in rows] == ["none", "auto"]
    assert rows[1]["extra_noise"] > 0
