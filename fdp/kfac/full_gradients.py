"""Preconditioning of whole gradients by functions that are compiled once for every kind of layer.

    (G, u, g . u)   per layer:   G = [weight, bias],   u = L^-1 G R^-1 as weight and bias,   the dot product for nu

On a GPU a layer then takes its products and a few kernels, instead of one for every step on the way.

    >>> how = {"shapes": known.shapes, "rounded": True, "root": False}
    >>> updates, dots = precondition_whole(maps, gradients, runner=runner, **how)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxtyping import Float
from torch import Tensor

from fdp.gradients.execution import Runner
from fdp.gradients.linear_maps import Sides
from fdp.kfac.invert.apply import precondition, trust_dot
from fdp.kfac.layers import joined, parted
from fdp.kfac.types import Layer, Preconditioner, Product
from fdp.types import Flat


def precondition_whole(
    preconditioners: Mapping[Layer, Preconditioner],
    gradients: Flat,
    *,
    shapes: Mapping[Layer, tuple[int, int]],
    rounded: bool,
    root: bool,
    runner: Runner,
) -> tuple[Flat, list[Float[Tensor, ""]]]:
    """``F^-1 G`` of every layer and ``G . F^-1 G``, or ``G . G`` with ``root``, of which one half is applied already.

    Leaves of no layer are returned as they are.

    Guarantees:
      - as :func:`fdp.kfac.invert.apply.precondition` layer by layer, up to the rounding of a compiled function.
    """
    done, dots = dict(gradients), []
    for layer, preconditioner in preconditioners.items():
        weight = gradients[layer.weight]
        bias = None if layer.bias is None else gradients[layer.bias]
        key = ("precondition", shapes[layer], rounded, root, _form(preconditioner), bias is None)
        run = _run_of(shapes[layer], rounded=rounded, root=root)
        new_weight, new_bias, dot = runner.function(key, run, preconditioner, weight, bias)
        done[layer.weight] = new_weight
        if layer.bias is not None:
            done[layer.bias] = new_bias
        dots.append(dot)
    return done, dots


def _run_of(
    shape: tuple[int, int], *, rounded: bool, root: bool
) -> Callable[[Preconditioner, Tensor, Tensor | None], tuple[Tensor, Tensor | None, Tensor]]:
    def run(preconditioner: Preconditioner, weight: Tensor, bias: Tensor | None):
        layer = Layer("weight", None if bias is None else "bias")
        leaves = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        gradient = joined(layer, shape, leaves)
        update = precondition(preconditioner, gradient, rounded=rounded)
        dot = trust_dot(gradient, update, root=root)
        parts = parted(layer, update, leaves)
        return parts["weight"].contiguous(), None if bias is None else parts["bias"].contiguous(), dot

    return run


def _form(preconditioner: Preconditioner) -> tuple[str, ...]:
    match preconditioner:
        case Product():
            return ("Product",)
        case Sides(left, right):
            return type(left).__name__, type(right).__name__
