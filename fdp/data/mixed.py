"""Private data mixed with public data in one dataset.

    samples = private samples, then public samples;        each is drawn with the same probability, clipped and noised

**The guarantee is about the private units.** The public samples are part of the public settings of the run, like the
first parameters: they are the same in neighbouring datasets. They are sampled, clipped and noised like private ones, so
nothing shows which samples of a step were private. The population, and so the sampling rate, counts both.

    >>> dataset = Mixed(private, public)
    >>> dataset.unit.one
    'one record (its first 513 tokens) of the private data'
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fdp import tree
from fdp.data.digest import arrays_of
from fdp.data.read_counts import ReadCounts, read_counts_of
from fdp.data.units import PrivacyUnit, beside_public, dataset_unit
from fdp.privacy.microbatches import Dataset
from fdp.types import FdpError, Tree


@dataclass(frozen=True)
class Mixed:
    """The samples of a private dataset, then those of a public one. Both must give samples of the same form.

    Guarantees:
      - adding or removing a private unit adds or removes one sample and changes no other, private or public;
      - a public sample does not depend on the private data.
    """

    private: Dataset
    public: Dataset

    def __post_init__(self) -> None:
        if not len(self.private) or not len(self.public):
            raise FdpError("public data: expected samples of both the private and the public data, got none of one")
        forms = [_form(each) for each in (self.private, self.public)]
        if forms[0] != forms[1]:
            raise FdpError(
                f"public data: expected samples like the private ones, {forms[0]}, got {forms[1]}; read both alike"
            )

    @property
    def unit(self) -> PrivacyUnit:
        """The unit of privacy, in words: that of the private data."""
        return beside_public(dataset_unit(self.private))

    @property
    def reading(self) -> ReadCounts | None:
        """The counts of the private data, which no budget covers, and of the public data."""
        private = read_counts_of(self.private)
        return None if private is None else private._replace(public=read_counts_of(self.public))

    def __len__(self) -> int:
        return len(self.private) + len(self.public)

    def fetch(self, indices: np.ndarray) -> Tree:
        """Return the samples as both datasets do."""
        own = indices < len(self.private)
        if own.all():
            return self.private.fetch(indices)
        if not own.any():
            return self.public.fetch(indices - len(self.private))
        private, public = self.private.fetch(indices[own]), self.public.fetch(indices[~own] - len(self.private))
        is_own = torch.from_numpy(own)

        def merge(mine: Tensor, theirs: Tensor) -> Tensor:
            both = mine.new_empty((len(indices), *mine.shape[1:]))
            both[is_own], both[~is_own] = mine, theirs
            return both

        return tree.map(merge, private, public)

    def content(self) -> Iterator[tuple[str, np.ndarray | Tensor]]:
        """Yield the arrays that samples are made from, for ``fdp.data.digest``."""
        yield "sizes", np.array([len(self.private), len(self.public)])
        for side, dataset in (("private", self.private), ("public", self.public)):
            yield from ((f"{side} {name}", values) for name, values in arrays_of(dataset))


def _form(dataset: Dataset) -> dict[str, str]:
    """Return the type and shape of every entry of a sample, which depend on the options and not on content."""
    sample = tree.flatten(dataset.fetch(np.arange(1)))
    return {path: f"{leaf.dtype} {tuple(leaf.shape[1:])}".removeprefix("torch.") for path, leaf in sample.items()}
