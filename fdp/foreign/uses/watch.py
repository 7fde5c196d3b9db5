"""Watch every use of every parameter of a module from outside: no hooks, nothing patched.

    module(x)  under a TorchFunctionMode that knows each watched parameter by identity

A module is called by ``torch.func.functional_call`` with plain tensors in place of its watched leaves. A torch function
that gets one of them is mapped to the operation of ``fdp.ops`` that records the use (``fdp.foreign.uses.dispatch``).
Dropout draws its masks from per-sample keys. A use without a rule is an error that names the leaf, the operation and
the choices.

    >>> out = watched_call(module, leaves, args, kwargs, batch_size=len(tokens))
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from fdp.foreign.module_state import state_of
from fdp.foreign.uses.dispatch import dispatch
from fdp.foreign.uses.function_table import (
    FUNCTION_KINDS,
    HANDLERS,
    PYTHON_METHODS,
    WRITE_FUNCTIONS,
    FunctionKind,
    drops_out,
)
from fdp.foreign.uses.sample_order import note_reordering
from fdp.foreign.uses.side_effects import (
    REPLACED_DRAWS,
    check_draw_unused,
    check_has_values,
    check_no_draw,
    dense_embedding,
    guard_write,
    nan_instead_of_draw,
)
from fdp.foreign.uses.tracking import CallTrace
from fdp.gradients.tape import Watched
from fdp.gradients.vjp import RECOMPUTED, NotFunctional
from fdp.types import FdpError

SETUP_CONTEXT = "setup_context"
_NO_CHECKPOINT = (
    "expected a forward without torch.utils.checkpoint, whose recomputation would read the module's own weights \
instead of those given; switch it off (gradient_checkpointing_disable()), and have fdp recompute blocks instead \
(blocks='auto' with Memory(recompute=True), --checkpoint-activations)"
)
TORCH_FUNC_ERRORS = {
    "saved tensor hooks": _NO_CHECKPOINT,
    RECOMPUTED: _NO_CHECKPOINT,
    SETUP_CONTEXT: "expected a torch.autograd.Function with a setup_context, got one whose forward takes ctx, which "
    "torch.func cannot differentiate; rewrite it, or name the block's leaves in materialize=(...)",
}
"""Parts of the messages about modules that cannot be differentiated, and what to do."""


def watched_call(
    module: nn.Module,
    tensors: Mapping[str, Tensor | Watched],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    batch_size: int,
    dropout: Int[Tensor, "batch 8"] | None = None,
    batch_first: bool = True,
    samples: Collection[str] = (),
) -> Any:
    """Return ``functional_call(module, tensors, args, kwargs)``, recording each use of a watched tensor.

    ``tensors`` are parameters and buffers by name; tied names have one value. Plain ones are constants, except for
    those named in ``samples``. ``dropout`` holds the samples' keys. ``batch_first=False``: tensors of three dims and
    more (and ids of two) have their samples in dim 1.

    Guarantees:
      - a watched tensor in an operation without a rule is an error; a use that cannot be seen gives NaN;
      - nothing is drawn from torch's generators: running twice gives the same result.
    """
    watched = [leaf for leaf in tensors.values() if isinstance(leaf, Watched)]
    tapes = [leaf.tape for leaf in watched if type(leaf) is Watched] or [leaf.tape for leaf in watched]
    tape = tapes[0] if tapes else None
    trace = CallTrace(tape, batch_size, batch_first=batch_first, keys=dropout)
    given: dict[str, Tensor] = {}
    for name, leaf in tensors.items():
        if isinstance(leaf, Watched):
            given[name] = trace.watch(leaf)
        else:
            given[name] = leaf
            if name not in samples:
                trace.constants[leaf] = True
    planning = tape is not None and tape.taps is None
    if torch.compiler.is_compiling():  # planned before, when forbidden operations were refused
        with torch.set_grad_enabled(planning or torch.is_grad_enabled()), WatchMode(trace):
            out = torch.func.functional_call(module, given, args, kwargs, tie_weights=False)
    else:
        state = state_of(module)
        versions = trace.guard_writes({**state.tensors, **given}, but=samples)
        try:
            with torch.set_grad_enabled(planning or torch.is_grad_enabled()), WatchMode(trace):
                out = _call_module(module, given, args, kwargs, remedies=tape is not None)
            versions.check()
        finally:
            changed = state.restore()
            if tape is not None:
                tape.changed += changed
        check_has_values(module, given, out)
    if tape is not None:
        _check_returned(trace, out)
    return out


def _call_module(
    module: nn.Module,
    given: dict[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    *,
    remedies: bool,
) -> Any:
    """Call the module; explain errors of torch.func. (A materialised block is tried another way.)"""
    try:
        return torch.func.functional_call(module, given, args, kwargs, tie_weights=False)
    except RuntimeError as error:
        words = next((words for words in TORCH_FUNC_ERRORS if words in str(error)), None)
        if words is None or not remedies:
            raise
        kind = NotFunctional if words == SETUP_CONTEXT else FdpError
        raise kind(f"{type(module).__name__}: {TORCH_FUNC_ERRORS[words]}") from error


class WatchMode(TorchFunctionMode):
    """A mode that intercepts every torch function while a module runs."""

    def __init__(self, trace: CallTrace):
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        trace, kind = self.trace, None
        if func is torch.Tensor.requires_grad_:  # called by hooks for adapters; here the caller differentiates
            return args[0]
        if isinstance(func, FunctionType):
            for method, same, known in PYTHON_METHODS:
                if func is method:
                    func, kind = same, known
        kind = FUNCTION_KINDS.get(func) if kind is None else kind
        if trace.versions is not None:
            func = guard_write(trace, func, kind, args, kwargs)
        if trace.random_draws and kind is not FunctionKind.METADATA:
            check_draw_unused(trace, args, kwargs)
        if kind is FunctionKind.EMBEDDING:
            args, kwargs = dense_embedding(args, kwargs)
        constant = trace.tape is not None
        if constant:  # torch.compile traces these lines for every torch function: keep them few, without calls
            for value in (*args, *kwargs.values()) if kwargs else args:
                for entry in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(entry, Tensor):
                        if entry in trace.tracked:
                            return dispatch(trace, func, kind, args, kwargs)
                        constant = constant and entry in trace.constants
        if kind is FunctionKind.RANDOM:
            if func in REPLACED_DRAWS:
                return nan_instead_of_draw(trace, func, args, kwargs)
            check_no_draw(func, args, kwargs)
        elif kind is FunctionKind.DROPOUT and drops_out(func, args, kwargs):
            return HANDLERS[func](trace, *args, **kwargs)
        elif kind is FunctionKind.RECURRENT:
            return _run_recurrent(func, args, kwargs)
        elif kind is FunctionKind.BATCH_NORM:
            _check_statistics(func, args, kwargs)
        out = func(*args, **kwargs)
        if trace.versions is not None and trace.tape is not None:
            note_reordering(trace, func, args, kwargs, out)
        if constant:
            _note_constant(trace, out)
        elif (
            trace.constants
            and (func in WRITE_FUNCTIONS or "out" in kwargs)
            and not _wrote_into_samples(trace, args, kwargs)
        ):
            trace.constants = {}  # samples were written into a constant: neither it nor its views are constants now
        return out


def _note_constant(trace: CallTrace, out: Any) -> None:
    """Record that a result of constants is a constant."""
    for made in out if isinstance(out, (list, tuple)) else (out,):
        if isinstance(made, Tensor):
            trace.constants[made] = True


def _wrote_into_samples(trace: CallTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if the tensor that a function wrote into is known to have held samples before."""
    return "out" not in kwargs and bool(args) and isinstance(args[0], Tensor) and args[0] not in trace.constants


def _run_recurrent(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a recurrent layer; cuDNN has no backward for it in eval(), and draws dropout of its own."""
    drop, training = (args[5], args[6]) if isinstance(args[3], bool) else (args[6], args[7])
    if drop and training:
        raise FdpError(
            f"dropout: expected none between recurrent layers, since its mask cannot be drawn from per-sample keys, "
            f"got p = {drop} in training mode; set dropout=0, use one-layer modules with nn.Dropout between, or eval()"
        )
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled and training):
        return func(*args, **kwargs)


def _check_statistics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse batch normalisation by batch statistics, even without trained parameters."""
    if kwargs.get("training", args[5] if len(args) > 5 else False):
        raise FdpError(
            f"{resolve_name(func) or func}: expected fixed statistics, got statistics of the batch, which mix its "
            f"samples: no bound on one sample's gradient would hold. Use nn.GroupNorm, or put the layer in eval()"
        )


def _check_returned(trace: CallTrace, out: Any) -> None:
    """Refuse a result that depends on parameters but holds no samples: its copies would be unknown outside."""
    if isinstance(out, Tensor):
        if out in trace.tracked:
            raise FdpError(
                f"{trace.tracked[out].path}: expected the module to return (batch, ...), got a value of shape "
                f"{tuple(out.shape)} that depends on parameters and holds no samples. Expand it over the batch, or "
                f"return only what depends on the data"
            )
    elif isinstance(out, (list, tuple, dict)):
        for part in out.values() if isinstance(out, dict) else out:
            _check_returned(trace, part)
