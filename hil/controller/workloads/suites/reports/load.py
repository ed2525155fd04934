"""What every report is made from: a suite run's folder, of a run that is over, going on, or cut off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hil.controller.storage.texts import counted
from hil.controller.workloads.suites.record import CaseRecord
from hil.controller.workloads.suites.store import SuiteRun
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
        left_out: test cases that lay beside the models and cannot be run, a line for each place.
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
    left_out: tuple[str, ...] = ()

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
        notes += [f"Left out: {line}." for line in self.left_out]
        if self.damaged:
            notes.append(f"{counted(self.damaged, 'line')} of results.jsonl cannot be read.")
        return notes


def load_run(folder: Path) -> SuiteResults:
    """The run in a folder. What a killed run left of a line is left out.

    Raises:
        UsageError: the folder holds none, or what it holds cannot be read.
    """
    run = SuiteRun.open(folder)
    try:
        return _loaded(run)
    except (OSError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"the suite run in {folder} cannot be read: {type(error).__name__}: {error}") from error


def _loaded(run: SuiteRun) -> SuiteResults:
    folder, head = run.folder, run.head
    ids = [str(one) for one in head["ids"]]
    records, damaged = run.read()
    ended = {record.id for record in records}
    return SuiteResults(
        folder=folder,
        id=str(head.get("id") or folder.name),
        source=str(head.get("source") or ""),
        suite=str(head["suite"]),
        flow=str(head["flow"]),
        runtime=str(head.get("runtime") or ""),
        boards=tuple(str(one) for one in head.get("boards") or ()),
        started=head.get("started"),
        finished=head.get("finished"),
        exit_code=head.get("exit_code"),
        command=str(head.get("command") or ""),
        versions={str(key): str(value) for key, value in (head.get("versions") or {}).items()},
        interrupted=bool(head.get("interrupted")),
        records=tuple(records),
        missing=tuple(one for one in ids if one not in ended),
        damaged=damaged,
        left_out=tuple(str(one) for one in head.get("left_out") or ()),
    )
