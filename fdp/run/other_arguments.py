"""Arguments of :func:`fdp.private` that it does not have, and what fdp calls them: names of Opacus, and misspellings.

fdp.private(module, data, max_grad_norm=1.0)     # no such argument max_grad_norm: fdp calls it max_norm
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Collection
from typing import ParamSpec, TypeVar

from fdp.types import FdpError

P = ParamSpec("P")
R = TypeVar("R")

MEANT = {
    "max_grad_norm": "max_norm",
    "clip_norm": "max_norm",
    "l2_norm_clip": "max_norm",
    "clipping": "clip",
    "target_epsilon": "epsilon",
    "eps": "epsilon",
    "target_delta": "delta",
    "noise": "noise_multiplier",
    "sigma": "noise_multiplier",
    "data_loader": "dataset",
    "dataloader": "dataset",
    "train_dataset": "dataset",
    "data": "dataset",
    "model": "module",
    "criterion": "loss",
    "loss_fn": "loss",
    "collate": "collate_fn",
    "expected_batch_size": "batch_size",
    "max_physical_batch_size": "microbatch",
    "microbatch_size": "microbatch",
    "num_samples": "population",
    "sample_size": "population",
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "num_steps": "steps",
    "max_steps": "steps",
}
"""Arguments of other libraries by the argument of fdp that means the same."""

WHY = {
    "sample_rate": "it follows from batch_size and population; give these",
    "poisson_sampling": "fdp always samples this way; leave it out",
    "grad_sample_mode": "fdp chooses how to compute norms by itself; leave it out",
    "loss_reduction": "fdp clips the loss of every sample; leave it out",
    "noise_generator": "fdp's noise always comes from a cryptographic generator; leave it out",
    "secure_mode": "fdp's noise always comes from a cryptographic generator; leave it out",
}
"""Arguments of other libraries that have no counterpart, and what to do."""


class UnknownArgument(FdpError, TypeError):
    """A keyword argument that a function does not have."""


def explain_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` with an error for unknown keyword arguments that says what they are called."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def explained(*args: P.args, **given: P.kwargs) -> R:
        if unknown := [name for name in given if name not in known]:
            raise UnknownArgument("; ".join(_answer(name, known) for name in unknown))
        return function(*args, **given)

    return explained


def _answer(name: str, known: Collection[str]) -> str:
    """Return what to write instead of an argument that there is not."""
    said = f"no such argument {name}"
    if name in MEANT:
        return f"{said}: fdp calls it {MEANT[name]}"
    if name in WHY:
        return f"{said}: {WHY[name]}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"{said}: did you mean {near[0]}?" if near else f"{said}: expected one of {', '.join(known)}"
