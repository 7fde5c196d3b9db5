"""Poisson sampling: rates, independence, truncation, and batches that are functions of the key."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from fdp import keys
from fdp.privacy.sampling import Poisson, poisson, rounded_population, sample, sample_batch
from fdp.types import FdpError

KEY = keys.key(7)


def draws(sampling: Poisson, count: int) -> list[Tensor]:
    return [sample(sampling, keys.fold_in(KEY, step)) for step in range(count)]


def included(sampling: Poisson, count: int) -> Tensor:
    """Return a (draws, dataset) table of 0 and 1: which samples were drawn."""
    table = torch.zeros(count, sampling.dataset_size)
    for row, indices in zip(table, draws(sampling, count)):
        row[indices] = 1.0
    return table


def test_a_draw_is_a_function_of_sampling_and_key():
    sampling = poisson(1000, expected_batch_size=100)
    first, again = sample(sampling, KEY), sample(sampling, KEY)
    assert first.dtype == torch.int64
    assert torch.equal(first, again)
    assert not torch.equal(first, sample(sampling, keys.fold_in(KEY, 1)))


def test_the_rate_depends_on_the_population_not_on_the_number_of_samples():
    """Neighbours have the same rate: by default the number of samples is rounded up."""
    assert poisson(48_211, expected_batch_size=98).rate == poisson(48_212, expected_batch_size=98).rate == 98 / 49_000
    assert poisson(48_211, expected_batch_size=98, population=50_000).rate == 98 / 50_000
    few, more = (poisson(size, expected_batch_size=200, population=1000) for size in (900, 901))
    for step in range(20):
        key = keys.fold_in(KEY, step)
        drawn = sample(more, key)
        assert torch.equal(sample(few, key), drawn[drawn < 900])
    table = included(poisson(400, expected_batch_size=100, population=1000), 500)
    assert stats.binomtest(int(table.sum()), 400 * 500, 0.1).pvalue > 1e-5


@given(size=st.integers(1, 10**9))
def test_the_rounded_number_is_at_least_the_samples_and_shared_by_ten(size):
    rounded = rounded_population(size)
    assert size <= rounded <= max(1.1 * size, size + 9)
    assert rounded % 10 == 0
    assert len(str(rounded).rstrip("0")) <= 2
    assert all(rounded_population(other) == rounded for other in range(rounded - 9, rounded + 1))


def test_an_index_is_drawn_whatever_the_size_of_the_data():
    # (key, i) alone decides: a larger dataset at the same rate has the same draw on the common part.
    small = sample(poisson(500, expected_batch_size=50), KEY)
    large = sample(poisson(1000, expected_batch_size=100), KEY)
    assert torch.equal(small, large[large < 500])


@given(size=st.integers(1, 300), part=st.floats(0.01, 1.0), seed=st.integers(0, 2**30))
def test_indices_ascend_without_repeats_within_the_data(size, part, seed):
    indices = sample(poisson(size, expected_batch_size=size * part, population=size), keys.key(seed))
    assert (indices[1:] > indices[:-1]).all()
    assert len(indices) == 0 or (indices[0] >= 0 and indices[-1] < size)


@pytest.mark.parametrize("rate", [0.002, 0.05, 0.5, 0.97])
def test_every_index_is_drawn_with_probability_rate(rate):
    size, count = 400, 800
    table = included(poisson(size, expected_batch_size=rate * size), count)
    total = int(table.sum())
    assert stats.binomtest(total, size * count, rate).pvalue > 1e-5
    # each index on its own: the counts are binomial, so their p-values are not too small for 400 of them
    each = stats.binom.sf(table.sum(0).numpy() - 1, count, rate)
    assert each.min() > 1e-7
    # batch sizes have the binomial variance, which fixed-size or shuffled batches have not
    sizes = table.sum(1).numpy()
    chi2 = sizes.var(ddof=1) * (count - 1) / (size * rate * (1 - rate))
    assert 1e-5 < stats.chi2.cdf(chi2, count - 1) < 1 - 1e-5


def test_indices_are_drawn_independently():
    table = included(poisson(40, expected_batch_size=12), 2000)
    correlation = torch.corrcoef(table.T)
    off = correlation[~torch.eye(40, dtype=torch.bool)]
    assert off.abs().max() < 5.5 / 2000**0.5
    steps = table[1:].flatten() - 0.3
    before = table[:-1].flatten() - 0.3
    assert abs(float((steps * before).mean()) / 0.21) < 5 / (40 * 1999) ** 0.5


def test_the_rate_is_exact_to_64_bits(monkeypatch):
    last_in, first_out = -(2**63) + 2**62 - 1, -(2**63) + 2**62  # the boundary of q = 1/4, as signed numbers
    monkeypatch.setattr(keys, "bits", lambda key, shape: torch.tensor([-(2**63), last_in, first_out, 2**63 - 1]))
    assert sample(poisson(4, population=4, expected_batch_size=1), KEY).tolist() == [0, 1]
    assert sample(poisson(4, population=4, expected_batch_size=4), KEY).tolist() == [0, 1, 2, 3]
    assert sample(poisson(4, population=4, expected_batch_size=4 * 2.0**-64), KEY).tolist() == [0]
    assert sample(poisson(4, population=4, expected_batch_size=4 * 2.0**-65), KEY).tolist() == []


def test_all_samples_at_rate_one_and_few_at_tiny_rates():
    assert torch.equal(sample(poisson(50, expected_batch_size=50), KEY), torch.arange(50))
    assert len(sample(poisson(50, expected_batch_size=1e-9), KEY)) == 0


def test_truncation_keeps_a_subset_of_the_draw_of_at_most_that_size():
    whole = poisson(200, expected_batch_size=20)
    for most in (1, 15, 20, 200):
        for full, cut in zip(draws(whole, 40), draws(whole._replace(max_batch_size=most), 40)):
            assert len(cut) == min(len(full), most)
            assert set(cut.tolist()) <= set(full.tolist())
            assert (cut[1:] > cut[:-1]).all()


def test_every_subset_of_a_truncated_draw_is_equally_likely():
    pairs: dict[tuple[int, ...], int] = {}
    for indices in draws(poisson(5, population=5, expected_batch_size=5, max_batch_size=2), 2000):
        pairs[tuple(indices.tolist())] = pairs.get(tuple(indices.tolist()), 0) + 1
    assert len(pairs) == 10
    assert stats.chisquare(list(pairs.values())).pvalue > 1e-5


def test_sample_batch_draws_pads_and_fetches():
    data = {"x": torch.randn(100, 3), "y": torch.arange(100)}
    sampling = poisson(100, expected_batch_size=20)
    batch = sample_batch(data, sampling, KEY, step=3, microbatch_size=8)
    drawn = sample(sampling, keys.step_key(KEY, f"sample training {tuple(sampling)}", 3))
    assert torch.equal(batch.data["y"][batch.mask > 0], drawn)
    assert torch.equal(batch.data["x"][batch.mask > 0], data["x"][drawn])
    assert batch.data["x"].shape == (*batch.mask.shape, 3)
    empty = sample_batch(data, poisson(100, expected_batch_size=1e-6), KEY, step=0, microbatch_size=8)
    assert empty.mask.tolist() == [[0.0] * 8]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: poisson(0, expected_batch_size=1), "dataset_size"),
        (lambda: poisson(-5, expected_batch_size=1), "dataset_size"),
        (lambda: poisson(10.5, expected_batch_size=1), "dataset_size"),  # pyright: ignore
        (lambda: poisson(10, expected_batch_size=0), "above 0"),
        (lambda: poisson(10, expected_batch_size=-1), "above 0"),
        (lambda: poisson(10, expected_batch_size=float("nan")), "finite"),
        (lambda: poisson(10, expected_batch_size=11), "above 1"),
        (lambda: poisson(10, expected_batch_size=5, max_batch_size=0), "max_batch_size"),
        (lambda: sample(Poisson(10, 20.0, 10), KEY), "batch larger than the data"),
        (
            lambda: sample_batch(torch.zeros(9), poisson(10, expected_batch_size=2), KEY, step=0, microbatch_size=2),
            "expected the 9 samples",
        ),
        (lambda: poisson(10, expected_batch_size=5, population=0), "population: expected a whole"),
        (lambda: poisson(10, expected_batch_size=5, population=4), "above 1"),
        (lambda: poisson(10, expected_batch_size=5, population=9, max_batch_size=7), "truncated more often"),
    ],
)
def test_bad_input_is_an_error_that_says_what_to_do(call, words):
    with pytest.raises(FdpError, match=words):
        call()


def test_a_million_samples_take_well_under_a_second():
    sampling = poisson(1_000_000, expected_batch_size=1000)
    start = time.process_time()
    drawn = sample(sampling, KEY)
    assert time.process_time() - start < 1.0
    assert 800 < len(drawn) < 1200
