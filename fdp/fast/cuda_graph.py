"""A step as one CUDA graph: recorded once per shape of batch, replayed from then on.

At short sequences the GPU waits for Python between kernels; a replay has no Python in it. The first call of a shape
runs as it is, which compiles what is still to be compiled; the second is recorded. What is recorded are places in
memory: the state must be donated (its tensors stay where they are), batch and key are copied into places of their own.

    >>> run = captured(body)
    >>> state, metrics = run(state, batch, key)          # body(state, batch, key), with the state written in place
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp import tree
from fdp.types import Batch, FdpError, Key, Metrics, TrainState, Tree

Body = Callable[[TrainState, Batch, Key], tuple[TrainState, Metrics]]


class Recording(NamedTuple):
    """A graph with the places that it reads and writes."""

    graph: Any
    places: tuple[int, ...]
    batch: Batch
    key: Key
    after: TrainState
    metrics: Metrics


def captured(body: Body) -> Body:
    """``body`` replayed as a CUDA graph; it must write the state it returns into the state it is given.

    Guarantees:
      - the same kernels on the same numbers as ``body`` itself: what depends on the batch or the key is read anew;
      - a state kept elsewhere, or a batch of another shape, is recorded anew and never replayed from old places.
    """
    seen: set[Any] = set()
    recordings: dict[Any, Recording] = {}
    pool: list[Any] = []

    def run(state: TrainState, batch: Batch, key: Key) -> tuple[TrainState, Metrics]:
        if not key.is_cuda:
            raise FdpError(f"cuda_graph: expected a step on a CUDA device, got a key on {key.device}; leave it out")
        places = tuple(leaf.data_ptr() for leaf in tree.leaves(state))
        shape = tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree.leaves(batch))
        if shape in recordings and recordings[shape].places != places:
            recordings.clear()  # another state: the old places may be anyone's by now
            seen.clear()
        if shape in recordings:
            return _replayed(recordings[shape], batch, key)
        if shape not in seen:
            seen.add(shape)
            return body(state, batch, key)
        if not pool:
            pool.append(torch.cuda.graph_pool_handle())  # recordings never run at the same time: one pool for all
        recordings[shape] = _recorded(body, state, batch, key, pool[0])
        return _replayed(recordings[shape], batch, key)

    return run


def _recorded(body: Body, state: TrainState, batch: Batch, key: Key, pool: Any) -> Recording:
    own_batch, own_key = tree.map(Tensor.clone, batch), key.clone()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # what the first call used is free for the recording's own pool
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        after, metrics = body(state, own_batch, own_key)
    places = tuple(leaf.data_ptr() for leaf in tree.leaves(state))
    if tuple(leaf.data_ptr() for leaf in tree.leaves(after)) != places:
        raise FdpError("cuda_graph: expected a step that writes the state in place; use donate=('state',)")
    return Recording(graph, places, own_batch, own_key, after, metrics)


def _replayed(recording: Recording, batch: Batch, key: Key) -> tuple[TrainState, Metrics]:
    _copy_into(recording.batch, batch)
    recording.key.copy_(key)
    recording.graph.replay()
    return recording.after, tree.map(Tensor.clone, recording.metrics)


def _copy_into(places: Tree, values: Tree) -> None:
    for place, value in zip(tree.leaves(places), tree.leaves(values)):
        place.copy_(value, non_blocking=True)
