"""Strips of the tiles of ``ghost``: what is kept of both Gram matrices, whether from Triton or from Gluon.

    A, X (R, C): rows t of a tile, columns s    ->    sum_{s < t} A_ts X_ts;  |A_t| and |X_t|, the sizes of its rows;
                                                      on the diagonal a_t^2, b_t^2 and their part of norm and bound

R rows of a tile of C x C tokens are a strip: all of a tile, or the half that one group of warps computed. See ``ghost``
for what is done with the sums.
"""

from __future__ import annotations

from fdp_kernels.op import jit, tl

CHUNK = 1024
"""Features per accumulator."""


@jit
def row_and_column(pair):
    """Return row and column of the pair-th tile on or below the diagonal; integer steps correct the rounded root."""
    i = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > pair, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= pair, i + 1, i)
    return i, pair - i * (i + 1) // 2


@jit
def _row_scale(z_RC):
    """Return for each row a power of two from 2^-126 to 2^126, at most its largest size and about it; and 1 over that.

    Both are made from the exponent, so they are exact.
    """
    largest = tl.max(tl.abs(z_RC), 1).to(tl.int32, bitcast=True)
    bits = tl.minimum(tl.maximum(largest & 0x7F800000, 0x00800000), 0x7E800000)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@jit
def _row_sums(A_RC, X_RC, C: tl.constexpr):
    """Return ``sum_s A_ts X_ts`` of each row in float64, and ``|A_t|`` and ``|X_t|`` in float32, rounded up.

    Rows are summed in float32, because conversions to float64 are slow. Scaled by powers of two, which is exact, no
    product is too large for float32, and those that are too small are each below 2^-126 of the product of both scales:
    that is added for all of them.
    """
    scale_A, down_A = _row_scale(A_RC)
    scale_X, down_X = _row_scale(X_RC)
    A_RC = A_RC * down_A[:, None]
    X_RC = X_RC * down_X[:, None]
    lost = C * 2.0**-126
    products = (tl.sum(A_RC * X_RC, 1).to(tl.float64) + lost) * (scale_A.to(tl.float64) * scale_X.to(tl.float64))
    A_R = tl.sqrt(tl.sum(A_RC * A_RC, 1) * (1 + 2.0**-15) + lost) * (1 + 2.0**-20) * scale_A
    X_R = tl.sqrt(tl.sum(X_RC * X_RC, 1) * (1 + 2.0**-15) + lost) * (1 + 2.0**-20) * scale_X
    return products, A_R, X_R


@jit
def store_strip(
    A_RC, X_RC, r_R, c_C, strip, row, i, j, p, d, units_p, units_d, tile_ptr, size_ptr, token_ptr, row_ptr, tokens,
    R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Store what the norm needs of a strip: R rows of a tile of C x C tokens.

    r_R and c_C count rows and columns from 0; ``strip`` is the strip's position among all strips, ``row`` that of its
    rows among all blocks of R tokens.
    """
    if i == j:
        t = strip % (C // R) * R + r_R
        A_R = tl.sum(tl.where(t[:, None] == c_C[None, :], A_RC, 0.0), 1).to(tl.float64)
        X_R = tl.sum(tl.where(t[:, None] == c_C[None, :], X_RC, 0.0), 1).to(tl.float64)
        # Squared token norms, rounded up: twice the bound's share covers 1 / (1 - share).
        a_R = tl.where(i * C + t < tokens, A_R * (1 + 2 * units_p) + 2 * (p * 2.0**-126 / units_p), 0.0)
        b_R = tl.where(i * C + t < tokens, X_R * (1 + 2 * units_d) + 2 * (d * 2.0**-126 / units_d), 0.0)
        tl.store(token_ptr + row * (2 * R) + r_R, a_R)
        tl.store(token_ptr + row * (2 * R) + R + r_R, b_R)
        tl.store(row_ptr + row * 2, tl.sum(A_R * X_R + units_p * (a_R * X_R) + units_d * (b_R * A_R)))
        tl.store(row_ptr + row * 2 + 1, tl.sum(tl.sqrt(a_R * b_R)))
        A_RC = tl.where(t[:, None] > c_C[None, :], A_RC, 0.0)
        X_RC = tl.where(t[:, None] > c_C[None, :], X_RC, 0.0)
    products_R, sizes_A, sizes_X = _row_sums(A_RC, X_RC, C)
    tl.store(tile_ptr + strip, tl.sum(products_R))
    sizes = size_ptr + strip.to(tl.int64) * (2 * R)
    tl.store(sizes + r_R, sizes_A)
    tl.store(sizes + R + r_R, sizes_X)
