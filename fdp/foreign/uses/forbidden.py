"""What a forward may not do, whatever it gets: write into the module's tensors, draw numbers, return none.

Refused before it is done, so that nothing has to be put back, and before any number of a sample is computed.

    >>> func = guarded(run, func, kind, args, kwargs)         # the function to call, or an error
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import resolve_name

from fdp.foreign.module_state import written
from fdp.foreign.uses.table import SWITCHED, WRITES, Kind
from fdp.foreign.uses.tracking import Run, tensors_of
from fdp.types import FdpError

READS_DATA, WRITES_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # pyright: ignore
UNUSED: dict[Callable[..., Any], Callable[..., Tensor]] = {
    torch.rand: torch.empty,
    torch.randn: torch.empty,
    torch.rand_like: torch.empty_like,
    torch.randn_like: torch.empty_like,
}
"""Functions whose numbers may be drawn if nobody uses them, and what makes a tensor of the same form."""


def guarded(run: Run, func: Any, kind: Kind | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function itself, or one that does the same and is seen to write; an error if it writes into the module."""
    assert run.versions is not None
    if func in WRITES or kwargs.get("out") is not None or _mutates(func):
        run.versions.check_write(func, args, kwargs)
    elif kind is None and func == READS_DATA:
        return torch.Tensor.detach  # the same values; a write into it counts
    elif kind is None and func == WRITES_DATA:
        names = [name for name, leaf in run.versions.tensors.items() if leaf is args[0]]
        raise written(names[0] if names else "a tensor", "tensor.data = ...")
    return func


def _mutates(func: Any) -> bool:
    """Whether an operator of ``torch.ops`` says that it writes into its arguments."""
    schema = getattr(func, "_schema", None)
    return schema is not None and schema.is_mutable


def looked_up(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of ``F.embedding`` or ``F.embedding_bag``, with a gradient that is dense. max_norm is refused."""
    max_norm = kwargs.get("max_norm", next(iter([a for a in args[3:4] if type(a) is float]), None))
    if max_norm is not None:
        raise max_norm_refusal("F.embedding", max_norm)
    if kwargs.get("sparse"):
        kwargs = kwargs | {"sparse": False}  # the same gradient, in another form
    if len(args) > 6 and args[6] is True and not isinstance(args[5], str):
        args = (*args[:6], False, *args[7:])
    return args, kwargs


def max_norm_refusal(name: str, max_norm: float) -> FdpError:
    """The refusal of a table that is written by those who look something up in it."""
    return FdpError(
        f"{name}: max_norm={max_norm} renormalises every row that is looked up, in place and without noise: the rows "
        f"that moved are those of the samples. Set max_norm=None and, if rows are to be short, shorten what is looked "
        f"up: h * (max_norm / h.norm(dim=-1, keepdim=True)).clamp(max=1)"
    )


def check_random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a draw from torch's generators."""
    if getattr(func, "__name__", "").rstrip("_") in SWITCHED:
        on = kwargs.get("training", next((a for a in args if isinstance(a, bool)), False))
        if not on:
            return
    raise _random(resolve_name(func) or str(func))


def unused(run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Not a number instead of a random one: there are modules that draw one and, in eval(), do nothing with it."""
    made = UNUSED[func](*args, **{name: value for name, value in kwargs.items() if name != "generator"})
    made = made.fill_(torch.nan)
    run.random[made] = f"torch.{func.__name__}"
    return made


def check_not_random(run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse the use of a number that was drawn."""
    for tensor in tensors_of(args, kwargs):
        if tensor in run.random:
            raise _random(run.random[tensor])


def _random(name: str) -> FdpError:
    return FdpError(
        f"{name}: expected a module whose forward, run twice, gives the same, got one that draws random numbers; put "
        f"it in eval(), or give it the numbers as data"
    )


def check_values(module: nn.Module, given: Mapping[str, Tensor], out: Any) -> None:
    """Refuse a result without values where all that was given has some."""
    if any(isinstance(leaf, FakeTensor) for leaf in given.values()):
        return
    if any(isinstance(_inner(leaf), FakeTensor) for leaf in _leaves(out)) and torch._C._get_dispatch_mode(FAKE) is None:
        raise FdpError(
            f"{type(module).__name__}: returned a tensor without values: the module keeps a table outside of itself (a "
            f"functools.cache, a global), which was filled while a plan was made. Empty that cache, then make the "
            f"table in __init__, or keep it in an attribute of the module"
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
