"""Checks of what a proof takes for granted, made on the model at hand.

- ``check_independent``: the loss of a sample does not depend on the other samples of its batch. Batch normalisation,
  in-batch negatives and batch-dependent routing break this, and with it every per-sample bound.
- ``check_separate``: the rows that are clipped as a sample's hold that sample and no other, forward and backward.
- ``check_norms``: the plan's per-sample norms are those of ``vmap(grad)``, the definition.

    >>> check_independent(model, params, data)
    >>> check_norms(model, params, data, plan=plan)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.checks.synthetic_samples import Sample, join, made_up, not_a_number
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Plan
from fdp.gradients.taps import Tape, batch_size_of, make_taps, watch
from fdp.gradients.vjp import NotFunctional
from fdp.model import Model, check_losses
from fdp.types import FdpError, Flat, Norms, Tree

LEAST = 1e-3
"""Norms are compared down to this share of the sample's whole norm: there are leaves whose gradient is zero but for
rounding, such as the biases of keys."""


def check_independent(
    model: Model,
    params: Tree,
    data: Tree,
    *,
    losses_of: Callable[[Tree], Tensor] | None = None,
    tolerance: float = 1e-4,
    at_most: int | None = None,
    cause: str | None = None,
) -> None:
    """Put samples alone, elsewhere in the batch and beside others; the loss of a sample must stay.

    The samples are some of ``data`` and made-up ones of the same shapes (``fdp.checks.synthetic_samples``): one long
    document, many short ones, padding, equal values, zeros, the largest values, NaN. What a model cannot be given
    alone, it is not given. ``losses_of(data)`` computes the losses where ``model.loss(params, data)`` cannot, because
    parameters are in parts. ``at_most``: samples of one batch; default: three times those of ``data``. What depends on
    others only among more samples, or only where none of this leads, is not seen. ``cause``: what is known of the
    model, for the error.

    Guarantees:
      - the error says which samples, by place or by how they were made up, and by which share a loss moved; no value
        of the data and no loss is in it.
    """
    size = batch_size_of(data)
    if size < 2:
        raise FdpError(f"check_independent: expected a batch of at least 2 samples, got {size}")
    compute = (lambda data: model.loss(params, data)) if losses_of is None else losses_of
    with torch.no_grad():
        losses = check_losses(model, compute(data), size)
        floats = any(leaf.is_floating_point() for leaf in tree.leaves(data))
        real = [_one(data, i) for i in range(size)]
        chosen = {i: _alone(compute, real[i], size) for i in (0, size // 2, size - 1)}
        expected = torch.cat([chosen.get(i, losses[i : i + 1]) for i in range(size)])
        check = partial(_check_stays, model, compute, tolerance=tolerance, floor=_floor(losses), cause=cause)
        check(real, losses, expected)
        tried = [(sample, _tried(lambda: _alone(compute, sample, size))) for sample in made_up(data)]  # noqa: B023
        known = [*zip(real, expected.split(1)), *((sample, loss) for sample, loss in tried if loss is not None)]
        room = max(3 * size, len(known)) if at_most is None else max(2, min(at_most, len(known)))
        batches = [[known[i] for i in order] for order in _orders(len(known), room)]
        spoilt = not_a_number(data)
        nan = _tried(lambda: _alone(compute, spoilt, size)) if floats else None
        if nan is not None:
            batches.append([*known[: room - 1], (spoilt, nan)])
        for batch in batches:
            samples, each = zip(*batch)
            check(samples, _together(model, compute, samples, cause), torch.cat(each))


def _one(data: Tree, i: int) -> Sample:
    return Sample(f"sample {i} of the data", tree.map(lambda leaf: leaf[i : i + 1], data))


def _alone(compute: Callable[[Tree], Tensor], sample: Sample, size: int) -> Tensor:
    """The loss of a sample alone or, if the model takes no batch of one, among copies of itself."""
    loss = _tried(lambda: compute(sample.data))
    return compute(join([sample] * size))[:1] if loss is None or loss.shape != (1,) else loss


def _orders(count: int, room: int) -> list[list[int]]:
    """Batches of ``room`` out of ``count`` samples, each sample in two of them, beside others if not all fit in one."""
    forward = list(range(count))
    stride = next(n for n in range(max(2, math.isqrt(count)), count + 2) if math.gcd(n, count) == 1)
    strided = [i * stride % count for i in reversed(forward)]
    starts = range(0, count, room)
    return [[order[(start + i) % count] for i in range(room)] for order in (forward, strided) for start in starts]


def _check_stays(
    model: Model,
    compute: Callable[[Tree], Tensor],
    samples: Sequence[Sample],
    got: Tensor,
    expected: Tensor,
    *,
    tolerance: float,
    floor: float,
    cause: str | None,
) -> None:
    """Refuse losses that are not the ``expected`` ones; find out which neighbour it takes."""
    for i, sample in enumerate(samples):
        moved = _moved(got[i : i + 1], expected[i : i + 1], floor)
        if not sample.regular or moved <= tolerance:
            continue
        beside = f"{len(samples) - 1} others"
        for other in samples:
            pair = _tried(lambda: compute(join([sample, other])))  # noqa: B023
            if other is not sample and (pair is None or _moved(pair[:1], expected[i : i + 1], floor) > tolerance):
                beside = other.words
                break
        raise FdpError(
            f"{model.name}: the loss of a sample changed by {moved:.1e} of itself: {sample.words} has one loss alone "
            f"and another beside {beside}, so samples are not independent and clipping bounds nothing. "
            f"{cause or LIKELY_CAUSES}"
        )


LIKELY_CAUSES = (
    "Look for batch norm (use group or layer norm), a loss over pairs in the batch, routing that depends on the batch, "
    "or a longest length or position taken over all samples"
)


def _together(model: Model, compute: Callable[[Tree], Tensor], samples: Sequence[Sample], cause: str | None) -> Tensor:
    losses = _tried(lambda: compute(join(samples)))
    if losses is None:
        raise FdpError(
            f"{model.name}: cannot be given {len(samples)} samples together each of which it can be given alone, real "
            f"and made-up ones of unlike lengths and values; so samples are not independent. {cause or LIKELY_CAUSES}"
        )
    return losses


def mixture(
    model: Model,
    params: Tree,
    data: Tree,
    *,
    losses_of: Callable[[Tree], Tensor] | None = None,
    at_most: int | None = None,
    more: Sequence[Sample] = (),
) -> Tree:
    """The samples of ``data`` and as many made-up ones as there is room for: those of a loss that is a number.

    ``more``: samples to be tried besides those of ``fdp.checks.synthetic_samples``.
    """
    compute = (lambda data: model.loss(params, data)) if losses_of is None else losses_of
    found = []
    with torch.no_grad():
        for sample in (*made_up(data), *more):
            loss = _tried(lambda: compute(sample.data)) if sample.regular else None  # noqa: B023
            if loss is not None and bool(torch.isfinite(loss).all()):
                found.append(sample)
    room = len(found) if at_most is None else max(0, at_most - batch_size_of(data))
    return join([Sample("the data", data), *found[:room]])


def check_separate(model: Model, params: Tree, data: Tree, *, plan: Plan, tolerance: float = 1e-4) -> None:
    """Spoil one sample's row at every use of every leaf; no other sample's loss or output gradient may move.

    What is added to row b of a use, a large number or NaN, must reach nothing but loss b, and the slope of the others
    must not notice: else the row is not of sample b alone (it was put elsewhere in the batch, or mixed with others, if
    only in the backward) and what is clipped as one sample's is not. Unlike norms, which may agree by chance, this says
    so of samples that are all alike, too.
    """
    size = batch_size_of(data)
    for order in (torch.arange(size), torch.arange(size - 1, -1, -1)):
        batch = _rows(data, order.to(tree.leaves(data)[0].device))
        losses, slopes = _tapped(model, params, batch, plan, None)
        for value in (1e3, torch.nan):
            got, moved = _tapped(model, params, batch, plan, value)
            where = "its loss" if _moved(got[1:], losses[1:], _floor(losses[1:])) > tolerance else None
            for name, slope in slopes.items():
                largest = slope[1:].abs().max().clamp_min(1e-30)
                if where is None and _moved(moved[name][1:] / largest, slope[1:] / largest, 1.0) > tolerance:
                    where = "a gradient"
                if where is not None:
                    raise FdpError(
                        f"{model.name}: what was done to the first sample's rows alone moved another sample: {where}, "
                        f"seen at {name}. The model puts samples in another order, or mixes them in its forward or "
                        f"backward: what is clipped would not be one sample's. Keep sample b in row b; or, where "
                        f"samples are only put elsewhere, name the leaf in materialize=(...)"
                    )


def _tapped(
    model: Model,
    params: Tree,
    data: Tree,
    plan: Plan,
    spoil: float | None,
    *,
    rows: Tensor | int = 0,
    slopes: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses, and the slope of their sum at every use, if the rows of some samples there are moved by ``spoil``."""
    flat, size = tree.flatten(params), batch_size_of(data)
    watched = frozenset(use.path for uses in plan.uses for use in uses)
    every: dict[str, Tensor] = {}
    carry: Tree = ()
    with torch.enable_grad():  # also without slopes: a module may look at whether it is differentiated
        for i, (block, uses) in enumerate(zip(model.blocks, plan.uses)):
            weights = {path: flat[path] for path in tree.leaves(block.params)}
            taps = {name: tap.detach().clone() for name, tap in make_taps(uses, weights).items()}
            for tap in taps.values():
                if spoil is not None:
                    tap[rows] += spoil
                tap.requires_grad_(slopes)
            carry = block.apply(watch(block, weights, watched, Tape(size, taps)), carry, data)
            every |= {f"{block.name}, {name}" if i else name: tap for name, tap in taps.items()}
        losses = check_losses(model, carry, size)
        if not every or not losses.requires_grad:
            return losses.detach(), {}
        found = torch.autograd.grad(losses.sum(), list(every.values()), allow_unused=True, materialize_grads=True)
    return losses.detach(), dict(zip(every, found))


def check_rows(model: Model, params: Tree, data: Tree, *, plan: Plan, tolerance: float = 1e-4) -> None:
    """Spoil some samples' rows at every use of every leaf; the losses of the others must stay.

    A part of :func:`check_separate` that is cheap enough for a whole microbatch, forward only: every second sample's
    rows, then those of the first half. A model that puts the samples at hand in another order is seen, unless each
    stays in its half and at its parity.
    """
    places = torch.arange(batch_size_of(data), device=tree.leaves(data)[0].device)
    losses, _ = _tapped(model, params, data, plan, None, slopes=False)
    for spoilt in (places % 2 == 0, places < (len(places) + 1) // 2):
        got, _ = _tapped(model, params, data, plan, 1e3, rows=spoilt, slopes=False)
        if _moved(got[~spoilt], losses[~spoilt], _floor(losses[~spoilt])) > tolerance:
            raise FdpError(
                f"{model.name}: what was done to the rows of some samples alone moved the loss of another. The model "
                f"puts samples in another order, or mixes them: what is clipped would not be one sample's. Keep sample "
                f"b in row b; or, where samples are only put elsewhere, name the leaves in materialize=(...)"
            )


def check_norms(
    model: Model, params: Tree, data: Tree, *, plan: Plan, measured: Norms | None = None, tolerance: float = 1e-3
) -> None:
    """Compare the plan's norms with ``vmap(grad)`` of the whole loss, leaf by leaf. The error names the leaf.

    ``measured`` are norms that were computed elsewhere, by ranks that hold parts; default: by the plan, here.
    """
    norms = per_sample_norms(model, params, data, plan=plan)[1] if measured is None else measured
    found = reference_gradients(model, params, data).items()
    expected = {path: _norms(gradient) for path, gradient in found if path in plan.trainable}
    least = LEAST * torch.stack(list(expected.values())).nan_to_num().square().sum(0).sqrt()
    for path, each in expected.items():
        moved = _relative(norms.squared[path].double().sqrt(), each, least)
        if not moved <= tolerance:
            raise FdpError(f"{path}: per-sample norm differs from vmap(grad) by {moved:.1e} (allowed {tolerance:.0e})")


def reference_gradients(model: Model, params: Tree, data: Tree) -> Flat:
    """Every sample's gradient of every leaf by ``vmap(grad)`` of the whole loss: the definition, slow and large."""
    flat = tree.flatten(params)

    def loss_of_one(flat: Flat, one: Tree) -> Tensor:
        return model.loss(tree.unflatten(params, flat), tree.map(lambda leaf: leaf.unsqueeze(0), one)).squeeze(0)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        try:
            return torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0))(flat, data)
        except (RuntimeError, NotFunctional):  # no batching rule, a shape that depends on the data, plain autograd only
            return _one_by_one(loss_of_one, flat, data)


def _one_by_one(loss_of_one: Callable[[Flat, Tree], Tensor], flat: Flat, data: Tree) -> Flat:
    """The same by a plain backward for every sample."""
    rows: list[Flat] = []
    for i in range(batch_size_of(data)):
        opened = {path: leaf.detach().requires_grad_() for path, leaf in flat.items()}
        with torch.enable_grad():
            loss = loss_of_one(opened, tree.map(lambda leaf: leaf[i], data))  # noqa: B023
        slopes = torch.autograd.grad(loss, list(opened.values()), allow_unused=True, materialize_grads=True)
        rows.append(dict(zip(opened, slopes)))
    return {path: torch.stack([row[path] for row in rows]) for path in flat}


def _rows(data: Tree, which: Tensor) -> Tree:
    return tree.map(lambda leaf: leaf[which], data)


def _tried(losses: Callable[[], Tensor]) -> Tensor | None:
    """The losses, or None where the model cannot be given such data."""
    try:
        return losses()
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def _floor(losses: Tensor) -> float:
    """Below this a difference is relative to it: 1, or the largest loss. One very large loss must not hide others."""
    return min(1.0, float(losses.nan_to_num().abs().max()))


def _moved(got: Tensor, expected: Tensor, floor: float) -> float:
    """Largest difference, relative to the value itself or, where that is small, to ``floor``.

    A NaN in one but not in the other counts as infinite.
    """
    if not bool((torch.isfinite(got) == torch.isfinite(expected)).all()):
        return float("inf")
    got, expected = got.nan_to_num(), expected.nan_to_num()
    return float(((got - expected).abs() / expected.abs().clamp_min(max(floor, 1e-30))).max())


def _norms(gradient: Float[Tensor, " batch *shape"]) -> Float[Tensor, " batch"]:
    return gradient.double().reshape(len(gradient), -1).square().sum(1).sqrt()


def _relative(got: Tensor, expected: Tensor, least: Tensor) -> float:
    """Largest difference, relative to the value itself or, where that is small, to ``least``.

    A NaN in one but not in the other counts as infinite.
    """
    if not bool((torch.isfinite(got) == torch.isfinite(expected)).all()):
        return float("inf")
    got, expected = got.nan_to_num(), expected.nan_to_num()
    return float(((got - expected).abs() / torch.maximum(expected.abs(), least).clamp_min(1e-30)).max())
