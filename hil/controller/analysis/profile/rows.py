r"""A profile's rows as a table: CSV, or Parquet if pyarrow is installed. Both are written as a stream.

In CSV a list is a single cell with items separated by ``;``. Special characters in an item are escaped: ``\;``, ``\\``,
``\n``, ``\r``, ``\0``; ``\e`` is an empty item.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from hil.core.files import open_file, replace_file
from hil.core.install_hints import make_install_command
from hil.core.timeline import OpRow
from hil.errors import UsageError

COLUMNS = tuple(field.name for field in dataclasses.fields(OpRow))
# Tables in a compilation's profile.
PASSES, DISPATCHES, EXECUTABLES = "passes.csv", "dispatches.csv", "executables.csv"

_ESCAPES = {"\\": "\\\\", ";": "\\;", "\n": "\\n", "\r": "\\r", "\0": "\\0"}
_ESCAPED = str.maketrans(_ESCAPES)
_MEANT = {escape[1]: char for char, escape in _ESCAPES.items()} | {"e": ""}
# A trailing backslash counts as an ordinary character. Without this rule, the search would retry at every earlier
# character.
_ITEM = re.compile(r"((?:[^;\\]|\\.?)*)(?:;|$)", re.DOTALL)
_BATCH = 1 << 15  # rows in a Parquet batch, and the minimum number of rows in a row group
_INTEGERS = 1 << 63
_CUT_HINT = "profile again, or read the profile's trace"


@functools.lru_cache(4096)
def join_list(items: Sequence[str]) -> str:
    """Join items into a cell."""
    return ";".join(item.translate(_ESCAPED) if item else "\\e" for item in items)


@functools.lru_cache(4096)
def split_list(cell: str) -> tuple[str, ...]:
    """Split a cell into items."""
    if "\\" not in cell:
        return tuple(cell.split(";")) if cell else ()
    # The last match is the empty match at the end.
    items = _ITEM.findall(cell)
    return tuple(re.sub(r"\\(.)", lambda found: _MEANT.get(found[1], found[1]), item) for item in items[:-1])


def _parse_integer(cell: str) -> int:
    """Parse an integer of 64 bits. Raises ValueError for others: floats cannot contain them."""
    found = int(cell)
    if not -_INTEGERS <= found < _INTEGERS:
        raise ValueError(f"{cell[:30]} is not an integer of 64 bits")
    return found


_READ: dict[str, Callable[[str], Any]] = {
    "int": _parse_integer,
    "int | None": lambda cell: _parse_integer(cell) if cell else None,
    "tuple[str, ...]": split_list,
}
# Parser of the cells in each column.
_READERS = [_READ.get(str(field.type), str) for field in dataclasses.fields(OpRow)]
# (column index, parser) for columns that are not plain text. A table may have a million rows.
_CONVERTED: list[tuple[int, Any]] = [(index, read) for index, read in enumerate(_READERS) if read is not str]


def write_csv(rows: Iterable[OpRow], path: Path) -> int:
    """Write rows as CSV (UTF-8, with a header; unknown values are empty cells). Return the row count."""
    written = itertools.count()
    values = attrgetter(*COLUMNS)
    nodes, types = COLUMNS.index("onnx_nodes"), COLUMNS.index("op_types")

    def iter_cells() -> Iterator[list[Any]]:
        # Pass the counter second, so that zip does not advance the counter after the last row.
        for row, _ in zip(rows, written, strict=False):
            line = list(values(row))
            line[nodes] = join_list(line[nodes])
            line[types] = join_list(line[types])
            yield line

    with replace_file(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(iter_cells())
    return next(written)


def read_csv(path: Path) -> Iterator[OpRow]:
    """Yield the rows in a file from :func:`write_csv`.

    Raises:
        UsageError: while reading: the file does not exist, is truncated, or is a different table.
    """
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8", newline="") as file:
            lines = csv.reader(file, strict=True)
            header = next(lines, [])
            if tuple(header) != COLUMNS:
                there = ", ".join(header)[:200] or "none"
                raise UsageError(f"{path} is not an operation table of a profile: got columns {there}")
            _check_end(path)
            for cells in lines:
                yield _parse_row(cells)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not an operation table of a profile: {error}") from error
    except (csv.Error, ValueError) as error:
        raise UsageError(f"{path}, line {lines.line_num}: {error}", hint=_CUT_HINT) from error


def write_parquet(rows: Iterable[OpRow], path: Path) -> None:
    """Write rows as Parquet: the CSV's columns as string lists, strings, 64-bit integers and nulls."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError("pyarrow is not installed", hint=make_install_command("parquet")) from error
    types = {str: pyarrow.string(), split_list: pyarrow.list_(pyarrow.string())}
    schema = pyarrow.schema(
        [(name, types.get(read, pyarrow.int64())) for name, read in zip(COLUMNS, _READERS, strict=True)]
    )
    values = attrgetter(*COLUMNS)
    source = iter(rows)
    with replace_file(path) as temporary, parquet.ParquetWriter(temporary, schema) as writer:
        while batch := [values(row) for row in itertools.islice(source, _BATCH)]:
            columns = [
                pyarrow.array(column, field.type)
                for column, field in zip(zip(*batch, strict=True), schema, strict=True)
            ]
            writer.write_batch(pyarrow.record_batch(columns, schema=schema))


def _check_end(path: Path) -> None:
    with open_file(path) as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            raise UsageError(f"{path} is truncated: the last line is incomplete", hint=_CUT_HINT)


def _parse_row(cells: list[Any]) -> OpRow:
    if len(cells) != len(COLUMNS):
        raise ValueError(f"expected {len(COLUMNS)} cells, got {len(cells)}")
    for index, read in _CONVERTED:
        cells[index] = read(cells[index])
    return OpRow(*cells)
