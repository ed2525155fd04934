"""Reading flatbuffers that nobody vouches for, without code generated for their schema.

A damaged or hostile buffer is an error, never a crash or an endless loop.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

# The least that a table takes: where its own layout is told.
_TABLE_BYTES = 4
# Writers share what is equal, so that a little is read more than once; a bomb is a small file that tells of a huge one.
_TOLD_OVER = 16


class Damaged(ValueError):
    """The buffer is cut off, altered, or of a version that is not known; the message says which."""


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """What Python says of bytes that are no flatbuffer becomes :class:`Damaged`."""
    try:
        yield
    # TypeError: flatbuffers' own word for an offset that is out of range.
    except (struct.error, IndexError, UnicodeDecodeError, TypeError, OverflowError) as error:
        raise Damaged("it is cut off or damaged") from error


class Table:
    """A table: fields by number; one that is not there has its default.

    Args:
        data: the buffer.
        at: where in it the table is.
        left: one number, how many bytes may still be read; shared by all tables that come of the same root.
    """

    def __init__(self, data: memoryview, at: int, left: list[int]) -> None:
        from flatbuffers import number_types, table

        self._table = table.Table(data, at)
        self._types = number_types
        self._left = left
        self._spend(_TABLE_BYTES)

    def _offset(self, field: int) -> int:
        return int(self._table.Offset(4 + 2 * field))

    def number(self, field: int, kind: str) -> Any:
        """A number: ``Int8``, ``Uint64``, ``Float64``, ``Bool`` ...; 0 by default."""
        offset, flags = self._offset(field), getattr(self._types, f"{kind}Flags")
        return self._table.Get(flags, self._table.Pos + offset) if offset else flags.py_type(0)

    def text(self, field: int) -> str:
        """A string; "" by default."""
        offset = self._offset(field)
        return self._table.String(self._table.Pos + offset).decode() if offset else ""

    def table(self, field: int) -> Table | None:
        """A table, or a union's."""
        offset = self._offset(field)
        return self._at(self._table.Pos + offset) if offset else None

    def tables(self, field: int) -> Iterator[Table]:
        """A vector of tables."""
        if offset := self._offset(field):
            start = self._table.Vector(offset)
            for index in range(self._table.VectorLen(offset)):
                yield self._at(start + 4 * index)

    def data(self, field: int) -> memoryview:
        """A vector of bytes, in place."""
        if not (offset := self._offset(field)):
            return memoryview(b"")
        start, length = self._table.Vector(offset), self._table.VectorLen(offset)
        found: memoryview = self._table.Bytes[start : start + length]
        if found.nbytes != length:
            raise Damaged("it is cut off")
        return found

    def integers(self, field: int, dtype: str = "<i4") -> tuple[int, ...]:
        """A vector of integers."""
        if not (offset := self._offset(field)):
            return ()
        start, length, size = self._table.Vector(offset), self._table.VectorLen(offset), np.dtype(dtype).itemsize
        self._spend(length * size)
        found: memoryview = self._table.Bytes[start : start + length * size]
        if found.nbytes != length * size:
            raise Damaged("it is cut off")
        return tuple(int(one) for one in np.frombuffer(found, dtype))

    def _spend(self, size: int) -> None:
        self._left[0] -= size
        if self._left[0] < 0:
            raise Damaged("it is damaged: it says the same over and over")

    def _at(self, place: int) -> Table:
        return Table(self._table.Bytes, int(self._table.Indirect(place)), self._left)


def root_table(data: memoryview) -> Table:
    """The table that a buffer begins with."""
    return Table(data, struct.unpack_from("<I", data)[0], [_TOLD_OVER * data.nbytes])
