"""``fdp inspect``: show a model before it is trained, a folder of ``transformers`` or a preset, or data, or both.

    fdp inspect models/tiny --batch-size 8 --context 512
    fdp inspect gpt2 --method ghost --json
    fdp inspect models/tiny --data notes.jsonl --unit user --user-field author

Of a model it shows the leaves, how each is used and by which rule, what is tied, frozen or materialised, the blocks
and the memory. A use without a rule is listed with what to do about it. For data see :mod:`fdp.cli.inspect_data`.
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument

from fdp.cli.inspect_data import (
    InspectDataOptions,
    ToldData,
    data_settings,
    name_text_field,
    show_data,
    tell_data,
)
from fdp.cli.options import Flag, expand_groups
from fdp.cli.train_options import TrainOptions, train_flag

if TYPE_CHECKING:
    from fdp.foreign.inspect import Inspection, LeafRow
    from fdp.types import Tree

MIB = 2**20
CLASSIFIER_TOKENS = 128
"""Tokens of a sample of a text classifier without ``--context``."""
OPTIMIZERS = ("adamw", "adam", "sgd", "lamb", "adafactor")


@dataclass(frozen=True)
class InspectOptions:
    """The batch, the method and the optimizer that memory is computed for."""

    batch_size: Annotated[int, Flag("Samples computed at once.")] = 8
    context: Annotated[int | None, train_flag("context")] = None
    method: Annotated[str, train_flag("method")] = "auto"
    optimizer: Annotated[str, Flag("adamw, adam, sgd, lamb or adafactor: for the memory of its state.")] = "adamw"
    dtype: Annotated[str, Flag("The dtype of the computation: float32 or bfloat16.")] = "float32"
    as_json: Annotated[bool, Flag("Print the result as one JSON object, last.", name="--json")] = False


@expand_groups
def inspect_command(
    options: InspectOptions,
    data: InspectDataOptions,
    path: Annotated[
        str | None, Argument(help="A folder with config.json and safetensors, or a preset such as gpt2.")
    ] = None,
) -> None:
    """Show leaves, uses, rules, blocks and memory of a model (no weight is read); with --data also what is in the data.

    Without a model, only the data is shown.
    """
    console, shown = Console(highlight=False), {}
    if path is None and data.data is None:
        from fdp.types import FdpError

        raise FdpError(
            "inspect: expected a model (a folder or a preset), or --data, or both, got neither; try fdp inspect "
            "gpt-nano"
        )
    if path is not None:
        shown = _show_model(path, options, console)
    if data.data is not None:
        told = _show_data(data_settings(data, model=data.model or path or "gpt-nano", context=options.context), console)
        shown = shown | {"data": told._asdict()}
    if options.as_json:
        print(json.dumps(shown))


def _show_data(settings: TrainOptions, console: Console) -> ToldData:
    """Print what is told about data, and return it; of records without a text in the expected field, the fields."""
    from fdp.data.record_fields import MissingText

    try:
        told = tell_data(settings)
    except MissingText as error:
        raise name_text_field(console, settings, error.problem) from None
    show_data(console, told)
    return told


def _show_model(path: str, options: InspectOptions, console: Console) -> dict[str, Any]:
    """Print an inspection of a model, and return it for JSON."""
    # torch takes seconds to import; --help and mistakes on the command line should not wait for it.
    from fdp import optimizers
    from fdp.cli.names import by_value, choose, choose_dtype
    from fdp.foreign.inspect import inspect_model
    from fdp.gradients.plan import Method
    from fdp.types import FdpError

    batch_size, context = options.batch_size, options.context
    if batch_size < 1 or (context is not None and context < 1):
        raise FdpError(f"expected --batch-size and --context of at least 1, got {batch_size} and {context}")
    method = choose("--method", options.method, by_value(Method))
    dtype = choose_dtype(options.dtype)
    make_optimizer = choose("--optimizer", options.optimizer, {name: getattr(optimizers, name) for name in OPTIMIZERS})
    model, names, microbatch = _open_model(path, batch_size, context)
    found = inspect_model(model, microbatch, names=names, method=method, dtype=dtype, optimizer=make_optimizer(1e-3))
    console.print(_summary(found), soft_wrap=True)
    if model.remark is not None:
        console.print(Text(model.remark, style="yellow"), soft_wrap=True)
    for table in (_leaves(found), _tied(found), _blocks(found), _memory(found, options.optimizer)):
        if table.row_count:
            console.print(table)
    for rows in _group_by_layer(found.refused):
        console.print(Text(f"no rule: {rows[0].refusal}", style="yellow"), soft_wrap=True)
    return result_of(found) | {"path": path, "remark": model.remark}


def result_of(found: Inspection) -> dict[str, Any]:
    """Return an inspection for JSON."""
    return {
        "name": found.name,
        "parameters": sum(row.size for row in found.leaves),
        "trainable": sum(row.size for row in found.leaves if not row.frozen),
        "method": found.method.value,
        "batch_size": found.batch_size,
        "leaves": [row._asdict() | {"size": row.size, "tied": row.tied} for row in found.leaves],
        "blocks": [row._asdict() for row in found.blocks],
        "memory_bytes": found.memory._asdict(),
    }


def _open_model(path: str, batch_size: int, context: int | None) -> tuple[Any, dict[str, str], Tree]:
    """Return the model, the names of its leaves, and a batch with the shapes of its data."""
    import torch

    from fdp import models, tree
    from fdp.cli.model_and_data import check_model_name

    def samples(example: Tree) -> Tree:
        return tree.map(lambda leaf: leaf[:1].expand(batch_size, *leaf.shape[1:]), example)

    def tokens(length: int) -> Tree:
        return {"tokens": torch.zeros((), dtype=torch.int64).expand(1, length + 1)}

    _check_no_data(path)
    check_model_name(path, "PATH")
    if Path(path).is_dir():
        from fdp.foreign.hub.hugging_face import model_of
        from fdp.foreign.hub.read_folder import empty_module
        from fdp.foreign.leaves import leaf_paths

        module = empty_module(Path(path))
        example = _classifier_example(module, context)
        model = model_of(module, context=context, example=example)
        length = model.context or CLASSIFIER_TOKENS
        return model, leaf_paths(module), samples(tokens(length) if example is None else example)
    model = models.build(path, context=context)
    if model.context is not None:
        return model, {}, samples(tokens(model.context))
    images = {"image": torch.zeros(1, 1, 8, 8), "label": torch.zeros(1, dtype=torch.int64)}
    return model, {}, samples(images)


def _check_no_data(path: str) -> None:
    """Raise if the model is a file, or a folder without a config.json: it is likely to be data."""
    from fdp.types import FdpError

    if Path(path).is_file() or (Path(path).is_dir() and not Path(path, "config.json").exists()):
        raise FdpError(
            f"PATH: expected a model, which is a folder with a config.json or a preset, got {path}, which is neither; "
            f"if it is data: fdp inspect --data {shlex.quote(path)}"
        )


def _classifier_example(module: Any, context: int | None) -> Tree | None:
    """Return two samples for a classifier; None for a language model."""
    import torch

    from fdp.foreign.hub.hugging_face import CLASSIFYING

    if not type(module).__name__.endswith(CLASSIFYING):
        return None
    label, config = torch.zeros(2, dtype=torch.int64), module.config
    if module.main_input_name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        return {"image": torch.zeros(2, config.num_channels, *size), "label": label}
    length = context or min(
        CLASSIFIER_TOKENS, config.max_position_embeddings - 2
    )  # RoBERTa reserves the first two positions
    mask = (torch.arange(length) < max(1, length // 2)).long().expand(2, length)
    return {"tokens": 3 * mask, "mask": mask, "label": label}


def _summary(found: Inspection) -> str:
    size = sum(row.size for row in found.leaves)
    trained = sum(row.size for row in found.leaves if not row.frozen)
    kinds = len({row.kind for row in found.blocks})
    refused = f", {len(found.refused)} leaves with a use that has no rule" if found.refused else ""
    return (
        f"{found.name}: {size:,} parameters in {len(found.leaves)} leaves, {trained:,} trained; {len(found.blocks)} "
        f"blocks of {kinds} kinds{refused}"
    )


def _leaves(found: Inspection) -> Table:
    """Return the leaves; leaves that differ only in their layer share a row."""
    table = _table(
        f"leaves, method {found.method.value}, {found.batch_size} samples",
        *("leaf", "leaves", "shape", "rules", "norm by", "sum by", "stored MiB", ""),
    )
    for rows in _group_by_layer(found.leaves):
        first = rows[0]
        stored = f"{sum(row.kept_bytes for row in rows) / MIB:,.2f}"
        table.add_row(
            _mask_layer(first.path) if len(rows) > 1 else first.path,
            f"{len(rows)}",
            " x ".join(map(str, first.shape)),
            ", ".join(first.rules),
            first.norm_by or "",
            first.sum_by or "",
            "" if first.norm_by is None else stored,
            ", ".join(_remarks(first)),
        )
    return table


def _remarks(row: LeafRow) -> list[str]:
    remarks = {
        "frozen": row.frozen,
        "tied": row.tied,
        "no rule": row.refusal is not None,
        "materialised": row.materialized,
    }
    return [remark for remark, holds in remarks.items() if holds]


def _tied(found: Inspection) -> Table:
    table = _table("tied", "leaf", "also", "used in")
    for row in found.leaves:
        if row.tied:
            table.add_row(row.path, ", ".join(row.also), ", ".join(row.blocks))
    return table


def _blocks(found: Inspection) -> Table:
    """Return the blocks; consecutive blocks of one kind share a row."""
    table = _table("blocks", "block", "blocks", "kind", "leaves", "parameters", "")
    for _, group in groupby(found.blocks, key=lambda row: row.kind):
        rows = list(group)
        first, last = rows[0], rows[-1]
        name = first.name if len(rows) == 1 else f"{first.name} ... {last.name}"
        remarks = [*(["fused head"] if first.fused_head else []), *([] if first.compiled else ["not compiled"])]
        size = f"{sum(row.size for row in rows):,}"
        table.add_row(name, f"{len(rows)}", f"{first.kind}", f"{first.leaves}", size, ", ".join(remarks))
    return table


def _memory(found: Inspection, optimizer: str) -> Table:
    need = found.memory
    table = _table("memory on one device", "what", "MiB")
    table.add_row("parameters, float32", f"{need.parameters / MIB:,.1f}")
    table.add_row(f"state of {optimizer}", f"{need.optimizer / MIB:,.1f}")
    table.add_row(
        f"per-sample gradients of {found.batch_size} samples, if all were stored", f"{need.per_sample / MIB:,.1f}"
    )
    table.add_row(f"stored of them by method {found.method.value}", f"{need.kept / MIB:,.1f}")
    return table


def _group_by_layer(rows: tuple[LeafRow, ...]) -> list[list[LeafRow]]:
    """Group the leaves that differ only in their layer."""
    found: dict[Any, list[LeafRow]] = {}
    for row in rows:
        kind = (_mask_layer(row.path), row.shape, row.rules, row.norm_by, row.sum_by, tuple(_remarks(row)))
        found.setdefault(kind, []).append(row)
    return list(found.values())


def _mask_layer(path: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", path)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        number = name in ("leaves", "blocks", "stored MiB", "parameters", "MiB")
        table.add_column(
            name,
            justify="right" if number else "left",
            overflow="fold",  # the end of a path matters most
            min_width=26 if name == "leaf" else None,
        )
    return table
