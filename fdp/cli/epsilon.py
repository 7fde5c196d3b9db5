"""``fdp epsilon``: the epsilon of a mechanism, or the noise for a budget, without training.

    fdp epsilon --noise-multiplier 1.1 --delta 1e-6 --population 50000 --batch-size 256 --steps 1000
    fdp epsilon --epsilon 3 --delta 1e-6 --population 50000 --batch-size 256 --steps 1000 --plot budget.png

Give exactly one of ``--noise-multiplier`` and ``--epsilon``; the other is computed. K-FAC's noised statistics have the
same options as in ``fdp train`` and are accounted in the same way:

    fdp epsilon --epsilon 3 ... --kfac-data noised --kfac-period 20
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from fdp.cli.choices import CLIPS
from fdp.cli.options import Flag, Range, check_ranges, expand_groups
from fdp.cli.train_options import train_flag
from fdp.privacy.shown_numbers import round_up, shown_delta

if TYPE_CHECKING:
    from fdp.privacy.mechanism import Mechanism

TABLE_PARTS = (0.01, 0.1, 0.25, 0.5, 0.75, 1.0)
"""Parts of the steps after which the table shows epsilon."""


class AccountantName(StrEnum):
    """The accountants by their names on the command line."""

    pld = "pld"
    rdp = "rdp"


@dataclass(frozen=True)
class MechanismOptions:
    """The subsampled Gaussian mechanism and its accountant."""

    delta: Annotated[float, Flag("The probability that the bound may fail; well below 1 / population.")]
    population: Annotated[int, Flag("The public number of samples, which sets the sampling rate, as in fdp train.")]
    batch_size: Annotated[float, train_flag("batch_size")]
    steps: Annotated[int | None, train_flag("steps")] = None
    epochs: Annotated[float | None, train_flag("epochs")] = None
    noise_multiplier: Annotated[
        float | None, Flag("Noise as a multiple of C: gives epsilon.", range=Range.NOT_NEGATIVE)
    ] = None
    epsilon: Annotated[float | None, Flag("Privacy budget: gives the noise multiplier.", range=Range.POSITIVE)] = None
    accountant: Annotated[AccountantName, Flag("The accountant of the result; both are shown.")] = AccountantName.pld
    max_batch_size: Annotated[int | None, Flag("Truncate larger draws to this many samples; PLD only.")] = None
    clip: Annotated[
        str, Flag("As in fdp train: quantile adds its noised count; every other style costs nothing.", complete=CLIPS)
    ] = "automatic"
    count_noise: Annotated[
        float | None,
        Flag(
            "For quantile clipping: the noise on its count, in samples.",
            default_text="with --clip quantile a twentieth of --batch-size, as in fdp train",
            range=Range.POSITIVE,
        ),
    ] = None
    kfac_data: Annotated[
        str | None, Flag("As in fdp train: noised adds K-FAC's statistics; every other source costs nothing.")
    ] = None
    kfac_noise: Annotated[float | None, train_flag("kfac_noise")] = None
    kfac_period: Annotated[int, Flag("As in fdp train: steps between noised statistics.")] = 10


@dataclass(frozen=True)
class EpsilonOutputOptions:
    """The plot, and the form of the result."""

    plot: Annotated[Path | None, Flag("Draw epsilon against steps into this .png file.")] = None
    as_json: Annotated[bool, Flag("Print the result as one JSON object, last.", name="--json")] = False


class Budget(NamedTuple):
    """The epsilon of a mechanism, and its curve by both accountants: epsilon by number of steps."""

    mechanism: Mechanism
    epsilon: float
    pld: dict[int, float | None]
    rdp: dict[int, float | None]


@expand_groups
def epsilon_command(options: MechanismOptions, output: EpsilonOutputOptions) -> None:
    """Compute the epsilon of a mechanism, or the noise for a budget.

    Neighbours differ by adding or removing one sample; the sampling rate is public.
    """
    # torch takes seconds to import; --help and mistakes on the command line should not wait for it.
    from fdp.types import FdpError

    if (options.noise_multiplier is None) == (options.epsilon is None):
        got = "neither" if options.epsilon is None else "both"
        raise FdpError(f"expected exactly one of --noise-multiplier and --epsilon, got {got}; the other is computed")
    if output.plot is not None and (output.plot.suffix != ".png" or not output.plot.parent.is_dir()):
        raise FdpError(f"--plot: expected a .png file in a folder that exists, got {output.plot}")
    check_ranges(options)
    budget = compute_budget(options)
    console = Console(highlight=False)
    _print_budget(console, budget, options)
    if output.plot is not None:
        _plot(output.plot, budget.mechanism, steps=count_steps(options), delta=options.delta)
        console.print(f"drawn in {output.plot}", soft_wrap=True)
    if output.as_json:
        print(json.dumps(_result(budget, options)))


def count_steps(options: MechanismOptions) -> int:
    """Return ``--steps``, or the steps of ``--epochs``; raise unless exactly one is given."""
    from fdp.run.epochs import steps_of_epochs
    from fdp.types import FdpError

    steps, epochs = options.steps, options.epochs
    if steps is not None and epochs is None:
        return steps
    if steps is None and epochs is not None:
        return steps_of_epochs(epochs, population=options.population, batch_size=options.batch_size)
    got = "neither" if steps is None else "both"
    raise FdpError(f"expected exactly one of --steps and --epochs, got {got}")


def compute_budget(options: MechanismOptions) -> Budget:
    """Return the mechanism, with the noise for the budget if one is given, and its epsilon."""
    from fdp.kfac.private.curvature_sources import choose_statistics
    from fdp.privacy import accounting
    from fdp.privacy.clipping import flat
    from fdp.privacy.mechanism import Mechanism
    from fdp.privacy.sampling import poisson
    from fdp.types import FdpError

    steps, delta, population = count_steps(options), options.delta, options.population
    accountant = accounting.Accountant(options.accountant.value)
    sampling = poisson(
        population,
        expected_batch_size=options.batch_size,
        population=population,
        max_batch_size=options.max_batch_size,
    )
    # The budget does not depend on C, of gradients or of statistics; the clip style matters only by its count's noise.
    clip, statistics = flat(max_norm=1.0)._replace(count_noise=_count_noise(options)), None
    if options.kfac_data == "noised":
        statistics = choose_statistics(
            sampling,
            max_norm=1.0,
            period=options.kfac_period,
            steps=steps,
            epsilon=options.epsilon,
            delta=delta,
            noise=options.kfac_noise,
            noise_multiplier=options.noise_multiplier,
        )
    elif options.kfac_noise is not None:
        raise FdpError(f"--kfac-noise: expected --kfac-data noised to go with it, got {options.kfac_data or 'none'}")
    noise = options.noise_multiplier
    if options.epsilon is not None:
        noise = accounting.noise_multiplier_for(
            sampling,
            clip,
            epsilon=options.epsilon,
            delta=delta,
            steps=steps,
            accountant=accountant,
            statistics=statistics,
        )
    assert noise is not None
    mechanism = Mechanism(sampling, clip, noise, statistics)
    spent = accounting.epsilon(mechanism, steps=steps, delta=delta, accountant=accountant)
    counts = sorted({max(1, round(steps * part)) for part in TABLE_PARTS})
    pld, rdp = ({count: _bound(mechanism, count, delta, name) for count in counts} for name in AccountantName)
    return Budget(mechanism, spent, pld, rdp)


def _count_noise(options: MechanismOptions) -> float | None:
    """Return the noise on the count of quantile clipping, in samples; None without it."""
    from fdp.privacy.clipping import COUNT_NOISE_SHARE
    from fdp.types import FdpError

    if options.clip not in CLIPS:
        raise FdpError(f"--clip: expected one of {', '.join(CLIPS)}, got {options.clip}")
    if options.count_noise is None and options.clip == "quantile":
        return options.batch_size / COUNT_NOISE_SHARE
    return options.count_noise


def _print_budget(console: Console, budget: Budget, options: MechanismOptions) -> None:
    from fdp.privacy.guarantee import RELATION, delta_advice

    mechanism, steps, delta = budget.mechanism, count_steps(options), options.delta
    noise, rate = round_up(mechanism.noise_multiplier, 5), mechanism.sampling.rate
    console.print(_table(budget, title=f"epsilon at delta {shown_delta(delta)}, noise multiplier {noise}"))
    console.print(
        f"noise multiplier {noise}: epsilon {round_up(budget.epsilon, 4)} at delta {shown_delta(delta)} after {steps} "
        f"steps at rate {rate:.4g} ({options.accountant.value.upper()})"
    )
    console.print(f"neighbours: {RELATION}")
    if (count_noise := mechanism.clip.count_noise) is not None:
        console.print(f"this includes the count of quantile clipping in every step, noise {count_noise:g} samples")
    if (statistics := mechanism.statistics) is not None:
        noise = round_up(statistics.noise_multiplier, 5)
        console.print(f"this includes {statistics.releases(steps)} releases of statistics, noise {noise} x their C")
    if advice := delta_advice(options.population, delta):
        console.print(f"[yellow]{advice}[/]")


def _result(budget: Budget, options: MechanismOptions) -> dict[str, Any]:
    from fdp.privacy import accounting
    from fdp.privacy.guarantee import RELATION

    mechanism, steps = budget.mechanism, count_steps(options)
    return {
        "noise_multiplier": mechanism.noise_multiplier,
        "effective_noise_multiplier": accounting.effective_noise_multiplier(mechanism),
        "epsilon": _finite(budget.epsilon),
        "accountant": options.accountant.value,
        "epsilon_pld": _finite(budget.pld[steps]),
        "epsilon_rdp": _finite(budget.rdp[steps]),
        "delta": options.delta,
        "steps": steps,
        "sampling_rate": mechanism.sampling.rate,
        "population": options.population,
        "expected_batch_size": options.batch_size,
        "max_batch_size": options.max_batch_size,
        "count_noise": mechanism.clip.count_noise,
        "kfac_noise_multiplier": None if mechanism.statistics is None else mechanism.statistics.noise_multiplier,
        "relation": RELATION,
    }


def _bound(mechanism: Mechanism, steps: int, delta: float, name: AccountantName) -> float | None:
    """Return epsilon by one accountant, None if that accountant has no bound."""
    from fdp.privacy import accounting

    pld = name is AccountantName.pld
    if delta < accounting.SMALLEST_DELTA if pld else mechanism.sampling.max_batch_size is not None:
        return None
    return accounting.epsilon(mechanism, steps=steps, delta=delta, accountant=accounting.Accountant(name.value))


def _table(budget: Budget, *, title: str) -> Table:
    table = Table(title=title)
    for heading in ("steps", "PLD", "RDP"):
        table.add_column(heading, justify="right")
    for count in budget.pld:
        row = (budget.pld[count], budget.rdp[count])
        table.add_row(f"{count:,}", *("-" if value is None else round_up(value, 4) for value in row))
    return table


def _plot(path: Path, mechanism: Mechanism, *, steps: int, delta: float) -> None:
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
    axes.set(xlabel="steps", ylabel=f"epsilon at delta {shown_delta(delta)}", xlim=(0, steps), ylim=(0, None))
    z, rate = mechanism.noise_multiplier, mechanism.sampling.rate
    axes.set_title(f"noise multiplier {z:.4g}, sampling rate {rate:.3g}\n{RELATION}", fontsize=10)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    FigureCanvasAgg(figure).print_png(str(path))


def _finite(value: float | None) -> float | None:
    """Return the value for JSON, which has no infinity: None is "no finite bound"."""
    return value if value is not None and math.isfinite(value) else None
