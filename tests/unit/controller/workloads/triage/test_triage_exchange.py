"""Triage entries and expected failures convert into each other."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from hil.controller.records.decisions.triage import TriageEntry
from hil.controller.workloads.suites.expected import Expectations, parse
from hil.controller.workloads.triage.entries import TriagedCase, TriageList, make_entry
from hil.controller.workloads.triage.exchange import export_expectations, import_expectations
from hil.errors import UsageError

TODAY = date(2026, 11, 21)
LIST = """
[[compile]]
cases = ["reshape_*", "pad"]
except = "reshape_plain"
outcome = "COMPILE_CRASH"
reason = "allowzero"
issue = "https://example.com/1"
flow = "iree*"

[[run]]
cases = "resize"
outcome = ["FAIL", "PASS"]
reason = "rounds half up"
board = ["evk1", "evk2"]
until = 2030-12-31
"""


def imported(text: str = LIST, **given: str) -> list[TriageEntry]:
    how = {"suite": "nets", "owner": "ada", **given}
    return import_expectations((), parse(text, Path("x.toml")), **how, now=5.0)[0]


def test_import_makes_entry_per_case_and_board() -> None:
    entries = imported()
    assert [(one.case, one.board, one.flow, one.state, one.until) for one in entries] == [
        ("reshape_*", "", "iree*", "known", None),
        ("pad", "", "iree*", "known", None),
        ("resize", "evk1", "", "wontfix", "2030-12-31"),
        ("resize", "evk2", "", "wontfix", "2030-12-31"),
    ]
    first, last = entries[0], entries[-1]
    assert (first.suite, first.owner, first.excluded, first.issue) == (
        "nets",
        "ada",
        ["reshape_plain"],
        "https://example.com/1",
    )
    assert (last.outcomes, last.note, last.stage) == (["FAIL"], "rounds half up", "run")


def test_import_keeps_priority_of_compile_entries() -> None:
    row = '[[{}]]\ncases = "a"\noutcome = "{}"\nreason = "x"\n'
    text = row.format("compile", "COMPILE_ERROR") + row.format("run", "FAIL") + row.format("run", "BLIND")
    entries, count = import_expectations((), parse(text, None), suite="", owner="", now=1.0)
    assert count == 1 and [one.outcomes for one in entries] == [["COMPILE_ERROR"]]


@pytest.mark.parametrize(
    "given", [{"owner": "x" * 501}, {"suite": "x" * 501}, {"text": LIST.replace("pad", "x" * 501)}]
)
def test_import_rejects_long_texts(given: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="has 501 characters"):
        imported(**given)


def test_import_keeps_owner_of_existing_entry() -> None:
    before = [make_entry(case="pad", suite="nets", flow="iree*", state="new", owner="bo")]
    found, count = import_expectations(before, parse(LIST, None), suite="nets", owner="ada", now=1.0)
    assert count == 4 and [one.owner for one in found if one.case == "pad"] == ["bo"]
    assert len(found) == 4


def test_export_is_valid_list_with_same_meaning(tmp_path: Path) -> None:
    text, left_out = export_expectations(imported(), suite="nets", today=TODAY)
    assert left_out == []
    (tmp_path / "expected.toml").write_text(text)
    entries = Expectations.load(tmp_path / "expected.toml").entries
    assert sorted(imported(text), key=repr) == sorted(imported(), key=repr)
    # The exact name is last, because later entries have priority.
    assert [one.cases for one in entries[:2]] == [("reshape_*",), ("pad",)]


def test_export_joins_exact_cases_with_same_reason() -> None:
    entries = [make_entry(case=case, state="known", outcomes=["FAIL"], note="x") for case in ("unpad", "pad")]
    text, _ = export_expectations(entries, suite="", today=TODAY)
    assert [one.cases for one in parse(text, None)] == [("pad", "unpad")]


def test_export_writes_specific_entries_last() -> None:
    entries = [
        make_entry(case="mlp_a", state="known", outcomes=["FAIL"], note="exact"),
        make_entry(case="mlp_*", state="known", outcomes=["RUN_CRASH"], note="wild"),
        make_entry(case="mlp_[ab]", state="known", outcomes=["FAIL"], note="exact"),
        make_entry(case="mlp_b", state="known", outcomes=["RUN_CRASH"], note="wild"),
    ]
    text, _ = export_expectations(entries, suite="", today=TODAY)
    for case in ("mlp_a", "mlp_b", "mlp_c"):
        expected = [one for one in parse(text, None) if one.covers(case)][-1]
        found = TriageList(tuple(entries), TODAY).find(TriagedCase(case))
        assert found is not None and (expected.reason, expected.outcomes) == (found.note, tuple(found.outcomes))


def test_export_leaves_out_other_states_and_suites() -> None:
    entries = [
        make_entry(case="a", state="new", outcomes=["FAIL"]),
        make_entry(case="b", state="fixed", outcomes=["FAIL"]),
        make_entry(case="c", state="known"),
        make_entry(case="d", state="known", outcomes=["SLOWER"]),
        make_entry(case="e", state="wontfix", until="2020-01-01", outcomes=["FAIL"]),
        make_entry(case="f", state="known", outcomes=["FAIL"], suite="other"),
        make_entry(case="g", state="known", outcomes=["FAIL", "COMPILE_ERROR"], suite="net*"),
    ]
    text, left_out = export_expectations(entries, suite="nets", today=TODAY)
    assert [line.partition(":")[0] for line in left_out] == ["a", "b", "c", "d", "e"]
    assert [(one.table, one.cases, one.outcomes) for one in parse(text, None)] == [
        ("compile", ("g",), ("COMPILE_ERROR",)),
        ("run", ("g",), ("FAIL",)),
    ]


def test_timeout_is_exported_to_table_of_its_stage() -> None:
    entries = [make_entry(case="a", state="known", outcomes=["TIMEOUT"], stage="compile")]
    text, _ = export_expectations(entries, suite="", today=TODAY)
    assert [one.table for one in parse(text, None)] == ["compile"]
