"""ChaCha20 as a counter-based random source (RFC 7539, now RFC 8439), and the normal law drawn from it.

    state = constants_4 | key_8 | counter_1 | nonce_3                         (sixteen 32-bit words)
    block = state + (diagonal round . column round)^10 (state)                (mod 2^32)
    quarter round:  a += b; d = (d ^ a) <<< 16;  c += d; b = (b ^ c) <<< 12;
                    a += b; d = (d ^ a) <<<  8;  c += d; b = (b ^ c) <<<  7

Numbers are drawn from the stream with nonce 0: element ``i`` is its words ``2i`` (low half) and ``2i + 1``
(high half), a function of the key and ``i`` alone, so any part of a draw can be had without the rest. 32-bit
words and 64-bit elements are both held in int64.

    >>> words = keystream(key, nonce, 0, 4)                      # (64,) words in [0, 2^32)
    >>> x = bits(key, (1024, 768), (512, 0), (512, 768))         # the lower half of a (1024, 768) draw
    >>> z = normal(key, (1024, 768), (512, 0), (512, 768), -inf, inf, torch.float32)

Letters: K = 8 key words, N = 3 nonce words, B blocks, W = 16 words of a block, R runs (of consecutive
elements in a box), L elements of a run.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

WORDS = 16
"""32-bit words of a block."""
ELEMENTS = 8
"""64-bit elements of a block."""
MAX_BLOCKS = 1 << 32
"""The counter is one 32-bit word."""

_MASK = 0xFFFFFFFF
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"

# ---------------------------------------------------------------- reference


def _rotate(x: Tensor, n: int) -> Tensor:
    return (x << n & _MASK) | (x >> (32 - n))


def _quarter_rounds(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    for left, right in ((16, 12), (8, 7)):
        a = a + b & _MASK
        d = _rotate(d ^ a, left)
        c = c + d & _MASK
        b = _rotate(b ^ c, right)
    return a, b, c, d


def blocks_reference(key_K: Tensor, nonce_N: Tensor, counter_B: Tensor) -> Tensor:
    """The block function at every counter: int64 ``(B, W)``. A row of the 4x4 state is ``(4, B)``."""
    shape = (4, counter_B.shape[0])
    constants = torch.stack([key_K.new_full((), word) for word in _CONSTANTS])
    last = torch.cat([counter_B[None], nonce_N[:, None].expand(3, shape[1])]) & _MASK
    key = key_K & _MASK
    start = (constants[:, None].expand(shape), key[:4, None].expand(shape), key[4:, None].expand(shape), last)
    a, b, c, d = start
    for _ in range(10):
        a, b, c, d = _quarter_rounds(a, b, c, d)
        a, b, c, d = _quarter_rounds(a, b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0))
        b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
    return torch.cat([row + first & _MASK for row, first in zip((a, b, c, d), start)]).T


def keystream_reference(key_K: Tensor, nonce_N: Tensor, first_block: int, blocks: int) -> Tensor:
    """Words of ``blocks`` blocks from ``first_block`` on: int64 ``(blocks * 16,)``, each in [0, 2^32)."""
    _check_range(first_block, blocks)
    counter_B = torch.arange(first_block, first_block + blocks, device=key_K.device)
    return blocks_reference(key_K, nonce_N, counter_B).reshape(-1)


def bits_reference(key_K: Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Tensor:
    """64 bits for every element of a box in a row-major tensor: the blocks each run touches, cut to it."""
    first, outer, length = _runs(shape, start, size)
    starts_R = torch.full((1,), first, device=key_K.device)
    for count, stride in outer:
        starts_R = (starts_R[:, None] + torch.arange(count, device=key_K.device) * stride).reshape(-1)
    per_run = (length + ELEMENTS - 2) // ELEMENTS + 1  # a run may begin on the last element of a block
    counter_RB = starts_R[:, None] // ELEMENTS + torch.arange(per_run, device=key_K.device)
    words = blocks_reference(key_K, key_K.new_zeros(3), counter_RB.reshape(-1))
    low_high = words.reshape(len(starts_R), per_run * ELEMENTS, 2)
    elements = low_high[..., 0] | low_high[..., 1] << 32
    index_RL = (starts_R % ELEMENTS)[:, None] + torch.arange(length, device=key_K.device)
    return elements.gather(1, index_RL).reshape(list(size))


def normal_from_bits(bits: Tensor) -> Tensor:
    """``±Φ⁻¹(|s|)``, ``s = (bits + 1/2) 2⁻⁶⁴``, in float64: a sign and 63 bits of tail; reaches 9.1 sigma."""
    signed = _signed_tail(bits)
    return torch.special.ndtri(signed.abs()).copysign_(signed)


def truncated_normal_from_bits(bits: Tensor, lower: float, upper: float) -> Tensor:
    """``Φ⁻¹(Φ(lower) + u (Φ(upper) - Φ(lower)))`` in float64, from the end that keeps the tail exact."""
    if lower >= 0:
        return -truncated_normal_from_bits(bits, -upper, -lower)
    below, above, signed = _cdf(lower), _cdf(-upper), _signed_tail(bits)
    if upper <= 0:  # 2 |s| is u; 1 - Φ(upper) would lose the digits that Φ(upper) has
        x = torch.special.ndtri(below + 2 * signed.abs() * (_cdf(upper) - below))
    else:
        mass = signed.abs() * (1 - below - above)
        x = torch.special.ndtri(torch.where(signed < 0, mass + below, mass + above))
        x = torch.where(signed < 0, x, -x)
    return x.clamp(lower, upper)


def normal_reference(
    key_K: Tensor,
    shape: Sequence[int],
    start: Sequence[int],
    size: Sequence[int],
    lower: float,
    upper: float,
    dtype: torch.dtype,
) -> Tensor:
    """Normal values cut to [lower, upper] for every element of a box."""
    return _law(lower, upper)(bits_reference(key_K, shape, start, size)).to(dtype)


def _signed_tail(bits: Tensor) -> Tensor:
    return bits.double().add_(0.5).mul_(2.0**-64)  # in [-1/2, 1/2], never 0, symmetric


def _cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _law(lower: float, upper: float) -> Callable[[Tensor], Tensor]:
    if lower == -math.inf and upper == math.inf:
        return normal_from_bits
    return lambda bits: truncated_normal_from_bits(bits, lower, upper)


def _runs(shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> tuple[int, list[tuple[int, int]], int]:
    """The box as runs: the first element of all, (count, stride) of each outer dim, the length of a run."""
    _check_range(0, -(-math.prod(shape) // ELEMENTS))
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    outer = len(shape)
    while outer > 0 and size[outer - 1] == shape[outer - 1]:  # whole trailing dims join the run
        outer -= 1
    outer = max(outer - 1, 0)
    first = sum(begin * stride for begin, stride in zip(start, strides))
    return first, list(zip(size, strides))[:outer], math.prod(size[outer:])


def _check_range(first_block: int, blocks: int) -> None:
    if first_block < 0 or first_block + blocks > MAX_BLOCKS:
        raise ValueError(
            f"a ChaCha20 stream has blocks 0..2^32-1, got {first_block}..{first_block + blocks - 1}; "
            "split the key and draw in parts"
        )


# ---------------------------------------------------------------- CPU: the `cryptography` package's cipher

_PIECE = 1 << 18
"""Elements worked on at a time: scratch of a few MB, near the cache, with work for several threads."""
_GAP = 1 << 10
"""Elements between two runs below which drawing through the gap costs less than starting the cipher again."""
_ZEROS = memoryview(bytes(8 * (_PIECE + 2 * ELEMENTS)))


def _cipher(key_K: Tensor, nonce_N: Sequence[int] = (0, 0, 0)) -> Callable[[int], Any]:
    """``counter -> encryptor``; reads the key once."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    key = struct.pack("<8I", *(word & _MASK for word in key_K.tolist()))
    nonce = struct.pack("<3I", *(word & _MASK for word in nonce_N))

    def encryptor(block: int) -> Any:
        return Cipher(algorithms.ChaCha20(key, struct.pack("<I", block) + nonce), mode=None).encryptor()

    return encryptor


def _keystream_cpu(key_K: Tensor, nonce_N: Tensor, first_block: int, blocks: int) -> Tensor:
    _check_range(first_block, blocks)
    raw = _cipher(key_K, nonce_N.tolist())(first_block).update(bytes(4 * WORDS * blocks))
    return torch.from_numpy(np.frombuffer(raw, dtype="<u4").astype(np.int64))


def _stretch(cipher: Callable[[int], Any], first: int, count: int) -> np.ndarray:
    """Elements ``first .. first + count - 1`` of the stream; ``count`` at most _PIECE."""
    skip = first % ELEMENTS
    out = np.empty(-(-(skip + count) // ELEMENTS) * ELEMENTS, dtype="<i8")
    cipher(first // ELEMENTS).update_into(_ZEROS[: out.nbytes], out.view(np.uint8))
    return out[skip : skip + count]


def _draw(cipher: Callable[[int], Any], starts: np.ndarray, length: int) -> np.ndarray:
    """The elements of every run, (R, L): close, evenly spaced runs from one stretch, others one by one."""
    if len(starts) == 1:
        return _stretch(cipher, int(starts[0]), length)[None]
    out, steps = np.empty((len(starts), length), dtype=np.int64), np.diff(starts)
    step = int(steps[0])
    most = (_PIECE - length) // step + 1 if step - length <= _GAP else 1
    breaks = (np.flatnonzero(steps != step) + 1).tolist()
    for begin, end in zip([0, *breaks], [*breaks, len(starts)]):
        for low in range(begin, end, most):
            count = min(most, end - low)
            stretch = _stretch(cipher, int(starts[low]), (count - 1) * step + length)
            out[low : low + count] = as_strided(stretch, (count, length), (8 * step, 8))
    return out


def _fill_cpu(
    key_K: Tensor, box: tuple[Sequence[int], ...], law: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Tensor:
    """``law(bits of the box)``, a piece at a time: the only memory the size of the box is the result."""
    size, cipher = list(box[2]), _cipher(key_K)
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    start, outer, length = _runs(*box)
    if not outer and length <= _PIECE:
        return law(torch.from_numpy(_stretch(cipher, start, length))).to(dtype).view(size)
    starts = np.array([start])
    for count, stride in outer:
        starts = (starts[:, None] + np.arange(count) * stride).reshape(-1)
    out = torch.empty((len(starts), length), dtype=dtype)
    columns = min(length, _PIECE)
    rows = _PIECE // columns
    for row in range(0, len(starts), rows):
        for column in range(0, length, columns):
            part = out[row : row + rows, column : column + columns]
            part.copy_(law(torch.from_numpy(_draw(cipher, starts[row : row + rows] + column, part.shape[1]))))
    return out.view(size)


def _bits_cpu(key_K: Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Tensor:
    return _fill_cpu(key_K, (shape, start, size), lambda bits: bits, torch.int64)


def _normal_cpu(
    key_K: Tensor,
    shape: Sequence[int],
    start: Sequence[int],
    size: Sequence[int],
    lower: float,
    upper: float,
    dtype: torch.dtype,
) -> Tensor:
    return _fill_cpu(key_K, (shape, start, size), _law(lower, upper), dtype)


# ---------------------------------------------------------------- ops
# Library.define, not custom_op, which raises inside torch.func.grad. Opaque to the compiler, which would make
# its own Φ⁻¹ and round it differently; and the key is read when the op runs, so it may be a traced tensor.

_library = torch.library.Library("fdp_kernels", "FRAGMENT")
_BOX = "Tensor key, SymInt[] shape, SymInt[] start, SymInt[] size"


def _define(name: str, schema: str, reference: Callable, cpu: Callable, fake: Callable) -> None:
    _library.define(f"{name}({schema}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, reference, "CompositeExplicitAutograd")
    if find_spec("cryptography"):  # without it CPU tensors get the same bits from the reference, slower
        _library.impl(name, cpu, "CPU")
    torch.library.register_fake(f"fdp_kernels::{name}", fake, lib=_library)


_define(
    "keystream",
    "Tensor key, Tensor nonce, SymInt first_block, SymInt blocks",
    keystream_reference,
    _keystream_cpu,
    lambda key, nonce, first_block, blocks: key.new_empty((blocks * WORDS,)),
)
_define(
    "bits",
    _BOX,
    bits_reference,
    _bits_cpu,
    lambda key, shape, start, size: key.new_empty(size),
)
_define(
    "normal",
    f"{_BOX}, float lower, float upper, ScalarType dtype",
    normal_reference,
    _normal_cpu,
    lambda key, shape, start, size, lower, upper, dtype: key.new_empty(size, dtype=dtype),
)

keystream = torch.ops.fdp_kernels.keystream
"""``(key_K, nonce_N, first_block, blocks)``: as :func:`keystream_reference`."""
bits = torch.ops.fdp_kernels.bits
"""``(key_K, shape, start, size)``: as :func:`bits_reference`."""
normal = torch.ops.fdp_kernels.normal
"""``(key_K, shape, start, size, lower, upper, dtype)``: as :func:`normal_reference`."""
