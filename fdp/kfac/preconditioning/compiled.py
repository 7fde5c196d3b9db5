"""Preconditioning of full (unsharded) gradients by functions that are compiled once per kind of layer.

    (u, g . u) per layer,    g = [weight, bias],   u = L^-1 g R^-1 split into weight and bias

On a GPU a layer then takes its matrix products and a few kernels.

    >>> options = {"shapes": survey.shapes, "rounded": True, "root": False}
    >>> updates, dots = precondition_compiled(preconditioners, gradients, runner=runner, **options)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxtyping import Float
from torch import Tensor

from fdp.gradients.execution import Runner
from fdp.gradients.linear_maps import Sides
from fdp.kfac.layers import to_leaves, to_matrix
from fdp.kfac.preconditioning.one_layer import precondition, trust_dot
from fdp.kfac.types import Layer, Preconditioner, Product
from fdp.types import Flat


def precondition_compiled(
    preconditioners: Mapping[Layer, Preconditioner],
    gradients: Flat,
    *,
    shapes: Mapping[Layer, tuple[int, int]],
    rounded: bool,
    root: bool,
    runner: Runner,
) -> tuple[Flat, list[Float[Tensor, ""]]]:
    """Return ``F^-1 G`` of every layer and the dot products of :func:`~fdp.kfac.preconditioning.one_layer.trust_dot`.

    Leaves that belong to no layer are returned unchanged.

    Guarantees:
      - equal to ``precondition`` layer by layer, up to the rounding of a compiled function.
    """
    done, dots = dict(gradients), []
    for layer, preconditioner in preconditioners.items():
        weight = gradients[layer.weight]
        bias = None if layer.bias is None else gradients[layer.bias]
        key = ("precondition", shapes[layer], rounded, root, _kind(preconditioner), bias is None)
        run = _function_of(shapes[layer], rounded=rounded, root=root)
        new_weight, new_bias, dot = runner.function(key, run, preconditioner, weight, bias)
        done[layer.weight] = new_weight
        if layer.bias is not None:
            done[layer.bias] = new_bias
        dots.append(dot)
    return done, dots


def _function_of(
    shape: tuple[int, int], *, rounded: bool, root: bool
) -> Callable[[Preconditioner, Tensor, Tensor | None], tuple[Tensor, Tensor | None, Tensor]]:
    def run(preconditioner: Preconditioner, weight: Tensor, bias: Tensor | None):
        layer = Layer("weight", None if bias is None else "bias")
        leaves = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        gradient = to_matrix(layer, shape, leaves)
        update = precondition(preconditioner, gradient, rounded=rounded)
        dot = trust_dot(gradient, update, root=root)
        parts = to_leaves(layer, update, leaves)
        return parts["weight"].contiguous(), None if bias is None else parts["bias"].contiguous(), dot

    return run


def _kind(preconditioner: Preconditioner) -> tuple[str, ...]:
    match preconditioner:
        case Product():
            return ("Product",)
        case Sides(left, right):
            return type(left).__name__, type(right).__name__
