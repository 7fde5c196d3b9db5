"""Hints to whoever runs a private training: before it begins, and while it trains, each one once.

    before   from public settings: the first step spends most of the budget; the sampling rate is near 1; the batch is
             too small for the noise. From the number of samples: the population is far from it
    during   from the metrics: every sample is clipped; none is; the loss diverges, which ends the run

The number of samples is private, and so are the losses and norms that hints during a run are computed from. Hints are
for the screen of the data's owner; nothing writes them to a file.

    >>> for hint in hints_before(run): print(hint)
    >>> for state, record in follow_hints(stream, run, say=print, stop=True): ...        # may raise Diverged
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from fdp.advice.divergence import Divergence, find_divergence
from fdp.advice.signal import alignment_of, critical_batch_size, signal_to_noise, trained_parameters
from fdp.gradients.plan import Method
from fdp.parallel.sharded_init import drawn_params
from fdp.privacy import accounting
from fdp.privacy.guarantee import LARGE_EPSILON
from fdp.privacy.sampling import Poisson
from fdp.privacy.shown_numbers import round_up
from fdp.run.prepare_run import Run
from fdp.run.step_record import StepRecord
from fdp.types import FdpError, TrainState

SAME_STEPS = 20
"""Steps in a row after which "all are clipped" or "none is" counts as a habit; in short runs a quarter of the steps."""

FIRST_STEP_SHARE = 0.4
"""A first step that spends more than this part of epsilon makes further steps cheap."""

MORE_STEPS = 4
"""The suggestion multiplies the steps by this."""
CHEAP_GROWTH = 0.8
"""More steps cost little if the noise grows by less than this part of the square root of ``MORE_STEPS``."""

FAR_POPULATION = 2.0
"""A population that differs from the number of samples by more than this factor is told."""

HIGH_RATE = 0.5
LOW_SIGNAL = 1.0
"""Predicted signal-to-noise of the whole run below which it hardly learns."""


REMEDY = "Lower --lr, to a tenth or less, or raise --warmup; --on-divergence continue trains on regardless"


class Diverged(FdpError):
    """The run was stopped because its loss diverged."""

    def __init__(self, found: Divergence) -> None:
        super().__init__(f"diverged: {found.sentence}. {REMEDY}")
        self.found = found


class Advised(NamedTuple):
    """The hints that were given already."""

    clipped: bool = False
    unclipped: bool = False
    diverged: bool = False


def hints_before(run: Run) -> list[str]:
    """Return hints that follow from the settings of a run and its number of samples; none if it is not private."""
    if run.epsilons is None:
        return []
    sampling = run.mechanism.sampling
    found = [_large_epsilon(run), _random_base(run), _population(sampling), _first_step(run), _rate(sampling)]
    found.append(_batch(run))
    return [hint for hint in found if hint is not None]


def follow_hints(
    stream: Iterable[tuple[TrainState, StepRecord]],
    run: Run,
    *,
    say: Callable[[str], None],
    stop: bool,
    earlier: Sequence[StepRecord] = (),
) -> Iterator[tuple[TrainState, StepRecord]]:
    """Pass the stream on; say each hint once, and raise :class:`Diverged` if ``stop`` and the loss diverges.

    ``earlier`` are the records of a run that is resumed. Every rank sees the same records, so all of them stop.
    """
    records, advised = list(earlier), Advised()
    steps, clips = run.config.steps, run.config.method is not Method.NONE and run.config.clip.name == "flat"
    for state, record in stream:
        records.append(record)
        yield state, record
        found = None if advised.diverged else find_divergence(records, steps=steps)
        if found is not None and stop:
            raise Diverged(found)
        if found is not None:
            say(f"hint: {found.sentence}: it diverges. {REMEDY}")
            advised = advised._replace(diverged=True)
        hint = clipping_hint(records, steps=steps) if clips else None
        if hint is not None and not getattr(advised, hint[0]):
            say(f"hint: {hint[1]}")
            advised = advised._replace(**{hint[0]: True})


def clipping_hint(records: Sequence[StepRecord], *, steps: int) -> tuple[str, str] | None:
    """Return ``("clipped" or "unclipped", sentence)`` if the last steps clipped every sample, or none; else None."""
    needed = max(2, min(SAME_STEPS, steps // 4))
    last = [record for record in records[-2 * needed :] if record.clipped_fraction is not None][-needed:]
    if len(last) < needed:
        return None
    bound, norms = last[-1].max_norm, [record.norm_q50 for record in last if record.norm_q50 is not None]
    if bound is None or not norms:
        return None
    middle = sorted(norms)[len(norms) // 2]
    if all(record.clipped_fraction == 1.0 for record in last):
        return "clipped", (
            f"all samples were clipped in the last {needed} steps (median norm {middle:.3g}, --max-norm {bound:g}). C "
            f"then works as normalisation: every sample counts the same, and with Adam the size of C hardly matters. "
            f"That is fine with a tuned --lr, and usual (Li et al. 2022 use C = 0.1). Raise --max-norm towards "
            f"{middle:.2g} only if large gradients must count more; the noise grows with C"
        )
    if all(record.clipped_fraction == 0.0 for record in last):
        return "unclipped", (
            f"no sample was clipped in the last {needed} steps (median norm {middle:.3g}, --max-norm {bound:g}): the "
            f"noise is {bound / middle:.3g} times as large as it needs to be. In the next run lower --max-norm to "
            f"about {middle:.2g}: the signal stays, the noise shrinks with C"
        )
    return None


def _random_base(run: Run) -> str | None:
    """Return a hint if most of the model stays as it was drawn: adapters of a model that never learned anything."""
    config = run.config
    if config.values is not drawn_params or len(config.model.trainable) == len(config.model.leaves):
        return None
    return (
        f"{config.model.name} is a preset with random parameters, and most of them are frozen: adapters learn little "
        f"on it. For a pretrained model give the folder that save_pretrained wrote: --model FOLDER"
    )


def _large_epsilon(run: Run) -> str | None:
    """Return a hint if the run promises little."""
    assert run.epsilons is not None
    if (epsilon := float(run.epsilons[-1])) < LARGE_EPSILON:
        return None
    return (
        f"epsilon {epsilon:.3g} promises little: beyond {LARGE_EPSILON:g} the number alone protects hardly anyone. "
        f"Give more noise (--epsilon 8 or less), or state what attacks on the model find"
    )


def _first_step(run: Run) -> str | None:
    """Return a hint if the first step spends most of the budget, with the price of more steps."""
    assert run.epsilons is not None
    first, last, config = run.epsilons[0], run.epsilons[-1], run.config
    # The budget of a run that extends others is what these left, which the price of more steps would have to count.
    if config.epsilon is None or config.before or config.steps < 2 or first < FIRST_STEP_SHARE * last:
        return None
    more, now = MORE_STEPS * config.steps, run.mechanism.noise_multiplier
    try:
        then = accounting.noise_multiplier_for(
            run.mechanism.sampling, config.clip, epsilon=config.epsilon, delta=config.delta, steps=more,
            statistics=run.mechanism.statistics,
        )  # fmt: skip
    except FdpError:  # the statistics of more steps would spend the budget alone
        return None
    if then > CHEAP_GROWTH * math.sqrt(MORE_STEPS) * now:  # each step gains as little as its noise costs
        return None
    noise, instead = round_up(then, 4), round_up(now, 4)
    return (
        f"the first step spends {first:.2g} of epsilon {config.epsilon:g}: {MORE_STEPS:g} times as many steps, --steps "
        f"{more}, need only {then / now:.3g} times the noise (multiplier {noise} instead of {instead})"
    )


def _population(sampling: Poisson) -> str | None:
    """Return a hint if steps draw far more or fewer samples than the batch size; the exact number is not shown."""
    factor = sampling.dataset_size / sampling.population
    if 1 / FAR_POPULATION <= factor <= FAR_POPULATION:
        return None
    batch = sampling.expected_batch_size
    drawn = f"about {float(f'{batch * factor:.1g}'):,g} samples on average instead of {batch:g}"
    much, follows = ("above", "with the noise of that many") if factor < 1 else ("below", "and takes as much longer")
    return (
        f"--population {sampling.population:,} is far {much} the number of samples: a step draws {drawn}, {follows}. "
        f"The guarantee holds all the same. Announce a number near that of your samples, or check that --data and "
        f"--unit are what you mean"
    )


def _rate(sampling: Poisson) -> str | None:
    if sampling.rate < HIGH_RATE:
        return None
    return (
        f"the sampling rate is {sampling.rate:.2g}: most samples are in every step, and sampling protects no one. A "
        f"--batch-size of {max(1, round(sampling.population / 4)):,} or less needs less noise per step and takes "
        f"less time"
    )


def _batch(run: Run) -> str | None:
    """Return a hint if the noise drowns the signal of the whole run."""
    config, z, parameters = run.config, run.mechanism.noise_multiplier, trained_parameters(run.config.model)
    aligned = alignment_of(pretrained=config.values is not drawn_params, steps=config.steps)
    found = signal_to_noise(
        noise_multiplier=z,
        batch_size=config.batch_size,
        parameters=parameters,
        steps=config.steps,
        alignment=aligned,
    ).in_total
    if found >= LOW_SIGNAL:
        return None
    wanted = critical_batch_size(noise_multiplier=z, parameters=parameters, alignment=aligned)
    wanted = min(wanted, run.mechanism.sampling.population / 4)
    if wanted <= 1.5 * config.batch_size:
        return None
    return (
        f"the batch is small for this noise: the predicted signal-to-noise ratio of all {config.steps} steps is "
        f"{found:.2g} (an estimate: docs/choosing_settings.md). --batch-size {_two_digits(wanted)} or more steps "
        f"help; fdp advise computes both"
    )


def _two_digits(value: float) -> int:
    return int(float(f"{value:.1e}"))
