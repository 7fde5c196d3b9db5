"""Checks of what a proof takes for granted, made on the model at hand.

- ``check_independent``: the loss of a sample does not depend on the other samples of its batch. Batch normalisation,
  in-batch negatives and batch-dependent routing break this, and with it every per-sample bound.
- ``check_separate``: the rows that are clipped as a sample's hold that sample and no other, forward and backward.
- ``check_norms``: the plan's per-sample norms are those of ``vmap(grad)``, the definition.

    >>> check_independent(model, params, data)
    >>> check_norms(model, params, data, plan=plan)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fdp import tree
from fdp.methods import Plan
from fdp.model import Model, check_losses
from fdp.per_sample import per_sample_norms
from fdp.taps import Tape, batch_size_of, make_taps, watch
from fdp.types import FdpError, Flat, Norms, Tree


def check_independent(
    model: Model,
    params: Tree,
    data: Tree,
    *,
    losses_of: Callable[[Tree], Tensor] | None = None,
    tolerance: float = 1e-4,
) -> None:
    """Change the other samples, and their number; the loss of a sample must stay.

    The batch is put in reverse order, and samples are taken alone. The others become copies of a sample itself, which
    is valid data whatever the model expects; then zeros (which may mean padding, or no label), then the largest values
    of the batch, floats a thousand times larger, then NaN: a model that cannot be given these is not tried with them.
    A sample whose end is zeros (shorter than the others) is taken alone as well, and all of them three times over.
    What depends on others only where none of this leads, or only among more samples, is not seen: give a batch as
    large as a microbatch. Raises an error that says what was changed and by how much a loss moved.
    ``losses_of(data)`` computes the losses where ``model.loss(params, data)`` cannot, because parameters are in parts.
    """
    size = batch_size_of(data)
    if size < 2:
        raise FdpError(f"check_independent: expected a batch of at least 2 samples, got {size}")
    compute = (lambda data: model.loss(params, data)) if losses_of is None else losses_of
    with torch.no_grad():
        losses = check_losses(model, compute(data), size)

        def check(change: str, got: Tensor, expected: Tensor) -> None:
            moved = _moved(got, expected, losses)
            if not moved <= tolerance:
                raise FdpError(
                    f"{model.name}: the loss of a sample changed by {moved:.1e} on {change}, so samples are not "
                    f"independent and clipping bounds nothing. Look for batch norm (use group or layer norm), a loss "
                    f"over pairs in the batch, or routing that depends on the batch"
                )

        backwards = torch.arange(size - 1, -1, -1, device=losses.device)
        check("reversing the batch", compute(_rows(data, backwards)), losses[backwards])
        for i in (0, size - 1):
            copies = torch.full((size,), i, device=losses.device)
            check(f"replacing all samples but {i}", compute(_rows(data, copies)), losses[copies])
        i = size // 2
        alone = torch.tensor([i], device=losses.device)
        check(f"leaving sample {i} alone", compute(_rows(data, alone)), losses[alone])
        floats = any(leaf.is_floating_point() for leaf in tree.leaves(data))
        for others, change in OTHERS.items():
            if change is _nan and not floats:
                continue
            got = _tried(lambda: compute(_spoilt(data, i, change)))  # noqa: B023
            if got is not None:
                check(f"making all samples but {i} {others}", got[alone], losses[alone])
        cut = _spoilt(data, i, _same, own=_cut)
        short, among = _tried(lambda: compute(_rows(cut, alone))), _tried(lambda: compute(cut))
        if short is not None and among is not None:
            check(f"leaving sample {i} alone, the end of it zeros", among[alone], short)
        if losses_of is None:
            thrice = torch.arange(3 * size, device=losses.device) % size
            check("having every sample three times", compute(_rows(data, thrice)), losses[thrice])


def _zeros(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf)


def _largest(leaf: Tensor) -> Tensor:
    if leaf.is_floating_point():
        return leaf * 1e3
    return torch.ones_like(leaf) if leaf.dtype == torch.bool else leaf.amax().expand_as(leaf)


def _cut(row: Tensor) -> Tensor:
    """One sample's integers with zeros, such as padding, from the middle on."""
    if row.is_floating_point() or row.ndim == 0:
        return row
    return torch.where(torch.arange(len(row), device=row.device).view(-1, *[1] * (row.ndim - 1)) < len(row) / 2, row, 0)


def _nan(leaf: Tensor) -> Tensor:
    return torch.full_like(leaf, torch.nan) if leaf.is_floating_point() else leaf


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {"zeros": _zeros, "as large as can be": _largest, "NaN": _nan}
"""What else a sample's neighbours may be, leaf by leaf."""


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
            where = "its loss" if _moved(got[1:], losses[1:], losses[1:]) > tolerance else None
            for name, slope in slopes.items():
                largest = slope[1:].abs().max().clamp_min(1e-30)
                if where is None and _moved(moved[name][1:] / largest, slope[1:] / largest, None) > tolerance:
                    where = "a gradient"
                if where is not None:
                    raise FdpError(
                        f"{model.name}: what was done to the first sample's rows alone moved another sample: {where}, "
                        f"seen at {name}. The model puts samples in another order, or mixes them in its forward or "
                        f"backward: what is clipped would not be one sample's. Keep sample b in row b; or, where "
                        f"samples are only put elsewhere, name the leaf in materialize=(...)"
                    )


def _tapped(
    model: Model, params: Tree, data: Tree, plan: Plan, spoil: float | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses, and the slope of their sum at every use, if the first sample's row there is moved by ``spoil``."""
    flat, size = tree.flatten(params), batch_size_of(data)
    watched = frozenset(use.path for uses in plan.uses for use in uses)
    every: dict[str, Tensor] = {}
    carry: Tree = ()
    with torch.enable_grad():
        for i, (block, uses) in enumerate(zip(model.blocks, plan.uses)):
            weights = {path: flat[path] for path in tree.leaves(block.params)}
            taps = {name: tap.detach().clone() for name, tap in make_taps(uses, weights).items()}
            for tap in taps.values():
                if spoil is not None:
                    tap[0] += spoil
                tap.requires_grad_()
            carry = block.apply(watch(block, weights, watched, Tape(size, taps)), carry, data)
            every |= {f"{block.name}, {name}" if i else name: tap for name, tap in taps.items()}
        losses = check_losses(model, carry, size)
        if not every or not losses.requires_grad:
            return losses.detach(), {}
        slopes = torch.autograd.grad(losses.sum(), list(every.values()), allow_unused=True, materialize_grads=True)
    return losses.detach(), dict(zip(every, slopes))


def check_norms(
    model: Model, params: Tree, data: Tree, *, plan: Plan, measured: Norms | None = None, tolerance: float = 1e-3
) -> None:
    """Compare the plan's norms with ``vmap(grad)`` of the whole loss, leaf by leaf. The error names the leaf.

    ``measured`` are norms that were computed elsewhere, by ranks that hold parts; default: by the plan, here.
    """
    norms = per_sample_norms(model, params, data, plan=plan)[1] if measured is None else measured
    for path, gradient in reference_gradients(model, params, data).items():
        if path not in plan.trainable:
            continue
        expected = gradient.double().reshape(len(gradient), -1).square().sum(1).sqrt()
        got = norms.squared[path].double().sqrt()
        moved = max(_relative(got[b : b + 1], expected[b : b + 1]) for b in range(len(got)))
        if not moved <= tolerance:
            raise FdpError(f"{path}: per-sample norm differs from vmap(grad) by {moved:.1e} (allowed {tolerance:.0e})")


def reference_gradients(model: Model, params: Tree, data: Tree) -> Flat:
    """Every sample's gradient of every leaf by ``vmap(grad)`` of the whole loss: the definition, slow and large."""
    flat = tree.flatten(params)

    def loss_of_one(flat: Flat, one: Tree) -> Tensor:
        return model.loss(tree.unflatten(params, flat), tree.map(lambda leaf: leaf.unsqueeze(0), one)).squeeze(0)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0))(flat, data)


def _rows(data: Tree, which: Tensor) -> Tree:
    return tree.map(lambda leaf: leaf[which], data)


def _same(row: Tensor) -> Tensor:
    return row


def _spoilt(
    data: Tree, keep: int, change: Callable[[Tensor], Tensor], *, own: Callable[[Tensor], Tensor] = _same
) -> Tree:
    """``data`` with every sample changed but one, which is made its ``own``."""

    def spoilt(leaf: Tensor) -> Tensor:
        other = change(leaf).clone()
        other[keep] = own(leaf[keep])
        return other

    return tree.map(spoilt, data)


def _tried(losses: Callable[[], Tensor]) -> Tensor | None:
    """The losses, or None where the model cannot be given such data."""
    try:
        return losses()
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError):
        return None


def _moved(got: Tensor, expected: Tensor, losses: Tensor | None) -> float:
    """Largest difference, relative to the value itself or, where that is small, to 1 or the largest of ``losses``.

    A NaN in one but not in the other counts as infinite. One very large loss must not hide what the others do.
    """
    if not bool((torch.isfinite(got) == torch.isfinite(expected)).all()):
        return float("inf")
    got, expected = got.nan_to_num(), expected.nan_to_num()
    floor = 1.0 if losses is None else min(1.0, float(losses.nan_to_num().abs().max()))
    return float(((got - expected).abs() / expected.abs().clamp_min(max(floor, 1e-30))).max())


def _relative(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest value; a NaN in one but not in the other counts as infinite."""
    if not bool((torch.isfinite(got) == torch.isfinite(expected)).all()):
        return float("inf")
    got, expected = got.nan_to_num(), expected.nan_to_num()
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
