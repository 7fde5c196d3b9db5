"""Every use of every parameter of a foreign module, seen from outside: no hooks, nothing patched.

    module(x)  under a TorchFunctionMode that knows each watched parameter by identity

A module is called by ``torch.func.functional_call`` with the plain tensors of its watched leaves. Every function of
torch that gets one is mapped to the operation of ``fdp.ops`` that records the use (``fdp.foreign.uses.table``); dropout
draws its masks from per-sample keys; what has no rule is an error that names the leaf, the operation and the choices.

    >>> out = watched_call(module, leaves, args, kwargs, batch_size=len(tokens))

Your own operation, a function of samples and one parameter, made visible and given a rule:

    >>> @operation
    ... def gated(x, weight): ...
    >>> @rule(gated, example=(x, weight))             # compared with vmap(grad) at once
    ... def record(x, g, shape): return Pair(rows(g), rows(x), shape)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode, resolve_name

from fdp import ops
from fdp.foreign.module_state import state_of
from fdp.foreign.uses.forbidden import UNUSED, check_not_random, check_random, check_values, guarded, looked_up, unused
from fdp.foreign.uses.pointwise import alone, cast, in_place, plain, pointwise, turned
from fdp.foreign.uses.products import refusal, selected
from fdp.foreign.uses.sample_order import note_order
from fdp.foreign.uses.table import DETACHES, HANDLERS, IN_PLACE, KINDS, METHODS, READS, WRITES, Kind, draws
from fdp.foreign.uses.tracking import SAMPLES, SHARED, Run, Selected, Tracked, tensors_of
from fdp.gradients.rules import Record, Rule, check_rule
from fdp.gradients.taps import Watched
from fdp.gradients.vjp import NotFunctional
from fdp.types import FdpError

RULES: dict[Callable[..., Any] | str, Rule] = {}
"""Rules of operations that are not torch's: operators of ``torch.ops``, and names of operations."""

SETUP_CONTEXT = "setup_context"
UNDER_FUNC = {
    "saved tensor hooks": "expected a forward without torch.utils.checkpoint, got one that torch.func cannot "
    "differentiate; switch it off (gradient_checkpointing_disable()), and have fdp recompute blocks instead "
    "(blocks='auto' with Memory(recompute=True), --checkpoint-activations)",
    SETUP_CONTEXT: "expected a torch.autograd.Function with a setup_context of its own, got one whose forward takes "
    "ctx, which torch.func cannot differentiate; rewrite it, or name the block's leaves in materialize=(...)",
}
"""What torch.func says of modules that it cannot differentiate, and what to do."""


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
    """``functional_call(module, tensors, args, kwargs)``, every use of a watched tensor recorded on its tape.

    ``tensors``: parameters and buffers by name; tied names have one value. Those that are plain are constants, but for
    those named in ``samples``. ``dropout``: the samples' keys. ``batch_first=False``: tensors of three dims and more
    (and ids of two) have their samples in dim 1.

    Guarantees:
      - a watched tensor that an operation without a rule gets is an error; one that gets it unseen makes no number;
      - nothing is drawn from torch's generators: run twice, the same comes out.
    """
    watched = [leaf for leaf in tensors.values() if isinstance(leaf, Watched)]
    tapes = [leaf.tape for leaf in watched if type(leaf) is Watched] or [leaf.tape for leaf in watched]
    tape = tapes[0] if tapes else None
    run = Run(tape, batch_size, batch_first=batch_first, keys=dropout)
    given: dict[str, Tensor] = {}
    for name, leaf in tensors.items():
        if isinstance(leaf, Watched):
            given[name] = run.watch(leaf)
        else:
            given[name] = leaf
            if name not in samples:
                run.constants[leaf] = True
    planning = tape is not None and tape.taps is None
    if torch.compiler.is_compiling():  # planned before: what a module may not do was seen then
        with torch.set_grad_enabled(planning or torch.is_grad_enabled()), Uses(run):
            out = torch.func.functional_call(module, given, args, kwargs, tie_weights=False)
    else:
        state = state_of(module)
        versions = run.guard({**state.tensors, **given}, but=samples)
        try:
            with torch.set_grad_enabled(planning or torch.is_grad_enabled()), Uses(run):
                out = _called(module, given, args, kwargs, remedies=tape is not None)
            versions.check()
        finally:
            changed = state.restore()
            if tape is not None:
                tape.changed += changed
        check_values(module, given, out)
    if tape is not None:
        _check_returned(run, out)
    return out


def _called(
    module: nn.Module,
    given: dict[str, Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    *,
    remedies: bool,
) -> Any:
    """What the module returned; where torch.func gives up, what to do. (Materialised, it is tried another way.)"""
    try:
        return torch.func.functional_call(module, given, args, kwargs, tie_weights=False)
    except RuntimeError as error:
        words = next((words for words in UNDER_FUNC if words in str(error)), None)
        if words is None or not remedies:
            raise
        kind = NotFunctional if words == SETUP_CONTEXT else FdpError
        raise kind(f"{type(module).__name__}: {UNDER_FUNC[words]}") from error


class Uses(TorchFunctionMode):
    """What every function of torch does while a module runs."""

    def __init__(self, run: Run):
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        run, kind = self.run, None
        if func is torch.Tensor.requires_grad_:  # as a hook for adapters does: here the derivative is asked for outside
            return args[0]
        if isinstance(func, FunctionType):
            for method, same, known in METHODS:
                if func is method:
                    func, kind = same, known
        kind = KINDS.get(func) if kind is None else kind
        if run.versions is not None:
            func = guarded(run, func, kind, args, kwargs)
        if run.random and kind is not Kind.ASK:
            check_not_random(run, args, kwargs)
        if kind is Kind.LOOKUP:
            args, kwargs = looked_up(args, kwargs)
        constant = run.tape is not None
        if constant:  # torch.compile runs through these lines for every function of torch: few, and no calls
            for value in (*args, *kwargs.values()) if kwargs else args:
                for entry in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(entry, Tensor):
                        if entry in run.tracked:
                            return _used(run, func, kind, args, kwargs)
                        constant = constant and entry in run.constants
        if kind is Kind.RANDOM:
            if func in UNUSED:
                return unused(run, func, args, kwargs)
            check_random(func, args, kwargs)
        elif kind is Kind.DRAW and draws(func, args, kwargs):
            return HANDLERS[func](run, *args, **kwargs)
        elif kind is Kind.RECURRENT:
            return _recurrent(func, args, kwargs)
        elif kind is Kind.STATISTICS:
            _check_statistics(func, args, kwargs)
        out = func(*args, **kwargs)
        if run.versions is not None and run.tape is not None:
            note_order(run, func, args, kwargs, out)
        if constant:
            _note_constant(run, out)
        elif run.constants and (func in WRITES or "out" in kwargs) and not _written_samples(run, args, kwargs):
            run.constants = {}  # samples were written into one: none is known any more, nor its views
        return out


def operation(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function(x, weight, **options)``, visible to whoever watches parameters. Give it a rule."""
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def visible(x: Tensor, weight: Tensor, **options: Any) -> Tensor:
        mode = _get_current_function_mode()
        if not isinstance(mode, Uses) or not (x in mode.run.tracked or weight in mode.run.tracked):
            return function(x, weight, **options)
        with torch._C.DisableTorchFunction():
            if name not in RULES:
                raise refusal(name, (mode.run.known(x), mode.run.known(weight)))
            return _by_rule(mode.run, RULES[name], mode.run.known(x), mode.run.known(weight), **options)

    return visible


def rule(
    function: Callable[..., Tensor], *, example: tuple[Tensor, Tensor] | None = None, **options: Any
) -> Callable[[Rule | Callable[..., Record]], Rule]:
    """Register how uses of ``function(x, weight, **options)`` are recorded: a ``Rule``, or its ``record``.

    ``function`` is made by :func:`operation`, or an operator of ``torch.ops``. With an ``example``, an input and a
    weight (and options), the rule is compared with ``vmap(grad)`` at once, and refused if it differs.
    """

    def register(how: Rule | Callable[..., Record]) -> Rule:
        own = getattr(function, "__wrapped__", None)
        made = how if isinstance(how, Rule) else Rule(getattr(function, "__name__", "own"), own or function, how)
        if example is not None:
            check_rule(made, *example, **options)
        RULES[function if own is None else f"{own.__module__}.{own.__qualname__}"] = made
        return made

    return register


def _used(run: Run, func: Any, kind: Kind | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of torch that gets at least one tracked tensor."""
    if func is torch.Tensor.__getitem__ and isinstance(args[1], list):
        args = (args[0], _index(run, *args))  # from here on a list is a tuple of indices
    args, kwargs = tuple([run.known(a) for a in args]), {name: run.known(a) for name, a in kwargs.items()}
    if any(isinstance(a, Selected) for a in (*args, *kwargs.values())):
        return _of_selected(run, func, kind, args, kwargs)
    if kind is Kind.ASK:
        return func(*[plain(a) for a in args], **{name: plain(a) for name, a in kwargs.items()})
    if kind is Kind.MAKE:
        return _made(run, func, args, kwargs)
    if kwargs.get("out") is not None:
        raise refusal(f"{resolve_name(func) or func} with out=", _flat(args))
    own = func in RULES or func in HANDLERS
    if kind is None and not own and getattr(func, "__name__", "") == "__get__":
        return _property(run, func, args[0])
    if not torch.is_grad_enabled():
        # Inside a torch.autograd.Function a tap would have no derivative, the backward being its author's.
        raise refusal("a torch.autograd.Function, or under torch.no_grad() (write .detach())", _flat(args))
    if func in RULES:
        return _by_rule(run, RULES[func], *args, **kwargs)
    if own:
        return HANDLERS[func](run, *args, **kwargs)
    if kind is Kind.CAST:
        return cast(run, func, args, kwargs)
    if kind is Kind.IN_PLACE:
        return in_place(run, IN_PLACE[func], args, kwargs)
    if kind is Kind.POINTWISE:
        return pointwise(run, func, args, kwargs)
    if kind is Kind.EXPAND and isinstance(args[0], Tracked):
        return _expanded(run, func, args[0], args, kwargs)
    if kind is Kind.TURN and isinstance(args[0], Tracked) and _turns(func, args[0], args[1:]):
        return turned(run, args[0])
    if kind in (Kind.ALONE, Kind.TURN) and _all_shared(run, args, kwargs):
        return alone(run, func, args, kwargs)
    raise refusal(resolve_name(func) or str(func), _flat(args) + _flat(tuple(kwargs.values())))


def _of_selected(run: Run, func: Any, kind: Kind | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of matrices that ids of samples chose; what asks for no values gets none."""
    if kind is Kind.ASK or (getattr(func, "__name__", "") == "__get__" and func.__self__.__name__ in READS):
        return func(*[a.value if isinstance(a, Selected) else plain(a) for a in args], **kwargs)
    if not torch.is_grad_enabled():
        raise refusal("a torch.autograd.Function, or under torch.no_grad() (write .detach())", _flat(args))
    return selected(run, func, args, kwargs)


def _index(run: Run, x: Tensor, index: list[Any]) -> Tensor:
    """``w[[0, 2]]``: the numbers in a list as a tensor."""
    try:
        made = torch.tensor(index, device=x.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise refusal(f"indexing by a list of other than numbers ({error})", (run.known(x),)) from error
    run.constants[made] = True
    return made


def _made(run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What holds no parameter, to a derivative: a new tensor of a parameter's shape, or its value alone."""
    x = args[0]
    if func in DETACHES and isinstance(x, Tracked):
        if x.leaf is None:  # every sample has its own copy, also of what no derivative goes through
            return run.give(Tracked(x.value.detach(), lambda: x.copies().detach(), x.path))
        made = x.leaf.value.t().detach() if x.turned else x.leaf.value.detach()
    else:
        made = func(*[plain(a) for a in args], **{name: plain(a) for name, a in kwargs.items()})
    run.constants[made] = True
    return made


def _all_shared(run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether no operand holds samples."""
    held = tensors_of([plain(a) for a in args], {name: plain(a) for name, a in kwargs.items()})
    return all([tensor in run.tracked or run.constant(tensor) for tensor in held])


def _by_rule(run: Run, own: Rule, x: Any, weight: Any, **options: Any) -> Tensor:
    if not isinstance(weight, Tracked) or weight.leaf is None or weight.turned:
        raise refusal(f"{own.name} with a weight that is not a parameter itself", (x, weight))
    first, back = run.samples(x, path=weight.path)
    return back(ops.use(own, first, weight.leaf, **options))


def _property(run: Run, func: Any, x: Tracked) -> Any:
    name = func.__self__.__name__
    if name in READS:
        return func(x.value)
    turns = name in ("T", "mT") and len(x.shape) == 2
    if turns and run.tape is not None and run.tape.attached:
        raise FdpError(
            f"{x.path}: read by the property .{name}, which torch.compile does not show; write .t(), or compile nothing"
        )
    if turns:
        return turned(run, x, by_property=True)
    raise refusal(f"the property .{name}", (x,))


def _turns(func: Any, x: Tracked, dims: tuple[Any, ...]) -> bool:
    """Whether the dims of a matrix change places."""
    given = dims[0] if len(dims) == 1 and isinstance(dims[0], list) else list(dims)
    if len(x.shape) != 2 or len(given) not in (0, 2):
        return False
    permutes = func in (torch.permute, torch.Tensor.permute)
    return not given or ([dim % 2 for dim in given] == [1, 0] if permutes else given[0] % 2 != given[1] % 2)


def _expanded(run: Run, func: Any, x: Tracked, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A parameter spread over samples, one copy each; or over something else."""
    value = func(*[plain(a) for a in args], **{name: plain(a) for name, a in kwargs.items()})
    dim = 0 if run.batch_first or value.ndim < 3 else 1
    wide = [1] * (value.ndim - len(x.shape)) + list(x.shape)
    if value.ndim <= dim or value.shape[dim] != run.batch_size or wide[dim] != 1:
        run.note(x.path, SHARED)
        return alone(run, func, args, kwargs)
    run.note(x.path, SAMPLES)
    copies = x.copies()
    first = copies.reshape(copies.shape[0], *wide[:dim], *wide[dim + 1 :])
    rest = [*value.shape[:dim], *value.shape[dim + 1 :]]
    times = [new // old for new, old in zip(rest, first.shape[1:])]
    first = first.repeat(1, *times) if func is torch.Tensor.repeat else first.expand(copies.shape[0], *rest)
    return first.movedim(0, dim)


def _note_constant(run: Run, out: Any) -> None:
    """What is made of constants alone is one."""
    for made in out if isinstance(out, (list, tuple)) else (out,):
        if isinstance(made, Tensor):
            run.constants[made] = True


def _written_samples(run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether what a function wrote into is known to have held samples before."""
    return "out" not in kwargs and bool(args) and isinstance(args[0], Tensor) and args[0] not in run.constants


def _recurrent(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Recurrent layers: cuDNN has no backward for those in eval(), and draws dropout of its own."""
    drop, training = (args[5], args[6]) if isinstance(args[3], bool) else (args[6], args[7])
    if drop and training:
        raise FdpError(
            f"dropout with p = {drop} between recurrent layers in training mode: expected none, since its mask cannot "
            f"be drawn from per-sample keys; set dropout=0, use one-layer modules with nn.Dropout between, or eval()"
        )
    with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled and training):
        return func(*args, **kwargs)


def _check_statistics(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Batch normalisation without parameters, or with frozen ones: nothing else would see it."""
    if kwargs.get("training", args[5] if len(args) > 5 else False):
        raise FdpError(
            f"{resolve_name(func) or func}: expected fixed statistics, got those of the batch, which mix its samples: "
            f"no bound on one sample's gradient would hold. Use nn.GroupNorm, or put the layer in eval()"
        )


def _check_returned(run: Run, out: Any) -> None:
    """No result that holds parameters is without samples: outside, nobody would know of its copies."""
    if isinstance(out, Tensor):
        if out in run.tracked:
            raise FdpError(
                f"{run.tracked[out].path}: the module returns a value of shape {tuple(out.shape)} that parameters went "
                f"into, without samples; expected (batch, ...). Expand it, or return only what depends on the data"
            )
    elif isinstance(out, (list, tuple, dict)):
        for part in out.values() if isinstance(out, dict) else out:
            _check_returned(run, part)


def _flat(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([entry for value in values for entry in (value if isinstance(value, list) else [value])])
