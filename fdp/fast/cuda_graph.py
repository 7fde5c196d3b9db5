"""Record a step as CUDA graphs, one per size of microbatch and one for the end of a step, and replay them.

    one microbatch        [gradient, end]                                    the sum is part of the update, never stored
    several               [begin]  [gradient, running sum += it] ...  [end]  one graph per size, whatever their number

At short sequences the GPU waits for Python between kernels; a replay runs no Python. The first call of a graph's work
runs eagerly, which compiles what is still to be compiled; the second is recorded. A recording stores addresses: the
state must be donated (its tensors stay where they are), and so does the running sum, which is allocated outside the
recordings. Batch and key are copied to addresses of their own. All recordings share one pool of memory, since they
never run at the same time: only what they return is kept from one to the next.

    >>> run = capture(StepParts(begin, gradient, end, mark_end))
    >>> state, metrics, seen = run(state, batch, key)                        # the state is written in place
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdp import tree
from fdp.gradients.accumulate import (
    MicrobatchSum,
    add_microbatch_,
    clear_running_sum_,
    join_metrics,
    make_running_sum,
)
from fdp.privacy.microbatches import split_microbatches
from fdp.types import NO_SAMPLES, Batch, ClippedSum, FdpError, Key, Metrics, TrainState, Tree


class StepParts(NamedTuple):
    """The work of a step, in the order in which it is done; only ``end`` changes the state, in place.

    ``begin(state, device)`` returns what all microbatches compute with; ``gradient(work, state, data, mask, onto)`` is
    one microbatch, added to the sum ``onto`` (None: it is the only one); ``end(state, total, tally, key)`` returns the
    state and what is to be seen of the sum. ``mark_end()`` is called just before ``end`` is replayed, since a replay
    runs none of its Python.
    """

    begin: Callable[[TrainState, torch.device], Tree]
    gradient: Callable[[Tree, TrainState, Tree, Tensor, ClippedSum | None], MicrobatchSum]
    end: Callable[[TrainState, ClippedSum, Tensor, Key], tuple[TrainState, Tree]]
    mark_end: Callable[[], None]


class Recording(NamedTuple):
    """A graph with the tensors that it reads and writes."""

    graph: Any
    inputs: Tree
    outputs: Tree


def capture(parts: StepParts) -> Callable[[TrainState, Batch, Key], tuple[TrainState, Metrics, Tree]]:
    """Return the step of ``parts``, replayed as CUDA graphs.

    Guarantees:
      - the same kernels on the same numbers as the parts themselves: batch and key are read at every replay;
      - a state stored elsewhere, or a microbatch of another shape, is recorded again, never replayed at old addresses;
      - until ``end`` runs, nothing of the state is written, and after it nothing is allocated.
    """
    recorded: list[_RecordedStep] = []

    def run(state: TrainState, batch: Batch, key: Key) -> tuple[TrainState, Metrics, Tree]:
        check_device(key)
        addresses = _addresses(state)
        if not recorded or recorded[0].addresses != addresses:
            recorded[:] = [_RecordedStep(parts, addresses)]  # the memory of another state may belong to anyone by now
        microbatches = split_microbatches(batch)
        try:
            if len(microbatches) == 1:
                return recorded[0].run_one(state, *microbatches[0], key)
            return recorded[0].run_several(state, microbatches, key)
        except Exception:
            recorded.clear()  # out of memory: the recordings hold most of it
            raise

    return run


def check_device(key: Key) -> None:
    """Refuse a step that is not on a CUDA device."""
    if not key.is_cuda:
        raise FdpError(f"cuda_graph: expected a step on a CUDA device, got a key on {key.device}; leave it out")


class _RecordedStep:
    """The recordings for one state, and the running sum that the microbatches of a step are added to."""

    def __init__(self, parts: StepParts, addresses: tuple[int, ...]) -> None:
        self.parts, self.addresses = parts, addresses
        self.recorder = _Recorder()
        self.running: tuple[ClippedSum, Tensor] | None = None

    def run_one(self, state: TrainState, data: Tree, mask: Tensor, key: Key) -> tuple[TrainState, Metrics, Tree]:
        """Run a step of one microbatch: a lazy sum goes into the update as it is."""

        def work(data: Tree, mask: Tensor, key: Key) -> tuple[Metrics, Tree]:
            total, tally, metrics = self.parts.gradient(self.parts.begin(state, mask.device), state, data, mask, None)
            return metrics, self._end(state, total, tally, key)

        metrics, seen = self.recorder.run_last("step", work, data, mask, key, mark_end=self.parts.mark_end)
        return state, metrics, seen

    def run_several(
        self, state: TrainState, microbatches: list[tuple[Tree, Tensor]], key: Key
    ) -> tuple[TrainState, Metrics, Tree]:
        """Run a step of several microbatches, which are added to the running sum. The first such step is eager."""
        if self.running is None:
            return self._run_eagerly(state, microbatches, key)
        running = self.running

        def begin(device: Tensor) -> Tree:
            clear_running_sum_(running)
            return self.parts.begin(state, device.device)

        def add(data: Tree, mask: Tensor) -> Metrics:
            return add_microbatch_(running, partial(self.parts.gradient, work, state, data, mask))

        work = self.recorder.run("begin", begin, key)
        metrics = join_metrics(
            [tree.map(torch.clone, self.recorder.run("add", add, data, mask)) for data, mask in microbatches]
        )
        end = partial(self._end, state, *running)
        return state, metrics, self.recorder.run_last("end", end, key, mark_end=self.parts.mark_end)

    def _run_eagerly(
        self, state: TrainState, microbatches: list[tuple[Tree, Tensor]], key: Key
    ) -> tuple[TrainState, Metrics, Tree]:
        work, metrics, running = self.parts.begin(state, key.device), [], None
        for data, mask in microbatches:
            if running is None:
                part = self.parts.gradient(work, state, data, mask, NO_SAMPLES)
                running = make_running_sum(part)
                metrics.append(part.metrics)
                del part
            else:
                metrics.append(add_microbatch_(running, partial(self.parts.gradient, work, state, data, mask)))
            self.recorder.note("add", data, mask)
        assert running is not None
        joined = join_metrics(metrics)
        seen = self._end(state, *running, key)
        self.recorder.note("begin", key)
        self.recorder.note("end", key)
        self.running = running
        return state, joined, seen

    def _end(self, state: TrainState, total: ClippedSum, tally: Tensor, key: Key) -> Tree:
        """Run the end of a step on a sum whose tensors it must leave alone, and return what is to be seen."""
        after, seen = self.parts.end(state, total._replace(value=dict(total.value)), tally, key)
        if _addresses(after) != self.addresses:
            raise FdpError("cuda_graph: expected a step that writes the state in place; use donate=('state',)")
        return seen


class _Recorder:
    """Recordings by name and shape of the inputs: the first run is eager, the second is recorded, all later replay."""

    def __init__(self) -> None:
        self.known: set[Any] = set()
        self.recordings: dict[Any, Recording] = {}
        self.pool: Any = None

    def note(self, name: str, *inputs: Tree) -> None:
        """Remember that this work was done eagerly by someone else."""
        self.known.add(_key(name, inputs))

    def run(self, name: str, work: Callable[..., Tree], *inputs: Tree) -> Tree:
        """Return ``work(*inputs)``; what a recording returns is overwritten by its next replay."""
        if (recording := self._load(name, work, inputs)) is None:
            return self._run_eagerly(name, work, inputs)
        recording.graph.replay()
        return recording.outputs

    def run_last(self, name: str, work: Callable[..., Tree], *inputs: Tree, mark_end: Callable[[], None]) -> Tree:
        """Return ``work(*inputs)``, the end of a step, in tensors that are allocated before it is replayed."""
        if (recording := self._load(name, work, inputs)) is None:
            return self._run_eagerly(name, work, inputs)
        kept = tree.map(torch.empty_like, recording.outputs)
        mark_end()
        recording.graph.replay()
        for target, value in zip(tree.leaves(kept), tree.leaves(recording.outputs)):
            target.copy_(value)
        return kept

    def _run_eagerly(self, name: str, work: Callable[..., Tree], inputs: tuple[Tree, ...]) -> Tree:
        result = work(*inputs)
        self.note(name, *inputs)
        return result

    def _load(self, name: str, work: Callable[..., Tree], inputs: tuple[Tree, ...]) -> Recording | None:
        """Return the recording of this work with the inputs copied into it; None if the work was never done."""
        key = _key(name, inputs)
        if key not in self.known:
            return None
        if key not in self.recordings:
            self.recordings[key] = self._record(work, inputs)
        recording = self.recordings[key]
        for target, value in zip(tree.leaves(recording.inputs), tree.leaves(inputs)):
            target.copy_(value, non_blocking=True)
        return recording

    def _record(self, work: Callable[..., Tree], inputs: tuple[Tree, ...]) -> Recording:
        own = tree.map(torch.clone, inputs)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # memory of the eager run becomes free for the recordings' pool
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            outputs = work(*own)
        return Recording(graph, own, outputs)


def _key(name: str, inputs: tuple[Tree, ...]) -> Any:
    return name, tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree.leaves(inputs))


def _addresses(state: TrainState) -> tuple[int, ...]:
    return tuple(leaf.data_ptr() for leaf in tree.leaves(state))
