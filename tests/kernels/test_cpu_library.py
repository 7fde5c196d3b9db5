"""The compiled loops compute every element alike, are loaded from nowhere that others write to, and can be missing."""

from __future__ import annotations

import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from fdp_kernels import chacha20, cpu_library
from fdp_kernels import normal as normal_values
from fdp_kernels.cpu_library import Library, addresses_of, library
from fdp_kernels.keep_cpu import wide_weighted_sum
from fdp_kernels.processor import ON_ARM
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fdp.cpu.gelu import CUBIC, LINEAR, MOST
from fdp.cpu.gelu import gelu as fdp_gelu
from fdp.cpu.layer_norm import TOKENS_TOGETHER
from fdp.cpu.promise import differentiated_once
from fdp.gradients.vjp import vjp

COMPILED = library()
CAN_COMPILE = (
    sys.platform == "linux"
    and shutil.which("gcc") is not None
    and (ON_ARM or " fma " in Path("/proc/cpuinfo").read_text(encoding="utf-8"))
)
pytestmark = pytest.mark.skipif(COMPILED is None and not CAN_COMPILE, reason="no C compiler")


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


def layer_norm(given: Sequence[Tensor], library: Library | None = None) -> list[Tensor]:
    """Return y, mean and rise, and the gradients of input, scales and biases."""
    g, x, weight, bias = given
    y, of_x, (samples, tokens, features) = torch.empty_like(x), torch.empty_like(x), x.shape
    moments, parts = torch.empty(samples, tokens, 2), torch.empty(samples, -(-tokens // TOKENS_TOGETHER), 2, features)
    of_weight, of_bias = torch.empty_like(weight), torch.empty_like(weight)
    library = library or loops()
    library.layer_norm(x, weight, bias, y, moments, samples, tokens, features, 1e-5)
    library.layer_norm_backward(g, x, weight, moments, of_x, parts, of_weight, of_bias, samples, tokens, features)
    return [y, moments, of_x, of_weight, of_bias]


def rows_of_tokens() -> tuple[Tensor, ...]:
    return torch.randn(3, 75, 37), torch.randn(3, 75, 37) * 3 + 1, torch.randn(3, 37), torch.randn(3, 37)


def on_grid(z: Tensor, value: Tensor, library: Library | None = None) -> Tensor:
    out, numbers = z.clone(), torch.tensor([0.37 * 2.0**22, 2.0**22, 2.0**-22], dtype=torch.float64)
    parts = value.split([1, len(value) - 1])  # two leaves
    sizes = torch.tensor([len(part) for part in parts])
    (library or loops()).add_on_grid(out, addresses_of((part,) for part in parts), sizes, numbers, 2)
    return out


def adamw(given: Tensor, library: Library | None = None) -> Tensor:
    """Return the parameters, means and squares after an update of two leaves: the first element, and the others."""
    out, numbers = torch.empty(3, given.shape[1]), torch.rand(9, generator=torch.Generator().manual_seed(0))
    addresses = addresses_of((row[first:] for row in (*given, *out)) for first in (0, 1))
    (library or loops()).adamw(addresses, torch.tensor([1, given.shape[1] - 1]), numbers, 2)
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
    given, many, leaf = rows_of_tokens(), torch.randn(2, 40_000, dtype=torch.float64), torch.rand(4, 40_000)

    def results() -> list[Tensor]:
        return [
            *gelu(x),
            normal(bits),
            weighted_sum(G, factors),
            on_grid(many[0], many[1]),
            *layer_norm(given),
            adamw(leaf),
        ]

    torch.set_num_threads(1)
    expected = results()
    for number in (2, 3):
        torch.set_num_threads(number)
        assert all(map(torch.equal, results(), expected))


def test_gelu_of_what_is_not_a_number_or_far_away():
    y, slope = gelu(torch.tensor([math.nan, math.inf, -math.inf, 1e38, -1e38, 0.0, 40.0, -40.0]))
    assert y[0].isnan()
    assert slope[0].isnan()
    assert y[1] == math.inf
    assert y[2].isnan()  # as torch's
    torch.testing.assert_close(y[3:], torch.tensor([1e38, 0.0, 0.0, 40.0, 0.0]), rtol=0, atol=0)
    torch.testing.assert_close(slope[3:], torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0]), rtol=0, atol=0)


def test_noise_lands_on_the_nearest_point_of_the_grid_and_on_the_even_one_of_two():
    z = torch.zeros(5, dtype=torch.float64)
    value = torch.tensor([0.5, 1.5, -2.5, 0.49, 3.0], dtype=torch.float64) * 2.0**-22
    assert torch.equal(on_grid(z, value) * 2.0**22, torch.tensor([0.0, 2.0, -2.0, 0.0, 3.0], dtype=torch.float64))
    z, value = torch.randn(2, 5000, dtype=torch.float64)
    assert torch.equal(on_grid(z, value), (z * (0.37 * 2.0**22) + value * 2.0**22).round() * 2.0**-22)


def test_a_rare_value_is_a_nan_that_carries_its_bits():
    tails = torch.tensor([0, 1, (1 << 47) - 1, 1 << 47])
    bits = torch.cat([tails, tails | -(1 << 63)])
    drawn = normal(bits).view(torch.float64)
    assert drawn.isnan().tolist() == [True, True, True, False] * 2
    rare = drawn.isnan()
    assert torch.equal(drawn.view(torch.int64)[rare] & ((1 << 47) - 1 | -(1 << 63)), bits[rare])
    assert torch.equal(normal_values._rare_values(drawn)[1], bits[rare])
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


def test_a_draw_of_many_leaves_has_its_rare_values():
    """Four values in 2^18 take extra bits: each is that of its own leaf and element."""
    sizes, keys = [100_001, 0, 161_000], torch.arange(24).view(3, 8)
    drawn = normal_values.foreach_normal(keys, sizes)
    rare = torch.nonzero(drawn.abs() > 4.3).flatten().tolist()
    assert len(rare) > 1
    assert min(rare) < sizes[0] < max(rare), "in both leaves: else choose other keys"
    assert torch.equal(drawn, normal_values.foreach_normal_reference(keys, sizes))


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "G",
    [
        torch.randn(4, 6)[:, :3],
        torch.randn(4, 6).double(),
        torch._neg_view(torch.randn(4, 6)),
        torch._efficientzerotensor(4, 6),
        [1.0, 2.0],
    ],
    ids=["strided", "float64", "negative", "zero", "list"],
)
def test_tensors_whose_memory_is_not_what_a_loop_reads_are_refused(G):
    out, factors = torch.empty(6, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    with pytest.raises(ValueError, match="weighted_sum: expected a tensor"):
        loops().weighted_sum(G, factors, out, 4, 6)


def test_callers_make_memory_what_the_loops_read():
    G, factors = torch.randn(4, 6), torch.rand(4, dtype=torch.float64)
    expected = factors @ G.double()
    for rows in (G, torch._neg_view(-G), G.T.contiguous().T):
        for weights in (factors, torch._neg_view(-factors)):
            torch.testing.assert_close(wide_weighted_sum(rows, weights), expected)
    assert not wide_weighted_sum(torch._efficientzerotensor(4, 6), factors).any()
    with differentiated_once():
        assert torch.equal(fdp_gelu(torch._neg_view(-G)), fdp_gelu(G))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_keys_of_another_dtype_or_shape_and_negative_sizes_are_refused(dtype):
    keys, nonces = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(5, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="foreach_normal: expected \\(2, 8\\) keys, int64"):
        normal_values.foreach_normal(keys.to(dtype), [1, 2])
    with pytest.raises(ValueError, match="sizes of 0 or more"):
        normal_values.foreach_normal(keys, [300_000, -299_990])
    for key, of in (
        (keys[0].to(dtype), nonces),
        (keys[0], nonces.to(dtype)),
        (keys[0, :4], nonces),
        (keys[0], nonces[:, :2]),
    ):
        with pytest.raises(ValueError, match="child_keys: expected"):
            chacha20.child_keys(key, of)


def test_an_element_that_was_not_drawn_is_not_taken_for_a_rare_one():
    values = torch.tensor([0.5, math.nan, -1.0], dtype=torch.float64)
    with pytest.raises(RuntimeError, match="every element to be drawn"):
        normal_values._rare_values(values)


# ---------------------------------------------------------------- compiling and loading

new_library = library.__wrapped__


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FDP_CACHE", str(tmp_path / "parent" / "cache"))
    return tmp_path / "parent" / "cache"


@pytest.fixture
def compiled_again(monkeypatch):
    """Return a list that grows by one with every call of the compiler."""
    calls, compile = [], cpu_library._compile
    monkeypatch.setattr(cpu_library, "_compile", lambda *args: calls.append(1) or compile(*args))
    return calls


def only_file(cache):
    (path,) = cache.iterdir()
    return path


def test_the_library_is_compiled_once_and_readable_by_its_owner_only(cache, compiled_again):
    for _ in range(3):
        assert new_library() is not None
    assert len(compiled_again) == 1
    for path in (cache.parent, cache):
        assert path.stat().st_mode & 0o777 == 0o700
    assert only_file(cache).stat().st_mode & 0o777 == 0o600


def test_another_source_compiler_or_processor_is_another_library(monkeypatch):
    compiler = shutil.which("cc") or ""
    first = cpu_library._digest(compiler, None)
    assert cpu_library._digest(compiler, None) == first != cpu_library._digest(compiler, "openmp")
    for name, value in (("FLAGS", ("-O2",)), ("FOR_THIS_PROCESSOR", ()), ("_processor", lambda: "another")):
        with monkeypatch.context() as patch:
            patch.setattr(cpu_library, name, value)
            assert cpu_library._digest(compiler, None) != first


@pytest.mark.long
@pytest.mark.parametrize("harm", ["one bit", "cut off", "empty", "writable by others", "a link"])
def test_a_cached_library_that_is_not_what_was_compiled_is_not_loaded(harm, cache, compiled_again, tmp_path):
    new_library()
    path, content = only_file(cache), bytearray(only_file(cache).read_bytes())
    path.unlink()
    if harm == "one bit":
        content[content.index(struct.pack("<d", 3.3871328727963666080))] ^= 1  # a constant of the normal law
    path.write_bytes(content[: len(content) // 2] if harm == "cut off" else b"" if harm == "empty" else content)
    path.chmod(0o622 if harm == "writable by others" else 0o600)
    if harm == "a link":
        path.rename(tmp_path / "elsewhere.so")
        path.symlink_to(tmp_path / "elsewhere.so")
    assert new_library() is not None
    assert len(compiled_again) == 2
    assert only_file(cache) == path
    assert new_library() is not None
    assert len(compiled_again) == 2, "what was compiled anew is in its place"


def test_a_library_that_gives_other_numbers_is_not_used(cache, monkeypatch):
    monkeypatch.setattr(cpu_library, "DRAWN", {0: 0.21609778664313})
    assert new_library() is None


@pytest.mark.long
def test_after_a_compiler_that_gives_other_numbers_the_next_one_is_tried(cache, tmp_path, monkeypatch):
    """Two libraries loaded from memory must not have one name, else the first is loaded again."""
    wrong = tmp_path / "bin" / "cc"
    wrong.parent.mkdir()
    wrong.write_text(f"""#!/bin/sh
sed 's/3.3871328727963666080e0/3.38713e0/' {cpu_library.SOURCE} > {tmp_path}/wrong.c
for word; do [ "$word" = {cpu_library.SOURCE} ] && word={tmp_path}/wrong.c; set -- "$@" "$word"; shift; done
exec gcc "$@"
""")
    wrong.chmod(0o755)
    monkeypatch.setattr(cpu_library, "COMPILERS", (str(wrong),))
    assert new_library() is None
    monkeypatch.setattr(cpu_library, "COMPILERS", (str(wrong), "gcc"))
    assert new_library() is not None


@pytest.mark.parametrize("what", ["meta", "float64", "vjp", "fake"])
def test_the_state_in_which_it_is_asked_for_first_does_not_matter(what, cache):
    found = []

    def ask(x: Tensor) -> tuple[Tensor, tuple[()]]:
        found.append(new_library())
        return x, ()

    x, default = torch.ones(2), torch.get_default_dtype()
    if what == "vjp":
        vjp(ask, x)
    elif what == "float64":
        torch.set_default_dtype(torch.float64)
        ask(x)
        torch.set_default_dtype(default)
    else:
        with torch.device("meta") if what == "meta" else FakeTensorMode():
            ask(x)
    assert found[0] is not None


def test_the_openmp_of_torch_is_taken_not_that_of_another_package():
    pytest.importorskip("sklearn.utils._openmp_helpers")
    path = cpu_library._openmp_of_torch()
    assert path is None or "torch" in path


@pytest.mark.long
def test_a_forked_child_can_draw_a_few_values(tmp_path):
    """Threads do not survive a fork; where there is little to compute none are asked for."""
    script = tmp_path / "fork.py"
    script.write_text("""
import os, signal, torch
from fdp_kernels.cpu_library import library
from fdp_kernels.normal import foreach_normal
torch.set_num_threads(2)
assert library() is not None

def in_a_child(work):
    if (child := os.fork()) == 0:
        signal.alarm(10)
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

in_a_child(lambda: torch.randn(2_000_000).exp())     # loading has started no threads
torch.randn(2_000_000).exp()
in_a_child(lambda: foreach_normal(torch.zeros(1, 8, dtype=torch.int64), [1000]))
""")
    subprocess.run([sys.executable, str(script)], check=True, timeout=100)


@pytest.mark.long
def test_a_cache_in_which_others_could_write_is_not_used(cache, compiled_again):
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    for _ in range(2):
        assert new_library() is not None
    assert len(compiled_again) == 2
    assert not list(cache.iterdir())


@pytest.mark.long
def test_what_is_no_file_in_the_cache_is_passed_over(cache, compiled_again, monkeypatch):
    new_library()
    name = only_file(cache).name
    pipe = cache / f"{name.rsplit('-', 1)[0]}-0.so"
    os.mkfifo(pipe)
    (cache / f"{name.rsplit('-', 1)[0]}-1.so").symlink_to(cache / name)
    assert new_library() is not None
    assert len(compiled_again) == 1
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(PermissionError("sticky")))
    cpu_library._write_cached("cpu-other", b"content")
    assert len(list(cache.iterdir())) == 3, "nothing is left of what could not be put there"


@pytest.mark.long
def test_a_cache_that_cannot_be_made_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FDP_CACHE", str(tmp_path / "file" / "cache"))
    assert new_library() is not None
    monkeypatch.setenv("FDP_CACHE", "~nobody-of-this-name/cache")
    assert new_library() is not None


@pytest.mark.long
@pytest.mark.parametrize("script", ["exit 1", "exit 0", 'exec gcc "$@" -ffast-math', "sleep 60"])
def test_without_a_compiler_that_does_as_told_there_is_no_library(script, cache, tmp_path, monkeypatch):
    bad = tmp_path / "bin" / "cc"
    bad.parent.mkdir()
    bad.write_text(f"#!/bin/sh\n{script}\n")
    bad.chmod(0o755)
    monkeypatch.setattr(cpu_library, "COMPILE_SECONDS", 0.5 if script.startswith("sleep") else 20)
    monkeypatch.setattr(cpu_library, "COMPILERS", (str(bad), "no-such-compiler"))
    assert new_library() is None
    monkeypatch.setattr(cpu_library, "COMPILERS", (str(bad), "gcc"))
    assert (new_library() is None) == script.startswith("sleep"), "another one is tried, unless one hangs"


@pytest.mark.long
def test_without_openmp_the_loops_run_on_one_thread(cache, monkeypatch, threads):
    monkeypatch.setattr(cpu_library, "_openmp_of_torch", lambda: None)
    alone = new_library()
    assert alone is not None
    assert alone.handle != loops().handle
    torch.set_num_threads(2)
    bits = torch.randint(-(2**63), 2**63 - 1, (3001,))
    out = torch.empty(3001, dtype=torch.float64)
    alone.normal_from_bits(bits, out, 3001)
    assert torch.equal(out.view(torch.int64), normal(bits))


@pytest.mark.long
def test_other_instructions_give_the_same_bits(cache, monkeypatch):
    """Every operation is rounded by itself: neither vectors nor optimisation change a bit."""
    monkeypatch.setattr(cpu_library, "FLAGS", (*cpu_library.FLAGS, "-O1", "-fno-tree-vectorize"))
    other = new_library()
    assert other is not None
    assert other.handle != loops().handle
    bits, x, out = torch.randint(-(2**63), 2**63 - 1, (70_001,)), torch.randn(5001) * 5, torch.empty(2, 5001)
    drawn = torch.empty(70_001, dtype=torch.float64)
    other.normal_from_bits(bits, drawn, len(bits))
    other.gelu_and_slope(x, out[0], out[1], len(x), LINEAR, CUBIC, MOST)
    assert torch.equal(drawn.view(torch.int64), normal(bits))
    assert torch.equal(out, gelu(x))
    given, many = rows_of_tokens(), torch.randn(2, 5000, dtype=torch.float64)
    assert torch.equal(on_grid(many[0], many[1], other), on_grid(many[0], many[1]))
    assert all(map(torch.equal, layer_norm(given, other), layer_norm(given)))
    leaf = torch.rand(4, 5000)
    assert torch.equal(adamw(leaf, other), adamw(leaf))
