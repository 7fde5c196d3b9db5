"""Tests of ChaCha20: the RFC 8439 vectors, ops and Triton bodies against the reference, boxes against the stream."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from fdp_kernels import chacha20
from fdp_kernels.op import INTERPRETED
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

NO_NONCE = torch.zeros(3, dtype=torch.int64)
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


def test_child_keys_are_the_first_words_of_their_streams():
    key, nonces = random_words(8, 20), random_words(3 * 5, 21).view(5, 3)
    want = torch.stack([chacha20.keystream_reference(key, nonce, 0, 1)[:8] for nonce in nonces])
    assert torch.equal(chacha20.child_keys(key, nonces), want)
    assert chacha20.child_keys(key, nonces[:0]).shape == (0, 8)


@st.composite
def boxes(draw):
    shape = draw(st.lists(st.integers(1, 13), max_size=4))
    start = [draw(st.integers(0, extent)) for extent in shape]
    return shape, start, [draw(st.integers(0, extent - begin)) for begin, extent in zip(start, shape)]


def slices_of_stream(key, nonce, box):
    """Return the 64-bit elements and the 32-bit words of a box, each cut out of the whole stream of its leaf."""
    shape, start, size = box
    count, inside = math.prod(shape), tuple(slice(b, b + n) for b, n in zip(start, size))
    stream = chacha20.keystream_reference(key, nonce, 0, -(-count // 8))
    elements = (stream[0::2] | stream[1::2] << 32)[:count]
    return elements.view(shape)[inside], stream[:count].view(shape)[inside]


@pytest.mark.parametrize(("piece", "gap"), [(1 << 18, 1 << 10), (16, 4), (24, 0)])
def test_any_box_is_a_slice_of_the_stream(piece, gap, monkeypatch):
    monkeypatch.setattr(chacha20, "_PIECE_ELEMENTS", piece)  # small pieces split runs, and split between runs
    monkeypatch.setattr(chacha20, "_GAP_ELEMENTS", gap)

    @settings(deadline=None, max_examples=40)
    @given(box=boxes())
    @example(box=([13, 7], [0, 0], [13, 7]))
    @example(box=([9, 41], [1, 3], [8, 35]))
    @example(box=([5, 6, 7], [1, 2, 3], [3, 3, 4]))
    def check(box):
        key = random_words(8, 3)
        want, words = slices_of_stream(key, NO_NONCE, box)
        assert torch.equal(chacha20.bits(key, *box), want)
        assert torch.equal(chacha20.bits_reference(key, *box), want)
        assert torch.equal(chacha20.words_reference(key, 0, *box), words)

    check()


@pytest.fixture
def many_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("piece", [8, 64, 1 << 15])
def test_threads_draw_every_element_of_every_stream(piece, monkeypatch):
    monkeypatch.setattr(chacha20, "_THREAD_ELEMENTS", piece)
    sizes = [5, 0, 1000, 64, 1, 129]
    keys = [random_words(8, seed) for seed in range(len(sizes))]
    outs = [np.full(size, -1, dtype=np.int64) for size in sizes]
    chacha20.fill_streams([chacha20.make_cipher(key) for key in keys], outs)
    for key, size, out in zip(keys, sizes, outs):
        assert torch.equal(torch.from_numpy(out), chacha20.bits_reference(key, [size], [0], [size]))


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("broken", range(6))
def test_a_thread_that_fails_is_an_error_and_never_noise_that_was_not_drawn(broken, monkeypatch):
    monkeypatch.setattr(chacha20, "_THREAD_ELEMENTS", 8)
    good = chacha20.make_cipher(random_words(8, 0))

    def bad(block):
        raise MemoryError("no room")

    ciphers = [bad if i == broken else good for i in range(6)]
    with pytest.raises(MemoryError, match="no room"):
        chacha20.fill_streams(ciphers, [np.zeros(8, dtype=np.int64) for _ in ciphers])


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


def test_ops_pass_opcheck():
    key, nonce = random_words(8, 11), random_words(3, 12)
    torch.library.opcheck(chacha20.keystream.default, (key, nonce, 3, 2))
    torch.library.opcheck(chacha20.child_keys.default, (key, random_words(6, 13).view(2, 3)))
    torch.library.opcheck(chacha20.bits.default, (key, [6, 5], [1, 2], [4, 3]))


# ---------------------------------------------------------------- Triton bodies, in the interpreter

interpreted = pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter runs where there is no GPU")
SMALL_BOXES = [([700], [13], [601]), ([3, 41], [1, 5], [2, 30]), ([], [], []), ([4], [2], [0])]


@interpreted
def test_the_block_body_is_the_cipher():
    key, nonces = random_words(8, 30), random_words(3 * 33, 31).view(33, 3)
    first = (1 << 32) - 33
    assert torch.equal(
        chacha20.launch_keystream(key, nonces[0], first, 33), chacha20.keystream_reference(key, nonces[0], first, 33)
    )
    assert torch.equal(chacha20.launch_child_keys(key, nonces), chacha20.child_keys_reference(key, nonces))
    assert chacha20.launch_child_keys(key, nonces[:0]).shape == (0, 8)


@interpreted
@pytest.mark.parametrize("box", SMALL_BOXES)
def test_bodies_draw_the_bits_of_the_reference(box):
    key = random_words(8, 32)
    assert torch.equal(chacha20.launch_bits(key, *box), chacha20.bits_reference(key, *box))
    assert torch.equal(chacha20.launch_words(key, 4, *box), chacha20.words_reference(key, 4, *box))


# ---------------------------------------------------------------- on a GPU

BOXES = [([100, 63], [7, 5], [90, 50]), ([1 << 20], [0], [1 << 20]), ([1 << 36], [(1 << 36) - 40], [40]), ([], [], [])]


@pytest.mark.gpu
@pytest.mark.parametrize("box", BOXES)
def test_gpu_draws_the_bits_of_the_cpu(box):
    key, nonces = random_words(8, 4), random_words(3 * 100, 14).view(100, 3)
    there = key.cuda()
    assert torch.equal(
        chacha20.keystream(there, nonces[0].cuda(), 9, 100).cpu(), chacha20.keystream(key, nonces[0], 9, 100)
    )
    assert torch.equal(chacha20.child_keys(there, nonces.cuda()).cpu(), chacha20.child_keys(key, nonces))
    for purpose in (0, 4):
        words = chacha20.words_reference(key, purpose, *box)
        assert torch.equal(chacha20.launch_words(there, purpose, *box).cpu(), words)
    if box[0] != [1 << 36]:
        assert torch.equal(chacha20.bits(there, *box).cpu(), chacha20.bits(key, *box))
