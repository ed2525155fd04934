"""Restore programs of the history, with the inputs and references of their runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hil.controller.pipeline.case import Case
from hil.controller.pipeline.records.restored import board_of_stored, restore_artifact, restore_case
from hil.controller.pipeline.settings.model_settings import refuse_functions
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.history import HistoryEntry
from hil.controller.storage.history.store import HistoryStore
from hil.controller.storage.runs import Run, RunStore, is_sealed
from hil.errors import UsageError

_KINDS = ("run", "bench")


@dataclass(frozen=True)
class ProgramRestorer:
    """Restores programs of a history.

    Attributes:
        job: options of the command. The board in these options, if any, replaces the board of the stored runs.
    """

    store: HistoryStore
    job: Job

    def choose_job(self, run: Run) -> Job:
        """Return the job of a stored run, with the board to use. Records of other users must not choose the board."""
        stored = Job.of_record(run.record.request)
        if is_own := is_sealed(run.folder, run.record.request):
            if self.job.board or self.job.hw_type:
                # Faults belong to the stored board.
                return replace(board_of_stored(stored, self.job, own=False), faults=())
        else:
            refuse_functions(stored)
        return board_of_stored(stored, self.job, own=is_own)

    def restore_entry(self, run: Run, measured: HistoryEntry, entry: HistoryEntry, job: Job) -> Case:
        """Return the case of an entry: its program and, if its run is still stored, its inputs and references.

        Otherwise, the case gets the inputs of the new run. The references of the new run are used only for its own
        program.
        """
        if entry is not measured and (stored := find_run(entry)) is not None:
            run, measured = stored, entry
        found = next((case for case in run.record.cases if case.name == measured.case), None)
        record, folder = self.store.program_record(entry.program), self.store.program(entry.program)
        if record is None or folder is None:
            raise UsageError(f"the program of {entry.run} is not in the history")
        if found is None or not found.inputs:
            raise UsageError(f"run {run.id} has no inputs for case {measured.case}")
        if missing := [name for name in record.files if not (folder / name).is_file()]:
            raise UsageError(f"the program of {entry.run} is missing files: {', '.join(missing)}")
        artifact = restore_artifact(record, {name: folder / name for name in record.files})
        case = restore_case(run, found, job, artifact)
        return case if measured is entry else replace(case, references=())


def open_run(entry: HistoryEntry) -> Run:
    """Open the run of an entry. Raises UsageError if it cannot be measured again."""
    if entry.key.kind not in _KINDS:
        raise UsageError(f"a {entry.key.kind} cannot be measured again", hint="measure the model with hil bench")
    if flag := next((one for one in entry.key.flags if one.startswith(("--concurrency", "--sustained"))), ""):
        raise UsageError(f"a bench with {flag} cannot be measured again")
    run = find_run(entry)
    if run is None:
        raise UsageError(f"the directory of run {entry.run} is missing, so its inputs are unknown")
    return run


def find_run(entry: HistoryEntry) -> Run | None:
    """Return the run of an entry, or None if its directory is missing."""
    folder = Path(entry.folder)
    return RunStore(folder.parent).open(str(folder)) if entry.folder and folder.is_dir() else None
