"""Checks of what a proof takes for granted, made on the model at hand.

- ``check_independent``: the loss of a sample does not depend on the other samples of its batch. Batch normalisation,
  in-batch negatives and batch-dependent routing break this, and with it every per-sample bound.
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
from fdp.taps import batch_size_of
from fdp.types import FdpError, Flat, Norms, Tree


def check_independent(
    model: Model,
    params: Tree,
    data: Tree,
    *,
    losses_of: Callable[[Tree], Tensor] | None = None,
    tolerance: float = 1e-4,
) -> None:
    """Replace every sample but one, for the first and the last sample; the loss of that one must stay.

    The others become copies of the sample itself, which is valid data whatever the model expects, and are also put in
    reverse order. Raises an error that says which sample moved and by how much. ``losses_of(data)`` computes the
    losses where ``model.loss(params, data)`` cannot, because the parameters are in parts.
    """
    size = batch_size_of(data)
    if size < 2:
        raise FdpError(f"check_independent: expected a batch of at least 2 samples, got {size}")
    compute = (lambda data: model.loss(params, data)) if losses_of is None else losses_of
    with torch.no_grad():
        losses = check_losses(model, compute(data), size)
        trials = {"reversing the batch": torch.arange(size - 1, -1, -1, device=losses.device)}
        for i in (0, size - 1):
            trials[f"replacing all samples but {i}"] = torch.full((size,), i, device=losses.device)
        for change, source in trials.items():
            got = compute(tree.map(lambda leaf: leaf[source], data))  # noqa: B023
            expected = losses[source]
            moved = _relative(got, expected)
            if not moved <= tolerance:
                raise FdpError(
                    f"{model.name}: the loss of a sample changed by {moved:.1e} on {change}, so samples are not "
                    f"independent and clipping bounds nothing. Look for batch norm (use group or layer norm), a loss "
                    f"over pairs in the batch, or routing that depends on the batch"
                )


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


def _relative(got: Tensor, expected: Tensor) -> float:
    """Largest difference relative to the largest value; a NaN in one but not in the other counts as infinite."""
    if not bool((torch.isfinite(got) == torch.isfinite(expected)).all()):
        return float("inf")
    got, expected = got.nan_to_num(), expected.nan_to_num()
    return float((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
