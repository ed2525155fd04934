"""Test the terminal output of a running suite."""

from __future__ import annotations

from support.suite_runs import case

from hil.controller.cli.screen import SuiteScreen, _make_progress, answer


def test_suite_screen_reports_failures_and_merges_lost_boards(capsys):
    with SuiteScreen(quiet=True) as screen:
        screen.begin(9, [])
        for record in (
            case("fine"),
            case("wrong", "FAIL"),
            *(case(f"late{number}", "BOARD_LOST") for number in range(5)),
            case("cut", "BOARD_LOST", message="the cable was cut"),
            case("known", "XFAIL"),
        ):
            screen.end(record)
    told = [line.split()[:2] for line in capsys.readouterr().err.splitlines()]
    assert told == [["FAIL", "wrong"], ["BOARD_LOST", "late0"], ["BOARD_LOST", "cut"]]


def test_json_output_accepts_unfinished_run_without_exit_code(capsys):
    assert answer(True, {"id": "a", "exit_code": None}) == 0
    assert '"exit_code": null' in capsys.readouterr().out


def test_progress_bar_shows_case_name_verbatim():
    bars = _make_progress(("{task.description}", "{task.fields[stage]}"), 10)
    bars.add_task("a:star:b[red]c", stage="x[0]")
    assert [str(column.render(bars.tasks[0])) for column in bars.columns] == ["a:star:b[red]c", "x[0]"]
