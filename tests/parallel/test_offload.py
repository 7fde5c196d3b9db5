"""Copies to CPU memory: the same numbers, pinned if they come from a GPU, and none for estimates."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fdp.gradients.clipped_sum
from fdp import keys
from fdp.fast.compile_modes import make_execution
from fdp.gradients.clipped_sum import clipped_sum, plain_sum
from fdp.gradients.lazy_sum import LazySum, add_onto
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.models import mlp
from fdp.parallel.offload import CPU, Offload, add_on_device_, like_on_cpu, send, to_cpu, wait_for_copies
from fdp.privacy.clipping import clip_to


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_on_the_cpu_are_added_in_place_in_the_wider_dtype_and_rounded_once(dtype):
    leaf = torch.full((3,), 2.0**-25, dtype=torch.float64)
    lazy = LazySum(leaf.expand(2, 3), torch.ones(2, dtype=torch.float64))
    total = add_onto({}, {"w": torch.ones(3, dtype=torch.float64)}, dtype, CPU)
    place = total["w"].data_ptr()
    total = add_onto(total, {"w": lazy}, dtype, CPU)  # 2^-24, half a unit of float32: rounded to even
    total = add_onto(total, {"w": 3 * leaf}, dtype, CPU)
    wait_for_copies(CPU)
    expected = 1 + 5 * 2.0**-25 if dtype == torch.float64 else 1 + 2.0**-23
    assert total["w"].tolist() == [expected] * 3
    assert (total["w"].dtype, total["w"].data_ptr()) == (dtype, place)


def test_what_is_sent_arrives_in_the_compute_dtype():
    leaf = torch.randn(3)
    assert torch.equal(send(leaf, torch.bfloat16, CPU), leaf.bfloat16())
    there = send(leaf, torch.bfloat16, torch.device("meta"))
    assert (there.dtype, there.device.type) == (torch.bfloat16, "meta")


def test_a_microbatch_ends_when_its_sums_have_arrived(monkeypatch):
    waits = []
    monkeypatch.setattr(fdp.gradients.clipped_sum, "wait_for_copies", waits.append)
    model, data = mlp(widths=(5, 4), classes=3), {"image": torch.randn(2, 5), "label": torch.tensor([0, 2])}
    params = model.init(keys.key(0))
    execution = make_execution(offload=Offload(grads=True))
    plan = make_plan(model, params, data)
    _, norms, stash = per_sample_norms(model, params, data, plan=plan, execution=execution)
    clipped_sum(stash, clip_to(norms, max_norm=1.0))
    assert waits == [CPU]
    plan = make_plan(model, params, data, method=Method.NONE)
    plain_sum(model, params, data, torch.ones(2), plan=plan, execution=execution, onto={})
    assert waits == [CPU, CPU]


@pytest.mark.gpu
def test_copies_from_a_busy_gpu_have_arrived_after_the_wait():
    cuda = torch.device("cuda", torch.cuda.current_device())
    busy = torch.randn(4096, 4096, device=cuda)
    total = to_cpu(torch.zeros(1 << 24, dtype=torch.float64, device=cuda))
    for k in range(1, 6):
        for _ in range(20):
            busy = torch.tanh(busy @ busy)
        add_on_device_(total, torch.full((1 << 24,), float(k), dtype=torch.float64, device=cuda))
    wait_for_copies(cuda)
    assert bool((total == 15).all())
    assert total.is_pinned()


@pytest.mark.gpu
@pytest.mark.parametrize("view", [lambda leaf: leaf, lambda leaf: leaf.t(), lambda leaf: leaf[1:3, ::2]])
def test_a_copy_from_a_gpu_is_pinned_and_equal(view):
    leaf = view(torch.randn(4, 6, device="cuda"))
    found = to_cpu(leaf)
    assert found.is_pinned()
    assert torch.equal(found, leaf.cpu())
