"""The one door to differentiation: ``out, pull, aux = vjp(fn, *primals)`` with ``fn(*primals) = (out, aux)``.

``pull(gradient)`` is ``gradient^T d out / d primal`` for every primal. It keeps no graph of its own: left alone,
``torch.func`` records the backward too, and everything that it touched stays alive with it. Leaves that are no floats
(masks, positions, keys that travel with a hidden state) are constants; in a gradient's place they have themselves.
What torch.func cannot differentiate but plain autograd can (:class:`NotFunctional`) is left to that.

    >>> out, pull, inputs = vjp(lambda h, taps: block(h, taps), h, taps)
    >>> h_gradient, tap_gradients = pull(out_gradient)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fdp import tree
from fdp.types import FdpError, Flat, Tree


class NotFunctional(FdpError):
    """A function with a derivative that plain autograd knows and torch.func does not: the words say which."""


def vjp(fn: Callable[..., tuple[Tree, Any]], *primals: Tree) -> tuple[Tree, Callable[[Tree], tuple[Tree, ...]], Any]:
    """The output of ``fn``, its pull-back, and what ``fn`` returned beside the output."""
    if not all(leaf.is_floating_point() for leaf in tree.leaves(primals)):
        return _vjp_of_floats(fn, primals)
    structure: list[Tree] = []

    def run(*primals: Tree) -> tuple[Tree, Any]:
        out, aux = fn(*primals)
        floats, rest = _parted(out)
        if not rest:
            return out, (aux, rest)
        structure.append(tree.map(lambda _: 0, out))
        return floats, (aux, rest)

    try:
        out, pull, (aux, rest) = torch.func.vjp(run, *primals, has_aux=True)  # pyright: ignore[reportAssignmentType]
    except NotFunctional:
        structure.clear()
        out, pull, (aux, rest) = _by_autograd(run, primals)

    def pull_without_graph(gradient: Tree) -> tuple[Tree, ...]:
        with torch.no_grad():
            return pull(_parted(gradient)[0] if rest else gradient)

    return tree.unflatten(structure[0], out | rest) if rest else out, pull_without_graph, aux


def _by_autograd(fn: Callable[..., tuple[Tree, Any]], primals: tuple[Tree, ...]):
    """As ``torch.func.vjp`` with ``has_aux``, by a graph that lives as long as the pull-back."""
    opened = tree.map(lambda leaf: leaf.detach().requires_grad_(), primals)
    with torch.enable_grad():
        out, aux = fn(*opened)

    def pull(gradient: Tree) -> tuple[Tree, ...]:
        pairs = [(o, g) for o, g in zip(tree.leaves(out), tree.leaves(gradient)) if o.requires_grad]
        wanted = tree.leaves(opened)
        if not pairs:
            return tree.map(torch.zeros_like, opened)
        outs, slopes = zip(*pairs)
        found = iter(
            torch.autograd.grad(outs, wanted, slopes, allow_unused=True, materialize_grads=True, retain_graph=True)
        )
        return tree.map(lambda _: next(found), opened)

    def detached(value: Any) -> Any:
        return value.detach() if isinstance(value, torch.Tensor) else value

    return tree.map(detached, out), pull, tree.map(detached, aux)


def _vjp_of_floats(fn: Callable[..., tuple[Tree, Any]], primals: tuple[Tree, ...]):
    floats, rest = _parted(primals)

    def joined(floats: Flat) -> tuple[Tree, ...]:
        return tree.unflatten(primals, floats | rest)

    out, pull, aux = vjp(lambda floats: fn(*joined(floats)), floats)
    return out, lambda gradient: joined(pull(gradient)[0]), aux


def _parted(values: Tree) -> tuple[Flat, Flat]:
    """The leaves that are floats, and the others, by path."""
    flat = tree.flatten(values)
    floats = {path: leaf for path, leaf in flat.items() if leaf.is_floating_point()}
    return floats, {path: leaf for path, leaf in flat.items() if path not in floats}
