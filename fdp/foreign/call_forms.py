"""The arguments of a call as a form: tensors are slots, everything else is written in.

    (args, kwargs)  =  fill(form, hidden, extras)                   extras: the distinct tensors of all calls

A block of a foreign module is called with more than the hidden state: masks, position embeddings, flags. What is not
a tensor belongs to the form; what is, travels. Calls whose forms are equal can share one compiled block.

    >>> forms, hidden, extras = read(calls)                         # calls: [(args, kwargs), ...], one per block
    >>> args, kwargs = fill(forms[0], hidden[0], extras)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from fdp.foreign.layout import NotAStack

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class Slot(NamedTuple):
    """A tensor's place: its number among the extras, -1 for the hidden state, -2 for one that nobody uses."""

    index: int


HIDDEN, SPARE = Slot(-1), Slot(-2)


class Form(NamedTuple):
    """A call without its tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def read(
    calls: Sequence[Call], absent: Callable[[Tensor], bool] = lambda _: False
) -> tuple[tuple[Form, ...], list[Tensor], list[Tensor]]:
    """Forms, hidden states and the distinct other tensors of ``calls``. Tensors that are ``absent`` become None."""
    extras: list[Tensor] = []
    hiddens, forms = [], []
    for args, kwargs in calls:
        hidden = hidden_of(args, kwargs)
        hiddens.append(hidden)

        def slot(leaf: Any, hidden: Tensor = hidden) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf is hidden:
                return HIDDEN
            if absent(leaf):
                return None
            for i, known in enumerate(extras):
                if known is leaf:
                    return Slot(i)
            extras.append(leaf)
            return Slot(len(extras) - 1)

        forms.append(Form(_mapped(slot, args), _mapped(slot, kwargs)))
    return tuple(forms), hiddens, extras


def fill(form: Form, hidden: Tensor, extras: Sequence[Tensor], spare: Tensor | None = None) -> Call:
    """The call, tensors in their places; ``spare``: in those that nobody uses, by default the hidden state."""
    unused = hidden if spare is None else spare

    def tensor(leaf: Any) -> Any:
        if isinstance(leaf, Slot):
            return unused if leaf == SPARE else hidden if leaf == HIDDEN else extras[leaf.index]
        return leaf

    return _mapped(tensor, form.args), _mapped(tensor, form.kwargs)


def difference(expected: Sequence[Form], got: Sequence[Form]) -> str:
    """In words, what the first two calls that differ are given: by argument, a tensor, nothing, or a value."""
    pairs = ((e, g) for e, g in zip(expected, got) if repr(e) != repr(g))
    expected_form, got_form = next(pairs, (expected[-1], got[-1]))
    named = ([*enumerate(form.args), *form.kwargs.items()] for form in (expected_form, got_form))
    (mine, theirs) = ({str(name): _words(value) for name, value in entries} for entries in named)
    apart = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if not apart:  # the same arguments, other tensors among them
        return "arguments that are one tensor in one call and another in the other"
    said = [f"{name} = {mine.get(name, 'not given')} and {theirs.get(name, 'not given')}" for name in apart]
    return "; ".join(said)


def _words(value: Any) -> str:
    if isinstance(value, Slot):
        return "a tensor"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def spared(value: Any) -> Any:
    """``value`` with every tensor in it as one that nobody uses."""
    return _mapped(lambda leaf: SPARE if isinstance(leaf, Tensor) else leaf, value)


def swapped(form: Form, kind: type, new: Any) -> Form:
    """The form with ``new`` in the place of what is written in of this class."""

    def swap(leaf: Any) -> Any:
        return new if isinstance(leaf, kind) else leaf

    return Form(_mapped(swap, form.args), _mapped(swap, form.kwargs))


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden state: the first positional argument or, without any, the first tensor given by name."""
    given = args[:1] or tuple(value for value in kwargs.values() if isinstance(value, Tensor))[:1]
    if not given or not isinstance(given[0], Tensor):
        raise NotAStack(
            f"block: expected to be called with its hidden state first, got {[type(a).__name__ for a in args]} and "
            f"{sorted(kwargs)}"
        )
    return given[0]


def _mapped(fn: Callable[[Any], Any], value: Any) -> Any:
    """``fn`` on every leaf of nested plain containers. A slot is a leaf, though it is a tuple."""
    if isinstance(value, Slot):
        return fn(value)
    if isinstance(value, dict):
        return {key: _mapped(fn, item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)([_mapped(fn, item) for item in value])
    return fn(value)
