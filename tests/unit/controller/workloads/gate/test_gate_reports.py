"""Reports of a gate, and its exit code."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest

from hil.controller.records.base import make_record
from hil.controller.records.decisions.gate import GATE_VERDICTS, GateRecord
from hil.controller.workloads.gate.reports import make_annotations, make_junit, make_markdown, make_sarif
from hil.controller.workloads.gate.run import find_exit_code
from hil.controller.workloads.gate.verdict_texts import MEANINGS, describe_total, list_details


def side(**values: Any) -> dict[str, Any]:
    known = {"commit": "1a2b3c4d5e", "run": "r1", "outcome": "PASS", "reason": "", "p50_ns": 2e6}
    return {**known, "compiler": "iree 3.13.0", "runtime": "iree 3.13.0", "program": "", **values}


def verdict(name: str, case: str = "m", **values: Any) -> dict[str, Any]:
    key = {"kind": "bench", "model": f"models/{case}.onnx", "case": case, "board": "orin", "runtime": "iree"}
    known = {"series": case, "key": key, "verdict": name, "reason": "a|b <i>", "suspect": "step"}
    return {**known, "new": side(), "old": side(), **values}


def record(*verdicts: dict[str, Any], **values: Any) -> GateRecord:
    known = {"schema": 1, "id": "g", "folder": "", "created": 1.0, "finished": True, "history": "h"}
    known |= {"baseline": "main", "commit": "feed", "min_effect": 0.02, "budget_s": 300.0}
    known |= {"fail_on": ["regressed", "broken"], "unmeasured": [], "verdicts": list(verdicts), "exit_code": 0}
    return make_record({**known, **values}, GateRecord)


REGRESSED = verdict(
    "regressed",
    ratio=1.05,
    interval={"low": 1.04, "high": 1.06, "level": 0.99},
    rounds=8,
    board_s=2.5,
    changes=["kernel: 6.1 -> 6.6"],
)


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        ([], 0),
        (["no change", "new", "improved", "undecided", "toolchain"], 0),
        (["board fault"], 4),
        (["board fault", "broken"], 1),
        (["regressed"], 1),
    ],
)
def test_exit_code_follows_most_serious_verdict(verdicts: list[str], code: int) -> None:
    assert find_exit_code(record(*map(verdict, verdicts))) == code


def test_known_failures_do_not_fail_gate() -> None:
    known, counted = verdict("broken", "known", triage="known"), verdict("regressed", "late", triage="expired")
    assert find_exit_code(record(known, verdict("regressed", triage="wontfix"))) == 0
    found = record(known, counted)
    assert find_exit_code(found) == 1
    assert describe_total(found).startswith("1 broken, 1 regressed, 1 of these known; ")
    text = make_markdown(found)
    assert text.startswith("### hil gate: 1 failure\n") and "| broken (known) |" in text and "triage: expired" in text
    suite = ElementTree.fromstring(make_junit(found))
    tags = {case.get("name", "").split()[0]: [one.tag for one in case] for case in suite.iter("testcase")}
    assert tags == {"known": ["skipped"], "late": ["failure"]}
    levels = [one["level"] for one in json.loads(make_sarif(found))["runs"][0]["results"]]
    assert sorted(levels) == ["error", "warning"]
    assert [one.partition(" ")[0] for one in make_annotations(found)] == ["::warning", "::error"]


def test_every_verdict_has_a_meaning() -> None:
    assert list(MEANINGS) == list(GATE_VERDICTS)


def test_markdown_shows_ratio_and_escapes_texts() -> None:
    text = make_markdown(record(REGRESSED, verdict("no change", "n")))
    (row,) = [line for line in text.splitlines() if line.startswith("| **regressed**")]
    assert "1.050 (1.040 to 1.060)" in row
    assert r"a\|b \<i\>" in row
    assert text.startswith("### hil gate: 1 failure\n")
    assert text.count("- baseline: 1a2b3c4d5") == 1
    assert r"- kernel: 6.1 -\> 6.6" in text


def test_junit_marks_failures_errors_and_skips() -> None:
    key = REGRESSED["key"]
    text = make_junit(record(REGRESSED, verdict("board fault"), verdict("undecided"), verdict("new"), unmeasured=[key]))
    root = ElementTree.fromstring(text)
    assert [len(root.findall(f".//{tag}")) for tag in ("testcase", "failure", "error", "skipped")] == [5, 1, 1, 3]
    failure = root.find(".//failure")
    assert failure is not None and failure.get("type") == "regressed"


def test_sarif_has_result_per_change() -> None:
    (run,) = json.loads(make_sarif(record(REGRESSED, verdict("improved"), verdict("no change"), verdict("new"))))[
        "runs"
    ]
    assert [(one["ruleId"], one["level"]) for one in run["results"]] == [("regressed", "error"), ("improved", "note")]
    place = run["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "models/m.onnx"}
    assert {one["ruleId"] for one in run["results"]} <= {rule["id"] for rule in run["tool"]["driver"]["rules"]}


def test_total_counts_verdicts_and_board_time() -> None:
    text = describe_total(record(REGRESSED, verdict("no change"), unmeasured=[REGRESSED["key"]]))
    assert text == "1 regressed, 1 no change, 1 not measured at this commit; 2.5 s of board time"


def cause(**values: Any) -> dict[str, Any]:
    tried = [{"commit": "b" * 40, "outcome": "bad", "reason": "FAIL: y"}]
    return {"good": "a" * 40, "commits": 2, "tried": tried, **values}


CANDIDATES = [{"commit": "b" * 40, "subject": "use |int8|"}, {"commit": "c" * 40, "subject": "tidy"}]


@pytest.mark.parametrize(
    ("values", "lines"),
    [
        ({"candidates": CANDIDATES[:1]}, ["first bad commit: bbbbbbbbb use |int8|"]),
        (
            {"candidates": CANDIDATES, "reason": "1 commit could not be tested"},
            [
                "first bad commit: one of 2; 1 commit could not be tested",
                "candidate: bbbbbbbbb use |int8|",
                "candidate: ccccccccc tidy",
            ],
        ),
        ({"reason": "commit 'x' is not in /r"}, ["first bad commit: not found; commit 'x' is not in /r"]),
    ],
)
def test_reports_show_first_bad_commit(values: dict[str, Any], lines: list[str]) -> None:
    found = record(verdict("broken", cause=cause(**values)))
    lines = [*lines, "tested: bbbbbbbbb: bad: FAIL: y"]
    assert list(list_details(found.verdicts[0]))[2:] == lines
    assert "\n".join(lines) in (ElementTree.fromstring(make_junit(found)).findtext(".//failure") or "")
    (result,) = json.loads(make_sarif(found))["runs"][0]["results"]
    assert "\n".join(lines) in result["message"]["text"]
    assert make_markdown(found).count("\n- ") == 2 + len(lines)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"axis": "flag", "candidates": [{"value": "-O2 -> -O3"}]}, "first bad flag: -O2 -> -O3"),
        ({"axis": "driver", "reason": "the board failed: lost"}, "first bad driver: not found; the board failed: lost"),
    ],
)
def test_reports_name_axis_and_candidate(values: dict[str, Any], line: str) -> None:
    tried = [{"value": "-O2 -> -O3", "outcome": "bad", "reason": "FAIL: y"}]
    found = record(verdict("broken", cause={"tried": tried, **values}))
    assert list(list_details(found.verdicts[0]))[2:] == [line, "tested: -O2 -> -O3: bad: FAIL: y"]
    (annotation,) = make_annotations(found)
    assert annotation.endswith(f"a|b <i>; {line}")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"layers_reason": "the runtime has no profiler"}, "slower layers: unknown; the runtime has no profiler"),
        (
            {
                "slower_layers": [
                    {"name": "conv2", "change_ns": 1.2e6},
                    {"name": "fc", "change_ns": 1e5, "is_new": True},
                ]
            },
            "slower layers: conv2 +1.2 ms, fc +100 us (new)",
        ),
    ],
)
def test_details_name_slower_layers(values: dict[str, Any], line: str) -> None:
    assert list(list_details(record(verdict("regressed", **values)).verdicts[0]))[2:] == [line]
