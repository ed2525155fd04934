"""What a submission's jobs came to, fetched: a run's folder, or a suite's one run of all its parts."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hil.controller.farm.client import FarmClient
from hil.controller.farm.suites import Ended, merge
from hil.controller.farm.words import JobState, Kind, Result, Spec, gravest
from hil.controller.storage.runs import storing
from hil.controller.workloads.suites.store import SuiteRun, default_folder
from hil.errors import FarmError, UsageError

_AT_ONCE = 8


@dataclass(frozen=True)
class Outcome:
    """A job that has ended.

    Attributes:
        name: the job's.
        spec: what it was to do.
        result: how it ended.
    """

    name: str
    spec: Spec
    result: Result


def outcomes(farm: FarmClient, name: str) -> list[Outcome]:
    """How the jobs of a submission ended, or one of them.

    Raises:
        UsageError: there is no such job, or one has not ended.
    """
    rows = farm.ask("result", name=name, specs=True)
    over = (JobState.DONE, JobState.CANCELLED)
    if going := [row for row in rows if row["state"] not in over]:
        what = f"{len(going)} of {len(rows)} jobs have" if len(rows) > 1 else f"job {name} has"
        raise UsageError(
            f"{what} not ended: {going[0]['name']} is {going[0]['state']}", hint=f"hil farm logs {name} -f"
        )
    return [Outcome(row["name"], Spec.of_json(row["spec"]), Result.of_json(row)) for row in rows]


def exit_code(ended: Sequence[Outcome]) -> int:
    """One exit code for all."""
    return gravest([one.result.exit_code for one in ended])


def is_suite(ended: Sequence[Outcome]) -> bool:
    """Whether these are parts of a suite."""
    return all(one.spec.kind is Kind.SUITE for one in ended)


def fetch_run(farm: FarmClient, one: Outcome, folder: Path) -> None:
    """A run's folder as its host had it.

    Raises:
        UsageError: the folder is there already and not empty.
        FarmError: the store has it no more.
        StorageError: it cannot be written.
    """
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty", hint="name another --out")
    _fetch(farm, one.result.files, folder)


def fetch_suite(farm: FarmClient, ended: Sequence[Outcome], out: Path | None) -> SuiteRun:
    """One suite run of all parts, with its reports and what its cases kept.

    Args:
        farm: the connection.
        ended: the parts.
        out: the run's folder; None makes one below ``hil-suites``.

    Raises:
        UsageError: the folder holds a run already.
        FarmError: the store has their files no more.
        StorageError: it cannot be written.
    """
    typed = ended[0].spec.options["typed"]
    folder = out or default_folder(typed["suite"], typed["flow_name"])
    run = merge([Ended(one.spec, one.result) for one in ended], folder)
    for one in ended:
        cases = {at: digest for at, digest in one.result.files.items() if PurePosixPath(at).parts[0] == "cases"}
        _fetch(farm, cases, folder)
    return run


def _fetch(farm: FarmClient, files: Mapping[str, str], folder: Path) -> None:
    """Files of the store, path below the folder -> digest; each content comes once, several at a time."""
    places: dict[str, list[Path]] = {}
    for at, digest in files.items():
        parts = PurePosixPath(at)
        if parts.is_absolute() or ".." in parts.parts or not parts.parts:
            raise FarmError(f"the farm names a file {at!r}, which is outside the run's folder")
        places.setdefault(digest, []).append(folder / parts)

    def fetch(digest: str) -> None:
        first, *others = places[digest]
        farm.download(digest, first)
        for other in others:
            other.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(first, other)

    pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fetch")
    try:
        with storing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for _ in pool.map(fetch, places):
                pass
    finally:
        pool.shutdown(cancel_futures=True)
