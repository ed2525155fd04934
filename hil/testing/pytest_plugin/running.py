"""Run the stages of a test's case when fixtures request them, and determine the test's outcome."""

from __future__ import annotations

import contextlib
import hashlib
import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from hil import errors
from hil.compare.verdict import Verdict, compare
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.verdicts.accepting import load_rules
from hil.controller.records.suite import CaseRecord
from hil.controller.storage.runs import convert_write_errors, make_safe_name
from hil.controller.storage.screen.web_link import make_web_link
from hil.controller.workloads.suites.outcome import list_directories, record_of
from hil.controller.workloads.suites.preparing import begin_case
from hil.controller.workloads.suites.store import SuiteDirectory
from hil.controller.workloads.suites.tasks import Task, choose_next_confirmation, drop_results, make_attempt
from hil.core.board_config import BoardConfig
from hil.core.results import Artifact, Model, Outcome, RunResult, Stage
from hil.core.tensors import Array
from hil.core.text import escape_controls
from hil.testing.pytest_plugin import failure_text
from hil.testing.pytest_plugin.options import profile_folders, rename_for_pytest, repeat_command
from hil.testing.pytest_plugin.session import HilCase, ModelCase, PluginSession

RUN = pytest.StashKey["CaseRun"]()
_MAX_NAME = 150


class CaseRun:
    """A case in a test. A failed stage ends the test: an error in a fixture, or a failure in the test function."""

    def __init__(self, plugin: PluginSession, hil_case: HilCase, item: pytest.Item) -> None:
        self.plugin = plugin
        self.hil_case = hil_case
        self.flow = hil_case.target.flow
        self.lender = hil_case.target.lender
        self.record: CaseRecord | None = None
        self._item = item
        self._case: Case | None = None
        self._early: Case | None = None
        self._executed: RunResult | None = None
        self._board = ""
        self._hw_type = hil_case.hw_type
        self._work = Path(tempfile.mkdtemp(prefix="case-", dir=plugin.work))
        self._store = SuiteDirectory(hil_case.out)
        # Task that reruns the case to confirm a mismatch, or None.
        self._confirmation: Task | None = None

    @property
    def config(self) -> BoardConfig | None:
        """The board config to compile for; None if only the board knows the target."""
        return self.lender.choose_config(self.flow.runtime)

    @property
    def case(self) -> Case:
        """The case with its imported model."""
        if self._case is None:
            plugin, hil_case = self.plugin, self.hil_case
            if isinstance(self._item, ModelCase) and (
                task := plugin.get_prefetched(hil_case, self._list_upcoming_cases)
            ):
                case, self._early = task.case, task.early
            else:
                case = begin_case(hil_case.spec, self.flow, plugin.runner, self._work, hil_case.target.request.settings)
            # Several tests may use the same case.
            self._case = replace(case, name=_make_folder_name(self._item, self.hil_case))
            shutil.rmtree(self._store.get_case_folder(self._case.name), ignore_errors=True)
            self._end_if_failed()
        return self._case

    def get_model(self) -> Model:
        """Return the imported model."""
        assert self.case.model is not None
        return self.case.model

    def compile(self) -> Artifact:
        """Compile for the kind of board, or for the borrowed board if only the board knows the target."""
        config = self.config
        if config is None:
            with self.borrow_board() as session:
                config = session.board.config
        if self.case.artifact is None:
            self._case = self.plugin.runner.compile(self.case, config)
            self._end_if_failed()
        assert self.case.artifact is not None
        return self.case.artifact

    @contextlib.contextmanager
    def borrow_board(self) -> Iterator[BoardSession]:
        """Borrow a board."""
        with contextlib.ExitStack() as stack:
            refused: errors.HilError | None = None
            try:
                self.plugin.make_room(self.lender)
                session = stack.enter_context(self.lender.borrow_board())
            except errors.UsageError as error:
                # Here, invalid usage means that the board does not support the flow.
                refused = error.as_kind(errors.BoardRefused)
            except errors.HilError as error:
                refused = error
            if refused is not None:
                self._case = self.case.with_error(refused, Stage.PUSH)
                self._judge_outcome()
            # For a board of a farm, the hardware type is known only now.
            self._board, self._hw_type = session.board.name, session.board.config.hw_type
            yield session

    def run(self, artifact: Artifact, inputs: Mapping[str, Array]) -> RunResult:
        """Push, load and run the program."""
        self._case = replace(self.case, artifact=artifact)
        self._take_inputs(inputs)
        with self.borrow_board() as session:
            case = self.plugin.runner.execute(self.case, session)
            if isinstance(case.error, errors.BoardError):
                self.lender.reconnect(case.error)
                case = replace(case, reason=case.error.message)
            self._case = case
        self._end_if_failed()
        assert case.result is not None
        self._executed = case.result
        return case.result

    def run_reference(self, inputs: Mapping[str, Array]) -> RunResult:
        """Compute the reference."""
        self._take_inputs(inputs)
        runner = self.plugin.runner
        early = self._early if self._early is not None else runner.refer_early(self.case)
        if early is not None:
            self._case = runner.add_references(self.case, early)
        self._end_if_failed()
        if not self.case.references:
            raise pytest.UsageError("hil_reference requires hil_result: only the board knows the inputs of this model")
        return self.case.references[0]

    def compare_outputs(self, result: RunResult, reference: RunResult) -> Verdict:
        """Compare the board's result with the reference. The user's fixtures may replace both arguments."""
        case = replace(self.case, result=result)
        if not case.references or case.references[0] is not reference:
            case = replace(case, references=(reference,))
        self._case = self.plugin.runner.judge(case)
        self._end_if_failed()
        if self._case.outcome is Outcome.FAIL and result is self._executed:
            self._confirm_mismatch()
        # With several references, return the verdict that decides the outcome.
        verdicts = self._case.verdicts
        return next((one for one in verdicts if one.outcome is self._case.outcome), verdicts[0])

    def _confirm_mismatch(self) -> None:
        """Rerun a mismatch on the same and other boards, as `hil suite run --confirm` does."""
        task = Task(self.case, wrong=self.case, wrong_on=self._board)
        while boards := choose_next_confirmation(task, self.plugin.request.confirm, list(self.lender.choices)):
            try:
                with self.lender.borrow_board(boards) as session:
                    task.board = session.board.name
                    case = self.plugin.runner.execute(drop_results(self.case), session)
                    if isinstance(case.error, errors.BoardError):
                        self.lender.reconnect(case.error)
                        break
            except errors.HilError as error:
                print(rename_for_pytest(f"hil: cannot confirm the mismatch: {error}"))
                break
            task.case = case if case.outcome else self.plugin.runner.judge(case)
            task.attempts.append(make_attempt("confirm", task))
            task.confirmations.append((task.board, task.case.outcome is not Outcome.PASS))
        self._confirmation = task if task.confirmations else None

    def check(self, result: RunResult, reference: RunResult) -> Verdict:
        """Compare and end the case: the test fails if outputs differ, or if an expected failure passed."""
        verdict = self.compare_outputs(result, reference)
        self._judge_outcome()
        return verdict

    def check_these(
        self, actual: RunResult, reference: RunResult, *, rtol: float | None, atol: float | None
    ) -> Verdict:
        """Compare two results and fail the test if they differ."""
        try:
            settings = self.plugin.request.settings
            # If the test gives a tolerance, ignore criteria from the command line.
            accept = load_rules(settings.accept) if rtol is None and atol is None else ()
            blind, flush = settings.allow_blind, settings.allow_flush
            verdict = compare(
                actual, reference, rtol=rtol, atol=atol, allow_blind=blind, allow_flush=flush, accept=accept
            )
        except errors.UsageError as error:
            pytest.fail(rename_for_pytest(str(error)), pytrace=False)
        if not verdict:
            wrong = replace(
                self.case, result=actual, references=(reference,), verdicts=(verdict,), outcome=verdict.outcome
            )
            self.record = self._make_record(wrong)
            pytest.fail(failure_text.describe_mismatch([verdict], verdict.reason), pytrace=False)
        return verdict

    def _take_inputs(self, inputs: Mapping[str, Array]) -> None:
        """Use these inputs.

        If they are empty, only the board knows the model's inputs, and a later stage creates them.
        """
        if inputs and inputs is not self.case.inputs:
            self._case, self._early = replace(self.case, inputs=dict(inputs)), None

    def _list_upcoming_cases(self) -> list[HilCase]:
        """Return the cases of this test and of the following tests."""
        items = self._item.session.items
        return [item.case for item in items[items.index(self._item) :] if isinstance(item, ModelCase)]

    def describe(self) -> str:
        """Return the commands and paths for the report of a failure."""
        if self._case is None:
            return failure_text.repeat(self._repeat_command)
        record = self.record or self._make_record(self._case)
        out = self.hil_case.out
        # Only --hil-out stores a session.
        link = make_web_link(out, record.id, parts=2) if self.plugin.config.getoption("hil_out") else ""
        return failure_text.format_commands(record, self.plugin.config.invocation_params.dir, out, link)

    def end(self) -> None:
        """End the test: add outcome and times to pytest's report."""
        if self._case is not None and self._case.outcome:
            self._write_profiles(self._case)
            record = self.record or self._make_record(self.case)
            self.record = record.replace(directories=list_directories(self.case, self._store))
            self._item.user_properties.extend(failure_text.list_properties(self.record))
            shutil.rmtree(self._case.folder, ignore_errors=True)
        shutil.rmtree(self._work, ignore_errors=True)

    def _write_profiles(self, case: Case) -> None:
        name = f"{case.name}-{make_safe_name(self.hil_case.target.name)}"
        folders = profile_folders(self.plugin.config, name)
        if not folders:
            return
        from hil.controller.analysis.profile.collect import write_profiles

        try:
            *_, profiles = write_profiles(case, folders, run_id=name, context=self.plugin.context)
            self._case = replace(case, profiles=profiles)
            for profile in profiles:
                for note in profile.notes:
                    print(escape_controls(f"hil: {profile.folder}: {note}"))
        except errors.StorageError as error:
            print(rename_for_pytest(f"hil: {error}"))

    def _end_if_failed(self) -> None:
        """End the test if the last stage failed."""
        if self._case is not None and self._case.error is not None:
            self._judge_outcome()

    def _judge_outcome(self) -> None:
        """Judge the ended case. Returns only if the test passes."""
        expected = self.hil_case.folder.expectations.judge(self._make_record(self.case))
        record = self.record = self.plugin.known.judge(expected)
        outcome = Outcome(record.outcome)
        if outcome is Outcome.PASS:
            dispute = f"the references disagree: {record.disagreement}" if record.disagreement else ""
            for note in filter(None, (record.elsewhere, dispute)):
                print(escape_controls(f"hil: {note}"))
            return
        if outcome is Outcome.XFAIL:
            pytest.xfail(failure_text.explain_expected(record))
        if outcome is Outcome.SKIP:
            pytest.skip(escape_controls(record.message))
        pytest.fail(failure_text.describe_failure(self.case, record, again=self._is_already_reported()), pytrace=False)

    def _is_already_reported(self) -> bool:
        """Return True if another test already reported the same board error: a lost board fails many tests."""
        error = self.case.error
        if not isinstance(error, errors.BoardError):
            return False
        # Ignore detail and hint, which vary between errors.
        reported = (error.board or self._board, error.message)
        before = reported in self.plugin.reported
        self.plugin.reported.add(reported)
        return before

    def _make_record(self, case: Case) -> CaseRecord:
        """Return the record of a case. Store the case's files if it did not pass, or if --hil-keep-all is set."""
        plugin = self.plugin
        task = Task(case, board=self._board, hw_type=self._hw_type)
        if self._confirmation is not None:
            task.attempts, task.confirmations = self._confirmation.attempts, self._confirmation.confirmations
            task.wrong, task.wrong_on = case, self._board
        request = self.hil_case.request
        common = (self.hil_case.spec, task, self.hil_case.folder.path.name, self.flow, request)
        try:
            if case.outcome is not Outcome.PASS or request.keep_all:
                plugin.make_out(self.hil_case.out)
                logs = self._store.get_case_folder(case.name) / "logs"
                with convert_write_errors(logs):
                    shutil.copytree(case.folder / "logs", logs, dirs_exist_ok=True)
            record, folder = record_of(*common, self._store), str(self._store.get_case_folder(case.name))
            # Replace the case's directory in the hint by the directory where the files are stored.
            hint = rename_for_pytest(record.hint.replace(str(case.folder), folder))
            return record.replace(
                repeat=self._repeat_command, folder=folder, hint=hint, message=rename_for_pytest(record.message)
            )
        except errors.StorageError as error:
            print(rename_for_pytest(f"hil: {error}"))
            record = record_of(*common, SuiteDirectory(self._work))
            return record.replace(repeat=self._repeat_command, diff="", folder="")

    @property
    def _repeat_command(self) -> str:
        return shlex.join(repeat_command(self.plugin.config, self._item.nodeid))


def _make_folder_name(item: pytest.Item, case: HilCase) -> str:
    """Return the directory name of a test's case: the case's id, with the test's name as a prefix for user tests."""
    own = "" if isinstance(item, ModelCase) else item.nodeid.partition("[")[0].replace("::", ".") + "."
    name = re.sub(r"[^\w.+-]", "_", own + case.spec.id)
    if len(name) <= _MAX_NAME:
        return name
    return f"{name[:_MAX_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
