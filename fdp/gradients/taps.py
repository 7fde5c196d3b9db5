"""Taps: per-sample output gradients as true derivatives, without hooks.

For an operation ``y = op(x, w)`` inside a block, add a zero to its output, ``y = op(x, w) + tap``. The derivative of
the loss with respect to ``tap`` *is* the output gradient ``g`` of every sample; ``g`` and the input ``x`` determine the
gradient of ``w``. A small parameter (bias, scale) is tapped by expanding it to one copy per sample: the derivative with
respect to the copies is the per-sample gradient itself.

    >>> uses, _ = trace(block, leaves, carry, data)                       # shapes only: which ops use which leaf
    >>> out, pull = tapped_vjp(block, weights, carry, data, uses)
    >>> carry_gradient, records = pull(out_gradient)                      # records: {path: [Pair or Dense, ...]}

Each run of a block records its uses of the leaves on a :class:`fdp.gradients.tape.Tape`, which also adds the taps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fdp import tree
from fdp.gradients.random_draws import RandomDraws
from fdp.gradients.rules import Dense, Record, Rule
from fdp.gradients.tape import EXPANDED, Tape, Use, Watched
from fdp.gradients.vjp import vjp
from fdp.types import FdpError, Flat, Path, Tree


def trace(
    block: Any, leaves: Mapping[Path, Tensor], trainable: frozenset[Path], carry: Tree, data: Tree
) -> tuple[tuple[Use, ...], Tree]:
    """Return the uses of every trainable leaf in ``block`` and its fake output, without computing anything.

    Tensors may be real or fake; only shapes, dtypes and devices are read.
    """
    tape, out = trace_tape(block, leaves, trainable, carry, data)
    return tuple(tape.uses), out


def trace_tape(
    block: Any,
    leaves: Mapping[Path, Tensor],
    trainable: frozenset[Path],
    carry: Tree,
    data: Tree,
    *,
    attached: bool = False,
) -> tuple[Tape, Tree]:
    """Return the tape of a trace (uses, rules, options, biases if ``attached``) and the fake output."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(leaf: Tensor) -> Tensor:
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)

    weights = {path: fake(leaves[path]) for path in tree.leaves(block.params)}
    tape = Tape(batch_size_of(data), None, attached=attached)
    with mode, RandomDraws(tape.draws), torch.no_grad():
        out = block.apply(watch(block, weights, trainable, tape), tree.map(fake, carry), tree.map(fake, data))
    tape.written_outputs()
    names = [use.name for use in tape.uses]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FdpError(
            f"{block.name}: expected distinct names of uses, got {twice} twice; rename leaves that contain '#'"
        )
    return tape, out


def tapped_vjp(
    block: Any, weights: Flat, carry: Tree, data: Tree, uses: tuple[Use, ...], trainable: frozenset[Path]
) -> tuple[Tree, Callable[[Tree], tuple[Tree, dict[Path, list[Record]]]]]:
    """Return a block's output, and the pull-back of an output gradient to its carry and its leaves' records.

    Weights are constants of the differentiation: no weight gradient is computed here.
    """
    batch_size = batch_size_of(data)
    rules: dict[str, tuple[Rule, dict[str, Any]]] = {}

    def run(carry: Tree, taps: Flat):
        tape = Tape(batch_size, taps)
        out = block.apply(watch(block, weights, trainable, tape), carry, data)
        tape.check_met(block.name)
        rules.update(tape.rules)
        return out, tape.inputs

    out, pull, inputs = vjp(run, carry, make_taps(uses, weights))

    def pull_records(gradient: Tree) -> tuple[Tree, dict[Path, list[Record]]]:
        carry_gradient, tap_gradients = pull(gradient)
        return carry_gradient, records_of(uses, rules, inputs, tap_gradients)

    return out, pull_records


def records_of(
    uses: tuple[Use, ...], rules: Mapping[str, tuple[Rule, dict[str, Any]]], inputs: Flat, tap_gradients: Flat
) -> dict[Path, list[Record]]:
    """Return the records of each leaf: by rule from input and output gradient, or the per-sample gradient itself."""
    records: dict[Path, list[Record]] = {}
    for use in uses:
        g = tap_gradients[use.name]
        if use.rule == EXPANDED:
            record = Dense(g)
        else:
            rule, options = rules[use.name]
            record = rule.record(inputs[use.name], g, use.leaf_shape, **options)
        records.setdefault(use.path, []).append(record)
    return records


def batch_size_of(data: Tree) -> int:
    """Return the leading size that all leaves of ``data`` share; it may be a variable of code that is compiled."""
    leaves = tree.leaves(data)
    if not leaves or any(leaf.ndim == 0 or leaf.shape[0] != leaves[0].shape[0] for leaf in leaves):
        sizes = {path: tuple(leaf.shape[:1]) for path, leaf in tree.flatten(data).items()}
        raise FdpError(f"batch: expected every leaf to have the same leading sample dimension, got sizes {sizes}")
    return leaves[0].shape[0]


def make_taps(uses: tuple[Use, ...], weights: Flat, zeros: Mapping[str, Tensor] | None = None) -> Flat:
    """Return a tap for every use: expanded zeros, which take no memory, or one copy of a small parameter per sample.

    ``zeros`` is the result of :func:`zeros_of` for the same uses; default: computed here.
    """
    zeros = zeros_of(uses, weights) if zeros is None else zeros
    return {use.name: zeros.get(use.name, weights[use.path]).expand(use.output_shape) for use in uses}


def zeros_of(uses: tuple[Use, ...], weights: Flat) -> dict[str, Tensor]:
    """Return a zero for every use whose tap is zeros, in the dtype and on the device of its leaf."""
    return {use.name: weights[use.path].new_zeros(()) for use in uses if use.rule != EXPANDED}


def watch(block: Any, weights: Flat, trainable: frozenset[Path], tape: Tape) -> Tree:
    """Return the block's parameters, the trainable ones as :class:`Watched` values that record on ``tape``."""
    leaves = {p: Watched(w, p, tape) if p in trainable else w for p, w in weights.items()}
    return tree.select(leaves, block.params)
