"""On a GPU a sample adds the same to the sum in microbatches of every size, and so does not depend on the others."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from fdp.checks.equal_sizes import differences
from fdp.equal_rounding import WORKSPACES
from fdp.fast.compile_modes import Compile
from fdp.gradients.lazy_sum import evaluate
from fdp.gradients.plan import Method
from fdp.models import GPTConfig, gpt
from fdp.privacy import clipping
from fdp.run.equal_sizes import MOST_MOVED, RoundingWarning
from fdp.run.prepare_run import prepare
from fdp.run.run_plan import first_examples
from fdp.run.training_run import draw_batch, steps
from fdp.step import sample_part, sum_over_microbatches
from tests.run.test_smaller_microbatches import CONFIG

pytestmark = pytest.mark.gpu
WORDS, CONTEXT, SIZES, MAX_NORM = 8192, 256, (64, 32, 16, 8), 1.0


class Texts:
    """200 random texts, before which one more may be that has no loss and so no gradient."""

    def __init__(self, more: int = 0) -> None:
        self.more = more
        self.tokens = torch.randint(WORDS, (201, CONTEXT + 1), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return 200 + self.more

    def fetch(self, indices: Any) -> Any:
        rows = torch.as_tensor(indices) - self.more
        return {"tokens": self.tokens[rows], "loss_mask": (rows >= 0)[:, None].expand(-1, CONTEXT)}


def configured(more: int = 0, **changes: Any):
    model = gpt(GPTConfig(layers=2, width=768, heads=12, context=CONTEXT, vocab_size=WORDS))
    size = 200 + more
    fields = {"dataset": Texts(more), "batch_size": size, "population": size, "microbatch_size": 64, "model": model}
    cuda = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "clip": clipping.flat(max_norm=MAX_NORM)}
    return dataclasses.replace(CONFIG, **fields | cuda | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": Method.GHOST_BK},
        {"method": Method.MATERIALIZE},
        {"compile": Compile.BLOCK},
        {"compile": Compile.BLOCK, "method": Method.GHOST_BK},
    ],
)
def test_all_sizes_are_used(changes):
    run, _ = prepare(configured(**changes))
    assert run.sizes == SIZES


def test_in_float32_the_sizes_that_are_used_agree():
    """Some are left out: cuBLAS splits some products even with the least memory that torch gives it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RoundingWarning)
        run, state = prepare(configured(dtype=torch.float32))
    part, examples = sample_part(run.stages, state), first_examples(run.config, SIZES[0])
    assert run.sizes[0] == SIZES[0]
    found = differences(part, examples, sizes=run.sizes, sharded=False)
    assert max(found.values()) <= MOST_MOVED / SIZES[0]


def first_step(method: str, device: str) -> tuple[int, ...]:
    """Return the sizes that a run uses, after its first step."""
    run, state = prepare(configured(method=Method(method), device=torch.device(device)))
    next(steps(run, state))
    return run.sizes


@pytest.mark.parametrize("method", ["auto", "ghost"])
def test_all_sizes_are_used_in_a_process_as_users_have_it(method):
    """Without the deterministic algorithms and the workspace of the tests."""
    environment = {name: value for name, value in os.environ.items() if name not in WORKSPACES}
    program = f"from tests.run.test_equal_sizes_gpu import first_step; print(first_step({method!r}, 'cuda'))"
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert found.stdout.strip() == str(SIZES), found.stderr


@pytest.mark.parametrize("changes", [{}, {"dtype": torch.float32}, {"compile": Compile.BLOCK}])
def test_a_sample_that_adds_nothing_moves_the_sum_by_nothing(changes):
    """The 8 samples behind three full microbatches are 9, in microbatches of other sizes."""
    sums = []
    for more in (0, 1):
        run, state = prepare(configured(more, **changes))
        batch = draw_batch(run, 0)
        assert int(batch.mask.sum()) == 200 + more
        sums.append(evaluate(sum_over_microbatches(run.stages, state, batch).total).value)
    moved = torch.stack([(sums[0][path].double() - sums[1][path].double()).norm() for path in sums[0]]).norm()
    assert float(moved) <= 1e-5 * MAX_NORM
