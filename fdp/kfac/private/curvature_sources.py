"""The sources of a run's curvature, and their privacy cost.

None         the training data without noise: the step's first microbatch         not private; only with method none
Synthetic    noise with the shapes of the data                                    no cost
Open         a public dataset                                                     no cost
Noised       clipped and noised statistics of separately drawn private samples    part of the run's budget

>>> optimizer = KfacOptimizer(0.1, KfacConfig(), Noised(max_norm=1.0, noise_multiplier=4.0))
>>> more = make_statistics(optimizer, sampling, steps=100, epsilon=8.0, delta=1e-6, noise_multiplier=None)
>>> feed = make_feed(make_kfac(model, microbatch, optimizer), optimizer, params, private=dataset, ...)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from fdp import keys, tree
from fdp.kfac.config import KfacConfig
from fdp.kfac.measure.estimator import shard_of_samples
from fdp.kfac.optimizer import Kfac, kfac
from fdp.kfac.private.noised_factors import STATISTICS, statistic_scales
from fdp.kfac.private.public_data import NoiseImages, Public, ZipfTokens, draw, public, synthetic
from fdp.kfac.private.refresh import private_kfac, refresh_noised, refresh_public
from fdp.model import Model
from fdp.optimizers import Schedule
from fdp.parallel.agree import check_agreement
from fdp.privacy import accounting
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism, Statistics, statistics
from fdp.privacy.microbatches import Dataset
from fdp.privacy.sampling import Poisson
from fdp.types import Batch, FdpError, Key, TrainState, Tree

LARGEST_DENSE_SIDE = 4096
"""In a private run, sides with more features are diagonal, because an eigendecomposition would take over a second."""

EPSILON_SHARE = 1 / 3
"""The default share of epsilon that the statistics alone may spend. Privacy losses add up more like squares than like
numbers, so the noise of the steps grows by much less than this share."""


class Synthetic(NamedTuple):
    """Zipf tokens or pink noise images."""


class Open(NamedTuple):
    """A public dataset."""

    dataset: Dataset


class Noised(NamedTuple):
    """Noised statistics of the private data; ``max_norm`` is in units of a synthetic sample's norm at the start.

    If ``noise_multiplier`` is None, it is the least that keeps the statistics alone within ``EPSILON_SHARE`` of the
    target epsilon, or that of the steps if there is no target.
    """

    max_norm: float
    noise_multiplier: float | None


Source: TypeAlias = Synthetic | Open | Noised


class KfacOptimizer(NamedTuple):
    """K-FAC before model, data and ranks are known. ``source`` None: the training data itself, without privacy."""

    learning_rate: float | Schedule
    config: KfacConfig
    source: Source | None = None


class Scales(NamedTuple):
    """Public numbers, by name, that make noised statistics comparable."""

    by_name: Mapping[str, float]


Feed: TypeAlias = Public | Scales
"""A source that has been checked against the data and the model."""


def describe_feed(feed: Feed) -> str:
    """Return ``synthetic``, ``public`` or ``noised private``."""
    if not isinstance(feed, Public):
        return "noised private"
    return "synthetic" if isinstance(feed.dataset, ZipfTokens | NoiseImages) else "public"


def check_source(optimizer: KfacOptimizer, *, private: bool) -> None:
    """Raise an FdpError for private training without a source, and for a source without privacy."""
    if private and optimizer.source is None:
        raise FdpError(
            "kfac: expected a source of curvature in a private run, got none: factors measured on the private data "
            "without noise would reveal it. Use --kfac-data synthetic (noise with the shapes of the data), a PATH to "
            "public data, or noised (clipped and noised statistics, part of the same budget); or method none; or "
            "another optimizer"
        )
    if not private and optimizer.source is not None:
        raise FdpError(
            "kfac: expected no --kfac-data without privacy (method none), where curvature is measured on the training "
            "data itself"
        )


def make_statistics(
    optimizer: object,
    sampling: Poisson,
    *,
    steps: int,
    epsilon: float | None,
    delta: float,
    noise_multiplier: float | None,
) -> Statistics | None:
    """Return the statistics that the run releases, for the mechanism; None unless the source is :class:`Noised`.

    The expected number of samples is that of a step.

    Guarantees:
      - every measurement of the run is a release, because the period is that of the factors.
    """
    if not isinstance(optimizer, KfacOptimizer) or not isinstance(optimizer.source, Noised):
        return None
    period = optimizer.config.factor_period
    if optimizer.config.inverse_period != period:
        raise FdpError(
            f"inverse_period: expected the factor_period {period} with noised statistics, which are inverted when they "
            f"are released, got {optimizer.config.inverse_period}"
        )
    max_norm, noise = optimizer.source
    budget = {"steps": steps, "epsilon": epsilon, "delta": delta, "noise_multiplier": noise_multiplier}
    return choose_statistics(sampling, max_norm=max_norm, noise=noise, period=period, **budget)


def choose_statistics(
    sampling: Poisson,
    *,
    max_norm: float,
    noise: float | None,
    period: int,
    steps: int,
    epsilon: float | None,
    delta: float,
    noise_multiplier: float | None,
) -> Statistics:
    """Return the statistics with the given noise multiplier, or (None) the one described at :class:`Noised`."""
    if noise is None and epsilon is not None:
        if period < 1:
            raise FdpError(f"period: expected at least 1 step, got {period}; 10 is a common choice")
        noise = accounting.noise_multiplier_for(
            sampling, flat(max_norm=max_norm), epsilon=EPSILON_SHARE * epsilon, delta=delta, steps=-(-steps // period)
        )
    noise = noise_multiplier or 0.0 if noise is None else noise
    return statistics(sampling, max_norm=max_norm, noise_multiplier=noise, period=period)


def make_kfac(model: Model, microbatch: Tree, optimizer: KfacOptimizer, **options: Any) -> Kfac:
    """Return K-FAC, for private training if there is a source; ``options`` are those of ``fdp.kfac.optimizer.kfac``."""
    rate, config, source = optimizer
    if source is None:
        return kfac(model, microbatch, learning_rate=rate, config=config, **options)
    return private_kfac(model, microbatch, learning_rate=rate, config=config, largest=LARGEST_DENSE_SIDE, **options)


def make_feed(
    k: Kfac, optimizer: KfacOptimizer, params: Tree, *, private: Dataset, digest: Callable[[Dataset], str], key: Key
) -> Feed | None:
    """Check the source; ``params`` are this rank's shards at the start of the run, ``key`` is for synthetic data.

    Guarantees:
      - reads nothing of ``private`` except its shapes, and its digest to tell it from public data;
      - a function of the key and the initial parameters, the same on every rank.
    """
    source, plan = optimizer.source, k.plan
    if source is None:
        return None
    if isinstance(source, Open):
        feed = public(source.dataset, private=private, digest=digest)
        if plan.sharding is not None:
            check_agreement({"content of the public data": feed.digest})
        return feed
    outputs = plan.model.vocab_size or (plan.survey.scores_shape or (0,))[-1]
    dataset = synthetic(private, outputs=outputs, key=keys.fold_in(key, "data").cpu())
    feed = public(dataset, private=private, digest=digest)
    if isinstance(source, Synthetic):
        return feed
    rank, ranks = shard_of_samples(plan.sharding)
    samples = plan.survey.plan.batch_size
    data, _ = draw(feed, samples=samples, key=keys.fold_in(key, "draw"), rank=rank, ranks=ranks)
    scales = statistic_scales(
        plan.model,
        params,
        tree.map(lambda leaf: leaf.to(key.device), data),
        estimator=plan.slot_estimator,
        key=keys.fold_in(key, "labels"),
        execution=plan.execution,
    )
    # The statistics of a typical sample then form one vector of norm 1.
    return Scales({name: size * math.sqrt(len(scales)) for name, size in scales.items()})


def refresh_from_feed(
    feed: Feed,
    k: Kfac,
    state: TrainState,
    batch: Callable[[Poisson, str], Batch],
    key: Key,
    step: int,
    *,
    mechanism: Mechanism,
    donate: bool,
) -> TrainState:
    """Return the state before step ``step`` with new curvature, if it is due.

    ``batch(sampling, purpose)`` draws private samples for noised statistics. ``key`` is the root key of the run.
    """
    if isinstance(feed, Public):
        return refresh_public(k, state, feed, key, step, donate=donate)
    more = mechanism.statistics
    assert more is not None

    def own() -> Batch:
        return batch(more.sampling, STATISTICS)

    return refresh_noised(k, state, own, key, step, mechanism=mechanism, scales=feed.by_name, donate=donate)
