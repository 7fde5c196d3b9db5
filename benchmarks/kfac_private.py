"""Private K-FAC on the digits classifier at epsilon 3, against DP-SGD and DP-AdamW with the same budget.

    python -m benchmarks.kfac_private               # under 5 minutes on one core

Prints the page and writes ``benchmarks/results/kfac_private_<hardware>_<yyyymm>.{json,md}``, or ``--out``.

All methods train the same mlp (64-32-10) for the same steps on the same Poisson batches, with the same clipping bound
and noise multiplier. K-FAC's preconditioners come from pink noise images (free), or from noised statistics of the
private data, paid for out of the same epsilon. Each method's learning rate is the one of its grid with the best mean
test accuracy over the tuning seeds; it is then run on other seeds. (This choice is not accounted for, for any of them.)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics as stats
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.report import current_commit, hardware, slug, versions
from fdp import keys
from fdp.data.datasets import digits
from fdp.data.digest import data_digest
from fdp.gradients.plan import Method, make_plan
from fdp.kfac.config import KfacConfig
from fdp.kfac.optimizer import Kfac
from fdp.kfac.private.noised_factors import STATISTICS, statistic_scales
from fdp.kfac.private.public_data import NoiseImages, draw, public
from fdp.kfac.private.refresh import private_kfac, refresh_noised, refresh_public, sides_of
from fdp.models import mlp
from fdp.models.classifiers import logits
from fdp.optimizers import Optimizer, adamw, sgd
from fdp.privacy import accounting, clipping
from fdp.privacy.mechanism import Mechanism, Statistics, statistics
from fdp.privacy.sampling import poisson, sample_batch
from fdp.step import init_state, make_train_step
from fdp.types import TrainState

RESULTS = Path(__file__).parent / "results"
EPSILON, DELTA, STEPS, BATCH, MICROBATCH = 3.0, 1e-5, 60, 192, 64
TUNING, SEEDS = (100, 101), (0, 1, 2, 3, 4)
MODEL = mlp(widths=(64, 32), classes=10)
TRAIN, TEST = digits()
SAMPLING = poisson(len(TRAIN), expected_batch_size=BATCH)
RELEASES = statistics(poisson(len(TRAIN), expected_batch_size=480), max_norm=2.0, noise_multiplier=8.0, period=30)
PINK = NoiseImages((1, 8, 8), 10, 512, exponent=1.0, mean=0.3, std=0.37, key=keys.key(7))
CONFIG = KfacConfig(damping=1e-2, kl_clip=None, momentum=0.9, factor_period=10, inverse_period=10)


class Result(NamedTuple):
    """One method at its best learning rate: accuracies over seeds, and the epsilon spent."""

    name: str
    rate: float
    accuracies: list[float]
    epsilon: float
    noise_multiplier: float
    seconds_per_run: float
    tuned: dict[float, float]


class Contender(NamedTuple):
    """A method: its grid, ``make(rate)``, and the noised statistics it releases, if any."""

    name: str
    rates: Sequence[float]
    make: Callable[[float], Optimizer | Kfac]
    releases: Statistics | None = None


def contenders() -> list[Contender]:
    example = TRAIN.fetch(np.arange(MICROBATCH))

    def make_kfac(rate: float) -> Kfac:
        return private_kfac(MODEL, example, learning_rate=rate, config=CONFIG, largest=128)

    return [
        Contender("DP-SGD, momentum 0.9", (0.1, 0.2, 0.5, 1.0, 2.0), lambda rate: sgd(rate, momentum=0.9)),
        Contender("DP-AdamW", (1e-2, 2e-2, 4e-2, 8e-2, 0.16), lambda rate: adamw(rate)),
        Contender("DP-K-FAC, pink noise", (1e-2, 2e-2, 4e-2, 8e-2, 0.16), make_kfac),
        Contender("DP-K-FAC, noised statistics", (1e-2, 2e-2, 4e-2, 8e-2, 0.16), make_kfac, RELEASES),
    ]


def mechanism_of(releases: Statistics | None) -> Mechanism:
    """Return the mechanism whose noise spends the budget, including any released statistics."""
    clip = clipping.flat(max_norm=1.0)
    z = accounting.noise_multiplier_for(SAMPLING, clip, epsilon=EPSILON, delta=DELTA, steps=STEPS, statistics=releases)
    return Mechanism(SAMPLING, clip, z, releases)


def train(contender: Contender, rate: float, seed: int, mechanism: Mechanism) -> float:
    """Return the test accuracy after ``STEPS`` steps."""
    method = contender.make(rate)
    root = keys.key(seed)
    params = MODEL.init(keys.fold_in(root, "init"))
    optimizer = method.optimizer if isinstance(method, Kfac) else method
    state = init_state(MODEL, params, optimizer, mechanism)
    plan = make_plan(MODEL, params, TRAIN.fetch(np.arange(MICROBATCH)), method=Method.GHOST_BK)
    sides = sides_of if isinstance(method, Kfac) else None
    step = make_train_step(MODEL, optimizer, mechanism=mechanism, plan=plan, precondition=sides)
    state = method.place(state) if isinstance(method, Kfac) else state
    refresh = refresher(method, mechanism, params) if isinstance(method, Kfac) else lambda state, key, t: state
    for t in range(STEPS):
        state = refresh(state, root, t)
        batch = sample_batch(TRAIN, SAMPLING, root, step=t, microbatch_size=MICROBATCH)
        state, _ = step(state, batch, root)
    data = TEST.fetch(np.arange(len(TEST)))
    return float((logits(MODEL, state.params, data).argmax(1) == data["label"]).float().mean())


def refresher(k: Kfac, mechanism: Mechanism, params) -> Callable[[TrainState, torch.Tensor, int], TrainState]:
    """Return ``refresh(state, key, step)``, from pink noise or from the statistics that the mechanism releases."""
    source = public(PINK, private=TRAIN, digest=data_digest)
    more = mechanism.statistics
    if more is None:
        return lambda state, key, t: refresh_public(k, state, source, key, t)
    example, _ = draw(source, samples=MICROBATCH, key=keys.key(3))
    scales = statistic_scales(MODEL, params, example, estimator=k.plan.slot_estimator, key=keys.key(4))

    def refresh(state: TrainState, key: torch.Tensor, t: int) -> TrainState:
        def batch():
            return sample_batch(TRAIN, more.sampling, key, step=t, microbatch_size=MICROBATCH, purpose=STATISTICS)

        return refresh_noised(k, state, batch, key, t, mechanism=mechanism, scales=scales)

    return refresh


def compare() -> list[Result]:
    """Run every method on the seeds, at the rate that was best on the tuning seeds."""
    found = []
    for contender in contenders():
        mechanism = mechanism_of(contender.releases)
        spent = accounting.epsilon(mechanism, steps=STEPS, delta=DELTA)
        tuned = {
            rate: stats.mean(train(contender, rate, seed, mechanism) for seed in TUNING) for rate in contender.rates
        }
        best = max(tuned, key=lambda rate: tuned[rate])
        start = time.perf_counter()
        accuracies = [train(contender, best, seed, mechanism) for seed in SEEDS]
        seconds = (time.perf_counter() - start) / len(SEEDS)
        found.append(Result(contender.name, best, accuracies, spent, mechanism.noise_multiplier, seconds, tuned))
        print(f"{contender.name}: {dict((r, round(a, 3)) for r, a in tuned.items())}", flush=True)
    return found


def page(content: Mapping[str, Any]) -> str:
    """Return the Markdown page of a report."""
    numbers = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    lines = [
        f"# Private K-FAC, {content['month']}",
        "",
        f"Command `{content['command']}` at commit {content['commit']}; {content['hardware']}, {numbers}; float32.",
        "",
        f"The digits classifier (64-32-10), {STEPS} steps of an expected {BATCH} of {len(TRAIN)} samples, clipped to "
        f"1, at epsilon {EPSILON:g}, delta {DELTA:g}. Learning rates are chosen, for each from its own grid of five, "
        f"by the mean accuracy of {len(TUNING)} other seeds; that choice is not accounted for, for any of them. Noised "
        f"statistics are {RELEASES.releases(STEPS)} releases at noise {RELEASES.noise_multiplier:g}, out of the same "
        "epsilon.",
        "",
        f"| method | rate | test accuracy, mean ± deviation of {len(SEEDS)} seeds | noise | epsilon | s / run |",
        "|---|---|---|---|---|---|",
    ]
    for row in content["rows"]:
        mean, spread = 100 * stats.mean(row["accuracies"]), 100 * stats.stdev(row["accuracies"])
        lines.append(
            f"| {row['name']} | {row['rate']:g} | {mean:.1f} ± {spread:.1f} % | {row['noise_multiplier']:.3f} | "
            f"{row['epsilon']:.3f} | {row['seconds_per_run']:.1f} |"
        )
    edges = [row["name"] for row in content["rows"] if str(row["rate"]) in (*row["tuned"],)[:: len(row["tuned"]) - 1]]
    lines += ["", f"Best learning rate at the edge of its grid: {', '.join(edges) or 'none'}.", ""]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hardware", help="its name; default: as the system reports it")
    parser.add_argument("--out", type=Path, help="the JSON file; default: results/kfac_private_<hardware>_<month>")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    now, device = datetime.now(UTC), torch.device("cpu")
    name = options.hardware or hardware(device)
    out = options.out or RESULTS / f"kfac_private_{slug(name)}_{now:%Y%m}.json"
    content = {
        "hardware": f"{os.environ.get('OMP_NUM_THREADS', 1)} threads of {name}",
        "versions": versions(device),
        "commit": current_commit(),
        "command": "python -m benchmarks.kfac_private",
        "month": f"{now:%B %Y}",
        "rows": [result._asdict() for result in compare()],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(content, indent=1) + "\n")
    out.with_suffix(".md").write_text(page(json.loads(out.read_text())))
    print(out.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
