"""Time of a step of the two small examples, the digits CNN and logistic regression, beside Opacus; on a CPU.

    python -m benchmarks.small_models            # a minute; prints one table, writes runs/small_models.json

Both sides train the same model on the same 1437 images with an expected batch of 512, flat clipping, noise and SGD,
and draw every batch themselves by Poisson sampling; a step is the draw, the private gradient and the update. fdp
draws its noise with ChaCha20, Opacus with torch's generator (``secure_mode`` off). Blocks of steps of all rows take
turns in one process; the time is the median over blocks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fdp import keys, models, ops
from fdp.checks.first_call import Checks
from fdp.data.datasets import digits
from fdp.gradients.plan import add_smaller_sizes, make_plan
from fdp.model import Model, from_loss
from fdp.optimizers import sgd
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, sample_batch
from fdp.step import init_state, make_train_step
from fdp.types import Tree

BATCH_SIZE, NOISE = 512, 2.0
MICROBATCH_SIZES = {"cnn": (576, 544, 512, 480, 32), "logistic": (576,)}
"""As in ``examples``: a draw is padded to the next size. A linear layer's samples cost less than the choice."""
RATES = {"cnn": (0.7, 0.9, 0.3), "logistic": (2.0, 0.0, 1.0)}
"""Learning rate, momentum and clipping norm, as in ``examples``."""
STEPS, BLOCKS = 20, 9


def logistic() -> tuple[Model, Tree]:
    """Return the loss of ``examples/logistic.py`` as a model, and its parameters."""

    def loss(params: Tree, data: Tree) -> torch.Tensor:
        logits = ops.linear(data["image"].flatten(1) - 0.5, params["weight"], params["bias"])
        return F.cross_entropy(logits, data["label"], reduction="none")

    params = {"weight": torch.zeros(10, 64), "bias": torch.zeros(10)}
    return from_loss(loss, params), params


def fdp_steps(name: str) -> Iterator[None]:
    """Run fdp, as in the example of the CNN."""
    train, _ = digits()
    rate, momentum, norm = RATES[name]
    if name == "cnn":
        model = models.build("cnn")
        params = model.init(keys.key(0))
    else:
        model, params = logistic()
    sampling = poisson(len(train), expected_batch_size=BATCH_SIZE)
    mechanism, optimizer = Mechanism(sampling, flat(max_norm=norm), NOISE), sgd(rate, momentum=momentum)
    sizes = MICROBATCH_SIZES[name]
    samples = train.fetch(torch.arange(sizes[0]).numpy())
    plan = add_smaller_sizes(make_plan(model, params, samples), model, params, samples, sizes=sizes[1:])
    step = make_train_step(model, optimizer, mechanism=mechanism, plan=plan, checks=Checks.SKIPPED)  # timed
    state, key = init_state(model, params, optimizer, mechanism), keys.key(1)
    number = 0
    while True:
        batch = sample_batch(train, sampling, key, step=number, microbatch_size=sizes)
        state, _ = step(state, batch, key)
        number += 1
        yield


def torch_model(name: str) -> nn.Module:
    """Return the same model as a module."""
    if name == "logistic":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    convolutions = [leaf for path, leaf in models.build("cnn").leaves.items() if path.endswith("weight")][:-1]
    layers: list[nn.Module] = []
    for i, leaf in enumerate(convolutions):
        filters, inputs = leaf.shape[:2]
        layers += [nn.Conv2d(inputs, filters, 3, stride=1 if i == 0 else 2, padding=1), nn.Tanh()]
    head = models.build("cnn").leaves["head.weight"].shape
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(head[1], head[0]))


def opacus_steps(name: str, *, mode: str) -> Iterator[None]:
    """Run Opacus, set up by its ``PrivacyEngine`` with Poisson sampling."""
    from opacus import PrivacyEngine

    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    train, _ = digits()
    rate, momentum, norm = RATES[name]
    plain, ghost = torch_model(name), mode == "ghost"
    made: Any = PrivacyEngine().make_private(
        module=plain,
        optimizer=torch.optim.SGD(plain.parameters(), lr=rate, momentum=momentum),
        criterion=nn.CrossEntropyLoss(),
        data_loader=DataLoader(TensorDataset(train.image - 0.5, train.label), batch_size=BATCH_SIZE),
        noise_multiplier=NOISE,
        max_grad_norm=norm,
        poisson_sampling=True,
        grad_sample_mode=mode,
    )
    module, optimizer, loader = made[0], made[1], made[-1]
    criterion = made[2] if ghost else nn.CrossEntropyLoss()
    while True:
        for images, labels in loader:
            optimizer.zero_grad(set_to_none=True)
            criterion(module(images), labels).backward()
            optimizer.step()
            yield


ROWS: dict[str, Callable[[str], Iterator[None]]] = {
    "fdp": fdp_steps,
    "opacus_hooks": lambda name: opacus_steps(name, mode="hooks"),
    "opacus_ghost": lambda name: opacus_steps(name, mode="ghost"),
}


def measure(name: str, *, steps: int = STEPS, blocks: int = BLOCKS) -> dict[str, float]:
    """Return the milliseconds of a step of every row: the median over blocks that take turns."""
    rows = {row: make(name) for row, make in ROWS.items()}
    taken: dict[str, list[float]] = {row: [] for row in rows}
    for block in range(blocks + 1):
        for row, run in rows.items():
            start = time.perf_counter()
            for _ in range(steps):
                next(run)
            if block:  # the first one warms up
                taken[row].append(1e3 * (time.perf_counter() - start) / steps)
    return {row: statistics.median(times) for row, times in taken.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time of a step of the small examples, beside Opacus, on a CPU.")
    parser.add_argument("--json", type=Path, default=Path("runs/small_models.json"))
    parser.add_argument("--models", nargs="+", choices=tuple(RATES), default=list(RATES))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    options = parser.parse_args(argv)
    found = {name: measure(name, steps=options.steps, blocks=options.blocks) for name in options.models}
    threads = torch.get_num_threads()
    print(f"milliseconds of a step, {threads} threads, torch {torch.__version__}, opacus {version('opacus')}")
    for name, times in found.items():
        ratio = times["fdp"] / min(times["opacus_hooks"], times["opacus_ghost"])
        rows = ", ".join(f"{row} {ms:.2f}" for row, ms in times.items())
        print(f"{name}: {rows}; fdp / faster Opacus {ratio:.2f} (target: at most 1)")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"threads": threads, "milliseconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
