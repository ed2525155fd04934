"""The terminal while a suite runs."""

from __future__ import annotations

from support.suite_runs import case

from hil.controller.cli.screen import SuiteScreen, _progress, answer


def test_what_is_not_as_it_should_be_is_told_at_once_and_a_lost_board_once(capsys):
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


def test_a_run_that_has_not_ended_is_shown_without_an_exit_code(capsys):
    assert answer(True, {"id": "a", "exit_code": None}) == 0
    assert '"exit_code": null' in capsys.readouterr().out


def test_a_bar_shows_a_cases_name_as_it_is():
    bars = _progress(("{task.description}", "{task.fields[stage]}"), 10)
    bars.add_task("a:star:b[red]c", stage="x[0]")
    assert [str(column.render(bars.tasks[0])) for column in bars.columns] == ["a:star:b[red]c", "x[0]"]
