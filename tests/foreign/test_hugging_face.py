"""Models of ``transformers``: exact norms and sums, one compiled layer, ranks, folders in and out."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fdp import keys, tree
from fdp.data.document_packing import PackUnit, pack
from fdp.data.documents import join_documents
from fdp.data.users import by_user
from fdp.fast.compile_modes import Compile, make_execution
from fdp.fast.compiled import CompiledRunner
from fdp.foreign.hub import hugging_face, read_folder
from fdp.foreign.hub.hugging_face import causal_lm, classifier, load, load_model, params_of, save
from fdp.foreign.hub.masks import CausalMasks
from fdp.foreign.stack.block_functions import BeforeLayers
from fdp.gradients.clipped_sum import clipped_sum
from fdp.gradients.execution import EAGER, Execution
from fdp.gradients.per_sample import per_sample_norms
from fdp.gradients.plan import Method, make_plan
from fdp.model import Model
from fdp.models.language import token_losses
from fdp.optimizers import sgd
from fdp.parallel.dtensors import shard_leaf
from fdp.parallel.mesh import make_mesh
from fdp.parallel.sharding import Zero, abstract_params, make_sharding
from fdp.privacy import clipping
from fdp.privacy.mechanism import Mechanism
from fdp.privacy.sampling import poisson, sample_batch
from fdp.step import init_state, make_train_step
from fdp.types import Clip, FdpError, Tree
from tests.fake_ranks import fake_ranks
from tests.foreign_models import CAUSAL, LAYERS, TOKENS, WORDS, make
from tests.ranks import run_on_ranks

QUICK = ("gpt2", "llama")
slow = pytest.mark.slow


def some(names: list[str] | tuple[str, ...], quick: tuple[str, ...] = QUICK) -> Any:
    return pytest.mark.parametrize("name", [n if n in quick else pytest.param(n, marks=slow) for n in names])


def some_data(name: str, samples: int = 3) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    label = torch.arange(samples) % 3
    if name == "vit":
        return {"image": torch.randn(samples, 3, 8, 8, generator=draw, dtype=torch.float64), "label": label}
    if name in ("bert", "roberta"):
        mask = (torch.arange(16) < torch.tensor([16, 9, 4, 12, 7])[:samples, None]).long()
        tokens = torch.randint(3, WORDS, (samples, 16), generator=draw)
        return {"tokens": torch.where(mask > 0, tokens, 1), "mask": mask, "label": label}
    return {"tokens": torch.randint(0, WORDS, (samples, TOKENS + 1), generator=draw)}


def own_losses(name: str, module: Any, data: Tree) -> Tensor:
    """Return the losses by the module itself, called as its users call it."""
    if name == "vit":
        return F.cross_entropy(module(pixel_values=data["image"]).logits, data["label"], reduction="none")
    if name in ("bert", "roberta"):
        scores = module(input_ids=data["tokens"], attention_mask=data["mask"]).logits
        return F.cross_entropy(scores, data["label"], reduction="none")
    scores = module(input_ids=data["tokens"][:, :-1]).logits
    return F.cross_entropy(scores.transpose(1, 2), data["tokens"][:, 1:], reduction="none").mean(1)


def make_model(name: str, **options: Any) -> tuple[Any, Model, Tree]:
    module = make(name)
    model = causal_lm(module, context=TOKENS, **options) if name in CAUSAL else classifier(module, **options)
    return module, model, params_of(module, model)


def gradients_alone(name: str, module: Any, model: Model, data: Tree) -> dict[str, Tensor]:
    own = dict(module.named_parameters())
    leaves = [own[path] for path in model.leaves]
    found = []
    for b in range(len(next(iter(data.values())))):
        one = {entry: leaf[b : b + 1] for entry, leaf in data.items()}
        found.append(torch.autograd.grad(own_losses(name, module, one).sum(), leaves))
    return {path: torch.stack([each[i] for each in found]) for i, path in enumerate(model.leaves)}


def assert_exact(
    model: Model,
    params: Tree,
    data: Tree,
    expected: dict[str, Tensor],
    method: Method,
    blocks: CompiledRunner | None = None,
) -> None:
    factors = torch.linspace(0.3, 0.9, len(next(iter(data.values()))), dtype=torch.float64)
    plan = make_plan(model, params, data, method=method, dtype=torch.float64)
    _, norms, stash = per_sample_norms(model, params, data, plan=plan, execution=Execution(runner=blocks or EAGER))
    total = clipped_sum(stash, Clip(dict.fromkeys(expected, factors), torch.tensor(1.0))).value
    for path, each in expected.items():
        squares = each.flatten(1).square().sum(1)
        torch.testing.assert_close(norms.squared[path], squares, rtol=1e-8, atol=1e-12, msg=lambda m, p=path: p + m)
        torch.testing.assert_close(total[path], torch.einsum("b,b...->...", factors, each), rtol=1e-8, atol=1e-10)


# ---------------------------------------------------------------- exact


@some(
    [*CAUSAL, "bert", "roberta", "vit"],
    quick=("gpt2", "gpt2-untied", "llama", "qwen2", "gemma", "gemma2", "mistral", "opt", "bert", "vit"),
)
def test_norms_and_sums_equal_single_sample_backwards(name):
    module, model, params = make_model(name)
    data = some_data(name)
    torch.testing.assert_close(model.loss(params, data), own_losses(name, module, data), rtol=1e-9, atol=1e-9)
    expected = gradients_alone(name, module, model, data)
    assert set(expected) == {path for path, _ in module.named_parameters()}
    for method in (Method.AUTO, Method.GHOST_BK):
        assert_exact(model, params, data, expected, method)


@slow
@pytest.mark.parametrize("name", [*CAUSAL, "bert", "roberta", "vit"])
@pytest.mark.parametrize("method", [Method.MATERIALIZE, Method.GHOST, Method.FLASH, Method.FLASH_BK])
def test_every_method_is_exact(name, method):
    module, model, params = make_model(name)
    data = some_data(name)
    assert_exact(model, params, data, gradients_alone(name, module, model, data), method)


def test_equal_layers_share_one_function():
    for name, kinds in {"gpt2": 1, "llama": 1, "gpt2-by-depth": LAYERS, "gemma2": 2}.items():
        _, model, _ = make_model(name)
        assert len({block.apply for block in model.blocks[1:-1]}) == kinds
        assert len(model.blocks) == LAYERS + 2


def test_heads_are_loss_heads_if_logits_are_unchanged():
    for name in ("gpt2", "gpt2-untied", "opt"):
        module, model, _ = make_model(name)
        head = model.blocks[-1]
        assert head.head is not None
        tied = module.config.tie_word_embeddings
        assert head.params["weight"] == (_table(module) if tied else "lm_head.weight")
    _, model, params = make_model("gemma2")  # caps its logits
    head = model.blocks[-1]
    assert head.head is None
    assert head.outputs is not None
    data, carry, flat = some_data("gemma2"), (), tree.flatten(params)
    for block in model.blocks[:-1]:
        carry = block.apply(tree.select(flat, block.params), carry, data)
    scores = head.outputs.scores(tree.select(flat, head.params), carry, data)
    torch.testing.assert_close(token_losses(scores, data), model.loss(params, data))


def _table(module: Any) -> str:
    table = module.get_input_embeddings().weight
    return next(name for name, leaf in module.named_parameters() if leaf is table)


@pytest.mark.long
def test_plain_causal_attention_gets_no_mask_and_windows_get_masks():
    for name in ("gpt2", "llama", "qwen2", "gemma", "opt"):
        before = make_model(name)[1].blocks[0].apply
        assert isinstance(before, BeforeLayers)
        assert isinstance(before.call, CausalMasks)
        assert "attention_mask': None" in repr(before.templates[0]) or "None" in repr(before.templates[0].args)
    for name in ("mistral", "gemma2"):
        before = make_model(name)[1].blocks[0].apply
        assert isinstance(before, BeforeLayers)
        assert isinstance(before.call, CausalMasks)
        assert "attention_mask': TensorSlot" in repr(before.templates[0])


def test_a_window_that_the_example_was_too_short_for_is_refused():
    module = make("mistral")
    model = causal_lm(module, context=3)
    with pytest.raises(FdpError, match="give an example"):
        model.loss(params_of(module, model), some_data("mistral"))


def test_other_attention_kernels_are_refused():
    module = make("llama")
    module.config._attn_implementation = "flex_attention"
    with pytest.raises(FdpError, match="attn_implementation='sdpa'"):
        causal_lm(module)


def test_a_module_of_another_kind_is_refused():
    with pytest.raises(FdpError, match="ForCausalLM"):
        hugging_face.model_of(torch.nn.Linear(2, 2))


# ---------------------------------------------------------------- documents and windows


def packed(samples: int = 3) -> dict[str, Tensor]:
    data = some_data("gpt2", samples)
    segments = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2], [1] * 8, [1, 1, 2, 2, 2, 3, 3, 3]])[:samples]
    same = torch.cat([segments[:, 1:] == segments[:, :-1], torch.ones(samples, 1, dtype=torch.bool)], dim=1)
    return data | {"segments": segments, "loss_mask": same}


@some([name for name in CAUSAL if name != "gpt2-by-depth"], quick=("gpt2", "mistral"))
def test_packed_documents_have_the_losses_they_have_alone(name):
    module, model, params = make_model(name, example=packed(2))
    data = packed()
    got = model.loss(params, data)
    for b in range(3):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for segment in data["segments"][b].unique():
            here = (data["segments"][b] == segment).nonzero().flatten()
            document = data["tokens"][b, here[0] : here[-1] + 2]
            logits = module(input_ids=document[None, :-1]).logits[0]
            each = F.cross_entropy(logits, document[1:], reduction="none")
            counts = data["loss_mask"][b, here]
            total, count = total + each[counts].sum(), count + int(counts.sum())
        torch.testing.assert_close(got[b], total / count, rtol=1e-8, atol=1e-8)


def test_windows_of_a_user_have_the_losses_they_have_alone():
    windows = torch.randint(0, WORDS, (2, 3, TOKENS + 1), generator=torch.Generator().manual_seed(2))
    module, model, params = make_model("llama", example={"tokens": windows})
    alone = own_losses("llama", module, {"tokens": windows.flatten(0, 1)}).view(2, 3).mean(1)
    torch.testing.assert_close(model.loss(params, {"tokens": windows}), alone, rtol=1e-9, atol=1e-9)


def test_documents_in_the_windows_of_a_user_have_the_losses_they_have_alone():
    rows = packed()  # three samples of one window, here as three windows of one sample
    user = {entry: leaf[None] for entry, leaf in rows.items()}
    _, model, params = make_model("llama", example=user)
    _, alone, _ = make_model("llama", example=rows)
    counts = rows["loss_mask"].sum(1)
    expected = (alone.loss(params, rows) * counts).sum() / counts.sum()
    torch.testing.assert_close(model.loss(params, user)[0], expected, rtol=1e-9, atol=1e-9)


RECORDS = {  # lengths of one user's records, in windows of 8 tokens and a target
    "empty": [2, *[0] * 8, 3, 9, *[0] * 25, 9, 4, 2],
    "one token": [2, *[1] * 7, *[1] * 9, 3, *[1] * 6],
    "both": [*[0, 1] * 9, 5, *[0] * 12, *[1] * 4, 2, 2, 0],
}


@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("mistral", marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", RECORDS)
def test_empty_and_short_records_of_a_user_have_the_losses_they_have_alone(name, kind):
    draw = np.random.default_rng(3)
    texts = [draw.integers(0, WORDS, length).tolist() for length in RECORDS[kind]]
    documents = join_documents(((text, [True] * len(text)) for text in texts), ["u"] * len(texts), source="here")
    rows = pack(documents, context=TOKENS, unit=PackUnit.OWNER)
    count = len(rows.owners)
    assert count > 2
    users = by_user(rows, context=TOKENS, vocab_size=WORDS, windows=count + 1, key=keys.key(0))
    data = users.fetch(np.array([0]))
    module, model, params = make_model(name, example=packed_windows(count + 1))
    total, targets = torch.zeros((), dtype=torch.float64), 0
    for text in (torch.tensor(text) for text in texts if len(text) > 1):
        logits = module(input_ids=text[None, :-1]).logits[0]
        total, targets = total + F.cross_entropy(logits, text[1:], reduction="sum"), targets + len(text) - 1
    assert targets == int(data["loss_mask"].sum())
    torch.testing.assert_close(model.loss(params, data)[0], total / targets, rtol=1e-9, atol=1e-9)


def test_segment_numbers_are_arbitrary():
    rows = packed()
    user = {entry: leaf[None] for entry, leaf in rows.items()}
    _, model, params = make_model("llama", example=user)
    numbered = user | {"segments": user["segments"] + torch.tensor([[[9], [0], [-9]]])}
    assert torch.equal(model.loss(params, numbered), model.loss(params, user))


def packed_windows(count: int) -> dict[str, Tensor]:
    """Return two users with many equal windows."""
    return {entry: leaf[:2, None].repeat(1, count, *[1] * (leaf.ndim - 1)) for entry, leaf in packed(2).items()}


def test_packed_documents_are_refused_if_the_example_had_none():
    _, model, params = make_model("llama")
    with pytest.raises(FdpError, match="give an example"):
        model.loss(params, packed())


# ---------------------------------------------------------------- engines


@pytest.mark.long
@some([*CAUSAL, "bert", "roberta", "vit"], quick=("llama",))
def test_compiled_blocks_are_exact(name):
    module, model, params = make_model(name)
    data, blocks = some_data(name), CompiledRunner(backend="aot_eager")
    assert_exact(model, params, data, gradients_alone(name, module, model, data), Method.AUTO, blocks)
    assert len(blocks.kinds) == 2 + len({block.apply for block in model.blocks[1:-1]})


def train_two_steps(
    name: str, axes: dict[str, int] | None = None, zero: Zero = Zero.THREE, compile: Compile = Compile.NONE
) -> dict[str, Tensor]:
    """Run two private steps; return full parameters."""
    _, model, params = make_model(name)
    root = keys.key(0)
    sharding, rank, ranks = None, 0, 1
    if axes is not None:
        sharding = make_sharding(model, make_mesh(axes, device_type="cpu"), zero=zero)
        rank, ranks = sharding.rank, sharding.ranks
        params = tree.nest({path: shard_leaf(leaf, path, sharding) for path, leaf in tree.flatten(params).items()})
    data = some_data(name, 5)
    sampling = poisson(5, expected_batch_size=3)
    mechanism = Mechanism(sampling, clipping.flat(max_norm=0.3), 1.0)
    batches = [sample_batch(data, sampling, root, step=t, microbatch_size=2, rank=rank, ranks=ranks) for t in range(2)]
    microbatch = {entry: leaf[0] for entry, leaf in batches[0].data.items()}
    plan = make_plan(model, abstract_params(model, sharding), microbatch, dtype=torch.float64)
    optimizer = sgd(0.5)
    step = make_train_step(
        model, optimizer, mechanism=mechanism, plan=plan, execution=make_execution(sharding=sharding, compile=compile)
    )
    state = init_state(model, params, optimizer, mechanism, execution=make_execution(sharding=sharding))
    for batch in batches:
        state, _ = step(state, batch, root)
    flat = tree.flatten(state.params)
    return {path: leaf.full_tensor() if sharding is not None else leaf for path, leaf in flat.items()}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert got.keys() == expected.keys()
    for path, leaf in expected.items():
        torch.testing.assert_close(got[path], leaf, rtol=tolerance, atol=tolerance, msg=lambda m, p=path: p + m)


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "axes", "zero"),
    [
        ("gpt2", {"shard": 2}, Zero.THREE),
        pytest.param("gpt2", {"replicate": 2, "shard": 2}, Zero.TWO, marks=slow),
        *[pytest.param(n, {"shard": 4}, Zero.THREE, marks=slow) for n in (*CAUSAL, "bert", "vit")],
        pytest.param("llama", {"replicate": 2}, Zero.NONE, marks=slow),
    ],
)
def test_several_ranks_equal_one(name, axes, zero):
    expected = train_two_steps(name)
    for got in run_on_ranks(train_two_steps, sum(axes.values()) if len(axes) == 1 else 4, name, axes, zero):
        assert_same(got, expected)


@slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_compiled_step_equals_the_eager_one(name):
    # Llama's norms are computed in float32, whatever the dtype, and Inductor adds in another order.
    assert_same(train_two_steps(name, compile=Compile.BLOCK), train_two_steps(name), 1e-6)


# ---------------------------------------------------------------- folders


def save_module(name: str, folder: Path, **options: Any) -> Any:
    module = make(name, dtype=torch.float32)
    module.save_pretrained(folder, **options)
    return module


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


@pytest.mark.parametrize("name", [*CAUSAL, "bert", "roberta", "vit"])
def test_a_folder_saved_by_transformers_is_loaded(name, tmp_path):
    module = save_module(name, tmp_path / "model")
    model, params = load(tmp_path / "model", dtype=torch.float64, context=TOKENS)
    data = some_data(name)
    torch.testing.assert_close(model.loss(params, data), own_losses(name, module.double(), data), rtol=1e-6, atol=1e-6)
    assert_same(tree.flatten(params), {n: leaf.detach() for n, leaf in module.named_parameters()}, 0.0)


@pytest.mark.parametrize(("name", "shards"), [("gpt2", None), ("llama", "4KB"), ("gemma", None), ("vit", None)])
def test_a_saved_folder_is_read_by_transformers(name, shards, tmp_path):
    import transformers

    module = save_module(name, tmp_path / "old", **({} if shards is None else {"max_shard_size": shards}))
    (tmp_path / "old" / "tokenizer.json").write_text("{}")
    (tmp_path / "old" / "pytorch_model.bin").write_text("old values")
    _, params = load(tmp_path / "old")
    changed = tree.map(lambda leaf: leaf + 0.125, params)
    save(tmp_path / "new", changed, source=tmp_path / "old")
    with torch.no_grad():
        for leaf in module.parameters():
            leaf += 0.125
    kind = transformers.AutoModelForCausalLM if name in CAUSAL else transformers.AutoModelForImageClassification
    again = kind.from_pretrained(tmp_path / "new").eval()
    data = some_data(name)
    data = {entry: leaf.float() if leaf.is_floating_point() else leaf for entry, leaf in data.items()}
    torch.testing.assert_close(own_losses(name, again, data), own_losses(name, module, data), rtol=0, atol=0)
    names = {file.name for file in (tmp_path / "new").iterdir()}
    assert names == {file.name for file in (tmp_path / "old").iterdir()} - {"pytorch_model.bin"}
    assert_same(tree.flatten(load(tmp_path / "new")[1]), tree.flatten(changed), 0.0)


def test_values_are_saved_in_the_stored_or_the_given_dtype(tmp_path):
    make("gpt2", dtype=torch.bfloat16).save_pretrained(tmp_path / "old")
    _, params = load(tmp_path / "old")
    assert {leaf.dtype for leaf in tree.leaves(params)} == {torch.float32}
    save(tmp_path / "half", params, source=tmp_path / "old")
    save(tmp_path / "full", params, source=tmp_path / "old", dtype=torch.float32)
    kinds = {
        folder: read_folder.StoredTensors(tmp_path / folder).part("transformer.wte.weight").dtype
        for folder in ("half", "full")
    }
    assert kinds == {"half": torch.bfloat16, "full": torch.float32}
    assert json.loads((tmp_path / "full" / "config.json").read_text())["dtype"] == "float32"


def test_stored_names_without_the_base_model_prefix_are_found(tmp_path):
    from safetensors.torch import load_file, save_file

    module = save_module("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {name.removeprefix("transformer."): leaf for name, leaf in tensors.items()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    _, params = load(tmp_path)
    assert_same(tree.flatten(params), {n: leaf.detach() for n, leaf in module.named_parameters()}, 0.0)


def test_an_existing_folder_is_not_overwritten(tmp_path):
    save_module("gpt2", tmp_path / "old")
    _, params = load(tmp_path / "old")
    with pytest.raises(FdpError, match="expected no folder of this name"):
        save(tmp_path / "old", params, source=tmp_path / "old")


def test_leaves_of_another_model_are_refused(tmp_path):
    save_module("gpt2", tmp_path / "old")
    with pytest.raises(FdpError, match="expected to hold the leaves"):
        save(tmp_path / "new", {"other": torch.ones(2)}, source=tmp_path / "old")
    assert not (tmp_path / "new").exists()


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(FdpError, match=r"config\.json"):
        load(tmp_path)
    save_module("gpt2", tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").unlink()
    with pytest.raises(FdpError, match="expected weights"):
        load(tmp_path / "old")


def test_stored_shapes_that_contradict_the_config_are_refused(tmp_path):
    save_module("gpt2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": WORDS + 1}))
    with pytest.raises(FdpError, match=rf"expected shape \({WORDS + 1}, 16\)"):
        load(tmp_path)


class Alive(TorchDispatchMode):
    """A mode that measures the most bytes of tensors, made by operations or noted, that were alive at once."""

    def __init__(self):
        super().__init__()
        self.most = 0
        self.known: list[weakref.ref[Tensor]] = []

    def note(self, leaf: Tensor) -> None:
        self.known = [ref for ref in self.known if ref() is not None] + [weakref.ref(leaf)]
        there = [ref() for ref in self.known]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in there if t is not None}
        self.most = max(self.most, sum(storages.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.note(out)
        return out


class Counting:
    """A file, or a tensor in it, that reports everything that is read to ``note``."""

    def __init__(self, inner: Any, note: Callable[[Tensor], Tensor]):
        self.inner, self.note = inner, note

    def __enter__(self) -> Counting:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def get_tensor(self, name: str) -> Tensor:
        return self.note(self.inner.get_tensor(name))

    def get_slice(self, name: str) -> Counting:
        return Counting(self.inner.get_slice(name), self.note)

    def __getitem__(self, window: Any) -> Tensor:
        return self.note(self.inner[window])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def load_counted(folder: str, zero: Zero, axes: dict[str, int]) -> dict[str, Any]:
    """Return what a rank reads, what it holds afterwards, and the most it held."""
    module = read_folder.empty_module(Path(folder))
    model = hugging_face.model_of(module)
    sharding = make_sharding(model, make_mesh(axes, device_type="cpu"), zero=zero)
    own, read, alive = read_folder.safe_open, [], Alive()

    def note(part: Tensor) -> Tensor:
        alive.note(part)
        read.append(part.numel() * part.element_size())
        return part

    read_folder.safe_open = lambda *args, **kwargs: Counting(own(*args, **kwargs), note)  # pyright: ignore
    try:
        with alive:
            params = read_folder.read_params(Path(folder), module, model, sharding, dtype=torch.float64)
    finally:
        read_folder.safe_open = own
    parts = {path: leaf.to_local() for path, leaf in tree.flatten(params).items()}
    return {
        "read": sum(read),
        "most": alive.most,
        "parts": parts,
        "windows": {path: plan.window for path, plan in sharding.leaves.items()},
    }


def assert_parts(ranks: list[dict[str, Any]], whole: dict[str, Tensor], *, repeated: int = 1) -> None:
    """Check that ``repeated`` ranks read every element, and that none held more than its shards and one tensor."""
    largest = max(leaf.numel() for leaf in whole.values())
    for rank in ranks:
        elements = sum(part.numel() for part in rank["parts"].values())
        assert rank["read"] == 4 * elements  # float32 in the files
        assert 8 * elements < rank["most"] <= 8 * elements + 4 * largest  # float64 in memory
        for path, window in rank["windows"].items():
            expected = whole[path][tuple(slice(start, start + length) for start, length in window)]
            assert torch.equal(rank["parts"][path], expected.double())
    assert sum(rank["read"] for rank in ranks) == 4 * repeated * sum(leaf.numel() for leaf in whole.values())


AXES = [({"shard": 4}, Zero.THREE, 1), ({"replicate": 2, "shard": 2}, Zero.TWO, 2), ({"replicate": 4}, Zero.NONE, 4)]


@pytest.mark.parametrize(("axes", "zero", "repeated"), AXES)
def test_ranks_read_their_shards_and_hold_at_most_one_tensor_more(axes, zero, repeated, tmp_path, monkeypatch):
    monkeypatch.setattr(read_folder, "run_in_unison", lambda act, group: act())  # fake ranks say nothing to each other
    module = save_module("llama", tmp_path / "model", max_shard_size="4KB")
    ranks = []
    for rank in range(4):
        with fake_ranks(4, rank=rank):
            ranks.append(load_counted(str(tmp_path / "model"), zero, axes))
    assert_parts(ranks, {path: leaf.detach() for path, leaf in module.named_parameters()}, repeated=repeated)


@slow
@pytest.mark.ranks
@pytest.mark.parametrize(("axes", "zero", "repeated"), AXES)
def test_processes_read_their_shards_and_hold_at_most_one_tensor_more(axes, zero, repeated, tmp_path):
    module = save_module("gpt2", tmp_path / "model")
    ranks = run_on_ranks(load_counted, 4, str(tmp_path / "model"), zero, axes)
    assert_parts(ranks, {path: leaf.detach() for path, leaf in module.named_parameters()}, repeated=repeated)


def save_from_ranks(old: str, new: str) -> None:
    model = load_model(old)
    sharding = make_sharding(model, make_mesh({"shard": 2}, device_type="cpu"), zero=Zero.THREE)
    _, params = load(old, sharding=sharding)
    save(new, params, source=old)


@slow
@pytest.mark.ranks
def test_ranks_save_what_they_loaded(tmp_path):
    module = save_module("gpt2", tmp_path / "old")
    run_on_ranks(save_from_ranks, 2, str(tmp_path / "old"), str(tmp_path / "new"))
    _, params = load(tmp_path / "new")
    assert_same(tree.flatten(params), {n: leaf.detach() for n, leaf in module.named_parameters()}, 0.0)
