"""The contract over choices of norms and sums: no attack of ``tests.adversary`` moves the sum by more than its bound.

Every rule, and every pair of rules on one leaf, in one block or two; every norm choice, sum choice and budget; all clip
styles; float32 and bfloat16. A failure names the model, the leaf, the attack, the choice, the style and the dtype.
"""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from fdp_kernels.keep_int8 import round_to_int8
from fdp_kernels.tied import stored_tied_norms_reference

from fdp.fast.compiled import CompiledRunner
from fdp.gradients import launches, rules, shared_leaves
from fdp.gradients.costs import Choice, NormBy, SumBy
from fdp.gradients.execution import Memory
from fdp.gradients.linear_maps import MatrixMap, Sides
from fdp.gradients.per_sample import Transform, _squared, per_sample_norms
from fdp.gradients.plan import Method, Plan, make_plan
from fdp.gradients.precondition import map_record
from fdp.gradients.rules import Dense, Pair
from fdp.model import Model
from fdp.privacy import clipping
from tests.adversary import (
    ARENAS,
    BEFORE,
    FAMILIES,
    IN_8_BITS,
    SLACK,
    STYLES,
    TARGETS,
    TOKENS,
    WAYS,
    WIDTH,
    Target,
    adapted,
    attacked,
    breaches,
    crowded,
    forced,
    joined,
    language,
    measure,
    named,
    plans_of,
)
from tests.adversary_search import Search
from tests.test_contract import preconditioned

DTYPES = (torch.float32, torch.bfloat16)
OTHER_STYLES = [style for style in STYLES if style != "flat"]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])
slow = pytest.mark.slow


def way_name(way: tuple[NormBy, SumBy]) -> str:
    return f"{way[0].value}-{way[1].value.split()[0]}"


@cache
def target_of(name: str, dtype: torch.dtype, few: bool = True) -> Target:
    return attacked(ARENAS[name](), dtype, few=few)


@cache
def auto_of(name: str, dtype: torch.dtype, few: bool = True) -> Plan:
    target = target_of(name, dtype, few)
    return make_plan(target.model, target.params, target.data, method=Method.AUTO, dtype=dtype)


IN_SEVERAL_WAYS = ("linear+add", "linear|linear", "embedding|linear")
TELLING = ("s +-1e+20", "squares of 1.04858e+06 less 1", "tokens +-1e+08, gradients 1e+08", "nan", "just below")
"""Parts of the names of attacks that are also tried where a second backward makes every sum slow."""


def telling(target: Target) -> list[str]:
    return [attack for attack in target.attackers if any(part in attack for part in TELLING)]


def check_arena(
    name: str, way: tuple[NormBy, SumBy], dtype: torch.dtype, styles: list[str], *, few: bool = True
) -> None:
    target = target_of(name, dtype, few)
    plan = forced(auto_of(name, dtype, few), *way)
    only = telling(target) if way[1] is SumBy.SECOND_BACKWARD and few else None
    found = breaches(target, {named(plan.choices["w"]): plan}, styles, dtype, only=only)
    assert not found, "\n".join(found)


def quick_ways(name: str) -> list[tuple[NormBy, SumBy]]:
    """Return the choices that differ on a CPU; a leaf of small parameters has none.

    Two blocks matter if uses are merged, or if a second backward goes through them.
    """
    kept, direct, gram, again = (WAYS[i] for i in (0, 1, 2, 4))
    small = name.split(" ")[-1] in ("vector",) or name in ("scale", "add", "scale+scale", "scale+add", "add+add")
    if small:
        return [kept, again]
    return [kept, again, gram] if "|" in name else [kept, direct, gram]


QUICK = [(name, way) for name in ARENAS for way in quick_ways(name)]
REST = [(name, way) for name in ARENAS for way in WAYS if way not in quick_ways(name)]


def cases(pairs: list[tuple[str, tuple[NormBy, SumBy]]]) -> list:
    return [pytest.param(name, way, id=f"{name.replace(' ', '-')}-{way_name(way)}") for name, way in pairs]


def test_the_arenas_have_every_pair_of_rules_of_a_family():
    for kinds in FAMILIES.values():
        assert all(any(name.startswith(f"{a}+{b}") or name.startswith(f"{b}+{a}") for name in ARENAS)
                   for a in kinds for b in kinds)  # fmt: skip


@pytest.mark.parametrize(("name", "way"), cases(QUICK))
def test_no_attack_moves_the_sum_too_far_in_float32(name, way):
    check_arena(name, way, torch.float32, ["flat"])


@pytest.mark.parametrize(
    ("name", "way"), cases([(name, way) for name, way in QUICK if "|" not in name and way is not WAYS[0]])
)
def test_no_attack_moves_the_sum_too_far_in_bfloat16(name, way):
    check_arena(name, way, torch.bfloat16, ["flat"])


STYLED = ("linear", "embedding", "linear+embedding", "linear+add", "linear|linear")


@pytest.mark.parametrize("style", OTHER_STYLES)
@pytest.mark.parametrize(("name", "way"), cases([(name, way) for name in STYLED for way in WAYS[:3]]))
def test_no_attack_moves_the_sum_too_far_in_any_style(name, way, style):
    check_arena(name, way, torch.float32, [style])


@slow
@by_dtype
@pytest.mark.parametrize(("name", "way"), cases(QUICK + REST))
def test_no_attack_of_all_moves_the_sum_too_far(name, way, dtype):
    check_arena(name, way, dtype, list(STYLES), few=False)


@slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=["float16", "float64"])
@pytest.mark.parametrize(("name", "way"), cases(QUICK))
def test_no_attack_moves_the_sum_too_far_in_other_dtypes(name, way, dtype):
    check_arena(name, way, dtype, ["flat"])


@pytest.mark.parametrize("way", [WAYS[1], WAYS[2], WAYS[3]], ids=way_name)
@pytest.mark.parametrize("name", ["linear", "embedding", "conv1d", "experts", "linear+linear", "linear+add"])
def test_a_norm_of_pairs_is_never_below_its_floor(name, way):
    """Tokens +-1e20 add up to nothing, but their norm is not nothing: rounding of their size is within it."""
    target = target_of(name, torch.float32)
    plan = forced(auto_of(name, torch.float32), *way)
    _, norms, _ = per_sample_norms(target.model, target.params, target.data, plan=plan)
    measured = norms.total()[BEFORE + target.attackers.index("w: tokens +-1e+20")]
    largest = 1e20 * TOKENS * 2 * WIDTH * WIDTH  # of all elements, tokens and uses
    assert 2.0**-27 * 1e20 * TOKENS <= measured <= 2.0**-20 * largest


CROWDED = [("scale|scale vector", WAYS[4], 8192), ("linear|linear", WAYS[4], 1024), ("linear", WAYS[1], 1024),
           ("embedding", WAYS[1], 1024), ("linear+add", WAYS[2], 1024), ("linear|embedding", WAYS[5], 512)]  # fmt: skip


@pytest.mark.parametrize(("name", "way", "size"), CROWDED, ids=[f"{n}-{way_name(w)}" for n, w, _ in CROWDED])
def test_a_crowd_of_samples_that_cancel_does_not_round_an_honest_one_over_the_bound(name, way, size):
    target = crowded(ARENAS[name](), "w", torch.float32, size=size)
    plan = make_plan(target.model, target.params, target.data, method=Method.AUTO)
    found = breaches(target, {way_name(way): forced(plan, *way)}, ["flat"], torch.float32)
    assert not found, "\n".join(found)


def test_the_norm_of_two_gradients_that_nearly_cancel_is_not_understated():
    """They differ by a unit in the last place of float32: their squares in float64 lose a part of what is left."""
    for seed in range(20):
        one = 2.0**60 * (1 + torch.rand(2, 4096, generator=torch.Generator().manual_seed(seed)))
        other = -torch.nextafter(one, torch.full_like(one, torch.inf))
        true = (one.double() + other.double()).square().sum(1)
        for way in (WAYS[1], WAYS[2], WAYS[4], WAYS[5]):
            measured = _squared([Dense(one), Dense(other)], Choice(*way, 0.0, 0.0))
            assert bool((measured >= true * (1 - 1e-9)).all()), f"{way_name(way)}, seed {seed}"


# --- whole models: language models, users' windows, packed documents, adapters, foreign modules ---------------------


WHOLE = [  # language models that differ in their data only: in one dtype
    pytest.param(name, dtype, marks=[slow] if name.startswith("gpt-") and i % 2 == j else [])
    for i, name in enumerate(TARGETS)
    for j, dtype in enumerate(DTYPES)
]


@pytest.mark.parametrize(("name", "dtype"), WHOLE, ids=lambda value: str(value).removeprefix("torch."))
def test_no_attack_moves_the_sum_of_a_whole_model_too_far(name, dtype):
    """Methods and budgets as they choose, every choice for all leaves, and every leaf by another choice."""
    target = TARGETS[name](dtype)
    ways = {way: plan for way, plan in plans_of(target, dtype).items() if not way.startswith("symmetric")}
    found = breaches(target, ways, ["flat"], dtype)
    assert not found, "\n".join(found)


@slow
@by_dtype
@pytest.mark.parametrize("name", TARGETS)
def test_no_attack_moves_the_sum_of_a_whole_model_too_far_in_any_style(name, dtype):
    target = TARGETS[name](dtype)
    found = breaches(target, plans_of(target, dtype), OTHER_STYLES, dtype)
    assert not found, "\n".join(found)


def shrinking(model: Model) -> Transform:
    """Maps of every leaf to a tenth or less: a sum of what was not mapped would be far above the bound."""
    draw, sides = torch.Generator().manual_seed(2), {}
    for path in sorted(model.trainable):
        rows = model.leaves[path].shape[0]
        sides[path] = Sides(MatrixMap(0.05 * torch.eye(rows) + 0.01 * torch.rand(rows, rows, generator=draw)), None)
    return partial(map_record, sides)


MAPS = {"stretched": (preconditioned, "pair"), "shrunk": (shrinking, "second")}


@by_dtype
@pytest.mark.parametrize("how", MAPS)
def test_no_attack_moves_the_sum_of_mapped_gradients_too_far(how, dtype):
    maps, ways = MAPS[how]
    arena = joined(
        ("linear", "embedding", "linear+linear", "linear+embedding", "linear+add", "embedding+add"), blocks=1
    )
    target = attacked(arena, dtype, few=True, parts=TELLING if ways == "pair" else ("tokens +-1e+20", "all equal"))
    plans = {way: plan for way, plan in plans_of(target, dtype, methods=False).items() if ways in way}
    plans = {way: plan for way, plan in plans.items() if not way.startswith("symmetric")}
    found = breaches(target, plans, ["flat"], dtype, transform=maps(arena.model))
    assert not found, "\n".join(found)


# --- compiled blocks, and lazy sums -------------------------------------------------------------


@pytest.mark.parametrize("lazy", [False, True], ids=["evaluated", "lazy"])
@pytest.mark.parametrize("way", WAYS[:2] + WAYS[2:3] + WAYS[4:5], ids=way_name)
def test_no_attack_moves_the_sum_of_compiled_blocks_too_far(way, lazy):
    target, plan, blocks = compiled_target()
    found = breaches(target, {way_name(way): forced(plan, *way)}, ["flat"], torch.float32, blocks=blocks, lazy=lazy)
    assert not found, "\n".join(found)


@cache
def compiled_target() -> tuple[Target, Plan, CompiledRunner]:
    arena = joined(("linear", "linear+embedding", "linear+add", "add|add"), blocks=2)
    target = attacked(arena, torch.float32, few=True, parts=("s +-1e+20", "squares of 1.04858e+06 less 1"))
    plan = make_plan(target.model, target.params, target.data, method=Method.AUTO)
    return target, plan, CompiledRunner(backend="aot_eager")


@pytest.mark.parametrize("way", [WAYS[0], IN_8_BITS], ids=way_name)
@pytest.mark.parametrize("lazy", [False, True], ids=["evaluated", "lazy"])
def test_no_attack_on_a_stored_head_and_its_embedding_moves_the_sum_too_far(monkeypatch, lazy, way):
    """As where kernels run: an embedding's rows beside the stored gradients of its head, by the kernels' references."""
    for module in (rules, launches, shared_leaves):
        monkeypatch.setattr(module, "has_kernels", lambda record: isinstance(record, Pair))
    seen = []
    monkeypatch.setattr(
        shared_leaves, "stored_tied_norms", lambda *of: (seen.append(of), stored_tied_norms_reference(*of))[1]
    )
    target = target_of("embedding|linear", torch.bfloat16)
    plan = forced(auto_of("embedding|linear", torch.bfloat16), *way)
    found = breaches(target, {"keep": plan}, ["flat"], torch.bfloat16, lazy=lazy)
    assert not found, "\n".join(found)
    assert seen
    understated = lambda *of: stored_tied_norms_reference(*of) / 2  # noqa: E731
    monkeypatch.setattr(shared_leaves, "stored_tied_norms", understated)
    assert breaches(target, {"keep": plan}, ["flat"], torch.bfloat16, lazy=lazy)


@by_dtype
@pytest.mark.parametrize(
    "name",
    ["linear", "linear+linear", *(pytest.param(name, marks=pytest.mark.long) for name in IN_SEVERAL_WAYS)],
)
def test_no_attack_moves_the_sum_of_gradients_in_8_bits_too_far(monkeypatch, name, dtype):
    target, plan = target_of(name, dtype), forced(auto_of(name, dtype), *IN_8_BITS)
    assert {choice.norm for choice in plan.choices.values()} >= {NormBy.KEEP_INT8}
    found = breaches(target, {"int8": plan}, ["flat"], dtype)
    assert not found, "\n".join(found)
    if name != "linear":
        return
    real = round_to_int8
    monkeypatch.setattr("fdp_kernels.keep_int8.round_to_int8", lambda G: (*real(G)[:2], real(G)[2] / 2))
    assert breaches(target, {"int8": plan}, ["flat"], dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@by_dtype
def test_no_attack_moves_the_sum_too_far_on_a_gpu(dtype):
    """Kernels in bfloat16, float64 products in float32; all leaves in one model, its blocks compiled."""
    arena = joined(("linear", "embedding", "conv1d", "linear+embedding", "embedding|linear", "linear+add", "add|add"),
                   tokens=TOKENS)  # fmt: skip
    blocks = CompiledRunner() if dtype is torch.bfloat16 else None
    search = Search(arena, dtype, seed=1, device=torch.device("cuda"), blocks=blocks, generation=48)
    plans = search.plans()
    if dtype is torch.bfloat16:  # leaves that are used once, and the head beside its embedding
        alone = [path for path in plans["keep/reuse"].choices if path in ("linear", "embedding_linear")]
        assert len(alone) == 2
        plans["int8"] = forced(plans["keep/reuse"], *IN_8_BITS, leaves=alone)
    for way, plan in plans.items():
        for leaf in arena.leaves:
            found = search.all_named(leaf, plan)
            worst = max(found, key=lambda attack: found[attack].ratio)
            assert found[worst].ratio <= 1 + SLACK[dtype], f"{leaf}, {worst}, {way}: {found[worst].ratio}"


@pytest.mark.parametrize(
    "memory", [Memory(recompute=True), Memory(recompute=True, refetch=True)], ids=["again", "refetch"]
)
def test_no_attack_moves_the_sum_too_far_where_less_is_kept(memory):
    target, plan, _ = compiled_target()
    ways = {way_name(way): forced(plan, *way) for way in (WAYS[1], WAYS[4])}
    found = breaches(target, ways, ["flat"], torch.float32, memory=memory)
    assert not found, "\n".join(found)


# --- the search -----------------------------------------------------------------------------------------------------

SEARCHED = [("linear", 1), ("embedding", 1), ("linear+linear", 1), ("linear+add", 1), ("linear+add", 2),
            ("conv1d", 2), ("add|add", 4), ("linear+embedding", 2)]  # fmt: skip


@by_dtype
@pytest.mark.parametrize(("name", "way"), [(name, WAYS[i]) for name, i in SEARCHED],
                         ids=[f"{name}-{way_name(WAYS[i])}" for name, i in SEARCHED])  # fmt: skip
def test_a_search_finds_no_sample_that_moves_the_sum_too_far(name, way, dtype):
    search = Search(ARENAS[name](), dtype, seed=1)
    plan = forced(search.plans()["keep/reuse"], *way)
    found = search.climb("w", plan, seconds=1.0)
    assert found.ratio <= 1 + SLACK[dtype], f"w of {name}, {way_name(way)}, {dtype}: {found}"
    assert found.tried >= 16


def test_the_search_finds_what_is_there(monkeypatch):
    """Norms of half of every gradient: any sample that is clipped moves the sum by twice its bound."""
    import fdp.types

    real = fdp.types.Norms.total
    monkeypatch.setattr("fdp.types.Norms.total", lambda self: real(self) / 2)
    search = Search(ARENAS["linear"](), torch.float32, seed=1)
    assert search.climb("w", search.plans()["keep/reuse"], seconds=0.1).ratio > 1.9


# --- that these checks would notice ---------------------------------------------------------------------------------


def test_ordinary_samples_are_there_and_clipped():
    target = target_of("linear", torch.float32)
    plan = forced(auto_of("linear", torch.float32), *WAYS[0])
    seen = measure(target, plan, clipping.flat(max_norm=1.0), disturbed=True)
    assert seen.ratios["w: all equal"] == pytest.approx(1, abs=1e-6)
    assert seen.ratios["w: zeros"] == 0
    assert seen.ratios["w: one nan token"] == 0
    assert max(seen.disturbed.values()) < 1e-12  # kept gradients share nothing but the sum of what is clipped
    assert target.size == BEFORE + len(target.attackers) + 2
    assert not torch.equal(target.data["w.0.x"], target.quiet["w.0.x"])


def test_full_models_have_the_properties_they_are_named_for():
    assert any("lora" in path for path in adapted(torch.float32).model.trainable)
    assert language(tied=True, windows=2).data["tokens"].ndim == 3
    assert "segments" in language(tied=False, packed=True).data
