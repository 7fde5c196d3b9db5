"""Products of samples with parameters: linear layers either way up, experts, einsum, embeddings, convolutions.

    F.linear(x, W, b)    x W^T + b        addmm, mm, matmul, @    x W + b        bmm    x_e W_e for every expert e
    einsum(s, x, W)      any of them      embedding, W[ids]       W_id           conv   a linear layer on patches

Each is the operation of ``fdp.ops`` with its rule. A weight that is made of parameters (normalised, masked, a part of
one) meets every sample as its own copy.

    >>> linear(run, x, weight, bias)         # weight, bias: Tracked or plain
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fdp import ops
from fdp.foreign.uses.einsum import EINSUM, parse
from fdp.foreign.uses.pointwise import alone, pointwise
from fdp.foreign.uses.routing import ROUTED, pack
from fdp.foreign.uses.tracking import ALWAYS_FIRST, FLATTENED, SAMPLES, Run, Selected, Tracked
from fdp.gradients.rules import Pair, Rule, rows
from fdp.types import FdpError

Operand = Tensor | Tracked


def _rows_record(x: Tensor, g: Tensor, shape: Sequence[int], *, start: int, stop: int) -> Pair:
    return Pair(F.pad(rows(g), (start, shape[0] - stop)), rows(x), tuple(shape))


LINEAR_ROWS = Rule("linear rows", lambda x, weight, *, start, stop: F.linear(x, weight[start:stop]), _rows_record)
"""``x W[start:stop]^T``: a packed projection, one part of which is used."""


def linear(run: Run, input: Operand, weight: Operand, bias: Operand | None = None) -> Tensor:
    """``F.linear``."""
    return product(run, input, weight, bias, turned=False)


def addmm(run: Run, input: Operand, mat1: Operand, mat2: Operand, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """``beta input + alpha mat1 mat2``."""
    input, mat1 = scaled(run, input, beta), scaled(run, mat1, alpha)
    if len(input.shape) == 1:
        return product(run, mat1, mat2, input, turned=True)
    y = product(run, mat1, mat2, None, turned=True)
    if isinstance(run.known(y), Tracked) or isinstance(input, Tracked):
        return pointwise(run, torch.add, (run.known(y), input), {})
    return y + input


def scaled(run: Run, x: Operand, factor: float) -> Operand:
    """``factor x``."""
    if factor == 1:
        return x
    if isinstance(x, Tracked):
        return run.known(alone(run, torch.mul, (x, factor), {}))
    made = x * factor
    if x in run.constants:
        run.constants[made] = True
    return made


def matmul(run: Run, a: Operand, b: Operand) -> Tensor:
    """``a @ b``, for whichever of the two is made of parameters."""
    if isinstance(a, Tracked) and (isinstance(b, Tracked) or run.constant(b)):
        return alone(run, torch.matmul, (a, b), {})
    if isinstance(b, Tracked):
        if len(b.shape) == 1:
            y = run.known(pointwise(run, torch.mul, (a, b), {}))
            return alone(run, torch.sum, (y, -1), {}) if isinstance(y, Tracked) else y.sum(-1)
        if len(b.shape) == 2 and len(a.shape) >= 2:
            return product(run, a, b, None, turned=True)
        if len(b.shape) == 3 and isinstance(a, Tensor) and len(a.shape) in (3, 4):
            return experts(run, a, b)
    elif isinstance(a, Tracked) and len(a.shape) == 2 and b.ndim >= 3 and run.layout(b, path=a.path) == (SAMPLES, 0):
        return product(run, b.transpose(-1, -2), a, None, turned=False).transpose(-1, -2)
    raise refusal("matmul", (a, b))


def reversed_matmul(run: Run, a: Operand, b: Operand) -> Tensor:
    """``b @ a``."""
    return matmul(run, b, a)


def product(run: Run, x: Operand, weight: Operand, bias: Operand | None, *, turned: bool) -> Tensor:
    """``x W^T + b`` or, if ``turned``, ``x W + b``."""
    path = path_of(weight, bias, x)
    first, back = run.samples(x, path=path)
    by_leaf, own = leaf_of(bias)
    if not isinstance(weight, Tracked):
        y = (ops.matmul if turned else ops.linear)(first, weight, by_leaf)
    elif weight.leaf is not None:
        y = (ops.matmul if turned != weight.turned else ops.linear)(first, weight.leaf, by_leaf)
    else:
        copies = weight.copies() if turned else weight.copies().transpose(1, 2)
        y = (first.reshape(first.shape[0], -1, first.shape[-1]) @ copies).reshape(*first.shape[:-1], copies.shape[-1])
        y = y if by_leaf is None else ops.add(y, by_leaf)
    y = y if own is None else y + own.copies().reshape(y.shape[0], *[1] * (y.ndim - 2), -1)
    return back(y)


def experts(run: Run, x: Tensor, weight: Tracked, added: Operand | None = None) -> Tensor:
    """``x_e W_e``: (experts, samples * tokens, inputs), or (samples, experts, tokens, inputs), by (experts, inputs,
    outputs). ``added``: what is added to every expert's result, (experts, 1, outputs)."""
    path, size = weight.path, run.batch_size
    if x.ndim == 4 and run.layout(x, path=path, dims=ALWAYS_FIRST)[0] == SAMPLES:
        first = x.expand(-1, weight.shape[0], -1, -1)
        return _with_added(run, _expert_product(first, weight), added, weight)
    if x.ndim == 4 or x.shape[1] % size:
        raise refusal("a product over experts whose tokens are not the same number for every sample", (x, weight))
    run.note(path, FLATTENED)
    parts = (size, -1) if run.batch_first else (-1, size)
    sample = 1 if run.batch_first else 2
    y = _with_added(run, _expert_product(x.unflatten(1, parts).movedim(sample, 0), weight), added, weight)
    return y.movedim(0, sample).flatten(1, 2)


def _with_added(run: Run, y: Tensor, added: Operand | None, weight: Tracked) -> Tensor:
    """A result (samples, experts, tokens, outputs) and what is the same for all tokens of an expert."""
    if added is None:
        return y
    experts, outputs = y.shape[1], y.shape[3]
    fits = len(added.shape) <= 3 and (1, 1, 1, *added.shape)[-3] in (1, experts) and (1, *added.shape)[-2:-1] == (1,)
    if not fits or (isinstance(added, Tensor) and not run.constant(added)):
        raise refusal("torch.baddbmm, adding other than one row for every expert", (added, weight))
    if isinstance(added, Tracked):
        copies = added.copies()
        return y + copies.reshape(len(copies), *[1] * (3 - len(added.shape)), *added.shape)
    return y + added.expand(experts, 1, outputs)


def einsum(run: Run, equation: Any, *operands: Any) -> Tensor:
    """``torch.einsum`` of one tensor with samples and one parameter."""
    given = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], list) else list(operands)
    if not isinstance(equation, str) or len(given) != 2:
        raise refusal("torch.einsum of other than two operands", tuple(given))
    if all([isinstance(operand, Tracked) or run.constant(operand) for operand in given]):
        return alone(run, torch.einsum, (equation, *given), {})
    swapped = isinstance(given[0], Tracked)
    x, weight = reversed(given) if swapped else given
    if not isinstance(weight, Tracked) or not isinstance(x, Tensor):
        raise refusal(f"torch.einsum({equation!r})", tuple(given))
    layout, dim = run.layout(x, path=weight.path, dims=ALWAYS_FIRST)
    letters = parse(equation, len(x.shape), len(weight.shape), swapped=swapped, flattened=layout == FLATTENED)
    if letters is None or weight.leaf is None or weight.turned:
        raise refusal(f"torch.einsum({equation!r})", tuple(given))
    y = ops.use(EINSUM, run.first(x, layout, dim), weight.leaf, x_of=letters.x, w_of=letters.w, y_of=letters.y)
    return (y.flatten(0, 1) if layout == FLATTENED else y).movedim(0, letters.place)


def embedding(
    run: Run,
    input: Operand,
    weight: Operand,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """``F.embedding``."""
    if scale_grad_by_freq:
        raise refusal("F.embedding with scale_grad_by_freq", (input, weight))
    if isinstance(input, Tracked) or not isinstance(weight, Tracked):
        raise refusal("F.embedding by ids that parameters went into", (input, weight))
    first, back = run.samples(input, path=weight.path, dims=2)
    if weight.leaf is not None and not weight.turned:
        return back(ops.embedding(first, weight.leaf, padding_idx=padding_idx))
    found = torch.func.vmap(lambda ids, table: table[ids])(first, weight.copies())
    if padding_idx is not None:  # its row is not trained
        padding = (first == padding_idx % weight.shape[0]).unsqueeze(-1)
        found = torch.where(padding, found.detach(), found)
    return back(found)


def getitem(run: Run, x: Operand, index: Any) -> Any:
    """``w[ids]`` for ids of samples, and any part of a parameter otherwise."""
    entries = index if isinstance(index, list) else [index]
    held = [e for e in entries if isinstance(e, Tracked) or (isinstance(e, Tensor) and not run.constant(e))]
    if isinstance(x, Tracked) and not held:
        return alone(run, torch.Tensor.__getitem__, (x, tuple(index) if isinstance(index, list) else index), {})
    ids = index if isinstance(index, Tensor) and not index.is_floating_point() else None
    if isinstance(x, Tracked) and _is_stack(x) and ids is not None and ids.ndim == 1 and ids.dtype != torch.bool:
        return _select(run, Selected(_unmade(x, len(ids), *x.shape[1:]), x, ids))
    if isinstance(x, Tracked) and len(x.shape) == 2 and ids is not None and ids.dtype != torch.bool:
        return embedding(run, ids, x)
    if isinstance(x, Tracked) and len(x.shape) == 1 and ids is not None and ids.dtype != torch.bool:
        return embedding(run, ids, run.known(alone(run, torch.unsqueeze, (x, 1), {}))).squeeze(-1)
    raise refusal("indexing", (x, *held))


def _is_stack(x: Tracked) -> bool:
    return len(x.shape) == 3 and x.leaf is not None and not x.turned


def _unmade(x: Tracked, *shape: int) -> Tensor:
    """Not a number, without memory: a use of it that is not seen could not pass for one."""
    return x.value.new_full((), float("nan")).expand(shape)


def _select(run: Run, made: Selected) -> Tensor:
    run.tracked[made.value] = made
    return made.value


def selected(run: Run, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """A function of matrices that ids of samples chose: their transposes, and products with one row or several each."""
    chosen = next(a for a in args if isinstance(a, Selected))
    if func in TRANSPOSES and chosen is args[0] and {dim % 3 for dim in args[1:]} == {1, 2}:
        turned = Selected(chosen.value.transpose(1, 2), chosen.weight, chosen.ids, turned=not chosen.turned)
        return _select(run, turned)
    if func in PRODUCTS and len(args) == 2 and not kwargs:
        x = args[1] if chosen is args[0] else args[0]
        if isinstance(x, Tensor) and x.ndim == 3 and len(x) == len(chosen.ids):
            first = chosen is args[0]  # W_id x, columns of x: as rows, with the matrices turned
            rows = x.transpose(1, 2) if first else x
            ids = chosen.ids.unsqueeze(1).expand(rows.shape[:2])
            y = _routed(run, pack(rows, ids), chosen, turned=chosen.turned == first)
            return y.transpose(1, 2) if first else y
    raise refusal("other than a product of three dims by matrices that ids chose", (chosen.weight, *args))


def _routed(run: Run, packed: Tensor, chosen: Selected, *, turned: bool) -> Tensor:
    first, back = run.samples(packed, path=chosen.path, dims=ALWAYS_FIRST)
    return back(ops.use(ROUTED, first, chosen.weight.leaf, turned=turned))  # pyright: ignore[reportArgumentType]


PRODUCTS = (torch.bmm, torch.Tensor.bmm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
TRANSPOSES = (torch.transpose, torch.Tensor.transpose, torch.swapaxes, torch.Tensor.swapaxes)


def index_select(run: Run, input: Operand, dim: int, index: Tensor) -> Tensor:
    """``torch.index_select``: rows of a table by ids of samples, or any part of a parameter by constants."""
    if isinstance(input, Tracked) and run.constant(index):
        return alone(run, torch.index_select, (input, dim, index), {})
    if isinstance(input, Tracked) and len(input.shape) == 2 and dim in (0, -2):
        return embedding(run, index, input)
    raise refusal("torch.index_select", (input, index))


def masked_fill(run: Run, input: Operand, mask: Operand, value: Any) -> Tensor:
    """``torch.masked_fill``, whichever of its arguments parameters went into."""
    return pointwise(run, torch.where, (mask, value, input), {})


def inner(run: Run, input: Operand, other: Operand) -> Tensor:
    """``torch.inner`` with a matrix: a linear layer."""
    if isinstance(other, Tracked) and len(other.shape) == 2 and isinstance(input, Tensor):
        return product(run, input, other, None, turned=False)
    raise refusal("torch.inner", (input, other))


def conv(dims: int) -> Callable[..., Tensor]:
    """``F.conv1d``, ``2d`` or ``3d``."""
    op = (ops.conv1d, ops.conv2d, ops.conv3d)[dims - 1]
    plain_op = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]

    def convolution(
        run: Run,
        input: Operand,
        weight: Operand,
        bias: Operand | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        path = path_of(weight, bias, input)
        if isinstance(input, Tracked) or run.layout(input, path=path, dims=ALWAYS_FIRST)[0] != SAMPLES:
            raise refusal(f"F.conv{dims}d on other than a batch of samples", (input, weight))
        x, padding = _padded(input, weight.shape[2:], padding, dilation)
        options = {"stride": _tuple(stride), "padding": _tuple(padding), "dilation": _tuple(dilation), "groups": groups}
        return convolve(x, weight, bias, op=op, plain_op=plain_op, options=options)

    return convolution


def convolve(
    x: Tensor,
    weight: Operand,
    bias: Operand | None,
    *,
    op: Callable[..., Tensor],
    plain_op: Callable[..., Tensor],
    options: Mapping[str, Any],
) -> Tensor:
    """Convolve samples by ``op``, which has a rule, where the weight is a leaf; else by a copy for every sample."""
    by_leaf, own = leaf_of(bias)
    if isinstance(weight, Tracked) and (weight.leaf is None or weight.turned):

        def of_one(x1: Tensor, w1: Tensor) -> Tensor:
            return plain_op(x1.unsqueeze(0), w1, None, **options).squeeze(0)

        y = torch.func.vmap(of_one)(x, weight.copies())
        y = y if by_leaf is None else ops.add(y.movedim(1, -1), by_leaf).movedim(-1, 1)
    else:
        y = op(x, weight.leaf if isinstance(weight, Tracked) else weight, by_leaf, **options)
    return y if own is None else y + own.copies().reshape(*own.copies().shape, *[1] * (x.ndim - 2))


def refusal(operation: str, operands: Sequence[Any]) -> FdpError:
    """A use without a rule: whose, by what, on what shapes, and the choices."""
    held = [a for a in operands if isinstance(a, (Tensor, Tracked, Selected))]
    path = next((a.path for a in held if isinstance(a, Tracked)), "a parameter")
    shapes = ", ".join(str(tuple(a.shape)) if isinstance(a, Tensor) else f"{a.path} {tuple(a.shape)}" for a in held)
    return FdpError(
        f"{path}: used by {operation} on {shapes}, which has no per-sample rule. Freeze the leaf "
        f"(requires_grad_(False)), give the operation a rule (fdp.rule), or send the leaf's block through "
        f"the materialised path, exact and slower: from_module(..., materialize=('{path}',)), on the command line "
        f"--method materialize"
    )


def _expert_product(x: Tensor, weight: Tracked) -> Tensor:
    if weight.leaf is not None and not weight.turned:
        return ops.use(ops.EXPERTS, x, weight.leaf)
    return x @ weight.copies()


def leaf_of(bias: Operand | None) -> tuple[Any, Tracked | None]:
    """A bias that ``fdp.ops`` knows (a leaf, or plain); and one that it does not."""
    if not isinstance(bias, Tracked):
        return bias, None
    return (bias.leaf, None) if bias.leaf is not None else (None, bias)


def path_of(*operands: Operand | None) -> str:
    return next(a.path for a in operands if isinstance(a, Tracked))


def _tuple(extent: Any) -> Any:
    return extent if isinstance(extent, int) else tuple(extent)


def _padded(x: Tensor, kernel: Sequence[int], padding: Any, dilation: Any) -> tuple[Tensor, Any]:
    """Padding by name as numbers; what is not the same on both sides is added to ``x`` itself."""
    if padding == "valid":
        return x, 0
    if padding != "same":
        return x, padding
    every = [dilation] * len(kernel) if isinstance(dilation, int) else list(dilation) * (len(kernel) // len(dilation))
    sides = [(step * (size - 1) // 2, step * (size - 1) - step * (size - 1) // 2) for step, size in zip(every, kernel)]
    if all(before == after for before, after in sides):
        return x, tuple(before for before, _ in sides)
    return F.pad(x, [side for pair in reversed(sides) for side in pair]), 0
