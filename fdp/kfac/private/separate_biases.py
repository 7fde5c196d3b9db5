"""Layers whose biases are separate, so that every leaf is preconditioned and clipped by itself.

K-FAC usually joins a bias to its weight as a last column. That would couple two leaves in the norm of a sample, so in
private training each bias is a layer of its own, described by its squared gradients alone.

    >>> known = separate_biases(survey(model, params, microbatch))
    >>> inverses = {layer: invert(c, power=Power.ROOT, ...) for layer, c in curvatures.items()}
    >>> step = make_train_step(..., precondition=lambda state: sides_by_path(inverses))
"""

from __future__ import annotations

from collections.abc import Mapping

from fdp.gradients.linear_maps import Sides
from fdp.kfac.layers import Met, Survey
from fdp.kfac.types import Layer, Preconditioner
from fdp.types import FdpError, Path


def separate_biases(known: Survey) -> Survey:
    """Return the same leaves, every bias a layer of its own: one column of elements."""
    layers: list[Layer] = []
    shapes: dict[Layer, tuple[int, int]] = {}
    met: dict[Layer, tuple[Met, ...]] = {}
    uses = [(i, use) for i, block in enumerate(known.plan.uses) for use in block]
    for layer in known.layers:
        rows, columns = known.shapes[layer]
        weight = Layer(layer.weight, None)
        layers.append(weight)
        met[weight] = known.met[layer]
        shapes[weight] = (rows, columns - (layer.bias is not None))
        if layer.bias is not None:
            bias = Layer(layer.bias, None)
            layers.append(bias)
            shapes[bias] = (rows, 1)
            met[bias] = tuple(Met.small(i, use) for i, use in uses if use.path == layer.bias)
    return known._replace(layers=tuple(layers), shapes=shapes, met=met)


def sides_by_path(inverses: Mapping[Layer, Preconditioner]) -> dict[Path, Sides]:
    """Maps by leaf; refuses what does not act on the two sides of one leaf."""
    for layer, inverse in inverses.items():
        if layer.bias is not None:
            raise FdpError(
                f"{layer.weight}: expected a layer without its bias, which is clipped as a leaf of its own, got one "
                f"joined with {layer.bias}; make forms and "
                f"curvatures of separate_biases(known)"
            )
        if not isinstance(inverse, Sides):
            raise FdpError(
                f"{layer.weight}: expected a map for each side, got one of their product, which no pair of rows can go "
                f"through; invert with Damping.PI"
            )
    return {layer.weight: inverse for layer, inverse in inverses.items() if isinstance(inverse, Sides)}
