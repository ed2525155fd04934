"""Restore the case of a history's entry from its stored run: inputs, references and settings."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from hil.bundles.cases import BUNDLE_FORMAT, Signature
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.records.restored import restore_case, restore_spec
from hil.controller.pipeline.settings.options import Job
from hil.controller.records.measurements.history import HistoryEntry
from hil.controller.records.run import RunCase
from hil.controller.storage.runs import Run, RunStore, is_sealed
from hil.controller.workloads.suites.store import SuiteRun, name_suite_run
from hil.core.results import Artifact
from hil.errors import UsageError

_SUITE = "suite"
_KINDS = ("run", "bench", _SUITE)


class CaseMissing(UsageError):
    """A case cannot be restored: its run does not have it, or its files have changed."""


@contextlib.contextmanager
def read_options(run: str) -> Iterator[None]:
    """Raise UsageError if the block cannot read the options of a run, for example of another version of hil."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"cannot read the options of run {run}: {error}", hint="measure the commit again") from error


class StoredCases(Protocol):
    """Cases of a stored run.

    Attributes:
        job: board and settings of the run.
        is_own: whether this user started the run in this directory.
    """

    job: Job
    is_own: bool

    def restore(self, name: str, job: Job, artifact: Artifact) -> Case:
        """Return a case with another program. ``job`` selects the board.

        Raises CaseMissing.
        """

    def adapt(self, name: str, artifact: Artifact) -> Artifact:
        """Return a stored program with the function and the outputs of a case.

        The history stores a program once, although multiple cases may use different functions of it.
        """


@dataclass
class StoredRunCases:
    """Cases of a run, bundle run, trace run or bench."""

    run: Run

    def __post_init__(self) -> None:
        """Read the job."""
        with read_options(self.run.id):
            self.job = Job.from_record(self.run.record.request)
        self.is_own = is_sealed(self.run.folder, self.run.record.request)

    def restore(self, name: str, job: Job, artifact: Artifact) -> Case:
        """Return a case with the stored inputs and references."""
        found = self._find(name)
        if found is None or not found.inputs:
            raise CaseMissing(f"run {self.run.id} has no inputs for case {name}")
        case = restore_case(self.run, found, job, artifact)
        if found.model is None or found.model.format != BUNDLE_FORMAT:
            return case
        specs = (tuple(map(restore_spec, some or ())) for some in (found.model.inputs, found.model.outputs))
        return replace(case, signature=Signature(*specs))

    def adapt(self, name: str, artifact: Artifact) -> Artifact:
        """Return the program with the stored function and outputs."""
        found = self._find(name)
        if found is None or found.artifact is None:
            return artifact
        outputs = found.model.outputs if found.model is not None else None
        specs = artifact.outputs if outputs is None else tuple(map(restore_spec, outputs))
        return replace(artifact, function=found.artifact.function, outputs=specs)

    def _find(self, name: str) -> RunCase | None:
        return next((case for case in self.run.record.cases if case.name == name), None)


@dataclass(frozen=True)
class CaseOpener:
    """Opens the stored runs of entries.

    Attributes:
        open_suite: returns the cases of a suite run. The text is the name of the board that ran the case.
    """

    open_suite: Callable[[SuiteRun, str], StoredCases]

    def open(self, entry: HistoryEntry) -> StoredCases:
        """Open the run of an entry. Raises UsageError if it cannot be measured again."""
        if entry.key.kind not in _KINDS:
            raise UsageError(f"a {entry.key.kind} cannot be measured again", hint="measure the model with hil bench")
        if flag := next((one for one in entry.key.flags if one.startswith(("--concurrency", "--sustained"))), ""):
            raise UsageError(f"a bench with {flag} cannot be measured again")
        cases = self.find(entry)
        if cases is None:
            raise UsageError(f"the directory of run {entry.run} is missing, so its inputs are unknown")
        return cases

    def find(self, entry: HistoryEntry) -> StoredCases | None:
        """Open the run of an entry, or return None if its directory is missing or has another run."""
        place = Path(entry.folder)
        if not (entry.folder and place.is_dir()):
            return None
        if entry.key.kind != _SUITE:
            return StoredRunCases(RunStore(place.parent).open(str(place)))
        run = SuiteRun.open(place)
        return self.open_suite(run, entry.key.board) if name_suite_run(run.head) == entry.run else None
