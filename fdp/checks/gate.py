"""Refuse settings without privacy, and batches that were not drawn for the step, before anything is computed.

The accountant charges for one fresh Poisson draw per step, clipped and noised by the mechanism. Anything that would
silently make that untrue is an error here.

    >>> check_settings(model, optimizer, mechanism, plan, sharding)       # when a step is made
    >>> gate = Gate(mechanism.sampling, stages.rounding, sharding)
    >>> step_number = gate.check(state.step, batch)                       # at every call
    >>> gate.remember(after.step, step_number)                            # saves a read from the device
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from fdp.gradients.plan import Plan
from fdp.model import Model
from fdp.optimizers import Optimizer
from fdp.parallel.gather_reduce import sum_over_samples
from fdp.parallel.sharding import Sharding
from fdp.privacy.mechanism import Mechanism, check_noise
from fdp.privacy.sampling import Poisson, check_drawn, check_step
from fdp.privacy.sum_rounding import Rounding, check_draw, check_rounding, most_samples
from fdp.types import Batch, ClippedSum, FdpError


def check_settings(
    model: Model, optimizer: Optimizer, mechanism: Mechanism, plan: Plan, sharding: Sharding | None
) -> None:
    """Refuse settings that do not make a private step, and noise with method none."""
    if plan.trainable != model.trainable:
        raise FdpError("plan: made for other trainable leaves than the model's; call make_plan with this model")
    if plan.private:
        check_noise(mechanism)
    elif mechanism.noise_multiplier != 0:
        raise FdpError("method none trains without privacy and adds no noise; expected noise_multiplier 0")
    if plan.private and optimizer.measures:
        raise FdpError(
            "optimizer: expected one whose state depends on the data through noised sums alone, got K-FAC with factors "
            "measured on samples; make it by fdp.kfac.private.refresh.private_kfac, and refresh it from public data or "
            "noised statistics"
        )
    if plan.private and sharding is not None:
        check_rounding(Rounding(reduce_dtype=sharding.reduce_dtype or torch.float64))


class Gate:
    """A check that batches were drawn by ``sampling`` for the step of the state; None accepts any batch.

    A batch with more samples than the slack for ``rounding`` covers is refused too (``fdp.privacy.sum_rounding``).

    The step number is a tensor on the device. For the state that the last step returned it is remembered here, so that
    it need not be read back. It is used once: after a step that failed, on whatever line, the number is read.
    """

    def __init__(
        self,
        sampling: Poisson | None,
        rounding: Callable[[torch.device], Rounding] = lambda device: Rounding(),
        sharding: Sharding | None = None,
    ) -> None:
        self.sampling = sampling
        self.rounding = rounding
        self.sharding = sharding
        self.last_step: tuple[weakref.ref[Tensor], int, int] | None = None
        self.running = False

    def enter(self) -> None:
        """Refuse a step after one that failed on this rank: others may hold a part of its sum, and wait for the rest.

        If it were made again, they would add this rank's samples a second time.
        """
        if self.running:
            raise FdpError(
                "step: expected that the last step on this rank came to its end, got one that failed: the other ranks "
                "may have added a part of it, and would add it twice. End all ranks and begin again from a checkpoint"
            )
        self.running = self.sharding is not None and self.sharding.mesh.size() > 1

    def leave(self) -> None:
        """Note that a step came to its end."""
        self.running = False

    def check(self, count: Int[Tensor, ""], batch: Batch) -> int | None:
        """Refuse a batch that was not drawn for the step ``count``; return its number, None if it was not needed."""
        if self.sampling is None:
            return None
        check_drawn(batch, self.sampling)
        assert batch.drawn is not None
        self._check_draw(batch, self.sampling)
        if torch.compiler.is_compiling() or batch.drawn.stamp.step is None:
            return None
        step_number = self._step_number(count)
        check_step(batch, step_number)
        return step_number

    def remember(self, count: Int[Tensor, ""], step_number: int | None) -> None:
        """Remember the number of the state after step ``step_number``."""
        if step_number is not None and count.device.type != "cpu":
            self.last_step = (weakref.ref(count), count._version, step_number + 1)

    def check_compiled(self, total: ClippedSum, count: Int[Tensor, ""], batch: Batch) -> ClippedSum:
        """Return the sum, with an infinite sensitivity if the batch was drawn for another step, or is too large.

        A compiled step cannot raise. Noise of infinite scale makes every parameter NaN, so that nothing of such a
        batch is released.
        """
        if self.sampling is None or batch.drawn is None or not torch.compiler.is_compiling():
            return total
        if batch.drawn.step is not None:
            ours = batch.drawn.step.to(count.device) == count
            total = total._replace(sensitivity=torch.where(ours, total.sensitivity, torch.inf))
        if not self.rounding(batch.mask.device).exact:
            covered = self._count(batch) <= most_samples(self.sampling)
            total = total._replace(sensitivity=torch.where(covered, total.sensitivity, torch.inf))
        return total

    def _check_draw(self, batch: Batch, sampling: Poisson) -> None:
        """Refuse a batch whose sum would be rounded more than its sensitivity covers.

        Samples are counted only if there is room for too many: that waits for the device.
        """
        rounding = self.rounding(batch.mask.device)
        if rounding.exact:
            return
        samples = batch.mask.numel() * batch.share.ranks
        if samples > most_samples(sampling):
            samples = 0 if torch.compiler.is_compiling() else int(self._count(batch))
        check_draw(samples, len(batch.mask) if batch.groups is None else len(batch.groups.sizes), sampling, rounding)

    def _count(self, batch: Batch) -> Int[Tensor, ""]:
        """Return the number of samples of all ranks."""
        return sum_over_samples(self.sharding, (batch.mask > 0).sum())

    def _step_number(self, count: Int[Tensor, ""]) -> int:
        remembered, self.last_step = self.last_step, None  # a replayed graph changes the count, not its version
        if remembered is not None:
            last, version, number = remembered
            if last() is count and count._version == version:
                return number
        return int(count)
