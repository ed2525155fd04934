"""Files of expected failures: matching entries and judged records."""

from __future__ import annotations

import textwrap
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hil.controller.records.suite import CaseRecord
from hil.controller.workloads.suites.expected import TABLES, Expectations, strip_judgement
from hil.core.results import BOARD_OUTCOMES, Outcome
from hil.errors import UsageError

TODAY = date(2026, 11, 21)


def expectations(tmp_path: Path, text: str, today: date = TODAY) -> Expectations:
    path = tmp_path / "expected.toml"
    path.write_text(textwrap.dedent(text))
    return Expectations.load(path, today=today)


def record(case_id: str, ended: str = "PASS", stage: str = "", **values: Any) -> CaseRecord:
    early = ended in TABLES["compile"] and ended != "TIMEOUT"
    given = {
        **{"model": "net", "suite": "s", "flow": "iree", "runtime": "iree", "board": "sim", "hw_type": "sim"},
        **{"message": "" if ended == "PASS" else "it broke", "stage": stage or ("compile" if early else "compare")},
        **values,
    }
    return CaseRecord(id=case_id, outcome=ended, ended=ended, **given)


def entry(table: str = "run", **values: Any) -> str:
    """An entry's text; values as TOML writes them."""
    given = {"cases": '"*"', "outcome": '"FAIL"' if table == "run" else '"COMPILE_ERROR"', "reason": '"why"', **values}
    return f"[[{table}]]\n" + "".join(f"{key} = {value}\n" for key, value in given.items())


# --- judged records ---------------------------------------------------------------------------------------------------


def test_missing_file_expects_every_case_to_pass(tmp_path: Path) -> None:
    for known in (Expectations.load(None), Expectations.load(tmp_path / "expected.toml")):
        assert known.entries == () and known.find(record("a")) is None
        for one in (record("a"), record("a", "FAIL"), record("a", "BOARD_LOST")):
            assert known.judge(one) == one
        assert known.list_remarks(["a"], flow="iree", runtime="iree") == []


def test_expected_failure_becomes_xfail(tmp_path: Path) -> None:
    known = expectations(tmp_path, entry(cases='"conv_*"', issue='"https://example.com/7"'))
    found = known.judge(record("conv_1", "FAIL"))
    assert (found.outcome, found.ended, found.message) == ("XFAIL", "FAIL", "it broke")
    assert found.expectation == {"outcome": "FAIL", "reason": "why", "issue": "https://example.com/7"}
    assert known.judge(record("relu_1", "FAIL")).outcome == "FAIL"


def test_unexpected_pass_becomes_xpass(tmp_path: Path) -> None:
    known = expectations(tmp_path, entry("compile", outcome='["COMPILE_ERROR", "COMPILE_CRASH"]'))
    found = known.judge(record("conv_1"))
    assert (found.outcome, found.ended) == ("XPASS", "PASS")
    assert found.message == "COMPILE_ERROR or COMPILE_CRASH was expected (why)" and "--update" in found.hint
    assert Outcome(found.outcome).exit_code == 1
    found = known.judge(record("conv_1", message="0 elements compared"))
    assert found.message == "0 elements compared; COMPILE_ERROR or COMPILE_CRASH was expected (why)"


@pytest.mark.parametrize(
    ("ended", "stage"), [("RUN_CRASH", "run"), ("COMPILE_ERROR", "compile"), ("TIMEOUT", "run"), ("LOAD_ERROR", "load")]
)
def test_different_failure_preserves_outcome(tmp_path: Path, ended: str, stage: str) -> None:
    found = expectations(tmp_path, entry()).judge(record("a", ended, stage))
    assert (found.outcome, found.ended) == (ended, ended)
    assert found.message == "it broke; FAIL was expected (why)" and found.expectation["outcome"] == "FAIL"


def test_message_of_returns_original_message(tmp_path: Path) -> None:
    known = expectations(tmp_path, entry() + entry(cases='"old"', outcome='"LOAD_ERROR"', until="2026-11-20"))
    for one in (record("a"), record("a", "FAIL"), record("a", "RUN_ERROR"), record("b", "RUN_ERROR", message="")):
        assert strip_judgement(known.judge(one)) == one.message
    alone = expectations(tmp_path, entry(until="2026-11-20"))
    one = record("a", "FAIL")
    assert alone.judge(one).message != one.message == strip_judgement(alone.judge(one))


@pytest.mark.parametrize("stage", ["import", "compile", "push", "load", "run", "refer"])
def test_timeout_belongs_to_table_of_stage(tmp_path: Path, stage: str) -> None:
    for table in TABLES:
        found = expectations(tmp_path, entry(table, outcome='"TIMEOUT"')).judge(record("a", "TIMEOUT", stage))
        assert (found.outcome == "XFAIL") is ((stage in ("import", "compile")) == (table == "compile"))


def test_optional_pass_accepts_pass_and_failure(tmp_path: Path) -> None:
    known = expectations(tmp_path, entry(outcome='["LOAD_ERROR", "PASS"]'))
    assert known.judge(record("a")) == record("a")
    assert known.judge(record("a", "LOAD_ERROR", "load")).outcome == "XFAIL"
    found = known.judge(record("a", "FAIL"))
    assert (found.outcome, found.message) == ("FAIL", "it broke; LOAD_ERROR or PASS was expected (why)")
    late = expectations(tmp_path, entry(outcome='["LOAD_ERROR", "PASS"]', until="2026-11-20"))
    assert late.judge(record("a")) == record("a")


def test_surprise_hint_names_version_differences(tmp_path: Path) -> None:
    installed = {"numpy": version("numpy"), "onnx": "1.0.0", "no-such-package": "2.1"}
    head = "[made_with]\n" + "".join(f'{name} = "{made}"\n' for name, made in installed.items())
    known = expectations(tmp_path, head + entry(cases='"a"') + entry(cases='"old"', until="2026-11-20"))
    told = "the expected failures were recorded with onnx 1.0.0 (here: "
    assert known.other_versions.startswith(told) and "no-such-package 2.1 (here: none)" in known.other_versions
    assert "numpy" not in known.other_versions
    for one in (record("a"), record("a", "RUN_CRASH"), record("b", "FAIL", hint="look there"), record("old", "FAIL")):
        assert told in known.judge(one).hint
    assert known.judge(record("b", "FAIL", hint="look there")).hint.startswith("look there; ")
    for one in (record("a", "FAIL"), record("b"), record("b", "BOARD_LOST")):
        assert known.judge(one).hint == ""
    assert told in known.list_remarks(["a", "old"], flow="iree", runtime="iree")[-1]
    # Local builds such as PyTorch's for CPUs (2.13.0+cpu) count as the same version.
    same = expectations(tmp_path, f'[made_with]\nnumpy = "{version("numpy")}+cpu"\n' + entry())
    assert (
        same.judge(record("b", "RUN_CRASH")).hint == "" and same.list_remarks(["a"], flow="iree", runtime="iree") == []
    )


@pytest.mark.parametrize("ended", ["BOARD_LOST", "SKIP"])
def test_expected_outcomes_exclude_lost_board(tmp_path: Path, ended: str) -> None:
    every = "".join(entry(table, outcome=str(list(words))) for table, words in TABLES.items())
    assert expectations(tmp_path, every).judge(record("a", ended)) == record("a", ended)


def test_every_case_outcome_can_be_expected() -> None:
    never = {"PASS", *BOARD_OUTCOMES, "SKIP", "XFAIL", "XPASS"}
    assert {word for words in TABLES.values() for word in words} == {one.value for one in Outcome} - never


# --- which entry counts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "place", "counts"),
    [
        ({}, {}, True),
        ({"flow": '"iree*"'}, {"flow": "iree-O3"}, True),
        ({"flow": '"iree"'}, {"flow": "iree-O3"}, False),
        ({"flow": '["int8", "iree-O?"]'}, {"flow": "iree-O3"}, True),
        ({"runtime": '"onnxruntime"'}, {}, False),
        ({"board": '"sim*"'}, {"board": "lab-4", "hw_type": "sim-m33"}, True),
        ({"board": '"lab-4"'}, {"board": "lab-4", "hw_type": "sim-m33"}, True),
        ({"board": '"rpi5"'}, {"board": "lab-4", "hw_type": "sim-m33"}, False),
        ({"board": '"sim"'}, {"board": ""}, True),  # it did not get as far as a board
        ({"flow": '"iree"', "board": '"rpi5"'}, {}, False),
    ],
)
def test_entry_applies_in_scope_only(
    tmp_path: Path, scope: dict[str, str], place: dict[str, str], counts: bool
) -> None:
    known = expectations(tmp_path, entry(**scope))
    one = record("a", "FAIL", **place)
    assert (known.judge(one).outcome == "XFAIL") is counts
    assert known.selects("a", one.flow, one.board, one.runtime, one.hw_type) is counts


def test_patterns_match_like_shell_with_case(tmp_path: Path) -> None:
    known = expectations(tmp_path, entry(cases='["conv_?d", "x[12]", "a.b"]', **{"except": '"conv_3*"'}))
    ids = ["conv_1d", "conv_3d", "conv_10d", "Conv_1d", "x1", "x3", "a.b", "aXb", "a.b.c"]
    assert [one for one in ids if known.find(record(one))] == ["conv_1d", "x1", "a.b"]


def test_last_entry_of_table_wins(tmp_path: Path) -> None:
    known = expectations(tmp_path, entry() + entry(cases='"a"', outcome='"RUN_CRASH"') + entry(flow='"other"'))
    assert known.judge(record("a", "RUN_CRASH")).outcome == "XFAIL"
    assert known.judge(record("a", "FAIL")).outcome == "FAIL"
    assert known.judge(record("b", "FAIL")).outcome == "XFAIL"


@pytest.mark.parametrize("first", ["compile", "run"])
def test_compile_entry_precedes_run_entry(tmp_path: Path, first: str) -> None:
    texts = {"compile": entry("compile", cases='"a"'), "run": entry()}
    known = expectations(tmp_path, texts.pop(first) + "".join(texts.values()))
    assert known.judge(record("a", "COMPILE_ERROR")).outcome == "XFAIL"
    assert known.judge(record("a", "FAIL")).outcome == "FAIL"
    assert known.judge(record("a")).outcome == "XPASS"
    assert known.judge(record("b", "FAIL")).outcome == "XFAIL"


def test_entry_expires_after_date(tmp_path: Path) -> None:
    text = entry(cases='"a"', until="2026-11-21")
    assert expectations(tmp_path, text).judge(record("a", "FAIL")).outcome == "XFAIL"
    late = expectations(tmp_path, text, date(2026, 11, 22))
    found = late.judge(record("a", "FAIL"))
    assert (found.outcome, found.message) == ("FAIL", "it broke; FAIL was expected until 2026-11-21 (why)")
    assert late.judge(record("a")) == record("a") and late.judge(record("b", "FAIL")) == record("b", "FAIL")
    assert not late.selects("a", "iree", "sim", "iree")
    assert [one.number for one in late.expired()] == [1]
    [remark] = late.list_remarks(["a"], flow="iree", runtime="iree")
    assert "[[run]] entry 1: expired after 2026-11-21" in remark


def test_earlier_entry_applies_after_expiry(tmp_path: Path) -> None:
    known = expectations(tmp_path, entry() + entry(outcome='"RUN_CRASH"', until="2026-11-20"))
    assert known.judge(record("a", "FAIL")).outcome == "XFAIL"


def test_remarks_list_unmatched_patterns(tmp_path: Path) -> None:
    known = expectations(
        tmp_path,
        entry(cases='["a", "gone", "c*", "x?"]')
        + entry("compile", cases='["1", "2", "3", "4", "5"]', board='"elsewhere"')
        + entry(cases='"nobody"', flow='"other"')
        + entry(cases='"a"'),
    )
    unused = known.list_unused(["a", "b", "cc"], flow="iree", runtime="iree")
    assert list(unused.values()) == [("1", "2", "3", "4", "5"), ("gone", "x?")]
    assert [line.partition(": ")[2] for line in known.list_remarks(["a", "b", "cc"], flow="iree", runtime="iree")] == [
        "[[compile]] entry 1: no case matches 1, 2, 3 and 2 more",
        "[[run]] entry 1: no case matches gone, x?",
    ]


def test_judge_handles_many_entries_and_cases_quickly(tmp_path: Path) -> None:
    text = "".join(
        entry(cases=str([f"op_{n}_{k}_cpu" for k in range(5)]), flow='"iree*"') + entry(cases=f'"group_{n}_*"')
        for n in range(200)
    )
    known = expectations(tmp_path, text)
    ids = [f"op_{n}_{k}_cpu" for n in range(200) for k in range(8)]
    start = time.process_time()
    judged = [known.judge(record(one, "FAIL")) for one in ids]
    known.list_remarks(ids, flow="iree", runtime="iree")
    assert sum(one.outcome == "XFAIL" for one in judged) == 1000
    assert time.process_time() - start < 20  # measured: 0.4 s


# --- invalid files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("[[run]\n", "cannot be read", ""),
        ("[[runs]]\n", "unknown table 'runs'", "did you mean 'run'?"),
        ("run = 3\n", "run must be an array of tables", "[[run]]"),
        ("[run]\nreason = 'x'\n", "run must be an array of tables", "[[run]]"),
        (entry(flows='"x"'), "[[run]] entry 1: unknown key 'flows'", "did you mean 'flow'?"),
        (entry() + "[[run]]\ncases = 'a'\n", "[[run]] entry 2: missing 'outcome'", "cases, outcome and reason"),
        (entry(reason='" "'), "reason must be a string, and reason must not be empty", ""),
        (entry(issue="7"), "issue must be a string", ""),
        (entry(cases="[]"), "cases must be a non-empty string or a non-empty list", ""),
        (entry(cases='["a", ""]'), "cases must be a non-empty string or a non-empty list", ""),
        (entry(cases='["a", 1]'), "cases must be a non-empty string or a non-empty list", ""),
        (entry(board="1"), "board must be a non-empty string or a non-empty list", ""),
        (entry(outcome='"FIAL"'), "unknown outcome 'FIAL'", "did you mean 'FAIL'?"),
        (entry(outcome='"load_error"'), "unknown outcome 'load_error'", "did you mean 'LOAD_ERROR'"),
        (entry("compile", outcome='"FAIL"'), "[[compile]] entry 1: unsupported outcome FAIL in [[compile]]", "[[run]]"),
        (entry(outcome='["FAIL", "COMPILE_CRASH"]'), "unsupported outcome COMPILE_CRASH in [[run]]", "[[compile]]"),
        (entry(outcome='"BOARD_LOST"'), "unsupported outcome BOARD_LOST", "one of FAIL"),
        (entry(outcome='"PASS"'), "outcome must not be only PASS", "one of FAIL"),
        (entry(outcome='["PASS", "PASS"]'), "outcome must not be only PASS", "one of FAIL"),
        ("made_with = 3\n", "[made_with] must map packages to versions", 'onnx = "1.23.2"'),
        ("[made_with]\nonnx = 1.2\n", "[made_with] must map packages to versions", ""),
        ("[made_wiht]\nonnx = '1.2'\n", "unknown table 'made_wiht'", "did you mean 'made_with'?"),
        (entry() + "[made_with]\nonnx = '1.2'\n", "[made_with] must come before the entries", ""),
        (entry(outcome='"XFAIL"'), "unsupported outcome XFAIL", "one of FAIL"),
        (entry(until='"2030-01-01"'), "until must be a date", "without quotes"),
        (entry(until="2030-01-01T00:00:00"), "until must be a date", "without quotes"),
        (entry(until="2030"), "until must be a date", "without quotes"),
    ],
)
def test_load_error_names_place_in_file(tmp_path: Path, text: str, says: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        expectations(tmp_path, text)
    assert "expected.toml" in caught.value.message and says in caught.value.message
    assert hint in caught.value.hint


def test_load_rejects_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for name in ("folder.toml", "bytes.toml"):
        with pytest.raises(UsageError, match="cannot be read"):
            Expectations.load(tmp_path / name)
