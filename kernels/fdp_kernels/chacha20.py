"""ChaCha20 as a counter-based random source (RFC 7539, now RFC 8439), and the normal law drawn from it.

    state = constants_4 | key_8 | counter_1 | nonce_3                         (sixteen 32-bit words)
    block = state + (diagonal round . column round)^10 (state)                (mod 2^32)
    quarter round:  a += b; d = (d ^ a) <<< 16;  c += d; b = (b ^ c) <<< 12;
                    a += b; d = (d ^ a) <<<  8;  c += d; b = (b ^ c) <<<  7

Numbers are drawn from the stream with nonce 0, each a function of the key and of its place ``i`` alone, so that any
part of a draw can be had without the rest. A 64-bit element is words ``2i`` (low half) and ``2i + 1`` (high half). A
normal one in float64 takes such an element, a sign and 63 bits ``m``, and needs no more unless it lies far out; one in
less than float64, for what no noise depends on, takes word ``i``, a sign and 31 bits:

    z = sign * -Φ⁻¹(p),   p = (m + 1/2) 2⁻⁶⁴                     m >= 2^47
                          p = (m 2^64 + r + 1/2) 2⁻¹²⁸           m < 2^47;  r: element i under nonce (4, 0, 0)
    float32:              p = (m + 1/2) 2⁻³²                     m >= 2^16
                          p = (m 2^32 + r + 1/2) 2⁻⁶⁴            m < 2^16;  r: word i under nonce (4, 0, 0)

Words and elements are both held in int64. The specification is in float64; on a GPU, values come from Wichura's
rational functions (AS 241, PPND7, Applied Statistics 37, 1988): of the same bits, within 1e-6 of the value. In float64
those functions are joined without a gap and evaluated in float64, so that neighbouring bits give neighbouring values:
between -8 and 8 the values lie less than 2^-40 apart.

    >>> words = keystream(key, nonce, 0, 4)                      # (64,) words in [0, 2^32)
    >>> x = bits(key, (1024, 768), (512, 0), (512, 768))         # the lower half of a (1024, 768) draw
    >>> z = normal(key, (1024, 768), (512, 0), (512, 768), -inf, inf, torch.float64)

Letters: K = 8 key words, N = 3 nonce words, B blocks, W = 16 words of a block, R runs (of consecutive
elements in a box), L elements of a run, C children.
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

from fdp_kernels.op import define, jit, tl, triton

WORDS = 16
"""32-bit words of a block; and normal elements of one."""
ELEMENTS = 8
"""64-bit elements of a block."""
MAX_BLOCKS = 1 << 32
"""The counter is one 32-bit word."""
FINE = 4
"""The first word of the nonce under which the tail of the normal law takes its 32 further bits."""

INTERPRETED = triton is not None and triton.knobs.runtime.interpret  # pyright: ignore
"""Whether kernel bodies run on the CPU, in Triton's interpreter."""

_MASK = 0xFFFFFFFF
_TAIL = 0x7FFFFFFF
_RARE = 1 << 16
_WIDE_TAIL = (1 << 63) - 1
_WIDE_RARE = 1 << 47
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


def blocks_reference(key_K: Tensor, nonce_BN: Tensor, counter_B: Tensor) -> Tensor:
    """The block function at every nonce and counter: int64 ``(B, W)``. A row of the 4x4 state is ``(4, B)``."""
    shape = (4, counter_B.shape[0])
    constants = torch.stack([key_K.new_full((), word) for word in _CONSTANTS])
    last = torch.cat([counter_B[None], nonce_BN.T]) & _MASK
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
    return blocks_reference(key_K, nonce_N.expand(blocks, 3), counter_B).reshape(-1)


def children_reference(key_K: Tensor, nonce_CN: Tensor) -> Tensor:
    """The first eight words of the stream of every nonce, keys themselves: int64 ``(C, K)``."""
    return blocks_reference(key_K, nonce_CN, key_K.new_zeros(nonce_CN.shape[0]))[:, :8].contiguous()


def bits_reference(
    key_K: Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int], purpose: int = 0
) -> Tensor:
    """64 bits for every element of a box in a row-major tensor, from the stream with nonce ``(purpose, 0, 0)``."""
    low_high = _units_reference(key_K, purpose, (shape, start, size), ELEMENTS)
    return (low_high[..., 0] | low_high[..., 1] << 32).reshape(list(size))


def words_reference(
    key_K: Tensor, purpose: int, shape: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> Tensor:
    """32 bits for every element of a box, from the stream with nonce ``(purpose, 0, 0)``."""
    return _units_reference(key_K, purpose, (shape, start, size), WORDS).reshape(list(size))


def _units_reference(key_K: Tensor, purpose: int, box: tuple[Sequence[int], ...], per_block: int) -> Tensor:
    """Words of every element of a box, ``(R, L, words of an element)``: the blocks each run touches, cut to it."""
    starts_R, length = _run_starts(box, per_block, key_K.device)
    per_run = (length + per_block - 2) // per_block + 1  # a run may begin on the last element of a block
    counter_RB = starts_R[:, None] // per_block + torch.arange(per_run, device=key_K.device)
    nonce_N = torch.stack([key_K.new_full((), word) for word in (purpose, 0, 0)])
    words = blocks_reference(key_K, nonce_N.expand(counter_RB.numel(), 3), counter_RB.reshape(-1))
    units = words.reshape(len(starts_R), per_run * per_block, WORDS // per_block)
    index_RL = (starts_R % per_block)[:, None] + torch.arange(length, device=key_K.device)
    return units.gather(1, index_RL[..., None].expand(-1, -1, units.shape[-1]))


def normal_from_words(words: Tensor, fine: Tensor) -> Tensor:
    """The law of this module's equation in float64; ``fine`` counts only where the tail of ``words`` is below 2^16.

    Guarantees:
      - symmetric, monotone in the tail, never 0 and never infinite; reaches 9.1 sigma with true probability.
    """
    tail = words & _TAIL
    near = tail.double().add_(0.5).mul_(2.0**-32)
    far = (tail << 32 | fine).double().add_(0.5).mul_(2.0**-64)
    z = torch.special.ndtri(far.where(tail < _RARE, near))
    return z.where(words > _TAIL, -z)


def wide_normal_from_bits(bits: Tensor, fine: Tensor) -> Tensor:
    """The law of 64 bits in float64; ``fine`` counts only where the 63 bits of the tail are below 2^47.

    Guarantees:
      - symmetric, monotone in the tail, never infinite; reaches 13 sigma with true probability.
    """
    tail = bits & _WIDE_TAIL
    near = tail.double().add_(0.5).mul_(2.0**-64)
    below = (fine.double() + (fine < 0).double() * 2.0**64).add_(0.5).mul_(2.0**-128)  # unsigned
    z = torch.special.ndtri((tail.double() * 2.0**-64 + below).where(tail < _WIDE_RARE, near))
    return z.where(bits < 0, -z)


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
    box = (shape, start, size)
    if not _unbounded(lower, upper):
        return truncated_normal_from_bits(bits_reference(key_K, *box), lower, upper).to(dtype)
    if dtype == torch.float64:
        return wide_normal_from_bits(bits_reference(key_K, *box), bits_reference(key_K, *box, purpose=FINE))
    return normal_from_words(words_reference(key_K, 0, *box), words_reference(key_K, FINE, *box)).to(dtype)


def _signed_tail(bits: Tensor) -> Tensor:
    return bits.double().add_(0.5).mul_(2.0**-64)  # in [-1/2, 1/2], never 0, symmetric


def _cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _unbounded(lower: float, upper: float) -> bool:
    return lower == -math.inf and upper == math.inf


def _runs(box: tuple[Sequence[int], ...], per_block: int) -> tuple[int, list[tuple[int, int]], int]:
    """The box as runs: the first element of all, (count, stride) of each outer dim, the length of a run."""
    shape, start, size = box
    _check_range(0, -(-math.prod(shape) // per_block))
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    outer = len(shape)
    while outer > 0 and size[outer - 1] == shape[outer - 1]:  # whole trailing dims join the run
        outer -= 1
    outer = max(outer - 1, 0)
    first = sum(begin * stride for begin, stride in zip(start, strides))
    return first, list(zip(size, strides))[:outer], math.prod(size[outer:])


def _run_starts(box: tuple[Sequence[int], ...], per_block: int, device: torch.device) -> tuple[Tensor, int]:
    """The first element of every run, made where it is needed, and the length of all."""
    first, outer, length = _runs(box, per_block)
    starts_R = torch.full((1,), first, device=device)
    for count, stride in outer:
        starts_R = (starts_R[:, None] + torch.arange(count, device=device) * stride).reshape(-1)
    return starts_R, length


def _check_range(first_block: int, blocks: int) -> None:
    if first_block < 0 or first_block + blocks > MAX_BLOCKS:
        raise ValueError(
            f"a ChaCha20 stream has blocks 0..2^32-1, got {first_block}..{first_block + blocks - 1}; "
            "split the key and draw in parts"
        )


# ---------------------------------------------------------------- Triton
# A tile is COUNTERS blocks. Each of the sixteen words of a block is a tensor over the counters, so that a lane makes a
# whole block and no word is made twice; joined, they stand in the order of the stream.


@jit
def _quarter_round(a, b, c, d):
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@jit
def block_words(key_ptr, counter, first, second, third):
    """The sixteen words of every block, as uint32 tensors of the shape of ``counter``; the nonce is broadcast to it."""
    zero = tl.zeros_like(counter)
    keys = key_ptr + zero  # loads of a tile settle its layout: scalars would leave one conversion to each join
    k0 = tl.load(keys + 0).to(tl.uint32)
    k1 = tl.load(keys + 1).to(tl.uint32)
    k2 = tl.load(keys + 2).to(tl.uint32)
    k3 = tl.load(keys + 3).to(tl.uint32)
    k4 = tl.load(keys + 4).to(tl.uint32)
    k5 = tl.load(keys + 5).to(tl.uint32)
    k6 = tl.load(keys + 6).to(tl.uint32)
    k7 = tl.load(keys + 7).to(tl.uint32)
    n0 = zero + first
    n1 = zero + second
    n2 = zero + third
    x0 = zero + 0x61707865
    x1 = zero + 0x3320646E
    x2 = zero + 0x79622D32
    x3 = zero + 0x6B206574
    x4 = k0
    x5 = k1
    x6 = k2
    x7 = k3
    x8 = k4
    x9 = k5
    x10 = k6
    x11 = k7
    x12 = counter
    x13 = n0
    x14 = n1
    x15 = n2
    for _ in range(10):
        x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
    return (
        x0 + 0x61707865,
        x1 + 0x3320646E,
        x2 + 0x79622D32,
        x3 + 0x6B206574,
        x4 + k0,
        x5 + k1,
        x6 + k2,
        x7 + k3,
        x8 + k4,
        x9 + k5,
        x10 + k6,
        x11 + k7,
        x12 + counter,
        x13 + n0,
        x14 + n1,
        x15 + n2,
    )


@jit
def _joined8(x0, x1, x2, x3, x4, x5, x6, x7, COUNT: tl.constexpr):
    """Eight tensors interleaved: element ``8 i + j`` is ``xj[i]``."""
    even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return tl.reshape(tl.join(even, odd), (8 * COUNT,))


@jit
def stream_words(key_ptr, purpose, counter, COUNTERS: tl.constexpr):
    """The words of consecutive blocks of the stream with nonce ``(purpose, 0, 0)``, in order: ``(16 COUNTERS,)``."""
    w = block_words(key_ptr, counter, purpose, 0, 0)
    a = tl.join(tl.join(tl.join(w[0], w[8]), tl.join(w[4], w[12])), tl.join(tl.join(w[2], w[10]), tl.join(w[6], w[14])))
    b = tl.join(tl.join(tl.join(w[1], w[9]), tl.join(w[5], w[13])), tl.join(tl.join(w[3], w[11]), tl.join(w[7], w[15])))
    return tl.reshape(tl.join(a, b), (16 * COUNTERS,))


if INTERPRETED:  # which knows no assembly

    @jit
    def _log2(x):
        return tl.log2(x)

    @jit
    def ratio(x, y):
        return x / y

    @jit
    def _wide_root(x):
        return tl.sqrt(x)

    @jit
    def _wide_ratio(x, y):
        return x / y

else:

    @jit
    def _log2(x):
        """One instruction, relative error 2⁻²²; libdevice's is twenty."""
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @jit
    def ratio(x, y):
        """``x / y`` within 2 units in the last place, for ``y`` from 2⁻¹²⁶ to 2¹²⁶."""
        return tl.inline_asm_elementwise(
            "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1
        )

    @jit
    def _wide_root(x):
        """``√x`` in float64 for ordinary ``x > 0``: 20 bits by one instruction, 60 by a step of third order."""
        y = tl.inline_asm_elementwise("rsqrt.approx.ftz.f64 $0, $1;", "=d,d", [x], tl.float64, is_pure=True, pack=1)
        root = x * y
        error = 1.0 - root * y
        return root + root * (error * (0.5 + 0.375 * error))

    @jit
    def _wide_ratio(x, y):
        """``x / y`` in float64 for ordinary ``y``, likewise."""
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f64 $0, $1;", "=d,d", [y], tl.float64, is_pure=True, pack=1)
        error = 1.0 - y * r
        ratio = x * r
        return ratio + ratio * (error + error * error)


@jit
def _near(tail):
    """-Φ⁻¹((tail + 1/2) 2⁻³²) for tails from 2^16 on: AS 241, its middle and its nearer tail, no branch."""
    from_half = ((tail ^ 0x7FFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1/2 - p, without cancellation
    r = 0.180625 - from_half * from_half
    p = (tail.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    t = tl.sqrt(_log2(p) * -0.6931471805599453) - 1.6
    central = from_half <= 0.425
    above = (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179) * from_half
    below = ((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0
    tail_above = ((0.17023821103 * t + 1.3067284816) * t + 2.7568153900) * t + 1.4234372777
    tail_below = (0.12021132975 * t + 0.73700164250) * t + 1.0
    return ratio(tl.where(central, above, tail_above), tl.where(central, below, tail_below))


@jit
def _far(tail, fine):
    """-Φ⁻¹((tail 2^32 + fine + 1/2) 2⁻⁶⁴) for tails below 2^16: AS 241, its nearer and its farther tail."""
    p = tail.to(tl.float32) * 2.3283064365386963e-10 + (fine.to(tl.float32) + 0.5) * 5.421010862427522e-20
    r = tl.sqrt(_log2(p) * -0.6931471805599453)
    t = r - 1.6
    u = r - 5.0
    near = r <= 5.0
    above = ((0.17023821103 * t + 1.3067284816) * t + 2.7568153900) * t + 1.4234372777
    below = (0.12021132975 * t + 0.73700164250) * t + 1.0
    far_above = ((0.017337203997 * u + 0.42868294337) * u + 3.0812263860) * u + 6.6579051150
    far_below = (0.012258202635 * u + 0.24197894225) * u + 1.0
    return ratio(tl.where(near, above, far_above), tl.where(near, below, far_below))


@jit
def _signed(z, words):
    return (z.to(tl.uint32, bitcast=True) | (words & 0x80000000)).to(tl.float32, bitcast=True)


@jit
def normal_tile(key_ptr, first_block, COUNTERS: tl.constexpr):
    """Normal elements ``16 first_block ..`` of a key, ``(16 COUNTERS,)`` in float32."""
    counter = (first_block + tl.arange(0, COUNTERS)).to(tl.uint32)
    words = stream_words(key_ptr, 0, counter, COUNTERS)
    tail = words & 0x7FFFFFFF
    z = _near(tail)
    rare = tail < 65536
    if tl.max(rare.to(tl.int32), 0) > 0:  # one tile of 512 in 64
        z = tl.where(rare, _far(tail, stream_words(key_ptr, 4, counter, COUNTERS)), z)
    return _signed(z, words)


@jit
def _wide_number(high, low):
    """``high 2^32 + low`` of unsigned words, in float64: as exponents and digits put together, not by conversions."""
    top = (high.to(tl.uint64) | 0x4530000000000000).to(tl.float64, bitcast=True)  # 2^84 + high 2^32
    bottom = (low.to(tl.uint64) | 0x4330000000000000).to(tl.float64, bitcast=True)  # 2^52 + low
    return (top - 19342813118337666422669312.0) + bottom  # 2^84 + 2^52


@jit
def _root_log(p):
    """√(-ln p) in float64 for 0 < p < 1/2, within 1e-7 and without a gap.

    ln of the digits 1 + x, x in [0, 1), is x ln 2 + x (1 - x) Q(x): exact at both ends, where one exponent meets the
    next.
    """
    bits = p.to(tl.uint64, bitcast=True)
    exponent = ((bits >> 52) | 0x4330000000000000).to(tl.float64, bitcast=True) - 4503599627371519.0  # 2^52 + 1023
    x = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True) - 1.0
    q = 0.029624441085345808 + -0.00629998263056584 * x
    q = -0.0662845316947021 + q * x
    q = 0.10268142062882449 + q * x
    q = -0.13909891619171894 + q * x
    q = 0.19308219807071886 + q * x
    q = -0.3068521622031952 + q * x
    return _wide_root((x - x * x) * q - (exponent + x) * 0.6931471805599453)


@jit
def _wide_tail_above(t):
    return ((0.17023819267880508 * t + 1.3067283407383865) * t + 2.756815092823142) * t + 1.4234371242575101


@jit
def _wide_tail_below(t):
    return (0.12021132975 * t + 0.73700164250) * t + 1.0


@jit
def _wide_near(p):
    """-Φ⁻¹(p) in float64 for 2⁻¹⁷ <= p <= 1/2: :func:`_near` in float64, the tail scaled to meet the middle."""
    from_half = 0.5 - p
    r = 0.180625 - from_half * from_half
    t = _root_log(p) - 1.6
    central = from_half <= 0.425
    above = (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179) * from_half
    below = ((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0
    return _wide_ratio(tl.where(central, above, _wide_tail_above(t)), tl.where(central, below, _wide_tail_below(t)))


@jit
def _wide_far(p):
    """-Φ⁻¹(p) in float64 for p < 2⁻¹⁷: :func:`_far` in float64, each part scaled to meet the one before."""
    r = _root_log(p)
    t = r - 1.6
    u = r - 5.0
    near = r <= 5.0
    far_above = ((0.01733720293309936 * u + 0.42868291706379413) * u + 3.0812261969199892) * u + 6.657904706436456
    far_below = (0.012258202635 * u + 0.24197894225) * u + 1.0
    return _wide_ratio(tl.where(near, _wide_tail_above(t), far_above), tl.where(near, _wide_tail_below(t), far_below))


@jit
def _halves(key_ptr, purpose, counter, COUNTERS: tl.constexpr):
    """High and low words of the 64-bit elements of consecutive blocks, in order: ``(8 COUNTERS,)`` each."""
    w = block_words(key_ptr, counter, purpose, 0, 0)
    high = _joined8(w[1], w[3], w[5], w[7], w[9], w[11], w[13], w[15], COUNTERS)
    low = _joined8(w[0], w[2], w[4], w[6], w[8], w[10], w[12], w[14], COUNTERS)
    return high, low


@jit
def _wide_rare(high):
    return (high & 0x7FFFFFFF) < 32768


@jit
def _wide_usual(high, low):
    """The magnitude of an element of 64 bits, whatever they are."""
    return _wide_near(
        _wide_number(high & 0x7FFFFFFF, low) * 5.421010862427522e-20 + 2.710505431213761e-20
    )  # 2^-64, -65


@jit
def _wide_refined(high, low, more, last, usual):
    """The same with 64 bits more where it is rare."""
    below = (_wide_number(more, last) + 0.5) * 2.938735877055719e-39  # 2^-128
    far = _wide_far(_wide_number(high & 0x7FFFFFFF, low) * 5.421010862427522e-20 + below)
    return tl.where(_wide_rare(high), far, usual)


@jit
def wide_normal_tile(key_ptr, first_block, COUNTERS: tl.constexpr):
    """Normal elements ``8 first_block ..`` of a key, ``(8 COUNTERS,)`` in float64."""
    counter = (first_block + tl.arange(0, COUNTERS)).to(tl.uint32)
    high, low = _halves(key_ptr, 0, counter, COUNTERS)
    z = _wide_usual(high, low)
    if tl.max(_wide_rare(high).to(tl.int32), 0) > 0:  # one tile of 256 in 256
        more, last = _halves(key_ptr, 4, counter, COUNTERS)
        z = _wide_refined(high, low, more, last, z)
    return (z.to(tl.uint64, bitcast=True) | ((high & 0x80000000).to(tl.uint64) << 32)).to(tl.float64, bitcast=True)


@jit
def _run_tile(starts_ptr, length, tiles, PER_BLOCK: tl.constexpr, COUNTERS: tl.constexpr):
    """This program's blocks and, of each element in them, the place in the result and whether it has one."""
    pid = tl.program_id(0)
    run = (pid // tiles).to(tl.int64)
    start = tl.load(starts_ptr + run)
    first_block = start // PER_BLOCK + (pid % tiles) * COUNTERS
    index = first_block * PER_BLOCK - start + tl.arange(0, PER_BLOCK * COUNTERS)
    return first_block, run * length + index, (index >= 0) & (index < length)


@jit
def _normal_body(key_ptr, starts_ptr, out_ptr, length, tiles, COUNTERS: tl.constexpr):
    first_block, place, inside = _run_tile(starts_ptr, length, tiles, 16, COUNTERS)
    tl.store(out_ptr + place, normal_tile(key_ptr, first_block, COUNTERS).to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _wide_normal_body(key_ptr, starts_ptr, out_ptr, length, tiles, COUNTERS: tl.constexpr):
    first_block, place, inside = _run_tile(starts_ptr, length, tiles, 8, COUNTERS)
    tl.store(out_ptr + place, wide_normal_tile(key_ptr, first_block, COUNTERS), mask=inside)


@jit
def _words_body(key_ptr, starts_ptr, out_ptr, length, tiles, PURPOSE: tl.constexpr, COUNTERS: tl.constexpr):
    first_block, place, inside = _run_tile(starts_ptr, length, tiles, 16, COUNTERS)
    counter = (first_block + tl.arange(0, COUNTERS)).to(tl.uint32)
    tl.store(out_ptr + place, stream_words(key_ptr, PURPOSE, counter, COUNTERS).to(tl.int64), mask=inside)


@jit
def _pair(low, high):
    return (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)


@jit
def _bits_body(key_ptr, starts_ptr, out_ptr, length, tiles, COUNTERS: tl.constexpr):
    first_block, place, inside = _run_tile(starts_ptr, length, tiles, 8, COUNTERS)
    w = block_words(key_ptr, (first_block + tl.arange(0, COUNTERS)).to(tl.uint32), 0, 0, 0)
    elements = _joined8(
        _pair(w[0], w[1]),
        _pair(w[2], w[3]),
        _pair(w[4], w[5]),
        _pair(w[6], w[7]),
        _pair(w[8], w[9]),
        _pair(w[10], w[11]),
        _pair(w[12], w[13]),
        _pair(w[14], w[15]),
        COUNTERS,
    )
    tl.store(out_ptr + place, elements, mask=inside)


@jit
def _blocks_body(
    key_ptr, nonces_ptr, out_ptr, nonce_stride, first_block, step, rows, KEEP: tl.constexpr, ROWS: tl.constexpr
):
    """Row ``i`` is the first KEEP words of block ``first_block + i step`` under nonce ``i nonce_stride``."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    counter = (first_block + row * step).to(tl.uint32)
    nonce = nonces_ptr + row * nonce_stride
    w = block_words(
        key_ptr,
        counter,
        tl.load(nonce, mask=inside, other=0).to(tl.uint32),
        tl.load(nonce + 1, mask=inside, other=0).to(tl.uint32),
        tl.load(nonce + 2, mask=inside, other=0).to(tl.uint32),
    )
    for j in tl.static_range(KEEP):  # pyright: ignore
        tl.store(out_ptr + row * KEEP + j, w[j].to(tl.int64), mask=inside)


_COUNTERS, _WARPS = 128, 4
"""Blocks of a tile: one for each lane."""


def _launch_runs(
    body: Any, key_K: Tensor, box: tuple[Sequence[int], ...], per_block: int, dtype: torch.dtype, **constants: int
) -> Tensor:
    size = list(box[2])
    out = torch.empty(size, dtype=dtype, device=key_K.device)
    if 0 in size:
        return out
    starts_R, length = _run_starts(box, per_block, key_K.device)
    counters = min(_COUNTERS, triton.next_power_of_2(-(-length // per_block) + 1))
    tiles = -(-(length + per_block - 1) // (per_block * counters))
    with torch.cuda.device_of(key_K):
        body[(len(starts_R) * tiles,)](
            key_K.contiguous(), starts_R, out, length, tiles, COUNTERS=counters, num_warps=_WARPS, **constants
        )
    return out


def _launch_blocks(
    key_K: Tensor, nonces: Tensor, nonce_stride: int, first_block: int, step: int, rows: int, keep: int
) -> Tensor:
    out = torch.empty((rows, keep), dtype=torch.int64, device=key_K.device)
    if rows:
        at_once = 32
        with torch.cuda.device_of(key_K):
            _blocks_body[(-(-rows // at_once),)](
                key_K.contiguous(),
                nonces.contiguous(),
                out,
                nonce_stride,
                first_block,
                step,
                rows,
                KEEP=keep,
                ROWS=at_once,
                num_warps=1,
            )
    return out


def launch_keystream(key_K: Tensor, nonce_N: Tensor, first_block: int, blocks: int) -> Tensor:
    """:func:`keystream_reference` in one launch."""
    _check_range(first_block, blocks)
    return _launch_blocks(key_K, nonce_N, 0, first_block, 1, blocks, WORDS).view(-1)


def launch_children(key_K: Tensor, nonce_CN: Tensor) -> Tensor:
    """:func:`children_reference` in one launch."""
    return _launch_blocks(key_K, nonce_CN, 3, 0, 0, nonce_CN.shape[0], 8)


def launch_bits(key_K: Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Tensor:
    """:func:`bits_reference` in one launch."""
    return _launch_runs(_bits_body, key_K, (shape, start, size), ELEMENTS, torch.int64)


def launch_words(
    key_K: Tensor, purpose: int, shape: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> Tensor:
    """:func:`words_reference` in one launch."""
    return _launch_runs(_words_body, key_K, (shape, start, size), WORDS, torch.int64, PURPOSE=purpose)


def launch_normal(
    key_K: Tensor,
    shape: Sequence[int],
    start: Sequence[int],
    size: Sequence[int],
    lower: float,
    upper: float,
    dtype: torch.dtype,
) -> Tensor:
    """:func:`normal_reference` in one launch; bounded draws take their bits from a kernel."""
    box = (shape, start, size)
    if not _unbounded(lower, upper):
        return truncated_normal_from_bits(launch_bits(key_K, *box), lower, upper).to(dtype)
    if dtype == torch.float64:
        return _launch_runs(_wide_normal_body, key_K, box, ELEMENTS, dtype)
    return _launch_runs(_normal_body, key_K, box, WORDS, dtype)


# ---------------------------------------------------------------- CPU: the `cryptography` package's cipher

_PIECE = 1 << 18
"""Elements worked on at a time: scratch of a few MB, near the cache, with work for several threads."""
_GAP = 1 << 10
"""Elements between two runs below which drawing through the gap costs less than starting the cipher again."""
_ZEROS = memoryview(bytes(8 * (_PIECE + 2 * ELEMENTS)))
_HALF, _WHOLE = np.dtype("<u4"), np.dtype("<i8")
"""An element of 32 bits, and one of 64."""


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


def _stretch(cipher: Callable[[int], Any], unit: np.dtype, first: int, count: int) -> np.ndarray:
    """Elements ``first .. first + count - 1`` of the stream; ``count`` at most _PIECE."""
    per_block = 4 * WORDS // unit.itemsize
    skip = first % per_block
    out = np.empty(-(-(skip + count) // per_block) * per_block, dtype=unit)
    cipher(first // per_block).update_into(_ZEROS[: out.nbytes], out.view(np.uint8))
    return out[skip : skip + count]


def _draw(cipher: Callable[[int], Any], unit: np.dtype, starts: np.ndarray, length: int) -> np.ndarray:
    """The elements of every run, (R, L): close, evenly spaced runs from one stretch, others one by one."""
    if len(starts) == 1:
        return _stretch(cipher, unit, int(starts[0]), length)[None]
    out, steps = np.empty((len(starts), length), dtype=unit), np.diff(starts)
    step = int(steps[0])
    most = (_PIECE - length) // step + 1 if step - length <= _GAP else 1
    breaks = (np.flatnonzero(steps != step) + 1).tolist()
    for begin, end in zip([0, *breaks], [*breaks, len(starts)]):
        for low in range(begin, end, most):
            count = min(most, end - low)
            stretch = _stretch(cipher, unit, int(starts[low]), (count - 1) * step + length)
            out[low : low + count] = as_strided(stretch, (count, length), (unit.itemsize * step, unit.itemsize))
    return out


def _fill_cpu(
    key_K: Tensor,
    box: tuple[Sequence[int], ...],
    unit: np.dtype,
    law: Callable[[np.ndarray, np.ndarray], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """``law(elements of the box, first of each run)``, a piece at a time: only the result has the size of the box."""
    size, cipher = list(box[2]), _cipher(key_K)
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    start, outer, length = _runs(box, 4 * WORDS // unit.itemsize)
    starts = np.array([start])
    if not outer and length <= _PIECE:
        return law(_draw(cipher, unit, starts, length), starts).to(dtype).view(size)
    for count, stride in outer:
        starts = (starts[:, None] + np.arange(count) * stride).reshape(-1)
    out = torch.empty((len(starts), length), dtype=dtype)
    columns = min(length, _PIECE)
    rows = _PIECE // columns
    for row in range(0, len(starts), rows):
        for column in range(0, length, columns):
            part, first = out[row : row + rows, column : column + columns], starts[row : row + rows] + column
            part.copy_(law(_draw(cipher, unit, first, part.shape[1]), first))
    return out.view(size)


def _normal_law_cpu(key_K: Tensor) -> Callable[[np.ndarray, np.ndarray], Tensor]:
    """The law of words that knows their places: the few that lie far out get their further bits block by block."""
    fine_cipher = _cipher(key_K, (FINE, 0, 0))

    def law(words: np.ndarray, starts: np.ndarray) -> Tensor:
        fine = np.zeros(words.shape, dtype=np.int64)
        for row, column in np.argwhere(words & _TAIL < _RARE).tolist():
            fine[row, column] = _stretch(fine_cipher, _HALF, int(starts[row]) + column, 1)[0]
        return normal_from_words(torch.from_numpy(words.astype(np.int64)), torch.from_numpy(fine))

    return law


def _wide_normal_law_cpu(key_K: Tensor) -> Callable[[np.ndarray, np.ndarray], Tensor]:
    """The same of 64-bit elements."""
    fine_cipher = _cipher(key_K, (FINE, 0, 0))

    def law(bits: np.ndarray, starts: np.ndarray) -> Tensor:
        fine = np.zeros(bits.shape, dtype=np.int64)
        for row, column in np.argwhere(bits & _WIDE_TAIL < _WIDE_RARE).tolist():
            fine[row, column] = _stretch(fine_cipher, _WHOLE, int(starts[row]) + column, 1)[0]
        return wide_normal_from_bits(torch.from_numpy(bits), torch.from_numpy(fine))

    return law


def _bits_cpu(key_K: Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Tensor:
    return _fill_cpu(key_K, (shape, start, size), _WHOLE, lambda bits, _: torch.from_numpy(bits), torch.int64)


def _normal_cpu(
    key_K: Tensor,
    shape: Sequence[int],
    start: Sequence[int],
    size: Sequence[int],
    lower: float,
    upper: float,
    dtype: torch.dtype,
) -> Tensor:
    box = (shape, start, size)
    if _unbounded(lower, upper) and dtype == torch.float64:
        return _fill_cpu(key_K, box, _WHOLE, _wide_normal_law_cpu(key_K), dtype)
    if _unbounded(lower, upper):
        return _fill_cpu(key_K, box, _HALF, _normal_law_cpu(key_K), dtype)
    return _fill_cpu(
        key_K, box, _WHOLE, lambda bits, _: truncated_normal_from_bits(torch.from_numpy(bits), lower, upper), dtype
    )


# ---------------------------------------------------------------- ops
# Opaque to the compiler, which would make its own Φ⁻¹ and round it differently; and the key is read when the op runs,
# so it may be a traced tensor.

_BOX = "Tensor key, SymInt[] shape, SymInt[] start, SymInt[] size"
_CIPHER = find_spec("cryptography") is not None  # without it CPU tensors get the same bits from the reference, slower

keystream = define(
    "keystream",
    "Tensor key, Tensor nonce, SymInt first_block, SymInt blocks -> Tensor",
    reference=keystream_reference,
    cuda=launch_keystream,
    cpu=_keystream_cpu if _CIPHER else None,
    fake=lambda key, nonce, first_block, blocks: key.new_empty((blocks * WORDS,)),
)
"""``(key_K, nonce_N, first_block, blocks)``: as :func:`keystream_reference`."""
children = define(
    "children",
    "Tensor key, Tensor nonces -> Tensor",
    reference=children_reference,
    cuda=launch_children,
    fake=lambda key, nonces: key.new_empty((nonces.shape[0], 8)),
)
"""``(key_K, nonce_CN)``: as :func:`children_reference`."""
bits = define(
    "bits",
    f"{_BOX} -> Tensor",
    reference=bits_reference,
    cuda=launch_bits,
    cpu=_bits_cpu if _CIPHER else None,
    fake=lambda key, shape, start, size: key.new_empty(size),
)
"""``(key_K, shape, start, size)``: as :func:`bits_reference`."""
normal = define(
    "normal",
    f"{_BOX}, float lower, float upper, ScalarType dtype -> Tensor",
    reference=normal_reference,
    cuda=launch_normal,
    cpu=_normal_cpu if _CIPHER else None,
    fake=lambda key, shape, start, size, lower, upper, dtype: key.new_empty(size, dtype=dtype),
)
"""``(key_K, shape, start, size, lower, upper, dtype)``: as :func:`normal_reference`."""
