"""Tests of the TF32 product: the plain product on a CPU, close to it on a GPU."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from fdp_kernels.rounded_product import _library_product, pad_to_alignment, rounded_product, rounded_product_reference
from torch import Tensor

SHAPES = [(5, 8, 12), (7, 9, 5), (3, 1025, 17), (0, 4, 4), (4, 0, 3)]


def pair(rows: int, depth: int, columns: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows + depth + columns)
    return torch.randn(rows, depth, generator=draw).to(dtype), torch.randn(depth, columns, generator=draw).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_cpu_returns_the_plain_product(shape):
    a, b = pair(*shape)
    assert torch.equal(rounded_product(a, b), a @ b)
    torch.library.opcheck(rounded_product, (a, b), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if min(shape)])
def test_padding_does_not_change_the_product(shape):
    a, b = pair(*shape, dtype=torch.float64)
    wide, tall = pad_to_alignment(a, rows=1), pad_to_alignment(b)
    assert wide.shape[1] == tall.shape[0]
    assert not any(extent % 4 for extent in (wide.shape[1], *tall.shape))
    torch.testing.assert_close((wide @ tall)[:, : shape[2]], a @ b)
    assert pad_to_alignment(b.mT, rows=1).is_contiguous()


MATMUL = torch.backends.cuda.matmul
CHOICES = {  # how a precision is chosen, and what the product is then made with
    "none": (lambda: None, "tf32"),
    "medium": (lambda: torch.set_float32_matmul_precision("medium"), "tf32"),
    "older": (lambda: setattr(MATMUL, "allow_tf32", False), "ieee"),
    "newer": (lambda: setattr(MATMUL, "fp32_precision", "ieee"), "ieee"),
    "everywhere": (lambda: setattr(torch.backends, "fp32_precision", "tf32"), "tf32"),
}


def settings() -> list[object]:
    found: list[object] = []
    for ask in (lambda: MATMUL.allow_tf32, lambda: MATMUL.fp32_precision, torch.get_float32_matmul_precision):
        try:
            found.append(ask())
        except RuntimeError:  # older and newer settings do not agree
            found.append(None)
    return found


@pytest.fixture
def restore_settings():
    yield
    torch.set_float32_matmul_precision("highest")
    backends: Any = torch.backends
    for setting in (backends, backends.cuda.matmul, backends.mkldnn.matmul):
        setting.fp32_precision = "none"


@pytest.mark.parametrize("choice", CHOICES)
def test_a_chosen_precision_is_kept_and_settings_are_restored(choice, restore_settings):
    choose, expected = CHOICES[choice]
    choose()
    before, inside = settings(), []

    class Left:
        def __matmul__(self, other: object) -> None:
            inside.append(MATMUL.fp32_precision)

    _library_product(cast(Tensor, Left()), cast(Tensor, None))
    assert inside == [expected]
    assert settings() == before


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 1025, 1025), (1000, 1024, 1024), (33, 7, 5)])
@pytest.mark.parametrize("transposed", [False, True])
def test_gpu_rounds_to_eleven_bits_and_restores_the_setting(shape, transposed):
    a, b = (x.cuda() for x in pair(*shape))
    a = a.mT.contiguous().mT if transposed else a
    before = torch.backends.cuda.matmul.allow_tf32
    got = rounded_product(pad_to_alignment(a, rows=1), pad_to_alignment(b))[:, : shape[2]]
    assert torch.backends.cuda.matmul.allow_tf32 == before
    want = rounded_product_reference(a.double(), b.double())
    bound = 2.0**-10 * (a.double().square().sum(1, keepdim=True) * b.double().square().sum(0)).sqrt()
    assert bool(((got.double() - want).abs() <= bound).all())
    torch.testing.assert_close(rounded_product(a.double(), b.double()), want)
