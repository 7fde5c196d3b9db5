"""The cipher against RFC 8439, the ops against their references, the normal law against scipy."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from fdp_kernels import chacha20
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import special
from torch import Tensor

INF = math.inf
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
        key = random_words(8, 3)
        stream = chacha20.keystream_reference(key, torch.zeros(3, dtype=torch.int64), 0, -(-math.prod(shape) // 8))
        whole = (stream[0::2] | stream[1::2] << 32)[: math.prod(shape)].view(shape)
        want = whole[tuple(slice(b, b + n) for b, n in zip(start, size))]
        assert torch.equal(chacha20.bits(key, *box), want)
        assert torch.equal(chacha20.bits_reference(key, *box), want)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            normal = chacha20.normal_from_bits(want).to(dtype)
            assert torch.equal(chacha20.normal(key, *box, -INF, INF, dtype), normal)
            assert torch.equal(chacha20.normal_reference(key, shape, start, size, -INF, INF, dtype), normal)

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


def extreme_bits() -> Tensor:
    top = (1 << 63) - 1
    tails = [0, 1, 2, 3, 7, top, top - 1, 1 << 62] + [1 << e for e in range(63)] + [3 << e for e in range(61)]
    return torch.tensor(tails + [-1 - tail for tail in tails])


def test_tails_beyond_eight_sigma_are_reached_and_symmetric():
    values = chacha20.normal_from_bits(torch.tensor([0, -1]))
    assert values[0] > 9.1
    assert values[0] == -values[1]
    every = chacha20.normal_from_bits(extreme_bits())
    assert every.isfinite().all()
    half = len(every) // 2
    assert torch.equal(every[:half], -every[half:])
    tail = chacha20.normal_from_bits(torch.arange(1, 2000))
    assert (tail > 8).all()
    assert (tail.diff() < 0).all()


@pytest.mark.parametrize("bits", [extreme_bits(), random_words(4000, 7) << 32 | random_words(4000, 8)])
def test_normal_has_its_tail_probability(bits):
    signed = [(int(b) + 0.5) * 2.0**-64 if abs(int(b)) < 1 << 52 else int(b) * 2.0**-64 for b in bits]
    x = chacha20.normal_from_bits(bits).numpy()
    error = special.log_ndtr(-np.abs(x)) - np.log(np.abs(signed))
    assert np.abs(error).max() < 2e-13


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


def test_untruncated_limits_are_the_plain_normal():
    bits = extreme_bits()
    assert torch.equal(chacha20.truncated_normal_from_bits(bits, -INF, INF), chacha20.normal_from_bits(bits))


def test_ops_pass_opcheck():
    key, nonce = random_words(8, 11), random_words(3, 12)
    box = ([6, 5], [1, 2], [4, 3])
    torch.library.opcheck(chacha20.keystream.default, (key, nonce, 3, 2))
    torch.library.opcheck(chacha20.bits.default, (key, *box))
    torch.library.opcheck(chacha20.normal.default, (key, *box, -INF, INF, torch.bfloat16))


@pytest.mark.gpu
def test_gpu_has_the_bits_of_the_cpu():
    key, nonce = random_words(8, 13), random_words(3, 14)
    box = ([100, 63], [7, 5], [90, 50])
    stream = chacha20.keystream(key.cuda(), nonce.cuda(), 9, 100).cpu()
    assert torch.equal(stream, chacha20.keystream(key, nonce, 9, 100))
    assert torch.equal(chacha20.bits(key.cuda(), *box).cpu(), chacha20.bits(key, *box))
    there = chacha20.normal(key.cuda(), *box, -INF, INF, torch.float64).cpu()
    torch.testing.assert_close(there, chacha20.normal(key, *box, -INF, INF, torch.float64), rtol=1e-14, atol=0)
