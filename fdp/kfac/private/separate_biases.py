"""Layers whose biases are separate, so that every leaf is preconditioned and clipped by itself.

K-FAC usually joins a bias to its weight as a last column. That would couple two leaves in the norm of a sample, so in
private training each bias is a layer of its own, described by its squared gradients alone.

    >>> found = separate_biases(survey(model, params, microbatch))
    >>> inverses = {layer: invert(c, power=Power.ROOT, ...) for layer, c in curvatures.items()}
    >>> step = make_train_step(..., precondition=lambda state: sides_by_path(inverses))
"""

from __future__ import annotations

from collections.abc import Mapping

from fdp.gradients.linear_maps import Sides
from fdp.kfac.layers import LeafUse, Survey
from fdp.kfac.types import Layer, Preconditioner
from fdp.types import FdpError, Path


def separate_biases(survey: Survey) -> Survey:
    """Return the survey with every bias as a layer of its own, one column of elements."""
    layers: list[Layer] = []
    shapes: dict[Layer, tuple[int, int]] = {}
    by_layer: dict[Layer, tuple[LeafUse, ...]] = {}
    uses = [(i, use) for i, block in enumerate(survey.plan.uses) for use in block]
    for layer in survey.layers:
        rows, columns = survey.shapes[layer]
        weight = Layer(layer.weight, None)
        layers.append(weight)
        by_layer[weight] = survey.uses[layer]
        shapes[weight] = (rows, columns - (layer.bias is not None))
        if layer.bias is not None:
            bias = Layer(layer.bias, None)
            layers.append(bias)
            shapes[bias] = (rows, 1)
            by_layer[bias] = tuple(LeafUse.elementwise(i, use) for i, use in uses if use.path == layer.bias)
    return survey._replace(layers=tuple(layers), shapes=shapes, uses=by_layer)


def sides_by_path(inverses: Mapping[Layer, Preconditioner]) -> dict[Path, Sides]:
    """Return the maps of each leaf; raise an FdpError unless every one acts on the two sides of one leaf."""
    for layer, inverse in inverses.items():
        if layer.bias is not None:
            raise FdpError(
                f"{layer.weight}: expected a layer without its bias, which is clipped as a leaf of its own, got one "
                f"joined with {layer.bias}; compute forms and curvatures from separate_biases(survey(...))"
            )
        if not isinstance(inverse, Sides):
            raise FdpError(
                f"{layer.weight}: expected one map per side, got an inverse of their product, which cannot be applied "
                f"to pairs of rows; invert with Damping.PI"
            )
    return {layer.weight: inverse for layer, inverse in inverses.items() if isinstance(inverse, Sides)}
