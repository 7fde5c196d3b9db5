"""What K-FAC preconditions together: every weight with the bias that is always added to its output.

A layer's gradient is a matrix (rows, columns): of a linear layer or a convolution W as (outputs, inputs * kernel), its
bias the last column; of ``x W`` as W has them, inputs first; of W_e of several experts as (experts * inputs, outputs);
of an embedding its table; of anything else (norm scales, positions, biases of their own, blocks whose per-sample
gradients are made whole) all its elements as one column, of which K-FAC knows no more than their squares.

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
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fdp import tree
from fdp.gradients.costs import NormBy
from fdp.gradients.plan import Method, Plan, make_plan, trace_model
from fdp.gradients.rules import OneHot, Pair
from fdp.gradients.taps import EXPANDED, Tape, Use, traced
from fdp.kfac.types import Layer
from fdp.model import Block, Model
from fdp.types import Flat, Path, Tree


class Met(NamedTuple):
    """One use of a leaf: its block, and the sizes of its record (``fdp.gradients.rules.Pair``), tokens for each sample.

    ``use`` None: its per-sample gradient is all there is, as where ``pair`` is False. ``inputs_left``: its inputs are
    on the left, output gradients on the right; else the other way round. ``one_hot``: they are an embedding's.
    ``leading``: how many dims of the leaf are rows.
    """

    block: int
    use: Use | None
    pair: bool
    inputs_left: bool
    one_hot: bool
    groups: int
    tokens: int
    leading: int

    @classmethod
    def small(cls, block: int, use: Use | None) -> Met:
        """A use without two sides."""
        return cls(block, use, False, False, False, 1, 1, 0)


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

    def uses_in(self, layer: Layer, block: int) -> list[Met]:
        """The uses of a layer's weight in one block, in the order of their records."""
        return [met for met in self.met[layer] if met.block == block]

    def small(self, layer: Layer) -> bool:
        """Whether the layer is one column of elements, because its uses have not all the same two sides."""
        met = self.met[layer]
        return not all(use.pair for use in met) or len({(use.leading, use.groups) for use in met}) > 1

    def groups(self, layer: Layer) -> int:
        """Of a convolution, or experts: how many parts of its rows have inputs, and a product, of their own."""
        return 1 if self.small(layer) else self.met[layer][0].groups


def survey(model: Model, params: Tree, microbatch: Tree, *, dtype: torch.dtype = torch.float32) -> Survey:
    """Trace ``model`` on the shapes of ``microbatch``; nothing is computed.

    Guarantees:
      - every trainable leaf is in exactly one layer;
      - a bias is a weight's last column only if it is added to the output of every use of it, and nowhere else.
    """
    plan = make_plan(model, params, microbatch, method=Method.GHOST_BK, dtype=dtype)
    flat = tree.flatten(params)
    whole = frozenset(path for path, choice in plan.choices.items() if choice.norm is NormBy.VMAP)
    tapes, last = trace_model(model, flat, microbatch, dtype, model.trainable - whole)
    met: dict[Path, list[Met]] = {path: [] for path in model.leaves if path in model.trainable}
    for i, (block, tape) in enumerate(zip(model.blocks, tapes)):
        if tape is not None:
            for use in tape.uses:
                met[use.path].append(_met(i, tape, use, dtype))
        for path in dict.fromkeys(path for path in tree.leaves(block.params) if path in whole):
            met[path].append(Met.small(i, None))
    weights_of = _paired([tape for tape in tapes if tape is not None], met)
    bias_of = {weight: bias for bias, weight in weights_of.items()}
    layers = tuple(Layer(path, bias_of.get(path)) for path in met if path not in weights_of)
    by_layer = {layer: tuple(met[layer.weight]) for layer in layers}
    shapes = {layer: _shape(layer, model.leaves[layer.weight].shape, uses) for layer, uses in by_layer.items()}
    return Survey(plan, layers, shapes, by_layer, _scores_shape(model, flat, last, microbatch, dtype))


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


def _met(block: int, tape: Tape, use: Use, dtype: torch.dtype) -> Met:
    if use.rule == EXPANDED:
        return Met.small(block, use)
    rule, options = tape.rules[use.name]
    x = tape.inputs[use.name].detach()  # a tensor without values, and so will the record be
    g = x.new_empty(use.output_shape, dtype=dtype)
    with torch.enable_grad():  # what depends on x is the side of the inputs
        record = rule.record(x.requires_grad_() if x.is_floating_point() else x, g, use.leaf_shape, **options)
    if not isinstance(record, Pair):
        return Met.small(block, use)
    _, groups, tokens, columns = record.right.shape
    one_hot = isinstance(record.left, OneHot)
    rows = math.prod(use.leaf_shape) // columns
    leading = next((k for k in range(1, 1 + len(use.leaf_shape)) if math.prod(use.leaf_shape[:k]) == rows), 0)
    inputs_left = isinstance(record.left, OneHot) or record.left.requires_grad
    return Met(block, use, leading > 0, inputs_left, one_hot, groups, tokens, leading)


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
        sizes = [use.leaf_shape for use in (met[bias][0].use, met[weight][0].use) if use is not None]
        fits = len(sizes) == 2 and sizes[0] == sizes[1][:1]
        if together and alone and fits and all(use.pair and not use.inputs_left for use in met[weight]):
            pairs[bias] = weight
    return pairs


def _shape(layer: Layer, leaf: tuple[int, ...], met: tuple[Met, ...]) -> tuple[int, int]:
    leading = met[0].leading
    if len({(use.leading, use.groups) for use in met}) > 1 or not leading:
        return math.prod(leaf), 1
    return math.prod(leaf[:leading]), math.prod(leaf[leading:]) + (layer.bias is not None)


def _scores_shape(
    model: Model, flat: Flat, carry: Tree, microbatch: Tree, dtype: torch.dtype
) -> tuple[int, ...] | None:
    last = model.blocks[-1]
    if last.outputs is None:
        return None
    meta = {path: flat[path].new_empty((), dtype=dtype).expand(flat[path].shape) for path in tree.leaves(last.params)}
    try:
        _, scores = traced(Block(last.name, last.params, last.outputs.scores), meta, frozenset(), carry, microbatch)
    except (DynamicOutputShapeException, DataDependentOutputException):
        return None
    return tuple(scores.shape)
