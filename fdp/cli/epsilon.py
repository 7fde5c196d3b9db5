"""``fdp epsilon``: what a mechanism costs, or how much noise a budget needs, without training.

    fdp epsilon --noise-multiplier 1.1 --delta 1e-6 --population 50000 --batch-size 256 --steps 1000
    fdp epsilon --epsilon 3 --delta 1e-6 --population 50000 --batch-size 256 --steps 1000 --plot budget.png

Exactly one of ``--noise-multiplier`` and ``--epsilon`` is given; the other is the answer. What ``fdp train`` says of
K-FAC's noised statistics is said here in the same words, and accounted alike:

    fdp epsilon --epsilon 3 ... --kfac-data noised --kfac-period 20
"""

from __future__ import annotations

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from typer import Option

from fdp.cli import rounded_up

if TYPE_CHECKING:
    from fdp.privacy.mechanism import Mechanism


class AccountantName(StrEnum):
    """The accountants by the names the command line takes."""

    pld = "pld"
    rdp = "rdp"


def epsilon_command(
    delta: Annotated[float, Option(help="The probability that the bound may fail; well below 1 / population.")],
    population: Annotated[
        int, Option(help="The public number of samples, from which the sampling rate comes, as of fdp train.")
    ],
    batch_size: Annotated[float, Option(help="Expected samples per step (Poisson).")],
    steps: Annotated[int, Option(help="Steps.")],
    noise_multiplier: Annotated[float | None, Option(help="Noise as a multiple of C: gives epsilon.")] = None,
    epsilon: Annotated[float | None, Option(help="Budget: gives the noise multiplier.")] = None,
    accountant: Annotated[AccountantName, Option(help="Whose epsilon counts; both are shown.")] = AccountantName.pld,
    max_batch_size: Annotated[int | None, Option(help="Truncate larger draws to this many samples; PLD only.")] = None,
    count_noise: Annotated[float | None, Option(help="Quantile clipping: the noise on its count, in samples.")] = None,
    kfac_data: Annotated[
        str | None, Option(help="As of fdp train: noised adds K-FAC's statistics; all else costs nothing.")
    ] = None,
    kfac_noise: Annotated[
        float | None,
        Option(
            help="As of fdp train: noise of noised statistics as a multiple of their C; default: what spends a third "
            "of --epsilon by itself, or --noise-multiplier."
        ),
    ] = None,
    kfac_period: Annotated[int, Option(help="As of fdp train: steps between noised statistics.")] = 10,
    plot: Annotated[Path | None, Option(help="Draw epsilon against steps into this .png file.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object, last.")] = False,
) -> None:
    """What a mechanism costs, or the noise for a budget. Neighbours: add or remove one sample; sampling rate public."""
    # torch takes seconds to import, and --help and mistakes on the command line should not.
    from fdp.kfac.private.sources import releases_of
    from fdp.privacy import accounting
    from fdp.privacy.clipping import flat
    from fdp.privacy.guarantee import RELATION, delta_advice
    from fdp.privacy.mechanism import Mechanism
    from fdp.privacy.sampling import poisson
    from fdp.types import FdpError

    if (noise_multiplier is None) == (epsilon is None):
        got = "neither" if epsilon is None else "both"
        raise FdpError(f"expected exactly one of --noise-multiplier and --epsilon, got {got}; the other is computed")
    if plot is not None and (plot.suffix != ".png" or not plot.parent.is_dir()):
        raise FdpError(f"--plot: expected a .png file in a folder that exists, got {plot}")
    used = accounting.Accountant(accountant.value)
    sampling = poisson(population, expected_batch_size=batch_size, population=population, max_batch_size=max_batch_size)
    # The budget does not depend on C, and on the clip style only through what its count releases.
    clip = flat(max_norm=1.0)._replace(count_noise=count_noise)
    more = None
    if kfac_data == "noised":
        noise = {"noise": kfac_noise, "noise_multiplier": noise_multiplier}
        # nor on the C of the statistics
        more = releases_of(
            sampling, max_norm=1.0, period=kfac_period, steps=steps, epsilon=epsilon, delta=delta, **noise
        )
    elif kfac_noise is not None:
        raise FdpError(f"--kfac-noise: expected --kfac-data noised to go with it, got {kfac_data or 'none'}")
    if epsilon is not None:
        noise_multiplier = accounting.noise_multiplier_for(
            sampling, clip, epsilon=epsilon, delta=delta, steps=steps, accountant=used, statistics=more
        )
    assert noise_multiplier is not None
    mechanism = Mechanism(sampling, clip, noise_multiplier, more)
    spent = accounting.epsilon(mechanism, steps=steps, delta=delta, accountant=used)
    counts = sorted({max(1, round(steps * part)) for part in (0.01, 0.1, 0.25, 0.5, 0.75, 1.0)})
    pld, rdp = ({t: _bound(mechanism, t, delta, name) for t in counts} for name in AccountantName)

    console = Console(highlight=False)
    shown = rounded_up(noise_multiplier, 5)
    console.print(_table(pld, rdp, title=f"epsilon at delta {delta:g}, noise multiplier {shown}"))
    answer = f"noise multiplier {shown}: epsilon {rounded_up(spent, 4)}"
    console.print(f"{answer} at delta {delta:g} after {steps} steps at rate {sampling.rate:.4g} ({used.name})")
    console.print(f"neighbours: {RELATION}")
    if more is not None:
        noise = rounded_up(more.noise_multiplier, 5)
        console.print(f"in it {more.releases(steps)} releases of statistics, noise {noise} x their C")
    if advice := delta_advice(population, delta):
        console.print(f"[yellow]{advice}[/]")
    if plot is not None:
        _draw(plot, mechanism, steps=steps, delta=delta)
        console.print(f"drawn in {plot}", soft_wrap=True)
    if as_json:
        result = {
            "noise_multiplier": noise_multiplier,
            "effective_noise_multiplier": accounting.effective_noise_multiplier(mechanism),
            "epsilon": _finite(spent),
            "accountant": used.value,
            "epsilon_pld": _finite(pld[steps]),
            "epsilon_rdp": _finite(rdp[steps]),
            "delta": delta,
            "steps": steps,
            "sampling_rate": sampling.rate,
            "population": population,
            "expected_batch_size": batch_size,
            "max_batch_size": max_batch_size,
            "count_noise": count_noise,
            "kfac_noise_multiplier": None if more is None else more.noise_multiplier,
            "relation": RELATION,
        }
        print(json.dumps(result))


def _bound(mechanism: Mechanism, steps: int, delta: float, name: AccountantName) -> float | None:
    """Epsilon by one accountant, None where it has none to offer."""
    from fdp.privacy import accounting

    pld = name is AccountantName.pld
    if delta < accounting.SMALLEST_DELTA if pld else mechanism.sampling.max_batch_size is not None:
        return None
    return accounting.epsilon(mechanism, steps=steps, delta=delta, accountant=accounting.Accountant(name.value))


def _table(pld: dict[int, float | None], rdp: dict[int, float | None], *, title: str) -> Table:
    table = Table(title=title)
    for heading in ("steps", "PLD", "RDP"):
        table.add_column(heading, justify="right")
    for count in pld:
        row = (pld[count], rdp[count])
        table.add_row(f"{count:,}", *("-" if value is None else rounded_up(value, 4) for value in row))
    return table


def _draw(path: Path, mechanism: Mechanism, *, steps: int, delta: float) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from fdp.privacy import accounting
    from fdp.privacy.guarantee import RELATION

    counts = sorted({max(1, round(steps * (part / 40) ** 2)) for part in range(41)})  # denser where it bends
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for name in AccountantName:
        if _bound(mechanism, 1, delta, name) not in (None, math.inf):
            used = accounting.Accountant(name.value)
            curve = accounting.epsilon_curve(mechanism, steps=counts, delta=delta, accountant=used)
            axes.plot(counts, curve, label=used.name)
    axes.set(xlabel="steps", ylabel=f"epsilon at delta {delta:g}", xlim=(0, steps), ylim=(0, None))
    z, rate = mechanism.noise_multiplier, mechanism.sampling.rate
    axes.set_title(f"noise multiplier {z:.4g}, sampling rate {rate:.3g}\n{RELATION}", fontsize=10)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    FigureCanvasAgg(figure).print_png(str(path))


def _finite(value: float | None) -> float | None:
    """JSON has no infinity: null is "no finite bound"."""
    return value if value is not None and math.isfinite(value) else None
