"""Tests of the in-place cross-entropy gradient: the kernel against the reference, the reference against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from fdp_kernels.cross_entropy import launch_softmax_gradient, softmax_gradient_, softmax_gradient_reference

from tests.conftest import randn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def problem(rows: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, targets (the second is ignored) and scales (the third is 0)."""
    draw = torch.Generator().manual_seed(0)
    logits = 5 * randn(rows, vocab).float()
    targets = torch.randint(0, vocab, (rows,), generator=draw)
    targets[1:2] = -100
    scales = torch.rand(rows, generator=draw)
    scales[2:3] = 0
    return logits.to(DEVICE), targets.to(DEVICE), scales.to(DEVICE)


def test_reference_is_the_gradient_of_cross_entropy() -> None:
    logits, targets, scales = problem(5, 11)
    leaf = logits.double().requires_grad_()
    losses = F.cross_entropy(leaf, targets, reduction="none")
    (gradient,) = torch.autograd.grad((losses * scales).sum(), leaf)
    wide = logits.double()
    torch.testing.assert_close(softmax_gradient_reference(wide, targets, scales, 1.0), losses.detach())
    torch.testing.assert_close(wide, gradient)


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 2), (5, 63), (4, 100), (7, 1033), (2, 9001)])
def test_kernel_equals_reference(rows: int, vocab: int) -> None:
    logits, targets, scales = problem(rows, vocab)
    for each, scale in ((scales, 1.0), (None, 0.25)):
        wide, got, again = logits.double(), logits.clone(), logits.clone()
        expected = softmax_gradient_reference(wide, targets, each, scale)
        losses = launch_softmax_gradient(got, targets, each, scale)
        torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=2e-6)
        torch.testing.assert_close(got.double(), wide, rtol=2e-6, atol=1e-6)
        assert torch.equal(launch_softmax_gradient(again, targets, each, scale), losses)
        assert torch.equal(again, got)


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_rows_may_begin_anywhere_and_neighbours_stay_unchanged(offset: int) -> None:
    """In a slice of a wider buffer every row begins at another offset within 16 bytes."""
    logits, targets, scales = problem(5, 37)
    buffer = torch.full((5, 41), 9.0, device=DEVICE)
    view = buffer[:, offset : offset + 37]
    view.copy_(logits)
    wide = logits.double()
    softmax_gradient_reference(wide, targets, scales, 1.0)
    launch_softmax_gradient(view, targets, scales, 1.0)
    torch.testing.assert_close(view.double(), wide, rtol=2e-6, atol=1e-6)
    outside = torch.cat([buffer[:, :offset], buffer[:, offset + 37 :]], 1)
    assert (outside == 9.0).all()


def test_extreme_logits() -> None:
    logits, targets, _ = problem(6, 45)
    targets = torch.tensor([3, 3, 3, -1, 3, 3], device=DEVICE)
    logits[0, 7:30] = -torch.inf
    logits[1] *= 1e4
    logits[2, 5] = torch.nan
    logits[3, 5] = torch.nan  # ignored
    wide, got = logits.double(), logits.clone()
    expected = softmax_gradient_reference(wide, targets, None, 1.0)
    losses = launch_softmax_gradient(got, targets, None, 1.0)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(got.double(), wide, rtol=2e-6, atol=1e-6, equal_nan=True)
    assert losses.isnan().tolist() == [False, False, True, False, False, False]
    assert not got[3].any()
    assert losses[3] == 0


def test_op() -> None:
    logits, targets, scales = problem(3, 9)
    op = torch.ops.fdp_kernels.softmax_gradient_
    torch.library.opcheck(op, (logits, targets, scales, 1.0))
    torch.library.opcheck(op, (logits, targets, None, 0.5))


def test_scale_is_a_number_or_a_tensor() -> None:
    logits, targets, scales = problem(3, 9)
    a, b = logits.clone(), logits.clone()
    softmax_gradient_(a, targets, 0.5)
    softmax_gradient_(b, targets, torch.full_like(scales, 0.5))
    assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("pitch", [50257, 50304])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_the_gpu(dtype: torch.dtype, pitch: int) -> None:
    draw = 4 * torch.randn(777, pitch, device=DEVICE)
    buffer = draw.to(dtype)
    start = buffer[:, :50257]
    targets = torch.randint(0, 50257, (777,), device=DEVICE)
    targets[5] = -100
    wide, logits = start.double(), buffer.clone()[:, :50257]
    expected = softmax_gradient_reference(wide, targets, None, 0.5)
    losses = softmax_gradient_(logits, targets, 0.5)
    torch.testing.assert_close(losses.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits.double(), wide, rtol=4.1e-3 if dtype == torch.bfloat16 else 1e-5, atol=1e-9)
    scratch = buffer.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = softmax_gradient_(scratch[:, :50257], targets, 0.5)
    scratch.copy_(buffer)
    graph.replay()
    assert torch.equal(again, losses)
    assert torch.equal(scratch[:, :50257], logits)
    assert torch.equal(scratch[:, 50257:], buffer[:, 50257:])
