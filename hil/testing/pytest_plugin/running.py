"""A test's case on its way: each stage when a fixture asks for it, and what the test then comes to."""

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
from hil.controller.pipeline.accepting import load_rules
from hil.controller.pipeline.board_pool import BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.storage.runs import safe_name, storing
from hil.controller.workloads.suites.outcome import left_by, record_of
from hil.controller.workloads.suites.preparing import begin_case
from hil.controller.workloads.suites.store import CaseRecord, SuiteRun
from hil.controller.workloads.suites.tasks import Task
from hil.core.board_config import BoardConfig
from hil.core.results import Artifact, Model, Outcome, RunResult, Stage
from hil.core.tensors import Array
from hil.core.text import visible
from hil.testing.pytest_plugin import failure_text
from hil.testing.pytest_plugin.options import profile_folders, renamed, repeat_command
from hil.testing.pytest_plugin.session import HilCase, ModelCase, PluginSession

RUN = pytest.StashKey["CaseRun"]()
_NAME_MOST = 150


class CaseRun:
    """One case in one test. What cannot go on ends the test: an error in a fixture, a failure in the test itself."""

    def __init__(self, plugin: PluginSession, hil_case: HilCase, item: pytest.Item) -> None:
        self.plugin = plugin
        self.hil_case = hil_case
        self.flow = hil_case.target.flow
        self.lender = hil_case.target.lender
        self.record: CaseRecord | None = None
        self._item = item
        self._case: Case | None = None
        self._early: Case | None = None
        self._board = ""
        self._hw_type = hil_case.hw_type
        self._work = Path(tempfile.mkdtemp(prefix="case-", dir=plugin.work))
        self._store = SuiteRun(hil_case.out, {})

    @property
    def config(self) -> BoardConfig | None:
        """What the program is compiled for; None where only a board tells."""
        return self.lender.config_for(self.flow.runtime)

    @property
    def case(self) -> Case:
        """The case, its model read."""
        if self._case is None:
            plugin, hil_case = self.plugin, self.hil_case
            if isinstance(self._item, ModelCase) and (task := plugin.prefetched(hil_case, self._coming)):
                case, self._early = task.case, task.early
            else:
                case = begin_case(hil_case.spec, self.flow, plugin.runner, self._work, hil_case.target.request.settings)
            # Two tests may have the same case.
            self._case = replace(case, name=_folder_name(self._item, self.hil_case))
            shutil.rmtree(self._store.case_folder(self._case.name), ignore_errors=True)
            self._go_on()
        return self._case

    def model(self) -> Model:
        """Import."""
        assert self.case.model is not None
        return self.case.model

    def compile(self) -> Artifact:
        """Compile: for the kind of board, or for the one that was borrowed where only it can tell what it is."""
        config = self.config
        if config is None:
            with self.borrow() as session:
                config = session.board.config
        if self.case.artifact is None:
            self._case = self.plugin.runner.compile(self.case, config)
            self._go_on()
        assert self.case.artifact is not None
        return self.case.artifact

    @contextlib.contextmanager
    def borrow(self) -> Iterator[BoardSession]:
        """Have a board."""
        with contextlib.ExitStack() as stack:
            refused: errors.HilError | None = None
            try:
                self.plugin.make_room(self.lender)
                session = stack.enter_context(self.lender.borrow())
            except errors.UsageError as error:
                # Bad usage here is a board that cannot be used that way.
                refused = errors.BoardRefused(error.message, hint=error.hint, detail=error.detail, board=error.board)
            except errors.HilError as error:
                refused = error
            if refused is not None:
                self._case = self.case.ended(refused, Stage.PUSH)
                self._end()
            # Of a board that a farm lends the kind is known only now.
            self._board, self._hw_type = session.board.name, session.board.config.hw_type
            yield session

    def run(self, artifact: Artifact, inputs: Mapping[str, Array]) -> RunResult:
        """Push, load and run."""
        self._case = replace(self.case, artifact=artifact)
        self._take_inputs(inputs)
        with self.borrow() as session:
            case = self.plugin.runner.execute(self.case, session)
            if isinstance(case.error, errors.BoardError):
                self.lender.lost(case.error)
                case = replace(case, reason=case.error.message)
            self._case = case
        self._go_on()
        assert case.result is not None
        return case.result

    def run_reference(self, inputs: Mapping[str, Array]) -> RunResult:
        """Ask the reference."""
        self._take_inputs(inputs)
        runner = self.plugin.runner
        early = self._early if self._early is not None else runner.refer_early(self.case)
        if early is not None:
            self._case = runner.with_references(self.case, early)
        self._go_on()
        if not self.case.references:
            raise pytest.UsageError("a model whose inputs only the board knows has a reference after hil_result only")
        return self.case.references[0]

    def verdict(self, result: RunResult, reference: RunResult) -> Verdict:
        """Compare what the board gave with the reference: or what the user's own fixtures gave in their place."""
        case = replace(self.case, result=result)
        if not case.references or case.references[0] is not reference:
            case = replace(case, references=(reference,))
        self._case = self.plugin.runner.judge(case)
        self._go_on()
        # Of several references the one that decided.
        verdicts = self._case.verdicts
        return next((one for one in verdicts if one.outcome is self._case.outcome), verdicts[0])

    def check(self, result: RunResult, reference: RunResult) -> Verdict:
        """The end of a case that is a test of its own: it fails where the outputs differ, or an error was expected."""
        verdict = self.verdict(result, reference)
        self._end()
        return verdict

    def check_these(
        self, actual: RunResult, reference: RunResult, *, rtol: float | None, atol: float | None
    ) -> Verdict:
        """Compare two results; the test fails where they differ."""
        try:
            settings = self.plugin.request.settings
            # A tolerance of the test's own goes before the criteria of the command line.
            accept = load_rules(settings.accept) if rtol is None and atol is None else ()
            blind, flush = settings.allow_blind, settings.allow_flush
            verdict = compare(
                actual, reference, rtol=rtol, atol=atol, allow_blind=blind, allow_flush=flush, accept=accept
            )
        except errors.UsageError as error:
            pytest.fail(renamed(str(error)), pytrace=False)
        if not verdict:
            wrong = replace(
                self.case, result=actual, references=(reference,), verdicts=(verdict,), outcome=verdict.outcome
            )
            self.record = self._recorded(wrong)
            pytest.fail(failure_text.mismatch([verdict], verdict.reason), pytrace=False)
        return verdict

    def _take_inputs(self, inputs: Mapping[str, Array]) -> None:
        """Use these inputs. A model whose inputs only the board knows gets them there."""
        if inputs and inputs is not self.case.inputs:
            self._case, self._early = replace(self.case, inputs=dict(inputs)), None

    def _coming(self) -> list[HilCase]:
        """The cases of this test and of those after it."""
        items = self._item.session.items
        return [item.case for item in items[items.index(self._item) :] if isinstance(item, ModelCase)]

    def describe(self) -> str:
        """For the report of a failure: what repeats it, what shows the difference, where things were stored."""
        if self._case is None:
            return failure_text.repeat(self._repeat)
        record = self.record or self._recorded(self._case)
        return failure_text.commands(record, self.plugin.config.invocation_params.dir, self.hil_case.out)

    def end(self) -> None:
        """The test is over: its outcome and times go to whoever reads reports."""
        if self._case is not None and self._case.outcome:
            self._write_profiles(self._case)
            self.record = replace(self.record or self._recorded(self.case), left=left_by(self.case, self._store))
            self._item.user_properties.extend(failure_text.properties(self.record))
            shutil.rmtree(self._case.folder, ignore_errors=True)
        shutil.rmtree(self._work, ignore_errors=True)

    def _write_profiles(self, case: Case) -> None:
        name = f"{case.name}-{safe_name(self.hil_case.target.name)}"
        folders = profile_folders(self.plugin.config, name)
        if not folders:
            return
        from hil.controller.analysis.profile.collect import write_profiles

        try:
            *_, profiles = write_profiles(case, folders, run_id=name, context=self.plugin.context)
            self._case = replace(case, profiles=profiles)
            for profile in profiles:
                for note in profile["notes"]:
                    print(visible(f"hil: {profile['folder']}: {note}"))
        except errors.StorageError as error:
            print(visible(f"hil: {error}"))

    def _go_on(self) -> None:
        """Go on with the next stage, unless the last one ended in an error: that ends the test."""
        if self._case is not None and self._case.error is not None:
            self._end()

    def _end(self) -> None:
        """Judge the case that has ended. Returns where the test passes."""
        record = self.record = self.hil_case.folder.expectations.judge(self._recorded(self.case))
        outcome = Outcome(record.outcome)
        if outcome is Outcome.PASS:
            dispute = f"the references disagree: {record.disagreement}" if record.disagreement else ""
            for note in filter(None, (record.elsewhere, dispute)):
                print(visible(f"hil: {note}"))
            return
        if outcome is Outcome.XFAIL:
            pytest.xfail(failure_text.expected(record))
        if outcome is Outcome.SKIP:
            pytest.skip(visible(record.message))
        pytest.fail(failure_text.failure(self.case, record, again=self._told_before()), pytrace=False)

    def _told_before(self) -> bool:
        """Whether the case ended as another one did, for a reason that is the board's: one that is gone fails many."""
        error = self.case.error
        if not isinstance(error, errors.BoardError):
            return False
        # The link's own words, the detail, differ from time to time, and so does what may be said of how to go on.
        reported = (error.board or self._board, error.message)
        before = reported in self.plugin.reported
        self.plugin.reported.add(reported)
        return before

    def _recorded(self, case: Case) -> CaseRecord:
        """The record of a case as it is; what it leaves behind is stored unless it passed."""
        plugin = self.plugin
        task = Task(case, board=self._board, hw_type=self._hw_type)
        request = self.hil_case.request
        common = (self.hil_case.spec, task, self.hil_case.folder.path.name, self.flow, request)
        try:
            if case.outcome is not Outcome.PASS:
                plugin.make_out(self.hil_case.out)
                logs = self._store.case_folder(case.name) / "logs"
                with storing(logs):
                    shutil.copytree(case.folder / "logs", logs, dirs_exist_ok=True)
            record, folder = record_of(*common, self._store), str(self._store.case_folder(case.name))
            # What a hint names of the case's files is where those are stored.
            hint = renamed(record.hint.replace(str(case.folder), folder))
            return replace(record, repeat=self._repeat, folder=folder, hint=hint, message=renamed(record.message))
        except errors.StorageError as error:
            print(visible(f"hil: {error}"))
            return replace(record_of(*common, SuiteRun(self._work, {})), repeat=self._repeat, diff="", folder="")

    @property
    def _repeat(self) -> str:
        return shlex.join(repeat_command(self.plugin.config, self._item.nodeid))


def _folder_name(item: pytest.Item, case: HilCase) -> str:
    """The folder of a test's case: the case's id, and before it the name of the test where it is the user's own."""
    own = "" if isinstance(item, ModelCase) else item.nodeid.partition("[")[0].replace("::", ".") + "."
    name = re.sub(r"[^\w.+-]", "_", own + case.spec.id)
    if len(name) <= _NAME_MOST:
        return name
    return f"{name[:_NAME_MOST]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
