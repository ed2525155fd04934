"""Searches for several suspects together: shared builds, boards that fail, and interrupted gates."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.histories import history_entry

from hil.controller.pipeline.case import Case
from hil.controller.records.base import make_record
from hil.controller.records.decisions.gate import GateCandidate, GateCause, GateVerdict
from hil.controller.workloads.gate.bisection import run as bisection_run
from hil.controller.workloads.gate.bisection.axes.axis import BisectAxis, CandidateRange
from hil.controller.workloads.gate.bisection.confirm import FaultRate, ProgramAnswer, Trial, decide_answers
from hil.controller.workloads.gate.bisection.run import CauseFinder
from hil.controller.workloads.gate.comparing.rounds import RoundsFile
from hil.controller.workloads.gate.plan import GateCase
from hil.core.board_config import BoardConfig
from hil.core.results import Outcome
from hil.errors import UsageError

COMMITS = [GateCandidate(commit=f"{number:040x}", subject=f"commit {number}") for number in range(16)]
# Returns the result of a test, given the case and the commit's number.
CommitTest = Callable[[str, int], Trial]


class FakeAxis(BisectAxis):
    """Axis with the commits of :data:`COMMITS`. It counts builds."""

    name = "commit"

    def __init__(self, unbuilt: frozenset[int] = frozenset()) -> None:
        self.unbuilt, self.builds, self.now, self.is_open = unbuilt, [], 0, False

    @contextlib.contextmanager
    def open_search(self) -> Iterator[None]:
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False

    def find_candidates(self, case: GateCase, verdict: GateVerdict) -> CandidateRange:
        where = " in a clean checkout"
        return CandidateRange(COMMITS, first="the first", last="the last", where=where, needs_good=False)

    def prepare(self, candidate: GateCandidate, suspects: Sequence[Any], folder: Path) -> str:
        self.now = int(candidate.commit, 16)
        self.builds.append(self.now)
        return "the build ended with exit code 1" if self.now in self.unbuilt else ""

    def make_program(self, suspect: Any, candidate: GateCandidate, folder: Path, config: BoardConfig) -> Case:
        raise NotImplementedError


def make_suspect(case: str) -> tuple[GateCase, GateVerdict]:
    old, new = history_entry("r1", case, commit=COMMITS[0].commit), history_entry("r2", case, commit=COMMITS[-1].commit)
    found = GateCase(new, old)
    side = {"commit": "", "run": "r2", "outcome": "FAIL", "reason": "", "p50_ns": None}
    side |= {"compiler": "", "runtime": "", "program": ""}
    verdict = {"series": found.series, "key": new.key.to_json(), "verdict": "broken", "reason": "", "suspect": ""}
    return found, make_record({**verdict, "new": side, "old": None}, GateVerdict)


@pytest.fixture
def bisect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Mapping[str, GateCause]]:
    """Search with fake tests of commits. Returns the cause of each case."""

    def run(axis: FakeAxis, test: CommitTest, *names: str, command: str = "") -> Mapping[str, GateCause]:
        def make_suspect_run(*arguments: Any) -> Any:
            return SimpleNamespace(case=arguments[-2], verdict=arguments[-1])

        def make_tester(measurer: Any, suspect: Any, axis: FakeAxis, budget_s: float) -> Any:
            def call(*_: Any, **__: Any) -> Trial:
                assert axis.is_open
                return test(suspect.case.new.case, axis.now)

            return SimpleNamespace(suspect=suspect, axis=axis, decisions=[], test=call)

        monkeypatch.setattr(bisection_run, "SuspectRun", make_suspect_run)
        monkeypatch.setattr(bisection_run, "CandidateTester", make_tester)
        screen = SimpleNamespace(**dict.fromkeys(("begin", "stage", "end", "note"), lambda *_: None))
        suspects = [make_suspect(name) for name in names]
        restorer = SimpleNamespace(name_board=lambda entry: entry.key.board)
        measurer: Any = SimpleNamespace(screen=screen, restorer=restorer, runner=None, pool=None)
        CauseFinder(axis, tmp_path, measurer, 1, RoundsFile(tmp_path), command).run(suspects, lambda: None)
        assert not axis.is_open
        return {case.new.case: verdict.cause for case, verdict in suspects if verdict.cause is not None}

    return run


def fail_from(**first_bad: int) -> CommitTest:
    return lambda case, number: Trial("bad" if number >= first_bad[case] else "good", "")


def list_subjects(cause: GateCause) -> list[str]:
    return [one.subject for one in cause.candidates]


def test_suspects_share_builds(bisect) -> None:
    axis = FakeAxis()
    found = bisect(axis, fail_from(a=5, b=5), "a", "b")
    assert [list_subjects(cause) for cause in found.values()] == [["commit 5"]] * 2
    assert len(axis.builds) == len(set(axis.builds)) <= 6
    assert (found["a"].commits, len(found["a"].tried), found["a"].reason) == (15, len(axis.builds), "")


def test_suspects_have_separate_causes(bisect) -> None:
    found = bisect(FakeAxis(), fail_from(a=3, b=12), "a", "b")
    assert [list_subjects(cause) for cause in found.values()] == [["commit 3"], ["commit 12"]]


def test_commits_that_do_not_build_remain_candidates(bisect) -> None:
    found = bisect(FakeAxis(frozenset({6, 7})), fail_from(a=7), "a")
    assert list_subjects(found["a"]) == ["commit 6", "commit 7", "commit 8"]
    assert found["a"].reason == "2 commits could not be tested"


def test_commit_spoiled_by_board_is_tested_again(bisect) -> None:
    spoiled = {6, 7}

    def test(case: str, number: int) -> Trial:
        if number in spoiled:
            spoiled.remove(number)
            return Trial("skipped", "lost", True)
        return fail_from(a=7)(case, number)

    assert list_subjects(bisect(FakeAxis(), test, "a")["a"]) == ["commit 7"]


def test_search_ends_if_board_stays_away(bisect) -> None:
    found = bisect(FakeAxis(), lambda case, number: Trial("skipped", "lost", True), "a")
    assert list_subjects(found["a"]) == []
    assert "cannot be tested: lost" in found["a"].reason
    assert len(found["a"].tried) == 2


def test_judged_commit_that_passes_blames_nothing(bisect) -> None:
    found = bisect(FakeAxis(), fail_from(a=16), "a")
    assert list_subjects(found["a"]) == []
    assert "is good in a clean checkout" in found["a"].reason


def test_interrupted_search_repeats_no_test(bisect) -> None:
    left = iter(range(3))

    def interrupted(case: str, number: int) -> Trial:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return fail_from(a=9)(case, number)

    first, second = FakeAxis(), FakeAxis()
    with pytest.raises(KeyboardInterrupt):
        bisect(first, interrupted, "a")
    found = bisect(second, fail_from(a=9), "a")
    assert list_subjects(found["a"]) == ["commit 9"]
    assert not set(first.builds[:3]) & set(second.builds)
    assert len(found["a"].tried) == 3 + len(second.builds)


def test_resumed_search_repeats_tests_of_another_axis(bisect) -> None:
    """Versions of a compiler and of a driver can be equal."""
    first, second = FakeAxis(), FakeAxis()
    second.name = "driver"
    bisect(first, fail_from(a=3), "a")
    assert list_subjects(bisect(second, fail_from(a=9), "a")["a"]) == ["commit 9"]


def test_resumed_search_repeats_tests_of_another_command(bisect) -> None:
    """The first command may have built a wrong program."""
    bisect(FakeAxis(), fail_from(a=3), "a", command="make -j")
    assert list_subjects(bisect(FakeAxis(), fail_from(a=9), "a", command="make")["a"]) == ["commit 9"]
    again = FakeAxis()
    assert list_subjects(bisect(again, fail_from(a=5), "a", command="make")["a"]) == ["commit 9"]
    assert not again.builds


def test_unknown_commit_becomes_reason(bisect, monkeypatch: pytest.MonkeyPatch) -> None:
    axis = FakeAxis()

    def refuse(case: GateCase, verdict: GateVerdict) -> CandidateRange:
        raise UsageError("commit 'x' is not in /r")

    monkeypatch.setattr(axis, "find_candidates", refuse)
    assert bisect(axis, fail_from(a=1), "a")["a"].reason == "commit 'x' is not in /r"


def test_damaged_log_of_trials_is_refused(bisect, tmp_path: Path) -> None:
    (tmp_path / "bisect.jsonl").write_text('{"series": 1}\n')
    with pytest.raises(UsageError, match=r"bisect\.jsonl is damaged"):
        bisect(FakeAxis(), fail_from(a=1), "a")


@pytest.mark.parametrize("seed", range(20))
def test_bisect_names_commit_if_board_spoils_30_percent(bisect, seed: int) -> None:
    draw = random.Random(seed)
    first_bad, rate = draw.randrange(1, 16), FaultRate()
    faults = (Outcome.FAIL, Outcome.RUN_CRASH, Outcome.BOARD_LOST)

    def run(outcome: Outcome) -> ProgramAnswer:
        return ProgramAnswer(draw.choice(faults) if draw.random() < 0.3 else outcome)

    def test(case: str, number: int) -> Trial:
        return decide_answers(
            lambda: run(Outcome.FAIL if number >= first_bad else Outcome.PASS),
            lambda: run(Outcome.PASS),
            is_searched=lambda outcome: outcome is Outcome.FAIL,
            rate=rate,
        )

    assert list_subjects(bisect(FakeAxis(), test, "a")["a"]) == [f"commit {first_bad}"]
