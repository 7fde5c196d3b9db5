"""Argument checks of optimizers. An error says what was expected, what was given, where, and what to do.

>>> nonnegative("learning_rate", -1.0)             # learning_rate: expected a finite number, 0 or more, got -1.0
>>> check_fits("grads", params, grads)             # names the path that misfits
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fdp import tree
from fdp.arguments import is_number, nonnegative_number, positive_number, shown
from fdp.types import FdpError, Tree


def nonnegative(name: str, value: float) -> None:
    """Raise unless ``0 <= value < inf``."""
    nonnegative_number(name, value)


def positive(name: str, value: float) -> None:
    """Raise unless ``0 < value < inf``."""
    positive_number(name, value)


def decay_rate(name: str, value: float) -> None:
    """Raise unless ``0 <= value < 1``."""
    if not is_number(value) or not 0 <= value < 1:
        raise FdpError(f"{name}: expected a decay rate in [0, 1), got {shown(value)}")


def floating(params: Tree) -> None:
    """Raise unless there are leaves and every one is a real floating point tensor."""
    if not tree.leaves(params):
        raise FdpError("params: expected at least one tensor, got an empty tree")
    if all(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree.leaves(params)):
        return
    for path, leaf in tree.flatten(params).items():
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            got = f"a tensor of {leaf.dtype}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise FdpError(
                f"params[{path!r}]: expected a floating point tensor, got {got}; "
                "keep values that are not trained in another tree"
            )


def check_fits(name: str, params: Tree, other: Tree) -> None:
    """Raise unless ``other`` has the structure and shapes of ``params``."""
    try:
        same = all(tree.leaves(tree.map(lambda p, leaf: p.shape == getattr(leaf, "shape", None), params, other)))
    except ValueError:
        same = False
    if not same:
        raise FdpError(_difference(name, params, other))


def _difference(name: str, params: Tree, other: Tree) -> str:
    expected, got = tree.flatten(params), tree.flatten(other)
    for path, leaf in expected.items():
        if path not in got:
            return f"{name}[{path!r}]: expected a tensor of shape {_shape(leaf)}, got no leaf at this path"
        if _shape(leaf) != _shape(got[path]):
            return f"{name}[{path!r}]: expected shape {_shape(leaf)}, got {_shape(got[path])}"
    for path, leaf in got.items():
        if path not in expected:
            return f"{name}[{path!r}]: expected no leaf here, as in params, got one of shape {_shape(leaf)}"
    return (
        f"{name}: expected the containers of params ({type(params).__name__} ...), got the same paths "
        f"in other containers ({type(other).__name__} ...); a tuple is not a list"
    )


def _shape(leaf: Any) -> str:
    return str(tuple(leaf.shape)) if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
