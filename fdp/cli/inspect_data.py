"""``fdp inspect --data``: tell the data before it is trained on, without a run.

    fdp inspect --data notes.jsonl
    fdp inspect models/tiny --data notes.jsonl --unit user --user-field patient_id --json

It shows the line that ``fdp train`` prints, the fields of the records by name and kind, the lengths of the texts in
tokens, texts that are equal or empty, and suggestions. If the records have no text in the expected field, it still
shows their fields. **All of it is computed from private data and covered by no budget.**
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fdp.cli.options import Flag
from fdp.cli.train_options import TrainOptions, train_flag

if TYPE_CHECKING:
    from fdp.data.documents import Documents
    from fdp.privacy.microbatches import Dataset
    from fdp.types import FdpError

PRIVATE = "computed from private data and covered by no budget: for your eyes, not to be shared"


@dataclass(frozen=True)
class InspectDataOptions:
    """The data to tell, and how it is read; as in ``fdp train``."""

    data: Annotated[str | None, train_flag("data", default_text="none: only the model is shown")] = None
    model: Annotated[
        str | None,
        Flag("The model to read the data for, without showing it.", default_text="the argument, or gpt-nano"),
    ] = None
    form: Annotated[str, train_flag("form")] = "auto"
    field: Annotated[str, train_flag("field")] = "text"
    tokenizer: Annotated[str | None, train_flag("tokenizer")] = None
    unit: Annotated[str, train_flag("unit")] = "window"
    user_field: Annotated[str | None, train_flag("user_field")] = None
    windows_per_user: Annotated[int, train_flag("windows_per_user")] = 8
    pack: Annotated[bool, train_flag("pack")] = False
    long: Annotated[str | None, train_flag("long")] = None
    public_data: Annotated[str | None, train_flag("public_data")] = None


class ToldData(NamedTuple):
    """All that is told about data; ``lengths`` and ``fields`` are empty where they do not apply."""

    data: str
    line: str
    unit: str
    warnings: list[str]
    lengths: dict[str, int]
    fields: list[dict[str, Any]]
    suggestions: list[str]
    reading: dict[str, Any]


def data_settings(given: InspectDataOptions, *, model: str, context: int | None) -> TrainOptions:
    """Return the options of a run on the data."""
    from dataclasses import asdict

    from fdp.cli.options import build

    return build(TrainOptions, asdict(given) | {"model": model, "context": context})


def tell_data(options: TrainOptions) -> ToldData:
    """Read the data as a run would, and tell it."""
    import numpy as np

    from fdp.cli.model_and_data import check_model_name, is_folder, load_dataset, load_model
    from fdp.data.read_counts import read_counts_of
    from fdp.data.units import dataset_unit, sentence

    check_model_name(options.model.model)
    model, path = load_model(options).model, options.data.data
    dataset = load_dataset(options, model)
    reading = read_counts_of(dataset)
    assert reading is not None
    fields, documents = _read_texts(options)
    lengths = None if documents is None else np.diff(documents.starts)
    longest = _longest(options) if is_folder(options.model.model) else None
    return ToldData(
        path,
        reading.line(),
        sentence(dataset_unit(dataset), change="added or removed"),
        [*reading.warnings(), *_describe_copies(dataset, documents)],
        _quantiles(lengths),
        fields,
        _suggest(options, dataset, lengths, model.context, longest),
        reading.as_json(),
    )


def show_data(console: Console, told: ToldData) -> None:
    """Print what is told about data."""
    console.print(Text(f"{told.data}: {told.line}", style="bold"), soft_wrap=True)
    console.print(Text(PRIVATE, style="yellow"), soft_wrap=True)
    console.print(f"unit of privacy: {told.unit}", soft_wrap=True)
    if told.lengths:
        listed = ", ".join(f"{name} {value:,}" for name, value in told.lengths.items())
        console.print(f"lengths in {told.reading['word']}s: {listed}", soft_wrap=True)
    if told.fields:
        console.print(_field_table(told.fields))
    for warning in told.warnings:
        console.print(Text(warning, style="yellow"), soft_wrap=True)
    for suggestion in told.suggestions:
        console.print(Text(f"suggestion: {suggestion}", style="cyan"), soft_wrap=True)


def name_text_field(console: Console, options: TrainOptions, problem: str) -> FdpError:
    """Print the fields of records without a text in the expected one; return an error that says how to name it."""
    from fdp.cli.model_and_data import parse_form
    from fdp.data.file_kinds import TABLE_SUFFIXES, suffix_of
    from fdp.data.files import find_source
    from fdp.data.record_fields import example_of
    from fdp.data.text_fields import describe_fields, likely_text_field
    from fdp.types import FdpError

    source = find_source(Path(options.data.data), form=parse_form(options.data.form))
    fields = describe_fields(source)
    console.print(Text(PRIVATE, style="yellow"), soft_wrap=True)
    console.print(_field_table(fields))
    likely = likely_text_field(fields, but=options.data.user_field)
    remedy = f"name the field that holds the text with --field{example_of(likely)}. The table lists the fields"
    if any(suffix_of(file) in TABLE_SUFFIXES for file in source.files):
        remedy += "; if it lists values, the file has no header: write the names of the fields above its first row"
    return FdpError(f"{problem}; {remedy}")


def _field_table(fields: list[dict[str, Any]]) -> Table:
    table = Table(title="fields", title_justify="left", title_style="bold")
    for name in ("field", "kind", "in records", "short values", "different"):
        table.add_column(name, justify="left" if name in ("field", "kind") else "right")
    for row in fields:
        counts = (f"{row[name]:,}" for name in ("present", "short", "values"))
        table.add_row(row["field"], row["kind"], *counts)
    return table


def _describe_copies(dataset: Dataset, documents: Documents | None) -> list[str]:
    """Return the warning of a run about samples that are copies, and sentences about texts if these are no samples."""
    from fdp.data.read_counts import read_counts_of
    from fdp.data.repeated import digest_and_repeats
    from fdp.data.units import UnitKind
    from fdp.run.repeated_samples import describe_repeats, describe_texts

    reading, (_, repeats) = read_counts_of(dataset), digest_and_repeats(dataset)
    found = [describe_repeats(repeats, len(dataset), reading=reading)] if repeats.repeated else []
    if documents is None or (reading is not None and reading.kind in (UnitKind.RECORD, UnitKind.FILE)):
        return found
    return found + describe_texts(documents)


def _read_texts(options: TrainOptions) -> tuple[list[dict[str, Any]], Documents | None]:
    """Return the fields of the records, and the texts; None where there is no text."""
    from fdp.cli.check_data import load_tokenizer
    from fdp.cli.model_and_data import is_folder, parse_form
    from fdp.data import corpus, datasets, text
    from fdp.data.files import find_source, find_token_files
    from fdp.data.text_fields import describe_fields

    given, path = options.data, Path(options.data.data)
    if given.data in datasets.NAMES or find_token_files(path):
        return [], None
    folder = Path(options.model.model) if is_folder(options.model.model) else None
    tokenizer, form = load_tokenizer(given.tokenizer, folder, given.data) or text.BYTES, parse_form(given.form)
    documents, _ = corpus.read(path, tokenizer, form=form, field=given.field)
    source = find_source(path, form=form)
    return describe_fields(source) if source.records else [], documents


def _quantiles(lengths: Any) -> dict[str, int]:
    from fdp.data.lengths import length_quantiles

    return {} if lengths is None else length_quantiles(lengths)


def _suggest(options: TrainOptions, dataset: Any, lengths: Any, context: int | None, longest: int | None) -> list[str]:
    """Return options that fit the data better, each with its reason."""
    from fdp.cli.user_advice import suggest_for_users
    from fdp.data.lengths import share_whole, suggest_context

    found: list[str] = []
    if lengths is not None and context is not None:
        better = suggest_context(lengths, context=context, longest=longest)
        if better is not None:
            now, then = share_whole(lengths, context), share_whole(lengths, better)
            found.append(
                f"--context {better}: {then:.0%} of the texts fit into one window whole (with {context}: {now:.0%})"
            )
    return found + list(suggest_for_users(dataset, most=options.data.windows_per_user).values())


def _longest(options: TrainOptions) -> int | None:
    from fdp.foreign.hub.positions import longest_context
    from fdp.foreign.hub.read_folder import read_config

    return longest_context(read_config(Path(options.model.model)))
