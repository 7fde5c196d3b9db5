"""What is trained, and on what: the model and the data that the command line names.

--model gpt2-large                    a preset, drawn from the key
--model models/tiny                   a local folder of ``transformers``: its values in, a folder like it out
--lora 16 / --train-only '*bias'      only adapters, or only the leaves that match
--prefix 8                            only keys and values of 8 virtual tokens in front of every layer's own
--unit window | record | user         what one sample is, and so whom the guarantee is about

>>> chosen = subject(settings)
>>> data = dataset_of(settings, chosen.model)
>>> export(state.params, settings, folder, promised=[guarantee])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from fdp import keys, models, tree
from fdp.data import corpus, datasets, text
from fdp.data.document_packing import PackUnit
from fdp.data.files import RecordForm
from fdp.foreign.adapters.lora import lora_model, merge, train_only
from fdp.foreign.adapters.prefix import prefix_model, without_prefix
from fdp.foreign.adapters.prefix_save import save_prefix
from fdp.foreign.hub import hugging_face
from fdp.foreign.hub.read_folder import empty_module, read_params
from fdp.model import Model
from fdp.parallel.sharded_init import drawn_params
from fdp.parallel.sharding import Sharding
from fdp.privacy.guarantee import MARKER, Guarantee, marker_text, read_marker
from fdp.privacy.microbatches import Dataset
from fdp.storage.safetensors import export_safetensors
from fdp.types import FdpError, Key, Tree

Values: TypeAlias = Callable[[Model, Sharding | None, Key], Tree]
"""The first parameters of a model, whole or as this rank's parts; the key is for leaves that nothing is stored for."""

UNITS = ("window", "record", "user", "row")


class Subject(NamedTuple):
    """The model, and where its first values come from."""

    model: Model
    values: Values


def is_folder(name: str) -> bool:
    """Whether ``--model`` names a folder rather than a preset."""
    return name not in models.PRESETS and Path(name).is_dir()


def subject_and_data(settings: Mapping[str, Any]) -> tuple[Subject, Dataset]:
    """Both: a foreign model is called as the data's entries ask (masks, segments, windows), and so comes after them."""
    chosen = subject(settings)
    dataset = dataset_of(settings, chosen.model)
    if not is_folder(settings["model"]):
        return chosen, dataset
    example = dataset.fetch(np.arange(min(2, len(dataset))))
    plain = set(example) == {"tokens"} and example["tokens"].ndim == 2
    return (chosen if plain else subject(settings, example=example)), dataset


def subject(settings: Mapping[str, Any], *, example: Tree | None = None) -> Subject:
    """The model that was asked for, with adapters or frozen leaves; ``example``: samples that are not tokens alone."""
    name, context = settings["model"], settings["context"]
    folder = Path(name) if is_folder(name) else None
    _check_one_way(settings)
    if settings["prefix"] is not None:
        if folder is None:
            raise FdpError(f"--prefix: expected --model to be a folder of transformers, got {name!r}; use --lora")
        model = prefix_model(empty_module(folder), tokens=settings["prefix"], context=context, example=example)
        return Subject(model, _stored_values(folder, without_prefix(model)))
    if folder is None:
        base = models.build(name, context=context)
    else:
        base = hugging_face.load_model(folder, context=context, example=example)
    model = base
    if settings["lora"] is not None:
        if settings["lora"] < 1:
            raise FdpError(f"--lora: expected a rank of at least 1, got {settings['lora']}")
        targets = _words(settings["lora_targets"]) or _matrices(base)
        model = lora_model(base, rank=settings["lora"], alpha=_alpha(settings), targets=targets)
    if settings["train_only"] is not None:
        model = train_only(base, *_words(settings["train_only"]))
    if folder is None:
        return Subject(model, drawn_params)
    return Subject(model, _stored_values(folder, base))


def dataset_of(settings: Mapping[str, Any], model: Model, *, source: str | None = None) -> Dataset:
    """The data that was asked for, a sample being what ``--unit`` says; ``source`` instead of ``--data``."""
    path = settings["data"] if source is None else source
    if model.context is None and is_folder(settings["model"]) and path not in datasets.NAMES:
        raise FdpError(
            f"--model {settings['model']}: expected a language model, got a classifier, {model.name}; --data has no "
            f"labels. Train it from Python: load(folder, example=data) of fdp.foreign.hub.hugging_face with data "
            f"{{'tokens', 'mask', 'label'}} or {{'image', 'label'}}, then fdp.step.make_train_step"
        )
    unit, by = settings["unit"], settings["user_field"]
    if unit not in UNITS:
        raise FdpError(f"--unit: expected one of {', '.join(UNITS)}, got {unit!r}")
    if (unit == "user") != (by is not None):
        raise FdpError(f"--user-field: expected with --unit user, and only there, got --unit {unit}")
    form = named_form(settings["form"])
    vocab_size = datasets.BYTES if model.vocab_size is None else model.vocab_size
    tokenizer = _tokenizer(settings, model)
    if unit == "window":
        return datasets.load(
            path,
            context=model.context,
            form=form,
            field=settings["field"],
            vocab_size=vocab_size,
            tokenizer=tokenizer,
        )
    if model.context is None:
        raise FdpError(f"--unit {unit}: expected a language model, got {model.name}; leave it out")
    pack = PackUnit.ROW if unit == "row" else PackUnit.OWNER if settings["pack"] else None
    # The key is public and the same in every run: which of a user's windows are used depends on nobody else.
    window_key = keys.fold_in(keys.key(0), "windows")
    return corpus.load(
        path,
        context=model.context,
        vocab_size=vocab_size,
        tokenizer=tokenizer or text.BYTES,
        form=form,
        field=settings["field"],
        per_user=None if by is None else corpus.PerUser(by, settings["windows_per_user"], window_key),
        pack=pack,
    )


def named_form(name: str) -> RecordForm:
    """Return the form that ``--form`` names."""
    known = {form.value: form for form in RecordForm}
    if name not in known:
        raise FdpError(f"--form: expected one of {', '.join(known)}, got {name!r}")
    return known[name]


def promised_before(settings: Mapping[str, Any]) -> tuple[Guarantee, ...]:
    """What was promised by the runs of fdp that trained the model in ``--model``, if any did."""
    return read_marker(Path(settings["model"])) if is_folder(settings["model"]) else ()


def export(params: Tree, settings: Mapping[str, Any], folder: Path, *, promised: Sequence[Guarantee]) -> Path:
    """Write the trained model, adapters merged: a folder like the one it came from, or one safetensors file.

    Of a prefix, which cannot be merged, a folder that ``peft`` reads. ``promised`` is what all runs that trained it
    promised, this one last: a folder says it, for whoever trains it again.
    """
    files = {MARKER: marker_text(promised)}
    if settings["prefix"] is not None:
        save_prefix(folder / "model", params, base=settings["model"], files=files)
        return folder / "model"
    merged = params if settings["lora"] is None else merge(params, alpha=_alpha(settings))
    if not is_folder(settings["model"]):
        export_safetensors(merged, folder / "model.safetensors")
        return folder / "model.safetensors"
    hugging_face.save(folder / "model", merged, source=settings["model"], files=files)
    return folder / "model"


def _check_one_way(settings: Mapping[str, Any]) -> None:
    """Refuse two of the options that say what is trained."""
    given = [name for name in ("lora", "prefix", "train_only") if settings[name] is not None]
    if len(given) > 1:
        said = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise FdpError(f"{said}: expected one of them, got {len(given)}; each says what alone is trained")


def _alpha(settings: Mapping[str, Any]) -> float:
    return 2.0 * settings["lora"] if settings["lora_alpha"] is None else settings["lora_alpha"]


def _words(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(word.strip() for word in text.split(",") if word.strip())


def _matrices(model: Model) -> tuple[str, ...]:
    """The matrices of the repeated blocks: no embedding and no head; of one block, those without the words."""
    if len(model.blocks) == 1:
        matrices = (path for path, leaf in model.leaves.items() if len(leaf.shape) == 2)
        return tuple(sorted(path for path in matrices if model.vocab_size not in model.leaves[path].shape))
    inner = {path for block in model.blocks[1:-1] for path in tree.leaves(block.params)}
    outer = {path for block in (model.blocks[0], model.blocks[-1]) for path in tree.leaves(block.params)}
    return tuple(sorted(path for path in inner - outer if len(model.leaves[path].shape) == 2))


def _stored_values(folder: Path, base: Model) -> Values:
    def values(model: Model, sharding: Sharding | None, key: Key) -> Tree:
        module = empty_module(folder)
        device = key.device if sharding is None else None
        stored = read_params(folder, module, base, sharding, dtype=torch.float32, device=device)
        new = model._replace(leaves={path: leaf for path, leaf in model.leaves.items() if path not in base.leaves})
        drawn = drawn_params(new, sharding, key)
        return tree.nest(tree.flatten(stored) | tree.flatten(drawn))

    return values


def _tokenizer(settings: Mapping[str, Any], model: Model) -> text.Tokenizer | None:
    """The one that was named, else that of the model's folder, if it has one; None: bytes."""
    if settings["tokenizer"] is not None:
        return text.load_tokenizer(settings["tokenizer"])
    folder = Path(settings["model"])
    if model.vocab_size is None or not is_folder(settings["model"]) or not any(folder.glob("tokenizer*")):
        return None
    return text.load_tokenizer(folder)
