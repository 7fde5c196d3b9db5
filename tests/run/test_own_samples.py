"""Samples as people have them: tensors, torch datasets, lists, loaders; with a collate function that pads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data import Dataset as TorchDataset

from fdp import tree
from fdp.data.digest import data_digest
from fdp.privacy.microbatches import Dataset
from fdp.run.own_samples import CollatedSamples, as_samples
from fdp.types import FdpError

X, Y = torch.arange(24.0).view(8, 3), torch.arange(8)


class Rows(TorchDataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return X[index], int(Y[index])


FORMS: dict[str, Any] = {
    "tensors": (X, Y),
    "arrays": (X.numpy(), Y.numpy()),
    "TensorDataset": TensorDataset(X, Y),
    "a torch dataset": Rows(),
    "a list of samples": [(x, y) for x, y in zip(X, Y)],
    "numbers": [(x.tolist(), int(y)) for x, y in zip(X, Y)],
    "a loader": DataLoader(Rows(), batch_size=4, shuffle=True),
    "a subset": Subset(Rows(), range(8)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_rows(form: str):
    samples = as_samples(FORMS[form])
    assert isinstance(samples, Dataset)
    assert len(samples) == 8
    x, y = samples.fetch(np.array([5, 2, 2]))
    assert torch.equal(x.float(), X[[5, 2, 2]])
    assert y.tolist() == [5, 2, 2]


def test_dictionaries_keep_their_entries():
    for form in ({"a": X, "b": Y}, [{"a": x, "b": y} for x, y in zip(X, Y)]):
        assert set(as_samples(form).fetch(np.arange(2))) == {"a", "b"}


def pad(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    length = max(map(len, samples))
    rows = [torch.nn.functional.pad(sample, (0, length - len(sample))) for sample in samples]
    return {"row": torch.stack(rows), "mask": torch.stack([torch.arange(length) < len(s) for s in samples])}


def test_batches_are_padded_to_the_longest_sample_of_all():
    ragged = [torch.ones(n) for n in (2, 5, 1, 3)]
    samples = as_samples(ragged, collate_fn=pad)
    assert isinstance(samples, CollatedSamples)
    assert samples.longest == (1,)
    batch = samples.fetch(np.array([0, 2]))
    assert batch["row"].shape == (2, 5)
    assert batch["mask"].sum(1).tolist() == [2, 1]
    assert samples.fetch(np.array([], dtype=int))["row"].shape == (0, 5)
    assert tree.leaves(samples.fetch_alone(2))[0].shape == (1, 1)


RAGGED = [torch.full((n,), i + 1.0) for i, n in enumerate((5, 5, 5, 5, 2, 4, 1, 3))]
"""The first samples are as long as the longest, so that sorting them changes nothing."""


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


def test_a_sample_that_appears_later_changes_no_row_but_its_own():
    """Rows that no check has seen: those of others are the same, and a change of the longest sample is an error."""

    def spoiled(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        found = pad(samples)
        marked = any(bool((sample < 0).any()) for sample in samples)
        return found | {"row": found["row"] * (2 if marked and kind == "scaled" else 1)}

    kind, source = "", list(RAGGED)
    samples = as_samples(source, collate_fn=spoiled)
    before = samples.fetch(np.arange(8))["row"]
    source[6], kind = torch.tensor([-1.0]), "scaled"
    assert torch.equal(samples.fetch(np.array([4, 5, 7]))["row"], before[[4, 5, 7]])
    with pytest.raises(FdpError, match="that does not depend on the samples beside it"):
        samples.fetch(np.array([4, 6]))


def test_samples_that_are_drawn_anew_by_the_dataset_are_collated_all_the_same():
    class Augmented(TorchDataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            return RAGGED[index] + torch.rand(())

    rows = as_samples(Augmented(), collate_fn=pad).fetch(np.arange(8))["row"]
    assert rows.shape == (8, 5)
    assert torch.equal(rows.floor()[:, 0], torch.arange(1.0, 9.0))


PROJECTION = torch.randn(768, 300, generator=torch.Generator().manual_seed(0))
FEATURES = [torch.randn(768, generator=torch.Generator().manual_seed(i)) for i in range(40)]


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


class ReusedBuffer(TorchDataset):
    """Fills the same tensor, or the same array, for every sample."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.buffer[:] = index
        return {"row": self.buffer}


@pytest.mark.parametrize("buffer", [torch.zeros(3), np.zeros(3)], ids=["tensor", "array"])
@pytest.mark.parametrize("collate_fn", [None, default_collate], ids=["ours", "theirs"])
def test_a_dataset_may_fill_one_buffer_for_every_sample(buffer: Any, collate_fn: Any):
    rows = as_samples(ReusedBuffer(buffer), collate_fn=collate_fn).fetch(np.array([5, 2, 7]))["row"]
    assert rows[:, 0].tolist() == [5, 2, 7]


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": SubsetRandomSampler(range(4))},
        {"sampler": WeightedRandomSampler([1.0] * 8, 8)},
        {"batch_sampler": [[0, 1], [2, 3]]},
        {"batch_sampler": BatchSampler(SubsetRandomSampler(range(4)), 2, drop_last=False)},
    ],
    ids=["subset", "weighted", "list of batches", "batches of a subset"],
)
def test_a_loader_that_leaves_samples_out_or_repeats_some_is_refused(options: dict[str, Any]):
    with pytest.raises(FdpError, match=r"reads every sample of its dataset once, .*Subset\(dataset, indices\)"):
        as_samples(DataLoader(TensorDataset(torch.arange(8.0)), **options))


@pytest.mark.parametrize(
    "options",
    [{}, {"shuffle": True}, {"sampler": DistributedSampler(Rows(), 2, 0)}, {"batch_size": 3, "drop_last": True}],
    ids=["in order", "shuffled", "of one rank", "in whole batches"],
)
def test_a_loader_that_reads_every_sample_is_taken(options: dict[str, Any]):
    assert len(as_samples(DataLoader(TensorDataset(torch.arange(8.0)), **options))) == 8


def test_samples_of_one_shape_are_collated_without_any_other():
    sizes: list[int] = []

    def stack(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        sizes.append(len(samples))
        return {"x": torch.stack(samples)}

    samples = as_samples(FEATURES, collate_fn=stack)
    sizes.clear()
    assert torch.equal(samples.fetch(np.array([3, 1]))["x"], torch.stack([FEATURES[3], FEATURES[1]]))
    assert sizes == [1, 1]


@pytest.mark.parametrize("lengths", [(5, 3, 2), (3, 3, 3)], ids=["longest", "one shape"])
def test_samples_that_are_longer_when_they_are_read_again_are_refused(lengths: tuple[int, ...]):
    source = [torch.ones(length) for length in lengths]
    samples = as_samples(source, collate_fn=pad)
    source[2] = torch.ones(6)
    with pytest.raises(FdpError, match=r"the same length whenever they are read.* got a longer one"):
        samples.fetch(np.arange(3))


def test_the_digest_sees_every_sample():
    changed = [(x, y) for x, y in zip(X, Y)]
    changed[7] = (X[7] + 1, Y[7])
    digests = {data_digest(as_samples(form)) for form in ((X, Y), (X + 0, Y), changed, FORMS["a list of samples"])}
    assert len(digests) >= 2
    assert data_digest(as_samples(changed)) != data_digest(as_samples(FORMS["a list of samples"]))


@pytest.mark.parametrize(
    ("dataset", "collate_fn", "words"),
    [
        (iter([1]), None, r"list\(dataset\)"),
        ("text", None, "load it first"),
        ([], None, "empty"),
        ((X, Y[:3]), None, "common leading sample dimension"),
        ([(object(), 1)] * 3, None, "ToTensor"),
        ([torch.ones(n) for n in (1, 2, 1)], None, "collate_fn that pads"),
        ([torch.ones(1)] * 3, lambda samples: 1 / 0, r"try it: collate_fn\(\[dataset\[0\], dataset\[1\]\]\)"),
        ([torch.ones(1)] * 3, lambda samples: {"x": torch.ones(7), "t": ["a"]}, "one row for each"),
    ],
)
def test_mistakes_say_what_to_do(dataset: Any, collate_fn: Any, words: str):
    with pytest.raises(FdpError, match=words):
        as_samples(dataset, collate_fn=collate_fn).fetch(np.arange(3))
