"""All kinds of the zoo, by group. To add one, put a ``Kind`` in the list of its group.

>>> GROUPS["layers"].append(Kind("mine", lambda: Case(Mine(), lambda n, g: {"x": normal(g, n, 4)})))
"""

from __future__ import annotations

from benchmarks.zoo.hold import Kind
from benchmarks.zoo.layers import LAYERS

GROUPS: dict[str, list[Kind]] = {"torch.nn": LAYERS}
