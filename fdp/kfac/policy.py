"""Which form each side of each layer is kept in, from what it costs: flops per step, bytes, and the number of columns.

One side of p features, the other of d, n rows in every update; factors updated every f steps, inverses every i:

    dense      2 n p^2 / f  +  p^3 / i                  +  2 p^2 d           2 p^2 numbers      (by eigenvalues 10 p^3)
    columns    (n^2 p + n^3 / 3) / i                    +  4 n p d           2 n p + n^2        (by eigenvalues 10 n^3)
    softmax    as columns, of the n tokens' probabilities
    diagonal   2 n p / f  +  p / i                      +  p d               2 p
    skip       nothing

``auto`` takes the cheapest exact form of each side and, while the layer costs more than ``rho`` times its own share of
a step, 6 flops per row and parameter, the diagonal of the costlier side, then of both, then nothing. (An embedding is
reckoned as a head of its size, which is also what its gradient costs to precondition.)

    >>> rows = plan_forms(model, known, policy=auto(rho=1.0), sharing=Sharing.EXPAND, via=Via.CHOLESKY, samples=64,
    ...                   factor_period=10, inverse_period=10)
    >>> curvatures = collect(model, params, data, mask, forms=forms_of(rows), ...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from fdp.kfac.forms import Form
from fdp.kfac.invert.inverse import Via
from fdp.kfac.layers import Met, Survey
from fdp.kfac.measure.collect import Sharing, check_forms
from fdp.kfac.ranks.gather_columns import CAP, check_cap
from fdp.kfac.types import Layer
from fdp.model import Model
from fdp.types import FdpError

Both: TypeAlias = tuple[Form, Form]

SIDE_BYTES = 2 * 1024**3
"""What one side, factor and inverse together, may take at most under ``auto``: a vocabulary's square is beyond it."""


class Cost(NamedTuple):
    """Of one side in one form: flops in an average step, and bytes that are kept."""

    flops: float
    bytes: int


class Options(NamedTuple):
    """What a layer could be: the cost of every form of its sides, and which pairs of forms it can have.

    ``own`` is the flops of the layer in a training step. ``columns``: how many there would be on the left and right.
    ``of_tokens``: the form that has all of the left side of an embedding, and no more; None for other layers.
    """

    layer: Layer
    shape: tuple[int, int]
    own: float
    columns: tuple[int, int]
    left: dict[Form, Cost]
    right: dict[Form, Cost]
    allowed: frozenset[Both]
    of_tokens: Form | None

    def cost(self, both: Both) -> Cost:
        left, right = self.left[both[0]], self.right[both[1]]
        return Cost(left.flops + right.flops, left.bytes + right.bytes)


class Row(NamedTuple):
    """A layer's forms, what they cost in an average step and in memory, and why they were chosen."""

    layer: Layer
    left: Form
    right: Form
    flops: float
    bytes: int
    why: str


Choice: TypeAlias = tuple[Both, str]
Policy: TypeAlias = Callable[[Sequence[Options]], list[Choice]]
"""The forms of every layer, and why."""


def everything() -> Policy:
    """Dense on both sides, the head as a softmax; where a layer has no such form, its diagonal."""
    return lambda options: [(_exact(each, _fullest), "all") for each in options]


def auto(*, rho: float = 1.0, cap: int = CAP, side_bytes: int = SIDE_BYTES) -> Policy:
    """The cheapest exact form of each side, as long as the layer costs at most ``rho`` times its part of a step.

    Forms with more than ``cap`` columns or ``side_bytes`` bytes are not considered.
    """
    check_cap(cap)
    if not rho >= 0.0:
        raise FdpError(f"rho: expected 0 (skip everything) or more, got {rho}; 1.0 lets K-FAC double a step")
    if side_bytes < 1:
        raise FdpError(f"side_bytes: expected at least 1 byte, got {side_bytes}")
    return lambda options: [_within(each, rho=rho, cap=cap, side_bytes=side_bytes) for each in options]


def by_path(forms: Mapping[str, Form | Both]) -> Policy:
    """The forms of the first pattern (``fnmatch``) that a layer's weight matches; one form is for both sides.

    Layers that match none are skipped. Forms that a layer cannot have are refused, not replaced.
    """
    pairs = {pattern: form if isinstance(form, tuple) else (form, form) for pattern, form in forms.items()}

    def policy(options: Sequence[Options]) -> list[Choice]:
        paths = [each.layer.weight for each in options]
        for pattern in pairs:
            if not any(fnmatchcase(path, pattern) for path in paths):
                raise FdpError(f"policy: expected every pattern to match a layer, got {pattern!r}; layers: {paths}")
        choices: list[Choice] = []
        for path in paths:
            pattern = next((pattern for pattern in pairs if fnmatchcase(path, pattern)), None)
            nothing: Choice = (Form.SKIP, Form.SKIP), "no pattern matches"
            choices.append(nothing if pattern is None else (pairs[pattern], f"matches {pattern!r}"))
        return choices

    return policy


def policy_named(name: str, *, rho: float = 1.0, cap: int = CAP) -> Policy:
    """``all`` or ``auto``."""
    check_cap(cap)
    named: dict[str, Callable[[], Policy]] = {"all": everything, "auto": lambda: auto(rho=rho, cap=cap)}
    if name not in named:
        raise FdpError(f"policy: expected one of {', '.join(named)}, or forms by path (by_path), got {name!r}")
    return named[name]()


def check_period(period: int, name: str) -> None:
    """Refuses a period that is no number of steps."""
    if period < 1:
        raise FdpError(f"{name}: expected at least 1 step, got {period}; 10 is a common choice")


def plan_forms(
    model: Model,
    known: Survey,
    *,
    policy: Policy,
    sharing: Sharing,
    via: Via,
    samples: int,
    factor_period: int,
    inverse_period: int,
    column_bytes: int = 2,
) -> tuple[Row, ...]:
    """The forms of every layer of ``known``, as rows of a table; ``forms_of`` makes of them what ``collect`` takes.

    ``samples`` is how many an update of the factors sees on all ranks together, about as many as a step;
    ``column_bytes`` the size of a number of a stored column.

    Guarantees:
      - ``collect`` accepts the forms;
      - nothing but shapes is looked at: the same on every rank and in every run.
    """
    check_period(factor_period, "factor_period")
    check_period(inverse_period, "inverse_period")
    if samples < 1:
        raise FdpError(f"samples: expected at least 1, got {samples}")

    def cost(form: Form, p: int, d: int, n: int) -> Cost:
        return side_cost(
            form,
            p,
            d,
            n,
            via=via,
            factor_period=factor_period,
            inverse_period=inverse_period,
            column_bytes=column_bytes,
        )

    options = [_options(model, known, layer, cost, sharing=sharing, samples=samples) for layer in known.layers]
    rows = []
    for each, (both, why) in zip(options, policy(options)):
        if both not in each.allowed:  # says why not
            check_forms(model, known, {each.layer: both}, sharing)
        rows.append(Row(each.layer, *both, *each.cost(both), why))
    return tuple(rows)


def forms_of(rows: Sequence[Row]) -> dict[Layer, Both]:
    """The forms, without layers of which nothing is kept."""
    return {row.layer: (row.left, row.right) for row in rows if {row.left, row.right} != {Form.SKIP}}


def side_cost(
    form: Form,
    p: int,
    d: int,
    n: int,
    *,
    via: Via,
    factor_period: int,
    inverse_period: int,
    column_bytes: int = 2,
) -> Cost:
    """The table of this module: a side of ``p`` features beside one of ``d``, from ``n`` rows in every update."""
    f, i = factor_period, inverse_period
    cube = 10 if via is Via.EIGEN else 1
    match form:
        case Form.DENSE:
            return Cost(2 * n * p**2 / f + cube * p**3 / i + 2 * p**2 * d, 2 * 4 * p**2)
        case Form.COLUMNS | Form.SOFTMAX:
            small = n**3 * (10 if via is Via.EIGEN else 1 / 3)
            return Cost((n**2 * p + small) / i + 4 * n * p * d, n * p * (column_bytes + 4) + 4 * n**2)
        case Form.DIAGONAL:
            return Cost(2 * n * p / f + p / i + p * d, 2 * 4 * p)
        case _:
            return Cost(0.0, 0)


def _options(
    model: Model,
    known: Survey,
    layer: Layer,
    cost: Callable[[Form, int, int, int], Cost],
    *,
    sharing: Sharing,
    samples: int,
) -> Options:
    rows, columns = known.shapes[layer]
    met = known.met[layer]
    heads = [use for use in met if not use.one_hot]
    left, right = (samples * _places(uses, sharing) for uses in (heads or list(met), list(met)))
    own = 6.0 * samples * _places(list(met), Sharing.EXPAND) * rows * columns

    def allows(both: Both) -> bool:
        try:
            check_forms(model, known, {layer: both}, sharing)
        except FdpError:
            return False
        return True

    lefts = {form: cost(form, rows, columns, left) for form in Form}
    rights = {form: cost(form, columns, rows, right) for form in Form}
    allowed = frozenset((a, b) for a in Form for b in Form if allows((a, b)))
    # Rows that are one-hot are a diagonal; those of a sample added up are one column.
    of_tokens = None if len(heads) == len(met) else Form.COLUMNS if sharing is Sharing.REDUCE else Form.DIAGONAL
    of_tokens = None if of_tokens is Form.DIAGONAL and heads else of_tokens
    return Options(layer, (rows, columns), own, (left, right), lefts, rights, allowed, of_tokens)


def _places(uses: Sequence[Met], sharing: Sharing) -> int:
    """Rows of a sample."""
    return 1 if sharing is Sharing.REDUCE else sum(use.tokens for use in uses)


def _exact(options: Options, order: Callable[[Options, Form, int], tuple[float, ...]]) -> Both:
    """The first pair that the layer can have, each side's forms taken in the given order, left before right."""
    lefts, rights = (sorted(Form, key=lambda form, side=side: order(options, form, side)) for side in (0, 1))
    pairs = [(a, b) for a in lefts for b in rights if (a, b) in options.allowed]
    return pairs[0]


def _fullest(options: Options, form: Form, side: int) -> tuple[float, ...]:
    """Softmax, dense, diagonal, nothing, columns; an embedding's left side in the form that has all of it."""
    ranking = [Form.SOFTMAX, Form.DENSE, Form.DIAGONAL, Form.SKIP, Form.COLUMNS]
    if options.of_tokens is not None and side == 0:
        ranking = sorted(ranking, key=lambda each: each is not options.of_tokens)
    return (ranking.index(form),)


def _within(options: Options, *, rho: float, cap: int, side_bytes: int) -> Choice:
    """The cheapest exact pair; beyond the budget the diagonal of the costlier side, of both, nothing."""

    def cheapest(options: Options, form: Form, side: int) -> tuple[float, ...]:
        cost, columns = (options.left, options.right)[side][form], options.columns[side]
        # From as many columns as features on, the matrix is the smaller one.
        most = cap if form is Form.SOFTMAX else min(cap, options.shape[side] - 1)
        fits = cost.bytes <= side_bytes and (form is Form.DENSE or columns <= most)
        match form:
            case Form.DIAGONAL:
                return (0.0,) if options.of_tokens is form and side == 0 else (2.0,)
            case Form.SKIP:
                return (3.0,)
            case Form.SOFTMAX:  # before the others: the true Fisher information of the head
                return (0.0,) if fits else (4.0,)
            case _:
                return (1.0 if fits else 4.0, cost.flops)

    best = _exact(options, cheapest)
    names = f"({best[0].value}, {best[1].value})"
    left_is_costlier = options.left[best[0]].flops >= options.right[best[1]].flops
    one = (Form.DIAGONAL, best[1]) if left_is_costlier else (best[0], Form.DIAGONAL)
    share = options.cost(best).flops / options.own
    diagonals = all({*both} <= {Form.DIAGONAL, Form.SKIP} for both in options.allowed)
    other = f"other forms have more than {cap} columns or {side_bytes / 1024**3:.1f} GiB"
    exact = best[1] is not Form.DIAGONAL and (best[0] is not Form.DIAGONAL or options.of_tokens is Form.DIAGONAL)
    reason = "has no form but diagonals" if diagonals else "cheapest exact forms" if exact else other
    tried: list[Choice] = [
        (best, f"{reason}: {share:.2f} of the layer's step"),
        (one, f"{names} is {share:.2f} of the layer's step: the diagonal of the costlier side"),
        ((Form.DIAGONAL, Form.DIAGONAL), f"{names} is {share:.2f} of the layer's step: diagonals"),
        ((Form.SKIP, Form.SKIP), f"{names} is {share:.2f} of the layer's step: nothing"),
    ]
    within = ((both, why) for both, why in tried if both in options.allowed)
    return next((both, why) for both, why in within if options.cost(both).flops <= rho * options.own)
