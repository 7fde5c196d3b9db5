"""What one run of a foreign module knows of its tensors: which hold samples, which hold parameters, which neither.

    parameter-made   value = f(w, constants), no sample dim        its copies f(w_b): (batch, *shape), one per sample
    constant         made of no data and no parameter              positions, masks, buffers, frozen leaves
    all others       hold samples: (batch, ...), or (batch * tokens, ...) flattened

A module is given plain tensors. One that a watched parameter went into is known by identity (:class:`Tracked`); where
it meets samples its copies do, one each, so that the derivative with respect to a sample's copy is that sample's.

    >>> first, back = run.samples(x, who="wte.weight")       # samples in dim 0, and the way back
    >>> y = back(ops.linear(first, leaf))
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fdp.foreign.module_state import Versions
from fdp.gradients.taps import Tape, Watched
from fdp.types import FdpError

ALWAYS_FIRST = 1_000_000
"""More dims than any tensor has: for operations that have samples in dim 0 by definition."""
SAMPLES, FLATTENED, SHARED = "samples", "flattened", "shared"


class Tracked:
    """A tensor without samples that parameters went into.

    ``value`` is what the module sees; ``make()`` its copies. ``leaf``: the parameter itself, if the value is nothing
    else but for its dtype and, if ``turned``, its transposition. ``by_property``: read as ``.T`` or ``.mT``, which
    torch.compile does not show.
    """

    def __init__(
        self,
        value: Tensor,
        make: Callable[[], Tensor],
        path: str,
        *,
        leaf: Watched | None = None,
        turned: bool = False,
        by_property: bool = False,
    ):
        self.value = value
        self.make = make
        self.path = path
        self.leaf = leaf
        self.turned = turned
        self.by_property = by_property
        self.made: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    def copies(self) -> Tensor:
        """(batch, *shape): one per sample. All uses share them."""
        if self.by_property and torch.compiler.is_compiling():
            raise FdpError(
                f"{self.path}: read by the property .T or .mT outside of a product; expected .t() or .transpose(0, 1), "
                f"which torch.compile shows, too"
            )
        if self.made is None:
            self.made = self.make()
        return self.made


class Selected:
    """Matrices of a stack that ids of samples chose, ``W[ids]``, not made: one per row, ``turned`` if transposed.

    ``value`` is what the module sees, without memory.
    """

    def __init__(self, value: Tensor, weight: Tracked, ids: Tensor, *, turned: bool = False):
        self.value = value
        self.weight = weight
        self.ids = ids
        self.turned = turned
        self.path = weight.path

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


class Run:
    """One run of a module: what is known of its tensors so far."""

    def __init__(self, tape: Tape | None, batch_size: int, *, batch_first: bool, keys: Tensor | None):
        self.tape = tape
        self.batch_size = batch_size
        self.batch_first = batch_first
        self.keys = keys
        self.draws = 0
        self.leaves: dict[str, Tensor] = {}
        self.tracked: dict[Tensor, Any] = {}
        self.constants: dict[Tensor, bool] = {}
        self.held: dict[Tensor, bool] = {}  # constants that the module holds: no dim of theirs is that of samples
        self.moved: dict[Tensor, bool] = {}  # whose samples are in an order that data decide
        self.random: dict[Tensor, str] = {}  # drawn, and not to be used: by which function
        self.versions: Versions | None = None  # of the module's own tensors; None while torch.compile traces

    def guard(self, tensors: Mapping[str, Tensor], *, but: Collection[str] = ()) -> Versions:
        """Refuse writes into ``tensors``, all that a module holds; its plain attributes among them are constants."""
        for leaf in tensors.values():
            if not isinstance(leaf, nn.Parameter) and not leaf.requires_grad and leaf not in self.tracked:
                self.constants[leaf] = self.held[leaf] = True
        self.versions = Versions({name: leaf for name, leaf in tensors.items() if name not in but})
        for name in but:
            self.constants.pop(tensors[name], None)
            self.held.pop(tensors[name], None)
        return self.versions

    def watch(self, leaf: Watched) -> Tensor:
        """What the module sees of a watched leaf."""
        if leaf.path in self.leaves:
            return self.leaves[leaf.path]  # tied: another name of it
        tape = leaf.tape
        seen = self.leaves[leaf.path] = self.give(
            Tracked(_hidden(leaf.value), lambda: tape.expanded(leaf), leaf.path, leaf=leaf)
        )
        return seen

    def give(self, tracked: Tracked) -> Tensor:
        """What the module sees of it."""
        self.tracked[tracked.value] = tracked
        return tracked.value

    def share(self, copies: Tensor, path: str) -> Tensor:
        """What the module sees of a result without samples, given its copies."""
        return self.give(Tracked(_hidden(copies[0]), lambda: copies, path))

    def known(self, value: Any) -> Any:
        """``value`` with every tracked tensor in it, one list deep, as :class:`Tracked`."""
        if isinstance(value, Tensor):
            return self.tracked.get(value, value)
        if isinstance(value, (list, tuple)):
            return [self.known(entry) for entry in value]
        return value

    def note(self, path: str, answer: str) -> str:
        """Write down how samples were found: for another number of samples it must be found the same.

        While torch.compile traces, what was found before is the answer: it does not show all functions of torch.
        """
        if self.tape is None:
            return answer
        known, place = self.tape.known, len(self.tape.layouts)
        if known is not None and place < len(known):
            answer = known[place][1]
        self.tape.layouts.append((path, answer))
        return answer

    def constant(self, x: Tensor) -> bool:
        """Whether no data and no parameter went into ``x``."""
        return self.note("a tensor", SHARED if x in self.constants else SAMPLES) == SHARED

    def layout(self, x: Tensor, *, path: str, dims: int = 3, filled: bool = False) -> tuple[str, int]:
        """Where the samples of ``x`` are: SAMPLES in a dim, FLATTENED with others in dim 0, or SHARED, none.

        Tensors of fewer than ``dims`` dims have samples first even if the module has tokens first. ``filled``: it meets
        a parameter that is as long there, so that a constant of as many rows as there are samples holds none.
        """
        if x in self.moved:
            raise FdpError(
                f"{path}: used on samples in an order that the data decide (sorted by length, or picked by an index "
                f"made of data): row b need not hold sample b, and the norms of the wrong samples would be clipped. "
                f"Leave samples in their rows, or send the leaf's block through the materialised path, one sample at a "
                f"time, exact and slower: from_module(..., materialize=('{path}',))"
            )
        dim = 0 if self.batch_first or x.ndim < dims else 1
        fits = {
            SAMPLES: x.ndim > dim and x.shape[dim] == self.batch_size,
            FLATTENED: x.ndim > 0 and x.shape[0] > 0 and x.shape[0] % self.batch_size == 0,
            SHARED: True,
        }
        if fits[SAMPLES] and x not in self.held and not (filled and x in self.constants):
            found = SAMPLES
        elif x in self.constants:
            found = SHARED
        else:
            found = FLATTENED
        found = self.note(path, found)
        if not fits[found]:
            later = " (from_module(..., batch_first=False) takes them in dim 1)" if self.batch_first else ""
            raise FdpError(
                f"{path}: used on an input of shape {tuple(x.shape)}; expected {self.batch_size} samples in dim {dim}"
                f"{later}, or samples and tokens flattened into dim 0. Change the layout, freeze the leaf, or name it "
                f"in materialize=(...), on the command line --method materialize"
            )
        return found, 0 if found == FLATTENED else dim

    def first(self, x: Tensor, layout: str, dim: int) -> Tensor:
        """``x`` with samples in dim 0."""
        if layout == SAMPLES:
            return x.movedim(dim, 0) if dim else x
        if layout == SHARED:
            return x.expand(self.batch_size, *x.shape)
        if self.batch_first:
            return x.unflatten(0, (self.batch_size, -1))
        return x.unflatten(0, (-1, self.batch_size)).transpose(0, 1)

    def back(self, y: Tensor, layout: str, dim: int, path: str) -> Tensor:
        """A result with samples in dim 0 as the module expects it of an input of that layout."""
        if layout == SAMPLES:
            return y.movedim(0, dim) if dim else y
        if layout == SHARED:
            return self.share(y, path)
        return y.flatten(0, 1) if self.batch_first else y.transpose(0, 1).flatten(0, 1)

    def samples(self, x: Tensor | Tracked, *, path: str, dims: int = 3) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """``x`` with samples in dim 0, and what turns a result with samples in dim 0 into what the module expects."""
        if isinstance(x, Tracked):
            self.note(path, SHARED)
            return x.copies(), lambda y: self.share(y, path)
        layout, dim = self.layout(x, path=path, dims=dims)
        return self.first(x, layout, dim), lambda y: self.back(y, layout, dim, path)


def _hidden(value: Tensor) -> Tensor:
    """While torch.compile traces, not a number: a use that it does not show could then not pass for none."""
    if not torch.compiler.is_compiling():
        return value
    return value.new_full((), float("nan")).expand(value.shape)


def aligned(copies: Tensor, ndim: int, layout: str, dim: int, path: str) -> Tensor:
    """Copies (batch, *shape) fit for a tensor of ``ndim`` dims in the module's eyes, once its samples are in dim 0.

    ``layout`` and ``dim`` say where it has them (``Run.layout``); the parameter must have no extent there.
    """
    batch, *shape = copies.shape
    wide = [1] * (ndim - len(shape)) + list(shape)
    if layout == SHARED:
        return copies.reshape(batch, *wide)
    if len(wide) > ndim or wide[dim] != 1:
        raise FdpError(
            f"{path}: as a tensor of shape {tuple(shape)} it meets one of {ndim} dims with samples in dim {dim}; "
            f"expected an extent of 1 there, so that all samples are treated alike. Reshape it, freeze it, or name it "
            f"in materialize=(...), on the command line --method materialize"
        )
    return copies.reshape(batch, *wide) if layout == FLATTENED else copies.reshape(batch, *wide[:dim], *wide[dim + 1 :])


def tensors_of(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """All tensors among the arguments of a function, one list deep."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend([entry for entry in value if isinstance(entry, Tensor)])
    return found
