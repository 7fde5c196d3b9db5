"""The one door to differentiation: ``out, pull, aux = vjp(fn, *primals)`` with ``fn(*primals) = (out, aux)``.

``pull(gradient)`` is ``gradient^T d out / d primal`` for every primal. It keeps no graph of its own: left alone,
``torch.func`` records the backward too, and everything that it touched stays alive with it. Leaves that are no floats
(masks, positions, keys that travel with a hidden state) are constants; in a gradient's place they have themselves.

    >>> out, pull, inputs = vjp(lambda h, taps: block(h, taps), h, taps)
    >>> h_gradient, tap_gradients = pull(out_gradient)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fdp import tree
from fdp.types import Tree


def vjp(fn: Callable[..., tuple[Tree, Any]], *primals: Tree) -> tuple[Tree, Callable[[Tree], tuple[Tree, ...]], Any]:
    """The output of ``fn``, its pull-back, and what ``fn`` returned beside the output."""
    if not all(leaf.is_floating_point() for leaf in tree.leaves(primals)):
        return _vjp_of_floats(fn, primals)
    structure: list[Tree] = []

    def run(*primals: Tree) -> tuple[Tree, Any]:
        out, aux = fn(*primals)
        leaves = tree.leaves(out)
        rest = [leaf for leaf in leaves if not leaf.is_floating_point()]
        if not rest:
            return out, (aux, rest)
        structure.append(tree.map(lambda leaf: leaf.is_floating_point(), out))
        return [leaf for leaf in leaves if leaf.is_floating_point()], (aux, rest)

    out, pull, (aux, rest) = torch.func.vjp(run, *primals, has_aux=True)  # pyright: ignore[reportAssignmentType]

    def pull_without_graph(gradient: Tree) -> tuple[Tree, ...]:
        with torch.no_grad():
            return pull([g for g in tree.leaves(gradient) if g.is_floating_point()] if rest else gradient)

    return _joined(structure[0], out, rest) if rest else out, pull_without_graph, aux


def _vjp_of_floats(fn: Callable[..., tuple[Tree, Any]], primals: tuple[Tree, ...]):
    kinds = tree.map(lambda leaf: leaf.is_floating_point(), primals)
    leaves = tree.leaves(primals)
    rest = [leaf for leaf in leaves if not leaf.is_floating_point()]
    floats = [leaf for leaf in leaves if leaf.is_floating_point()]
    out, pull, aux = vjp(lambda floats: fn(*_joined(kinds, floats, rest)), floats)
    return out, lambda gradient: _joined(kinds, pull(gradient)[0], rest), aux


def _joined(kinds: Tree, floats: list[Tensor], rest: list[Tensor]) -> Any:
    """A tree of floats, where ``kinds`` is true, and of others, each in their order."""
    sloped, others = iter(floats), iter(rest)
    return tree.map(lambda is_float: next(sloped if is_float else others), kinds)
