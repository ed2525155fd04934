"""Run a suite from the first check to the reports. This implements `hil suite run`."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from hil.controller.devices.board_choice import BoardChoice
from hil.controller.models.flows.flow import Flow
from hil.controller.records.suite import CaseRecord, SuiteRecord
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated, lend_pool
from hil.controller.storage.run_context import RunContext
from hil.controller.storage.runs import check_seal
from hil.controller.storage.sources.origin import find_request_origin
from hil.controller.workloads.suites.cases.sources import choose_common_flow, choose_flow, open_suite, place_of
from hil.controller.workloads.suites.cases.spec import CaseSpec, Suite, list_model_files
from hil.controller.workloads.suites.engine import Engine
from hil.controller.workloads.suites.expected import Expectations
from hil.controller.workloads.suites.outcome import record_of
from hil.controller.workloads.suites.preparing import (
    check_settings,
    choose_board_runtime,
    make_suite_runner,
    resolve_boards,
    use_flow_device,
)
from hil.controller.workloads.suites.reports import write_reports
from hil.controller.workloads.suites.request import SuiteRequest, make_profile_folders
from hil.controller.workloads.suites.store import SuiteRun, choose_default_folder, collect_versions
from hil.controller.workloads.suites.tasks import Task
from hil.controller.workloads.triage.entries import TriageList
from hil.core.results import NEVER_IN, Outcome, exit_code_of
from hil.core.variables import check_variables
from hil.errors import (
    EXIT_INTERRUPTED,
    BoardRefused,
    BoardUnreachable,
    FarmError,
    UsageError,
)


class SuiteProgress(Protocol):
    """Receiver of a suite's progress."""

    def begin(self, total: int, done: Sequence[CaseRecord]) -> None:
        """Report the number of cases, and the cases that ended before the run was resumed."""

    def end(self, record: CaseRecord) -> None:
        """Report a finished case."""

    def note(self, text: str) -> None:
        """Show a message to the user."""

    def interrupt(self, command: str) -> None:
        """Report an interruption. The command resumes the work on this machine."""


def run_suite(
    request: SuiteRequest,
    *,
    out: Path | None,
    screen: SuiteProgress,
    isolated: Isolated | None = None,
    choices: Sequence[BoardChoice] = (),
    known: TriageList | None = None,
) -> SuiteRun:
    """Run a suite and store results as they arrive.

    Args:
        out: the run's directory; None creates one in ``hil-suites``.
        isolated: a pool of workers to use. The pool outlives the suite unless the suite is aborted. None creates a
            pool.
        choices: the boards; if empty, the boards of the request.
        known: triage of failures. Known failures do not fail the suite.

    Returns:
        The run; ``head.exit_code`` is 5 if no case was selected.

    Raises:
        UsageError: the request is invalid.
        BoardRefused, BoardUnreachable: no board was ever reached, and no case ran.
        KeyboardInterrupt: Ctrl-C; partial results and reports are stored.
    """
    with _open_context(request, isolated) as context:
        job = _SuiteJob(request, context, screen, choices, known)
        return job.start(out)


def resume_suite(
    folder: Path, *, screen: SuiteProgress, isolated: Isolated | None = None, known: TriageList | None = None
) -> SuiteRun:
    """Resume an interrupted suite run. Only cases without a record run.

    Args:
        isolated, known: see :func:`run_suite`.

    Raises:
        UsageError: the directory is not a suite run, or the suite's cases have changed.
        KeyboardInterrupt: Ctrl-C.
    """
    run = SuiteRun.open(folder)
    check_seal(folder, run.head.request)
    try:
        request = SuiteRequest.from_json(run.head.request)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"cannot resume {folder}: missing or invalid request in suite.json ({error})",
            hint="suite.json is damaged or from a different version: start a new run",
        ) from error
    if not request.source:
        raise UsageError(f"cannot resume {folder}: pytest ran this suite", hint="run pytest again")
    with _open_context(request, isolated) as context:
        job = _SuiteJob(request, context, screen, known=known)
        return job.resume(run)


def check_request(request: SuiteRequest) -> None:
    """Raise UsageError for unknown flows or boards, and for settings that the flows or boards do not support."""
    choices = resolve_boards(request, choose_flow(request))
    flow = choose_flow(choose_board_runtime(request, choices))
    check_settings(request.settings, flow, choices)


def select(
    suite: Suite, request: SuiteRequest, flow: Flow, expectations: Expectations, choices: Sequence[BoardChoice]
) -> list[CaseSpec]:
    """Return the cases of a suite that a request selects, in order."""
    found = [spec for spec in suite.cases if request.selects(spec.id)]
    if request.only_expected_failures:
        boards = [(choice.name, choice.config.hw_type) for choice in choices]
        found = [
            spec
            for spec in found
            if any(
                expectations.selects(spec.id, own.name, board, own.runtime, hw_type)
                for own in [spec.flow or flow]
                for board, hw_type in boards
            )
        ]
    return found


@contextlib.contextmanager
def _open_context(request: SuiteRequest, isolated: Isolated | None = None) -> Iterator[RunContext]:
    check_variables()  # reports read a variable after the last case
    with lend_pool(isolated, None if request.on_farm else request.jobs) as workers:
        yield RunContext(Cache(), workers)


class _SuiteJob:
    """Run of a suite on the boards, from the first check to the reports."""

    def __init__(
        self,
        request: SuiteRequest,
        context: RunContext,
        screen: SuiteProgress,
        boards: Sequence[BoardChoice] = (),
        known: TriageList | None = None,
    ) -> None:
        self._context = context
        self._screen = screen
        self._known = known or TriageList()
        asked = choose_flow(request)
        self._choices = use_flow_device(boards, asked) or resolve_boards(request, asked)
        self._request = request = choose_board_runtime(request, self._choices)
        self._flow = choose_flow(request)
        if request.on_farm and request.only_expected_failures and not request.hw_type:
            raise UsageError(
                "--only-expected-failures requires a hardware type: farm boards report their type only after the start",
                hint="add --runtime-hw-type TYPE",
            )
        check_settings(request.settings, self._flow, self._choices)
        make_profile_folders(request.profiles)
        self._suite = open_suite(request, self._flow, context)
        self._flow = choose_common_flow(self._suite.cases, self._flow)
        self._expectations = Expectations.load(self._suite.expected)

    def start(self, out: Path | None) -> SuiteRun:
        suite, flow = self._suite, self._flow
        specs = select(suite, self._request, flow, self._expectations, self._choices)
        folder = out or choose_default_folder(suite.name, flow.name)
        request = self._request.to_json()
        head = SuiteRecord(
            schema=1,
            id=folder.name,
            request=request,
            source=suite.source,
            place=place_of(suite.source),
            suite=suite.name,
            flow=flow.name,
            runtime=flow.runtime,
            boards=[choice.name for choice in self._choices],
            command=_resume_command(folder),
            versions=collect_versions(),
            ids=[spec.id for spec in specs],
            suite_ids=[spec.id for spec in suite.cases],
            models=list_model_files(specs),
            expected=str(suite.expected) if suite.expected else None,
            origin=find_request_origin(request),
            left_out=list(suite.left_out),
            interrupted=False,
            started=time.time(),
            finished=None,
            exit_code=None,
        )
        is_new, is_first = not folder.exists(), not folder.parent.exists()
        run = SuiteRun.create(folder, head)
        try:
            with run.lock_for_writing():
                return self._run_cases(run, specs)
        except (FarmError, BoardRefused, BoardUnreachable):
            # The farm has no suitable boards, or no board was reached: remove the new directory.
            if is_new and all(record.outcome in NEVER_IN for record in run.read_records()):
                shutil.rmtree(folder, ignore_errors=True)
                if is_first:
                    with contextlib.suppress(OSError):  # the directory may contain newer runs by now
                        folder.parent.rmdir()
            raise

    def resume(self, run: SuiteRun) -> SuiteRun:
        by_id = {spec.id: spec for spec in self._suite.cases}
        if missing := [case_id for case_id in run.head.ids if case_id not in by_id]:
            raise UsageError(
                f"cannot resume {run.folder}: the suite {self._suite.name} no longer has the case {missing[0]!r}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
                hint="the models or the onnx package changed: start a new run",
            )
        with run.lock_for_writing():
            was, now = run.head.versions, collect_versions()
            if other := [f"{name} {was[name]} (here: {now.get(name)})" for name in was if was[name] != now.get(name)]:
                text = f"finished cases ran with {', '.join(other)}: start a new run for consistent versions"
                self._screen.note(text)
            specs = [by_id[case_id] for case_id in run.head.ids]
            run.save(interrupted=False, finished=None, exit_code=None, models=list_model_files(specs))
            return self._run_cases(run, specs)

    def _run_cases(self, run: SuiteRun, specs: Sequence[CaseSpec]) -> SuiteRun:
        request, suite, flow, screen = self._request, self._suite, self._flow, self._screen
        if stale := run.drop_stale({spec.id: spec.content for spec in specs}):
            more = f" and {len(stale) - 1} more" if len(stale) > 1 else ""
            screen.note(f"{stale[0]}{more} will run again: the model, an accompanying file or the flow changed")
        done = {record.id: record for record in run.read_records()}
        todo = {spec.id: spec for spec in specs if spec.id not in done}
        screen.begin(len(specs), list(done.values()))
        every = [spec.id for spec in suite.cases]
        remarks = self._expectations.list_remarks(every, flow=flow.name, runtime=flow.runtime)
        left_out = [f"left out: {one}" for one in suite.left_out]
        for line in (*left_out, *self._request.list_remarks(every), *remarks):
            screen.note(line)
        try:
            if todo:
                engine = Engine(request, flow, self._choices, make_suite_runner(self._context), run, say=screen.note)
                # The engine adds the boards that it opens. Keep the boards from before the interruption.
                engine.boards = run.head.board_info
                earlier = run.head.consoles
                for task in engine.run(list(todo.values())):
                    # Cases that reached no board were compiled for this board type.
                    task.hw_type = task.hw_type or engine.hw_type
                    self._write_profiles(task, run)
                    record = record_of(todo[task.case.name], task, suite.name, flow, request, run)
                    record = self._known.judge(self._expectations.judge(record))
                    run.head.consoles = [*earlier, *engine.save_consoles()]
                    run.append(record)
                    screen.end(record)
                run.head.consoles = [*earlier, *engine.save_consoles()]
                if request.on_farm:
                    run.head.boards = sorted(engine.boards)
        except KeyboardInterrupt:
            run.save(interrupted=True, exit_code=EXIT_INTERRUPTED)
            write_reports(run.folder)
            screen.interrupt(_resume_command(run.folder))
            raise
        outcomes = [Outcome(record.outcome) for record in run.read_records()]
        run.save(finished=time.time(), exit_code=exit_code_of(outcomes))
        write_reports(run.folder)
        return run

    def _write_profiles(self, task: Task, run: SuiteRun) -> None:
        """Write the requested profiles of a finished case."""
        case = task.answered
        if folders := {kind: Path(folder) / case.name for kind, folder in self._request.profiles.items()}:
            from hil.controller.analysis.profile.collect import write_profiles

            *_, profiles = write_profiles(case, folders, run_id=f"{run.folder.name} {case.name}", context=self._context)
            for note in [f"{one.folder}: {note}" for one in profiles for note in one.notes]:
                self._screen.note(note)
            if task.wrong is None:
                task.case = replace(case, profiles=profiles)
            else:
                task.wrong = replace(case, profiles=profiles)


def _resume_command(folder: Path) -> str:
    return shlex.join(["hil", "suite", "run", "--resume", str(folder)])


def expect_from(folder: Path, path: Path | None, *, update: bool) -> str:
    """Compare or update a suite's expected failures with a run.

    Args:
        path: the file of expected failures; None is the suite's file.
        update: whether to write the file, which may be missing.

    Returns:
        The changes as a unified diff; "" without changes.

    Raises:
        UsageError: the directory is not a suite run, or the file is not defined, missing or unreadable.
        StorageError: the file cannot be written.
    """
    from hil.controller.workloads.suites.expected_update import update as rewritten

    run = SuiteRun.open(folder)
    if path is not None and not update and not path.exists():
        raise UsageError(f"file {path} not found", hint="--update creates it from the failures of the run")
    own = path or (Path(run.head.expected) if run.head.expected else None)
    if own is None:
        what = f"the suite {run.head.suite} has no expected-failures file"
        raise UsageError(what, hint="add --file FILE")
    return rewritten(own, run.read_records(), ids=run.head.suite_ids, write=update)
