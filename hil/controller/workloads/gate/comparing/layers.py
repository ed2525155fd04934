"""Name the layers that became slower: profile the old and the new program of a regression, and compare the profiles."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from hil.controller.analysis.profile.collect import collect
from hil.controller.analysis.profile.diff import OpDiff, compare_profiles
from hil.controller.analysis.profile.store import read_profile
from hil.controller.models.importers import import_model
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.options import PROFILED_COUNTS, Job
from hil.controller.pipeline.stages import choose_board
from hil.controller.records.decisions.gate import SlowerLayer
from hil.controller.records.measurements.history import HistoryEntry
from hil.controller.storage.runs import make_safe_name
from hil.controller.workloads.gate.bisection.repository import GitRepository
from hil.controller.workloads.gate.plan import GateCase
from hil.controller.workloads.gate.remeasure import Remeasurer
from hil.controller.workloads.gate.stored_cases import StoredRunCases
from hil.core.results import Model
from hil.core.scratch import make_temporary_folder
from hil.core.timeline import Profile
from hil.errors import BoardError, HilError, UsageError

# Maximum layers in a verdict.
_MAX_LAYERS = 10
_COMPUTE = "compute"
_ONNX_SUFFIX = ".onnx"


@dataclass
class LayerFinder:
    """Finds slower layers.

    Attributes:
        folder: directory for the profiles: a directory per series, with the directories `old` and `new`.
        board_s: board time so far in seconds.
    """

    measurer: Remeasurer
    folder: Path
    board_s: float = 0.0

    def find_slower(self, case: GateCase) -> tuple[list[SlowerLayer], str]:
        """Return the slower layers, largest change first, and the reason if they are not known.

        An error is only a reason, because the verdict does not depend on layers.
        """
        assert case.old is not None
        try:
            old, new = self._profile_programs(case, case.old)
        except HilError as error:
            return [], error.message
        found = compare_profiles(old, new)
        if found.incomparable:
            return [], f"cannot compare the old program (A) with the new program (B): {found.incomparable}"
        slower = sorted(filter(_is_slower, found.ops), key=lambda one: -one.change_ns)
        layers = [SlowerLayer(name=one.name, change_ns=one.change_ns, is_new=one.a is None) for one in slower]
        return layers[:_MAX_LAYERS], "" if layers else "no layer is significantly slower in the profiles"

    def _profile_programs(self, case: GateCase, old: HistoryEntry) -> tuple[Profile, Profile]:
        """Run both programs with the profiler. Raises HilError if a profile is not complete."""
        restorer = self.measurer.restorer
        cases = restorer.opener.open(case.new)
        job = restorer.choose_job(cases)
        restored = [restorer.restore_entry(cases, case.new, entry, job) for entry in (old, case.new)]
        with make_temporary_folder("gate-") as place:
            models = [
                self._find_model(one, entry, Path(place)) for one, entry in zip(restored, (old, case.new), strict=True)
            ]
            if None in models:
                # Names of nodes in only one profile could not be compared with names of operations in the other.
                models = [None, None]
            before, after = (
                self._profile(one, entry, model, job, self.folder / case.series / name)
                for one, entry, model, name in zip(restored, (old, case.new), models, ("old", "new"), strict=True)
            )
        return before, after

    def _profile(self, case: Case, entry: HistoryEntry, model: Model | None, job: Job, folder: Path) -> Profile:
        """Run a program with the profiler, and store the profile.

        Args:
            model: model whose nodes name the operations, or None.
        """
        measurer = self.measurer
        warmup, iterations = PROFILED_COUNTS["warmup"], PROFILED_COUNTS["iterations"]
        options = replace(case.options, profile=True, warmup=warmup, iterations=iterations)
        case = replace(case, options=options, folder=folder)
        choice, faults = choose_board(job), job.faults
        session = measurer.pool.session(choice, runtimes=[entry.key.runtime], faults=faults)
        measurer.screen.stage(case.name, 0, f"profiling the program of {entry.source.commit[:9] or entry.run}")
        begun = time.monotonic()
        case = measurer.runner.execute(case, session)
        self.board_s += time.monotonic() - begun
        if case.error is not None:
            if isinstance(case.error, BoardError):
                measurer.pool.reconnect(choice, case.error, faults=faults)
            raise case.error
        notes = case.capture.notes if case.capture is not None else []
        if case.capture is None or case.capture.taken is None:
            raise UsageError("; ".join(notes) or "the runtime has no profiler")
        context = measurer.runner.context
        notes = collect(replace(case, model=model), case.capture, folder, run=entry.run, context=context)
        profile = read_profile(folder)
        if not profile.rows:
            raise UsageError("; ".join(notes) or "the profile contains no operations")
        return profile

    def _find_model(self, case: Case, entry: HistoryEntry, scratch: Path) -> Model | None:
        """Return the model of a program: the program itself, or the compiled file if it is available, or None."""
        assert case.artifact is not None
        program = case.artifact.files[case.artifact.main]
        if program.suffix == _ONNX_SUFFIX:
            return self._import_model(program, case)
        cases = self.measurer.restorer.opener.find(entry)
        if not isinstance(cases, StoredRunCases):
            return None
        stored = next((one for one in cases.run.record.cases if one.name == entry.case), None)
        if stored is None or stored.model is None:
            return None
        for path in (Path(stored.path), _export_model(entry, scratch)):
            model = self._import_model(path, case) if path is not None else None
            if model is not None and model.digest == stored.model.digest:
                return model
        return None

    def _import_model(self, path: Path, case: Case) -> Model | None:
        context, options = self.measurer.runner.context, case.options
        try:
            return import_model(
                path,
                function=options.function,
                dims=options.dims,
                isolated=context.isolated,
                cache=context.cache,
            )
        except HilError:
            return None


def _export_model(entry: HistoryEntry, scratch: Path) -> Path | None:
    """Write the model of the measured commit to a directory, or return None if git does not track the model."""
    # The run and the model are texts from the history, which may contain any path.
    folder = scratch / make_safe_name(entry.run)
    try:
        folder.mkdir()
        return GitRepository.find(Path()).export_file(entry.source.commit, entry.key.model, folder)
    except (UsageError, OSError, ValueError):
        return None


def _is_slower(one: OpDiff) -> bool:
    """Return whether a layer is slower, or only in the new program."""
    return one.kind == _COMPUTE and one.change in ("slower", "only in b")
