"""A module's own initial values, one leaf at a time: ``torch.manual_seed(seed); factory()``, never held whole.

The factory runs on shape-only tensors while every operation is written on a tape, and every draw is also made for
real and thrown away, which moves the random stream on; the stream's state before the draw is kept. A leaf is then
computed from the operations it depends on, each draw at its own state, so any order of leaves gives the same bits.

    >>> leaves = torch_leaves(lambda: GPT(config), seed=0)           # ('wte.weight', whole leaf), ...
    >>> shard = place_leaves(leaves, lambda path, leaf: leaf.chunk(ranks)[rank])

Cost: every draw is made twice, and once more for each time that Python looked at its value. Memory: the tape (about
5 kB a draw), tensors the factory brings from outside, and one leaf with what it is computed from.
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

# Operations whose result in self does not depend on what self held.
FILLS = {
    *(aten.uniform_, aten.normal_, aten.bernoulli_, aten.random_, aten.exponential_, aten.cauchy_, aten.log_normal_),
    *(aten.geometric_, aten.fill_, aten.zero_, aten.copy_),
}


def torch_leaves(factory: Callable[[], nn.Module], *, seed: int) -> Iterator[tuple[Path, Tensor]]:
    """Every parameter of ``factory()`` with its initial value, in the order of ``named_parameters()``.

    Guarantees:
      - the values are those of ``torch.manual_seed(seed); factory()`` on the CPU, bit for bit;
      - a parameter under several names comes once, under its first; buffers do not come;
      - the caller's random state is as before at every yield, and after the end;
      - a leaf is freed when the caller lets go of it.
    """
    tape = _Tape()
    with _keeping(torch.default_generator):
        torch.default_generator.manual_seed(seed)
        module = tape.record(factory)
    views = {path: tape.view(leaf) for path, leaf in module.named_parameters()}
    if not views:
        raise FdpError(
            f"{type(module).__name__}: expected a module with parameters, got one without: there is nothing to draw or "
            f"to shard. Give the module that holds them"
        )
    del module
    for path, view in views.items():
        yield path, tape.value(view, path)  # no name is bound to the value: only the caller keeps it alive


def place_leaves(leaves: Iterable[tuple[Path, Tensor]], place: Callable[[Path, Tensor], Tensor]) -> dict[Path, Tensor]:
    """``{path: place(path, leaf)}``, each whole leaf freed before the next is asked for.

    Guarantees:
      - a part that is a view of its leaf is copied, so that it does not keep the leaf alive;
      - a path that comes twice is an error.
    """
    placed: dict[Path, Tensor] = {}
    for path, leaf in leaves:
        if path in placed:
            raise FdpError(f"{path}: expected every leaf once, got it twice; give each parameter exactly one owner")
        part = place(path, leaf)
        if type(part) is Tensor and part.numel() < leaf.numel() and _same_memory(part, leaf):
            part = part.clone()
        placed[path] = part
        del leaf, part
    return placed


@dataclass(frozen=True)
class _View:
    """A tensor as a window on a numbered storage. (Not a NamedTuple: it is a leaf of an operation's arguments.)"""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Op(NamedTuple):
    """One operation. Storages by number: ``inputs`` bear on what it computes, ``reads`` on what is there afterwards."""

    func: Any
    args: Any
    inputs: frozenset[int]
    reads: frozenset[int]
    writes: frozenset[int]
    made: tuple[_View | None, ...]
    stream: tuple[torch.Generator, Tensor] | None


class _Shapes(FakeTensorMode):
    """One for all tensors of a tape: a module copied by ``copy.deepcopy``, as nn.Transformer does, keeps it."""

    def __deepcopy__(self, memo: Any) -> _Shapes:
        return self


class _Tape(TorchDispatchMode):
    """Runs on shapes, and writes down every operation that makes or changes a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.fake = _Shapes()
        self.ops: list[_Op] = []
        self.numbers: dict[int, int] = {}
        self.storages: list[torch.UntypedStorage] = []  # held, so that no two ever have the same id
        self.sizes: list[int] = []
        self.writers: list[list[int]] = []  # of each storage: which operations write it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree.map(self._shape_only, (args, kwargs or {}))
        if func in (aten.lift_fresh.default, aten.lift.default):
            return args[0]
        op = self._before(func, args, kwargs)
        if op.stream is not None:
            self._call(op._replace(stream=None), self._values(op.inputs))  # a real draw, for the stream's sake only
        try:
            with self.fake:
                out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):  # Python asks for values: compute them
            real = self._call(op, self._values(op.inputs))
            out = tree.map(lambda x: self.fake.from_tensor(x) if isinstance(x, Tensor) else x, real)
        self._after(op, out)
        self.fake.fake_tensor_converter.tensor_memo.clear()  # its weak references would forbid Module.to(dtype)
        return out

    def record(self, factory: Callable[[], nn.Module]) -> nn.Module:
        try:
            with warnings.catch_warnings(), torch.device("cpu"), self:
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # copy.deepcopy asks
                return factory()
        except RuntimeError as error:
            raise FdpError(
                f"expected a factory that runs on tensors without memory, got: {error}. Where it runs by itself, it "
                "needs memory: replace numpy() and data_ptr() by operations on tensors"
            ) from error

    def view(self, tensor: Tensor) -> _View:
        tensor = self._shape_only(tensor)
        if tensor.is_conj() or tensor.is_neg():
            raise FdpError("expected values as they lie in memory, got a lazily conjugated tensor; resolve_conj() it")
        offset = int(tensor.storage_offset())
        return _View(self._number(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    def value(self, view: _View, path: Path) -> Tensor:
        """What the tensor holds at the end of the tape."""
        try:
            value = _window(self._values({view.storage})[view.storage], view)
        except FdpError as error:
            raise FdpError(f"{path}: {error}") from None
        return value if _covers(value) else value.clone()

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if id(storage) not in self.numbers:
            self.numbers[id(storage)] = len(self.storages)
            self.storages.append(storage)
            self.sizes.append(storage.nbytes())
            self.writers.append([])
        return self.numbers[id(storage)]

    def _shape_only(self, x: Any) -> Any:
        """A tensor from outside the tape enters it as a constant: its value when it is first met."""
        if not isinstance(x, Tensor) or isinstance(x, FakeTensor):
            return x
        fake, new = self.fake.from_tensor(x), len(self.storages)
        if self._number(fake) == new:
            whole = _bytes(x.untyped_storage()).clone()
            made = _View(new, whole.dtype, tuple(whole.shape), whole.stride(), 0)
            nothing = frozenset()
            self._append(_Op(aten.clone.default, ((whole,), {}), nothing, nothing, frozenset({new}), (made,), None))
        return fake

    def _before(self, func: Any, args: Any, kwargs: Any) -> _Op:
        """The operation with what it will read and overwrite; what it makes is not known yet."""
        stream = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            generator = kwargs.get("generator") or torch.default_generator
            stream = (generator, generator.get_state())
        fills = func.overloadpacket in FILLS
        inputs = frozenset(map(self._number, _tensors((args[1:], kwargs) if fills else (args, kwargs))))
        writes = frozenset(map(self._number, _written(func, args, kwargs)))
        reads = inputs if fills and _covers(args[0]) else inputs | writes
        views = tree.map(lambda x: self.view(x) if isinstance(x, Tensor) else x, (args, kwargs))
        return _Op(func, views, inputs, reads, writes, (), stream)

    def _after(self, op: _Op, out: Any) -> None:
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
                    "build there, and let `place` move each part to its device"
                )
        if fresh or op.writes:  # else a view, or a value that Python asked for
            self._append(op._replace(made=made, writes=op.writes | fresh))

    def _append(self, op: _Op) -> None:
        for number in op.writes:
            self.writers[number].append(len(self.ops))
        self.ops.append(op)

    def _values(self, wanted: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        """The storages as they are now, from the operations they depend on; the rest is freed on the way."""
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
        """Every operation that the storages' present values depend on, in order.

        A storage's last writer decides its value; a writer that keeps a part of what was there reads it too.
        """
        needed: set[int] = set()
        stack = [(number, len(self.ops)) for number in wanted]
        while stack:
            number, time = stack.pop()
            position = bisect_left(self.writers[number], time) - 1
            if position < 0:
                raise FdpError("expected values that operations on tensors compute, got memory filled in another way")
            index = self.writers[number][position]
            if index not in needed:
                needed.add(index)
                stack += [(read, index) for read in self.ops[index].reads]
        return sorted(needed)

    def _call(self, op: _Op, env: dict[int, torch.UntypedStorage]) -> Any:
        """Do one operation for real, at its own place in the random stream (the present one if it has none)."""

        def tensor(x: Any) -> Any:
            if not isinstance(x, _View):
                return x
            if x.storage not in env:  # about to be overwritten
                env[x.storage] = torch.UntypedStorage(self.sizes[x.storage])
            return _window(env[x.storage], x)

        args, kwargs = tree.map(tensor, op.args)
        with torch.no_grad():
            if op.stream is None:
                out = op.func(*args, **kwargs)
            else:
                generator, state = op.stream
                with _keeping(generator):
                    generator.set_state(state)
                    out = op.func(*args, **kwargs)
        for real, view in zip(_tensors(out), op.made):
            if view is not None:
                found = _View(view.storage, real.dtype, tuple(real.shape), real.stride(), int(real.storage_offset()))
                if found != view:
                    raise FdpError(
                        f"expected {op.func} to give {view} as on shapes alone, got {found}; keep global settings such "
                        "as the default dtype as they were, or leave this operation out of the constructor"
                    )
                env[view.storage] = real.untyped_storage()
        return out


@contextmanager
def _keeping(generator: torch.Generator) -> Iterator[None]:
    """Put the generator back to where it was."""
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree.leaves(values) if isinstance(x, Tensor)]


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that the operation's schema says it changes."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return _tensors(found)


def _covers(tensor: Tensor) -> bool:
    """Whether the tensor is the whole of its storage, in order."""
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def _window(storage: torch.UntypedStorage, view: _View) -> Tensor:
    return torch.empty(0, dtype=view.dtype, device="cpu").set_(storage, view.offset, view.size, view.stride)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _same_memory(part: Tensor, leaf: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
