"""Elementwise operations on lists of leaves: on a CPU, small leaves share calls.

    in_groups(fn, tree, *rest)        fn gets lists of some leaves, and returns lists of as many

An operation on a CPU takes longer to start than a bias takes to compute. ``each`` calls torch once for all leaves of a
group (``torch._foreach_...``), which computes every leaf as by itself, bit for bit. On other devices, for tensors that
are not plain (DTensor), and under a trace or a transform, a group is one leaf, and the operation the ordinary one.

    >>> mean = in_groups(lambda m, g: each("lerp", m, g, 0.1), state.mean, grads)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from fdp import tree
from fdp.types import FdpError, Tree

ELEMENTS_TOGETHER = 1 << 20
"""Most elements of a group, which bounds temporary memory (8 MiB in float64); a larger leaf is a group of its own."""


def in_groups(fn: Callable[..., Any], first: Tree, *rest: Tree) -> Any:
    """Return the tree of ``fn``'s results; if ``fn`` returns a tuple of lists, a tuple of trees.

    All trees must have the paths of the first. ``fn`` computes every leaf by itself. A tree without leaves is
    returned as it is.
    """
    if not tree.same_paths(first, *rest):
        raise FdpError(
            "in_groups: expected trees with the same paths, got "
            + "; ".join(f"{tree.paths(one)[:4]}" for one in (first, *rest))
        )
    columns = [tree.leaves(one) for one in (first, *rest)]
    if not columns[0]:
        return first
    found = [fn(*(column[group] for column in columns)) for group in _groups(columns[0])]
    if isinstance(found[0], tuple):
        return tuple(tree.refill(first, chain.from_iterable(parts)) for parts in zip(*found))
    return tree.refill(first, chain.from_iterable(found))


def each(name: str, leaves: list[Tensor], *others: Any, **options: Any) -> list[Tensor]:
    """Return ``leaf.<name>(*others, **options)`` for every leaf.

    If an argument is a list, each leaf takes its own entry. Names that end in an underscore change the leaves.
    """
    if len(leaves) == 1:
        own = (other[0] if isinstance(other, list) else other for other in others)
        return [getattr(leaves[0], name)(*own, **options)]
    results = getattr(torch, f"_foreach_{name}")(leaves, *others, **options)
    return leaves if name.endswith("_") else list(results)


def groups_of(sizes: Sequence[int], *, share: bool) -> Iterator[slice]:
    """Yield neighbours in groups: of at most ``ELEMENTS_TOGETHER`` elements if they may share calls, else one by one.

    ``sizes`` are their numbers of elements.
    """
    start, filled = 0, 0
    for i, size in enumerate(sizes):
        if i > start and (not share or filled + size > ELEMENTS_TOGETHER):
            yield slice(start, i)
            start, filled = i, 0
        filled += size
    if sizes:
        yield slice(start, len(sizes))


def _groups(leaves: list[Tensor]) -> Iterator[slice]:
    """Return the groups in which leaves are updated."""
    share = not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    share = share and all(type(leaf) in (Tensor, Parameter) and leaf.device.type == "cpu" for leaf in leaves)
    return groups_of([leaf.numel() for leaf in leaves], share=share)
