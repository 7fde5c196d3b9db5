"""Triton bodies of ChaCha20: blocks of the stream, and the runs of a box that are drawn from it.

``chacha20.py`` has the equation, the reference and the launches.

A tile is COUNTERS blocks. Each of the sixteen words of a block is a tensor over the counters, so one lane computes a
whole block and no word is computed twice. Interleaving the words puts them in stream order.
"""

from __future__ import annotations

from fdp_kernels.op import jit, tl


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
    """Return the sixteen words of every block, uint32 in the shape of ``counter``; the nonce is broadcast to it."""
    zero = tl.zeros_like(counter)
    keys = key_ptr + zero  # loading a tile fixes its layout; scalars would need a conversion at every join
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
def _interleave8(x0, x1, x2, x3, x4, x5, x6, x7, COUNT: tl.constexpr):
    """Interleave eight tensors: element ``8 i + j`` is ``xj[i]``."""
    even = tl.join(tl.join(x0, x4), tl.join(x2, x6))
    odd = tl.join(tl.join(x1, x5), tl.join(x3, x7))
    return tl.reshape(tl.join(even, odd), (8 * COUNT,))


@jit
def stream_words(key_ptr, purpose, counter, COUNTERS: tl.constexpr):
    """Return the words of consecutive blocks under nonce ``(purpose, 0, 0)``, in order: ``(16 COUNTERS,)``."""
    w = block_words(key_ptr, counter, purpose, 0, 0)
    a = tl.join(tl.join(tl.join(w[0], w[8]), tl.join(w[4], w[12])), tl.join(tl.join(w[2], w[10]), tl.join(w[6], w[14])))
    b = tl.join(tl.join(tl.join(w[1], w[9]), tl.join(w[5], w[13])), tl.join(tl.join(w[3], w[11]), tl.join(w[7], w[15])))
    return tl.reshape(tl.join(a, b), (16 * COUNTERS,))


@jit
def halves(key_ptr, purpose, counter, COUNTERS: tl.constexpr):
    """Return high and low words of the 64-bit elements of consecutive blocks, in order: ``(8 COUNTERS,)`` each."""
    w = block_words(key_ptr, counter, purpose, 0, 0)
    high = _interleave8(w[1], w[3], w[5], w[7], w[9], w[11], w[13], w[15], COUNTERS)
    low = _interleave8(w[0], w[2], w[4], w[6], w[8], w[10], w[12], w[14], COUNTERS)
    return high, low


@jit
def run_tile(starts_ptr, length, tiles, PER_BLOCK: tl.constexpr, COUNTERS: tl.constexpr):
    """Return this program's first block and, per element, its index in the result and whether it lies in the run."""
    pid = tl.program_id(0)
    run = (pid // tiles).to(tl.int64)
    start = tl.load(starts_ptr + run)
    first_block = start // PER_BLOCK + (pid % tiles) * COUNTERS
    index = first_block * PER_BLOCK - start + tl.arange(0, PER_BLOCK * COUNTERS)
    return first_block, run * length + index, (index >= 0) & (index < length)


@jit
def words_body(key_ptr, starts_ptr, out_ptr, length, tiles, PURPOSE: tl.constexpr, COUNTERS: tl.constexpr):
    first_block, position, inside = run_tile(starts_ptr, length, tiles, 16, COUNTERS)
    counter = (first_block + tl.arange(0, COUNTERS)).to(tl.uint32)
    tl.store(out_ptr + position, stream_words(key_ptr, PURPOSE, counter, COUNTERS).to(tl.int64), mask=inside)


@jit
def _join_words(low, high):
    return (low.to(tl.uint64) | (high.to(tl.uint64) << 32)).to(tl.int64, bitcast=True)


@jit
def bits_body(key_ptr, starts_ptr, out_ptr, length, tiles, COUNTERS: tl.constexpr):
    first_block, position, inside = run_tile(starts_ptr, length, tiles, 8, COUNTERS)
    w = block_words(key_ptr, (first_block + tl.arange(0, COUNTERS)).to(tl.uint32), 0, 0, 0)
    elements = _interleave8(
        _join_words(w[0], w[1]),
        _join_words(w[2], w[3]),
        _join_words(w[4], w[5]),
        _join_words(w[6], w[7]),
        _join_words(w[8], w[9]),
        _join_words(w[10], w[11]),
        _join_words(w[12], w[13]),
        _join_words(w[14], w[15]),
        COUNTERS,
    )
    tl.store(out_ptr + position, elements, mask=inside)


@jit
def blocks_body(
    key_ptr, nonces_ptr, out_ptr, nonce_stride, first_block, step, rows, KEEP: tl.constexpr, ROWS: tl.constexpr
):
    """Store in row ``i`` the first KEEP words of block ``first_block + i step`` under nonce ``i nonce_stride``."""
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
