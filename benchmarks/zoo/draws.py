"""Random batches for the zoo: floats, ids, images.

>>> Case(nn.Linear(4, 3), floats("input", 4))
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from benchmarks.zoo.hold import Draw

WORDS = 13


def normal(g: Generator, *shape: int) -> Tensor:
    """Return normal numbers in float64."""
    return torch.randn(shape, dtype=torch.float64, generator=g)


def integers(g: Generator, *shape: int, below: int = WORDS, least: int = 1) -> Tensor:
    """Return integers from ``least`` to below ``below``."""
    return torch.randint(least, below, shape, generator=g)


def floats(name: str, *shape: int) -> Draw:
    """Return a function that draws batches of one entry of normal numbers."""
    return lambda n, g: {name: normal(g, n, *shape)}


def ids(name: str, *shape: int, below: int = WORDS, least: int = 1) -> Draw:
    """Return a function that draws batches of one entry of integers."""
    return lambda n, g: {name: integers(g, n, *shape, below=below, least=least)}
