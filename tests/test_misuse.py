"""Ways to lose the guarantee without a word, one by one: each is refused with a message that teaches, or impossible."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fdp.checks.first_call
import fdp.step
from fdp import keys, ops, optimizers, tree
from fdp.checks.first_call import Checks, check_model
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fast.compiled import CompiledRunner
from fdp.fingerprint import fingerprint
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.execution import Execution
from fdp.gradients.lazy_sum import add_sums, evaluate
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.kfac.private.noised_factors import STATISTICS
from fdp.kfac.state import KfacState
from fdp.model import Model, from_loss
from fdp.models import GPTConfig, gpt, mlp
from fdp.optimizers import Optimizer, adamw, sgd
from fdp.parallel.mesh import make_mesh
from fdp.parallel.sharded_init import init_params
from fdp.parallel.sharding import Zero, abstract_params, make_sharding
from fdp.privacy import clipping
from fdp.privacy.accounting import epsilon
from fdp.privacy.clipping import flat
from fdp.privacy.mechanism import Mechanism, statistics, without_noise
from fdp.privacy.noise import add_gaussian, declare_sensitivity, expected_mean
from fdp.privacy.sampling import Poisson, poisson, sample_batch, trusted_batch
from fdp.run.spent import spent
from fdp.stages import make_stages
from fdp.step import init_state, join_observed, make_train_step
from fdp.types import Batch, ClippedSum, FdpError, Flat, TrainState
from tests.ranks import run_on_ranks

MODEL = mlp(widths=(5, 4), classes=3)
DATA = {
    "image": torch.randn(40, 5, generator=torch.Generator().manual_seed(0)),
    "label": torch.arange(40) % 3,
}
SAMPLING = poisson(40, expected_batch_size=8)
MECHANISM = Mechanism(SAMPLING, flat(max_norm=0.5), 1.0)
ROOT = keys.key(1)
SIZE = 8


def plan_of(method: Method = Method.AUTO, model: Model = MODEL) -> Any:
    return make_plan(model, model.init(ROOT), tree.map(lambda leaf: leaf[:SIZE], DATA), method=method)


def step_of(mechanism: Mechanism = MECHANISM, optimizer: Optimizer | None = None, **options: Any) -> Any:
    return make_train_step(MODEL, optimizer or sgd(1.0), mechanism=mechanism, plan=plan_of(), **options)


def state_of(mechanism: Mechanism = MECHANISM, optimizer: Optimizer | None = None) -> TrainState:
    return init_state(MODEL, MODEL.init(ROOT), optimizer or sgd(1.0), mechanism)


def drawn(step: int, sampling: Poisson = SAMPLING, key: Tensor = ROOT, **options: Any) -> Batch:
    return sample_batch(DATA, sampling, key, step=step, microbatch_size=SIZE, **options)


def empty(sampling: Poisson = SAMPLING) -> Batch:
    """A batch of padding: the step is noise, and nothing else."""
    data = tree.map(lambda leaf: leaf[None, :SIZE], DATA)
    return trusted_batch(data, torch.zeros(1, SIZE), sampling, step=None)


def noise_of(
    mechanism: Mechanism, optimizer: Optimizer | None = None, *, at: int = 0, root: Tensor = ROOT, **options: Any
) -> Flat:
    """The noise that a step adds, in units of its own standard deviation."""
    state = state_of(mechanism, optimizer)._replace(step=torch.tensor(at))
    stages = make_stages(MODEL, optimizer or sgd(1.0), mechanism=mechanism, plan=plan_of(), **options)
    after, _, total = join_observed(stages, lambda total: tree.map(torch.clone, total))(
        state, empty(mechanism.sampling), root
    )
    added = stages.finish.noise_added(state, total, stages.key(root, state.step), after)
    return {path: leaf / total.sensitivity / mechanism.noise_multiplier for path, leaf in added.items()}


def correlation(a: Flat, b: Flat) -> float:
    one, other = (torch.cat([leaf.flatten() for leaf in tree.leaves(flat)]) for flat in (a, b))
    return float(torch.corrcoef(torch.stack([one, other]))[0, 1])


# --- a. one key for two steps, or two runs --------------------------------------------------------------------------


def test_one_key_gives_every_step_its_own_noise():
    first, second = noise_of(MECHANISM, at=0), noise_of(MECHANISM, at=1)
    assert abs(correlation(first, second)) < 0.5
    assert correlation(first, noise_of(MECHANISM, at=0)) == pytest.approx(1.0)
    for path, leaf in first.items():
        assert not torch.equal(leaf, second[path])


@pytest.mark.parametrize("how", ["plain", "donated", "blocks"])
def test_one_key_gives_every_step_its_own_noise_however_it_is_computed(how, monkeypatch):
    options: dict[str, Any] = {"plain": {}, "donated": {"donate": ("state",)}}.get(
        how, {"donate": ("state",), "execution": Execution(runner=CompiledRunner(backend="eager"))}
    )
    optimizer = adamw(1.0, b1=0.0, b2=0.0, eps=1.0)  # about linear in the noise
    step, state = step_of(optimizer=optimizer, **options), state_of(optimizer=optimizer)
    moved = []
    for _ in range(3):
        before = tree.map(torch.clone, state.params)
        state, _ = step(state, empty(), ROOT)
        moved.append(tree.map(lambda old, new: old - new, before, state.params))
    for a, b in ((0, 1), (1, 2), (0, 2)):
        assert abs(correlation(tree.flatten(moved[a]), tree.flatten(moved[b]))) < 0.5


def test_the_count_of_adaptive_clipping_has_noise_of_its_own_at_every_step():
    style = clipping.quantile(max_norm=0.5, target_quantile=0.5, learning_rate=1.0, count_noise=4.0)
    mechanism = Mechanism(SAMPLING, style, 1.0)
    step, state, factors = step_of(mechanism), state_of(mechanism), []
    for _ in range(3):
        before = state.clip
        state, _ = step(state, empty(), ROOT)
        factors.append(float(state.clip / before))
    assert len(set(factors)) == 3


def test_samples_of_two_steps_purposes_or_samplings_are_drawn_apart():
    first = drawn(0).data["image"][drawn(0).mask > 0]
    assert torch.equal(first, drawn(0).data["image"][drawn(0).mask > 0])
    for other in (drawn(1), drawn(0, purpose=STATISTICS), drawn(0, poisson(40, expected_batch_size=8.5))):
        theirs = other.data["image"][other.mask > 0]
        assert theirs.shape != first.shape or not torch.equal(theirs, first)


# --- h. one seed, two settings --------------------------------------------------------------------------------------

OTHERS: dict[str, dict[str, Any]] = {
    "clip norm": {"mechanism": MECHANISM._replace(clip=flat(max_norm=0.6))},
    "clip style": {"mechanism": MECHANISM._replace(clip=clipping.automatic(max_norm=0.5))},
    "noise": {"mechanism": MECHANISM._replace(noise_multiplier=1.1)},
    "batch size": {"mechanism": MECHANISM._replace(sampling=poisson(40, expected_batch_size=9))},
    "dataset size": {"mechanism": MECHANISM._replace(sampling=poisson(39, expected_batch_size=8))},
    "learning rate": {"optimizer": sgd(0.9)},
    "momentum": {"optimizer": sgd(1.0, momentum=0.9)},
    "schedule": {"optimizer": sgd(optimizers.cosine(1.0, steps=7))},
    "optimizer": {"optimizer": adamw(1.0)},
    "decay": {"optimizer": sgd(1.0, weight_decay=0.1)},
}


@pytest.mark.parametrize("what", OTHERS)
def test_two_settings_of_one_key_share_no_noise(what):
    """Else the difference of two runs is that of their sums, without noise."""
    changed: Any = {"mechanism": MECHANISM} | OTHERS[what]
    here, there = noise_of(MECHANISM), noise_of(**changed)
    assert abs(correlation(here, there)) < 0.5


def test_two_schedules_are_told_apart_by_what_they_hold():
    schedules = [optimizers.cosine(1.0, steps=5), optimizers.cosine(1.0, steps=6), optimizers.constant(1.0)]
    schedules += [lambda step: step * 0.1, lambda step: step * 0.2]
    prints = {fingerprint(sgd(schedule)) for schedule in schedules}
    assert len(prints) == len(schedules)
    assert fingerprint(sgd(optimizers.cosine(1.0, steps=5))) in prints


SETTINGS: dict[str, Any] = {
    "flat": lambda n: clipping.flat(max_norm=n),
    "per layer": lambda n: clipping.per_layer(max_norm=n),
    "per group": lambda n: clipping.per_group(groups={"a": ["w"]}, max_norms={"a": n}),
    "automatic": lambda n: clipping.automatic(max_norm=1.0, gamma=n),
    "quantile": lambda n: clipping.quantile(max_norm=1.0, target_quantile=0.5, learning_rate=0.2, count_noise=n),
    "noise": lambda n: MECHANISM._replace(noise_multiplier=n),
    "sgd": lambda n: sgd(n),
    "adam": lambda n: optimizers.adamw(1e-3, eps=n),
    "schedule": lambda n: sgd(optimizers.constant(n)),
    "a function": lambda n: lambda step: step * n,
    "a container": lambda n: {"rates": [n, (n, n)]},
}
TYPES = [int, float, np.int64, np.int16, np.float64, np.float32, np.float16, np.longdouble, Fraction, Decimal]


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("name", SETTINGS)
def test_numbers_of_every_kind_are_told_apart(name, kind):
    """Two runs whose numbers were one to a fingerprint would share their noise."""
    if kind is Decimal and name not in ("a function", "a container"):
        pytest.skip("refused")
    of = SETTINGS[name]
    assert fingerprint(of(kind(1))) == fingerprint(of(kind(1))) != fingerprint(of(kind(2)))
    if kind in (np.int64, np.int16):
        assert fingerprint(of(kind(1))) == fingerprint(of(1))


@pytest.mark.parametrize("kind", [np.datetime64, np.timedelta64])
@pytest.mark.parametrize("unit", ["Y", "D", "s", "ns"])
def test_dates_of_numpy_are_told_apart(kind, unit):
    one, other = (kind(number, unit) for number in (1, 2))
    assert fingerprint(lambda: one) == fingerprint(lambda: one) != fingerprint(lambda: other)


RATE: Any = np.float32(0.1)


def test_a_global_of_numpy_in_a_function_is_seen(monkeypatch):
    one = fingerprint(sgd(lambda step: step * RATE))
    monkeypatch.setitem(globals(), "RATE", np.float32(0.2))
    assert fingerprint(sgd(lambda step: step * RATE)) != one


def test_two_losses_of_the_same_leaves_are_two_models():
    params = {"w": torch.zeros(3)}

    def smoothed(by: float):
        return lambda p, data: (data["x"] @ p["w"]) * by

    one, other, again = (from_loss(smoothed(by), params).identity for by in (0.1, 0.2, 0.1))
    assert fingerprint(one) == fingerprint(again) != fingerprint(other)
    heads = [gpt(GPTConfig(1, 8, heads, 4, 7)) for heads in (1, 2)]
    assert heads[0].leaves.keys() == heads[1].leaves.keys()
    assert fingerprint(heads[0].identity) != fingerprint(heads[1].identity)


@pytest.mark.parametrize("method", [Method.GHOST, Method.MATERIALIZE, Method.FLASH])
def test_how_a_step_is_computed_changes_no_noise(method):
    stages = [
        make_stages(MODEL, sgd(1.0), mechanism=MECHANISM, plan=plan_of(by), execution=make_execution(compile=compile))
        for by, compile in ((Method.AUTO, Compile.NONE), (method, Compile.BLOCK))
    ]
    one, other = (stage.key(ROOT, torch.tensor(3)) for stage in stages)
    assert torch.equal(one, other)


# --- b. batches that nobody drew, or drew for something else --------------------------------------------------------


def test_a_batch_made_by_hand_is_refused():
    batch = drawn(0)
    with pytest.raises(FdpError, match=r"got one made by hand: .* epsilon would not hold. Draw it by fdp.sample_batch"):
        step_of()(state_of(), Batch(batch.data, batch.mask), ROOT)
    with pytest.raises(FdpError, match="trusted_batch accepts one of your own, unchecked"):
        step_of()(state_of(), Batch(batch.data, batch.mask), ROOT)
    mine = trusted_batch(batch.data, batch.mask, SAMPLING, step=0)
    assert int(step_of()(state_of(), mine, ROOT)[0].step) == 1


def test_a_batch_of_another_sampling_is_refused():
    other = poisson(40, expected_batch_size=16)
    with pytest.raises(
        FdpError, match=r"mechanism's sampling \(8 of 40 expected\), got one by another \(16 of 40 expected\)"
    ):
        step_of()(state_of(), drawn(0, other), ROOT)


def test_a_batch_that_is_used_twice_is_refused():
    step, batch = step_of(), drawn(0)
    state, _ = step(state_of(), batch, ROOT)
    with pytest.raises(FdpError, match=r"expected the draw of step 1, .* got that of step 0: .* step=1\)"):
        step(state, batch, ROOT)
    with pytest.raises(FdpError, match="expected the draw of step 0"):
        step(state_of(), drawn(1), ROOT)
    state, _ = step(state, drawn(1), ROOT)
    assert int(state.step) == 2


def test_a_sample_in_two_microbatches_is_refused():
    batch = drawn(0)
    twice = batch._replace(
        data=tree.map(lambda leaf: torch.cat([leaf, leaf]), batch.data), mask=torch.cat([batch.mask] * 2)
    )
    with pytest.raises(FdpError, match="it was changed after the draw, and a sample could be in it twice"):
        step_of()(state_of(), twice, ROOT)


def test_the_draw_of_another_release_is_refused():
    with pytest.raises(FdpError, match="expected a draw for training, got the one for statistics"):
        step_of()(state_of(), drawn(0, purpose=STATISTICS), ROOT)


def test_a_step_without_privacy_takes_any_batch():
    batch = drawn(0)
    step = make_train_step(
        MODEL, sgd(1.0), mechanism=Mechanism(SAMPLING, flat(max_norm=1.0), 0.0), plan=plan_of(Method.NONE)
    )
    state = state_of()
    for _ in range(2):
        state, _ = step(state, Batch(batch.data, batch.mask), ROOT)
    assert int(state.step) == 2


def test_the_number_of_a_step_is_asked_of_the_device_once(monkeypatch):
    """A state that the step returned is known by its number, one that anybody else wrote to is not."""
    from fdp.checks.gate import Gate

    class Away(Tensor):
        """A tensor that says it is elsewhere, and counts who waits for it."""

        waits = 0

        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("meta")

        def __int__(self) -> int:
            Away.waits += 1
            return int(self.as_subclass(Tensor))

    gate, count = Gate(SAMPLING), torch.tensor(4).as_subclass(Away)
    assert gate.check(count, drawn(4)) == 4
    after = torch.tensor(5).as_subclass(Away)
    gate.remember(after, 4)
    assert gate.check(after, drawn(5)) == 5
    assert Away.waits == 1
    gate.remember(after, 4)
    after.fill_(2)
    assert gate.check(after, drawn(2)) == 2
    assert Away.waits == 2
    gate.remember(after, 1)
    assert gate.check(after, drawn(2)) == 2
    assert Away.waits == 2
    after.data.fill_(3)  # by a graph: no new version
    with pytest.raises(FdpError, match="expected the draw of step 3"):  # nothing was remembered of a failed step
        gate.check(after, drawn(2))
    assert Away.waits == 3


@pytest.mark.slow
def test_in_a_compiled_step_the_batch_of_another_step_releases_nothing():
    torch._dynamo.reset()
    step = torch.compile(step_of(checks=Checks.SKIPPED), fullgraph=True, dynamic=False, backend="eager")
    state, _ = step(state_of(), drawn(0), ROOT)
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(state.params))
    state, _ = step(state, drawn(0), ROOT)
    assert all(bool(leaf.isnan().all() | leaf.isinf().all()) for leaf in tree.leaves(state.params))
    with pytest.raises(Exception, match="got one made by hand"):
        step(state_of(), Batch(drawn(0).data, drawn(0).mask), ROOT)


# --- c. no noise ----------------------------------------------------------------------------------------------------


def test_private_training_without_noise_must_be_asked_for():
    silent = Mechanism(SAMPLING, flat(max_norm=0.5), 0.0)
    with pytest.raises(
        FdpError, match=r"expected a finite number above 0 for private training, got 0.0.*without_noise"
    ):
        step_of(silent)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(FdpError, match="noise_multiplier"):
            step_of(silent._replace(noise_multiplier=bad))
    said = without_noise(SAMPLING, flat(max_norm=0.5))
    assert int(step_of(said)(state_of(said), drawn(0), ROOT)[0].step) == 1
    with pytest.raises(FdpError, match=r"expected 0 in a mechanism without noise, got 1\.0"):
        step_of(said._replace(noise_multiplier=1.0))


# --- d. a loss over the batch, and norms that are wrong -------------------------------------------------------------


def centred(p: Any, data: Any) -> Tensor:
    """A loss that looks at the other samples: the mean of the batch is taken off."""
    h = ops.linear(data["image"], p["w"])
    return (h - h.mean(0)).square().sum(1)


def own_step(loss: Any, shape: tuple[int, ...] = (3, 5), method: Method = Method.AUTO, **options: Any) -> Any:
    params = {"w": torch.randn(shape, generator=torch.Generator().manual_seed(1))}
    model = from_loss(loss, params, name="mine")
    plan = make_plan(model, params, tree.map(lambda leaf: leaf[:SIZE], DATA), method=method)
    step = make_train_step(model, sgd(1.0), mechanism=MECHANISM, plan=plan, **options)
    return step, init_state(model, params, sgd(1.0), MECHANISM)


@pytest.mark.parametrize("method", [Method.AUTO, Method.MATERIALIZE])
def test_a_loss_over_the_batch_is_refused_at_the_first_call(method):
    step, state = own_step(centred, method=method)
    for _ in range(2):  # not let in by trying again
        with pytest.raises(FdpError, match=r"mine: .*not independent"):
            step(state, drawn(0), ROOT)
    step, state = own_step(centred, method=method, checks=Checks.SKIPPED)
    assert int(step(state, drawn(0), ROOT)[0].step) == 1


def test_a_wrong_rule_is_refused_at_the_first_call(monkeypatch):
    """A norm that is half of what it is: clipping would let twice the bound through."""

    def loss(p: Any, data: Any) -> Tensor:
        return ops.linear(data["image"], p["w"]).square().sum(1)

    step, state = own_step(loss)
    assert int(step(state, drawn(0), ROOT)[0].step) == 1
    real = fdp.checks.first_call.per_sample_norms

    def wrong(*args: Any, **options: Any) -> Any:
        losses, norms, stash = real(*args, **options)
        return losses, norms._replace(squared={path: each / 4 for path, each in norms.squared.items()}), stash

    monkeypatch.setattr(fdp.checks.first_call, "per_sample_norms", wrong)
    step, state = own_step(loss)
    with pytest.raises(FdpError, match=r"w: per-sample norm differs from vmap\(grad\) by 5"):
        step(state, drawn(0), ROOT)


def test_the_checks_are_made_once_by_the_choices_of_the_plan(monkeypatch):
    seen, real = [], fdp.checks.first_call.check_model
    monkeypatch.setattr(
        fdp.checks.first_call, "check_model", lambda *args, **options: seen.append(options) or real(*args, **options)
    )
    step, state = step_of(), state_of()
    for t in range(3):
        state, _ = step(state, drawn(t), ROOT)
    assert len(seen) == 1
    step_of(checks=Checks.SKIPPED)(state_of(), drawn(0), ROOT)
    assert len(seen) == 1


def test_a_leaf_whose_gradient_is_rounding_is_no_mistake():
    """A shift of all scores, which the loss takes off again."""
    params = {"w": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)), "b": torch.ones(1)}
    data = tree.map(lambda leaf: leaf[:SIZE], DATA)

    def shifted(p: Any, data: Any) -> Tensor:
        h = ops.add(ops.linear(data["image"], p["w"]), p["b"])
        return (h - h.mean(1, keepdim=True)).square().sum(1)

    model = from_loss(shifted, params)
    plan = make_plan(model, params, data)
    check_model(model, params, data, plan=plan)


def test_a_step_that_was_never_called_is_not_compiled():
    torch._dynamo.reset()
    step = step_of()
    with pytest.raises(Exception, match="expected a step that has been called once before it is compiled"):
        torch.compile(step, fullgraph=True, backend="eager")(state_of(), drawn(0), ROOT)


@pytest.mark.slow
def test_a_step_that_was_called_once_can_be_compiled():
    torch._dynamo.reset()
    step = step_of()
    state, _ = step(state_of(), drawn(0), ROOT)
    expected, _ = step(state, drawn(1), ROOT)
    state, _ = torch.compile(step, fullgraph=True, dynamic=False, backend="eager")(state, drawn(1), ROOT)
    assert correlation(tree.flatten(state.params), tree.flatten(expected.params)) == pytest.approx(1.0)


def refused_on_ranks() -> list[str]:
    """The same words on every rank, whose samples differ."""
    sharding = make_sharding(MODEL, make_mesh({"shard": 2}, device_type="cpu"), zero=Zero.THREE)
    first, *rest = MODEL.blocks

    def mixed(params: Any, carry: Any, data: Any) -> Any:
        h = first.apply(params, carry, data)
        return h - h.mean(0)

    said = []
    for model in (MODEL._replace(blocks=(first._replace(apply=mixed), *rest)), MODEL):
        params = init_params(model, ROOT, sharding)
        share: Any = {"rank": sharding.rank, "ranks": sharding.ranks}
        batch = drawn(0, **share)
        example = tree.map(lambda leaf: leaf[0], batch.data)
        plan = make_plan(model, abstract_params(model, sharding), example)
        step = make_train_step(
            model, sgd(1.0), mechanism=MECHANISM, plan=plan, execution=make_execution(sharding=sharding)
        )
        state = init_state(model, params, sgd(1.0), MECHANISM, execution=make_execution(sharding=sharding))
        try:
            state, _ = step(state, batch, ROOT)
            said.append(f"step {int(state.step)}")
        except FdpError as error:
            said.append(str(error))
    return said


@pytest.mark.ranks
def test_the_checks_are_made_by_all_ranks_together():
    for bad, good in run_on_ranks(refused_on_ranks, 2):
        assert "not independent" in bad
        assert good == "step 1"


# --- e. a sum that nobody clipped -----------------------------------------------------------------------------------


def test_a_clipped_sum_made_by_hand_is_refused():
    value = {"w": torch.ones(3)}
    with pytest.raises(
        FdpError, match=r"got one made by hand, .*: nothing vouches for its sensitivity.*declare_sensitivity"
    ):
        add_gaussian(ClippedSum(value, torch.tensor(1.0)), key=ROOT, step=0, noise_multiplier=1.0)
    with pytest.raises(FdpError, match="expected a ClippedSum"):
        add_gaussian(value, key=ROOT, step=0, noise_multiplier=1.0)  # pyright: ignore
    mine = declare_sensitivity(value, 1.0)
    assert not torch.equal(add_gaussian(mine, key=ROOT, step=0, noise_multiplier=1.0)["w"], value["w"])
    with pytest.raises(FdpError, match="sensitivity: expected a finite number above 0, got 0"):
        declare_sensitivity(value, 0.0)
    unknown = add_sums(mine, ClippedSum(dict(value), torch.tensor(1.0)))
    with pytest.raises(FdpError, match="nothing vouches"):
        add_gaussian(unknown, key=ROOT, step=0, noise_multiplier=1.0)


def total_of(max_norm: float) -> ClippedSum:
    data, params = tree.map(lambda leaf: leaf[:SIZE], DATA), MODEL.init(ROOT)
    _, norms, stash = per_sample_norms(MODEL, params, data, plan=plan_of())
    return clipped_sum(stash, clipping.clip_to(norms, max_norm=max_norm).masked(torch.ones(SIZE)))


def test_sums_clipped_by_the_library_are_accepted_after_any_transport():
    total = total_of(0.5)
    for same in (total, evaluate(total), total._replace(value=dict(total.value)), tree.map(torch.clone, total)):
        assert same.bound == total.bound is not None
        add_gaussian(same, key=ROOT, step=0, noise_multiplier=1.0)
    assert len(tree.leaves(total)) == len(total.value) + 1


def test_a_step_written_out_shares_no_noise_between_steps_clip_norms_and_multipliers():
    zeros = {"w": torch.zeros(200, dtype=torch.float64)}

    def noise(step: int = 0, norm: float = 0.5, z: float = 1.0) -> Flat:
        total = total_of(norm)._replace(value=zeros)
        return {"w": add_gaussian(total, key=ROOT, step=step, noise_multiplier=z)["w"] / norm / z}

    for other in (noise(step=1), noise(norm=0.6), noise(z=1.1)):
        assert abs(correlation(noise(), other)) < 0.3


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_declared_sensitivity_works_in_a_compiled_function(backend):
    torch._dynamo.reset()

    def release(value: Tensor, key: Tensor, step: Tensor) -> Flat:
        return add_gaussian(declare_sensitivity({"w": value}, 0.5), key=key, step=step, noise_multiplier=2.0)

    compiled = torch.compile(release, fullgraph=True, backend=backend)
    value, step = torch.ones(4, dtype=torch.float64), torch.tensor(3)
    torch.testing.assert_close(compiled(value, ROOT, step), release(value, ROOT, step))


# --- f. dividing by how many were drawn -----------------------------------------------------------------------------


def test_the_divisor_comes_from_the_sampling():
    noisy = {"w": torch.full((2,), 4.0)}
    assert expected_mean(noisy, SAMPLING)["w"].tolist() == [0.5, 0.5]
    for drawn_count in (7, 7.0, torch.tensor(7)):
        with pytest.raises(FdpError, match=r"the number of samples that were drawn is private.*mechanism.sampling"):
            expected_mean(noisy, drawn_count)  # pyright: ignore


# --- g. fewer steps than ran ----------------------------------------------------------------------------------------


def test_the_state_counts_what_was_spent():
    step, state = step_of(), state_of()
    assert spent(state, MECHANISM, delta=1e-5) == 0.0
    for t in range(3):
        state, _ = step(state, drawn(t), ROOT)
        assert spent(state, MECHANISM, delta=1e-5) == epsilon(MECHANISM, steps=t + 1, delta=1e-5)
    assert spent(state, without_noise(SAMPLING, flat(max_norm=0.5)), delta=1e-5) == float("inf")
    adaptive = clipping.quantile(max_norm=0.5, target_quantile=0.5, learning_rate=0.2, count_noise=1.0)
    assert spent(state, MECHANISM._replace(clip=adaptive), delta=1e-5) > spent(state, MECHANISM, delta=1e-5)


def test_statistics_that_were_released_are_spent_before_their_step_is_made():
    more = statistics(SAMPLING, max_norm=1.0, noise_multiplier=2.0, period=2)
    mechanism = MECHANISM._replace(statistics=more)
    curvature = KfacState(torch.tensor(0), {}, {}, torch.tensor(2), torch.tensor(0))
    for steps, charged in ((2, 3), (3, 3), (4, 4)):
        state = TrainState({}, (curvature, ()), (), torch.tensor(steps))
        assert spent(state, mechanism, delta=1e-5) == epsilon(mechanism, steps=charged, delta=1e-5)
