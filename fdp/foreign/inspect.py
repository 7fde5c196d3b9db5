"""Inspect a model before it is trained: its leaves, the rules of their uses, its blocks, its memory.

    per-sample gradients = batch x trainable elements x bytes                     what a plan stores of them is less

Every block is traced on shapes. If a use has no rule, the leaves are watched one at a time to find out whose use it is,
and the leaf is shown with what to do. The plan and the memory assume that such leaves are materialised.

    >>> found = inspect_model(model, microbatch, method=Method.AUTO, dtype=torch.float32, optimizer=adamw(1e-3))
    >>> [row.path for row in found.leaves if row.refusal]                  # leaves that cannot be trained as they are
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fdp import tree
from fdp.gradients.costs import NormBy
from fdp.gradients.plan import Method, Plan, make_plan
from fdp.gradients.taps import trace_tape
from fdp.model import Block, Model
from fdp.optimizers import Optimizer
from fdp.parallel.sharding import abstract_params
from fdp.types import FdpError, Flat, Path, Tree


class LeafRow(NamedTuple):
    """A leaf: ``rules`` by which its uses are recorded, in order; ``also``: its other names, if it is tied.

    ``refusal`` says which use has no rule and lists the choices; None if all uses have one.
    """

    path: Path
    shape: tuple[int, ...]
    blocks: tuple[str, ...]
    rules: tuple[str, ...]
    also: tuple[str, ...]
    frozen: bool
    materialized: bool
    norm_by: str | None
    sum_by: str | None
    kept_bytes: float
    refusal: str | None

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def tied(self) -> bool:
        """True if the leaf has several names, or several blocks use it."""
        return bool(self.also) or len(self.blocks) > 1


class BlockRow(NamedTuple):
    """A block: blocks with the same ``kind`` number share one function, which is compiled once."""

    name: str
    kind: int
    leaves: int
    size: int
    compiled: bool
    fused_head: bool


class MemoryNeed(NamedTuple):
    """Bytes on one device: ``per_sample`` for all per-sample gradients, ``kept`` for what the plan stores of them."""

    parameters: int
    optimizer: int
    per_sample: int
    kept: float


class Inspection(NamedTuple):
    """The result of inspecting a model."""

    name: str
    leaves: tuple[LeafRow, ...]
    blocks: tuple[BlockRow, ...]
    memory: MemoryNeed
    method: Method
    batch_size: int
    dtype: torch.dtype

    @property
    def refused(self) -> tuple[LeafRow, ...]:
        return tuple(row for row in self.leaves if row.refusal is not None)


def inspect_model(
    model: Model,
    microbatch: Tree,
    *,
    method: Method,
    dtype: torch.dtype,
    optimizer: Optimizer,
    names: Mapping[str, Path] | None = None,
) -> Inspection:
    """Inspect ``model`` on the shapes of ``microbatch``.

    ``names`` maps every parameter name to its leaf (``fdp.foreign.leaves.leaf_paths``).

    Guarantees:
      - every leaf and every block has a row;
      - nothing is computed: the values of parameters and data are not read.
    """
    flat = tree.flatten(abstract_params(model, None))
    needs_rules = method is not Method.MATERIALIZE
    refusals = refused_uses(model, flat, microbatch, dtype=dtype) if needs_rules else {}
    ready = model._replace(materialized=model.materialized | frozenset(refusals))
    plan = make_plan(ready, tree.nest(flat), microbatch, method=method, dtype=dtype)
    named = {path: tuple(n for n, leaf in (names or {}).items() if leaf == path and n != path) for path in flat}
    rows = tuple(_leaf_row(model, plan, path, named[path], refusals.get(path)) for path in model.leaves)
    return Inspection(
        model.name, rows, _block_rows(model), _memory(model, plan, optimizer), method, plan.batch_size, dtype
    )


def refused_uses(model: Model, flat: Flat, microbatch: Tree, *, dtype: torch.dtype) -> dict[Path, str]:
    """Return the trained leaves with a use that has no rule, each with the error message."""
    weights = {path: leaf.new_empty((), dtype=dtype).expand(leaf.shape) for path, leaf in flat.items()}
    carry: Tree = ()
    found: dict[Path, str] = {}
    for block in model.blocks:
        own = frozenset(tree.leaves(block.params)) & model.trainable - model.materialized
        try:
            carry = trace_tape(block, weights, own, carry, microbatch)[1]
        except FdpError as error:
            refused = _refused_leaves(block, weights, own, carry, microbatch)
            if not refused:
                trace_tape(block, weights, frozenset(), carry, microbatch)  # raises too, if no leaf is at fault
                refused = dict.fromkeys(sorted(own), str(error))  # the error of several leaves together
            found |= refused
            carry = trace_tape(block, weights, frozenset(), carry, microbatch)[1]
        except (DynamicOutputShapeException, DataDependentOutputException):
            return found  # making the plan will raise the error
    return found


def _refused_leaves(
    block: Block, weights: Flat, own: frozenset[Path], carry: Tree, microbatch: Tree
) -> dict[Path, str]:
    found = {}
    for path in sorted(own):
        try:
            trace_tape(block, weights, frozenset({path}), carry, microbatch)
        except FdpError as error:
            found[path] = str(error)
    return found


def _leaf_row(model: Model, plan: Plan, path: Path, also: tuple[str, ...], refusal: str | None) -> LeafRow:
    choice = plan.choices.get(path)
    held = [block.name for block in model.blocks if path in tree.leaves(block.params)]
    return LeafRow(
        path=path,
        shape=tuple(model.leaves[path].shape),
        blocks=tuple(held),
        rules=tuple(use.rule for uses in plan.uses for use in uses if use.path == path),
        also=also,
        frozen=path in model.frozen,
        materialized=choice is not None and choice.norm is NormBy.VMAP,
        norm_by=None if choice is None else choice.norm.value,
        sum_by=None if choice is None else choice.sum.value,
        kept_bytes=0.0 if choice is None else choice.stored_bytes,
        refusal=refusal,
    )


def _block_rows(model: Model) -> tuple[BlockRow, ...]:
    kinds: dict[object, int] = {}
    rows = []
    for block in model.blocks:
        paths = set(tree.leaves(block.params))
        size = sum(torch.Size(model.leaves[path].shape).numel() for path in paths)
        kind = kinds.setdefault(block.apply, len(kinds))
        rows.append(BlockRow(block.name, kind, len(paths), size, block.compiled, block.head is not None))
    return tuple(rows)


def _memory(model: Model, plan: Plan, optimizer: Optimizer) -> MemoryNeed:
    """Return the memory need. Parameters and optimizer state are float32, whatever the compute dtype."""
    sizes = {path: torch.Size(leaf.shape).numel() for path, leaf in model.leaves.items()}
    trained = {path: torch.empty(model.leaves[path].shape, device="meta") for path in model.leaves}
    state = optimizer.init({path: leaf for path, leaf in trained.items() if path in model.trainable})
    held = sum(leaf.numel() * leaf.itemsize for leaf in tree.leaves(state) if isinstance(leaf, Tensor))
    whole = sum(size for path, size in sizes.items() if path in model.trainable)
    return MemoryNeed(
        parameters=sum(sizes.values()) * torch.float32.itemsize,
        optimizer=held,
        per_sample=plan.batch_size * whole * plan.dtype.itemsize,
        kept=plan.stored_bytes,
    )
