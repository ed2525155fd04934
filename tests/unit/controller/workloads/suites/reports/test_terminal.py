"""The last screen: what failed, and what to type next."""

from __future__ import annotations

import io

from rich.console import Console
from support.suite_runs import case, large_run, suite_run

from hil.controller.workloads.suites.reports import print_summary


def shown(folder, *records, width=100, **header):
    console = Console(file=io.StringIO(), width=width)
    print_summary(console, suite_run(folder, list(records), **header))
    return console.file.getvalue()


def test_it_tells_totals_groups_and_how_to_repeat_a_failure(tmp_path):
    text = shown(tmp_path, case("a"), case("b", "FAIL", op="Conv", confirmed="flaky"), case("c", "TIMEOUT", op="LSTM"))
    assert "1 PASS" in text and "1 FAIL" in text and "1 TIMEOUT" in text
    assert "compare 1, run 1" in text and "Conv 1, LSTM 1" in text
    assert "FAIL  b  flaky\n  y: 41 of 1024" in text
    assert "\n  hil suite run models --flow iree --filter b\n" in text
    assert f"open {tmp_path}/report.html" in text


def test_only_the_first_twenty_failures_are_shown(tmp_path):
    text = shown(tmp_path, *(case(f"c{n}", "FAIL") for n in range(33)))
    assert text.count("--filter") == 20 and "and 13 failing cases more" in text


def test_a_command_is_never_wrapped(tmp_path):
    repeat = "hil suite run models --flow iree " + "--filter " + "x" * 200
    assert f"  {repeat}\n" in shown(tmp_path, case("a", "FAIL", repeat=repeat), width=60)


def test_brackets_and_colours_in_names_are_no_markup(tmp_path):
    text = shown(tmp_path, case("a", "RUN_ERROR", op="[red]x[/]", message="bad [/bold] \x1b[31mred"))
    assert "[red]x[/] 1" in text and "bad [/bold] red" in text and "\x1b" not in text


def test_all_is_well_in_two_lines(tmp_path):
    lines = shown(tmp_path, case("a"), case("b"), width=200).splitlines()
    assert len(lines) == 2 and "2 PASS" in lines[0]


def test_eighty_columns_hold_a_large_run(tmp_path):
    lines = shown(tmp_path, *large_run(500), width=80).splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines if "hil suite" not in line and "report.html" not in line)


def test_cases_that_were_lost_with_the_board_are_one_failure(tmp_path):
    lost = [case(f"c{n}", "BOARD_LOST") for n in range(30)]
    other = case("gone", "BOARD_LOST", message="the cable was cut")
    text = shown(tmp_path, *lost, case("wrong", "FAIL"), other)
    assert text.count("the board stopped answering") == 1 and "and 29 cases more for the same reason" in text
    assert "BOARD_LOST  c0\n" in text and "FAIL  wrong\n" in text and "the cable was cut" in text
    # Nothing that the counts do not have.
    assert "31 BOARD_LOST" in text and "failing cases more" not in text


def test_a_folder_is_told_as_one_types_it(tmp_path):
    text = shown(tmp_path / "my runs", case("a"), width=300)
    assert f"stored in '{tmp_path}/my runs'; open '{tmp_path}/my runs/report.html'" in text
