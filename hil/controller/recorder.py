"""Writes down what a job's cases come to, stage by stage, so that whatever ends the job loses nothing."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from hil.controller.case import Case
from hil.controller.report import case_record
from hil.controller.runs import Run
from hil.errors import EXIT_INTERRUPTED
from hil.results import Outcome, exit_code_of


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
        self._cases = cases
        self._records: dict[str, Any] = {case["name"]: case for case in run.record["cases"]}
        self._tensors: dict[str, dict[str, Any]] = {case.name: {} for case in cases}
        self._lock = threading.Lock()
        self.ended: set[str] = set()

    def write(self) -> None:
        """Write the record as things stand.

        Raises:
            StorageError: it cannot be written.
        """
        with self._lock:
            for case in self._cases:
                self._records[case.name] = case_record(case, self._tensors[case.name])
            self._run.record["cases"] = [self._records[name] for name in self._order if name in self._records]
            self._run.save()

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
        self.write()

    def end(self, case: Case) -> None:
        """A case has its outcome."""
        self.ended.add(case.name)
        self.write()

    def interrupt(self) -> None:
        """Ctrl-C: cases that had not ended did not fail either; what they were doing was stopped."""
        for case in self._cases:
            if case.name not in self.ended:
                case.outcome, case.error, case.reason = None, None, "interrupted"
        self._run.record["exit_code"] = EXIT_INTERRUPTED
        self.write()

    def finish(self) -> dict[str, Any]:
        """Every case has ended: the run's outcome and exit code are theirs. Returns the record."""
        self.write()
        outcomes = [Outcome(case["outcome"]) for case in self._run.record["cases"]]
        self._run.record["exit_code"] = exit_code_of(outcomes)
        self._run.record["outcome"] = max(outcomes, key=lambda outcome: outcome.exit_code).value
        self._run.record["finished"] = True
        self._run.save()
        return {**self._run.record, "folder": str(self._run.folder)}
