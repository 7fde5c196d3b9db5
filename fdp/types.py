"""The values that flow through a private step.

    (params, batch) -> Norms -> Clip -> ClippedSum -> noisy sum -> update

A number that must stay with a tensor travels in the same value: the sensitivity of a sum is a field of the sum,
so that the noise can only ever be scaled by the bound that the clipping established.

    >>> total = clipped_sum(stash, clip)              # ClippedSum(value, sensitivity)
    >>> noisy = add_gaussian(total, key=key, step=step, noise_multiplier=1.0)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from fdp_kernels.keep import weighted_sum
from jaxtyping import Float, Int
from torch import Tensor

Tree: TypeAlias = Any
"""A pytree: nested dict, list, tuple or NamedTuple with tensors (or other values) at the leaves."""

Path: TypeAlias = str
"""Where a leaf sits in its tree, e.g. ``blocks.0.attention.qkv``."""

Flat: TypeAlias = dict[Path, Tensor]
"""A tree as a flat dictionary: one entry per leaf, keys in path order."""

Key: TypeAlias = Int[Tensor, " 8"]
"""A ChaCha20 key: eight 32-bit words, held in int64."""


class ShardWindow(NamedTuple):
    """The position of a shard in its leaf: the leaf's shape, and (start, length) of the shard per dim."""

    shape: tuple[int, ...]
    window: tuple[tuple[int, int], ...]


class Axis(NamedTuple):
    """One axis of the mesh, seen from this rank."""

    name: str
    size: int
    rank: int
    group: str


class FdpError(ValueError):
    """A mistake in what fdp was given: says what was expected, what was found, where, and what to do."""

    everywhere = False
    """Whether every rank of the run raises it."""


class Norms(NamedTuple):
    """Squared gradient norms of every sample, leaf by leaf; a tied leaf is one entry, cross terms included."""

    squared: dict[Path, Float[Tensor, " batch"]]

    def total(self) -> Float[Tensor, " batch"]:
        """The norm of each sample's whole gradient, added up in float64."""
        squares = list(self.squared.values())
        return torch.stack(squares).double().sum(0).sqrt().to(squares[0].dtype)


@dataclass(frozen=True)
class Bound:
    """Who vouches for a sensitivity, in words that hold every number of it. Part of a value's structure, not a leaf."""

    by: str


class Clip(NamedTuple):
    """What to multiply each sample's gradient by, leaf by leaf; ``bound`` says who computed the factors.

    Guarantees:
      - the sample's gradient, each leaf times its factor, has norm at most ``sensitivity``.
    """

    factors: dict[Path, Float[Tensor, " batch"]]
    sensitivity: Tensor
    bound: Bound = Bound("own factors")

    def smallest(self) -> Float[Tensor, " batch"]:
        """The least factor of each sample over all leaves: below 1 where anything of it was clipped."""
        first, *rest = self.factors.values()
        return first if all(f is first for f in rest) else torch.stack([first, *rest]).amin(0)

    def masked(self, mask: Float[Tensor, " batch"]) -> Clip:
        """The same, with factor exactly 0 for every sample that is padding (mask 0)."""
        keep = mask > 0
        first, *rest = self.factors.values()
        if all(f is first for f in rest):  # flat clipping has one tensor for all leaves
            return self._replace(factors=dict.fromkeys(self.factors, first.where(keep, first.new_zeros(()))))
        return self._replace(factors={path: f.where(keep, f.new_zeros(())) for path, f in self.factors.items()})


class Weighted(NamedTuple):
    """A sum not yet made, ``sum_s factors_s rows_s``: what is noised next need not be rounded, or stored, before."""

    rows: Float[Tensor, " samples *shape"]
    factors: Float[Tensor, " samples"]

    def total(self, onto: Float[Tensor, " *shape"] | None = None) -> Float[Tensor, " *shape"]:
        """The sum in the dtype of the factors, float64 where they clip; ``onto`` another, in the wider of both dtypes.

        Guarantees:
          - a row whose factor is 0 contributes exactly 0, even if it holds NaN or infinity.
        """
        flat, before = self.rows.reshape(len(self.factors), -1), None if onto is None else onto.flatten()
        dtype = self.factors.dtype if onto is None else torch.promote_types(self.factors.dtype, onto.dtype)
        return weighted_sum(flat, self.factors, dtype, before).view(self.rows.shape[1:])


class ClippedSum(NamedTuple):
    """A sum of clipped per-sample gradients; leaves may be sums not yet made.

    ``bound`` says who vouches for the sensitivity: ``clipped_sum``, or who declared it. None: nobody, and no noise is
    added to it.

    Guarantees:
      - adding or removing one sample moves ``value`` by at most ``sensitivity`` in the Euclidean norm over all leaves.
    """

    value: dict[Path, Any]
    sensitivity: Tensor
    bound: Bound | None = None

    def made(self) -> ClippedSum:
        """The same, every leaf's sum made."""
        made = {path: leaf.total() if isinstance(leaf, Weighted) else leaf for path, leaf in self.value.items()}
        return self._replace(value=made)

    def plus(self, other: ClippedSum, *, release: bool = False) -> ClippedSum:
        """The sum over the samples of both. They must be different samples, clipped to the same bound.

        With ``release`` both are used up, each leaf let go of as soon as it is added.

        Guarantees:
          - the sensitivity is that of one: a sample is in one of the two sums only;
          - nobody vouches for the sum if nobody does for one of the two.
        """
        take = dict.pop if release else dict.__getitem__
        value = {path: _added(take(self.value, path), take(other.value, path)) for path in list(self.value)}
        bound = None if other.bound is None else self.bound
        return ClippedSum(value, torch.maximum(self.sensitivity, other.sensitivity), bound)


def _added(leaf: Any, more: Any) -> Tensor:
    """The sum of two leaves of sums; one that is not yet made is added to the other as it is made."""
    leaf = leaf.total() if isinstance(leaf, Weighted) else leaf
    return more.total(leaf) if isinstance(more, Weighted) else leaf + more


class TrainState(NamedTuple):
    """All that a step reads and writes: ``step(state, batch, key) -> (state, metrics)``."""

    params: Tree
    opt: Tree
    clip: Tree
    step: Int[Tensor, ""]


@dataclass(frozen=True)
class BatchShare:
    """A rank's share of the global batch: that of ``rank`` among ``ranks`` that hold different samples."""

    rank: int
    ranks: int


@dataclass(frozen=True)
class Stamp:
    """Who drew a batch, and for what. It is part of the structure of a batch, not a leaf.

    ``sampling`` is the law of the draw, ``purpose`` the release it was drawn for, ``step`` that of the run (None:
    whichever it is used in), ``shape`` the (microbatches, samples) of ``share``.
    """

    sampling: Any
    purpose: str
    step: int | None
    shape: tuple[int, ...]
    share: BatchShare


class Drawn(NamedTuple):
    """Proof of a draw: its stamp, and the stamp's step as a tensor, which a compiled step can compare."""

    stamp: Stamp
    step: Int[Tensor, ""] | None


class Batch(NamedTuple):
    """Microbatches of fixed shape: data leaves are ``(microbatches, samples, ...)``; mask 1 is a sample, 0 padding.

    ``drawn`` says who drew it: ``fdp.sample_batch`` does. A private step refuses a batch without it, one of another
    sampling, step or rank: the accountant charges for samples drawn by its own sampling, anew for every step.
    """

    data: Tree
    mask: Float[Tensor, "microbatches samples"]
    drawn: Drawn | None = None

    @property
    def share(self) -> BatchShare:
        """Whose part of a global batch this is."""
        return BatchShare(0, 1) if self.drawn is None else self.drawn.stamp.share


class Metrics(NamedTuple):
    """What a step saw, computed on private data and **not** covered by the privacy budget."""

    losses: Float[Tensor, " samples"]
    norms: Float[Tensor, " samples"]
    factors: Float[Tensor, " samples"]
    mask: Float[Tensor, " samples"]


Step: TypeAlias = Callable[[TrainState, Batch, Key], tuple[TrainState, Metrics]]
