"""The options of ``fdp train --optimizer kfac``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fdp.cli.needs import Needs
from fdp.cli.options import Effect, Flag


@dataclass(frozen=True)
class KfacOptions:
    """K-FAC: the curvature, what it is measured on, and how it is used."""

    panel: ClassVar[str] = "K-FAC (--optimizer kfac)"
    key_prefix: ClassVar[str] = "kfac_"

    damping: Annotated[
        float, Flag("Added to the curvature; a larger value is closer to the plain gradient.", needs=Needs.KFAC)
    ] = 3e-2
    period: Annotated[
        int, Flag("Steps between measurements of the curvature, each on one microbatch.", needs=Needs.KFAC)
    ] = 10
    data: Annotated[
        str | None,
        Flag(
            "The data that the curvature of a private run is measured on: synthetic (Zipf tokens or pink noise "
            "images), a path to public data in the format of --data, or noised (the private data, clipped and noised, "
            "paid for by the same budget). With --method none it is --data itself: leave this out."
        ),
    ] = None
    max_norm: Annotated[
        float,
        Flag(
            "C of noised statistics: the most one sample can add. A synthetic sample's statistics have norm 1.",
            needs=Needs.KFAC_NOISED,
        ),
    ] = 1.0
    noise: Annotated[
        float | None,
        Flag(
            "Noise of noised statistics as a multiple of their C.",
            default_text="--noise-multiplier, or the noise that alone would spend a third of --epsilon",
            needs=Needs.KFAC_NOISED,
        ),
    ] = None
    policy: Annotated[
        str,
        Flag(
            "auto chooses per layer, by cost; all is dense wherever a layer allows it. A private run is always dense "
            "up to 4096 features and diagonal beyond.",
            needs=Needs.KFAC_WITHOUT_PRIVACY,
        ),
    ] = "auto"
    fisher: Annotated[
        str,
        Flag(
            "Labels of the gradients: sampled from the model, exact (all labels), or empirical (the data's).",
            needs=Needs.KFAC,
        ),
    ] = "sampled"
    distribution: Annotated[
        str,
        Flag(
            "Inverses over ranks: gather (every rank inverts all), owner (one rank inverts for all) or ring (columns "
            "stay where they are).",
            effect=Effect.EXECUTION,
            needs=Needs.KFAC,
        ),
    ] = "gather"
    sharing: Annotated[
        str,
        Flag("How the tokens of a sample count: each by itself (expand), or all as one (reduce).", needs=Needs.KFAC),
    ] = "expand"
    momentum: Annotated[float, Flag("Momentum of preconditioned gradients.", needs=Needs.KFAC)] = 0.9
    kl_clip: Annotated[
        float, Flag("About the most that a step may change the predictions; 0 sets no limit.", needs=Needs.KFAC)
    ] = 1e-2
    max_condition: Annotated[
        float | None,
        Flag(
            "Raise small eigenvalues until largest / smallest is at most this; needs eigenvalues, so it excludes ring.",
            needs=Needs.KFAC,
        ),
    ] = None
    rho: Annotated[
        float,
        Flag(
            "With --kfac-policy auto: the most K-FAC may cost, relative to a layer's own part of a step; 1 doubles it.",
            needs=Needs.KFAC_POLICY_AUTO,
        ),
    ] = 1.0
    cap: Annotated[
        int, Flag("Columns of a factor that are stored at most, over all ranks.", needs=Needs.KFAC_COLUMNS)
    ] = 8192
