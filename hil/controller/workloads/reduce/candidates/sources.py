"""Failed cases of stored runs, and stored reductions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hil.controller.pipeline.settings.options import Job
from hil.controller.storage.paths import is_file
from hil.controller.storage.runs import RunStore, check_seal
from hil.controller.storage.session_folders import DEFAULT_ROOT
from hil.controller.workloads.reduce.trials import RECORD
from hil.core.results import Outcome
from hil.errors import UsageError, did_you_mean


def restore_job(root: Path | None, name: str, case: str) -> Job:
    """Return the job that repeats a failed case of a stored run, with the stored inputs.

    Args:
        root: directory of the runs; None is the default.
        name: the run, see :meth:`RunStore.find_folder`.
        case: the case's name; "" is the first case that failed.

    Raises:
        UsageError: the run or case does not exist, the case passed, or another user started the run.
    """
    run = RunStore(root).open(name)
    check_seal(run.folder, run.record.request)
    failed = [one for one in run.record.cases if one.outcome not in (None, Outcome.PASS, Outcome.SKIP, Outcome.XFAIL)]
    chosen = next((one for one in failed if case in ("", one.name)), None)
    if chosen is None:
        known = [one.name for one in failed]
        similar = did_you_mean(case, known)
        raise UsageError(
            f"run {run.id} has no failed case {case}".rstrip(),
            hint=f"{similar}failed cases: {', '.join(known)}" if known else "all cases of the run passed",
        )
    job = Job.from_record(run.record.request)
    if job.generate is not None:
        raise UsageError("cannot reduce a generation", hint="find the wrong call with hil bisect --generate")
    given = tuple(f"{entry.name}={run.own(entry.file)}" for entry in chosen.inputs)
    # Stored inputs already determine the sizes, so ignore ranges.
    ranges = {} if given else job.dim_ranges
    return replace(job, models=(Path(chosen.path),), inputs=given or job.inputs, dim_ranges=ranges, out=root)


def find_reduction(root: Path | None, name: str) -> Path:
    """Return the directory of a stored reduction: a path, an id, or the start of an id. Raises UsageError."""
    place = root or DEFAULT_ROOT
    for folder in (Path(name), place / name):
        if is_file(folder / RECORD):
            return folder
    found = sorted(path.parent for path in place.glob(f"*/{RECORD}") if path.parent.name.startswith(name))
    if name == "latest":
        found = sorted(path.parent for path in place.glob(f"*/{RECORD}"))[-1:]
    if len(found) != 1:
        what = f"ambiguous reduction {name!r}" if found else f"reduction {name!r} not found"
        raise UsageError(f"{what} in {place}", hint="specify the directory of the reduction")
    return found[0]
