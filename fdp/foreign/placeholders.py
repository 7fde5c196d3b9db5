"""Copies of a module without its parameters, and with placeholders for some of its parts.

    >>> skeleton = replace_submodules(meta_copy(module), {"lm_head": IdentityHead(head)})       # module is unchanged

A copy is called by ``torch.func.functional_call`` with every parameter given. A forgotten parameter has no memory, so
using it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fdp.foreign.call_template import Call, CallTemplate, fill_template, hidden_of
from fdp.foreign.find_stack import NotAStack


class LastBlockReached(Exception):
    """Raised when the last block is called, to skip what follows it."""


class Placeholder(nn.Module):
    """A stand-in for a block; it has the block's attributes (a kind of attention, a window)."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.__dict__["block"] = block  # not a submodule: its parameters are not given

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)


class RecordingBlock(Placeholder):
    """A placeholder that records how it is called and returns its hidden state in the form that ``output`` gives.

    The last one, which has no ``output``, ends the run.
    """

    def __init__(self, block: nn.Module, name: str, calls: dict[str, Call], output: CallTemplate | None):
        super().__init__(block)
        self.name, self.calls, self.output = name, calls, output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.name in self.calls:
            raise NotAStack(f"{self.name}: expected one call, got two")
        self.calls[self.name] = (args, kwargs)
        if self.output is None:
            raise LastBlockReached
        return block_output(self.output, hidden_of(args, kwargs))


class ResumingBlock(Placeholder):
    """A placeholder that returns its hidden state or, if it is the ``last`` one, the ``value`` it was given."""

    def __init__(self, block: nn.Module, output: CallTemplate, *, last: bool):
        super().__init__(block)
        self.output, self.last = output, last
        self.register_buffer("value", torch.zeros(()) if last else None, persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.value if self.last else hidden_of(args, kwargs)
        return block_output(self.output, hidden)  # pyright: ignore[reportArgumentType]


class TracingBlock(Placeholder):
    """A placeholder that records its call and returns its ``own`` tensors, so that uses of them can be found.

    ``own`` holds the hidden state and a stand-in for everything else that the block returns.
    """

    def __init__(self, block: nn.Module, name: str, calls: list[str], output: CallTemplate, own: tuple[Tensor, Tensor]):
        super().__init__(block)
        self.name, self.calls, self.output = name, calls, output
        self.__dict__["own"] = own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(self.name)
        return block_output(self.output, *self.own)


class IdentityHead(nn.Module):
    """A placeholder for a head that returns its input. It has the head's parameters, whose dtype modules read."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.__dict__["_parameters"] = {name: _meta_parameter(leaf) for name, leaf in head._parameters.items()}

    def forward(self, x: Tensor) -> Tensor:
        return x


class RecordingHead(IdentityHead):
    """A placeholder for a head that returns its input and stores it."""

    def __init__(self, head: nn.Module):
        super().__init__(head)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x


def block_output(output: CallTemplate, hidden: Tensor, spare: Tensor | None = None) -> Any:
    """Return what a block returns for this hidden state: the state itself, or a tuple that begins with it."""
    return fill_template(output, hidden, (), spare)[0][0]


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a module of the same class with the same attributes. (``copy.copy`` refuses parametrised modules.)"""
    new = type(module).__new__(type(module))
    new.__dict__.update(module.__dict__)
    return new


def meta_copy(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` whose parameters are on the meta device; buffers are shared."""
    copies: dict[int, nn.Module] = {}

    def copied(part: nn.Module) -> nn.Module:
        if id(part) not in copies:
            new = copies[id(part)] = shallow_copy(part)
            new.__dict__["_parameters"] = {name: _meta_parameter(leaf) for name, leaf in part._parameters.items()}
            new.__dict__["_buffers"] = dict(part._buffers)
            new.__dict__["_modules"] = {n: None if m is None else copied(m) for n, m in part._modules.items()}
        return copies[id(part)]

    return copied(module)


def copy_with_changes(
    module: nn.Module, chosen: Callable[[nn.Module], bool], change: Callable[[nn.Module], None]
) -> nn.Module:
    """Return a copy, sharing all tensors, in which ``change`` was applied to the ``chosen`` parts.

    If no part is chosen, return the module itself.
    """
    if not any(chosen(part) for part in module.modules()):
        return module
    copies: dict[int, nn.Module] = {}

    def copied(part: nn.Module) -> nn.Module:
        if id(part) not in copies:
            new = copies[id(part)] = shallow_copy(part)
            new.__dict__["_parameters"] = dict(part._parameters)
            new.__dict__["_buffers"] = dict(part._buffers)
            new.__dict__["_modules"] = {n: None if m is None else copied(m) for n, m in part._modules.items()}
            if chosen(new):
                change(new)
        return copies[id(part)]

    return copied(module)


def _meta_parameter(leaf: nn.Parameter | None) -> nn.Parameter | None:
    return None if leaf is None else nn.Parameter(torch.empty_like(leaf, device="meta"), requires_grad=False)


def replace_submodules(module: nn.Module, parts: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of ``module`` with other parts at the given dotted names; everything else is shared."""
    new = shallow_copy(module)
    new.__dict__["_modules"] = dict(module._modules)
    inner: dict[str, dict[str, nn.Module]] = {}
    for name, part in parts.items():
        first, _, rest = name.partition(".")
        if rest:
            inner.setdefault(first, {})[rest] = part
        else:
            new._modules[first] = part
    for first, rest in inner.items():
        child = new._modules[first]
        assert child is not None
        new._modules[first] = replace_submodules(child, rest)
    return new
