"""The functions of a stack's blocks, each a pure function of (leaves, carry, data): before, a layer, after.

    before   (hidden, *extras)                                     extras: the other tensor arguments of the layers
    layer    (layer(hidden, ...), *extras)
    after    losses

Extras (masks, positions) are computed once and passed on. An extra that depends on no parameter travels as integers of
the same bits, so that nothing differentiates it. An extra without a batch dimension is expanded to one. Neither costs a
kernel or memory.

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
from fdp.foreign.call_template import Call, CallTemplate, describe_difference, fill_template, read_calls
from fdp.foreign.find_stack import NotAStack
from fdp.foreign.placeholders import LastBlockReached
from fdp.foreign.stack.dependencies import Weights, skip_uses
from fdp.foreign.uses.dropout import DROPOUT_KEYS, keys_of, next_keys
from fdp.foreign.uses.watch import watched_call
from fdp.gradients.taps import batch_size_of
from fdp.types import FdpError, Tree

Caller: TypeAlias = Callable[[Callable[..., Any], Tree], Any]
"""``call(module, data)``: calls a module with the entries of a batch and returns what the module returned."""

INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
"""Integer dtypes of the same width."""


class ExtraInfo(NamedTuple):
    """Facts about a tensor argument of the layers other than the hidden state.

    ``has_samples``: dim 0 is the batch; ``has_gradient``: it depends on a parameter; ``dtype``: its own dtype, or None
    if it has the dtype of the hidden state.
    """

    has_samples: bool
    has_gradient: bool
    dtype: torch.dtype | None


class Constants:
    """A module's buffers, and zeros for the parameters that a run does not need; each device gets one copy."""

    def __init__(self, module: nn.Module, unneeded: Mapping[str, tuple[int, ...]]):
        self.unneeded = dict(unneeded)
        self.buffers = dict(module.named_buffers(remove_duplicate=False))
        self.copies: dict[torch.device, dict[str, Tensor]] = {}

    def on(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return all constants by name; the zeros take no memory and have the given ``dtype``."""
        if torch.compiler.is_compiling() and device not in self.copies:
            buffers = {name: buffer.to(device) for name, buffer in self.buffers.items()}  # part of the graph
        else:
            self.move(device)
            buffers = self.copies[device]
        if not self.unneeded:
            return dict(buffers)
        zero = torch.zeros((), dtype=dtype, device=device)
        return buffers | {name: zero.expand(shape) for name, shape in self.unneeded.items()}

    def move(self, device: torch.device) -> None:
        """Copy the buffers to a device, unless they are there already."""
        if device not in self.copies:
            with unset_fake_temporarily():  # a plan is made on shape-only tensors, but these need values
                self.copies[device] = {name: buffer.to(device) for name, buffer in self.buffers.items()}


@dataclass(frozen=True, eq=False)
class ModuleCall:
    """A module as a function of its arguments, with its parameters given; those named in ``samples`` hold samples."""

    module: nn.Module
    params: Weights
    constants: Constants
    data: Tree
    samples: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters or, without parameters, of the data."""
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
class BeforeLayers:
    """Everything that the module does before its layers. ``absent`` says which tensors stand for None.

    ``templates`` and ``extras``: how the layers were called on the example; ``dead``: uses that no result depends on;
    ``later``: constants of the other parts, which are moved to a device before their graphs are captured.
    """

    module: nn.Module
    calls: dict[str, Call]
    call: Caller
    absent: Callable[[Tensor], bool]
    constants: Constants
    templates: tuple[CallTemplate, ...] = ()
    extras: tuple[ExtraInfo, ...] = ()
    dead: Mapping[str, frozenset[int]] = field(default_factory=dict)
    later: tuple[Constants, ...] = ()

    def __call__(self, params: Weights, carry: Tree, data: Tree) -> tuple[Tensor, ...]:
        if not torch.compiler.is_compiling():
            for constants in self.later:
                constants.move(tree.leaves(data)[0].device)
        templates, hidden, extras = self.read_calls(skip_uses(params, self.dead), data)
        if not torch.compiler.is_compiling() and repr(templates) != repr(self.templates):
            raise FdpError(
                f"blocks: expected layers to be called as on the example, got "
                f"{describe_difference(self.templates, templates)}; give an example with the entries and lengths of "
                f"the data"
            )
        size = batch_size_of(data)
        packed = [_pack_extra(extra, info, size) for extra, info in zip(extras, self.extras)]
        keys = keys_of(data)
        return (hidden, *packed) if keys is None else (hidden, *packed, next_keys(keys))

    def read_calls(self, params: Weights, data: Tree) -> tuple[tuple[CallTemplate, ...], Tensor, list[Tensor]]:
        """Return how the layers are called: the templates, the hidden state, and the other tensors."""
        templates, hiddens, extras = read_calls(self.layer_calls(params, data), self.absent)
        if any(hidden is not hiddens[0] for hidden in hiddens[1:]):
            raise NotAStack(
                "blocks: expected each block to be given what the previous one returned, got something else: the "
                "module computes something between its blocks",
                first="name another list of blocks, or ",
            )
        return templates, hiddens[0], extras

    def layer_calls(self, params: Weights, data: Tree) -> list[Call]:
        """Return the arguments of the layers' calls, in order."""
        self.calls.clear()
        module_call = ModuleCall(self.module, params, self.constants, data)
        try:
            self.call(module_call, module_inputs(data, module_call.dtype))
        except LastBlockReached:
            return list(self.calls.values())
        finally:
            self.calls.clear()
        raise NotAStack(
            "blocks: expected the module to call the last of them, got to its end without a call",
            first="name those that run, or ",
        )


@dataclass(frozen=True, eq=False)
class LayerBlock:
    """One layer of the module, shared by all layers that do the same: only the module's own computation."""

    module: nn.Module
    template: CallTemplate
    extras: tuple[ExtraInfo, ...]
    constants: Constants

    def __call__(self, params: Weights, carry: Tree, data: Tree) -> tuple[Tensor, ...]:
        return self.call_with(self.template, params, carry, data)

    def call_with(self, template: CallTemplate, params: Weights, carry: Tree, data: Tree) -> tuple[Tensor, ...]:
        """Call the layer as ``template`` says instead of its own template."""
        hidden, *packed = carry
        extras = [_unpack_extra(part, info, hidden.dtype) for part, info in zip(packed, self.extras)]
        keys = packed[len(extras) :]  # of dropout, if there are any
        dtype = next((leaf.dtype for leaf in params.values()), hidden.dtype)
        if hidden.dtype != dtype:  # no parameter comes before the blocks, and the data have another dtype
            extras = [extra.to(dtype) if info.dtype is None else extra for extra, info in zip(extras, self.extras)]
            packed = [_pack_extra(extra, info, len(hidden)) for extra, info in zip(extras, self.extras)]
            hidden = hidden.to(dtype)
        args, kwargs = fill_template(template, hidden, extras)
        data = data | {DROPOUT_KEYS: keys[0]} if keys else data
        out = ModuleCall(self.module, params, self.constants, data)(*args, **kwargs)
        return (out if isinstance(out, Tensor) else out[0], *packed[: len(extras)], *(next_keys(key) for key in keys))


@dataclass(frozen=True, eq=False)
class AfterLayers:
    """Everything that the module does after its layers, then ``finish`` on what it returns."""

    module: nn.Module
    last: str
    call: Caller
    finish: Callable[[Any, Tree], Tensor]
    constants: Constants
    names: tuple[str, ...] = ()
    dead: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def __call__(self, params: Weights, carry: Tree, data: Tree) -> Tensor:
        needed = skip_uses({name: params[name] for name in self.names}, self.dead)
        data = data | {DROPOUT_KEYS: carry[-1]} if keys_of(data) is not None else data
        resumed = f"{self.last}.value"
        module_call = ModuleCall(self.module, {resumed: carry[0], **needed}, self.constants, data, samples=(resumed,))
        return self.finish(self.call(module_call, module_inputs(data, module_call.dtype)), data)


def module_inputs(data: Tree, dtype: torch.dtype) -> Tree:
    """Return the data that a module is called with: without dropout keys, and with floats cast to ``dtype``."""
    entries = {name: leaf for name, leaf in data.items() if name != DROPOUT_KEYS} if isinstance(data, dict) else data
    return tree.map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, entries)


def _pack_extra(extra: Tensor, info: ExtraInfo, size: int) -> Tensor:
    if info.has_gradient:
        return extra
    extra = extra if info.has_samples else extra.expand(size, *extra.shape)
    return extra.view(INTEGERS[extra.dtype]) if extra.dtype in INTEGERS else extra


def _unpack_extra(part: Tensor, info: ExtraInfo, dtype: torch.dtype) -> Tensor:
    if info.has_gradient:
        return part
    own = dtype if info.dtype is None else info.dtype
    part = part.view(own) if own in INTEGERS else part
    return part if info.has_samples else part[0]
