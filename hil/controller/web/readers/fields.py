"""What readers of every kind of record share: a bounded document, and values of it that may be of any type."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hil.compare.stats import STATISTICS, Statistic
from hil.controller.web.entries import NAMES, OutputEntry, real, text, texts, whole
from hil.core.files import read_file
from hil.errors import UsageError

# A record is read into memory whole: a longer one is told, not read.
MOST_BYTES = 32 << 20
# Values in it: an empty list is two bytes in a file, and thirty times as many in memory.
MOST_VALUES = 2_000_000


def read_document(path: Path) -> Mapping[str, Any]:
    """A record's JSON object. Raises OSError or ValueError: it cannot be read, or is longer than :data:`MOST_BYTES`."""
    try:
        document = parsed(read_file(path, MOST_BYTES))
    except UsageError as error:
        raise ValueError(error.message) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    return document


def digests(pairs: Iterable[tuple[Any, Any]]) -> dict[str, str]:
    """Models and their digests, those that a record has; a model is called as its file is, without ``.onnx``."""
    found = ((text(name).removesuffix(".onnx"), text(digest)) for name, digest in itertools.islice(pairs, NAMES))
    return {name: digest for name, digest in found if name and digest}


def parsed(data: bytes) -> Any:
    """The JSON of a record. Raises ValueError: it is none, or has more than :data:`MOST_VALUES` values."""
    if len(data) > MOST_VALUES and sum(map(data.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES} values")
    return json.loads(data)


def mapping(value: Any) -> Mapping[str, Any]:
    """The value, if it is a JSON object; else none of its keys."""
    return value if isinstance(value, dict) else {}


def listed(value: Any) -> list[Any]:
    """The value, if it is a list; else nothing."""
    return value if isinstance(value, list) else []


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list."""
    return [one for one in listed(value) if isinstance(one, dict)]


def common(document: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a session that every kind of record says in the same words."""
    origin = mapping(document.get("origin"))
    return {
        "created": real(document.get("created")),
        "finished": document.get("finished", True) not in (None, False),
        "exit_code": whole(document.get("exit_code")),
        "command": text(document.get("command")),
        "labels": texts(origin.get("labels")),
        "branch": text(origin.get("branch")),
        "commit": text(origin.get("commit")),
    }


def times(timings: Mapping[str, Any]) -> dict[str, Any]:
    """A case's times on the host: all together, and of compiling."""
    found = [seconds for value in timings.values() if (seconds := real(value)) is not None]
    return {"host_s": sum(found) if found else None, "compile_s": real(timings.get("compile_s"))}


def statistics(outputs: Any) -> dict[str, Any]:
    """What is known of a case's outputs: of each statistic the worst of them all, and where there are several, each."""
    found = mappings(outputs)[:NAMES]
    several = tuple(
        OutputEntry(text(one.get("name")), real(one.get("max_abs")), real(one.get("sqnr_db"))) for one in found
    )
    return {
        **{one.key: _worst(found, one) for one in STATISTICS if one.key in _SHOWN},
        "output": several[0].name if len(several) == 1 else "",
        "outputs": several if len(several) > 1 else (),
    }


_SHOWN = ("max_abs", "max_ulp", "sqnr_db")


def _worst(outputs: Sequence[Mapping[str, Any]], statistic: Statistic) -> float | None:
    values = [value for one in outputs if (value := real(one.get(statistic.key))) is not None]
    # What is no number is neither larger nor smaller.
    numbers = [value for value in values if not math.isnan(value)]
    worst: float | None = statistic.worst(numbers or values, default=None)
    return worst
