"""Untrusted text never reaches a terminal unescaped: all output uses one function."""

from __future__ import annotations

import ast
import io
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text
from support.sources import iter_trees

import hil
import tools
from hil.controller.storage.screen.console import Console
from hil.controller.storage.screen.texts import make_plain
from hil.core.text import VisibleStream, escape_controls

# Every character that a terminal, a pager or an editor may interpret.
HOSTILE = (
    *map(chr, [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)]),
    *"\u061c\u200e\u200f\u2028\u2029\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ud800\udfff",
)
ATTACK = "a\x1b]0;title\x07b\x1b[2J\x9b31m\u202ec\x08\x7f"
SHOWN = r"a\x1b]0;title\x07b\x1b[2J\x9b31m\u202ec\x08\x7f"
# rich removes bells and backspaces.
SHOWN_BY_RICH = SHOWN.replace(r"\x07", "").replace(r"\x08", "")


@pytest.mark.parametrize("char", HOSTILE, ids=lambda char: f"{ord(char):04x}")
def test_visible_escapes_control_characters(char: str):
    shown = escape_controls(f"a{char}b")
    assert shown in (f"a\\x{ord(char):02x}b", f"a\\u{ord(char):04x}b")
    assert shown.isprintable() and escape_controls(shown) == shown


def test_visible_retains_ordinary_text():
    text = "plain, tab\tline\nñandú 漢字 é 👍 ␛ \\x1b [bold]"
    assert escape_controls(text) == text
    assert escape_controls("a\r\nb") == "a\nb"
    assert escape_controls("50%\r100%") == "50%\\x0d100%"


def test_console_retains_colours_and_escapes_untrusted_text():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=200, color_system="standard", _environ={})
    table = Table(ATTACK, title=ATTACK)
    table.add_row(Text(ATTACK, "red"))
    for what in (ATTACK, Text(ATTACK, "bold"), table):
        console.print(what, markup=False, highlight=False)
        console.print(what, markup=False, highlight=False, soft_wrap=True)
    shown = file.getvalue()
    assert shown.count(SHOWN_BY_RICH) >= 4 and shown.count(r"a\x1b]0;title") == 10
    assert "\x1b[1m" in shown and "\x1b[31m" in shown
    for escape in ("\x1b]", "\x1b[2J", "\x9b", "\u202e", "\x07", "\x08", "\x7f"):
        assert escape not in shown


def test_visible_stream_allows_colours_only_from_console():
    own = io.StringIO()
    stream = VisibleStream(own)
    console = Console(file=stream, force_terminal=True, color_system="standard", _environ={})  # type: ignore[arg-type]
    console.print(Text(ATTACK, "red"), soft_wrap=True)
    print(ATTACK, file=stream)
    stream.writelines([ATTACK, "\n"])
    assert own.getvalue() == f"\x1b[31m{SHOWN_BY_RICH}\x1b[0m\n{SHOWN}\n{SHOWN}\n"
    assert not hasattr(stream, "buffer")


def test_visible_stream_accepts_bytes_of_shell_completion():
    own = io.StringIO()
    assert VisibleStream(own).write(b"plain,run\x1b[1m") == 13
    assert own.getvalue() == "plain,run\\x1b[1m"


@pytest.mark.parametrize("markup", [True, False])
def test_console_prints_names_with_colons_without_emoji(markup: bool):
    file = io.StringIO()
    console = Console(file=file, width=80)
    table = Table("node")
    table.add_row("block:star:relu")
    console.print("block:star:relu", table, markup=markup)
    assert file.getvalue().count("block:star:relu") == 2


def test_plain_removes_escape_sequences():
    assert make_plain("\x1b[31mred\x1b[0m\x9b2J\u202e\x85\x00") == "red2J\\u202e\\x85"


WRITES = ("os.write(1,", "os.write(2,")
# Not user-visible text: programs for boards, and prompts, which are escaped there.
APART = ("board_relay.py", "board_side.py", "prompts.py", "console.py")


def around(tree: ast.AST) -> list[int]:
    """Return the lines that write to a terminal without hil's streams and console."""
    found = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        code = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.ImportFrom, ast.Call, ast.Constant)) else ""
        if (
            code.endswith(("__stdout__", "__stderr__", "stdout.buffer", "stderr.buffer"))
            or code.startswith(("from rich import print", "from rich.console import Console", *WRITES))
            or code == "'/dev/tty'"
        ):
            found.append(node.lineno)  # type: ignore[attr-defined]
        found += around(node)
    return found


@pytest.mark.ci
def test_output_uses_only_wrapped_streams_and_console():
    """Text reaches a terminal through sys.stdout and sys.stderr, which commands wrap, and through hil's Console."""
    pattern = r"__stdout__|__stderr__|(stdout|stderr)\.buffer|from rich|os\.write\([12],|/dev/tty"
    trees = iter_trees(pattern, Path(tools.__file__).parent.glob("*.py"))
    found = {name: lines for name, tree in trees if Path(name).name not in APART and (lines := around(tree))}
    assert not found
    assert around(ast.parse("import sys\ndef f():\n  sys.stdout.buffer.write(b'')")) == [3]


@pytest.mark.parametrize("module", ["controller/cli/main.py", "agent/__main__.py", "sim/__main__.py"])
def test_every_command_wraps_streams_first(module: str):
    (main,) = (
        node
        for node in ast.parse((Path(hil.__file__).parent / module).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    )
    calls = [ast.unparse(node) for node in main.body[:4]]
    assert "show_visibly()" in calls


def test_farm_tables_retain_colours_and_escape_untrusted_text(monkeypatch: pytest.MonkeyPatch):
    from hil.controller.cli.farm.tables import Column, line, make_table, show

    own = io.StringIO()
    monkeypatch.setattr(own, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stdout", VisibleStream(own))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    for variable in ("NO_COLOR", "CI", "FORCE_COLOR"):
        monkeypatch.delenv(variable, raising=False)
    column = Column("purpose", lambda row: (row["purpose"], "red"))
    show(make_table([column], [{"purpose": ATTACK}], 300), line((ATTACK, "green"), ATTACK))
    shown = own.getvalue()
    assert "\x1b[31m" in shown and "\x1b[32m" in shown
    for escape in ("\x1b]", "\x1b[2J", "\x9b", "\u202e", "\x07", "\x08", "\x7f"):
        assert escape not in shown
