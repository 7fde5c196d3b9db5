"""A stand-in for CUDA graphs on the CPU: recording undoes what it ran, a replay runs the same operations again.

Every operation of torch between the start and the end of a recording is noted with its tensors. What it wrote into
tensors from before the recording is undone at the end, as a real recording computes nothing. A replay calls the
operations again on the same tensors and writes their results to where the recording stored them.

    >>> fake = install(monkeypatch)
    >>> step(state, batch, key)                                # records and replays on the CPU
    >>> len(fake.graphs)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class FakeGraph(TorchDispatchMode):
    """The operations of one recording."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple, dict, list[tuple[Tensor, bool]]]] = []
        self.undo: dict[int, tuple[Tensor, Tensor]] = {}
        self.made: set[int] = set()
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func._schema.is_mutable:
            for x in given:
                if _storage(x) not in self.made and _storage(x) not in self.undo:
                    self.undo[_storage(x)] = (x, x.clone())
        out = func(*args, **kwargs)
        theirs = {_storage(x) for x in given}
        results = [(x.detach(), _storage(x) not in theirs) for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.made |= {_storage(x) for x, own in results if own}
        args, kwargs = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, (args, kwargs))
        self.operations.append((func, args, kwargs or {}, results))
        return out

    @torch.no_grad()
    def end(self) -> None:
        """Undo what was written into tensors from before the recording."""
        for x, before in self.undo.values():
            x.copy_(before)
        self.undo = {}

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, results in self.operations:
            again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for (x, own), value in zip(results, again):
                if own and x.numel():
                    x.copy_(value)


class Fake:
    """The graphs that were recorded."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def make(self) -> FakeGraph:
        self.graphs.append(FakeGraph())
        return self.graphs[-1]


def install(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """Let steps on the CPU be recorded by stand-ins."""
    fake = Fake()

    @contextmanager
    def record(graph: FakeGraph, pool: Any) -> Iterator[None]:
        assert pool == "the pool"
        with graph:
            yield
        graph.end()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake.make)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "the pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr("fdp.fast.cuda_graph.check_device", lambda key: None)
    return fake


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
