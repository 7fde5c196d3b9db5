"""Which function of torch is which operation: the table by which a foreign module's uses of parameters are known.

Names are looked up wherever torch has them (``torch.add``, ``Tensor.add``, ``Tensor.__add__``). What is in no list is
refused.

    >>> KINDS[torch.add]                          # Kind.POINTWISE
    >>> HANDLERS[F.linear]                        # fdp.foreign.uses.products.linear
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fdp.foreign.uses import attention, dropout, norm_layers, products, rarer_products

READS = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "is_cuda",
    "is_cpu",
    "is_leaf",
    "layout",
    "is_sparse",
    "is_quantized",
    "is_meta",
    "is_nested",
    "itemsize",
    "nbytes",
    "grad",
    "grad_fn",
    "names",
    "is_mps",
    "is_xpu",
    "is_mkldnn",
)
"""Properties that say nothing of the values."""


def _found(names: str) -> frozenset[Callable[..., Any]]:
    """Every function of these names in torch, as a method, and in ``torch.nn.functional``."""
    places = (torch, torch.Tensor, F, torch.special, torch.linalg)
    return frozenset(getattr(place, name) for name in names.split() for place in places if hasattr(place, name))


class Kind(Enum):
    """What is done with a function that gets a parameter, or what was made of one."""

    ASK = "says nothing of the values"
    MAKE = "what comes of it holds no parameter, to a derivative"
    CAST = "the same parameter, in another dtype"
    TURN = "the transpose of a matrix"
    EXPAND = "spread over samples, or not"
    POINTWISE = "element by element, by broadcasting"
    IN_PLACE = "the same, written into samples"
    ALONE = "a function of parameters and constants"
    DRAW = "dropout"
    RANDOM = "refused, whatever it gets"
    RECURRENT = "by materialisation only"
    STATISTICS = "refused if those of the batch"
    LOOKUP = "rows of a table, which it must not write"


IN_PLACE = {
    getattr(torch.Tensor, inplace): getattr(torch, name)
    for name, inplaces in (
        ("add", "add_ __iadd__"),
        ("sub", "sub_ __isub__"),
        ("mul", "mul_ __imul__"),
        ("div", "div_ __itruediv__ __idiv__"),
    )
    for inplace in inplaces.split()
    if hasattr(torch.Tensor, inplace)
}
_INTO = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__", "__ipow__")
_NAMES = {
    Kind.ALONE: "view reshape unsqueeze squeeze flatten unflatten movedim moveaxis chunk split unbind narrow select "
    "cat concat stack flip roll tile repeat_interleave sum mean norm var std amax amin softmax "
    "log_softmax cumsum normalize tril triu outer interpolate view_as reshape_as diag diag_embed vector_norm prod "
    "diff kron logsumexp cumprod gather take_along_dim dot vdot matrix_exp inverse inv solve",
    Kind.ASK: "size dim numel nelement stride is_floating_point is_complex is_contiguous element_size ndimension "
    "storage_offset get_device __len__ is_tensor is_same_size data_ptr __repr__ __format__ is_signed result_type",
    Kind.MAKE: "new_zeros new_ones new_empty new_full zeros_like ones_like empty_like full_like detach",
    Kind.CAST: "to float double half bfloat16 type type_as contiguous clone",
    Kind.TURN: "t transpose swapaxes swapdims permute",
    Kind.EXPAND: "expand broadcast_to expand_as repeat",
    Kind.POINTWISE: "add sub subtract mul multiply div divide true_divide pow maximum minimum rsub atan2 hypot xlogy "
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__ __rpow__ exp "
    "exp2 expm1 log log2 log1p sqrt rsqrt square abs neg negative __neg__ reciprocal sigmoid tanh relu softplus silu "
    "gelu elu leaky_relu sin cos tan erf clamp clamp_min clamp_max clip sign addcmul addcdiv lerp where hardtanh "
    "logsigmoid logit polar",
    Kind.RANDOM: "rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ normal normal_ "
    "uniform_ random_ exponential_ geometric_ cauchy_ log_normal_ multinomial poisson rrelu gumbel_softmax "
    "alpha_dropout feature_alpha_dropout feature_dropout fractional_max_pool2d fractional_max_pool3d binomial rrelu_ "
    "dropout_ native_dropout alpha_dropout_ feature_dropout_ feature_alpha_dropout_ _standard_gamma _sample_dirichlet",
    Kind.RECURRENT: "lstm gru rnn_tanh rnn_relu",
    Kind.STATISTICS: "batch_norm",
    Kind.LOOKUP: "embedding embedding_bag",
}
WRITES: dict[Callable[..., Any], bool] = {
    getattr(place, name): True
    for place in (torch.Tensor, torch, F)
    for name in dir(place)
    if name == "__setitem__" or name in _INTO or (name.endswith("_") and not name.endswith("__"))
    if callable(getattr(place, name))
}
"""Functions that write into a tensor, their first argument."""
SWITCHED = ("alpha_dropout", "feature_alpha_dropout", "feature_dropout", "dropout", "native_dropout", "rrelu")
"""Functions that draw only if an argument of theirs says that it is training."""
DRAWS = {
    F.dropout: (1, "p", 2, "training"),
    torch.dropout: (1, "p", 2, "train"),
    F.dropout1d: (1, "p", 2, "training"),
    F.dropout2d: (1, "p", 2, "training"),
    F.dropout3d: (1, "p", 2, "training"),
    F.scaled_dot_product_attention: (4, "dropout_p", None, None),
    F.multi_head_attention_forward: (10, "dropout_p", 13, "training"),
}
"""Functions that draw: where their probability is, and whether they are to draw at all."""
KINDS: dict[Callable[..., Any], Kind] = {
    **{func: kind for kind, names in _NAMES.items() for func in _found(names)},
    **dict.fromkeys(IN_PLACE, Kind.IN_PLACE),
    **dict.fromkeys(DRAWS, Kind.DRAW),
}


def _rdiv(x: Tensor, other: Any) -> Tensor:
    return torch.div(other, x) if isinstance(other, Tensor) else x.reciprocal() * other


def _rpow(x: Tensor, other: Any) -> Tensor:
    return torch.pow(other, x)


def _rmatmul(x: Tensor, other: Tensor) -> Tensor:
    return torch.matmul(other, x)


METHODS: tuple[tuple[Callable[..., Any], Callable[..., Any], Kind | None], ...] = (
    (torch.Tensor.__rsub__, torch.rsub, Kind.POINTWISE),
    (torch.Tensor.__rdiv__, _rdiv, Kind.POINTWISE),  # pyright: ignore
    (torch.Tensor.pow, torch.pow, Kind.POINTWISE),
    (torch.Tensor.__pow__, torch.pow, Kind.POINTWISE),
    (torch.Tensor.__rpow__, _rpow, Kind.POINTWISE),
    (torch.Tensor.norm, torch.norm, Kind.ALONE),
    (torch.Tensor.__rmatmul__, _rmatmul, None),
    (torch.Tensor.unflatten, torch.unflatten, Kind.ALONE),
)
"""Methods that torch has in Python, which torch.compile finds in no dictionary, with functions that do the same."""
DETACHES = (torch.detach, torch.Tensor.detach)
HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: products.linear,
    torch.addmm: products.addmm,
    torch.Tensor.addmm: products.addmm,
    torch.mm: products.matmul,
    torch.Tensor.mm: products.matmul,
    torch.bmm: products.matmul,
    torch.Tensor.bmm: products.matmul,
    torch.matmul: products.matmul,
    torch.Tensor.matmul: products.matmul,
    torch.Tensor.__matmul__: products.matmul,
    _rmatmul: products.reversed_matmul,
    torch.mv: products.matmul,
    torch.Tensor.mv: products.matmul,
    torch.inner: products.inner,
    torch.Tensor.inner: products.inner,
    torch.einsum: products.einsum,
    F.embedding: products.embedding,
    torch.Tensor.__getitem__: products.getitem,
    torch.index_select: products.index_select,
    torch.Tensor.index_select: products.index_select,
    torch.masked_fill: products.masked_fill,
    torch.Tensor.masked_fill: products.masked_fill,
    F.conv1d: products.conv(1),
    F.conv2d: products.conv(2),
    F.conv3d: products.conv(3),
    F.conv_transpose1d: rarer_products.conv_transpose(1),
    F.conv_transpose2d: rarer_products.conv_transpose(2),
    F.conv_transpose3d: rarer_products.conv_transpose(3),
    F.bilinear: rarer_products.bilinear,
    F.embedding_bag: rarer_products.embedding_bag,
    F.pad: rarer_products.pad,
    torch.baddbmm: rarer_products.baddbmm,
    torch.Tensor.baddbmm: rarer_products.baddbmm,
    torch.lstm_cell: rarer_products.lstm_cell,
    torch.gru_cell: rarer_products.gru_cell,
    torch.rnn_tanh_cell: rarer_products.rnn_cell(torch.tanh),
    torch.rnn_relu_cell: rarer_products.rnn_cell(torch.relu),
    F.layer_norm: norm_layers.layer_norm,
    torch.layer_norm: norm_layers.layer_norm,
    F.rms_norm: norm_layers.rms_norm,
    torch.rms_norm: norm_layers.rms_norm,
    F.group_norm: norm_layers.group_norm,
    torch.group_norm: norm_layers.group_norm,
    F.instance_norm: norm_layers.instance_norm,
    F.batch_norm: norm_layers.batch_norm,
    torch.prelu: norm_layers.prelu,
    torch._weight_norm: norm_layers.weight_norm,
    torch.Tensor.prelu: norm_layers.prelu,
    F.scaled_dot_product_attention: attention.scaled_dot_product,
    F.multi_head_attention_forward: attention.multi_head,
    F.dropout: dropout.dropout,
    torch.dropout: dropout.dropout,
    F.dropout1d: dropout.dropout_maps,
    F.dropout2d: dropout.dropout_maps,
    F.dropout3d: dropout.dropout_maps,
}

ATEN: dict[str, Callable[..., Any]] = {
    "linear.default": products.linear,
    "addmm.default": products.addmm,
    "mm.default": products.matmul,
    "bmm.default": products.matmul,
    "matmul.default": products.matmul,
    "baddbmm.default": rarer_products.baddbmm,
    "embedding.default": rarer_products.aten_embedding,
    "layer_norm.default": norm_layers.layer_norm,
    "group_norm.default": norm_layers.group_norm,
}
"""Operators of ``torch.ops.aten`` that have a parameter and mean what functions of torch do."""
for _name, _handler in ATEN.items():
    _packet = getattr(torch.ops.aten, _name.partition(".")[0])
    HANDLERS |= {_packet: _handler, getattr(_packet, _name.partition(".")[2]): _handler}
KINDS |= {
    func: Kind.POINTWISE
    for name in ("add", "sub", "mul", "div")
    for func in (getattr(torch.ops.aten, name), getattr(torch.ops.aten, name).Tensor)
}


def draws(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call drops anything out."""
    at, name, at_training, training = DRAWS[func]
    p = kwargs.get(name, args[at] if len(args) > at else 0.5 if at == 1 else 0.0)
    if at_training is None:
        return p > 0.0
    on = kwargs.get(training, args[at_training] if len(args) > at_training else True)
    return bool(on) and p > 0.0
