"""Curvature of private data, released with noise: every sample's statistics clipped as one vector, then the Gaussian
mechanism, as for a sum of gradients.

    A_b = sum_t x_t x_t^T,  G_b = sum_t g_t g_t^T        of every layer, sample b            |A_b|_F = |X_b X_b^T|_F
    c_b = min(1, C / n_b),  n_b^2 = sum over layers of |A_b|^2 / a^2 + |G_b|^2 / g^2         (a, g public scales)
    M   = a (sum_b c_b A_b / a + z C N) / B,  (M + M^T) / 2, negative eigenvalues to 0       B the expected batch size

The norm of a matrix of outer products is that of the tokens' Gram matrix, and the sum is of rows times sqrt(c_b): no
sample's n x n matrix is formed where it has fewer tokens than that. Noise is drawn for every element of M, and the two
halves are averaged *after* it, which like all that follows is post-processing. Embeddings and diagonal sides are
vectors. What is released is charged for: ``fdp.privacy.mechanism.Statistics`` says who is drawn, the bound and the
noise, to this module and to the accountant. Norm parameters and biases are known by their squared gradients.

    >>> more = statistics(poisson(50_000, expected_batch_size=512), max_norm=1.0, noise_multiplier=4.0, period=100)
    >>> mechanism = Mechanism(sampling, clip, z, more)                               # epsilon(mechanism, ...) has both
    >>> batch = sample_batch(dataset, more.sampling, key, step=t, microbatch_size=64, purpose=STATISTICS)
    >>> curvatures = release(clipped_statistics(model, params, batch, ...), more, known, forms, ...)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import keys, tree
from fdp.gradients.execution import STORE_ALL, Memory
from fdp.gradients.lazy_sum import add_sums
from fdp.kfac import factors
from fdp.kfac.forms import Form
from fdp.kfac.layers import Survey
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.measure.sample_rows import Counts, Rows, rows_of, slots
from fdp.kfac.measure.sums import Forms, Sharing, Slot
from fdp.kfac.types import Curvature, DenseFactor, DiagonalFactor, Factor, Layer
from fdp.model import Model
from fdp.parallel.gather_reduce import sum_over_samples
from fdp.parallel.sharding import Sharding
from fdp.privacy.clipping import clip_factors
from fdp.privacy.mechanism import Statistics
from fdp.privacy.noise import add_noise
from fdp.privacy.sampling import check_drawn
from fdp.types import Batch, Bound, ClippedSum, FdpError, Key, Tree

NOISABLE = (Form.DENSE, Form.DIAGONAL, Form.SKIP)
STATISTICS = "statistics"
"""The purpose of the samples that statistics are released of: a draw of their own."""


def clipped_statistics(
    model: Model,
    params: Tree,
    batch: Batch,
    *,
    statistics: Statistics,
    known: Survey,
    forms: Forms,
    fisher: Fisher,
    scales: Mapping[str, float],
    key: Key,
    sharding: Sharding | None = None,
    memory: Memory = STORE_ALL,
    sharing: Sharing = Sharing.EXPAND,
) -> ClippedSum:
    """``sum_b c_b statistics_b / scale`` over all samples of all ranks, by :func:`name`; ``key`` is for labels.

    ``known`` and ``forms`` are of layers without joint biases (``separate_biases``); ``scales`` are
    public numbers that make statistics comparable, by name (:func:`scales_of` public data), 1 where there is none.

    Guarantees:
      - adding or removing one sample moves the sum by at most ``statistics.max_norm``, over all names together;
      - a sample that is padding, or whose statistics are not finite, contributes exactly 0;
      - the batch was drawn by ``statistics.sampling`` for this purpose, or it is refused.
    """
    check_drawn(batch, statistics.sampling, purpose=STATISTICS)
    check_noisable(forms, fisher, sharding, sharing)
    total: ClippedSum | None = None
    for i, mask in enumerate(batch.mask):
        data = tree.map(lambda leaf, i=i: leaf[i], batch.data)
        rows = rows_of(model, params, data, known, forms, fisher, keys.fold_in(key, i), sharding, memory)
        squared = torch.stack([_squared(slot, rows[slot], forms) / _scale(slot, scales) ** 2 for slot in rows])
        clip = clip_factors(squared.sum(0).sqrt(), max_norm=statistics.max_norm)
        clip = torch.where(mask > 0, clip, clip.new_zeros(()))
        value = {name(s): _weighted(s, r, clip, known, forms) / _scale(s, scales) for s, r in rows.items()}
        part = ClippedSum(value, clip.new_full((), statistics.max_norm), Bound(f"statistics {statistics.max_norm}"))
        total = part if total is None else add_sums(total, part)
    assert total is not None
    return total._replace(value={n: sum_over_samples(sharding, leaf) for n, leaf in total.value.items()})


def release(
    total: ClippedSum,
    *,
    statistics: Statistics,
    known: Survey,
    forms: Forms,
    scales: Mapping[str, float],
    key: Key,
) -> dict[Layer, Curvature]:
    """The noised curvature of every layer, symmetric and positive semidefinite, counted by the expected batch size.

    Guarantees:
      - the noise is that of ``statistics``, one draw per element, the same on every mesh;
      - the result depends on the data through the noised sum alone: no count of samples is in it.
    """
    noisy = add_noise(total, key=key, noise_multiplier=statistics.noise_multiplier)
    expected = statistics.sampling.expected_batch_size
    found: dict[Slot, Factor] = {}
    for slot in slots(known, forms):
        value = noisy[name(slot)] * _scale(slot, scales)
        weight = value.new_full((), expected)
        found[slot] = DiagonalFactor(value.clamp_min(0), weight) if value.ndim == 1 else _positive(value, weight)
    return {layer: Curvature(_side(layer, True, found), _side(layer, False, found)) for layer in forms}


def scales_of(
    model: Model,
    params: Tree,
    public: Tree,
    *,
    known: Survey,
    forms: Forms,
    fisher: Fisher,
    key: Key,
    sharding: Sharding | None = None,
    memory: Memory = STORE_ALL,
    sharing: Sharing = Sharing.EXPAND,
) -> dict[str, float]:
    """The root mean square, over all ranks' samples of a **public** microbatch, of every statistic's norm; 1 where that
    is 0. The same on every rank."""
    check_noisable(forms, fisher, sharding, sharing)
    rows = rows_of(model, params, public, known, forms, fisher, key, sharding, memory)
    squared = torch.stack([_squared(slot, each, forms) for slot, each in rows.items()])
    samples = squared.shape[1] * (1 if sharding is None else sharding.ranks)
    sizes = (sum_over_samples(sharding, squared.sum(1)) / samples).sqrt().tolist()
    return {name(slot): size if 0 < size < float("inf") else 1.0 for slot, size in zip(rows, sizes)}


def name(slot: Slot) -> str:
    """What a statistic is called: the key of its noise."""
    return f"{slot.layer.weight}/{'left' if slot.left else 'right'}/{'inputs' if slot.inputs else 'gradients'}"


def check_noisable(forms: Forms, fisher: Fisher, sharding: Sharding | None, sharing: Sharing = Sharing.EXPAND) -> None:
    """Refuse what cannot be released with noise: rows of the data themselves, many passes, cut rows, joint biases."""
    if sharing is not Sharing.EXPAND:
        raise FdpError(
            f"sharing: expected expand, a row for every place of a sample, for private statistics, got {sharing.value}"
        )
    for layer, both in forms.items():
        if layer.bias is not None:
            raise FdpError(f"{layer.weight}: expected layers of separate_biases(known), got one with a bias")
        if not set(both) <= set(NOISABLE):
            raise FdpError(
                f"{layer.weight}: expected the forms dense, diagonal or skip, sums to which noise can be added, got "
                f"({both[0].value}, {both[1].value}), which keep rows of the data"
            )
    if fisher is Fisher.EXACT:
        raise FdpError("fisher: expected sampled or empirical for private statistics, got exact, one pass per class")
    if sharding is not None and sharding.tensor.size > 1:
        raise FdpError(
            "private statistics: expected whole rows on every rank, got a mesh with an axis 'tensor' above 1"
        )


def _squared(slot: Slot, rows: Rows, forms: Forms) -> Float[Tensor, " batch"]:
    """The squared norm of each sample's matrix or vector."""
    if isinstance(rows, Counts):
        same = rows.ids.unsqueeze(1) == rows.ids.unsqueeze(2)
        return (same * rows.each.unsqueeze(1) * rows.each.unsqueeze(2)).sum((1, 2))
    if _form(slot, forms) is Form.DIAGONAL:
        return rows.square().sum(1).square().sum(1)
    gram = rows @ rows.mT if rows.shape[1] <= rows.shape[2] else rows.mT @ rows
    return gram.square().sum((1, 2))


def _weighted(slot: Slot, rows: Rows, clip: Float[Tensor, " batch"], known: Survey, forms: Forms) -> Tensor:
    """``sum_b clip_b statistics_b``; nothing at all of a sample whose factor is 0."""
    if isinstance(rows, Counts):
        size = known.shapes[slot.layer][0 if slot.left else 1]
        each = (rows.each * clip.unsqueeze(1)).flatten()
        return each.new_zeros(size).index_add(0, rows.ids.flatten(), each)
    each = clip.view(-1, 1, 1)
    scaled = torch.where(each > 0, rows * each.sqrt(), 0.0).flatten(0, 1)
    return scaled.square().sum(0) if _form(slot, forms) is Form.DIAGONAL else scaled.mT @ scaled


def _form(slot: Slot, forms: Forms) -> Form:
    return forms[slot.layer][0 if slot.left else 1]


def _scale(slot: Slot, scales: Mapping[str, float]) -> float:
    return scales.get(name(slot), 1.0)


def _positive(value: Float[Tensor, "n n"], weight: Tensor) -> DenseFactor:
    """The symmetric part, and of that the nearest matrix without negative eigenvalues, which only noise can make."""
    spectrum, vectors = torch.linalg.eigh((value + value.mT) / 2)
    return DenseFactor((vectors * spectrum.clamp_min(0)) @ vectors.mT, weight)


def _side(layer: Layer, left: bool, found: Mapping[Slot, Factor]) -> Factor | None:
    """Of inputs and gradients of a tied leaf: their mean on the left, their sum on the right, as in ``collect``."""
    both = [found[slot] for slot in (Slot(layer, left, False), Slot(layer, left, True)) if slot in found]
    if len(both) < 2:
        return both[0] if both else None
    total = factors.add(*both)
    return total._replace(weight=both[0].weight * (2 if left else 1))
