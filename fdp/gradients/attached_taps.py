"""Taps under plain autograd, attached to outputs instead of added to them: the fast way for blocks that run eagerly.

    out, pull = attached_vjp(block, weights, carry, data, uses, trainable)             as fdp.gradients.taps.tapped_vjp

``torch.func`` has to see the sum ``y + tap``, which is a pass over every output, and it wraps every tensor. Plain
autograd lets a tap share the gradient of an output (:func:`fdp.gradients.tape.attach`), so that a bias stays part of
its product and nothing is added. Both give true derivatives. Inside ``torch.compile``, under a transform of
``torch.func`` and in inference mode only ``torch.func`` is right, and :func:`can_attach` says so.

    >>> if can_attach(block):
    >>>     out, pull = attached_vjp(block, weights, carry, data, uses, trainable)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fdp import tree
from fdp.cpu.promise import differentiated_once
from fdp.gradients.rules import Record
from fdp.gradients.tape import Tape, Use
from fdp.gradients.taps import batch_size_of, make_taps, records_of, watch
from fdp.gradients.vjp import refuse_recomputation
from fdp.types import Flat, Path, Tree

_WRITES_IN_PLACE: weakref.WeakSet[Any] = weakref.WeakSet()
"""Functions of blocks that write into the output of a use, which is a view if its tap is attached."""


class WritesInPlace(Exception):
    """Raised if a block writes into the output of a use; :func:`can_attach` is False for it from then on."""


def can_attach(block: Any) -> bool:
    """Return True if the block may be differentiated by plain autograd here."""
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
        return False
    return not torch._C._are_functorch_transforms_active() and block.apply not in _WRITES_IN_PLACE


def attached_vjp(
    block: Any, weights: Flat, carry: Tree, data: Tree, uses: tuple[Use, ...], trainable: frozenset[Path]
) -> tuple[Tree, Callable[[Tree], tuple[Tree, dict[Path, list[Record]]]]]:
    """Return a block's output, and the pull-back of an output gradient to its carry and its leaves' records.

    Guarantees:
      - a use that the plan knows and the block does not make is an error, never a gradient of zero;
      - nothing is recomputed in the pull-back: a block that asks for it (torch.utils.checkpoint) is an error.
    """
    taps = {name: tap.detach().requires_grad_() for name, tap in make_taps(uses, weights).items()}
    carry = tree.map(lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()), carry)
    constants = {path: leaf.detach() for path, leaf in weights.items()}
    tape = Tape(batch_size_of(data), taps, attached=True, compiled=False)
    with torch.enable_grad(), refuse_recomputation(), differentiated_once():
        try:
            out = block.apply(watch(block, constants, trainable, tape), carry, data)
        except RuntimeError as error:
            if "modified inplace" not in str(error):
                raise
            _remember(block.apply)
            raise WritesInPlace from error
    tape.check_met(block.name)
    inputs = {name: x.detach() for name, x in tape.inputs.items()}

    def pull(gradient: Tree) -> tuple[Tree, dict[Path, list[Record]]]:
        carry_gradient, tap_gradients = gradients(out, gradient, carry, taps)
        return carry_gradient, records_of(uses, tape.rules, inputs, tap_gradients)

    return tree.map(Tensor.detach, out), pull


def gradients(out: Tree, gradient: Tree, carry: Tree, taps: Flat) -> tuple[Tree, Flat]:
    """Return the gradients of carry and taps; those of what the output does not depend on are zeros."""
    wanted = [leaf for leaf in (*tree.leaves(carry), *taps.values()) if leaf.requires_grad]
    follows = [(o, g) for o, g in zip(tree.leaves(out), tree.leaves(gradient)) if o.requires_grad]
    if not follows:
        found = iter([torch.zeros_like(leaf) for leaf in wanted])
    else:
        outs, slopes = zip(*follows)
        with refuse_recomputation():
            found = iter(torch.autograd.grad(outs, wanted, slopes, allow_unused=True, materialize_grads=True))
    # Integers have no gradient and stand for themselves.
    of_carry = tree.map(lambda leaf: next(found) if leaf.requires_grad else leaf, carry)
    return of_carry, {name: next(found) for name in taps}


def _remember(apply: Any) -> None:
    try:
        _WRITES_IN_PLACE.add(apply)
    except TypeError:  # something that cannot be referenced weakly is tried again each time
        return
