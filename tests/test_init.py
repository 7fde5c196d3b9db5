from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fdp import init, keys
from fdp.model import LeafSpec, Model

KEY = keys.key(3)
INITS = {
    "constant": init.constant(0.7),
    "normal": init.normal(0.02),
    "truncated_normal": init.truncated_normal(0.02),
    "uniform": init.uniform(0.3),
}


@given(data=st.data(), name=st.sampled_from(sorted(INITS)))
def test_any_window_equals_the_slice(data, name):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=0, max_size=3)))
    starts = [data.draw(st.integers(0, n)) for n in shape]
    window = tuple((start, data.draw(st.integers(0, n - start))) for start, n in zip(starts, shape))
    whole = INITS[name](KEY, shape, dtype=torch.float32)
    part = INITS[name](KEY, shape, dtype=torch.float32, window=window)
    assert torch.equal(part, whole[tuple(slice(start, start + length) for start, length in window)])


@pytest.mark.parametrize("name", INITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shape_and_dtype_are_what_was_asked_for(name, dtype):
    value = INITS[name](KEY, (3, 5), dtype=dtype)
    assert (tuple(value.shape), value.dtype) == ((3, 5), dtype)
    assert torch.isfinite(value).all()


def test_a_constant_fills_every_element():
    assert (init.constant(0.7)(KEY, (4, 3), dtype=torch.float64) == 0.7).all()


LAWS = {
    "normal": (init.normal(0.02), lambda scale: stats.norm(0, 0.02 * scale)),
    "truncated_normal": (init.truncated_normal(0.02), lambda scale: stats.truncnorm(-2, 2, 0, 0.02 * scale)),
    "uniform": (init.uniform(0.3), lambda scale: stats.uniform(-0.3 * scale, 0.6 * scale)),
}


@pytest.mark.parametrize("name", LAWS)
def test_values_follow_the_stated_law(name):
    drawn, law = LAWS[name]
    values = drawn(KEY, (64, 128), dtype=torch.float64).flatten().numpy()
    assert stats.kstest(values, law(1.0).cdf).pvalue > 1e-3
    for wrong in (2 / 3, 3 / 2):
        assert stats.kstest(values, law(wrong).cdf).pvalue < 1e-9


def test_truncation_is_at_two_standard_deviations():
    values = init.truncated_normal(0.02)(KEY, (100_000,), dtype=torch.float32)
    assert 0.0399 < values.abs().max() <= 0.04
    assert float(values.std()) == pytest.approx(0.02 * 0.8796, rel=0.01)  # the law's own, less than std


def test_leaves_depend_on_their_path_and_not_on_their_order():
    specs = {name: LeafSpec((4, 3), init.normal(1.0)) for name in ("a", "b", "c")}
    forward = Model("m", specs, ()).init(KEY)
    backward = Model("m", dict(reversed(specs.items())), ()).init(KEY)
    alone = Model("m", {"b": specs["b"]}, ()).init(KEY)
    assert all(torch.equal(forward[name], backward[name]) for name in specs)
    assert torch.equal(forward["b"], alone["b"])
    assert not torch.equal(forward["a"], forward["b"])
    assert not torch.equal(forward["b"], Model("m", specs, ()).init(keys.key(4))["b"])
