"""A step on another device than the CPU, without one: whatever it makes on the way must be there as well.

Fake tensors have a device and no values. Those of the device ``meta`` refuse to meet those of the CPU, as CUDA's would,
so a mask, a constant or a generator that was left on the CPU is an error here. Kernels are not run: ``meta`` has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fdp import keys, tree
from fdp.checks.first_call import Checks
from fdp.foreign.hub.hugging_face import causal_lm, params_of
from fdp.gradients.plan import Method, make_plan
from fdp.kfac import Damping, Distribution, Fisher, KfacConfig, Sharing, Via, Where, everything, kfac
from fdp.kfac.private.noised_factors import STATISTICS
from fdp.kfac.private.refresh import private_kfac, refresh_noised, sides_of
from fdp.model import Model
from fdp.models import GPTConfig, LlamaConfig, gpt, llama
from fdp.optimizers import Optimizer, adamw, sgd
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism, statistics
from fdp.privacy.sampling import TRAINING, poisson, trusted_batch
from fdp.step import init_state, make_train_step
from fdp.types import Batch, Tree
from tests.foreign_models import make

SAMPLES, TOKENS, WORDS = 3, 8, 24
SAMPLING = poisson(100, expected_batch_size=SAMPLES)
ELSEWHERE = torch.device("meta")
GPT = gpt(GPTConfig(layers=1, width=16, heads=2, context=TOKENS, vocab_size=WORDS))
LLAMA = llama(LlamaConfig(layers=1, width=16, heads=2, key_heads=1, hidden=24, context=TOKENS, vocab_size=WORDS))


class NoValues(FakeTensorMode):
    """Fake tensors of which a value that is asked for is 1: checks for NaN and the like pass."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else args[0].dtype is torch.bool or 1
        return super().dispatch(func, types, args, kwargs)


@pytest.fixture
def no_values() -> Iterator[None]:
    with NoValues(allow_non_fake_inputs=True):
        yield


fake = pytest.mark.usefixtures("no_values")


def some(cases: dict[str, Any], *, quick: tuple[str, ...]) -> list[Any]:
    """The cases by their names, all but the quick ones slow: an operation on fake tensors takes longer than a real."""
    return [
        pytest.param(case, id=name, marks=[] if name in quick else pytest.mark.slow) for name, case in cases.items()
    ]


def there(values: Tree) -> Tree:
    """The same shapes on the other device."""
    return tree.map(lambda leaf: torch.empty_like(leaf, device=ELSEWHERE), values)


def some_key() -> Tensor:
    return torch.empty_like(keys.key(0), device=ELSEWHERE)


def some_batch(purpose: str = TRAINING) -> Batch:
    tokens = torch.empty(1, SAMPLES, TOKENS + 1, dtype=torch.int64, device=ELSEWHERE)
    mask = torch.ones(1, SAMPLES, device=ELSEWHERE)
    return trusted_batch({"tokens": tokens}, mask, SAMPLING, step=None, purpose=purpose)


def mechanism(clip: Any = None, **more: Any) -> Mechanism:
    bound = clipping.flat(max_norm=1.0) if clip is None else clip
    return Mechanism(SAMPLING, bound, 1.0, **more)


def one_step(model: Model, params: Tree, optimizer: Optimizer, how: Mechanism, **options: Any) -> None:
    batch = some_batch()
    example = {"tokens": batch.data["tokens"][0]}
    plan = make_plan(model, params, example, **options)
    step = make_train_step(model, optimizer, mechanism=how, plan=plan, checks=Checks.SKIPPED)
    state = init_state(model, params, optimizer, how)
    for leaf in tree.leaves(step(state, batch, some_key())):
        assert leaf.device == ELSEWHERE


@fake
def test_a_tensor_that_was_left_on_the_cpu_is_noticed():
    left = nn.Parameter(torch.ones(4))
    with pytest.raises(RuntimeError, match=r"same device|different devices"):
        _ = torch.empty(2, 4, device=ELSEWHERE) * left


@fake
@pytest.mark.parametrize("model", [GPT, LLAMA], ids=lambda model: model.name)
@pytest.mark.parametrize("method", some({m.value: m for m in Method}, quick=("auto",)))
def test_every_method_stays_on_its_device(method, model):
    how = mechanism()._replace(noise_multiplier=float(method is not Method.NONE))
    dtype = torch.bfloat16 if model is GPT else torch.float32
    one_step(model, model.init(some_key()), adamw(1e-3), how, method=method, dtype=dtype)


CLIPS = {
    "automatic": clipping.automatic(max_norm=1.0),
    "per_layer": clipping.per_layer(max_norm=1.0),
    "quantile": clipping.quantile(max_norm=1.0, target_quantile=0.5, learning_rate=0.2, count_noise=1.0),
}


@fake
@pytest.mark.parametrize("clip", some(CLIPS, quick=("quantile",)))
def test_every_way_to_clip_stays_on_its_device(clip):
    one_step(GPT, GPT.init(some_key()), adamw(1e-3), mechanism(clip), method=Method.AUTO)


@pytest.mark.parametrize("method", some({"auto": Method.AUTO, "materialize": Method.MATERIALIZE}, quick=("auto",)))
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_models_of_transformers_stay_on_their_device(name, method):
    module = make(name, dtype=torch.float32)
    model = causal_lm(module)
    params = params_of(module, model)
    with NoValues(allow_non_fake_inputs=True):
        one_step(model, there(params), sgd(0.1), mechanism(), method=method)


KFAC = {
    "auto": {},
    "everything": {"policy": everything()},
    "empirical": {"fisher": Fisher.EMPIRICAL},
    "reduce": {"sharing": Sharing.REDUCE},
    "eigen": {"via": Via.EIGEN, "max_condition": 1e4},
    "product": {"via": Via.EIGEN, "method": Damping.PRODUCT},
    "ring": {"distribution": Distribution.RING},
    "owner": {"distribution": Distribution.OWNER},
    "host": {"store": Where.CPU},
    "window": {"window": 3, "column_dtype": None},
}


@fake
@pytest.mark.parametrize("settings", some(KFAC, quick=("auto", "ring", "reduce")))
def test_curvature_stays_on_its_device(settings):
    model = LLAMA if settings else GPT
    batch = some_batch()
    example = {"tokens": batch.data["tokens"][0]}
    config = KfacConfig(factor_period=1, inverse_period=1, **settings)
    k = kfac(model, example, learning_rate=0.1, config=config)
    how = mechanism()._replace(noise_multiplier=0.0)
    params = model.init(some_key())
    plan = make_plan(model, params, example, method=Method.NONE)
    step = make_train_step(model, k.optimizer, mechanism=how, plan=plan)
    state = init_state(model, params, k.optimizer, how)
    for t in range(2):
        state = k.refresh(state, example, batch.mask[0], some_key(), t)
    state, _ = step(state, batch, some_key())
    assert all(leaf.device == ELSEWHERE for leaf in tree.leaves(state.params))


@fake
def test_noised_curvature_stays_on_its_device():
    batch = some_batch()
    example = {"tokens": batch.data["tokens"][0]}
    k = private_kfac(GPT, example, learning_rate=0.1, config=KfacConfig(), largest=100)
    how = mechanism(statistics=statistics(SAMPLING, max_norm=1.0, noise_multiplier=1.0, period=1))
    params = GPT.init(some_key())
    plan = make_plan(GPT, params, example, method=Method.AUTO)
    step = make_train_step(GPT, k.optimizer, mechanism=how, plan=plan, precondition=sides_of, checks=Checks.SKIPPED)
    state = k.place(init_state(GPT, params, k.optimizer, how))
    state = refresh_noised(k, state, lambda: some_batch(STATISTICS), some_key(), 0, mechanism=how, scales={})
    state, _ = step(state, batch, some_key())
    assert all(leaf.device == ELSEWHERE for leaf in tree.leaves(state.params))
