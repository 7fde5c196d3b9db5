"""Any ``nn.Module`` as a model: a pure ``loss(params, data) -> (batch,)`` and its parameters as a tree.

    losses = loss(module(inputs of data; params), data)             by torch.func.functional_call, the module unchanged

Leaves have the module's own names; a tied parameter is one leaf under its first name. Buffers are constants, parameters
that do not require gradients are frozen, and the module stays in ``train()`` or ``eval()`` mode.

    >>> def loss(outputs, data): return F.cross_entropy(outputs, data["label"], reduction="none")
    >>> model, params = from_module(module, loss=loss, example={"input": images[:4], "label": labels[:4]})
    >>> plan = make_plan(model, params, microbatch)
"""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from fdp.fingerprint import fingerprint
from fdp.foreign.check_on_example import check_module
from fdp.foreign.check_structure import check_structure
from fdp.foreign.leaves import foreign_model, leaf_paths, object_settings, params_of
from fdp.foreign.loss_state import refuse_writes, without_memory
from fdp.foreign.stack.block_functions import Caller
from fdp.foreign.stack.fast_paths import reference_module, without_fast_paths
from fdp.foreign.stack.one_block import Finish, module_loss
from fdp.foreign.stack.stack_blocks import stack_blocks
from fdp.model import Block, Model
from fdp.types import FdpError, Path, Tree


def from_module(
    module: nn.Module,
    *,
    loss: Finish | None = None,
    call: Caller | None = None,
    blocks: str | None = None,
    materialize: Sequence[str] = (),
    frozen: Sequence[str] = (),
    name: str | None = None,
    example: Tree | None = None,
    check: bool = True,
    batch_first: bool = True,
) -> tuple[Model, Tree]:
    """Return the model of ``module`` and its parameters, which share the module's memory.

    Args:
      loss: ``loss(outputs, data)`` returns the loss of every sample; default: the module returns it.
      call: ``call(module, data)`` calls the module with a batch; default: with the entries of ``data`` that its forward
        takes, floating-point ones in the dtype of the parameters.
      blocks: the layers to treat one at a time (``model.layers.*``, or ``auto``); None: the module is one block.
      materialize: patterns of leaves whose blocks materialise per-sample gradients, one sample at a time if necessary.
        Recurrent layers always do.
      frozen: patterns of leaves that are not trained.
      example: a batch of at least two samples with the lengths to come, best as large as a microbatch.
      check: check on the example that samples influence each other neither in their losses nor in their gradients, that
        a call leaves nothing behind for the next, and that every leaf's per-sample norms are those of a backward of the
        sample alone, also for samples that are truncated, scaled or synthetic.
      batch_first: False if the module has tokens in dim 0 and samples in dim 1.

    Guarantees:
      - every use of every trained leaf is recorded; a use without a rule is an error that names it and the choices;
      - batch normalisation by batch statistics is refused by name, and so is a module or a loss that stores something
        about the samples it is called with, in its tensors or for its next call;
      - the module is left as it is, bit for bit.
    """
    check_structure(module)
    reference, module = reference_module(module), without_fast_paths(module)
    finish, caller = map(without_memory, given := (loss or _module_output, call or _call_by_name(module)))
    if blocks is None:
        apply = module_loss(module, call=caller, finish=finish, batch_first=batch_first)
        stack: tuple[Block, ...] = (Block("module", leaf_paths(module), apply),)
    elif example is None or not batch_first:
        got = "no example" if example is None else "batch_first=False"
        raise FdpError(f"blocks={blocks!r}: expected an example, and samples in dim 0; got {got}")
    else:
        stack = stack_blocks(module, call=caller, finish=finish, example=example, pattern=blocks)
    model = foreign_model(module, stack)
    if loss is not None or call is not None:  # two losses of one module must not share noise
        model = model._replace(settings=fingerprint(model.settings, loss, object_settings(loss), call))
    model = _choose_leaves(model._replace(name=name or model.name), module, materialize=materialize, frozen=frozen)
    params = params_of(module, model)
    if check and example is None:
        raise FdpError(
            f"{model.name}: expected an example, a batch of at least two samples, to check that samples are "
            f"independent and norms exact; give example=data, or check=False to go without"
        )
    if check:
        with refuse_writes(*given):
            check_module(reference, model, params, example, call=caller, finish=finish, batch_first=batch_first)
    return model, params


def _choose_leaves(model: Model, module: nn.Module, *, materialize: Sequence[str], frozen: Sequence[str]) -> Model:
    """Return the model with the leaves that patterns name materialised or frozen; recurrent leaves are materialised."""
    named = frozenset(path for pattern in materialize for path in _matching_leaves(pattern, model, "materialize"))
    model = model._replace(
        frozen=model.frozen.union(*(_matching_leaves(pattern, model, "frozen") for pattern in frozen)),
        materialized=named | _recurrent_leaves(module) & frozenset(model.leaves),
    )
    if not model.trainable:
        raise FdpError(
            f"{model.name}: expected a parameter to train, got {len(model.leaves)} that are all frozen; let some "
            f"require gradients (requires_grad_(True)), or name fewer in frozen=(...)"
        )
    return model


def _call_by_name(module: nn.Module) -> Caller:
    """Return a caller that passes the entries of the data that the forward has arguments for."""
    takes = [
        name
        for name, argument in inspect.signature(module.forward).parameters.items()
        if argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
    ]

    def call(module: Callable[..., Any], data: Tree) -> Any:
        if isinstance(data, Tensor):
            return module(data)
        if isinstance(data, (list, tuple)):
            return module(*data)
        known = {name: data[name] for name in takes if name in data}
        if not known:
            raise FdpError(
                f"data: expected entries that the module's forward takes, {takes}, got {list(data)}; rename them, or "
                f"define the call: from_module(..., call=lambda module, data: module(data['{next(iter(data))}']))"
            )
        return module(**known)

    return call


def _module_output(returned: Any, data: Tree) -> Tensor:
    if isinstance(returned, Tensor):
        return returned
    raise FdpError(
        f"loss: expected the module to return the loss of every sample, got {type(returned).__name__}; give "
        f"loss=lambda outputs, data: ..., which returns a tensor of shape (batch,)"
    )


def _matching_leaves(pattern: str, model: Model, what: str) -> frozenset[Path]:
    found = frozenset(fnmatch.filter(model.leaves, pattern)) | frozenset(fnmatch.filter(model.leaves, f"{pattern}.*"))
    if not found:
        raise FdpError(
            f"{what}: expected a pattern of leaves of {model.name}, such as {sorted(model.leaves)[0]!r}, got "
            f"{pattern!r}"
        )
    return found


def _recurrent_leaves(module: nn.Module) -> frozenset[Path]:
    paths = leaf_paths(module)
    recurrent = [name for name, part in module.named_modules() if isinstance(part, nn.RNNBase)]
    return frozenset(
        path for name, path in paths.items() if any(name.startswith(f"{n}." if n else "") for n in recurrent)
    )
