"""What a row took by itself: what the runtime does around operations is not to count their time again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hil.core.timeline import OpRow


def own_times(rows: Iterable[OpRow]) -> Iterator[tuple[OpRow, int]]:
    """Each row with its own time in ns; not in the order of their start, for what encloses others comes after them.

    Args:
        rows: in the order of their start.
    """
    open_rows: list[_Open] = []
    for row in rows:
        while open_rows and open_rows[-1].end_ns <= row.start_ns:
            yield open_rows.pop().closed()
        end = row.start_ns + row.duration_ns
        if open_rows and end <= open_rows[-1].end_ns:
            open_rows[-1].cover(row.start_ns, end)
        if row.kind == "runtime":
            open_rows.append(_Open(row))
        else:
            yield row, row.duration_ns
    while open_rows:
        yield open_rows.pop().closed()


class _Open:
    """A row within which others may lie."""

    def __init__(self, row: OpRow) -> None:
        self.row = row
        self.end_ns = row.start_ns + row.duration_ns
        self._covered_ns = 0
        self._covered_until = row.start_ns

    def cover(self, start_ns: int, end_ns: int) -> None:
        """Something lay within; several at once count once."""
        self._covered_ns += max(0, end_ns - max(start_ns, self._covered_until))
        self._covered_until = max(self._covered_until, end_ns)

    def closed(self) -> tuple[OpRow, int]:
        return self.row, self.row.duration_ns - self._covered_ns
