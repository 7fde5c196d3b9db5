"""Record a step as a CUDA graph, once per shape of batch, and replay it from then on.

At short sequences the GPU waits for Python between kernels; a replay runs no Python. The first call of a shape runs
eagerly, which compiles what is still to be compiled; the second is recorded. A recording stores addresses: the state
must be donated (its tensors stay where they are), batch and key are copied to addresses of their own.

    >>> run = capture(body)
    >>> state, *more = run(state, batch, key)            # body(state, batch, key), with the state written in place
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp import tree
from fdp.types import Batch, FdpError, Key, TrainState, Tree

Body = Callable[[TrainState, Batch, Key], tuple[Any, ...]]
"""``body(state, batch, key) -> (state, more, ...)``: any number of trees after the state."""


class Recording(NamedTuple):
    """A graph with the tensors that it reads and writes."""

    graph: Any
    addresses: tuple[int, ...]
    batch: Batch
    key: Key
    after: TrainState
    more: tuple[Tree, ...]


def capture(body: Body) -> Body:
    """Return ``body`` replayed as a CUDA graph; it must write the state it returns into the state it is given.

    Guarantees:
      - the same kernels on the same numbers as ``body`` itself: batch and key are read at every replay;
      - a state stored elsewhere, or a batch of another shape, is recorded again, never replayed at old addresses.
    """
    seen: set[Any] = set()
    recordings: dict[Any, Recording] = {}
    pool: list[Any] = []

    def run(state: TrainState, batch: Batch, key: Key) -> tuple[Any, ...]:
        if not key.is_cuda:
            raise FdpError(f"cuda_graph: expected a step on a CUDA device, got a key on {key.device}; leave it out")
        addresses = tuple(leaf.data_ptr() for leaf in tree.leaves(state))
        shape = tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree.leaves(batch))
        if shape in recordings and recordings[shape].addresses != addresses:
            recordings.clear()  # another state: its old memory may belong to anyone by now
            seen.clear()
        if shape in recordings:
            return _replay(recordings[shape], batch, key)
        if shape not in seen:
            seen.add(shape)
            return body(state, batch, key)
        if not pool:
            pool.append(torch.cuda.graph_pool_handle())  # recordings never run at the same time: one pool for all
        recordings[shape] = _record(body, state, batch, key, pool[0])
        return _replay(recordings[shape], batch, key)

    return run


def _record(body: Body, state: TrainState, batch: Batch, key: Key, pool: Any) -> Recording:
    own_batch, own_key = tree.map(Tensor.clone, batch), key.clone()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # memory of the first call becomes free for the recording's own pool
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        after, *more = body(state, own_batch, own_key)
    addresses = tuple(leaf.data_ptr() for leaf in tree.leaves(state))
    if tuple(leaf.data_ptr() for leaf in tree.leaves(after)) != addresses:
        raise FdpError("cuda_graph: expected a step that writes the state in place; use donate=('state',)")
    return Recording(graph, addresses, own_batch, own_key, after, tuple(more))


def _replay(recording: Recording, batch: Batch, key: Key) -> tuple[Any, ...]:
    _copy_into(recording.batch, batch)
    recording.key.copy_(key)
    recording.graph.replay()
    return (recording.after, *tree.map(Tensor.clone, recording.more))


def _copy_into(targets: Tree, values: Tree) -> None:
    for target, value in zip(tree.leaves(targets), tree.leaves(values)):
        target.copy_(value, non_blocking=True)
