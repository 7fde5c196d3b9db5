"""What K-FAC preconditions together: every weight with the bias that is always added to its output.

A layer's gradient is a matrix (rows, columns): of a linear layer or a convolution W as (outputs, inputs * kernel), its
bias the last column; of an embedding its table; of anything else (norm scales, positions, biases of their own) all its
elements as one column, of which K-FAC knows no more than their squares.

    >>> known = survey(model, params, microbatch)
    >>> known.layers                                        # (Layer("head.weight", "head.bias"), ...)
    >>> joined(layer, known.shapes[layer], gradients)       # (rows, columns)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.kfac.types import Layer
from fdp.methods import Method, Plan, make_plan
from fdp.model import Block, Model
from fdp.rules import OneHot, Pair
from fdp.taps import EXPANDED, Tape, Use, traced
from fdp.types import Flat, Path, Tree


class Met(NamedTuple):
    """One use of a leaf: the sizes of its record (``fdp.rules.Pair``), tokens for each sample.

    ``pair`` False: its per-sample gradient is all there is. ``one_hot``: its inputs are on the left, output gradients
    on the right; else the other way round.
    """

    use: Use
    pair: bool
    one_hot: bool
    groups: int
    tokens: int


class Survey(NamedTuple):
    """What a pass over a model meets, for one shape of microbatch.

    ``shapes``: each layer's (rows, columns), of whole leaves, the bias included. ``met``: the uses of each layer's
    weight, of all blocks. ``scores``: the shape of the last block's scores, where it has ``outputs``.
    """

    plan: Plan
    layers: tuple[Layer, ...]
    shapes: dict[Layer, tuple[int, int]]
    met: dict[Layer, tuple[Met, ...]]
    scores: tuple[int, ...] | None

    def small(self, layer: Layer) -> bool:
        """Whether the layer is one column of elements, because some use of it has no two sides."""
        return not all(met.pair for met in self.met[layer])


def survey(model: Model, params: Tree, microbatch: Tree, *, dtype: torch.dtype = torch.float32) -> Survey:
    """Trace ``model`` on the shapes of ``microbatch``; nothing is computed.

    Guarantees:
      - every trainable leaf is in exactly one layer;
      - a bias is a weight's last column only if it is added to the output of every use of it, and nowhere else.
    """
    plan = make_plan(model, params, microbatch, method=Method.GHOST_BK, dtype=dtype)
    meta = {path: leaf.new_empty((), dtype=dtype).expand(leaf.shape) for path, leaf in tree.flatten(params).items()}
    tapes: list[Tape] = []
    carry: Tree = ()
    for block in model.blocks:
        last = carry
        tape, carry = traced(block, meta, model.trainable, carry, microbatch)
        tapes.append(tape)
    met: dict[Path, list[Met]] = {path: [] for path in model.leaves if path in model.trainable}
    for tape in tapes:
        for use in tape.uses:
            met[use.path].append(_met(tape, use, dtype))
    weights_of = _paired(tapes, met)
    bias_of = {weight: bias for bias, weight in weights_of.items()}
    layers = tuple(Layer(path, bias_of.get(path)) for path in met if path not in weights_of)
    by_layer = {layer: tuple(met[layer.weight]) for layer in layers}
    shapes = {layer: _shape(layer, model.leaves[layer.weight].shape, uses) for layer, uses in by_layer.items()}
    return Survey(plan, layers, shapes, by_layer, _scores_shape(model, meta, last, microbatch))


def layers_of(model: Model, params: Tree, microbatch: Tree) -> tuple[Layer, ...]:
    """The layers of ``model``, in the order of its leaves."""
    return survey(model, params, microbatch).layers


def joined(layer: Layer, shape: tuple[int, int], flat: Flat) -> Float[Tensor, "rows columns"]:
    """A layer's leaves (parameters, gradients) as one matrix."""
    rows = shape[0]
    weight = flat[layer.weight].reshape(rows, -1)
    return weight if layer.bias is None else torch.cat([weight, flat[layer.bias].reshape(rows, 1)], 1)


def parted(layer: Layer, value: Float[Tensor, "rows columns"], like: Flat) -> Flat:
    """A layer's matrix as its leaves, in the shapes of ``like``; undoes :func:`joined`."""
    if layer.bias is None:
        return {layer.weight: value.reshape(like[layer.weight].shape)}
    weight, bias = value[:, :-1], value[:, -1]
    return {
        layer.weight: weight.reshape(like[layer.weight].shape),
        layer.bias: bias.reshape(like[layer.bias].shape),
    }


def _met(tape: Tape, use: Use, dtype: torch.dtype) -> Met:
    if use.rule == EXPANDED:
        return Met(use, pair=False, one_hot=False, groups=1, tokens=1)
    rule, options = tape.rules[use.name]
    x = tape.inputs[use.name]  # a tensor without values, and so will the record be
    g = x.new_empty(use.output_shape, dtype=dtype)
    record = rule.record(x, g, use.leaf_shape, **options)
    if not isinstance(record, Pair):
        return Met(use, pair=False, one_hot=False, groups=1, tokens=1)
    return Met(use, True, isinstance(record.left, OneHot), record.right.shape[1], record.right.shape[2])


def _paired(tapes: list[Tape], met: dict[Path, list[Met]]) -> dict[Path, Path]:
    """``{bias: weight}``, where one is added whenever the other is used and never else."""
    added: dict[Path, list[Path]] = {}
    for tape in tapes:
        path_of = {use.name: use.path for use in tape.uses}
        for bias, name in tape.additions:
            added.setdefault(bias, []).append(path_of[name])
    expanded = [path for tape in tapes for path in tape.expansions]
    pairs = {}
    for bias, weights in added.items():
        weight = weights[0]
        together = weights == [weight] * len(met[weight]) and expanded.count(bias) == len(weights)
        alone = not any(weight in others for other, others in added.items() if other != bias)
        fits = met[bias][0].use.leaf_shape == met[weight][0].use.leaf_shape[:1]
        if together and alone and fits and all(use.pair and not use.one_hot for use in met[weight]):
            pairs[bias] = weight
    return pairs


def _shape(layer: Layer, leaf: tuple[int, ...], met: tuple[Met, ...]) -> tuple[int, int]:
    if not all(use.pair for use in met):
        return math.prod(leaf), 1
    return leaf[0], math.prod(leaf[1:]) + (layer.bias is not None)


def _scores_shape(model: Model, meta: Flat, carry: Tree, microbatch: Tree) -> tuple[int, ...] | None:
    last = model.blocks[-1]
    if last.outputs is None:
        return None
    _, scores = traced(Block(last.name, last.params, last.outputs.scores), meta, frozenset(), carry, microbatch)
    return tuple(scores.shape)
