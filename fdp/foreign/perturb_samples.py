"""Perturb the samples of an example, each in its own way: truncate to unequal lengths, scale by unequal factors.

The samples of an example often have equal lengths. Perturbed ones show what a module does with unequal samples: sort
them by length, use the longest length, treat padding separately.

    >>> mix_samples(model, params, example, more=perturb_samples(example, paddings_of(module)))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fdp import tree
from fdp.checks.synthetic_samples import POSITIONS, SEGMENTS, Sample
from fdp.gradients.taps import batch_size_of
from fdp.types import Path, Tree

MAX_SAMPLES = 4
"""At most this many samples of the example are perturbed."""
SCALES = (0.3, 3.0, 0.1, 10.0)


def paddings_of(module: nn.Module) -> tuple[int, ...]:
    """Return the ids that a module uses for padding, and 0."""
    found = [getattr(part, "padding_idx", None) for part in module.modules()]
    found.append(getattr(getattr(module, "config", None), "pad_token_id", None))
    return tuple(sorted({0, *(number for number in found if isinstance(number, int) and number >= 0)}))


def perturb_samples(example: Tree, paddings: Iterable[int] = (0,)) -> list[Sample]:
    """Return a few samples, truncated (with each padding id; once with the longest first, once last) and scaled."""
    count = min(MAX_SAMPLES, batch_size_of(example))
    found = []
    for k, padding in enumerate(paddings):
        for b in range(count):
            share = (b if k % 2 else count - b) / (count + 1)
            found.append(_change_sample("cut to another length", example, b, _truncate(share, padding)))
    if any(leaf.is_floating_point() for leaf in tree.leaves(example)):
        found += [_change_sample("scaled", example, b, _scale(SCALES[b])) for b in range(count)]
    return found


def _change_sample(words: str, example: Tree, b: int, change: Callable[[Path, Tensor, Tensor], Tensor]) -> Sample:
    flat = {path: change(path, leaf, leaf[b : b + 1]) for path, leaf in tree.flatten(example).items()}
    return Sample(f"sample {b} of the data, {words}", tree.unflatten(example, flat))


def _truncate(share: float, padding: int) -> Callable[[Path, Tensor, Tensor], Tensor]:
    def truncate(path: Path, leaf: Tensor, one: Tensor) -> Tensor:
        if one.ndim < 2 or path.rpartition(".")[2] in (SEGMENTS, *POSITIONS):
            return one
        kept = max(1, int(share * one.shape[1]))
        fill = 0 if one.dtype == torch.bool or one.is_floating_point() or _is_mask(leaf) else padding
        if fill and leaf.device.type != "cpu" and fill > int(leaf.max()):
            return one  # on a GPU, an index too large for a table would end the process
        return torch.cat([one[:, :kept], torch.full_like(one[:, kept:], fill)], dim=1)

    return truncate


def _is_mask(leaf: Tensor) -> bool:
    """Return True if an integer tensor holds only zeros and ones."""
    return bool(((leaf == 0) | (leaf == 1)).all())


def _scale(scale: float) -> Callable[[Path, Tensor, Tensor], Tensor]:
    return lambda path, leaf, one: one * scale if one.is_floating_point() else one
