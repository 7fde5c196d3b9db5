"""``sum_int8`` on Hopper: tensor cores multiply stored integers by integer weights and add them without rounding.

    W_j = u_j sum_b w_bj q_bj       w_bj = round(c_b 2^e_bj / u_j),   u_j = 2^-29 of the largest |c_b 2^e_bj|

j is a block of 128 columns of a row, which share an exponent; the u_j are powers of two. Every w is four bytes, whose
products with q are added in 32 bits, and the four sums in 64. So only weights are rounded, at the 29th bit of the
largest of their block, and the sum, once, to float32.

A warp reads the integers as words of four columns, as they lie in memory. One instruction takes sixteen words of each
of four samples, 16 x 16 integers, and multiplies them by a matrix of 16 x 8:

    right[(b, k), (k', byte)] = byte of w_b  if k = k',  else 0             b: 4 samples; k, k': the columns of a word

Three of four products are with zeros, but nothing is converted, shifted or exchanged between lanes: 0.6 instructions
for a number instead of 4. What is left is the time to read q, and that is done by TMA, three steps ahead.

Slack: that of ``sum_int8``. The largest integer of a block is at least 63. So if L_j is the largest norm of block j
among all c_b G_b, rounding a sample's weight moves block j by at most ``127 sqrt(128) u_j / 2 <= 2^-25.4 L_j``, and all
blocks by ``2^-25.4 sqrt(B) C``. B samples and the last rounding move W by at most ``2^-24 (0.4 B^1.5 + B) C``. (Units
are at least ``2^-126``: gradients close to the smallest numbers of float32 are rounded by more, by ``2^-120`` each.)

Letters: B samples; N blocks of 128 columns, all rows after one another; t, r lane % 4 and lane // 4.
"""

# Bodies are Gluon, which pyright takes for Python.
# pyright: reportInvalidTypeForm=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdp_kernels.hopper import (
    gl,
    gluon_jit,
    has_hopper,
    hopper,
    make_barriers,
    matrix_index_hopper,
    next_slot,
    pick_hopper,
    ring_layout,
)
from fdp_kernels.keep_hopper import INT8_COLUMNS
from fdp_kernels.tile_gemm import cdiv, first_ends, pad_to_four

MOST_SAMPLES = 64
"""Most samples of a part: their weights lie in registers and in shared memory."""
BLOCKS = 4
"""Blocks of columns that a program sums, with one warp."""
SLOTS = 3
"""Steps of eight samples that are on their way."""

_WEIGHT = """
{ .reg .b32 w;
cvt.rni.s32.f32 w, $1;
add.u32 w, w, 0x80808080;
xor.b32 $0, w, 0x80808080; }
"""
"""Round to an integer, below 2^30, and write it as four signed bytes: ``w = sum_i 256^i byte_i``."""
_PLACE = "prmt.b32 $0, $1, 0, $2;"
"""Bytes of a word as a selector names them; 4 names a zero."""
_MULTIPLY = """
mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {$0,$1,$2,$3}, {$16,$17}, {$20}, {$28,$29,$30,$31};
mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {$4,$5,$6,$7}, {$18,$19}, {$20}, {$32,$33,$34,$35};
mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {$8,$9,$10,$11}, {$16,$17}, {$24}, {$36,$37,$38,$39};
mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {$12,$13,$14,$15}, {$18,$19}, {$24}, {$40,$41,$42,$43};
"""
"""Four words of a lane times two bytes of weights, then times the other two.

Words 0 and 1 are rows r and 8 + r, words 2 and 3 those of the next instruction. Lane (t, r) holds sample t of what is
multiplied, and column t of the results: of both rows, for both bytes.
"""


def _constant(value: Any) -> Any:
    return value if gl is None else gl.constexpr(value)


WEIGHT, PLACE, MULTIPLY = _constant(_WEIGHT), _constant(_PLACE), _constant(_MULTIPLY)
OPERANDS = _constant(",".join(["=&r"] * 16 + ["r"] * 28))


@gluon_jit
def _weights(exponent_ptr, factor_ptr, first, end, sample_S, block_N, blocks):
    """Return ``c_b 2^e_bj`` of samples from ``first`` on, (N, S); 0 past the last."""
    b_S = gl.minimum(first + sample_S, end - 1)
    exponent_NS = gl.load(exponent_ptr + (gl.expand_dims(b_S.to(gl.int64) * blocks, 0) + gl.expand_dims(block_N, 1)))
    factor_S = gl.where(first + sample_S < end, gl.load(factor_ptr + b_S), 0.0)
    power_NS = ((exponent_NS.to(gl.int32) + 127) << 23).to(gl.float32, bitcast=True)
    return power_NS * gl.expand_dims(factor_S, 0)


@gluon_jit
def _store_weights(
    exponent_ptr, factor_ptr, shared, first, end, base, blocks, BLOCKS: gl.constexpr, MOST_SAMPLES: gl.constexpr
):
    """Write the w of all samples to shared memory, eight at a time; return the units u_j."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [BLOCKS, 32 // BLOCKS], [1, 1], [0, 1])
    sample_S = gl.arange(0, 8, gl.SliceLayout(0, LAYOUT))
    block_N = (base + gl.arange(0, BLOCKS, gl.SliceLayout(1, LAYOUT))).to(gl.int64)
    largest_NS = gl.zeros([BLOCKS, 8], gl.int32, LAYOUT)
    weights = ()
    for k in gl.static_range(MOST_SAMPLES // 8):
        weight_NS = _weights(exponent_ptr, factor_ptr, first + 8 * k, end, sample_S, block_N, blocks)
        largest_NS = gl.maximum(largest_NS, weight_NS.to(gl.int32, bitcast=True) & 0x7FFFFFFF)  # NaN is largest
        weights = weights + (weight_NS,)
    field_N = gl.max(largest_NS, 1) >> 23
    power_N = gl.minimum(gl.maximum(field_N, 30), 254)
    inverse_N = ((283 - power_N) << 23).to(gl.float32, bitcast=True)  # the largest becomes 2^29 to 2^30
    for k in gl.static_range(MOST_SAMPLES // 8):
        w_NS = gl.inline_asm_elementwise(
            WEIGHT, "=r,r", [weights[k] * gl.expand_dims(inverse_N, 1)], dtype=gl.int32, is_pure=True, pack=1
        )
        # A lane reads samples 2 t and 2 t + 1 of every eight: first the even ones, then the odd ones.
        w_2TN = gl.permute(gl.reshape(w_NS, (BLOCKS, 4, 2)), (2, 1, 0))
        shared.index(k).store(gl.reshape(w_2TN, (8, BLOCKS)))
    return gl.where(field_N == 255, 0x7FC00000, (power_N - 29) << 23).to(gl.float32, bitcast=True)


@gluon_jit
def _add_bytes(low, high, BLOCKS: gl.constexpr):
    """Return ``sum_i 256^i sums_i``, rounded once to float32, of the sums of bytes 0 and 1, and of 2 and 3."""
    sum_0, sum_1 = gl.reshape(low, (4, BLOCKS, 8, 2, 2)).split()
    sum_2, sum_3 = gl.reshape(high, (4, BLOCKS, 8, 2, 2)).split()
    upper = (sum_2.to(gl.int64) << 16) + (sum_3.to(gl.int64) << 24)
    return (sum_0.to(gl.int64) + (sum_1.to(gl.int64) << 8) + upper).to(gl.float32)


@gluon_jit
def _load_samples(q, ring, full, slot, base, sample, pred, BLOCKS: gl.constexpr):
    """Begin to load eight samples' words of all blocks into a slot."""
    hopper.mbarrier.expect(full.index(slot), BLOCKS * 8 * 128, pred=pred)
    hopper.tma.async_copy_global_to_shared(q, [base, sample, 0], full.index(slot), ring.index(slot), pred=pred)


@gluon_jit(do_not_specialize=("batch", "size"))
def _sum_hopper_body(
    q0, q1, q2, q3, exponent_ptr0, exponent_ptr1, exponent_ptr2, exponent_ptr3,
    factor_ptr0, factor_ptr1, factor_ptr2, factor_ptr3, out_ptr0, out_ptr1, out_ptr2, out_ptr3,
    n0, n1, n2, n3, end0, end1, end2, batch, size,
    BLOCKS: gl.constexpr, MOST_SAMPLES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Sum BLOCKS blocks of columns over the samples of a part, eight at a time."""
    TNRV: gl.constexpr = gl.BlockedLayout([1, BLOCKS, 1, 4], [4, 1, 8, 1], [1, 1, 1, 1], [3, 0, 2, 1])
    TNR: gl.constexpr = gl.SliceLayout(3, TNRV)
    TN: gl.constexpr = gl.SliceLayout(2, TNR)
    LOADED: gl.constexpr = gl.BlockedLayout([BLOCKS, 2, 4], [1, 4, 8], [1, 1, 1], [1, 2, 0])
    STORED: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    index = gl.program_id(0)
    matrix = matrix_index_hopper(index, end0, end1, end2)
    own = index - pick_hopper(matrix, 0, end0, end1, end2)
    blocks = pick_hopper(matrix, n0, n1, n2, n3)
    tiles = gl.cdiv(blocks, BLOCKS)
    part = own // tiles
    base = gl.minimum(own % tiles * BLOCKS, blocks - BLOCKS)  # the last tile may overlap the one before
    first = part * size
    end = gl.minimum(first + size, batch)
    q = pick_hopper(matrix, q0, q1, q2, q3)
    ring = gl.allocate_shared_memory(q0.dtype, [SLOTS, BLOCKS, 8, 32], q0.layout)
    full = make_barriers(SLOTS, 1)
    steps = gl.cdiv(end - first, 8)
    for slot in gl.static_range(SLOTS):
        _load_samples(q, ring, full, slot, base, first + 8 * slot, slot < steps, BLOCKS)
    shared = gl.allocate_shared_memory(
        gl.int32, [MOST_SAMPLES // 8, 8, BLOCKS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    unit_N = _store_weights(
        pick_hopper(matrix, exponent_ptr0, exponent_ptr1, exponent_ptr2, exponent_ptr3),
        pick_hopper(matrix, factor_ptr0, factor_ptr1, factor_ptr2, factor_ptr3),
        shared, first, end, base, blocks, BLOCKS, MOST_SAMPLES,
    )  # fmt: skip
    # Lane (t, r) holds column r // 2 and byte r % 2 of the right matrix: one byte of w, in one place.
    r_R = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, TNR)))
    place_R = 4 * (r_R >> 1)
    low_R = 0x4444 - ((4 - (r_R & 1)) << place_R)
    high_R = low_R + (2 << place_R)
    low_01 = gl.zeros([4, BLOCKS, 8, 4], gl.int32, TNRV)
    low_23 = low_01
    high_01 = low_01
    high_23 = low_01
    slot = 0
    phase = 0
    for step in range(0, steps):
        hopper.mbarrier.wait(full.index(slot), phase)
        words = ring.index(slot).load(LOADED)
        even, odd = gl.permute(gl.reshape(words, (BLOCKS, 4, 2, 8, 4)), (1, 0, 3, 4, 2)).split()
        halves = (even, odd)
        for k in gl.static_range(2):
            words = gl.convert_layout(halves[k], TNRV, assert_trivial=True)
            w_TN = gl.expand_dims(shared.index(step).slice(4 * k, 4, 0).load(TN), 2)
            low = gl.inline_asm_elementwise(
                PLACE, "=r,r,r", [w_TN, low_R[None, None, :]], dtype=gl.int32, is_pure=True, pack=1
            )
            high = gl.inline_asm_elementwise(
                PLACE, "=r,r,r", [w_TN, high_R[None, None, :]], dtype=gl.int32, is_pure=True, pack=1
            )
            low_01, low_23, high_01, high_23 = gl.inline_asm_elementwise(
                MULTIPLY,
                OPERANDS,
                [words, gl.expand_dims(low, 3), gl.expand_dims(high, 3), low_01, low_23, high_01, high_23],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
                is_pure=True,
                pack=4,
            )
        gl.thread_barrier()  # all lanes have read the slot
        _load_samples(q, ring, full, slot, base, first + 8 * (step + SLOTS), step + SLOTS < steps, BLOCKS)
        slot, phase = next_slot(slot, phase, SLOTS)
    total = gl.join(_add_bytes(low_01, high_01, BLOCKS), _add_bytes(low_23, high_23, BLOCKS))
    UNITS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, total.type.layout))))
    total *= gl.convert_layout(unit_N, UNITS)[None, :, None, None, None]
    # (t, N, r, one of two words, one of two pairs) in the order of columns
    total = gl.reshape(gl.permute(total, (1, 2, 4, 3, 0)), (BLOCKS * 128,))
    out_ptr = pick_hopper(matrix, out_ptr0, out_ptr1, out_ptr2, out_ptr3)
    start = (part.to(gl.int64) * blocks + base) * 128
    gl.store(out_ptr + start + gl.arange(0, BLOCKS * 128, STORED), gl.convert_layout(total, STORED))


def can_sum(q_BPD: Tensor, size: int) -> bool:
    """Return True if this body sums these integers in parts of ``size`` samples."""
    return (
        has_hopper(q_BPD.device)
        and min(len(q_BPD), size) <= MOST_SAMPLES
        and q_BPD.shape[2] % INT8_COLUMNS == 0
        and q_BPD.shape[1] * q_BPD.shape[2] >= BLOCKS * INT8_COLUMNS
        and q_BPD.data_ptr() % 16 == 0
    )


def launch_four_sums(qs: list[Tensor], es: list[Tensor], factors: list[Tensor], size: int) -> list[Tensor]:
    """Return ``sum_b c_b q_b 2^e_b`` of every ``size`` samples, (parts, P, D), of up to four matrices."""
    parts = cdiv(len(qs[0]), size)
    outs = [torch.empty(parts, *q.shape[1:], dtype=torch.float32, device=q.device) for q in qs]
    blocks = [q[0].numel() // INT8_COLUMNS for q in qs]
    counts = [parts * cdiv(count, BLOCKS) for count in blocks]
    _sum_hopper_body[(sum(counts),)](
        *pad_to_four([_descriptor(q.contiguous()) for q in qs]), *pad_to_four([e.contiguous() for e in es]),
        *pad_to_four([factor.contiguous() for factor in factors]), *pad_to_four(outs), *pad_to_four(blocks),
        *first_ends(counts), len(qs[0]), size,
        BLOCKS=BLOCKS, MOST_SAMPLES=MOST_SAMPLES, SLOTS=SLOTS, num_warps=1,
    )  # fmt: skip
    return outs


def sum_reference(q_BPD: Tensor, e_BPJ: Tensor, factors: Tensor) -> Tensor:
    """Return what the body computes of one part, bit for bit, (P, D) in float32."""
    scales_BPJ = factors[:, None, None] * _power(e_BPJ)
    fields_PJ = (scales_BPJ.view(torch.int32) & 0x7FFFFFFF).amax(0) >> 23
    powers_PJ = fields_PJ.clamp(30, 254) - 127 - 29
    weights_BPJ = (scales_BPJ * _power(-powers_PJ)).round().nan_to_num(0, 0, 0).long()
    q_BPJC = q_BPD.long().unflatten(2, (-1, INT8_COLUMNS))
    total_PJC = (weights_BPJ.unsqueeze(-1) * q_BPJC).sum(0).float()
    units_PJ = _power(powers_PJ).masked_fill(fields_PJ == 255, torch.nan)
    return (total_PJC * units_PJ.unsqueeze(-1)).flatten(1)


def _power(exponents: Tensor) -> Tensor:
    """Return ``2^exponents`` in float32, for exponents from -126 to 127."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)


def _descriptor(q_BPD: Tensor) -> Any:
    """Return a descriptor of the words of all blocks, (N, B, 32): a box holds eight samples of BLOCKS blocks."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    words = q_BPD.view(torch.int32).view(len(q_BPD), -1, 32)
    samples, blocks, _ = words.shape
    return TensorDescriptor(words, [blocks, samples, 32], [32, 32 * blocks, 1], [BLOCKS, 8, 32], ring_layout(32))
