"""Multi-tensor operations equal single ones for all devices, dtypes and sizes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fdp.kfac.foreach import foreach_copy, foreach_decayed_add, foreach_is_finite
from tests.conftest import randn

WHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def tensors(device: str, seed: int = 1) -> list[Tensor]:
    """Return scalars, rows, matrices and transposes of every dtype in turn, some empty."""
    shapes = [(), (3,), (5, 4), (0,), (7, 0), (1030, 70)] * 4
    made = [randn(*shape, seed=seed + i).to(device, DTYPES[i % 4]) for i, shape in enumerate(shapes)]
    return [x.mT if x.ndim == 2 and i % 2 else x for i, x in enumerate(made)]


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_tensor_that_is_not_finite_is_found(device: str, bad: float) -> None:
    clean = tensors(device)
    assert foreach_is_finite(clean).tolist() == [True] * len(clean)
    for i, x in enumerate(clean):
        for place in {0, x.numel() // 2, x.numel() - 1} if x.numel() else ():
            spoiled = [y.clone() for y in clean]
            spoiled[i] = x.flatten().index_fill(0, torch.tensor(place, device=device), bad).view(x.shape)
            assert foreach_is_finite(spoiled).tolist() == [j != i for j in range(len(clean))]


def test_the_largest_number_of_a_dtype_is_finite() -> None:
    assert foreach_is_finite([torch.full((3,), -torch.finfo(dtype).max, dtype=dtype) for dtype in DTYPES]).all()
    assert foreach_is_finite([]).tolist() == []


@pytest.mark.parametrize("device", WHERE)
def test_foreach_sums_and_copies_equal_those_of_each_pair(device: str) -> None:
    old, new = tensors(device), tensors(device, seed=50)
    before = [x.clone() for x in old]
    expected = [x * 0.7 + y for x, y in zip(old, new)]
    torch.testing.assert_close(foreach_decayed_add(old, new, rho=0.7), expected, rtol=0, atol=0)
    torch.testing.assert_close(old, before, rtol=0, atol=0)
    places = [x.data_ptr() for x in old]
    foreach_copy(old, [x.double() for x in new])
    torch.testing.assert_close(old, new, rtol=0, atol=0)
    assert [x.data_ptr() for x in old] == places
