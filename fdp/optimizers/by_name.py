"""Optimizers by name, for the command line and :func:`fdp.private`.

>>> OPTIMIZERS["adamw"](1e-3, weight_decay=0.1)
"""

from __future__ import annotations

from collections.abc import Callable

from fdp import optimizers
from fdp.optimizers import Optimizer

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adamw": optimizers.adamw,
    # as in torch.optim, Adam's decay is L2 regularisation: before the moments
    "adam": lambda rate, *, weight_decay=0.0: optimizers.chain(
        optimizers.add_decayed_weights(weight_decay), optimizers.adam(rate)
    ),
    "sgd": optimizers.sgd,
    "lamb": optimizers.lamb,
    "adafactor": optimizers.adafactor,
    "adagrad": optimizers.adagrad,
    "adadelta": optimizers.adadelta,
    "adamax": optimizers.adamax,
}
"""Functions of a learning rate and a weight decay. K-FAC is not among them: it needs more than that."""
