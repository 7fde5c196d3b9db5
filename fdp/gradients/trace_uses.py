"""The uses of parameters, found by tracing a model on the shapes of a microbatch; nothing is computed.

    tape of a block = its uses of the leaves that are watched          blocks of one kind and shape are traced once

A foreign module's dimension of samples is found by its size, so a model is traced with two batch sizes: a dimension
that only happens to be as large is refused.

    >>> uses, layouts = trace_uses(model, flat, microbatch, torch.float32, model.trainable)
    >>> check_layouts(layouts, retrace_layouts(model, flat, microbatch, torch.float32, model.trainable), batch_size)
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fdp import tree
from fdp.gradients.tape import Tape, Use
from fdp.gradients.taps import batch_size_of, trace_tape
from fdp.model import Block, Model, check_losses
from fdp.types import FdpError, Flat, Path, Tree

RETRACE_BATCH_SIZES = (1009, 1013)
"""Batch sizes with which a model is traced a second time: primes, so that no dimension of a model is a multiple."""


def trace_model(
    model: Model, flat: Flat, microbatch: Tree, dtype: torch.dtype, watched: frozenset[Path]
) -> tuple[list[Tape | None], Tree]:
    """Return every block's tape of the leaves ``watched``, and the input of the last block; nothing is computed.

    Blocks with the same function and the same shapes are traced once. A tape is None if its block has no watched leaf
    and its inner shapes depend on the data.
    """
    meta = {path: leaf.new_empty((), dtype=dtype).expand(leaf.shape) for path, leaf in flat.items()}
    carry: Tree = ()
    tapes: list[Tape | None] = []
    traced: dict[Any, tuple[Block, Tape, Tree]] = {}
    for block in model.blocks:
        last, kind = carry, _kind(block, meta, watched, carry)
        try:
            if kind in traced:
                twin, tape, carry = traced[kind]
                tape = tape.renamed(dict(zip(tree.leaves(twin.params), tree.leaves(block.params))))
            else:
                tape, carry = trace_tape(block, meta, watched, carry, microbatch)
                traced[kind] = (block, tape, carry)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            tape, carry = None, _assume_output(model, block, carry, microbatch, watched, dtype, error)
        except RuntimeError as error:  # an operation without a shape rule for this dtype
            if watched & frozenset(tree.leaves(block.params)):
                raise
            tape, carry = None, _assume_output(model, block, carry, microbatch, watched, dtype, error)
        tapes.append(tape)
    check_losses(model, carry, batch_size_of(microbatch))
    return tapes, last


def _kind(block: Block, meta: Flat, watched: frozenset[Path], carry: Tree) -> Any:
    """Return what a trace of the block depends on, but for the names of its leaves."""
    paths = tree.leaves(block.params)
    leaves = [(paths.index(path), meta[path].shape, meta[path].device, path in watched) for path in paths]
    given = [(name, leaf.shape, leaf.dtype, leaf.device) for name, leaf in tree.flatten(carry).items()]
    # A path with "#" may be taken for the name of a use, which every trace checks.
    own = block.name if any("#" in path for path in paths) else None
    return id(block.apply), own, tuple(tree.flatten(block.params)), tuple(leaves), tuple(given)


def trace_uses(
    model: Model, flat: Flat, microbatch: Tree, dtype: torch.dtype, watched: frozenset[Path]
) -> tuple[tuple[tuple[Use, ...], ...], list[tuple[Path, str]]]:
    """Return the uses of every block, and in which dimension a foreign module has its samples, by leaf."""
    tapes, _ = trace_model(model, flat, microbatch, dtype, watched)
    uses = tuple(() if tape is None else tuple(tape.uses) for tape in tapes)
    return uses, [layout for tape in tapes if tape is not None for layout in tape.layouts]


def retrace_layouts(
    model: Model, flat: Flat, microbatch: Tree, dtype: torch.dtype, watched: frozenset[Path]
) -> list[tuple[Path, str]]:
    """Trace with another batch size, to refuse a dimension that only happens to equal it, or a multiple of it."""
    size = next(other for other in RETRACE_BATCH_SIZES if batch_size_of(microbatch) % other)
    more = tree.map(lambda leaf: leaf[:1].expand(size, *leaf.shape[1:]), microbatch)
    return trace_uses(model, flat, more, dtype, watched)[1]


def check_no_draws(
    model: Model, flat: Flat, microbatch: Tree, dtype: torch.dtype, watched: frozenset[Path], method: str
) -> None:
    """Refuse a model that draws random numbers, for a method that computes it again for the sum."""
    tapes, _ = trace_model(model, flat, microbatch, dtype, watched)
    if draws := sorted(set().union(*(tape.draws for tape in tapes if tape is not None))):
        raise FdpError(
            f"{model.name}: expected a model that computes the same twice, since {method} goes back a second time for "
            f"the sum, got one that draws random numbers ({', '.join(draws)}): a sample's norm would be that of "
            f"another gradient than the sum adds. Use the method 'auto' without a memory budget, or draw from a "
            f"key in the data"
        )


def _assume_output(
    model: Model,
    block: Block,
    carry: Tree,
    microbatch: Tree,
    watched: frozenset[Path],
    dtype: torch.dtype,
    error: Exception,
) -> Tree:
    """Return a stand-in for the output of a materialised block whose shapes depend on the data.

    The last block returns losses; any other block is assumed to return a carry like its input.
    """
    if watched & frozenset(tree.leaves(block.params)):
        raise FdpError(
            f"{block.name}: {error} has a shape or a branch that depends on the data, so that no uses can be planned; "
            f"materialise the block's per-sample gradients, which is exact and slower (from_module(..., "
            f"materialize=...), or the method 'materialize'), or compute the same for every sample (experts by einsum "
            f"over all of them)"
        ) from error
    if block is not model.blocks[-1] and not tree.leaves(carry):
        raise FdpError(
            f"{block.name}: {error} has a shape that depends on the data, so that the shape of its output is not known "
            f"before it runs; take the module as one block (blocks=None)"
        ) from error
    last = block is model.blocks[-1]
    return tree.leaves(microbatch)[0].new_empty(batch_size_of(microbatch), dtype=dtype) if last else carry


def check_layouts(found: list[tuple[Path, str]], again: list[tuple[Path, str]], batch_size: int) -> None:
    """Refuse a foreign module whose sample dimensions, found by shape, change with the batch size."""
    if batch_size == 1 or found == again:  # every dimension of size 1 could be that of one sample
        return
    pairs = zip(found, again)
    (path, here), (_, there) = next((pair for pair in pairs if pair[0] != pair[1]), (found[-1], again[-1]))
    raise FdpError(
        f"{path}: the dimension of the samples is ambiguous: with {batch_size} samples it was found as ({here}), with "
        f"another number as ({there}). Some other dimension happens to be {batch_size}, or a multiple. Use another "
        f"microbatch size"
    )
