"""Small classifiers: logistic regression, a multilayer perceptron, a convolutional net. Loss: cross-entropy.

Data is ``{"image": (batch, ...), "label": (batch,)}``.

    >>> model = cnn(channels=(16, 32), side=8, classes=10)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fdp import ops, tree
from fdp.init import constant, normal
from fdp.model import Block, LeafSpec, Likelihood, Model, Outputs
from fdp.types import Path, Tree


def logistic(*, inputs: int, classes: int, name: str = "logistic") -> Model:
    """``softmax(W x + b)``."""
    return mlp(widths=(inputs,), classes=classes, name=name)


def mlp(*, widths: Sequence[int], classes: int, name: str = "mlp") -> Model:
    """Return a perceptron with ``widths[0]`` inputs, a tanh layer per further width, and a linear head."""
    leaves: dict[Path, LeafSpec] = {}
    blocks = []
    for i, (inputs, outputs) in enumerate(pairwise(widths)):
        leaves |= _dense_leaves(f"layers.{i}", inputs, outputs)
        paths = {"weight": f"layers.{i}.weight", "bias": f"layers.{i}.bias"}
        blocks.append(Block(f"layers.{i}", paths, _tanh_layer))
    leaves |= _dense_leaves("head", widths[-1], classes)
    blocks.append(_head_block())
    return Model(name, leaves, tuple(blocks))


def cnn(*, channels: Sequence[int], side: int, classes: int, inputs: int = 1, name: str = "cnn") -> Model:
    """Return 3x3 convolutions with tanh, each but the first halving the side, and a linear head.

    Bounded activations work well under clipping: Papernot et al. 2021, arXiv 2007.14191.
    """
    leaves: dict[Path, LeafSpec] = {}
    blocks = []
    previous = inputs
    for i, filters in enumerate(channels):
        scale = 1 / math.sqrt(9 * previous)
        leaves[f"layers.{i}.weight"] = LeafSpec((filters, previous, 3, 3), normal(scale))
        leaves[f"layers.{i}.bias"] = LeafSpec((filters,), constant(0.0))
        paths = {"weight": f"layers.{i}.weight", "bias": f"layers.{i}.bias"}
        blocks.append(Block(f"layers.{i}", paths, partial(_conv_layer, stride=1 if i == 0 else 2)))
        side = side if i == 0 else math.ceil(side / 2)
        previous = filters
    leaves |= _dense_leaves("head", previous * side * side, classes)
    blocks.append(_head_block())
    return Model(name, leaves, tuple(blocks))


def logits(model: Model, params: Tree, data: Tree) -> Float[Tensor, "batch classes"]:
    """Return the scores before the softmax, for prediction."""
    flat = tree.flatten(params)
    carry: Tree = ()
    for block in model.blocks[:-1]:
        carry = block.apply(tree.select(flat, block.params), carry, data)
    return _scores(tree.select(flat, model.blocks[-1].params), carry, data)


def _head_block() -> Block:
    outputs = Outputs(_scores, Likelihood.SOFTMAX, _labels, weight="weight")
    return Block("head", {"weight": "head.weight", "bias": "head.bias"}, _classify, outputs=outputs)


def _dense_leaves(name: str, inputs: int, outputs: int) -> dict[Path, LeafSpec]:
    return {
        f"{name}.weight": LeafSpec((outputs, inputs), normal(1 / math.sqrt(inputs))),
        f"{name}.bias": LeafSpec((outputs,), constant(0.0)),
    }


def _input(carry: Tree, data: Tree, dtype: torch.dtype) -> Tensor:
    return carry if isinstance(carry, Tensor) else data["image"].to(dtype)


def _tanh_layer(p: Tree, carry: Tree, data: Tree) -> Tensor:
    return ops.linear(_input(carry, data, p["weight"].dtype).flatten(1), p["weight"], p["bias"]).tanh()


def _conv_layer(p: Tree, carry: Tree, data: Tree, *, stride: int) -> Tensor:
    x = _input(carry, data, p["weight"].dtype)
    return ops.conv2d(x, p["weight"], p["bias"], stride=stride, padding=1).tanh()


def _scores(p: Tree, carry: Tree, data: Tree) -> Tensor:
    return ops.linear(_input(carry, data, p["weight"].dtype).flatten(1), p["weight"], p["bias"])


def _labels(data: Tree) -> Tensor:
    return data["label"]


def _classify(p: Tree, carry: Tree, data: Tree) -> Float[Tensor, " batch"]:
    scores = _scores(p, carry, data)
    wide = scores if scores.element_size() >= 4 else scores.float()
    return F.cross_entropy(wide, data["label"], reduction="none")
