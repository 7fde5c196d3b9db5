"""The end of a step as one pass over every leaf, in place: noise, mean, AdamW and the cast to the compute dtype.

    sum + z C N(0, I)  ->  / B  ->  AdamW  ->  parameters, moments, and the parameters as the next step computes with

The weighted sum over samples is part of the pass: nothing is rounded below float64 before the noise is added. Momentum
follows an optimizer that needs full gradients (K-FAC): noise and mean are then computed as in any step, and the pass
begins with that optimizer's output. The cast parameters are stored for the next step. They are always
``cast(params)``, and are cast again if the parameters are other tensors or were changed by anyone else.

    >>> update = FusedUpdate(model, optimizer.rule, mechanism, torch.bfloat16)
    >>> update.refresh_copies(state.params)
    >>> weights = update.compute_weights(state.params)
    >>> state = update(state, total, tally, key)
"""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor

from fdp import tree
from fdp.fast.noisy_update import NoisyUpdate, first_moments
from fdp.finish import Finish, noise_adder, noisy_mean
from fdp.gradients.lazy_sum import LazySum, single_row
from fdp.model import Model
from fdp.optimizers.base import AdamW, Momentum, cast
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.noise import noise_deviation
from fdp.types import ClippedSum, FdpError, Flat, Key, Path, TrainState, Tree


class FusedUpdate:
    """The end of a step with AdamW or momentum on one device, as one kernel; on a CPU, the same in plain torch."""

    def __init__(self, model: Model, rule: AdamW | Momentum, mechanism: Mechanism, dtype: torch.dtype):
        if not 0 <= (z := mechanism.noise_multiplier) < math.inf:  # add_noise, which checks this, is not called
            raise FdpError(f"noise_multiplier: expected a finite number, 0 or more, got {z}")
        self.trainable = [path for path in model.leaves if path in model.trainable]
        self.mechanism = mechanism
        self.dtype = dtype
        self.rule = rule
        self.noise = noise_adder(mechanism)
        self.noisy = NoisyUpdate(rule)
        self.copies: Flat = {}
        self.seen: list[tuple[weakref.ref[Tensor], int]] = []

    @property
    def finish(self) -> Finish:
        """Return this update as the end of a step."""
        return Finish(self, self.noise_added)

    @property
    def takes_lazy_sums(self) -> bool:
        """Return True if the sum over samples is part of the pass."""
        return isinstance(self.rule, AdamW)

    def refresh_copies(self, params: Tree) -> None:
        """Re-cast the compute copies if someone else changed the parameters.

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
                self.copies[path].copy_(leaf)  # a recorded graph reads this very tensor
            else:
                self.copies[path] = leaf.detach().to(self.dtype)
        self.seen = _marks(flat)

    def reserve(self) -> None:
        """Allocate what recording the next update needs; call it before any step that may be recorded."""
        self.noisy.reserve()

    def _wrote(self, flat: Flat) -> bool:
        """Return True if the copies are of these very tensors and nobody else has written to them since."""
        leaves = list(flat.values())
        return len(leaves) == len(self.seen) and all(
            ref() is leaf and version == leaf._version for leaf, (ref, version) in zip(leaves, self.seen)
        )

    def compute_weights(self, params: Tree) -> Tree:
        """Return the parameters in the compute dtype."""
        flat = tree.flatten(params)
        return tree.unflatten(params, {path: self.copies.get(path, leaf) for path, leaf in flat.items()})

    def __call__(self, state: TrainState, total: ClippedSum, tally: Tensor, key: Key) -> TrainState:
        """Write the next state into this one and return it.

        Guarantees:
          - the state of ``plain_finish``, up to rounding: the same draws, scaled once by the sensitivity that the sum
            carries.
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

    def _through_front(self, state: TrainState, total: ClippedSum, trained: Flat, key: Key) -> dict[Path, LazySum]:
        """Return the update of the optimizer in front, given the noisy mean; its state is written into the old one."""
        assert isinstance(self.rule, Momentum)
        one = _one(total)
        mean = noisy_mean(self.noise, self.mechanism, total, key, state.params)
        precise = {path: cast(leaf, torch.promote_types(leaf.dtype, torch.float32)) for path, leaf in trained.items()}
        updates, after = self.rule.front.update(mean, state.opt[0], precise)
        tree.map(lambda old, new: old.copy_(new), state.opt[0], after)
        return {path: _rows(leaf.contiguous(), one) for path, leaf in tree.flatten(updates).items()}

    def noise_added(self, before: TrainState, total: ClippedSum, key: Key, after: TrainState) -> Flat:
        """Return the noise in the pass that led from ``before`` to ``after``, recovered from what it wrote.

        AdamW's first moment is ``m' = b1 m + (1 - b1) g`` with ``g = (sum + noise) / B``; in float32 this gives the
        noise to about six digits. Momentum gets its noisy mean from :func:`fdp.finish.noisy_mean`.
        """
        if not isinstance(self.rule, AdamW) or self.mechanism.noise_multiplier == 0:
            noisy = self.noise(total, key)
            return {path: noisy[path] - total.value[path].to(noisy[path]) for path in self.trainable}
        b1, expected = self.rule.b1, self.mechanism.sampling.expected_batch_size
        old, new = (first_moments(state.opt, self.trainable) for state in (before, after))
        mean = {path: (new[path].double() - b1 * old[path].double()) / (1 - b1) for path in self.trainable}
        return {path: leaf * expected - total.value[path].double() for path, leaf in mean.items()}


def _one(total: ClippedSum) -> Tensor:
    return total.sensitivity.new_ones(1, dtype=torch.float64)


def _rows(leaf: Tensor | LazySum, one: Tensor) -> LazySum:
    return leaf if isinstance(leaf, LazySum) else single_row(leaf, one)


def _marks(flat: Flat) -> list[tuple[weakref.ref[Tensor], int]]:
    """Return references to the tensors and how often torch has written to them; kernels write without its knowledge.

    Addresses would not do: freed memory is soon another tensor's.
    """
    return [(weakref.ref(leaf), leaf._version) for leaf in flat.values()]
