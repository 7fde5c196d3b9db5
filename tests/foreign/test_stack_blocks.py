"""A module as a stack: where its blocks are, what comes before and after them, and that nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdp import tree
from fdp.fast.compiled import CompiledRunner
from fdp.foreign.find_stack import find_stack
from fdp.foreign.leaves import foreign_model, leaf_paths, params_of
from fdp.foreign.stack.stack_blocks import stack_blocks
from fdp.foreign.uses.dropout import with_keys
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.execution import EAGER, Execution, Memory
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.gradients.vjp import vjp
from fdp.keys import key
from fdp.model import Block, Model
from fdp.types import Clip, FdpError, Tree

WIDTH, WORDS, TOKENS = 6, 11, 5


class Layer(nn.Module):
    """``h + tanh(W h) scale``, with a mask and positions from outside."""

    def __init__(self, depth: int = 0):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.depth = depth
        self.drop = nn.Dropout(0.4)

    def forward(self, h: Tensor, mask: Tensor | None = None, *, positions: Tensor | None = None, scale: float = 1.0):
        new = self.drop(torch.tanh(self.linear(h))) * scale
        new = new if mask is None else new * mask
        return h + (new if positions is None else new * positions)


class Stacked(nn.Module):
    """Embedding, three layers, a norm and a head; ``tied``: the head is the table of the embedding itself."""

    def __init__(self, *, tied: bool = False, layer: Callable[[int], nn.Module] = Layer):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([layer(i) for i in range(3)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = None if tied else nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        mask = (tokens != 0).to(h.dtype).unsqueeze(-1)
        positions = (torch.arange(1, tokens.shape[1] + 1, device=tokens.device)[None, :, None] / 7).to(h.dtype)
        for layer in self.layers:
            h = self.called(layer, h, mask, positions)
        h = self.norm(h)
        return F.linear(h, self.embed.weight) if self.head is None else self.head(h)

    def called(self, layer: nn.Module, h: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        return layer(h, mask, positions=positions, scale=0.5)


def losses(scores: Tensor, data: Tree) -> Tensor:
    return (
        F.cross_entropy(scores[:, :-1].flatten(0, 1), data["tokens"][:, 1:].flatten(), reduction="none")
        .view(len(scores), -1)
        .mean(1)
    )


def call(module: Any, data: Tree) -> Tensor:
    return module(data["tokens"])


def some_data(samples: int = 3) -> dict[str, Tensor]:
    return {"tokens": torch.randint(0, WORDS, (samples, TOKENS), generator=torch.Generator().manual_seed(1))}


def made(kind: type[Stacked] = Stacked, **options: Any) -> tuple[nn.Module, Model, Tree]:
    torch.manual_seed(0)
    module = kind(**options).double().eval()
    model = foreign_model(module, stack_blocks(module, call=call, finish=losses, example=some_data(2)))
    return module, model, params_of(module, model)


def gradients_alone(module: nn.Module, model: Model, data: Tree) -> dict[str, Tensor]:
    """Every sample's gradient of every leaf, by a backward of the module called with that sample alone."""
    found: dict[str, list[Tensor]] = {path: [] for path in model.leaves}
    own = dict(module.named_parameters())
    for b in range(len(data["tokens"])):
        one = tree.map(lambda leaf: leaf[b : b + 1], data)  # noqa: B023
        slopes = torch.autograd.grad(losses(call(module, one), one).sum(), [own[path] for path in found])
        for path, slope in zip(found, slopes):
            found[path].append(slope)
    return {path: torch.stack(each) for path, each in found.items()}


def assert_exact(
    module: nn.Module, model: Model, params: Tree, data: Tree, *, blocks: CompiledRunner | None = None
) -> None:
    expected = gradients_alone(module, model, data)
    factors = torch.linspace(0.3, 0.9, len(data["tokens"]), dtype=torch.float64)
    for method in (Method.AUTO, Method.GHOST_BK):
        plan = make_plan(model, params, data, method=method, dtype=torch.float64)
        got, norms, stash = per_sample_norms(
            model, params, data, plan=plan, execution=Execution(runner=blocks or EAGER)
        )
        torch.testing.assert_close(got, losses(call(module, data), data), rtol=1e-10, atol=1e-10)
        total = clipped_sum(stash, Clip(dict.fromkeys(expected, factors), torch.tensor(1.0))).value
        for path, each in expected.items():
            torch.testing.assert_close(norms.squared[path], each.flatten(1).square().sum(1), rtol=1e-8, atol=1e-12)
            torch.testing.assert_close(total[path], torch.einsum("b,b...->...", factors, each), rtol=1e-8, atol=1e-12)


# ---------------------------------------------------------------- where the blocks are


def test_the_list_of_layers_is_found():
    assert find_stack(Stacked()).blocks == ("layers.0", "layers.1", "layers.2")
    assert find_stack(Stacked(), "layers.*").blocks == ("layers.0", "layers.1", "layers.2")


def test_a_list_inside_a_layer_is_not_a_stack():
    class Nested(nn.Module):
        def __init__(self):
            super().__init__()
            self.outer = nn.ModuleList([Stacked() for _ in range(2)])

    assert find_stack(Nested()).blocks == ("outer.0", "outer.1")


@pytest.mark.parametrize("pattern", ["layers", "layers.*.linear", "*"])
def test_a_pattern_that_names_no_list_is_refused(pattern):
    with pytest.raises(FdpError, match=r"ends in '\.\*'"):
        find_stack(Stacked(), pattern)


def test_a_pattern_of_another_module_is_refused_and_the_lists_are_named():
    with pytest.raises(FdpError, match="its lists are \\['layers'\\]"):
        find_stack(Stacked(), "model.layers.*")


def test_two_lists_of_similar_size_are_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.ModuleList([Layer() for _ in range(3)])
            self.decoder = nn.ModuleList([Layer() for _ in range(2)])

    with pytest.raises(FdpError, match="'encoder' and \\['decoder'\\]"):
        find_stack(Two())


def test_a_module_without_a_list_is_refused():
    with pytest.raises(FdpError, match="blocks=None"):
        find_stack(nn.Sequential(nn.Linear(2, 2)))


def test_tied_names_are_one_leaf():
    module = Stacked()
    module.head.weight = module.embed.weight  # pyright: ignore
    assert leaf_paths(module)["head.weight"] == "embed.weight"


# ---------------------------------------------------------------- before, layers, after


def test_a_stack_computes_what_the_module_does():
    module, model, params = made()
    assert [block.name for block in model.blocks] == ["before", "layers.0", "layers.1", "layers.2", "after"]
    assert [len(block.params) for block in model.blocks] == [1, 2, 2, 2, 4]
    assert_exact(module, model, params, some_data())


def test_the_module_is_unchanged():
    torch.manual_seed(0)
    module = Stacked().eval()
    before = {name: (id(leaf), leaf.clone()) for name, leaf in module.named_parameters()}
    parts = [id(part) for part in module.modules()]
    stack_blocks(module, call=call, finish=losses, example=some_data(2))
    assert [id(part) for part in module.modules()] == parts
    assert all(id(leaf) == before[name][0] for name, leaf in module.named_parameters())
    assert all(torch.equal(leaf, before[name][1]) for name, leaf in module.named_parameters())


def test_parameters_need_no_values():
    with torch.device("meta"):
        module = Stacked().eval()
    blocks = stack_blocks(module, call=call, finish=losses, example=some_data(2))
    held, params = made()[0], made()[2]
    model = foreign_model(module, blocks)
    torch.testing.assert_close(model.loss(params, some_data()), losses(call(held, some_data()), some_data()))


def test_equal_layers_share_one_function_and_others_do_not():
    _, model, _ = made()
    assert len({block.apply for block in model.blocks}) == 3

    class Deeper(Layer):
        def forward(self, h: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(h, *args, **kwargs) * (1 + self.depth // 2)

    module, model, params = made(layer=Deeper)
    assert len({block.apply for block in model.blocks}) == 4  # layers 0 and 1 multiply by 1, layer 2 by 2
    assert_exact(module, model, params, some_data())


def test_layers_with_different_buffers_do_not_share_a_function():
    class Buffered(Layer):
        def __init__(self, depth: int):
            super().__init__(depth)
            self.register_buffer("gain", torch.tensor([1.0, 1.0, 3.0][depth]))

        def forward(self, h: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(h, *args, **kwargs) * self.gain

    module, model, params = made(layer=Buffered)
    assert len({block.apply for block in model.blocks}) == 4
    assert_exact(module, model, params, some_data())


def test_an_embedding_that_is_also_the_head_is_one_leaf_used_in_both_parts():
    module, model, params = made(tied=True)
    assert model.blocks[0].params == {"embed.weight": "embed.weight"}
    assert model.blocks[-1].params["embed.weight"] == "embed.weight"
    plan = make_plan(model, params, some_data(), method=Method.GHOST_BK, dtype=torch.float64)
    assert [use.rule for uses in plan.uses for use in uses if use.path == "embed.weight"] == ["embedding", "linear"]
    assert_exact(module, model, params, some_data())


def test_layers_that_return_tuples_are_exact():
    class Pairing(Layer):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs), None

    class Unpairing(Stacked):
        def called(self, *args: Any) -> Tensor:
            return super().called(*args)[0]

    module, model, params = made(Unpairing, layer=Pairing)
    assert_exact(module, model, params, some_data())


class Chatty(Layer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(*args, **kwargs)
        return out, (out.mean(-1, keepdim=True), None)


def test_layers_that_return_more_tensors_are_exact_if_those_are_unused():
    class Deaf(Stacked):
        def called(self, *args: Any) -> Tensor:
            return super().called(*args)[0]

    module, model, params = made(Deaf, layer=Chatty)
    assert_exact(module, model, params, some_data())


def test_layers_that_return_more_tensors_are_refused_if_those_are_used():
    class Listening(Stacked):
        def called(self, *args: Any) -> Tensor:
            out, (mean, _) = super().called(*args)
            self.heard = mean.sum()
            return out

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) + self.heard

    with pytest.raises(FdpError, match=r"also uses results of \['layers.*; take the module as one block"):
        made(Listening, layer=Chatty)


def test_computation_between_the_layers_is_refused():
    class Between(Stacked):
        def called(self, layer: nn.Module, h: Tensor, *args: Tensor) -> Tensor:
            return super().called(layer, h * 2, *args)

    with pytest.raises(FdpError, match="computes something between its blocks"):
        made(Between)


def test_a_layer_that_runs_twice_is_refused():
    class Twice(Stacked):
        def called(self, layer: nn.Module, h: Tensor, *args: Tensor) -> Tensor:
            return super().called(layer, super().called(layer, h, *args), *args)

    with pytest.raises(FdpError, match="expected one call, got two"):
        made(Twice)


def test_skipped_layers_are_refused():
    class Short(Stacked):
        def called(self, layer: nn.Module, h: Tensor, *args: Tensor) -> Tensor:
            return h if layer is self.layers[1] else super().called(layer, h, *args)

    with pytest.raises(FdpError, match="expected 3 blocks to be called, got calls of 2"):
        made(Short)


class Walking(Stacked):
    """Layers in some order, and something made of what they returned."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        h, seen = self.embed(tokens), []
        for i in self.order:
            h = self.layers[i](h)
            seen.append(h)
        assert self.head is not None
        return self.head(self.norm(self.end(tokens, seen)))

    def end(self, tokens: Tensor, seen: list[Tensor]) -> Tensor:
        return seen[-1]


@pytest.mark.parametrize("order", [(1, 0, 2), (0, 1, 2, 2), (0, 1, 2, 0, 1, 2)])
def test_layers_that_run_in_another_order_or_again_after_the_last_are_refused(order):
    kind = type("Ordered", (Walking,), {"order": order})
    with pytest.raises(FdpError, match=r"expected a module that calls each of .* once and in order, got calls of"):
        made(kind)


@pytest.mark.parametrize("end", [lambda _, tokens, seen: sum(seen), lambda _, tokens, seen: seen[-2] + seen[-1]])
def test_a_module_that_uses_results_of_earlier_layers_is_refused(end):
    with pytest.raises(FdpError, match=r"also uses results of \['layers.*; take the module as one block"):
        made(type("Summed", (Walking,), {"end": end}))


def test_values_from_before_the_layers_may_be_used_after_them():
    class Skipped(Walking):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Sequential(self.embed, nn.Linear(WIDTH, WIDTH))  # pyright: ignore

        def end(self, tokens: Tensor, seen: list[Tensor]) -> Tensor:
            return seen[-1] + self.embed(tokens)

    assert_exact(*made(Skipped), some_data())


def test_placeholders_have_the_attributes_of_their_layers():
    class Asking(Stacked):
        def called(self, layer: Any, h: Tensor, *args: Tensor) -> Tensor:
            return super().called(layer, h, *args) if layer.depth < 3 else h

    assert_exact(*made(Asking), some_data())


def test_parametrised_layers_are_exact():
    def normalised(depth: int) -> nn.Module:
        layer = Layer(depth)
        nn.utils.parametrizations.weight_norm(layer.linear)
        return layer

    assert_exact(*made(layer=normalised), some_data())


def test_a_layer_that_writes_into_its_argument_is_refused():
    class Writing(Layer):
        def forward(self, h: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            h += self.linear(h)
            return h

    with pytest.raises(FdpError, match=r"layers.0: expected a layer that leaves its arguments as they are"):
        made(layer=Writing)


def test_arguments_that_depend_on_parameters_but_hold_no_samples_are_refused():
    class Learned(Stacked):
        def called(self, layer: nn.Module, h: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
            return super().called(layer, h, self.gains(mask), positions)

        def gains(self, mask: Tensor) -> Tensor:
            if not hasattr(self, "kept") or self.kept[0] is not mask:
                self.kept = (mask, self.norm.weight * 2)
            return self.kept[1]

    with pytest.raises(FdpError, match="take the module as one block"):
        made(Learned)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_arguments_that_depend_on_parameters_and_samples_are_differentiated(compiled):
    class Recalling(Stacked):
        """Every layer sees the embedding."""

        def forward(self, tokens: Tensor) -> Tensor:
            first = torch.sigmoid(self.embed(tokens))
            h = first * 2
            for layer in self.layers:
                h = layer(h, first)
            assert self.head is not None
            return self.head(self.norm(h))

    module, model, params = made(Recalling)
    assert_exact(module, model, params, some_data(), blocks=CompiledRunner(backend="aot_eager") if compiled else None)


def test_data_that_call_layers_differently_than_the_example_are_refused():
    class Choosy(Stacked):
        def called(self, layer: nn.Module, h: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
            return layer(h, mask) if h.shape[1] > TOKENS else super().called(layer, h, mask, positions)

    _, model, params = made(Choosy)
    longer = {"tokens": torch.ones(2, TOKENS + 1, dtype=torch.int64)}
    with pytest.raises(FdpError, match="give an example with the entries and lengths of the data"):
        model.loss(params, longer)


# ---------------------------------------------------------------- engines


def test_materialised_blocks_and_second_backwards_are_exact():
    module, model, params = made()
    data, expected = some_data(), gradients_alone(module, model, some_data())
    for method in (Method.MATERIALIZE, Method.GHOST):
        plan = make_plan(model, params, data, method=method, dtype=torch.float64)
        for memory in (Memory(), Memory(recompute=True)):
            _, norms, stash = per_sample_norms(model, params, data, plan=plan, execution=Execution(memory=memory))
            total = clipped_sum(stash, Clip(dict.fromkeys(expected, torch.ones(3)), torch.tensor(1.0))).value
            for path, each in expected.items():
                torch.testing.assert_close(norms.squared[path], each.flatten(1).square().sum(1), rtol=1e-8, atol=1e-12)
                torch.testing.assert_close(total[path], each.sum(0), rtol=1e-8, atol=1e-12)


@pytest.mark.long
def test_compiled_blocks_equal_eager_ones_and_layers_are_compiled_once():
    module, model, params = made(tied=True)
    blocks = CompiledRunner(backend="aot_eager")
    assert_exact(module, model, params, some_data(), blocks=blocks)
    assert len({id(kind.run) for kind in blocks.kinds.values()}) == 3


def test_a_block_marked_as_not_compiled_is_not_compiled():
    def apply(params: Tree, carry: Tree, data: Tree) -> Tensor:
        assert torch.compiler.is_compiling() == compiled
        return (data["x"] * params["w"]).sum(1)

    for compiled in (True, False):
        block = Block("one", {"w": "w"}, apply, compiled=compiled)
        weights, data = {"w": torch.ones(2)}, {"x": torch.ones(3, 2)}
        out, pull = CompiledRunner(backend="aot_eager").plain_vjp(block, weights, (), data, frozenset("w"))
        assert out.tolist() == [2.0] * 3
        assert pull(torch.ones(3))[1]["w"].tolist() == [3.0, 3.0]


def test_equal_layers_draw_different_dropout_and_a_forward_is_repeatable():
    module, model, params = made()
    module.train()
    model = foreign_model(module, stack_blocks(module, call=call, finish=losses, example=some_data(2)))
    data = with_keys(some_data(), key(0))
    assert torch.equal(model.loss(params, data), model.loss(params, data))
    assert not torch.equal(model.loss(params, data), model.loss(params, with_keys(some_data(), key(1))))
    flat, keys = tree.flatten(params), []
    carry: Tree = ()
    for block in model.blocks[:-1]:
        carry = block.apply(tree.select(flat, block.params), carry, data)
        keys.append(carry[-1])
    assert all(not torch.equal(a, b) for i, a in enumerate(keys) for b in keys[:i])
    plan = make_plan(model, params, data, method=Method.GHOST_BK, dtype=torch.float64)
    expected = make_plan(model, params, data, method=Method.MATERIALIZE, dtype=torch.float64)
    got, want = (per_sample_norms(model, params, data, plan=p)[1].total() for p in (plan, expected))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_extras_in_the_carry_take_no_memory_and_no_gradient():
    _, model, params = made()
    data, flat = some_data(4), tree.flatten(params)
    before, layer, *_ = model.blocks
    hidden, mask, positions = before.apply(tree.select(flat, before.params), (), data)
    assert [leaf.is_floating_point() for leaf in (hidden, mask, positions)] == [True, False, False]
    assert (positions.shape[0], positions.stride()[0]) == (4, 0)
    _, *handed_on = layer.apply(tree.select(flat, layer.params), (hidden, mask, positions), data)
    assert all(a is b for a, b in zip(handed_on, (mask, positions)))


# ---------------------------------------------------------------- leaves that are no floats


def test_integers_pass_through_a_vjp():
    def fn(carry: Tree, w: Tensor) -> tuple[Tree, Tensor]:
        h, ids = carry
        return (h * w * ids, ids + 1), h.sum()

    h, ids, w = torch.tensor([1.0, 2.0]), torch.tensor([3, 4]), torch.tensor(5.0)
    out, pull, aux = vjp(fn, (h, ids), w)
    assert out[0].tolist() == [15.0, 40.0]
    assert out[1].tolist() == [4, 5]
    assert aux.item() == 3.0
    (h_slope, same), w_slope = pull((torch.ones(2), ids))
    assert h_slope.tolist() == [15.0, 20.0]
    assert same is ids
    assert w_slope.item() == 11.0
