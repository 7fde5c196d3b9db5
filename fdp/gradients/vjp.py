"""Vector-Jacobian products: ``out, pull, aux = vjp(fn, *primals)`` with ``fn(*primals) = (out, aux)``.

``pull(gradient)`` is ``gradient^T d out / d primal`` for every primal. It records no graph: by default ``torch.func``
would, and keep everything alive that the backward touched. Integer and boolean leaves (masks, positions) are constants,
and stand in a gradient for themselves. If torch.func cannot differentiate a function (:class:`NotFunctional`), plain
autograd does.

    >>> out, pull, inputs = vjp(lambda h, taps: block(h, taps), h, taps)
    >>> h_gradient, tap_gradients = pull(out_gradient)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fdp import tree
from fdp.cpu.promise import differentiated_once
from fdp.types import FdpError, Flat, Tree

RECOMPUTED = (
    "expected a block without torch.utils.checkpoint, whose recomputation would read the module's own weights instead "
    "of those given; switch it off, and have fdp recompute blocks (Memory(recompute=True), --checkpoint-activations)"
)
"""The message about a block that recomputes parts of itself in the backward pass."""


class NotFunctional(FdpError):
    """Raised by a function that plain autograd can differentiate and torch.func cannot; the message names it."""


@contextmanager
def refuse_recomputation() -> Iterator[None]:
    """Raise an error if a forward inside wants to be recomputed, as ``torch.func`` does, or a backward recomputes.

    A module is called with the weights given. A recomputation happens later, with those that the module was made with:
    a wrong gradient, and no sign of it.
    """
    with torch.autograd.graph.disable_saved_tensors_hooks(RECOMPUTED):
        try:
            yield
        except RuntimeError as error:
            if str(error) != RECOMPUTED and "use_reentrant=True" not in str(error):  # the latter is said in a backward
                raise
            raise FdpError(RECOMPUTED) from error


def vjp(fn: Callable[..., tuple[Tree, Any]], *primals: Tree) -> tuple[Tree, Callable[[Tree], tuple[Tree, ...]], Any]:
    """Return the output of ``fn``, its pull-back, and the auxiliary result of ``fn``."""
    if not all(leaf.is_floating_point() for leaf in tree.leaves(primals)):
        return _vjp_of_floats(fn, primals)
    structure: list[Tree] = []

    def run(*primals: Tree) -> tuple[Tree, Any]:
        with differentiated_once():
            out, aux = fn(*primals)
        floats, rest = _split_floats(out)
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
            return pull(_split_floats(gradient)[0] if rest else gradient)

    return tree.unflatten(structure[0], out | rest) if rest else out, pull_without_graph, aux


def _by_autograd(fn: Callable[..., tuple[Tree, Any]], primals: tuple[Tree, ...]):
    """Compute ``torch.func.vjp(..., has_aux=True)`` by plain autograd; the graph lives as long as the pull-back."""
    opened = tree.map(lambda leaf: leaf.detach().requires_grad_(), primals)
    with torch.enable_grad(), refuse_recomputation():
        out, aux = fn(*opened)

    def pull(gradient: Tree) -> tuple[Tree, ...]:
        pairs = [(o, g) for o, g in zip(tree.leaves(out), tree.leaves(gradient)) if o.requires_grad]
        wanted = tree.leaves(opened)
        if not pairs:
            return tree.map(torch.zeros_like, opened)
        outs, slopes = zip(*pairs)
        with refuse_recomputation():
            found = iter(
                torch.autograd.grad(outs, wanted, slopes, allow_unused=True, materialize_grads=True, retain_graph=True)
            )
        return tree.map(lambda _: next(found), opened)

    def detached(value: Any) -> Any:
        return value.detach() if isinstance(value, torch.Tensor) else value

    return tree.map(detached, out), pull, tree.map(detached, aux)


def _vjp_of_floats(fn: Callable[..., tuple[Tree, Any]], primals: tuple[Tree, ...]):
    floats, rest = _split_floats(primals)

    def merge(floats: Flat) -> tuple[Tree, ...]:
        return tree.unflatten(primals, floats | rest)

    out, pull, aux = vjp(lambda floats: fn(*merge(floats)), floats)
    return out, lambda gradient: merge(pull(gradient)[0]), aux


def _split_floats(values: Tree) -> tuple[Flat, Flat]:
    """Return the floating-point leaves and the others, by path."""
    flat = tree.flatten(values)
    floats = {path: leaf for path, leaf in flat.items() if leaf.is_floating_point()}
    return floats, {path: leaf for path, leaf in flat.items() if path not in floats}
