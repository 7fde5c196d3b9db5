"""What a step refuses before it computes anything: settings without privacy, and batches that were not drawn for it.

The accountant charges for one fresh Poisson draw per step, clipped, and noised as the mechanism says. Whatever could
make that untrue without a word is an error here.

    >>> check_settings(model, optimizer, mechanism, plan, sharding)       # when a step is made
    >>> gate = Gate(mechanism.sampling)
    >>> turn = gate.check(state.step, batch)                              # at every call: who drew the batch, and when
    >>> gate.passed(after.step, turn)
"""

from __future__ import annotations

import weakref

import torch
from jaxtyping import Int
from torch import Tensor

from fdp.gradients.plan import Plan
from fdp.model import Model
from fdp.optimizers import Optimizer
from fdp.parallel.sharding import Sharding
from fdp.privacy.mechanism import Mechanism, check_noise
from fdp.privacy.sampling import Poisson, check_drawn, check_step
from fdp.types import Batch, ClippedSum, FdpError


def check_settings(
    model: Model, optimizer: Optimizer, mechanism: Mechanism, plan: Plan, sharding: Sharding | None
) -> None:
    """Refuse parts that do not make a private step together; for method none, a mechanism that says otherwise."""
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
    exact = (None, torch.float32, torch.float64)
    if plan.private and sharding is not None and sharding.reduce_dtype not in exact:
        raise FdpError(
            f"reduce_dtype: expected float64 or float32 for private sums, got {sharding.reduce_dtype}: rounding by "
            f"2^-8 of a sum is more than one sample may move it"
        )


class Gate:
    """Lets the batch of a step pass: drawn by ``sampling``, for the step that the state is at. None: any batch.

    The number of a step lives on the device. That of a state which the step itself returned is remembered here, so that
    the device need not be asked again.
    """

    def __init__(self, sampling: Poisson | None) -> None:
        self.sampling = sampling
        self.known: tuple[weakref.ref[Tensor], int, int] | None = None

    def check(self, count: Int[Tensor, ""], batch: Batch) -> int | None:
        """Refuse a batch that was not drawn for the step ``count``; its number, None where it need not be known."""
        if self.sampling is None:
            return None
        check_drawn(batch, self.sampling)
        assert batch.drawn is not None
        if torch.compiler.is_compiling() or batch.drawn.stamp.step is None:
            return None
        turn = self._number(count)
        check_step(batch, turn)
        return turn

    def passed(self, count: Int[Tensor, ""], turn: int | None) -> None:
        """Remember the number of the state after step ``turn``."""
        if turn is not None and count.device.type != "cpu":
            self.known = (weakref.ref(count), count._version, turn + 1)

    def bounded(self, total: ClippedSum, count: Int[Tensor, ""], batch: Batch) -> ClippedSum:
        """Inside a compiled step, which cannot raise: the batch of another step has no finite sensitivity.

        Noise of infinite scale makes every parameter NaN, so that nothing of such a batch is released.
        """
        if self.sampling is None or batch.drawn is None or batch.drawn.step is None:
            return total
        if not torch.compiler.is_compiling():
            return total
        ours = batch.drawn.step.to(count.device) == count
        return total._replace(sensitivity=torch.where(ours, total.sensitivity, torch.inf))

    def _number(self, count: Int[Tensor, ""]) -> int:
        if self.known is not None:
            last, version, number = self.known
            if last() is count and count._version == version:
                return number
        return int(count)
