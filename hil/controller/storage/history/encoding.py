"""Encode and decode values in the database of a history.

This module validates values before writing, and limits their size when reading.
"""

from __future__ import annotations

import array
import json
import math
import sys
from collections.abc import Sequence
from typing import Any, get_args

from hil.controller.records.base import R, make_record
from hil.controller.records.measurements.history import MAX_SAMPLES, Confirmation, HistoryEntry
from hil.controller.storage.history.database import MAX_VALUE_BYTES
from hil.controller.storage.history.place import HistoryPlace
from hil.core.bounded_json import check_value_count, parse_json
from hil.errors import StorageError, UsageError

_MAX_VALUES = 100_000
# Maximum size of the texts that are columns: PostgreSQL limits the size of texts in an index.
_MAX_TEXT_BYTES = 2500
_SAMPLE_BYTES = 8


def check_entry(entry: HistoryEntry) -> HistoryEntry:
    """Validate an entry, because an invalid entry would make the history unreadable.

    Raises UsageError or UnicodeError.
    """
    texts = "\n".join(list_columns(entry)).encode()
    if len(texts) > _MAX_TEXT_BYTES:
        raise UsageError(f"the names of the entry have {len(texts)} bytes, at most {_MAX_TEXT_BYTES} are allowed")
    if b"\0" in texts:
        raise UsageError("a name of the entry contains a NUL character")
    times = entry.samples_ns
    if len(times) > MAX_SAMPLES or not all(map(math.isfinite, times)):
        raise UsageError(f"expected at most {MAX_SAMPLES} finite samples")
    checked = make_record(entry.replace(samples_ns=[]).to_json(), HistoryEntry)
    document = encode_record(checked)
    if len(document) > MAX_VALUE_BYTES:
        raise UsageError(f"the entry has {len(document)} bytes, at most {MAX_VALUE_BYTES} are allowed")
    try:
        check_value_count(document, _MAX_VALUES)
    except ValueError as error:
        raise UsageError(f"the entry has {error}") from error
    return checked.replace(samples_ns=times)


def list_columns(entry: HistoryEntry) -> tuple[str, ...]:
    """Return the texts of an entry that are columns of the database."""
    return (entry.run, entry.case, entry.source.commit, entry.source.branch, entry.program, entry.outcome)


def encode_record(record: Any) -> bytes:
    """Encode a record as JSON."""
    return json.dumps(record.to_json(), sort_keys=True, allow_nan=False).encode()


def decode_record(data: Any, kind: type[R], place: HistoryPlace) -> R:
    """Decode a record.

    Args:
        data: value of :meth:`HistoryDatabase.bound_column`.
        place: place of the history, for the message.

    Raises:
        StorageError: the value is invalid.
    """
    try:
        return make_record(parse_json(_require_bytes(data), _MAX_VALUES), kind)
    except (ValueError, UsageError) as error:
        raise _make_damage_error(place, error) from error


def decode_entry(document: Any, samples: Any, confirmed: str, place: HistoryPlace) -> HistoryEntry:
    """Decode an entry. Raises the errors of :func:`decode_record`."""
    try:
        times = _unpack_samples(_require_bytes(samples))
        if confirmed not in get_args(Confirmation):
            raise ValueError(f"unknown confirmation {confirmed!r:.40}")
    except ValueError as error:
        raise _make_damage_error(place, error) from error
    return decode_record(document, HistoryEntry, place).replace(samples_ns=times, confirmed=confirmed)


def pack_samples(samples: Sequence[float]) -> bytes:
    """Encode times as little-endian float64."""
    times = array.array("d", samples)
    if sys.byteorder == "big":
        times.byteswap()
    return times.tobytes()


def _unpack_samples(data: bytes) -> list[float]:
    if len(data) > MAX_SAMPLES * _SAMPLE_BYTES:
        raise ValueError(f"more than {MAX_SAMPLES} samples")
    times = array.array("d", data)
    if sys.byteorder == "big":
        times.byteswap()
    return times.tolist()


def _require_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"expected a BLOB of at most {MAX_VALUE_BYTES} bytes")
    return value


def _make_damage_error(place: HistoryPlace, error: Exception) -> StorageError:
    text = error.message if isinstance(error, UsageError) else str(error)
    return StorageError(
        f"the history {place} is damaged: {text}",
        hint="move the directory away and add the runs again: hil history add RUN...",
    )
