"""Split a module into a stack of blocks: the part before its layers, the layers, the part after. No hooks, no patching.

    before   run the module with a placeholder for every layer: it passes the hidden state on and records the other
             arguments; the last one ends the run                              carry = (hidden, *extras)
    layer    the module's own, called with its own leaves                      carry = (layer(hidden, ...), *extras)
    after    run the module again; the last placeholder returns the hidden state that the layers computed

The placeholders sit in a copy without parameters (``fdp.foreign.placeholders``). Layers that are called alike and do
the same (``fdp.foreign.stack.operation_log``) share one ``apply`` object, which is compiled once. A leaf with two names
is one leaf. Each part is given the parameters that its result depends on, and zeros without memory for the others, so
that no part records a use that the loss does not depend on.

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
from fdp.foreign.call_template import CallTemplate, describe_difference, fill_template
from fdp.foreign.find_stack import AUTO, NotAStack, Stack, find_stack
from fdp.foreign.leaves import leaf_paths
from fdp.foreign.placeholders import ResumingBlock, TracingBlock, meta_copy, replace_submodules
from fdp.foreign.stack.block_functions import (
    AfterLayers,
    BeforeLayers,
    Caller,
    Constants,
    ExtraInfo,
    LayerBlock,
    ModuleCall,
    module_inputs,
)
from fdp.foreign.stack.dependencies import Shapes, Weights, dead_uses, needed_parameters
from fdp.foreign.stack.layer_calls import (
    empty_tensors,
    never_absent,
    output_template,
    outside_shapes,
    split_before,
    zero_parameters,
)
from fdp.foreign.stack.operation_log import log_operations, refuse_branches
from fdp.model import Block
from fdp.types import Tree


@refuse_branches("blocks")
def stack_blocks(
    module: nn.Module,
    *,
    call: Caller,
    finish: Callable[[Any, Tree], Tensor],
    example: Tree,
    pattern: str = AUTO,
    parts: Mapping[str, nn.Module] | None = None,
    absent: Callable[[Tensor], bool] = never_absent,
) -> tuple[Block, ...]:
    """Return the module as blocks: one before, one per layer of the list that ``pattern`` names, one after.

    ``call(module, data)`` calls a module with a batch. ``finish(returned, data)`` turns what the module returned into
    the loss of every sample, or whatever the last block is to return. ``example`` is a batch like those to come: its
    entries and lengths decide how the layers are called. ``parts`` replace some of the module's own parts. A tensor for
    which ``absent`` is true stands for None. Parameter values are never read: parameters may have no memory.

    Guarantees:
      - the blocks one after the other compute what the module does; a module that does more between its layers than
        pass on the hidden state is an error;
      - a parameter that no result depends on is in no block.
    """
    example = tree.map(lambda leaf: leaf.cpu().float() if leaf.is_floating_point() else leaf.cpu(), example)
    stack, paths = find_stack(module, pattern), leaf_paths(module)
    module = meta_copy(module)
    skeleton = replace_submodules(module, parts or {})
    shapes = outside_shapes(skeleton, stack)

    before, output = split_before(module, skeleton, stack, call, absent, shapes, example)
    _, hidden, extras = before.read_calls(zero_parameters(shapes, torch.float32), example)
    early, depends = needed_parameters(lambda p, data: _tensors(_read_without_values(before, p, data)), shapes, example)
    infos = tuple(info._replace(has_gradient=d) for info, d in zip(before.extras, depends[1:]))
    _check_extras(infos, extras)
    before = replace(before, constants=Constants(skeleton, _without(shapes, early)), extras=infos)

    _check_order(skeleton, stack, call, finish, output, hidden, shapes, example)
    last = stack.blocks[-1]
    resuming = {name: ResumingBlock(module.get_submodule(name), output, last=name == last) for name in stack.blocks}
    after = AfterLayers(replace_submodules(skeleton, resuming), last, call, finish, Constants(skeleton, {}))

    def run_after(params: Weights, data: Tree) -> list[Tensor]:
        return [replace(after, names=tuple(params))(params, (torch.empty_like(hidden),), data)]

    late, _ = needed_parameters(run_after, shapes, example)
    after = replace(after, names=tuple(late), constants=Constants(skeleton, _without(shapes, late)))
    if set(early) & set(late):  # each part also runs the other's computation, whose uses must not be recorded
        of_before, of_after = ({name: (paths[name], shapes[name]) for name in names} for names in (early, late))
        before = replace(before, dead=dead_uses(lambda p, d: _tensors(before.read_calls(p, d)), of_before, example))
        after = replace(after, dead=dead_uses(run_after, of_after, example))

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


def _check_order(
    skeleton: nn.Module,
    stack: Stack,
    call: Caller,
    finish: Callable[[Any, Tree], Tensor],
    output: CallTemplate,
    hidden: Tensor,
    shapes: Shapes,
    example: Tree,
) -> None:
    """Refuse a module that does not call every block once and in order, or that uses what an earlier one returned.

    Blocks that are called twice or backwards, or whose results are added up at the end, would be another function.
    """
    calls: list[str] = []
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        hiddens = {name: torch.empty(hidden.shape, requires_grad=True) for name in stack.blocks}
        others = {name: torch.empty(hidden.shape, requires_grad=True) for name in stack.blocks}
        blocks = {
            name: TracingBlock(skeleton.get_submodule(name), name, calls, output, (hiddens[name], others[name]))
            for name in stack.blocks
        }
        params = {name: torch.empty(shape) for name, shape in shapes.items()}
        data = tree.map(torch.empty_like, example)
        module_call = ModuleCall(replace_submodules(skeleton, blocks), params, Constants(skeleton, {}), data)
        out = finish(call(module_call, module_inputs(data, module_call.dtype)), data)
        if tuple(calls) != stack.blocks:
            raise NotAStack(
                f"blocks: expected a module that calls each of {list(stack.blocks)} once and in order, got calls of "
                f"{calls}"
            )
        *earlier, _ = hiddens
        wanted = [*(hiddens[name] for name in earlier), *others.values()]
        ones = torch.ones_like(out)
        grads = torch.autograd.grad(out, wanted, ones, allow_unused=True) if out.requires_grad else ()
    if used := [name for name, grad in zip([*earlier, *others], grads) if grad is not None]:
        raise NotAStack(
            f"blocks: expected a module that uses the hidden state of its last block only, got one that also uses "
            f"results of {used}"
        )


def _check_extras(infos: tuple[ExtraInfo, ...], extras: list[Tensor]) -> None:
    for info, extra in zip(infos, extras):
        if info.has_gradient and not info.has_samples:
            raise NotAStack(
                f"blocks: expected arguments that depend on parameters to hold samples, got a tensor of shape "
                f"{tuple(extra.shape)} without samples"
            )


def _layers(
    module: nn.Module,
    stack: Stack,
    before: BeforeLayers,
    output: CallTemplate,
    hidden: Tensor,
    extras: list[Tensor],
) -> list[tuple[LayerBlock, tuple[str, ...]]]:
    """Return each layer's function, one object for equal layers, and the names of the parameters it uses."""
    known: list[tuple[Any, LayerBlock]] = []
    layers = []
    for name, template in zip(stack.blocks, before.templates):
        block = module.get_submodule(name)
        log = log_operations(block, empty_tensors(block), *fill_template(template, hidden, extras))
        if repr(output_template(name, log.out)) != repr(output):
            raise NotAStack(f"{name}: expected a result of the same form as the first block's, got another form")
        if any(written.startswith("argument ") for written in log.written):
            raise NotAStack(
                f"{name}: expected a layer that leaves its arguments as they are, got one that writes into them",
                first="write h = h + y instead of h += y, or ",
            )
        used = tuple(n for n, _ in block.named_parameters(remove_duplicate=False) if n in log.used)
        key = (repr(template), log.lines, used)
        equal = (layer for other, layer in known if other == key and _same_buffers(layer.module, block))
        layer = next(equal, None)
        if layer is None:
            unused = {n: tuple(p.shape) for n, p in block.named_parameters(remove_duplicate=False) if n not in used}
            layer = LayerBlock(block, template, before.extras, Constants(block, unused))
            known.append((key, layer))
        layers.append((layer, used))
    return layers


def _same_buffers(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = (dict(block.named_buffers(remove_duplicate=False)) for block in (one, other))
    return mine.keys() == theirs.keys() and all(
        a is b or torch.equal(a, b) for a, b in zip(mine.values(), theirs.values())
    )


def _read_without_values(before: BeforeLayers, params: Weights, data: Tree) -> tuple[Any, Tensor, list[Tensor]]:
    """Read the layers' calls on tensors without values; they must be the calls of the example."""
    read = before.read_calls(params, data)
    if repr(read[0]) != repr(before.templates):
        raise NotAStack(
            f"blocks: expected calls that do not depend on values, got "
            f"{describe_difference(before.templates, read[0])}",
            first="pass it its masks (call=...), or ",
        )
    return read


def _tensors(read: tuple[Any, Tensor, list[Tensor]]) -> list[Tensor]:
    _, hidden, extras = read
    return [hidden, *extras]


def _without(shapes: Shapes, names: list[str]) -> Shapes:
    return {name: shape for name, shape in shapes.items() if name not in names}
