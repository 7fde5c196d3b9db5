"""A tape of the operations that initialise a module, from which any tensor can be computed later.

The tape runs on shape-only tensors. It numbers storages and records, for each operation, the storages that it reads and
writes and, for a random draw, the generator's state before it.

    >>> tape = InitTape()
    >>> module = tape.record(factory)
    >>> tape.value(tape.view(module.weight), "weight")               # computed from the operations it depends on
"""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from fdp import tree
from fdp.types import FdpError, Path

aten = torch.ops.aten


# Operations that overwrite self whatever it held.
OVERWRITING = {
    *(aten.uniform_, aten.normal_, aten.bernoulli_, aten.random_, aten.exponential_, aten.cauchy_, aten.log_normal_),
    *(aten.geometric_, aten.fill_, aten.zero_, aten.copy_),
}


@dataclass(frozen=True)
class StorageView:
    """A tensor as a view of a numbered storage. (Not a NamedTuple: it is a leaf of an operation's arguments.)"""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class TapedOperation(NamedTuple):
    """One operation. It computes with the storages ``inputs``; ``reads`` adds those that it overwrites only in part."""

    func: Any
    args: Any
    inputs: frozenset[int]
    reads: frozenset[int]
    writes: frozenset[int]
    made: tuple[StorageView | None, ...]
    stream: tuple[torch.Generator, Tensor] | None


class _SharedFakeMode(FakeTensorMode):
    """One fake mode for all tensors of a tape; ``copy.deepcopy``, as nn.Transformer uses it, must not copy the mode."""

    def __deepcopy__(self, memo: Any) -> _SharedFakeMode:
        return self


class InitTape(TorchDispatchMode):
    """A mode that runs on shapes and records every operation that makes or changes a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = _SharedFakeMode()
        self.ops: list[TapedOperation] = []
        self.numbers: dict[int, int] = {}
        self.storages: list[torch.UntypedStorage] = []  # kept alive, so that no two ever have the same id
        self.sizes: list[int] = []
        self.writers: list[list[int]] = []  # for each storage, the operations that write it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree.map(self._shape_only, (args, kwargs or {}))
        if func in (aten.lift_fresh.default, aten.lift.default):
            return args[0]
        op = self._before(func, args, kwargs)
        if op.stream is not None:
            self._call(op._replace(stream=None), self._values(op.inputs))  # a real draw, only to advance the stream
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):  # Python reads values: compute them
            real = self._call(op, self._values(op.inputs))
            out = tree.map(lambda x: self.fake.from_tensor(x) if isinstance(x, Tensor) else x, real)
        self._after(op, out)
        self.fake.fake_tensor_converter.tensor_memo.clear()  # its weak references would break Module.to(dtype)
        return out

    def record(self, factory: Callable[[], nn.Module]) -> nn.Module:
        try:
            with warnings.catch_warnings(), torch.device("cpu"), self:
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by copy.deepcopy
                return factory()
        except RuntimeError as error:
            raise FdpError(
                f"expected a factory that runs on tensors without memory, got: {error}. If it runs outside fdp, it "
                "reads memory: replace numpy() and data_ptr() by tensor operations"
            ) from error

    def view(self, tensor: Tensor) -> StorageView:
        tensor = self._shape_only(tensor)
        if tensor.is_conj() or tensor.is_neg():
            raise FdpError("expected a tensor stored as it is, got a lazily conjugated one; call resolve_conj() on it")
        offset = int(tensor.storage_offset())
        return StorageView(self._number(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    def value(self, view: StorageView, path: Path) -> Tensor:
        """Return what the tensor holds at the end of the tape."""
        try:
            value = _as_tensor(self._values({view.storage})[view.storage], view)
        except FdpError as error:
            raise FdpError(f"{path}: {error}") from None
        return value if _covers_storage(value) else value.clone()

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if id(storage) not in self.numbers:
            self.numbers[id(storage)] = len(self.storages)
            self.storages.append(storage)
            self.sizes.append(storage.nbytes())
            self.writers.append([])
        return self.numbers[id(storage)]

    def _shape_only(self, x: Any) -> Any:
        """Enter a tensor from outside the tape as a constant, with the value it has when it is first seen."""
        if not isinstance(x, Tensor) or isinstance(x, FakeTensor):
            return x
        fake, new = self.fake.from_tensor(x), len(self.storages)
        if self._number(fake) == new:
            whole = _as_bytes(x.untyped_storage()).clone()
            made = StorageView(new, whole.dtype, tuple(whole.shape), whole.stride(), 0)
            nothing = frozenset()
            self._append(
                TapedOperation(aten.clone.default, ((whole,), {}), nothing, nothing, frozenset({new}), (made,), None)
            )
        return fake

    def _before(self, func: Any, args: Any, kwargs: Any) -> TapedOperation:
        """Return the operation with the storages it reads and overwrites; what it makes is not known yet."""
        stream = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator") or torch.default_generator
            stream = (generator, generator.get_state())
        fills = func.overloadpacket in OVERWRITING
        inputs = frozenset(map(self._number, _tensors((args[1:], kwargs) if fills else (args, kwargs))))
        writes = frozenset(map(self._number, _written_arguments(func, args, kwargs)))
        reads = inputs if fills and _covers_storage(args[0]) else inputs | writes
        views = tree.map(lambda x: self.view(x) if isinstance(x, Tensor) else x, (args, kwargs))
        return TapedOperation(func, views, inputs, reads, writes, (), stream)

    def _after(self, op: TapedOperation, out: Any) -> None:
        for number in op.writes:
            if self.storages[number].nbytes() != self.sizes[number]:
                raise FdpError(f"expected tensors of fixed size in a constructor, got {op.func}, which resizes one")
        old = len(self.storages)
        views = [self.view(x) for x in _tensors(out)]
        made = tuple(view if view.storage >= old else None for view in views)
        fresh = frozenset(view.storage for view in views if view.storage >= old)
        for x in _tensors(out):
            if x.device.type != "cpu":
                raise FdpError(
                    f"expected a factory that builds its module on the CPU, got {op.func} on {x.device}; "
                    "build on the CPU, and let `place` move each part to its device"
                )
        if fresh or op.writes:  # otherwise a view, or a value that Python read
            self._append(op._replace(made=made, writes=op.writes | fresh))

    def _append(self, op: TapedOperation) -> None:
        for number in op.writes:
            self.writers[number].append(len(self.ops))
        self.ops.append(op)

    def _values(self, wanted: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        """Compute the present contents of the storages from the operations they depend on; free the rest on the way."""
        wanted = set(wanted)
        needed = self._history(wanted)
        last = {number: index for index in needed for number in self.ops[index].reads | self.ops[index].writes}
        env: dict[int, torch.UntypedStorage] = {}
        for index in needed:
            op = self.ops[index]
            self._call(op, env)
            for number in op.reads | op.writes:
                if last[number] == index and number not in wanted:
                    del env[number]
        return env

    def _history(self, wanted: set[int]) -> list[int]:
        """Return every operation that the present contents of the storages depend on, in order.

        A storage's last writer decides its contents; a writer that leaves a part in place reads the storage too.
        """
        needed: set[int] = set()
        stack = [(number, len(self.ops)) for number in wanted]
        while stack:
            number, time = stack.pop()
            position = bisect_left(self.writers[number], time) - 1
            if position < 0:
                raise FdpError("expected values computed by tensor operations, got memory that was filled otherwise")
            index = self.writers[number][position]
            if index not in needed:
                needed.add(index)
                stack += [(read, index) for read in self.ops[index].reads]
        return sorted(needed)

    def _call(self, op: TapedOperation, env: dict[int, torch.UntypedStorage]) -> Any:
        """Run one operation for real, at its recorded random state (the present one if it has none)."""

        def tensor(x: Any) -> Any:
            if not isinstance(x, StorageView):
                return x
            if x.storage not in env:  # it is about to be overwritten
                env[x.storage] = torch.UntypedStorage(self.sizes[x.storage])
            return _as_tensor(env[x.storage], x)

        args, kwargs = tree.map(tensor, op.args)
        with torch.no_grad():
            if op.stream is None:
                out = op.func(*args, **kwargs)
            else:
                generator, state = op.stream
                with restore_generator(generator):
                    generator.set_state(state)
                    out = op.func(*args, **kwargs)
        for real, view in zip(_tensors(out), op.made):
            if view is not None:
                found = StorageView(
                    view.storage, real.dtype, tuple(real.shape), real.stride(), int(real.storage_offset())
                )
                if found != view:
                    raise FdpError(
                        f"expected {op.func} to give {view}, as on shapes alone, got {found}; do not change global "
                        "settings such as the default dtype, or take this operation out of the constructor"
                    )
                env[view.storage] = real.untyped_storage()
        return out


@contextmanager
def restore_generator(generator: torch.Generator) -> Iterator[None]:
    """Restore the generator's state on exit."""
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree.leaves(values) if isinstance(x, Tensor)]


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that the operation's schema says it changes."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return _tensors(found)


def _covers_storage(tensor: Tensor) -> bool:
    """Return True if the tensor is all of its storage, in order."""
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _as_tensor(storage: torch.UntypedStorage, view: StorageView) -> Tensor:
    return torch.empty(0, dtype=view.dtype, device="cpu").set_(storage, view.offset, view.size, view.stride)


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
