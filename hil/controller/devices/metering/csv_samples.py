"""Parse lines of CSV with power samples: ``time,watts`` or ``time,volts,amps``, optionally ``gpio``.

The lines come from a meter's program or file, which may be damaged: an invalid line is counted and skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hil.controller.devices.metering.sample_buffer import SampleBuffer
from hil.core.meter_config import COLUMN_UNITS, IGNORED_COLUMN, check_columns, get_quantity
from hil.errors import UsageError

DEFAULT_COLUMNS = ("time", "watts")
# Values beyond these are damaged. The time fits a count of nanoseconds in int64.
_MAX_SECONDS, _MAX_WATTS = 9e9, 1e9
# Lines at the start that are not samples, such as messages of the program, before hil reports a wrong format.
MAX_GARBAGE = 1000


class CsvParser:
    """Parser of a meter's lines. Appends the samples to a buffer.

    Attributes:
        samples: number of valid samples.
        garbage: number of lines that are neither a sample, a header, a comment nor empty.
        last_garbage: the last of these lines, shortened.
    """

    def __init__(self, columns: Sequence[str], buffer: SampleBuffer) -> None:
        self._columns = tuple(columns or DEFAULT_COLUMNS)
        self._has_columns = bool(columns)
        self._buffer = buffer
        self.samples = 0
        self.garbage = 0
        self.last_garbage = ""

    @property
    def has_time(self) -> bool:
        """True if the samples have a time of the meter."""
        return any(get_quantity(name) == "time" for name in self._columns if name != IGNORED_COLUMN)

    def feed(self, line: str, arrived_ns: int) -> None:
        """Parse a line that arrived at a time of this machine's clock."""
        line = line.strip()
        if not line or line.startswith("#"):
            return
        fields = [field.strip() for field in line.split(",", 64)]
        if not self._has_columns and self._read_header(fields):
            return
        values = self._parse_values(fields)
        if values is None:
            self.garbage += 1
            self.last_garbage = line[:100]
            return
        self.samples += 1
        self._has_columns = True
        self._buffer.append(values.get("time"), arrived_ns, values["power"], values.get("gpio"))

    def _read_header(self, fields: Sequence[str]) -> bool:
        """Take the columns from a header line. Return False if the line is not a header."""
        names = [field.strip('"').lower().replace(" ", "_") for field in fields]
        columns = tuple(name if name in COLUMN_UNITS else IGNORED_COLUMN for name in names)
        try:
            check_columns(columns, "header")
        except UsageError:
            return False
        self._columns = columns
        self._has_columns = True
        return True

    def _parse_values(self, fields: Sequence[str]) -> dict[str, float] | None:
        """Return the values by quantity in base units; None for an invalid line."""
        if len(fields) != len(self._columns):
            return None
        found: dict[str, float] = {}
        for name, text in zip(self._columns, fields, strict=True):
            if name == IGNORED_COLUMN:
                continue
            try:
                value = float(text) * COLUMN_UNITS[name]
            except ValueError:
                return None
            if "_" in text:
                return None
            if not math.isfinite(value):
                self._buffer.count_invalid()
                return None
            found[get_quantity(name)] = value
        if "power" not in found:
            found["power"] = found.pop("voltage") * found.pop("current")
        if abs(found["power"]) > _MAX_WATTS or abs(found.get("time", 0.0)) > _MAX_SECONDS:
            self._buffer.count_invalid()
            return None
        return found
