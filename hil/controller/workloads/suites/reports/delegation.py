"""What a compiler told of its work with a case: how much a backend took over, and what it left to the CPU's kernels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hil.controller.storage.texts import counted, seconds
from hil.controller.workloads.suites.record import CaseRecord

# Outputs that have columns of their own in results.csv; outputs.csv has them all.
_OUTPUTS = 2
_STATISTICS = ("max_abs", "mean_abs", "sqnr_db")
COLUMNS = (
    "params",
    "delegated",
    "quantise_s",
    "lower_s",
    "delegated_nodes",
    "undelegated_nodes",
    "delegated_ops",
    "undelegated_ops",
    "program_bytes",
    *(f"output_{place}_{name}" for place in range(_OUTPUTS) for name in _STATISTICS),
)
_LEFT = 5


@dataclass(frozen=True)
class Delegation:
    """How a program is shared out.

    Attributes:
        delegated: operator -> how many nodes of it a backend took over.
        undelegated: operator -> how many were left.
    """

    delegated: Mapping[str, int]
    undelegated: Mapping[str, int]

    @classmethod
    def of(cls, record: CaseRecord) -> Delegation | None:
        """A case's; None where its compiler told of none."""
        said = record.notes.get("delegation")
        if not isinstance(said, Mapping):
            return None
        return cls(_counts(said.get("delegated")), _counts(said.get("undelegated")))

    @property
    def taken(self) -> int:
        """How many nodes a backend took over."""
        return sum(self.delegated.values())

    @property
    def left(self) -> int:
        """How many nodes were left."""
        return sum(self.undelegated.values())

    @property
    def words(self) -> str:
        """``3 of 4 nodes; left: aten.foo 1``."""
        told = f"{self.taken} of {counted(self.taken + self.left, 'node')}"
        return f"{told}; left: {_listed(self.undelegated)}" if self.undelegated else told


def is_told(records: Iterable[CaseRecord]) -> bool:
    """Whether there is anything for the columns of this module in a run."""
    return any(record.notes or record.params for record in records)


def cells(record: CaseRecord) -> list[Any]:
    """A case's cells for :data:`COLUMNS`."""
    shared, notes = Delegation.of(record), record.notes
    outputs = [*record.outputs[:_OUTPUTS], *({} for _ in range(_OUTPUTS))][:_OUTPUTS]
    return [
        _json(record.params),
        None if shared is None else shared.taken > 0,
        notes.get("quantise_s"),
        notes.get("lower_s"),
        None if shared is None else shared.taken,
        None if shared is None else shared.left,
        None if shared is None else _json(shared.delegated),
        None if shared is None else _json(shared.undelegated),
        notes.get("program_bytes"),
        *(output.get(name) for output in outputs for name in _STATISTICS),
    ]


def lowering_words(record: CaseRecord) -> str:
    """``quantised in 0.4 s, lowered in 1.2 s``; "" where nothing was told."""
    words = {"quantised": record.notes.get("quantise_s"), "lowered": record.notes.get("lower_s")}
    return ", ".join(f"{word} in {seconds(value)}" for word, value in words.items() if isinstance(value, int | float))


def summary_words(records: Iterable[CaseRecord]) -> str:
    """How much was delegated over a whole run, and which operators were left most; "" where nothing was told."""
    found = [shared for record in records if (shared := Delegation.of(record)) is not None]
    taken, left = sum(one.taken for one in found), sum(one.left for one in found)
    if not taken + left:
        return ""
    programs = sum(one.taken > 0 for one in found)
    told = f"delegated: {taken} of {counted(taken + left, 'node')}, in {programs} of {counted(len(found), 'program')}"
    ops: Counter[str] = Counter()
    for one in found:
        ops.update(one.undelegated)
    return f"{told}; left most: {_listed(ops)}" if ops else told


def _listed(counts: Mapping[str, int]) -> str:
    most = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    told = ", ".join(f"{name} {count}" for name, count in most[:_LEFT])
    return told + (f", {len(most) - _LEFT} others" if len(most) > _LEFT else "")


def _counts(said: Any) -> dict[str, int]:
    return {str(name): count for name, count in said.items() if isinstance(count, int)} if said else {}


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(sorted(value.items()))) if value else ""
