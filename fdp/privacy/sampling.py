"""Poisson sampling of the global batch, cut into microbatches of fixed shape.

    i is in this step's batch  iff  u_i < q,   u_i = uniform(key, i),   q = expected_batch_size / population

The draw is a function of the key alone: the same on every rank and host, and again after a restart. With
``max_batch_size`` it is truncated Poisson (arXiv 2508.15089): when more are drawn, those with the smallest
``u_i`` stay, which is a uniformly random subset.

Neighbours differ by one sample, added or removed, and q is public: it must be the same for both. So q is not a function
of the number of samples, which changes, but of an announced number, the population.

    >>> sampling = poisson(48_211, expected_batch_size=256, population=50_000)
    >>> batch = sample_batch(dataset, sampling, root, step=t, microbatch_size=64)      # root: one key per run
    >>> state, metrics = train_step(state, batch, root)                  # compares who drew the batch, and when
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from fdp import keys, tree
from fdp.types import Batch, BatchShare, Drawn, FdpError, Key, Stamp, Tree

TRAINING = "training"
"""The purpose of the samples that a step trains on."""


class Poisson(NamedTuple):
    """Who is in a step's batch. :func:`poisson` builds and checks it.

    ``dataset_size`` is **private**: how many samples there are to draw from. The rest is public, and every figure of
    the accountant is a function of the rest. ``population`` stands for the number of samples in ``rate``.
    ``max_batch_size`` None: never truncated.
    """

    dataset_size: int
    expected_batch_size: float
    population: int
    max_batch_size: int | None = None

    @property
    def rate(self) -> float:
        """The probability q that one sample is drawn in one step."""
        return self.expected_batch_size / self.population


@runtime_checkable
class Dataset(Protocol):
    """Data read on demand: ``fetch`` returns a tree whose leaves are ``(len(indices), ...)`` tensors."""

    def __len__(self) -> int: ...

    def fetch(self, indices: np.ndarray) -> Tree: ...


def poisson(
    dataset_size: int,
    *,
    expected_batch_size: float,
    population: int | None = None,
    max_batch_size: int | None = None,
) -> Poisson:
    """Return a checked :class:`Poisson`: ``0 < expected_batch_size <= population`` and ``max_batch_size >= 1``.

    ``population`` is the public number that the rate is computed from, about as many as there are samples. None:
    :func:`rounded_population`, which is as good as public unless one sample more crosses a border of the rounding.
    """
    population = rounded_population(dataset_size) if population is None else population
    sampling = Poisson(dataset_size, expected_batch_size, population, max_batch_size)
    check(sampling)
    return sampling


def rounded_population(dataset_size: int) -> int:
    """Round up to two significant digits, and to a multiple of ten: 48,211 to 49,000, 64 to 70, 3 to 10.

    It is a function of the number of samples: one sample more or less changes it where it crosses a border. To rule
    that out, announce a number.

    Guarantees:
      - at least ``dataset_size``, and at most a tenth, or 9, more;
      - at least ten neighbouring sizes have the same.
    """
    _check_size("dataset_size", dataset_size)
    grain = 10 ** max(1, len(str(dataset_size)) - 2)
    return -(-dataset_size // grain) * grain


def check(sampling: Poisson) -> None:
    """Raise :class:`FdpError` unless ``sampling`` describes a draw that exists."""
    size, expected, population, most = sampling
    _check_size("dataset_size", size)
    _check_size("population", population)
    if isinstance(expected, bool) or not isinstance(expected, (int, float)) or not math.isfinite(expected):
        raise FdpError(f"expected_batch_size: expected a finite number, got {expected!r}")
    if expected <= 0:
        raise FdpError(f"expected_batch_size: expected a number above 0, got {expected}; nothing would ever be sampled")
    if expected > population:
        raise FdpError(
            f"expected_batch_size: expected at most the population {population}, got {expected}: a batch larger than "
            f"the data, at a sampling rate above 1. Lower it, or check that the population counts samples, not batches"
        )
    if most is None:
        return
    if not _whole(most) or most < 1:
        raise FdpError(f"max_batch_size: expected None or a whole number, 1 or more, got {most!r}")
    if size > population:
        raise FdpError(
            f"population: with max_batch_size expected at least as many as there are samples, got {population}: draws "
            f"would be truncated more often than is accounted for. Announce a larger population"
        )


def sample(sampling: Poisson, key: Key) -> Int[Tensor, " drawn"]:
    """The indices of this step's samples, ascending.

    Guarantees:
      - index i is drawn independently of the others with probability ``floor(q 2^64) / 2^64``, never above q;
      - the probability is of the public numbers alone: a sample more or less leaves the draw of all others as it is;
      - the result is a function of ``(sampling, key)``;
      - with ``max_batch_size`` m, at most m are kept, every m-subset of the draw being equally likely.
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
    # Given that they are drawn, the u_i are independent and uniform below q: they serve as random priorities.
    kept = torch.argsort(bits[drawn], stable=True)[: sampling.max_batch_size]
    return drawn[kept].sort().values


def microbatches(
    indices: Int[Tensor, " drawn"], *, microbatch_size: int
) -> tuple[Int[Tensor, "microbatches samples"], Float[Tensor, "microbatches samples"]]:
    """``indices`` in rows of ``microbatch_size``, and the mask: 1 a sample, 0 padding (pointing at index 0).

    There are ``max(1, ceil(n / microbatch_size))`` rows: an empty draw is one row of padding, a normal step.
    """
    if not _whole(microbatch_size) or microbatch_size < 1:
        raise FdpError(f"microbatch_size: expected a whole number, 1 or more, got {microbatch_size!r}")
    count = len(indices)
    rows = max(1, -(-count // microbatch_size))
    matrix = indices.new_zeros(rows * microbatch_size, dtype=torch.int64)
    mask = torch.zeros(rows * microbatch_size, dtype=torch.float32, device=indices.device)
    matrix[:count], mask[:count] = indices, 1.0
    return matrix.view(rows, microbatch_size), mask.view(rows, microbatch_size)


def gather(dataset: Dataset | Tree, index_matrix: Int[Tensor, "microbatches samples"]) -> Tree:
    """The rows of every data leaf, ``(microbatches, samples, ...)``, in the structure of the data.

    ``dataset`` is a :class:`Dataset`, or a tree of tensors and numpy arrays (memory-mapped ones are read only
    where needed) with one leading sample dimension. Tensors stay on their device.
    """
    flat = index_matrix.flatten()
    shape = tuple(index_matrix.shape)
    size = length(dataset)
    if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < size:
        raise FdpError(f"index_matrix: expected indices in [0, {size}), got {int(flat.min())} to {int(flat.max())}")
    if isinstance(dataset, Dataset):
        rows = dataset.fetch(flat.cpu().numpy())
    else:
        rows = tree.map(lambda leaf: _rows(leaf, flat), dataset)
    for path, leaf in tree.flatten(rows).items():
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != flat.shape:
            got = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise FdpError(f"dataset{_at(path)}: expected fetch to return a tensor of {len(flat)} rows, got {got}")
    return tree.map(lambda leaf: leaf.view(*shape, *leaf.shape[1:]), rows)


def length(dataset: Dataset | Tree) -> int:
    """The number of samples: the leading dimension that all leaves share."""
    if isinstance(dataset, Dataset):
        return len(dataset)
    flat = tree.flatten(dataset)
    for path, leaf in flat.items():
        if not isinstance(leaf, (Tensor, np.ndarray)) or leaf.ndim == 0:
            raise FdpError(
                f"dataset{_at(path)}: expected a tensor or numpy array with a leading sample dimension, got "
                f"{type(leaf).__name__}"
            )
    sizes = {path: int(leaf.shape[0]) for path, leaf in flat.items()}
    if len(set(sizes.values())) != 1:
        raise FdpError(f"dataset: expected leaves with one common leading sample dimension, got {sizes}")
    return next(iter(sizes.values()))


def sample_batch(
    dataset: Dataset | Tree,
    sampling: Poisson,
    key: Key,
    *,
    step: int,
    microbatch_size: int,
    rank: int = 0,
    ranks: int = 1,
    purpose: str = TRAINING,
) -> Batch:
    """Draw, cut and fetch: the global batch of one step, stamped with who drew it. ``key`` is the root of the run.

    ``microbatch_size`` counts the samples of all ranks. Every rank draws the same batch and fetches its own columns of
    every microbatch, as many as the others, so that all take part in every collective. ``purpose`` is another one for
    a release beside the steps', such as noised statistics.

    Guarantees:
      - no two steps, samplings or purposes of a root share a draw;
      - the same (sampling, key, step, purpose) draw the same samples, on every rank and again after a restart.
    """
    if not 0 <= rank < ranks:
        raise FdpError(f"rank: expected 0 <= rank < ranks, got rank {rank} of {ranks}")
    if not _whole(step) or step < 0:
        raise FdpError(f"step: expected the number of the step, a whole number from 0 on, got {step!r}")
    if length(dataset) != sampling.dataset_size:
        raise FdpError(
            f"sampling.dataset_size: expected the {length(dataset)} samples of the dataset, got "
            f"{sampling.dataset_size}; some could not be drawn, or would not be there"
        )
    drawn = sample(sampling, keys.step_key(key, f"sample {purpose} {tuple(sampling)}", step))
    matrix, mask = microbatches(drawn, microbatch_size=microbatch_size)
    columns = -(-microbatch_size // ranks)
    matrix, mask = (torch.nn.functional.pad(m, (0, columns * ranks - microbatch_size)) for m in (matrix, mask))
    mine = slice(rank * columns, (rank + 1) * columns)
    batch = Batch(gather(dataset, matrix[:, mine]), mask[:, mine])
    return _stamped(batch, sampling, step, rank, ranks, purpose)


def trusted_batch(
    data: Tree,
    mask: Float[Tensor, "microbatches samples"],
    sampling: Poisson,
    *,
    step: int | None,
    rank: int = 0,
    ranks: int = 1,
    purpose: str = TRAINING,
) -> Batch:
    """A batch that you drew yourself, taken at your word: for tests, benchmarks, and samplers of your own.

    What is given up: nothing checks that every sample was drawn by ``sampling``, independently of the others and anew
    for this step, nor that it is in one microbatch of one rank only. The stated epsilon holds only if all that is
    true. ``step`` None: it is accepted at any step, again and again.
    """
    if tuple(mask.shape) != tuple(tree.leaves(data)[0].shape[:2]):
        raise FdpError(
            f"mask: expected (microbatches, samples) as in the data, {tuple(tree.leaves(data)[0].shape[:2])}, got "
            f"{tuple(mask.shape)}"
        )
    return _stamped(Batch(data, mask), sampling, step, rank, ranks, purpose)


def check_drawn(batch: Batch, sampling: Poisson, *, purpose: str = TRAINING) -> None:
    """Refuse a batch that was not drawn by ``sampling`` for ``purpose``, or was put together from others."""
    if batch.drawn is None:
        raise FdpError(
            "batch: expected one that fdp.sample_batch drew, got one made by hand: nothing says that its samples were "
            "drawn by the mechanism's sampling, each once, and epsilon would not hold. Draw it by fdp.sample_batch("
            "dataset, mechanism.sampling, key, step=..., microbatch_size=...); "
            "fdp.privacy.sampling.trusted_batch takes one of your own at your word"
        )
    stamp = batch.drawn.stamp
    if stamp.sampling != sampling:
        raise FdpError(
            f"batch: expected a draw by the mechanism's sampling ({_said(sampling)}), got one by another "
            f"({_said(stamp.sampling)}): the accountant would charge for what did not happen; give sample_batch the "
            f"sampling of the mechanism"
        )
    if stamp.purpose != purpose:
        raise FdpError(
            f"batch: expected a draw for {purpose}, got the one for {stamp.purpose}: every release is accounted as a "
            f"draw of its own; call sample_batch(..., purpose={purpose!r})"
        )
    if stamp.shape != tuple(batch.mask.shape):
        raise FdpError(
            f"batch: expected the {stamp.shape} (microbatches, samples) that were drawn, got "
            f"{tuple(batch.mask.shape)}: it was cut or put together after the draw, and a sample could be in it twice"
        )


def check_step(batch: Batch, step: int) -> None:
    """Refuse a batch that was drawn for another step."""
    drawn = None if batch.drawn is None else batch.drawn.stamp.step
    if drawn is not None and drawn != step:
        raise FdpError(
            f"batch: expected the draw of step {step}, which the state is at, got that of step {drawn}: a batch that "
            f"is used twice, or chosen, is not the fresh draw that the accountant charges for; call sample_batch(..., "
            f"step={step})"
        )


def _stamped(batch: Batch, sampling: Poisson, step: int | None, rank: int, ranks: int, purpose: str) -> Batch:
    stamp = Stamp(sampling, purpose, step, tuple(batch.mask.shape), BatchShare(rank, ranks))
    number = None if step is None else torch.tensor(step, device=batch.mask.device)
    return batch._replace(drawn=Drawn(stamp, number))


def _said(sampling: Poisson) -> str:
    """The public part in words."""
    _, expected, population, most = sampling
    return f"{expected:g} of {population} expected" + ("" if most is None else f", at most {most}")


def _rows(leaf: Tensor | np.ndarray, flat: Int[Tensor, " rows"]) -> Tensor:
    if isinstance(leaf, Tensor):
        return leaf[flat.to(leaf.device)]
    return torch.from_numpy(np.asarray(leaf[flat.cpu().numpy()]))


def _at(path: str) -> str:
    return f".{path}" if path else ""


def _check_size(name: str, value: Any) -> None:
    if not _whole(value) or value < 1:
        raise FdpError(f"{name}: expected a whole number of samples, 1 or more, got {value!r}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
