"""A study's list, its rows and its table. No compiler runs here."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from hil.controller.study.plan import Experiment, read_study
from hil.controller.study.record import FAILED, PASSED, Row, StageResult, exit_code, row_of, summary
from hil.controller.study.show import cells, failures, markdown, write_tables
from hil.controller.study.ways import WAYS
from hil.errors import UsageError
from hil.results import Outcome

FOURTEEN = Path(__file__).parents[4] / "examples" / "tfcompile_study"
ONE = Experiment("fc", "Fully | connected", "pass", Path("fc/model.py"))


def row(way, failed="", outcome=Outcome.PASS):
    names = WAYS[way].all_stages
    stages = [StageResult(name, PASSED, 1.5) for name in (names[: names.index(failed)] if failed else names)]
    if failed:
        stages.append(StageResult(failed, FAILED, 1.5, "it | broke"))
        stages += [StageResult(name) for name in names[len(stages) :]]
    steps, worst = (0, {}) if failed else (5, {"max_abs": 2e-7})
    return Row(ONE, way, stages, outcome, f"{way} 1.0", 2048, steps, "", worst)


def test_the_example_has_the_fourteen_experiments_of_the_report():
    listed = read_study(FOURTEEN)
    assert len(listed) == 14
    assert {one.name for one in listed} == {path.parent.name for path in FOURTEEN.glob("*/model.py")}
    refused = [one.name for one in listed if one.reported != "pass"]
    assert refused == ["dynamic_rnn", "keras_rnn", "rnn_seq_length"]
    assert {one.reported for one in listed if one.reported != "pass"} == {
        "compile: XLA compilation requires a fixed stack size upper bound"
    }
    assert [one.name for one in read_study(FOURTEEN, ["keras_rnn", "fc"])] == ["fc", "keras_rnn"]


@pytest.mark.parametrize(
    ("text", "only", "message"),
    [
        (None, (), "is no study"),
        ("", (), "lists no experiment"),
        ("[fc", (), "cannot be read"),
        ("[fc]\nspeed = 'slow'\n", (), "has no 'speed'"),
        ("fc = 1\n", (), "table of texts"),
        ("[gone]\n", (), "lists gone, but there is no"),
        ("[fc]\n", ("fd",), "no experiment 'fd'"),
    ],
)
def test_a_study_that_is_none_is_refused(tmp_path, text, only, message):
    (tmp_path / "fc").mkdir()
    (tmp_path / "fc" / "model.py").touch()
    if text is not None:
        (tmp_path / "study.toml").write_text(text)
    with pytest.raises(UsageError, match=message):
        read_study(tmp_path, only)


def test_a_row_is_read_as_it_was_written():
    for one in (row("tfcompile"), row("iree", "lower to StableHLO", Outcome.COMPILE_ERROR)):
        assert row_of(one.document(), ONE) == one


def test_the_table_names_the_stage_that_failed_and_leaves_nothing_out(tmp_path):
    rows = [row("tfcompile", "link", Outcome.COMPILE_ERROR), row("iree")]
    broken, fine = map(cells, rows)
    assert (broken["config / lower"], broken["link"], broken["load"], broken["outcome"]) == (
        "1.5 s",
        "FAIL",
        "-",
        "COMPILE_ERROR",
    )
    assert (fine["link"], fine["match"], fine["size"], fine["2019"]) == ("none", "5 steps", "2 KiB", "pass")
    assert failures(rows) == ["fc, tfcompile: link: it | broke"]
    assert "- fc, tfcompile: link: it | broke" in markdown(rows)
    write_tables(rows, tmp_path)
    written = list(csv.DictReader((tmp_path / "study.csv").read_text().splitlines()))
    assert [(line["way"], line["failed_stage"], line["message"], line["match"]) for line in written] == [
        ("tfcompile", "link", "it | broke", "not reached"),
        ("iree", "", "", "pass"),
    ]
    assert summary(rows) == "tfcompile: 0 of 1 passed; iree: 1 of 1 passed"


def test_exit_codes_are_those_of_all_commands():
    assert exit_code([row("iree")], False) == 0
    assert exit_code([row("iree"), row("iree", "match", Outcome.FAIL)], False) == 1
    assert exit_code([row("iree", "compile", Outcome.COMPILE_CRASH), row("iree", "match", Outcome.FAIL)], False) == 3
    assert exit_code([], False) == 5
    assert exit_code([row("iree")], True) == 130
