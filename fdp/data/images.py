"""Labelled images in memory, of finite pixels.

**A sample, the unit of privacy, is one image with its label.**

    >>> dataset = examples(image, label, where="digits")             # image (n, 1, 8, 8), label (n,)
    >>> dataset.fetch(np.array([0, 7]))                # {'image': float32 (2, 1, 8, 8), 'label': int64 (2,)}
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fdp.data.read_counts import ReadCounts
from fdp.data.units import PrivacyUnit, UnitKind, privacy_unit
from fdp.types import FdpError


@dataclass(frozen=True)
class Examples:
    """Labelled images held in memory; a sample is one image with its label."""

    image: Tensor = field(repr=False)
    label: Tensor = field(repr=False)

    @property
    def reading(self) -> ReadCounts:
        """The number of images; covered by no budget."""
        return ReadCounts(UnitKind.IMAGE, len(self), 0, "pixel")

    @property
    def unit(self) -> PrivacyUnit:
        """The unit of privacy, in words."""
        return privacy_unit(UnitKind.IMAGE)

    def __len__(self) -> int:
        return len(self.label)

    def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return ``{"image": float32 (n, ...), "label": int64 (n,)}`` for n indices."""
        rows = torch.as_tensor(indices, dtype=torch.int64)
        return {"image": self.image.index_select(0, rows), "label": self.label.index_select(0, rows)}

    def content(self) -> list[tuple[str, Tensor]]:
        """Return the arrays that samples are made from, for ``fdp.data.digest``."""
        return [("image", self.image), ("label", self.label)]


def examples(image: Tensor, label: Tensor, *, where: str) -> Examples:
    """Check images and labels and return them as a dataset; ``where`` names the source in errors."""
    if len(image) != len(label) or len(label) == 0:
        raise FdpError(f"{where}: expected as many labels as images, got {len(image)} images and {len(label)} labels")
    bad = ~torch.isfinite(image).flatten(1).all(1)
    if bool(bad.any()):
        raise FdpError(
            f"{where}: expected finite pixels, got NaN or infinity in image {int(bad.int().argmax())} "
            f"and {int(bad.sum()) - 1} others; repair or drop them"
        )
    return Examples(image.float(), label.long())
