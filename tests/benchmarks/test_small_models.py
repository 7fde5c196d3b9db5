"""The benchmark of the small examples: both sides train the same models, and its report is complete."""

from __future__ import annotations

import json
import math

import pytest

from benchmarks import small_models
from fdp import models

pytest.importorskip("opacus", reason="opacus is not installed: pip install 'fdp[test]'")


def test_the_modules_have_the_parameters_of_the_models():
    expected = sum(math.prod(leaf.shape) for leaf in models.build("cnn").leaves.values())
    assert sum(p.numel() for p in small_models.torch_model("cnn").parameters()) == expected
    _, params = small_models.logistic()
    assert [p.shape for p in small_models.torch_model("logistic").parameters()] == [p.shape for p in params.values()]


@pytest.mark.filterwarnings("ignore")  # Opacus warns of its generator and of hooks
def test_every_row_is_timed_and_reported(tmp_path, capsys):
    report = tmp_path / "times.json"
    small_models.main(["--models", "logistic", "--steps", "1", "--blocks", "1", "--json", str(report)])
    times = json.loads(report.read_text())["milliseconds"]["logistic"]
    assert set(times) == {"fdp", "opacus_hooks", "opacus_ghost"}
    assert all(ms > 0 for ms in times.values())
    assert "logistic: fdp" in capsys.readouterr().out
