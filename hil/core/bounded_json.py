"""Parse untrusted JSON with a limit on values, because parsed values need far more memory than their text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hil.core.files import MAX_FILE_BYTES, read_file

# Limit for other documents. An empty list has two bytes of text, but needs thirty times as much memory.
MAX_VALUES = 2_000_000
# Limit for records that hil writes, such as run.json, which may contain timings from a million runs.
MAX_RECORD_VALUES = 20_000_000


def read_json(path: Path, most_bytes: int = MAX_FILE_BYTES) -> Any:
    """Read a JSON record that hil wrote. The file may have been replaced, so limits apply.

    Args:
        most_bytes: maximum size of the file.

    Raises:
        UnreadableFile, OSError: see :func:`hil.core.files.read_file`.
        ValueError: see :func:`parse_json`.
    """
    return parse_json(read_file(path, most_bytes), MAX_RECORD_VALUES)


def parse_json(data: bytes, most: int = MAX_VALUES) -> Any:
    """Parse a JSON document.

    Args:
        most: maximum number of values.

    Raises:
        ValueError: the document is invalid, nested too deeply, or has more values.
    """
    check_value_count(data, most)
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nesting exceeds the limit") from error


def check_value_count(data: bytes, most: int) -> None:
    """Raise ValueError if a JSON text may have more than ``most`` values."""
    if len(data) > most and sum(map(data.count, (b",", b"[", b"{"))) > most:
        raise ValueError(f"more than {most} values")
