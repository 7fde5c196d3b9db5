"""The cipher against RFC 8439, the ops and kernel bodies against their references, the normal law against scipy."""

from __future__ import annotations

import math
import struct
from functools import cache

import numpy as np
import pytest
import torch
from fdp_kernels import chacha20
from fdp_kernels.op import jit, tl
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import special
from torch import Tensor

INF = math.inf
NO_NONCE = torch.zeros(3, dtype=torch.int64)
FINE_NONCE = torch.tensor([chacha20.FINE, 0, 0])
ZERO = "00" * 32
# (key, nonce, counter, block): RFC 8439 section 2.3.2, then appendix A.1 #1..#5
VECTORS = {
    "2.3.2": (
        bytes(range(32)).hex(),
        "000000090000004a00000000",
        1,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    "A.1 #1": (
        ZERO,
        "00" * 12,
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    "A.1 #2": (
        ZERO,
        "00" * 12,
        1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    "A.1 #3": (
        ZERO[:-2] + "01",
        "00" * 12,
        1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    "A.1 #4": (
        "00ff" + "00" * 30,
        "00" * 12,
        2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    "A.1 #5": (
        ZERO,
        "00" * 11 + "02",
        0,
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
}


def words(raw: str) -> Tensor:
    data = bytes.fromhex(raw)
    return torch.tensor(struct.unpack(f"<{len(data) // 4}I", data))


def random_words(n: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 1 << 32, n))


@pytest.mark.parametrize("function", [chacha20.keystream_reference, chacha20.keystream], ids=["reference", "op"])
@pytest.mark.parametrize("name", VECTORS)
def test_block_function_has_the_rfc_vectors(name, function):
    key, nonce, counter, block = VECTORS[name]
    assert torch.equal(function(words(key), words(nonce), counter, 1), words(block))


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1 << 30), first=st.integers(0, (1 << 32) - 20), blocks=st.integers(0, 20))
def test_op_equals_reference(seed, first, blocks):
    key, nonce = random_words(8, seed), random_words(3, seed + 1)
    got = chacha20.keystream(key, nonce, first, blocks)
    assert got.shape == (16 * blocks,)
    assert torch.equal(got, chacha20.keystream_reference(key, nonce, first, blocks))


def test_children_are_the_first_words_of_their_streams():
    key, nonces = random_words(8, 20), random_words(3 * 5, 21).view(5, 3)
    want = torch.stack([chacha20.keystream_reference(key, nonce, 0, 1)[:8] for nonce in nonces])
    assert torch.equal(chacha20.children(key, nonces), want)
    assert chacha20.children(key, nonces[:0]).shape == (0, 8)


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(1, 13), max_size=4))
    start = [draw(st.integers(0, extent)) for extent in shape]
    return shape, start, [draw(st.integers(0, extent - begin)) for begin, extent in zip(start, shape)]


@pytest.mark.parametrize(("piece", "gap"), [(1 << 18, 1 << 10), (16, 4), (24, 0)])
def test_any_box_is_the_slice_of_the_whole_stream(piece, gap, monkeypatch):
    monkeypatch.setattr(chacha20, "_PIECE", piece)  # small pieces: cuts inside runs, and between them
    monkeypatch.setattr(chacha20, "_GAP", gap)

    @settings(deadline=None, max_examples=40)
    @given(box=boxes())
    @example(box=([13, 7], [0, 0], [13, 7]))
    @example(box=([9, 41], [1, 3], [8, 35]))
    @example(box=([5, 6, 7], [1, 2, 3], [3, 3, 4]))
    def check(box):
        shape, start, size = box
        key, count = random_words(8, 3), math.prod(shape)
        inside = tuple(slice(b, b + n) for b, n in zip(start, size))
        stream = chacha20.keystream_reference(key, NO_NONCE, 0, -(-count // 8))
        want = (stream[0::2] | stream[1::2] << 32)[:count].view(shape)[inside]
        assert torch.equal(chacha20.bits(key, *box), want)
        assert torch.equal(chacha20.bits_reference(key, *box), want)
        fine = chacha20.keystream_reference(key, FINE_NONCE, 0, -(-count // 8))
        more = (fine[0::2] | fine[1::2] << 32)[:count].view(shape)[inside]
        z = chacha20.wide_normal_from_bits(want, more)
        narrow = chacha20.normal_from_words(stream[:count].view(shape)[inside], fine[:count].view(shape)[inside])
        cut = chacha20.truncated_normal_from_bits(want, -1, 2)
        assert torch.equal(chacha20.normal_reference(key, shape, start, size, -INF, INF, torch.float64), z)
        assert torch.equal(chacha20.normal_reference(key, shape, start, size, -INF, INF, torch.float32), narrow.float())
        assert torch.equal(chacha20.normal_reference(key, shape, start, size, -1, 2, torch.bfloat16), cut.bfloat16())
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            law = z if dtype == torch.float64 else narrow
            assert torch.equal(chacha20.normal(key, *box, -INF, INF, dtype), law.to(dtype))
            assert torch.equal(chacha20.normal(key, *box, -1, 2, dtype), cut.to(dtype))

    check()


def test_pieces_join_without_a_seam():
    key, n = random_words(8, 4), (1 << 18) + 77
    whole = chacha20.normal(key, [n], [0], [n], -INF, INF, torch.float32)
    parts = [
        chacha20.normal(key, [n], [a], [b - a], -INF, INF, torch.float32)
        for a, b in ((0, 100_001), (100_001, 1 << 18), (1 << 18, n))
    ]
    assert torch.equal(torch.cat(parts), whole)


def test_blocks_past_the_counter_are_refused():
    key, nonce = random_words(8, 5), random_words(3, 6)
    for function in (chacha20.keystream, chacha20.keystream_reference):
        assert function(key, nonce, (1 << 32) - 1, 1).shape == (16,)
        with pytest.raises(ValueError, match="2\\^32"):
            function(key, nonce, (1 << 32) - 1, 2)
    last = chacha20.bits(key, [1 << 35], [(1 << 35) - 3], [3])
    assert torch.equal(last, chacha20.bits_reference(key, [1 << 35], [(1 << 35) - 3], [3]))
    with pytest.raises(ValueError, match="2\\^32"):
        chacha20.bits(key, [(1 << 35) + 1], [0], [1])
    box = [1 << 36], [(1 << 36) - 3], [3]
    last = chacha20.normal(key, *box, -INF, INF, torch.float32)
    assert torch.equal(last, chacha20.normal_reference(key, *box, -INF, INF, torch.float32))
    want = chacha20.normal_from_words(chacha20.keystream(key, NO_NONCE, (1 << 32) - 1, 1)[-3:], NO_NONCE)
    assert torch.equal(last, want.float())
    for elements, dtype in ((1 << 36, torch.float32), (1 << 35, torch.float64)):
        with pytest.raises(ValueError, match="2\\^32"):
            chacha20.normal(key, [elements + 1], [0], [1], -INF, INF, dtype)


def extreme_bits() -> Tensor:
    top = (1 << 63) - 1
    tails = [0, 1, 2, 3, 7, top, top - 1, 1 << 62] + [1 << e for e in range(63)] + [3 << e for e in range(61)]
    return torch.tensor(tails + [-1 - tail for tail in tails])


# ---------------------------------------------------------------- the normal law

RARE = 1 << 16
TOP = (1 << 31) - 1
# Tails and further bits on both sides of every seam: of the refinement, of the rational functions, of the middle.
SPLIT = round((0.5 - 0.425) * 2**32)
TAILS = [0, 1, 2, 7, 255, RARE - 1, RARE, RARE + 1, 1 << 20, SPLIT - 1, SPLIT, SPLIT + 1, 1 << 30, TOP - 1, TOP]
FINES = [0, 1, 1 << 20, 59_600_000, 59_700_000, (1 << 32) - 1]  # e^-25, where the farther tail begins, between


def planted_words() -> tuple[Tensor, Tensor]:
    tail, fine = torch.tensor([(tail, fine) for tail in TAILS for fine in FINES]).T
    return tail, fine


def probability(tail: int, fine: int) -> float:
    return (tail * 2**32 + fine + 0.5) * 2.0**-64 if tail < RARE else (tail + 0.5) * 2.0**-32


def test_tails_beyond_eight_sigma_are_reached_and_symmetric():
    tail, fine = planted_words()
    up, down = chacha20.normal_from_words(tail, fine), chacha20.normal_from_words(tail + (1 << 31), fine)
    assert torch.equal(up, -down)
    assert (up > 0).all()
    assert up.isfinite().all()
    assert up[0] == up.max() > 9.1
    assert 0 < up.min() < 1e-9


def test_normal_has_its_tail_probability():
    tail = torch.cat([planted_words()[0], random_words(4000, 7) >> 1, random_words(4000, 17) >> 17])
    fine = torch.cat([planted_words()[1], random_words(8000, 8)])
    p = np.array([probability(*pair) for pair in zip(tail.tolist(), fine.tolist())])
    x = chacha20.normal_from_words(tail, fine).numpy()
    assert np.abs(special.log_ndtr(-x) - np.log(p)).max() < 2e-13


def test_only_far_tails_take_further_bits_and_those_refine_them():
    fine, other = torch.full((2,), 5), torch.full((2,), 1 << 31)
    words = torch.tensor([RARE, RARE - 1])
    same, moved = chacha20.normal_from_words(words, fine) == chacha20.normal_from_words(words, other)
    assert same
    assert not moved
    between = chacha20.normal_from_words(torch.full((1000,), 77), torch.arange(1000) << 22)
    assert (between.diff() < 0).all()
    step = chacha20.normal_from_words(torch.tensor([76, 77, 78]), torch.tensor([1 << 31] * 3))
    assert step[0] > between[0] > between[-1] > step[2]


@cache
def rare_places() -> tuple[Tensor, Tensor]:
    """A key, and the elements among its first 2^20 that lie far out: about 32."""
    key = random_words(8, 4)
    stream = chacha20.keystream(key, NO_NONCE, 0, 1 << 16)
    return key, (stream & TOP < RARE).nonzero()[:, 0]


def test_far_tails_of_any_window_take_their_bits_from_the_same_place_of_the_second_stream():
    key, places = rare_places()
    assert 12 < len(places) < 60
    whole = chacha20.normal(key, [1 << 20], [0], [1 << 20], -INF, INF, torch.float32)
    assert torch.equal(whole, chacha20.normal_reference(key, [1 << 20], [0], [1 << 20], -INF, INF, torch.float32))
    assert set((whole.abs() > special.ndtri(1 - 2.0**-16)).nonzero()[:, 0].tolist()) == set(places.tolist())
    for i in places.tolist():
        word = chacha20.keystream(key, NO_NONCE, i // 16, 1)[i % 16]
        fine = chacha20.keystream(key, FINE_NONCE, i // 16, 1)[i % 16]
        assert whole[i] == chacha20.normal_from_words(word, fine).float()
        row, column = divmod(i, 1024)
        low, left = max(row - 1, 0), max(column - 2, 0)
        box = [1024, 1024], [low, left], [row - low + 1, column - left + 1]
        window = chacha20.normal(key, *box, -INF, INF, torch.float32)
        assert torch.equal(window, whole.view(1024, 1024)[low : row + 1, left : column + 1])


@pytest.mark.parametrize(
    ("lower", "upper"),
    [(-2, 2), (-3, 1), (-1, 3), (0, 1), (1, 2), (5, INF), (-INF, -6), (-7, -6.5), (-INF, 0.5)],
)
def test_truncated_normal_inverts_its_distribution(lower, upper):
    bits = torch.cat([extreme_bits(), random_words(4000, 9) << 32 | random_words(4000, 10)])
    x = chacha20.truncated_normal_from_bits(bits, lower, upper).numpy()
    assert lower <= x.min()
    assert x.max() <= upper
    sign = -1 if lower >= 0 else 1
    low, high = special.ndtr(sorted((sign * lower, sign * upper)))
    got = np.sort((special.ndtr(sign * x[-4000:]) - low) / (high - low))
    u = (bits[-4000:].double().numpy() + 0.5) * 2.0**-64
    one_sided = lower >= 0 or upper <= 0
    want = np.sort(2 * np.abs(u) if one_sided else np.where(u < 0, -u, 1 - u))
    assert np.abs(got - want).max() < 1e-12


def test_ops_pass_opcheck():
    key, nonce = random_words(8, 11), random_words(3, 12)
    box = ([6, 5], [1, 2], [4, 3])
    torch.library.opcheck(chacha20.keystream.default, (key, nonce, 3, 2))
    torch.library.opcheck(chacha20.children.default, (key, random_words(6, 13).view(2, 3)))
    torch.library.opcheck(chacha20.bits.default, (key, *box))
    torch.library.opcheck(chacha20.normal.default, (key, *box, -INF, INF, torch.bfloat16))


# ---------------------------------------------------------------- kernel bodies, in the interpreter


interpreted = pytest.mark.skipif(not chacha20.INTERPRETED, reason="Triton's interpreter runs where there is no GPU")


@interpreted
def test_the_block_body_is_the_cipher():
    key, nonces = random_words(8, 30), random_words(3 * 33, 31).view(33, 3)
    first = (1 << 32) - 33
    assert torch.equal(
        chacha20.launch_keystream(key, nonces[0], first, 33), chacha20.keystream_reference(key, nonces[0], first, 33)
    )
    assert torch.equal(chacha20.launch_children(key, nonces), chacha20.children_reference(key, nonces))
    assert chacha20.launch_children(key, nonces[:0]).shape == (0, 8)


@interpreted
@pytest.mark.parametrize("box", [([700], [13], [601]), ([3, 41], [1, 5], [2, 30]), ([], [], []), ([4], [2], [0])])
def test_the_bodies_of_draws_have_the_bits_of_the_reference(box):
    key = random_words(8, 32)
    assert torch.equal(chacha20.launch_bits(key, *box), chacha20.bits_reference(key, *box))
    words = chacha20.launch_words(key, chacha20.FINE, *box)
    assert torch.equal(words, chacha20.words_reference(key, chacha20.FINE, *box))
    shape, start, size = box
    close(chacha20.launch_normal(key, shape, start, size, -INF, INF, torch.float32), key, box, rtol=1e-6)
    close(chacha20.launch_normal(key, shape, start, size, -INF, INF, torch.float64), key, box, rtol=5e-7)


def close(got: Tensor, key: Tensor, box, *, rtol: float) -> None:
    shape, start, size = box
    want = chacha20.normal_reference(key.cpu(), shape, start, size, -INF, INF, got.dtype)
    torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=0)


@interpreted
def test_the_normal_body_refines_far_tails():
    key, places = rare_places()
    for i in places[:2].tolist():
        box = [1 << 20], [i - 5], [9]
        z = chacha20.launch_normal(key, *box, -INF, INF, torch.float32)
        assert z.abs().max() > 4.1
        close(z, key, box, rtol=1e-6)


@interpreted
def test_the_float32_law_is_within_5e_7_of_the_inverse_distribution():
    tail = torch.cat([planted_words()[0], random_words(2000, 33) >> 1, random_words(2000, 34) >> 17])
    fine = torch.cat([planted_words()[1], random_words(4000, 35)])
    out = torch.empty(len(tail))
    _law_body[(1,)](tail, fine, out, len(tail), BLOCK=8192)
    torch.testing.assert_close(out.double(), chacha20.normal_from_words(tail, fine), rtol=5e-7, atol=0)
    _law_body[(1,)](tail + (1 << 31), fine, out, len(tail), BLOCK=8192)
    torch.testing.assert_close(-out.double(), chacha20.normal_from_words(tail, fine), rtol=5e-7, atol=0)


@jit
def _law_body(words_ptr, fine_ptr, out_ptr, count, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + index, mask=index < count, other=0).to(tl.uint32)
    fine = tl.load(fine_ptr + index, mask=index < count, other=0).to(tl.uint32)
    tail = words & 0x7FFFFFFF
    z = tl.where(tail < 65536, chacha20._far(tail, fine), chacha20._near(tail))
    tl.store(out_ptr + index, chacha20._signed(z, words), mask=index < count)


# ---------------------------------------------------------------- on a GPU

BOXES = [([100, 63], [7, 5], [90, 50]), ([1 << 20], [0], [1 << 20]), ([1 << 36], [(1 << 36) - 40], [40]), ([], [], [])]


@pytest.mark.gpu
@pytest.mark.parametrize("box", BOXES)
def test_gpu_has_the_bits_of_the_cpu(box):
    key, nonces = rare_places()[0], random_words(3 * 100, 14).view(100, 3)
    there = key.cuda()
    assert torch.equal(
        chacha20.keystream(there, nonces[0].cuda(), 9, 100).cpu(), chacha20.keystream(key, nonces[0], 9, 100)
    )
    assert torch.equal(chacha20.children(there, nonces.cuda()).cpu(), chacha20.children(key, nonces))
    for purpose in (0, chacha20.FINE):
        words = chacha20.words_reference(key, purpose, *box)
        assert torch.equal(chacha20.launch_words(there, purpose, *box).cpu(), words)
    if box[0] != [1 << 36]:
        assert torch.equal(chacha20.bits(there, *box).cpu(), chacha20.bits(key, *box))
        cut = chacha20.normal(there, *box, -1, 2, torch.float64).cpu()
        torch.testing.assert_close(cut, chacha20.normal(key, *box, -1, 2, torch.float64), rtol=1e-13, atol=1e-15)
        close(chacha20.normal(there, *box, -INF, INF, torch.float64), key, box, rtol=5e-7)
    z = chacha20.normal(there, *box, -INF, INF, torch.float32)
    close(z, key, box, rtol=1e-6)
    assert torch.equal(z, chacha20.normal(there, *box, -INF, INF, torch.float32))
    assert torch.equal(z.bfloat16(), chacha20.normal(there, *box, -INF, INF, torch.bfloat16))


@pytest.mark.gpu
def test_gpu_windows_are_bitwise_slices():
    key = rare_places()[0].cuda()
    whole = chacha20.normal(key, [1024, 1024], [0, 0], [1024, 1024], -INF, INF, torch.float32)
    for (row, rows), (column, columns) in [((0, 512), (0, 1024)), ((3, 77), (0, 1024)), ((0, 1024), (130, 700))]:
        part = chacha20.normal(key, [1024, 1024], [row, column], [rows, columns], -INF, INF, torch.float32)
        assert torch.equal(part, whole[row : row + rows, column : column + columns])


@pytest.mark.gpu
def test_gpu_draws_replay_in_a_graph():
    key, nonces = random_words(8, 40).cuda(), random_words(6, 41).view(2, 3).cuda()

    def draws() -> list[Tensor]:
        children = chacha20.children(key, nonces)
        return [children, chacha20.normal(children[1], [500, 70], [3, 1], [400, 60], -INF, INF, torch.float32)]

    draws()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = draws()
    for seed in (42, 43):
        key.copy_(random_words(8, seed))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(recorded, draws()))


# ---------------------------------------------------------------- the law of 64 bits


def wide_tails() -> Tensor:
    """63 bits each: every size down to 1, random ones, and both sides of where one function takes over from another."""
    edges = [round(p * 2**64) for p in (0.075, 2.0**-17, 1.38879438649640e-11)]
    around = [edge + step for edge in edges for step in (-3, -2, -1, 0, 1, 2)]
    random = (random_words(4000, 51) << 31 | random_words(4000, 52) >> 1) & ((1 << 63) - 1)
    return torch.cat([torch.tensor([0, 1, (1 << 63) - 1] + [1 << e for e in range(63)] + around), random])


def test_the_law_of_64_bits_inverts_the_distribution_and_is_symmetric():
    tails, zero = wide_tails(), torch.zeros(1, dtype=torch.int64)
    z = chacha20.wide_normal_from_bits(tails, zero)
    assert torch.isfinite(z).all()
    assert (z >= 0).all()
    far = tails < 1 << 47
    p = np.where(far.numpy(), tails.double() * 2.0**-64 + 2.0**-129, (tails.double() + 0.5) * 2.0**-64)
    np.testing.assert_allclose(special.ndtr(-z.numpy()), p, rtol=1e-12)
    assert torch.equal(chacha20.wide_normal_from_bits(tails | -(1 << 63), zero), -z)
    ordered = chacha20.wide_normal_from_bits(tails.sort().values, zero)
    assert (ordered.diff() <= 0).all()
    assert float(chacha20.wide_normal_from_bits(zero, zero)) > 13
    high = torch.tensor([-1])  # all ones: nearly 2^64 further down the tail, unsigned
    assert float(chacha20.wide_normal_from_bits(zero, high)) == pytest.approx(-special.ndtri(2.0**-64), rel=1e-12)


def test_values_of_64_bits_lie_closer_than_any_grid_that_noise_is_rounded_to():
    """2^-40 of a standard deviation apart at most, also where 63 bits are few: far out the further bits count."""
    near = torch.tensor([1 << 62, 1 << 58, 1 << 50, 1 << 47])
    zero = torch.zeros_like(near)
    step = torch.tensor([1 << 10, 1 << 8, 1 << 4, 1])
    gaps = chacha20.wide_normal_from_bits(near, zero) - chacha20.wide_normal_from_bits(near + step, zero)
    assert (gaps >= 0).all()
    assert (gaps < 2.0**-40).all()
    far, fine = torch.tensor([1 << 40, 1 << 20, 5]), torch.tensor([1 << 40] * 3)
    gaps = chacha20.wide_normal_from_bits(far, fine) - chacha20.wide_normal_from_bits(far, fine + (1 << 12))
    assert (gaps.abs() < 2.0**-40).all()


@interpreted
def test_the_wide_body_is_near_the_inverse_distribution_and_without_gaps():
    tails = wide_tails()
    fine = random_words(len(tails), 54) << 32 | random_words(len(tails), 55)
    np.testing.assert_allclose(
        wide_law(tails, fine), chacha20.wide_normal_from_bits(tails, fine), rtol=5e-7, atol=1e-12
    )
    # Neighbouring bits give neighbouring values, everywhere and where the functions meet, to far below any grid.
    start = tails[(tails > 1 << 31) & (tails < (1 << 63) - (1 << 34))]
    start = torch.cat([start, start - 1])
    nothing = torch.zeros_like(start)
    gaps = wide_law(start, nothing) - wide_law(start + (start >> 30), nothing)
    assert (gaps.abs() < 2.0**-28).all()
    assert (gaps > -(2.0**-45)).all()


def wide_law(tails: Tensor, fine: Tensor) -> Tensor:
    """The law as the kernel has it."""
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
    z = chacha20._wide_refined(high, low, more, last, chacha20._wide_usual(high, low))
    tl.store(out_ptr + index, z, mask=index < count)


@interpreted
def test_the_wide_body_refines_far_tails():
    key, shape = random_words(8, 53), [1 << 18]
    bits = chacha20.bits(key, shape, [0], shape)
    places = (bits & ((1 << 63) - 1) < 1 << 47).nonzero()[:, 0].tolist()
    assert places
    for i in places[:2]:
        box = shape, [max(i - 3, 0)], [6]
        z = chacha20.launch_normal(key, *box, -INF, INF, torch.float64)
        assert z.abs().max() > 4.1
        close(z, key, box, rtol=5e-7)
        assert torch.equal(
            chacha20.normal(key, *box, -INF, INF, torch.float64),
            chacha20.normal_reference(key, *box, -INF, INF, torch.float64),
        )
