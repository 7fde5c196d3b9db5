"""Load the model and the data that the command line names, and export the trained model.

--model gpt2-large                    a preset, initialised from the key
--model models/tiny                   a local folder of ``transformers``; the trained model is a folder like it
--lora 16 / --train-only '*bias'      train only adapters, or only the leaves that match
--prefix 8                            train only the keys and values of 8 virtual tokens before every layer's own
--unit window | record | user         what one sample is, and so whom the guarantee protects

>>> (model, values), dataset = load_model_and_data(options)
>>> export_model(state.params, options.model, folder, guarantees=[guarantee])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from fdp import keys, models, tree
from fdp.cli.check_data import check_context, check_public_data, load_tokenizer, parse_long
from fdp.cli.leaf_names import lora_targets, named_leaves
from fdp.cli.names import by_value, nearest
from fdp.cli.train_options import DataOptions, ModelOptions, TrainOptions
from fdp.data import corpus, datasets, text
from fdp.data.document_packing import PackUnit
from fdp.data.documents import Long
from fdp.data.files import RecordForm, find_source
from fdp.data.mixed import Mixed
from fdp.data.record_fields import MissingText
from fdp.data.text_fields import with_example
from fdp.data.user_fields import user_fields
from fdp.foreign.adapters.lora import lora_model, merge, train_only
from fdp.foreign.adapters.prefix import prefix_model, without_prefix
from fdp.foreign.adapters.prefix_save import save_prefix
from fdp.foreign.hub import hugging_face
from fdp.foreign.hub.read_folder import empty_module, folder_digest, read_params
from fdp.model import Model
from fdp.parallel.sharded_init import drawn_params
from fdp.parallel.sharding import Sharding
from fdp.privacy.guarantee import MARKER, Guarantee, marker_text, read_marker
from fdp.privacy.microbatches import Dataset
from fdp.report.search_price import price_promises
from fdp.run.run_folder import is_run_folder
from fdp.storage.safetensors import export_safetensors
from fdp.types import FdpError, Key, Tree

InitialParams: TypeAlias = Callable[[Model, Sharding | None, Key], Tree]
"""Returns the initial parameters of a model, full or this rank's shards; leaves without a stored value use the key."""

UNITS = ("window", "record", "user", "row")
PRESET_LETTERS, FOLDER_LETTERS = 0.7, 0.6
"""Part of the letters that a mistyped name shares with the preset, or the folder, that is suggested."""


class ModelSource(NamedTuple):
    """A model and its initial parameters."""

    model: Model
    values: InitialParams


def is_folder(name: str) -> bool:
    """Return True if ``--model`` names a folder, not a preset."""
    return name not in models.PRESETS and Path(name).is_dir()


def check_model_name(name: str, flag: str = "--model") -> None:
    """Raise unless ``name`` is a preset or a model's folder; suggest near ones, or how to get a model of the hub."""
    if is_folder(name) and is_run_folder(Path(name)):
        model = Path(name, "model")
        trained = f"its model is {model}" if model.is_dir() else f"fdp train --extend {name} goes on training from it"
        raise FdpError(f"{flag}: expected a preset or the folder of a model, got {name}, that of a run; {trained}")
    if name in models.PRESETS or is_folder(name):
        return
    expected = f"{flag}: expected a preset ({', '.join(models.PRESETS)}) or a folder, got {name!r}, which is"
    if Path(name).is_file():
        raise FdpError(f"{expected} a file; give the folder with config.json and the weights, as save_pretrained wrote")
    preset, folder = nearest(name, models.PRESETS, cutoff=PRESET_LETTERS), near_model_folder(name)
    near = [repr(each) for each in (preset, folder) if each is not None]
    said = f" Did you mean {' or '.join(near)}?" * bool(near)
    target = f"models/{Path(name).name}"
    if preset is None and name.count("/") < 2 and name[0] not in "./~":
        said += (
            f" If it is a model of the Hugging Face hub, download it first: hf download {name} --local-dir {target}; "
            f"then give {target}"
        )
    raise FdpError(f"{expected} neither.{said or ' Check the path: a folder of transformers has a config.json'}")


def near_model_folder(name: str) -> str | None:
    """Return the folder of a model whose path is close to ``name``, each part to its own; None if there is none."""
    *above, last = Path(name).relative_to(Path(name).anchor).parts
    found = Path(Path(name).anchor)
    try:
        for part in above:
            if (near := part if (found / part).is_dir() else _nearest_folder(found, part)) is None:
                return None
            found /= near
        near = _nearest_folder(found, last, holding="config.json")
    except OSError:  # a folder that may not be listed
        return None
    return None if near is None else str(found / near)


def _nearest_folder(where: Path, name: str, *, holding: str = "") -> str | None:
    """Return the name closest to ``name`` among the folders in ``where`` that hold a file."""
    names = [each.name for each in where.iterdir() if each.is_dir() and (each / holding).exists()]
    return nearest(name, names, cutoff=FOLDER_LETTERS)


def load_model_and_data(options: TrainOptions) -> tuple[ModelSource, Dataset]:
    """Return the model and the data.

    A model from a folder is built twice if the samples are not just tokens: the arguments of its forward call depend on
    the entries of the data (masks, segments, windows), and the data on the model's context and vocabulary.

    Guarantees:
      - with a fixed seed, a folder with another config or other weights gives other noise.
    """
    source = load_model(options)
    dataset = load_dataset(options, source.model)
    if not is_folder(options.model.model):
        return source, dataset
    example = dataset.fetch(np.arange(min(2, len(dataset))))
    only_tokens = set(example) == {"tokens"} and example["tokens"].ndim == 2
    source = source if only_tokens else load_model(options, example=example)
    if options.training.seed is None:  # the key is new: nothing to tell apart, and weights may take minutes to read
        return source, dataset
    return source._replace(values=_values_of(source.values, folder_digest(Path(options.model.model)))), dataset


def load_model(options: TrainOptions, *, example: Tree | None = None) -> ModelSource:
    """Return the model, with adapters or frozen leaves; ``example`` are samples that hold more than tokens."""
    given, context = options.model, options.data.context
    folder = Path(given.model) if is_folder(given.model) else None
    _check_one_adapter(given)
    if folder is not None:
        check_context(folder, context)
    if given.prefix is not None:
        if folder is None:
            raise FdpError(
                f"--prefix: expected --model to be a folder of transformers, got {given.model!r}; use --lora"
            )
        model = prefix_model(empty_module(folder), tokens=given.prefix, context=context, example=example)
        return ModelSource(model, _stored_values(folder, without_prefix(model)))
    if folder is None:
        base = models.build(given.model, context=context)
    else:
        base = hugging_face.load_model(folder, context=context, example=example)
    model = base
    if given.lora is not None:
        targets = lora_targets(base, given.lora_targets)
        model = lora_model(base, rank=given.lora, alpha=_lora_alpha(given.lora, given.lora_alpha), targets=targets)
    if given.train_only is not None:
        model = train_only(base, *named_leaves(base, "--train-only", given.train_only, tuple(base.leaves)))
    if folder is None:
        return ModelSource(model, drawn_params)
    return ModelSource(model, _stored_values(folder, base))


def load_dataset(options: TrainOptions, model: Model, *, source: str | None = None) -> Dataset:
    """Return the data in samples as ``--unit`` defines them, mixed with ``--public-data``.

    ``source`` replaces ``--data``, and is not mixed with anything.
    """
    public = options.reading.public_data
    if source is not None or public is None:
        return _load_samples(options, model, options.data.data if source is None else source)
    check_public_data(public, options.data.data)
    private = _load_samples(options, model, options.data.data)
    return Mixed(private, _load_samples(options, model, public, all_named=False))


def _load_samples(options: TrainOptions, model: Model, path: str, *, all_named: bool = True) -> Dataset:
    """Return the data at a path; if not ``all_named``, a record without a user is a user of its own."""
    try:
        return _read_samples(options, model, path, all_named=all_named)
    except MissingText as error:
        found = with_example(error, find_source(path), but=options.data.user_field)
    raise found


def _read_samples(options: TrainOptions, model: Model, path: str, *, all_named: bool) -> Dataset:
    given, folder = options.data, Path(options.model.model) if is_folder(options.model.model) else None
    if model.context is None and folder is not None and path not in datasets.NAMES:
        raise FdpError(
            f"--model {options.model.model}: expected a language model, got a classifier, {model.name}; --data has no "
            f"labels. Train it from Python: load(folder, example=data) of fdp.foreign.hub.hugging_face with data "
            f"{{'tokens', 'mask', 'label'}} or {{'image', 'label'}}, then fdp.step.make_train_step"
        )
    _check_unit(given, path)
    form, long = parse_form(given.form), parse_long(options.reading, unit=given.unit)
    vocab_size = datasets.BYTE_VOCAB_SIZE if model.vocab_size is None else model.vocab_size
    tokenizer = load_tokenizer(given.tokenizer, None if model.vocab_size is None else folder, path)
    if given.unit == "window":
        return datasets.load(
            path, context=model.context, form=form, field=given.field, vocab_size=vocab_size, tokenizer=tokenizer
        )
    if model.context is None:
        raise FdpError(f"--unit {given.unit}: expected a language model, got {model.name}; leave it out")
    per_user = None
    if given.user_field is not None:
        # The key is public and the same in every run: which of a user's windows are used depends on nobody else.
        key = keys.fold_in(keys.key(0), "windows")
        per_user = corpus.PerUser(given.user_field, given.windows_per_user, key, long, all_named)
    return corpus.load(
        path,
        context=model.context,
        vocab_size=vocab_size,
        tokenizer=tokenizer or text.BYTES,
        form=form,
        field=given.field,
        per_user=per_user,
        pack=PackUnit.ROW if given.unit == "row" else PackUnit.OWNER if given.pack else None,
        windows_per_record=given.windows_per_user if (given.unit, long) == ("record", Long.SPLIT) else 1,
    )


def parse_form(name: str) -> RecordForm:
    """Return the form that ``--form`` names."""
    known = by_value(RecordForm)
    if name not in known:
        raise FdpError(f"--form: expected one of {', '.join(known)}, got {name!r}")
    return known[name]


def earlier_guarantees(given: ModelOptions) -> tuple[Guarantee, ...]:
    """Return the guarantees of the runs that trained the model in ``--model``; empty if none did.

    Guarantees:
      - the model of a run of ``fdp search`` has the price of the search, also while that runs or if it did not end.
    """
    folder = Path(given.model)
    return price_promises(folder.resolve().parent, read_marker(folder)) if is_folder(given.model) else ()


def export_model(params: Tree, given: ModelOptions, folder: Path, *, guarantees: Sequence[Guarantee]) -> Path:
    """Write the trained model, adapters merged: a folder like the one it came from, or one safetensors file.

    A prefix cannot be merged; it becomes a folder that ``peft`` reads. A folder records ``guarantees``, those of all
    runs that trained the model, this one last, for whoever trains it again; of a run of a search, at the price of that.
    """
    files = {MARKER: marker_text(price_promises(folder, guarantees))}
    if given.prefix is not None:
        save_prefix(folder / "model", params, base=given.model, files=files)
        return folder / "model"
    merged = params if given.lora is None else merge(params, alpha=_lora_alpha(given.lora, given.lora_alpha))
    if not is_folder(given.model):
        export_safetensors(merged, folder / "model.safetensors")
        return folder / "model.safetensors"
    hugging_face.save(folder / "model", merged, source=given.model, files=files)
    return folder / "model"


def _check_one_adapter(given: ModelOptions) -> None:
    """Raise if two options say which part of the model is trained."""
    named = {"--lora": given.lora, "--prefix": given.prefix, "--train-only": given.train_only}
    found = [flag for flag, value in named.items() if value is not None]
    if len(found) > 1:
        raise FdpError(
            f"{' and '.join(found)}: expected one of them, got {len(found)}; each selects the only part that is trained"
        )


def _check_unit(given: DataOptions, path: str) -> None:
    if given.unit not in UNITS:
        raise FdpError(
            f"--unit: expected one of {', '.join(UNITS)}, got {given.unit!r}; if a person is to be protected, give "
            f"--unit user, and --user-field with the field that names the person"
        )
    if given.unit != "user" and given.user_field is not None:
        raise FdpError(
            f"--user-field: expected --unit user to go with it, got --unit {given.unit}: only with --unit user are the "
            f"records of a person one sample. Add --unit user, or leave --user-field out"
        )
    if given.unit == "user" and given.user_field is None:
        found = user_fields(path, text_field=given.field)
        listed = f"; it could be {' or '.join(found)}" if found else ""
        example = found[0] if found else "author"
        raise FdpError(
            f"--unit user: expected --user-field, the field of a record that names the person it belongs to, got none"
            f"{listed}. For example: --user-field {example}"
        )


def _lora_alpha(rank: int, alpha: float | None) -> float:
    return 2.0 * rank if alpha is None else alpha


# The names of these functions, and of what the inner ones capture, are part of the noise key (fdp.fingerprint).
def _values_of(start: InitialParams, content: str) -> InitialParams:
    """Return ``start``, told apart from that of a folder with other content."""

    def values(model: Model, sharding: Sharding | None, key: Key) -> Tree:
        assert content  # captured: it tells this run's noise from that of other weights at the same path
        return start(model, sharding, key)

    return values


def _stored_values(folder: Path, base: Model) -> InitialParams:
    """Return a function that reads the leaves of ``base`` from the folder and initialises the others from the key."""

    def values(model: Model, sharding: Sharding | None, key: Key) -> Tree:
        module = empty_module(folder)
        device = key.device if sharding is None else None
        stored = read_params(folder, module, base, sharding, dtype=torch.float32, device=device)
        new = model._replace(leaves={path: leaf for path, leaf in model.leaves.items() if path not in base.leaves})
        initialised = drawn_params(new, sharding, key)
        return tree.nest(tree.flatten(stored) | tree.flatten(initialised))

    return values
