"""Public data to measure curvature on: a public dataset, or synthetic noise with the statistics of data.

    tokens   P(i) ~ (i + 1)^-s, independent                        s = 0 uniform, s = 1 Zipf's law
    images   amplitude ~ frequency^-s, given mean and deviation    s = 0 white, s = 1 pink, like photographs

The labels of a true Fisher information are drawn from the model, so those of the data do not matter. A sample is a
function of (key, index).

    >>> source = public(ZipfTokens(vocab_size=256, context=128, samples=512, exponent=1.0, key=keys.key(0)),
    ...                 private=dataset, digest=data_digest)                  # raises if it is the private data
    >>> microbatch = draw(source, samples=64, key=key)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from fdp import keys, tree
from fdp.privacy.microbatches import Dataset
from fdp.types import FdpError, Key, Tree

SYNTHETIC_SAMPLES = 4096
"""The size of a synthetic dataset."""

MAX_DRAW_ELEMENTS = 1 << 20
"""Up to this size a random tensor is drawn at once even if few rows are needed, which is faster than row by row."""


@dataclass(frozen=True, eq=False)
class ZipfTokens:
    """Windows of ``context + 1`` independent tokens, where token i has a probability ~ ``(i + 1)^-exponent``."""

    vocab_size: int
    context: int
    samples: int
    exponent: float
    key: Key

    def __len__(self) -> int:
        return self.samples

    def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return ``{"tokens": int64 (n, context + 1)}``."""
        mass = torch.arange(1, self.vocab_size + 1, dtype=torch.float64) ** -self.exponent
        ends = mass.cumsum(0) / mass.sum()
        uniform = _rows(keys.uniform, self.key, (self.samples, self.context + 1), indices)
        return {"tokens": torch.searchsorted(ends, uniform, right=True).clamp_max(self.vocab_size - 1)}


@dataclass(frozen=True, eq=False)
class NoiseImages:
    """Gaussian images of ``shape`` = (channels, height, width) whose amplitudes fall as ``frequency^-exponent``."""

    shape: tuple[int, int, int]
    classes: int
    samples: int
    exponent: float
    mean: float
    std: float
    key: Key

    def __len__(self) -> int:
        return self.samples

    def fetch(self, indices: np.ndarray) -> dict[str, Tensor]:
        """Return ``{"image": float32 (n, *shape), "label": int64 (n,)}`` with uniform labels."""
        white = _rows(keys.normal, keys.fold_in(self.key, "image"), (self.samples, *self.shape), indices)
        rows, columns = (torch.fft.fftfreq(length, dtype=torch.float64) for length in self.shape[1:])
        frequency = torch.hypot(rows[:, None], columns[None, :])
        frequency[0, 0] = 1 / max(self.shape[1:])
        amplitude = frequency**-self.exponent
        amplitude = amplitude / amplitude.square().mean().sqrt()
        image = self.mean + self.std * torch.fft.ifft2(torch.fft.fft2(white) * amplitude).real
        uniform = _rows(keys.uniform, keys.fold_in(self.key, "label"), (self.samples,), indices)
        return {"image": image.float(), "label": (uniform * self.classes).long()}


class Public(NamedTuple):
    """A dataset that has been checked not to be the private one, and its digest."""

    dataset: Dataset
    digest: str


def public(dataset: Dataset, *, private: Dataset, digest: Callable[[Dataset], str]) -> Public:
    """Return ``dataset`` as a source of curvature for training on ``private``; ``digest`` hashes a dataset.

    Guarantees:
      - the private dataset, or one with its digest, is refused, because its curvature would reveal it;
      - a dataset whose samples have other leaves, dtypes or shapes is refused.
    """
    theirs = digest(dataset)
    if dataset is private or (len(dataset) == len(private) and theirs == digest(private)):
        raise FdpError(
            "public: expected other data to measure curvature on, got the private dataset: factors without noise would "
            "reveal it. Use public or synthetic data, or release noised statistics (fdp.privacy.mechanism.statistics)"
        )
    expected, got = _schema(private), _schema(dataset)
    if got != expected:
        raise FdpError(f"public: expected samples like the private data's, {expected}, got {got}; crop or convert them")
    return Public(dataset, theirs)


def synthetic(like: Dataset, *, outputs: int, key: Key) -> ZipfTokens | NoiseImages:
    """Return Zipf tokens or pink images with the shapes of ``like``'s samples; nothing else of ``like`` is read.

    ``outputs`` is the size of the vocabulary, or the number of classes. Images have mean 0.3 and deviation 0.37,
    typical of pixels in [0, 1]; statistics of the private data would be a release.
    """
    shapes = {path: shape for path, (shape, _) in _schema(like).items()}
    if list(shapes) == ["tokens"] and len(shapes["tokens"]) == 1:
        return ZipfTokens(outputs, shapes["tokens"][0] - 1, samples=SYNTHETIC_SAMPLES, exponent=1.0, key=key)
    if set(shapes) == {"image", "label"} and len(shapes["image"]) == 3:
        channels, height, width = shapes["image"]
        return NoiseImages(
            (channels, height, width), outputs, SYNTHETIC_SAMPLES, exponent=1.0, mean=0.3, std=0.37, key=key
        )
    raise FdpError(
        f"synthetic: expected samples of tokens (context + 1,) or of an image (channels, height, width) and a label, "
        f"got {shapes}; give public data, or noised statistics"
    )


def draw(source: Public, *, samples: int, key: Key, rank: int = 0, ranks: int = 1) -> tuple[Tree, Float[Tensor, "..."]]:
    """Return a microbatch of ``samples`` samples, different on every rank, and its mask of ones.

    Samples repeat only if the dataset is too small.
    """
    if not isinstance(source, Public):
        raise FdpError(
            f"draw: expected a Public source, which is checked against the private data, got {type(source).__name__}; "
            f"call fdp.kfac.private.public_data.public(dataset, private=..., digest=...)"
        )
    order = torch.argsort(keys.bits(key.cpu(), (len(source.dataset),)), stable=True)
    mine = torch.arange(rank * samples, (rank + 1) * samples) % len(order)
    return source.dataset.fetch(order[mine].numpy()), torch.ones(samples)


def _schema(dataset: Dataset) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    one = dataset.fetch(np.zeros(1, dtype=np.int64))
    return {path: (tuple(leaf.shape[1:]), leaf.dtype) for path, leaf in tree.flatten(one).items()}


def _rows(draw: Callable[..., Tensor], key: Key, shape: tuple[int, ...], indices: np.ndarray) -> Float[Tensor, "n ..."]:
    """Return the rows ``indices`` of a random tensor of ``shape``."""
    rest = [(0, length) for length in shape[1:]]
    if len(indices) == 0:
        return torch.empty(0, *shape[1:], dtype=torch.float64)
    if min(indices) < 0 or max(indices) >= shape[0]:
        raise FdpError(f"indices: expected numbers from 0 to {shape[0] - 1}, got {min(indices)} to {max(indices)}")
    if math.prod(shape) <= MAX_DRAW_ELEMENTS:
        return draw(key, shape, dtype=torch.float64)[torch.as_tensor(indices, dtype=torch.int64)]
    return torch.cat([draw(key, shape, dtype=torch.float64, window=((int(i), 1), *rest)) for i in indices])
