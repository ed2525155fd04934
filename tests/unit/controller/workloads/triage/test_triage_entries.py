"""Triage entries: which entry covers a case, and which failures count."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest

from hil.controller.records.decisions.gate import GateSide, GateVerdict
from hil.controller.records.decisions.triage import TriageEntry
from hil.controller.records.measurements.history import SeriesKey
from hil.controller.records.suite import CaseRecord
from hil.controller.workloads.suites.expected import Expectations
from hil.controller.workloads.triage.entries import (
    SLOWER,
    TriagedCase,
    TriageList,
    find_same,
    make_entry,
    put_entry,
    remove_entry,
)
from hil.errors import UsageError

TODAY = date(2026, 11, 21)


def entry(case: str = "conv1", state: str = "known", **values: Any) -> TriageEntry:
    return make_entry(case=case, state=state, **values)


def judge(record: CaseRecord, *entries: TriageEntry) -> CaseRecord:
    return TriageList(entries, TODAY).judge(record)


def record(case: str = "conv1", ended: str = "FAIL", **values: Any) -> CaseRecord:
    given = {"model": "net", "suite": "nets", "flow": "iree", "runtime": "iree", "board": "evk1", "hw_type": "evk"}
    return CaseRecord(**{**given, "id": case, "outcome": ended, "ended": ended, "stage": "compare", **values})


def test_known_failure_does_not_count() -> None:
    found = judge(record(), entry(owner="ada", issue="#7", note="rounds half up"))
    assert (found.outcome, found.ended, found.triage) == ("XFAIL", "FAIL", "known")
    assert found.expectation == {"outcome": "FAIL", "reason": "rounds half up", "issue": "#7"}


@pytest.mark.parametrize(
    ("until", "outcome", "triage"), [("2026-11-21", "XFAIL", "wontfix"), ("2026-11-20", "FAIL", "expired")]
)
def test_wontfix_counts_again_after_last_day(until: str, outcome: str, triage: str) -> None:
    found = judge(record(), entry(state="wontfix", until=until))
    assert (found.outcome, found.triage) == (outcome, triage)
    assert ("expired after 2026-11-20" in found.hint) == (triage == "expired")


def test_fixed_failure_that_returns_counts() -> None:
    found = judge(record(hint="check"), entry(state="fixed", owner="ada"))
    assert (found.outcome, found.triage) == ("FAIL", "fixed")
    assert found.hint == "check; triage: fails again, was marked as fixed (ada)"


def test_new_failure_counts() -> None:
    assert (judge(record(), entry(state="new")).outcome, judge(record(), entry(state="new")).triage) == ("FAIL", "new")
    assert judge(record()) == record()


@pytest.mark.parametrize("ended", ["PASS", "BOARD_LOST", "BOARD_UNFIT", "SKIP"])
def test_other_results_do_not_change(ended: str) -> None:
    assert judge(record(ended=ended), entry()) == record(ended=ended)


def test_expected_failures_take_precedence() -> None:
    expected = record().replace(outcome="XFAIL", expectation={"outcome": "FAIL", "reason": "list"})
    assert judge(expected, entry()) == expected


def test_known_failure_has_no_message_of_other_expected_failure(tmp_path: Path) -> None:
    (tmp_path / "expected.toml").write_text('[[run]]\ncases = "conv1"\noutcome = "BLIND"\nreason = "list"\n')
    unexpected = Expectations.load(tmp_path / "expected.toml").judge(record(message="off by 3"))
    assert unexpected.message == "off by 3; BLIND was expected (list)"
    found = judge(unexpected, entry(note="rounds"))
    assert (found.message, found.expectation["reason"]) == ("off by 3", "rounds")


def test_known_outcome_does_not_hide_other_failure() -> None:
    found = judge(record(ended="RUN_CRASH"), entry(outcomes=["FAIL"]))
    assert (found.outcome, found.triage) == ("RUN_CRASH", "other outcome")
    late, early = record(ended="TIMEOUT", stage="run"), record(ended="TIMEOUT", stage="compile")
    timeout = entry(outcomes=["TIMEOUT"], stage="compile")
    assert [judge(one, timeout).outcome for one in (late, early)] == ["TIMEOUT", "XFAIL"]


@pytest.mark.parametrize(
    ("scope", "covers"),
    [
        ({}, True),
        ({"board": "evk1"}, True),
        ({"board": "evk"}, True),
        ({"board": "rpi5"}, False),
        ({"suite": "nets", "flow": "ir*", "runtime": "iree"}, True),
        ({"suite": "other"}, False),
        ({"flow": "onnx*"}, False),
        ({"case": "conv*"}, True),
        ({"case": "conv*", "excluded": ["conv1"]}, False),
        ({"case": "Conv1"}, False),
    ],
)
def test_entry_covers_cases_in_scope(scope: dict[str, Any], covers: bool) -> None:
    found = judge(record(), entry(**{"case": "conv1", **scope}))
    assert (found.outcome == "XFAIL") == covers


def test_most_specific_entry_decides() -> None:
    entries = entry("*", note="all"), entry("conv*", board="evk1", note="wild"), entry("conv1", state="fixed")
    case = TriagedCase("conv1", "nets", "iree", "evk1", "iree")
    for order in (entries, entries[::-1]):
        found = TriageList(order, TODAY).find(case)
        assert found is not None and found.state in ("fixed", "known")
    exact = entry("conv1", board="evk1", note="exact")
    best = TriageList((*entries, exact), TODAY).find(case)
    assert best is not None and best.note == "exact"
    patterns = TriageList((entry("*", note="all"), entry("con*", note="longer"), entry("c*1", note="short")), TODAY)
    longest = patterns.find(case)
    assert longest is not None and longest.note == "longer"
    older, newer = entry(note="old", changed=1.0), entry(note="new", changed=2.0, suite="")
    latest = TriageList((older, newer), TODAY).find(case)
    assert latest is not None and latest.note == "new"


def test_case_name_with_brackets_matches_itself() -> None:
    assert judge(record("conv[1]"), entry("conv[1]")).outcome == "XFAIL"


def verdict(name: str, outcome: str = "FAIL") -> GateVerdict:
    key = SeriesKey(kind="suite", model="nets/net.onnx", case="conv1", board="evk1", runtime="iree", flow="iree")
    side = {"commit": "", "run": "r", "reason": "", "p50_ns": None, "compiler": "", "runtime": "", "program": ""}
    new = GateSide(outcome=outcome, **side)
    return GateVerdict(series="s", key=key, verdict=name, reason="", suspect="", new=new, old=None)  # type: ignore[arg-type]


def test_gate_verdicts_match_in_every_suite() -> None:
    known = TriageList((entry(suite="other", outcomes=["FAIL"]),), TODAY)
    slow = TriageList((entry(outcomes=[SLOWER]),), TODAY)
    assert known.judge_verdict(verdict("broken")) == "known"
    assert known.judge_verdict(verdict("broken", "RUN_CRASH")) == "other outcome"
    assert known.judge_verdict(verdict("regressed", "PASS")) == "other outcome"
    assert slow.judge_verdict(verdict("regressed", "PASS")) == "known"
    assert known.judge_verdict(verdict("undecided")) == ""


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"state": "knwon"}, "unknown state 'knwon'"),
        ({"case": " "}, "empty case ID"),
        ({"outcomes": ["FIAL"]}, "unknown outcome 'FIAL'"),
        ({"outcomes": ["BOARD_LOST"]}, "unknown outcome 'BOARD_LOST'"),
        ({"state": "wontfix"}, "wontfix requires a last day"),
        ({"until": "2030-01-01"}, "a last day requires wontfix"),
        ({"state": "wontfix", "until": "2030-13-01"}, "invalid date '2030-13-01'"),
        ({"note": "x" * 501}, "note has 501 characters"),
        ({"owner": "ada\udcff"}, "owner 'ada.*' is not valid text"),
    ],
)
def test_invalid_entry_is_rejected_with_hint(values: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make_entry(**{"case": "conv1", "state": "known", **values})


def test_put_replaces_entry_with_same_case_and_scope() -> None:
    entries = put_entry(put_entry((), entry(note="a")), entry(board="evk1", note="b"))
    changed = put_entry(entries, entry(note="c"))
    assert [one.note for one in changed] == ["c", "b"]
    assert find_same(changed, entry(board="evk1")) is changed[1]
    assert remove_entry(changed, entry()) == [changed[1]]
