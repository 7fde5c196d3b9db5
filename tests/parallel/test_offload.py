"""Copies to CPU memory: the same numbers, pinned if they come from a GPU, and none for estimates."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fdp.parallel.offload import like_on_cpu, to_cpu


def test_a_tensor_on_the_cpu_stays_where_it_is():
    leaf = torch.randn(3, 2)
    assert to_cpu(leaf) is leaf


def test_memory_for_a_copy_has_the_dtype_of_the_leaf_and_the_given_shape():
    found = like_on_cpu(torch.zeros(0, dtype=torch.float64), torch.Size((4, 2)))
    assert (found.dtype, found.shape, found.device.type) == (torch.float64, (4, 2), "cpu")
    assert not found.is_pinned()


def test_an_estimate_without_a_gpu_needs_no_pinned_memory():
    with FakeTensorMode():
        leaf = torch.empty(5, device="cuda")
        assert to_cpu(leaf).device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("view", [lambda leaf: leaf, lambda leaf: leaf.t(), lambda leaf: leaf[1:3, ::2]])
def test_a_copy_from_a_gpu_is_pinned_and_equal(view):
    leaf = view(torch.randn(4, 6, device="cuda"))
    found = to_cpu(leaf)
    assert found.is_pinned()
    assert torch.equal(found, leaf.cpu())
