"""The normal law drawn from ChaCha20: every value is a function of the key and of the element's index.

    z = sign * -Φ⁻¹(p),   p = (m + 1/2) 2⁻⁶⁴                     m >= 2^47
                          p = (m 2^64 + r + 1/2) 2⁻¹²⁸           m < 2^47;  r: element i under nonce (4, 0, 0)
    float32:              p = (m + 1/2) 2⁻³²                     m >= 2^16
                          p = (m 2^32 + r + 1/2) 2⁻⁶⁴            m < 2^16;  r: word i under nonce (4, 0, 0)

A float64 value takes 64-bit element ``i``: a sign and 63 bits ``m``. Only rare values, far in the tail, take 64 more
bits ``r``. A value in a narrower dtype, on which no noise depends, takes word ``i``: a sign and 31 bits.

The reference evaluates Φ⁻¹ in float64, to about 1e-15 of the value; on a CPU with MKL by its inverse error function,
which is vectorised, except in the tails. On a GPU, values come from rational functions (``normal_triton.py``): same
bits, within 1e-6 of the value, and within 1e-7 for all but one float64 value in 65,536. In float64 the pieces join
without a gap, so neighbouring bits give neighbouring values: between -8 and 8 the values lie less than 2^-40 apart.

    >>> z = normal(key, (1024, 768), (512, 0), (512, 768), -inf, inf, torch.float64)
    >>> z = foreach_normal(keys, [1024 * 768, 768])              # all elements of two leaves, one after the other

Letters: K = 8 key words, C keys.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from fdp_kernels import cpu_library
from fdp_kernels.chacha20 import (
    BOX_SCHEMA,
    ELEMENT,
    ELEMENTS_PER_BLOCK,
    HAS_CIPHER,
    WORD,
    WORDS_PER_BLOCK,
    bits_reference,
    check_blocks,
    fill_box_cpu,
    fill_streams,
    launch_bits,
    launch_runs,
    make_cipher,
    read_element,
    read_stream,
    words_reference,
)
from fdp_kernels.cpu_library import dense
from fdp_kernels.normal_triton import normal_body, wide_normal_body
from fdp_kernels.op import define
from fdp_kernels.processor import ON_ARM

TAIL_PURPOSE = 4
"""First nonce word of the stream from which values far in the tail take their extra bits."""

_TAIL = 0x7FFFFFFF
_RARE = 1 << 16
_WIDE_TAIL = (1 << 63) - 1
_WIDE_RARE = 1 << 47
_BITS_IN_NAN, _MARK = _WIDE_RARE - 1 - (1 << 63), 0xFFFA
"""The bits that a compiled loop leaves in the NaN that stands for a rare value, which are its sign and 47 bits; and the
16 bits between them, by which it is known from any other NaN."""
_ELEMENTS_TOGETHER = 1 << (18 if ON_ARM else 17)
"""Elements of a piece of :func:`foreach_normal` on a CPU: 1 MiB, near the cache, with work for two threads; on ARM 2
MiB, since a torch operation takes longer to start."""
HAS_VECTOR_ERFINV = torch.backends.mkl.is_available()
"""True if ``torch.erfinv`` is MKL's: four times as fast as ``ndtri``. Others take longer than ``ndtri``."""
_HALF_A_STEP = torch.tensor(2.0**-65, dtype=torch.float64, device="cpu")
"""Half of the least difference between two probabilities, so that none is 0."""
_FAR = 2.0**-8
"""Below this probability ``2p - 1`` has lost too many digits: rounding it moves a value by 9e-16 of itself here."""
_WHOLE_VECTORS = 64
"""Elements are evaluated in multiples of this many, and threads split between them: none is left over for other code,
which might round differently."""

# ---------------------------------------------------------------- reference


def normal_from_words(words: Tensor, fine: Tensor) -> Tensor:
    """Map 32-bit words to normal values in float64; ``fine`` is used only where the tail of a word is below 2^16.

    Guarantees:
      - symmetric, monotone in the tail, never 0 and never infinite; reaches 9.1 sigma with true probability.
    """
    tail = words & _TAIL
    near = tail.double().add_(0.5).mul_(2.0**-32)
    far = (tail << 32 | fine).double().add_(0.5).mul_(2.0**-64)
    z = torch.special.ndtri(far.where(tail < _RARE, near))
    return z.where(words > _TAIL, -z)


def wide_normal_from_bits(bits: Tensor, fine: Tensor) -> Tensor:
    """Map 64-bit elements to normal values in float64; ``fine`` is used only where the 63-bit tail is below 2^47.

    Guarantees:
      - symmetric, monotone in the tail to float64 rounding, never infinite; reaches 13 sigma with true probability;
      - equal bits give equal values, whatever is beside them.
    """
    tail = bits & _WIDE_TAIL
    near = tail.double().add_(0.5).mul_(2.0**-64)
    lower = (fine.double() + (fine < 0).double() * 2.0**64).add_(0.5).mul_(2.0**-128)  # unsigned
    p = (tail.double() * 2.0**-64 + lower).where(tail < _WIDE_RARE, near)
    padded = torch.nn.functional.pad(p.flatten(), (0, -p.numel() % _WHOLE_VECTORS), value=0.25)
    z = torch.empty_like(padded)
    lower_quantile_(padded, z, torch.nonzero(padded < _FAR).flatten())
    z = z[: p.numel()].view(p.shape)
    return z.where(bits < 0, -z)


def lower_quantile_(p: Tensor, out: Tensor, far: Tensor) -> None:
    """Write ``Φ⁻¹(p)``, ``0 < p <= 1/2``, to ``out``; both are float64 of a multiple of ``_WHOLE_VECTORS`` elements.

    ``√2 erf⁻¹(2p - 1)`` is taken where ``2p - 1`` keeps enough digits of p, which it does not at ``far``, the indices
    of what is below ``_FAR``.

    Guarantees:
      - equal p give equal values, bit for bit, whatever is beside them.
    """
    if p.device.type == "cpu" and (loops := cpu_library.library()) is not None:
        loops.lower_quantile(dense(p), out, p.numel())
        return
    if not HAS_VECTOR_ERFINV or p.device.type != "cpu":
        torch.special.ndtri(p, out=out)
        return
    torch.mul(p, 2, out=out).sub_(1).erfinv_().mul_(math.sqrt(2))
    out.index_copy_(0, far, torch.special.ndtri(p.take(far)))


def truncated_normal_from_bits(bits: Tensor, lower: float, upper: float) -> Tensor:
    """Return ``Φ⁻¹(Φ(lower) + u (Φ(upper) - Φ(lower)))`` in float64, from the end that keeps the tail exact."""
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
    """Draw a normal value, truncated to [lower, upper], for every element of a box."""
    box = (shape, start, size)
    if not _unbounded(lower, upper):
        return truncated_normal_from_bits(bits_reference(key_K, *box), lower, upper).to(dtype)
    if dtype == torch.float64:
        return wide_normal_from_bits(bits_reference(key_K, *box), bits_reference(key_K, *box, purpose=TAIL_PURPOSE))
    return normal_from_words(words_reference(key_K, 0, *box), words_reference(key_K, TAIL_PURPOSE, *box)).to(dtype)


def foreach_normal_reference(keys_CK: Tensor, sizes: Sequence[int]) -> Tensor:
    """Draw element 0, 1, ... ``sizes[c] - 1`` of every key in float64, one key after the other."""
    _check_sizes(keys_CK, sizes)
    draws = [
        normal_reference(key, [size], [0], [size], -math.inf, math.inf, torch.float64)
        for key, size in zip(keys_CK, sizes)
    ]
    return torch.cat(draws) if draws else keys_CK.new_empty(0, dtype=torch.float64)


def _check_sizes(keys_CK: Tensor, sizes: Sequence[int]) -> None:
    if keys_CK.shape != (len(sizes), 8) or keys_CK.dtype != torch.int64:
        got = f"{keys_CK.dtype} of shape {tuple(keys_CK.shape)}"
        raise ValueError(f"foreach_normal: expected ({len(sizes)}, 8) keys, int64, got {got}")
    if min(sizes, default=0) < 0:
        raise ValueError(f"foreach_normal: expected sizes of 0 or more, got {list(sizes)}")


def _signed_tail(bits: Tensor) -> Tensor:
    return bits.double().add_(0.5).mul_(2.0**-64)  # in [-1/2, 1/2], never 0, symmetric


def _cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _unbounded(lower: float, upper: float) -> bool:
    return lower == -math.inf and upper == math.inf


# ---------------------------------------------------------------- launch


def launch_normal(
    key_K: Tensor,
    shape: Sequence[int],
    start: Sequence[int],
    size: Sequence[int],
    lower: float,
    upper: float,
    dtype: torch.dtype,
) -> Tensor:
    """Evaluate :func:`normal_reference` in one launch; truncated draws launch only for their bits."""
    box = (shape, start, size)
    if not _unbounded(lower, upper):
        return truncated_normal_from_bits(launch_bits(key_K, *box), lower, upper).to(dtype)
    if dtype == torch.float64:
        return launch_runs(wide_normal_body, key_K, box, ELEMENTS_PER_BLOCK, dtype)
    return launch_runs(normal_body, key_K, box, WORDS_PER_BLOCK, dtype)


# ---------------------------------------------------------------- CPU


def _normal_law_cpu(key_K: Tensor) -> Callable[[np.ndarray, np.ndarray], Tensor]:
    """Return the law of 32-bit words; the few values far in the tail read their extra bits one by one."""
    fine_cipher = make_cipher(key_K, (TAIL_PURPOSE, 0, 0))

    def law(words: np.ndarray, starts: np.ndarray) -> Tensor:
        fine = np.zeros(words.shape, dtype=np.int64)
        for row, column in np.argwhere(words & _TAIL < _RARE).tolist():
            fine[row, column] = read_stream(fine_cipher, WORD, int(starts[row]) + column, 1)[0]
        return normal_from_words(torch.from_numpy(words.astype(np.int64)), torch.from_numpy(fine))

    return law


def _wide_normal_law_cpu(key_K: Tensor) -> Callable[[np.ndarray, np.ndarray], Tensor]:
    """Return the law of 64-bit elements; the few values far in the tail read their extra bits one by one."""
    fine_cipher = make_cipher(key_K, (TAIL_PURPOSE, 0, 0))

    def law(bits: np.ndarray, starts: np.ndarray) -> Tensor:
        flat = torch.from_numpy(bits.reshape(-1))
        out = torch.empty(flat.shape, dtype=torch.float64)
        rare, bits_of_rare = _wide_normal_cpu(flat, out, _make_scratch(len(flat)))
        if len(rare):
            places = [divmod(i, bits.shape[1]) for i in rare.tolist()]
            fine = [read_element(fine_cipher, int(starts[row]) + column) for row, column in places]
            out[rare] = wide_normal_from_bits(bits_of_rare, torch.tensor(fine))
        return out.view(bits.shape)

    return law


def _wide_normal_cpu(bits: Tensor, out: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
    """Write the values of :func:`wide_normal_from_bits` into ``out``, bit for bit, but for those far in the tail.

    Returns the indices of these, which need extra bits, and their own bits. ``scratch`` is that of
    :func:`_make_scratch`. The bits and ``out`` may be the same memory.
    """
    if (loops := cpu_library.library()) is not None:
        loops.normal_from_bits(dense(bits), out, len(bits))
        return _rare_values(out)
    n, (p, z) = len(bits), scratch[:, : len(bits) + -len(bits) % _WHOLE_VECTORS]
    tail = torch.bitwise_and(bits, _WIDE_TAIL, out=z.view(torch.int64)[:n])
    torch.add(_HALF_A_STEP, p[:n].copy_(tail), alpha=2.0**-64, out=p[:n])
    p[n:].fill_(0.25)
    far = _indices_below(p, _FAR)
    lower_quantile_(p, z, far)  # negative: below the median
    rare = far[p.take(far) < _WIDE_RARE * 2.0**-64]
    bits_of_rare = bits[rare]
    torch.copysign(z[:n], bits.view(torch.float64), out=out)
    return rare, bits_of_rare


def _rare_values(out: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of rare values, which the compiled loops leave as NaN, and their bits."""
    rare = torch.from_numpy(np.flatnonzero(np.isnan(out.numpy())))
    bits = out.view(torch.int64)[rare]
    if len(rare) and not bool(((bits >> 47) & 0xFFFF == _MARK).all()):
        raise RuntimeError("normal: expected every element to be drawn, got some that were not; please report this")
    return rare, bits & _BITS_IN_NAN


def _indices_below(p: Tensor, least: float) -> Tensor:
    """Return where ``p`` is below ``least``; if few are, numpy takes a third of torch's time."""
    return torch.from_numpy(np.flatnonzero(p.numpy() < least))


def _make_scratch(elements: int) -> Tensor:
    """Return memory for the probabilities and values of so many elements, in whole vectors."""
    return torch.empty(2, elements + -elements % _WHOLE_VECTORS, dtype=torch.float64)


def _fill_normal(keys: list[list[int]], out: Tensor, sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """Draw the values of :func:`_foreach_normal_cpu` without compiled loops; return the rare ones, in parts."""
    bits = out.view(torch.int64)
    fill_streams([make_cipher(key) for key in keys], [part.numpy() for part in bits.split(list(sizes))])
    scratch = _make_scratch(min(len(out), _ELEMENTS_TOGETHER))
    found: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(out), _ELEMENTS_TOGETHER):
        part = slice(start, start + _ELEMENTS_TOGETHER)
        rare, bits_of_rare = _wide_normal_cpu(bits[part], out[part], scratch)
        found.append((rare + start, bits_of_rare))
    return found


def _foreach_normal_cpu(keys_CK: Tensor, sizes: Sequence[int]) -> Tensor:
    _check_sizes(keys_CK, sizes)
    for size in sizes:
        check_blocks(0, -(-size // ELEMENTS_PER_BLOCK))
    keys, ends = keys_CK.tolist(), list(accumulate(sizes))
    out = torch.empty(sum(sizes), dtype=torch.float64)
    if (loops := cpu_library.library()) is not None:
        loops.normals(dense(keys_CK), torch.tensor(sizes, dtype=torch.int64), out, len(sizes))
        found = [_rare_values(out)]
    else:
        found = _fill_normal(keys, out, sizes)
    fine: list[int] = []
    for i in (i for rare, _ in found for i in rare.tolist()):
        key = bisect_right(ends, i)
        fine.append(read_element(make_cipher(keys[key], (TAIL_PURPOSE, 0, 0)), i - ends[key] + sizes[key]))
    if fine:
        rare, bits_of_rare = map(torch.cat, zip(*found))
        out[rare] = wide_normal_from_bits(bits_of_rare, torch.tensor(fine))
    return out


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
        return fill_box_cpu(key_K, box, ELEMENT, _wide_normal_law_cpu(key_K), dtype)
    if _unbounded(lower, upper):
        return fill_box_cpu(key_K, box, WORD, _normal_law_cpu(key_K), dtype)
    return fill_box_cpu(
        key_K, box, ELEMENT, lambda bits, _: truncated_normal_from_bits(torch.from_numpy(bits), lower, upper), dtype
    )


# ---------------------------------------------------------------- op
# Opaque to the compiler, which would use its own Φ⁻¹ and round differently.

normal = define(
    "normal",
    f"{BOX_SCHEMA}, float lower, float upper, ScalarType dtype -> Tensor",
    reference=normal_reference,
    cuda=launch_normal,
    cpu=_normal_cpu if HAS_CIPHER else None,
    fake=lambda key, shape, start, size, lower, upper, dtype: key.new_empty(size, dtype=dtype),
)
"""``(key_K, shape, start, size, lower, upper, dtype)``: as :func:`normal_reference`."""
foreach_normal = define(
    "foreach_normal",
    "Tensor keys, SymInt[] sizes -> Tensor",
    reference=foreach_normal_reference,
    cpu=_foreach_normal_cpu if HAS_CIPHER else None,
    fake=lambda keys, sizes: keys.new_empty(sum(sizes), dtype=torch.float64),
)
"""``(keys_CK, sizes)``: as :func:`foreach_normal_reference`; each draw is that of :data:`normal`, bit for bit."""
