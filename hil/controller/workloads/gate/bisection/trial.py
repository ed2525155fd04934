"""Test a commit for a suspect: build the program from the worktree, and run it on the suspect's board."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hil.controller.analysis.bench.measure import BenchSide
from hil.controller.analysis.detection.sequential import SequentialDecision, pool_noise
from hil.controller.pipeline.board_session import BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.settings.model_settings import for_model
from hil.controller.pipeline.settings.options import Job
from hil.controller.pipeline.stages import choice_of
from hil.controller.records.gate import GateVerdict
from hil.controller.storage.history.programs import combine_digests
from hil.controller.workloads.gate.bisection.confirm import (
    BOARD_ERRORS_MOST,
    FaultRate,
    ProgramAnswer,
    Trial,
    decide_answers,
)
from hil.controller.workloads.gate.bisection.repository import CommitTree
from hil.controller.workloads.gate.plan import GateCase
from hil.controller.workloads.gate.remeasure import Remeasurer
from hil.controller.workloads.gate.stored_cases import StoredRunCases
from hil.core.results import BOARD_OUTCOMES, WRONG, Outcome, Stage
from hil.errors import BoardError, HilError, StorageError, UsageError

# Stages on the host. An error in these stages does not depend on the board.
_HOST_STAGES = (Stage.IMPORT.value, Stage.COMPILE.value, Stage.REFER.value)
# Smallest effect to detect, as a share of the change, so that the decision needs fewer rounds for a large change. A
# commit is then bad if it causes at least a quarter of the change.
_SHARE = 0.5
# Skip a commit after this many failed measurements in a row. Each measurement runs two programs: on a board that spoils
# 30 % of all runs, half of the measurements fail.
_FAILURES_MOST = 12
_EFFECT_MOST = 0.5


@dataclass
class CommitTester:
    """Tests the commits for one suspect.

    Attributes:
        case: the suspect. The history may contain the program that passed before.
        verdict: broken or regressed.
        rate: share of runs that failed because of the board.
        budget_s: maximum time in seconds for measurements in turns, per commit.
        decisions: log ratios of earlier decisions on the board, from which the board's noise is estimated.

    Raises:
        UsageError: the suspect cannot be measured again.
    """

    measurer: Remeasurer
    case: GateCase
    verdict: GateVerdict
    budget_s: float
    rate: FaultRate = field(default_factory=FaultRate)
    decisions: list[Sequence[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        old = self.case.old.program if self.case.old is not None else ""
        # Digest of a program -> result of its comparison with the good program.
        self._decided = {
            old: Trial("good", "same program as the baseline"),
            self.case.new.program: Trial("bad", "same program as the judged measurement"),
        }
        cases = self.measurer.opener.open(self.case.new)
        if not isinstance(cases, StoredRunCases):
            raise UsageError("--bisect does not support suites", hint="measure the model with hil bench")
        self._cases, self._run = cases, cases.run
        self._job: Job = self.measurer.choose_job(cases)
        if self._job.generate is not None:
            raise UsageError("--bisect does not support --generate")

    def test(
        self,
        tree: CommitTree,
        folder: Path,
        *,
        known: Sequence[float],
        keep_round: Callable[[float], None],
    ) -> Trial:
        """Test the commit in the worktree.

        Args:
            folder: directory for logs.
            known: log ratios of rounds that an interrupted gate measured with this commit.
            keep_round: called with the log ratio of every new round.
        """
        try:
            return self._decide(_CommitProgram(self, tree, folder), known, keep_round)
        except StorageError:
            raise
        except UsageError as error:
            # Files are missing or do not match the model of this commit, so skip the commit.
            return Trial("skipped", error.message)

    def _decide(self, program: _CommitProgram, known: Sequence[float], keep_round: Callable[[float], None]) -> Trial:
        run_good = self._run_good if self._good is not None else None
        if self.verdict.verdict == "broken":
            return decide_answers(program.run, run_good, is_searched=self._is_searched, rate=self.rate)
        trial = decide_answers(program.run, None, is_searched=lambda outcome: False, rate=self.rate)
        return self._compare_times(program, known, keep_round) if trial.outcome == "good" else trial

    def begin(self, tree: CommitTree, folder: Path) -> Case:
        """Import the model of the commit with the options of the stored run. Raises UsageError if a file is missing."""
        stored = next((case for case in self._run.record.cases if case.name == self.case.new.case), None)
        if stored is None:
            raise UsageError(f"run {self._run.id} has no case {self.case.new.case}")
        model = tree.find_model(self.case.new.key.model)
        options = for_model(self._job.options(), Path(stored.path))
        if isinstance(options.expected, Mapping):
            raise UsageError("--bisect does not support expected outputs that were passed as Python arrays")
        inputs = options.inputs
        options = replace(
            options,
            inputs=self._run.load_tensors(stored.inputs)
            if isinstance(inputs, Mapping)
            else tuple(map(tree.locate_tensor, inputs)),
            expected=tuple(map(tree.locate_tensor, options.expected)),
            debug_ir=None,
            debug_ir_passes=False,
            recompute=False,
            recompile=1,
            profile=False,
        )
        return self.measurer.runner.begin(model, options, folder, name=self.case.new.case, want_inputs=self.is_compared)

    @property
    def is_compared(self) -> bool:
        """Whether outputs are compared with references, as in the stored run."""
        return self.case.new.outcome != Outcome.SKIP.value

    def call_board(self, call: Callable[[BoardSession], Case]) -> Case | BoardError:
        """Call a function with the board's session. After a board error, reconnect and return the error."""
        choice, faults = choice_of(self._job), self._job.faults
        try:
            case = call(self.measurer.pool.session(choice, runtimes=[self.case.new.key.runtime], faults=faults))
        except BoardError as error:
            self.measurer.pool.reconnect(choice, error, faults=faults)
            return error
        if isinstance(case.error, BoardError):
            self.measurer.pool.reconnect(choice, case.error, faults=faults)
        return case

    @functools.cached_property
    def _good(self) -> Case | None:
        """The program that passed before, or None if the history does not contain it."""
        if self.case.old is None or not self.case.is_stored:
            return None
        return self.measurer.restore_entry(self._cases, self.case.new, self.case.old, self._job)

    def _run_good(self) -> ProgramAnswer:
        good = self._good
        assert good is not None
        return make_answer(self.call_board(lambda session: self.measurer.run_once(good, session)))

    def _is_searched(self, outcome: Outcome) -> bool:
        judged = self.verdict.new.again or self.verdict.new.outcome
        return outcome.value == judged or (outcome in WRONG and judged in {one.value for one in WRONG})

    def _compare_times(
        self, program: _CommitProgram, known: Sequence[float], keep_round: Callable[[float], None]
    ) -> Trial:
        """Measure the commit's program and the good program in turns, unless the result is known."""
        if program.digest and (decided := self._decided.get(program.digest)) is not None:
            return decided
        trial = self._measure_times(program, known, keep_round)
        if trial.outcome != "skipped":
            self._decided[program.digest] = replace(
                trial, reason=f"same program as another tested commit: {trial.reason}"
            )
        return trial

    def _measure_times(
        self, program: _CommitProgram, known: Sequence[float], keep_round: Callable[[float], None]
    ) -> Trial:
        change = (self.verdict.ratio or 1.0) - 1
        effect = min(max(self.measurer.min_effect, _SHARE * change), _EFFECT_MOST)
        decision = SequentialDecision(effect, direction="slower", noise=pool_noise(self.decisions))
        for log_ratio in known:
            decision.add(log_ratio)
        until, failures = time.monotonic() + self.budget_s, 0
        while decision.verdict == "undecided":
            rounds = len(decision.log_ratios)
            error = self._add_rounds(program, decision, until, keep_round)
            if error is None:
                break
            self.rate.add(faults=1)
            failures = 1 if len(decision.log_ratios) > rounds else failures + 1
            most = BOARD_ERRORS_MOST if isinstance(error, BoardError) else _FAILURES_MOST
            if failures >= most:
                return Trial("skipped", f"{failures} errors in a row: {error.message}", isinstance(error, BoardError))
        self.decisions.append(decision.log_ratios)
        text = f"{100 * (decision.decision.ratio - 1):+.1f} % after {len(decision.log_ratios)} rounds"
        if decision.verdict == "undecided":
            return Trial("skipped", f"{text}; undecided")
        return Trial("bad" if decision.verdict == "regressed" else "good", text)

    def _add_rounds(
        self,
        program: _CommitProgram,
        decision: SequentialDecision,
        until: float,
        keep_round: Callable[[float], None],
    ) -> HilError | None:
        """Add rounds until the decision is clear or the time is over.

        Return the error that ended the measurement, or None.
        """
        good = self._good
        if good is None:
            return UsageError("the program of the baseline is not in the history")

        def measure(session: BoardSession) -> Case:
            cases = [self.measurer.run_once(good, session)]
            if cases[0].error is None:
                cases.append(program.run_case(session))
            if cases[-1].error is not None:
                return cases[-1]
            sides = [BenchSide(label, case, session.board) for label, case in zip("AB", cases, strict=True)]
            try:
                self.measurer.measure_turns(self.case.new.case, sides, decision, until=until, keep_round=keep_round)
            except BoardError:
                raise
            except HilError as error:
                return cases[-1].ended(error, Stage.RUN)
            return cases[-1]

        found = self.call_board(measure)
        return found if isinstance(found, BoardError) else found.error


class _CommitProgram:
    """Program of a commit. The model is imported and compiled at the first run."""

    def __init__(self, tester: CommitTester, tree: CommitTree, folder: Path) -> None:
        self._tester = tester
        self._tree = tree
        self._folder = folder
        self._compiled: Case | None = None

    @property
    def digest(self) -> str:
        """Digest of the compiled program as in a history, or "" before the first run."""
        artifact = self._compiled.artifact if self._compiled is not None else None
        return combine_digests(artifact.digests) if artifact is not None else ""

    def run(self) -> ProgramAnswer:
        """Run the program once, and compare its outputs."""
        return make_answer(self._tester.call_board(self.run_case))

    def run_case(self, session: BoardSession) -> Case:
        """Run the program once, and compare its outputs."""
        tester = self._tester
        if self._compiled is None:
            begun = tester.begin(self._tree, self._folder)
            self._compiled = tester.measurer.runner.compile(begun, session.board.config)
        case = tester.measurer.runner.execute(self._compiled, session)
        if case.outcome:
            return case
        if not tester.is_compared:
            return replace(case, outcome=Outcome.SKIP, reason="output not compared")
        return tester.measurer.runner.judge(case)


def make_answer(found: Case | BoardError) -> ProgramAnswer:
    """Return the result of a run."""
    if isinstance(found, BoardError):
        outcome = Outcome(found.outcome or Outcome.BOARD_LOST)
        return ProgramAnswer(outcome if outcome in BOARD_OUTCOMES else Outcome.BOARD_LOST, found.message)
    assert found.outcome is not None
    return ProgramAnswer(found.outcome, found.reason, is_from_host=found.stage in _HOST_STAGES)
