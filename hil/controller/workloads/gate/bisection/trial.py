"""Test a candidate for a suspect: run its program on the suspect's board, and compare outputs or times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hil.controller.analysis.bench.measure import BenchSide
from hil.controller.analysis.detection.sequential import SequentialDecision, pool_noise
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.instructions import MIN_EFFECT, describe_change
from hil.controller.records.decisions.gate import GateCandidate
from hil.controller.records.measurements.instructions import InstructionComparison
from hil.controller.storage.history.programs import combine_digests
from hil.controller.workloads.gate.bisection.axes.axis import BisectAxis
from hil.controller.workloads.gate.bisection.confirm import (
    MAX_BOARD_ERRORS,
    FaultRate,
    ProgramAnswer,
    Trial,
    decide_answers,
)
from hil.controller.workloads.gate.bisection.suspect import SuspectRun
from hil.controller.workloads.gate.comparing.instruction_counts import count_again
from hil.controller.workloads.gate.remeasure import Remeasurer
from hil.core.results import BOARD_OUTCOMES, WRONG, Outcome, Stage
from hil.errors import BoardError, HilError, StorageError, UsageError

# Stages on the host. An error in these stages does not depend on the board.
_HOST_STAGES = (Stage.IMPORT.value, Stage.COMPILE.value, Stage.REFER.value)
# Smallest effect to detect, as a share of the change, so that the decision needs fewer rounds for a large change. A
# candidate is then bad if it causes at least a quarter of the change.
_SHARE = 0.5
# Skip a candidate after this many failed measurements in a row. Each measurement runs two programs: on a board that
# spoils 30 % of all runs, half of the measurements fail.
_MAX_FAILURES = 12
_MAX_EFFECT = 0.5


@dataclass
class CandidateTester:
    """Tests candidates for one suspect.

    Attributes:
        budget_s: maximum time in seconds for measurements in turns, per candidate.
        rate: share of runs that failed because of the board.
        decisions: log ratios of earlier decisions on the board, from which the board's noise is estimated.
    """

    measurer: Remeasurer
    suspect: SuspectRun
    axis: BisectAxis
    budget_s: float
    rate: FaultRate = field(default_factory=FaultRate)
    decisions: list[Sequence[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        case = self.suspect.case
        # Digest of a program -> result of its comparison with the good program.
        self._decided = {
            case.old.program if case.old is not None else "": Trial("good", "same program as the baseline"),
            case.new.program: Trial("bad", "same program as the judged measurement"),
        }

    def test(
        self,
        candidate: GateCandidate,
        folder: Path,
        *,
        known: Sequence[float],
        keep_round: Callable[[float], None],
    ) -> Trial:
        """Test the current candidate of the axis.

        Args:
            folder: directory for logs.
            known: log ratios of rounds that an interrupted gate measured with this candidate.
            keep_round: called with the log ratio of every new round.
        """
        try:
            return self._decide(_CandidateProgram(self, candidate, folder), known, keep_round)
        except StorageError:
            raise
        except UsageError as error:
            # Files are missing or do not match the model of this candidate, so skip the candidate.
            return Trial("skipped", error.message)

    def _decide(self, program: _CandidateProgram, known: Sequence[float], keep_round: Callable[[float], None]) -> Trial:
        if self.suspect.is_broken:
            run_good = None if self.axis.changes_board or self.suspect.good is None else self._run_good
            return decide_answers(program.run, run_good, is_searched=self._is_searched, rate=self.rate)
        trial = decide_answers(program.run, None, is_searched=lambda outcome: False, rate=self.rate)
        if trial.outcome != "good":
            return trial
        if self._is_only_counted:
            return self._compare_programs(program, lambda: self._count(program))
        return self._compare_programs(program, lambda: self._measure_times(program, known, keep_round))

    def _run_good(self) -> ProgramAnswer:
        good = self.suspect.good
        assert good is not None
        return make_answer(self.suspect.call_board(lambda session: self.measurer.run_once(good, session)))

    def _is_searched(self, outcome: Outcome) -> bool:
        new = self.suspect.verdict.new
        judged = new.again or new.outcome
        return outcome.value == judged or (outcome in WRONG and judged in {one.value for one in WRONG})

    @property
    def _is_only_counted(self) -> bool:
        """Whether the judged program executes more instructions, but is not slower."""
        verdict = self.suspect.verdict
        is_slower = verdict.interval is not None and verdict.interval.low > 1
        return verdict.instructions is not None and verdict.instructions.verdict == "more" and not is_slower

    def _compare_programs(self, program: _CandidateProgram, compare: Callable[[], Trial]) -> Trial:
        """Compare the candidate's program with the good program, unless the result is known."""
        if program.digest and (decided := self._decided.get(program.digest)) is not None:
            return decided
        trial = compare()
        if trial.outcome != "skipped":
            self._decided[program.digest] = replace(
                trial, reason=f"same program as another tested {self.axis.name}: {trial.reason}"
            )
        return trial

    def _count(self, program: _CandidateProgram) -> Trial:
        """Count the instructions of both programs. A candidate is bad if it causes at least half of the change."""
        assert self.suspect.verdict.instructions is not None
        limit = max(MIN_EFFECT, _SHARE * (self.suspect.verdict.instructions.ratio - 1))
        found = self._count_once(program)
        for _ in range(MAX_BOARD_ERRORS - 1):
            if isinstance(found, BoardError):
                found = self._count_once(program)
        if isinstance(found, HilError):
            return Trial("skipped", found.message, isinstance(found, BoardError))
        if found.verdict == "unclear" and found.ratio + found.spread > 1 + limit:
            return Trial("skipped", found.reason)
        return Trial("bad" if found.ratio > 1 + limit else "good", describe_change(found))

    def _count_once(self, program: _CandidateProgram) -> InstructionComparison | HilError:
        compared: list[InstructionComparison] = []

        def count(session: BoardSession, cases: Sequence[Case]) -> None:
            compared.append(count_again(cases, session.board))

        error = self._run_both(program, count)
        return error if error is not None else compared[0]

    def _measure_times(
        self, program: _CandidateProgram, known: Sequence[float], keep_round: Callable[[float], None]
    ) -> Trial:
        change = (self.suspect.verdict.ratio or 1.0) - 1
        effect = min(max(self.measurer.min_effect, _SHARE * change), _MAX_EFFECT)
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
            most = MAX_BOARD_ERRORS if isinstance(error, BoardError) else _MAX_FAILURES
            if failures >= most:
                return Trial("skipped", f"{failures} errors in a row: {error.message}", isinstance(error, BoardError))
        self.decisions.append(decision.log_ratios)
        text = f"{100 * (decision.decision.ratio - 1):+.1f} % after {len(decision.log_ratios)} rounds"
        if decision.verdict == "undecided":
            return Trial("skipped", f"{text}; undecided")
        return Trial("bad" if decision.verdict == "regressed" else "good", text)

    def _add_rounds(
        self,
        program: _CandidateProgram,
        decision: SequentialDecision,
        until: float,
        keep_round: Callable[[float], None],
    ) -> HilError | None:
        """Add rounds until the decision is clear or the time is over.

        Return the error that ended the measurement, or None.
        """

        def measure(session: BoardSession, cases: Sequence[Case]) -> None:
            sides = [BenchSide(label, case, session.board) for label, case in zip("AB", cases, strict=True)]
            name = self.suspect.case.new.case
            self.measurer.measure_turns(name, sides, decision, until=until, keep_round=keep_round)

        return self._run_both(program, measure)

    def _run_both(
        self, program: _CandidateProgram, measure: Callable[[BoardSession, Sequence[Case]], None]
    ) -> HilError | None:
        """Run the good program and the candidate's program once, then measure both. Return the error, or None."""
        good = self.suspect.good
        if good is None:
            return UsageError("the program of the baseline is not in the history")

        def run(session: BoardSession) -> Case:
            cases = [self.measurer.run_once(good, session)]
            if cases[0].error is None:
                cases.append(program.run_case(session))
            if cases[-1].error is not None:
                return cases[-1]
            try:
                measure(session, cases)
            except BoardError:
                raise
            except HilError as error:
                return cases[-1].with_error(error, Stage.RUN)
            return cases[-1]

        found = self.suspect.call_board(run)
        return found if isinstance(found, BoardError) else found.error


class _CandidateProgram:
    """Program of a candidate. The axis makes it at the first run."""

    def __init__(self, tester: CandidateTester, candidate: GateCandidate, folder: Path) -> None:
        self._tester = tester
        self._candidate = candidate
        self._folder = folder
        self._compiled: Case | None = None

    @property
    def digest(self) -> str:
        """Digest of the program as in a history, or "" before the first run."""
        artifact = self._compiled.artifact if self._compiled is not None else None
        return combine_digests(artifact.digests) if artifact is not None else ""

    def run(self) -> ProgramAnswer:
        """Run the program once, and compare its outputs."""
        return make_answer(self._tester.suspect.call_board(self.run_case))

    def run_case(self, session: BoardSession) -> Case:
        """Run the program once, and compare its outputs."""
        suspect, runner = self._tester.suspect, self._tester.suspect.runner
        if self._compiled is None:
            config = session.board.config
            self._compiled = self._tester.axis.make_program(suspect, self._candidate, self._folder, config)
        case = runner.execute(self._compiled, session)
        if case.outcome:
            return case
        if not suspect.is_compared:
            return replace(case, outcome=Outcome.SKIP, reason="output not compared")
        return runner.judge(case)


def make_answer(found: Case | BoardError) -> ProgramAnswer:
    """Return the result of a run."""
    if isinstance(found, BoardError):
        outcome = Outcome(found.outcome or Outcome.BOARD_LOST)
        return ProgramAnswer(outcome if outcome in BOARD_OUTCOMES else Outcome.BOARD_LOST, found.message)
    assert found.outcome is not None
    return ProgramAnswer(found.outcome, found.reason, is_from_host=found.stage in _HOST_STAGES)
