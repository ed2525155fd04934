from __future__ import annotations

import io

import pytest
from rich.console import Console
from support.suite_runs import case, large_run, suite_run

from hil.controller.workloads.suites.reports.results import load_run
from hil.controller.workloads.suites.reports.summary import format_summary_markdown, print_summary


def shown(folder, *records, width=100, **header):
    console = Console(file=io.StringIO(), width=width)
    print_summary(console, suite_run(folder, list(records), **header))
    return console.file.getvalue()


def test_print_summary_shows_totals_groups_and_command(tmp_path):
    text = shown(tmp_path, case("a"), case("b", "FAIL", op="Conv", confirmed="flaky"), case("c", "TIMEOUT", op="LSTM"))
    assert "1 PASS" in text and "1 FAIL" in text and "1 TIMEOUT" in text
    assert "compare 1, run 1" in text and "Conv 1, LSTM 1" in text
    assert "FAIL  b  flaky\n  y: 41 of 1024" in text
    assert "\n  hil suite run @models --flow iree --filter b\n" in text
    assert f"open {tmp_path}/report.html" in text


def test_print_summary_limits_failures_to_twenty(tmp_path):
    text = shown(tmp_path, *(case(f"c{n}", "FAIL") for n in range(33)))
    assert text.count("--filter") == 20 and "and 13 more failing cases" in text


def test_print_summary_does_not_wrap_commands(tmp_path):
    repeat = "hil suite run @models --flow iree " + "--filter " + "x" * 200
    assert f"  {repeat}\n" in shown(tmp_path, case("a", "FAIL", repeat=repeat), width=60)


def test_print_summary_escapes_markup_and_colours(tmp_path):
    text = shown(tmp_path, case("a", "RUN_ERROR", op="[red]x[/]", message="bad [/bold] \x1b[31mred"))
    assert "[red]x[/] 1" in text and "bad [/bold] red" in text and "\x1b" not in text


def test_print_summary_of_passed_run_has_two_lines(tmp_path):
    lines = shown(tmp_path, case("a"), case("b"), width=200).splitlines()
    assert len(lines) == 2 and "2 PASS" in lines[0]


def test_print_summary_fits_80_columns(tmp_path):
    lines = shown(tmp_path, *large_run(500), width=80).splitlines()
    assert all(len(line.rstrip()) <= 80 for line in lines if "hil suite" not in line and "report.html" not in line)


def test_print_summary_merges_cases_lost_with_board(tmp_path):
    lost = [case(f"c{n}", "BOARD_LOST") for n in range(30)]
    other = case("gone", "BOARD_LOST", message="the cable was cut")
    text = shown(tmp_path, *lost, case("wrong", "FAIL"), other)
    assert text.count("the board stopped answering") == 1 and "and 29 more cases with the same error" in text
    assert "BOARD_LOST  c0\n" in text and "FAIL  wrong\n" in text and "the cable was cut" in text
    # The totals match the list.
    assert "31 BOARD_LOST" in text and "more failing cases" not in text


def test_print_summary_quotes_directory(tmp_path):
    text = shown(tmp_path / "my runs", case("a"), width=300)
    assert f"stored in '{tmp_path}/my runs'; open '{tmp_path}/my runs/report.html'" in text


def summary(folder, *records, **header):
    return format_summary_markdown(load_run(suite_run(folder, list(records), **header)))


def test_summary_contains_totals_failures_and_commands(tmp_path):
    text = summary(
        tmp_path,
        case("good"),
        case("wrong", "FAIL", op="Conv"),
        case("wrong2", "FAIL", op="Conv"),
        case("broken", "COMPILE_ERROR", op="LSTM"),
    )
    assert "3 cases of 4 failed" in text
    assert "| FAIL | 2 |" in text and "| COMPILE_ERROR | 1 |" in text
    assert "| `Conv` | 2 | 2 |" in text and "| `LSTM` | 1 | 1 |" in text
    assert "| compare | 2 |" in text and "| compile | 1 |" in text
    assert "| `broken` | COMPILE\\_ERROR | compile | failed to legalize" in text
    details = text[text.index("<details>") :]
    assert "hil suite run @models --flow iree --filter wrong\n" in details and "--filter good" not in text


def test_summary_of_passed_run_omits_failures(tmp_path):
    text = summary(tmp_path, case("a"), case("b"))
    assert "2 of 2 passed" in text
    assert "Failed cases" not in text and "<details>" not in text


def test_summary_starts_with_unrun_cases(tmp_path):
    text = summary(tmp_path, case("a"), missing=("b", "c"), interrupted=True)
    assert "**2 of 3 cases not run: interrupted**" in text


def test_summary_counts_reruns_retries_and_expectations(tmp_path):
    lost = {"why": "board lost", "board": "b1", "outcome": "BOARD_LOST", "message": "gone"}
    again = {"why": "confirm", "board": "b2", "outcome": "FAIL", "message": ""}
    text = summary(
        tmp_path,
        case("a", attempts=(lost, lost)),
        case("b", "FAIL", attempts=(again,), confirmed="always wrong"),
        case("c", "FAIL", attempts=(again,), confirmed="flaky"),
        case("d", "FAIL", attempts=(lost, again), confirmed="one bad board"),
        case("e", "XFAIL"),
        case("f", "XPASS"),
    )
    assert "- 1 failed as expected" in text
    assert "- 1 passed unexpectedly: remove it from the expected failures" in text
    assert "- rerun mismatches: 1 always wrong, 1 flaky, 1 one bad board" in text
    assert "- the infrastructure failed 3 times: 2 cases retried" in text


def test_summary_escapes_markup(tmp_path):
    text = summary(tmp_path, case("a|b`c", "RUN_ERROR", message="<img src=x onerror=alert(1)> | **x** [y](z)\n# title"))
    row = next(row for row in text.splitlines() if "RUN\\_ERROR |" in row)
    assert row.count(" | ") == 3
    assert "\\<img src=x onerror=alert(1)\\> \\| \\*\\*x\\*\\* \\[y\\](z) \\# title" in row
    assert "a\\|b\\`c" in row


def test_summary_fences_command_with_backticks(tmp_path):
    text = summary(tmp_path, case("a", "FAIL", repeat="hil suite run ```` x"))
    assert "`````sh\nhil suite run ```` x\n`````\n" in text


def test_summary_stays_below_a_megabyte(tmp_path):
    long = "\U0001f600|" * 1500
    text = summary(
        tmp_path, *(case(f"c{n}_{'é' * 2000}", "FAIL", op=f"{n}{long}", message=long, repeat=long) for n in range(400))
    )
    assert len(text.encode()) < 1_000_000
    assert "... and 200 more cases" in text and "... and 370 more operators" in text


@pytest.mark.ci
def test_summary_of_large_run_stays_short(tmp_path):
    records = large_run(2000)
    text = summary(tmp_path, *records)
    assert len(text.encode()) < 100_000
    assert f"of {len(records)} failed" in text


def test_summary_does_not_rank_single_cold_iterations(tmp_path):
    cold = {"iterations": 1, "cold": True}
    text = format_summary_markdown(
        load_run(suite_run(tmp_path / "a", [case("a", **cold), case("b", device_p50_ns=9e6)]))
    )
    assert "| `b` | 9 ms | 130 us | 10 iterations |" in text and "| `a` |" not in text
    assert "1 case timed with 1 cold iteration and not ranked: use --iterations 20 --warmup 2" in text
    text = format_summary_markdown(load_run(suite_run(tmp_path / "b", [case("a", **cold), case("b", **cold)])))
    assert "all cases timed with 1 cold iteration" in text and "| case | median" not in text


def test_summary_reports_disagreeing_references(tmp_path):
    text = format_summary_markdown(load_run(suite_run(tmp_path, [case("a", disagreement="this vs that on output y")])))
    assert "the references disagree in 1 case: a: this vs that on output y" in text
