"""``fdp inspect``: a model before it is trained, in the format of ``transformers`` or one of fdp's own.

    fdp inspect models/tiny --batch-size 8 --context 512
    fdp inspect gpt2 --method ghost --json

Leaves, how each is used and by which rule, what is tied, frozen or materialised, the blocks, the memory. A use without
a rule is a row that says what to do.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

if TYPE_CHECKING:
    from fdp.foreign.inspect import Inspection, LeafRow
    from fdp.types import Tree

MIB = 2**20
TEXT = 128
"""Tokens of a sample of a text classifier, where no --context is given."""


def inspect_command(
    path: Annotated[str, Argument(help="A folder with config.json and safetensors, or a preset such as gpt2.")],
    batch_size: Annotated[int, Option(help="Samples computed at once.")] = 8,
    context: Annotated[int | None, Option(help="Tokens of a sample; default: the model's own.")] = None,
    method: Annotated[str, Option(help="auto, ghost, ghost_bk, flash, flash_bk, materialize or none.")] = "auto",
    optimizer: Annotated[str, Option(help="adamw, adam, sgd, lamb or adafactor: for its state.")] = "adamw",
    dtype: Annotated[str, Option(help="What is computed in: float32 or bfloat16.")] = "float32",
    as_json: Annotated[bool, Option("--json", help="Print the result as one JSON object, last.")] = False,
) -> None:
    """Leaves, uses, rules, tied groups, blocks and memory of a model; nothing is computed, no weight is read."""
    # torch takes seconds to import, and --help and mistakes on the command line should not.
    import torch

    from fdp import optimizers
    from fdp.cli.configure import choose
    from fdp.foreign.inspect import inspect_model
    from fdp.gradients.plan import Method
    from fdp.types import FdpError

    if batch_size < 1 or (context is not None and context < 1):
        raise FdpError(f"expected --batch-size and --context of at least 1, got {batch_size} and {context}")
    rules = {name: getattr(optimizers, name) for name in ("adamw", "adam", "sgd", "lamb", "adafactor")}
    settings: dict[str, Any] = {
        "method": choose("method", method, {each.value: each for each in Method}),
        "dtype": choose("dtype", dtype, {"float32": torch.float32, "bfloat16": torch.bfloat16}),
        "optimizer": choose("optimizer", optimizer, rules)(1e-3),
    }
    model, names, microbatch = _opened(path, batch_size, context)
    found = inspect_model(model, microbatch, names=names, **settings)
    console = Console(highlight=False)
    console.print(_summary(found), soft_wrap=True)
    if model.remark is not None:
        console.print(Text(model.remark, style="yellow"), soft_wrap=True)
    for table in (_leaves(found), _tied(found), _blocks(found), _memory(found, optimizer)):
        if table.row_count:
            console.print(table)
    for row in _alike(found.refused):
        console.print(Text(f"no rule: {row[0].refusal}", style="yellow"), soft_wrap=True)
    if as_json:
        print(json.dumps(result(found) | {"path": path, "remark": model.remark}))


def result(found: Inspection) -> dict[str, Any]:
    """All that was found, as JSON has it."""
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


def _opened(path: str, batch_size: int, context: int | None) -> tuple[Any, dict[str, str], Tree]:
    """The model, the names of its leaves, and a batch of the shapes of its data, without values."""
    import torch

    from fdp import models, tree
    from fdp.types import FdpError

    def samples(example: Tree) -> Tree:
        return tree.map(lambda leaf: leaf[:1].expand(batch_size, *leaf.shape[1:]), example)

    def tokens(length: int) -> Tree:
        return {"tokens": torch.zeros((), dtype=torch.int64).expand(1, length + 1)}

    if Path(path).is_dir():
        from fdp.foreign.hub.hugging_face import model_of
        from fdp.foreign.hub.read_folder import empty_module
        from fdp.foreign.leaves import leaf_paths

        module = empty_module(Path(path))
        example = _classified(module, context)
        model = model_of(module, context=context, example=example)
        length = model.context or TEXT
        return model, leaf_paths(module), samples(tokens(length) if example is None else example)
    if path not in models.PRESETS:
        raise FdpError(
            f"expected a folder in the format of transformers, or one of {', '.join(models.PRESETS)}, got {path!r}"
        )
    model = models.build(path, context=context)
    if model.context is not None:
        return model, {}, samples(tokens(model.context))
    images = {"image": torch.zeros(1, 1, 8, 8), "label": torch.zeros(1, dtype=torch.int64)}
    return model, {}, samples(images)


def _classified(module: Any, context: int | None) -> Tree | None:
    """Two samples of what a classifier is given; None: it is a language model."""
    import torch

    from fdp.foreign.hub.hugging_face import CLASSIFYING

    if not type(module).__name__.endswith(CLASSIFYING):
        return None
    label, config = torch.zeros(2, dtype=torch.int64), module.config
    if module.main_input_name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, (tuple, list)) else (config.image_size,) * 2
        return {"image": torch.zeros(2, config.num_channels, *size), "label": label}
    length = context or min(TEXT, config.max_position_embeddings - 2)  # RoBERTa's first two are not for tokens
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
    """Leaves that differ only in their layer are one row."""
    table = _table(
        f"leaves, method {found.method.value}, {found.batch_size} samples",
        *("leaf", "leaves", "shape", "rules", "norm by", "sum by", "kept MiB", ""),
    )
    for rows in _alike(found.leaves):
        first = rows[0]
        kept = f"{sum(row.kept_bytes for row in rows) / MIB:,.2f}"
        table.add_row(
            _layers(first.path) if len(rows) > 1 else first.path,
            f"{len(rows)}",
            " x ".join(map(str, first.shape)),
            ", ".join(first.rules),
            first.norm_by or "",
            first.sum_by or "",
            "" if first.norm_by is None else kept,
            ", ".join(_remarks(first)),
        )
    return table


def _remarks(row: LeafRow) -> list[str]:
    said = {
        "frozen": row.frozen,
        "tied": row.tied,
        "no rule": row.refusal is not None,
        "materialised": row.materialized,
    }
    return [word for word, holds in said.items() if holds]


def _tied(found: Inspection) -> Table:
    table = _table("tied", "leaf", "also", "used in")
    for row in found.leaves:
        if row.tied:
            table.add_row(row.path, ", ".join(row.also), ", ".join(row.blocks))
    return table


def _blocks(found: Inspection) -> Table:
    """Blocks of one kind, one after the other, are one row."""
    table = _table("blocks", "block", "blocks", "kind", "leaves", "parameters", "")
    runs: list[list[Any]] = []
    for row in found.blocks:
        if runs and runs[-1][0].kind == row.kind:
            runs[-1].append(row)
        else:
            runs.append([row])
    for rows in runs:
        first, last = rows[0], rows[-1]
        name = first.name if len(rows) == 1 else f"{first.name} ... {last.name}"
        said = [*(["fused head"] if first.fused_head else []), *([] if first.compiled else ["not compiled"])]
        size = f"{sum(row.size for row in rows):,}"
        table.add_row(name, f"{len(rows)}", f"{first.kind}", f"{first.leaves}", size, ", ".join(said))
    return table


def _memory(found: Inspection, optimizer: str) -> Table:
    need = found.memory
    table = _table("memory on one device", "what", "MiB")
    table.add_row("parameters, float32", f"{need.parameters / MIB:,.1f}")
    table.add_row(f"state of {optimizer}", f"{need.optimizer / MIB:,.1f}")
    table.add_row(f"per-sample gradients of {found.batch_size}, were they all made", f"{need.per_sample / MIB:,.1f}")
    table.add_row(f"kept of them by method {found.method.value}", f"{need.kept / MIB:,.1f}")
    return table


def _alike(rows: tuple[LeafRow, ...]) -> list[list[LeafRow]]:
    found: dict[Any, list[LeafRow]] = {}
    for row in rows:
        kind = (_layers(row.path), row.shape, row.rules, row.norm_by, row.sum_by, tuple(_remarks(row)))
        found.setdefault(kind, []).append(row)
    return list(found.values())


def _layers(path: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", path)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for name in columns:
        number = name in ("leaves", "blocks", "kept MiB", "parameters", "MiB")
        table.add_column(
            name,
            justify="right" if number else "left",
            overflow="fold",  # a path is no use if its end is cut off
            min_width=26 if name == "leaf" else None,
        )
    return table
