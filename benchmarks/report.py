"""What all benchmarks found at one time: one document, its table, and what changed since a former one."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCHEMA = 1
# Of a ratio, between two documents: as much differs from day to day on one machine.
NOISE = 0.1
_HOLDS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}

# (benchmark, case, rival)
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Change:
    """A ratio beside the one that a former document has for the same case and rival."""

    key: Key
    former: float
    now: float
    bar: str

    @property
    def text(self) -> str:
        """``better``, ``worse``, ``different`` where no bar says which is better; "" within the noise."""
        share = self.now / self.former if self.former else float("inf")
        if abs(share - 1) <= NOISE:
            return ""
        sign = self.bar.partition(" ")[0]
        if sign not in _HOLDS:
            return "different"
        return "better" if (share < 1) == sign.startswith("<") else "worse"


def holds(row: Mapping[str, Any]) -> bool | None:
    """Whether a row's ratio is within its bar; None where it has none of one."""
    sign, _, limit = str(row["bar"]).partition(" ")
    if sign not in _HOLDS or row["ratio"] is None:
        return None
    return bool(_HOLDS[sign](row["ratio"], float(limit)))


def read(path: Path) -> dict[str, Any]:
    """A document that was written before.

    Raises:
        ValueError: it is none of ours, or of a later schema.
        OSError: it cannot be read.
    """
    document = json.loads(path.read_bytes())
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or "benchmarks" not in document:
        raise ValueError(f"invalid document {path}: expected schema {SCHEMA} of scripts/bench")
    return document


def rows_of(document: Mapping[str, Any]) -> Iterator[tuple[Key, Mapping[str, Any]]]:
    """Every row, with what names it."""
    for one in document["benchmarks"]:
        for row in one.get("rows", ()):
            yield (one["benchmark"], row["case"], row["rival"]), row


def changes(former: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """The ratios that both documents have. What has no rival is left out: milliseconds are the machine's."""
    before = {key: row["ratio"] for key, row in rows_of(former)}
    found = []
    for key, row in rows_of(now):
        if row["ratio"] is not None and before.get(key) is not None:
            found.append(Change(key, before[key], row["ratio"], row["bar"]))
    return found


def machines_differ(former: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What of the machines differs: a ratio that hangs on cores is another one then."""
    kinds = ("cpu", "cores")
    then, today = ({kind: {one.get(kind) for one in made["benchmarks"]} for kind in kinds} for made in (former, now))
    return [
        f"{kind}: {_words(then[kind])} before, {_words(today[kind])} now" for kind in kinds if then[kind] != today[kind]
    ]


def table(document: Mapping[str, Any]) -> list[Sequence[str]]:
    """Lines for people: benchmark, case, hil's figure, the rival, the rival's figure, ratio, bar, whether it holds."""
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
    """A figure in three digits, "" for none."""
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _words(values: Iterable[Any]) -> str:
    return ", ".join(sorted(map(str, values)))
