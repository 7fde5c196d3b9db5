"""An optimizer of fdp from a name, or from a class or an instance of ``torch.optim``.

"adamw", torch.optim.AdamW, torch.optim.AdamW(module.parameters(), lr=1e-3, weight_decay=0.1), optimizers.adamw(1e-3)

Of an instance the settings are used; its state is fdp's own. What fdp would compute differently is refused.

    >>> optimizer = as_optimizer("sgd", lr=0.5)
    >>> optimizer = as_optimizer(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fdp import optimizers
from fdp.optimizers import Optimizer, Schedule
from fdp.optimizers.by_name import OPTIMIZERS
from fdp.types import FdpError

LEARNING_RATES = {"sgd": 0.1, "adagrad": 1e-2, "adadelta": 1.0}
"""Default learning rates of optimizers whose steps are in units of the gradient or of the parameters."""
DEFAULT_LR = 1e-3
REFUSED = ("amsgrad", "maximize", "differentiable")
"""Settings of torch's optimizers that change the result and that fdp does not have."""


def as_optimizer(given: Any, *, lr: float | Schedule | None = None, weight_decay: float | None = None) -> Optimizer:
    """Return the optimizer that a name, an optimizer of torch or one of fdp stands for."""
    if isinstance(given, Optimizer):
        _refuse(lr=lr, weight_decay=weight_decay)
        return given
    if isinstance(given, torch.optim.Optimizer):
        _refuse(weight_decay=weight_decay)
        return _from_instance(given, lr)
    name = given.__name__.lower() if isinstance(given, type) else given
    if name not in OPTIMIZERS:
        got = given.__name__ if isinstance(given, type) else repr(given)
        raise FdpError(
            f"optimizer: expected one of {', '.join(OPTIMIZERS)}, an SGD, Adam or AdamW of torch.optim, or an "
            f"optimizer of fdp.optimizers; got {got}"
        )
    rate = LEARNING_RATES.get(name, DEFAULT_LR) if lr is None else lr
    return OPTIMIZERS[name](rate, weight_decay=0.0 if weight_decay is None else weight_decay)


def _from_instance(given: torch.optim.Optimizer, lr: float | Schedule | None) -> Optimizer:
    """Return the optimizer with the settings of one of torch."""
    name, groups = type(given).__name__.lower(), given.param_groups
    if len(groups) > 1:
        raise FdpError(
            f"optimizer: expected one group of parameters, got {len(groups)}; give an optimizer of fdp.optimizers, "
            f"whose weight decay takes a mask, or freeze parameters (requires_grad_(False))"
        )
    if given.state:
        raise FdpError(
            f"optimizer: expected a new {type(given).__name__}, got one that has made steps; its state would be lost"
        )
    settings: Mapping[str, Any] = groups[0]
    if odd := [key for key in REFUSED if settings.get(key)]:
        raise FdpError(f"optimizer: expected {type(given).__name__} without {odd[0]}, got it; leave it out")
    rate = float(settings["lr"]) if lr is None else lr
    if name == "sgd" and not settings["dampening"]:
        chosen = {key: settings[key] for key in ("momentum", "nesterov", "weight_decay")}
        return optimizers.sgd(rate, **chosen)
    if name in ("adam", "adamw"):
        (b1, b2), decay = settings["betas"], settings["weight_decay"]
        decoupled = name == "adamw" or settings.get("decoupled_weight_decay")
        return (optimizers.adamw if decoupled else _adam)(rate, b1=b1, b2=b2, eps=settings["eps"], weight_decay=decay)
    raise FdpError(
        f"optimizer: expected SGD (without dampening), Adam or AdamW of torch.optim, got {type(given).__name__}; use "
        f"one of {', '.join(OPTIMIZERS)} by name"
    )


def _adam(rate: float | Schedule, *, weight_decay: float, **settings: float) -> Optimizer:
    """Return Adam; as in torch.optim, its decay is L2 regularisation: before the moments."""
    adam = optimizers.adam(rate, **settings)
    return optimizers.chain(optimizers.add_decayed_weights(weight_decay), adam) if weight_decay else adam


def _refuse(**settings: Any) -> None:
    if odd := [name for name, value in settings.items() if value is not None]:
        raise FdpError(f"{odd[0]}: expected it inside the optimizer that you give, got it beside; leave it out here")
