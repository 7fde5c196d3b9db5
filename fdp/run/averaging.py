"""The exponential moving average of the parameters over the steps of a run.

    avg_t = sum_s d^(t-s) theta_s / sum_s d^(t-s)                 over s = 1 .. t, the parameters after every step
          = avg_(t-1) + w_t (theta_t - avg_(t-1)),                w_t = (1 - d) / (1 - d^t)

The weights sum to 1 from the first step on (w_1 = 1), so that a short run needs no correction. It depends on the data
only through the parameters: the average is post-processing and costs nothing. Private training gains most from it,
since it averages the noise of about 1 / (1 - d) steps (De et al. 2022, arXiv 2204.13650).

    >>> average = start_average(state.params, model.trainable)
    >>> average = update_average(average, state.params, decay=0.99, step=int(state.step))
    >>> params = replace_leaves(state.params, average)
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.parallel.dtensors import local_shard, shard_like
from fdp.types import FdpError, Flat, Path, Tree


def check_decay(decay: float) -> None:
    """Refuse a decay outside [0, 1)."""
    if not 0 <= decay < 1:
        raise FdpError(f"--ema: expected a decay of at least 0 and below 1, such as 0.99, got {decay:g}")


def start_average(params: Tree, trainable: Collection[Path]) -> Flat:
    """Return the average before the first step: copies of the leaves that are trained, full or sharded like them."""
    return copy_leaves({path: leaf for path, leaf in tree.flatten(params).items() if path in trainable})


def update_average(average: Flat, params: Tree, *, decay: float, step: int) -> Flat:
    """Return the average after ``step`` steps, in new tensors, from that after one less and the parameters.

    Guarantees:
      - after one step it is the parameters, bit for bit; a leaf that never changes stays as it is;
      - a function of the values alone: the same on any number of ranks and after a restart.
    """
    weight, flat = average_weight(decay, step), tree.flatten(params)
    return {path: _blend(leaf, flat[path], weight) for path, leaf in average.items()}


def average_weight(decay: float, step: int) -> float:
    """Return ``w_t = (1 - d) / (1 - d^t)`` for t = ``step``, from 1 on."""
    if step < 1:
        raise FdpError(f"average: expected the number of a step, from 1 on, got {step}")
    return 1.0 if step == 1 else (1 - decay) / (1 - decay**step)


def replace_leaves(params: Tree, leaves: Flat) -> Tree:
    """Return the parameters with some leaves replaced, such as by their averages."""
    return tree.unflatten(params, tree.flatten(params) | leaves)


def copy_leaves(leaves: Flat) -> Flat:
    """Return copies that the next step does not write to, each on the device of its leaf."""
    return {path: shard_like(leaf, local_shard(leaf).clone()) for path, leaf in leaves.items()}


def _blend(average: Tensor, leaf: Tensor, weight: float) -> Float[Tensor, " *shape"]:
    old, new = local_shard(average), local_shard(leaf)
    return shard_like(average, new.clone() if weight == 1.0 else torch.lerp(old, new.to(old.device), weight))
