"""A module as a stack of blocks: what comes before its layers, the layers, what comes after; no hooks, no patching.

    before   run the module with a placeholder for every layer: it lets the hidden state pass and notes the other
             arguments; the last one ends the run                              carry = (hidden, *extras)
    layer    the module's own, called with its own leaves                      carry = (layer(hidden, ...), *extras)
    after    run it again; the last placeholder puts the loop's result in the hidden state's place

The placeholders sit in a copy without parameters (``fdp.foreign.placeholders``). Layers that are called alike and do
the same (``fdp.foreign.stack.block_kinds``) are one ``apply`` object, which is compiled once. A leaf with two names is
one leaf; each part is given the names that its result depends on, and zeros without memory for the others, so that no
part records a use that has no part in the loss.

    >>> blocks = stack_blocks(module, call=call, finish=losses, example=data)        # (before, layer, ..., after)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fdp import tree
from fdp.foreign.call_forms import HIDDEN, Form, difference, fill, spared
from fdp.foreign.layout import AUTO, NotAStack, Stack, find_stack, leaf_paths
from fdp.foreign.placeholders import Noting, Passing, Resuming, Standing, hollow, with_parts
from fdp.foreign.stack.block_kinds import refusing_branches, tape
from fdp.foreign.stack.dead_uses import dead_uses
from fdp.foreign.stack.parts import After, Before, Caller, Constants, Extra, Layer, Run, Weights, inputs_of
from fdp.model import Block
from fdp.types import Tree

Shapes = dict[str, tuple[int, ...]]


@refusing_branches("blocks")
def stack_blocks(
    module: nn.Module,
    *,
    call: Caller,
    finish: Callable[[Any, Tree], Tensor],
    example: Tree,
    pattern: str = AUTO,
    parts: Mapping[str, nn.Module] | None = None,
    absent: Callable[[Tensor], bool] | None = None,
) -> tuple[Block, ...]:
    """The module as blocks: one before, one per layer of the list that ``pattern`` names, one after.

    ``call(module, data)`` calls a module with a batch, ``finish(returned, data)`` makes of what it returned the loss of
    every sample (or whatever the last block is to return). ``example`` is a batch as they will come: its entries and
    lengths decide how the layers are called. ``parts`` are put in the place of some of the module's own; tensors of
    which ``absent`` is true stand for None. Values of parameters are never read: they may be without memory.

    Guarantees:
      - the blocks one after the other compute what the module does; where it does more between its layers than hand on
        the hidden state, an error says so;
      - a parameter that no result depends on is in no block.
    """
    example = tree.map(lambda leaf: leaf.cpu().float() if leaf.is_floating_point() else leaf.cpu(), example)
    stack, paths = find_stack(module, pattern), leaf_paths(module)
    module = hollow(module)
    skeleton = with_parts(module, parts or {})
    shapes = _outside(skeleton, stack)

    before, output = _before(module, skeleton, stack, call, absent or _never, shapes, example)
    hidden, extras = before.read(_zeros(shapes, torch.float32), example)[1:]
    early, slopes = _needed(lambda given, data: _tensors(_read_as_planned(before, given, data)), shapes, example)
    kinds = tuple(kind._replace(slope=slope) for kind, slope in zip(before.extras, slopes[1:]))
    _check_slopes(kinds, extras)
    before = replace(before, constants=Constants(skeleton, _without(shapes, early)), extras=kinds)

    _check_walk(skeleton, stack, call, finish, output, hidden, shapes, example)
    resumed = {
        name: Resuming(module.get_submodule(name), output, last=name == stack.blocks[-1]) for name in stack.blocks
    }
    after = After(with_parts(skeleton, resumed), stack.blocks[-1], call, finish, Constants(skeleton, {}))

    def end(given: Weights, data: Tree) -> list[Tensor]:
        return [replace(after, names=tuple(given))(given, (torch.empty_like(hidden),), data)]

    late, _ = _needed(end, shapes, example)
    after = replace(after, names=tuple(late), constants=Constants(skeleton, _without(shapes, late)))
    if set(early) & set(late):  # each part does what is for the other, too, and uses these for nothing
        both = [{name: (paths[name], shapes[name]) for name in names} for names in (early, late)]
        before = replace(before, dead=dead_uses(lambda p, data: _tensors(before.read(p, data)), both[0], example))
        after = replace(after, dead=dead_uses(end, both[1], example))

    layers = _layers(module, stack, before, output, hidden, extras)
    before = replace(before, later=(after.constants, *dict.fromkeys(layer.constants for layer, _ in layers)))
    return (
        Block("before", {name: paths[name] for name in early}, before, compiled=False),
        *(
            Block(block, {name: paths[f"{block}.{name}"] for name in names}, layer)
            for block, (layer, names) in zip(stack.blocks, layers)
        ),
        Block("after", {name: paths[name] for name in late}, after),
    )


@refusing_branches("blocks")
def calls_of(module: nn.Module, call: Caller, example: Tree, *, pattern: str = AUTO) -> list[Any]:
    """What the layers are called with, layer by layer, if every parameter has its row's number in each row."""
    stack, module = find_stack(module, pattern), hollow(module)
    shapes = _outside(module, stack)
    before, _ = _before(module, module, stack, call, _never, shapes, example)
    return before.seen(_numbered(shapes), example)


@refusing_branches("blocks")
def returns(module: nn.Module, part: str, call: Caller, finish: Callable[[Any, Tree], Tensor], example: Tree) -> bool:
    """Whether what ``finish`` takes from the module's result is what its ``part`` returned, untouched."""
    noting = Noting(module.get_submodule(part))
    hollowed = with_parts(hollow(module), {part: noting})
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.no_grad():
        shapes = {name: leaf.shape for name, leaf in hollowed.named_parameters(remove_duplicate=False)}
        given = {name: torch.empty(shape) for name, shape in shapes.items()}
        run = Run(hollowed, given, Constants(hollowed, {}), example)
        out = finish(call(run, tree.map(torch.empty_like, example)), example)
    (seen,) = noting.seen
    return out.shape == seen.shape and out.untyped_storage()._cdata == seen.untyped_storage()._cdata


def _before(
    module: nn.Module,
    skeleton: nn.Module,
    stack: Stack,
    call: Caller,
    absent: Callable[[Tensor], bool],
    shapes: Shapes,
    example: Tree,
) -> tuple[Before, Form]:
    """What comes before the layers, with how they are called; and the form of what a layer returns."""

    def skipping(outputs: Mapping[str, Form | None]) -> Before:
        calls: dict = {}
        passing = {name: Passing(module.get_submodule(name), name, calls, out) for name, out in outputs.items()}
        return Before(with_parts(skeleton, passing), calls, call, absent, Constants(skeleton, {}))

    first, *_ = stack.blocks
    forms, hidden, extras = skipping(dict.fromkeys(stack.blocks)).read(_zeros(shapes, torch.float32), example)
    block = module.get_submodule(first)
    output = _output(first, tape(block, _local(block), *fill(forms[0], hidden, extras)).out)
    before = skipping({**dict.fromkeys(stack.blocks, output), stack.blocks[-1]: None})

    # With another number of samples and another dtype, to see what goes with them.
    wide = {"params": _zeros(shapes, torch.float64), "data": _resized(example, len(hidden) + 1, torch.float64)}
    forms, hidden, extras = before.read(_zeros(shapes, torch.float32), example)
    other, hidden2, extras2 = before.read(**wide)
    if len(forms) != len(stack.blocks):
        raise NotAStack(
            f"blocks: expected calls of {len(stack.blocks)} blocks, got {len(forms)}", first="name those that run, or "
        )
    if repr(forms) != repr(other):
        raise NotAStack(
            f"blocks: expected calls that depend neither on the number of samples nor on their dtype, got "
            f"{difference(forms, other)}",
            first="make what all layers share once, before them, or ",
        )
    kinds = tuple(_kind(i, a, b, (hidden, hidden2)) for i, (a, b) in enumerate(zip(extras, extras2)))
    return replace(before, forms=forms, extras=kinds), output


def _check_walk(
    skeleton: nn.Module,
    stack: Stack,
    call: Caller,
    finish: Callable[[Any, Tree], Tensor],
    output: Form,
    hidden: Tensor,
    shapes: Shapes,
    example: Tree,
) -> None:
    """Refuse a module that does not call every block once and in order, or that uses what an earlier one returned.

    Blocks that are called twice, backwards, or whose results are added up at the end would make another function.
    """
    calls: list[str] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        own = {name: torch.empty(hidden.shape, requires_grad=True) for name in stack.blocks}
        more = {name: torch.empty(hidden.shape, requires_grad=True) for name in stack.blocks}
        blocks = {
            name: Standing(skeleton.get_submodule(name), name, calls, output, (own[name], more[name])) for name in own
        }
        walked = with_parts(skeleton, blocks)
        given = {name: torch.empty(shape) for name, shape in shapes.items()}
        data = tree.map(torch.empty_like, example)
        run = Run(walked, given, Constants(skeleton, {}), data)
        out = finish(call(run, inputs_of(data, run.dtype)), data)
        if tuple(calls) != stack.blocks:
            raise NotAStack(
                f"blocks: expected a module that calls each of {list(stack.blocks)} once and in order, got calls of "
                f"{calls}"
            )
        *earlier, _ = own
        wanted = [*(own[name] for name in earlier), *more.values()]
        ones = torch.ones_like(out)
        found = torch.autograd.grad(out, wanted, ones, allow_unused=True) if out.requires_grad else ()
    if used := [name for name, slope in zip([*earlier, *more], found) if slope is not None]:
        raise NotAStack(
            f"blocks: expected a module that uses the hidden state of its last block, got one that also uses what "
            f"{used} did"
        )


def _kind(i: int, one: Tensor, other: Tensor, hiddens: tuple[Tensor, Tensor]) -> Extra:
    same = one.shape == other.shape
    samples = [len(hidden) for hidden in hiddens]
    moved = one.ndim > 0 and [len(one), len(other)] == samples and one.shape[1:] == other.shape[1:]
    if not (same or moved):
        raise NotAStack(
            f"blocks: expected arguments with samples in dimension 0 or nowhere, got shapes {tuple(one.shape)} for "
            f"{samples[0]} samples and {tuple(other.shape)} for {samples[1]}"
        )
    follows = (one.dtype, other.dtype) == tuple(hidden.dtype for hidden in hiddens)
    return Extra(samples=not same, slope=False, dtype=None if follows else one.dtype)


def _check_slopes(kinds: tuple[Extra, ...], extras: list[Tensor]) -> None:
    for kind, extra in zip(kinds, extras):
        if kind.slope and not kind.samples:
            raise NotAStack(
                f"blocks: expected what parameters make for all layers to hold samples, got a tensor of shape "
                f"{tuple(extra.shape)} without"
            )


def _output(name: str, out: Any) -> Form:
    """The form of what a layer returned: its hidden state, alone or first of a tuple, the rest of which nobody uses."""
    if isinstance(out, Tensor):
        return Form((HIDDEN,), {})
    if type(out) is tuple and out and isinstance(out[0], Tensor):
        return Form(((HIDDEN, *spared(out[1:])),), {})
    raise NotAStack(
        f"{name}: expected a layer that returns its hidden state, alone or first of a tuple, got {type(out).__name__}"
    )


def _layers(
    module: nn.Module, stack: Stack, before: Before, output: Form, hidden: Tensor, extras: list[Tensor]
) -> list[tuple[Layer, tuple[str, ...]]]:
    """Every layer's function, one object for those that are equal, and the names of the parameters it uses."""
    kinds: list[tuple[Any, Layer]] = []
    layers = []
    for name, form in zip(stack.blocks, before.forms):
        block = module.get_submodule(name)
        found = tape(block, _local(block), *fill(form, hidden, extras))
        if repr(_output(name, found.out)) != repr(output):
            raise NotAStack(f"{name}: expected to return what the first block does, got another form of result")
        if any(written.startswith("argument ") for written in found.written):
            raise NotAStack(
                f"{name}: expected a layer that leaves its arguments as they are, got one that writes into them",
                first="write h = h + y instead of h += y, or ",
            )
        used = tuple(n for n, _ in block.named_parameters(remove_duplicate=False) if n in found.used)
        key = (repr(form), found.lines, used)
        like = (layer for known, layer in kinds if known == key and _same_buffers(layer.module, block))
        layer = next(like, None)
        if layer is None:
            unused = {n: tuple(p.shape) for n, p in block.named_parameters(remove_duplicate=False) if n not in used}
            layer = Layer(block, form, before.extras, Constants(block, unused))
            kinds.append((key, layer))
        layers.append((layer, used))
    return layers


def _same_buffers(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = (dict(block.named_buffers(remove_duplicate=False)) for block in (one, other))
    return mine.keys() == theirs.keys() and all(
        a is b or torch.equal(a, b) for a, b in zip(mine.values(), theirs.values())
    )


def _needed(
    run: Callable[[Weights, Tree], list[Tensor]], shapes: Shapes, example: Tree
) -> tuple[list[str], list[bool]]:
    """The parameters on which the results of ``run`` depend, and which of the results depend on any."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.enable_grad():
        given = {name: torch.empty(shape, requires_grad=True) for name, shape in shapes.items()}
        outs = run(given, tree.map(lambda leaf: torch.empty_like(leaf), example))
        sloped = [out for out in outs if out.requires_grad]
        if not sloped or not given:
            return [], [False] * len(outs)
        ones = [torch.ones_like(out) for out in sloped]
        found = torch.autograd.grad(sloped, list(given.values()), ones, allow_unused=True)
    return [name for name, slope in zip(given, found) if slope is not None], [out.requires_grad for out in outs]


def needed_names(run: Callable[[Weights, Tree], list[Tensor]], shapes: Shapes, example: Tree) -> list[str]:
    """The parameters on which what ``run`` returns depends."""
    return _needed(run, shapes, example)[0]


def _outside(module: nn.Module, stack: Stack) -> Shapes:
    """The shapes of the parameters that are in no layer."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: tuple(leaf.shape) for name, leaf in parameters if not stack.holds(name)}


def _read_as_planned(before: Before, given: Weights, data: Tree) -> tuple[Any, Tensor, list[Tensor]]:
    """What blocks are called with if tensors have no values: it must be what they were called with on the example."""
    seen = before.read(given, data)
    if repr(seen[0]) != repr(before.forms):
        raise NotAStack(
            f"blocks: expected calls that do not depend on values, got {difference(before.forms, seen[0])}",
            first="hand it its masks (call=...), or ",
        )
    return seen


def _tensors(seen: tuple[Any, Tensor, list[Tensor]]) -> list[Tensor]:
    _, hidden, extras = seen
    return [hidden, *extras]


def _local(block: nn.Module) -> dict[str, Tensor]:
    """Tensors in the place of a layer's parameters and buffers, without memory or on the CPU."""
    buffers = {name: torch.empty_like(b, device="cpu") for name, b in block.named_buffers(remove_duplicate=False)}
    parameters = dict(block.named_parameters(remove_duplicate=False))
    return {name: torch.empty(()).expand(leaf.shape) for name, leaf in parameters.items()} | buffers


def _numbered(shapes: Shapes) -> dict[str, Tensor]:
    """Parameters in which rows can be told apart, with memory for their numbers only."""

    def numbered(shape: tuple[int, ...]) -> Tensor:
        first = torch.arange(1.0, 1.0 + (shape[0] if shape else 1)) / 16
        return first.view(shape[0], *[1] * (len(shape) - 1)).expand(shape) if shape else first[0]

    return {name: numbered(shape) for name, shape in shapes.items()}


def _zeros(shapes: Shapes, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: torch.zeros((), dtype=dtype).expand(shape) for name, shape in shapes.items()}


def _resized(example: Tree, samples: int, dtype: torch.dtype) -> Tree:
    def resized(leaf: Tensor) -> Tensor:
        more = leaf[:1].expand(samples, *leaf.shape[1:])
        return more.to(dtype) if more.is_floating_point() else more

    return tree.map(resized, example)


def _without(shapes: Shapes, names: list[str]) -> Shapes:
    return {name: shape for name, shape in shapes.items() if name not in names}


def _never(_: Tensor) -> bool:
    return False
