"""Every collective of a step, by name; nothing here looks at the rank. What ranks say to each other outside of steps,
about files and settings, is in ``unison``, ``dcp`` and ``safetensors_io``.

A collective starts at once and returns a tensor that must not be read before :func:`wait`; between the two, other work
goes on. All are functions of plain tensors, traced by ``torch.compile`` as they stand.

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
    """Gather on a CPU.

    The two workers of a gloo group note what they finished last in one string, without a lock. The name of the plain
    gather, ALLGATHER_COALESCED, lies on the heap, and two that end together free it twice, about once in 30,000 (torch
    2.11 and 2.13). The name of this one, ALLGATHER, fits into the string itself.
    """
    full = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    return _functional.all_gather_into_tensor_out(x, ranks, group, out=full)


@torch.library.register_fake("fdp_collectives::gather", lib=_LIBRARY)
def _(x: Tensor, ranks: int, group: str) -> Tensor:
    return x.new_empty((ranks * x.shape[0], *x.shape[1:]))


def axis_of(mesh: DeviceMesh, name: str) -> Axis:
    """The axis called ``name``, with this rank's place on it."""
    group = mesh.get_group(name)
    return Axis(name, group.size(), mesh.get_local_rank(name), group.group_name)


def after(x: Tensor, token: Tensor) -> Tensor:
    """A copy of ``x`` that cannot be made before ``token`` is known.

    A compiler moves a gather that depends only on the graph's inputs to the front, and all gathered weights are then
    alive at once. A gather of ``after(shard, activation)`` stays where it was written.
    """
    return torch.ops.fdp_collectives.after(x, token)


def all_gather(x: Float[Tensor, " local"], axis: Axis) -> Float[Tensor, " ranks*local"]:
    """The tensors of all ranks of ``axis``, one after the other."""
    x = x.contiguous()
    if x.device.type != "cpu":
        return _functional.all_gather_into_tensor(x, axis.size, axis.group)
    if torch.compiler.is_compiling():  # the body, which writes into its output, as one operation
        return torch.ops.fdp_collectives.gather(x, axis.size, axis.group)
    return _gather(x, axis.size, axis.group)


def reduce_scatter(x: Float[Tensor, " ranks*local"], axis: Axis) -> Float[Tensor, " local"]:
    """This rank's part of the **sum** over the ranks of ``axis``."""
    return _functional.reduce_scatter_tensor(x.contiguous(), "sum", axis.size, axis.group)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The **sum** over the ranks of ``axis``."""
    return _functional.all_reduce(x.contiguous(), "sum", axis.group)


def broadcast(x: Tensor, axis: Axis) -> Tensor:
    """The tensor of the first rank of ``axis``."""
    return _functional.broadcast(x.contiguous(), 0, axis.group)


def broadcast_into(x: Tensor, source: int, axis: Axis) -> Tensor:
    """``x`` of the rank ``source`` of ``axis``, written into everyone else's; its own is only read.

    Unlike the others it needs no memory of its own. ``x`` must be contiguous, and of one shape on all ranks.
    """
    return _functional.broadcast_(x, source, axis.group)


def wait(pending: Tensor) -> Tensor:
    """The result of a collective, once it has arrived."""
    return _functional.wait_tensor(pending)
