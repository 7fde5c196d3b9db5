"""Any ``nn.Module`` as a model: a pure ``loss(params, data) -> (batch,)`` and its parameters as a tree.

    losses = loss(module(inputs of data; params), data)             by torch.func.functional_call, the module untouched

Leaves are called by the module's own names; a tied parameter is one leaf under its first name. Buffers are constants,
parameters that do not require gradients are frozen, the module stays in ``train()`` or ``eval()`` as it is.

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

from fdp.foreign.check import check_module
from fdp.foreign.layout import leaf_paths
from fdp.foreign.leaves import foreign_model, params_of
from fdp.foreign.refusals import check_door
from fdp.foreign.stack.fast_paths import reference, without_fast_paths
from fdp.foreign.stack.one_block import Finish, whole
from fdp.foreign.stack.parts import Caller
from fdp.foreign.stack.skeleton import stack_blocks
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
    """The model of ``module`` and its parameters, which share the module's memory.

    ``loss(outputs, data)`` gives the loss of every sample; default: the module returns it. ``call(module, data)`` calls
    the module with a batch; default: the entries of ``data`` that its forward has arguments for, floating-point ones in
    the dtype of the parameters. ``blocks`` names the list of layers to be treated one at a time (``model.layers.*``, or
    ``auto``); None: the module is one block. ``materialize`` and ``frozen`` are patterns of leaves: blocks that hold
    one of the first have their per-sample gradients made whole, one sample at a time if need be (recurrent layers
    always do); the others are not trained. ``batch_first=False``: the module has tokens in dim 0, samples in dim 1.

    ``example`` is a batch of at least two samples, of the lengths to come, best of as many as a microbatch will have.
    With ``check``, on it: samples influence each other neither in their losses nor in their gradients,
    a call leaves nothing for the next, and every leaf's per-sample norms are those of a backward of the sample alone,
    also of samples that are cut to other lengths, scaled or made up.

    Guarantees:
      - every use of every trained leaf is recorded; one without a rule is an error that names it and the choices;
      - batch normalisation by statistics of the batch is refused by name, and so is a module that keeps something of
        the samples it is called with, in its tensors or for its next call;
      - the module is left as it is, bit for bit.
    """
    check_door(module)
    given, module = reference(module), without_fast_paths(module)
    finish, caller = loss or _its_own_loss, call or _by_name(module)
    if blocks is None:
        apply = whole(module, call=caller, finish=finish, batch_first=batch_first)
        made: tuple[Block, ...] = (Block("module", leaf_paths(module), apply),)
    elif example is None or not batch_first:
        raise FdpError(f"blocks={blocks!r}: expected an example, and samples in dim 0; got example={example!r}")
    else:
        made = stack_blocks(module, call=caller, finish=finish, example=example, pattern=blocks)
    model = foreign_model(module, made)
    held = frozenset(path for pattern in materialize for path in _matching(pattern, model, "materialize"))
    model = model._replace(
        name=name or model.name,
        frozen=model.frozen.union(*(_matching(pattern, model, "frozen") for pattern in frozen)),
        materialized=held | _recurrent(module) & frozenset(model.leaves),
    )
    if not model.trainable:
        raise FdpError(
            f"{model.name}: expected a parameter to train, got {len(model.leaves)} that are all frozen; let some "
            f"require gradients (requires_grad_(True)), or name fewer in frozen=(...)"
        )
    params = params_of(module, model)
    if check:
        if example is None:
            raise FdpError(
                f"{model.name}: expected an example, a batch of two samples or more on which to check that samples are "
                f"independent and norms exact; give example=data, or check=False to go without"
            )
        check_module(given, model, params, example, call=caller, finish=finish, batch_first=batch_first)
    return model, params


def _by_name(module: nn.Module) -> Caller:
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
                f"say how to call it: from_module(..., call=lambda module, data: module(data['{next(iter(data))}']))"
            )
        return module(**known)

    return call


def _its_own_loss(returned: Any, data: Tree) -> Tensor:
    if isinstance(returned, Tensor):
        return returned
    raise FdpError(
        f"loss: expected the module to return the loss of every sample, got {type(returned).__name__}; give "
        f"loss=lambda outputs, data: ..., which makes a tensor of shape (batch,) of it"
    )


def _matching(pattern: str, model: Model, what: str) -> frozenset[Path]:
    found = frozenset(fnmatch.filter(model.leaves, pattern)) | frozenset(fnmatch.filter(model.leaves, f"{pattern}.*"))
    if not found:
        raise FdpError(
            f"{what}: expected a pattern of leaves of {model.name}, such as {sorted(model.leaves)[0]!r}, got "
            f"{pattern!r}"
        )
    return found


def _recurrent(module: nn.Module) -> frozenset[Path]:
    paths = leaf_paths(module)
    within = [name for name, part in module.named_modules() if isinstance(part, nn.RNNBase)]
    return frozenset(path for name, path in paths.items() if any(name.startswith(f"{n}." if n else "") for n in within))
