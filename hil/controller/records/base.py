"""Base class for stored documents, and conversion from and to JSON values.

A field without a default is in every document. A field with a default is absent from documents of earlier versions. A
field with the default UNSET is absent where it does not apply.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from hil.core.bounded_json import read_json
from hil.core.files import MAX_FILE_BYTES
from hil.core.text import convert_to_json
from hil.errors import UsageError

R = TypeVar("R", bound="Record")
# Version of all stored documents.
SCHEMA = 1


class Record(msgspec.Struct):
    """A JSON object with typed fields. Decoding ignores unknown fields, which newer versions may write."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        values: dict[str, Any] = convert_to_json(msgspec.to_builtins(self, enc_hook=lambda value: value.item()))
        return values

    def replace(self: R, **values: Any) -> R:
        """Return a copy with changed fields."""
        return msgspec.structs.replace(self, **values)


def note(text: str, **bounds: Any) -> Meta:
    """Describe a field in the JSON schema, with bounds as in :class:`msgspec.Meta`."""
    return Meta(description=text, **bounds)


class Interval(Record, kw_only=True):
    """A confidence interval."""

    low: float
    high: float
    level: Annotated[float, note("probability that the interval contains the true value")]


Number = Annotated[
    float | Literal["inf", "-inf", "nan"] | None, note("a number; infinity and NaN are strings, which JSON lacks")
]
Count = Annotated[int, Meta(ge=0)]
Samples = Annotated[list[int], note("a time per iteration, in nanoseconds", max_length=10_000)]
# Later times than the year 9999 cannot be formatted.
Timestamp = Annotated[float, note("seconds since the epoch", ge=0, lt=253_402_300_800)]


def parse_number(value: float | str | None) -> float | None:
    """Convert a :data:`Number` of a record to a number. A string that is not a number becomes None."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return None


def check_schema(values: Any, folder: Path) -> None:
    """Raise UsageError if a newer version of hil wrote a parsed document."""
    schema = values.get("schema") if isinstance(values, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise UsageError(f"{folder} was written by a newer hil (schema {schema})")


def make_record(values: Any, kind: type[R]) -> R:
    """Convert parsed JSON, or values that :func:`hil.core.text.convert_to_json` converts to JSON, to a record.

    Raises:
        UsageError: a field is missing or has a wrong type. The message names the field.
    """
    try:
        return msgspec.convert(convert_to_json(values), kind)
    except (msgspec.ValidationError, UnicodeError, RecursionError) as error:
        # msgspec cannot compare lone surrogates with the names of fields.
        raise UsageError(f"invalid record: {error}") from error


def read_record(path: Path, kind: type[R], most_bytes: int = MAX_FILE_BYTES) -> R:
    """Read a record's file.

    Args:
        most_bytes: Maximum size of the file.

    Raises:
        UsageError: the file is unreadable, is not JSON, is not a record of this kind, or is from a newer hil.
    """
    try:
        values = read_json(path, most_bytes)
    except UsageError as error:
        raise UsageError(f"cannot read {path}: {error.message}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if "schema" in kind.__struct_fields__:
        check_schema(values, path.parent)
    try:
        return make_record(values, kind)
    except UsageError as error:
        raise UsageError(f"cannot read {path}: {error.message}") from error
