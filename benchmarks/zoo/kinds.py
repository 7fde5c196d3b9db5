"""All kinds of the zoo, by group. To add one, append a ``Kind`` to the list of its group.

>>> GROUPS["torch.nn"].append(Kind("mine", lambda: Case(Mine(), floats("x", 4))))
"""

from __future__ import annotations

from benchmarks.zoo.families import ADAPTERS, FAMILIES
from benchmarks.zoo.hold import Kind
from benchmarks.zoo.layers import LAYERS
from benchmarks.zoo.written import WRITTEN_BY_HAND

GROUPS: dict[str, list[Kind]] = {
    "torch.nn": LAYERS,
    "written by hand": WRITTEN_BY_HAND,
    "transformers": FAMILIES,
    "peft": ADAPTERS,
}
