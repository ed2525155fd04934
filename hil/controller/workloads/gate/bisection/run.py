"""Search the commits of all suspects together, so that the suspects share builds.

hil stores the result of every test immediately.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hil.controller.records.gate import BlamedCommit, CommitTrial, GateCause, GateVerdict, TriedCommit
from hil.controller.storage.runs import storing
from hil.controller.storage.screen.texts import counted
from hil.controller.workloads.gate.bisection.confirm import Trial
from hil.controller.workloads.gate.bisection.repository import CommitTree, GitRepository
from hil.controller.workloads.gate.bisection.search import CommitSearch
from hil.controller.workloads.gate.bisection.trial import CommitTester
from hil.controller.workloads.gate.bisection.trial_log import TrialLog
from hil.controller.workloads.gate.plan import GateCase
from hil.controller.workloads.gate.remeasure import Remeasurer
from hil.controller.workloads.gate.rounds import RoundsFile, RoundsKey
from hil.errors import UsageError

DEFAULT_BUILD_TIMEOUT_S = 1800.0
SEARCHED = ("broken", "regressed")
_SHORT = 9
# End the search if the board failed for this many commits in a row.
_BOARD_SKIPS_MOST = 3
_STAGES = 100

Suspects = Sequence[tuple[GateCase, GateVerdict]]


@dataclass
class _SuspectSearch:
    """Search for the first bad commit of one suspect."""

    tester: CommitTester
    commits: list[BlamedCommit]
    search: CommitSearch
    tried: list[TriedCommit] = field(default_factory=list)
    retried: set[int] = field(default_factory=set)
    board_skips: int = 0

    @property
    def series(self) -> str:
        return self.tester.case.series

    def choose_next(self) -> str | None:
        """Return the commit to test next.

        If the board made a test fail, this method returns the commit a second time.
        """
        if self.board_skips >= _BOARD_SKIPS_MOST:
            return None
        position = self.search.choose_next()
        if position is None:
            position = next(iter(self._list_spoiled()), None)
            if position is None:
                return None
            self.retried.add(position)
            self.search.forget(position)
        return self.commits[position].commit

    def add(self, tried: TriedCommit) -> None:
        """Add the result of a test."""
        position = next((place for place, one in enumerate(self.commits) if one.commit == tried.commit), None)
        if position is None:
            return  # the branch changed since the gate was interrupted
        self.tried.append(tried)
        self.search.add(position, tried.outcome)
        self.board_skips = self.board_skips + 1 if tried.is_board_error else 0

    def describe(self) -> GateCause:
        """Return the result of the search."""
        candidates = [self.commits[place] for place in self.search.candidates]
        return GateCause(
            good=self.commits[0].commit,
            commits=len(self.commits) - 1,
            candidates=candidates if self.board_skips < _BOARD_SKIPS_MOST else [],
            reason=self._explain(candidates),
            tried=self.tried,
        )

    def _explain(self, candidates: Sequence[BlamedCommit]) -> str:
        if self.board_skips >= _BOARD_SKIPS_MOST:
            return f"the board failed: {self.tried[-1].reason}"
        first, last = self.commits[0].commit, self.commits[-1].commit
        reasons = {one.commit: one.reason for one in self.tried}
        if (found := self.search.problem_at(len(self.commits) - 1)) is not None:
            what = "cannot be tested" if found == "skipped" else "is good in a clean checkout"
            return f"the judged commit {last[:_SHORT]} {what}: {reasons.get(last, '')}"
        if (found := self.search.problem_at(0)) is not None:
            what = "cannot be tested" if found == "skipped" else "is also bad in a clean checkout"
            return f"the commit {first[:_SHORT]} before the change {what}: {reasons.get(first, '')}"
        return f"{counted(len(candidates) - 1, 'commit')} could not be tested" if len(candidates) > 1 else ""

    def _list_spoiled(self) -> list[int]:
        """Return the positions of relevant tests that could not be completed because of the board."""
        spoiled = {one.commit for one in self.tried if one.is_board_error}
        tested = {one.commit for one in self.tried if not one.is_board_error}
        ends = [0, len(self.commits) - 1]
        places = [*ends, *self.search.candidates]
        known = {self.commits[place].commit: place for place in dict.fromkeys(places)}
        return [place for name, place in known.items() if name in spoiled - tested and place not in self.retried]


@dataclass
class CommitBisector:
    """Find the commits that caused the failures of a gate.

    Attributes:
        command: build command for the shell; "" builds nothing.
        folder: directory of the gate.
        budget_s: maximum time in seconds for measurements in turns, per suspect and commit.
        rounds: file with the measured rounds.
    """

    repository: GitRepository
    command: str
    build_timeout_s: float
    folder: Path
    measurer: Remeasurer
    budget_s: float
    rounds: RoundsFile

    def run(self, suspects: Suspects, save: Callable[[], None]) -> None:
        """Set the cause of every verdict.

        Args:
            suspects: cases with verdicts of :data:`SEARCHED`.
            save: called after every cause.
        """
        log = TrialLog(self.folder)
        searches = []
        for case, verdict in suspects:
            try:
                searches.append(self._begin(case, verdict, log))
            except UsageError as error:
                verdict.cause = GateCause(reason=error.message)
                save()
        if not searches:
            return
        with self.repository.open_worktree() as tree:
            while searches:
                wanted = {one.series: one.choose_next() for one in searches}
                for ended in [one for one in searches if wanted[one.series] is None]:
                    ended.tester.verdict.cause = ended.describe()
                    searches.remove(ended)
                    save()
                if searches:
                    commit, _ = Counter(filter(None, wanted.values())).most_common(1)[0]
                    self._test(tree, commit, [one for one in searches if wanted[one.series] == commit], log)

    def _begin(self, case: GateCase, verdict: GateVerdict, log: TrialLog) -> _SuspectSearch:
        if case.old is None:
            raise UsageError("the baseline has no measurement")
        good, bad = case.old.source.commit, case.new.source.commit
        if not good or not bad:
            raise UsageError("a measurement has no commit")
        commits = self.repository.list_commits(good, bad)
        tester = CommitTester(self.measurer, case, verdict, self.budget_s)
        measured = (case.new.run, *(one.tried.commit for one in log.trials))
        known = self.rounds.read()
        tester.decisions += [known.get(_make_key(case, name), ()) for name in measured]
        # If the first commit was not measured, it must pass a test.
        needs_good = not commits[0].commit.startswith(good)
        found = _SuspectSearch(tester, commits, CommitSearch(len(commits), needs_good=needs_good))
        for one in log.trials:
            # Repeat tests with a board error, because the board may work again.
            if (one.series, one.run) == (case.series, case.new.run) and not one.tried.is_board_error:
                found.add(one.tried)
        return found

    def _test(self, tree: CommitTree, commit: str, searches: Sequence[_SuspectSearch], log: TrialLog) -> None:
        """Build a commit once, and test it for every suspect."""
        screen, title = self.measurer.screen, f"commit {commit[:_SHORT]}"
        folder = self.folder / "commits" / commit[:12]
        with storing(folder):
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        screen.begin(title, _STAGES)
        screen.stage(title, 0, "building")
        problem = self._build(tree, commit, folder)
        screen.end(title)
        for one in searches:
            name, begun = one.tester.case.new.case, time.monotonic()
            screen.begin(name, _STAGES)
            screen.stage(name, 0, f"testing {title}")
            try:
                trial = Trial("skipped", problem) if problem else self._run_test(one, tree, commit, folder)
            finally:
                screen.end(name)
            screen.note(f"{title}: {name}: {trial.outcome}: {trial.reason}")
            tried = TriedCommit(
                commit=commit,
                outcome=trial.outcome,
                reason=trial.reason,
                is_board_error=trial.is_board_error,
                board_s=time.monotonic() - begun,
            )
            log.append(CommitTrial(series=one.series, run=one.tester.case.new.run, tried=tried))
            one.add(tried)

    def _build(self, tree: CommitTree, commit: str, folder: Path) -> str:
        """Return why the commit cannot be built, or ""."""
        try:
            tree.check_out(commit)
        except UsageError as error:
            return error.message
        if not self.command.strip():
            return ""
        log = folder / "build.log"
        return tree.build(self.command, commit, timeout_s=self.build_timeout_s, log=log)

    def _run_test(self, one: _SuspectSearch, tree: CommitTree, commit: str, folder: Path) -> Trial:
        key = _make_key(one.tester.case, commit)
        known = self.rounds.read().get(key, ())
        return one.tester.test(tree, folder, known=known, keep_round=functools.partial(self.rounds.append, key))


def _make_key(case: GateCase, measured: str) -> RoundsKey:
    """Return the key under which the rounds of a run or commit are stored."""
    return RoundsKey(case.series, case.old.program if case.old else "", measured, case.new.key.board)
