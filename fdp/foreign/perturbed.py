"""The samples of an example, each changed in its own way: cut to unequal lengths, scaled by unequal numbers.

An example is often of one length. What a module does with unlike samples (sort them by length, take the longest, treat
what is padded apart) shows on these.

    >>> mixture(model, params, example, more=perturbed(example, paddings_of(module)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fdp import tree
from fdp.checks.synthetic_samples import POSITIONS, SEGMENTS, Sample
from fdp.gradients.taps import batch_size_of
from fdp.types import Path, Tree

FEW = 4
"""Samples of the example that are changed."""
SCALES = (0.3, 3.0, 0.1, 10.0)


def paddings_of(module: nn.Module) -> tuple[int, ...]:
    """The numbers that a module says stand for padding, and 0."""
    found = [getattr(part, "padding_idx", None) for part in module.modules()]
    found.append(getattr(getattr(module, "config", None), "pad_token_id", None))
    return tuple(sorted({0, *(number for number in found if isinstance(number, int) and number >= 0)}))


def perturbed(example: Tree, paddings: Iterable[int] = (0,)) -> list[Sample]:
    """A few samples, cut (with each padding, the longest first and last) and scaled."""
    count = min(FEW, batch_size_of(example))
    found = []
    for k, padding in enumerate(paddings):
        for b in range(count):
            share = (b if k % 2 else count - b) / (count + 1)
            found.append(_changed("cut to another length", example, b, _cut(share, padding)))
    if any(leaf.is_floating_point() for leaf in tree.leaves(example)):
        found += [_changed("scaled", example, b, _scaled(SCALES[b])) for b in range(count)]
    return found


def _changed(words: str, example: Tree, b: int, change: Callable[[Path, Tensor, Tensor], Tensor]) -> Sample:
    flat = {path: change(path, leaf, leaf[b : b + 1]) for path, leaf in tree.flatten(example).items()}
    return Sample(f"sample {b} of the data, {words}", tree.unflatten(example, flat))


def _cut(share: float, padding: int) -> Callable[[Path, Tensor, Tensor], Tensor]:
    def cut(path: Path, leaf: Tensor, one: Tensor) -> Tensor:
        if one.ndim < 2 or path.rpartition(".")[2] in (SEGMENTS, *POSITIONS):
            return one
        kept = max(1, int(share * one.shape[1]))
        fill = 0 if one.dtype == torch.bool or one.is_floating_point() or _counts(leaf) else padding
        if fill and leaf.device.type != "cpu" and fill > int(leaf.max()):
            return one  # an index too large for a table would end the process there
        return torch.cat([one[:, :kept], torch.full_like(one[:, kept:], fill)], dim=1)

    return cut


def _counts(leaf: Tensor) -> bool:
    """Whether integers are a mask: nothing but zeros and ones."""
    return bool(((leaf == 0) | (leaf == 1)).all())


def _scaled(scale: float) -> Callable[[Path, Tensor, Tensor], Tensor]:
    return lambda path, leaf, one: one * scale if one.is_floating_point() else one
