"""Ways to lose the guarantee without a word, one by one: each is refused with a message that teaches, or impossible."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fdp.step
from fdp import clipping, keys, optimizers, tree
from fdp.clipping import flat
from fdp.compiled import Blocks
from fdp.kfac.private_factors import STATISTICS
from fdp.mechanism import Mechanism, without_noise
from fdp.methods import Method, make_plan
from fdp.model import from_loss
from fdp.models import GPTConfig, gpt, mlp
from fdp.optimizers import Optimizer, adamw, sgd
from fdp.sampling import Poisson, poisson, sample_batch, trusted_batch
from fdp.settings import fingerprint
from fdp.step import Compile, compose, init_state, make_stages, make_train_step
from fdp.types import Batch, FdpError, Flat, TrainState

MODEL = mlp(widths=(5, 4), classes=3)
DATA = {
    "image": torch.randn(40, 5, generator=torch.Generator().manual_seed(0)),
    "label": torch.arange(40) % 3,
}
SAMPLING = poisson(40, expected_batch_size=8)
MECHANISM = Mechanism(SAMPLING, flat(max_norm=0.5), 1.0)
ROOT = keys.key(1)
SIZE = 8


def plan_of(method: Method = Method.AUTO) -> Any:
    return make_plan(MODEL, MODEL.init(ROOT), tree.map(lambda leaf: leaf[:SIZE], DATA), method=method)


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
    seen: dict[str, Flat] = {}

    def watched(total: Any, key: Tensor) -> Flat:
        noisy = stages.noise(total, key)
        added = {path: (leaf - total.value[path]) / total.sensitivity for path, leaf in noisy.items()}
        seen.setdefault("noise", {}).update({path: leaf / mechanism.noise_multiplier for path, leaf in added.items()})
        return noisy

    compose(stages._replace(noise=watched))(state, empty(mechanism.sampling), root)
    return seen["noise"]


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
    monkeypatch.setattr(fdp.step, "Blocks", lambda: Blocks(backend="eager"))
    options: dict[str, Any] = {"plain": {}, "donated": {"donate": ("state",)}}.get(
        how, {"donate": ("state",), "compile": Compile.BLOCK}
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
        make_stages(MODEL, sgd(1.0), mechanism=MECHANISM, plan=plan_of(by), compile=compile)
        for by, compile in ((Method.AUTO, Compile.NONE), (method, Compile.BLOCK))
    ]
    one, other = (stage.key(ROOT, torch.tensor(3)) for stage in stages)
    assert torch.equal(one, other)


# --- b. batches that nobody drew, or drew for something else --------------------------------------------------------


def test_a_batch_made_by_hand_is_refused():
    batch = drawn(0)
    with pytest.raises(FdpError, match=r"got one made by hand: .* epsilon would not hold. Draw it by fdp.sample_batch"):
        step_of()(state_of(), Batch(batch.data, batch.mask), ROOT)
    with pytest.raises(FdpError, match="trusted_batch takes one of your own at your word"):
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
    with pytest.raises(FdpError, match="it was cut or put together after the draw, and a sample could be in it twice"):
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
    from fdp.guards import Gate

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
    gate.passed(after, 4)
    assert gate.check(after, drawn(5)) == 5
    assert Away.waits == 1
    after.fill_(2)
    assert gate.check(after, drawn(2)) == 2
    assert Away.waits == 2


@pytest.mark.slow
def test_in_a_compiled_step_the_batch_of_another_step_releases_nothing():
    torch._dynamo.reset()
    step = torch.compile(step_of(), fullgraph=True, dynamic=False, backend="eager")
    state, _ = step(state_of(), drawn(0), ROOT)
    assert all(bool(leaf.isfinite().all()) for leaf in tree.leaves(state.params))
    state, _ = step(state, drawn(0), ROOT)
    assert all(bool(leaf.isnan().all() | leaf.isinf().all()) for leaf in tree.leaves(state.params))
    with pytest.raises(Exception, match="got one made by hand"):
        step(state_of(), Batch(drawn(0).data, drawn(0).mask), ROOT)


# --- c. no noise ----------------------------------------------------------------------------------------------------


def test_private_training_without_noise_needs_a_word():
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
