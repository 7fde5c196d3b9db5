"""Float32 matrix products in TF32: inputs rounded to eleven significant bits, by the library.

    out = round(a) round(b)        rounded to TF32 on a GPU, multiplied exactly, added up in float32

The product is fast only if rows begin on 16 bytes; ``pad_to_alignment`` sees to that. On a CPU, and for other dtypes,
it is the plain product. The call restores torch's precision setting, and if the user has chosen a precision for matrix
products, by any of torch's settings, that choice is kept.

    >>> y = rounded_product(x_MK, m_KN)
    >>> y = rounded_product(pad_to_alignment(x_MK, rows=1), pad_to_alignment(m_KN))[:, :N]     # from aligned rows
"""

from __future__ import annotations

import torch
from torch import Tensor

from fdp_kernels.op import define

FLOATS_PER_16_BYTES = 4


def rounded_product_reference(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """Return the plain product; nothing is rounded."""
    return a_MK @ b_KN


def pad_to_alignment(x: Tensor, *, rows: int = FLOATS_PER_16_BYTES) -> Tensor:
    """Pad with zeros on the right to 16 bytes, and below to a multiple of ``rows``; return a contiguous matrix."""
    below, right = -x.shape[0] % rows, -x.shape[1] % FLOATS_PER_16_BYTES
    return torch.nn.functional.pad(x, (0, right, 0, below)) if below or right else x.contiguous()


def _library_product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    setting = torch.backends.cuda.matmul
    if setting.fp32_precision != "none":  # chosen by the user, by this setting or by an older one
        return a_MK @ b_KN
    setting.allow_tf32 = True
    try:
        return a_MK @ b_KN
    finally:
        setting.allow_tf32 = False
        setting.fp32_precision = "none"  # the line before sets "ieee"


rounded_product = define(
    "rounded_product",
    "Tensor a, Tensor b -> Tensor",
    reference=rounded_product_reference,
    cuda=_library_product,
    fake=lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
)
