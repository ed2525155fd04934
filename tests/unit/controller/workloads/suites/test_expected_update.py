"""Update expected failures from a run: the run passes afterwards and other entries stay unchanged."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomlkit
from hypothesis import given, settings
from hypothesis import strategies as st

from hil.compare.verdict import compare
from hil.controller.records.suite import CaseRecord
from hil.controller.workloads.suites.expected import TABLES, Expectation, Expectations, parse
from hil.controller.workloads.suites.expected_update import generalize_text, update, update_text
from hil.core.results import Outcome, RunResult
from hil.errors import UsageError

TODAY = date(2026, 11, 21)


def record(case_id: str, ended: str = "PASS", message: str = "", **values: Any) -> CaseRecord:
    early = ended in TABLES["compile"] and ended != "TIMEOUT"
    given_ = {
        **{"model": "net", "suite": "s", "flow": "iree", "runtime": "iree", "board": "sim", "hw_type": "sim"},
        **{"message": message, "stage": "compile" if early else "compare", **values},
    }
    return CaseRecord(id=case_id, outcome=ended, ended=ended, **given_)


class File:
    """A file of expected failures in a suite of cases a to z."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "expected.toml"

    def write(self, text: str) -> File:
        self.path.write_text(textwrap.dedent(text))
        return self

    def update(self, *records: CaseRecord, write: bool = True, ids: str = "abcdefghijklmnopqrstuvwxyz") -> str:
        return update(self.path, records, ids=list(ids), write=write, today=TODAY)

    @property
    def text(self) -> str:
        return self.path.read_text()

    def entries(self, table: str) -> list[dict[str, Any]]:
        return tomlkit.parse(self.text).unwrap().get(table, [])


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path)


# --- new entries -----------------------------------------------------------------------------------------------------


def test_first_update_writes_entry_per_failure_kind(file: File) -> None:
    diff = file.update(
        record("c", "FAIL", "output y: 3 of 12 values differ"),
        record("a", "COMPILE_ERROR", "failed to legalize operation 'x'\nmore", flow="iree-O3"),
        record("b"),
        record("d", "TIMEOUT", "outlived 60 s", stage="compile"),
        record("e", "TIMEOUT", "outlived 60 s", stage="run"),
    )
    place = {"flow": "iree", "board": "sim"}
    # The reason contains no numbers, because they may differ in the next run.
    assert file.entries("compile") == [
        {
            "cases": "a",
            "outcome": "COMPILE_ERROR",
            "reason": "failed to legalize operation 'x'",
            **place,
            "flow": "iree-O3",
        },
        {"cases": "d", "outcome": "TIMEOUT", "reason": "outlived 60 s", **place},
    ]
    assert file.entries("run") == [
        {"cases": "c", "outcome": "FAIL", "reason": "values differ", **place},
        {"cases": "e", "outcome": "TIMEOUT", "reason": "outlived 60 s", **place},
    ]
    assert diff.startswith("--- /dev/null\n") and file.text.replace("\n", "\n+") in f"+{diff}+"


def test_similar_failures_share_entry_and_reason(file: File) -> None:
    names = "qponmlkjihgfedcba"
    file.update(
        *(record(name, "FAIL", f"output o{n}: {n} of 12 values out of tolerance") for n, name in enumerate(names)),
        record("x", "FAIL", "dtype int8, the reference has float32"),
        record("y", "RUN_ERROR", "output o1: 1 of 12 values out of tolerance"),
    )
    alike_, dtype, other = file.entries("run")
    assert alike_["cases"] == sorted(names)
    assert alike_["reason"] == "values out of tolerance"
    assert (dtype["cases"], dtype["reason"]) == ("x", "dtype int8, the reference has float32")
    assert other["outcome"] == "RUN_ERROR"
    file.update(*(record(f"a_long_name_of_a_case_{n}", "LOAD_ERROR", "too big") for n in range(9)))
    assert '    "a_long_name_of_a_case_3",\n' in file.text, "a list too wide for a line has a line for each"


def test_new_failure_joins_matching_entry(file: File) -> None:
    file.write("""\
        # Our own list.

        # Seen on all of them.
        [[run]]  # f
        cases = ["b", "d"]  # two
        outcome = "FAIL"
        reason = "output y: 7 of 9 values differ"
        issue = "https://example.com/7"
        """)
    before = file.text
    file.update(record("c", "FAIL", "output z: 1 of 2 values differ"), record("b", "FAIL"), record("d", "FAIL"))
    assert file.text == before.replace('"b", "d"', '"b", "c", "d"')


@pytest.mark.parametrize("line", ["until = 2030-01-01\n", 'flow = "other"\n', 'board = "rpi5"\n', 'except = ["c*"]\n'])
def test_new_failure_skips_entry_of_other_scope(file: File, line: str) -> None:
    file.write('[[run]]\ncases = "x"\noutcome = "FAIL"\nreason = "it differs"\n' + line)
    before = file.text
    file.update(record("c", "FAIL", "it differs"))
    assert file.text.startswith(before) and [one["cases"] for one in file.entries("run")] == ["x", "c"]


def test_update_fills_empty_reason(file: File) -> None:
    file.update(record("a", "RUN_CRASH"), record("b", "RUN_CRASH", "   \n"))
    assert file.entries("run")[0]["reason"] == "RUN_CRASH"


def test_judged_run_gives_same_update(file: File) -> None:
    file.write('[[run]]\ncases = ["a", "b"]\noutcome = "FAIL"\nreason = "it differs"\n')
    run = [record("a", "RUN_ERROR", "no such kernel"), record("b"), record("c", "FAIL", "it differs")]
    known = Expectations.load(file.path, today=TODAY)
    judged = [known.judge(one) for one in run]
    assert judged != run and file.update(*judged, write=False) == file.update(*run, write=False)
    file.update(*judged)
    assert [one["reason"] for one in file.entries("run")] == ["no such kernel", "it differs"]


# --- passing cases ----------------------------------------------------------------------------------------------------


def test_update_removes_passing_cases_and_empty_entries(file: File) -> None:
    file.write("""\
        # All of them.

        # Gone soon.
        [[compile]]
        cases = "a"
        outcome = "COMPILE_ERROR"
        reason = "one"

        # Resizing.

        # Stays.
        [[run]]
        cases = [
            "b",
            "c",  # of old
            "d",  # too
        ]
        outcome = "FAIL"
        reason = "two"
        """)
    file.update(record("a"), record("c"))
    assert file.text == textwrap.dedent("""\
        # All of them.


        # Resizing.

        # Stays.
        [[run]]
        cases = [
            "b",
            "d",  # too
        ]
        outcome = "FAIL"
        reason = "two"
        """)
    file.update(record("b"), record("d"))
    assert file.text == "# All of them.\n\n\n# Resizing.\n"


def test_update_adds_exception_to_pattern(file: File) -> None:
    file.write('[[run]]\ncases = ["a*", "x"]\noutcome = "FAIL"\nreason = "r"\n')
    ids = {"a1", "a2", "a3", "x"}
    path = file.path
    update(path, [record("a1"), record("a2", "FAIL")], ids=ids, write=True, today=TODAY)
    assert file.entries("run") == [{"cases": ["a*", "x"], "outcome": "FAIL", "reason": "r", "except": "a1"}]
    update(path, [record("a2"), record("x", "FAIL")], ids=ids, write=True, today=TODAY)
    assert file.entries("run")[0]["except"] == ["a1", "a2"]
    # A pattern and its exceptions are removed with its last case.
    update(path, [record("a3")], ids=ids, write=True, today=TODAY)
    assert file.entries("run") == [{"cases": ["x"], "outcome": "FAIL", "reason": "r"}]


def test_repeated_failure_removes_exception(file: File) -> None:
    file.write('[[run]]\ncases = "?"\nexcept = ["a", "b"]\noutcome = "FAIL"\nreason = "it differs"\n')
    file.update(record("b", "FAIL", "it differs"))
    [entry] = file.entries("run")
    assert (entry["cases"], entry["except"]) == ("?", ["a"]) and Expectations.load(file.path).find(record("b"))


def test_update_preserves_exception_for_listed_case(file: File) -> None:
    file.write('[[run]]\ncases = ["a", "b", "c"]\nexcept = "a"\noutcome = "FAIL"\nreason = "it differs"\n')
    file.update(record("b"))
    assert file.entries("run")[0] == {"cases": ["a", "c"], "except": "a", "outcome": "FAIL", "reason": "it differs"}


def test_changed_failure_moves_to_other_entry(file: File) -> None:
    file.write('[[compile]]\ncases = ["a", "b"]\noutcome = "COMPILE_ERROR"\nreason = "r"\nissue = "i"\n')
    file.update(record("a", "FAIL", "it differs"), record("b", "COMPILE_CRASH", "died"))
    assert [(one["cases"], one["outcome"]) for one in file.entries("compile")] == [("b", "COMPILE_CRASH")]
    assert [(one["cases"], one["outcome"]) for one in file.entries("run")] == [("a", "FAIL")]


def test_hidden_entry_applies_after_removal(file: File) -> None:
    file.write("""\
        [[run]]
        cases = "*"
        outcome = "FAIL"
        reason = "all"

        [[run]]
        cases = "a"
        outcome = "RUN_CRASH"
        reason = "this one"
        """)
    file.update(record("a", "FAIL"))
    assert [one["reason"] for one in file.entries("run")] == ["all"]


# --- unchanged entries ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ['flow = "other"', 'runtime = "onnxruntime"', 'board = ["rpi5", "lab*"]'])
def test_update_preserves_entries_of_other_scope(file: File, scope: str) -> None:
    file.write(f'[[run]]\ncases   =  ["a",]\n{scope}\noutcome="FAIL"\nreason=\'r\'\n')
    before = file.text
    assert file.update(record("a"), record("b")) == "" and file.text == before
    file.update(record("a", "FAIL", "r"))
    assert file.text.startswith(before) and len(file.entries("run")) == 2


def test_update_preserves_cases_without_result(file: File) -> None:
    file.write('[[run]]\ncases = ["a", "b"]\noutcome = "FAIL"\nreason = "r"\n')
    assert file.update(record("c")) == ""
    file.update(record("a"))
    assert file.entries("run")[0]["cases"] == ["b"]


@pytest.mark.parametrize(
    "silent",
    [
        record("a", "BOARD_LOST"),
        record("a", "SKIP"),
        record("a", "FAIL", "it differs", confirmed="flaky"),
        record("a", "FAIL", "it differs", confirmed="one bad board"),
    ],
)
@pytest.mark.parametrize("there", ["", '[[run]]\ncases = "a"\noutcome = "LOAD_ERROR"\nreason = "r"\n'])
def test_inconclusive_result_does_not_change_file(file: File, silent: CaseRecord, there: str) -> None:
    assert file.write(there).update(silent) == "" and file.text == there


def test_confirmed_failure_changes_file(file: File) -> None:
    assert file.update(record("a", "FAIL", "it differs", confirmed="always wrong"))


def test_update_does_not_renew_expired_entry(file: File) -> None:
    file.write('[[run]]\ncases = ["a", "b"]\noutcome = "FAIL"\nreason = "r"\nuntil = 2026-11-20\n')
    assert file.update(record("a", "FAIL"), record("b", "FAIL")) == ""
    file.update(record("a"), record("b", "LOAD_ERROR", "too big"))
    assert [one["cases"] for one in file.entries("run")] == [["b"], "b"]


def test_update_without_write_returns_diff_only(file: File) -> None:
    assert "+[[run]]" in file.update(record("a", "FAIL", "m"), write=False) and not file.path.exists()


@pytest.mark.parametrize(
    "text",
    [
        'run = [{cases = "a", outcome = "FAIL", reason = "r"}]\n',
        '[[run]]\ncases = "a"\noutcome = "FAIL"\nreason = """\n[[run]]\ncases"""\n',
        '[["run"]]\ncases = "a"\noutcome = "FAIL"\nreason = "r"\n',
    ],
)
def test_update_rejects_unsupported_syntax(file: File, text: str) -> None:
    assert file.write(text).update(record("a", "FAIL")) == ""
    with pytest.raises(UsageError, match="unsupported layout of the entries"):
        file.update(record("a"))
    assert file.text == text


def test_update_rejects_invalid_file(file: File) -> None:
    with pytest.raises(UsageError, match="unknown key"):
        file.write('[[run]]\ncase = "a"\n').update(record("a"))


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (
            "output y: 3 of 12 values differ, worst at [0, 1]: -1.5e-07",
            "output z: 1 of 7 values differ, worst at [4]: nan",
            True,
        ),
        ("failed to legalize 'torch.a' at 'Conv_0'", "failed to legalize 'torch.a' at '/net/Conv'", True),
        ("failed to legalize 'torch.a' at 'Conv_0'", "failed to legalize 'torch.b' at 'Conv_0'", False),
        ("NOT_IMPLEMENTED: Foo(13)", "NOT_IMPLEMENTED: Foo(17)", True),
        ("died of SIGSEGV", "died of SIGABRT", False),
        ("dtype int8, the reference has float32", "dtype int8, the reference has int32", False),
        ("[[1, 2], [3]] is no shape", "[[], []] is no shape", True),
        ("line one\nof mine", "line one\nof yours", True),
    ],
)
def test_alike_ignores_names_and_numbers(one: str, other: str, same: bool) -> None:
    assert (generalize_text(one) == generalize_text(other)) is same


def verdict(actual: Any, wanted: Any) -> str:
    """Return the comparison's reason for an output y."""
    mine, theirs = (RunResult(outputs={"y": np.array(value)}, source="r 1.2") for value in (actual, wanted))
    found = compare(mine, theirs)
    assert found.outcome is Outcome.FAIL
    return found.reason


@pytest.mark.parametrize(
    ("actual", "wanted", "reason"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.5, 3.5], "values out of tolerance"),
        ([1.0], [1.5], "values out of tolerance"),
        ([1, 2], [1, 3], "values differ"),
        ([1, 2], [4, 3], "values differ"),
        (["a, b; c"], ["x"], "values differ"),
        ([np.nan, 1.0], [1.0, 1.0], "values NaN or infinite on one side only"),
        ([0.0, 0.0], [1.0, 2.0], "every value is 0, but the reference has other values"),
        ([[1.0, 2.0]], [[1.0], [2.0]], "shape …, the reference has …"),
        (np.float32([1, 2]), [1, 2], "dtype float32, the reference has int64"),
        (np.float32([1, 2]), [1.0, 3.0], "dtype float32, the reference has float64; values out of tolerance"),
    ],
)
def test_failure_reason_omits_measured_numbers(file: File, actual: Any, wanted: Any, reason: str) -> None:
    file.update(record("a", "FAIL", verdict(actual, wanted)))
    assert [one["reason"] for one in file.entries("run")] == [reason]


@settings(max_examples=100)
@given(st.text(alphabet="ab 12'\"`[](),.:-+…\nnaninf", max_size=400))
def test_alike_stays_short_and_idempotent(text: str) -> None:
    assert (
        generalize_text(generalize_text(text)) == generalize_text(text)
        and len(generalize_text(text)) <= 160
        and "\n" not in generalize_text(text)
    )


# --- any file and run -------------------------------------------------------------------------------------------------

NAMES = ["a", "b", "c", "ab", "bc"]
PATTERNS = st.lists(st.sampled_from([*NAMES, "*", "a*", "?b", "[bc]"]), min_size=1, max_size=3)


@st.composite
def files(draw: st.DrawFn) -> str:
    blocks = []
    for _ in range(draw(st.integers(0, 4))):
        table = draw(st.sampled_from(list(TABLES)))
        lines = [f"[[{table}]]", f"cases = {draw(PATTERNS)}"]
        outcomes = draw(st.lists(st.sampled_from(TABLES[table]), min_size=1, max_size=2))
        outcomes += ["PASS"] * draw(st.booleans())
        lines += [f"outcome = {outcomes}", f'reason = "{draw(st.sampled_from(["m 1", "other"]))}"']
        for key, choices in (("flow", ["iree", "f*"]), ("board", ["sim", "rpi5"]), ("except", [*NAMES, "b*"])):
            if draw(st.booleans()):
                lines.append(f'{key} = "{draw(st.sampled_from(choices))}"')
        if draw(st.booleans()):
            lines.append(f"until = {draw(st.sampled_from(['2026-11-20', '2026-11-21']))}")
        blocks.append(draw(st.sampled_from(["", "# said\n", "\n"])) + "\n".join(lines) + "\n")
    return "".join(blocks)


@st.composite
def runs(draw: st.DrawFn) -> list[CaseRecord]:
    words = ["PASS", "PASS", *TABLES["compile"], *TABLES["run"], "BOARD_LOST"]
    return [
        record(name, draw(st.sampled_from(words)), draw(st.sampled_from(["m 1", "m 2", "x"])))
        for name in draw(st.lists(st.sampled_from(NAMES), unique=True))
    ]


@settings(max_examples=100)
@given(files(), runs())
def test_updated_run_passes_and_other_cases_stay(text: str, run: list[CaseRecord]) -> None:
    path = Path("expected.toml")
    after = update_text(text, path, run, ids=NAMES, today=TODAY)
    assert update_text(after, path, run, ids=NAMES, today=TODAY) == after
    before, now = (Expectations(path, parse(one, path), TODAY) for one in (text, after))
    for one in run:
        overdue = any(old.applies_to(one) and old.expects(one) for old in now.expired())
        if one.ended == "BOARD_LOST":
            assert now.judge(one) == one
        elif not overdue or now.find(one):
            assert now.judge(one).outcome in ("PASS", "XFAIL")
    for name in set(NAMES) - {one.id for one in run}:
        for ended in ("PASS", "FAIL", "COMPILE_ERROR"):
            assert now.judge(record(name, ended)) == before.judge(record(name, ended))

    def elsewhere(entries: tuple[Expectation, ...]) -> list[Expectation]:
        return [replace(one, number=0) for one in entries if not one.in_scope("iree", "iree", "sim", "sim")]

    assert elsewhere(before.entries) == elsewhere(now.entries)
