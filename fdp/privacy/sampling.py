"""Poisson sampling of the global batch, and the stamp that proves who drew a batch, and for which step.

    i is in this step's batch  iff  u_i < q,   u_i = uniform(key, i),   q = expected_batch_size / population

The draw is a function of the key alone: the same on every rank and host, and again after a restart. With
``max_batch_size`` it is truncated Poisson (arXiv 2508.15089): if more are drawn, those with the smallest
``u_i`` stay, which is a uniformly random subset.

Neighbours differ by one sample, added or removed, and q is public: it must be the same for both. So q does not depend
on the number of samples, which differs, but on an announced number, the population.

    >>> sampling = poisson(48_211, expected_batch_size=256, population=50_000)
    >>> batch = sample_batch(dataset, sampling, root, step=t, microbatch_size=64)      # root: one key per run
    >>> state, metrics = train_step(state, batch, root)                  # checks the stamp of the batch
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp import keys, tree
from fdp.arguments import plain_number, positive_number, whole_number
from fdp.privacy.microbatches import (
    Dataset,
    check_sizes,
    dataset_length,
    fetch_rows,
    group_rows,
    pad_to_rows,
)
from fdp.types import Batch, BatchShare, Drawn, FdpError, Key, RowGroups, Stamp, Tree

TRAINING = "training"
"""The purpose of the samples that a step trains on."""


class Poisson(NamedTuple):
    """The law of the draw. :func:`poisson` builds and checks it.

    ``dataset_size``, the number of samples to draw from, is **private**. The rest is public, and every figure of the
    accountant is a function of the rest. ``population`` stands for the number of samples in ``rate``. If
    ``max_batch_size`` is None, the draw is never truncated.
    """

    dataset_size: int
    expected_batch_size: float
    population: int
    max_batch_size: int | None = None

    @property
    def rate(self) -> float:
        """The probability q that one sample is drawn in one step."""
        return self.expected_batch_size / self.population


def poisson(
    dataset_size: int,
    *,
    expected_batch_size: float,
    population: int | None = None,
    max_batch_size: int | None = None,
) -> Poisson:
    """Return a checked :class:`Poisson`: ``0 < expected_batch_size <= population`` and ``max_batch_size >= 1``.

    ``population`` is the public number that the rate is computed from, close to the number of samples. The default is
    :func:`rounded_population`, which is as good as public unless one more sample crosses a border of the rounding.
    """
    population = rounded_population(dataset_size) if population is None else population
    sampling = Poisson(dataset_size, expected_batch_size, population, max_batch_size)
    check(sampling)
    numbers = {name: value for name, value in sampling._asdict().items() if value is not None}
    return sampling._replace(**{name: plain_number(value) for name, value in numbers.items()})


def rounded_population(dataset_size: int) -> int:
    """Round up to two significant digits, and to a multiple of ten: 48,211 to 49,000, 64 to 70, 3 to 10.

    It depends on the number of samples: adding or removing one changes it at a border of the rounding. To rule that
    out, announce a number.

    Guarantees:
      - at least ``dataset_size``, and larger by at most a tenth, or by 9;
      - at least ten neighbouring sizes have the same value.
    """
    dataset_size = _check_size("dataset_size", dataset_size)
    grain = 10 ** max(1, len(str(dataset_size)) - 2)
    return -(-dataset_size // grain) * grain


def check(sampling: Poisson) -> None:
    """Raise :class:`FdpError` unless ``sampling`` is a valid law."""
    size, expected, population, most = sampling
    _check_size("dataset_size", size)
    _check_size("population", population)
    positive_number("expected_batch_size", expected)
    if expected > population:
        raise FdpError(
            f"expected_batch_size: expected at most the population {population}, got {expected}: a batch larger than "
            f"the data, at a sampling rate above 1. Lower it, or check that the population counts samples, not batches"
        )
    if most is None:
        return
    whole_number("max_batch_size", most, advice="; None does not truncate")
    if size > population:
        raise FdpError(
            f"population: with max_batch_size expected at least as many as there are samples, got {population}: draws "
            f"would be truncated more often than is accounted for. Announce a larger population"
        )


def sample(sampling: Poisson, key: Key) -> Int[Tensor, " drawn"]:
    """Draw the indices of one step's samples, ascending.

    Guarantees:
      - index i is drawn independently of the others with probability ``floor(q 2^64) / 2^64``, never above q;
      - the probability depends on public numbers only: adding or removing a sample leaves all other draws as they are;
      - the result is a function of ``(sampling, key)``;
      - with ``max_batch_size`` m, at most m are kept, and every m-subset of the draw is equally likely.
    """
    check(sampling)
    bits = keys.bits(key, (sampling.dataset_size,))
    # 64 random bits as a signed number are uniform on [-2^63, 2^63): compare with the q-quantile, exactly.
    last = math.floor(Fraction(sampling.rate) * 2**64) - 2**63 - 1
    if last < -(2**63):
        return torch.empty(0, dtype=torch.int64, device=bits.device)
    drawn = torch.nonzero(bits <= last).flatten()
    if sampling.max_batch_size is None or len(drawn) <= sampling.max_batch_size:
        return drawn
    # Given that they are drawn, the u_i are independent and uniform below q, so they serve as random priorities.
    kept = torch.argsort(bits[drawn], stable=True)[: sampling.max_batch_size]
    return drawn[kept].sort().values


def sample_batch(
    dataset: Dataset | Tree,
    sampling: Poisson,
    key: Key,
    *,
    step: int,
    microbatch_size: int | Sequence[int],
    rank: int = 0,
    ranks: int = 1,
    purpose: str = TRAINING,
) -> Batch:
    """Draw the global batch of one step and return this rank's share of it, stamped. ``key`` is the root of the run.

    ``microbatch_size`` counts the samples of all ranks. Several sizes, such as ``(64, 32, 16, 8)``, cut a draw into
    microbatches with little padding; the plan of the step must have them all (``add_smaller_sizes``), and a sample must
    add the same to the sum in all of them (``fdp.checks.equal_sizes``). Every rank draws the same batch and fetches its
    own columns of every row, as many as the others, so that all take part in every collective. A release besides the
    steps', such as noised statistics, has a ``purpose`` of its own.

    Guarantees:
      - no two steps, samplings or purposes of a root share a draw;
      - the same (sampling, key, step, purpose) draw the same samples, on every rank and again after a restart;
      - every drawn sample is in exactly one microbatch of one rank, whatever the sizes.
    """
    if whole_number("rank", rank, least=0) >= whole_number("ranks", ranks):
        raise FdpError(f"rank: expected 0 <= rank < ranks, got rank {rank} of {ranks}")
    step = whole_number("step", step, least=0, advice="; it is the number of the step, state.step")
    if dataset_length(dataset) != sampling.dataset_size:
        raise FdpError(
            f"sampling.dataset_size: expected the {dataset_length(dataset)} samples of the dataset, got "
            f"{sampling.dataset_size}; some could never be drawn, or drawn ones would not exist"
        )
    drawn = sample(sampling, keys.step_key(key, f"sample {purpose} {tuple(sampling)}", step))
    sizes = check_sizes(microbatch_size)
    groups, size = group_rows(len(drawn), sizes), sizes[-1]
    matrix, mask = pad_to_rows(drawn, rows=sum(groups.sizes), size=size)
    columns = -(-size // ranks)
    matrix, mask = (torch.nn.functional.pad(m, (0, columns * ranks - size)) for m in (matrix, mask))
    mine = slice(rank * columns, (rank + 1) * columns)
    batch = Batch(fetch_rows(dataset, matrix[:, mine]), mask[:, mine], groups=groups if len(sizes) > 1 else None)
    return _stamp(batch, sampling, step, rank, ranks, purpose, keys.digest(key))


def trusted_batch(
    data: Tree,
    mask: Float[Tensor, "rows samples"],
    sampling: Poisson,
    *,
    step: int | None,
    rank: int = 0,
    ranks: int = 1,
    purpose: str = TRAINING,
    groups: RowGroups | None = None,
) -> Batch:
    """Stamp a batch that you drew yourself, unchecked: for tests, benchmarks, and samplers of your own.

    Every row is a microbatch, unless ``groups`` joins several.

    Nothing checks that every sample was drawn by ``sampling``, independently of the others and anew for this step, nor
    that it is in one microbatch of one rank only. The stated epsilon holds only if all of that is true. If ``step`` is
    None, the batch is accepted at any step, any number of times.
    """
    if tuple(mask.shape) != tuple(tree.leaves(data)[0].shape[:2]):
        raise FdpError(
            f"mask: expected (rows, samples) as in the data, {tuple(tree.leaves(data)[0].shape[:2])}, got "
            f"{tuple(mask.shape)}"
        )
    return _stamp(Batch(data, mask, groups=groups), sampling, step, rank, ranks, purpose)


def check_drawn(batch: Batch, sampling: Poisson, *, purpose: str = TRAINING) -> None:
    """Refuse a batch that was not drawn by ``sampling`` for ``purpose``, or that was assembled from others."""
    if batch.drawn is None:
        raise FdpError(
            "batch: expected one that fdp.sample_batch drew, got one made by hand: nothing proves that its samples "
            "were drawn by the mechanism's sampling, each once, and epsilon would not hold. Draw it by "
            "fdp.sample_batch(dataset, mechanism.sampling, key, step=..., microbatch_size=...); "
            "fdp.privacy.sampling.trusted_batch accepts one of your own, unchecked"
        )
    stamp = batch.drawn.stamp
    if stamp.sampling != sampling:
        raise FdpError(
            f"batch: expected a draw by the mechanism's sampling ({_describe(sampling)}), got one by another "
            f"({_describe(stamp.sampling)}): the accountant would charge for another draw than this one; give "
            f"sample_batch the sampling of the mechanism"
        )
    if stamp.purpose != purpose:
        raise FdpError(
            f"batch: expected a draw for {purpose}, got the one for {stamp.purpose}: every release is accounted as a "
            f"draw of its own; call sample_batch(..., purpose={purpose!r})"
        )
    if stamp.shape != tuple(batch.mask.shape):
        raise FdpError(
            f"batch: expected the {stamp.shape} (rows, samples) that were drawn, got "
            f"{tuple(batch.mask.shape)}: it was changed after the draw, and a sample could be in it twice"
        )


def check_step(batch: Batch, step: int) -> None:
    """Refuse a batch that was drawn for another step."""
    drawn = None if batch.drawn is None else batch.drawn.stamp.step
    if drawn is not None and drawn != step:
        raise FdpError(
            f"batch: expected the draw of step {step}, the step of the state, got that of step {drawn}: a batch that "
            f"is used twice, or chosen, is not the fresh draw that the accountant charges for; call sample_batch(..., "
            f"step={step})"
        )


def _stamp(
    batch: Batch, sampling: Poisson, step: int | None, rank: int, ranks: int, purpose: str, root: str = ""
) -> Batch:
    stamp = Stamp(sampling, purpose, step, tuple(batch.mask.shape), BatchShare(rank, ranks), root)
    number = None if step is None else torch.tensor(step, device=batch.mask.device)
    return batch._replace(drawn=Drawn(stamp, number))


def _describe(sampling: Poisson) -> str:
    """Describe the public part in words."""
    _, expected, population, most = sampling
    return f"{expected:g} of {population} expected" + ("" if most is None else f", at most {most}")


def _check_size(name: str, value: Any) -> int:
    return whole_number(name, value, of=" of samples")
