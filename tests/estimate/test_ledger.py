"""The ledger against sizes worked out by hand, and the memory that kernels hold in passing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fdp import keys
from fdp.estimate.ledger import DEVICE, HOST, Ledger, MemoryKind, Phase, Transfer, fused_attention
from fdp.gradients.vjp import vjp

KIB = 1024


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def held(fn, *, host: bool = False) -> int:
    """The peak of ``fn(ledger)``."""
    ledger = Ledger({})
    with ledger, fused_attention():
        ledger.begin(Phase.PASS)
        fn(ledger)
    return ledger.peaks(host=host)[Phase.PASS].total


def test_the_peak_counts_storages_alive_at_one_time():
    def chain(_):
        x = empty(KIB)
        for _ in range(10):
            x = x + 1

    assert held(chain) == 2 * 4 * KIB


def test_views_and_in_place_writes_allocate_nothing():
    def reuse(_):
        x = empty(4, KIB)
        x.t().unsqueeze(0)[:, 1:].add_(1)
        x.mul_(2)

    assert held(reuse) == 16 * KIB


def test_storages_are_rounded_up_to_512_bytes():
    assert held(lambda _: [empty(1), empty(129)]) == 512 + 1024


def test_tensors_saved_by_autograd_are_held_until_the_backward():
    def forward_and_back(_):
        out, pull, _ = vjp(lambda x: (x.exp().exp(), ()), empty(KIB))
        pull(out)

    def forward(_):
        empty(KIB).exp().exp()

    assert held(forward) == 2 * 4 * KIB
    assert held(forward_and_back) > held(forward)


def test_a_label_given_late_holds_from_the_start():
    ledger = Ledger({})
    with ledger:
        ledger.begin(Phase.PASS)
        kept, passing = empty(KIB) + 1, empty(2 * KIB) + 1
        del passing
        ledger.label([kept], MemoryKind.PARAMETERS)
        since = ledger.begin(Phase.SUM)
        later = kept * 2
        ledger.relabel(MemoryKind.KEPT, since=since)
        del later
    peaks = ledger.peaks(host=False)
    assert peaks[Phase.PASS].by_kind[MemoryKind.PARAMETERS] == 4 * KIB
    assert peaks[Phase.PASS].by_kind[MemoryKind.KEPT] == 0
    assert peaks[Phase.SUM].by_kind[MemoryKind.KEPT] == 4 * KIB
    assert all(peak.total == sum(peak.by_kind.values()) for peak in peaks.values())


def test_a_copy_to_the_host_is_held_there():
    def there_and_back(_):
        x = empty(KIB)
        y = x.to(HOST)
        (y * 2).to(torch.bfloat16).to(DEVICE)

    assert held(there_and_back) == (4 + 2) * KIB
    assert held(there_and_back, host=True) == 3 * 4 * KIB - 2 * KIB


@pytest.mark.parametrize(("dtype", "wide", "copied"), [
    (torch.bfloat16, torch.float64, 8),
    (torch.float32, torch.float64, 8),
    (torch.bfloat16, torch.float32, 0),
    (torch.float64, torch.float64, 0),
])  # fmt: skip
def test_a_reduction_in_another_dtype_copies_its_input(dtype, wide, copied):
    def norms(_):
        torch.linalg.vector_norm(empty(8, KIB, dtype=dtype), dim=1, dtype=wide)

    assert held(norms) == 8 * KIB * dtype.itemsize + max(copied * 8 * KIB, 512)


def test_noise_needs_no_workspace_and_truncated_draws_do():
    key = keys.key(0)
    on_device = held(lambda _: keys.normal(empty(8, dtype=torch.int64), (64, KIB)))
    truncated = held(lambda _: keys.truncated_normal(empty(8, dtype=torch.int64), (64, KIB)))
    on_host = held(lambda _: keys.normal(empty(8, dtype=torch.int64).to(HOST), (64, KIB)), host=True)
    assert on_device == 4 * 64 * KIB + 512
    assert truncated == 32 * 64 * KIB + 512
    assert on_host == 4 * 64 * KIB + 512
    assert keys.normal(key, (2, 3)).shape == (2, 3)  # and outside a ledger nothing has changed


def test_attention_holds_no_score_matrix_unless_flash_is_off():
    def attend(_):
        q = empty(1, 2, KIB, 64, dtype=torch.bfloat16)
        out, pull, _ = vjp(lambda q: (F.scaled_dot_product_attention(q, q, q, is_causal=True), ()), q)
        pull(out)

    def by_matrix(ledger):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            attend(ledger)

    assert held(attend) < 2 * KIB * KIB * 2 < held(by_matrix)


def test_attention_with_a_mask_or_grouped_heads_holds_no_score_matrix_either():
    def attend(_):
        q, k = empty(1, 4, KIB, 64, dtype=torch.bfloat16), empty(1, 2, KIB, 64, dtype=torch.bfloat16)
        mask = empty(1, 1, KIB, KIB, dtype=torch.bool)
        options = {"attn_mask": mask, "dropout_p": 0.0, "scale": 0.1, "enable_gqa": True}
        out, pull, _ = vjp(lambda q: (F.scaled_dot_product_attention(q, k, k, **options), ()), q)
        pull(out)

    assert held(attend) < 4 * KIB * KIB * 2


def test_flops_are_counted_by_dtype():
    ledger = Ledger({})
    with ledger:
        torch.mm(empty(3, 5), empty(5, 7))
        torch.bmm(empty(2, 3, 5, dtype=torch.float64), empty(2, 5, 7, dtype=torch.float64))
    assert ledger.flops == {torch.float32: 2 * 3 * 5 * 7, torch.float64: 2 * 2 * 3 * 5 * 7}


def test_a_ring_sends_an_all_reduce_twice():
    gather = Transfer("all-gather", "shard", 4, torch.bfloat16, calls=3, elements=400)
    reduce = gather._replace(collective="all-reduce")
    assert (gather.bytes, gather.passes, gather.sent) == (800, 1, 600)
    assert (reduce.bytes, reduce.passes, reduce.sent) == (800, 2, 1200)
