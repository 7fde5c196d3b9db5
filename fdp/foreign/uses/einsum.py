"""The rule of ``y = einsum(s, x, W)`` for samples x and one parameter W.

The letters of W are of three kinds: in x and y (groups, such as experts), in x only (contracted, inputs) and in y only
(outputs). Letters of x and y that W lacks are positions (tokens). So per group it is a product of two matrices,

    G_b = left_b^T right_b        left, right: (positions, inputs), (positions, outputs), in the order that W has

and if W has its letters in another order, ``G_b = einsum(x, g -> b W)``.

    >>> letters = parse("btd,edf->btef", 3, 3, swapped=False, flattened=False)
    >>> ops.use(EINSUM, x, weight, x_of=letters.x, w_of=letters.w, y_of=letters.y)
"""

from __future__ import annotations

import math
import string
from typing import NamedTuple

import torch
from torch import Tensor

from fdp.gradients.rules import Dense, Pair, Record, Rule


class EinsumLetters(NamedTuple):
    """The letters of x, W and y, with samples in front of x and y; the module has samples in dim ``place`` of y."""

    x: str
    w: str
    y: str
    place: int


def parse(equation: str, x_dims: int, w_dims: int, *, swapped: bool, flattened: bool) -> EinsumLetters | None:
    """Parse an equation of two operands, with samples in dim 0 of x.

    Return None if it mixes samples or repeats letters. ``swapped``: W comes first. ``flattened``: dim 0 of x is samples
    and tokens, which become two letters.
    """
    left, arrow, y = equation.replace(" ", "").partition("->")
    x, _, w = left.partition(",")
    x, w = (w, x) if swapped else (x, w)
    if not arrow or "." in w:
        return None
    free = [letter for letter in string.ascii_letters if letter not in x + w + y]
    dots = "".join(free[: x_dims - len(x.replace("...", ""))])
    x, y = x.replace("...", dots), y.replace("...", dots)
    if len(x) != x_dims or len(w) != w_dims or any(len(set(part)) != len(part) for part in (x, w, y)):
        return None
    sample = x[0]
    if sample in w or sample not in y or not set(w) <= set(x) | set(y):
        return None
    token = free[len(dots)] if flattened else ""
    return EinsumLetters(sample + token + x[1:], w, sample + token + y.replace(sample, ""), y.index(sample))


def _forward(x: Tensor, weight: Tensor, *, x_of: str, w_of: str, y_of: str) -> Tensor:
    return torch.einsum(f"{x_of},{w_of}->{y_of}", x, weight)


def _record(x: Tensor, g: Tensor, shape: tuple[int, ...], *, x_of: str, w_of: str, y_of: str) -> Record:
    sample = x_of[0]
    groups = "".join(a for a in w_of if a in x_of and a in y_of)
    inputs = "".join(a for a in w_of if a in x_of and a not in y_of)
    outputs = "".join(a for a in w_of if a in y_of and a not in x_of)
    places = "".join(a for a in y_of[1:] if a in x_of and a not in w_of)
    if w_of not in (groups + inputs + outputs, groups + outputs + inputs):
        return Dense(torch.einsum(f"{x_of},{y_of}->{sample}{w_of}", x, g))
    of_x = _as_matrices(x, x_of, sample, groups, places, inputs)
    of_g = _as_matrices(g, y_of, sample, groups, places, outputs)
    left, right = (of_x, of_g) if w_of == groups + inputs + outputs else (of_g, of_x)
    return Pair(left, right, tuple(shape))


def _as_matrices(z: Tensor, letters: str, sample: str, groups: str, places: str, rest: str) -> Tensor:
    extent = dict(zip(letters, z.shape))
    parts = [math.prod([extent[a] for a in part]) for part in (sample, groups, places, rest)]
    return torch.einsum(f"{letters}->{sample}{groups}{places}{rest}", z).reshape(parts)


EINSUM = Rule("einsum", _forward, _record)
