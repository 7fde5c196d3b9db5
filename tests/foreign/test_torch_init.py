from __future__ import annotations

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from fdp import tree
from fdp.foreign import init_tape
from fdp.foreign.torch_init import place_leaves, torch_leaves
from fdp.types import FdpError


class Leaf(nn.Module):
    """One parameter, made by a function."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.leaf = nn.Parameter(make())


class GPT(nn.Module):
    """Layer defaults, then ``apply``, then a second draw of some leaves, others scaled; a tied head; a buffer."""

    def __init__(self, width: int = 24, layers: int = 3, vocab_size: int = 37) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "up": nn.Linear(width, 4 * width),
                    "project": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)) * torch.rand(()))
        self.apply(self.reset)
        for name, leaf in self.named_parameters():
            if name.endswith("project.weight"):
                nn.init.normal_(leaf, std=0.02 / (2 * layers) ** 0.5)
            if name.endswith("up.weight"):
                leaf.data *= 0.5

    def reset(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def filled(fill: Callable[[Tensor], object], *size: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = Leaf(lambda: torch.empty(size or (21, 17)))
        fill(module.leaf)
        return module

    return make


@torch.no_grad()
def in_parts(leaf: Tensor) -> None:
    leaf.normal_()
    leaf[3].fill_(0)
    leaf[:, 2].uniform_()
    leaf.t()[2].normal_()
    leaf[leaf > 1] = 0.5
    for part in leaf.chunk(3):
        nn.init.xavier_uniform_(part)
    leaf[torch.randperm(len(leaf))[:4]] *= leaf.std()


def as_often_as_drawn() -> Tensor:
    return torch.stack([torch.randn(3) for _ in range(int(torch.randint(2, 9, ()).item()))])


def with_a_seed_inside() -> Tensor:
    first = torch.rand(20)
    torch.manual_seed(5)
    second = torch.rand(20)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(6)
        third = torch.rand(20)
    own = torch.rand(20, generator=torch.Generator().manual_seed(7))
    return torch.stack([first, second, third, own, torch.rand(20)])


def with_a_constant_that_changes() -> Tensor:
    constant = np.ones(6)
    product = torch.from_numpy(constant) * torch.rand(6)
    constant[:] = 5
    return product


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 33, bias=False)),
    "embedding": lambda: nn.Embedding(19, 7, padding_idx=3),
    "norms": lambda: nn.Sequential(nn.LayerNorm(5), nn.BatchNorm1d(5), nn.GroupNorm(2, 4), nn.RMSNorm(3)),
    "conv": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose1d(3, 4, 5, groups=1)),
    "attention": lambda: nn.Sequential(
        nn.MultiheadAttention(12, 3), nn.MultiheadAttention(12, 3, kdim=5, vdim=7, add_bias_kv=True)
    ),
    "gru": lambda: nn.GRU(7, 9, num_layers=2, bidirectional=True),
    "lstm": lambda: nn.LSTM(7, 9, proj_size=3),
    "transformer (deepcopy)": lambda: nn.Transformer(12, 2, 2, 1, 20, batch_first=True),
    "gpt": GPT,
    "gpt in bfloat16": lambda: GPT().bfloat16(),
    "linear in float64": lambda: nn.Linear(5, 7, dtype=torch.float64),
    "trunc_normal_": filled(nn.init.trunc_normal_),
    "trunc_normal_, never rejected": filled(lambda leaf: nn.init.trunc_normal_(leaf, std=0.02)),
    "trunc_normal_, tail": filled(lambda leaf: nn.init.trunc_normal_(leaf, a=1.0, b=1.5)),
    "orthogonal_": filled(nn.init.orthogonal_),
    "sparse_": filled(lambda leaf: nn.init.sparse_(leaf, 0.3)),
    "kaiming_normal_": filled(nn.init.kaiming_normal_, 6, 5, 3),
    "in parts": filled(in_parts),
    "orthogonal parametrization": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5)),
    "bernoulli": lambda: Leaf(lambda: torch.bernoulli(torch.rand(9, 9)) + torch.rand(9)),
    "poisson": lambda: Leaf(lambda: torch.poisson(torch.rand(50) * 20) + torch.rand(50)),
    "multinomial": lambda: Leaf(lambda: torch.multinomial(torch.rand(9), 4).float() + torch.rand(4)),
    "selection": lambda: Leaf(lambda: torch.rand(50)[torch.rand(50) > 0.5]),
    "item": lambda: Leaf(as_often_as_drawn),
    "tolist": lambda: Leaf(lambda: torch.tensor(torch.linspace(0, float(torch.rand(())), 5).tolist())),
    "numpy constant": lambda: Leaf(lambda: torch.from_numpy(np.arange(6.0))[2:].mul_(torch.rand(4))),
    "numpy constant that changes": lambda: Leaf(with_a_constant_that_changes),
    "seeds inside": lambda: Leaf(with_a_seed_inside),
    "windows of one draw": lambda: nn.ParameterList(torch.randn(4, 6).unbind(1)),
}


def constructed(factory: Callable[[], nn.Module], seed: int) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {path: leaf.detach() for path, leaf in factory().named_parameters()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for path, leaf in want.items():
        assert type(got[path]) is Tensor
        assert (got[path].dtype, got[path].shape) == (leaf.dtype, leaf.shape), path
        assert got[path].untyped_storage().nbytes() == leaf.numel() * leaf.element_size(), path
        assert torch.equal(got[path].contiguous().view(torch.uint8), leaf.contiguous().view(torch.uint8)), path


@pytest.mark.parametrize("seed", [0, 11])
@pytest.mark.parametrize("name", MODULES)
def test_values_equal_those_of_the_constructor_bit_for_bit(name, seed):
    assert_same(dict(torch_leaves(MODULES[name], seed=seed)), constructed(MODULES[name], seed))


def test_different_seeds_give_different_values():
    first, second = (dict(torch_leaves(GPT, seed=seed))["embed.weight"] for seed in (0, 11))
    assert not torch.equal(first, second)


def test_a_tied_parameter_is_yielded_once_and_buffers_are_not():
    paths = [path for path, _ in torch_leaves(GPT, seed=0)]
    assert "embed.weight" in paths
    assert "head.weight" not in paths
    assert "mask" not in paths
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize("name", ["gpt", "trunc_normal_", "seeds inside"])
def test_the_random_state_of_the_caller_is_unchanged_at_every_yield(name):
    before = torch.get_rng_state()
    leaves = torch_leaves(MODULES[name], seed=3)
    for _ in leaves:
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_caller_may_draw_between_leaves():
    leaves = {}
    with torch.random.fork_rng(devices=[]):
        for path, leaf in torch_leaves(GPT, seed=3):
            leaves[path] = leaf
            torch.rand(7)
    assert_same(leaves, constructed(GPT, 3))


def test_the_default_device_of_the_caller_does_not_matter():
    with torch.device("meta"):
        leaves = dict(torch_leaves(GPT, seed=3))
    assert_same(leaves, constructed(GPT, 3))


def test_the_random_state_is_unchanged_if_the_factory_fails():
    def factory() -> nn.Module:
        nn.Linear(3, 3)
        raise KeyError("mine")

    before = torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        next(torch_leaves(factory, seed=0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_skipped_draw_changes_later_values(monkeypatch):
    """The comparison can fail: without the discarded draws, every leaf starts at the head of the stream."""
    call = init_tape.InitTape._call

    def skip(self, op, env):
        discarded = op.func is torch.ops.aten.uniform_.default and op.stream is None
        return None if discarded else call(self, op, env)

    monkeypatch.setattr(init_tape.InitTape, "_call", skip)
    got, want = dict(torch_leaves(MODULES["linear"], seed=0)), constructed(MODULES["linear"], 0)
    assert torch.equal(got["0.weight"], want["0.weight"])
    assert not torch.equal(got["2.weight"], want["2.weight"])


class LiveBytes(TorchDispatchMode):
    """A mode that measures the most bytes of real tensors that are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree.leaves((args, out)):
            if isinstance(x, Tensor) and not isinstance(x, FakeTensor) and x.device.type == "cpu":
                storage = x.untyped_storage()
                if id(storage) not in self.live:
                    weakref.finalize(storage, self.live.pop, id(storage))
                self.live[id(storage)] = storage.nbytes()
        self.peak = max(self.peak, sum(self.live.values()))
        return out


def mlp(layers: int = 12, width: int = 64) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def mlp_scaled_at_the_end() -> nn.Module:
    """Every leaf depends on an early draw and on a late operation: in stream order all would be alive at once."""
    module = mlp()
    for leaf in module.parameters():
        leaf.data.mul_(0.5)
    return module


def mlp_by_many_steps() -> nn.Module:
    """Every step of a leaf's computation makes a tensor of the leaf's size."""
    module = mlp()
    for layer in module.children():
        weight = torch.randn(64, 64)
        for _ in range(12):
            weight = weight * 0.9
        layer.weight = nn.Parameter(weight)
    return module


@pytest.mark.parametrize(("factory", "alive"), [(mlp, 1), (mlp_scaled_at_the_end, 1), (mlp_by_many_steps, 2)])
def test_only_one_leaf_and_its_inputs_are_alive_at_once(factory, alive):
    leaf, whole = 64 * 64 * 4, 12 * (64 * 64 + 64) * 4
    with LiveBytes() as real:
        module = factory()
    assert real.peak >= whole
    del module
    with LiveBytes() as ours:
        parts = place_leaves(torch_leaves(factory, seed=0), lambda _, leaf: leaf.chunk(8)[1])
    assert sum(part.untyped_storage().nbytes() for part in parts.values()) == whole // 8
    assert ours.peak <= whole // 8 + alive * leaf
    torch.manual_seed(0)
    assert_same(parts, {path: leaf.detach().chunk(8)[1] for path, leaf in factory().named_parameters()})


class RealDraws(TorchDispatchMode):
    """A mode that counts the draws on real tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        real = bool(args) and isinstance(args[0], Tensor) and not isinstance(args[0], FakeTensor)
        self.count += real and torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def test_an_overwritten_value_is_drawn_only_to_advance_the_stream():
    def factory() -> nn.Module:
        module = nn.Linear(5, 5)  # two draws
        nn.init.normal_(module.weight)  # a third
        nn.init.zeros_(module.bias)
        return module

    with RealDraws() as draws:
        dict(torch_leaves(factory, seed=0))
    assert draws.count == 3 + 1


def test_a_leaf_is_freed_when_the_caller_releases_it():
    seen: list[weakref.ref] = []

    def place(path: str, leaf: Tensor) -> Tensor:
        assert all(earlier() is None for earlier in seen)
        seen.append(weakref.ref(leaf.untyped_storage()))
        return leaf[:1]

    parts = place_leaves(torch_leaves(mlp, seed=0), place)
    assert len(seen) == len(parts) == 24
    assert all(earlier() is None for earlier in seen)


def test_place_gets_path_and_leaf_and_its_result_is_stored():
    leaves = [("a", torch.arange(6.0)), ("b", torch.ones(2, 3))]
    placed = place_leaves(leaves, lambda path, leaf: leaf.double() if path == "a" else leaf)
    assert list(placed) == ["a", "b"]
    assert torch.equal(placed["a"], torch.arange(6.0).double())
    assert placed["b"] is leaves[1][1]


def test_a_path_that_comes_twice_is_an_error_that_names_it():
    with pytest.raises(FdpError, match=r"blocks\.0\.weight: expected every leaf once"):
        place_leaves([("blocks.0.weight", torch.ones(1))] * 2, lambda _, leaf: leaf)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: nn.Linear(3, 4, device="meta"), "builds its module on the CPU, got .* on meta"),
        (lambda: Leaf(lambda: torch.randn(4).resize_(9)), "resize"),
        (lambda: Leaf(lambda: torch.from_numpy(torch.rand(5).numpy())), r"numpy\(\)"),
        (lambda: Leaf(lambda: torch.randn(4, dtype=torch.complex64).conj()), "conjugated"),
    ],
)
def test_operations_that_cannot_be_replayed_are_an_error(factory, message):
    before = torch.get_rng_state()
    with pytest.raises(FdpError, match=message):
        dict(torch_leaves(factory, seed=0))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_setting_changed_between_leaves_is_an_error_that_names_the_leaf():
    leaves = torch_leaves(lambda: nn.ParameterList([torch.rand(3), torch.rand(3)]), seed=0)
    next(leaves)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(FdpError, match=r"^1: expected aten.rand.default to give .*float32.*, got .*float64"):
            next(leaves)
    finally:
        torch.set_default_dtype(torch.float32)
