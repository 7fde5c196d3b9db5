"""The collectives of a step, by name. Exchanges outside of steps are in ``agree`` and in ``fdp.storage``.

A collective starts at once and returns a tensor that must not be read before :func:`wait`; other work can run in
between. All are functions of plain tensors that ``torch.compile`` traces. None of them depends on the rank.

    >>> pending = all_gather(shard, axis)
    >>> full = wait(pending)
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fdp.types import Axis

_functional = torch.ops._c10d_functional

_LIBRARY = torch.library.Library("fdp_collectives", "DEF")
_LIBRARY.define("after(Tensor x, Tensor token) -> Tensor")
_LIBRARY.define("gather(Tensor x, int ranks, str group) -> Tensor")


@torch.library.impl(_LIBRARY, "after", "CompositeExplicitAutograd")
def _after(x: Tensor, token: Tensor) -> Tensor:
    return x.clone()


@torch.library.register_fake("fdp_collectives::after", lib=_LIBRARY)
def _(x: Tensor, token: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.impl(_LIBRARY, "gather", "CompositeExplicitAutograd")
def _gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """Gather on a CPU, avoiding a double free in gloo (torch 2.11 and 2.13).

    The two workers of a gloo group write the name of their last operation to one string, without a lock. The name of
    the plain gather, ALLGATHER_COALESCED, is on the heap, and two gathers that end together free it twice, about once
    in 30,000. The name of this one, ALLGATHER, fits into the string object itself.
    """
    full = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    return _functional.all_gather_into_tensor_out(x, ranks, group, out=full)


@torch.library.register_fake("fdp_collectives::gather", lib=_LIBRARY)
def _(x: Tensor, ranks: int, group: str) -> Tensor:
    return x.new_empty((ranks * x.shape[0], *x.shape[1:]))


def axis_of(mesh: DeviceMesh, name: str) -> Axis:
    """Return the mesh axis called ``name``."""
    group = mesh.get_group(name)
    return Axis(name, group.size(), mesh.get_local_rank(name), group.group_name)


def after(x: Tensor, token: Tensor) -> Tensor:
    """Return a copy of ``x`` that depends on ``token``.

    A compiler moves a gather that depends only on the graph's inputs to the front, and then all gathered weights are
    alive at once. A gather of ``after(shard, activation)`` stays where it was written.
    """
    return torch.ops.fdp_collectives.after(x, token)


def all_gather(x: Float[Tensor, " local"], axis: Axis) -> Float[Tensor, " ranks*local"]:
    """Concatenate the tensors of all ranks of ``axis``."""
    x = x.contiguous()
    if x.device.type != "cpu":
        return _functional.all_gather_into_tensor(x, axis.size, axis.group)
    if torch.compiler.is_compiling():  # one opaque operation, since the body writes into its output
        return torch.ops.fdp_collectives.gather(x, axis.size, axis.group)
    return _gather(x, axis.size, axis.group)


def reduce_scatter(x: Float[Tensor, " ranks*local"], axis: Axis) -> Float[Tensor, " local"]:
    """Return this rank's part of the **sum** over the ranks of ``axis``."""
    return _functional.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.group)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """Return the **sum** over the ranks of ``axis``."""
    return _functional.all_reduce(x.contiguous(), "sum", axis.group)


def broadcast(x: Tensor, axis: Axis) -> Tensor:
    """Return the tensor of the first rank of ``axis``."""
    return _functional.broadcast(x.contiguous(), 0, axis.group)


def broadcast_into(x: Tensor, source: int, axis: Axis) -> Tensor:
    """Write rank ``source``'s ``x`` into the ``x`` of all other ranks of ``axis``, in place.

    Unlike the other collectives it allocates nothing. ``x`` must be contiguous, and of one shape on all ranks.
    """
    return _functional.broadcast_(x, source, axis.group)


def wait(pending: Tensor) -> Tensor:
    """Wait for a collective and return its result."""
    return _functional.wait_tensor(pending)
