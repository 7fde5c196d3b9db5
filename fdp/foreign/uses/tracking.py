"""Track the tensors of one call of a module: which hold samples, which depend on parameters, which do neither.

    tracked       value = f(w, constants), without a batch dim    its copies f(w_b): (batch, *shape), one per sample
    constant      depends on no data and no parameter             positions, masks, buffers, frozen leaves
    all others    hold samples: (batch, ...), or (batch * tokens, ...) flattened

The module is given plain tensors. A tensor that depends on a watched parameter is known by identity (:class:`Tracked`).
If it is combined with samples, each sample uses its own copy, so that the derivative with respect to a copy is that
sample's gradient.

    >>> first, back = trace.with_samples_first(x, path="wte.weight")       # samples in dim 0, and the inverse
    >>> y = back(ops.linear(first, leaf))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fdp.foreign.module_state import VersionCounters
from fdp.gradients.tape import Tape, Watched
from fdp.types import FdpError

ALWAYS_FIRST = 1_000_000
"""More dims than any tensor has: for operations that have samples in dim 0 by definition."""
SAMPLES, FLATTENED, SHARED = "samples", "flattened", "shared"


class Tracked:
    """A tensor without samples that depends on parameters.

    ``value`` is the tensor that the module sees; ``make()`` computes its copies. ``leaf`` is the parameter if the value
    is the parameter itself, up to its dtype and, if ``transposed``, its transposition. ``by_property``: it was read as
    ``.T`` or ``.mT``, which torch.compile does not show.
    """

    def __init__(
        self,
        value: Tensor,
        make: Callable[[], Tensor],
        path: str,
        *,
        leaf: Watched | None = None,
        transposed: bool = False,
        by_property: bool = False,
    ):
        self.value = value
        self.make = make
        self.path = path
        self.leaf = leaf
        self.transposed = transposed
        self.by_property = by_property
        self.cached: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def copies(self) -> Tensor:
        """Return one copy per sample, (batch, *shape). All uses share them."""
        if self.by_property and torch.compiler.is_compiling():
            raise FdpError(
                f"{self.path}: expected .t() or .transpose(0, 1), which torch.compile shows, got the property .T or "
                f".mT outside a product"
            )
        if self.cached is None:
            self.cached = self.make()
        return self.cached


class SelectedMatrices:
    """Matrices of a stack selected by ids of samples, ``W[ids]``, one per row, never computed.

    ``value`` is the tensor that the module sees; it takes no memory.
    """

    def __init__(self, value: Tensor, weight: Tracked, ids: Tensor, *, transposed: bool = False):
        self.value = value
        self.weight = weight
        self.ids = ids
        self.transposed = transposed
        self.path = weight.path

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


class CallTrace:
    """Everything known about the tensors of one call of a module."""

    def __init__(self, tape: Tape | None, batch_size: int, *, batch_first: bool, keys: Tensor | None):
        self.tape = tape
        self.batch_size = batch_size
        self.batch_first = batch_first
        self.keys = keys
        self.dropout_calls = 0
        self.seen_leaves: dict[str, Tensor] = {}
        self.tracked: dict[Tensor, Any] = {}
        self.constants: dict[Tensor, bool] = {}
        self.module_constants: dict[Tensor, bool] = {}  # held by the module: none of their dims is the batch
        self.reordered: dict[Tensor, bool] = {}  # their samples are in an order that data decide
        self.random_draws: dict[Tensor, str] = {}  # must not be used; the value is the function that drew them
        self.versions: VersionCounters | None = None  # of the module's own tensors; None while torch.compile traces

    def guard_writes(self, tensors: Mapping[str, Tensor], *, but: Collection[str] = ()) -> VersionCounters:
        """Refuse writes into ``tensors``, everything that a module holds; plain tensors among them are constants."""
        for leaf in tensors.values():
            if not isinstance(leaf, nn.Parameter) and not leaf.requires_grad and leaf not in self.tracked:
                self.constants[leaf] = self.module_constants[leaf] = True
        self.versions = VersionCounters({name: leaf for name, leaf in tensors.items() if name not in but})
        for name in but:
            self.constants.pop(tensors[name], None)
            self.module_constants.pop(tensors[name], None)
        return self.versions

    def watch(self, leaf: Watched) -> Tensor:
        """Return the tensor that stands for a watched leaf in the module."""
        if leaf.path in self.seen_leaves:
            return self.seen_leaves[leaf.path]  # another name of a tied leaf
        tape = leaf.tape
        seen = self.seen_leaves[leaf.path] = self.register(
            Tracked(_nan_if_compiling(leaf.value), lambda: tape.expand(leaf), leaf.path, leaf=leaf)
        )
        return seen

    def register(self, tracked: Tracked) -> Tensor:
        """Track a tensor; return what the module sees of it."""
        self.tracked[tracked.value] = tracked
        return tracked.value

    def register_copies(self, copies: Tensor, path: str) -> Tensor:
        """Track a result without samples, given its copies; return what the module sees of it."""
        return self.register(Tracked(_nan_if_compiling(copies[0]), lambda: copies, path))

    def resolve(self, value: Any) -> Any:
        """Replace every tracked tensor in ``value``, up to one list deep, by its :class:`Tracked`."""
        if isinstance(value, Tensor):
            return self.tracked.get(value, value)
        if isinstance(value, (list, tuple)):
            return [self.resolve(entry) for entry in value]
        return value

    def note_layout(self, path: str, answer: str) -> str:
        """Record how samples were found: with another batch size they must be found the same way.

        While torch.compile traces, return what was recorded before, because it does not show all torch functions.
        """
        if self.tape is None:
            return answer
        known, place = self.tape.known, len(self.tape.layouts)
        if known is not None and place < len(known):
            answer = known[place][1]
        self.tape.layouts.append((path, answer))
        return answer

    def is_constant(self, x: Tensor) -> bool:
        """Return True if ``x`` depends on no data and no parameter."""
        return self.note_layout("a tensor", SHARED if x in self.constants else SAMPLES) == SHARED

    def find_layout(self, x: Tensor, *, path: str, dims: int = 3, filled: bool = False) -> tuple[str, int]:
        """Return how ``x`` holds samples, and in which dim: SAMPLES, FLATTENED with tokens in dim 0, or SHARED
        (none).

        Tensors of fewer than ``dims`` dims have samples first even if the module has tokens first. ``filled``: ``x`` is
        combined with a parameter of the same extent there, so that a constant with as many rows as samples holds none.
        """
        if x in self.reordered:
            raise FdpError(
                f"{path}: used on samples in an order that the data decide (sorted by length, or selected by an index "
                f"that depends on data): row b may not hold sample b, and the norms of the wrong samples would be "
                f"clipped. Leave samples in their rows, or materialise the leaf's block, one sample at a time, exact "
                f"but slower: from_module(..., materialize=('{path}',))"
            )
        dim = 0 if self.batch_first or x.ndim < dims else 1
        fits = {
            SAMPLES: x.ndim > dim and x.shape[dim] == self.batch_size,
            FLATTENED: x.ndim > 0 and x.shape[0] > 0 and x.shape[0] % self.batch_size == 0,
            SHARED: True,
        }
        if fits[SAMPLES] and x not in self.module_constants and not (filled and x in self.constants):
            found = SAMPLES
        elif x in self.constants:
            found = SHARED
        else:
            found = FLATTENED
        found = self.note_layout(path, found)
        if not fits[found]:
            later = " (from_module(..., batch_first=False) takes them in dim 1)" if self.batch_first else ""
            raise FdpError(
                f"{path}: expected an input with {self.batch_size} samples in dim {dim}{later}, or with samples and "
                f"tokens flattened into dim 0, got shape {tuple(x.shape)}. Change the layout, freeze the leaf, or name "
                f"it in materialize=(...), on the command line --method materialize"
            )
        return found, 0 if found == FLATTENED else dim

    def samples_first(self, x: Tensor, layout: str, dim: int) -> Tensor:
        """Return ``x`` with samples in dim 0."""
        if layout == SAMPLES:
            return x.movedim(dim, 0) if dim else x
        if layout == SHARED:
            return x.expand(self.batch_size, *x.shape)
        if self.batch_first:
            return x.unflatten(0, (self.batch_size, -1))
        return x.unflatten(0, (-1, self.batch_size)).transpose(0, 1)

    def restore_layout(self, y: Tensor, layout: str, dim: int, path: str) -> Tensor:
        """Return a result with samples in dim 0 in the layout that the module expects."""
        if layout == SAMPLES:
            return y.movedim(0, dim) if dim else y
        if layout == SHARED:
            return self.register_copies(y, path)
        return y.flatten(0, 1) if self.batch_first else y.transpose(0, 1).flatten(0, 1)

    def with_samples_first(
        self, x: Tensor | Tracked, *, path: str, dims: int = 3
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return ``x`` with samples in dim 0, and the function that restores the module's layout on a result."""
        if isinstance(x, Tracked):
            self.note_layout(path, SHARED)
            return x.copies(), lambda y: self.register_copies(y, path)
        layout, dim = self.find_layout(x, path=path, dims=dims)
        return self.samples_first(x, layout, dim), lambda y: self.restore_layout(y, layout, dim, path)


def _nan_if_compiling(value: Tensor) -> Tensor:
    """Return NaN while torch.compile traces, so that a use it does not show cannot go unnoticed."""
    if not torch.compiler.is_compiling():
        return value
    return value.new_full((), float("nan")).expand(value.shape)


def align_copies(copies: Tensor, ndim: int, layout: str, dim: int, path: str) -> Tensor:
    """Reshape copies (batch, *shape) to broadcast with a tensor of ``ndim`` dims whose samples are in dim 0.

    ``layout`` and ``dim`` say where the module has that tensor's samples (``CallTrace.find_layout``); the parameter
    must have extent 1 there.
    """
    batch, *shape = copies.shape
    wide = [1] * (ndim - len(shape)) + list(shape)
    if layout == SHARED:
        return copies.reshape(batch, *wide)
    if len(wide) > ndim or wide[dim] != 1:
        raise FdpError(
            f"{path}: expected an extent of 1 in dim {dim}, which holds samples, so that all samples are treated "
            f"alike, got shape {tuple(shape)} combined with a tensor of {ndim} dims. Reshape it, freeze it, or name it "
            f"in materialize=(...), on the command line --method materialize"
        )
    return copies.reshape(batch, *wide) if layout == FLATTENED else copies.reshape(batch, *wide[:dim], *wide[dim + 1 :])


def tensors_of(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return all tensors among the arguments of a function, up to one list deep."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend([entry for entry in value if isinstance(entry, Tensor)])
    return found
