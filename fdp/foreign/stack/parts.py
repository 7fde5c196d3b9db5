"""The parts of a stack as pure functions of (leaves, carry, data): before, a block, after.

    before   (hidden, *extras)                                     extras: the other tensors that blocks are given
    block    (block(hidden, ...), *extras)
    after    losses

Extras (masks, positions) are made once and handed on. What no parameter is in travels as integers of the same bits,
so that nothing differentiates it; what has no samples in dim 0 is given some that all lie at one address. Neither
takes a kernel, or memory.

    >>> carry = before(params, (), data)
    >>> losses = after(params, layer(params, carry, data), data)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from fdp import tree
from fdp.foreign.call_forms import Call, Form, difference, fill, read
from fdp.foreign.layout import NotAStack
from fdp.foreign.placeholders import Reached
from fdp.foreign.stack.dead_uses import skipping
from fdp.foreign.uses.dropout import NAME, keys_of, next_keys
from fdp.foreign.uses.watch import watched_call
from fdp.gradients.taps import Watched, batch_size_of
from fdp.types import FdpError, Tree

Caller: TypeAlias = Callable[[Callable[..., Any], Tree], Any]
"""``call(module, data)``: how a batch becomes the arguments of a module; returns what the module returned."""
Weights: TypeAlias = Mapping[str, Tensor | Watched]

BITS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


class Extra(NamedTuple):
    """What is known of a tensor that blocks are given beside the hidden state.

    ``samples``: it has samples in dim 0; ``slope``: a parameter is in it; ``dtype``: its own, None if it is that of the
    hidden state.
    """

    samples: bool
    slope: bool
    dtype: torch.dtype | None


class Constants:
    """A module's buffers, and zeros for parameters that a run does not need; on any device, moved there once."""

    def __init__(self, module: nn.Module, unneeded: Mapping[str, tuple[int, ...]]):
        self.unneeded = dict(unneeded)
        self.home = dict(module.named_buffers(remove_duplicate=False))
        self.there: dict[torch.device, dict[str, Tensor]] = {}

    def on(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """All of them by name; zeros have no memory, and are of ``dtype``."""
        if torch.compiler.is_compiling() and device not in self.there:
            buffers = {name: buffer.to(device) for name, buffer in self.home.items()}  # part of the graph
        else:
            self.move(device)
            buffers = self.there[device]
        if not self.unneeded:
            return dict(buffers)
        zero = torch.zeros((), dtype=dtype, device=device)
        return buffers | {name: zero.expand(shape) for name, shape in self.unneeded.items()}

    def move(self, device: torch.device) -> None:
        """Have the buffers on a device, if they are not there yet."""
        if device not in self.there:
            with unset_fake_temporarily():  # a plan is made on tensors without memory; these have theirs
                self.there[device] = {name: buffer.to(device) for name, buffer in self.home.items()}


@dataclass(frozen=True, eq=False)
class Run:
    """A module as a function of its arguments, its parameters given; those named in ``samples`` hold samples."""

    module: nn.Module
    params: Weights
    constants: Constants
    data: Tree
    samples: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """That of the parameters or, if there are none, of the data."""
        floats = (leaf for leaf in tree.leaves(self.data) if leaf.is_floating_point())
        return next((leaf.dtype for leaf in (*self.params.values(), *floats)), torch.get_default_dtype())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self.constants.on(tree.leaves(self.data)[0].device, self.dtype)
        return watched_call(
            self.module,
            tensors | dict(self.params),
            args,
            kwargs,
            batch_size=batch_size_of(self.data),
            dropout=keys_of(self.data),
            samples=self.samples,
        )


@dataclass(frozen=True, eq=False)
class Before:
    """All that the module does before its blocks. ``absent`` says which tensors stand for None.

    ``forms`` and ``extras``: how the blocks were called on the example; ``dead``: uses that no result depends on;
    ``later``: what the other parts hold, which is moved to a device before their graphs are made.
    """

    module: nn.Module
    calls: dict[str, Call]
    call: Caller
    absent: Callable[[Tensor], bool]
    constants: Constants
    forms: tuple[Form, ...] = ()
    extras: tuple[Extra, ...] = ()
    dead: Mapping[str, frozenset[int]] = field(default_factory=dict)
    later: tuple[Constants, ...] = ()

    def __call__(self, params: Weights, carry: Tree, data: Tree) -> tuple[Tensor, ...]:
        if not torch.compiler.is_compiling():
            for constants in self.later:
                constants.move(tree.leaves(data)[0].device)
        forms, hidden, extras = self.read(skipping(params, self.dead), data)
        if not torch.compiler.is_compiling() and repr(forms) != repr(self.forms):
            raise FdpError(
                f"blocks: expected layers to be called as on the example, got {difference(self.forms, forms)}; give an "
                f"example with the entries and lengths of the data"
            )
        size = batch_size_of(data)
        packed = [_packed(extra, kind, size) for extra, kind in zip(extras, self.extras)]
        keys = keys_of(data)
        return (hidden, *packed) if keys is None else (hidden, *packed, next_keys(keys))

    def read(self, params: Weights, data: Tree) -> tuple[tuple[Form, ...], Tensor, list[Tensor]]:
        """How the blocks are called: the forms of their calls, the hidden state, and the other tensors."""
        forms, hiddens, extras = read(self.seen(params, data), self.absent)
        if any(hidden is not hiddens[0] for hidden in hiddens[1:]):
            raise NotAStack(
                "blocks: expected each to be given what the one before it returned, got something else: the module "
                "does more between its blocks",
                first="name another list of blocks, or ",
            )
        return forms, hiddens[0], extras

    def seen(self, params: Weights, data: Tree) -> list[Call]:
        """The blocks' calls, in order."""
        self.calls.clear()
        run = Run(self.module, params, self.constants, data)
        try:
            self.call(run, inputs_of(data, run.dtype))
        except Reached:
            return list(self.calls.values())
        finally:
            self.calls.clear()
        raise NotAStack(
            "blocks: expected the module to call the last of them, got to its end without",
            first="name those that run, or ",
        )


@dataclass(frozen=True, eq=False)
class Layer:
    """A block of the module, for all blocks that do the same: nothing but the module's own computation."""

    module: nn.Module
    form: Form
    extras: tuple[Extra, ...]
    constants: Constants

    def __call__(self, params: Weights, carry: Tree, data: Tree) -> tuple[Tensor, ...]:
        return self.called(self.form, params, carry, data)

    def called(self, form: Form, params: Weights, carry: Tree, data: Tree) -> tuple[Tensor, ...]:
        """The layer called as ``form`` says, instead of its own."""
        hidden, *packed = carry
        extras = [_unpacked(part, kind, hidden.dtype) for part, kind in zip(packed, self.extras)]
        keys = packed[len(extras) :]  # of dropout, if there are any
        dtype = next((leaf.dtype for leaf in params.values()), hidden.dtype)
        if hidden.dtype != dtype:  # no parameter comes before the blocks, and the data are of another dtype
            extras = [extra.to(dtype) if kind.dtype is None else extra for extra, kind in zip(extras, self.extras)]
            packed = [_packed(extra, kind, len(hidden)) for extra, kind in zip(extras, self.extras)]
            hidden = hidden.to(dtype)
        args, kwargs = fill(form, hidden, extras)
        data = data | {NAME: keys[0]} if keys else data
        out = Run(self.module, params, self.constants, data)(*args, **kwargs)
        return (out if isinstance(out, Tensor) else out[0], *packed[: len(extras)], *(next_keys(key) for key in keys))


@dataclass(frozen=True, eq=False)
class After:
    """All that the module does after its blocks. What it returns, ``finish`` makes something of."""

    module: nn.Module
    last: str
    call: Caller
    finish: Callable[[Any, Tree], Tensor]
    constants: Constants
    names: tuple[str, ...] = ()
    dead: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def __call__(self, params: Weights, carry: Tree, data: Tree) -> Tensor:
        needed = skipping({name: params[name] for name in self.names}, self.dead)
        data = data | {NAME: carry[-1]} if keys_of(data) is not None else data
        resumed = f"{self.last}.value"
        run = Run(self.module, {resumed: carry[0], **needed}, self.constants, data, samples=(resumed,))
        return self.finish(self.call(run, inputs_of(data, run.dtype)), data)


def inputs_of(data: Tree, dtype: torch.dtype) -> Tree:
    """What a module is called with: no keys, and floats in the dtype of its parameters."""
    held = {name: leaf for name, leaf in data.items() if name != NAME} if isinstance(data, dict) else data
    return tree.map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, held)


def _packed(extra: Tensor, kind: Extra, size: int) -> Tensor:
    if kind.slope:
        return extra
    extra = extra if kind.samples else extra.expand(size, *extra.shape)
    return extra.view(BITS[extra.dtype]) if extra.dtype in BITS else extra


def _unpacked(part: Tensor, kind: Extra, dtype: torch.dtype) -> Tensor:
    if kind.slope:
        return part
    own = dtype if kind.dtype is None else kind.dtype
    part = part.view(own) if own in BITS else part
    return part if kind.samples else part[0]
