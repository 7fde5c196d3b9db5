"""Attention, and the kernels that compute it.

softmax(q k^T / sqrt(features)) v

>>> y = attention(q, k, v)                           # causal; as ``fdp.ops.attention`` too
>>> with fast_attention(device, repeatable=True):    # a second backward gives bit for bit the same gradients
...     loss.backward()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fdp.cpu.attention import causal_attention
from fdp.equal_rounding import check_repeatable
from fdp.types import NotRepeatable


def attention(
    q: Float[Tensor, "batch heads tokens features"],
    k: Float[Tensor, "batch key_heads tokens features"],
    v: Float[Tensor, "batch key_heads tokens features"],
    *,
    causal: bool = True,
    segments: Int[Tensor, "batch tokens"] | None = None,
) -> Float[Tensor, "batch heads tokens features"]:
    """``softmax(q k^T / sqrt(features)) v``; there may be fewer key heads than query heads (grouped queries).

    With ``segments``, the number of each token's document, a token attends only to tokens of its own document.
    """
    if k.shape[1] != q.shape[1]:
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    if segments is None:
        return causal_attention(q, k, v) if causal else F.scaled_dot_product_attention(q, k, v)
    same_document = segments[:, None, :, None] == segments[:, None, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=same_document.tril() if causal else same_document)


_KERNELS = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
}


def _enabled_kernels(*kernels: SDPBackend) -> list[SDPBackend]:
    """Return the kernels that are enabled in torch.backends, and plain matrix products as the last resort."""
    return [kernel for kernel in kernels if _KERNELS[kernel]()] + [SDPBackend.MATH]


@contextmanager
def fast_attention(device: torch.device, *, repeatable: bool) -> Iterator[None]:
    """Use the fastest attention kernels on a GPU; if ``repeatable``, only deterministic algorithms.

    Backward kernels of attention add in any order: on an H200, 9 to 100 of 100 repetitions differ, from 512 tokens on.
    If a second backward did not give bit for bit the gradients of the first, the sum would contain gradients that were
    never measured. So torch's deterministic algorithms are switched on; an operation without one raises
    :class:`NotRepeatable`. Nothing changes while a graph is traced.
    """
    if device.type != "cuda" or torch.compiler.is_compiling():
        yield
        return
    if not repeatable:
        with sdpa_kernel(_enabled_kernels(*_KERNELS), set_priority=True):
            yield
        return
    check_repeatable()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory  # pyright: ignore
    try:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = filled and before[0]  # pyright: ignore
        with sdpa_kernel(
            _enabled_kernels(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION), set_priority=True
        ):
            yield
    except RuntimeError as error:
        if "does not have a deterministic" not in str(error):
            raise
        raise NotRepeatable(
            "repeatable gradients: expected operations with a deterministic algorithm, got one that has none: leave "
            f"out --repeatable, or choose a method that goes back once (ghost_bk, flash_bk). torch says: {error}"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled  # pyright: ignore
