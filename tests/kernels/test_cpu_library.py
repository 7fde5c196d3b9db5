"""The compiled loops compute every element alike, are loaded from nowhere that others write to, and can be missing."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator

import pytest
import torch
from fdp_kernels import chacha20, cpu_library
from fdp_kernels.cpu_library import Library, library
from torch import Tensor

from fdp.cpu_operations import CUBIC, LINEAR, MOST

COMPILED = library()
pytestmark = pytest.mark.skipif(COMPILED is None, reason="no C compiler")


def loops() -> Library:
    assert COMPILED is not None
    return COMPILED


def gelu(x: Tensor) -> Tensor:
    """Return values and slopes, in two rows."""
    out = torch.empty(2, len(x))
    loops().gelu_and_slope(x, out[0], out[1], len(x), LINEAR, CUBIC, MOST)
    return out


def quantile(p: Tensor) -> Tensor:
    out = torch.empty_like(p)
    loops().lower_quantile(p, out, p.numel())
    return out


def normal(bits: Tensor) -> Tensor:
    """Return the values as bits: rare ones are NaN, which equals nothing."""
    out = torch.empty(bits.shape, dtype=torch.float64)
    loops().normal_from_bits(bits, out, bits.numel())
    return out.view(torch.int64)


def weighted_sum(G: Tensor, factors: Tensor) -> Tensor:
    out = torch.empty(G.shape[1], dtype=torch.float64)
    loops().weighted_sum(G, factors, out, *G.shape)
    return out


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", [0, 1, 7, 255, 256, 257, 1000, 5001])
@pytest.mark.parametrize("start", [0, 1, 3, 250])
def test_an_element_is_computed_alike_wherever_it_lies(size, start):
    x, p = torch.randn(6000) * 5, torch.rand(6000, dtype=torch.float64) / 2
    p[::7] = 2.0 ** -torch.arange(1, 859, dtype=torch.float64).remainder(120)
    bits = torch.randint(-(2**63), 2**63 - 1, (6000,))
    part = slice(start, start + size)
    for function, data in ((gelu, x), (quantile, p), (normal, bits)):
        whole, alone = function(data), function(data[part].clone())
        assert torch.equal(whole[..., part], alone)


def test_any_number_of_threads_gives_the_same_bits(threads):
    x, bits = torch.randn(10_001), torch.randint(-(2**63), 2**63 - 1, (10_001,))
    G, factors = torch.randn(5, 10_001), torch.rand(5, dtype=torch.float64)
    torch.set_num_threads(1)
    expected = [*gelu(x), normal(bits), weighted_sum(G, factors)]
    for number in (2, 3):
        torch.set_num_threads(number)
        assert all(map(torch.equal, [*gelu(x), normal(bits), weighted_sum(G, factors)], expected))


def test_gelu_of_what_is_not_a_number_or_far_away():
    y, slope = gelu(torch.tensor([math.nan, math.inf, -math.inf, 1e38, -1e38, 0.0, 40.0, -40.0]))
    assert y[0].isnan()
    assert slope[0].isnan()
    assert y[1] == math.inf
    assert y[2].isnan()  # as torch's
    torch.testing.assert_close(y[3:], torch.tensor([1e38, 0.0, 0.0, 40.0, 0.0]), rtol=0, atol=0)
    torch.testing.assert_close(slope[3:], torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0]), rtol=0, atol=0)


def test_a_rare_value_is_a_nan_that_carries_its_bits():
    tails = torch.tensor([0, 1, (1 << 47) - 1, 1 << 47])
    bits = torch.cat([tails, tails | -(1 << 63)])
    drawn = normal(bits).view(torch.float64)
    assert drawn.isnan().tolist() == [True, True, True, False] * 2
    rare = drawn.isnan()
    assert torch.equal(drawn.view(torch.int64)[rare] & ((1 << 47) - 1 | -(1 << 63)), bits[rare])
    assert drawn[3] == -drawn[7] > 4


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_child_keys_are_chacha20s(count):
    key, nonces = torch.randint(0, 2**32, (8,)), torch.randint(0, 2**32, (count, 3))
    found = torch.empty(count, 8, dtype=torch.int64)
    loops().child_keys(key, nonces, found, count)
    assert torch.equal(found, chacha20.child_keys_reference(key, nonces))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_normal_values_of_many_keys_are_those_of_each_keys_stream(number, threads):
    sizes = [1, 0, 7, 8, 255, 256, 257, 3000, 2]
    keys = torch.randint(0, 2**32, (len(sizes), 8))
    out = torch.empty(sum(sizes), dtype=torch.float64)
    torch.set_num_threads(number)
    loops().normals(keys, torch.tensor(sizes), out, len(sizes))
    for key, size, part in zip(keys, sizes, out.split(sizes)):
        bits = chacha20.bits_reference(key, [size], [0], [size]) if size else torch.empty(0, dtype=torch.int64)
        assert torch.equal(part.view(torch.int64), normal(bits))


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("columns", [1, 1023, 1024, 2500])
def test_a_weighted_sum_is_rounded_to_float64_only(rows, columns):
    """Cancelling rows of any size: float32 would leave nothing of the small ones."""
    G = torch.randn(rows, columns) * 10.0 ** torch.arange(rows).unsqueeze(1).remainder(7)
    G = torch.cat([G, -G, torch.full((1, columns), 1e-3)])
    factors = torch.cat([torch.rand(rows, dtype=torch.float64).repeat(2), torch.ones(1, dtype=torch.float64)])
    found = weighted_sum(G, factors)
    torch.testing.assert_close(found, torch.full_like(found, float(G[-1, 0])), rtol=1e-5, atol=0)


def test_tensors_that_are_not_contiguous_are_refused():
    with pytest.raises(ValueError, match="weighted_sum: expected contiguous tensors on the CPU"):
        weighted_sum(torch.randn(4, 6)[:, :3], torch.rand(4, dtype=torch.float64))


# ---------------------------------------------------------------- compiling and loading


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FDP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compiled_files(cache):
    return sorted(path.name for path in cache.iterdir())


def damage(path):
    """Put another file in the place of a library; the one that is loaded stays as it is."""
    path.unlink()
    path.write_bytes(b"not a library")


def test_the_library_is_compiled_once_and_readable_by_its_owner_only(cache, monkeypatch):
    assert library.__wrapped__() is not None
    (name,) = compiled_files(cache)
    assert cache.stat().st_mode & 0o777 == 0o700 == (cache / name).stat().st_mode & 0o777
    monkeypatch.setattr(cpu_library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert library.__wrapped__() is not None


def test_another_source_compiler_or_processor_is_another_library(monkeypatch):
    compiler = shutil.which("cc") or ""
    first = cpu_library._digest(compiler, None)
    assert cpu_library._digest(compiler, None) == first != cpu_library._digest(compiler, "openmp")
    for name, value in (("FLAGS", ("-O2",)), ("FOR_THIS_PROCESSOR", ()), ("_processor", lambda: "another")):
        with monkeypatch.context() as patch:
            patch.setattr(cpu_library, name, value)
            assert cpu_library._digest(compiler, None) != first


def test_a_library_that_others_can_write_is_compiled_anew(cache):
    library.__wrapped__()
    (name,) = compiled_files(cache)
    damage(cache / name)
    (cache / name).chmod(0o722)
    assert library.__wrapped__() is not None
    assert (cache / name).stat().st_mode & 0o777 == 0o700


def test_nothing_is_loaded_from_a_folder_that_others_can_write(cache):
    library.__wrapped__()
    (name,) = compiled_files(cache)
    damage(cache / name)
    cache.chmod(0o777)
    assert library.__wrapped__() is not None
    assert (cache / name).read_bytes().startswith(b"not a library")


def test_a_cache_that_cannot_be_made_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FDP_CACHE", str(tmp_path / "file" / "cache"))
    assert library.__wrapped__() is not None


def test_without_a_compiler_or_with_one_that_fails_there_is_no_library(cache, tmp_path, monkeypatch):
    bad = tmp_path / "bin" / "cc"
    bad.parent.mkdir()
    bad.write_text("#!/bin/sh\nexit 1\n")
    bad.chmod(0o755)
    monkeypatch.setattr(cpu_library, "COMPILERS", (str(bad),))
    assert library.__wrapped__() is None
    monkeypatch.setattr(cpu_library, "COMPILERS", ("no-such-compiler",))
    assert library.__wrapped__() is None


def test_without_openmp_the_loops_run_on_one_thread(cache, monkeypatch, threads):
    monkeypatch.setattr(cpu_library, "_openmp_of_torch", lambda: None)
    alone = library.__wrapped__()
    assert alone is not None
    torch.set_num_threads(2)
    bits = torch.randint(-(2**63), 2**63 - 1, (3001,))
    out = torch.empty(3001, dtype=torch.float64)
    alone.normal_from_bits(bits, out, 3001)
    assert torch.equal(out.view(torch.int64), normal(bits))
