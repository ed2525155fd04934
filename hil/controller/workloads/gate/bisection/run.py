"""Search the candidates of all suspects together, so that the suspects share builds and installations.

hil stores the result of every test immediately.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hil.controller.records.decisions.gate import CandidateTrial, GateCandidate, GateCause, GateVerdict, TriedCandidate
from hil.controller.storage.runs import convert_write_errors, make_safe_name
from hil.controller.storage.screen.texts import format_count
from hil.controller.workloads.gate.bisection.axes.axis import BisectAxis, CandidateRange
from hil.controller.workloads.gate.bisection.confirm import Trial
from hil.controller.workloads.gate.bisection.search import CandidateSearch
from hil.controller.workloads.gate.bisection.suspect import SuspectRun
from hil.controller.workloads.gate.bisection.trial import CandidateTester
from hil.controller.workloads.gate.bisection.trial_log import TrialLog
from hil.controller.workloads.gate.comparing.rounds import RoundsFile, RoundsKey
from hil.controller.workloads.gate.plan import GateCase
from hil.controller.workloads.gate.remeasure import Remeasurer
from hil.core.digest import digest_of
from hil.errors import UsageError

DEFAULT_BUILD_TIMEOUT_SECONDS = 1800.0
_SHORT = 9
# End the search if the board failed for this many candidates in a row.
_MAX_BOARD_SKIPS = 3
_STAGES = 100
_NAME_CHARACTERS = 60

Suspects = Sequence[tuple[GateCase, GateVerdict]]


@dataclass
class _SuspectSearch:
    """Search for the first bad candidate of one suspect."""

    tester: CandidateTester
    range: CandidateRange
    search: CandidateSearch
    tried: list[TriedCandidate] = field(default_factory=list)
    retried: set[int] = field(default_factory=set)
    board_skips: int = 0

    @property
    def series(self) -> str:
        return self.tester.suspect.case.series

    @property
    def candidates(self) -> Sequence[GateCandidate]:
        return self.range.candidates

    def choose_next(self) -> str | None:
        """Return the label of the candidate to test next.

        If the board made a test fail, this method returns the candidate a second time.
        """
        if self.board_skips >= _MAX_BOARD_SKIPS:
            return None
        position = self.search.choose_next()
        if position is None:
            position = next(iter(self._list_spoiled()), None)
            if position is None:
                return None
            self.retried.add(position)
            self.search.forget(position)
        return self.candidates[position].label

    def find(self, label: str) -> GateCandidate:
        """Return a candidate."""
        return next(one for one in self.candidates if one.label == label)

    def add(self, tried: TriedCandidate) -> None:
        """Add the result of a test."""
        position = next((place for place, one in enumerate(self.candidates) if one.label == tried.label), None)
        if position is None:
            return  # the branch or the values of --over changed since the gate was interrupted
        self.tried.append(tried)
        self.search.add(position, tried.outcome)
        self.board_skips = self.board_skips + 1 if tried.is_board_error else 0

    def describe(self) -> GateCause:
        """Return the result of the search."""
        candidates = [self.candidates[place] for place in self.search.candidates]
        return GateCause(
            axis=self.tester.axis.name,
            good=self.candidates[0].label,
            commits=len(self.candidates) - 1,
            candidates=candidates if self.board_skips < _MAX_BOARD_SKIPS else [],
            reason=self._explain(candidates),
            tried=self.tried,
        )

    def _explain(self, candidates: Sequence[GateCandidate]) -> str:
        if self.board_skips >= _MAX_BOARD_SKIPS:
            return f"the board failed: {self.tried[-1].reason}"
        first, last = self.candidates[0].label, self.candidates[-1].label
        reasons = {one.label: one.reason for one in self.tried}
        if (found := self.search.find_problem(len(self.candidates) - 1)) is not None:
            what = "cannot be tested" if found == "skipped" else f"is good{self.range.where}"
            return f"{self.range.last} {what}: {reasons.get(last, '')}"
        if (found := self.search.find_problem(0)) is not None:
            what = "cannot be tested" if found == "skipped" else f"is also bad{self.range.where}"
            return f"{self.range.first} {what}: {reasons.get(first, '')}"
        noun = self.tester.axis.name
        return f"{format_count(len(candidates) - 1, noun)} could not be tested" if len(candidates) > 1 else ""

    def _list_spoiled(self) -> list[int]:
        """Return the positions of relevant tests that could not be completed because of the board."""
        spoiled = {one.label for one in self.tried if one.is_board_error}
        tested = {one.label for one in self.tried if not one.is_board_error}
        ends = [0, len(self.candidates) - 1]
        places = [*ends, *self.search.candidates]
        known = {self.candidates[place].label: place for place in dict.fromkeys(places)}
        return [place for name, place in known.items() if name in spoiled - tested and place not in self.retried]


@dataclass
class CauseFinder:
    """Find the candidates that caused the failures of a gate.

    Attributes:
        axis: list of candidates, for example commits.
        folder: directory of the gate.
        budget_s: maximum time in seconds for measurements in turns, per suspect and candidate.
        rounds: file with the measured rounds.
        command: command of --bisect; "" without a command. Tests with another command do not count.
    """

    axis: BisectAxis
    folder: Path
    measurer: Remeasurer
    budget_s: float
    rounds: RoundsFile
    command: str = ""

    @property
    def _command_digest(self) -> str:
        return digest_of(self.command.encode()) if self.command else ""

    def run(self, suspects: Suspects, save: Callable[[], None]) -> None:
        """Set the cause of every verdict.

        Args:
            suspects: cases whose verdicts are searchable on the axis.
            save: called after every cause.
        """
        log = TrialLog(self.folder)
        searches = []
        for case, verdict in suspects:
            try:
                searches.append(self._begin(case, verdict, log))
            except UsageError as error:
                verdict.cause = GateCause(axis=self.axis.name, reason=error.message)
                save()
        if not searches:
            return
        with self.axis.open_search():
            while searches:
                wanted = {one.series: one.choose_next() for one in searches}
                for ended in [one for one in searches if wanted[one.series] is None]:
                    ended.tester.suspect.verdict.cause = ended.describe()
                    searches.remove(ended)
                    save()
                if searches:
                    label, _ = Counter(filter(None, wanted.values())).most_common(1)[0]
                    self._test(label, [one for one in searches if wanted[one.series] == label], log)

    def _begin(self, case: GateCase, verdict: GateVerdict, log: TrialLog) -> _SuspectSearch:
        if case.old is None:
            raise UsageError("the baseline has no measurement")
        found = self.axis.find_candidates(case, verdict)
        measurer = self.measurer
        suspect = SuspectRun(measurer.restorer, measurer.runner, measurer.pool, case, verdict)
        tester = CandidateTester(measurer, suspect, self.axis, self.budget_s)
        # An interrupted gate may have searched on another axis, or with another command.
        searched = self.axis.name, self._command_digest
        trials = [one for one in log.trials if (one.axis, one.command) == searched]
        measured = (case.new.run, *(self._name_build(one.tried.label) for one in trials))
        known = self.rounds.read()
        tester.decisions += [known.get(self._make_key(case, name), ()) for name in measured]
        search = _SuspectSearch(tester, found, CandidateSearch(len(found.candidates), needs_good=found.needs_good))
        for one in trials:
            # Repeat tests with a board error, because the board may work again.
            if (one.series, one.run) == (case.series, case.new.run) and not one.tried.is_board_error:
                search.add(one.tried)
        return search

    def _test(self, label: str, searches: Sequence[_SuspectSearch], log: TrialLog) -> None:
        """Prepare a candidate once, and test it for every suspect."""
        screen, name = self.measurer.screen, self.axis.name
        candidate = searches[0].find(label)
        title = f"{name} {candidate.commit[:_SHORT] or candidate.value}"
        folder = self.folder / f"{name}s" / (candidate.commit[:12] or make_safe_name(label)[:_NAME_CHARACTERS])
        with convert_write_errors(folder):
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        screen.begin(title, _STAGES)
        screen.stage(title, 0, "preparing")
        try:
            problem = self.axis.prepare(candidate, [one.tester.suspect for one in searches], folder)
        finally:
            screen.end(title)
        for one in searches:
            case, begun = one.tester.suspect.case, time.monotonic()
            screen.begin(case.new.case, _STAGES)
            screen.stage(case.new.case, 0, f"testing {title}")
            try:
                trial = Trial("skipped", problem) if problem else self._run_test(one, label, folder)
            finally:
                screen.end(case.new.case)
            screen.note(f"{title}: {case.new.case}: {trial.outcome}: {trial.reason}")
            tried = TriedCandidate(
                commit=candidate.commit,
                value=candidate.value,
                outcome=trial.outcome,
                reason=trial.reason,
                is_board_error=trial.is_board_error,
                board_s=time.monotonic() - begun,
            )
            log.append(
                CandidateTrial(
                    series=one.series, run=case.new.run, axis=name, command=self._command_digest, tried=tried
                )
            )
            one.add(tried)

    def _run_test(self, one: _SuspectSearch, label: str, folder: Path) -> Trial:
        key = self._make_key(one.tester.suspect.case, self._name_build(label))
        known = self.rounds.read().get(key, ())
        keep_round = functools.partial(self.rounds.append, key)
        return one.tester.test(one.find(label), folder, known=known, keep_round=keep_round)

    def _name_build(self, label: str) -> str:
        """Return the name of a candidate's rounds. Another command may build another program for the candidate."""
        return f"{label} {self._command_digest}".rstrip()

    def _make_key(self, case: GateCase, measured: str) -> RoundsKey:
        """Return the key under which the rounds of a run or candidate are stored."""
        board = self.measurer.restorer.name_board(case.new)
        return RoundsKey(case.series, case.old.program if case.old else "", measured, board)
