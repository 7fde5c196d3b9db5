from __future__ import annotations

import torch

from fdp.types import Clip, FdpError, Norms


def test_the_total_norm_is_over_all_leaves():
    norms = Norms({"a": torch.tensor([9.0, 0.0]), "b": torch.tensor([16.0, 4.0])})
    assert norms.total().tolist() == [5.0, 2.0]
    assert norms.total().dtype == torch.float32


def test_the_total_norm_is_added_up_in_float64():
    # in float32, 2^24 + 1 + 1 + ... stays 2^24: ten thousand small leaves would vanish from the norm
    squared = {"large": torch.tensor([2.0**24])} | {str(i): torch.ones(1) for i in range(10_000)}
    assert Norms(squared).total().item() == torch.tensor((2.0**24 + 10_000) ** 0.5).item()


def test_not_a_number_in_one_leaf_is_in_the_total_of_that_sample_only():
    norms = Norms({"a": torch.tensor([1.0, float("nan"), 1.0]), "b": torch.tensor([0.0, 0.0, float("inf")])})
    assert norms.total()[0] == 1.0
    assert norms.total()[1].isnan()
    assert norms.total()[2].isinf()


def test_the_smallest_factor_is_over_leaves():
    clip = Clip({"a": torch.tensor([1.0, 0.5]), "b": torch.tensor([0.25, 1.0])}, torch.tensor(1.0))
    assert clip.smallest().tolist() == [0.25, 0.5]


def test_padding_has_factor_exactly_zero_whatever_its_norm():
    clip = Clip({"a": torch.tensor([0.5, float("nan"), float("inf")])}, torch.tensor(2.0))
    masked = clip.masked(torch.tensor([1.0, 0.0, 0.0]))
    assert masked.factors["a"].tolist() == [0.5, 0.0, 0.0]
    assert masked.sensitivity is clip.sensitivity


def test_an_error_is_a_value_error():
    assert issubclass(FdpError, ValueError)


def test_flat_clipping_keeps_one_tensor_for_all_leaves():
    factors = torch.tensor([1.0, 0.5, 0.25])
    masked = Clip(dict.fromkeys(["a", "b", "c"], factors), torch.tensor(1.0)).masked(torch.tensor([1.0, 0.0, 1.0]))
    assert len({id(f) for f in masked.factors.values()}) == 1
    assert masked.factors["b"].tolist() == [1.0, 0.0, 0.25]
    assert masked.smallest().tolist() == [1.0, 0.0, 0.25]
    different = Clip({"a": factors, "b": factors / 2, "c": factors}, torch.tensor(1.0))
    assert different.smallest().tolist() == [0.5, 0.25, 0.125]
    kept = different.masked(torch.tensor([0.0, 1.0, 1.0])).factors
    assert {path: f.tolist() for path, f in kept.items()} == {
        "a": [0.0, 0.5, 0.25], "b": [0.0, 0.25, 0.125], "c": [0.0, 0.5, 0.25]
    }  # fmt: skip
