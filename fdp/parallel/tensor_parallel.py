"""Tensor parallelism: the two operations at the borders of layers that are split over ranks.

    enter   y = x                      backward: sum of the gradients of all ranks
    leave   y = sum over ranks of x    backward: the gradient itself

Between them every rank of the axis computes its own heads or hidden units; outside, all ranks compute the same.
Shoeybi et al. 2019, arXiv 1909.08053 (f and g). Without an axis both are the identity.

    >>> hidden = gelu(linear(enter(x, axis), up))            # up: this rank's rows
    >>> y = leave(linear(hidden, down), axis)                # down: this rank's columns

``torch.func`` cannot differentiate a collective, so each of the two is defined as the backward of the other.
``torch.compile`` would differentiate the forward instead of using that definition. ``allow_in_graph`` keeps it from
looking inside, and ``tests/parallel/test_tensor_parallel.py`` checks it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from fdp.parallel import collectives
from fdp.types import Axis


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, size: int, group: str) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.size, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        return _leave(gradient, ctx.size, ctx.group), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, size: int, group: str) -> tuple[Tensor, Any]:
        return _enter(x, size, group), in_dims[0]


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, size: int, group: str) -> Tensor:
        axis = Axis("tensor", size, 0, group)
        return collectives.wait(collectives.all_reduce(x, axis))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.size, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore
        return _enter(gradient, ctx.size, ctx.group), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, size: int, group: str) -> tuple[Tensor, Any]:
        return _leave(x, size, group), in_dims[0]  # a sum over ranks does not care which dim is the batch


@torch.compiler.allow_in_graph
def _enter(x: Tensor, size: int, group: str) -> Tensor:
    return _Enter.apply(x, size, group)  # pyright: ignore


@torch.compiler.allow_in_graph
def _leave(x: Tensor, size: int, group: str) -> Tensor:
    return _Leave.apply(x, size, group)  # pyright: ignore


def enter(x: Float[Tensor, " *shape"], axis: Axis | None) -> Float[Tensor, " *shape"]:
    """Return ``x`` as the input of layers that are split over ``axis``; sum its gradient over the ranks."""
    return x if axis is None else _enter(x, axis.size, axis.group)


def leave(x: Float[Tensor, " *shape"], axis: Axis | None) -> Float[Tensor, " *shape"]:
    """Sum the outputs of layers that are split over ``axis``."""
    return x if axis is None else _leave(x, axis.size, axis.group)
