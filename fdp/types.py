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
from jaxtyping import Float, Int
from torch import Tensor

Tree: TypeAlias = Any
"""A pytree: nested dict, list, tuple or NamedTuple with tensors (or other values) at the leaves."""

Path: TypeAlias = str
"""The path of a leaf in its tree, e.g. ``blocks.0.attention.qkv``."""

Flat: TypeAlias = dict[Path, Tensor]
"""A tree as a flat dictionary: one entry per leaf, keys in path order."""

Key: TypeAlias = Int[Tensor, " 8"]
"""A ChaCha20 key: eight 32-bit words, held in int64."""


class ShardWindow(NamedTuple):
    """The place of a shard in its leaf: the leaf's shape, and (start, length) of the shard per dim."""

    shape: tuple[int, ...]
    window: tuple[tuple[int, int], ...]


class Axis(NamedTuple):
    """One axis of the mesh, seen from this rank."""

    name: str
    size: int
    rank: int
    group: str


class FdpError(ValueError):
    """A mistake in what fdp was given. The message says what was expected, what came, where, and what to do."""

    everywhere = False
    """True if every rank of the run raises it."""


class NotRepeatable(FdpError):
    """Raised if gradients have to be the same each time they are computed, and this machine or model cannot do that."""


class Norms(NamedTuple):
    """Squared gradient norms of every sample, leaf by leaf; a tied leaf is one entry, cross terms included."""

    squared: dict[Path, Float[Tensor, " batch"]]

    def total(self) -> Float[Tensor, " batch"]:
        """Return the norm of each sample's full gradient, summed in float64."""
        squares = list(self.squared.values())
        return torch.stack(squares).double().sum(0).sqrt().to(squares[0].dtype)


@dataclass(frozen=True)
class Bound:
    """The origin of a sensitivity, in words that name every number it depends on. Static structure, not a leaf."""

    by: str

    @property
    def unnamed(self) -> bool:
        """True if the words leave out a number: that of clip factors made by hand, or of a bound that is a tensor."""
        return any(words in self.by for words in (OWN_FACTORS, A_TENSOR))


OWN_FACTORS, A_TENSOR = "own factors", "a bound of the state"
"""Origins of a sensitivity that do not name its number."""


class Clip:
    """Clip factors of every sample, leaf by leaf; ``bound`` says who vouches for them.

    If it is None, nobody does: the factors were made by hand (``fdp.privacy.clipping.declare_clip`` vouches for those),
    and no noise is added to their sum. Not a NamedTuple, whose ``_replace`` would keep the bound of other factors.

    Guarantees:
      - the sample's gradient, each leaf times its factor, has norm at most ``sensitivity``.
    """

    factors: dict[Path, Float[Tensor, " batch"]]
    sensitivity: Tensor
    bound: Bound | None

    def __init__(
        self, factors: dict[Path, Float[Tensor, " batch"]], sensitivity: Tensor, *, bound: Bound | None = None
    ) -> None:
        for name, value in (("factors", factors), ("sensitivity", sensitivity), ("bound", bound)):
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise FdpError(f"Clip: expected its {name} to stay as they were made; make another: Clip(factors, sensitivity)")

    def smallest(self) -> Float[Tensor, " batch"]:
        """Return each sample's smallest factor over all leaves: below 1 if any part of it was clipped."""
        first, *rest = self.factors.values()
        return first if all(f is first for f in rest) else torch.stack([first, *rest]).amin(0)

    def masked(self, mask: Float[Tensor, " batch"]) -> Clip:
        """Return the same clip with factor exactly 0 for every sample that is padding (mask 0)."""
        keep = mask > 0
        return self._map(lambda f: f.where(keep, f.new_zeros(())))

    def double(self) -> Clip:
        """Return the same clip with factors in float64, in which everything is summed."""
        return self._map(Tensor.double)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Clip:
        """Return the clip with ``change`` of every factor, which must not be larger; one tensor for all stays one."""
        first, *rest = self.factors.values()
        if all(f is first for f in rest):  # flat clipping has one tensor for all leaves
            return Clip(dict.fromkeys(self.factors, change(first)), self.sensitivity, bound=self.bound)
        return Clip({path: change(f) for path, f in self.factors.items()}, self.sensitivity, bound=self.bound)


class ClippedSum(NamedTuple):
    """A sum of clipped per-sample gradients. Leaves are tensors, or sums evaluated later (``gradients.lazy_sum``).

    ``bound`` names the origin of the sensitivity: ``clipped_sum``, or a declaration by the caller. If it is None, the
    sensitivity is unknown and no noise is added.

    Guarantees:
      - adding or removing one sample moves ``value`` by at most ``sensitivity`` in the Euclidean norm over all leaves.
    """

    value: dict[Path, Any]
    sensitivity: Tensor
    bound: Bound | None = None


NO_SAMPLES = ClippedSum({}, torch.zeros(()))
"""The sum of no samples, to which the first of several microbatches is added."""


class TrainState(NamedTuple):
    """Everything that a step reads and writes: ``step(state, batch, key) -> (state, metrics)``."""

    params: Tree
    opt: Tree
    clip: Tree
    step: Int[Tensor, ""]


@dataclass(frozen=True)
class BatchShare:
    """The part of a global batch that ``rank`` holds, of ``ranks`` that hold different samples."""

    rank: int
    ranks: int


@dataclass(frozen=True)
class Stamp:
    """The origin of a batch: its sampling and its purpose. Static structure, not a leaf.

    ``sampling`` is the distribution of the draw, ``purpose`` the release it was drawn for, ``step`` the step of the run
    (None: any), ``shape`` the (rows, samples) of ``share``, ``root`` a digest of the key that drew it ("": unknown).
    """

    sampling: Any
    purpose: str
    step: int | None
    shape: tuple[int, ...]
    share: BatchShare
    root: str = ""


class Drawn(NamedTuple):
    """Proof of a draw: its stamp, and the stamp's step as a tensor, which a compiled step can compare."""

    stamp: Stamp
    step: Int[Tensor, ""] | None


@dataclass(frozen=True)
class RowGroups:
    """The rows of a batch as microbatches: each is ``sizes[i]`` consecutive rows. Static structure, not a leaf."""

    sizes: tuple[int, ...]


class Batch(NamedTuple):
    """Rows of fixed shape: data leaves are ``(rows, samples, ...)``; mask 1 is a sample, 0 padding.

    Every row is a microbatch, or ``groups`` says how many consecutive rows are computed at once, so that microbatches
    may be of several sizes (``fdp.privacy.microbatches.split_microbatches``). ``drawn`` says who drew the batch;
    ``fdp.sample_batch`` sets it. A private step refuses a batch without it, or of another sampling, step or rank: the
    accountant charges for samples drawn by its own sampling, afresh for every step.
    """

    data: Tree
    mask: Float[Tensor, "rows samples"]
    drawn: Drawn | None = None
    groups: RowGroups | None = None

    @property
    def share(self) -> BatchShare:
        """Return which part of the global batch this is."""
        return BatchShare(0, 1) if self.drawn is None else self.drawn.stamp.share


class Metrics(NamedTuple):
    """Metrics of a step, computed on private data and **not** covered by the privacy budget."""

    losses: Float[Tensor, " samples"]
    norms: Float[Tensor, " samples"]
    factors: Float[Tensor, " samples"]
    mask: Float[Tensor, " samples"]


Step: TypeAlias = Callable[[TrainState, Batch, Key], tuple[TrainState, Metrics]]
