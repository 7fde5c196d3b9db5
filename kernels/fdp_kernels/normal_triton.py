"""Triton bodies of the normal law: -Φ⁻¹ of random bits by rational functions, in the tails Wichura's (AS 241, PPND7).

``normal.py`` has the equation, the reference and the launches. Float32 values are within 5e-7 (relative) of the
reference, and so are the tails in float64; all but one value in 65,536 are in one piece, within 1e-7. In float64 the
pieces are scaled so that they join without a gap: neighbouring bits give neighbouring values. Names with ``wide`` take
64 bits per element and compute in float64; the others take 32 bits and compute in float32.

Reference: Wichura, Algorithm AS 241, Applied Statistics 37, 1988.
"""

from __future__ import annotations

from fdp_kernels.chacha20_triton import halves, run_tile, stream_words
from fdp_kernels.op import INTERPRETED, jit, tl

if INTERPRETED:  # the interpreter has no inline assembly

    @jit
    def _log2(x):
        return tl.log2(x)

    @jit
    def ratio(x, y):
        return x / y

    @jit
    def _wide_sqrt(x):
        return tl.sqrt(x)

    @jit
    def _wide_ratio(x, y):
        return x / y

else:

    @jit
    def _log2(x):
        """Return log2(x) in one instruction (libdevice takes twenty), with relative error 2⁻²²."""
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)

    @jit
    def ratio(x, y):
        """Return ``x / y`` within 2 units in the last place, for ``y`` from 2⁻¹²⁶ to 2¹²⁶."""
        return tl.inline_asm_elementwise(
            "div.approx.ftz.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, is_pure=True, pack=1
        )

    @jit
    def _wide_sqrt(x):
        """Return ``√x`` in float64 for normal ``x > 0``: 20 bits from one instruction, 60 after a third-order step."""
        y = tl.inline_asm_elementwise("rsqrt.approx.ftz.f64 $0, $1;", "=d,d", [x], tl.float64, is_pure=True, pack=1)
        root = x * y
        error = 1.0 - root * y
        return root + root * (error * (0.5 + 0.375 * error))

    @jit
    def _wide_ratio(x, y):
        """Return ``x / y`` in float64 for normal ``y``: 20 bits from one instruction, 60 after a third-order step."""
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f64 $0, $1;", "=d,d", [y], tl.float64, is_pure=True, pack=1)
        error = 1.0 - y * r
        ratio = x * r
        return ratio + ratio * (error + error * error)


@jit
def _near(tail):
    """Return -Φ⁻¹((tail + 1/2) 2⁻³²) for tails >= 2^16: the central and the near-tail piece of AS 241, no branch."""
    from_half = ((tail ^ 0x7FFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1/2 - p, without cancellation
    r = 0.180625 - from_half * from_half
    p = (tail.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    t = tl.sqrt(_log2(p) * -0.6931471805599453) - 1.6
    central = from_half <= 0.425
    numerator = (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r + 3.3871327179) * from_half
    denominator = ((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0
    tail_numerator = ((0.17023821103 * t + 1.3067284816) * t + 2.7568153900) * t + 1.4234372777
    tail_denominator = (0.12021132975 * t + 0.73700164250) * t + 1.0
    return ratio(tl.where(central, numerator, tail_numerator), tl.where(central, denominator, tail_denominator))


@jit
def _far(tail, fine):
    """Return -Φ⁻¹((tail 2^32 + fine + 1/2) 2⁻⁶⁴) for tails < 2^16: the near- and far-tail pieces of AS 241."""
    p = tail.to(tl.float32) * 2.3283064365386963e-10 + (fine.to(tl.float32) + 0.5) * 5.421010862427522e-20
    r = tl.sqrt(_log2(p) * -0.6931471805599453)
    t = r - 1.6
    u = r - 5.0
    near = r <= 5.0
    numerator = ((0.17023821103 * t + 1.3067284816) * t + 2.7568153900) * t + 1.4234372777
    denominator = (0.12021132975 * t + 0.73700164250) * t + 1.0
    far_numerator = ((0.017337203997 * u + 0.42868294337) * u + 3.0812263860) * u + 6.6579051150
    far_denominator = (0.012258202635 * u + 0.24197894225) * u + 1.0
    return ratio(tl.where(near, numerator, far_numerator), tl.where(near, denominator, far_denominator))


@jit
def _apply_sign(z, words):
    return (z.to(tl.uint32, bitcast=True) | (words & 0x80000000)).to(tl.float32, bitcast=True)


@jit
def normal_tile(key_ptr, first_block, COUNTERS: tl.constexpr):
    """Return normal elements ``16 first_block ..`` of a key, ``(16 COUNTERS,)`` in float32."""
    counter = (first_block + tl.arange(0, COUNTERS)).to(tl.uint32)
    words = stream_words(key_ptr, 0, counter, COUNTERS)
    tail = words & 0x7FFFFFFF
    z = _near(tail)
    rare = tail < 65536
    if tl.max(rare.to(tl.int32), 0) > 0:  # true for one tile of 512 elements in 64
        z = tl.where(rare, _far(tail, stream_words(key_ptr, 4, counter, COUNTERS)), z)
    return _apply_sign(z, words)


@jit
def _words_to_float64(high, low):
    """Return ``high 2^32 + low`` of unsigned words in float64, from bit patterns: conversions are slow."""
    top = (high.to(tl.uint64) | 0x4530000000000000).to(tl.float64, bitcast=True)  # 2^84 + high 2^32
    bottom = (low.to(tl.uint64) | 0x4330000000000000).to(tl.float64, bitcast=True)  # 2^52 + low
    return (top - 19342813118337666422669312.0) + bottom  # 2^84 + 2^52


@jit
def _minus_log2(q, SHIFT: tl.constexpr):
    """Return ``-log2(2^SHIFT q)`` in float64 for normal q > 0, within 4e-7 and without a gap.

    For a mantissa 1 + x, log2(1 + x) = x + x (1 - x) Q(x): exact at both ends, where one exponent meets the next.
    """
    bits = q.to(tl.uint64, bitcast=True)
    exponent = ((bits >> 52) | 0x4330000000000000).to(
        tl.float64, bitcast=True
    )  # 2^52 + 1023 + log2 of the power of two
    x = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True) - 1.0
    c = 0.06332586182005587 + -0.015209108182866235 * x
    c = -0.12970379258743722 + c * x
    c = 0.19543639433935975 + c * x
    c = -0.2778877970763393 + c * x
    c = 0.44266644015178563 + c * x
    return (x * x - x) * c - ((exponent - (4503599627371519.0 - SHIFT)) + x)


@jit
def _wide_near(p):
    """Return -Φ⁻¹(p) in float64 for 2⁻¹⁷ <= p <= 1/2, within 1e-7.

    (1/2 - p) R(w), where w = -log2(4 p (1 - p)) is 0 at the median and grows slowly: one rational function reaches from
    there to the tails, with a relative error of 2.4e-8.
    """
    w = _minus_log2(p - p * p, 2)
    r = 0.000331409251744725 + 3.4850241378170174e-06 * w
    r = 0.006591823595371114 + r * w
    r = 0.07781718408451893 + r * w
    r = 0.6011393240004315 + r * w
    r = 2.5066283329735475 + r * w
    denominator = 0.0005685656508687522 + 2.3435569625511075e-05 * w
    denominator = 0.014192216772014387 + denominator * w
    denominator = 0.058354880600629384 + denominator * w
    denominator = 1.0 + denominator * w
    return _wide_ratio((0.5 - p) * r, denominator)


@jit
def _wide_far(p):
    """Return -Φ⁻¹(p) in float64 for p < 2⁻¹⁷: as :func:`_far`, each piece scaled to meet the one before."""
    r = _wide_sqrt(_minus_log2(p, 0) * 0.6931471805599453)
    t = r - 1.6
    u = r - 5.0
    near = r <= 5.0
    numerator = ((0.17023819480563812 * t + 1.306728357063707) * t + 2.756815127264799) * t + 1.4234371420409058
    denominator = (0.12021132975 * t + 0.73700164250) * t + 1.0
    far_numerator = ((0.017337203149697857 * u + 0.428682922419449) * u + 3.0812262354146047) * u + 6.65790478961551
    far_denominator = (0.012258202635 * u + 0.24197894225) * u + 1.0
    return _wide_ratio(
        tl.where(near, numerator, far_numerator),
        tl.where(near, denominator, far_denominator),
    )


@jit
def _wide_rare(high):
    return (high & 0x7FFFFFFF) < 32768


@jit
def _wide_magnitude(high, low):
    """Return the magnitude of a 64-bit element, before refinement."""
    return _wide_near(
        _words_to_float64(high & 0x7FFFFFFF, low) * 5.421010862427522e-20 + 2.710505431213761e-20
    )  # 2^-64, -65


@jit
def _wide_refine(high, low, more, last, magnitude):
    """Replace the magnitude by one from 64 more bits where the tail is rare."""
    lower = (_words_to_float64(more, last) + 0.5) * 2.938735877055719e-39  # 2^-128
    far = _wide_far(_words_to_float64(high & 0x7FFFFFFF, low) * 5.421010862427522e-20 + lower)
    return tl.where(_wide_rare(high), far, magnitude)


@jit
def wide_normal_tile(key_ptr, first_block, COUNTERS: tl.constexpr):
    """Return normal elements ``8 first_block ..`` of a key, ``(8 COUNTERS,)`` in float64."""
    counter = (first_block + tl.arange(0, COUNTERS)).to(tl.uint32)
    high, low = halves(key_ptr, 0, counter, COUNTERS)
    z = _wide_magnitude(high, low)
    if tl.max(_wide_rare(high).to(tl.int32), 0) > 0:  # true for one tile of 256 elements in 256
        more, last = halves(key_ptr, 4, counter, COUNTERS)
        z = _wide_refine(high, low, more, last, z)
    return (z.to(tl.uint64, bitcast=True) | ((high & 0x80000000).to(tl.uint64) << 32)).to(tl.float64, bitcast=True)


@jit
def normal_body(key_ptr, starts_ptr, out_ptr, length, tiles, COUNTERS: tl.constexpr):
    first_block, position, inside = run_tile(starts_ptr, length, tiles, 16, COUNTERS)
    tl.store(out_ptr + position, normal_tile(key_ptr, first_block, COUNTERS).to(out_ptr.dtype.element_ty), mask=inside)


@jit
def wide_normal_body(key_ptr, starts_ptr, out_ptr, length, tiles, COUNTERS: tl.constexpr):
    first_block, position, inside = run_tile(starts_ptr, length, tiles, 8, COUNTERS)
    tl.store(out_ptr + position, wide_normal_tile(key_ptr, first_block, COUNTERS), mask=inside)
