"""Records of ``.parquet`` and ``.arrow`` files, read by ``pyarrow`` some rows at a time.

A folder that ``datasets.save_to_disk`` wrote holds ``.arrow`` files: streams of record batches. ``.feather``, and other
``.arrow`` files, are the same with an index at the end.

    >>> for place, record in read_parquet(Path("mail.parquet")): ...          # "mail.parquet, row 7", {...}
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fdp.extras import missing_package
from fdp.types import FdpError

ROWS = 1024
"""Rows that are made Python objects at a time."""
INDEXED = b"ARROW1"
"""The first bytes of a file with an index; a stream begins otherwise."""


def read_parquet(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the record of every row, with its place."""
    _import_pyarrow(file)
    from pyarrow.parquet import ParquetFile

    def batches() -> Iterator[Any]:
        with ParquetFile(file) as table:
            yield from table.iter_batches(batch_size=ROWS)

    return _records(file, batches())


def read_arrow(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the record of every row of a stream, or of a file with an index, with its place."""
    pyarrow = _import_pyarrow(file)

    def batches() -> Iterator[Any]:
        with file.open("rb") as content:
            is_indexed = content.read(len(INDEXED)) == INDEXED
        with pyarrow.memory_map(str(file)) as content:
            if is_indexed:
                with pyarrow.ipc.open_file(content) as table:
                    yield from (table.get_batch(i) for i in range(table.num_record_batches))
            else:
                with pyarrow.ipc.open_stream(content) as table:
                    yield from table

    return _records(file, batches())


def _records(file: Path, batches: Iterator[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    for batch in _call_safely(file, batches):
        names = batch.schema.names
        if len(set(names)) < len(names):
            raise FdpError(f"{file}: expected a table that names every column once, got a name twice; rename one")
        for start in range(0, batch.num_rows, ROWS):
            for record in batch.slice(start, ROWS).to_pylist():
                number += 1
                yield f"{file}, row {number}", record


def _call_safely(file: Path, batches: Iterator[Any]) -> Iterator[Any]:
    """Pass the batches on; an error of the library, whose message may show content, becomes one without it."""
    import pyarrow

    try:
        yield from batches
        return
    except (pyarrow.ArrowException, OSError) as error:
        why = type(error).__name__
    raise FdpError(f"{file}: expected a table that pyarrow reads, got one that it does not ({why}); write it again")


def _import_pyarrow(file: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise missing_package("pyarrow", purpose=f"to read {file}") from None
    return pyarrow
