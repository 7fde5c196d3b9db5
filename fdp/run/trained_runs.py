"""Remember the runs of this process by the parameters that they trained, so that a later run counts them.

A run is known by the parameters that it wrote into, whichever module holds them, and by the values that it wrote,
whoever copied them. If parameters are put back to what they were before a run, the run no longer counts.

    >>> run = TrainedRun(module)                                # before training
    >>> run.remember(module, trainable, promise)                # when parameters are written into the module
    >>> run.remember_values(state_dict, promise)                # when they are given away
    >>> promises_about(module)                                  # of the runs that its parameters come from
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fdp.privacy.guarantee import Guarantee

Sums: TypeAlias = tuple[tuple[int, ...], float, float]
"""Shape, sum and norm of a parameter: enough to recognise values that were put back, or copied."""

ENTRIES = 2**16
"""Entries of a large parameter that are looked at, about as many."""

_by_parameter: Any = WeakIdKeyDictionary()
"""The runs that wrote into a parameter, in order, each with the sums that the parameter had before it."""
_runs: list[TrainedRun] = []
_numbers = itertools.count()


class TrainedRun:
    """A run that is about to train a module, or did; ``before`` are the runs that its first parameters come from."""

    def __init__(self, module: nn.Module) -> None:
        self.number = next(_numbers)
        self.before = _runs_of(module)
        self.first = {name: sums_of(leaf) for name, leaf in module.named_parameters()}
        self.written: set[Sums] = set()
        self.promise: Guarantee | None = None

    def remember(self, module: nn.Module, trainable: Collection[str], promise: Guarantee) -> None:
        """Remember the values that the run has just written into the ``trainable`` parameters of the module."""
        leaves = {name: leaf for name, leaf in module.named_parameters() if name in trainable}
        for name in self.remember_values(leaves, promise):
            known, first = _by_parameter.setdefault(leaves[name], []), self.first.get(name)
            if all(run is not self for _, run in known):
                # What began from the same values, and all after it, is no longer in the parameter.
                same = (place for place, (sums, _) in enumerate(known) if sums == first)
                known[next(same, len(known)) :] = [(first, self)]

    def remember_values(self, leaves: Mapping[str, Tensor], promise: Guarantee) -> list[str]:
        """Remember values that the run has computed; return the names of those that it has changed."""
        if self.promise is None:
            _runs.append(self)
        self.promise = promise
        sums = {name: sums_of(leaf) for name, leaf in leaves.items()}
        changed = {name: now for name, now in sums.items() if now is not None and now != self.first.get(name)}
        self.written.update(changed.values())
        return list(changed)


def promises_about(module: nn.Module) -> tuple[Guarantee, ...]:
    """Return the promises of the runs of this process that the parameters of a module come from, in order.

    Guarantees:
      - a run counts if one of the parameters it wrote into is in the module and is not what it was before the run;
      - so does a run that wrote the values of a parameter, and every run before it.
    """
    return tuple(run.promise for run in _runs_of(module) if run.promise is not None)


def _runs_of(module: nn.Module) -> tuple[TrainedRun, ...]:
    found = {run.number: run for leaf in module.parameters() for run in _runs_in(leaf)}
    return tuple(found[number] for number in sorted(found))


def _runs_in(leaf: Tensor) -> Iterator[TrainedRun]:
    if not _runs or (now := sums_of(leaf)) is None:
        return
    known = [run for _, run in itertools.takewhile(lambda each: each[0] != now, _by_parameter.get(leaf, ()))]
    yield from known
    if not any(now in run.written for run in known):
        for run in itertools.islice((run for run in _runs if now in run.written), 1):
            yield from (*run.before, run)


def sums_of(leaf: Tensor) -> Sums | None:
    """Return the sums of a parameter, over evenly spaced entries if it is large; None if it has no values.

    Noise changes every entry, so a part of them tells whether the parameter was trained.
    """
    leaf = leaf.detach()
    if leaf.device.type == "meta":
        return None
    entries = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).flatten()
    entries = entries[:: max(1, len(entries) // ENTRIES)].double()
    return tuple(leaf.shape), float(entries.sum()), float(torch.linalg.vector_norm(entries))
