"""Keys: reproducible, domain-separated, the same bits for any window, thread count or compiler."""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import pytest
import torch
from fdp_kernels import chacha20
from fdp_kernels.normal import TAIL_PURPOSE
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.fx.experimental.proxy_tensor import make_fx

from fdp import keys
from fdp.types import FdpError

ROOT = keys.key(0)
N = 20_000


def as_set(*parts: torch.Tensor) -> set[int]:
    return set(torch.cat([part.reshape(-1) for part in parts]).tolist())


def words_of(key: torch.Tensor) -> tuple[int, ...]:
    return tuple(key.tolist())


# ---------------------------------------------------------------- keys


def test_a_key_without_a_seed_is_unpredictable():
    assert len({words_of(keys.key()) for _ in range(50)}) == 50


def test_a_key_is_a_function_of_the_seed():
    seeds = [0, 1, 255, 256, 1 << 32, 1 << 63, 1 << 64, (1 << 64) + 1, 10**80]
    assert len({words_of(keys.key(seed)) for seed in seeds}) == len(seeds)
    for seed in seeds:
        key = keys.key(seed)
        assert torch.equal(key, keys.key(seed))
        assert (key.dtype, key.shape) == (torch.int64, (8,))
        assert ((key >= 0) & (key < 1 << 32)).all()


def test_streams_do_not_change_between_versions():
    digest = hashlib.sha256(b"fdp.keys.key seed 0").digest()
    assert words_of(ROOT) == struct.unpack("<8I", digest)

    def child(*nonce: int) -> torch.Tensor:
        return chacha20.keystream_reference(ROOT, torch.tensor(nonce), 0, 1)

    path = struct.unpack("<3I", hashlib.sha256(b"blocks.0.qkv").digest()[:12])
    assert torch.equal(keys.split(ROOT, 2).reshape(-1), child(1, 0, 0))
    assert torch.equal(keys.fold_in(ROOT, 5 + (7 << 32)), child(2, 5, 7)[:8])
    assert torch.equal(keys.fold_in(ROOT, "blocks.0.qkv"), child(path[0] & ~0xFF | 3, *path[1:])[:8])
    low, high = child(0, 0, 0).view(8, 2).T
    assert torch.equal(keys.bits(ROOT, (8,)), low | high << 32)
    signed = (keys.bits(ROOT, (2,)).double() + 0.5) / 2.0**64
    cut = keys.truncated_normal(ROOT, (2,), lower=-50, upper=50, dtype=torch.float64)
    assert torch.allclose(cut, torch.special.ndtri(signed.abs()).copysign(signed), rtol=1e-12, atol=0)
    words = child(0, 0, 0)
    tail, sign = (words & 0x7FFFFFFF).double(), 1 - 2 * (words >> 31)
    assert torch.equal(keys.normal(ROOT, (16,)), (-sign * torch.special.ndtri((tail + 0.5) / 2.0**32)).float())
    golden = [-0.6154462, -0.7984508, -0.4057299, 0.3106435]
    assert torch.allclose(keys.normal(ROOT, (4,)), torch.tensor(golden), rtol=1e-5)


def test_a_number_folds_in_as_an_int_or_as_a_tensor():
    for data in (0, 1, 1 << 31, 1 << 32, (1 << 63) - 1):
        assert torch.equal(keys.fold_in(ROOT, data), keys.fold_in(ROOT, torch.tensor(data)))
    assert torch.equal(keys.fold_in(ROOT, 3), keys.fold_in(ROOT, torch.tensor(3, dtype=torch.int32)))


def test_a_key_that_is_read_at_once_has_the_children_of_one_that_is_traced(monkeypatch):
    every = [0, 7, 1 << 31, (1 << 32) + 5, (1 << 63) - 1, torch.tensor(1 << 40), torch.tensor(-3), "", "blocks.0.qkv"]
    at_once = [keys.fold_in(ROOT, data) for data in every]
    compiled = torch.compile(lambda key, step: keys.fold_in(key, step), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(ROOT, torch.tensor(1 << 40)), at_once[5])
    assert torch.equal(keys.fold_in(ROOT, torch.tensor(7, dtype=torch.uint64)), at_once[1])
    assert keys.fold_in(ROOT, torch.tensor((1 << 64) - 3, dtype=torch.uint64)).equal(at_once[6])
    with torch.device("meta"):
        assert all(torch.equal(keys.fold_in(ROOT, data), child) for child, data in zip(at_once, every))
    monkeypatch.setattr(keys, "are_plain", lambda tensors: False)
    assert all(torch.equal(child, keys.fold_in(ROOT, data)) for child, data in zip(at_once, every))


@pytest.mark.parametrize("library", ["compiled loops", "none"])
@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_a_traced_program_draws_for_the_key_that_it_is_given(pre_dispatch, library, monkeypatch):
    if library == "none":
        monkeypatch.setattr("fdp_kernels.cpu_library.library", lambda: None)

    def draw(key):
        return keys.normal(keys.fold_in(keys.fold_in(key, 5), "w"), (3,), dtype=torch.float64)

    program = make_fx(draw, pre_dispatch=pre_dispatch)(ROOT)
    for key in (ROOT, keys.key(1), keys.key(2)):
        assert torch.equal(program(key), draw(key))


def test_no_stream_serves_two_purposes():
    numbers = [keys.fold_in(ROOT, i) for i in [*range(200), 1 << 32, 2 << 32, 1 << 62]]
    paths = [keys.fold_in(ROOT, path) for path in ["", "0", "1", "a", "a.b", "blocks.0.qkv", "blocks.1.qkv"]]
    drawn = keys.bits(ROOT, (400,))
    halves = torch.stack([drawn & 0xFFFFFFFF, drawn >> 32 & 0xFFFFFFFF], dim=1).view(-1, 8)
    every = [*numbers, *paths, *keys.split(ROOT, 100), *halves, ROOT]
    assert len({words_of(key) for key in every}) == len(every)


def test_purposes_have_their_own_nonces():
    purposes = {0, keys._SPLIT, keys._FOLD_INT, keys._FOLD_STR, TAIL_PURPOSE}
    assert len(purposes) == 5
    assert {keys._path_words(f"blocks.{i}")[0] & 0xFF for i in range(300)} == {keys._FOLD_STR}


@pytest.mark.parametrize("paths", [[], ["a"], ["", "blocks.0.qkv", "blocks.1.qkv", "a.b"]])
def test_many_paths_fold_in_at_once_as_one_by_one(paths):
    children = keys.fold_in_nonces(ROOT, keys.path_nonces(paths))
    assert children.shape == (len(paths), 8)
    assert all(torch.equal(child, keys.fold_in(ROOT, path)) for child, path in zip(children, paths))


@pytest.mark.gpu
def test_many_paths_fold_in_at_once_on_a_gpu():
    paths = [f"blocks.{i}.weight" for i in range(100)]
    children = keys.fold_in_nonces(ROOT.cuda(), keys.path_nonces(paths, "cuda"))
    assert torch.equal(children.cpu(), keys.fold_in_nonces(ROOT, keys.path_nonces(paths)))
    assert torch.equal(children[7], keys.fold_in(ROOT.cuda(), paths[7]))


def test_every_bit_of_the_key_and_of_the_data_matters():
    child = keys.fold_in(ROOT, 0)
    for word in range(8):
        for bit in (0, 31):
            other = ROOT.clone()
            other[word] ^= 1 << bit
            assert not torch.equal(keys.fold_in(other, 0), child)
            assert not torch.equal(keys.bits(other, (4,)), keys.bits(ROOT, (4,)))
    assert len({words_of(keys.fold_in(ROOT, 1 << bit)) for bit in range(63)}) == 63


def test_split_gives_n_keys_and_its_prefix_is_stable():
    for n in (0, 1, 2, 3, 17):
        children = keys.split(ROOT, n)
        assert children.shape == (n, 8)
        assert len({words_of(child) for child in children}) == n
    assert torch.equal(keys.split(ROOT, 3), keys.split(ROOT, 8)[:3])


def test_no_value_repeats_across_elements_leaves_and_steps():
    steps = [keys.fold_in(ROOT, step) for step in range(4)]
    leaves = [keys.fold_in(step, f"blocks.{i}.weight") for step in steps for i in range(4)]
    assert len(as_set(*[keys.bits(leaf, (1000,)) for leaf in leaves])) == 16_000


# ---------------------------------------------------------------- laws


def close(values: torch.Tensor, cdf) -> float:
    return stats.kstest(values.double().numpy(), cdf).pvalue


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_passes_kolmogorov_smirnov_and_a_wrong_sigma_fails(dtype):
    x = keys.normal(ROOT, (N,), dtype=dtype)
    assert x.dtype == dtype
    assert close(x, stats.norm.cdf) > 0.01
    assert close(x * 2 / 3, stats.norm.cdf) < 1e-12
    assert close(x * 3 / 2, stats.norm.cdf) < 1e-12


def test_normal_has_the_moments_of_the_normal_law():
    n = 1_000_000
    x = keys.normal(keys.key(1), (n,), dtype=torch.float64)
    for power, want, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((x**power).mean()) - want) < 4 * math.sqrt(variance / n)
    for lag in (1, 2, 7, 8, 15, 16, 64):  # neighbours share a ChaCha20 block
        assert abs(float((x[lag:] * x[:-lag]).mean())) < 4 / math.sqrt(n)


def test_normal_has_the_tails_of_the_normal_law():
    n = 1 << 22
    x = keys.normal(keys.key(2), (n,), dtype=torch.float64)
    assert abs(int((x > 0).sum()) - n / 2) < 4 * math.sqrt(n) / 2
    seam = -stats.norm.ppf(2.0**-16)  # beyond it, 32 more bits
    for beyond in (3.0, 4.0, seam):
        expected = 2 * n * stats.norm.sf(beyond)
        assert abs(int((x.abs() > beyond).sum()) - expected) < 4 * math.sqrt(expected)
    far = x[x.abs() > float(seam)]
    assert stats.kstest(stats.norm.sf(far.abs().numpy()) * 2**16, stats.uniform.cdf).pvalue > 0.01
    assert len(far.unique()) == len(far) > 80


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_passes_kolmogorov_smirnov(dtype):
    x = keys.uniform(ROOT, (N,), dtype=dtype)
    assert close(x, stats.uniform.cdf) > 0.01
    assert close(x * 0.97, stats.uniform.cdf) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_is_never_one(dtype, monkeypatch):
    edges = torch.tensor([-1, 0, (1 << 63) - 1, -(1 << 63)])  # all ones, all zeros, just below and at the middle
    monkeypatch.setattr(keys, "bits", lambda key, shape, *, window=None: edges)
    x = keys.uniform(ROOT, (4,), dtype=dtype)
    assert x[0] == 1 - torch.finfo(dtype).eps / 2
    assert x[0] < 1
    assert (x[1], x[3]) == (0, 0.5)
    assert x[2] == 0.5 - torch.finfo(dtype).eps / 2


@pytest.mark.parametrize(("lower", "upper"), [(-2.0, 2.0), (-1.0, 3.0), (0.5, 1.5), (4.0, math.inf)])
def test_truncated_normal_passes_kolmogorov_smirnov(lower, upper):
    x = keys.truncated_normal(ROOT, (N,), lower=lower, upper=upper)
    assert lower <= x.min()
    assert x.max() <= upper
    assert close(x, stats.truncnorm(lower, upper).cdf) > 0.01
    assert close(0.9 * x, stats.truncnorm(lower, upper).cdf) < 1e-6


# ---------------------------------------------------------------- windows


@st.composite
def windows(draw):
    shape = draw(st.lists(st.integers(1, 17), min_size=0, max_size=3))
    starts = [draw(st.integers(0, extent)) for extent in shape]
    return shape, [(start, draw(st.integers(0, extent - start))) for start, extent in zip(starts, shape)]


DRAWS = [keys.bits, keys.uniform, keys.normal, keys.truncated_normal]


@pytest.mark.parametrize("draw", DRAWS)
@settings(deadline=None, max_examples=40)
@given(case=windows())
def test_a_window_is_bitwise_the_slice_of_the_full_draw(draw, case):
    shape, window = case
    whole = draw(ROOT, shape)
    assert whole.shape == tuple(shape)
    part = draw(ROOT, shape, window=window)
    assert torch.equal(part, whole[tuple(slice(start, start + length) for start, length in window)])
    assert part.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_along_any_dim_join_to_the_full_draw(dtype):
    shape = (520, 1030)  # more than one piece, rows that do not end on a block
    whole = keys.normal(ROOT, shape, dtype=dtype)
    rows = [keys.normal(ROOT, shape, dtype=dtype, window=((i * 130, 130), (0, 1030))) for i in range(4)]
    columns = [keys.normal(ROOT, shape, dtype=dtype, window=((0, 520), (i * 206, 206))) for i in range(5)]
    assert torch.equal(torch.cat(rows), whole)
    assert torch.equal(torch.cat(columns, 1), whole)


def test_a_window_of_a_huge_tensor_costs_only_itself():
    side = 1 << 17  # the whole draw would be 128 GB
    part = keys.bits(ROOT, (side, side), window=((side - 3, 3), (70_001, 5)))
    flat = [keys.bits(ROOT, (side * side,), window=(((side - 3 + i) * side + 70_001, 5),)) for i in range(3)]
    assert torch.equal(part, torch.stack(flat))


# ---------------------------------------------------------------- threads and compilers


def test_same_bits_with_one_and_two_threads():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = [draw(ROOT, (300_007,)) for draw in DRAWS]
        torch.set_num_threads(2)
        two = [draw(ROOT, (300_007,)) for draw in DRAWS]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(one, two))


def draw_everything(key: torch.Tensor, step: torch.Tensor) -> list[torch.Tensor]:
    leaf = keys.fold_in(keys.fold_in(key, step), "blocks.0.qkv")
    first, second = keys.split(keys.fold_in(leaf, 3), 2)
    out = [keys.bits(first, (7, 11)), keys.split(leaf, 3)]
    for draw in (keys.uniform, keys.normal, keys.truncated_normal):
        out += [draw(second, (37, 19), dtype=dtype) for dtype in (torch.float32, torch.float64)]
    return out + [2 * keys.normal(first, (37, 19), dtype=torch.bfloat16, window=((3, 20), (5, 9)))]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager_bitwise_for_a_traced_key_and_step(backend):
    compiled = torch.compile(draw_everything, fullgraph=True, backend=backend)
    compiled(keys.key(9), torch.tensor(0))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed in (0, 1):
            got = compiled(keys.key(seed), torch.tensor(seed + 5))
            want = draw_everything(keys.key(seed), torch.tensor(seed + 5))
            assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_the_words_of_a_path_are_marked_as_torch_marks_a_constant():
    def marked(path: str) -> list[int]:
        return []

    assert vars(keys._path_words) == vars(torch.compiler.assume_constant_result(marked)) != {}


def test_a_draw_is_a_constant_inside_torch_func():
    def loss(w):
        return (w * keys.normal(keys.fold_in(ROOT, 1), (5,))).sum()

    want = keys.normal(keys.fold_in(ROOT, 1), (5,))
    w = torch.ones(5)
    assert torch.equal(torch.func.grad(loss)(w), want)
    assert torch.equal(torch.compile(torch.func.grad(loss), fullgraph=True, backend="aot_eager")(w), want)
    per_sample = torch.func.vmap(torch.func.grad(loss))(torch.ones(3, 5))
    assert torch.equal(per_sample, want.expand(3, 5))


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "bad", [torch.zeros(8), torch.zeros(8, dtype=torch.int32), torch.zeros(2, 8, dtype=torch.int64), 3, None]
)
def test_a_wrong_key_is_refused(bad):
    for use in (lambda: keys.split(bad, 2), lambda: keys.fold_in(bad, 1), lambda: keys.normal(bad, (2,))):
        with pytest.raises(FdpError, match="expected an int64 tensor of shape"):
            use()


@pytest.mark.parametrize("seed", [-1, 1.5, "seed", True])
def test_a_wrong_seed_is_refused(seed):
    with pytest.raises(FdpError, match="non-negative int"):
        keys.key(seed)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda: keys.fold_in(ROOT, -1), "fold_in"),
        (lambda: keys.fold_in(ROOT, 1 << 63), "fold_in"),
        (lambda: keys.fold_in(ROOT, torch.tensor(1.0)), "0-d integer"),
        (lambda: keys.fold_in(ROOT, torch.tensor([1])), "0-d integer"),
        (lambda: keys.split(ROOT, -1), "n >= 0"),
        (lambda: keys.bits(ROOT, ((1 << 35) + 1,), window=((0, 1),)), "2\\^35"),
        (lambda: keys.truncated_normal(ROOT, ((1 << 35) + 1,), window=((0, 1),)), "2\\^35"),
        (lambda: keys.normal(ROOT, ((1 << 36) + 1,), window=((0, 1),)), "2\\^36"),
        (lambda: keys.fold_in_nonces(ROOT, torch.zeros(3, dtype=torch.int64)), "path_nonces"),
        (lambda: keys.bits(ROOT, (4, 4), window=((0, 4),)), "per dim"),
        (lambda: keys.bits(ROOT, (4, 4), window=((0, 4), (2, 3))), "dim 1"),
        (lambda: keys.bits(ROOT, (4,), window=((-1, 2),)), "dim 0"),
        (lambda: keys.normal(ROOT, (4,), dtype=torch.int64), "floating point"),
        (lambda: keys.uniform(ROOT, (4,), dtype=torch.int64), "floating point"),
        (lambda: keys.truncated_normal(ROOT, (4,), lower=1.0, upper=1.0), "lower < upper"),
        (lambda: keys.truncated_normal(ROOT, (4,), lower=40.0, upper=50.0), "37"),
        (lambda: keys.truncated_normal(ROOT, (4,), lower=math.nan), "lower < upper"),
    ],
)
def test_bad_arguments_are_refused(use, message):
    with pytest.raises(FdpError, match=message):
        use()


def test_drawing_does_not_change_the_key():
    before = ROOT.clone()
    for draw in DRAWS:
        assert torch.equal(draw(ROOT, (9,)), draw(ROOT, (9,)))
    assert torch.equal(ROOT, before)
    assert np.array_equal(ROOT.numpy(), before.numpy())
