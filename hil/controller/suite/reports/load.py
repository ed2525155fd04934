"""What every report is made from: a suite run's folder, of a run that is over, going on, or cut off."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hil.controller.suite.record import CaseRecord
from hil.controller.suite.reports.texts import counted
from hil.errors import UsageError


@dataclass(frozen=True)
class SuiteResults:
    """A stored suite run, to be read.

    Attributes:
        folder: where it is.
        id: the run's name.
        source: what named the suite on the command line.
        suite, flow, runtime, boards: what it ran in.
        started, finished: seconds since the epoch; None where it is not known, or not over.
        exit_code: None while it is not over.
        command: the command that it goes on with.
        versions: tool -> version.
        interrupted: whether it was told to stop.
        records: of the cases that ended, in the suite's order.
        missing: ids of the cases that have not ended.
        damaged: how many lines of results.jsonl cannot be read.
    """

    folder: Path
    id: str
    source: str
    suite: str
    flow: str
    runtime: str
    boards: tuple[str, ...]
    started: float | None
    finished: float | None
    exit_code: int | None
    command: str
    versions: Mapping[str, str]
    interrupted: bool
    records: tuple[CaseRecord, ...]
    missing: tuple[str, ...] = ()
    damaged: int = 0

    @property
    def title(self) -> str:
        """The suite and the flow, for a headline."""
        return f"{self.suite} · {self.flow}"

    @property
    def notes(self) -> list[str]:
        """What a reader has to know before any number: that the run is not whole."""
        notes = []
        if self.missing:
            told = f"{len(self.missing)} of {counted(len(self.missing) + len(self.records), 'case')}"
            why = "it was interrupted" if self.interrupted else "the run is not over, or was cut off"
            notes.append(f"{told} {'was' if len(self.missing) == 1 else 'were'} not run: {why}.")
        if self.damaged:
            notes.append(f"{counted(self.damaged, 'line')} of results.jsonl cannot be read.")
        return notes


def load_run(folder: Path) -> SuiteResults:
    """The run in a folder. What a killed run left of a line is left out.

    Raises:
        UsageError: the folder holds none, or what it holds cannot be read.
    """
    try:
        head = json.loads((folder / "suite.json").read_text(encoding="utf-8"))
        lines = (folder / "results.jsonl").read_bytes()
        suite, flow, ids = str(head["suite"]), str(head["flow"]), [str(one) for one in head["ids"]]
    except FileNotFoundError as error:
        raise UsageError(
            f"{folder} holds no suite run: it has no {Path(error.filename).name}",
            hint="name the folder that hil suite run --out was given, or that it told of",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the suite run in {folder} cannot be read: {type(error).__name__}: {error}") from error
    records, damaged = _records(lines)
    order = {one: place for place, one in enumerate(ids)}
    return SuiteResults(
        folder=folder,
        id=str(head.get("id") or folder.name),
        source=str(head.get("source") or ""),
        suite=suite,
        flow=flow,
        runtime=str(head.get("runtime") or ""),
        boards=tuple(str(one) for one in head.get("boards") or ()),
        started=head.get("started"),
        finished=head.get("finished"),
        exit_code=head.get("exit_code"),
        command=str(head.get("command") or ""),
        versions={str(key): str(value) for key, value in (head.get("versions") or {}).items()},
        interrupted=bool(head.get("interrupted")),
        records=tuple(sorted(records.values(), key=lambda record: order.get(record.id, len(order)))),
        missing=tuple(one for one in ids if one not in records),
        damaged=damaged,
    )


def _records(lines: bytes) -> tuple[dict[str, CaseRecord], int]:
    """Records by id, the last where there are two, and how many whole lines cannot be read."""
    records: dict[str, CaseRecord] = {}
    damaged = 0
    for line in lines.split(b"\n")[:-1]:  # what follows the last line's end is half a line, or nothing
        try:
            record = CaseRecord.of_json(json.loads(line))
        except (ValueError, TypeError, AttributeError):
            damaged += 1
        else:
            records[record.id] = record
    return records, damaged
