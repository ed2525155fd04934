"""Convert the result of a finished job to entries of the history.

The run of an entry is the job's name. All jobs of a suite are one run, with the submission's number. The commit is from
the submission and the board from the gateway, because the record of a host may be wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath

from hil.controller.farm.client.results import EndedJob, read_suite_head
from hil.controller.farm.job_files import DIRTY, MODEL_PATH, ORIGIN
from hil.controller.farm.messages import Kind, parse_job
from hil.controller.records.base import make_record
from hil.controller.records.measurements.history import HistoryEntry, SourceState, StoredProgram
from hil.controller.records.outputs import Origin
from hil.controller.storage.history.programs import combine_digests
from hil.controller.workloads.history.collect import make_run_entry, make_suite_entry
from hil.errors import UsageError


def make_job_entries(job: EndedJob, programs: Mapping[str, StoredProgram], board: str) -> list[HistoryEntry]:
    """Return an entry for every ended case of a job. A job that lost its board can have no cases.

    Args:
        programs: programs of the job by digest.
        board: board of the job's last lease.

    Raises:
        FarmError: the job's record is invalid.
    """
    entries = _make_suite_entries(job, programs) if job.spec.kind is Kind.SUITE else _make_run_entries(job)
    return [
        entry.replace(key=entry.key.replace(board=board), board=entry.board.replace(name=board)) for entry in entries
    ]


def _make_run_entries(job: EndedJob) -> list[HistoryEntry]:
    if not job.result.record:
        return []
    record, state = job.run, _make_state(job)
    entries = []
    for case in record.cases:
        if case.outcome is None:
            continue
        entry = make_run_entry(record, case, state, "")
        # The path on the host differs for each job.
        model = str(job.spec.options.get(MODEL_PATH) or PurePosixPath(case.path).name)
        program = combine_digests(case.artifact.digests) if case.artifact else ""
        entries.append(entry.replace(run=job.name, key=entry.key.replace(model=model), program=program))
    return entries


def _make_suite_entries(job: EndedJob, programs: Mapping[str, StoredProgram]) -> list[HistoryEntry]:
    if job.part.cases is None:
        return []
    head = read_suite_head(job, str(parse_job(job.name)[0]))
    state, by_main = _make_state(job), {one.files[one.main]: one.digest for one in programs.values()}
    entries = [make_suite_entry(head, case, state, "") for case in job.part.cases]
    return [entry.replace(program=by_main.get(entry.program, entry.program)) for entry in entries]


def _make_state(job: EndedJob) -> SourceState:
    """Return the state of the submitter's working tree."""
    dirty = job.spec.options.get(DIRTY)
    dirty = dirty if isinstance(dirty, bool) else None
    try:
        origin = make_record(job.spec.options.get(ORIGIN), Origin)
    except UsageError:
        return SourceState(dirty=dirty)
    return SourceState(commit=origin.commit, branch=origin.branch, dirty=dirty, labels=origin.labels)
