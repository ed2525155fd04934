"""Writes down what a job's cases come to, stage by stage, so that whatever ends the job loses nothing."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hil.controller.pipeline.case import Case
from hil.controller.pipeline.report import case_record
from hil.controller.storage.runs import Run
from hil.core.results import NEVER_IN, Outcome, exit_code_of
from hil.core.text import jsonable
from hil.errors import EXIT_INTERRUPTED


class Recorder:
    """Keeps a run's record up to date; may be called from several threads.

    Args:
        run: the run; cases that its record holds already, under other names, stay as they are.
        order: the names of all the run's cases.
        cases: those that are run now.
    """

    def __init__(self, run: Run, order: Sequence[str], cases: Sequence[Case]) -> None:
        self._run = run
        self._order = order
        self._cases = {case.name: case for case in cases}
        self._records: dict[str, Any] = {}
        # The same as JSON: made of hundreds of cases whenever one has changed, it would take most of the time.
        self._texts: dict[str, str] = {}
        self._tensors: dict[str, dict[str, Any]] = {case.name: {} for case in cases}
        self._lock = threading.Lock()
        self.ended: set[str] = set()
        self._is_new = not run.record["cases"]
        for record in run.record["cases"]:
            self._note(record)
        self._gather(cases)

    def write(self, case: Case | None = None) -> None:
        """Write the record as things stand.

        Args:
            case: one that has changed, as it is now; None writes all again.

        Raises:
            StorageError: it cannot be written.
        """
        with self._lock:
            if case is not None:
                self._cases[case.name] = case
            self._gather(list(self._cases.values()) if case is None else [case])
            self._run.save([self._texts[name] for name in self._order if name in self._texts])

    def keep(self, case: Case, what: str) -> None:
        """Store a case's ``inputs``, ``outputs`` or ``references``."""
        save = self._run.save_tensors
        stored: list[Any]
        if what == "references":
            stored = [save(case.name, f"reference-{number}", one.outputs) for number, one in enumerate(case.references)]
        else:
            held = case.inputs if what == "inputs" else case.result.outputs if case.result else None
            stored = save(case.name, what, held or {})
        self._tensors[case.name][what] = stored
        self.write(case)

    def end(self, case: Case) -> None:
        """A case has its outcome."""
        self.ended.add(case.name)
        self.write(case)

    def interrupt(self) -> None:
        """Ctrl-C: cases that had not ended did not fail either; what they were doing was stopped."""
        for name, case in self._cases.items():
            if name not in self.ended:
                self._cases[name] = replace(case, outcome=None, error=None, reason="interrupted")
        self._run.record["exit_code"] = EXIT_INTERRUPTED
        self.write()

    def finish(self) -> dict[str, Any]:
        """Every case has ended: the run's outcome and exit code are theirs. Returns the record."""
        self._gather(list(self._cases.values()))
        outcomes = [Outcome(case["outcome"]) for case in self._run.record["cases"]]
        self._run.record["exit_code"] = exit_code_of(outcomes)
        self._run.record["outcome"] = max(outcomes, key=lambda outcome: outcome.exit_code).value
        self._run.record["finished"] = True
        kept = self.keeps()
        if kept:
            self._run.save()
        return {**self._run.record, "folder": str(self._run.folder) if kept else ""}

    def keeps(self) -> bool:
        """Whether the run, which is over, has anything to keep; one that never came to its board is taken away."""
        came_in = self._run.record["board"] or any(case.outcome not in NEVER_IN for case in self._cases.values())
        if self._is_new and not came_in:
            self._run.discard()
            return False
        return True

    def _gather(self, cases: Sequence[Case]) -> None:
        for case in cases:
            self._note(case_record(case, self._tensors[case.name]))
        self._run.record["cases"] = [self._records[name] for name in self._order if name in self._records]

    def _note(self, record: dict[str, Any]) -> None:
        self._records[record["name"]] = record
        self._texts[record["name"]] = json.dumps(jsonable(record), allow_nan=False)
