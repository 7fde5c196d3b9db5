"""Checks of the assumptions behind per-sample clipping, run on a given model.

- ``check_independent``: the loss of a sample does not depend on the other samples of its batch. Batch normalisation,
  in-batch negatives and batch-dependent routing break this, and with it every per-sample bound.
- ``check_separate``: row b of every use holds sample b and no other, forward and backward.
- ``check_norms``: the plan's per-sample norms equal those of ``vmap(grad)``, the definition.

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
from fdp.checks.synthetic_samples import Sample, concatenate, make_synthetic_samples, nan_sample
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Plan
from fdp.gradients.tape import Tape
from fdp.gradients.taps import batch_size_of, make_taps, watch
from fdp.gradients.vjp import NotFunctional
from fdp.model import Model, check_losses
from fdp.types import FdpError, Flat, Norms, Tree

NORM_FLOOR = 1e-3
"""A leaf's norm is compared relative to at least this share of the sample's norm: some gradients are zero up to
rounding, such as those of key biases."""


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
    """Check that a sample's loss is the same alone, at another index of the batch, and beside other samples.

    The samples are some of ``data`` and synthetic ones of the same shapes (``fdp.checks.synthetic_samples``): one long
    document, many short ones, padding, equal values, zeros, the largest values, NaN. Samples that the model rejects
    alone are left out. ``losses_of(data)`` computes the losses if parameters are sharded; default: ``model.loss``.
    ``at_most`` is the largest batch; default: three times the size of ``data``. A dependence that appears only in
    larger batches, or only for other values, is not found. ``cause`` is a likely cause to name in the error.

    Guarantees:
      - the error names the samples, by index or by how they were made, and the relative change of a loss; it contains
        no value of the data and no loss.
    """
    size = batch_size_of(data)
    if size < 2:
        raise FdpError(f"check_independent: expected a batch of at least 2 samples, got {size}")
    compute = (lambda data: model.loss(params, data)) if losses_of is None else losses_of
    with torch.no_grad():
        losses = check_losses(model, compute(data), size)
        floats = any(leaf.is_floating_point() for leaf in tree.leaves(data))
        real = [_sample_at(data, i) for i in range(size)]
        chosen = {i: _loss_alone(compute, real[i], size) for i in (0, size // 2, size - 1)}
        expected = torch.cat([chosen.get(i, losses[i : i + 1]) for i in range(size)])
        check = partial(_check_unchanged, model, compute, tolerance=tolerance, floor=_loss_floor(losses), cause=cause)
        check(real, losses, expected)
        synthetic = make_synthetic_samples(data)
        tried = [(sample, _try_losses(partial(_loss_alone, compute, sample, size))) for sample in synthetic]
        known = [*zip(real, expected.split(1)), *((sample, loss) for sample, loss in tried if loss is not None)]
        room = max(3 * size, len(known)) if at_most is None else max(2, min(at_most, len(known)))
        batches = [[known[i] for i in order] for order in _orders(len(known), room)]
        spoiled = nan_sample(data)
        nan = _try_losses(partial(_loss_alone, compute, spoiled, size)) if floats else None
        if nan is not None:
            batches.append([*known[: room - 1], (spoiled, nan)])
        for batch in batches:
            samples, each = zip(*batch)
            check(samples, _losses_together(model, compute, samples, cause), torch.cat(each))


def _sample_at(data: Tree, i: int) -> Sample:
    return Sample(f"sample {i} of the data", tree.map(lambda leaf: leaf[i : i + 1], data))


def _loss_alone(compute: Callable[[Tree], Tensor], sample: Sample, size: int) -> Tensor:
    """Return the loss of a sample alone or, if the model rejects a batch of one, among copies of itself."""
    loss = _try_losses(lambda: compute(sample.data))
    return compute(concatenate([sample] * size))[:1] if loss is None or loss.shape != (1,) else loss


def _orders(count: int, room: int) -> list[list[int]]:
    """Return batches of ``room`` out of ``count`` samples; each sample is in two of them, with other neighbours."""
    forward = list(range(count))
    stride = next(n for n in range(max(2, math.isqrt(count)), count + 2) if math.gcd(n, count) == 1)
    strided = [i * stride % count for i in reversed(forward)]
    starts = range(0, count, room)
    return [[order[(start + i) % count] for i in range(room)] for order in (forward, strided) for start in starts]


def _check_unchanged(
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
    """Raise if a loss differs from the ``expected`` one, and name the neighbour that changes it."""
    for i, sample in enumerate(samples):
        moved = _relative_change(got[i : i + 1], expected[i : i + 1], floor)
        if not sample.regular or moved <= tolerance:
            continue
        beside = f"{len(samples) - 1} others"
        for other in samples:
            pair = _try_losses(lambda: compute(concatenate([sample, other])))  # noqa: B023
            if other is not sample and (
                pair is None or _relative_change(pair[:1], expected[i : i + 1], floor) > tolerance
            ):
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


def _losses_together(
    model: Model, compute: Callable[[Tree], Tensor], samples: Sequence[Sample], cause: str | None
) -> Tensor:
    losses = _try_losses(lambda: compute(concatenate(samples)))
    if losses is None:
        raise FdpError(
            f"{model.name}: fails on a batch of {len(samples)} samples (real and synthetic, of different lengths and "
            f"values) although it accepts each of them alone, so samples are not independent. {cause or LIKELY_CAUSES}"
        )
    return losses


def mix_samples(
    model: Model,
    params: Tree,
    data: Tree,
    *,
    losses_of: Callable[[Tree], Tensor] | None = None,
    at_most: int | None = None,
    more: Sequence[Sample] = (),
) -> Tree:
    """Return a batch of ``data`` and synthetic samples with a finite loss, at most ``at_most`` in all.

    ``more`` are samples to try besides those of ``fdp.checks.synthetic_samples``.
    """
    compute = (lambda data: model.loss(params, data)) if losses_of is None else losses_of
    found = []
    with torch.no_grad():
        for sample in (*make_synthetic_samples(data), *more):
            loss = _try_losses(lambda: compute(sample.data)) if sample.regular else None  # noqa: B023
            if loss is not None and bool(torch.isfinite(loss).all()):
                found.append(sample)
    room = len(found) if at_most is None else max(0, at_most - batch_size_of(data))
    return concatenate([Sample("the data", data), *found[:room]])


def check_separate(model: Model, params: Tree, data: Tree, *, plan: Plan, tolerance: float = 1e-4) -> None:
    """Check that changing one sample's row at every use of every leaf changes no other sample's loss or gradient.

    A large number or NaN is added to row 0 of every use. If it moves another sample's loss or output gradient, the row
    does not hold that sample alone: the model reorders samples, or mixes them in its forward or backward, and the rows
    clipped as one sample's are not. Unlike a comparison of norms, this works even if all samples are equal.
    """
    size = batch_size_of(data)
    for order in (torch.arange(size), torch.arange(size - 1, -1, -1)):
        batch = _select_samples(data, order.to(tree.leaves(data)[0].device))
        losses, slopes = _tapped_losses(model, params, batch, plan, None)
        for value in (1e3, torch.nan):
            got, moved = _tapped_losses(model, params, batch, plan, value)
            where = "its loss" if _relative_change(got[1:], losses[1:], _loss_floor(losses[1:])) > tolerance else None
            for name, slope in slopes.items():
                largest = slope[1:].abs().max().clamp_min(1e-30)
                if where is None and _relative_change(moved[name][1:] / largest, slope[1:] / largest, 1.0) > tolerance:
                    where = "a gradient"
                if where is not None:
                    raise FdpError(
                        f"{model.name}: changing only the first sample's rows changed another sample: {where}, seen at "
                        f"{name}. The model reorders samples, or mixes them in its forward or backward, so the clipped "
                        f"rows would not be one sample's. Keep sample b in row b; or, if samples are only reordered, "
                        f"name the leaf in materialize=(...)"
                    )


def _tapped_losses(
    model: Model,
    params: Tree,
    data: Tree,
    plan: Plan,
    spoil: float | None,
    *,
    rows: Tensor | int = 0,
    slopes: bool = True,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the losses, and the gradient of their sum at every use, after adding ``spoil`` to some rows there."""
    flat, size = tree.flatten(params), batch_size_of(data)
    watched = frozenset(use.path for uses in plan.uses for use in uses)
    every: dict[str, Tensor] = {}
    carry: Tree = ()
    with torch.enable_grad():  # even without slopes: a module may test torch.is_grad_enabled()
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
    """Check that changing some samples' rows at every use of every leaf leaves the other losses unchanged.

    The forward part of :func:`check_separate`, cheap enough for a full microbatch: it changes every second sample's
    rows, then those of the first half. A reordering is found unless each sample stays in its half and at its parity.
    """
    index = torch.arange(batch_size_of(data), device=tree.leaves(data)[0].device)
    losses, _ = _tapped_losses(model, params, data, plan, None, slopes=False)
    for selected in (index % 2 == 0, index < (len(index) + 1) // 2):
        got, _ = _tapped_losses(model, params, data, plan, 1e3, rows=selected, slopes=False)
        if _relative_change(got[~selected], losses[~selected], _loss_floor(losses[~selected])) > tolerance:
            raise FdpError(
                f"{model.name}: changing only the rows of some samples changed the loss of another. The model reorders "
                f"samples, or mixes them, so the clipped rows would not be one sample's. Keep sample b in row b; or, "
                f"if samples are only reordered, name the leaves in materialize=(...)"
            )


def check_norms(
    model: Model, params: Tree, data: Tree, *, plan: Plan, measured: Norms | None = None, tolerance: float = 1e-3
) -> None:
    """Compare the plan's norms with ``vmap(grad)`` of the full loss, leaf by leaf. The error names the leaf.

    ``measured`` are norms computed elsewhere, by ranks that hold shards; default: computed here, by the plan.
    """
    norms = per_sample_norms(model, params, data, plan=plan)[1] if measured is None else measured
    found = reference_gradients(model, params, data).items()
    expected = {path: _norms(gradient) for path, gradient in found if path in plan.trainable}
    least = NORM_FLOOR * torch.stack(list(expected.values())).nan_to_num().square().sum(0).sqrt()
    for path, each in expected.items():
        moved = _relative_change(norms.squared[path].double().sqrt(), each, least)
        if not moved <= tolerance:
            raise FdpError(f"{path}: per-sample norm differs from vmap(grad) by {moved:.1e} (allowed {tolerance:.0e})")


def reference_gradients(model: Model, params: Tree, data: Tree) -> Flat:
    """Return per-sample gradients of every leaf by ``vmap(grad)`` of the full loss: the definition, slow and large."""
    flat = tree.flatten(params)

    def loss_of_one(flat: Flat, one: Tree) -> Tensor:
        return model.loss(tree.unflatten(params, flat), tree.map(lambda leaf: leaf.unsqueeze(0), one)).squeeze(0)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        try:
            return torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0))(flat, data)
        except (RuntimeError, NotFunctional):  # no batching rule, a shape that depends on the data, plain autograd only
            return _one_by_one(loss_of_one, flat, data)


def _one_by_one(loss_of_one: Callable[[Flat, Tree], Tensor], flat: Flat, data: Tree) -> Flat:
    """Compute the same with one plain backward per sample."""
    rows: list[Flat] = []
    for i in range(batch_size_of(data)):
        opened = {path: leaf.detach().requires_grad_() for path, leaf in flat.items()}
        with torch.enable_grad():
            loss = loss_of_one(opened, tree.map(lambda leaf: leaf[i], data))  # noqa: B023
        slopes = torch.autograd.grad(loss, list(opened.values()), allow_unused=True, materialize_grads=True)
        rows.append(dict(zip(opened, slopes)))
    return {path: torch.stack([row[path] for row in rows]) for path in flat}


def _select_samples(data: Tree, which: Tensor) -> Tree:
    return tree.map(lambda leaf: leaf[which], data)


def _try_losses(losses: Callable[[], Tensor]) -> Tensor | None:
    """Return the losses, or None if the model rejects the data."""
    try:
        return losses()
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def _loss_floor(losses: Tensor) -> float:
    """Return the floor of relative changes: 1, or the largest loss if smaller, lest one huge loss hide the others."""
    return min(1.0, float(losses.nan_to_num().abs().max()))


def _relative_change(got: Tensor, expected: Tensor, floor: float | Tensor) -> float:
    """Return the largest difference, relative to the expected value or, if that is smaller, to ``floor``.

    A NaN in one but not in the other counts as infinite.
    """
    if not bool((torch.isfinite(got) == torch.isfinite(expected)).all()):
        return float("inf")
    got, expected = got.nan_to_num(), expected.nan_to_num()
    return float(((got - expected).abs() / expected.abs().clamp_min(floor).clamp_min(1e-30)).max())


def _norms(gradient: Float[Tensor, " batch *shape"]) -> Float[Tensor, " batch"]:
    return gradient.double().reshape(len(gradient), -1).square().sum(1).sqrt()
