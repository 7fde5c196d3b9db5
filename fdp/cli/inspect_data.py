"""``fdp inspect --data``: tell the data before it is trained on, without a run.

    fdp inspect --data notes.jsonl
    fdp inspect models/tiny --data notes.jsonl --unit user --user-field patient_id --json

It shows the line that ``fdp train`` prints, the fields of the records by name, the lengths of the texts in tokens, and
suggestions. **All of it is computed from private data and covered by no budget.**
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
    from fdp.data.person_fields import FieldCensus

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
    from fdp.cli.model_and_data import is_folder, load_dataset, load_model
    from fdp.data.read_counts import read_counts_of
    from fdp.data.units import dataset_unit, sentence

    model, path = load_model(options).model, options.data.data
    dataset = load_dataset(options, model)
    reading = read_counts_of(dataset)
    assert reading is not None
    census, lengths = _read_texts(options)
    longest = _longest(options) if is_folder(options.model.model) else None
    fields = [] if census is None else _describe_fields(census)
    return ToldData(
        path,
        reading.line(),
        sentence(dataset_unit(dataset), change="added or removed"),
        reading.warnings(),
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
        table = Table(title="fields", title_justify="left", title_style="bold")
        for name in ("field", "in records", "short values", "different"):
            table.add_column(name, justify="left" if name == "field" else "right")
        for row in told.fields:
            table.add_row(row["field"], f"{row['present']:,}", f"{row['short']:,}", f"{row['values']:,}")
        console.print(table)
    for warning in told.warnings:
        console.print(Text(warning, style="yellow"), soft_wrap=True)
    for suggestion in told.suggestions:
        console.print(Text(f"suggestion: {suggestion}", style="cyan"), soft_wrap=True)


def _read_texts(options: TrainOptions) -> tuple[FieldCensus | None, Any]:
    """Return the census of the records' fields, and the number of tokens of every text; None where there is none."""
    import numpy as np

    from fdp.cli.check_data import load_tokenizer
    from fdp.cli.model_and_data import is_folder, parse_form
    from fdp.data import corpus, datasets, text
    from fdp.data.files import find_source, find_token_files
    from fdp.data.person_fields import FieldCensus
    from fdp.data.record_files import read_records

    given, path = options.data, Path(options.data.data)
    if given.data in datasets.NAMES or find_token_files(path):
        return None, None
    folder = Path(options.model.model) if is_folder(options.model.model) else None
    tokenizer, form = load_tokenizer(given.tokenizer, folder, given.data) or text.BYTES, parse_form(given.form)
    documents, _ = corpus.read(path, tokenizer, form=form, field=given.field)
    lengths = np.diff(documents.starts)
    source = find_source(path, form=form)
    if not source.records:
        return None, lengths
    census = FieldCensus()
    for _ in census.watch(read_records(source)):
        pass
    return census, lengths


def _describe_fields(census: FieldCensus) -> list[dict[str, Any]]:
    """Return the counts of every field; those whose names look like content are counted together, and not named."""
    from fdp.data.person_fields import is_plain_name

    plain = {name: counts for name, counts in census.fields.items() if is_plain_name(name)}
    rows = [
        {"field": name, "present": counts.present, "short": counts.short, "values": len(counts.hashes)}
        for name, counts in plain.items()
    ]
    if others := [counts for name, counts in census.fields.items() if name not in plain]:
        together = f"{len(others)} fields whose names look like content"
        sums = {"present": sum(each.present for each in others), "short": sum(each.short for each in others)}
        rows.append({"field": together, **sums, "values": sum(len(each.hashes) for each in others)})
    return rows


def _quantiles(lengths: Any) -> dict[str, int]:
    from fdp.data.lengths import length_quantiles

    return {} if lengths is None else length_quantiles(lengths)


def _suggest(options: TrainOptions, dataset: Any, lengths: Any, context: int | None, longest: int | None) -> list[str]:
    """Return options that fit the data better, each with its reason."""
    from fdp.data.lengths import share_whole, suggest_context, suggest_windows
    from fdp.data.mixed import Mixed
    from fdp.data.nouns import plural
    from fdp.data.users import Users

    found: list[str] = []
    if lengths is not None and context is not None:
        better = suggest_context(lengths, context=context, longest=longest)
        if better is not None:
            now, then = share_whole(lengths, context), share_whole(lengths, better)
            found.append(
                f"--context {better}: {then:.0%} of the texts fit into one window whole (with {context}: {now:.0%})"
            )
    dataset = dataset.private if isinstance(dataset, Mixed) else dataset
    if isinstance(dataset, Users):
        reading, given = dataset.reading, options.data
        windows = dataset.counts.windows + dataset.counts.left_out
        most = suggest_windows(windows, most=given.windows_per_user)
        if most is not None:
            found.append(
                f"--windows-per-user {most}: uses all windows of 90% of the {plural(reading.sample)}, and pads no "
                "sample beyond that"
            )
        if "--pack" in reading.line():
            found.append("--pack: short records of one user share a window, within the same unit of privacy")
    return found


def _longest(options: TrainOptions) -> int | None:
    from fdp.foreign.hub.positions import longest_context
    from fdp.foreign.hub.read_folder import import_transformers

    folder = Path(options.model.model)
    return longest_context(import_transformers().AutoConfig.from_pretrained(folder, local_files_only=True))
