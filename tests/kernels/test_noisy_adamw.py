"""Tests of the fused noisy AdamW and momentum: the body against the reference, the reference against torch.optim."""

from __future__ import annotations

import math

import pytest
import torch
from fdp_kernels import noisy_adamw as kernel
from fdp_kernels import normal
from fdp_kernels.launch_tables import FIELDS, LaunchTables, Leaf
from fdp_kernels.noisy_adamw import Hyper
from fdp_kernels.op import INTERPRETED
from torch import Tensor

interpreted = pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter runs where there is no GPU")
HYPER = Hyper(b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.1, noise_std=0.0, eps_root=0.0)
MOMENTUM = Hyper(b1=0.8, b2=None, eps=0.0, weight_decay=0.1, noise_std=0.0, eps_root=0.0)
SCALARS = torch.tensor([0.7, 1 / 3, 1.9, 1.2, 0.01, 2.0**-21, 5], dtype=torch.float64)
DRAW = torch.Generator().manual_seed(0)


def leaf_of(
    rows: int,
    shape: tuple[int, ...],
    *,
    first: int = 0,
    decay: bool = True,
    copy: torch.dtype | None = torch.float32,
    dtype: torch.dtype = torch.float32,
    factors: torch.dtype = torch.float64,
) -> Leaf:
    return Leaf(
        torch.randn(rows, *shape, generator=DRAW).to(dtype),
        torch.rand(rows, generator=DRAW).to(factors),
        torch.randn(shape, generator=DRAW),
        0.1 * torch.randn(shape, generator=DRAW),
        torch.rand(shape, generator=DRAW),
        None if copy is None else torch.zeros(shape, dtype=copy),
        first,
        decay,
    )


def clones(leaves: list[Leaf], device: str = "cpu") -> list[Leaf]:
    return [Leaf._make(x.clone().to(device) if isinstance(x, Tensor) else x for x in leaf) for leaf in leaves]


def keys_of(leaves: list[Leaf], seed: int = 1) -> Tensor:
    return torch.randint(0, 1 << 32, (len(leaves), 8), generator=torch.Generator().manual_seed(seed))


def written_tensors(leaf: Leaf) -> list[Tensor]:
    return [tensor for tensor in (leaf.param, leaf.mean, leaf.square, leaf.copy) if tensor is not None]


def assert_same(got: list[Leaf], want: list[Leaf], *, rtol: float = 2e-6, atol: float = 2e-7) -> None:
    for one, other in zip(got, want):
        for a, b in zip(written_tensors(one), written_tensors(other)):
            half = a.dtype == torch.bfloat16
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=2.0**-7 if half else rtol, atol=atol)


def ragged() -> list[Leaf]:
    """Return leaves of every kind: aligned, starting inside a block, several rows, both factor dtypes, empty, 0-d."""
    leaves = [
        leaf_of(1, (36, 16)),
        leaf_of(1, (7,), copy=None),
        leaf_of(2, (33,), first=37, decay=False),
        leaf_of(4, (4, 16), first=160, factors=torch.float32),
        leaf_of(9, (5, 3)),
        leaf_of(1, (0, 4)),
        leaf_of(1, (), dtype=torch.float64),
    ]
    leaves[3].factors[1] = 0
    leaves[3].rows[1] = math.nan
    leaves[4].factors[8] = -0.0
    leaves[4].rows[8] = math.inf
    return leaves


# ---------------------------------------------------------------- reference


@pytest.mark.parametrize("decay", [False, True])
def test_without_noise_it_is_adamw_on_the_weighted_mean(decay):
    leaf = leaf_of(3, (6, 5), decay=decay)
    leaf = leaf._replace(mean=torch.zeros_like(leaf.mean), square=torch.zeros_like(leaf.mean))
    param = leaf.param.clone().requires_grad_()
    optimizer = torch.optim.AdamW([param], lr=0.01, weight_decay=0.1 if decay else 0.0)
    for step in range(1, 5):
        leaf.rows.copy_(torch.randn(leaf.rows.shape, generator=DRAW))
        param.grad = torch.einsum("s,sij->ij", leaf.factors.float(), leaf.rows) / 8
        optimizer.step()
        unbias = [1 / (1 - b**step) for b in (0.9, 0.999)]
        scalars = torch.tensor([0.7, 1 / 8, *unbias, 0.01, 0.0, step], dtype=torch.float64)
        kernel.update_leaves_([leaf], None, scalars, HYPER, LaunchTables())
        torch.testing.assert_close(leaf.param, param.detach(), rtol=1e-5, atol=1e-6)
        assert leaf.copy is not None
        assert torch.equal(leaf.copy, leaf.param)


def test_the_noise_is_that_of_the_key_times_the_scale():
    leaf = leaf_of(2, (5, 7), first=19)
    start, key = clones([leaf])[0], keys_of([leaf])
    hyper = HYPER._replace(b1=0.0)  # the mean is then the gradient itself
    kernel.update_leaves_([leaf], key, SCALARS, hyper, LaunchTables())
    z = normal.normal_reference(key[0], [54], [19], [35], -math.inf, math.inf, torch.float64).view(5, 7)
    total = torch.einsum("s,sij->ij", start.factors, start.rows.double())
    torch.testing.assert_close(leaf.mean.double(), (total + 0.7 * z) / 3, rtol=1e-6, atol=2.0**-22)


def reference(leaves: list[Leaf], keys: Tensor | None, scalars: Tensor, hyper: Hyper) -> None:
    kernel.noisy_adamw_reference_(leaves, keys, scalars, hyper)


def body(leaves: list[Leaf], keys: Tensor | None, scalars: Tensor, hyper: Hyper) -> None:
    kernel.launch_noisy_adamw_(leaves, keys, scalars, hyper, LaunchTables())


IMPLEMENTATIONS = [reference, pytest.param(body, marks=interpreted)]


@pytest.mark.parametrize("update", IMPLEMENTATIONS)
def test_nothing_is_rounded_before_the_noise(update):
    """2^-30 beside 1 is lost in float32; with noise of -1 it is all that is left."""
    leaf = leaf_of(2, (1,))._replace(rows=torch.tensor([[2.0**-30], [1.0]]), factors=torch.ones(2, dtype=torch.float64))
    key = keys_of([leaf])
    draw = normal.normal_reference if update is reference else normal.launch_normal
    z = float(draw(key[0], [1], [0], [1], -math.inf, math.inf, torch.float64))
    scalars = torch.tensor([-1 / z, 1, 1, 1, 0.01, 2.0**-51, 0], dtype=torch.float64)
    update([leaf], key, scalars, HYPER._replace(b1=0.0))  # the mean is then the gradient itself
    assert leaf.mean.item() == pytest.approx(2.0**-30, rel=1e-6)


@pytest.mark.parametrize("update", IMPLEMENTATIONS)
def test_the_noised_sum_is_rounded_to_the_grid_before_use(update):
    """The result is a multiple of the grid, whatever the sum; without noise nothing is rounded."""
    grid = 2.0**-8  # coarse, so that float32 shows it
    scalars = torch.tensor([1.0, 1, 1, 1, 0.01, grid, 0], dtype=torch.float64)
    leaf = leaf_of(2, (5, 9), first=3)
    plain, key = clones([leaf])[0], keys_of([leaf])
    update([leaf], key, scalars, HYPER._replace(b1=0.0))  # the mean is then the gradient itself
    assert torch.equal((leaf.mean / grid).round() * grid, leaf.mean)
    z = normal.normal_reference(key[0], [48], [3], [45], -math.inf, math.inf, torch.float64).view(5, 9)
    total = torch.einsum("s,sij->ij", plain.factors, plain.rows.double())
    assert ((leaf.mean.double() - total - z).abs() <= grid / 2 + 1e-6).all()
    update([plain], None, scalars, HYPER._replace(b1=0.0))
    torch.testing.assert_close(plain.mean.double(), total, rtol=1e-6, atol=1e-7)


def test_every_capture_has_its_own_reserved_memory():
    """Two kinds of step may both run before either is captured: neither may use up the other's buffer."""
    tables, pinned = LaunchTables(), []
    tables.reserve()
    assert tables._reserved is None  # no leaves seen yet
    tables._shape = torch.Size((3, FIELDS))
    make = torch.empty
    try:
        torch.empty = lambda *args, pin_memory=False, **options: pinned.append(pin_memory) or make(*args, **options)
        for _ in range(2):
            tables.reserve()
            tables.reserve()  # one is enough
            assert tables._reserved is not None
            tables._reserved = None  # as a capture does
    finally:
        torch.empty = make
    assert pinned == [True, True]


@pytest.mark.parametrize("update", IMPLEMENTATIONS)
def test_a_row_with_factor_zero_changes_nothing_even_if_it_is_nan(update):
    clean = leaf_of(3, (3, 11))
    clean.factors[1] = 0
    want = clones([clean])
    update(want, None, SCALARS, HYPER)
    for value in (math.nan, math.inf, -math.inf, 3e38):
        got = clones([clean])
        got[0].rows[1] = value
        update(got, None, SCALARS, HYPER)
        assert all(torch.equal(a, b) for a, b in zip(written_tensors(got[0]), written_tensors(want[0])))
        assert all(tensor.isfinite().all() for tensor in written_tensors(got[0]))


# ---------------------------------------------------------------- the body, in the interpreter


@interpreted
@pytest.mark.parametrize(
    "hyper", [HYPER, Hyper(b1=0.0, b2=0.4, eps=1e-6, weight_decay=0.0, noise_std=0.3, eps_root=0.05)]
)
def test_the_body_equals_its_reference_on_all_kinds_of_leaves(hyper):
    scalars = SCALARS.clone()
    scalars[5] = 2.0**-30  # on a coarser grid, draws that agree to seven digits may be rounded apart
    leaves = ragged()
    for keys in (keys_of(leaves), None):
        got, again, want = clones(leaves), clones(leaves), clones(leaves)
        body(got, keys, scalars, hyper)
        kernel.noisy_adamw_reference_(want, keys, scalars, hyper)
        assert_same(got, want)
        assert all(tensor.isfinite().all() for leaf in got for tensor in written_tensors(leaf))
        if keys is None:
            body(again, keys, scalars, hyper)
            assert all(
                torch.equal(a, b) for x, y in zip(got, again) for a, b in zip(written_tensors(x), written_tensors(y))
            )


@pytest.mark.parametrize("update", IMPLEMENTATIONS)
def test_without_a_second_moment_it_is_momentum(update):
    for leaf in [leaf._replace(square=None) for leaf in ragged()]:
        rows = torch.where(leaf.factors.view(-1, *[1] * leaf.param.ndim) == 0, 0.0, leaf.rows.double())
        g = (torch.einsum("s...,s->...", rows, leaf.factors.double()) * SCALARS[1]).float()
        m = MOMENTUM.b1 * leaf.mean + g
        p = leaf.param - SCALARS[4].float() * (m + (MOMENTUM.weight_decay if leaf.decay else 0.0) * leaf.param)
        update([leaf], None, SCALARS, MOMENTUM)
        torch.testing.assert_close(leaf.mean, m, rtol=2e-6, atol=2e-7)
        torch.testing.assert_close(leaf.param, p, rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("hyper", [MOMENTUM, HYPER])
def test_a_second_moment_requires_b2_and_the_reverse(hyper):
    leaf = leaf_of(1, (16,))
    leaf = leaf if hyper is MOMENTUM else leaf._replace(square=None)
    with pytest.raises(ValueError, match=r"leaf 0: expected a second moment if hyper\.b2 is given"):
        kernel.update_leaves_([leaf], None, SCALARS, hyper, LaunchTables())


@interpreted
def test_a_shard_gets_its_slice_of_the_noise():
    full = leaf_of(1, (40, 20), copy=None)
    key = keys_of([full])
    parts = []
    for a, b in [(0, 16), (16, 19), (19, 40)]:  # 16 * 20 is a multiple of a block, 19 * 20 is not
        rows = full.rows[:, a:b].contiguous()
        assert full.square is not None
        state = (tensor[a:b].clone() for tensor in (full.param, full.mean, full.square))
        parts.append(Leaf(rows, full.factors, *state, copy=None, first=20 * a, decay=True))
    body([full], key, SCALARS, HYPER)
    body(parts, key.expand(3, 8), SCALARS, HYPER)
    assert torch.equal(torch.cat([part.param for part in parts]), full.param)


@interpreted
def test_tables_are_rebuilt_for_other_tensors():
    tables, leaves = LaunchTables(), [leaf_of(1, (16,)), leaf_of(1, (5,))]
    for _ in range(2):
        got, want = clones(leaves), clones(leaves)
        kernel.launch_noisy_adamw_(got, None, SCALARS, HYPER, tables)
        kernel.noisy_adamw_reference_(want, None, SCALARS, HYPER)
        assert_same(got, want)


# ---------------------------------------------------------------- the op


def op_arguments(leaves: list[Leaf], keys: Tensor | None, scalars: Tensor = SCALARS) -> tuple:
    rows, factors, params, means, squares, copies, firsts, decays = (list(field) for field in zip(*leaves))
    return rows, factors, params, means, squares, copies, firsts, decays, keys, scalars, *HYPER


def test_the_op_equals_its_reference_and_passes_opcheck():
    leaves = [leaf_of(2, (3, 5)), leaf_of(1, (16,), first=3, decay=False)]
    keys = keys_of(leaves)
    got, want = clones(leaves), clones(leaves)
    kernel.noisy_adamw_(*op_arguments(got, keys))
    kernel.noisy_adamw_reference_(want, keys, SCALARS, HYPER)
    assert all(torch.equal(a, b) for x, y in zip(got, want) for a, b in zip(written_tensors(x), written_tensors(y)))
    torch.library.opcheck(kernel.noisy_adamw_.default, op_arguments(clones(leaves), keys))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda leaf: leaf._replace(rows=leaf.rows[:, :2]), "rows"),
        (lambda leaf: leaf._replace(factors=leaf.factors[:1]), "factors"),
        (lambda leaf: leaf._replace(mean=leaf.mean[:2]), "moments"),
        (lambda leaf: leaf._replace(copy=leaf.copy[:2]), "moments and copy"),
        (lambda leaf: leaf._replace(param=leaf.param.double()), "float32"),
        (lambda leaf: leaf._replace(first=(1 << 35) - 3), "2\\^35"),
        (lambda leaf: leaf._replace(first=-1), "2\\^35"),
    ],
)
def test_unsupported_leaves_are_refused(change, message):
    leaf = leaf_of(2, (4, 5))
    with pytest.raises(ValueError, match=message):
        kernel.update_leaves_([change(leaf)], None, SCALARS, HYPER, LaunchTables())


def test_wrong_keys_and_scalars_are_refused():
    leaf = leaf_of(1, (4,))
    with pytest.raises(ValueError, match="keys"):
        kernel.update_leaves_([leaf], keys_of([leaf, leaf]), SCALARS, HYPER, LaunchTables())
    with pytest.raises(ValueError, match="scalars"):
        kernel.update_leaves_([leaf], None, SCALARS.float(), HYPER, LaunchTables())


# ---------------------------------------------------------------- on a GPU


def realistic() -> list[Leaf]:
    bf16 = torch.bfloat16
    return [
        leaf_of(4, (640, 1283), dtype=bf16, copy=bf16),
        leaf_of(4, (1280, 768), dtype=bf16, copy=bf16, factors=torch.float32),
        leaf_of(4, (257,), dtype=bf16, copy=bf16, decay=False),
        leaf_of(1, (1000, 64), copy=bf16, first=64_000),
        leaf_of(1, (333, 3), copy=None, first=31),
        leaf_of(1, (50, 48), dtype=torch.float64, copy=bf16),
        leaf_of(33, (100, 16), dtype=bf16, copy=torch.float32),
        leaf_of(1, ()),
    ]


@pytest.mark.gpu
def test_gpu_without_a_second_moment_equals_the_reference():
    leaves = [leaf._replace(square=None) for leaf in ragged()]
    got, want = clones(leaves, "cuda"), clones(leaves)
    kernel.update_leaves_(got, None, SCALARS.cuda(), MOMENTUM, LaunchTables())
    kernel.noisy_adamw_reference_(want, None, SCALARS, MOMENTUM)
    assert_same(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("noisy", [False, True])
def test_gpu_equals_the_reference_and_itself(noisy):
    leaves = realistic()
    leaves[0].factors[2] = 0
    leaves[0].rows[2] = math.nan
    want, got, again = clones(leaves), clones(leaves, "cuda"), clones(leaves, "cuda")
    keys = keys_of(leaves) if noisy else None
    kernel.noisy_adamw_reference_(want, keys, SCALARS, HYPER)
    for target in (got, again):
        kernel.update_leaves_(target, None if keys is None else keys.cuda(), SCALARS.cuda(), HYPER, LaunchTables())
    assert_same(got, want, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(a, b) for x, y in zip(got, again) for a, b in zip(written_tensors(x), written_tensors(y)))


@pytest.mark.gpu
def test_gpu_adds_exactly_the_draws_of_the_normal_op():
    leaf = clones([leaf_of(1, (1024, 1024), copy=None)], "cuda")[0]
    leaf.rows.zero_()
    key = keys_of([leaf]).cuda()
    scalars = torch.tensor([1, 1, 1, 1, 0.01, 2.0**-20, 0], dtype=torch.float64, device="cuda")
    kernel.update_leaves_([leaf], key, scalars, HYPER._replace(b1=0.0), LaunchTables())
    box = [1 << 20], [0], [1 << 20]
    z = normal.normal(key[0], *box, -math.inf, math.inf, torch.float64)
    assert torch.equal(leaf.mean.view(-1), ((z * 2**20).round() * 2.0**-20).float())


@pytest.mark.gpu
def test_gpu_replays_in_a_graph_with_sums_computed_inside_it():
    leaves, tables = clones(realistic(), "cuda"), LaunchTables()
    keys, scalars = keys_of(leaves).cuda(), SCALARS.cuda()
    source = [leaf.rows.clone() for leaf in leaves]

    def step() -> None:  # in the graph, rows have other addresses than in the eager call before it
        made = [leaf._replace(rows=rows * 2) for leaf, rows in zip(leaves, source)]
        kernel.update_leaves_(made, keys, scalars, HYPER, tables)

    start = clones(leaves, "cuda")
    step()
    tables.reserve()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for seed in (2, 3):
        keys.copy_(keys_of(leaves, seed))
        scalars[4] = 0.01 * seed
        for leaf, begin in zip(leaves, start):
            for a, b in zip(written_tensors(leaf), written_tensors(begin)):
                a.copy_(b)
        graph.replay()
        replayed = clones(leaves, "cuda")
        want = [leaf._replace(rows=rows * 2) for leaf, rows in zip(clones(start, "cuda"), source)]
        kernel.update_leaves_(want, keys, scalars, HYPER, LaunchTables())
        assert all(
            torch.equal(a, b) for x, y in zip(replayed, want) for a, b in zip(written_tensors(x), written_tensors(y))
        )
