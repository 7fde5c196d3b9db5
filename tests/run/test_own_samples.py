"""Samples as people have them: tensors, torch datasets, lists, loaders."""

from __future__ import annotations

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
)
from torch.utils.data import Dataset as TorchDataset

from fdp.data.digest import data_digest
from fdp.privacy.microbatches import Dataset
from fdp.run.own_samples import as_samples
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
