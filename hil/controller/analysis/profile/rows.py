"""The rows of a profile as a table: CSV, or Parquet if pyarrow is installed. Both are written as a stream.

In CSV a list is one cell, its items separated by ``;``. Special characters of an item are escaped: ``\\;``, ``\\\\``,
``\\n``, ``\\r``, ``\\0``; ``\\e`` is an empty item.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from hil.core.files import replacing
from hil.core.timeline import OpRow
from hil.errors import UsageError

COLUMNS = tuple(field.name for field in dataclasses.fields(OpRow))
# The tables of a compilation's profile.
PASSES, DISPATCHES, EXECUTABLES = "passes.csv", "dispatches.csv", "executables.csv"

_ESCAPES = {"\\": "\\\\", ";": "\\;", "\n": "\\n", "\r": "\\r", "\0": "\\0"}
_ESCAPED = str.maketrans(_ESCAPES)
_MEANT = {escape[1]: char for char, escape in _ESCAPES.items()} | {"e": ""}
_ITEM = re.compile(r"((?:[^;\\]|\\.)*)(?:;|$)", re.DOTALL)
_BATCH = 1 << 15  # rows of a Parquet batch, the least of a row group
_CUT_HINT = "profile again, or read the profile's trace"


@functools.lru_cache(4096)
def join_list(items: Sequence[str]) -> str:
    """Join items to one cell."""
    return ";".join(item.translate(_ESCAPED) if item else "\\e" for item in items)


@functools.lru_cache(4096)
def split_list(cell: str) -> tuple[str, ...]:
    """Split a cell into its items."""
    if "\\" not in cell:
        return tuple(cell.split(";")) if cell else ()
    # The last match is the empty one at the end.
    items = _ITEM.findall(cell)
    return tuple(re.sub(r"\\(.)", lambda found: _MEANT.get(found[1], found[1]), item) for item in items[:-1])


_READ: dict[str, Callable[[str], Any]] = {
    "int": int,
    "int | None": lambda cell: int(cell) if cell else None,
    "tuple[str, ...]": split_list,
}
# What reads a cell of each column.
_READERS = [_READ.get(str(field.type), str) for field in dataclasses.fields(OpRow)]
# Those of them that change the text, with the column's place: a table may have a million rows.
_CONVERTED: list[tuple[int, Any]] = [(index, read) for index, read in enumerate(_READERS) if read is not str]


def write_csv(rows: Iterable[OpRow], path: Path) -> int:
    """Write rows as CSV (UTF-8, with a header; empty cells for unknown values). Return the number of rows."""
    written = itertools.count()
    values = attrgetter(*COLUMNS)
    nodes, types = COLUMNS.index("onnx_nodes"), COLUMNS.index("op_types")

    def cells() -> Iterator[list[Any]]:
        # The counter comes second, so that it is not advanced after the last row.
        for row, _ in zip(rows, written, strict=False):
            line = list(values(row))
            line[nodes] = join_list(line[nodes])
            line[types] = join_list(line[types])
            yield line

    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(cells())
    return next(written)


def read_csv(path: Path) -> Iterator[OpRow]:
    """Yield the rows of a file of :func:`write_csv`.

    Raises:
        UsageError: on reading: the file does not exist, was cut off, or is another table.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = csv.reader(file, strict=True)
            header = next(lines, [])
            if tuple(header) != COLUMNS:
                there = ", ".join(header)[:200] or "none"
                raise UsageError(f"{path} is no profile's table of operations: its columns are {there}")
            _check_end(path)
            for cells in lines:
                yield _row(cells)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is no profile's table of operations: {error}") from error
    except (csv.Error, ValueError) as error:
        raise UsageError(f"{path}, line {lines.line_num}: {error}", hint=_CUT_HINT) from error


def write_parquet(rows: Iterable[OpRow], path: Path) -> None:
    """Write rows as Parquet: the CSV's columns, with lists of strings, 64-bit integers and nulls."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError("pyarrow is not installed", hint="pip install 'hil[parquet]'") from error
    types = {str: pyarrow.string(), split_list: pyarrow.list_(pyarrow.string())}
    schema = pyarrow.schema(
        [(name, types.get(read, pyarrow.int64())) for name, read in zip(COLUMNS, _READERS, strict=True)]
    )
    values = attrgetter(*COLUMNS)
    source = iter(rows)
    with replacing(path) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
        while batch := [values(row) for row in itertools.islice(source, _BATCH)]:
            columns = [
                pyarrow.array(column, field.type)
                for column, field in zip(zip(*batch, strict=True), schema, strict=True)
            ]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))


def _check_end(path: Path) -> None:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            raise UsageError(f"{path} was cut off: its last line has no end", hint=_CUT_HINT)


def _row(cells: list[Any]) -> OpRow:
    if len(cells) != len(COLUMNS):
        raise ValueError(f"{len(cells)} cells instead of {len(COLUMNS)}")
    for index, read in _CONVERTED:
        cells[index] = read(cells[index])
    return OpRow(*cells)
