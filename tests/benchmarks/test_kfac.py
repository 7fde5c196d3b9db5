"""Tests of the K-FAC benchmark: rows of a tiny model, and the page."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kfac import _gpu_table, step_cost
from fdp.fast.compile_modes import Compile
from fdp.models import GPTConfig, gpt

MODEL = gpt(GPTConfig(layers=1, width=16, heads=2, context=8, vocab_size=23))


@pytest.mark.parametrize("name", ["adamw", "kfac"])
def test_a_row_covers_the_full_batch(name):
    tokens = torch.randint(0, 23, (3, 2, 9), generator=torch.Generator().manual_seed(0))
    row = step_cost(MODEL, tokens, name, compile=Compile.NONE, steps=1, microbatches=2)
    assert (row["optimizer"], row["batch_size"], row["context"]) == (name, 4, 8)
    assert row["ms"] == pytest.approx(row["step_ms"] + row["refresh_ms"] / 10)
    assert 0 < row["loss"] < 10
    assert row["failures"] == 0
    assert bool(row["forms"]) == (name == "kfac")


def test_the_page_compares_equal_batch_sizes():
    def row(name: str, size: int, ms: float) -> dict:
        return {"optimizer": name, "batch_size": size, "ms": ms, "step_ms": ms, "refresh_ms": 0.0, "peak_gib": None}

    page = "\n".join(_gpu_table([row("adamw", 8, 10.0), row("kfac", 8, 16.0), row("adamw", 32, 40.0)]))
    assert "K-FAC / AdamW, 8 samples: 1.60** (target: below 1.5). **Missed**" in page
    assert "32 samples:" not in page
    page = "\n".join(_gpu_table([row("adamw", 8, 10.0), row("kfac", 8, 14.0)]))
    assert "8 samples: 1.40** (target: below 1.5). Met" in page
