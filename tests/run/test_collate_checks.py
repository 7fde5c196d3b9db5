"""Collate functions by which one sample would change the row of another are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fdp.run.own_samples import as_samples
from fdp.types import FdpError
from tests.run.test_collated_samples import FEATURES, RAGGED, pad


def pad_sorted(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return pad(sorted(samples, key=len, reverse=True))  # for torch's pack_padded_sequence


def pad_reversed(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return pad(samples[::-1])


def pad_rarely_mixed(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    found = pad(samples)
    mixed = torch.rand(()) < 0.3
    return found | {"row": (found["row"] + found["row"].roll(1, 0)) / 2 if mixed else found["row"]}


def standardise(samples: list[float]) -> dict[str, torch.Tensor]:
    column = torch.tensor(samples)
    return {"age": (column - column.mean()) / (column.std(correction=0) + 1e-6)}


@pytest.mark.parametrize(
    ("dataset", "collate_fn"),
    [
        (RAGGED, pad_sorted),
        (RAGGED, pad_reversed),
        (RAGGED, pad_rarely_mixed),
        ([float(n) for n in range(40)], standardise),
        ([torch.arange(3.0) * n for n in range(40)], lambda samples: {"x": torch.stack(samples).cumsum(0)}),
        ([float(n) for n in range(40)], lambda samples: {"x": torch.rand(len(samples))}),
    ],
    ids=["sorted", "reversed", "mixed now and then", "standardised", "accumulated", "random"],
)
def test_a_collate_function_that_looks_across_samples_is_refused(dataset: Any, collate_fn: Any):
    torch.manual_seed(0)
    with pytest.raises(FdpError, match="in their order, that does not depend on the samples beside it"):
        as_samples(dataset, collate_fn=collate_fn)


WORDS = [f"w{n} w{n + 1} w{n % 7}" for n in range(60)]
NUMBERS: dict[str, int] = {}
met = 0


def in_a_variable_around() -> Callable[[list[str]], Any]:
    numbers: dict[str, int] = {}
    return lambda samples: {
        "ids": torch.tensor([[numbers.setdefault(w, len(numbers)) for w in s.split()] for s in samples])
    }


def in_a_global(samples: list[str]) -> dict[str, torch.Tensor]:
    return {"ids": torch.tensor([[NUMBERS.setdefault(w, len(NUMBERS)) for w in s.split()] for s in samples])}


class InAnAttribute:
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, samples: list[str]) -> dict[str, torch.Tensor]:
        return {"ids": torch.tensor([[self._number(word) for word in sample.split()] for sample in samples])}

    def _number(self, word: str) -> int:
        return self.numbers.setdefault(word, len(self.numbers))


class InAnArray:
    """Marks words that came before; only the first time that a word is met tells."""

    def __init__(self) -> None:
        self.seen = np.zeros(200, dtype=bool)

    def __call__(self, samples: list[str]) -> dict[str, torch.Tensor]:
        ids = np.array([[int(word[1:]) for word in sample.split()] for sample in samples])
        new = ~self.seen[ids]
        self.seen[ids] = True
        return {"ids": torch.from_numpy(ids), "new": torch.from_numpy(new)}


def from_a_count(samples: list[str]) -> dict[str, torch.Tensor]:
    """A number that is assigned, not an object that is changed; rows settle once many samples were met."""
    global met
    met = min(met + len(samples), 50)
    return {"x": torch.full((len(samples), 1), float(met))}


@pytest.mark.parametrize(
    "collate_fn",
    [in_a_variable_around(), in_a_global, InAnAttribute(), InAnAttribute().__call__, InAnArray(), from_a_count],
    ids=["variable", "global", "attribute", "method", "array", "count"],
)
def test_a_collate_function_that_remembers_samples_is_refused(collate_fn: Any):
    with pytest.raises(FdpError, match="it remembers samples"):
        as_samples(WORDS, collate_fn=collate_fn)


def test_a_collate_function_may_keep_a_cache_and_count_its_calls():
    cache: dict[str, list[int]] = {}
    calls: list[int] = []

    def look_up(samples: list[str]) -> dict[str, torch.Tensor]:
        calls.append(len(samples))
        rows = [cache.setdefault(sample, [int(word[1:]) for word in sample.split()]) for sample in samples]
        return {"ids": torch.tensor(rows)}

    rows = as_samples(WORDS, collate_fn=look_up).fetch(np.arange(3))["ids"]
    assert rows.tolist() == [[0, 1, 0], [1, 2, 1], [2, 3, 2]]


PROJECTION = torch.randn(768, 300, generator=torch.Generator().manual_seed(0))


def project(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"x": torch.stack(samples) @ PROJECTION}


def test_a_collate_function_may_compute_with_rounding():
    """A product of another number of rows is rounded otherwise."""
    rows = as_samples(FEATURES, collate_fn=project).fetch(np.arange(40))["x"]
    assert torch.allclose(rows, project(FEATURES)["x"], rtol=1e-4, atol=1e-3)


def test_rows_without_a_number_are_the_same_rows():
    samples = [torch.tensor([n, float("nan"), float("inf")]) for n in range(40)]
    rows = as_samples(samples, collate_fn=lambda given: {"x": torch.stack(given)}).fetch(np.arange(2))["x"]
    assert torch.equal(rows[:, 0], torch.tensor([0.0, 1.0]))
