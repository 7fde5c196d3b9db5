"""ChaCha20 as a counter-based random source (RFC 7539, now RFC 8439).

    state = constants_4 | key_8 | counter_1 | nonce_3                         (sixteen 32-bit words)
    block = state + (diagonal round . column round)^10 (state)                (mod 2^32)
    quarter round:  a += b; d = (d ^ a) <<< 16;  c += d; b = (b ^ c) <<< 12;
                    a += b; d = (d ^ a) <<<  8;  c += d; b = (b ^ c) <<<  7

Element ``i`` of a draw depends only on the key and on ``i``, so any box of a tensor can be drawn without the rest. A
64-bit element is words ``2i`` (low half) and ``2i + 1`` (high half) of the stream with nonce 0. Words and elements are
both held in int64. ``normal.py`` draws the normal law from the same stream; the Triton bodies are in
``chacha20_triton.py``.

    >>> words = keystream(key, nonce, 0, 4)                      # (64,) words in [0, 2^32)
    >>> x = bits(key, (1024, 768), (512, 0), (512, 768))         # the lower half of a (1024, 768) draw

Letters: K = 8 key words, N = 3 nonce words, B blocks, W = 16 words of a block, R runs (of consecutive elements in a
box), L elements of a run, C child_keys.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor

from fdp_kernels import cpu_library
from fdp_kernels.chacha20_triton import bits_body, blocks_body, words_body
from fdp_kernels.cpu_library import dense
from fdp_kernels.op import define, triton

WORDS_PER_BLOCK = 16
"""32-bit words; also the normal float32 elements drawn from a block."""
ELEMENTS_PER_BLOCK = 8
"""64-bit elements."""
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


def blocks_reference(key_K: Tensor, nonce_BN: Tensor, counter_B: Tensor) -> Tensor:
    """Evaluate the block function at every nonce and counter: int64 ``(B, W)``. State rows are ``(4, B)``."""
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
    """Return the words of ``blocks`` blocks from ``first_block`` on: int64 ``(blocks * 16,)``, each in [0, 2^32)."""
    check_blocks(first_block, blocks)
    counter_B = torch.arange(first_block, first_block + blocks, device=key_K.device)
    return blocks_reference(key_K, nonce_N.expand(blocks, 3), counter_B).reshape(-1)


def child_keys_reference(key_K: Tensor, nonce_CN: Tensor) -> Tensor:
    """Return a new key for every nonce, the first eight words of its stream: int64 ``(C, K)``."""
    return blocks_reference(key_K, nonce_CN, key_K.new_zeros(nonce_CN.shape[0]))[:, :8].contiguous()


def bits_reference(
    key_K: Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int], purpose: int = 0
) -> Tensor:
    """Draw 64 bits for every element of a box in a row-major tensor, from the stream with nonce ``(purpose, 0, 0)``."""
    low_high = _element_words_reference(key_K, purpose, (shape, start, size), ELEMENTS_PER_BLOCK)
    return (low_high[..., 0] | low_high[..., 1] << 32).reshape(list(size))


def words_reference(
    key_K: Tensor, purpose: int, shape: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> Tensor:
    """Draw 32 bits for every element of a box, from the stream with nonce ``(purpose, 0, 0)``."""
    return _element_words_reference(key_K, purpose, (shape, start, size), WORDS_PER_BLOCK).reshape(list(size))


def _element_words_reference(key_K: Tensor, purpose: int, box: tuple[Sequence[int], ...], per_block: int) -> Tensor:
    """Return the words of every element of a box, ``(R, L, words of an element)``."""
    starts_R, length = run_starts(box, per_block, key_K.device)
    per_run = (length + per_block - 2) // per_block + 1  # a run may begin on the last element of a block
    counter_RB = starts_R[:, None] // per_block + torch.arange(per_run, device=key_K.device)
    nonce_N = torch.stack([key_K.new_full((), word) for word in (purpose, 0, 0)])
    words = blocks_reference(key_K, nonce_N.expand(counter_RB.numel(), 3), counter_RB.reshape(-1))
    units = words.reshape(len(starts_R), per_run * per_block, WORDS_PER_BLOCK // per_block)
    index_RL = (starts_R % per_block)[:, None] + torch.arange(length, device=key_K.device)
    return units.gather(1, index_RL[..., None].expand(-1, -1, units.shape[-1]))


def split_into_runs(box: tuple[Sequence[int], ...], per_block: int) -> tuple[int, list[tuple[int, int]], int]:
    """Return the first element of a box, (count, stride) of each outer dim, and the length of a run."""
    shape, start, size = box
    check_blocks(0, -(-math.prod(shape) // per_block))
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    outer = len(shape)
    while outer > 0 and size[outer - 1] == shape[outer - 1]:  # a full trailing dim lengthens the run
        outer -= 1
    outer = max(outer - 1, 0)
    first = sum(begin * stride for begin, stride in zip(start, strides))
    return first, list(zip(size, strides))[:outer], math.prod(size[outer:])


def run_starts(box: tuple[Sequence[int], ...], per_block: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the first element of every run, on ``device``, and the length that all runs share."""
    first, outer, length = split_into_runs(box, per_block)
    starts_R = torch.full((1,), first, device=device)
    for count, stride in outer:
        starts_R = (starts_R[:, None] + torch.arange(count, device=device) * stride).reshape(-1)
    return starts_R, length


def check_blocks(first_block: int, blocks: int) -> None:
    if first_block < 0 or first_block + blocks > MAX_BLOCKS:
        raise ValueError(
            f"expected blocks of a ChaCha20 stream in 0..2^32-1, got {first_block}..{first_block + blocks - 1}; "
            "split the key and draw in parts"
        )


# ---------------------------------------------------------------- launches

_BLOCKS_PER_TILE, _WARPS = 128, 4
"""One block for each lane."""


def launch_runs(
    body: Any, key_K: Tensor, box: tuple[Sequence[int], ...], per_block: int, dtype: torch.dtype, **constants: int
) -> Tensor:
    """Launch a body that draws the runs of a box, one program per tile of a run."""
    size = list(box[2])
    out = torch.empty(size, dtype=dtype, device=key_K.device)
    if 0 in size:
        return out
    starts_R, length = run_starts(box, per_block, key_K.device)
    counters = min(_BLOCKS_PER_TILE, triton.next_power_of_2(-(-length // per_block) + 1))
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
        rows_per_program = 32
        with torch.cuda.device_of(key_K):
            blocks_body[(-(-rows // rows_per_program),)](
                key_K.contiguous(),
                nonces.contiguous(),
                out,
                nonce_stride,
                first_block,
                step,
                rows,
                KEEP=keep,
                ROWS=rows_per_program,
                num_warps=1,
            )
    return out


def launch_keystream(key_K: Tensor, nonce_N: Tensor, first_block: int, blocks: int) -> Tensor:
    """Evaluate :func:`keystream_reference` in one launch."""
    check_blocks(first_block, blocks)
    return _launch_blocks(key_K, nonce_N, 0, first_block, 1, blocks, WORDS_PER_BLOCK).view(-1)


def launch_child_keys(key_K: Tensor, nonce_CN: Tensor) -> Tensor:
    """Evaluate :func:`child_keys_reference` in one launch."""
    return _launch_blocks(key_K, nonce_CN, 3, 0, 0, nonce_CN.shape[0], 8)


def launch_bits(key_K: Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Tensor:
    """Evaluate :func:`bits_reference` in one launch."""
    return launch_runs(bits_body, key_K, (shape, start, size), ELEMENTS_PER_BLOCK, torch.int64)


def launch_words(
    key_K: Tensor, purpose: int, shape: Sequence[int], start: Sequence[int], size: Sequence[int]
) -> Tensor:
    """Evaluate :func:`words_reference` in one launch."""
    return launch_runs(words_body, key_K, (shape, start, size), WORDS_PER_BLOCK, torch.int64, PURPOSE=purpose)


# ---------------------------------------------------------------- CPU: the `cryptography` package's cipher

_PIECE_ELEMENTS = 1 << 18
"""Elements per piece: a few MB of scratch, near the cache, with work for several threads."""
_THREAD_ELEMENTS = 1 << 15
"""Elements that a thread draws at a time: a tenth of a millisecond of work."""
_GAP_ELEMENTS = 1 << 10
"""Largest gap between two runs that is drawn and dropped; a larger one costs more than starting the cipher again."""
_ZEROS = memoryview(bytes(8 * (_PIECE_ELEMENTS + 2 * ELEMENTS_PER_BLOCK)))
WORD, ELEMENT = np.dtype("<u4"), np.dtype("<i8")
"""32 and 64 bits of the stream."""


def make_cipher(key_K: Tensor | Sequence[int], nonce_N: Sequence[int] = (0, 0, 0)) -> Callable[[int], Any]:
    """Return ``counter -> encryptor``; the key is read once."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    words = key_K.tolist() if isinstance(key_K, Tensor) else key_K
    key = struct.pack("<8I", *(word & _MASK for word in words))
    nonce = struct.pack("<3I", *(word & _MASK for word in nonce_N))

    def encryptor(block: int) -> Any:
        return Cipher(algorithms.ChaCha20(key, struct.pack("<I", block) + nonce), mode=None).encryptor()

    return encryptor


def _keystream_cpu(key_K: Tensor, nonce_N: Tensor, first_block: int, blocks: int) -> Tensor:
    check_blocks(first_block, blocks)
    raw = make_cipher(key_K, nonce_N.tolist())(first_block).update(bytes(4 * WORDS_PER_BLOCK * blocks))
    return torch.from_numpy(np.frombuffer(raw, dtype="<u4").astype(np.int64))


def read_stream(cipher: Callable[[int], Any], unit: np.dtype, first: int, count: int) -> np.ndarray:
    """Return elements ``first .. first + count - 1`` of the stream; ``count`` is at most ``_PIECE_ELEMENTS``."""
    per_block = 4 * WORDS_PER_BLOCK // unit.itemsize
    skip = first % per_block
    out = np.empty(-(-(skip + count) // per_block) * per_block, dtype=unit)
    cipher(first // per_block).update_into(_ZEROS[: out.nbytes], out.view(np.uint8))
    return out[skip : skip + count]


def read_element(cipher: Callable[[int], Any], index: int) -> int:
    """Return one 64-bit element of the stream."""
    return int(read_stream(cipher, ELEMENT, index, 1)[0])


def fill_streams(ciphers: Sequence[Callable[[int], Any]], outs: Sequence[np.ndarray]) -> None:
    """Write the first 64-bit elements of every cipher's stream into its array, on as many threads as torch uses.

    Guarantees:
      - every element is written, or an error is raised: none is left as it was in memory.
    """
    pieces = [
        (cipher, first, out[first : first + _THREAD_ELEMENTS])
        for cipher, out in zip(ciphers, outs, strict=True)
        for first in range(0, len(out), _THREAD_ELEMENTS)
    ]
    threads = max(1, min(torch.get_num_threads(), sum(map(len, outs)) // _THREAD_ELEMENTS))

    def fill(thread: int) -> None:
        for cipher, first, out in pieces[thread::threads]:
            cipher(first // ELEMENTS_PER_BLOCK).update_into(_ZEROS[: out.nbytes], out.view(np.uint8))

    if threads == 1:
        return fill(0)
    with ThreadPoolExecutor(threads - 1) as pool:
        others = pool.map(fill, range(1, threads))
        fill(0)
        list(others)  # raises what a thread raised


def child_key_cpu(key_K: Tensor, nonce_N: Sequence[int]) -> Tensor:
    """Return the child of one nonce: (8,). For a plain key on a CPU, since no compiler or transform sees it.

    A step draws from few keys of its own, and to pass through the dispatcher took most of the time for each.
    """
    nonce_CN = torch.tensor([nonce_N], dtype=torch.int64, device="cpu")
    return (_child_keys_cpu if HAS_CIPHER else child_keys)(key_K, nonce_CN).view(8)


def _child_keys_cpu(key_K: Tensor, nonce_CN: Tensor) -> Tensor:
    if key_K.shape != (8,) or nonce_CN.shape != (len(nonce_CN), 3):
        got = tuple(key_K.shape), tuple(nonce_CN.shape)
        raise ValueError(f"child_keys: expected a key of shape (8,) and nonces of shape (C, 3), got {got}")
    if (loops := cpu_library.library()) is not None:
        out = torch.empty(len(nonce_CN), 8, dtype=torch.int64, device="cpu")
        loops.child_keys(dense(key_K), dense(nonce_CN), out, len(out))
        return out
    key = key_K.tolist()
    rows = [make_cipher(key, nonce)(0).update(_ZEROS[:32]) for nonce in nonce_CN.tolist()]
    return torch.from_numpy(np.frombuffer(b"".join(rows), dtype=WORD).astype(np.int64).reshape(-1, 8))


def _read_runs(cipher: Callable[[int], Any], unit: np.dtype, starts: np.ndarray, length: int) -> np.ndarray:
    """Return the elements of every run, (R, L). Close, evenly spaced runs are read at once, others one by one."""
    if len(starts) == 1:
        return read_stream(cipher, unit, int(starts[0]), length)[None]
    out, steps = np.empty((len(starts), length), dtype=unit), np.diff(starts)
    step = int(steps[0])
    most = (_PIECE_ELEMENTS - length) // step + 1 if step - length <= _GAP_ELEMENTS else 1
    breaks = (np.flatnonzero(steps != step) + 1).tolist()
    for begin, end in zip([0, *breaks], [*breaks, len(starts)]):
        for low in range(begin, end, most):
            count = min(most, end - low)
            words = read_stream(cipher, unit, int(starts[low]), (count - 1) * step + length)
            out[low : low + count] = as_strided(words, (count, length), (unit.itemsize * step, unit.itemsize))
    return out


def fill_box_cpu(
    key_K: Tensor,
    box: tuple[Sequence[int], ...],
    unit: np.dtype,
    law: Callable[[np.ndarray, np.ndarray], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Return ``law(elements of the box, first element of each run)`` in the shape of the box.

    The law is applied one piece at a time, so only the result has the size of the box.
    """
    size, cipher = list(box[2]), make_cipher(key_K)
    if 0 in size:
        return torch.empty(size, dtype=dtype)
    start, outer, length = split_into_runs(box, 4 * WORDS_PER_BLOCK // unit.itemsize)
    starts = np.array([start])
    if not outer and length <= _PIECE_ELEMENTS:
        return law(_read_runs(cipher, unit, starts, length), starts).to(dtype).view(size)
    for count, stride in outer:
        starts = (starts[:, None] + np.arange(count) * stride).reshape(-1)
    out = torch.empty((len(starts), length), dtype=dtype)
    columns = min(length, _PIECE_ELEMENTS)
    rows = _PIECE_ELEMENTS // columns
    for row in range(0, len(starts), rows):
        for column in range(0, length, columns):
            part, first = out[row : row + rows, column : column + columns], starts[row : row + rows] + column
            part.copy_(law(_read_runs(cipher, unit, first, part.shape[1]), first))
    return out.view(size)


def _bits_cpu(key_K: Tensor, shape: Sequence[int], start: Sequence[int], size: Sequence[int]) -> Tensor:
    return fill_box_cpu(key_K, (shape, start, size), ELEMENT, lambda bits, _: torch.from_numpy(bits), torch.int64)


# ---------------------------------------------------------------- ops
# Opaque to the compiler. The key is read when the op runs, so it may be a traced tensor.

BOX_SCHEMA = "Tensor key, SymInt[] shape, SymInt[] start, SymInt[] size"
HAS_CIPHER = find_spec("cryptography") is not None  # without it the reference gives the same bits, slower

keystream = define(
    "keystream",
    "Tensor key, Tensor nonce, SymInt first_block, SymInt blocks -> Tensor",
    reference=keystream_reference,
    cuda=launch_keystream,
    cpu=_keystream_cpu if HAS_CIPHER else None,
    fake=lambda key, nonce, first_block, blocks: key.new_empty((blocks * WORDS_PER_BLOCK,)),
)
"""``(key_K, nonce_N, first_block, blocks)``: as :func:`keystream_reference`."""
child_keys = define(
    "child_keys",
    "Tensor key, Tensor nonces -> Tensor",
    reference=child_keys_reference,
    cuda=launch_child_keys,
    cpu=_child_keys_cpu if HAS_CIPHER else None,
    fake=lambda key, nonces: key.new_empty((nonces.shape[0], 8)),
)
"""``(key_K, nonce_CN)``: as :func:`child_keys_reference`."""
bits = define(
    "bits",
    f"{BOX_SCHEMA} -> Tensor",
    reference=bits_reference,
    cuda=launch_bits,
    cpu=_bits_cpu if HAS_CIPHER else None,
    fake=lambda key, shape, start, size: key.new_empty(size),
)
"""``(key_K, shape, start, size)``: as :func:`bits_reference`."""
