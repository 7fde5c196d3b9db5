"""Tests of the kernel benchmark on the CPU: bodies in Triton's interpreter, checks, rows. No time is real."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from fdp_kernels import direct, ghost, weighted
from fdp_kernels.token_sums import token_sums

from benchmarks import kernel_checks, kernel_entries, kernels
from benchmarks.kernel_checks import Block, Shape, check_token_sums
from benchmarks.kernel_entries import BLOCKS, ENTRIES, Entry, problems
from tests.conftest import randn

FOREACH = {
    "foreach_direct": "direct",
    "foreach_ghost": "ghost",
    "foreach_keep": "keep",
    "foreach_weighted": "weighted",
}
EQUAL_SHAPES = (2, 3)
"""Two matrices of ``BLOCK`` with equal shapes."""
BLOCK = Block(2, 20, ((40, 33), (33, 40), (36, 34), (36, 34)))


def entry_of(name: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.name == name)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make operands float32 on the CPU, where launches run in Triton's interpreter."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("bodies run in the interpreter where there is no GPU")
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        """Convert loop bounds: numpy 2.4 no longer turns the (1,) arrays that hold scalars into an int."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(kernel_checks, "DEVICE", "cpu")
    monkeypatch.setattr(kernel_checks, "DTYPE", torch.float32)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace timing by one run; return the results on the first set of operands."""
    outcomes: list[Any] = []

    def run_once(run, operands, **options) -> float:
        outcomes.append(run(*operands[0]))
        return 2.0

    monkeypatch.setattr(kernels, "milliseconds", run_once)
    return outcomes


# ---------------------------------------------------------------- checks


@pytest.mark.parametrize("width", [5, 300])
def test_sums_over_tokens_pass_their_check_and_wrong_ones_do_not(width):
    g = randn(4, 7, width).float()
    sums, squares = token_sums(g)
    assert check_token_sums((g,), (sums, squares))
    assert not check_token_sums((g,), (2 * sums, 4 * squares))
    assert not check_token_sums((g,), (sums, 0.5 * squares))


@pytest.mark.parametrize("name", [*FOREACH, *FOREACH.values(), "keep_by_matmul"])
def test_a_correct_kernel_passes(name, on_cpu):
    entry = entry_of(name)
    shape = BLOCK if name in FOREACH else BLOCK.matrices[0]
    assert kernels.failure(entry, shape) == ""


def exchange_matrices(entry: Entry, first: int, second: int) -> Entry:
    """Return an entry whose kernel exchanges two matrices."""

    def kernel(*inputs, **options):
        order = list(range(len(BLOCK.widths)))
        order[first], order[second] = second, first
        found = entry.kernel(*inputs, **options)
        if entry.name == "foreach_keep":
            return [found[i] for i in [*order, *(len(order) + i for i in order)]]
        return found[order] if isinstance(found, torch.Tensor) else [found[i] for i in order]

    return entry._replace(kernel=kernel)


@pytest.mark.parametrize("positions", [(0, 1), EQUAL_SHAPES])
@pytest.mark.parametrize("name", FOREACH)
def test_a_kernel_that_exchanges_two_matrices_is_refused_and_not_timed(name, positions, on_cpu, timed):
    row = kernels.row_of(exchange_matrices(entry_of(name), *positions), BLOCK, 1.0, 1.0)
    assert "ms" not in row
    assert not timed
    assert kernels.text_of(row)[2].startswith("FAILED: ")
    if positions == EQUAL_SHAPES:
        assert row["failed"] == "differs from its reference on random data"


@pytest.mark.parametrize("name", FOREACH)
def test_a_kernel_that_leaves_a_matrix_out_is_refused(name, on_cpu, timed):
    entry = entry_of(name)
    fewer = entry._replace(kernel=lambda *lists: entry.kernel(*(each[:3] for each in lists)))
    assert "failed" in kernels.row_of(fewer, BLOCK, 1.0, 1.0)
    assert not timed


@pytest.mark.parametrize("name", ["direct", "ghost", "foreach_direct", "foreach_ghost"])
def test_a_kernel_that_exchanges_two_samples_is_refused(name, on_cpu):
    entry = entry_of(name)
    wrong = entry._replace(kernel=lambda *inputs: entry.kernel(*inputs).flip(-1))
    shape = BLOCK if name in FOREACH else BLOCK.matrices[0]
    assert kernels.failure(wrong, shape) == "differs from its reference on random data"


@pytest.mark.parametrize("batch", [4, 32])
def test_samples_of_one_batch_differ_in_size_by_more_than_a_check_allows(batch, monkeypatch):
    monkeypatch.setattr(kernel_checks, "DEVICE", "cpu")
    torch.manual_seed(0)
    g, x = kernel_checks.pair(Shape(batch, 512, 64, 64))
    norms = kernel_checks.exact_norms(g, x).sqrt()
    allowed = kernel_checks.rounding_loss(g) * kernel_checks.sizes(g, x)
    assert bool((norms.diff().abs() > allowed[1:]).all())


@pytest.mark.parametrize("name", FOREACH)
def test_matrices_of_one_block_differ_in_size_by_more_than_a_check_allows(name, monkeypatch):
    """Two matrices of a GPT-2-Large block have equally many elements: equal sizes would hide an exchange."""
    monkeypatch.setattr(kernel_checks, "DEVICE", "cpu")
    torch.manual_seed(0)
    gs, xs, *_ = entry_of(name).inputs(Block(2, 64, ((32, 64), (64, 32), (48, 48))), False)
    norms = torch.stack([kernel_checks.exact_norms(g, x) for g, x in zip(gs, xs)]).sqrt()
    assert bool((norms[1:] > 1.5 * norms[:-1]).all())


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize(("name", "one"), FOREACH.items())
def test_a_row_of_a_block_counts_all_matrices_and_compares_with_single_ones(name, one, on_cpu, timed):
    entry, single = entry_of(name), entry_of(one)
    row = kernels.row_of(entry, BLOCK, 1e12, 1.0)
    flops = sum(single.cost(shape)[0] for shape in BLOCK.matrices)
    assert row["rate"] == flops / 2e-3
    assert row["share"] == pytest.approx(flops / 2e9)
    assert row["widths"] == BLOCK.widths
    assert kernels.text_of(row)[:3] == [name, "2 x 20, a block", "2.000"]
    assert len(timed) == 2 + (single.plain is not None)
    assert len(timed[-1]) == len(BLOCK.widths)
    if one != "ghost":
        assert [product.shape[-2:] for product in timed[-1]] == [(p, d) for d, p in BLOCK.widths]


def test_only_foreach_kernels_are_measured_on_blocks():
    for entry in ENTRIES:
        for quick in (False, True):
            found = problems(entry, quick=quick)
            if entry.name in FOREACH:
                assert [(block.batch, block.tokens) for block in found] == [(4, 512), (4, 1024), (4, 2048), (32, 512)]
                assert found == BLOCKS
            else:
                assert all(isinstance(shape, Shape) for shape in found)
    assert BLOCKS[0].widths == ((1280, 3840), (1280, 1280), (1280, 5120), (5120, 1280))
    assert len(problems(entry_of("direct"), quick=False)) == 30
    assert len(problems(entry_of("direct"), quick=True)) == 3
    assert {entry.name for entry in ENTRIES} >= FOREACH.keys()


@pytest.mark.parametrize("name", FOREACH)
def test_operands_exceed_the_cache_and_stay_small(name, monkeypatch):
    monkeypatch.setattr(kernel_checks, "DEVICE", "meta")
    for block in BLOCKS:
        operands = kernels.operands_of(entry_of(name), block)
        assert kernels.L2_FLUSH_BYTES < kernels.bytes_of(operands) < 1.5e9
        assert len(operands) == (2 if kernels.bytes_of(operands[0]) > kernels.L2_FLUSH_BYTES else 3)


def test_tuned_tiles_are_valid_and_include_those_in_use():
    tables = {"direct": direct.TILES, "ghost": ghost.TILES, "keep": direct.TILES, "weighted": weighted.TILES}
    assert all(tile.rows == tile.columns for tile in entry_of("ghost").tiles)
    for name, one in FOREACH.items():
        assert entry_of(name).tiles == entry_of(one).tiles
        assert {row.tile for row in tables[one]} <= set(entry_of(one).tiles)


# ---------------------------------------------------------------- command


@pytest.fixture
def command(on_cpu, timed, monkeypatch, tmp_path):
    """Run the command with small blocks; return its exit code, rows and page."""
    monkeypatch.setattr(kernels, "limits", lambda: (1e12, 1e9))
    monkeypatch.setattr(kernel_entries, "BLOCKS", [BLOCK, BLOCK._replace(tokens=24)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)

    def run(*options: str) -> tuple[Any, dict[str, Any], str]:
        monkeypatch.setattr(sys, "argv", ["kernels", *options, "--out", str(tmp_path / "kernels")])
        with pytest.raises(SystemExit) as ended:
            kernels.main()
        page = tmp_path / "kernels.md"
        record = json.loads((tmp_path / "kernels.json").read_text())
        return ended.value.code, record, page.read_text() if page.exists() else ""

    return run


def test_the_command_writes_a_row_of_every_block(command):
    names = ("foreach_direct", "foreach_keep")
    code, record, page = command("--quick", "--only", *names)
    assert code == 0
    assert record["command"] == "python -m benchmarks.kernels --quick --only foreach_direct foreach_keep --out kernels"
    assert [(row["kernel"], row["tokens"]) for row in record["rows"]] == [(n, t) for n in names for t in (20, 24)]
    assert "| foreach_keep       | 2 x 24, a block            | 2.000    |" in page


def test_the_command_reports_a_wrong_kernel(command, monkeypatch):
    monkeypatch.setattr(
        kernels, "ENTRIES", [exchange_matrices(entry_of("foreach_weighted"), *EQUAL_SHAPES), entry_of("foreach_direct")]
    )
    code, record, page = command("--tokens", "24")
    assert code == 1
    assert ["failed" in row for row in record["rows"]] == [True, False]
    assert "| FAILED: differs from its reference on random data |" in page


def test_tiles_of_a_block_are_first_checked_on_a_ragged_one(command, monkeypatch):
    small = entry_of("foreach_ghost")._replace(ragged=BLOCK)
    square, flat = direct.Tile(32, 32, 16, 4, 2), direct.Tile(32, 16, 16, 4, 2)
    monkeypatch.setattr(kernels, "ENTRIES", [small._replace(tiles=(flat, square)), entry_of("keep_by_matmul")])
    code, record, page = command("--tune", "--tokens", "20")
    assert (code, page) == (0, "")
    (row,) = record["tuned"]
    assert row["tiles"] == [[2.0, list(square)]]  # ghost takes no other
