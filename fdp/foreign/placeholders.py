"""Copies of a module without its parameters, and with something else in the place of some of its parts.

    >>> skeleton = with_parts(hollow(module), {"model.layers.0": Same(), "lm_head": Same()})    # module is untouched

A copy is called by ``torch.func.functional_call`` with every parameter given: what was forgotten has no memory, and
using it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fdp.foreign.call_forms import Call, Form, fill, hidden_of
from fdp.foreign.layout import NotAStack


class Reached(Exception):
    """The last block has been reached: what follows it is not to be run."""


class Placeholder(nn.Module):
    """In a block's place, whose attributes (a kind of attention, a window) it has, too."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.__dict__["block"] = block  # no part of the module: its parameters are not given

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)


class Passing(Placeholder):
    """In a block's place: notes how it was called and returns its hidden state, as ``output`` says a block does.

    The last one ends the run.
    """

    def __init__(self, block: nn.Module, name: str, calls: dict[str, Call], output: Form | None):
        super().__init__(block)
        self.name, self.calls, self.output = name, calls, output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.name in self.calls:
            raise NotAStack(f"{self.name}: expected to be called once, got twice")
        self.calls[self.name] = (args, kwargs)
        if self.output is None:
            raise Reached
        return returned(self.output, hidden_of(args, kwargs))


class Resuming(Placeholder):
    """In a block's place: returns its hidden state or, if it is the ``last`` one, the ``value`` it has been given."""

    def __init__(self, block: nn.Module, output: Form, *, last: bool):
        super().__init__(block)
        self.output, self.last = output, last
        self.register_buffer("value", torch.zeros(()) if last else None, persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.value if self.last else hidden_of(args, kwargs)
        return returned(self.output, hidden)  # pyright: ignore[reportArgumentType]


class Standing(Placeholder):
    """In a block's place: notes that it was called and returns tensors of its ``own``, so that their use is seen: the
    hidden state, and what it returns besides."""

    def __init__(self, block: nn.Module, name: str, calls: list[str], output: Form, own: tuple[Tensor, Tensor]):
        super().__init__(block)
        self.name, self.calls, self.output = name, calls, output
        self.__dict__["own"] = own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(self.name)
        return returned(self.output, *self.own)


class Same(nn.Module):
    """In a head's place: returns what it is given. It has the head's parameters, whose dtype the module may ask for."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.__dict__["_parameters"] = {name: _meta(leaf) for name, leaf in head._parameters.items()}

    def forward(self, x: Tensor) -> Tensor:
        return x


class Noting(Same):
    """In a head's place: returns what it is given, and keeps it to be looked at."""

    def __init__(self, head: nn.Module):
        super().__init__(head)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x


def returned(output: Form, hidden: Tensor, spare: Tensor | None = None) -> Any:
    """What a block returns, its hidden state given: the state itself, or a tuple that begins with it."""
    return fill(output, hidden, (), spare)[0][0]


def shallow(module: nn.Module) -> nn.Module:
    """A module of the same class with the same attributes; ``copy.copy`` refuses parametrised ones."""
    new = type(module).__new__(type(module))
    new.__dict__.update(module.__dict__)
    return new


def hollow(module: nn.Module) -> nn.Module:
    """A copy of ``module`` whose parameters have shapes and dtypes but no memory; buffers are shared with it."""
    copies: dict[int, nn.Module] = {}

    def copied(part: nn.Module) -> nn.Module:
        if id(part) not in copies:
            new = copies[id(part)] = shallow(part)
            new.__dict__["_parameters"] = {name: _meta(leaf) for name, leaf in part._parameters.items()}
            new.__dict__["_buffers"] = dict(part._buffers)
            new.__dict__["_modules"] = {n: None if m is None else copied(m) for n, m in part._modules.items()}
        return copies[id(part)]

    return copied(module)


def copied_with(
    module: nn.Module, chosen: Callable[[nn.Module], bool], change: Callable[[nn.Module], None]
) -> nn.Module:
    """The module itself if no part of it is ``chosen``, else a copy with its tensors whose chosen parts are changed."""
    if not any(chosen(part) for part in module.modules()):
        return module
    copies: dict[int, nn.Module] = {}

    def copied(part: nn.Module) -> nn.Module:
        if id(part) not in copies:
            new = copies[id(part)] = shallow(part)
            new.__dict__["_parameters"] = dict(part._parameters)
            new.__dict__["_buffers"] = dict(part._buffers)
            new.__dict__["_modules"] = {n: None if m is None else copied(m) for n, m in part._modules.items()}
            if chosen(new):
                change(new)
        return copies[id(part)]

    return copied(module)


def _meta(leaf: nn.Parameter | None) -> nn.Parameter | None:
    return None if leaf is None else nn.Parameter(torch.empty_like(leaf, device="meta"), requires_grad=False)


def with_parts(module: nn.Module, parts: Mapping[str, nn.Module]) -> nn.Module:
    """A copy of ``module`` with other parts at the dotted names given; all that is not on the way to them is shared."""
    new = shallow(module)
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
        new._modules[first] = with_parts(child, rest)
    return new
