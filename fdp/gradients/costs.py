"""Cost model: predicted seconds and stored bytes of every option for a leaf's norms and sum.

Let x: (B, T, d) be the input and g: (B, T, p) the output gradient of a linear layer. An ordinary weight gradient takes
W = 2BTdp flops.

| norm by   | work of the norm                 | stored until the sum      | work of the sum          |
|-----------|----------------------------------|---------------------------|--------------------------|
| VMAP      | W, one sample a time             | B p d (any operation)     | move B p d               |
| KEEP      | W, move 2 B p d                  | B p d                     | move B p d               |
| KEEP_INT8 | W, move B p d / 2                | B p d / 2 (one byte each) | move B p d / 2           |
| DIRECT    | W                                | B T (p + d), or nothing   | W                        |
| GRAM      | 2 B T^2 (p + d), move 4 B T^2    | B T (p + d), or nothing   | W                        |
| SYMMETRIC | B T (T + tile) (p + d)           | B T (p + d), or nothing   | W                        |

KEEP_INT8 rounds what it stores to 8 bits, for those who allow it. In half precision on a GPU, kernels compute the
products in that precision. Elsewhere Gram matrices and weighted sums are computed in float64, and SYMMETRIC is GRAM; on
a CPU, DIRECT and sums from pairs then also move B p d in float64, unless samples have one token. With every option, an
embedding's norms and sum move its output gradients.

    >>> choices = candidates(uses, dtype=torch.bfloat16, rates=rates_of(device, torch.bfloat16))
    >>> best = min(choices.values(), key=lambda choice: choice.seconds)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from fdp.gradients.eight_bits import can_round
from fdp.gradients.launches import direct_squared_norms, symmetric_squared_norms
from fdp.gradients.rules import HALF, SAMPLES_PER_FLOAT32_SUM, Record, stored_squared_norm
from fdp.gradients.tape import EXPANDED, Use


class NormBy(Enum):
    """Options for the norms of a leaf. KEEP and VMAP store per-sample gradients, KEEP_INT8 stores them in 8 bits."""

    VMAP = "vmap"
    KEEP = "keep"
    KEEP_INT8 = "keep int8"
    DIRECT = "direct"
    GRAM = "gram"
    SYMMETRIC = "symmetric"


SQUARED_NORMS: dict[NormBy, Callable[[Sequence[Record]], list[Tensor]]] = {
    NormBy.DIRECT: direct_squared_norms,
    NormBy.GRAM: lambda records: [stored_squared_norm(record) for record in records],
    NormBy.SYMMETRIC: symmetric_squared_norms,
}
"""Norms of leaves with a single use whose per-sample gradients are not stored."""


class SumBy(Enum):
    """Options for the weighted sum of a leaf: from stored gradients, from stored pairs, or by a second backward."""

    REUSE = "reuse"
    PAIR = "pair"
    SECOND_BACKWARD = "second backward"


class Choice(NamedTuple):
    """The options chosen for one leaf's norm and sum.

    ``seconds`` is predicted and ``measured`` timed, for both together; ``stored_bytes`` are held in between.
    """

    norm: NormBy
    sum: SumBy
    seconds: float
    stored_bytes: float
    measured: float | None = None

    @property
    def price(self) -> float:
        """Return the measured seconds if there are any, else the predicted ones."""
        return self.seconds if self.measured is None else self.measured


class Rates(NamedTuple):
    """Speed of a device: flops per second of products in the compute dtype and in float64, bytes per second.

    ``kernels`` is True if the device runs our kernels in this dtype. ``stored`` is how many elements of a leaf's
    per-sample gradients, of all samples together, may be stored because forming them in float64 takes time.
    """

    matrix: float
    wide: float
    bandwidth: float
    kernels: bool = False
    stored: int = 0


EXPERTS = ("experts", "einsum")
"""Rules for which a leaf of three dims is one matrix per index of its first dim."""
SHARED_BY_KERNELS = ("linear", "embedding")
"""Rules of a leaf that is used several times for which kernels know the norm of all uses together."""
FEW_ELEMENTS = 1 << 24
"""``Rates.stored`` of a CPU: 64 MiB in float32."""
TILE_TOKENS = 128
"""Tile size of the symmetric kernel, in tokens: tiles on the diagonal are computed in full."""
# An H200. Only the proportions matter for a choice; they suit other devices too, and timings correct them.
CUDA_HALF = Rates(matrix=650e12, wide=50e12, bandwidth=4.0e12, kernels=True)
CUDA_WIDE = Rates(matrix=40e12, wide=50e12, bandwidth=4.0e12)
KERNEL_EFFICIENCY = 0.9
"""Speed of our kernels' matrix products relative to the library's."""


def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """Return the device's rates. On a CPU, moving an element costs about 32 flops and float64 is half as fast."""
    if device.type == "cuda":
        return CUDA_HALF if dtype in HALF else CUDA_WIDE
    matrix = 5e10
    wide = matrix if dtype == torch.float64 else matrix / 2
    return Rates(matrix, wide, matrix * dtype.itemsize / 32, stored=FEW_ELEMENTS)


def candidates(uses: list[Use], *, dtype: torch.dtype, rates: Rates) -> dict[NormBy, Choice]:
    """Return every option for one leaf's norms in one backward, with the sum that goes with it."""
    if {use.rule for use in uses} == {EXPANDED}:
        return {NormBy.KEEP: _keep(uses, dtype, rates)}
    half = rates.kernels and (len(uses) == 1 or all(use.rule in SHARED_BY_KERNELS for use in uses))
    rounded = {NormBy.KEEP_INT8: _keep_int8(uses, dtype, rates)} if half and _can_round(uses) else {}
    if half and len(uses) > 1:
        shared = _shared(uses, dtype, rates)
        closed = {by: shared._replace(norm=by) for by in (NormBy.DIRECT, NormBy.GRAM, NormBy.SYMMETRIC)}
        return {NormBy.KEEP: _keep(uses, dtype, rates)} | rounded | closed
    found = rounded | {
        NormBy.KEEP: _keep(uses, dtype, rates),
        NormBy.DIRECT: _direct(uses, dtype, rates, half),
        NormBy.GRAM: _gram(uses, dtype, rates, half),
    }
    symmetric = _symmetric(uses, dtype, rates) if half else found[NormBy.GRAM]._replace(norm=NormBy.SYMMETRIC)
    return found | {NormBy.SYMMETRIC: symmetric}


def second_backward(choice: Choice, uses: list[Use], *, rates: Rates) -> Choice:
    """Return the same norms with a sum by a second backward, which computes the pairs again: nothing is stored."""
    norm = NormBy.DIRECT if choice.norm in (NormBy.KEEP, NormBy.KEEP_INT8) else choice.norm
    again = 2 * sum(_gradient_flops(use) for use in uses) / rates.matrix
    return Choice(norm, SumBy.SECOND_BACKWARD, choice.seconds + again, 0.0)


def sizes(use: Use) -> tuple[int, int, int, int]:
    """Return B, T, and the rows p and columns d of the leaf as a matrix (per group for convolutions).

    Each expert has a matrix of its own, so B is samples times experts.
    """
    batch, *_ = use.input_shape
    if use.rule in EXPERTS and len(use.leaf_shape) == 3:
        experts, rows, columns = use.leaf_shape
        return batch * experts, max(1, math.prod(use.output_shape[1:]) // max(1, experts * columns)), rows, columns
    if use.rule == "routed":
        experts, rows, columns = use.leaf_shape
        return batch * experts, max(1, math.prod(use.output_shape[1:-1])), rows, columns
    rows = use.leaf_shape[0] if use.leaf_shape else 1
    columns = math.prod(use.leaf_shape[1:])
    if use.rule == EXPANDED:
        return batch, 1, rows, columns
    if use.rule in ("linear", "linear rows"):
        return batch, max(1, math.prod(use.input_shape[1:-1])), rows, columns
    if use.rule.startswith("conv_transpose"):
        return batch, max(1, math.prod(use.input_shape[2:])), rows, columns
    width = columns if use.rule in ("embedding", "matmul") else rows
    return batch, max(1, math.prod(use.output_shape[1:]) // max(1, width)), rows, columns


def _gradient_flops(use: Use) -> float:
    batch, tokens, rows, columns = sizes(use)
    if use.rule == EXPANDED:
        return 0.0
    return 2.0 * batch * tokens * columns * (1 if use.rule == "embedding" else rows)


def _keep(uses: list[Use], dtype: torch.dtype, rates: Rates) -> Choice:
    """Return the cost of stored gradients; kernels keep an embedding's rows beside a stored head of a later block."""
    batch, _, rows, columns = sizes(uses[0])
    stored = batch * rows * columns * dtype.itemsize
    beside = rates.kernels and {use.rule for use in uses} == set(SHARED_BY_KERNELS)
    apart = [use for use in uses if beside and use.rule == "embedding"]
    tables = [use for use in uses if use not in apart]
    of_rows = _pair_bytes(apart, dtype)
    moved = (len(tables) + 1) * stored
    if beside:  # the norm of the tables is a pass of its own, and the sum is written before the rows are added to it
        moved += stored + 3 * of_rows + 8 * rows * columns
    seconds = sum(map(_gradient_flops, tables)) / rates.matrix + moved / rates.bandwidth
    return Choice(NormBy.KEEP, SumBy.REUSE, seconds, stored + of_rows)


def _can_round(uses: list[Use]) -> bool:
    """Return True if the leaf's gradients can be stored in 8 bits: one product, and perhaps embeddings beside it."""
    products = [use for use in uses if use.rule != "embedding"]
    return len(products) == 1 and can_round(products[0].rule, sizes(products[0])[3])


def _keep_int8(uses: list[Use], dtype: torch.dtype, rates: Rates) -> Choice:
    """Return the cost of gradients stored in 8 bits, whose sum is written in float32 before the noise is added."""
    batch, _, rows, columns = sizes(next(use for use in uses if use.rule != "embedding"))
    stored, of_rows = batch * rows * columns, _pair_bytes([use for use in uses if use.rule == "embedding"], dtype)
    moved = 2 * stored + 8 * rows * columns * -(-batch // SAMPLES_PER_FLOAT32_SUM) + 3 * of_rows
    seconds = sum(map(_gradient_flops, uses)) / (rates.matrix * KERNEL_EFFICIENCY) + moved / rates.bandwidth
    return Choice(NormBy.KEEP_INT8, SumBy.REUSE, seconds, stored + of_rows)


def _sum_seconds(uses: list[Use], rates: Rates, half: bool) -> float:
    rate = rates.matrix * KERNEL_EFFICIENCY if half else rates.matrix
    return sum(_gradient_flops(use) for use in uses) / rate + (0.0 if half else _forming_seconds(uses, rates))


def _forming_seconds(uses: list[Use], rates: Rates) -> float:
    """Return the cost of per-sample gradients in float64, which sums from pairs form without kernels.

    More than ``rates.stored`` count as free, so that they are not stored instead.
    """
    batch, tokens, rows, columns = sizes(uses[0])
    elements = batch * rows * columns
    formed = len(uses) > 1 or (uses[0].rule != "embedding" and tokens > 1)
    return 8 * elements / rates.bandwidth if formed and elements <= rates.stored else 0.0


def _direct(uses: list[Use], dtype: torch.dtype, rates: Rates, half: bool) -> Choice:
    batch, _, rows, columns = sizes(uses[0])
    seconds = 2 * _sum_seconds(uses, rates, half)
    if half and uses[0].rule == "embedding":
        seconds = (2 * _pair_bytes(uses, dtype) + 4 * rows * columns) / rates.bandwidth
    elif not half:
        seconds += batch * rows * columns * dtype.itemsize / rates.bandwidth
    return Choice(NormBy.DIRECT, SumBy.PAIR, seconds, _pair_bytes(uses, dtype))


def _gram(uses: list[Use], dtype: torch.dtype, rates: Rates, half: bool) -> Choice:
    """Return the cost of stored Gram matrices, with cross terms between all uses."""
    seconds = _sum_seconds(uses, rates, half)
    for i, use in enumerate(uses):
        batch, tokens, rows, columns = sizes(use)
        left = 1 if use.rule == "embedding" else rows
        for other in uses[: i + 1]:
            squares = batch * tokens * sizes(other)[1]
            rate = rates.matrix if half else rates.wide
            seconds += 2.0 * squares * (left + columns) / rate + (16.0 * squares / rates.bandwidth if half else 0.0)
    return Choice(NormBy.GRAM, SumBy.PAIR, seconds, _pair_bytes(uses, dtype))


def _symmetric(uses: list[Use], dtype: torch.dtype, rates: Rates) -> Choice:
    (use,) = uses
    batch, tokens, rows, columns = sizes(use)
    if use.rule == "embedding":
        return _direct(uses, dtype, rates, True)._replace(norm=NormBy.SYMMETRIC)
    products = batch * tokens * (tokens + TILE_TOKENS) * (rows + columns)
    seconds = _sum_seconds(uses, rates, True) + products / (rates.matrix * KERNEL_EFFICIENCY)
    return Choice(NormBy.SYMMETRIC, SumBy.PAIR, seconds, _pair_bytes(uses, dtype))


def _shared(uses: list[Use], dtype: torch.dtype, rates: Rates) -> Choice:
    """Return the cost of the closed form of :mod:`fdp.gradients.shared_leaves`; uses of one kind share their tokens."""
    by_rule = {rule: [use for use in uses if use.rule == rule] for rule in SHARED_BY_KERNELS}
    tokens = {rule: sum(sizes(use)[1] for use in found) for rule, found in by_rule.items()}
    batch, _, rows, columns = sizes(uses[0])
    seconds = _sum_seconds(by_rule["linear"], rates, True)
    products = batch * tokens["linear"] * (tokens["linear"] + TILE_TOKENS) * (rows + columns)
    products += 2 * batch * tokens["linear"] * tokens["embedding"] * columns
    seconds += products / (rates.matrix * KERNEL_EFFICIENCY)
    moved = 2 * _pair_bytes(by_rule["embedding"], dtype) + 8 * batch * tokens["linear"] * tokens["embedding"]
    seconds += (moved + 4 * rows * columns * (len(uses) - 1)) / rates.bandwidth
    return Choice(NormBy.SYMMETRIC, SumBy.PAIR, seconds, _pair_bytes(uses, dtype))


def _pair_bytes(uses: list[Use], dtype: torch.dtype) -> float:
    total = 0.0
    for use in uses:
        batch, tokens, rows, columns = sizes(use)
        if use.rule == EXPANDED:
            total += batch * rows * columns * dtype.itemsize
        elif use.rule == "embedding":
            total += batch * tokens * (columns * dtype.itemsize + 8)
        else:
            total += batch * tokens * (rows + columns) * dtype.itemsize
    return total
