"""What the ranks do together outside the step: all of them, or none.

Reading and writing files can fail on one rank alone. The others must hear of it, or they wait forever: so an act that
can fail is done in unison, and an error anywhere is an error everywhere.

    >>> in_unison(lambda: check(path), group)              # raises on every rank, or on none
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from fdp.parallel.collectives import all_gather, axis_of, wait
from fdp.types import Axis, FdpError, Place

T = TypeVar("T")


def several() -> bool:
    """Whether there is a process group."""
    return dist.is_available() and dist.is_initialized()


def rank_in(group: ProcessGroup | None) -> int:
    """This rank's place in the group, by default that of all ranks; 0 if there is none."""
    return dist.get_rank(group) if several() else 0


def size_of(group: ProcessGroup | None) -> int:
    """How many ranks there are; 1 if there is no process group."""
    return dist.get_world_size(group) if several() else 1


def everyones(value: T, group: ProcessGroup | None) -> list[T]:
    """The value of every rank, in order."""
    if not several():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def in_unison(act: Callable[[], T], group: ProcessGroup | None) -> T:
    """``act()`` on every rank.

    Guarantees:
      - if it fails on any rank, every rank raises an :class:`FdpError`, with the class and the words of the first that
        failed.
    """
    if not several():
        return act()
    result: Any = None
    problem: FdpError | None = None
    try:
        result = act()
    except FdpError as error:
        problem = error
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        problem = FdpError(f"{type(error).__name__}: {error}")
        problem.__cause__ = error
    for rank, told in enumerate(everyones(None if problem is None else (type(problem), str(problem)), group)):
        if told is not None:
            kind, words = told
            shared = problem if problem and rank == rank_in(group) else kind(f"rank {rank}: {words}")
            shared.everywhere = True  # so that one rank may speak for all
            raise shared
    return result


def local(leaf: Tensor) -> Tensor:
    """This rank's part of a leaf."""
    return (leaf.to_local() if isinstance(leaf, DTensor) else leaf).detach()


def whole(leaf: Tensor) -> Tensor:
    """Gather all of a leaf on every rank, by fdp's own collectives: see :func:`fdp.parallel.collectives.all_gather`."""
    if not isinstance(leaf, DTensor):
        return leaf
    part, mesh, shape, cuts = local(leaf), leaf.device_mesh, list(leaf.shape), []
    for axis, placement in zip(mesh.mesh_dim_names or (), leaf.placements):
        if isinstance(placement, Shard):
            cuts.append((axis_of(mesh, axis), placement.dim, shape[placement.dim]))
            shape[placement.dim] = _share(shape[placement.dim], cuts[-1][0])
        elif not isinstance(placement, Replicate):
            raise FdpError(f"expected a leaf that is cut or replicated along {axis}, got {placement}")
    for axis, dim, length in reversed(cuts):
        part = part.movedim(dim, 0)
        padded = part.new_zeros((-(-length // axis.size), *part.shape[1:]))
        padded[: len(part)] = part
        part = wait(all_gather(padded, axis))[:length].movedim(0, dim)
    return part


def _share(length: int, axis: Axis) -> int:
    """How much of ``length`` lies on this rank: even chunks, of which the last ones may be short or empty."""
    chunk = -(-length // axis.size)
    return max(0, min(chunk, length - axis.rank * chunk))


def place(leaf: Tensor) -> Place:
    """Where this rank's part sits in the leaf; a plain tensor is the whole leaf."""
    if not isinstance(leaf, DTensor):
        return Place(tuple(leaf.shape), tuple((0, n) for n in leaf.shape))
    sizes, starts = compute_local_shape_and_global_offset(leaf.shape, leaf.device_mesh, leaf.placements)
    return Place(tuple(leaf.shape), tuple(zip(starts, sizes)))


def in_place_of(leaf: Tensor, part: Tensor) -> Tensor:
    """``part`` as this rank's part of a leaf placed like ``leaf``, on whatever device ``part`` is.

    ``DTensor.from_local`` would move it to the device of the mesh.
    """
    return DTensor(part, leaf._spec, requires_grad=False) if isinstance(leaf, DTensor) else part
