"""Where a run's curvature comes from, and what that costs.

None         the data itself, without noise: the step's first microbatch          not private, method none only
Synthetic    noise in the shapes of the data                                      free
Open         a dataset that no one needs to protect                               free
Noised       statistics of the private data, clipped and noised, a draw of their own    out of the run's budget

>>> optimizer = KfacOptimizer(0.1, KfacConfig(), Noised(max_norm=1.0, noise_multiplier=4.0))
>>> more = releases(optimizer, sampling, steps=100, epsilon=8.0, delta=1e-6, noise_multiplier=None)
>>> feed = make_feed(make_kfac(model, microbatch, optimizer), optimizer, params, private=dataset, ...)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from fdp import keys, tree
from fdp.kfac.config import KfacConfig
from fdp.kfac.optimizer import Kfac, kfac
from fdp.kfac.private.noised_factors import STATISTICS, scales_of
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

LARGEST = 4096
"""Sides of more features are diagonal in a private run: the eigenvalues of as many take about a second."""

SHARE = 1 / 3
"""Of epsilon, what the statistics alone may spend unless told otherwise. Losses add up more like squares than like
numbers: 1000 steps of 512 out of 50,000 within epsilon 3, and 100 releases, take 0.9 % more noise than without them."""


class Synthetic(NamedTuple):
    """Zipf tokens or pink noise images."""


class Open(NamedTuple):
    """A public dataset."""

    dataset: Dataset


class Noised(NamedTuple):
    """Statistics of the private data: ``max_norm`` bounds a sample's, 1 being a synthetic sample's norm at the start.

    ``noise_multiplier`` None: with a target epsilon, the least that keeps the statistics alone within ``SHARE`` of it;
    else that of the steps.
    """

    max_norm: float
    noise_multiplier: float | None


Source: TypeAlias = Synthetic | Open | Noised


class KfacOptimizer(NamedTuple):
    """K-FAC before model, data and ranks are known, on which it depends. ``source`` None: the data, not privately."""

    learning_rate: float | Schedule
    config: KfacConfig
    source: Source | None = None


class Scales(NamedTuple):
    """Public numbers that make noised statistics comparable, by name."""

    by_name: Mapping[str, float]


Feed: TypeAlias = Public | Scales
"""A source that was compared with the data and the model."""


def kind_of(feed: Feed) -> str:
    """``synthetic``, ``public`` or ``noised private``, in words."""
    if not isinstance(feed, Public):
        return "noised private"
    return "synthetic" if isinstance(feed.dataset, ZipfTokens | NoiseImages) else "public"


def check_source(optimizer: KfacOptimizer, *, private: bool) -> None:
    """Refuse private training on curvature that would reveal the data, and a source where the data itself is used."""
    if private and optimizer.source is None:
        raise FdpError(
            "kfac: its factors would be measured on the private data without noise, and reveal it. Expected a source: "
            "--kfac-data synthetic (noise in the shapes of the data), a PATH to public data, or noised (clipped, "
            "noised, and out of the same budget); or method none, or another optimizer"
        )
    if not private and optimizer.source is not None:
        raise FdpError(
            "kfac: without privacy (method none) the curvature is measured on the data itself; expected no --kfac-data"
        )


def releases(
    optimizer: object,
    sampling: Poisson,
    *,
    steps: int,
    epsilon: float | None,
    delta: float,
    noise_multiplier: float | None,
) -> Statistics | None:
    """What is released beside the steps' sums, for the mechanism: None unless the source is :class:`Noised`.

    As many samples are expected as in a step. Guarantees:
      - every measurement of the run is a release: the period is that of the factors.
    """
    if not isinstance(optimizer, KfacOptimizer) or not isinstance(optimizer.source, Noised):
        return None
    period = optimizer.config.factor_period
    if optimizer.config.inverse_period != period:
        raise FdpError(
            f"inverse_period: expected the factor_period {period} with noised statistics, which are inverted as they "
            f"are released, got {optimizer.config.inverse_period}"
        )
    max_norm, noise = optimizer.source
    budget = {"steps": steps, "epsilon": epsilon, "delta": delta, "noise_multiplier": noise_multiplier}
    return releases_of(sampling, max_norm=max_norm, noise=noise, period=period, **budget)


def releases_of(
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
    """The same from numbers: ``noise`` None is chosen as :class:`Noised` says."""
    if noise is None and epsilon is not None:
        if period < 1:
            raise FdpError(f"period: expected at least 1 step, got {period}; 10 is a common choice")
        noise = accounting.noise_multiplier_for(
            sampling, flat(max_norm=max_norm), epsilon=SHARE * epsilon, delta=delta, steps=-(-steps // period)
        )
    noise = noise_multiplier or 0.0 if noise is None else noise
    return statistics(sampling, max_norm=max_norm, noise_multiplier=noise, period=period)


def make_kfac(model: Model, microbatch: Tree, optimizer: KfacOptimizer, **options: Any) -> Kfac:
    """The optimizer, private or not as its source is; ``options`` are those of :func:`fdp.kfac.optimizer.kfac`."""
    rate, config, source = optimizer
    if source is None:
        return kfac(model, microbatch, learning_rate=rate, config=config, **options)
    return private_kfac(model, microbatch, learning_rate=rate, config=config, largest=LARGEST, **options)


def make_feed(
    k: Kfac, optimizer: KfacOptimizer, params: Tree, *, private: Dataset, digest: Callable[[Dataset], str], key: Key
) -> Feed | None:
    """The source, checked; ``params`` are this rank's parts at the start of the run, ``key`` is for synthetic data.

    Guarantees:
      - nothing of ``private`` but shapes, and its digest, to tell it from public data;
      - a function of the key and the first parameters, the same on every rank.
    """
    source, plan = optimizer.source, k.plan
    if source is None:
        return None
    if isinstance(source, Open):
        feed = public(source.dataset, private=private, digest=digest)
        if plan.sharding is not None:
            check_agreement({"content of the public data": feed.digest})
        return feed
    outputs = plan.model.vocab_size or (plan.known.scores or (0,))[-1]
    made = synthetic(private, outputs=outputs, key=keys.fold_in(key, "data").cpu())
    feed = public(made, private=private, digest=digest)
    if isinstance(source, Synthetic):
        return feed
    rank, ranks = (0, 1) if plan.sharding is None else (plan.sharding.rank, plan.sharding.ranks)
    samples = plan.known.plan.batch_size
    data, _ = draw(feed, samples=samples, key=keys.fold_in(key, "draw"), rank=rank, ranks=ranks)
    scales = scales_of(
        plan.model,
        params,
        tree.map(lambda leaf: leaf.to(key.device), data),
        known=plan.known,
        forms={layer: (left.form, right.form) for layer, (left, right, _) in plan.layers.items()},
        fisher=plan.config.fisher,
        key=keys.fold_in(key, "labels"),
        sharding=plan.sharding,
        memory=k.memory,
        sharing=plan.config.sharing,
    )
    # All statistics of a typical sample are one vector of norm 1.
    return Scales({name: size * math.sqrt(len(scales)) for name, size in scales.items()})


def refreshed_from(
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
    """The state before step ``step`` with newer curvature, where it is due.

    ``batch(sampling, purpose)`` draws private samples of this step, for noised statistics only. ``key`` is the root.
    """
    if isinstance(feed, Public):
        return refresh_public(k, state, feed, key, step, donate=donate)
    more = mechanism.statistics
    assert more is not None

    def own() -> Batch:
        return batch(more.sampling, STATISTICS)

    return refresh_noised(k, state, own, key, step, mechanism=mechanism, scales=feed.by_name, donate=donate)
