"""Test texts for users: error lines, times, and tables."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console
from rich.text import Text

from hil.controller.storage.screen.texts import (
    align_rows,
    format_joules,
    format_seconds,
    get_first_line,
    import_hint,
    keep_together,
    make_table,
    print_labelled,
)
from hil.controller.workloads.suites.cases.torch_cases import find_tests


@pytest.mark.parametrize(
    ("text", "line"), [("", "ValueError"), (" \n\n", "ValueError"), ("\n  why \n more", "why"), ("x" * 11, "x" * 10)]
)
def test_first_line_returns_first_nonempty_line(text: str, line: str) -> None:
    assert get_first_line(ValueError(text), most=10) == line


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0 s"), (5.25e-9, "5.25 ns"), (5.95e-5, "59.5 us"), (1.5, "1.5 s"), (125.0, "2 min 05 s")],
)
def test_seconds_formats_three_digits_with_unit(value: float | None, text: str) -> None:
    assert format_seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.25, "1.25 J"), (-2e-9, "-2 nJ"), (0.0, "0 J"), (3.98e-20, "0 J"), (-1.06e-18, "0 J"), (5e-11, "0.05 nJ")],
)
def test_joules_are_zero_below_a_picojoule(value: float, text: str) -> None:
    assert format_joules(value) == text


def test_import_hint_explains_torchvision_mismatch(tmp_path, monkeypatch) -> None:
    package = tmp_path / "made_tests"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "test_vision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')\n")
    (package / "test_absent.py").write_text("import a_package_that_is_not_there.at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    absent, vision = find_tests("made_tests", quantize=False)
    assert "nms does not exist; torchvision was built for a different torch" in vision["problem"]
    assert "CPU package index" in vision["problem"]
    assert absent["problem"].endswith("pip install a_package_that_is_not_there")
    assert import_hint(RuntimeError("something else")) == ""


def printed(width: int, *args: object, **settings: object) -> list[str]:
    out = StringIO()
    Console(file=out, width=width).print(make_table(*args, **settings))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_table_shows_text_verbatim_and_wraps_long_cells() -> None:
    rows = [("[red]a[/]", "1", Text("x")), ("b" * 12, "23", "")]
    assert printed(80, ("name", "n", "end"), rows, numbers=("n",)) == [
        "name           n  end",
        "[red]a[/]      1  x",
        "bbbbbbbbbbbb  23",
    ]
    narrow = printed(14, ("name", "n"), [row[:2] for row in rows], numbers=("n",), gap=1)
    assert narrow[1:] == ["[red]a[/]    1", "bbbbbbbbbbb 23", "b"]


def test_table_omits_empty_header() -> None:
    assert printed(80, ("", ""), [("a", "b")]) == ["a  b"]


def test_aligned_uses_display_width() -> None:
    rows = [["name", "shape", "n"], ["漢字", "2x3", "10"], ["[x]", "2", "9"]]
    assert list(align_rows(rows, left=2, gap=1)) == ["name shape  n", "漢字 2x3   10", "[x]  2      9"]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("short", ["  note         short"]),
        ("it does not fit in one line", ["  note         it does not fit in one", "               line"]),
        ("a" * 30, [f"  note         {'a' * 25}", f"               {'a' * 5}"]),
        ("the first line's end is 25 ms", ["  note         the first line's end is", "               25 ms"]),
        (
            f"the first lines are {keep_together('not it')}",
            ["  note         the first lines are", "               not it"],
        ),
        ("[red]no markup[/] :smile:", ["  note         [red]no markup[/] :smile:"]),
        ("two\nlines", ["  note         two", "               lines"]),
        ("a\ttab", ["  note         a       tab"]),
    ],
)
def test_say_wraps_and_indents_text(text: str, lines: list[str]) -> None:
    assert said(40, text) == lines


def test_say_ignores_width_of_narrow_terminal() -> None:
    assert said(10, "20 characters, a line") == ["  note         20 characters, a", "               line"]


def said(width: int, text: str) -> list[str]:
    shown = StringIO()
    print_labelled(Console(file=shown, width=width), "note", text)
    return shown.getvalue().splitlines()
