"""Initial values of a module, one leaf at a time: ``torch.manual_seed(seed); factory()`` without holding all of it.

The factory runs on shape-only tensors while a tape records every operation (``fdp.foreign.init_tape``). Each random
draw is also made for real and thrown away, which advances the random stream; the state before the draw is recorded. A
leaf is then computed from the operations it depends on, so any order of leaves gives the same bits.

    >>> leaves = torch_leaves(lambda: GPT(config), seed=0)           # ('wte.weight', full leaf), ...
    >>> shard = place_leaves(leaves, lambda path, leaf: leaf.chunk(ranks)[rank])

Cost: every draw is made twice, and once more each time Python reads its value. Memory: the tape (about 5 kB a draw),
tensors that the factory brings from outside, and one leaf with what it is computed from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from fdp.foreign.init_tape import InitTape, restore_generator
from fdp.types import FdpError, Path


def torch_leaves(factory: Callable[[], nn.Module], *, seed: int) -> Iterator[tuple[Path, Tensor]]:
    """Yield every parameter of ``factory()`` with its initial value, in the order of ``named_parameters()``.

    Guarantees:
      - the values are those of ``torch.manual_seed(seed); factory()`` on the CPU, bit for bit;
      - a parameter with several names is yielded once, under its first name; buffers are not yielded;
      - the caller's random state is unchanged at every yield and after the end;
      - a leaf is freed when the caller releases it.
    """
    tape = InitTape()
    with restore_generator(torch.default_generator):
        torch.default_generator.manual_seed(seed)
        module = tape.record(factory)
    views = {path: tape.view(leaf) for path, leaf in module.named_parameters()}
    if not views:
        raise FdpError(
            f"{type(module).__name__}: expected a module with parameters, got one without: there is nothing to "
            f"initialise or shard. Give the module that holds them"
        )
    del module
    for path, view in views.items():
        yield path, tape.value(view, path)  # not bound to a name here: only the caller keeps the value alive


def place_leaves(leaves: Iterable[tuple[Path, Tensor]], place: Callable[[Path, Tensor], Tensor]) -> dict[Path, Tensor]:
    """Return ``{path: place(path, leaf)}``, freeing each full leaf before asking for the next.

    Guarantees:
      - a part that is a view of its leaf is copied, so that it does not keep the leaf alive;
      - a path that comes twice is an error.
    """
    placed: dict[Path, Tensor] = {}
    for path, leaf in leaves:
        if path in placed:
            raise FdpError(f"{path}: expected every leaf once, got it twice; give each parameter exactly one owner")
        part = place(path, leaf)
        if type(part) is Tensor and part.numel() < leaf.numel() and _same_memory(part, leaf):
            part = part.clone()
        placed[path] = part
        del leaf, part
    return placed


def _same_memory(part: Tensor, leaf: Tensor) -> bool:
    return part.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
