"""The one door to differentiation: ``out, pull, aux = vjp(fn, *primals)`` with ``fn(*primals) = (out, aux)``.

``pull(gradient)`` is ``gradient^T d out / d primal`` for every primal. It keeps no graph of its own: left alone,
``torch.func`` records the backward too, and everything that it touched stays alive with it.

    >>> out, pull, inputs = vjp(lambda h, taps: block(h, taps), h, taps)
    >>> h_gradient, tap_gradients = pull(out_gradient)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fdp.types import Tree


def vjp(fn: Callable[..., tuple[Tree, Any]], *primals: Tree) -> tuple[Tree, Callable[[Tree], tuple[Tree, ...]], Any]:
    """The output of ``fn``, its pull-back, and what ``fn`` returned beside the output."""
    out, pull, aux = torch.func.vjp(fn, *primals, has_aux=True)  # pyright: ignore[reportAssignmentType]

    def pull_without_graph(gradient: Tree) -> tuple[Tree, ...]:
        with torch.no_grad():
            return pull(gradient)

    return out, pull_without_graph, aux
