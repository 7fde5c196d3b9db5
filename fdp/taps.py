"""Taps: per-sample output gradients as true derivatives, without hooks.

For an operation ``y = op(x, w)`` inside a block, add a zero to its output, ``y = op(x, w) + tap``. The derivative of
the loss with respect to ``tap`` *is* the output gradient ``g``, sample by sample, and with the input ``x`` it holds
all there is to know about the gradient of ``w``. A small parameter (bias, scale) is tapped by expanding it, one copy
per sample: the derivative with respect to the copies is the per-sample gradient itself.

    >>> uses, _ = trace(block, leaves, carry, data)                       # shapes only: which ops use which leaf
    >>> out, pull = tapped_vjp(block, weights, carry, data, uses)
    >>> carry_gradient, records = pull(out_gradient)                      # records: {path: [Pair or Dense, ...]}

A leaf that is watched is handed to the block as a :class:`Watched` value. The operations of ``fdp.ops`` know what to
do with one; every other operation on it is an error that names the leaf and the operation, so no use can escape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fdp import tree
from fdp.rules import Dense, Record, Rule
from fdp.types import FdpError, Flat, Path, Tree
from fdp.vjp import vjp

EXPANDED = "expanded"


class Use(NamedTuple):
    """One use of a leaf in a block: by which rule, on what shapes."""

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
    """What one run of a block sees: the taps it was given, the uses and inputs it recorded."""

    def __init__(self, batch_size: int, taps: Mapping[str, Tensor] | None):
        self.batch_size = batch_size
        self.taps = taps
        self.uses: list[Use] = []
        self.rules: dict[str, tuple[Rule, dict[str, Any]]] = {}
        self.inputs: dict[str, Tensor] = {}

    def output(self, rule: Rule, x: Tensor, leaf: Watched, options: dict[str, Any]) -> Tensor:
        """``rule.forward(x, leaf)`` plus its tap."""
        if x.ndim == 0 or x.shape[0] != self.batch_size:
            raise FdpError(
                f"{leaf.path}: used by {rule.name} on an input of shape {tuple(x.shape)}; expected a leading sample "
                f"dimension of {self.batch_size}. Keep samples in dimension 0 (or use the method 'materialize')"
            )
        y = rule.forward(x, leaf.value, **options)
        name = f"{leaf.path}#{sum(use.path == leaf.path for use in self.uses)}"
        self.uses.append(Use(name, leaf.path, rule.name, tuple(x.shape), tuple(y.shape), tuple(leaf.shape)))
        self.rules[name] = (rule, options)
        self.inputs[name] = x
        if self.taps is None:
            return y
        if self.taps[name].shape != y.shape:
            planned, got = tuple(self.taps[name].shape), tuple(y.shape)
            raise FdpError(
                f"{leaf.path}: expected an output of shape {planned}, as planned, got {got}; make a plan for it"
            )
        return y + self.taps[name]

    def expanded(self, leaf: Watched) -> Tensor:
        """``leaf`` as one copy per sample: ``(batch, *leaf.shape)``. All uses share the copies."""
        shape = (self.batch_size, *leaf.shape)
        if not any(use.path == leaf.path and use.rule == EXPANDED for use in self.uses):
            self.uses.append(Use(leaf.path, leaf.path, EXPANDED, shape, shape, tuple(leaf.shape)))
        return leaf.value.expand(shape) if self.taps is None else self.taps[leaf.path]


def trace(block: Any, leaves: Mapping[Path, Tensor], trainable: frozenset[Path], carry: Tree, data: Tree):
    """The uses of every trainable leaf in ``block`` and the shapes of its output, without computing anything.

    Tensors may be real or fake; only shapes, dtypes and devices are read. Returns ``(uses, fake output)``.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(leaf: Tensor) -> Tensor:
        with mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)

    weights = {path: fake(leaves[path]) for path in tree.leaves(block.params)}
    tape = Tape(batch_size_of(data), None)
    with mode, torch.no_grad():
        out = block.apply(_watch(block, weights, trainable, tape), tree.map(fake, carry), tree.map(fake, data))
    names = [use.name for use in tape.uses]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise FdpError(
            f"{block.name}: expected distinct names of uses, got {twice} twice; rename leaves that contain '#'"
        )
    return tuple(tape.uses), out


def tapped_vjp(
    block: Any, weights: Flat, carry: Tree, data: Tree, uses: tuple[Use, ...], trainable: frozenset[Path]
) -> tuple[Tree, Callable[[Tree], tuple[Tree, dict[Path, list[Record]]]]]:
    """A block's output and the pull-back of an output gradient to its carry and to its parameters' records.

    The weights themselves are constants of the differentiation: no weight gradient is computed here.
    """
    batch_size = batch_size_of(data)
    rules: dict[str, tuple[Rule, dict[str, Any]]] = {}

    def run(carry: Tree, taps: Flat):
        tape = Tape(batch_size, taps)
        out = block.apply(_watch(block, weights, trainable, tape), carry, data)
        rules.update(tape.rules)
        return out, tape.inputs

    out, pull, inputs = vjp(run, carry, _make_taps(uses, weights))

    def pull_records(gradient: Tree) -> tuple[Tree, dict[Path, list[Record]]]:
        carry_gradient, tap_gradients = pull(gradient)
        records: dict[Path, list[Record]] = {}
        for use in uses:
            g = tap_gradients[use.name]
            if use.rule == EXPANDED:
                record = Dense(g)
            else:
                rule, options = rules[use.name]
                record = rule.record(inputs[use.name], g, use.leaf_shape, **options)
            records.setdefault(use.path, []).append(record)
        return carry_gradient, records

    return out, pull_records


def batch_size_of(data: Tree) -> int:
    """The leading size that all leaves of ``data`` share."""
    sizes = {path: tuple(leaf.shape[:1]) for path, leaf in tree.flatten(data).items()}
    if len(set(sizes.values())) != 1 or () in sizes.values():
        raise FdpError(f"batch: expected every leaf to have the same leading sample dimension, got sizes {sizes}")
    ((size,),) = set(sizes.values())
    return size


def _make_taps(uses: tuple[Use, ...], weights: Flat) -> Flat:
    taps = {}
    for use in uses:
        weight = weights[use.path]
        value = weight if use.rule == EXPANDED else weight.new_zeros(())
        taps[use.name] = value.expand(use.output_shape)
    return taps


def _watch(block: Any, weights: Flat, trainable: frozenset[Path], tape: Tape) -> Tree:
    handed = {p: Watched(w, p, tape) if p in trainable else w for p, w in weights.items()}
    return tree.select(handed, block.params)


def _no_rule(leaf: Watched, operation: str) -> FdpError:
    return FdpError(
        f"{leaf.path} (shape {tuple(leaf.shape)}): used by {operation}, which has no per-sample rule. Use an operation "
        f"of fdp.ops, give your own a rule (fdp.rules.Rule with fdp.ops.use), freeze the leaf, or train with the "
        f"method 'materialize'"
    )
