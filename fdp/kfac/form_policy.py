"""Policies that choose the form of each side of each layer, from its flops per step, its bytes and its columns.

The costs of a side of p features, where the other side has d, with n rows per measurement, factors measured every f
steps and inverted every i steps:

    dense      2 n p^2 / f  +  p^3 / i                  +  2 p^2 d           2 p^2 numbers      (by eigenvalues 10 p^3)
    columns    (n^2 p + n^3 / 3) / i                    +  4 n p d           2 n p + n^2        (by eigenvalues 10 n^3)
    softmax    as columns, of the n tokens' probabilities
    diagonal   2 n p / f  +  p / i                      +  p d               2 p
    skip       nothing

``auto`` takes the cheapest exact form of each side. If the layer then costs more than ``rho`` times its own share of a
step (6 flops per row and parameter), it takes the diagonal of the more expensive side, then both diagonals, then
nothing. (An embedding counts as a head of its size, which is also the cost of preconditioning its gradient.)

    >>> costs = CostModel(Via.CHOLESKY, factor_period=10, inverse_period=10)
    >>> rows = plan_forms(model, survey, policy=auto(rho=1.0), sharing=Sharing.EXPAND, samples=64, costs=costs)
    >>> estimator = Estimator(survey, forms_of(rows), Fisher.SAMPLED, Sharing.EXPAND)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from fdp.kfac.factor_forms import Form
from fdp.kfac.inversion.one_side import Via
from fdp.kfac.layers import LeafUse, Survey
from fdp.kfac.measure.collect import check_forms
from fdp.kfac.measure.estimator import Sharing
from fdp.kfac.ranks.gather_columns import CAP_COLUMNS, check_cap
from fdp.kfac.types import Layer
from fdp.model import Model
from fdp.types import FdpError

FormPair: TypeAlias = tuple[Form, Form]

MAX_SIDE_BYTES = 2 * 1024**3
"""The most that one side, factor and inverse together, may take under ``auto``. A vocabulary's square is larger."""


class Cost(NamedTuple):
    """The cost of one side in one form: flops in an average step, and bytes stored."""

    flops: float
    bytes: int


class CostModel(NamedTuple):
    """The settings that costs depend on; ``column_bytes`` is the size of a number of a stored column."""

    via: Via
    factor_period: int
    inverse_period: int
    column_bytes: int = 2


class LayerOptions(NamedTuple):
    """The options of a layer: the cost of every form of its sides, and the pairs of forms that it can have.

    ``own`` is the flops of the layer in a training step. ``columns`` is the number of columns on the left and right.
    ``of_tokens`` is the cheapest exact form of the left side of an embedding; None for other layers.
    """

    layer: Layer
    shape: tuple[int, int]
    own: float
    columns: tuple[int, int]
    left: dict[Form, Cost]
    right: dict[Form, Cost]
    allowed: frozenset[FormPair]
    of_tokens: Form | None

    def cost(self, both: FormPair) -> Cost:
        left, right = self.left[both[0]], self.right[both[1]]
        return Cost(left.flops + right.flops, left.bytes + right.bytes)


class FormRow(NamedTuple):
    """A row of the table of forms: a layer's forms, their cost in an average step and in memory, and the reason."""

    layer: Layer
    left: Form
    right: Form
    flops: float
    bytes: int
    why: str


FormChoice: TypeAlias = tuple[FormPair, str]
Policy: TypeAlias = Callable[[Sequence[LayerOptions]], list[FormChoice]]
"""Returns the forms of every layer, and the reason."""


def everything() -> Policy:
    """Store both sides dense and the head as a softmax; layers that have no such form as their diagonal."""
    return lambda options: [(_first_allowed(each, _rank_by_content), "all") for each in options]


def auto(*, rho: float = 1.0, cap: int = CAP_COLUMNS, side_bytes: int = MAX_SIDE_BYTES) -> Policy:
    """Take the cheapest exact form of each side, if the layer then costs at most ``rho`` times its part of a step.

    Forms with more than ``cap`` columns or ``side_bytes`` bytes are not considered.
    """
    check_cap(cap)
    if not rho >= 0.0:
        raise FdpError(
            f"rho: expected 0 (skip everything) or more, got {rho}; 1.0 lets K-FAC double the cost of a step"
        )
    if side_bytes < 1:
        raise FdpError(f"side_bytes: expected at least 1 byte, got {side_bytes}")
    return lambda options: [_choose_within(each, rho=rho, cap=cap, side_bytes=side_bytes) for each in options]


def by_path(forms: Mapping[str, Form | FormPair]) -> Policy:
    """Take the forms of the first pattern (``fnmatch``) that matches the path of a layer's weight.

    A single form is for both sides. Layers that match no pattern are skipped. Forms that a layer cannot have raise an
    FdpError.
    """
    pairs = {pattern: form if isinstance(form, tuple) else (form, form) for pattern, form in forms.items()}

    def policy(options: Sequence[LayerOptions]) -> list[FormChoice]:
        paths = [each.layer.weight for each in options]
        for pattern in pairs:
            if not any(fnmatchcase(path, pattern) for path in paths):
                raise FdpError(f"policy: expected every pattern to match a layer, got {pattern!r}; layers: {paths}")
        choices: list[FormChoice] = []
        for path in paths:
            pattern = next((pattern for pattern in pairs if fnmatchcase(path, pattern)), None)
            nothing: FormChoice = (Form.SKIP, Form.SKIP), "no pattern matches"
            choices.append(nothing if pattern is None else (pairs[pattern], f"matches {pattern!r}"))
        return choices

    return policy


def policy_named(name: str, *, rho: float = 1.0, cap: int = CAP_COLUMNS) -> Policy:
    """Return the policy ``all`` or ``auto``."""
    check_cap(cap)
    named: dict[str, Callable[[], Policy]] = {"all": everything, "auto": lambda: auto(rho=rho, cap=cap)}
    if name not in named:
        raise FdpError(f"policy: expected one of {', '.join(named)}, or forms by path (by_path), got {name!r}")
    return named[name]()


def check_period(period: int, name: str) -> None:
    """Raise an FdpError if the period is below 1."""
    if period < 1:
        raise FdpError(f"{name}: expected at least 1 step, got {period}; 10 is a common choice")


def plan_forms(
    model: Model,
    survey: Survey,
    *,
    policy: Policy,
    sharing: Sharing,
    samples: int,
    costs: CostModel,
) -> tuple[FormRow, ...]:
    """Choose the forms of every layer of ``survey`` by ``policy``; ``forms_of`` extracts them from the result.

    ``samples`` is the number of samples of a measurement on all ranks together, about as many as in a step.

    Guarantees:
      - ``collect`` accepts the forms;
      - depends on shapes only, so it is the same on every rank and in every run.
    """
    check_period(costs.factor_period, "factor_period")
    check_period(costs.inverse_period, "inverse_period")
    if samples < 1:
        raise FdpError(f"samples: expected at least 1, got {samples}")

    layers = survey.layers
    options = [_options(model, survey, layer, sharing=sharing, samples=samples, costs=costs) for layer in layers]
    rows = []
    for each, (both, why) in zip(options, policy(options)):
        if both not in each.allowed:  # raise an error that says why
            check_forms(model, survey, {each.layer: both}, sharing)
        rows.append(FormRow(each.layer, *both, *each.cost(both), why))
    return tuple(rows)


def forms_of(rows: Sequence[FormRow]) -> dict[Layer, FormPair]:
    """Return the forms of the rows, without layers that are skipped on both sides."""
    return {row.layer: (row.left, row.right) for row in rows if {row.left, row.right} != {Form.SKIP}}


def side_cost(form: Form, p: int, d: int, n: int, *, costs: CostModel) -> Cost:
    """Return the cost in the module's table: a side of ``p`` features beside one of ``d``, with ``n`` rows."""
    via, f, i, column_bytes = costs
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
    model: Model, survey: Survey, layer: Layer, *, sharing: Sharing, samples: int, costs: CostModel
) -> LayerOptions:
    rows, columns = survey.shapes[layer]
    uses = survey.uses[layer]
    heads = [use for use in uses if not use.one_hot]
    left, right = (samples * _count_rows(those, sharing) for those in (heads or uses, uses))
    own = 6.0 * samples * _count_rows(uses, Sharing.EXPAND) * rows * columns

    def allows(both: FormPair) -> bool:
        try:
            check_forms(model, survey, {layer: both}, sharing)
        except FdpError:
            return False
        return True

    lefts = {form: side_cost(form, rows, columns, left, costs=costs) for form in Form}
    rights = {form: side_cost(form, columns, rows, right, costs=costs) for form in Form}
    allowed = frozenset((a, b) for a in Form for b in Form if allows((a, b)))
    # The second moment of one-hot rows is a diagonal; a sample's rows added up are one column.
    of_tokens = None if len(heads) == len(uses) else Form.COLUMNS if sharing is Sharing.REDUCE else Form.DIAGONAL
    of_tokens = None if of_tokens is Form.DIAGONAL and heads else of_tokens
    return LayerOptions(layer, (rows, columns), own, (left, right), lefts, rights, allowed, of_tokens)


def _count_rows(uses: Sequence[LeafUse], sharing: Sharing) -> int:
    """Return the number of rows of a sample."""
    return 1 if sharing is Sharing.REDUCE else sum(use.tokens for use in uses)


def _first_allowed(options: LayerOptions, order: Callable[[LayerOptions, Form, int], tuple[float, ...]]) -> FormPair:
    """Return the first pair that the layer can have; forms are sorted by ``order``, the left side first."""
    lefts, rights = (sorted(Form, key=lambda form, side=side: order(options, form, side)) for side in (0, 1))
    pairs = [(a, b) for a in lefts for b in rights if (a, b) in options.allowed]
    return pairs[0]


def _rank_by_content(options: LayerOptions, form: Form, side: int) -> tuple[float, ...]:
    """Rank softmax, dense, diagonal, skip, columns; first of all the exact form of an embedding's left side."""
    ranking = [Form.SOFTMAX, Form.DENSE, Form.DIAGONAL, Form.SKIP, Form.COLUMNS]
    if options.of_tokens is not None and side == 0:
        ranking = sorted(ranking, key=lambda each: each is not options.of_tokens)
    return (ranking.index(form),)


def _choose_within(options: LayerOptions, *, rho: float, cap: int, side_bytes: int) -> FormChoice:
    """Choose the cheapest exact pair; beyond the budget the diagonal of the more expensive side, both, or nothing."""

    def cheapest(options: LayerOptions, form: Form, side: int) -> tuple[float, ...]:
        cost, columns = (options.left, options.right)[side][form], options.columns[side]
        # With as many columns as features, the matrix is smaller.
        most = cap if form is Form.SOFTMAX else min(cap, options.shape[side] - 1)
        fits = cost.bytes <= side_bytes and (form is Form.DENSE or columns <= most)
        match form:
            case Form.DIAGONAL:
                return (0.0,) if options.of_tokens is form and side == 0 else (2.0,)
            case Form.SKIP:
                return (3.0,)
            case Form.SOFTMAX:  # preferred: the true Fisher information of the head
                return (0.0,) if fits else (4.0,)
            case _:
                return (1.0 if fits else 4.0, cost.flops)

    best = _first_allowed(options, cheapest)
    names = f"({best[0].value}, {best[1].value})"
    left_is_costlier = options.left[best[0]].flops >= options.right[best[1]].flops
    one = (Form.DIAGONAL, best[1]) if left_is_costlier else (best[0], Form.DIAGONAL)
    share = options.cost(best).flops / options.own
    diagonals = all({*both} <= {Form.DIAGONAL, Form.SKIP} for both in options.allowed)
    other = f"other forms have more than {cap} columns or {side_bytes / 1024**3:.1f} GiB"
    exact = best[1] is not Form.DIAGONAL and (best[0] is not Form.DIAGONAL or options.of_tokens is Form.DIAGONAL)
    reason = "diagonal forms only" if diagonals else "cheapest exact forms" if exact else other
    tried: list[FormChoice] = [
        (best, f"{reason}: {share:.2f} of the layer's step"),
        (one, f"{names} is {share:.2f} of the layer's step: diagonal of the more expensive side"),
        ((Form.DIAGONAL, Form.DIAGONAL), f"{names} is {share:.2f} of the layer's step: diagonals"),
        ((Form.SKIP, Form.SKIP), f"{names} is {share:.2f} of the layer's step: nothing"),
    ]
    within = ((both, why) for both, why in tried if both in options.allowed)
    return next((both, why) for both, why in within if options.cost(both).flops <= rho * options.own)
