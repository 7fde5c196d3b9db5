"""Folders of other ``transformers`` families: exact, or one block, or refused with a remedy; trained from the command
line.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fdp import keys, tree
from fdp.cli.main import main
from fdp.fast.compiled import CompiledRunner
from fdp.foreign.hub.classification import PaddingMasks
from fdp.foreign.hub.hugging_face import load, load_model, model_of, params_of, save
from fdp.foreign.hub.tensor_names import StoredSlice, locate_stored
from fdp.foreign.stack.block_functions import BeforeLayers
from fdp.foreign.stack.fast_paths import reference_module
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.execution import EAGER, Execution
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.optimizers import sgd
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, sample_batch
from fdp.step import init_state, make_train_step
from fdp.types import Clip, FdpError
from tests import folders
from tests.folders import COARSE, MODELS, NARROW, ONE_BLOCK, TOKENS, data_for, own_losses

transformers = pytest.importorskip("transformers")
slow = pytest.mark.slow
QUICK = ("gpt-j", "mixtral", "llama classifier")
by_name = pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=slow) for n in MODELS])


def make_model(name: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    module = folders.make(name)
    data = data_for(module)
    model = model_of(module, context=TOKENS) if set(data) == {"tokens"} else model_of(module, example=data)
    return module, model, params_of(module, model), data


def gradients_alone(module: Any, model: Any, data: dict[str, Any]) -> dict[str, torch.Tensor]:
    own, rows = dict(module.named_parameters()), []
    leaves = [own[path] for path in model.leaves]
    for b in range(len(data[next(iter(data))])):
        one = {entry: leaf[b : b + 1] for entry, leaf in data.items()}
        loss = own_losses(reference_module(module), one).sum()
        rows.append(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))
    return {path: torch.stack([row[i] for row in rows]) for i, path in enumerate(model.leaves)}


def assert_exact(name: str, method: Method, blocks: CompiledRunner | None = None) -> None:
    module, model, params, data = make_model(name)
    tolerance = 1e-3 if name in NARROW else 1e-5 if name in COARSE else 1e-9
    torch.testing.assert_close(
        model.loss(params, data), own_losses(reference_module(module), data), rtol=tolerance, atol=1e-6
    )
    expected = gradients_alone(module, model, data)
    plan = make_plan(model, params, data, method=method, dtype=next(module.parameters()).dtype)
    _, norms, stash = per_sample_norms(model, params, data, plan=plan, execution=Execution(runner=blocks or EAGER))
    factors = torch.linspace(0.3, 0.9, len(data[next(iter(data))]), dtype=torch.float64)
    total = clipped_sum(stash, Clip(dict.fromkeys(expected, factors), torch.tensor(1.0))).value
    whole = torch.stack([G.flatten(1).double().square().sum(1) for G in expected.values()]).sum(0)
    for path, G in expected.items():
        square = G.flatten(1).double().square().sum(1)
        error = ((norms.squared[path].double() - square).abs() / (square + 1e-6 * whole)).max()
        assert error < tolerance, f"{path}: {error}"
        sums = torch.einsum("b,b...->...", factors, G.double())
        torch.testing.assert_close(total[path].double(), sums, rtol=tolerance, atol=10 * tolerance)


@by_name
def test_norms_and_sums_equal_single_sample_backwards(name):
    assert_exact(name, Method.MATERIALIZE if name == "swin" else Method.AUTO)


@slow
@pytest.mark.parametrize("name", [name for name in MODELS if name != "swin"])
@pytest.mark.parametrize("method", [Method.GHOST, Method.GHOST_BK, Method.FLASH, Method.MATERIALIZE])
def test_every_method_is_exact(name, method):
    assert_exact(name, method)


@slow
@pytest.mark.parametrize("name", ["gpt-j", "mixtral", "gpt-oss", "llama classifier", "convnext"])
def test_compiled_blocks_are_exact(name):
    assert_exact(name, Method.AUTO, CompiledRunner(backend="aot_eager"))


def test_models_that_are_no_stack_are_one_block_and_say_why():
    _, model, _, _ = make_model("albert")
    assert len(model.blocks) == 1
    assert model.remark is not None
    assert "AlbertForSequenceClassification is computed as one block, not layer by layer: " in model.remark
    assert "once and in order" in model.remark


@slow
@pytest.mark.parametrize("name", MODELS)
def test_layers_are_blocks_if_possible(name):
    _, model, _, _ = make_model(name)
    assert (len(model.blocks), model.remark is None) == ((1, False) if name in ONE_BLOCK else (4, True))


def test_a_decoder_classifier_gets_causal_masks_with_and_without_padding():
    module, model, params, data = make_model("mistral classifier")  # has a window that is felt
    before = model.blocks[0].apply
    assert isinstance(before, BeforeLayers)
    assert before.call == PaddingMasks(False, True, ("sliding_attention",), 4, (("use_cache", False),))
    full = data | {"mask": torch.ones_like(data["mask"])}  # the module itself would leave out the mask, or not
    for given in (data, full):
        torch.testing.assert_close(model.loss(params, given), own_losses(module, given))


def test_a_decoder_classifier_without_a_padding_token_is_refused():
    module = folders.make("gpt2 classifier")
    module.config.pad_token_id = None
    with pytest.raises(FdpError, match=r"expected a pad_token_id.*config\.json"):
        model_of(module, example=data_for(module))


def test_a_step_on_padded_samples_runs():
    module, model, params, data = make_model("llama classifier")
    data = data_for(module, 8)
    plan = make_plan(model, params, tree.map(lambda leaf: leaf[:4], data), dtype=torch.float64)
    sampling, root, optimizer = poisson(8, expected_batch_size=4), keys.key(0), sgd(0.1)
    mechanism = Mechanism(sampling, clipping.flat(max_norm=1.0), 0.5)
    step = make_train_step(model, optimizer, mechanism=mechanism, plan=plan)
    state = init_state(model, params, optimizer, mechanism)
    for i in range(2):
        state, _ = step(state, sample_batch(data, sampling, root, step=i, microbatch_size=4), root)
    assert int(state.step) == 2


# ---------------------------------------------------------------- experts that are stored one by one


def test_experts_that_are_stored_separately_are_loaded_and_saved(tmp_path):
    folder = folders.save("mixtral", tmp_path)
    names = {key for key in load_file(folder / "model.safetensors") if ".experts." in key}
    assert any(name.endswith("experts.3.w1.weight") for name in names), "transformers no longer stores them one by one"
    _, params = load(folder, context=TOKENS)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    flat = tree.flatten(params)
    for path, leaf in loaded.named_parameters():
        torch.testing.assert_close(flat[path], leaf.detach(), rtol=0, atol=0)
    changed = tree.map(lambda leaf: leaf + 1.0, params)
    save(tmp_path / "changed", changed, source=folder)
    again = dict(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "changed").named_parameters())
    for path, leaf in tree.flatten(changed).items():
        torch.testing.assert_close(again[path].detach(), leaf, rtol=0, atol=0)


def test_a_window_of_the_experts_is_read_alone(tmp_path):
    from fdp.foreign.hub.read_folder import StoredTensors, _read_leaf, empty_module

    folder = folders.save("mixtral", tmp_path)
    stored, module = StoredTensors(folder), empty_module(folder)
    path = "model.layers.1.mlp.experts.gate_up_proj"
    places = {place._replace(name=""): key for key, place in locate_stored(stored.files, module).items()
              if place.name == path}  # fmt: skip
    assert len(places) == 8
    assert StoredSlice("", 3, 24, 48) in places
    shape = tuple(module.get_parameter(path).shape)
    whole = _read_leaf(stored, path, places, shape, None)
    part = _read_leaf(stored, path, places, shape, ((1, 2), (20, 10), (0, 16)))
    torch.testing.assert_close(part, whole[1:3, 20:30], rtol=0, atol=0)
    del places[StoredSlice("", 3, 24, 48)]
    with pytest.raises(FdpError, match="expected 4 experts of 48 rows"):
        _read_leaf(stored, path, places, shape, None)


# ---------------------------------------------------------------- the command line

TINY = shlex.split(
    "--unit record --context 8 --steps 2 --warmup 1 --batch-size 8 --microbatch 4 --noise-multiplier 0.5 --lr 0.1 "
    "--seed 0 --json --tokenizer bytes"
)
TRAINED, LONGER = ("bloom", "mixtral"), ("gpt-j", "mamba", "gemma2", "gpt-oss", "deepseek", "gemma-3n")


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "letters.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"letter {i} of many"}) for i in range(40)))
    return path


def run_cli(*words: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(words))
    return int(caught.value.code or 0)


@pytest.mark.long
@pytest.mark.parametrize("name", [*TRAINED, *(pytest.param(name, marks=slow) for name in LONGER)])
def test_a_folder_is_inspected_and_trained(name, letters, tmp_path, capsys):
    folder = folders.save(name, tmp_path)
    capsys.readouterr()
    assert run_cli("inspect", str(folder), "--batch-size", "4", "--context", "8", "--json") == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert not [row["path"] for row in found["leaves"] if row["refusal"]]
    assert (found["remark"] is not None) == (name in ONE_BLOCK)
    out = tmp_path / "out"
    assert run_cli("train", "--model", str(folder), "--data", str(letters), *TINY, "--out", str(out)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("is computed as one block, not layer by layer" in shown) == (name in ONE_BLOCK)
    assert json.loads((out / "summary.json").read_text())["steps"] == 2
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (folder, out / "model"))
    assert set(before) == set(after)
    assert any(not torch.equal(before[key], after[key]) for key in before)


def test_a_classifier_is_inspected_and_the_error_says_how_to_train_it(letters, tmp_path, capsys):
    folder = folders.save("llama classifier", tmp_path)
    assert run_cli("inspect", str(folder), "--batch-size", "4", "--context", "8", "--json") == 0
    assert run_cli("train", "--model", str(folder), "--data", str(letters), *TINY, "--out", str(tmp_path / "out")) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "LlamaForSequenceClassification" in said
    assert "from Python" in said
    assert load_model(folder).blocks


@slow
def test_a_model_without_rules_trains_by_the_method_that_the_error_names(tmp_path):
    _, model, params, data = make_model("swin")
    with pytest.raises(FdpError, match="--method materialize"):
        make_plan(model, params, data, dtype=torch.float64)
