"""Compare one kind of module with the definition: a loop of single-sample backwards in float64.

    norm_b = |grad of loss(module(sample b), sample b)|                 leaf by leaf, by the unchanged module itself

A kind is exact if losses, norms of every leaf and a clipped sum equal those of the loop (1e-7) on a batch that differs
from the example in its values and its number of samples. A kind that fdp refuses has a ``mend``, the remedy that the
error names, and is then compared with that. A kind that must be refused has the words of the error. Nothing else is
allowed: no other error, no difference, and no module that has changed by a single bit.

    >>> kind = Kind("linear", lambda: Case(nn.Linear(4, 3), lambda n, g: {"input": normal(g, n, 4)}))
    >>> hold(kind).verdict                                                            # "exact"
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from fdp import tree
from fdp.fast.compiled import CompiledRunner
from fdp.foreign.module import from_module
from fdp.foreign.uses.dropout import DROPOUT_KEYS, keys_of
from fdp.foreign.uses.tracking import CallTrace
from fdp.foreign.uses.watch import WatchMode
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.execution import EAGER, Execution
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import make_plan
from fdp.model import Model
from fdp.privacy.clipping import clip_to
from fdp.types import FdpError, Flat, Tree

EXACT, REFUSED, MENDED = "exact", "refused with a remedy", "exact by that remedy"
CRASHED, DIFFERENT, CHANGED = "CRASHED", "DIFFERENT", "MODULE CHANGED"
ALLOWED = (EXACT, REFUSED, MENDED)
EXAMPLE, SAMPLES = 4, 3
"""Number of samples in the example, and in the batch whose norms are compared."""
TOLERANCE = 1e-7
"""Tolerance of a norm or a sum, relative to itself or to a thousandth of the sample's total norm."""

Draw = Callable[[int, Generator], dict[str, Tensor]]


def squares(out: Any, data: Tree) -> Tensor:
    """Return half the sum of squares of a sample's shifted outputs, so that no gradient is linear in another."""
    out = out if isinstance(out, Tensor) else next(leaf for leaf in tree.leaves(list(out)) if isinstance(leaf, Tensor))
    return out.reshape(len(out), -1).add(0.3).square().sum(1) / 2


class Case(NamedTuple):
    """A module, a function that draws its batches, its loss, and how it becomes a model.

    ``options`` are those of ``from_module``. ``take(module, example)`` makes a model and its values another way.
    """

    module: nn.Module
    draw: Draw
    loss: Callable[[Any, Tree], Tensor] = squares
    options: Mapping[str, Any] = MappingProxyType({})
    take: Callable[[nn.Module, Tree], tuple[Model, Tree]] | None = None
    call: Callable[[Callable[..., Any], Tree], Any] | None = None

    def model(self, example: Tree) -> tuple[Model, Tree]:
        if self.take is not None:
            return self.take(self.module, example)
        more = {} if self.call is None else {"call": self.call}
        return from_module(self.module, loss=self.loss, example=example, **more, **self.options)


class Kind(NamedTuple):
    """A kind of module. ``refusal``: words of the error that it must raise; ``mend``: the remedy that the error
    names.

    A mend is other options of ``from_module``, or another case. ``compiled``: compare it compiled by block, too.
    """

    name: str
    make: Callable[[], Case]
    refusal: str | None = None
    mend: dict[str, Any] | Callable[[Case], Case] | None = None
    compiled: bool = False


class Row(NamedTuple):
    """The result of one kind: its ``verdict``, and in ``words`` the error or what went wrong."""

    name: str
    group: str
    verdict: str
    words: str
    error: float
    compiled: str
    seconds: float

    @property
    def good(self) -> bool:
        return self.verdict in ALLOWED and self.compiled in (*ALLOWED, "")


def hold(kind: Kind, *, group: str = "", backend: str = "aot_eager", compiled: bool | None = None) -> Row:
    """Compare a kind with the loop, eager and (by default if the kind says so) compiled."""
    began = time.perf_counter()
    verdict, words, error = _held(kind, None)
    also = ""
    if kind.compiled if compiled is None else compiled:
        also, more, _ = _held(kind, CompiledRunner(backend=backend))
        words = words if also in ALLOWED else f"{words} compiled: {more}".strip()
    return Row(kind.name, group, verdict, words, error, also, time.perf_counter() - began)


def _held(kind: Kind, blocks: CompiledRunner | None) -> tuple[str, str, float]:
    try:
        kind.make()
    except ImportError as missing:  # a zoo goes on without what is not installed
        return REFUSED, f"not here: {missing.name}", 0.0
    verdict, words, error = _looked_at(kind.make, blocks)
    if verdict != REFUSED:
        missed = verdict == EXACT and kind.refusal is not None
        return (DIFFERENT, f"not refused with {kind.refusal!r}", error) if missed else (verdict, words, error)
    if blocks is not None and "do not compile" in words:
        return REFUSED, words, error
    if kind.refusal is not None and kind.refusal not in words:
        return CRASHED, f"expected a refusal with {kind.refusal!r}, got {words}", error
    if kind.mend is None:
        return (CRASHED if kind.refusal is None else REFUSED), words, error
    after, more, error = _looked_at(lambda: _mended(kind), blocks)
    return (MENDED, words, error) if after == EXACT else (CRASHED, f"{words} MENDED: {after} {more}", error)


def _mended(kind: Kind) -> Case:
    case = kind.make()
    if isinstance(kind.mend, dict):
        return case._replace(options={**case.options, **kind.mend})
    assert kind.mend is not None
    return kind.mend(case)


def _made(make: Callable[[], Case]) -> Case:
    """Return the case in float64, the same every time, with parameters moved away from their initial values."""
    torch.manual_seed(0)
    case = make()
    module = case.module.double() if case.take is None else case.module
    if not any(leaf.is_complex() for leaf in module.parameters()):
        with torch.no_grad():
            for leaf in {id(leaf): leaf for leaf in module.parameters()}.values():
                leaf.add_(torch.randn(leaf.shape, dtype=leaf.dtype), alpha=0.1)
    return case


def _looked_at(make: Callable[[], Case], blocks: CompiledRunner | None) -> tuple[str, str, float]:
    case, reference = _made(make), _made(make)
    before = digest(case.module)
    try:
        example = case.draw(EXAMPLE, torch.Generator().manual_seed(1))
        data = case.draw(SAMPLES, torch.Generator().manual_seed(2))
        found = EXACT, "", 0.0
        model, params = case.model(example)
        before_step = digest(case.module)
        error, where = _compare(reference, model, params, data, blocks)
        if not error <= TOLERANCE:
            found = DIFFERENT, f"{where} by {error:.1e}", error
        elif digest(case.module) != before_step:
            found = CHANGED, "by a private pass", error
        else:
            found = EXACT, "", error
    except FdpError as refused:
        found = REFUSED, str(refused), 0.0
    except Exception as crash:
        inner = crash.__cause__ if blocks is not None else None
        if isinstance(inner, FdpError):
            found = REFUSED, str(inner), 0.0
        else:
            found = CRASHED, f"{type(crash).__name__}: {str(crash).strip().splitlines()[0][:200]}", 0.0
    if found[0] != DIFFERENT and digest(case.module) != before:
        return CHANGED, f"after {found[0]}: {found[1]}", found[2]
    return found


def _compare(case: Case, model: Model, params: Tree, data: Tree, blocks: CompiledRunner | None) -> tuple[float, str]:
    """Return the largest relative difference of losses, norms and a clipped sum from the loop's, and where it is."""
    plan = make_plan(model, params, data, dtype=torch.float64)
    losses, norms, stash = per_sample_norms(model, params, data, plan=plan, execution=Execution(runner=blocks or EAGER))
    expected, gradients = loop(case, model, data)
    if set(norms.squared) != set(gradients):
        return float("inf"), f"leaves {sorted(set(norms.squared) ^ set(gradients))[:3]}"
    squared = {path: g.reshape(len(g), -1).square().sum(1) for path, g in gradients.items()}
    least = 1e-3 * torch.stack(list(squared.values())).sum(0).sqrt()
    found = [(_apart(losses.double(), expected, torch.full_like(expected, 1e-3)), "the losses")]
    for path, square in squared.items():
        found.append((_apart(norms.squared[path].double().sqrt(), square.sqrt(), least), f"the norms of {path}"))
    bound = float(norms.total().median())
    clip = clip_to(norms, max_norm=bound)
    total = clipped_sum(stash, clip).value
    for path, g in gradients.items():
        summed = torch.einsum("b,b...->...", clip.factors[path].double(), g)
        apart = (total[path].double() - summed).norm() / summed.norm().clamp_min(1e-3 * bound)
        found.append((float(apart), f"the clipped sum of {path}"))
    return max(found, key=lambda pair: float("inf") if pair[0] != pair[0] else pair[0])


def _apart(got: Tensor, expected: Tensor, least: Tensor) -> float:
    return float(((got - expected).abs() / torch.maximum(expected.abs(), least).clamp_min(1e-30)).max())


def loop(case: Case, model: Model, data: dict[str, Tensor]) -> tuple[Tensor, Flat]:
    """Return every sample's loss and gradients: one backward of the module called with that sample alone."""
    call = case.call or _by_name(case.module)
    trained = {name: leaf for name, leaf in case.module.named_parameters() if name in model.trainable}
    losses, rows = [], {name: [] for name in trained}
    for b in range(len(next(iter(data.values())))):
        one = {name: leaf[b : b + 1] for name, leaf in data.items()}
        inputs = {name: leaf for name, leaf in one.items() if name != DROPOUT_KEYS}
        if (keys := keys_of(one)) is not None:  # dropout draws from the sample's key
            with WatchMode(CallTrace(None, 1, batch_first=True, keys=keys)):
                out = call(case.module, inputs)
        else:
            out = call(case.module, inputs)
        loss = case.loss(out, one).sum()
        slopes = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        losses.append(loss.detach())
        for (name, leaf), slope in zip(trained.items(), slopes):
            rows[name].append(torch.zeros_like(leaf) if slope is None else slope.detach().to_dense())
    return torch.stack(losses).double(), {name: torch.stack(found).double() for name, found in rows.items()}


def _by_name(module: nn.Module) -> Callable[[Callable[..., Any], Tree], Any]:
    takes = inspect.signature(module.forward).parameters
    return lambda module, data: module(**{name: leaf for name, leaf in data.items() if name in takes})


def digest(value: Any, known: dict[int, int] | None = None) -> str:
    """Return a string that depends on a module and everything reachable from it, down to the bits of its tensors."""
    known = {} if known is None else known
    if isinstance(value, Tensor):
        bits = hashlib.sha1(_bits(value)).hexdigest()
        grad = "" if not value.is_leaf or value.grad is None else digest(value.grad, known)
        return f"{type(value).__name__}{tuple(value.shape)}{value.dtype}{value.requires_grad}{bits}{grad}"
    if id(value) in known:
        return f"#{known[id(value)]}"
    if isinstance(value, dict):
        known[id(value)] = len(known)
        return "{" + ",".join(f"{key}:{digest(item, known)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple | set | frozenset):
        return "[" + ",".join(digest(item, known) for item in value) + "]"
    if isinstance(value, nn.Module) or (hasattr(value, "__dict__") and not callable(value)):
        known[id(value)] = len(known)
        return f"{type(value).__name__}({digest(vars(value), known)})"
    return (
        repr(value) if value is None or isinstance(value, int | float | complex | str | bytes) else type(value).__name__
    )


def _bits(value: Tensor) -> bytes:
    with torch.no_grad():
        if type(value) not in (Tensor, nn.Parameter) or value.device.type == "meta":
            return str(type(value)).encode()  # such as a tensor without values: its class tells
        value = value.detach().to_dense().contiguous().flatten()
        return value.view(torch.uint8).numpy().tobytes() if value.numel() else b""
