"""Check a module on an example for what shapes cannot show.

- samples do not influence each other (``fdp.checks.model_checks.check_independent``), nor the rows that stand for them
  (``fdp.checks.model_checks.check_separate``), neither those of the example nor synthetic ones of other lengths;
- the module writes into none of its tensors, and no call reads what an earlier one left behind;
- per-sample norms of every leaf, by taps, equal those of the module itself called with that sample alone. This catches
  layouts that were guessed wrong and parameters that the module stores elsewhere.

    >>> check_module(module, model, params, example, call=call, finish=loss)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from fdp import tree
from fdp.checks.model_checks import check_independent, check_separate, mix_samples
from fdp.checks.synthetic_samples import POSITIONS
from fdp.foreign.hub.rotary import rotary_tables
from fdp.foreign.leaves import leaf_paths
from fdp.foreign.module_state import ModuleBackup, WriteError, state_of, write_error
from fdp.foreign.perturb_samples import paddings_of, perturb_samples
from fdp.foreign.stack.block_functions import module_inputs
from fdp.foreign.uses.dropout import keys_of
from fdp.foreign.uses.tracking import CallTrace
from fdp.foreign.uses.watch import WatchMode
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, Plan, make_plan
from fdp.gradients.taps import batch_size_of
from fdp.model import Model
from fdp.types import FdpError, Path, Tree

NORM_TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}
"""Relative tolerance of norms; some float64 modules compute scores in float32."""
INDEPENDENCE_TOLERANCE = 1e-4
HALF_TOLERANCE = 0.1
"""Tolerance in half precision: enough to tell samples apart."""
NORM_FLOOR = 1e-4
"""Norms are compared up to this share of the sample's total norm, because some leaves (the biases of keys) have a
gradient that is zero except for rounding.
"""
ZERO_SHARE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Norms that differ by less than this share of the largest norm in the example are equal: some samples (one token, of
which attention has nothing to choose) have a gradient that is zero except for rounding.
"""


def check_module(
    module: nn.Module,
    model: Model,
    params: Tree,
    example: Tree,
    *,
    call: Callable[[Callable[..., Any], Tree], Any],
    finish: Callable[[Any, Tree], Tensor],
    batch_first: bool = True,
) -> None:
    """Run all checks; the error says what differs and what to do.

    Guarantees:
      - the module is left as it was, bit for bit, even if it is refused.
    """
    if batch_size_of(example) < 2:
        raise FdpError(
            f"example: expected a batch of at least 2 samples, to check that they are independent, got "
            f"{batch_size_of(example)}"
        )
    backup = ModuleBackup(module)
    losses_of = partial(_module_losses, module, model, call=call, finish=finish, batch_first=batch_first)
    try:
        _check_repeatable(model, example, backup, losses_of)
        _check_unwritten(backup)
        _check_all(module, model, params, example, losses_of)
        _check_unwritten(backup)
    except WriteError as error:  # transformers >= 5.23 writes into rotary tables that depend on positions
        if (cause := _likely_cause(module)) is None:
            raise
        raise FdpError(f"{error}. {cause}") from error
    finally:
        backup.restore_values()


def _check_unwritten(backup: ModuleBackup) -> None:
    if changed := backup.restore_values():
        raise write_error(changed[0], "something that torch does not see")


def _check_all(
    module: nn.Module, model: Model, params: Tree, example: Tree, losses_of: Callable[[Tree], Tensor]
) -> None:
    dtype = tree.leaves(params)[0].dtype
    tolerance = INDEPENDENCE_TOLERANCE if dtype in NORM_TOLERANCE else HALF_TOLERANCE
    check_independent(model, params, example, tolerance=tolerance, cause=_likely_cause(module))
    _check_positions(module, example)
    mixed = mix_samples(model, params, example, more=perturb_samples(example, paddings_of(module)))
    for data in (example, mixed) if batch_size_of(mixed) > batch_size_of(example) else (example,):
        plan = make_plan(model, params, data, method=Method.AUTO, dtype=dtype)
        _check_norms(module, model, params, data, plan=plan, real=batch_size_of(example), losses_of=losses_of)
        check_separate(model, params, data, plan=plan, tolerance=tolerance)


def _check_repeatable(model: Model, example: Tree, backup: ModuleBackup, losses_of: Callable[[Tree], Tensor]) -> None:
    """Call the module with the example, with the example reversed, and with the example again: losses must repeat.

    A table that has grown, or activations that nobody reads, are restored; state that changes the losses is refused.
    """
    reverse = torch.arange(batch_size_of(example) - 1, -1, -1, device=tree.leaves(example)[0].device)
    reversed_example = tree.map(lambda leaf: leaf[reverse], example)
    with torch.no_grad():
        first, _, again = [losses_of(data) for data in (example, reversed_example, example)]
    changed = backup.state.restore()
    same_finite = torch.isfinite(first) == torch.isfinite(again)
    close = (first - again).nan_to_num().abs() <= 1e-6 * first.nan_to_num().abs().clamp_min(1e-6)
    if not bool((same_finite & close).all()):
        cause = f"stores something in {changed[:3]}" if changed else "draws random numbers, or stores something"
        raise FdpError(
            f"{model.name}: expected losses that depend only on the parameters and the samples, got other losses "
            f"from a second call with the same samples: the module {cause}. Pass the state in as an entry of the data, "
            f"or put the part that does it in eval()"
        )


def _module_losses(
    module: nn.Module,
    model: Model,
    data: Tree,
    *,
    call: Callable[[Callable[..., Any], Tree], Any],
    finish: Callable[[Any, Tree], Tensor],
    batch_first: bool,
) -> Tensor:
    """Return the losses of the module itself, called with ``data``; refuse writes into its tensors."""
    dtype = next(leaf.dtype for name, leaf in module.named_parameters() if name in model.leaves)
    inputs = module_inputs(data, dtype)
    trace = CallTrace(None, batch_size_of(data), batch_first=batch_first, keys=keys_of(data))
    versions = trace.guard_writes(state_of(module).tensors)
    with WatchMode(trace):
        losses = finish(call(module, inputs), data)
    versions.check()
    return losses


def _check_positions(module: nn.Module, example: Tree) -> None:
    """Refuse positions in the data if a rotary table depends on the longest one, whatever the example holds."""
    lengths = {path: leaf.shape[-1] for path, leaf in tree.flatten(example).items() if path in POSITIONS}
    for table in rotary_tables(module):
        for path, length in lengths.items():
            if length > table.limit:
                raise FdpError(
                    f"{path}: expected rows of at most {table.limit} positions, got rows of {length}: samples would "
                    f"not be independent. {_likely_cause(module)}"
                )


def _likely_cause(module: nn.Module) -> str | None:
    """Describe a part of the module that is known to look across samples, and what to do about it."""
    for table in rotary_tables(module):
        return (
            f"The rotary table of this model ({table.part}, rope_type {table.kind!r}) depends on the longest position "
            f"in the microbatch: use fdp.foreign.model_of, which fixes the table by the length of a row, or a config "
            f"with rope_type 'default', or, with transformers before 5.23, give rows of at most {table.limit} "
            f"positions, up to which the table is fixed"
        )
    return None


def _check_norms(
    module: nn.Module,
    model: Model,
    params: Tree,
    data: Tree,
    *,
    plan: Plan,
    real: int,
    losses_of: Callable[[Tree], Tensor],
) -> None:
    """Compare every leaf's per-sample norms with those of the module called with each sample alone.

    The first ``real`` samples are the example's; the error gives their index and shows no norm.
    """
    expected = single_sample_norms(module, model, data, losses_of)
    got = per_sample_norms(model, params, data, plan=plan)[1].squared
    total = torch.stack(list(expected.values())).square().sum(0).sqrt()
    dtype = tree.leaves(params)[0].dtype
    tolerance, zero = NORM_TOLERANCE.get(dtype, HALF_TOLERANCE), ZERO_SHARE.get(dtype, 0.0) * total[:real].max()
    for path, norms in expected.items():
        gap = (got[path].double().sqrt() - norms).abs()
        difference = torch.where(gap <= zero, 0.0, gap / (norms + NORM_FLOOR * total).clamp_min(1e-30))
        if not bool((difference <= tolerance).all()):
            b = int(difference.nan_to_num(torch.inf).argmax())
            which = f"sample {b}" if b < real else "a synthetic sample of another length"
            raise FdpError(
                f"{path}: expected the gradient of {which} to have the same norm in a batch as alone, got a relative "
                f"difference of {float(difference[b]):.1e}. Shapes do not show which dim holds the samples: tokens may "
                f"come first (batch_first=False), or be flattened in front of samples; samples may be reordered; or "
                f"the module stores the parameter elsewhere. Name the leaf in materialize=('{path}',), or freeze it"
            )


def single_sample_norms(
    module: nn.Module, model: Model, example: Tree, losses_of: Callable[[Tree], Tensor]
) -> dict[Path, Float[Tensor, " batch"]]:
    """Return every trained leaf's gradient norm, sample by sample, by a plain backward of the module itself."""
    paths = leaf_paths(module)
    trained = {path: leaf for path, leaf in module.named_parameters() if paths[path] in model.trainable}
    found: dict[Path, list[Tensor]] = {path: [] for path in trained}
    for b in range(batch_size_of(example)):
        one = tree.map(lambda leaf: leaf[b : b + 1], example)  # noqa: B023
        with torch.enable_grad():
            losses = losses_of(one)
        try:
            grads = torch.autograd.grad(losses.sum(), list(trained.values()), allow_unused=True)
        except RuntimeError as error:
            raise FdpError(
                f"{model.name}: expected a module that can be trained, got one whose own backward, called with one "
                f"sample and without fdp, fails: {str(error).splitlines()[0]}"
            ) from error
        for path, grad in zip(trained, grads):
            norm = torch.zeros((), dtype=torch.float64, device=losses.device)
            found[path].append(norm if grad is None else grad.to_dense().double().norm())
    return {path: torch.stack(norms) for path, norms in found.items()}
