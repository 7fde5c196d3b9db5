"""A ledger of storages, collectives and flops, recorded while a computation runs on tensors without memory.

    held(t)     = sum of the bytes of every storage alive at time t, each rounded up to 512 as CUDA's allocator does
    peak(phase) = max of held(t) over the phase, split by the kind of the storages

A dispatch mode records every operation: the storages it creates and when they are freed, collectives, and flops. The
kind of a storage is often known only later (a kept pair looks like any activation until it outlives its backward), so
the log is evaluated after the run, with the final labels.

    >>> ledger = Ledger(axes={"0": ("shard", 8)})
    >>> with ledger, fused_attention(): step(state, batch, key)                         # tensors on DEVICE
    >>> ledger.peaks(host=False)[Phase.PASS].total
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fdp import tree
from fdp.estimate.workspace import workspace
from fdp.types import Tree

DEVICE = torch.device("meta")
"""The stand-in for the accelerator: the only device besides the CPU that every build of torch can differentiate on."""
HOST = torch.device("cpu")
ALLOCATION_BYTES = 512

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional
_DEVICE_OF = torch.ops.prim.device.default
_COPIES = {"aten::clone", "aten::_to_copy", "aten::cat", "fdp_collectives::after"}
_SUMS = {"aten::add": 2, "aten::index_add": 1}
"""The number of leading arguments that are summands: if the total is a gradient, so are they."""
_COLLECTIVES = {
    _c10d.all_gather_into_tensor.default: "all-gather",
    _c10d.reduce_scatter_tensor.default: "reduce-scatter",
    _c10d.all_reduce.default: "all-reduce",
}


class MemoryKind(Enum):
    """The purpose of memory.

    Parameters are the master weights; gathered are the full leaves and casts made from them. Gradients are clipped sums
    until the update, and the update itself. Kept pairs are stored per sample between its norm and the sum. Activations
    are the rest, temporary memory included.
    """

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    GATHERED = "gathered"
    GRADIENTS = "gradients"
    KEPT = "kept pairs"
    ACTIVATIONS = "activations"


class Phase(Enum):
    """The parts of a step, in order; with several microbatches, PASS and SUM alternate.

    CURVATURE is K-FAC's: it measures and inverts curvature before a step, once in a period.
    """

    CURVATURE = "curvature"
    PASS = "forward and backward"
    SUM = "clipped sum"
    NOISE = "noise"
    UPDATE = "update"


class Peak(NamedTuple):
    """The most bytes held at any time, in total and by kind."""

    total: int
    by_kind: dict[MemoryKind, int]


class Transfer(NamedTuple):
    """All calls of one collective over one axis in one dtype.

    ``elements`` counts the full tensor: the output of a gather, the input of a reduction.
    """

    collective: str
    axis: str
    ranks: int
    dtype: torch.dtype
    calls: int
    elements: int

    @property
    def bytes(self) -> int:
        """The full tensors, in bytes."""
        return self.elements * self.dtype.itemsize

    @property
    def passes(self) -> int:
        """The number of times a ring sends the full tensor: 2 for an all-reduce (reduce-scatter and all-gather)."""
        return 2 if self.collective == "all-reduce" else 1

    @property
    def sent(self) -> float:
        """Bytes that one rank sends when the ranks form a ring."""
        return self.passes * self.bytes * (self.ranks - 1) / self.ranks


class StorageRecord:
    """A storage: its size, device and kind, and the storages it was copied or summed from."""

    __slots__ = ("bytes", "host", "kind", "sources")

    def __init__(self, size: int, host: bool, kind: MemoryKind, sources: tuple[StorageRecord, ...]):
        self.bytes = size
        self.host = host
        self.kind = kind
        self.sources = sources

    def mark_gradient(self) -> None:
        """Label this storage, and the sums it was computed from, as gradients."""
        if self.kind is MemoryKind.ACTIVATIONS:
            self.kind = MemoryKind.GRADIENTS
            for source in self.sources:
                source.mark_gradient()


class Ledger(TorchDispatchMode):
    """A dispatch mode that records every storage, collective and flop. ``axes``: name and size by process group.

    Tensors are on DEVICE, or were sent from there to the host.
    """

    def __init__(self, axes: Mapping[str, tuple[str, int]]):
        super().__init__()
        self.axes = axes
        self.default = MemoryKind.ACTIVATIONS
        self.flops: dict[torch.dtype, float] = {}
        self._log: list[tuple[StorageRecord, int]] = []
        self._phases: list[tuple[int, Phase]] = []
        self._alive: dict[int, tuple[Any, StorageRecord, int]] = {}
        self._transfers: dict[tuple[str, str, int, torch.dtype], tuple[int, int]] = {}
        self._awaited: dict[Any, Phase] = {}
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE_OF:
            return args[0].fake_device
        if func in self._awaited:
            self.begin(self._awaited[func])
            self._awaited.clear()
        if extra := workspace(func, args, kwargs):
            passing = StorageRecord(_round_up(extra), False, MemoryKind.ACTIVATIONS, ())
            self._log += [(passing, 1), (passing, -1)]
        out = self._call(func, args, kwargs)
        outputs = [value for value in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(value, Tensor)]
        if func.overloadpacket in flop_registry:
            count = flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
            self.flops[outputs[0].dtype] = self.flops.get(outputs[0].dtype, 0.0) + count
        kind, sources = self._origin(func, args, outputs)
        for value in outputs:
            self._note(value, kind, sources)
        return out

    def begin(self, phase: Phase) -> int:
        """Begin ``phase`` and return the time, for ``relabel``."""
        self._phases.append((len(self._log), phase))
        return len(self._log)

    def begin_at(self, operations: Sequence[Any], phase: Phase) -> None:
        """Begin ``phase`` at the next call of one of ``operations``, once."""
        self._awaited = dict.fromkeys(operations, phase)

    def label(self, values: Tree, kind: MemoryKind) -> None:
        """Label every storage of a tree, for all of its lifetime."""
        for value in tree.leaves(values):
            if isinstance(value, Tensor) and (found := self._alive.get(value.untyped_storage()._cdata)):
                found[1].kind = kind

    def relabel(self, kind: MemoryKind, *, since: int) -> None:
        """Label the storages created since then that are alive and still labelled as activations."""
        for _, held, born in self._alive.values():
            if born >= since and held.kind is MemoryKind.ACTIVATIONS:
                held.kind = kind

    def peaks(self, *, host: bool) -> dict[Phase, Peak]:
        """Return the peak of every phase, on the host or on the device."""
        phase_at = dict(self._phases)
        highest: dict[Phase, tuple[int, int]] = {}
        phase, total = None, 0
        for i, (held, sign) in enumerate(self._log):
            phase = phase_at.get(i, phase)
            total += sign * held.bytes if held.host == host else 0
            if phase is not None and total > highest.get(phase, (-1, 0))[0]:
                highest[phase] = (total, i)
        return {phase: Peak(total, self._by_kind(i, host)) for phase, (total, i) in highest.items()}

    def most(self, kind: MemoryKind) -> int:
        """Return the most bytes of one kind that the device holds at any time."""
        now = highest = 0
        for held, sign in self._log:
            now += sign * held.bytes if held.kind is kind and not held.host else 0
            highest = max(highest, now)
        return highest

    def transfers(self) -> tuple[Transfer, ...]:
        """Return all transfers, summed by collective, axis and dtype."""
        return tuple(Transfer(*what, *amount) for what, amount in self._transfers.items())

    def _by_kind(self, until: int, host: bool) -> dict[MemoryKind, int]:
        found = dict.fromkeys(MemoryKind, 0)
        for held, sign in self._log[: until + 1]:
            found[held.kind] += sign * held.bytes if held.host == host else 0
        return found

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call ``func``. Tensors on the host are fake, and a copy from or to DEVICE copies nothing."""
        if func is _aten.copy_.default and DEVICE in (args[0].device, args[1].device):
            return args[0]
        if func is _aten.empty.memory_format and kwargs.get("device") in (None, HOST):
            with self._fake:
                return func(*args, **kwargs)
        target = kwargs.get("device") if func is _aten._to_copy.default else None
        if target is None or target == args[0].device:
            return func(*args, **kwargs)
        with self._fake if target == HOST else nullcontext():
            return torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=target)

    def _origin(self, func: Any, args: Any, outputs: list[Tensor]) -> tuple[MemoryKind, tuple[StorageRecord, ...]]:
        """Return the kind of a new storage, as far as its operation tells, and the storages it was made from."""
        if func in _COLLECTIVES:
            return self._collective(func, args, outputs[0])
        name = func._schema.name
        if name in _SUMS:
            return self.default, self._records_of(args[: _SUMS[name]])
        if name not in _COPIES:
            return self.default, ()
        given = args[0] if isinstance(args[0], (tuple, list)) else [args[0]]
        sources = self._records_of(given)
        kinds = {source.kind for source in sources}
        if kinds & {MemoryKind.PARAMETERS, MemoryKind.GATHERED}:
            return MemoryKind.GATHERED, sources
        return (MemoryKind.GRADIENTS if MemoryKind.GRADIENTS in kinds else self.default), sources

    def _collective(self, func: Any, args: Any, output: Tensor) -> tuple[MemoryKind, tuple[StorageRecord, ...]]:
        collective, given = _COLLECTIVES[func], args[0]
        axis, ranks = self.axes[args[-1]]
        what = (collective, axis, ranks, given.dtype)
        calls, elements = self._transfers.get(what, (0, 0))
        self._transfers[what] = (calls + 1, elements + max(given.numel(), output.numel()))
        source = self._record_of(given)
        if axis == "tensor" or source is None:
            return self.default, ()
        if source.kind is MemoryKind.ACTIVATIONS and collective != "all-gather":
            source.mark_gradient()
        return source.kind, ()

    def _records_of(self, values: Sequence[Any]) -> tuple[StorageRecord, ...]:
        return tuple(held for value in values if isinstance(value, Tensor) and (held := self._record_of(value)))

    def _record_of(self, value: Tensor) -> StorageRecord | None:
        found = self._alive.get(value.untyped_storage()._cdata)
        return None if found is None else found[1]

    def _note(self, value: Tensor, kind: MemoryKind, sources: tuple[StorageRecord, ...]) -> None:
        storage = value.untyped_storage()
        address = storage._cdata
        if address in self._alive:
            return
        held = StorageRecord(_round_up(storage.nbytes()), value.device == HOST, kind, sources)

        def gone(_: Any) -> None:
            del self._alive[address]
            self._log.append((held, -1))

        self._alive[address] = (weakref.ref(storage, gone), held, len(self._log))
        self._log.append((held, 1))


class fused_attention(TorchFunctionMode):
    """A mode that runs flash attention, as a GPU does, unless it is switched off: no (tokens, tokens) matrix."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and torch.backends.cuda.flash_sdp_enabled():
            return _flash(*args, **kwargs)
        return func(*args, **kwargs)


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention that holds no score matrix; a mask counts as the tensor that it is, and changes no shape."""
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]


def _round_up(size: int) -> int:
    return -(-size // ALLOCATION_BYTES) * ALLOCATION_BYTES
