"""Which measurements a gate compares, and the verdict on each series."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.histories import history_entry, program_source

from hil.controller.analysis.detection.sequential import Decision
from hil.controller.records.measurements.conditions import MeasurementGrade
from hil.controller.records.measurements.history import HistoryEntry, ToolVersions
from hil.controller.records.measurements.instructions import InstructionComparison
from hil.controller.storage.history.programs import combine_digests
from hil.controller.storage.history.store import HistoryStore
from hil.controller.workloads.gate.judge import Remeasurement, judge_case, list_changes, needs_board
from hil.controller.workloads.gate.plan import GateCase, plan_gate
from hil.core.digest import digest_of
from hil.errors import UsageError

OLD, NEW = b"old program", b"new program"
LATER = {"created": 100.0, "commit": "fade", "branch": "pr", "clock": "board"}


def digest(program: bytes) -> str:
    return combine_digests({"main.vmfb": digest_of(program)})


@pytest.fixture
def store(tmp_path: Path):
    with HistoryStore.open(tmp_path / "history", create=True) as opened:
        sources = [program_source(tmp_path / program.hex(), program) for program in (OLD, NEW)]
        opened.add([], sources)
        yield opened


def baseline_entries(count: int = 20, **values: Any) -> list[HistoryEntry]:
    """Return entries of the baseline branch with medians of 100 to 101 ns."""
    return [
        history_entry(
            f"run-{n:02}", created=float(n + 1), p50_ns=100 + n % 3 / 2, program=digest(OLD), clock="board", **values
        )
        for n in range(count)
    ]


def new_entry(**values: Any) -> HistoryEntry:
    known = {"created": 99.0, "commit": "feed", "branch": "pr", "program": digest(NEW), "clock": "board"}
    return history_entry("new", **{**known, "p50_ns": 100.5, **values})


def planned(store: HistoryStore, new: HistoryEntry, old: list[HistoryEntry] | None = None) -> GateCase:
    store.add([*(baseline_entries() if old is None else old), new])
    (case,) = plan_gate(store, baseline="main", commit="feed", min_effect=0.02).cases
    return case


def judged(store: HistoryStore, new: HistoryEntry, old: list[HistoryEntry] | None = None) -> str:
    case = planned(store, new, old)
    assert not needs_board(case)
    return judge_case(case, None).verdict


def test_slower_program_must_run_again(store: HistoryStore) -> None:
    case = planned(store, new_entry(p50_ns=110.0))
    assert needs_board(case)
    assert case.suspect is not None and (case.suspect.kind, case.suspect.direction) == ("step", "slower")
    assert case.old is not None and case.old.run == "run-19"


def test_wrong_program_must_run_again(store: HistoryStore) -> None:
    case = planned(store, new_entry(outcome="FAIL"))
    assert needs_board(case)
    assert case.suspect is not None and case.suspect.kind == "outcome"


def test_incomparable_time_must_run_again(store: HistoryStore) -> None:
    grade = MeasurementGrade(grade="F", reasons=["the board throttled"])
    old = [entry.replace(grade=grade, p50_ns=900.0) if entry.run == "run-18" else entry for entry in baseline_entries()]
    case = planned(store, new_entry(p50_ns=110.0).replace(grade=grade), old)
    assert needs_board(case)
    assert case.suspect is not None and (case.suspect.kind, case.suspect.direction) == ("grade", "slower")
    without_program = judge_case(replace(case, is_stored=False), None)
    assert (without_program.verdict, "the board throttled" in without_program.reason) == ("undecided", True)
    same = replace(case, new=case.new.replace(program=digest(OLD), tools=ToolVersions(compiler="newer")))
    assert judge_case(same, None).verdict == "no change"


def test_baseline_without_comparable_times_must_run_again(store: HistoryStore) -> None:
    grade = MeasurementGrade(grade="F", reasons=["no core was free"])
    case = planned(store, new_entry(p50_ns=900.0), [entry.replace(grade=grade) for entry in baseline_entries()])
    assert needs_board(case)
    assert case.suspect is not None and case.suspect.kind == "grade"
    assert "no core was free" in judge_case(replace(case, is_stored=False), None).reason


def test_plan_compares_with_earlier_run_if_program_is_deleted(store: HistoryStore) -> None:
    old = baseline_entries()
    old[-1] = old[-1].replace(program=digest(b"deleted program"))
    case = planned(store, new_entry(p50_ns=110.0), old)
    assert case.old is not None and case.old.run == "run-18"


def test_plan_prefers_measurement_without_board_error(store: HistoryStore) -> None:
    store.add([*baseline_entries(), new_entry(), new_entry(outcome="BOARD_LOST").replace(run="newer", created=100.0)])
    (case,) = plan_gate(store, baseline="main", commit="feed", min_effect=0.02).cases
    assert case.new.run == "new"


def test_uncommitted_changes_are_no_baseline(store: HistoryStore) -> None:
    entry = history_entry("dirty", created=50.0, p50_ns=300.0)
    dirty = entry.replace(source=entry.source.replace(dirty=True))
    case = planned(store, new_entry(), [*baseline_entries(), dirty])
    assert case.old is not None and case.old.run == "run-19"


def test_missed_step_is_compared_with_last_confirmed_run(store: HistoryStore) -> None:
    """The last run before is as slow as the new one, and no measurement confirmed it."""
    missed = baseline_entries()[-1].replace(run="missed", created=60.0, p50_ns=110.0)
    store.add([*baseline_entries(), missed])
    store.confirm(baseline_entries()[-2], "measured")
    store.add([new_entry(p50_ns=110.0)])
    (case,) = plan_gate(store, baseline="main", commit="feed", min_effect=0.02).cases
    assert case.old is not None and case.old.run == "run-18"
    store.confirm(missed, "accepted")
    (case,) = plan_gate(store, baseline="main", commit="feed", min_effect=0.02).cases
    assert case.old is not None and case.old.run == "missed"


def test_plan_lists_series_that_commit_did_not_measure(store: HistoryStore) -> None:
    store.add([*baseline_entries(), history_entry("other", "n", branch="main")])
    store.add([new_entry()])
    plan = plan_gate(store, baseline="main", commit="feed", min_effect=0.02)
    assert [case.new.run for case in plan.cases] == ["new"]
    assert [key.case for key in plan.unmeasured] == ["n"]


def test_plan_judges_newest_run_of_commit_on_baseline_branch(store: HistoryStore) -> None:
    newest = history_entry("newest", created=60.0, commit="beef", program=digest(NEW), clock="board", p50_ns=100.0)
    store.add([*baseline_entries(), newest])
    (case,) = plan_gate(store, baseline="main", commit="", min_effect=0.02).cases
    assert case.old is not None and (case.new.run, case.old.run) == ("newest", "run-19")


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({}, "no change"),
        ({"program": digest(OLD), "p50_ns": 150.0}, "no change"),
        ({"outcome": "BOARD_LOST", "p50_ns": None}, "board fault"),
        ({"outcome": "FAIL", "program": digest(OLD)}, "board fault"),
        ({"outcome": "COMPILE_ERROR", "program": "", "p50_ns": None}, "broken"),
        ({"program": "", "p50_ns": 150.0}, "undecided"),
    ],
)
def test_history_alone_decides(store: HistoryStore, values: dict[str, Any], verdict: str) -> None:
    assert judged(store, new_entry(**values)) == verdict


def test_failure_of_baseline_is_no_change(store: HistoryStore) -> None:
    assert judged(store, new_entry(outcome="FAIL"), baseline_entries(outcome="FAIL")) == "no change"


@pytest.mark.parametrize(("outcome", "verdict"), [("PASS", "new"), ("FAIL", "broken")])
def test_series_without_baseline(store: HistoryStore, outcome: str, verdict: str) -> None:
    store.add([history_entry("other", "n", branch="main"), new_entry(outcome=outcome)])
    (case,) = plan_gate(store, baseline="main", commit="feed", min_effect=0.02).cases
    assert judge_case(case, None).verdict == verdict


def test_plan_rejects_branch_without_measurements(store: HistoryStore) -> None:
    store.add([*baseline_entries(), new_entry()])
    with pytest.raises(UsageError, match="no measurement of branch 'mian'") as raised:
        plan_gate(store, baseline="mian", commit="feed", min_effect=0.02)
    assert "measured branches: main, pr" in raised.value.hint


def test_board_errors_of_baseline_are_skipped(store: HistoryStore) -> None:
    lost = history_entry("lost", created=50.0, outcome="BOARD_LOST", p50_ns=None)
    assert judged(store, new_entry(), [*baseline_entries(), lost]) == "no change"


def decided(verdict: Any, ratio: float = 1.1, **values: Any) -> Remeasurement:
    return Remeasurement("PASS", "PASS", decision=Decision(verdict, 9, ratio, None), **values)


@pytest.mark.parametrize(
    ("again", "verdict"),
    [
        (decided("regressed"), "regressed"),
        (decided("improved", 0.9), "improved"),
        (decided("no change", 1.0, old_p50_ns=101.0), "no change"),
        (decided("no change", 1.0, old_p50_ns=150.0), "board fault"),
        (decided("undecided", rounds_needed=7), "undecided"),
        (Remeasurement("PASS", "FAIL"), "broken"),
        (Remeasurement("FAIL", "FAIL"), "board fault"),
        (Remeasurement("LOAD_ERROR", "FAIL"), "broken"),
        (Remeasurement("LOAD_ERROR", "PASS"), "undecided"),
        (Remeasurement("SKIP", "FAIL"), "broken"),
        (Remeasurement(error="lost", is_board_error=True), "board fault"),
        (Remeasurement(error="no inputs"), "undecided"),
    ],
)
def test_new_measurement_decides(store: HistoryStore, again: Remeasurement, verdict: str) -> None:
    assert judge_case(planned(store, new_entry(p50_ns=110.0)), again).verdict == verdict


def test_failure_that_does_not_repeat_is_undecided(store: HistoryStore) -> None:
    case = planned(store, new_entry(outcome="FAIL"))
    found = judge_case(case, Remeasurement("PASS", "PASS"))
    assert (found.verdict, found.reason) == ("undecided", "FAIL in new, but PASS now")


def test_undecided_verdict_states_needed_rounds(store: HistoryStore) -> None:
    again = decided("undecided", 1.015, rounds_needed=7, board_s=61.0, budget_s=60.0)
    found = judge_case(planned(store, new_entry(p50_ns=110.0)), again)
    assert found.reason == "+1.5 % so far; about 7 more rounds needed; the board time of 60 s is used up"
    assert found.rounds_needed == 7


def test_other_compiler_of_same_commit_is_toolchain(store: HistoryStore) -> None:
    old = baseline_entries(commit="feed", tools={"compiler": "iree 3.12.0"})
    case = planned(store, new_entry(p50_ns=110.0, tools={"compiler": "iree 3.13.0"}), old)
    found = judge_case(case, decided("regressed"))
    assert found.verdict == "toolchain"
    assert found.changes == ["compiler: iree 3.12.0 -> iree 3.13.0"]


def test_list_changes_names_board_stack() -> None:
    old = history_entry(board={"name": "orin", "stack": {"kernel": "6.1", "governor": "performance"}})
    new = history_entry(board={"name": "orin", "stack": {"kernel": "6.6", "governor": "performance"}})
    assert list_changes(old, new) == ["kernel: 6.1 -> 6.6"]


def test_second_measurement_of_commit_is_no_baseline(store: HistoryStore) -> None:
    """CI may measure a commit of the baseline branch twice."""
    slow = {"branch": "main", "p50_ns": 130.0}
    store.add([*baseline_entries(), new_entry(**slow).replace(run="first", created=98.0), new_entry(**slow)])
    (case,) = plan_gate(store, baseline="main", commit="feed", min_effect=0.02).cases
    assert case.old is not None and (case.new.run, case.old.run) == ("new", "run-19")
    assert needs_board(case)


def test_branch_is_compared_with_its_ancestors(store: HistoryStore) -> None:
    """A branch is not slower because main became faster after the branch was made."""
    faster = history_entry("later", created=60.0, p50_ns=50.0, commit="beef", program=digest(NEW), clock="board")
    store.add([*baseline_entries(), faster, new_entry(program=digest(OLD))])
    ancestors = {"feed", "1a2b3c4d"}
    (case,) = plan_gate(store, baseline="main", commit="feed", min_effect=0.02, ancestors=ancestors).cases
    assert case.old is not None and case.old.run == "run-19"
    assert judge_case(case, None).verdict == "no change"


def test_other_failure_than_that_of_baseline_is_broken(store: HistoryStore) -> None:
    failing = history_entry("failing", created=60.0, outcome="FAIL")
    new = new_entry(outcome="COMPILE_CRASH", program="", p50_ns=None)
    assert judged(store, new, [*baseline_entries(), failing]) == "broken"


def test_plan_rejects_ambiguous_commit(store: HistoryStore) -> None:
    store.add([new_entry(), history_entry("other", "n", commit="feed0000")])
    with pytest.raises(UsageError, match="ambiguous commit"):
        plan_gate(store, baseline="main", commit="feed", min_effect=0.02)


def test_slower_runtime_with_same_program_is_toolchain(store: HistoryStore) -> None:
    new = new_entry(program=digest(OLD), p50_ns=150.0, tools={"runtime": "2"})
    assert judged(store, new, baseline_entries(tools={"runtime": "1"})) == "toolchain"


def test_fixed_program_must_also_be_as_fast(store: HistoryStore) -> None:
    failing = history_entry("failing", created=60.0, outcome="TIMEOUT", p50_ns=None)
    case = planned(store, new_entry(p50_ns=150.0), [*baseline_entries(), failing])
    assert case.suspect is not None and case.suspect.direction == "fixed"
    assert judge_case(case, decided("regressed", 1.5)).verdict == "regressed"
    assert judge_case(case, decided("no change", 1.0, old_p50_ns=100.0)).verdict == "improved"


def test_fixed_program_of_emulated_board_is_judged_by_counts(store: HistoryStore) -> None:
    failing = history_entry("failing", created=60.0, outcome="TIMEOUT", p50_ns=None)
    entries = [*baseline_entries(**counted(1000.0)), failing]
    case = planned(store, new_entry(**counted(1012.0)), entries)
    again = Remeasurement(old="PASS", new="PASS", instructions=comparison(1.012, "more"))
    assert judge_case(case, again).verdict == "regressed"
    again = Remeasurement(old="PASS", new="PASS", instructions=comparison(0.9, "fewer"))
    found = judge_case(case, again)
    assert (found.verdict, found.reason) == ("improved", "PASS again; -10.00 % instructions")


def test_failure_that_cannot_run_again_is_broken(store: HistoryStore) -> None:
    found = judge_case(planned(store, new_entry(outcome="FAIL")), Remeasurement(error="no inputs"))
    assert (found.verdict, found.reason) == ("broken", "FAIL; hil could not run the program again: no inputs")


def counted(median: float, spread: float = 0.0, counter: str = "perf_event") -> dict[str, Any]:
    return {"instructions": {"counter": counter, "iterations": 9, "median": median, "spread": spread}}


def test_more_instructions_must_run_again_at_the_same_time(store: HistoryStore) -> None:
    case = planned(store, new_entry(**counted(1002.0)), baseline_entries(**counted(1000.0)))
    assert case.suspect is None and needs_board(case)


@pytest.mark.parametrize(
    "new",
    [counted(1001.0), counted(900.0), counted(1002.0, spread=0.01), counted(1002.0, counter="icount"), {}],
    ids=["within-limit", "fewer", "varying", "other-counter", "not-counted"],
)
def test_other_counts_do_not_run_again(store: HistoryStore, new: dict[str, Any]) -> None:
    assert judged(store, new_entry(**new), baseline_entries(**counted(1000.0))) == "no change"


def test_counts_of_another_cpu_are_not_compared(store: HistoryStore) -> None:
    other = {"board": {"name": "sim", "stack": {"cpu_model": "another"}}}
    assert judged(store, new_entry(**counted(2000.0), **other), baseline_entries(**counted(1000.0))) == "no change"


def with_energy(joules: float, board: str = "one") -> dict[str, Any]:
    interval = {"low": 0.99 * joules, "high": 1.01 * joules, "level": 0.99}
    energy = {"meter": "hwmon", "per_inference": {"joules": joules, "interval": interval}}
    return {"energy": energy, "board": {"name": "sim", "id": board}}


@pytest.mark.parametrize(
    ("new", "is_compared"),
    [
        ({}, True),
        ({"board": {"name": "sim"}}, True),
        ({"board": {"name": "sim", "id": "two"}}, False),
        ({"grade": {"grade": "F", "reasons": ["no core was free"]}}, False),
    ],
)
def test_energy_of_another_board_or_grade_f_is_not_compared(
    store: HistoryStore, new: dict[str, Any], is_compared: bool
) -> None:
    case = planned(store, new_entry(**{**with_energy(2.0), **new}), baseline_entries(**with_energy(1.0)))
    assert (case.energy is not None, case.has_more_energy) == (is_compared, is_compared)
    if is_compared:
        assert judge_case(case, None).verdict == "regressed"


def test_more_instructions_without_stored_program_regress(store: HistoryStore) -> None:
    new = new_entry(program=digest(b"not stored"), **counted(1012.0))
    verdict = judge_case(planned(store, new, baseline_entries(**counted(1000.0))), None)
    assert (verdict.verdict, verdict.suspect) == ("regressed", "instructions")
    assert verdict.reason.startswith("+1.20 % instructions against 1a2b3c4d; hil cannot run both programs again")


def test_more_instructions_of_the_same_program_blame_new_tools(store: HistoryStore) -> None:
    new = new_entry(program=digest(OLD), tools={"runtime": "2"}, **counted(1012.0))
    verdict = judge_case(planned(store, new, baseline_entries(**counted(1000.0), tools={"runtime": "1"})), None)
    assert (verdict.verdict, verdict.reason) == ("toolchain", "same program as 1a2b3c4d, but +1.20 % instructions")


def comparison(ratio: float, verdict: str, reason: str = "") -> InstructionComparison:
    return InstructionComparison(ratio=ratio, min_effect=0.001, verdict=verdict, reason=reason)


@pytest.mark.parametrize(
    ("again", "decision", "verdict", "reason"),
    [
        (comparison(1.012, "more"), None, "regressed", "+1.20 % instructions against 1a2b3c4d"),
        (comparison(1.0, "equal"), None, "no change", "+0.00 % instructions against 1a2b3c4d"),
        (comparison(1.004, "unclear", "they vary"), None, "undecided", "instructions not compared: they vary"),
        (comparison(1.012, "more"), Decision("no change", 9, 1.0, None), "regressed", "+1.20 % instructions against"),
        (comparison(1.012, "more"), Decision("improved", 9, 0.9, None), "improved", "-10.0 % against"),
        (comparison(0.9, "fewer"), Decision("regressed", 9, 1.1, None), "regressed", "+10.0 % against"),
    ],
)
def test_counts_of_a_new_run_decide(
    store: HistoryStore, again: InstructionComparison, decision: Decision | None, verdict: str, reason: str
) -> None:
    case = planned(store, new_entry(**counted(1012.0)), baseline_entries(**counted(1000.0)))
    found = judge_case(case, Remeasurement(old="PASS", new="PASS", instructions=again, decision=decision))
    assert (found.verdict, found.instructions) == (verdict, again)
    assert found.reason.startswith(reason)


def test_accepted_measurement_has_no_change(store: HistoryStore) -> None:
    store.add([*baseline_entries(), new_entry(p50_ns=150.0)])
    store.accept("feed")
    (case,) = plan_gate(store, baseline="main", commit="feed", min_effect=0.02).cases
    assert not needs_board(case)
    found = judge_case(case, None)
    assert (found.verdict, found.reason) == ("no change", "accepted with hil history accept")


def test_accepted_wrong_output_stays_broken(store: HistoryStore) -> None:
    store.add([*baseline_entries(), new_entry(outcome="FAIL", p50_ns=None, program=digest(b"other"))])
    store.accept("feed")
    (case,) = plan_gate(store, baseline="main", commit="feed", min_effect=0.02).cases
    assert judge_case(case, None).verdict == "broken"


def test_accepted_commit_of_branch_is_baseline_of_later_commits(store: HistoryStore) -> None:
    accepted = new_entry(p50_ns=150.0, commit="acce97ed")
    later = history_entry("later", **{**LATER, "p50_ns": 150.5})
    store.add([*baseline_entries(), accepted, later])
    ancestors = {"1a2b3c4d", "acce97ed", "fade"}
    (case,) = plan_gate(store, baseline="main", commit="fade", min_effect=0.02, ancestors=ancestors).cases
    assert case.old is not None and case.old.source.commit == "1a2b3c4d"
    store.accept("acce97ed")
    (case,) = plan_gate(store, baseline="main", commit="fade", min_effect=0.02, ancestors=ancestors).cases
    assert case.old is not None and case.old.source.commit == "acce97ed"


def test_list_changes_names_parts_once() -> None:
    old, new = (
        history_entry(
            board={"name": "orin", "stack": {"kernel": kernel}, "parts": {"kernel": kernel, "runtime": kernel, **parts}}
        )
        for kernel, parts in (("6.1", {"driver": "1.2", "pci": "a"}), ("6.6", {"driver": "1.3", "pci": "a"}))
    )
    assert list_changes(old, new) == ["kernel: 6.1 -> 6.6", "driver 1.2 -> 1.3"]


@pytest.mark.parametrize(("parts", "suspect"), [({"driver": "1.2"}, None), (None, "grade")])
def test_times_without_stack_are_not_compared(store: HistoryStore, parts: dict[str, str] | None, suspect: str) -> None:
    old = baseline_entries(board={"name": "orin", "parts": parts})
    case = planned(store, new_entry(board={"name": "orin", "parts": {"driver": "1.3"}}), old)
    assert (case.suspect and case.suspect.kind) == suspect
    if suspect:
        assert judge_case(case, None).reason.endswith("has no stack of the board")
