"""The same task in Opacus' lines and in ours, as the documentation prints them: same noise, epsilon and accuracy.

The lines are those of docs/coming_from_opacus.md; both programs train the same module on the same images.
"""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fdp.data.datasets import digits
from fdp.privacy.accounting import Accountant, epsilon

pytest.importorskip("opacus", reason="opacus is not installed: pip install 'fdp[test]'")

PAGE = Path(__file__).parents[2] / "docs" / "coming_from_opacus.md"
OURS, THEIRS = "fdp", "not run: tests/run/test_beside_opacus.py"


def block(comment: str) -> str:
    """Return the fenced block after ``<!-- comment -->``."""
    found = re.search(rf"<!-- {comment}[^>]* -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None, comment
    return found[1]


def statements(text: str) -> int:
    """Return the number of statements: lines, if each fitted on one."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(text)))


def task() -> dict[str, Any]:
    """Return a module, and images for training and testing; 1400 is its own public number."""
    torch.manual_seed(0)
    train, test = digits()
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    return {
        "module": module,
        "train": TensorDataset(train.image[:1400], train.label[:1400]),
        "test": (test.image, test.label),
        "torch": torch,
        "nn": nn,
    }


def accuracy(module: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        return float((module.eval()(images).argmax(1) == labels).float().mean())


@pytest.mark.long
def test_both_programs_spend_the_same_and_learn_the_same():
    ours, theirs = task(), task()
    exec(block(OURS), ours)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus warns that its random numbers are not for production, and of hooks
        exec(block(THEIRS), theirs)
    run, engine, dp_optimizer = ours["run"], theirs["engine"], theirs["optimizer"]
    assert run.epsilon == pytest.approx(3, abs=0.02)
    assert engine.get_epsilon(1e-6) == pytest.approx(3, abs=0.05)
    # The same noise and the same number of steps: both calibrate it from epsilon, with accountants of their own.
    assert run.noise_multiplier == pytest.approx(dp_optimizer.noise_multiplier, rel=0.02)
    steps = sum(count for _, _, count in engine.accountant.history)
    assert steps == run.config.steps
    (rate,) = {rate for _, rate, _ in engine.accountant.history}
    assert rate == pytest.approx(run.run.mechanism.sampling.rate)
    # Our accountant about their run: the same epsilon as theirs.
    about_theirs = run.run.mechanism._replace(noise_multiplier=dp_optimizer.noise_multiplier)
    spent = epsilon(about_theirs, steps=steps, delta=1e-6, accountant=Accountant.PLD)
    assert spent == pytest.approx(engine.get_epsilon(1e-6), rel=0.02)
    scores = accuracy(run.module, *ours["test"]), accuracy(theirs["module"], *theirs["test"])
    assert min(scores) > 0.6
    assert abs(scores[0] - scores[1]) < 0.12


def test_ours_takes_at_most_nine_lines_and_fewer_than_theirs():
    assert statements(block(OURS)) < statements(block(THEIRS)) <= 11
    assert len(block(OURS).splitlines()) <= 9
