"""Tables through which one launch finds many leaves: pointers per leaf, and (leaf, tile) per program.

    >>> tables = LaunchTables()                                  # held by the caller, from step to step
    >>> table = tables.pointers(leaves)                          # int64 (L, FIELDS), on the device
    >>> for tiles, constants in tables.groups(leaves): ...       # one launch per combination of dtypes and alignment

Letters: L leaves, S rows, I elements of a leaf (any shape).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fdp_kernels.chacha20 import ELEMENTS_PER_BLOCK
from fdp_kernels.op import tl
from fdp_kernels.tile_gemm import cdiv

FIELDS = 10
"""Columns of the table: pointers to rows, factors, param, mean, square, copy; count, first, stride of rows, decay."""


class Leaf(NamedTuple):
    """The tensors of one leaf's update; ``first`` is the index of its first element in the full (unsharded) leaf."""

    rows: Tensor
    factors: Tensor
    param: Tensor
    mean: Tensor
    square: Tensor | None
    copy: Tensor | None
    first: int
    decay: bool


_BLOCKS_PER_TILE = 32
"""One ChaCha20 block, eight elements, per lane. A tile is one warp, so nothing waits at a barrier."""


class LaunchGroup(NamedTuple):
    """One launch: (leaf << 32 | tile) of every program, and the constants that specialise the body."""

    tiles: Tensor
    constants: dict[str, Any]


class LaunchTables:
    """A cache of tables, held by one caller, for tensors on one device.

    Tiles depend on the sizes of the leaves, pointers on their addresses. In a captured graph the sums have their own
    addresses, so the graph itself copies the pointers from pinned memory: every capture uses up the buffer that
    :meth:`reserve` pinned before it. Tiles come from an eager call before the capture.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple, tuple[LaunchGroup, ...]] = {}
        self._cached: tuple[Tensor, Tensor] | None = None
        self._shape: torch.Size | None = None
        self._reserved: Tensor | None = None
        self._captured: list[Tensor] = []  # graphs read these at every replay

    def groups(self, leaves: Sequence[Leaf]) -> tuple[LaunchGroup, ...]:
        """Return one group per combination of dtypes, number of rows and alignment."""
        kinds = tuple(_specialization(leaf) for leaf in leaves)
        sizes = tuple((leaf.param.numel(), leaf.first) for leaf in leaves)
        if (kinds, sizes) not in self._groups:
            device = leaves[0].param.device
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("expected a call with these leaves before the capture, to build their tables")
            self._groups[kinds, sizes] = tuple(_group(kind, kinds, sizes, device) for kind in dict.fromkeys(kinds))
        return self._groups[kinds, sizes]

    def reserve(self) -> None:
        """Pin memory for the next capture, which cannot; do nothing if some is reserved, or before the first call."""
        if self._shape is not None and (self._reserved is None or self._reserved.shape != self._shape):
            self._reserved = torch.empty(self._shape, dtype=torch.int64, pin_memory=True)

    def pointers(self, leaves: Sequence[Leaf]) -> Tensor:
        """Return the table of the leaves: int64 ``(L, FIELDS)``, on their device."""
        host = torch.tensor([_fields(leaf) for leaf in leaves], dtype=torch.int64)
        device = leaves[0].param.device
        if device.type != "cuda":
            return host
        if torch.cuda.is_current_stream_capturing():
            if self._cached is not None and torch.equal(self._cached[0], host):
                self._captured.append(self._cached[1])
                return self._cached[1]
            if self._reserved is None or self._reserved.shape != host.shape:
                raise RuntimeError("expected reserve() before every capture, to pin memory for its table")
            pinned, self._reserved = self._reserved.copy_(host), None
            self._captured.append(pinned)
            return torch.empty_like(host, device=device).copy_(pinned, non_blocking=True)
        self._shape = host.shape
        if self._cached is None or not torch.equal(self._cached[0], host):
            self._cached = (host, host.to(device))
        return self._cached[1]


def can_update(leaf: Leaf) -> bool:
    """Return True if the kernel can update the leaf in place: float32 parameters, dense, all on one device.

    Moments are float32, or all bfloat16.
    """
    moments = [tensor for tensor in (leaf.mean, leaf.square) if tensor is not None]
    every = [leaf.param, *moments, leaf.rows, leaf.factors, *([] if leaf.copy is None else [leaf.copy])]
    return (
        leaf.param.dtype == torch.float32
        and {tensor.dtype for tensor in moments} in ({torch.float32}, {torch.bfloat16})
        and leaf.rows.dtype in (torch.bfloat16, torch.float32, torch.float64)
        and leaf.factors.dtype in (torch.float32, torch.float64)
        and all(tensor.is_contiguous() and tensor.device == leaf.param.device for tensor in every)
    )


def _specialization(leaf: Leaf) -> tuple:
    """Return what the body is specialised on: rows, the dtypes of rows, factors, copy and moments, and alignment."""
    copy = None if leaf.copy is None else leaf.copy.dtype
    touched = [leaf.rows, leaf.param, leaf.mean, leaf.square, leaf.copy]
    aligned = (
        leaf.first % ELEMENTS_PER_BLOCK == 0
        and leaf.param.numel() % ELEMENTS_PER_BLOCK == 0
        and all(tensor.data_ptr() % 16 == 0 for tensor in touched if tensor is not None)
    )
    return leaf.rows.shape[0], leaf.rows.dtype, leaf.factors.dtype, copy, leaf.mean.dtype, aligned


def _group(kind: tuple, kinds: tuple, sizes: tuple, device: torch.device) -> LaunchGroup:
    rows, row, factor, copy, moment, aligned = kind
    tiles = [
        np.arange(cdiv(count + first % ELEMENTS_PER_BLOCK, ELEMENTS_PER_BLOCK * _BLOCKS_PER_TILE) if count else 0)
        | leaf << 32
        for leaf, (count, first) in enumerate(sizes)
        if kinds[leaf] == kind
    ]
    types = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
    types[torch.float64] = tl.float64
    constants = {"S": rows, "ROW": types[row], "FACTOR": types[factor], "COPY": types.get(copy)}
    constants |= {"MOMENT": types[moment], "NARROW": moment == torch.bfloat16}
    constants |= {"ALIGNED": aligned, "COUNTERS": _BLOCKS_PER_TILE}
    return LaunchGroup(torch.from_numpy(np.concatenate(tiles)).to(device), constants)


def _fields(leaf: Leaf) -> list[int]:
    tensors = (leaf.rows, leaf.factors, leaf.param, leaf.mean, leaf.square, leaf.copy)
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    count = leaf.param.numel()
    return [*pointers, count, leaf.first, count, int(leaf.decay)]
