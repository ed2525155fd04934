"""Types of fields in documents of a farm."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from msgspec import Meta

from hil.controller.records.base import Record, note

_MAX_INTEGER = (1 << 63) - 1
_YEARS = range(1970, 9999)  # conversion to local time fails near the years 1 and 9999


def list_values(*values: str) -> Meta:
    """Describe the known values of a text field."""
    return Meta(extra_json_schema={"enum": list(values)})


Time = Annotated[str, note("time with UTC offset, in ISO 8601", extra_json_schema={"format": "date-time"})]
Whole = Annotated[int, Meta(ge=0, le=_MAX_INTEGER)]
Integer = Annotated[int, Meta(ge=-_MAX_INTEGER, le=_MAX_INTEGER)]
Finite = Annotated[float, Meta(gt=-float(1 << 63), lt=float(1 << 63))]
JobName = Annotated[
    str, note("17, or 17.3 if the submission has several jobs", pattern=r"^\d+(\.\d+)?$(?!\n)", max_length=40)
]
KindName = Annotated[str, list_values("run", "bundle", "suite", "command", "lease", "health")]


def check_times(record: Record, *names: str) -> None:
    """Check times of a record. Raises ValueError that names the field."""
    for name in names:
        if (text := getattr(record, name)) is None:
            continue
        try:
            time = datetime.fromisoformat(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if time.year not in _YEARS:
            raise ValueError(f"{name}: time out of range")
        if time.tzinfo is None:
            raise ValueError(f"{name}: missing time zone")
