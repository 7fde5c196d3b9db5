"""Offload: what of the state is kept in CPU memory, and where the update is computed.

    params      each block's part is sent to the device when its turn comes, forward and backward
    grads       each block's reduced sum is sent back as soon as it is there
    optimizer   its state stays on the CPU, and the update is computed there

A choice about memory and speed only: the numbers are the same.

    >>> state = settle(init_state(...), offload, device)
    >>> step = make_train_step(..., offload=Offload(params=True, grads=True, optimizer=True))
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fdp import tree
from fdp.types import TrainState, Tree

CPU = torch.device("cpu")


class Offload(NamedTuple):
    """What is kept on the CPU between its uses."""

    params: bool = False
    grads: bool = False
    optimizer: bool = False


NOTHING = Offload()


def settle(state: TrainState, offload: Offload, device: torch.device) -> TrainState:
    """The state with every tensor where it is kept between steps; plain tensors, this rank's parts.

    What is kept on the CPU for a GPU is pinned, so that it can be sent while the GPU computes.
    """

    def there(part: Tree, *, on_cpu: bool) -> Tree:
        return tree.map(lambda leaf: _pinned(leaf.to(CPU), device) if on_cpu else leaf.to(device), part)

    params, opt = there(state.params, on_cpu=offload.params), there(state.opt, on_cpu=offload.optimizer)
    return state._replace(params=params, opt=opt)


def _pinned(leaf: Tensor, device: torch.device) -> Tensor:
    if isinstance(leaf, DTensor):
        raise AssertionError("settle works on plain parts")
    return leaf.pin_memory() if device.type == "cuda" and not leaf.is_pinned() else leaf
