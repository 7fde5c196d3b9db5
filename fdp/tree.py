"""Pytrees addressed by path; the only module that uses optree.

A leaf's path is the dotted list of keys that lead to it, ``blocks.0.attention.qkv``. Everything that must not depend
on the order of leaves (noise, initialisation, checkpoints, hashes) is derived from the path.

    >>> params = {"embed": {"tokens": w}, "blocks": [{"scale": s}]}
    >>> flatten(params)                                # {'blocks.0.scale': s, 'embed.tokens': w}
    >>> unflatten(params, flatten(params))             # params again
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import optree
import torch
from torch import Tensor

from fdp.types import Bound, FdpError, Path, RowGroups, Stamp, Tree

_ROW = 4096

for _static in (Stamp, Bound, RowGroups):  # parts of the structure, without leaves
    optree.register_pytree_node(
        _static,  # pyright: ignore
        lambda value: ((), value, ()),  # pyright: ignore
        lambda value, _: value,  # pyright: ignore
        namespace=optree.registry.__GLOBAL_NAMESPACE,  # pyright: ignore
    )


def paths(tree: Tree) -> list[Path]:
    """Return the path of every leaf, in optree's order (dictionary keys sorted)."""
    if torch.compiler.is_compiling():
        return _paths_of(optree.tree_accessors(tree))
    return list(_paths_in(optree.tree_structure(tree)))


def leaves(tree: Tree) -> list[Any]:
    """Return every leaf, in the order of :func:`paths`."""
    return optree.tree_leaves(tree)


def flatten(tree: Tree) -> dict[Path, Any]:
    """Return ``{path: leaf}``. Two leaves with the same path (keys with dots) are an error."""
    names, values = paths(tree), leaves(tree)
    flat = dict(zip(names, values))
    if len(flat) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise FdpError(f"expected every leaf to have its own path, got {twice} twice; rename keys that contain dots")
    return flat


def unflatten(like: Tree, flat: Mapping[Path, Any]) -> Tree:
    """Return the tree of ``like``'s structure whose leaf at each path is ``flat[path]``."""
    names = paths(like)
    missing, extra = sorted(set(names) - set(flat)), sorted(set(flat) - set(names))
    if missing or extra:
        raise FdpError(f"expected leaves {names[:4]}...: missing {missing}, not in the tree {extra}")
    return optree.tree_unflatten(optree.tree_structure(like), [flat[name] for name in names])


def map(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply ``fn`` leaf by leaf to trees of one structure."""
    return optree.tree_map(fn, tree, *rest)


def same_paths(*trees: Tree) -> bool:
    """Return True if all trees have leaves at the same paths."""
    first, *rest = (paths(tree) for tree in trees)
    return all(names == first for names in rest)


def refill(like: Tree, values: Iterable[Any]) -> Tree:
    """Return the tree of ``like``'s structure with these leaves, in the order of :func:`leaves`."""
    return optree.tree_unflatten(optree.tree_structure(like), list(values))


def nest(flat: Mapping[Path, Any]) -> Tree:
    """Return a nested dictionary from ``{path: leaf}``, undoing :func:`flatten`; keys ``0..n-1`` become a list."""
    root: dict[str, Any] = {}
    for path, leaf in flat.items():
        *parents, last = path.split(".")
        node = root
        for part in parents:
            node = node.setdefault(part, {})
        if not isinstance(node, dict) or last in node:
            raise FdpError(f"{path}: expected a leaf or a branch at each path, got both; rename one")
        node[last] = leaf
    return _lists(root)


def select(flat: Mapping[Path, Any], paths_tree: Tree) -> Tree:
    """Replace each path at the leaves of ``paths_tree`` by ``flat[path]``: a block's view of the parameters."""
    return optree.tree_map(lambda path: flat[path], paths_tree)


def size(tree: Tree) -> int:
    """Return the number of elements over all leaves."""
    return sum(leaf.numel() for leaf in leaves(tree))


def global_norm(tree: Tree) -> Tensor:
    """Return ``sqrt(sum of squares)`` over all leaves, accumulated in float64."""
    first, *rest = [_squared_norm(leaf.detach()) for leaf in leaves(tree)]
    return torch.as_tensor(sum(rest, start=first)).sqrt()


def squared_norms(tree: Tree) -> Tensor:
    """Return the sum of squares of every leaf, ``(leaves,)`` in the order of :func:`paths`, in float64.

    A sum is finite if and only if all elements of its leaf are. On a GPU all leaves share a few launches.
    """
    parts = [leaf.detach() for leaf in leaves(tree)]
    if parts and all(part.is_cuda for part in parts):
        return torch.stack(torch._foreach_norm(parts, 2, dtype=torch.float64)).square()
    return torch.stack([_squared_norm(part) for part in parts])


def _squared_norm(leaf: Tensor) -> Tensor:
    """Sum squares within rows of a few thousand, then over rows: one pass, accurate, and no float64 copy."""
    flat = leaf.flatten()
    even = len(flat) // _ROW * _ROW
    parts = [flat[:even].view(-1, _ROW), flat[even:].view(1, -1)]
    norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float64) for part in parts if part.numel()]
    return torch.cat(norms).square().sum() if norms else flat.new_zeros((), dtype=torch.float64)


@lru_cache(maxsize=256)
def _paths_in(structure: optree.PyTreeSpec) -> tuple[Path, ...]:
    """Return the paths of a structure; cached, since they are slow to build and a step needs the same few often."""
    return tuple(_paths_of(structure.accessors()))


def _paths_of(accessors: Iterable[optree.PyTreeAccessor]) -> list[Path]:
    return [".".join(_name(entry) for entry in accessor) for accessor in accessors]


def _name(entry: optree.PyTreeEntry) -> str:
    return entry.field if isinstance(entry, optree.NamedTupleEntry) else str(entry.entry)


def _lists(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    children = {key: _lists(child) for key, child in node.items()}
    if children and sorted(children) == sorted(str(i) for i in range(len(children))):
        return [children[str(i)] for i in range(len(children))]
    return children
