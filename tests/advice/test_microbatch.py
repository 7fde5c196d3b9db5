"""The microbatch of ``--microbatch auto``: the largest that fits and is of use, from public numbers alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fdp.advice import microbatch
from fdp.advice.machine import USABLE
from fdp.advice.microbatch import MOST_TOKENS, bytes_of_step, largest_microbatch, useful_microbatch
from fdp.fast.compile_modes import Compile
from fdp.gradients.plan import Method
from fdp.models import GPTConfig, gpt, mlp
from fdp.optimizers import adamw
from fdp.privacy import clipping
from fdp.run.run_config import RunConfig


class Shapes:
    """Samples of a shape; the values are never looked at."""

    def __init__(self, sample: dict[str, torch.Tensor], count: int = 100) -> None:
        self.sample, self.count = sample, count

    def __len__(self) -> int:
        return self.count

    def fetch(self, indices: Any) -> Any:
        return {name: leaf.expand(len(indices), *leaf.shape) for name, leaf in self.sample.items()}


def config_of(*, context: int = 8, batch_size: int = 64, **changes: Any) -> RunConfig:
    config = RunConfig(
        model=gpt(GPTConfig(layers=2, width=16, heads=2, context=context, vocab_size=61, tied=True)),
        dataset=Shapes({"tokens": torch.zeros(context + 1, dtype=torch.int64)}),
        method=Method.AUTO,
        clip=clipping.flat(max_norm=1.0),
        noise_multiplier=1.0,
        epsilon=None,
        delta=1e-5,
        batch_size=batch_size,
        steps=2,
        optimizer=adamw(1e-3),
        seed=0,
        dtype=torch.float32,
        microbatch_size=1,
        memory_budget=None,
        compile=Compile.NONE,
        device=torch.device("cpu"),
    )
    return replace(config, **changes)


def test_it_holds_most_draws_and_is_enough_tokens_for_a_gpu():
    assert [useful_microbatch(config_of(batch_size=n)) for n in (1, 2, 3, 64, 100)] == [1, 2, 4, 80, 130]
    for context, most in ((512, MOST_TOKENS // 512), (513, 32), (1024, 32), (100_000, 1)):
        assert useful_microbatch(config_of(context=context, batch_size=10_000)) == most
    images = Shapes({"image": torch.zeros(784), "label": torch.zeros((), dtype=torch.int64)})
    assert (
        useful_microbatch(config_of(model=mlp(widths=(784, 8), classes=10), dataset=images, batch_size=10_000))
        == microbatch.MOST_SAMPLES
    )


@pytest.mark.long
def test_it_is_the_largest_that_fits(monkeypatch: pytest.MonkeyPatch):
    config = config_of(batch_size=16)
    need = {size: bytes_of_step(config, size) for size in (8, 16, 20)}
    assert need[8] < need[16] < need[20]
    monkeypatch.setattr(microbatch, "bytes_of_step", lambda config, size: need.get(size, 1.0 * size))
    for size, most in need.items():
        assert largest_microbatch(config, most / USABLE * 1.001) == size
    assert largest_microbatch(config, 1.0) == 1


def test_it_does_not_depend_on_the_samples(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(microbatch, "bytes_of_step", lambda config, size: 1.0 * size)
    found = {
        largest_microbatch(config_of(dataset=Shapes({"tokens": torch.full((9,), token)}, count)), 40.0)
        for token, count in ((0, 1), (60, 1), (3, 1000))
    }
    assert found == {32}
