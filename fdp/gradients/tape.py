"""The tape of one run of a block: every use of its watched leaves, and the taps that are added to the outputs.

    y = op(x, w) + tap                          a tap of zeros; attach(y, tap) does the same and computes no addition
    b = tap                                     a small parameter: one copy per sample

A block gets every watched leaf as a :class:`Watched` value, which the operations of ``fdp.ops`` accept. Any other
operation on it is an error that names the leaf and the operation, so that no use goes unrecorded.

    >>> tape = Tape(3, taps)                                              # None: a trace, which adds no taps
    >>> h = ops.linear(x, Watched(weight, "w", tape))                     # the linear map, plus the tap "w#0"
    >>> tape.uses                                                         # [Use("w#0", "w", "linear", ...)]
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fdp import tree
from fdp.cpu.token_sums import sum_over_tokens
from fdp.gradients.rules import Rule
from fdp.types import FdpError, Path

EXPANDED = "expanded"


class Use(NamedTuple):
    """One use of a leaf in a block: its rule and its shapes."""

    name: str
    path: Path
    rule: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    leaf_shape: tuple[int, ...]


class Watched:
    """A parameter whose every use is recorded. Only the operations of ``fdp.ops`` accept one."""

    def __init__(self, value: Tensor, path: Path, tape: Tape):
        self.value = value
        self.path = path
        self.tape = tape

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    @property
    def device(self) -> torch.device:
        return self.value.device

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        watched = next(a for a in tree.leaves([list(args), kwargs or {}]) if isinstance(a, Watched))
        raise _no_rule(watched, getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> Any:
        raise _no_rule(self, name)

    def _refuse(self, *_: Any) -> Any:
        raise _no_rule(self, "a Python operator")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse
    __truediv__ = __rtruediv__ = __neg__ = __pow__ = __getitem__ = __iter__ = _refuse


class Tape:
    """The record of one run of a block: the taps it was given, the uses and inputs it saw.

    If ``attached``, taps are attached instead of added (see ``attach``): free, but for plain autograd only. If
    ``compiled``, the block is or will be compiled, and some functions of torch cannot be seen; default: ``attached``.
    """

    def __init__(
        self,
        batch_size: int,
        taps: Mapping[str, Tensor] | None,
        *,
        attached: bool = False,
        compiled: bool | None = None,
    ):
        self.batch_size = batch_size
        self.taps = taps
        self.attached = attached
        self.compiled = attached if compiled is None else compiled
        self.uses: list[Use] = []
        self.rules: dict[str, tuple[Rule, dict[str, Any]]] = {}
        self.inputs: dict[str, Tensor] = {}
        self.biases: dict[Path, str] = {}  # each fused bias: the use to whose output it was added
        self.expansions: list[Path] = []
        self.additions: list[tuple[Path, str]] = []  # every bias and the use to whose output it was added
        self.layouts: list[tuple[Path, str]] = []  # where a foreign module's sample dimension was found, per use
        self.known: list[tuple[Path, str]] | None = None  # layouts of an earlier trace, for compiled code
        self.changed: list[str] = []  # attributes that a foreign module changed, and that were restored
        self.outputs: list[tuple[str, Tensor, int]] = []  # in a trace: every use's output and its version
        self.versions: list[tuple[Path, Tensor, int]] = []  # in a trace: every use's input and its version
        self.draws: set[str] = set()  # in a trace: operations that draw random numbers
        self.written: frozenset[str] = frozenset()  # uses whose output is written in place later

    def output(self, rule: Rule, x: Tensor, leaf: Watched, options: dict[str, Any]) -> Tensor:
        """Return ``rule.forward(x, leaf)`` plus its tap."""
        self._check_samples(rule, x, leaf)
        return self._copy_if_written(self._add_tap(rule, x, leaf, options, rule.forward(x, leaf.value, **options)))

    def output_with_bias(self, rule: Rule, x: Tensor, leaf: Watched, bias: Watched) -> Tensor:
        """Return ``rule.forward(x, leaf, bias)``, one operation, with the taps of both attached to its output."""
        self._check_samples(rule, x, leaf)
        y = self._add_tap(rule, x, leaf, {}, rule.forward(x, leaf.value, bias.value))
        self.biases[bias.path] = self.uses[-1].name
        self.additions.append((bias.path, self.uses[-1].name))
        if self.taps is not None and bias.path not in self.taps:
            return self._copy_if_written(y)  # the caller sums the weight's tap gradient over tokens instead
        return self._copy_if_written(attach_bias(y, self.expand(bias)))

    def _copy_if_written(self, y: Tensor) -> Tensor:
        """Return the last use's output, copied if it is written in place later: an attached output is a view."""
        name = self.uses[-1].name if self.uses[-1].rule != EXPANDED else self.uses[-2].name
        if self.taps is None and not torch.compiler.is_compiling():
            self.outputs.append((name, y, _version(y)))
        return y.clone() if name in self.written else y

    def written_outputs(self) -> frozenset[str]:
        """Return the uses whose output was written in place after the trace; raise if an input was."""
        if path := next((path for path, x, version in self.versions if _version(x) != version), None):
            raise FdpError(
                f"{path}: its input is written in place after it was used, so its gradient would be that of other "
                f"numbers; expected an unchanged input. Write h = h + y instead of h += y, or inplace=False"
            )
        return frozenset(name for name, y, version in self.outputs if _version(y) != version)

    def _check_samples(self, rule: Rule, x: Tensor, leaf: Watched) -> None:
        if x.ndim == 0 or x.shape[0] != self.batch_size:
            raise FdpError(
                f"{leaf.path}: used by {rule.name} on an input of shape {tuple(x.shape)}; expected a leading sample "
                f"dimension of {self.batch_size}. Keep samples in dimension 0 (or use the method 'materialize')"
            )

    def _add_tap(self, rule: Rule, x: Tensor, leaf: Watched, options: dict[str, Any], y: Tensor) -> Tensor:
        name = f"{leaf.path}#{sum(use.path == leaf.path for use in self.uses)}"
        self.uses.append(Use(name, leaf.path, rule.name, tuple(x.shape), tuple(y.shape), tuple(leaf.shape)))
        self.rules[name] = (rule, options)
        self.inputs[name] = x
        if self.taps is None:
            self.versions.append((leaf.path, x, _version(x)))
            return y
        if self.taps[name].shape != y.shape:
            planned, got = tuple(self.taps[name].shape), tuple(y.shape)
            raise FdpError(
                f"{leaf.path}: expected an output of shape {planned}, as planned, got {got}; make a plan for it"
            )
        return attach(y, self.taps[name]) if self.attached else y + self.taps[name]

    def renamed(self, paths: Mapping[Path, Path]) -> Tape:
        """Return the tape of a trace for a block that does the same with other leaves: ``paths`` says with which."""
        names = {use.name: paths[use.path] + use.name.removeprefix(use.path) for use in self.uses}
        other = Tape(self.batch_size, self.taps, attached=self.attached, compiled=self.compiled)
        other.uses = [use._replace(name=names[use.name], path=paths[use.path]) for use in self.uses]
        other.rules = {names[name]: rule for name, rule in self.rules.items()}
        other.inputs = {names[name]: x for name, x in self.inputs.items()}
        other.biases = {paths[path]: names[name] for path, name in self.biases.items()}
        other.expansions = [paths[path] for path in self.expansions]
        other.additions = [(paths[path], names[name]) for path, name in self.additions]
        other.layouts = [(paths.get(path, path), layout) for path, layout in self.layouts]
        other.changed = list(self.changed)
        other.outputs = [(names[name], y, version) for name, y, version in self.outputs]
        other.versions = [(paths[path], x, version) for path, x, version in self.versions]
        other.written = frozenset(names[name] for name in self.written)
        return other

    def check_met(self, block: str) -> None:
        """Raise if a use that has a tap was not made: its gradient would be zero."""
        seen = {use.name for use in self.uses}
        if unmet := [name for name in self.taps or {} if name not in seen]:
            raise FdpError(f"{block}: expected the uses {unmet[:4]}, as planned, got none; make a plan for it")

    def expand(self, leaf: Watched) -> Tensor:
        """Return one copy of ``leaf`` per sample: ``(batch, *leaf.shape)``. All uses share the copies."""
        shape = (self.batch_size, *leaf.shape)
        self.expansions.append(leaf.path)
        if not any(use.path == leaf.path and use.rule == EXPANDED for use in self.uses):
            self.uses.append(Use(leaf.path, leaf.path, EXPANDED, shape, shape, tuple(leaf.shape)))
        return leaf.value.expand(shape) if self.taps is None else self.taps[leaf.path]


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(y: Tensor, tap: Tensor, copies: Tensor | None) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        copies = inputs[2]
        ctx.copies = None if copies is None else copies.shape

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:  # pyright: ignore
        gradient = gradient.contiguous()  # once, for every reader
        if ctx.copies is None:
            return gradient, gradient, None
        tokens = tuple(range(1, gradient.ndim - len(ctx.copies) + 1))
        return gradient, None, sum_over_tokens(gradient, tokens) if tokens else gradient


_Attach.forward.__signature__ = inspect.signature(_Attach.forward)  # pyright: ignore (torch asks for it at every call)


@torch.compiler.allow_in_graph
def attach(y: Float[Tensor, " batch *shape"], tap: Float[Tensor, " batch *shape"]) -> Float[Tensor, " batch *shape"]:
    """Return ``y + tap`` for a tap of zeros: no addition is computed, both get the gradient.

    For plain autograd only. ``torch.func`` and ``torch.compile`` together can lose a custom backward. Here that raises
    an error, because the output then does not depend on the tap.
    """
    return _Attach.apply(y, tap, None)  # pyright: ignore


@torch.compiler.allow_in_graph
def attach_bias(y: Float[Tensor, " batch *tokens p"], copies: Float[Tensor, "batch p"]) -> Float[Tensor, "..."]:
    """Return ``y``, which contains the bias already, with the gradient of one copy per sample; see ``attach``."""
    return _Attach.apply(y, None, copies)  # pyright: ignore


def _no_rule(leaf: Watched, operation: str) -> FdpError:
    return FdpError(
        f"{leaf.path} (shape {tuple(leaf.shape)}): used by {operation}, which has no per-sample rule. Use an operation "
        f"of fdp.ops, give your own a rule (fdp.Rule with fdp.ops.use), freeze the leaf, or train with the "
        f"method 'materialize'"
    )


def _version(x: Tensor) -> int:
    """Return how often a tensor, or a view of it, was written to."""
    return 0 if x.is_inference() else x._version
