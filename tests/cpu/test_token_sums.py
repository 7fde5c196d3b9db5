from __future__ import annotations

import pytest
import torch

from fdp.cpu import token_sums
from tests.conftest import randn


@pytest.mark.parametrize("on_arm", [True, False], ids=["ARM", "x86"])
@pytest.mark.parametrize("shape", [(3, 130, 300), (3, 130, 8), (1, 1, 256), (3, 0, 300), (0, 5, 300), (2, 4, 5, 300)])
def test_a_sum_over_tokens_is_torchs_up_to_rounding_and_no_sample_touches_another(shape, on_arm, monkeypatch):
    monkeypatch.setattr(token_sums, "ON_ARM", on_arm)
    x, dims = randn(*shape).float(), tuple(range(1, len(shape) - 1))
    total = token_sums.sum_over_tokens(x, dims)
    torch.testing.assert_close(total.double(), x.double().sum(dims), rtol=1e-5, atol=1e-4)
    if x.numel():
        x[0, 0, ..., 0] = torch.nan
        spoilt = token_sums.sum_over_tokens(x, dims)
        assert spoilt[0, 0].isnan()
        assert torch.equal(spoilt[1:], total[1:])
        assert torch.equal(token_sums.sum_over_tokens(x[-1:], dims), spoilt[-1:]) or len(x) == 1
    assert token_sums.sum_over_tokens(x.double(), dims).dtype == torch.float64


def test_a_sum_over_one_of_two_dimensions_of_tokens_is_torchs(monkeypatch):
    monkeypatch.setattr(token_sums, "ON_ARM", True)
    x = randn(2, 3, 4, 300).float()
    assert torch.equal(token_sums.sum_over_tokens(x, (1,)), x.sum(1))  # a bias for every token


def test_a_sum_over_tokens_can_be_compiled():
    x = randn(3, 130, 300).float()
    compiled = torch.compile(token_sums.sum_over_tokens, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, (1,)), x.sum(1))


def test_under_autocast_sums_are_torchs(monkeypatch):
    monkeypatch.setattr(token_sums, "ON_ARM", True)
    x = torch.randn(2, 200, 300)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(token_sums.sum_over_tokens(x, (1,)), x.sum(1))
