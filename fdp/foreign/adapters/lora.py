"""Low-rank adapters (LoRA) on a frozen model, and training of selected leaves.

    y = W x + (alpha / rank) B A x,     W (m, n) frozen, A (rank, n), B (m, rank)         Hu et al., arXiv 2106.09685

Only A and B are trained: only they are in a sample's norm, in the clipped sum and in the noise. A is drawn uniformly
from +-1/sqrt(n) and B is 0, so training starts from the original model. If a layer stores its weight as (inputs,
outputs) and computes ``x W``, the same B and A stand for ``x (W + (alpha / rank) B A)``.

    >>> model, params = lora(model, params, rank=8, alpha=16.0, targets=("blocks.*.qkv", "blocks.*.out"), key=key)
    >>> params = merge(params, alpha=16.0)                         # the original model's leaves, to save
    >>> model = train_only(model, "*_bias")                        # no adapters, biases only

The model's code is unchanged. In place of a targeted weight, its blocks get an :class:`AdaptedWeight`, which the
operations of ``fdp.ops`` treat as a watched weight, and which computes a product from the products of W, A and B.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from fdp import keys, ops, tree
from fdp.gradients.rules import Rule
from fdp.gradients.tape import Tape, Use, Watched
from fdp.gradients.taps import batch_size_of
from fdp.init import constant, uniform
from fdp.model import Block, LeafSpec, Model, Outputs
from fdp.parallel.dtensors import full_tensor
from fdp.types import FdpError, Key, Path, Tree

A_SUFFIX, B_SUFFIX = "_lora_a", "_lora_b"
"""Suffixes of the adapters' leaves, after the path of the leaf they adapt."""

_A_FIRST = {"linear": True, "matmul": False}
"""By rule: True if A is applied to the input before B, as in ``x W^T``; False for ``x W``."""


class AdaptedWeight(Watched):
    """``W + scale B A`` in place of W, never computed as a matrix."""

    def __init__(self, value: Tensor, a: ops.Weight, b: ops.Weight, scale: float, path: Path, batch_size: int):
        super().__init__(value, path, _AdapterTape(a, b, scale, batch_size))


class _AdapterTape(Tape):
    """The tape of an adapted weight: it records nothing for W; uses of A and B are recorded on their own tapes."""

    def __init__(self, a: ops.Weight, b: ops.Weight, scale: float, batch_size: int):
        tape = next((leaf.tape for leaf in (a, b) if isinstance(leaf, Watched)), None)
        attached, compiled = (False, False) if tape is None else (tape.attached, tape.compiled)
        super().__init__(batch_size, None, attached=attached, compiled=compiled)
        self.a, self.b, self.scale = a, b, scale
        if tape is not None:
            self.layouts = tape.layouts

    def output(self, rule: Rule, x: Tensor, leaf: Watched, options: dict[str, Any]) -> Tensor:
        if rule.name not in _A_FIRST:
            raise _unfit_error(leaf, rule.name)
        first, second = (self.a, self.b) if _A_FIRST[rule.name] else (self.b, self.a)
        y = rule.forward(x, leaf.value, **options)
        self.uses.append(Use(leaf.path, leaf.path, rule.name, tuple(x.shape), tuple(y.shape), tuple(leaf.shape)))
        return y + ops.use(rule, self.scale * ops.use(rule, x, first, **options), second, **options)

    def output_with_bias(self, rule: Rule, x: Tensor, leaf: Watched, bias: Watched) -> Tensor:
        return ops.add(self.output(rule, x, leaf, {}), bias)

    def expand(self, leaf: Watched) -> Tensor:
        raise _unfit_error(leaf, "an elementwise operation")


def lora(
    model: Model, params: Tree, *, rank: int, alpha: float, targets: Sequence[str], key: Key
) -> tuple[Model, Tree]:
    """Return ``model`` with adapters, and ``params`` with theirs; each adapter is drawn from (key, path).

    Guarantees:
      - the losses are those of ``model`` until B moves from 0;
      - every leaf of ``model`` is frozen; the trainable leaves are exactly the adapters.
    """
    adapted = lora_model(model, rank=rank, alpha=alpha, targets=targets)
    flat = tree.flatten(params)
    if sharded := [path for path, leaf in flat.items() if isinstance(leaf, DTensor)]:
        raise FdpError(
            f"{sharded[0]}: expected full parameters, got a DTensor; add adapters before sharding, or use lora_model "
            "and initialise its leaves on the mesh"
        )
    for path in sorted(set(adapted.leaves) - set(model.leaves)):
        like, spec = flat[path.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX)], adapted.leaves[path]
        flat[path] = spec.init(keys.fold_in(key, path), spec.shape, dtype=like.dtype).to(like.device)
    return adapted, tree.nest(flat)


def lora_model(model: Model, *, rank: int, alpha: float, targets: Sequence[str]) -> Model:
    """Return ``model``, frozen, with adapters on the leaves that ``targets`` match (``*`` matches anything).

    The result has no tensor-parallel form.
    """
    if not math.isfinite(alpha) or alpha <= 0:
        raise FdpError(f"lora: expected a finite alpha above 0, got {alpha}")
    chosen = match_leaves(model, targets)
    leaves = dict(model.leaves)
    for path in [path for path in model.leaves if path in chosen]:  # in the same order in every process
        shape = model.leaves[path].shape
        if len(shape) != 2:
            raise FdpError(f"lora: expected targets that are matrices, got {path} of shape {tuple(shape)}")
        if not 1 <= rank <= min(shape):
            raise FdpError(f"lora: expected a rank from 1 to {min(shape)} for {path} of shape {shape}, got {rank}")
        leaves[path + A_SUFFIX] = LeafSpec((rank, shape[1]), uniform(1 / math.sqrt(shape[1])))
        leaves[path + B_SUFFIX] = LeafSpec((shape[0], rank), constant(0.0))
    if len(leaves) != len(model.leaves) + 2 * len(chosen):
        raise FdpError(f"lora: expected a model without adapters on {sorted(chosen)[:4]}, got one that has them")
    shared: dict[Any, _AdaptedApply] = {}  # equal blocks share one apply, so that they are compiled once
    blocks = tuple(_adapted_block(block, chosen, alpha / rank, shared) for block in model.blocks)
    frozen = frozenset(model.leaves)
    return model._replace(
        name=f"{model.name}+lora",
        leaves=leaves,
        blocks=blocks,
        frozen=frozen,
        parallel=None,
        tensor=None,
        settings=f"{model.settings}, alpha {alpha}",
    )


def merge(params: Tree, *, alpha: float) -> Tree:
    """Return ``W + (alpha / rank) B A`` for every adapted leaf and all other leaves unchanged, without the adapters.

    The sum is computed in float64 and rounded once. Sharded leaves stay sharded; one full product is formed at a time.
    """
    flat = tree.flatten(params)
    adapted = [path.removesuffix(A_SUFFIX) for path in flat if path.endswith(A_SUFFIX)]
    if not adapted:
        raise FdpError(f"merge: expected adapters, leaves ending in {A_SUFFIX} and {B_SUFFIX}, got {list(flat)[:4]}...")
    for path in adapted:
        a, b = flat.pop(path + A_SUFFIX), flat.pop(path + B_SUFFIX)
        flat[path] = _merge_leaf(flat[path], a, b, alpha / a.shape[0])
    return tree.nest(flat)


def train_only(model: Model, *patterns: str) -> Model:
    """Return ``model`` with all leaves frozen except those that ``patterns`` match; ``"*_bias"`` trains only biases."""
    return model._replace(frozen=frozenset(model.leaves) - match_leaves(model, patterns))


def match_leaves(model: Model, patterns: Sequence[str]) -> frozenset[Path]:
    """Return the leaves that any pattern matches. A pattern without a match is an error that lists the leaves."""
    if isinstance(patterns, str) or not patterns:
        raise FdpError(f"patterns: expected a list of patterns of leaves, such as ('blocks.*.qkv',), got {patterns!r}")
    found: set[Path] = set()
    for pattern in patterns:
        hits = fnmatch.filter(model.leaves, pattern)
        if not hits:
            raise FdpError(
                f"{pattern!r}: expected a pattern of leaves of {model.name}, got none of {list(model.leaves)}"
            )
        found |= set(hits)
    return frozenset(found)


class _AdaptedApply:
    """A block's ``apply`` on a tree of {"base": leaves by name, "a", "b": adapters by the same names}."""

    def __init__(self, template: Tree, names: tuple[str, ...], scale: float, apply: Callable[[Tree, Tree, Tree], Tree]):
        self.template, self.names, self.scale, self.apply = template, names, scale, apply

    def __call__(self, params: Tree, carry: Tree, data: Tree) -> Tree:
        handed = dict(params["base"])
        for name in self.names:
            weight = handed[name]
            if isinstance(weight, Watched):
                raise FdpError(f"{weight.path}: expected an adapted leaf to be frozen, got a trained one")
            a, b = params["a"][name], params["b"][name]
            path = a.path.removesuffix(A_SUFFIX) if isinstance(a, Watched) else f"adapted leaf {name}"
            handed[name] = AdaptedWeight(weight, a, b, self.scale, path, batch_size_of(data))
        return self.apply(tree.select(handed, self.template), carry, data)


def _adapted_block(block: Block, chosen: frozenset[Path], scale: float, shared: dict[Any, _AdaptedApply]) -> Block:
    paths = list(dict.fromkeys(tree.leaves(block.params)))
    if not chosen & set(paths):
        return block
    names = {path: str(i) for i, path in enumerate(paths)}
    template = tree.select(names, block.params)
    adapted = {names[path]: path for path in paths if path in chosen}
    kind = (block.apply, repr(template), tuple(adapted))
    apply = shared.setdefault(kind, _AdaptedApply(template, tuple(adapted), scale, block.apply))
    params = {
        "base": {name: path for path, name in names.items()},
        "a": {name: path + A_SUFFIX for name, path in adapted.items()},
        "b": {name: path + B_SUFFIX for name, path in adapted.items()},
    }
    outputs: Outputs | None = None
    if block.outputs is not None:
        scores = _AdaptedApply(template, tuple(adapted), scale, block.outputs.scores)
        outputs = block.outputs._replace(scores=scores, weight=None)
    return block._replace(params=params, apply=apply, head=None, outputs=outputs)


def _merge_leaf(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    product: Tensor = scale * (full_tensor(b).double() @ full_tensor(a).double())
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        everywhere = DTensor.from_local(product, mesh, [Replicate()] * mesh.ndim, run_check=False)
        product = everywhere.redistribute(placements=weight.placements)
    return (weight.double() + product).to(weight.dtype)


def _unfit_error(leaf: Watched, operation: str) -> FdpError:
    return FdpError(
        f"{leaf.path} (shape {tuple(leaf.shape)}): expected an adapted leaf to be used in products only "
        f"({', '.join(_A_FIRST)}), got a use by {operation}. Leave it out of the targets"
    )
