"""Turn the ``--kfac-*`` options into the settings of K-FAC.

>>> config = make_kfac_config(options.kfac, weight_decay=0.0)
>>> source = make_kfac_source(options.kfac, load_dataset)    # what a private run measures the curvature on
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fdp.cli.kfac_options import KfacOptions
from fdp.cli.names import by_value, choose
from fdp.cli.options import options_of
from fdp.kfac.config import Distribution, KfacConfig
from fdp.kfac.form_policy import policy_named
from fdp.kfac.inversion.one_side import Via
from fdp.kfac.measure.estimator import Sharing
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.private.curvature_sources import Noised, Open, Source, Synthetic
from fdp.privacy.microbatches import Dataset
from fdp.types import FdpError

POLICIES = {name: name for name in ("auto", "all")}


def make_kfac_config(kfac: KfacOptions, *, weight_decay: float) -> KfacConfig:
    """Return the settings of K-FAC; settings without an option have their defaults. Errors name the option."""
    try:
        return _make_config(kfac, weight_decay)
    except FdpError as error:
        setting, colon, rest = str(error).partition(":")
        flag = _flag_of(setting)
        raise error if flag is None else FdpError(f"{flag}{colon}{rest}") from None


def make_kfac_source(kfac: KfacOptions, load: Callable[[str], Dataset]) -> Source | None:
    """Return the data that the curvature of a private run is measured on; None without ``--kfac-data``."""
    if kfac.noise is not None and kfac.data != "noised":
        raise FdpError(f"--kfac-noise: expected --kfac-data noised to go with it, got {kfac.data or 'none'}")
    if kfac.data == "noised":
        if not 0 < kfac.max_norm < math.inf:
            raise FdpError(f"--kfac-max-norm: expected a finite number above 0, got {kfac.max_norm:g}")
        return Noised(kfac.max_norm, kfac.noise)
    return None if kfac.data is None else Synthetic() if kfac.data == "synthetic" else Open(load(kfac.data))


def _make_config(kfac: KfacOptions, weight_decay: float) -> KfacConfig:
    policy = choose("--kfac-policy", kfac.policy, POLICIES)
    if kfac.period < 1:
        raise FdpError(f"--kfac-period: expected at least 1 step, got {kfac.period}; 10 is a common choice")
    fisher = choose("--kfac-fisher", kfac.fisher, by_value(Fisher))
    sharing = choose("--kfac-sharing", kfac.sharing, by_value(Sharing))
    distribution = choose("--kfac-distribution", kfac.distribution, by_value(Distribution))
    if distribution is Distribution.RING:
        _check_ring(kfac)
    if kfac.data == "noised" and sharing is not Sharing.EXPAND:
        raise FdpError(
            f"--kfac-sharing: expected expand with --kfac-data noised, a row for every token of a sample, got "
            f"{sharing.value}"
        )
    if kfac.data == "noised" and fisher is Fisher.EXACT:
        raise FdpError("--kfac-fisher: expected sampled or empirical with --kfac-data noised, got exact")
    return KfacConfig(
        damping=kfac.damping,
        kl_clip=None if kfac.kl_clip == 0 else kfac.kl_clip,
        momentum=kfac.momentum,
        factor_period=kfac.period,
        inverse_period=kfac.period,
        policy=policy_named(policy, rho=kfac.rho, cap=kfac.cap),
        fisher=fisher,
        sharing=sharing,
        distribution=distribution,
        via=Via.CHOLESKY if kfac.max_condition is None else Via.EIGEN,
        max_condition=kfac.max_condition,
        cap=kfac.cap,
        weight_decay=weight_decay,
    )


def _check_ring(kfac: KfacOptions) -> None:
    """Raise if eigenvalues are needed: with a ring no rank has them."""
    if kfac.data is not None:
        raise FdpError(
            "--kfac-distribution: expected gather or owner with --kfac-data: a private run takes the roots of "
            "inverses from eigenvalues, which no rank has in a ring; got ring"
        )
    if kfac.max_condition is not None:
        raise FdpError(
            "--kfac-distribution: expected gather or owner with --kfac-max-condition, which needs eigenvalues that no "
            "rank has in a ring; got ring. Leave --kfac-max-condition out, or raise --kfac-damping instead"
        )


def _flag_of(setting: str) -> str | None:
    """Return the flag of a setting of :class:`KfacConfig`, None if it has none."""
    if setting == "weight_decay":
        return "--weight-decay"
    option = options_of(KfacOptions).get(f"{KfacOptions.key_prefix}{setting}")
    return None if option is None else option.name
