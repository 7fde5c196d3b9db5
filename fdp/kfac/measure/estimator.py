"""The settings of a measurement: the factors to estimate, and how to run the passes.

>>> estimator = Estimator(survey(model, params, data), forms, Fisher.SAMPLED, Sharing.EXPAND)
>>> collect(model, params, data, mask, estimator=estimator, key=key, execution=Execution(sharding))
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, TypeAlias

from fdp.gradients.plan import Plan
from fdp.kfac.factor_forms import Form
from fdp.kfac.layers import Survey
from fdp.kfac.measure.fisher import Fisher
from fdp.kfac.types import Layer
from fdp.parallel.sharding import Sharding
from fdp.types import Path


class Sharing(Enum):
    """The two approximations for a weight that a sample uses at several positions.

    EXPAND treats each position as a row of its own; REDUCE adds up a sample's positions first.
    """

    EXPAND = "expand"
    REDUCE = "reduce"


Forms: TypeAlias = Mapping[Layer, tuple[Form, Form]]
"""The forms of the left and the right factor of each layer. Layers that are not named are not measured."""


class Estimator(NamedTuple):
    """The factors to measure: of which layers, in which forms, of which Fisher information."""

    survey: Survey
    forms: Forms
    fisher: Fisher
    sharing: Sharing

    @property
    def measured(self) -> dict[Path, Layer]:
        """Return the layers that have a factor, by the path of their weight."""
        return {layer.weight: layer for layer, both in self.forms.items() if set(both) != {Form.SKIP}}

    @property
    def plan(self) -> Plan:
        """Return the gradient plan of the survey, restricted to the weights that have a factor."""
        plan, paths = self.survey.plan, frozenset(self.measured)
        uses = tuple(tuple(use for use in block if use.path in paths) for block in plan.uses)
        return plan._replace(uses=uses, trainable=paths)


def shard_of_samples(sharding: Sharding | None) -> tuple[int, int]:
    """Return this rank's number among the ranks that hold different samples, and how many they are."""
    return (0, 1) if sharding is None else (sharding.rank, sharding.ranks)
