"""Models as stacks of blocks: ``carry_0 = (), carry_i = block_i(params_i, carry_{i-1}, data), losses = carry_n``.

Each block names the leaves it uses by path, so that a loop can gather, differentiate and free one block at a time. Two
blocks that name one leaf share it (weight tying). The last block returns the loss of every sample, shape (batch,).

    >>> model = gpt(GPTConfig(layers=4, width=128, heads=4, context=128, vocab_size=256))
    >>> params = model.init(keys.key(0))
    >>> losses = model.loss(params, {"tokens": tokens})
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor

from fdp import keys, tree
from fdp.fingerprint import fingerprint
from fdp.init import Initialiser, constant
from fdp.types import Axis, FdpError, Key, Path, Tree


class LeafSpec(NamedTuple):
    """The specification of a parameter: its shape, its initialiser, and the dim that a tensor axis shards, if any."""

    shape: tuple[int, ...]
    init: Initialiser
    tensor_dim: int | None = None


class LossHead(NamedTuple):
    """The head of a language model: ``losses_b = sum_t weights_bt cross_entropy(features_bt W^T, targets_bt)``.

    ``features(params, carry, data)`` is the input of the head; ``weight`` names W in the block's params;
    ``targets(data)`` are the tokens to predict; ``weights(data)`` weighs them. A mean over all tokens is the default,
    and is used if ``weights(data)`` is None. With these parts, a head can be computed without storing all logits.
    """

    features: Callable[[Tree, Tree, Tree], Tensor]
    weight: str
    targets: Callable[[Tree], Tensor]
    weights: Callable[[Tree], Tensor | None] | None = None


class Likelihood(Enum):
    """The loss of scores z and target y: ``-log softmax(z)[y]`` or ``|z - y|^2 / 2``."""

    SOFTMAX = "softmax"
    SQUARED = "squared"


class Outputs(NamedTuple):
    """The losses of the last block as a sum of terms: ``losses_b = sum_t weights_bt l(scores_bt, targets_bt)``.

    ``scores(params, carry, data)`` is (batch, *positions, classes), ``targets(data)`` (batch, *positions), with classes
    at the end if squared; ``weights(data)`` is (batch, *positions), None for a mean over positions. If the scores are
    the output of a linear layer, ``weight`` names it in the block's params. ``present(data)`` is (batch, tokens), 0 for
    tokens that affect no term, such as padding; None: all tokens do.
    """

    scores: Callable[[Tree, Tree, Tree], Tensor]
    likelihood: Likelihood
    targets: Callable[[Tree], Tensor]
    weights: Callable[[Tree], Tensor] | None = None
    weight: str | None = None
    present: Callable[[Tree], Tensor | None] | None = None


class Block(NamedTuple):
    """One stage of a stack: ``carry = apply(params, carry, data)``.

    ``params`` is a tree of *paths*; ``apply`` receives the same tree with the leaves themselves. Blocks that compute
    the same function share one ``apply`` object. ``head`` and ``outputs`` describe the same function in parts. If
    ``compiled`` is False, the block runs eagerly even if blocks are compiled.
    """

    name: str
    params: Tree
    apply: Callable[[Tree, Tree, Tree], Tree]
    head: LossHead | None = None
    outputs: Outputs | None = None
    compiled: bool = True


class Model(NamedTuple):
    """A stack of blocks and the leaves they use.

    ``parallel(axis)`` returns the same model with its layers sharded over a tensor axis, None: not sharded; leaves and
    losses stay the same. ``tensor`` is that axis. Blocks with a leaf in ``materialized`` have their per-sample
    gradients materialised with every method, because they use operations without a rule. ``settings`` distinguishes
    models with the same name and leaves but different losses. ``remark`` is a note to users about how it is computed.
    """

    name: str
    leaves: dict[Path, LeafSpec]
    blocks: tuple[Block, ...]
    context: int | None = None
    vocab_size: int | None = None
    frozen: frozenset[Path] = frozenset()
    parallel: Callable[[Axis | None], Model] | None = None
    tensor: Axis | None = None
    materialized: frozenset[Path] = frozenset()
    settings: str | None = None
    remark: str | None = None

    def init(self, key: Key, *, dtype: torch.dtype = torch.float32) -> Tree:
        """Return the initial parameters, each leaf a function of (key, path)."""
        flat = {path: leaf.init(keys.fold_in(key, path), leaf.shape, dtype=dtype) for path, leaf in self.leaves.items()}
        return tree.nest(flat)

    def loss(self, params: Tree, data: Tree) -> Float[Tensor, " batch"]:
        """Return the loss of every sample."""
        flat = tree.flatten(params)
        carry: Tree = ()
        for block in self.blocks:
            carry = block.apply(tree.select(flat, block.params), carry, data)
        return carry

    @property
    def trainable(self) -> frozenset[Path]:
        """Return the paths of the leaves that are trained."""
        return frozenset(self.leaves) - self.frozen

    @property
    def identity(self) -> tuple[Any, ...]:
        """Return what distinguishes it from other models; the same on every mesh, however it is computed."""
        shapes = {path: tuple(leaf.shape) for path, leaf in self.leaves.items()}
        return self.name, self.context, self.vocab_size, shapes, self.trainable, self.settings


def from_loss(
    loss: Callable[[Tree, Tree], Tensor], params: Tree, *, name: str = "loss", outputs: Outputs | None = None
) -> Model:
    """Return a model of one block from any ``loss(params, data) -> (batch,)``, with the structure of ``params``.

    ``outputs`` describes the terms of the loss; its ``scores`` get an empty carry.
    """
    flat = tree.flatten(params)
    leaves = {path: LeafSpec(tuple(leaf.shape), constant(0.0)) for path, leaf in flat.items()}
    paths = tree.unflatten(params, {path: path for path in flat})
    block = Block(name, paths, lambda p, _, data: loss(p, data), outputs=outputs)
    return Model(name, leaves, (block,), settings=fingerprint(loss))


def check_losses(model: Model, losses: Tree, batch_size: int) -> Float[Tensor, " batch"]:
    """Return the output of the last block; raise if it is not the loss of every sample."""
    if isinstance(losses, Tensor) and tuple(losses.shape) == (batch_size,):
        return losses
    got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    raise FdpError(
        f"{model.name}: expected the loss of every sample, shape ({batch_size},), got {got}; do not average over the "
        f"batch (reduction='none', then a mean over everything but dimension 0)"
    )


def check_params(model: Model, params: Tree) -> None:
    """Refuse parameters that are not the model's: missing or extra leaves, shapes, integers, NaN or infinity."""
    flat = tree.flatten(params)
    missing, extra = sorted(set(model.leaves) - set(flat)), sorted(set(flat) - set(model.leaves))
    if missing or extra:
        raise FdpError(f"params of {model.name}: missing leaves {missing}, unknown leaves {extra}; use model.init(key)")
    owned = {path for block in model.blocks for path in tree.leaves(block.params)}
    if orphans := sorted(set(flat) - owned):
        raise FdpError(f"params of {model.name}: no block uses {orphans}; name them in a block or remove them")
    if unknown := sorted(model.frozen - set(flat)):
        raise FdpError(f"frozen leaves of {model.name}: expected paths of its leaves, got {unknown}")
    for path, leaf in flat.items():
        if tuple(leaf.shape) != tuple(model.leaves[path].shape):
            raise FdpError(f"{path}: expected shape {model.leaves[path].shape}, got {tuple(leaf.shape)}")
        if not leaf.is_floating_point():
            raise FdpError(f"{path}: expected a floating-point parameter, got {leaf.dtype}; convert it")
        part = leaf.to_local() if isinstance(leaf, DTensor) else leaf
        if not bool(torch.isfinite(part).all()):
            raise FdpError(f"{path}: holds NaN or infinity; start from finite parameters")
