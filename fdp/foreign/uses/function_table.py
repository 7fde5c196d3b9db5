"""Tables of torch functions: what each does with a parameter, and which handler records the use.

Names are looked up wherever torch has them (``torch.add``, ``Tensor.add``, ``Tensor.__add__``). A function in no table
is refused.

    >>> FUNCTION_KINDS[torch.add]                 # FunctionKind.POINTWISE
    >>> HANDLERS[F.linear]                        # fdp.foreign.uses.products.linear
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fdp.foreign.uses import attention, convolutions, dropout, lookups, norm_layers, products, rarer_products

METADATA_PROPERTIES = (
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
"""Properties that do not depend on the values."""


def _named(names: str) -> frozenset[Callable[..., Any]]:
    """Return every function of these names in torch, as a method, and in ``torch.nn.functional``."""
    places = (torch, torch.Tensor, F, torch.special, torch.linalg)
    return frozenset(getattr(place, name) for name in names.split() for place in places if hasattr(place, name))


class FunctionKind(Enum):
    """A class of torch functions that are treated alike if they get a parameter, or a tensor that depends on one."""

    METADATA = "does not depend on the values"
    DETACH = "its result has no derivative"
    CAST = "the same parameter in another dtype"
    TRANSPOSE = "the transpose of a matrix"
    EXPAND = "expands over samples, or over another dim"
    POINTWISE = "elementwise, with broadcasting"
    IN_PLACE = "elementwise, written into samples"
    PARAMETERS_ONLY = "a function of parameters and constants"
    DROPOUT = "dropout"
    RANDOM = "draws random numbers: refused"
    RECURRENT = "recurrent: materialised"
    BATCH_NORM = "refused if it uses statistics of the batch"
    EMBEDDING = "rows of a table, which it must not write"


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
_IN_PLACE_OPERATORS = (
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__idiv__",
    "__ifloordiv__",
    "__imod__",
    "__ipow__",
)
_NAMES_BY_KIND = {
    FunctionKind.PARAMETERS_ONLY: (
        "view reshape unsqueeze squeeze flatten unflatten movedim moveaxis chunk split unbind narrow select cat concat "
        "stack flip roll tile repeat_interleave sum mean norm var std amax amin softmax log_softmax cumsum normalize "
        "tril triu outer interpolate view_as reshape_as diag diag_embed vector_norm prod diff kron logsumexp cumprod "
        "gather take_along_dim dot vdot matrix_exp inverse inv solve"
    ),
    FunctionKind.METADATA: (
        "size dim numel nelement stride is_floating_point is_complex is_contiguous element_size ndimension "
        "storage_offset get_device __len__ is_tensor is_same_size data_ptr __repr__ __format__ is_signed result_type"
    ),
    FunctionKind.DETACH: "new_zeros new_ones new_empty new_full zeros_like ones_like empty_like full_like detach",
    FunctionKind.CAST: "to float double half bfloat16 type type_as contiguous clone",
    FunctionKind.TRANSPOSE: "t transpose swapaxes swapdims permute",
    FunctionKind.EXPAND: "expand broadcast_to expand_as repeat",
    FunctionKind.POINTWISE: (
        "add sub subtract mul multiply div divide true_divide pow maximum minimum rsub atan2 hypot xlogy __add__ "
        "__radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __pow__ __rpow__ exp "
        "exp2 expm1 log log2 log1p sqrt rsqrt square abs neg negative __neg__ reciprocal sigmoid tanh relu softplus "
        "silu gelu elu leaky_relu sin cos tan erf clamp clamp_min clamp_max clip sign addcmul addcdiv lerp where "
        "hardtanh logsigmoid logit polar"
    ),
    FunctionKind.RANDOM: (
        "rand randn randint randperm rand_like randn_like randint_like bernoulli bernoulli_ normal normal_ uniform_ "
        "random_ exponential_ geometric_ cauchy_ log_normal_ multinomial poisson rrelu gumbel_softmax alpha_dropout "
        "feature_alpha_dropout feature_dropout fractional_max_pool2d fractional_max_pool3d binomial rrelu_ dropout_ "
        "native_dropout alpha_dropout_ feature_dropout_ feature_alpha_dropout_ _standard_gamma _sample_dirichlet"
    ),
    FunctionKind.RECURRENT: "lstm gru rnn_tanh rnn_relu",
    FunctionKind.BATCH_NORM: "batch_norm",
    FunctionKind.EMBEDDING: "embedding embedding_bag",
}
WRITE_FUNCTIONS: dict[Callable[..., Any], bool] = {
    getattr(place, name): True
    for place in (torch.Tensor, torch, F)
    for name in dir(place)
    if name == "__setitem__" or name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
    if callable(getattr(place, name))
}
"""Functions that write into their first argument."""
RANDOM_IF_TRAINING = ("alpha_dropout", "feature_alpha_dropout", "feature_dropout", "dropout", "native_dropout", "rrelu")
"""Functions that draw random numbers only if one of their arguments says that they are training."""
DROPOUT_ARGUMENTS = {
    F.dropout: (1, "p", 2, "training"),
    torch.dropout: (1, "p", 2, "train"),
    F.dropout1d: (1, "p", 2, "training"),
    F.dropout2d: (1, "p", 2, "training"),
    F.dropout3d: (1, "p", 2, "training"),
    F.scaled_dot_product_attention: (4, "dropout_p", None, None),
    F.multi_head_attention_forward: (10, "dropout_p", 13, "training"),
}
"""Dropout functions: index and name of the probability, and of the flag that switches dropout on."""
FUNCTION_KINDS: dict[Callable[..., Any], FunctionKind] = {
    **{func: kind for kind, names in _NAMES_BY_KIND.items() for func in _named(names)},
    **dict.fromkeys(IN_PLACE, FunctionKind.IN_PLACE),
    **dict.fromkeys(DROPOUT_ARGUMENTS, FunctionKind.DROPOUT),
}


def _rdiv(x: Tensor, other: Any) -> Tensor:
    return torch.div(other, x) if isinstance(other, Tensor) else x.reciprocal() * other


def _rpow(x: Tensor, other: Any) -> Tensor:
    return torch.pow(other, x)


def _rmatmul(x: Tensor, other: Tensor) -> Tensor:
    return torch.matmul(other, x)


PYTHON_METHODS: tuple[tuple[Callable[..., Any], Callable[..., Any], FunctionKind | None], ...] = (
    (torch.Tensor.__rsub__, torch.rsub, FunctionKind.POINTWISE),
    (torch.Tensor.__rdiv__, _rdiv, FunctionKind.POINTWISE),  # pyright: ignore
    (torch.Tensor.pow, torch.pow, FunctionKind.POINTWISE),
    (torch.Tensor.__pow__, torch.pow, FunctionKind.POINTWISE),
    (torch.Tensor.__rpow__, _rpow, FunctionKind.POINTWISE),
    (torch.Tensor.norm, torch.norm, FunctionKind.PARAMETERS_ONLY),
    (torch.Tensor.__rmatmul__, _rmatmul, None),
    (torch.Tensor.unflatten, torch.unflatten, FunctionKind.PARAMETERS_ONLY),
)
"""Methods that torch defines in Python, which torch.compile finds in no dictionary, and equal functions."""
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
    torch.inner: rarer_products.inner,
    torch.Tensor.inner: rarer_products.inner,
    torch.einsum: products.einsum,
    F.embedding: lookups.embedding,
    torch.Tensor.__getitem__: lookups.getitem,
    torch.index_select: lookups.index_select,
    torch.Tensor.index_select: lookups.index_select,
    torch.masked_fill: rarer_products.masked_fill,
    torch.Tensor.masked_fill: rarer_products.masked_fill,
    F.conv1d: convolutions.conv(1),
    F.conv2d: convolutions.conv(2),
    F.conv3d: convolutions.conv(3),
    F.conv_transpose1d: convolutions.conv_transpose(1),
    F.conv_transpose2d: convolutions.conv_transpose(2),
    F.conv_transpose3d: convolutions.conv_transpose(3),
    F.bilinear: rarer_products.bilinear,
    F.embedding_bag: lookups.embedding_bag,
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
    F.dropout1d: dropout.dropout_channels,
    F.dropout2d: dropout.dropout_channels,
    F.dropout3d: dropout.dropout_channels,
}

ATEN: dict[str, Callable[..., Any]] = {
    "linear.default": products.linear,
    "addmm.default": products.addmm,
    "mm.default": products.matmul,
    "bmm.default": products.matmul,
    "matmul.default": products.matmul,
    "baddbmm.default": rarer_products.baddbmm,
    "embedding.default": lookups.aten_embedding,
    "layer_norm.default": norm_layers.layer_norm,
    "group_norm.default": norm_layers.group_norm,
}
"""Operators of ``torch.ops.aten`` that take a parameter and equal a torch function."""
for _name, _handler in ATEN.items():
    _packet = getattr(torch.ops.aten, _name.partition(".")[0])
    HANDLERS |= {_packet: _handler, getattr(_packet, _name.partition(".")[2]): _handler}
FUNCTION_KINDS |= {
    func: FunctionKind.POINTWISE
    for name in ("add", "sub", "mul", "div")
    for func in (getattr(torch.ops.aten, name), getattr(torch.ops.aten, name).Tensor)
}


def drops_out(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if this call drops anything out."""
    at, name, at_training, training = DROPOUT_ARGUMENTS[func]
    p = kwargs.get(name, args[at] if len(args) > at else 0.5 if at == 1 else 0.0)
    if at_training is None:
        return p > 0.0
    on = kwargs.get(training, args[at_training] if len(args) > at_training else True)
    return bool(on) and p > 0.0
