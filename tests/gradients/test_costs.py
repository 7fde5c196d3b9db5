"""The table of fdp.gradients.costs, worked out by hand for a device that is easy to reckon with."""

from __future__ import annotations

import pytest
import torch

import fdp.gradients.costs
from fdp.gradients.costs import (
    CUDA_HALF,
    CUDA_WIDE,
    Choice,
    NormBy,
    Rates,
    SumBy,
    candidates,
    rates_of,
    second_backward,
    sizes,
)
from fdp.gradients.tape import EXPANDED, Use

RATES = Rates(matrix=1e12, wide=1e11, bandwidth=1e10, kernels=True)
B, T, P, D = 2, 256, 300, 500
W = 153_600_000  # 2 B T P D
LINEAR = Use("w#0", "w", "linear", (B, T, D), (B, T, P), (P, D))
EMBEDDING = Use("e#0", "e", "embedding", (B, T), (B, T, D), (P, D))
BIAS = Use("b", "b", EXPANDED, (B, P), (B, P), (P,))
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the measured constants of kernels at their values when these sums were done."""
    monkeypatch.setattr(fdp.gradients.costs, "KERNEL_EFFICIENCY", 0.8)
    monkeypatch.setattr(fdp.gradients.costs, "TILE_TOKENS", 128)


def seconds(choices: dict[NormBy, Choice]) -> dict[NormBy, float]:
    return {by: choice.seconds for by, choice in choices.items()}


def test_a_linear_layer_in_half_precision_on_a_gpu():
    choices = candidates([LINEAR], dtype=BF16, rates=RATES)
    assert seconds(choices) == pytest.approx(
        {
            NormBy.KEEP: 1.536e-4 + 1.2e-4,  # W; B P D of two bytes written and read
            NormBy.DIRECT: 2 * 1.92e-4,  # W twice by kernels
            NormBy.GRAM: 1.92e-4 + 2.097152e-4 + 2.097152e-4,  # W; two Gram matrices; in float32, written and read
            NormBy.SYMMETRIC: 1.92e-4 + 1.96608e-4,  # W; B T (T + 128) (P + D), by kernels
        }
    )
    pairs = 819_200  # B T (P + D) of two bytes
    assert {by: choice.stored_bytes for by, choice in choices.items()} == {
        NormBy.KEEP: 600_000, NormBy.DIRECT: pairs, NormBy.GRAM: pairs, NormBy.SYMMETRIC: pairs,
    }  # fmt: skip
    assert {by: choice.sum for by, choice in choices.items()} == {
        NormBy.KEEP: SumBy.REUSE, NormBy.DIRECT: SumBy.PAIR, NormBy.GRAM: SumBy.PAIR, NormBy.SYMMETRIC: SumBy.PAIR,
    }  # fmt: skip
    assert all(by is choice.norm for by, choice in choices.items())


def test_without_kernels_products_that_bear_on_privacy_are_in_float64():
    choices = candidates([LINEAR], dtype=torch.float32, rates=RATES._replace(kernels=False, stored=B * P * D))
    assert seconds(choices) == pytest.approx(
        {
            NormBy.KEEP: 1.536e-4 + 2.4e-4,
            NormBy.DIRECT: 2 * (1.536e-4 + 2.4e-4) + 1.2e-4,  # W; B P D formed in float64
            NormBy.GRAM: 1.536e-4 + 2.4e-4 + 2.097152e-3,
            NormBy.SYMMETRIC: 1.536e-4 + 2.4e-4 + 2.097152e-3,
        }
    )


def test_without_kernels_the_gradients_of_single_tokens_are_not_formed():
    single = Use("w#0", "w", "linear", (B, D), (B, P), (P, D))
    choices = candidates([single], dtype=torch.float32, rates=RATES._replace(kernels=False, stored=B * P * D))
    assert choices[NormBy.GRAM].seconds == pytest.approx(2 * B * P * D / 1e12 + 2 * B * (P + D) / 1e11)


def test_an_embedding_moves_its_output_gradients():
    choices = candidates([EMBEDDING], dtype=BF16, rates=RATES)
    pairs = 516_096  # B T (2 D + 8)
    assert choices[NormBy.DIRECT].stored_bytes == pairs
    moved = (2 * pairs + 600_000) / 1e10  # twice the pairs, and the table in float32
    assert choices[NormBy.DIRECT].seconds == choices[NormBy.SYMMETRIC].seconds == pytest.approx(moved)
    assert choices[NormBy.SYMMETRIC].norm is NormBy.SYMMETRIC


def test_small_parameters_have_one_option():
    (choice,) = candidates([BIAS], dtype=BF16, rates=RATES).values()
    assert choice[:2] == (NormBy.KEEP, SumBy.REUSE)
    assert choice.stored_bytes == B * P * 2
    twice = candidates([BIAS, LINEAR], dtype=BF16, rates=RATES)
    assert len(twice) == 4


def test_uses_by_kernels_share_one_closed_form():
    """Two linear uses are one with twice the tokens; an embedding adds a product of tokens with tokens."""
    twice = LINEAR._replace(input_shape=(B, 2 * T, D), output_shape=(B, 2 * T, P))
    both = candidates([LINEAR, LINEAR._replace(name="w#1")], dtype=BF16, rates=RATES)
    one = candidates([twice], dtype=BF16, rates=RATES)[NormBy.SYMMETRIC]
    assert both[NormBy.SYMMETRIC].stored_bytes == one.stored_bytes
    moved = 4 * P * D / RATES.bandwidth
    assert both[NormBy.SYMMETRIC].seconds == pytest.approx(one.seconds + moved)
    assert {by: of.seconds for by, of in both.items() if by is not NormBy.KEEP} == dict.fromkeys(
        (NormBy.DIRECT, NormBy.GRAM, NormBy.SYMMETRIC), both[NormBy.SYMMETRIC].seconds
    )
    tied = candidates([LINEAR, EMBEDDING], dtype=BF16, rates=RATES)[NormBy.SYMMETRIC]
    alone = candidates([LINEAR], dtype=BF16, rates=RATES)[NormBy.SYMMETRIC]
    assert tied.seconds > alone.seconds
    assert tied.stored_bytes == alone.stored_bytes + B * T * (2 * D + 8)


def test_kernels_keep_an_embedding_beside_its_stored_head():
    kept = candidates([LINEAR, EMBEDDING], dtype=BF16, rates=RATES)[NormBy.KEEP]
    pairs = 516_096  # B T (2 D + 8)
    assert kept.stored_bytes == 600_000 + pairs
    # W; B P D of two bytes written and read twice; the rows three times; P D of four bytes written and read
    assert kept.seconds == pytest.approx(1.536e-4 + 1.8e-4 + 3 * pairs / RATES.bandwidth + 1.2e-4)
    without = candidates([LINEAR, EMBEDDING], dtype=torch.float32, rates=RATES._replace(kernels=False))[NormBy.KEEP]
    assert without.stored_bytes == 1_200_000


def test_other_uses_of_one_leaf_are_not_left_to_kernels():
    """Cross terms of other rules are computed in float64, so several uses cost as much as without kernels."""
    both = [LINEAR, LINEAR._replace(name="w#1", rule="matmul")]
    assert seconds(candidates(both, dtype=BF16, rates=RATES)) == pytest.approx(
        seconds(candidates(both, dtype=BF16, rates=RATES._replace(kernels=False)))
    )


def test_a_second_backward_stores_nothing_and_recomputes_the_pairs():
    ways = candidates([LINEAR], dtype=BF16, rates=RATES)
    kept = second_backward(ways[NormBy.KEEP], [LINEAR], rates=RATES)
    assert kept[:2] == (NormBy.DIRECT, SumBy.SECOND_BACKWARD)
    assert kept.stored_bytes == 0
    ghost = second_backward(ways[NormBy.GRAM], [LINEAR], rates=RATES)
    assert ghost.norm is NormBy.GRAM
    assert ghost.seconds == pytest.approx(ways[NormBy.GRAM].seconds + 2 * W / 1e12)


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (LINEAR, (B, T, P, D)),
        (EMBEDDING, (B, T, P, D)),
        (BIAS, (B, 1, P, 1)),
        (Use("s", "s", EXPANDED, (4,), (4,), ()), (4, 1, 1, 1)),
        (Use("c#0", "c", "conv2d", (3, 4, 8, 8), (3, 6, 8, 8), (6, 4, 3, 3)), (3, 64, 6, 36)),
        (Use("w#0", "w", "linear", (5, 3), (5, 2), (2, 3)), (5, 1, 2, 3)),
    ],
)
def test_sizes(use, expected):
    assert sizes(use) == expected


def test_rates():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert rates_of(cuda, torch.bfloat16) is rates_of(cuda, torch.float16) is CUDA_HALF
    assert rates_of(cuda, torch.float32) is CUDA_WIDE
    assert CUDA_HALF.kernels
    assert not CUDA_WIDE.kernels
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        rates = rates_of(cpu, dtype)
        assert not rates.kernels
        assert 32 * rates.bandwidth / dtype.itemsize == pytest.approx(rates.matrix)
        assert rates.wide == rates.matrix / (1 if dtype == torch.float64 else 2)


def test_the_price_is_the_measured_time_if_there_is_one():
    choice = Choice(NormBy.KEEP, SumBy.REUSE, 2.0, 0.0)
    assert choice.price == 2.0
    assert choice._replace(measured=0.5).price == 0.5
    assert choice._replace(measured=0.0).price == 0.0
