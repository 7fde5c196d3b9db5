"""Noise, mean, AdamW and the cast to the compute dtype in one pass over every leaf, in place.

    sum + z C N(0, I)  ->  / B  ->  AdamW  ->  parameters, moments, and the parameters as the next step computes with

The weighted sum over samples is part of the pass: nothing is rounded to less than float64 before the noise is added.
Momentum comes behind something that needs whole gradients (K-FAC): noise and mean are made as in any step, and the pass
begins with what that makes of them.
The cast parameters are kept for the next step. They are nothing but ``cast(params)``, and are made anew whenever the
parameters are other tensors or were changed by anyone else.

    >>> update = FusedUpdate(model, optimizer.rule, mechanism, torch.bfloat16)
    >>> update.attend(state.params)
    >>> weights = update.compute_weights(state.params)
    >>> state = update(state, total, tally, key)
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from fdp import tree
from fdp.fast.noisy_update import NoisyUpdate
from fdp.model import Model
from fdp.optimizers.base import AdamW, Momentum, cast
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.noise import noise_deviation
from fdp.types import ClippedSum, FdpError, Flat, Key, Path, TrainState, Tree, Weighted

Mean = Callable[[ClippedSum, Key, Tree], Flat]
"""``mean(total, key, params)``: the noisy mean, leaf by leaf, in the dtypes to update in; takes the sums out."""


class FusedUpdate:
    """``finish`` of a step with AdamW or momentum on one device, as one kernel; on a CPU, the same in plain torch.

    ``mean`` is for momentum, whose ``front`` sees whole leaves.
    """

    def __init__(
        self,
        model: Model,
        rule: AdamW | Momentum,
        mechanism: Mechanism,
        dtype: torch.dtype,
        *,
        mean: Mean | None = None,
    ):
        if not 0 <= (z := mechanism.noise_multiplier) < math.inf:  # as add_noise, which is not called
            raise FdpError(f"noise_multiplier: expected a finite number, 0 or more, got {z}")
        self.trainable = [path for path in model.leaves if path in model.trainable]
        self.mechanism = mechanism
        self.dtype = dtype
        self.rule = rule
        self.mean = mean
        self.noisy = NoisyUpdate(rule)
        self.copies: Flat = {}
        self.seen: list[tuple[weakref.ref[Tensor], int]] = []

    def attend(self, params: Tree) -> None:
        """Cast the parameters anew if they are not those that this update wrote last; else nothing, also in a graph.

        A write that torch does not count (through ``.data``) is not seen: write to the parameters themselves.
        """
        flat = tree.flatten(params)
        if self._wrote(flat):
            return
        for path, leaf in flat.items():
            if leaf.dtype == self.dtype:
                self.copies.pop(path, None)
                continue
            if path in self.copies and self.copies[path].device == leaf.device:
                self.copies[path].copy_(leaf)  # where a recorded graph may look for it
            else:
                self.copies[path] = leaf.detach().to(self.dtype)
        self.seen = _marks(flat)

    def reserve(self) -> None:
        """Set aside what recording the next update needs; call it before any step that may be recorded."""
        self.noisy.reserve()

    def _wrote(self, flat: Flat) -> bool:
        """Whether these are the very tensors that the copies were made of, and no one else has written to them."""
        leaves = list(flat.values())
        return len(leaves) == len(self.seen) and all(
            ref() is leaf and version == leaf._version for leaf, (ref, version) in zip(leaves, self.seen)
        )

    def compute_weights(self, params: Tree) -> Tree:
        """The parameters in the compute dtype."""
        flat = tree.flatten(params)
        return tree.unflatten(params, {path: self.copies.get(path, leaf) for path, leaf in flat.items()})

    def __call__(self, state: TrainState, total: ClippedSum, tally: Tensor, key: Key) -> TrainState:
        """The next state, written into this one.

        Guarantees:
          - as ``add_noise``, ``expected_mean``, ``optimizer.update`` and ``apply_updates``: the same draws, scaled by
            the sensitivity that the sum carries, once; rounding apart, the same state.
        """
        flat = tree.flatten(state.params)
        trained = {path: flat[path] for path in self.trainable}
        expected = self.mechanism.sampling.expected_batch_size
        copies = {path: self.copies[path] for path in self.trainable if path in self.copies}
        if isinstance(self.rule, Momentum):
            sums = self._through_front(state, total, trained, key)
            self.noisy(trained, state.opt[1:], sums, copies, key=key, noise_scale=None, expected_batch_size=1.0)
        else:
            z, one = self.mechanism.noise_multiplier, _one(total)
            sums = {path: _rows(total.value[path], one) for path in self.trainable}
            scale = noise_deviation(total, z) if z else None
            self.noisy(trained, state.opt, sums, copies, key=key, noise_scale=scale, expected_batch_size=expected)
        clip = self.mechanism.clip.update(state.clip, tally, key, expected)
        tree.map(lambda old, new: old.copy_(new), state.clip, clip)
        state.step.add_(1)
        self.seen = _marks(flat)
        return state

    def _through_front(self, state: TrainState, total: ClippedSum, trained: Flat, key: Key) -> dict[Path, Weighted]:
        """What the optimizer in front makes of the noisy mean; its state is written into the old one."""
        assert isinstance(self.rule, Momentum)
        assert self.mean is not None
        one = _one(total)
        mean = self.mean(total, key, state.params)
        precise = {path: cast(leaf, torch.promote_types(leaf.dtype, torch.float32)) for path, leaf in trained.items()}
        updates, after = self.rule.front.update(mean, state.opt[0], precise)
        tree.map(lambda old, new: old.copy_(new), state.opt[0], after)
        return {path: _rows(leaf.contiguous(), one) for path, leaf in tree.flatten(updates).items()}


def _one(total: ClippedSum) -> Tensor:
    return total.sensitivity.new_ones(1, dtype=torch.float64)


def _rows(leaf: Tensor | Weighted, one: Tensor) -> Weighted:
    return leaf if isinstance(leaf, Weighted) else Weighted(leaf.unsqueeze(0), one)


def _marks(flat: Flat) -> list[tuple[weakref.ref[Tensor], int]]:
    """Which tensors these are and how often torch has written to them; kernels write without its knowledge.

    Not where they are: memory that was freed is soon another tensor's.
    """
    return [(weakref.ref(leaf), leaf._version) for leaf in flat.values()]
