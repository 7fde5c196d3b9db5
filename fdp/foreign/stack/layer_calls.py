"""Find out how a module calls its layers, by running it on an example with placeholders for them.

    before, output = split_before(...)             the part before the layers, and the form of what a layer returns
    layer_calls(module, call, example)             [(args, kwargs) of layer 0, of layer 1, ...]

Parameters are never read: the module runs on zeros, on row numbers, or on shapes alone.

    >>> layer_calls(module, call, {"tokens": tokens})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fdp import tree
from fdp.foreign.call_template import HIDDEN_SLOT, CallTemplate, describe_difference, drop_tensors, fill_template
from fdp.foreign.find_stack import AUTO, NotAStack, Stack, find_stack
from fdp.foreign.placeholders import RecordingBlock, RecordingHead, meta_copy, replace_submodules
from fdp.foreign.stack.block_functions import BeforeLayers, Caller, Constants, ExtraInfo, ModuleCall
from fdp.foreign.stack.dependencies import Shapes
from fdp.foreign.stack.operation_log import log_operations, refuse_branches
from fdp.types import Tree


@refuse_branches("blocks")
def layer_calls(module: nn.Module, call: Caller, example: Tree, *, pattern: str = AUTO) -> list[Any]:
    """Return the arguments of every layer's call, if each row of each parameter holds its row number."""
    stack, module = find_stack(module, pattern), meta_copy(module)
    shapes = outside_shapes(module, stack)
    before, _ = split_before(module, module, stack, call, never_absent, shapes, example)
    return before.layer_calls(_numbered_parameters(shapes), example)


@refuse_branches("blocks")
def returns_output_of(
    module: nn.Module, part: str, call: Caller, finish: Callable[[Any, Tree], Tensor], example: Tree
) -> bool:
    """Return True if what ``finish`` takes from the module's result is the unchanged output of ``part``."""
    head = RecordingHead(module.get_submodule(part))
    copy = replace_submodules(meta_copy(module), {part: head})
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        shapes = {name: leaf.shape for name, leaf in copy.named_parameters(remove_duplicate=False)}
        params = {name: torch.empty(shape) for name, shape in shapes.items()}
        module_call = ModuleCall(copy, params, Constants(copy, {}), example)
        out = finish(call(module_call, tree.map(torch.empty_like, example)), example)
    (seen,) = head.seen
    return out.shape == seen.shape and out.untyped_storage()._cdata == seen.untyped_storage()._cdata


def split_before(
    module: nn.Module,
    skeleton: nn.Module,
    stack: Stack,
    call: Caller,
    absent: Callable[[Tensor], bool],
    shapes: Shapes,
    example: Tree,
) -> tuple[BeforeLayers, CallTemplate]:
    """Return the part before the layers, with the templates of their calls, and the template of a layer's result."""

    def recording(outputs: Mapping[str, CallTemplate | None]) -> BeforeLayers:
        calls: dict = {}
        blocks = {name: RecordingBlock(module.get_submodule(name), name, calls, out) for name, out in outputs.items()}
        return BeforeLayers(replace_submodules(skeleton, blocks), calls, call, absent, Constants(skeleton, {}))

    params = zero_parameters(shapes, torch.float32)
    first, *_ = stack.blocks
    templates, hidden, extras = recording(dict.fromkeys(stack.blocks)).read_calls(params, example)
    block = module.get_submodule(first)
    log = log_operations(block, empty_tensors(block), *fill_template(templates[0], hidden, extras))
    output = output_template(first, log.out)
    before = recording({**dict.fromkeys(stack.blocks, output), stack.blocks[-1]: None})

    # Run again with another batch size and dtype, to see which arguments change with them.
    templates, hidden, extras = before.read_calls(params, example)
    other = _resize(example, len(hidden) + 1, torch.float64)
    templates2, hidden2, extras2 = before.read_calls(zero_parameters(shapes, torch.float64), other)
    if len(templates) != len(stack.blocks):
        raise NotAStack(
            f"blocks: expected {len(stack.blocks)} blocks to be called, got calls of {len(templates)}",
            first="name those that run, or ",
        )
    if repr(templates) != repr(templates2):
        raise NotAStack(
            f"blocks: expected calls that depend neither on the number of samples nor on their dtype, got "
            f"{describe_difference(templates, templates2)}",
            first="compute what all layers share once, before them, or ",
        )
    infos = tuple(_extra_info(a, b, (hidden, hidden2)) for a, b in zip(extras, extras2))
    return replace(before, templates=templates, extras=infos), output


def _extra_info(one: Tensor, other: Tensor, hiddens: tuple[Tensor, Tensor]) -> ExtraInfo:
    """Compare a tensor argument of two runs with different batch sizes and dtypes."""
    same = one.shape == other.shape
    sizes = [len(hidden) for hidden in hiddens]
    batched = one.ndim > 0 and [len(one), len(other)] == sizes and one.shape[1:] == other.shape[1:]
    if not (same or batched):
        raise NotAStack(
            f"blocks: expected arguments with samples in dimension 0 or nowhere, got shapes {tuple(one.shape)} for "
            f"{sizes[0]} samples and {tuple(other.shape)} for {sizes[1]}"
        )
    follows = (one.dtype, other.dtype) == tuple(hidden.dtype for hidden in hiddens)
    return ExtraInfo(has_samples=not same, has_gradient=False, dtype=None if follows else one.dtype)


def output_template(name: str, out: Any) -> CallTemplate:
    """Return the template of a layer's result: the hidden state, alone or first in a tuple whose rest is unused."""
    if isinstance(out, Tensor):
        return CallTemplate((HIDDEN_SLOT,), {})
    if type(out) is tuple and out and isinstance(out[0], Tensor):
        return CallTemplate(((HIDDEN_SLOT, *drop_tensors(out[1:])),), {})
    raise NotAStack(
        f"{name}: expected a layer that returns its hidden state, alone or first in a tuple, got {type(out).__name__}"
    )


def outside_shapes(module: nn.Module, stack: Stack) -> Shapes:
    """Return the shapes of the parameters that are outside the layers."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: tuple(leaf.shape) for name, leaf in parameters if not stack.holds(name)}


def zero_parameters(shapes: Shapes, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return zeros of the given shapes that take no memory."""
    return {name: torch.zeros((), dtype=dtype).expand(shape) for name, shape in shapes.items()}


def empty_tensors(block: nn.Module) -> dict[str, Tensor]:
    """Return stand-ins for a layer's parameters and buffers: parameters without memory, buffers on the CPU."""
    buffers = {name: torch.empty_like(b, device="cpu") for name, b in block.named_buffers(remove_duplicate=False)}
    parameters = dict(block.named_parameters(remove_duplicate=False))
    return {name: torch.empty(()).expand(leaf.shape) for name, leaf in parameters.items()} | buffers


def never_absent(_: Tensor) -> bool:
    """Return False: every tensor argument is a real one."""
    return False


def _numbered_parameters(shapes: Shapes) -> dict[str, Tensor]:
    """Return parameters whose rows differ from each other; only the row numbers take memory."""

    def numbered(shape: tuple[int, ...]) -> Tensor:
        first = torch.arange(1.0, 1.0 + (shape[0] if shape else 1)) / 16
        return first.view(shape[0], *[1] * (len(shape) - 1)).expand(shape) if shape else first[0]

    return {name: numbered(shape) for name, shape in shapes.items()}


def _resize(example: Tree, samples: int, dtype: torch.dtype) -> Tree:
    def resize(leaf: Tensor) -> Tensor:
        more = leaf[:1].expand(samples, *leaf.shape[1:])
        return more.to(dtype) if more.is_floating_point() else more

    return tree.map(resize, example)
