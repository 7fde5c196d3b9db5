"""Checks of a model that a private step runs once, before its first sum, on some real samples and synthetic ones.

    independence    the loss of a sample does not depend on the other samples       any model
    rows            row b of every use holds sample b                               up to 20 million, not sharded
    norms           the plan's norms equal those of ``vmap(grad)``                  up to 20 million parameters
    sizes           a sample adds the same in microbatches of all sizes             if the plan has several

If the first fails, clipping bounds nothing; if the next two fail, it bounds the wrong thing; and if the last one does,
a sample moves what others add. Every rank takes part, with the same samples. :func:`fdp.step.make_train_step` runs the
checks at a step's first call, ``fdp train`` at its start.

    >>> check_model(model, params, data, plan=plan)
    >>> step = make_train_step(..., checks=Checks.SKIPPED)              # a model that was checked elsewhere
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import cache

import torch
from fdp_kernels import cpu_library
from torch import Tensor

from fdp import keys, tree
from fdp.checks import model_checks
from fdp.checks.equal_sizes import SamplePart, check_sizes
from fdp.gradients.execution import LOCAL, STORE_ALL, Execution
from fdp.gradients.per_sample import losses_of, per_sample_norms
from fdp.gradients.plan import Method, Plan, choices_in_full, make_plan
from fdp.gradients.taps import batch_size_of
from fdp.model import Model
from fdp.parallel.agree import gather_values
from fdp.parallel.dtensors import full_tensor, localize
from fdp.parallel.sharding import Sharding, abstract_params
from fdp.privacy.microbatches import split_microbatches
from fdp.types import Batch, FdpError, Key, Tree

NORM_CHECK_MAX_PARAMETERS = 20_000_000
"""Largest number of parameters for which per-sample norms are compared with ``vmap(grad)``."""
NORM_CHECK_SAMPLES = 5
"""Number of samples in that comparison: two real, one long, one of many short documents, one of padding."""
INDEPENDENCE_BATCH_SIZE = 16
"""Most samples in a batch of the independence check; fewer if a microbatch is smaller."""
REAL_SAMPLES = 4
"""Number of real samples that are checked."""


class Checks(Enum):
    """The time at which a private step checks its model. If SKIPPED, the sensitivity is yours to guarantee."""

    FIRST_CALL = "first call"
    SKIPPED = "skipped"


def check_model(
    model: Model,
    params: Tree,
    data: Tree,
    *,
    plan: Plan,
    execution: Execution = LOCAL,
) -> None:
    """Check that clipping bounds what this model's samples contribute; the error says what is wrong.

    ``params`` are full, or this rank's shards, on any device; ``data`` holds samples, the same on every rank, of which
    the first few are used. Norms are computed by the choices of ``plan``, in float32 at least; gradients that it stores
    in 8 bits are stored as they are, since their rounding is no mistake of the model.
    """
    sharding = execution.sharding
    count, device = max(2, min(REAL_SAMPLES, batch_size_of(data))), tree.leaves(data)[0].device
    many = first_samples(data, max(2, min(INDEPENDENCE_BATCH_SIZE, batch_size_of(data))))
    data, parts = first_samples(data, count), localize(params)
    shapes = abstract_params(model, sharding, device=device)
    dtype = torch.promote_types(plan.dtype, torch.float32)

    @cache
    def plain_plan(samples: int) -> Plan:
        return make_plan(model, shapes, first_samples(data, samples), method=Method.NONE, dtype=dtype)

    in_parts = sharding is not None or any(leaf.device != device for leaf in tree.leaves(params))
    wide = params if in_parts else tree.map(lambda leaf: leaf.to(dtype), params)

    def losses(some: Tree) -> Tensor:
        if not in_parts:
            return model.loss(wide, some)
        return losses_of(model, parts, some, plan=plain_plan(batch_size_of(some)), sharding=sharding)

    room = max(count, min(plan.batch_size, INDEPENDENCE_BATCH_SIZE))
    model_checks.check_independent(model, params, data, losses_of=losses, at_most=room)
    by_rules = any(use for uses in plan.uses for use in uses)
    if not plan.private or not by_rules or tree.size(params) > NORM_CHECK_MAX_PARAMETERS:
        return
    if not in_parts:
        own = make_plan(model, shapes, many, method=plan.method, dtype=dtype)
        model_checks.check_rows(model, wide, many, plan=own)
    mixed = model_checks.mix_samples(
        model, params, first_samples(data, 2), losses_of=losses, at_most=NORM_CHECK_SAMPLES
    )
    own = make_plan(model, shapes, mixed, method=plan.method, dtype=dtype)._replace(choices=choices_in_full(plan))
    _, norms, _ = per_sample_norms(model, parts, mixed, plan=own, execution=execution._replace(memory=STORE_ALL))
    wholes = tree.map(lambda leaf: full_tensor(leaf).to(device, dtype), params)
    uncut = model if model.tensor is None or model.parallel is None else model.parallel(None)
    model_checks.check_norms(uncut, wholes, mixed, plan=own, measured=norms)


def first_samples(data: Tree, count: int) -> Tree:
    """Return the first ``count`` samples, repeated from the start if there are fewer."""
    which = torch.arange(count) % batch_size_of(data)
    return tree.map(lambda leaf: leaf[which.to(leaf.device)], data)


def check_same_keys(noise_key: Key, batch: Batch) -> None:
    """Refuse ranks that would draw different noise, or whose samples were drawn by different keys.

    The key of a step's noise follows from the key of the run, the mechanism, the optimizer and the model.
    """
    root = None if batch.drawn is None else batch.drawn.stamp.root
    if len(set(gather_values((keys.digest(noise_key), root), None))) > 1:
        error = FdpError(
            "ranks: expected the same key, mechanism, optimizer and model on every rank, got another one on some: with "
            "another key every rank draws samples of its own, and one that two ranks draw counts twice. Give every "
            "rank root = fdp.shared_key(fdp.key(), sharding), for its samples and its steps, and the same settings"
        )
        error.everywhere = True
        raise error


def check_same_loops(device: torch.device) -> None:
    """Refuse ranks on a CPU of which only some have compiled loops: equal parameters would be rounded unlike."""
    loops = gather_values(device.type != "cpu" or cpu_library.library() is not None, None)
    if len(set(loops)) > 1:
        without = [rank for rank, has in enumerate(loops) if not has]
        error = FdpError(
            f"ranks: expected compiled loops on every rank or on none, got none on {without}: parameters that all of "
            f"them hold would drift apart by rounding. Give every rank gcc and time to compile, about a second, or none"
        )
        error.everywhere = True
        raise error


class FirstCall:
    """A function that checks the model, and the sizes of the plan, on the first batch of a step, and never again."""

    def __init__(self, model: Model, plan: Plan, sharding: Sharding | None) -> None:
        self.model, self.plan, self.sharding = model, plan, sharding
        self.done = False

    def __call__(
        self, params: Tree, batch: Batch, noise_key: Callable[[], Key], part: Callable[[], SamplePart]
    ) -> None:
        """Check the model unless it was checked before. Every rank calls it, with its own samples.

        ``noise_key()`` returns that of the step, ``part()`` what :func:`fdp.checks.equal_sizes.differences` calls
        ``add``.
        """
        if self.done:
            return
        if torch.compiler.is_compiling():
            raise FdpError(
                f"{self.model.name}: expected a step that has been called once before it is compiled: its first call "
                f"checks that samples are independent and norms right, which cannot be done inside torch.compile. Call "
                f"the step once as it is, then compile it; or give make_train_step checks=fdp.Checks.SKIPPED, if the "
                f"model was checked elsewhere (fdp.check_independent, fdp.check_norms)"
            )
        data, _ = split_microbatches(batch)[0]
        if self.sharding is not None:
            check_same_keys(noise_key(), batch)
            check_same_loops(batch.mask.device)
            here = tree.leaves(data)[0].device
            few = tree.map(lambda leaf: leaf.cpu(), first_samples(data, REAL_SAMPLES))
            data = tree.map(lambda leaf: leaf.to(here), gather_values(few, None)[0])
        check_model(self.model, params, data, plan=self.plan, execution=Execution(self.sharding))
        if self.plan.smaller:
            sizes = [plan.batch_size for plan in (self.plan, *self.plan.smaller)]
            check_sizes(part(), first_samples(data, sizes[0]), sizes=sizes, sharded=self.sharding is not None)
        self.done = True
