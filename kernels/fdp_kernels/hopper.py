"""Parts of kernels for Hopper: warps that load, warps that multiply, and a ring in shared memory between them.

One warp fills the slots of the ring by TMA. Several groups of four warps each multiply their own rows of a tile, and
add up what they have. While one group adds, the tensor cores work for the others, so nobody waits for loads or
additions. In a kernel of Triton's, which pipelines by itself, all warps stop multiplying while they add.

Written in Gluon, the layer below Triton, which is experimental: other versions than those in GLUON_VERSIONS, and other
GPUs, use the Triton bodies, which compute the same. Gluon has no interpreter. `make test` compiles these bodies for
Hopper, and the tests marked `gpu` run them.

    >>> if runs_hopper(g):
    ...     desc = ring_descriptor(g, (1, 64, 64))
"""

# Bodies are Gluon, which pyright takes for Python.
# pyright: reportInvalidTypeForm=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fdp_kernels.op import triton
from fdp_kernels.tile_gemm import (
    Tile,
    align_rows,
    cdiv,
    descriptor_strides,
    matrix_index,
    multiprocessors,
    pad_to_four,
    pick,
    tile_position,
)

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
except ImportError:  # no Triton, or one without Gluon
    gluon: Any = None
    gl: Any = None
    hopper: Any = None

GLUON_VERSIONS = ("3.6.",)
"""Versions of Triton whose Gluon these bodies were tested with."""
TESTED: bool = gluon is not None and triton.__version__.startswith(GLUON_VERSIONS)
"""True if this is one of them."""
GROUP_ROWS = 64
"""Rows of a tile that one group of four warps multiplies: those of one instruction."""
DEPTH = 64
"""Columns of a slot of the ring: 128 bytes, which TMA and tensor cores read without conflicts."""


def gluon_jit(body: Any = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """Apply ``gluon.jit``; return the function unchanged where Gluon is missing.

    A number in ``do_not_specialize`` is never compiled into the body, not even if it is 1: Triton 3.6 crashes if that
    leaves a branch between two kinds of tiles without an alternative.
    """
    if body is None:
        return lambda body: gluon_jit(body, do_not_specialize=do_not_specialize)
    return body if gluon is None else gluon.jit(body, do_not_specialize=list(do_not_specialize))


def gluon_jit_of(body: Any) -> Any:
    """Return a function of ``op.jit`` for calls from Gluon; it must not make tensors, which need a layout there."""
    return body if gluon is None or not hasattr(body, "fn") else gluon.jit(body.fn)


def runs_hopper(z: Tensor) -> bool:
    """Return True if the bodies for Hopper take this operand: half precision, on such a GPU."""
    return z.dtype in (torch.bfloat16, torch.float16) and z.is_cuda and has_hopper(z.device)


def has_hopper(device: torch.device) -> bool:
    """Return True if this device is a GPU that runs the bodies for Hopper."""
    return TESTED and device.type == "cuda" and _is_hopper(device.index)


@cache
def _is_hopper(index: int | None) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(index)[0] == 9


def ring_layout(bits: int = 16) -> Any:
    """Return the layout of a slot of the ring, with elements of so many bits."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=3)


def ring_descriptor(z_BTK: Tensor, block: Sequence[int]) -> Any:
    """Return a tensor descriptor of a tensor from ``tile_gemm.align_rows``, for loads into the ring."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = ring_layout(8 * z_BTK.element_size())
    return TensorDescriptor(z_BTK, list(z_BTK.shape), descriptor_strides(z_BTK), list(block), layout)


def outer_descriptors(gs: Sequence[Tensor], xs: Sequence[Tensor], tile: Tile) -> list[Any]:
    """Return descriptors of four g, in boxes of a group's rows, then of four x: the operands of :func:`load_outer`."""
    lefts = [ring_descriptor(align_rows(g), (1, tile.depth, GROUP_ROWS)) for g in gs]
    rights = [ring_descriptor(align_rows(x), (1, tile.depth, tile.columns)) for x in xs]
    return pad_to_four(lefts) + pad_to_four(rights)


def fastest_tile(
    seconds: Mapping[Tile, float], count: Callable[[Tile], Sequence[int]], device: torch.device, *, beside: bool = False
) -> Tile:
    """Return the tile with which the last multiprocessor is done first; ``seconds`` is the relative time of one tile.

    ``count`` returns the number of tiles of every matrix. ``beside``: the launch often shares the device with another
    such launch, which begins on multiprocessors that the last round leaves idle; then half of that loss is counted.

    Each multiprocessor computes one tile at a time. A matrix of 1024 rows has a sixth tile of 192 for its last 64 rows,
    and the 544 tiles of 192 x 128 of a block of GPT-2-Medium take five rounds on 132 multiprocessors, of which the
    fifth has only a few tiles.
    """
    processors = multiprocessors(device)

    def rounds(tile: Tile) -> float:
        tiles = sum(count(tile))
        whole = cdiv(tiles, processors)
        return (whole + tiles / processors) / 2 if beside else whole

    return min(seconds, key=lambda tile: rounds(tile) * seconds[tile])


pick_hopper, tile_position_hopper = gluon_jit_of(pick), gluon_jit_of(tile_position)
matrix_index_hopper = gluon_jit_of(matrix_index)


@gluon_jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """Return the slot after this one, and its phase, which changes with every turn of the ring."""
    slot += 1
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon_jit
def make_barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """Return a barrier per slot, which opens after so many arrivals.

    Use every barrier after this: the compiler gives the memory of one that is never used to another buffer, which the
    late writes of its initialisation then spoil.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], hopper.mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        hopper.mbarrier.init(barriers.index(slot), count=ARRIVALS)
    hopper.fence_async_shared()
    return barriers


@gluon_jit
def make_ring(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Return two barriers per slot: one says that it is full, one that all readers are done with it."""
    full = make_barriers(SLOTS, 1)
    return full, make_barriers(SLOTS, READERS)


@gluon_jit
def load_outer(
    g, x, sample, i, j, steps, ring, slot, phase,
    BLOCK_P: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_T: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Load the operands of ``g_b[:, tile i]^T x_b[:, tile j]``, BLOCK_T tokens at a time; return the next slot."""
    GROUPS: gl.constexpr = BLOCK_P // 64
    left, right, full, empty = ring
    for step in range(steps):
        hopper.mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        hopper.mbarrier.expect(bar, (BLOCK_P + BLOCK_D) * BLOCK_T * 2)
        for k in gl.static_range(GROUPS):
            at = [sample, step * BLOCK_T, i * BLOCK_P + 64 * k]
            hopper.tma.async_copy_global_to_shared(g, at, bar, left.index(GROUPS * slot + k))
        hopper.tma.async_copy_global_to_shared(x, [sample, step * BLOCK_T, j * BLOCK_D], bar, right.index(slot))
        slot, phase = next_slot(slot, phase, SLOTS)
    return slot, phase


@gluon_jit
def multiply_outer(
    GROUP: gl.constexpr, acc, steps, ring, slot, phase,
    BLOCK_P: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_T: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Return rows 64 GROUP to 64 GROUP + 63 of the product of what was loaded, in ``acc``, and the next slot."""
    GROUPS: gl.constexpr = BLOCK_P // 64
    left, right, full, empty = ring
    for step in range(steps):
        hopper.mbarrier.wait(full.index(slot), phase)
        g_PT = left.index(GROUPS * slot + GROUP).reshape((BLOCK_T, 64)).permute((1, 0))
        x_TD = right.index(slot).reshape((BLOCK_T, BLOCK_D))
        token = hopper.warpgroup_mma(g_PT, x_TD, acc, use_acc=step > 0, is_async=True)
        acc = hopper.warpgroup_mma_wait(0, deps=[token])
        hopper.mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, SLOTS)
    return acc, slot, phase
