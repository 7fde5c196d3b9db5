"""Explicit random keys: every random number is a function of a key and of the element's index.

    value[i] = f(words 2i, 2i + 1 of ChaCha20(key)),      i the row-major index in the *global* tensor
    normal[i] = ±Φ⁻¹ of the same 64 bits,                 and, one time in 2^16, of 64 bits more
    normal[i] = ±Φ⁻¹ of word i in float32,                and, one time in 2^15, of 32 bits more
    split, fold_in:  child = the first 256 bits of ChaCha20(key, nonce = purpose | data)

ChaCha20 is RFC 8439 (2018). The purpose is part of the nonce, so children and draws never share a stream.
Element ``i`` does not depend on which other elements are drawn: a shard draws its own window and gets exactly
its slice of the full tensor.

A run has one root key. Every draw folds in its purpose and step, so that no two draws share a stream:

    parameters           fold_in(root, "init")
    samples of step t    step_key(root, "sample ...", t)         by sample_batch
    noise of step t      step_key(root, "noise ...", t)          by the step, which counts t itself

    >>> root = key()                                          # 256 bits from the operating system
    >>> leaf = fold_in(step_key(root, "noise", step), "blocks.0.qkv")
    >>> noise = normal(leaf, (1024, 768), window=((512, 512), (0, 768)))
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from typing import TypeAlias

import torch
from fdp_kernels import chacha20
from fdp_kernels.normal import foreach_normal
from fdp_kernels.normal import normal as draw_normal
from fdp_kernels.plain import are_plain
from jaxtyping import Float, Int
from torch import Tensor

from fdp.arguments import is_whole_number, shown
from fdp.types import FdpError, Key

Window: TypeAlias = tuple[tuple[int, int], ...]
"""A box inside a tensor: ``(start, length)`` for every dim."""

# Low byte of the nonce's first word. Draws use 0 and, in the tails of the normal law, fdp_kernels.normal.TAIL_PURPOSE.
_SPLIT, _FOLD_INT, _FOLD_STR = 1, 2, 3
_WORD = 0xFFFFFFFF
_FAR = 37.0  # beyond it the normal law has no mass that float64 could hold


def key(seed: int | None = None) -> Key:
    """Return the root key of a run: 256 bits from the operating system or, to repeat an experiment, a hashed seed.

    Give it unchanged to every step: samplers and steps fold in purpose, step and settings. They do not know the data:
    take a new key for other data.

    Guarantees:
      - without a seed the key is unpredictable;
      - with a seed it is a function of the seed: anyone who guesses the seed can subtract the noise.
    """
    if seed is None:
        raw = secrets.token_bytes(32)
    elif is_whole_number(seed) and seed >= 0:
        raw = hashlib.sha256(f"fdp.keys.key seed {int(seed)}".encode()).digest()
    else:
        raise FdpError(
            f"seed: expected a non-negative int or None, got {shown(seed)}; pass None for an unpredictable key"
        )
    return torch.tensor(_words(raw))


def split(key: Key, n: int) -> Int[Tensor, "n 8"]:
    """Return ``n`` new keys: words ``8j .. 8j + 7`` of the split stream are key ``j``.

    Guarantees:
      - the children differ from each other, from every ``fold_in`` of the key and from all draws of it.
    """
    _check_key(key)
    if n < 0:
        raise FdpError(f"split: expected a number of keys n >= 0, got {n}")
    words = chacha20.keystream(key, _nonce(key, _SPLIT, 0, 0), 0, (n + 1) // 2)
    return words[: 8 * n].view(n, 8)


def digest(key: Key) -> str:
    """Return SHA-256 of a key in hexadecimal, which tells keys apart and reveals none of them."""
    return hashlib.sha256(str(key.tolist()).encode()).hexdigest()


def fold_in(key: Key, data: int | str | Int[Tensor, ""]) -> Key:
    """Return the key for ``data``: a number such as the step (int or 0-d tensor, with the same result), or a path.

    Guarantees:
      - different data select different streams (numbers: always; paths: up to 88 bits of SHA-256);
      - a number and a path never select the same stream, nor that of ``split`` or of a draw.
    """
    _check_key(key)
    read_now = key.device.type == "cpu" and are_plain((key,))
    if isinstance(data, str):
        words = _path_words(data)
    elif isinstance(data, Tensor):
        if data.dim() != 0 or data.is_floating_point() or data.is_complex() or data.dtype == torch.bool:
            raise FdpError(f"fold_in: expected a 0-d integer tensor, got {data.dtype} of shape {tuple(data.shape)}")
        if not (read_now and data.device.type == "cpu" and are_plain((data,))):
            data = data.to(key.device, torch.int64)
            nonce = torch.stack([torch.full_like(data, _FOLD_INT), data & _WORD, data >> 32 & _WORD])
            return chacha20.keystream(key, nonce, 0, 1)[:8]
        number = int(data.to(torch.int64))
        words = [_FOLD_INT, number & _WORD, number >> 32 & _WORD]
    else:
        if not is_whole_number(data) or (data := int(data)) < 0 or data >= 1 << 63:
            raise FdpError(f"fold_in: expected an int in [0, 2^63), got {shown(data)}; fold in a str for anything else")
        words = [_FOLD_INT, data & _WORD, data >> 32]
    if read_now:
        return chacha20.child_key_cpu(key, words)
    return chacha20.keystream(key, _nonce(key, *words), 0, 1)[:8]


def step_key(root: Key, purpose: str, step: int | Int[Tensor, ""]) -> Key:
    """Return the key of one purpose at one step, ``fold_in(fold_in(root, purpose), step)``.

    Guarantees:
      - no two purposes and no two steps of a root share a key; a step may be a number or a tensor, on any device.
    """
    return fold_in(fold_in(root, purpose), step)


def path_nonces(paths: Sequence[str], device: torch.device | str | None = None) -> Int[Tensor, "paths 3"]:
    """Return the nonces of ``fold_in`` for each path, on a device; computed once, a captured step copies nothing."""
    return torch.tensor([_path_words(path) for path in paths], dtype=torch.int64).view(-1, 3).to(device)


def fold_in_nonces(key: Key, nonces: Int[Tensor, "paths 3"]) -> Int[Tensor, "paths 8"]:
    """Return the keys of many paths at once.

    Guarantees:
      - row ``i`` is ``fold_in(key, paths[i])`` for ``nonces = path_nonces(paths)``.
    """
    _check_key(key)
    if nonces.dtype != torch.int64 or nonces.dim() != 2 or nonces.shape[1] != 3:
        raise FdpError(
            f"nonces: expected int64 of shape (paths, 3), got {nonces.dtype} of shape {tuple(nonces.shape)}; "
            "make them with fdp.keys.path_nonces(paths, device)"
        )
    return chacha20.child_keys(key, nonces)


def bits(key: Key, shape: Sequence[int], *, window: Window | None = None) -> Int[Tensor, "..."]:
    """Draw 64 random bits per element, as int64.

    Guarantees:
      - with a window, bitwise the same slice of the draw without one, and no more memory than that slice.
    """
    _check_key(key)
    return chacha20.bits(key, *_box(shape, window, per_block=chacha20.ELEMENTS_PER_BLOCK))


def uniform(
    key: Key, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, window: Window | None = None
) -> Float[Tensor, "..."]:
    """Draw ``floor(2^p u) / 2^p`` with ``p`` the digits of ``dtype``: in [0, 1), exact in ``dtype``, never 1."""
    _check_float(dtype)
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    top = bits(key, shape, window=window) >> (64 - digits) & ((1 << digits) - 1)
    return top.to(dtype) * 2.0**-digits


def normal(
    key: Key, shape: Sequence[int], *, dtype: torch.dtype = torch.float32, window: Window | None = None
) -> Float[Tensor, "..."]:
    """Draw N(0, 1) by inverse CDF. float64: ``±Φ⁻¹((m + 1/2) 2⁻⁶⁴)``, ``m < 2⁶³``, with 64 more bits if ``m < 2⁴⁷``.

    float32 and below, never used for noise: ``±Φ⁻¹((m + 1/2) 2⁻³²)``, ``m < 2³¹``, with 32 more bits if ``m < 2¹⁶``.
    The same bits on every device; values on a GPU are within 1e-6 of those on a CPU.

    Guarantees:
      - symmetric; values out to 13 sigma (float32: 9.1 sigma) occur with their true probability;
      - in float64 and up to 8 sigma, the values that can occur lie less than 2^-40 apart;
      - with a window, bitwise the same slice of the draw without one.
    """
    _check_key(key)
    _check_float(dtype)
    per_block = chacha20.ELEMENTS_PER_BLOCK if dtype == torch.float64 else chacha20.WORDS_PER_BLOCK
    return draw_normal(key, *_box(shape, window, per_block=per_block), -math.inf, math.inf, dtype)


def normals(keys: Int[Tensor, "n 8"], sizes: Sequence[int]) -> Float[Tensor, " all"]:
    """Draw N(0, 1) in float64 for ``sizes[j]`` elements of every key, one key after the other, in one pass.

    Guarantees:
      - the part of key ``j`` is ``normal(keys[j], (sizes[j],), dtype=torch.float64)``, bit for bit on a CPU.
    """
    if keys.dtype != torch.int64 or keys.shape != (len(sizes), 8):
        raise FdpError(
            f"keys: expected int64 of shape ({len(sizes)}, 8), one key for each size, got {keys.dtype} of shape "
            f"{tuple(keys.shape)}"
        )
    for size in sizes:
        _box((size,), None, per_block=chacha20.ELEMENTS_PER_BLOCK)
    return foreach_normal(keys, list(sizes))


def truncated_normal(
    key: Key,
    shape: Sequence[int],
    *,
    lower: float = -2.0,
    upper: float = 2.0,
    dtype: torch.dtype = torch.float32,
    window: Window | None = None,
) -> Float[Tensor, "..."]:
    """Draw N(0, 1) conditioned on [lower, upper]: inverse CDF in float64, no rejection, then cast to ``dtype``."""
    _check_key(key)
    _check_float(dtype)
    if (lower, upper) == (-math.inf, math.inf):
        return normal(key, shape, dtype=dtype, window=window)
    if not (lower < upper and lower < _FAR and upper > -_FAR):
        raise FdpError(f"truncated_normal: expected lower < upper, and some of it in ±{_FAR}, got [{lower}, {upper}]")
    box = _box(shape, window, per_block=chacha20.ELEMENTS_PER_BLOCK)
    return draw_normal(key, *box, float(lower), float(upper), dtype)


def _words(raw: bytes) -> list[int]:
    return [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]


def _path_words(path: str) -> list[int]:
    """Return the nonce of a path, hashed at trace time: 8 bits of purpose, 88 bits of SHA-256."""
    first, second, third, *_ = _words(hashlib.sha256(path.encode()).digest())
    return [first & 0xFFFFFF00 | _FOLD_STR, second, third]


# As torch.compiler.assume_constant_result marks it, which would import torch's compiler first: a second in every start.
_path_words._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _nonce(key: Key, *words: int) -> Int[Tensor, " 3"]:
    # Filled on the GPU, since a copy from the host could not be captured in a CUDA graph.
    if key.device.type == "cpu":
        return torch.tensor(words)
    return torch.stack([key.new_full((), word) for word in words])


def _box(shape: Sequence[int], window: Window | None, *, per_block: int) -> tuple[list[int], list[int], list[int]]:
    """Return checked shape, starts and lengths."""
    shape = list(shape)
    if math.prod(shape) > chacha20.MAX_BLOCKS * per_block:
        power = 31 + per_block.bit_length()
        raise FdpError(
            f"shape {shape}: expected at most 2^{power} elements per key (2^32 blocks of {per_block}); "
            "split the key instead"
        )
    if window is None:
        return shape, [0] * len(shape), shape
    if len(window) != len(shape):
        raise FdpError(f"window {window}: expected one (start, length) per dim of shape {shape}")
    for dim, ((start, length), extent) in enumerate(zip(window, shape)):
        if start < 0 or length < 0 or start + length > extent:
            raise FdpError(f"window, dim {dim}: expected a range inside 0..{extent}, got {start}..{start + length}")
    return shape, [start for start, _ in window], [length for _, length in window]


def _check_key(key: Key) -> None:
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or key.shape != (8,):
        got = f"{key.dtype} of shape {tuple(key.shape)}" if isinstance(key, Tensor) else type(key).__name__
        raise FdpError(f"key: expected an int64 tensor of shape (8,), got {got}; make one with fdp.keys.key(seed)")


def _check_float(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise FdpError(f"dtype: expected a floating point type, got {dtype}; fdp.keys.bits draws integers")
