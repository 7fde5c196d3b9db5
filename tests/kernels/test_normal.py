"""Tests of the normal law: against scipy, op and Triton bodies against the reference, windows against the draw."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from fdp_kernels import chacha20, normal, normal_triton
from fdp_kernels.op import jit, tl
from hypothesis import example, given, settings
from scipy import special
from torch import Tensor

from tests.kernels.test_chacha20 import BOXES, NO_NONCE, SMALL_BOXES, boxes, interpreted, random_words, slices_of_stream

INF = math.inf
TAIL_NONCE = torch.tensor([normal.TAIL_PURPOSE, 0, 0])


@pytest.mark.parametrize(("piece", "gap"), [(1 << 18, 1 << 10), (16, 4), (24, 0)])
def test_any_box_is_the_law_of_a_slice_of_the_stream(piece, gap, cpu_loops, monkeypatch):
    monkeypatch.setattr(chacha20, "_PIECE_ELEMENTS", piece)  # small pieces split runs, and split between runs
    monkeypatch.setattr(chacha20, "_GAP_ELEMENTS", gap)

    @settings(deadline=None, max_examples=40)
    @given(box=boxes())
    @example(box=([13, 7], [0, 0], [13, 7]))
    @example(box=([9, 41], [1, 3], [8, 35]))
    @example(box=([5, 6, 7], [1, 2, 3], [3, 3, 4]))
    def check(box):
        shape, start, size = box
        key = random_words(8, 3)
        elements, words = slices_of_stream(key, NO_NONCE, box)
        more, fine = slices_of_stream(key, TAIL_NONCE, box)
        z = normal.wide_normal_from_bits(elements, more)
        narrow = normal.normal_from_words(words, fine)
        truncated = normal.truncated_normal_from_bits(elements, -1, 2)
        assert torch.equal(normal.normal_reference(key, shape, start, size, -INF, INF, torch.float64), z)
        assert torch.equal(normal.normal_reference(key, shape, start, size, -INF, INF, torch.float32), narrow.float())
        assert torch.equal(
            normal.normal_reference(key, shape, start, size, -1, 2, torch.bfloat16), truncated.bfloat16()
        )
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            law = z if dtype == torch.float64 else narrow
            assert torch.equal(normal.normal(key, *box, -INF, INF, dtype), law.to(dtype))
            assert torch.equal(normal.normal(key, *box, -1, 2, dtype), truncated.to(dtype))

    check()


def test_pieces_join_without_a_seam():
    key, n = random_words(8, 4), (1 << 18) + 77
    whole = normal.normal(key, [n], [0], [n], -INF, INF, torch.float32)
    parts = [
        normal.normal(key, [n], [a], [b - a], -INF, INF, torch.float32)
        for a, b in ((0, 100_001), (100_001, 1 << 18), (1 << 18, n))
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_blocks_past_the_counter_are_refused():
    key, box = random_words(8, 5), ([1 << 36], [(1 << 36) - 3], [3])
    last = normal.normal(key, *box, -INF, INF, torch.float32)
    assert torch.equal(last, normal.normal_reference(key, *box, -INF, INF, torch.float32))
    want = normal.normal_from_words(chacha20.keystream(key, NO_NONCE, (1 << 32) - 1, 1)[-3:], NO_NONCE)
    assert torch.equal(last, want.float())
    for elements, dtype in ((1 << 36, torch.float32), (1 << 35, torch.float64)):
        with pytest.raises(ValueError, match="2\\^32"):
            normal.normal(key, [elements + 1], [0], [1], -INF, INF, dtype)


def test_op_passes_opcheck():
    args = (random_words(8, 11), [6, 5], [1, 2], [4, 3], -INF, INF, torch.bfloat16)
    torch.library.opcheck(normal.normal.default, args)


# ---------------------------------------------------------------- 32 bits per value

RARE = 1 << 16
TOP = (1 << 31) - 1
# Tails and extra bits on both sides of every seam: of the refinement, and of the rational functions.
SPLIT = round((0.5 - 0.425) * 2**32)
TAILS = [0, 1, 2, 7, 255, RARE - 1, RARE, RARE + 1, 1 << 20, SPLIT - 1, SPLIT, SPLIT + 1, 1 << 30, TOP - 1, TOP]
FINES = [
    0,
    1,
    1 << 20,
    59_600_000,
    59_700_000,
    (1 << 32) - 1,
]  # the far tail begins at e^-25, between the two in the middle


def extreme_bits() -> Tensor:
    top = (1 << 63) - 1
    tails = [0, 1, 2, 3, 7, top, top - 1, 1 << 62] + [1 << e for e in range(63)] + [3 << e for e in range(61)]
    return torch.tensor(tails + [-1 - tail for tail in tails])


def planted_words() -> tuple[Tensor, Tensor]:
    tail, fine = torch.tensor([(tail, fine) for tail in TAILS for fine in FINES]).T
    return tail, fine


def probability(tail: int, fine: int) -> float:
    return (tail * 2**32 + fine + 0.5) * 2.0**-64 if tail < RARE else (tail + 0.5) * 2.0**-32


def test_tails_reach_beyond_eight_sigma_and_are_symmetric():
    tail, fine = planted_words()
    up, down = normal.normal_from_words(tail, fine), normal.normal_from_words(tail + (1 << 31), fine)
    assert torch.equal(up, -down)
    assert (up > 0).all()
    assert up.isfinite().all()
    assert up[0] == up.max() > 9.1
    assert 0 < up.min() < 1e-9


def test_normal_has_its_tail_probability():
    tail = torch.cat([planted_words()[0], random_words(4000, 7) >> 1, random_words(4000, 17) >> 17])
    fine = torch.cat([planted_words()[1], random_words(8000, 8)])
    p = np.array([probability(*pair) for pair in zip(tail.tolist(), fine.tolist())])
    x = normal.normal_from_words(tail, fine).numpy()
    assert np.abs(special.log_ndtr(-x) - np.log(p)).max() < 2e-13


def test_only_far_tails_take_extra_bits_which_refine_them():
    fine, other = torch.full((2,), 5), torch.full((2,), 1 << 31)
    words = torch.tensor([RARE, RARE - 1])
    same, moved = normal.normal_from_words(words, fine) == normal.normal_from_words(words, other)
    assert same
    assert not moved
    between = normal.normal_from_words(torch.full((1000,), 77), torch.arange(1000) << 22)
    assert (between.diff() < 0).all()
    step = normal.normal_from_words(torch.tensor([76, 77, 78]), torch.tensor([1 << 31] * 3))
    assert step[0] > between[0] > between[-1] > step[2]


@cache
def rare_indices() -> tuple[Tensor, Tensor]:
    """Return a key and the indices, among its first 2^20 elements, of values far in the tail: about 32."""
    key = random_words(8, 4)
    stream = chacha20.keystream(key, NO_NONCE, 0, 1 << 16)
    return key, (stream & TOP < RARE).nonzero()[:, 0]


def test_far_tails_of_any_window_take_extra_bits_at_their_own_index():
    key, places = rare_indices()
    assert 12 < len(places) < 60
    whole = normal.normal(key, [1 << 20], [0], [1 << 20], -INF, INF, torch.float32)
    assert torch.equal(whole, normal.normal_reference(key, [1 << 20], [0], [1 << 20], -INF, INF, torch.float32))
    assert set((whole.abs() > special.ndtri(1 - 2.0**-16)).nonzero()[:, 0].tolist()) == set(places.tolist())
    for i in places.tolist():
        word = chacha20.keystream(key, NO_NONCE, i // 16, 1)[i % 16]
        fine = chacha20.keystream(key, TAIL_NONCE, i // 16, 1)[i % 16]
        assert whole[i] == normal.normal_from_words(word, fine).float()
        row, column = divmod(i, 1024)
        low, left = max(row - 1, 0), max(column - 2, 0)
        box = [1024, 1024], [low, left], [row - low + 1, column - left + 1]
        window = normal.normal(key, *box, -INF, INF, torch.float32)
        assert torch.equal(window, whole.view(1024, 1024)[low : row + 1, left : column + 1])


@pytest.mark.parametrize(
    ("lower", "upper"),
    [(-2, 2), (-3, 1), (-1, 3), (0, 1), (1, 2), (5, INF), (-INF, -6), (-7, -6.5), (-INF, 0.5)],
)
def test_truncated_normal_inverts_its_distribution(lower, upper):
    bits = torch.cat([extreme_bits(), random_words(4000, 9) << 32 | random_words(4000, 10)])
    x = normal.truncated_normal_from_bits(bits, lower, upper).numpy()
    assert lower <= x.min()
    assert x.max() <= upper
    sign = -1 if lower >= 0 else 1
    low, high = special.ndtr(sorted((sign * lower, sign * upper)))
    got = np.sort((special.ndtr(sign * x[-4000:]) - low) / (high - low))
    u = (bits[-4000:].double().numpy() + 0.5) * 2.0**-64
    one_sided = lower >= 0 or upper <= 0
    want = np.sort(2 * np.abs(u) if one_sided else np.where(u < 0, -u, 1 - u))
    assert np.abs(got - want).max() < 1e-12


# ---------------------------------------------------------------- 64 bits per value


def wide_tails() -> Tensor:
    """Return 63-bit tails: every size down to 1, random ones, and both sides of every seam between two functions."""
    powers = [(1 - math.sqrt(1 - 2.0 ** (2 - k))) / 2 for k in range(2, 19)]  # p (1 - p) = 2^-k
    edges = [round(p * 2**64) for p in (2.0**-17, 1.38879438649640e-11, *powers[1:])]
    around = [edge + step for edge in edges for step in (-3, -2, -1, 0, 1, 2)]
    random = (random_words(4000, 51) << 31 | random_words(4000, 52) >> 1) & ((1 << 63) - 1)
    return torch.cat([torch.tensor([0, 1, (1 << 63) - 1] + [1 << e for e in range(63)] + around), random])


def test_64_bit_law_inverts_the_distribution_and_is_symmetric():
    tails, zero = wide_tails(), torch.zeros(1, dtype=torch.int64)
    z = normal.wide_normal_from_bits(tails, zero)
    assert torch.isfinite(z).all()
    assert (z >= 0).all()
    far = tails < 1 << 47
    p = np.where(far.numpy(), tails.double() * 2.0**-64 + 2.0**-129, (tails.double() + 0.5) * 2.0**-64)
    np.testing.assert_allclose(special.ndtr(-z.numpy()), p, rtol=1e-12)
    assert torch.equal(normal.wide_normal_from_bits(tails | -(1 << 63), zero), -z)
    ordered = normal.wide_normal_from_bits(tails.sort().values, zero)
    assert (ordered.diff() <= 1e-15 * ordered[1:]).all(), "monotone to float64 rounding, which depends on the compiler"
    assert float(normal.wide_normal_from_bits(zero, zero)) > 13
    high = torch.tensor([-1])  # all ones: nearly 2^64 further down the tail, unsigned
    assert float(normal.wide_normal_from_bits(zero, high)) == pytest.approx(-special.ndtri(2.0**-64), rel=1e-12)


def test_64_bit_values_are_denser_than_the_noise_grid():
    """Neighbours are at most 2^-40 of a standard deviation apart; far in the tail the extra bits see to it."""
    near = torch.tensor([1 << 62, 1 << 58, 1 << 50, 1 << 47])
    zero = torch.zeros_like(near)
    step = torch.tensor([1 << 10, 1 << 8, 1 << 4, 1])
    gaps = normal.wide_normal_from_bits(near, zero) - normal.wide_normal_from_bits(near + step, zero)
    assert (gaps >= 0).all()
    assert (gaps < 2.0**-40).all()
    far, fine = torch.tensor([1 << 40, 1 << 20, 5]), torch.tensor([1 << 40] * 3)
    gaps = normal.wide_normal_from_bits(far, fine) - normal.wide_normal_from_bits(far, fine + (1 << 12))
    assert (gaps.abs() < 2.0**-40).all()


def probabilities(count: int) -> Tensor:
    """Return probabilities up to 1/2 of every size, with 53 random bits, and both sides of the seam."""
    mantissas = (random_words(count, 61) << 20 | random_words(count, 64) >> 12).double() * 2.0**-53 + 0.5
    random = mantissas * 2.0 ** -(1 + torch.arange(count, dtype=torch.float64) % 20)
    seam = torch.full((65,), normal._FAR, dtype=torch.float64).view(torch.int64) + torch.arange(-32, 33)
    edges = torch.tensor([0.5, 0.5 - 2.0**-54, 2.0**-17, 2.0**-40, 2.0**-128], dtype=torch.float64)
    p = torch.cat([random, seam.view(torch.float64), edges])
    return torch.nn.functional.pad(p, (0, -len(p) % normal._WHOLE_VECTORS), value=0.25)


def test_lower_quantiles_are_those_of_ndtri_to_float64_rounding(cpu_loops):
    p = probabilities(200_000)
    z, reference = torch.empty_like(p), torch.special.ndtri(p)
    normal.lower_quantile_(p, z, torch.nonzero(p < normal._FAR).flatten())
    torch.testing.assert_close(z, reference, rtol=1.5e-15, atol=0)
    assert (z <= 0).all()
    assert z.isfinite().all()
    ordered = z[p.argsort()]
    assert (ordered.diff() >= -1.5e-15 * ordered[:-1].abs()).all()


def test_the_sum_of_squares_of_many_draws_is_that_of_the_normal_law(cpu_loops):
    """Whichever function evaluates a value, moments and tails are those of the law."""
    key, n = random_words(8, 62), 1 << 20
    z = normal.foreach_normal(key[None], [n])
    assert abs(float(z.mean())) < 4e-3
    assert abs(float(z.square().mean()) - 1) < 6e-3
    beyond = float((z.abs() > -special.ndtri(normal._FAR)).double().mean())
    assert abs(beyond - 2 * normal._FAR) < 1e-3


@pytest.mark.parametrize("vectors", [True, False])
def test_a_value_depends_on_its_bits_alone(vectors, cpu_loops, monkeypatch):
    monkeypatch.setattr(normal, "HAS_VECTOR_ERFINV", vectors and normal.HAS_VECTOR_ERFINV)
    key, n = random_words(8, 63), (1 << 17) + 3
    whole = normal.foreach_normal(key[None], [n])
    bits = chacha20.bits(key, [n], [0], [n])
    for start, count in [
        (0, 1),
        (1, 1),
        (7, 2),
        (3, 5),
        (64, 63),
        (5, 64),
        (9, 65),
        (11, 999),
        (1, 70_001),
        (2, n - 2),
    ]:
        window = normal.normal(key, [n], [start], [count], -INF, INF, torch.float64)
        assert torch.equal(window, whole[start : start + count])
        part = bits[start : start + count]
        usual = part & ((1 << 63) - 1) >= normal._WIDE_RARE
        law = normal.wide_normal_from_bits(part, torch.zeros(1, dtype=torch.int64))
        assert torch.equal(law[usual], window[usual])
    threads = torch.get_num_threads()
    try:
        for other in (1, 2, 3):
            torch.set_num_threads(other)
            assert torch.equal(normal.foreach_normal(key[None], [n]), whole)
    finally:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------- Triton bodies, in the interpreter


@interpreted
@pytest.mark.parametrize("box", SMALL_BOXES)
def test_bodies_are_close_to_the_reference(box):
    key, (shape, start, size) = random_words(8, 32), box
    close(normal.launch_normal(key, shape, start, size, -INF, INF, torch.float32), key, box, rtol=1e-6)
    close(normal.launch_normal(key, shape, start, size, -INF, INF, torch.float64), key, box, rtol=5e-7)


def close(got: Tensor, key: Tensor, box, *, rtol: float) -> None:
    shape, start, size = box
    want = normal.normal_reference(key.cpu(), shape, start, size, -INF, INF, got.dtype)
    torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=0)


@interpreted
def test_the_normal_body_refines_far_tails():
    key, places = rare_indices()
    for i in places[:2].tolist():
        box = [1 << 20], [i - 5], [9]
        z = normal.launch_normal(key, *box, -INF, INF, torch.float32)
        assert z.abs().max() > 4.1
        close(z, key, box, rtol=1e-6)


@interpreted
def test_the_float32_law_is_within_5e_7_of_the_inverse_distribution():
    tail = torch.cat([planted_words()[0], random_words(2000, 33) >> 1, random_words(2000, 34) >> 17])
    fine = torch.cat([planted_words()[1], random_words(4000, 35)])
    out = torch.empty(len(tail))
    _law_body[(1,)](tail, fine, out, len(tail), BLOCK=8192)
    torch.testing.assert_close(out.double(), normal.normal_from_words(tail, fine), rtol=5e-7, atol=0)
    _law_body[(1,)](tail + (1 << 31), fine, out, len(tail), BLOCK=8192)
    torch.testing.assert_close(-out.double(), normal.normal_from_words(tail, fine), rtol=5e-7, atol=0)


@jit
def _law_body(words_ptr, fine_ptr, out_ptr, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + index, mask=index < count, other=0).to(tl.uint32)
    fine = tl.load(fine_ptr + index, mask=index < count, other=0).to(tl.uint32)
    tail = words & 0x7FFFFFFF
    z = tl.where(tail < 65536, normal_triton._far(tail, fine), normal_triton._near(tail))
    tl.store(out_ptr + index, normal_triton._apply_sign(z, words), mask=index < count)


@interpreted
def test_the_wide_body_is_near_the_inverse_distribution_and_without_gaps():
    tails = wide_tails()
    fine = random_words(len(tails), 54) << 32 | random_words(len(tails), 55)
    law, exact = wide_law(tails, fine), normal.wide_normal_from_bits(tails, fine)
    np.testing.assert_allclose(law, exact, rtol=5e-7, atol=1e-12)
    near = tails >= 1 << 47
    np.testing.assert_allclose(law[near], exact[near], rtol=1e-7, atol=1e-12)
    # Neighbouring bits give neighbouring values, everywhere and where the functions meet, to far below any grid.
    start = tails[(tails > 1 << 31) & (tails < (1 << 63) - (1 << 34))]
    start = torch.cat([start, start - 1])
    nothing = torch.zeros_like(start)
    gaps = wide_law(start, nothing) - wide_law(start + (start >> 30), nothing)
    assert (gaps.abs() < 2.0**-28).all()
    assert (gaps > -(2.0**-45)).all()


def wide_law(tails: Tensor, fine: Tensor) -> Tensor:
    """Evaluate the law of the Triton body."""
    out = torch.empty(len(tails), dtype=torch.float64)
    _wide_law_body[(1,)](tails, fine, out, len(tails), BLOCK=16384)
    return out


@jit
def _wide_law_body(tails_ptr, fine_ptr, out_ptr, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tail = tl.load(tails_ptr + index, mask=index < count, other=1)
    fine = tl.load(fine_ptr + index, mask=index < count, other=1)
    high, low = (tail >> 32).to(tl.uint32), (tail & 0xFFFFFFFF).to(tl.uint32)
    more, last = ((fine >> 32) & 0xFFFFFFFF).to(tl.uint32), (fine & 0xFFFFFFFF).to(tl.uint32)
    z = normal_triton._wide_refine(high, low, more, last, normal_triton._wide_magnitude(high, low))
    tl.store(out_ptr + index, z, mask=index < count)


@interpreted
def test_the_wide_body_refines_far_tails():
    key, shape = random_words(8, 53), [1 << 18]
    bits = chacha20.bits(key, shape, [0], shape)
    places = (bits & ((1 << 63) - 1) < 1 << 47).nonzero()[:, 0].tolist()
    assert places
    for i in places[:2]:
        box = shape, [max(i - 3, 0)], [6]
        z = normal.launch_normal(key, *box, -INF, INF, torch.float64)
        assert z.abs().max() > 4.1
        close(z, key, box, rtol=5e-7)
        assert torch.equal(
            normal.normal(key, *box, -INF, INF, torch.float64),
            normal.normal_reference(key, *box, -INF, INF, torch.float64),
        )


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("box", BOXES)
def test_gpu_draws_are_close_to_the_cpu(box):
    key = rare_indices()[0]
    there = key.cuda()
    if box[0] != [1 << 36]:
        truncated = normal.normal(there, *box, -1, 2, torch.float64).cpu()
        torch.testing.assert_close(truncated, normal.normal(key, *box, -1, 2, torch.float64), rtol=1e-13, atol=1e-15)
        close(normal.normal(there, *box, -INF, INF, torch.float64), key, box, rtol=5e-7)
    z = normal.normal(there, *box, -INF, INF, torch.float32)
    close(z, key, box, rtol=1e-6)
    assert torch.equal(z, normal.normal(there, *box, -INF, INF, torch.float32))
    assert torch.equal(z.bfloat16(), normal.normal(there, *box, -INF, INF, torch.bfloat16))


@pytest.mark.gpu
def test_gpu_windows_are_bitwise_slices():
    key = rare_indices()[0].cuda()
    whole = normal.normal(key, [1024, 1024], [0, 0], [1024, 1024], -INF, INF, torch.float32)
    for (row, rows), (column, columns) in [((0, 512), (0, 1024)), ((3, 77), (0, 1024)), ((0, 1024), (130, 700))]:
        part = normal.normal(key, [1024, 1024], [row, column], [rows, columns], -INF, INF, torch.float32)
        assert torch.equal(part, whole[row : row + rows, column : column + columns])


@pytest.mark.gpu
def test_gpu_draws_replay_in_a_graph():
    key, nonces = random_words(8, 40).cuda(), random_words(6, 41).view(2, 3).cuda()

    def draws() -> list[Tensor]:
        children = chacha20.child_keys(key, nonces)
        return [children, normal.normal(children[1], [500, 70], [3, 1], [400, 60], -INF, INF, torch.float32)]

    draws()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = draws()
    for seed in (42, 43):
        key.copy_(random_words(8, seed))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(recorded, draws()))


@pytest.mark.parametrize("piece", [1 << 17, 24, 8])
def test_draws_of_many_keys_are_those_of_each_bit_for_bit(piece, cpu_loops, monkeypatch):
    monkeypatch.setattr(normal, "_ELEMENTS_TOGETHER", piece)  # small pieces hold parts of leaves
    monkeypatch.setattr(normal, "_WIDE_RARE", 1 << 60)  # one value in eight takes extra bits
    sizes = [5, 0, 33, 1, 8, 70]
    keys = torch.stack([random_words(8, seed) for seed in range(len(sizes))])
    drawn = normal.foreach_normal(keys, sizes)
    assert torch.equal(drawn, normal.foreach_normal_reference(keys, sizes))
    for key, size, part in zip(keys, sizes, drawn.split(sizes)):
        assert torch.equal(part, normal.normal(key, [size], [0], [size], -INF, INF, torch.float64))


def test_many_keys_need_a_size_each():
    with pytest.raises(ValueError, match="foreach_normal: expected"):
        normal.foreach_normal(torch.zeros(2, 8, dtype=torch.int64), [3])


@pytest.mark.parametrize("vectors", [True, False])
def test_on_a_cpu_exactly_the_values_below_the_threshold_take_extra_bits(vectors, cpu_loops, monkeypatch):
    monkeypatch.setattr(normal, "HAS_VECTOR_ERFINV", vectors)
    tails = torch.tensor([0, 1 << 46, (1 << 47) - 64, 1 << 47, (1 << 47) + 64, 1 << 62] * 20)
    bits = torch.cat([tails, tails | -(1 << 63)])  # of both signs
    rare, bits_of_rare = normal._wide_normal_cpu(bits, torch.empty(240, dtype=torch.float64), normal._make_scratch(240))
    assert torch.equal(rare, torch.nonzero(bits & ((1 << 63) - 1) < 1 << 47).flatten())
    assert torch.equal(bits_of_rare, bits[rare])
