"""Separate the arguments of a call into a template and its tensors.

    (args, kwargs)  =  fill_template(template, hidden, extras)      extras: the distinct tensors of all calls

A layer is called with more than the hidden state: masks, position embeddings, flags. Tensors become numbered slots;
everything else is part of the template. Calls with equal templates can share one compiled block.

    >>> templates, hidden, extras = read_calls(calls)               # calls: [(args, kwargs), ...], one per block
    >>> args, kwargs = fill_template(templates[0], hidden[0], extras)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from fdp.foreign.find_stack import NotAStack

Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class TensorSlot(NamedTuple):
    """The position of a tensor: its number among the extras, -1 for the hidden state, -2 for one that is not used."""

    index: int


HIDDEN_SLOT, UNUSED_SLOT = TensorSlot(-1), TensorSlot(-2)


class CallTemplate(NamedTuple):
    """The arguments of a call, with slots in place of tensors."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def read_calls(
    calls: Sequence[Call], absent: Callable[[Tensor], bool] = lambda _: False
) -> tuple[tuple[CallTemplate, ...], list[Tensor], list[Tensor]]:
    """Return the templates, the hidden states and the distinct other tensors of ``calls``.

    Tensors for which ``absent`` is true become None.
    """
    extras: list[Tensor] = []
    hiddens, templates = [], []
    for args, kwargs in calls:
        hidden = hidden_of(args, kwargs)
        hiddens.append(hidden)

        def slot(leaf: Any, hidden: Tensor = hidden) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if leaf is hidden:
                return HIDDEN_SLOT
            if absent(leaf):
                return None
            for i, known in enumerate(extras):
                if known is leaf:
                    return TensorSlot(i)
            extras.append(leaf)
            return TensorSlot(len(extras) - 1)

        templates.append(CallTemplate(_map_leaves(slot, args), _map_leaves(slot, kwargs)))
    return tuple(templates), hiddens, extras


def fill_template(
    template: CallTemplate, hidden: Tensor, extras: Sequence[Tensor], spare: Tensor | None = None
) -> Call:
    """Return the call with tensors in the slots; ``spare`` fills the unused slots, by default the hidden state does."""
    unused = hidden if spare is None else spare

    def tensor(leaf: Any) -> Any:
        if isinstance(leaf, TensorSlot):
            return unused if leaf == UNUSED_SLOT else hidden if leaf == HIDDEN_SLOT else extras[leaf.index]
        return leaf

    return _map_leaves(tensor, template.args), _map_leaves(tensor, template.kwargs)


def describe_difference(expected: Sequence[CallTemplate], got: Sequence[CallTemplate]) -> str:
    """Say in words which arguments of the first two differing calls differ: a tensor, nothing, or a value."""
    pairs = ((e, g) for e, g in zip(expected, got) if repr(e) != repr(g))
    first_pair = next(pairs, (expected[-1], got[-1]))
    named = ([*enumerate(template.args), *template.kwargs.items()] for template in first_pair)
    (mine, theirs) = ({str(name): _words(value) for name, value in entries} for entries in named)
    differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if not differing:  # the same arguments, but with other tensors
        return "different tensors for the same arguments"
    return "; ".join(
        f"{name} = {mine.get(name, 'not given')} and {theirs.get(name, 'not given')}" for name in differing
    )


def _words(value: Any) -> str:
    if isinstance(value, TensorSlot):
        return "a tensor"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def drop_tensors(value: Any) -> Any:
    """Replace every tensor in ``value`` by the unused slot."""
    return _map_leaves(lambda leaf: UNUSED_SLOT if isinstance(leaf, Tensor) else leaf, value)


def replace_instances(template: CallTemplate, kind: type, new: Any) -> CallTemplate:
    """Replace every value of class ``kind`` in the template by ``new``."""

    def swap(leaf: Any) -> Any:
        return new if isinstance(leaf, kind) else leaf

    return CallTemplate(_map_leaves(swap, template.args), _map_leaves(swap, template.kwargs))


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the hidden state: the first positional argument or, without any, the first keyword tensor."""
    given = args[:1] or tuple(value for value in kwargs.values() if isinstance(value, Tensor))[:1]
    if not given or not isinstance(given[0], Tensor):
        raise NotAStack(
            f"block: expected the hidden state as its first argument, got {[type(a).__name__ for a in args]} and "
            f"{sorted(kwargs)}"
        )
    return given[0]


def _map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """Apply ``fn`` to every leaf of nested plain containers. A slot is a leaf, though it is a tuple."""
    if isinstance(value, TensorSlot):
        return fn(value)
    if isinstance(value, dict):
        return {key: _map_leaves(fn, item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)([_map_leaves(fn, item) for item in value])
    return fn(value)
