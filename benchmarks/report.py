"""Read a document with the results of all benchmarks, format a table, and compare with an earlier document."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
# Smallest relative change of a ratio between two documents: on one machine, smaller changes occur from day to day.
NOISE = 0.1
_HOLDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}

# (benchmark, case, rival)
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Change:
    """Ratio, and the ratio in an earlier document for the same case and rival."""

    key: Key
    former: float
    now: float
    bar: str

    @property
    def text(self) -> str:
        """``better`` or ``worse``; ``different`` without a limit; "" within the noise."""
        share = self.now / self.former if self.former else float("inf")
        if abs(share - 1) <= NOISE:
            return ""
        sign = self.bar.partition(" ")[0]
        if sign not in _HOLDS:
            return "different"
        return "better" if (share < 1) == sign.startswith("<") else "worse"


def holds(row: Mapping[str, Any]) -> bool | None:
    """Return True if a row's ratio is within its limit; None if the ratio or the limit is missing."""
    sign, _, limit = str(row["bar"]).partition(" ")
    if sign not in _HOLDS or row["ratio"] is None:
        return None
    return bool(_HOLDS[sign](row["ratio"], float(limit)))


def read(path: Path) -> dict[str, Any]:
    """Read a document.

    Raises:
        ValueError: the file is not a document of this schema.
        OSError: the file cannot be read.
    """
    document = json.loads(path.read_bytes())
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or "benchmarks" not in document:
        raise ValueError(f"invalid document {path}: expected schema {SCHEMA} of scripts/bench")
    return document


def rows_of(document: Mapping[str, Any]) -> Iterator[tuple[Key, Mapping[str, Any]]]:
    """Yield each row with its key."""
    for one in document["benchmarks"]:
        for row in one.get("rows", ()):
            yield (one["benchmark"], row["case"], row["rival"]), row


def changes(former: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Return the ratios that are in both documents.

    Rows without a rival are left out, because their times depend on the machine.
    """
    before = {key: row["ratio"] for key, row in rows_of(former)}
    found = []
    for key, row in rows_of(now):
        if row["ratio"] is not None and before.get(key) is not None:
            found.append(Change(key, before[key], row["ratio"], row["bar"]))
    return found


def machines_differ(former: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return differences between the machines, because ratios may depend on the number of cores."""
    kinds = ("cpu", "cores")
    then, today = ({kind: {one.get(kind) for one in made["benchmarks"]} for kind in kinds} for made in (former, now))
    return [
        f"{kind}: {_words(then[kind])} before, {_words(today[kind])} now" for kind in kinds if then[kind] != today[kind]
    ]


def table(document: Mapping[str, Any]) -> list[Sequence[str]]:
    """Return lines for display.

    Columns: benchmark, case, hil's value, rival, the rival's value, ratio, limit, and if the limit holds.
    """
    lines: list[Sequence[str]] = []
    for (benchmark, case, rival), row in rows_of(document):
        figures = [number(row[name]) for name in ("value", "rival_value", "ratio")]
        held = {True: "holds", False: "missed", None: ""}[holds(row)]
        mine = f"{figures[0]} {row['unit']}"
        lines.append((benchmark, case, mine, rival, figures[1], figures[2], row["bar"], held))
    for one in document["benchmarks"]:
        if "error" in one:
            lines.append((one["benchmark"], f"failed: {one['error']}", *[""] * 6))
    return lines


def number(value: float | None) -> str:
    """Format a number with three digits; "" for None."""
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _words(values: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, values)))
