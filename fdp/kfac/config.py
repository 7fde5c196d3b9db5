"""The settings of K-FAC and their checks.

    damping     added to the product of both sides, on its scale
    kl_clip     bounds the change of the model's predictions in a step, approximately: lr^2 g^T F^-1 g <= kl_clip
    periods     factors are measured, and inverted, every so many steps, and before steps 1, 2, 4, ... of the first
                period
    decay       total <- decay total + total_new, weight <- decay weight + weight_new, at every measurement

The condition number of a damped side of n features is at most about ``n sqrt(mean curvature / damping)`` (balanced by
pi), and a float32 inverse is accurate up to about 1e4 (``fdp.kfac.inversion.woodbury``). Beyond that raise the damping,
or set a ``max_condition``, which needs ``Via.EIGEN`` and about ten times the work of Cholesky.

    >>> config = KfacConfig(damping=1e-2, policy=auto(rho=0.3), distribution=Distribution.OWNER)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

import torch

from fdp.kfac.factor_storage import Where
from fdp.kfac.form_policy import Policy, auto, check_period
from fdp.kfac.inversion.damped_inverse import Damping, check_settings
from fdp.kfac.inversion.one_side import Via
from fdp.kfac.inversion.woodbury import Power
from fdp.kfac.measure.estimator import Sharing
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.ranks.gather_columns import CAP_COLUMNS, check_cap
from fdp.optimizers import checks
from fdp.types import FdpError


class Distribution(Enum):
    """The division of inversion among ranks.

    GATHER gathers all columns, and every rank inverts every layer. RING leaves columns on their rank. OWNER gathers
    columns, and one rank per layer inverts and broadcasts.
    """

    GATHER = "gather"
    RING = "ring"
    OWNER = "owner"


@dataclass(frozen=True, kw_only=True)
class KfacConfig:
    """The settings of K-FAC.

    ``method`` PRODUCT applies to layers with two dense sides; others are damped by PI. ``window`` is the number of
    measurements whose columns are stored (dense and diagonal sides average over all, decayed). ``store`` and
    ``column_dtype`` are the device and the dtype of factors between measurements. ``power`` ROOT is for private
    training, where gradients are preconditioned twice.
    """

    damping: float = 3e-2
    kl_clip: float | None = 1e-2
    momentum: float = 0.9
    weight_decay: float = 0.0
    decay: float = 0.95
    factor_period: int = 10
    inverse_period: int = 10
    policy: Policy = field(default_factory=auto)
    fisher: Fisher = Fisher.SAMPLED
    sharing: Sharing = Sharing.EXPAND
    distribution: Distribution = Distribution.GATHER
    method: Damping = Damping.PI
    via: Via = Via.CHOLESKY
    max_condition: float | None = None
    power: Power = Power.INVERSE
    cap: int = CAP_COLUMNS
    window: int = 1
    store: Where = Where.AUTO
    column_dtype: torch.dtype | None = torch.float16

    @property
    def settings(self) -> tuple[tuple[str, Any], ...]:
        """Return the options that affect results, for :func:`fdp.fingerprint.fingerprint`."""
        how = ("distribution", "store", "column_dtype")
        return tuple((each.name, getattr(self, each.name)) for each in fields(self) if each.name not in how)

    def __post_init__(self) -> None:
        check_settings(
            damping=self.damping, method=self.method, via=self.via, max_condition=self.max_condition, power=self.power
        )
        check_period(self.factor_period, "factor_period")
        check_period(self.inverse_period, "inverse_period")
        check_cap(self.cap)
        checks.decay_rate("momentum", self.momentum)
        checks.nonnegative("weight_decay", self.weight_decay)
        if self.inverse_period % self.factor_period:
            raise FdpError(
                f"inverse_period: expected a multiple of factor_period = {self.factor_period}, got "
                f"{self.inverse_period}; factors are inverted right after a measurement"
            )
        if self.kl_clip is not None and not (math.isfinite(self.kl_clip) and self.kl_clip > 0):
            raise FdpError(f"kl_clip: expected a finite number above 0, or None for no bound, got {self.kl_clip}")
        if not 0.0 <= self.decay <= 1.0:
            raise FdpError(f"decay: expected a number from 0 (forget all) to 1 (keep all), got {self.decay}")
        if self.window < 1:
            raise FdpError(f"window: expected at least 1 measurement, got {self.window}")
        if self.column_dtype is not None and not self.column_dtype.is_floating_point:
            raise FdpError(f"column_dtype: expected a floating-point dtype, got {self.column_dtype}; float16 is usual")
        if self.distribution is Distribution.RING and (
            self.max_condition is not None or self.method is Damping.PRODUCT or self.power is Power.ROOT
        ):
            raise FdpError(
                "distribution: expected gather or owner with Damping.PRODUCT, Power.ROOT (private training) or a "
                "max_condition, which need eigenvalues; got ring, which computes none"
            )
