"""Run both programs of a suspect again, in turns on the same board, until the verdict is clear."""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hil.controller.analysis.bench.conditions import prepare_boards, watch_conditions
from hil.controller.analysis.bench.measure import BenchSide, measure_rounds
from hil.controller.analysis.bench.stats import Batch, BenchJob, round_log_ratios
from hil.controller.analysis.detection.sequential import Direction, SequentialDecision, pool_noise
from hil.controller.devices.measuring.grading import list_disturbances
from hil.controller.pipeline.boards.board_pool import BoardPool
from hil.controller.pipeline.boards.board_session import BoardSession
from hil.controller.pipeline.case import Case
from hil.controller.pipeline.runner import Runner
from hil.controller.pipeline.stages import choose_board
from hil.controller.records.measurements.history import HistoryEntry
from hil.controller.storage.run_context import Progress
from hil.controller.workloads.gate.comparing.instruction_counts import count_again
from hil.controller.workloads.gate.judge import Remeasurement
from hil.controller.workloads.gate.plan import GateCase
from hil.controller.workloads.gate.programs import ProgramRestorer
from hil.core.results import BOARD_OUTCOMES, Outcome
from hil.errors import BoardError, BoardUnfit, HilError, RunFailed

# Maximum rounds. If the verdict is still unclear, the noise of the board hides the effect.
_MAX_ROUNDS = 200
_STAGES = 100


@dataclass(frozen=True)
class Remeasurer:
    """Measure suspects again.

    Attributes:
        restorer: restores programs of the history.
        find_rounds: returns the log ratios of earlier decisions on a board, from which the board's noise is estimated.
    """

    restorer: ProgramRestorer
    runner: Runner
    pool: BoardPool
    min_effect: float
    screen: Progress
    find_rounds: Callable[[str], Iterable[Sequence[float]]]

    def measure(
        self, case: GateCase, *, budget_s: float, known: Sequence[float], keep_round: Callable[[float], None]
    ) -> Remeasurement:
        """Run both programs of a suspect.

        An error ends the measurement and is stored in the result, so that other suspects can still be measured.

        Args:
            budget_s: maximum board time; the current round is completed.
            known: log ratios of rounds that an interrupted gate measured.
            keep_round: called with the log ratio of every new round.
        """
        again = Remeasurement(budget_s=budget_s)
        self.screen.begin(case.new.case, _STAGES)
        try:
            self._measure(case, again, budget_s, known, keep_round)
        except BoardError as error:
            again.error, again.is_board_error = error.message, True
        except HilError as error:
            again.error = error.message
        finally:
            self.screen.end(case.new.case)
        return again

    def _measure(
        self,
        case: GateCase,
        again: Remeasurement,
        budget_s: float,
        known: Sequence[float],
        keep_round: Callable[[float], None],
    ) -> None:
        assert case.old is not None
        cases = self.restorer.opener.open(case.new)
        job = self.restorer.choose_job(cases)
        session = self.pool.session(choose_board(job), runtimes=[case.new.key.runtime], faults=job.faults)
        again.is_other_board = session.board.name != case.new.key.board
        begun = time.monotonic()  # the wait for the board does not count as board time
        try:
            sides = [
                self._run_side(label, self.restorer.restore_entry(cases, case.new, entry, job), entry, session)
                for label, entry in (("A", case.old), ("B", case.new))
            ]
            again.old, again.new = (side.case.outcome.value if side.case.outcome else "" for side in sides)
            again.new_reason = sides[1].case.reason
            is_comparable = all(side.case.outcome in (Outcome.PASS, Outcome.SKIP) for side in sides)
            if is_comparable and case.instructions is not None:
                self._count(case, again, sides)
            if is_comparable and case.suspect is not None and case.suspect.direction != "broken":
                self._measure_times(case, again, sides, begun + budget_s, known, keep_round)
        except BoardError as error:
            # The next suspect must not get a lost session.
            self.pool.reconnect(choose_board(job), error, faults=job.faults)
            raise
        finally:
            again.board_s = time.monotonic() - begun

    def _run_side(self, label: str, case: Case, entry: HistoryEntry, session: BoardSession) -> BenchSide:
        """Run the program of an entry once. Raises BoardError if the board fails."""
        self.screen.stage(entry.case, 0, f"running the program of {entry.source.commit[:9] or entry.run}")
        case = self.run_once(case, session)
        if case.error is not None and case.outcome in BOARD_OUTCOMES:
            raise case.error
        return BenchSide(label, case, session.board)

    def run_once(self, case: Case, session: BoardSession) -> Case:
        """Run a program, and compare its output if references are known."""
        case = self.runner.execute(self.runner.compile(case, session.board.config), session)
        if case.outcome:
            return case
        if not (case.references or case.model):
            return replace(case, outcome=Outcome.SKIP, reason="output not compared")
        return self.runner.judge(case)

    def _count(self, case: GateCase, again: Remeasurement, sides: Sequence[BenchSide]) -> None:
        self.screen.stage(case.new.case, 0, "counting instructions")
        try:
            again.instructions = count_again([side.case for side in sides], sides[0].board)
        except RunFailed:
            suspect = case.suspect
            if suspect is None or not (sides[0].board.config.has_time or suspect.direction == "broken"):
                raise
            # The times or the outcomes are also suspect, and need no counter.

    def _measure_times(
        self,
        case: GateCase,
        again: Remeasurement,
        sides: Sequence[BenchSide],
        until: float,
        known: Sequence[float],
        keep_round: Callable[[float], None],
    ) -> None:
        if not sides[0].board.config.has_time:  # batches then contain estimates from the host's clock
            return
        # If the history shows a faster program, test both directions, because the board may have become faster.
        direction: Direction = "both" if case.suspect is not None and case.suspect.direction == "faster" else "slower"
        noise = pool_noise(self.find_rounds(self.restorer.name_board(case.new)))
        decision = SequentialDecision(self.min_effect, direction=direction, noise=noise)
        for log_ratio in known:
            decision.add(log_ratio)
        self.measure_turns(case.new.case, sides, decision, until=until, keep_round=keep_round)
        again.decision, again.rounds_needed = decision.decision, decision.rounds_needed
        again.old_p50_ns, again.new_p50_ns = (_find_median(side) for side in sides)

    def measure_turns(
        self,
        name: str,
        sides: Sequence[BenchSide],
        decision: SequentialDecision,
        *,
        until: float,
        keep_round: Callable[[float], None],
    ) -> None:
        """Add rounds to a decision until the verdict is clear, or the board time is spent.

        Args:
            name: case, for the progress.
            until: end of the board time, on the monotonic clock in seconds; the current round is completed.
            keep_round: called with the log ratio of each new round, and with nan to discard all rounds.

        Raises:
            BoardUnfit: the board changed during the rounds, for example throttled. All rounds are discarded.
        """
        known = len(decision.log_ratios)

        def show(side: BenchSide, batch: Batch, done: float) -> None:
            needed = max(len(decision.log_ratios) + decision.rounds_needed, 1)
            percent = min(round(100 * (known + done) / needed), 99)
            self.screen.stage(name, percent, f"round {known + int(done) + 1}: {decision.verdict}")

        if decision.verdict != "undecided":
            return
        prepare_boards(sides)
        with watch_conditions(sides, copies=1):
            for rounds in measure_rounds(sides, BenchJob(self.restorer.job), show, random.Random(secrets.randbits(64))):
                batches = [batch for side in sides for batch in side.batches if batch.round == rounds - 1]
                log_ratio = float(round_log_ratios(batches)[0])
                keep_round(log_ratio)
                decision.add(log_ratio)
                is_spent = time.monotonic() >= until or len(decision.log_ratios) >= _MAX_ROUNDS
                if decision.verdict != "undecided" or is_spent:
                    break
        disturbances = [text for side in sides[:1] if side.conditions for text in list_disturbances(side.conditions)]
        if disturbances:
            keep_round(math.nan)
            decision.discard_rounds()
            raise BoardUnfit(
                f"the times are not comparable: {'; '.join(disturbances)}",
                hint="wait until the board is steady: hil bench MODEL --settle 60",
            )


def _find_median(side: BenchSide) -> float | None:
    if not side.batches:
        return None
    return float(np.median(np.concatenate([batch.duration_ns for batch in side.batches])))
