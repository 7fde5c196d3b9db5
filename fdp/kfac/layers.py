"""The layers that K-FAC preconditions: each weight together with the bias that is always added to its output.

A layer's gradient is a matrix (rows, columns):

    linear layer, convolution    (outputs, inputs * kernel), with the bias as the last column
    ``x W``                      (inputs, outputs)
    experts                      (experts * inputs, outputs)
    embedding                    (vocabulary, features)
    anything else                one column of all elements, known by their squares only: norm scales, positions,
                                 other biases, and blocks with materialised per-sample gradients

    >>> found = survey(model, params, microbatch)
    >>> found.layers                                        # (Layer("head.weight", "head.bias"), ...)
    >>> to_matrix(layer, found.shapes[layer], gradients)    # (rows, columns)
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
from fdp.gradients.plan import Method, Plan, make_plan
from fdp.gradients.rules import OneHot, Pair
from fdp.gradients.tape import EXPANDED, Tape, Use
from fdp.gradients.taps import trace_tape
from fdp.gradients.trace_uses import trace_model
from fdp.kfac.types import Layer
from fdp.model import Block, Model
from fdp.types import Flat, Path, Tree


class LeafUse(NamedTuple):
    """One use of a leaf: its block, and the sizes of its record (``fdp.gradients.rules.Pair``).

    ``use``: None if the block materialises per-sample gradients. ``pair``: the record has two sides, else it is a
    per-sample gradient. ``inputs_left``: inputs are on the left and output gradients on the right, else the other way
    round. ``one_hot``: inputs are an embedding's token ids. ``tokens``: positions per sample. ``leading``: the number
    of dims of the leaf that are rows.
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
    def elementwise(cls, block: int, use: Use | None) -> LeafUse:
        """Return a use whose record is a per-sample gradient."""
        return cls(block, use, False, False, False, 1, 1, 0)


class Survey(NamedTuple):
    """The layers of a model and their uses, for one shape of microbatch.

    ``shapes``: the (rows, columns) of each layer, of full leaves and with the bias. ``uses``: the uses of each layer's
    weight in all blocks. ``scores_shape``: of the last block's scores; None if it has no ``outputs``.
    """

    plan: Plan
    layers: tuple[Layer, ...]
    shapes: dict[Layer, tuple[int, int]]
    uses: dict[Layer, tuple[LeafUse, ...]]
    scores_shape: tuple[int, ...] | None

    def uses_in(self, layer: Layer, block: int) -> list[LeafUse]:
        """Return the uses of a layer's weight in one block, in the order of their records."""
        return [use for use in self.uses[layer] if use.block == block]

    def is_elementwise(self, layer: Layer) -> bool:
        """Return True if the layer is one column of elements, because its uses do not share the same two sides."""
        uses = self.uses[layer]
        return not all(use.pair for use in uses) or len({(use.leading, use.groups) for use in uses}) > 1

    def groups(self, layer: Layer) -> int:
        """Return the number of groups of a convolution, or of experts: parts of the rows with inputs of their own."""
        return 1 if self.is_elementwise(layer) else self.uses[layer][0].groups


def survey(model: Model, params: Tree, microbatch: Tree, *, dtype: torch.dtype = torch.float32) -> Survey:
    """Trace ``model`` on the shapes of ``microbatch`` without computing anything.

    Guarantees:
      - every trainable leaf is in exactly one layer;
      - a bias is a weight's last column only if it is added to the output of every use of it, and nowhere else.
    """
    plan = make_plan(model, params, microbatch, method=Method.GHOST_BK, dtype=dtype)
    flat = tree.flatten(params)
    materialised = frozenset(path for path, choice in plan.choices.items() if choice.norm is NormBy.VMAP)
    tapes, last = trace_model(model, flat, microbatch, dtype, model.trainable - materialised)
    uses: dict[Path, list[LeafUse]] = {path: [] for path in model.leaves if path in model.trainable}
    for i, (block, tape) in enumerate(zip(model.blocks, tapes)):
        if tape is not None:
            for use in tape.uses:
                uses[use.path].append(_leaf_use(i, tape, use, dtype))
        for path in dict.fromkeys(path for path in tree.leaves(block.params) if path in materialised):
            uses[path].append(LeafUse.elementwise(i, None))
    weight_of = _pair_biases([tape for tape in tapes if tape is not None], uses)
    bias_of = {weight: bias for bias, weight in weight_of.items()}
    layers = tuple(Layer(path, bias_of.get(path)) for path in uses if path not in weight_of)
    by_layer = {layer: tuple(uses[layer.weight]) for layer in layers}
    shapes = {layer: _shape(layer, model.leaves[layer.weight].shape, each) for layer, each in by_layer.items()}
    return Survey(plan, layers, shapes, by_layer, _scores_shape(model, flat, last, microbatch, dtype))


def to_matrix(layer: Layer, shape: tuple[int, int], flat: Flat) -> Float[Tensor, "rows columns"]:
    """Return a layer's leaves (parameters or gradients) as one matrix, with the bias as the last column."""
    rows = shape[0]
    weight = flat[layer.weight].reshape(rows, -1)
    return weight if layer.bias is None else torch.cat([weight, flat[layer.bias].reshape(rows, 1)], 1)


def to_leaves(layer: Layer, value: Float[Tensor, "rows columns"], like: Flat) -> Flat:
    """Split a layer's matrix into its leaves, in the shapes of ``like``; the inverse of :func:`to_matrix`."""
    if layer.bias is None:
        return {layer.weight: value.reshape(like[layer.weight].shape)}
    weight, bias = value[:, :-1], value[:, -1]
    return {
        layer.weight: weight.reshape(like[layer.weight].shape),
        layer.bias: bias.reshape(like[layer.bias].shape),
    }


def _leaf_use(block: int, tape: Tape, use: Use, dtype: torch.dtype) -> LeafUse:
    if use.rule == EXPANDED:
        return LeafUse.elementwise(block, use)
    rule, options = tape.rules[use.name]
    x = tape.inputs[use.name].detach()  # a fake tensor, so the record is fake too
    g = x.new_empty(use.output_shape, dtype=dtype)
    with torch.enable_grad():  # the side that requires a gradient is the side of the inputs
        record = rule.record(x.requires_grad_() if x.is_floating_point() else x, g, use.leaf_shape, **options)
    if not isinstance(record, Pair):
        return LeafUse.elementwise(block, use)
    _, groups, tokens, columns = record.right.shape
    one_hot = isinstance(record.left, OneHot)
    rows = math.prod(use.leaf_shape) // columns
    leading = next((k for k in range(1, 1 + len(use.leaf_shape)) if math.prod(use.leaf_shape[:k]) == rows), 0)
    inputs_left = isinstance(record.left, OneHot) or record.left.requires_grad
    return LeafUse(block, use, leading > 0, inputs_left, one_hot, groups, tokens, leading)


def _pair_biases(tapes: list[Tape], uses: dict[Path, list[LeafUse]]) -> dict[Path, Path]:
    """Return ``{bias: weight}`` for biases that are added to the output of every use of the weight, and only there."""
    added: dict[Path, list[Path]] = {}
    for tape in tapes:
        path_of = {use.name: use.path for use in tape.uses}
        for bias, name in tape.additions:
            added.setdefault(bias, []).append(path_of[name])
    expanded = [path for tape in tapes for path in tape.expansions]
    pairs = {}
    for bias, weights in added.items():
        weight = weights[0]
        always = weights == [weight] * len(uses[weight]) and expanded.count(bias) == len(weights)
        only = not any(weight in others for other, others in added.items() if other != bias)
        sizes = [use.leaf_shape for use in (uses[bias][0].use, uses[weight][0].use) if use is not None]
        fits = len(sizes) == 2 and sizes[0] == sizes[1][:1]
        if always and only and fits and all(use.pair and not use.inputs_left for use in uses[weight]):
            pairs[bias] = weight
    return pairs


def _shape(layer: Layer, leaf: tuple[int, ...], uses: tuple[LeafUse, ...]) -> tuple[int, int]:
    leading = uses[0].leading
    if len({(use.leading, use.groups) for use in uses}) > 1 or not leading:
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
        _, scores = trace_tape(Block(last.name, last.params, last.outputs.scores), meta, frozenset(), carry, microbatch)
    except (DynamicOutputShapeException, DataDependentOutputException):
        return None
    return tuple(scores.shape)
