"""Refuse a ``collate_fn`` by which one sample would change the row of another.

| a sample is collated                       | its row is the same, so that nothing is          |
|--------------------------------------------|--------------------------------------------------|
| beside other samples                       | mixed, sorted or standardised (``check_rows``)   |
| a second time                              | drawn at random (``check_rows``)                 |
| after all other samples, or before any     | remembered (``check_memory``)                    |

The checks are made once, on some samples; :class:`CollatedSamples` checks the rows of the longest ones every time.
Whoever collates must make padding harmless; ``fdp.run.module_model`` tests it.

    >>> longest, shortest = find_longest(samples)
    >>> check_rows(replace(samples, longest=longest), shortest)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fdp import tree
from fdp.run.batch_rows import join_rows, leaf_shapes, same_rows, slice_rows
from fdp.run.collated_samples import NOT_BY_ROW, CollatedSamples, collate_rows
from fdp.types import FdpError

SAMPLES_COMPARED = 32
"""The shortest samples, and as many from all over the data, on which a ``collate_fn`` is checked."""
REMEMBERS = (
    "collate_fn: expected a row that depends on its sample alone, got another one after others had been collated: it "
    "remembers samples, like a vocabulary that numbers words as it meets them. No bound on one sample would hold. "
    "Make what it looks up before training, from public data, and leave it as it is"
)


def find_longest(samples: CollatedSamples) -> tuple[tuple[int, ...], list[int]]:
    """Return the samples that are the longest in some dim of some entry, and a few of the shortest ones.

    Every sample is collated once. If all have one shape, none is the longest.
    """
    most: dict[tuple[str, int], tuple[int, int]] = {}
    elements, shapes = [], set()
    for index in range(len(samples)):
        found = tree.flatten(samples.fetch_alone(index))
        elements.append(sum(leaf.numel() for leaf in found.values()))
        shapes.add(tuple(leaf.shape for leaf in found.values()))
        for path, leaf in found.items():
            for dim, length in enumerate(leaf.shape[1:]):
                if length > most.get((path, dim), (-1, 0))[0]:
                    most[path, dim] = (length, index)
    shortest = np.argsort(elements, kind="stable")[:SAMPLES_COMPARED]
    longest = {index for _, index in most.values()} if len(shapes) > 1 else set()
    return tuple(sorted(longest)), shortest.tolist()


def check_rows(samples: CollatedSamples, indices: Sequence[int]) -> None:
    """Refuse a ``collate_fn`` that gives a sample another row beside other samples, or at another call.

    Guarantees:
      - among these samples, the row of each is the same by itself, a second time, and beside the next one;
      - if it needs no padding, it is the same without any sample beside it.
    """
    for pair in zip(indices, [*indices[1:], indices[0]]):
        given = [samples.source[index] for index in pair]
        rows = [samples.row(sample) for sample in given]
        together = slice_rows(collate_rows(samples.collate, [*given, *samples.beside[0]]), 0, len(given))
        same = same_rows(join_rows(rows), together) and same_rows(samples.row(given[0]), rows[0])
        alone = collate_rows(samples.collate, given[:1])
        if not same or (leaf_shapes(alone) == leaf_shapes(rows[0]) and not same_rows(alone, rows[0])):
            raise FdpError(NOT_BY_ROW)


def check_memory(samples: CollatedSamples, indices: Sequence[int], rewind: Callable[[], None]) -> None:
    """Refuse a ``collate_fn`` whose rows depend on the samples that it was called with before.

    ``rewind`` puts back what it could reach before its first call; by now it has collated every sample.

    Guarantees:
      - among these samples, the row of each is what it would be if no other sample had been collated before.
    """
    given = [[samples.source[index], *samples.beside[0]] for index in indices]
    after = [slice_rows(collate_rows(samples.collate, these), 0, 1) for these in given]
    for these, row in zip(given, after):
        rewind()
        if not same_rows(slice_rows(collate_rows(samples.collate, these), 0, 1), row):
            raise FdpError(REMEMBERS)
