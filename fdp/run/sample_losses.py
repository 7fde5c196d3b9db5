"""The loss of every sample, from a loss in the usual form of torch.

losses_b = loss(outputs[b : b + 1], targets[b : b + 1])

nn.CrossEntropyLoss(), F.cross_entropy       a loss with a ``reduction``: evaluated with "none", then reduced within
                                             each sample; a class weight multiplies the sample's loss
lambda outputs, targets: (batch,)            taken as it is
lambda outputs, targets: a number            evaluated sample by sample, if its value on a batch is the mean or the
                                             sum over the samples; a loss that couples samples is refused
lambda module, batch: (batch,)               calls the module itself; the first argument is named ``module``

>>> losses = sample_losses(nn.CrossEntropyLoss(), outputs, targets)
>>> losses(outputs, targets)                                                       # (batch,)
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fdp.types import FdpError

Loss: TypeAlias = Callable[[Any, Any], Tensor]
"""``loss(outputs, targets)``, of a batch or of every sample."""

MODULE_NAMES = ("module", "model", "net")
"""Names of the first argument of a loss that is given the module instead of its outputs."""
TOLERANCE = 1e-4
REMEDY = (
    "give a loss that returns one number per sample, such as "
    "lambda outputs, targets: F.cross_entropy(outputs, targets, reduction='none')"
)


def takes_module(loss: Any) -> bool:
    """Return True if the first argument of ``loss`` is the module: ``loss(module, batch)``."""
    if isinstance(loss, nn.Module):
        return False
    names = _arguments(loss)
    return bool(names) and names[0] in MODULE_NAMES


def sample_losses(loss: Loss, outputs: Any, targets: Any) -> Loss:
    """Return the function that computes the loss of every sample; outputs and targets of an example are used to check.

    Guarantees:
      - on the example, the loss of a sample is that of the sample alone (times its class weight, if there are any);
      - a loss of a batch that is neither the mean nor the sum of its samples' losses is refused.
    """
    reduction, whole = _reduction_of(loss), loss
    if reduction in ("mean", "sum"):
        by_sample = _within_samples(_without_reduction(loss), reduction, _ignored_index(loss))
        if not _has_class_weights(loss):
            _check_alone(by_sample, whole, outputs, targets)
        return by_sample
    with torch.no_grad():
        value = _call(loss, outputs, targets)
    if tuple(value.shape) == (len(targets),) and len(targets) > 1:
        return loss
    if value.ndim > 0:
        raise FdpError(
            f"loss: expected one number per sample, shape ({len(targets)},), or one number, got shape "
            f"{tuple(value.shape)}; average over everything but dimension 0: .flatten(1).mean(1)"
        )
    _check_separate(whole, value, outputs, targets)
    return _vectorised(loss, outputs, targets) or _one_by_one(loss)


def _vectorised(loss: Loss, outputs: Any, targets: Any) -> Loss | None:
    """Return the losses of all samples at once by ``vmap``, or None if the loss does not allow that."""

    def each_sample(outputs: Any, targets: Any) -> Tensor:
        return torch.vmap(lambda output, target: _call(loss, output[None], target[None]).reshape(()))(outputs, targets)

    if not isinstance(outputs, Tensor):
        return None
    try:
        with torch.no_grad():
            same = torch.allclose(each_sample(outputs, targets), _one_by_one(loss)(outputs, targets), rtol=TOLERANCE)
    except Exception:  # operations without a batching rule, or whose shapes depend on values
        return None
    return each_sample if same else None


def _one_by_one(loss: Loss) -> Loss:
    def each_sample(outputs: Any, targets: Any) -> Tensor:
        rows = [_call(loss, _row(outputs, b), targets[b : b + 1]) for b in range(len(targets))]
        return torch.stack([row.reshape(()) for row in rows])

    return each_sample


def _row(outputs: Any, b: int) -> Any:
    if isinstance(outputs, Tensor):
        return outputs[b : b + 1]
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(_row(part, b) for part in outputs)
    raise FdpError(
        f"loss: expected outputs that are tensors, to be taken apart by sample, got {type(outputs).__name__}; {REMEDY}"
    )


def _check_separate(loss: Loss, value: Tensor, outputs: Any, targets: Any) -> None:
    """Refuse a loss of a batch that is neither the mean nor the sum of the losses of its samples."""
    with torch.no_grad():
        each = _one_by_one(loss)(outputs, targets)
    for expected in (each.mean(), each.sum()):
        if torch.allclose(value, expected, rtol=TOLERANCE, atol=TOLERANCE):
            return
    raise FdpError(
        f"loss: expected the loss of a batch to be the mean of its samples' losses, got another number: the loss "
        f"compares samples with each other, or weighs them by the batch, and no bound on one sample would hold; "
        f"{REMEDY}"
    )


def _check_alone(by_sample: Loss, loss: Loss, outputs: Any, targets: Any) -> None:
    """Refuse a reduced loss that differs from the loss of each sample alone."""
    with torch.no_grad():
        ours, alone = by_sample(outputs, targets), _one_by_one(loss)(outputs, targets)
    known = torch.isfinite(alone)  # a mean over no target at all is NaN alone, and 0 here
    if not torch.allclose(ours[known], alone[known], rtol=TOLERANCE, atol=TOLERANCE):
        raise FdpError(
            f"loss: expected {_name(loss)} with reduction='none' to give the loss of each sample alone, got other "
            f"numbers; {REMEDY}"
        )


def _within_samples(elements: Loss, reduction: str, ignored: int | None) -> Loss:
    """Return the loss of every sample: the elements of each sample, reduced."""

    def reduced_losses(outputs: Any, targets: Any) -> Tensor:
        each = _call(elements, outputs, targets)
        if each.ndim == 0 or len(each) != len(targets):
            raise FdpError(
                f"loss: expected {len(targets)} samples in dim 0, got a loss of shape {tuple(each.shape)}; {REMEDY}"
            )
        if each.ndim == 1:
            return each
        each = each.flatten(1)
        if reduction == "sum":
            return each.sum(1)
        if ignored is None or targets.is_floating_point():
            return each.mean(1)
        return each.sum(1) / (targets != ignored).flatten(1).sum(1).clamp_min(1)

    return reduced_losses


def _without_reduction(loss: Any) -> Loss:
    if isinstance(loss, nn.Module):
        elements = copy.deepcopy(loss)
        elements.reduction = "none"  # type: ignore[assignment]
        return elements
    return functools.partial(loss, reduction="none")


def _reduction_of(loss: Any) -> str | None:
    """Return the reduction of a loss of torch, or of any callable with an argument ``reduction``; None without one."""
    found = getattr(loss, "reduction", None) if isinstance(loss, nn.Module) else _default(loss, "reduction")
    return found if isinstance(found, str) else None


def _ignored_index(loss: Any) -> int | None:
    found = loss.ignore_index if hasattr(loss, "ignore_index") else _default(loss, "ignore_index")
    return found if isinstance(found, int) else None


def _has_class_weights(loss: Any) -> bool:
    return getattr(loss, "weight", None) is not None or (
        isinstance(loss, functools.partial) and loss.keywords.get("weight") is not None
    )


def _default(loss: Any, name: str) -> Any:
    try:
        argument = inspect.signature(loss).parameters.get(name)
    except (TypeError, ValueError):
        return None
    return None if argument is None or argument.default is inspect.Parameter.empty else argument.default


def _arguments(loss: Any) -> list[str]:
    try:
        return [name for name, argument in inspect.signature(loss).parameters.items() if argument.kind.value <= 1]
    except (TypeError, ValueError):
        return []


def _call(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    try:
        value = loss(outputs, targets)
    except TypeError as error:
        if "object is not callable" not in str(error) or not (names := _arguments(loss)):
            raise
        raise FdpError(
            f"loss: expected loss(outputs, targets), got one that calls {names[0]!r} or another argument; to be given "
            f"the module and the batch, name its first argument {' or '.join(MODULE_NAMES)}: "
            f"loss=lambda module, batch: ..."
        ) from error
    if isinstance(value, Tensor):
        return value
    raise FdpError(f"loss: expected a tensor, got {type(value).__name__}; {REMEDY}")


def _name(loss: Any) -> str:
    return type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", "the loss")
