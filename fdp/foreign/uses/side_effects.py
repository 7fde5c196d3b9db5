"""Refuse side effects of a forward: writes into the module's tensors, random draws, tables outside the module.

They are refused before they happen, so that nothing has to be restored, and before any sample is computed.

    >>> func = guard_write(trace, func, kind, args, kwargs)         # the function to call, or an error
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import resolve_name

from fdp.foreign.module_state import write_error
from fdp.foreign.uses.function_table import RANDOM_IF_TRAINING, WRITE_FUNCTIONS, FunctionKind
from fdp.foreign.uses.tracking import CallTrace, tensors_of
from fdp.types import FdpError

READS_DATA, WRITES_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # pyright: ignore
REPLACED_DRAWS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    torch.rand: torch.empty,
    torch.randn: torch.empty,
    torch.rand_like: torch.empty_like,
    torch.randn_like: torch.empty_like,
}
"""Random functions whose result may be unused, and a function that makes a tensor of the same shape."""


def guard_write(
    trace: CallTrace, func: Any, kind: FunctionKind | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the function to call; refuse a write into the module. Reading ``.data`` becomes a detach."""
    assert trace.versions is not None
    if func in WRITE_FUNCTIONS or kwargs.get("out") is not None or _mutates(func):
        trace.versions.check_write(func, args, kwargs)
    elif kind is None and func == READS_DATA:
        return torch.Tensor.detach  # the same values, but writes into it are counted
    elif kind is None and func == WRITES_DATA:
        names = [name for name, leaf in trace.versions.tensors.items() if leaf is args[0]]
        raise write_error(names[0] if names else "a tensor", "tensor.data = ...")
    return func


def _mutates(func: Any) -> bool:
    """Return True if the schema of an operator of ``torch.ops`` says that it writes into its arguments."""
    schema = getattr(func, "_schema", None)
    return schema is not None and schema.is_mutable


def dense_embedding(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``F.embedding`` or ``F.embedding_bag`` with a dense gradient. Refuse ``max_norm``."""
    max_norm = kwargs.get("max_norm", next(iter([a for a in args[3:4] if type(a) is float]), None))
    if max_norm is not None:
        raise max_norm_error("F.embedding", max_norm)
    if kwargs.get("sparse"):
        kwargs = kwargs | {"sparse": False}  # the same gradient in another format
    if len(args) > 6 and args[6] is True and not isinstance(args[5], str):
        args = (*args[:6], False, *args[7:])
    return args, kwargs


def max_norm_error(name: str, max_norm: float) -> FdpError:
    """Return the error for a table whose rows are written by lookups."""
    return FdpError(
        f"{name}: max_norm={max_norm} renormalises every row that is looked up, in place and without noise: the rows "
        f"that change reveal the samples. Set max_norm=None; to bound rows, scale the result of the lookup: "
        f"h * (max_norm / h.norm(dim=-1, keepdim=True)).clamp(max=1)"
    )


def check_no_draw(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a draw from torch's generators."""
    if getattr(func, "__name__", "").rstrip("_") in RANDOM_IF_TRAINING:
        on = kwargs.get("training", next((a for a in args if isinstance(a, bool)), False))
        if not on:
            return
    raise _random_error(resolve_name(func) or str(func))


def nan_instead_of_draw(trace: CallTrace, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return NaN instead of random numbers: some modules draw them and, in eval(), do not use them."""
    made = REPLACED_DRAWS[func](*args, **{name: value for name, value in kwargs.items() if name != "generator"})
    made = made.fill_(torch.nan)
    trace.random_draws[made] = f"torch.{func.__name__}"
    return made


def check_draw_unused(trace: CallTrace, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse the use of a number that was drawn."""
    for tensor in tensors_of(args, kwargs):
        if tensor in trace.random_draws:
            raise _random_error(trace.random_draws[tensor])


def _random_error(name: str) -> FdpError:
    return FdpError(
        f"{name}: expected a forward that gives the same result twice, got one that draws random numbers; put it in "
        f"eval(), or pass the numbers in as data"
    )


def check_has_values(module: nn.Module, given: Mapping[str, Tensor], out: Any) -> None:
    """Refuse a result without values if everything that was given has values."""
    if any(isinstance(leaf, FakeTensor) for leaf in given.values()):
        return
    if any(isinstance(_inner(leaf), FakeTensor) for leaf in _leaves(out)) and torch._C._get_dispatch_mode(FAKE) is None:
        raise FdpError(
            f"{type(module).__name__}: expected a result with values, got one without: the module keeps a table "
            f"outside itself (a functools.cache, a global), which was filled while the plan was made on shapes. Clear "
            f"that cache, then build the table in __init__, or store it in an attribute of the module"
        )


FAKE = torch._C._TorchDispatchModeKey.FAKE


def _leaves(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (list, tuple, dict)):
        for part in out.values() if isinstance(out, dict) else out:
            yield from _leaves(part)


def _inner(leaf: Tensor) -> Tensor:
    while _functorch.is_functorch_wrapped_tensor(leaf):
        leaf = _functorch.get_unwrapped(leaf)
    return leaf
