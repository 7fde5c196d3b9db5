"""Layers of ``torch.nn``, alone and in small networks."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.zoo.draws import floats, ids
from benchmarks.zoo.hold import Case, Draw, Kind

_ROWS, _TOKENS, _SIGNAL, _IMAGE = (
    floats("input", 6),
    floats("input", 5, 6),
    floats("input", 4, 9),
    floats("input", 4, 7, 6),
)
_VOLUME = floats("input", 4, 5, 4, 4)


def _layer(name: str, module: Any, draw: Draw, *, compiled: bool = False, **more: Any) -> Kind:
    return Kind(name, lambda: Case(module().eval(), draw), compiled=compiled, **more)


LAYERS: list[Kind] = [
    _layer("Linear", lambda: nn.Linear(6, 5), _ROWS, compiled=True),
    _layer("Linear on tokens", lambda: nn.Linear(6, 5), _TOKENS, compiled=True),
    _layer("Linear without bias", lambda: nn.Linear(6, 5, bias=False), _TOKENS),
    _layer("Embedding", lambda: nn.Embedding(13, 5), ids("input", 6), compiled=True),
    _layer("Conv1d", lambda: nn.Conv1d(4, 6, 3), _SIGNAL, compiled=True),
    _layer("Conv2d", lambda: nn.Conv2d(4, 6, 3), _IMAGE, compiled=True),
    _layer("Conv3d", lambda: nn.Conv3d(4, 6, 3), _VOLUME),
]
