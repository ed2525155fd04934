"""Restore programs of the history, with the inputs and references of their runs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

from hil.controller.pipeline.case import Case
from hil.controller.pipeline.records.restored import restore_artifact, restore_board
from hil.controller.pipeline.settings.model_settings import refuse_functions
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.measurements.history import HistoryEntry
from hil.controller.storage.history.store import HistoryStore
from hil.controller.workloads.gate.stored_cases import CaseMissing, CaseOpener, StoredCases
from hil.errors import UsageError


@dataclass(frozen=True)
class ProgramRestorer:
    """Restores programs of a history.

    Attributes:
        job: options of the command. The board in these options, if any, replaces the board of the stored runs.
        opener: opens the stored runs.
    """

    store: HistoryStore
    job: Job
    opener: CaseOpener

    def choose_job(self, cases: StoredCases) -> Job:
        """Return the job of a stored run, with the board to use. Records of other users must not choose the board."""
        if cases.is_own:
            if self.job.board or self.job.hw_type:
                # Faults belong to the stored board.
                return replace(restore_board(cases.job, self.job, own=False), faults=())
        else:
            refuse_functions(cases.job)
        return restore_board(cases.job, self.job, own=cases.is_own)

    def name_board(self, entry: HistoryEntry) -> str:
        """Return the name of the board that runs the programs of an entry, as in the files of rounds."""
        return self.job.board or self.job.hw_type or entry.key.board

    def restore_entry(self, cases: StoredCases, measured: HistoryEntry, entry: HistoryEntry, job: Job) -> Case:
        """Return the case of an entry: its program and, if hil can read its run, its inputs and references.

        Otherwise, the case gets the inputs of the new run. The references of the new run are used only for its own
        program.

        Args:
            cases: the stored run of ``measured``, the new entry.
        """
        record, place = self.store.program_record(entry.program), self.store.program(entry.program)
        if record is None or place is None:
            raise UsageError(f"the program of {entry.run} is not in the history")
        if missing := [name for name in record.files if not (place / name).is_file()]:
            raise UsageError(f"the program of {entry.run} is missing files: {', '.join(missing)}")
        artifact = restore_artifact(record, {name: place / name for name in record.files})
        if entry is measured:
            return cases.restore(measured.case, job, cases.adapt(measured.case, artifact))
        own = None
        with contextlib.suppress(UsageError):  # another user's suite, for example from the cache of a CI service
            own = self.opener.find(entry)
        if own is not None:
            artifact = own.adapt(entry.case, artifact)
            with contextlib.suppress(CaseMissing):
                return own.restore(entry.case, job, artifact)
        else:
            artifact = cases.adapt(measured.case, artifact)
        case = cases.restore(measured.case, job, artifact)
        return replace(case, references=(), model=None)
