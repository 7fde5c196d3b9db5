"""Find the stack of layers inside a module.

    module = after . block_n . ... . block_1 . before                       blocks: the children of one list

A language model is one long list of layers with little before and after it. The list is named by a pattern, or found:
the outermost list of children of one class that holds most of the parameters.

    >>> find_stack(module).blocks                                           # ('model.layers.0', 'model.layers.1', ...)
    >>> find_stack(module, "transformer.h.*")
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from fdp.types import FdpError

AUTO = "auto"
"""The pattern that asks to find the list."""
RIVAL_SHARE = 0.5
"""A list with at least this share of the largest list's parameters is a rival: no list is chosen then."""


class NotAStack(FdpError):
    """A module that cannot be treated layer by layer, but can be as one block; ``reason`` says why."""

    def __init__(self, reason: str, *, first: str = "", then: str = ""):
        super().__init__(f"{reason}; {first}take the module as one block (blocks=None){then}")
        self.reason = reason


class Stack(NamedTuple):
    """The names of a module's blocks, in order."""

    blocks: tuple[str, ...]

    def holds(self, name: str) -> bool:
        """Return True if the parameter or buffer of this name is inside a block."""
        return any(name.startswith(f"{block}.") for block in self.blocks)


def find_stack(module: nn.Module, pattern: str = AUTO) -> Stack:
    """Return the blocks that ``pattern`` names (``model.layers.*``), or those of the list that dominates the module.

    Guarantees:
      - two lists of comparable size are an error that names both, never a guess.
    """
    return _largest_stack(module) if pattern == AUTO else _named_stack(module, pattern)


def _named_stack(module: nn.Module, pattern: str) -> Stack:
    parent, star, rest = pattern.rpartition(".*")
    if not star or rest or "*" in parent:
        raise FdpError(f"blocks: expected a pattern that ends in '.*', such as 'model.layers.*', got {pattern!r}")
    try:
        children = dict(module.get_submodule(parent).named_children())
    except AttributeError as error:
        lists = [name for name, child in module.named_modules() if isinstance(child, nn.ModuleList)]
        raise FdpError(
            f"blocks: expected the name of a part of {_class_name(module)}, got {parent!r}; its lists are {lists}"
        ) from error
    if not children:
        raise FdpError(f"blocks: expected blocks at {pattern!r}, got none; name a list of layers")
    return Stack(tuple(f"{parent}.{name}" for name in children))


def _largest_stack(module: nn.Module) -> Stack:
    sizes: dict[str, int] = {}
    for name, child in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in sizes)
        if name and not inside and isinstance(child, nn.ModuleList | nn.Sequential) and _same_class(child):
            sizes[name] = sum(parameter.numel() for parameter in child.parameters())
    sizes = {name: size for name, size in sizes.items() if size}
    if not sizes:
        raise NotAStack(
            f"{_class_name(module)}: found no list of like layers", first="name one (blocks='model.layers.*'), or "
        )
    largest = max(sizes, key=lambda name: sizes[name])
    if rivals := [name for name in sizes if name != largest and sizes[name] >= RIVAL_SHARE * sizes[largest]]:
        raise NotAStack(
            f"{_class_name(module)}: expected one list of like layers that dominates, got {largest!r} and {rivals}",
            first=f"name the one to stack (blocks='{largest}.*'), or ",
        )
    return Stack(tuple(f"{largest}.{name}" for name, _ in module.get_submodule(largest).named_children()))


def _same_class(children: nn.Module) -> bool:
    classes = {type(child) for child in children.children()}
    return len(classes) == 1 and not classes <= {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding}


def _class_name(module: nn.Module) -> str:
    return type(module).__name__
