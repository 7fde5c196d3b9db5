"""Weighted sums that are evaluated later, so that they are never rounded or stored before the noise is added.

sum_s factors_s rows_s

>>> total = evaluate(total)                       # a ClippedSum whose leaves are tensors
>>> total = add_sums(total, more)                 # different samples: the larger sensitivity of the two
>>> value = add_onto(value, part, torch.float32)  # leaf by leaf, each rounded once
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from fdp_kernels.keep import add_weighted_sum_, weighted_sum
from jaxtyping import Float
from torch import Tensor

from fdp.parallel.offload import add_on_device_, to_cpu
from fdp.types import Bound, ClippedSum, FdpError, Flat, Path


class LazySum(NamedTuple):
    """``sum_s factors_s rows_s``, evaluated by whoever adds the noise."""

    rows: Float[Tensor, " samples *shape"]
    factors: Float[Tensor, " samples"]

    def evaluate(
        self, onto: Float[Tensor, " *shape"] | None = None, dtype: torch.dtype | None = None
    ) -> Float[Tensor, " *shape"]:
        """Return the sum, plus ``onto``, computed in float64 and rounded once to ``dtype``.

        The default dtype is the wider one of factors and ``onto``; clip factors are float64.

        Guarantees:
          - a row whose factor is 0 contributes exactly 0, even if it holds NaN or infinity.
        """
        flat, before = self.rows.reshape(len(self.factors), -1), None if onto is None else onto.flatten()
        if dtype is None:
            dtype = self.factors.dtype if onto is None else torch.promote_types(self.factors.dtype, onto.dtype)
        return weighted_sum(flat, self.factors, dtype, before).view(self.rows.shape[1:])


def single_row(leaf: Float[Tensor, " *shape"], one: Float[Tensor, " 1"]) -> LazySum:
    """Return ``1 leaf`` as a lazy sum of one row."""
    return LazySum(leaf.unsqueeze(0), one)


def evaluate(total: ClippedSum) -> ClippedSum:
    """Return the same sum with every leaf evaluated."""
    return total._replace(value={path: _evaluate_leaf(leaf) for path, leaf in total.value.items()})


def add_sums(total: ClippedSum, more: ClippedSum) -> ClippedSum:
    """Return the sum over the samples of both, which must be different samples.

    Uses up both: each leaf is freed as soon as it is added.

    Guarantees:
      - those of :func:`with_bound_of`.
    """
    check_leaves("add_sums", total, more.value)
    if not total.value:
        return more
    bounded = with_bound_of(total, more)
    value = {path: _add_leaves(take(total.value, path), take(more.value, path)) for path in list(total.value)}
    return bounded._replace(value=value)


def with_bound_of(before: ClippedSum, total: ClippedSum) -> ClippedSum:
    """Return ``total``, the sum over the samples of ``before`` and of others, with a bound for all of them.

    Guarantees:
      - the sensitivity is the larger one of the two: a sample is in ``before`` or among the others, never in both;
      - nobody vouches for the sum if nobody does for one of the two;
      - the origin names the numbers of both, so that sums with other bounds share no noise.
    """
    if not before.value:
        return total
    sensitivity = torch.maximum(before.sensitivity, total.sensitivity)
    return total._replace(sensitivity=sensitivity, bound=_origin_of_both(before.bound, total.bound))


def check_leaves(name: str, before: ClippedSum, leaves: Collection[Path]) -> None:
    """Refuse a sum of other leaves, for the function of this name; the sum of no samples has none."""
    if before.value and (odd := sorted(set(before.value) ^ set(leaves))):
        raise FdpError(f"{name}: expected two sums of the same leaves, got {odd} in one of the two only")


def _origin_of_both(one: Bound | None, other: Bound | None) -> Bound | None:
    if one is None or other is None or one == other:
        return None if one is None else other
    parts = [*one.by.split(" + "), *other.by.split(" + ")]
    return Bound(" + ".join(sorted(set(parts))))


def add_onto(before: Flat, leaves: dict[Path, Any], dtype: torch.dtype, device: torch.device | None = None) -> Flat:
    """Return ``leaves`` in ``dtype`` on ``device``, each added to that of ``before``, in its place, if it has one.

    ``device`` is None, for where the leaves are, or the CPU: there the sums have arrived after
    ``offload.wait_for_copies``. Uses up ``leaves``: each is freed when it is added.

    Guarantees:
      - every element is added in the wider dtype of the two, float64 for lazy sums, and rounded once.
    """
    return {path: _add_leaf(before.get(path), take(leaves, path), dtype, device) for path in list(leaves)}


def take(values: dict[Path, Any], path: Path) -> Any:
    """Remove and return ``values[path]``, so that its memory can be freed; inside a compiled graph, only read it."""
    return values[path] if torch.compiler.is_compiling() else values.pop(path)


def _evaluate_leaf(leaf: Tensor | LazySum) -> Tensor:
    return leaf.evaluate() if isinstance(leaf, LazySum) else leaf


def _add_leaf(before: Tensor | None, leaf: Tensor | LazySum, dtype: torch.dtype, device: torch.device | None) -> Tensor:
    if device is not None:
        leaf = _evaluate_leaf(leaf)
        return to_cpu(leaf.to(dtype).contiguous(), wait=False) if before is None else add_on_device_(before, leaf)
    if before is None:
        return leaf.evaluate(dtype=dtype) if isinstance(leaf, LazySum) else leaf.to(dtype).contiguous()
    if not isinstance(leaf, LazySum):
        return before.add_(leaf)
    add_weighted_sum_(before.view(-1), leaf.rows.reshape(len(leaf.factors), -1), leaf.factors)
    return before


def _add_leaves(leaf: Tensor | LazySum, more: Tensor | LazySum) -> Tensor:
    leaf = _evaluate_leaf(leaf)
    return more.evaluate(leaf) if isinstance(more, LazySum) else leaf + more
