"""What is checked of a foreign module, once, on an example: what shapes cannot show.

- samples do not influence each other (``fdp.checks.model_checks.check_independent``), nor the rows that stand for them
  (``fdp.checks.model_checks.check_separate``), neither those of the example nor made-up ones of other lengths;
- nothing that the module holds is written into, and nothing that is left behind by one call is read by the next;
- every leaf's per-sample norms, by taps, are those of the module itself called with that sample alone: neither a layout
  that was guessed wrong nor a parameter that the module keeps elsewhere goes unseen.

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
from fdp.checks.model_checks import check_independent, check_separate, mixture
from fdp.checks.synthetic_samples import POSITIONS
from fdp.foreign.hub.rotary import tables_of
from fdp.foreign.layout import leaf_paths
from fdp.foreign.module_state import Kept, state_of, written
from fdp.foreign.perturbed import paddings_of, perturbed
from fdp.foreign.uses.dropout import NAME, keys_of
from fdp.foreign.uses.tracking import Run
from fdp.foreign.uses.watch import Uses
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, Plan, make_plan
from fdp.gradients.taps import batch_size_of
from fdp.model import Model
from fdp.types import FdpError, Path, Tree

TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-3}
"""Of norms; there are modules in float64 that compute scores in float32."""
INDEPENDENT = 1e-4
COARSE = 0.1
"""In half precision: enough to tell samples apart."""
FLOOR = 1e-4
"""Norms are compared up to this share of the sample's whole norm: there are leaves whose gradient is zero but for
rounding, such as the biases of keys."""


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
    """All checks; the error says what differs and what to do.

    Guarantees:
      - the module is what it was before, bit for bit, also where it is refused.
    """
    if batch_size_of(example) < 2:
        raise FdpError(
            f"example: expected a batch of at least 2 samples, on which to see whether they are independent, got "
            f"{batch_size_of(example)}"
        )
    kept, called = Kept(module), partial(_called, module, model, call=call, finish=finish, batch_first=batch_first)
    try:
        _check_twice(model, example, kept, called)
        _check_unwritten(kept)
        _check_all(module, model, params, example, called)
        _check_unwritten(kept)
    finally:
        kept.restore_values()


def _check_unwritten(kept: Kept) -> None:
    if changed := kept.restore_values():
        raise written(changed[0], "something that torch does not see")


def _check_all(module: nn.Module, model: Model, params: Tree, example: Tree, called: Callable[[Tree], Tensor]) -> None:
    dtype = tree.leaves(params)[0].dtype
    apart = INDEPENDENT if dtype in TOLERANCE else COARSE
    check_independent(model, params, example, tolerance=apart, cause=_likely_cause(module))
    _check_positions(module, example)
    mixed = mixture(model, params, example, more=perturbed(example, paddings_of(module)))
    for data in (example, mixed) if batch_size_of(mixed) > batch_size_of(example) else (example,):
        plan = make_plan(model, params, data, method=Method.AUTO, dtype=dtype)
        _check_norms(module, model, params, data, plan=plan, real=batch_size_of(example), called=called)
        check_separate(model, params, data, plan=plan, tolerance=apart)


def _check_twice(model: Model, example: Tree, kept: Kept, called: Callable[[Tree], Tensor]) -> None:
    """Call the module with the example, with the example backwards, and again: its losses must be the same.

    A table that has grown meanwhile, or activations that nobody reads, are put back; what is read again is refused.
    """
    last = torch.arange(batch_size_of(example) - 1, -1, -1, device=tree.leaves(example)[0].device)
    backwards = tree.map(lambda leaf: leaf[last], example)
    with torch.no_grad():
        first, _, again = [called(data) for data in (example, backwards, example)]
    changed = kept.state.restore()
    same = torch.isfinite(first) == torch.isfinite(again)
    apart = (first - again).nan_to_num().abs() <= 1e-6 * first.nan_to_num().abs().clamp_min(1e-6)
    if not bool((same & apart).all()):
        where = f"keeps something of it in {changed[:3]}" if changed else "draws numbers of its own, or keeps something"
        raise FdpError(
            f"{model.name}: called with the same samples again, after others, it gives other losses: the module {where}"
            f". Expected what is computed to depend on nothing but parameters and the samples at hand; hand the state "
            f"in as an entry of the data, or put the part that does it in eval()"
        )


def _called(
    module: nn.Module,
    model: Model,
    data: Tree,
    *,
    call: Callable[[Callable[..., Any], Tree], Any],
    finish: Callable[[Any, Tree], Tensor],
    batch_first: bool,
) -> Tensor:
    """The losses of the module itself, called with ``data``; writes into its tensors are refused."""
    dtype = next(leaf.dtype for name, leaf in module.named_parameters() if name in model.leaves)
    held = {name: leaf for name, leaf in data.items() if name != NAME} if isinstance(data, dict) else data
    inputs = tree.map(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, held)
    run = Run(None, batch_size_of(data), batch_first=batch_first, keys=keys_of(data))
    versions = run.guard(state_of(module).tensors)
    with Uses(run):
        losses = finish(call(module, inputs), data)
    versions.check()
    return losses


def _check_positions(module: nn.Module, example: Tree) -> None:
    """Refuse positions that come with the data and go to a table that looks at the longest, whatever the example's."""
    lengths = {path: leaf.shape[-1] for path, leaf in tree.flatten(example).items() if path in POSITIONS}
    for table in tables_of(module):
        for path, length in lengths.items():
            if length > table.limit:
                raise FdpError(
                    f"{path}: expected rows of at most {table.limit} positions, got rows of {length}: samples would "
                    f"not be independent. {_likely_cause(module)}"
                )


def _likely_cause(module: nn.Module) -> str | None:
    """What in a module is known to look across samples, and what to do about it."""
    for table in tables_of(module):
        return (
            f"The rotary table of this model ({table.part}, rope_type {table.kind!r}) looks at the longest position in "
            f"the microbatch: give rows of at most {table.limit} positions, up to which it is one table, or a config "
            f"with rope_type 'default', or take the model by fdp.foreign.model_of, which fixes the table by the length "
            f"of a row"
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
    called: Callable[[Tree], Tensor],
) -> None:
    """Compare every leaf's per-sample norms with those of the module called with each sample alone.

    The first ``real`` samples are the example's; the error names their places and shows no norm.
    """
    expected = alone_norms(module, model, data, called)
    got = per_sample_norms(model, params, data, plan=plan)[1].squared
    total = torch.stack(list(expected.values())).square().sum(0).sqrt()
    tolerance = TOLERANCE.get(tree.leaves(params)[0].dtype, COARSE)
    for path, norms in expected.items():
        apart = (got[path].double().sqrt() - norms).abs() / (norms + FLOOR * total).clamp_min(1e-30)
        if not bool((apart <= tolerance).all()):
            b = int(apart.nan_to_num(torch.inf).argmax())
            which = f"sample {b}" if b < real else "a made-up sample of another length"
            raise FdpError(
                f"{path}: the gradient of {which} has another norm in a batch than if the module is called with it "
                f"alone, by {float(apart[b]):.1e} of itself. Shapes do not show where its samples are: tokens may come "
                f"first (batch_first=False), or be flattened before samples; samples may be put in another order; or "
                f"the module keeps the parameter elsewhere. Name the leaf in materialize=('{path}',), or freeze it"
            )


def alone_norms(
    module: nn.Module, model: Model, example: Tree, called: Callable[[Tree], Tensor]
) -> dict[Path, Float[Tensor, " batch"]]:
    """Every trained leaf's gradient norm, sample by sample, by a plain backward of the module itself."""
    paths = leaf_paths(module)
    trained = {path: leaf for path, leaf in module.named_parameters() if paths[path] in model.trainable}
    found: dict[Path, list[Tensor]] = {path: [] for path in trained}
    for b in range(batch_size_of(example)):
        one = tree.map(lambda leaf: leaf[b : b + 1], example)  # noqa: B023
        with torch.enable_grad():
            losses = called(one)
        try:
            slopes = torch.autograd.grad(losses.sum(), list(trained.values()), allow_unused=True)
        except RuntimeError as error:
            raise FdpError(
                f"{model.name}: expected a module that can be trained, got one whose own backward fails, called with "
                f"one sample, without fdp: {str(error).splitlines()[0]}"
            ) from error
        for path, slope in zip(trained, slopes):
            norm = torch.zeros((), dtype=torch.float64, device=losses.device)
            found[path].append(norm if slope is None else slope.to_dense().double().norm())
    return {path: torch.stack(norms) for path, norms in found.items()}
