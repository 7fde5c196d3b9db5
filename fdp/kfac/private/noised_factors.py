"""Noised curvature of private data: clip each sample's statistics as one vector, sum, and add Gaussian noise.

    A_b = sum_t x_t x_t^T,  G_b = sum_t g_t g_t^T        of every layer, sample b            |A_b|_F = |X_b X_b^T|_F
    c_b = min(1, C / n_b),  n_b^2 = sum over layers of |A_b|^2 / a^2 + |G_b|^2 / g^2         (a, g public scales)
    M   = a (sum_b c_b A_b / a + z C N) / B,  (M + M^T) / 2, negative eigenvalues to 0       B the expected batch size

The norm of a sum of outer products is that of the tokens' Gram matrix, and the clipped sum is that of rows times
sqrt(c_b), so no sample's n x n matrix is formed if it has fewer than n tokens. Noise is drawn for every element of M;
its two halves are averaged afterwards, which like everything that follows is post-processing. Embeddings and diagonal
sides are vectors, as are norm scales and biases, of which the squared gradients are released. Releases are accounted
for: ``fdp.privacy.mechanism.Statistics`` gives the sampling, the bound and the noise to both this module and the
accountant.

    >>> more = statistics(poisson(50_000, expected_batch_size=512), max_norm=1.0, noise_multiplier=4.0, period=100)
    >>> mechanism = Mechanism(sampling, clip, z, more)                               # epsilon(mechanism, ...) has both
    >>> batch = sample_batch(dataset, more.sampling, key, step=t, microbatch_size=64, purpose=STATISTICS)
    >>> total = clipped_statistics(model, params, batch, estimator=estimator, statistics=more, scales={}, key=key)
    >>> curvatures = release(total, estimator=estimator, statistics=more, scales={}, key=key)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import keys
from fdp.gradients.execution import LOCAL, Execution
from fdp.gradients.lazy_sum import add_sums
from fdp.kfac import factors
from fdp.kfac.factor_forms import Form
from fdp.kfac.measure.accumulate import FactorKey
from fdp.kfac.measure.estimator import Estimator, Sharing, shard_of_samples
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.measure.per_sample_rows import OneHotRows, Rows, factor_keys, per_sample_rows
from fdp.kfac.types import Curvature, DenseFactor, DiagonalFactor, Factor, Layer
from fdp.model import Model
from fdp.parallel.gather_reduce import sum_over_samples
from fdp.parallel.sharding import Sharding
from fdp.privacy.clipping import clip_factors
from fdp.privacy.mechanism import Statistics
from fdp.privacy.microbatches import split_microbatches
from fdp.privacy.noise import add_noise
from fdp.privacy.sampling import check_drawn
from fdp.types import Batch, Bound, ClippedSum, FdpError, Key, Tree

NOISABLE = (Form.DENSE, Form.DIAGONAL, Form.SKIP)
STATISTICS = "statistics"
"""The purpose for which the samples of released statistics are drawn, independently of those of the steps."""


def clipped_statistics(
    model: Model,
    params: Tree,
    batch: Batch,
    *,
    estimator: Estimator,
    statistics: Statistics,
    scales: Mapping[str, float],
    key: Key,
    execution: Execution = LOCAL,
) -> ClippedSum:
    """Return ``sum_b c_b statistics_b / scale`` over all samples of all ranks, by :func:`statistic_name`.

    The layers of ``estimator`` have separate biases (``fdp.kfac.private.separate_biases``). ``scales`` are public
    numbers that make statistics comparable, by name (:func:`statistic_scales` of public data), 1 if missing. ``key`` is
    for sampled labels.

    Guarantees:
      - adding or removing one sample moves the sum by at most ``statistics.max_norm``, over all names together;
      - a sample that is padding, or whose statistics are not finite, contributes exactly 0;
      - a batch that was not drawn by ``statistics.sampling`` for this purpose is refused.
    """
    check_drawn(batch, statistics.sampling, purpose=STATISTICS)
    check_noisable(estimator, execution.sharding)
    total: ClippedSum | None = None
    for i, (data, mask) in enumerate(split_microbatches(batch)):
        labels = keys.fold_in(key, i)
        rows = per_sample_rows(model, params, data, estimator=estimator, key=labels, execution=execution)
        squared = [_squared_norms(k, each, estimator) / _scale(k, scales) ** 2 for k, each in rows.items()]
        clip = clip_factors(torch.stack(squared).sum(0).sqrt(), max_norm=statistics.max_norm)
        clip = torch.where(mask > 0, clip, clip.new_zeros(()))
        value = {statistic_name(k): _weighted_sum(k, r, clip, estimator) / _scale(k, scales) for k, r in rows.items()}
        part = ClippedSum(value, clip.new_full((), statistics.max_norm), Bound(f"statistics {statistics.max_norm}"))
        total = part if total is None else add_sums(total, part)
    assert total is not None
    return total._replace(value={n: sum_over_samples(execution.sharding, leaf) for n, leaf in total.value.items()})


def release(
    total: ClippedSum, *, estimator: Estimator, statistics: Statistics, scales: Mapping[str, float], key: Key
) -> dict[Layer, Curvature]:
    """Add noise and return the curvature of every layer, symmetric and positive semidefinite.

    The weight of a factor is the expected batch size.

    Guarantees:
      - the noise is that of ``statistics``, one draw per element, the same on every mesh;
      - the result depends on the data through the noised sum alone: it contains no count of samples.
    """
    noisy = add_noise(total, key=key, noise_multiplier=statistics.noise_multiplier)
    expected = statistics.sampling.expected_batch_size
    found: dict[FactorKey, Factor] = {}
    for each in factor_keys(estimator):
        value = noisy[statistic_name(each)] * _scale(each, scales)
        weight = value.new_full((), expected)
        found[each] = DiagonalFactor(value.clamp_min(0), weight) if value.ndim == 1 else _nearest_psd(value, weight)
    return {layer: Curvature(_side(layer, True, found), _side(layer, False, found)) for layer in estimator.forms}


def statistic_scales(
    model: Model, params: Tree, public: Tree, *, estimator: Estimator, key: Key, execution: Execution = LOCAL
) -> dict[str, float]:
    """Return the root mean square of every statistic's norm over all ranks' samples of a **public** microbatch.

    The result is the same on every rank, and 1 where the norm is 0.
    """
    check_noisable(estimator, execution.sharding)
    rows = per_sample_rows(model, params, public, estimator=estimator, key=key, execution=execution)
    squared = torch.stack([_squared_norms(each, rows[each], estimator) for each in rows])
    samples = squared.shape[1] * shard_of_samples(execution.sharding)[1]
    sizes = (sum_over_samples(execution.sharding, squared.sum(1)) / samples).sqrt().tolist()
    return {statistic_name(each): size if 0 < size < float("inf") else 1.0 for each, size in zip(rows, sizes)}


def statistic_name(key: FactorKey) -> str:
    """Return the name of a statistic, from which the key of its noise is derived."""
    return f"{key.layer.weight}/{'left' if key.left else 'right'}/{'inputs' if key.inputs else 'gradients'}"


def check_noisable(estimator: Estimator, sharding: Sharding | None) -> None:
    """Raise an FdpError for what cannot be noised: rows of the data, several passes, sharded rows, joint biases."""
    if estimator.sharing is not Sharing.EXPAND:
        raise FdpError(
            f"sharing: expected expand, one row per position of a sample, for private statistics, got "
            f"{estimator.sharing.value}"
        )
    for layer, both in estimator.forms.items():
        if layer.bias is not None:
            raise FdpError(
                f"{layer.weight}: expected layers with separate biases (fdp.kfac.private.separate_biases), got one "
                f"joined with {layer.bias}"
            )
        if not set(both) <= set(NOISABLE):
            raise FdpError(
                f"{layer.weight}: expected the forms dense, diagonal or skip, which are sums that can be noised, got "
                f"({both[0].value}, {both[1].value}), which store rows of the data"
            )
    if estimator.fisher is Fisher.EXACT:
        raise FdpError("fisher: expected sampled or empirical for private statistics, got exact, one pass per class")
    if sharding is not None and sharding.tensor.size > 1:
        raise FdpError(
            "private statistics: expected full rows on every rank, got a mesh whose axis 'tensor' is larger than 1"
        )


def _squared_norms(key: FactorKey, rows: Rows, estimator: Estimator) -> Float[Tensor, " batch"]:
    """Return the squared norm of each sample's matrix or vector."""
    if isinstance(rows, OneHotRows):
        same = rows.ids.unsqueeze(1) == rows.ids.unsqueeze(2)
        return (same * rows.weights.unsqueeze(1) * rows.weights.unsqueeze(2)).sum((1, 2))
    if _form(key, estimator) is Form.DIAGONAL:
        return rows.square().sum(1).square().sum(1)
    gram = rows @ rows.mT if rows.shape[1] <= rows.shape[2] else rows.mT @ rows
    return gram.square().sum((1, 2))


def _weighted_sum(key: FactorKey, rows: Rows, clip: Float[Tensor, " batch"], estimator: Estimator) -> Tensor:
    """Return ``sum_b clip_b statistics_b``, with exactly 0 for a sample whose factor is 0."""
    if isinstance(rows, OneHotRows):
        size = estimator.survey.shapes[key.layer][0 if key.left else 1]
        each = (rows.weights * clip.unsqueeze(1)).flatten()
        return each.new_zeros(size).index_add(0, rows.ids.flatten(), each)
    each = clip.view(-1, 1, 1)
    scaled = torch.where(each > 0, rows * each.sqrt(), 0.0).flatten(0, 1)
    return scaled.square().sum(0) if _form(key, estimator) is Form.DIAGONAL else scaled.mT @ scaled


def _form(key: FactorKey, estimator: Estimator) -> Form:
    return estimator.forms[key.layer][0 if key.left else 1]


def _scale(key: FactorKey, scales: Mapping[str, float]) -> float:
    return scales.get(statistic_name(key), 1.0)


def _nearest_psd(value: Float[Tensor, "n n"], weight: Tensor) -> DenseFactor:
    """Symmetrise, and set the negative eigenvalues, which only noise can cause, to 0."""
    spectrum, vectors = torch.linalg.eigh((value + value.mT) / 2)
    return DenseFactor((vectors * spectrum.clamp_min(0)) @ vectors.mT, weight)


def _side(layer: Layer, left: bool, found: Mapping[FactorKey, Factor]) -> Factor | None:
    """Return a side's factor; a tied leaf has the mean of inputs and gradients on the left, their sum on the right."""
    both = [found[key] for key in (FactorKey(layer, left, False), FactorKey(layer, left, True)) if key in found]
    if len(both) < 2:
        return both[0] if both else None
    total = factors.add(*both)
    return total._replace(weight=both[0].weight * (2 if left else 1))
