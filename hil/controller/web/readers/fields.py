"""Helpers for readers of all records: read a document of bounded size, and convert values of unknown type."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from hil.compare.stats import STATISTICS, Statistic
from hil.controller.records.measurements.conditions import Grade
from hil.controller.web.text.entries import NAMES, OutputEntry, read_int, read_real, read_text, read_texts
from hil.core.bounded_json import parse_json
from hil.core.files import read_file
from hil.core.json_values import read_list as read_list
from hil.core.json_values import read_mapping as read_mapping
from hil.core.json_values import read_mappings as read_mappings
from hil.core.results import Outcome
from hil.errors import UsageError

# Records are read into memory. A larger record is reported as damaged.
MAX_BYTES = 32 << 20
_OUTCOMES: Mapping[int, str] = {
    one.exit_code: one.value for one in (Outcome.PASS, Outcome.FAIL, Outcome.RUN_ERROR, Outcome.BOARD_LOST)
}


def read_document(path: Path) -> Mapping[str, Any]:
    """Read a record's JSON object.

    Raises:
        OSError: the file is unreadable.
        ValueError: the file is not a JSON object, or is larger than :data:`MAX_BYTES`.
    """
    try:
        document = parse_json(read_file(path, MAX_BYTES))
    except UsageError as error:
        raise ValueError(error.message) from error
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    return document


def read_digests(pairs: Iterable[tuple[Any, Any]]) -> dict[str, str]:
    """Return the known digests by model name. The name is the file name without ``.onnx``."""
    found = (
        (read_text(name).removesuffix(".onnx"), read_text(digest)) for name, digest in itertools.islice(pairs, NAMES)
    )
    return {name: digest for name, digest in found if name and digest}


def read_common_fields(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the session fields that have the same keys in all records."""
    origin = read_mapping(document.get("origin"))
    return {
        "created": read_real(document.get("created")),
        "finished": document.get("finished", True) not in (None, False),
        "exit_code": read_int(document.get("exit_code")),
        "command": read_text(document.get("command")),
        "labels": read_texts(origin.get("labels")),
        "branch": read_text(origin.get("branch")),
        "commit": read_text(origin.get("commit")),
    }


def choose_exit_outcome(code: int) -> str:
    """Return an outcome with an exit code, for a session without a recorded outcome; "" for other codes."""
    return _OUTCOMES.get(code, "")


def read_times(timings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a case's total time and compile time on the host, in seconds."""
    found = [seconds for value in timings.values() if (seconds := read_real(value)) is not None]
    return {"host_s": sum(found) if found else None, "compile_s": read_real(timings.get("compile_s"))}


def read_grade(record: Mapping[str, Any]) -> str:
    """Return the grade of a case's times: A, B or F; "" without a grade."""
    found = read_text(read_mapping(record.get("grade")).get("grade"))
    return found if found in get_args(Grade) else ""


def read_joules(record: Mapping[str, Any]) -> float | None:
    """Return the energy of an inference in joules; None if it was not measured, or refused."""
    return read_real(read_mapping(read_mapping(record.get("energy")).get("per_inference")).get("joules"))


def read_statistics(outputs: Any) -> dict[str, Any]:
    """Return the worst value of each statistic over a case's outputs, and the outputs if there are multiple."""
    found = read_mappings(outputs)[:NAMES]
    several = tuple(
        OutputEntry(read_text(one.get("name")), read_real(one.get("max_abs")), read_real(one.get("sqnr_db")))
        for one in found
    )
    return {
        **{one.key: _find_worst_value(found, one) for one in STATISTICS if one.key in _SHOWN},
        "output": several[0].name if len(several) == 1 else "",
        "outputs": several if len(several) > 1 else (),
    }


_SHOWN = ("max_abs", "max_ulp", "sqnr_db")


def _find_worst_value(outputs: Sequence[Mapping[str, Any]], statistic: Statistic) -> float | None:
    values = [value for one in outputs if (value := read_real(one.get(statistic.key))) is not None]
    # Ignore NaN, which has no order, unless all values are NaN.
    numbers = [value for value in values if not math.isnan(value)]
    worst: float | None = statistic.worst(numbers or values, default=None)
    return worst
