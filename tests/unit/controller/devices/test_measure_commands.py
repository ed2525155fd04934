"""Commands of a board before and after a measurement."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fake_boards import FakeBoard, fake_case
from support.waiting import eventually

from hil.controller.analysis.bench.conditions import prepare_boards
from hil.controller.analysis.bench.measure import BenchSide
from hil.controller.devices.measuring.measure_commands import prepare_board, restore_board
from hil.core.board_config import BoardCommand, Command, MeasureCommands
from hil.core.boards import load_board, read_board
from hil.core.results import Outcome
from hil.errors import BoardError, BoardLost, BoardUnfit, UsageError

FAIL = Command(("sh", "-c", "echo no governor; exit 3"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config"


def append(log: Path, word: str) -> Command:
    return Command(("sh", "-c", f"echo {word} >> {shlex.quote(str(log))}"))


def make_board(*before: Any, after: tuple[Any, ...] = ()) -> Any:
    return FakeBoard("b", None, measure=MeasureCommands(before, after))


def pending(home: Path) -> list[Path]:
    return list(home.rglob("*.json"))


@pytest.mark.parametrize("error", [None, RuntimeError("broken"), KeyboardInterrupt()])
def test_measure_commands_run_before_and_after_block(tmp_path, home, error):
    log = tmp_path / "log"
    board = make_board(append(log, "before"), after=(append(log, "after"),))
    try:
        with prepare_board(board, pytest.fail):
            assert log.read_text() == "before\n"
            assert [json.loads(path.read_text())["board"] for path in pending(home)] == ["b"]
            if error is not None:
                raise error
    except (RuntimeError, KeyboardInterrupt) as found:
        assert found is error
    assert log.read_text() == "before\nafter\n"
    assert pending(home) == []


def test_failing_command_before_measurement_is_board_error(tmp_path, home):
    log = tmp_path / "log"
    board = make_board(FAIL, append(log, "second"), after=(append(log, "after"),))
    side = BenchSide("A", fake_case("a"), board)
    failed = pytest.raises(BoardUnfit, match=r"command of \[measure\] before failed with exit code 3")
    with failed as found:
        prepare_boards([side])
    assert found.value.hint.startswith("run it manually: sh -c")
    assert log.read_text() == "after\n"
    assert pending(home) == []
    assert side.case.outcome is Outcome.BOARD_UNFIT


def test_failing_command_after_measurement_is_repeated_once(tmp_path, home):
    log, notes = tmp_path / "log", []
    board = make_board(after=(FAIL, append(log, "after")))
    with prepare_board(board, notes.append):
        pass
    assert log.read_text() == "after\n"
    assert len(pending(home)) == 1
    restore_board(board, notes.append)
    assert log.read_text() == "after\nafter\n"
    assert pending(home) == []
    assert [note.partition(":")[0] for note in notes] == [
        "b may not be restored",
        "restoring b",
        "b may not be restored",
    ]


def test_measure_commands_run_on_board_over_ssh(home):
    ran: list[list[str]] = []

    class FakeShell:
        def run(self, argv: list[str], *, timeout: float) -> None:
            ran.append(argv)
            if argv == ["restore"] and len(ran) == 2:
                raise BoardLost("gone")

    board = make_board(BoardCommand(("fix",)), after=(BoardCommand(("restore",)),))
    with pytest.raises(UsageError, match="not connected over SSH"), prepare_board(board, lambda text: None):
        pass
    board.shell = FakeShell()
    for path in pending(home):
        path.unlink()
    with prepare_board(board, lambda text: None):
        pass
    assert len(pending(home)) == 1  # the board did not respond
    restore_board(board, lambda text: None)
    assert ran == [["fix"], ["restore"], ["restore"]]
    assert pending(home) == []


def test_killed_measurement_is_restored_by_next_command(tmp_path, home):
    log, notes = tmp_path / "log", []
    script = tmp_path / "measure.py"
    script.write_text(
        f"""
import pathlib, time, types
from hil.controller.devices.measuring.measure_commands import prepare_board
from hil.core.board_config import Command, MeasureCommands
before, after = ({append(log, "before").argv!r}, {append(log, "after").argv!r})
measure = MeasureCommands((Command(before),), (Command(after),))
board = types.SimpleNamespace(name="b", config_path=pathlib.Path(), measure=measure, shell=None)
with prepare_board(board, print):
    time.sleep(600)
"""
    )
    process = subprocess.Popen([sys.executable, str(script)])
    board = make_board()
    try:
        eventually(lambda: log.exists() and log.read_text(), process=process)
        restore_board(board, notes.append)
        assert (log.read_text(), notes) == ("before\n", [])  # the measurement still runs
        locked = pytest.raises(BoardError, match="another hil command measures")
        with locked, prepare_board(make_board(FAIL), notes.append):
            pass
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    restore_board(board, notes.append)
    assert log.read_text() == "before\nafter\n"
    assert notes == ["restoring b: the last measurement did not end normally"]
    restore_board(board, pytest.fail)


def test_pending_commands_of_other_users_do_not_run(home):
    board = make_board(after=(FAIL,))
    with prepare_board(board, lambda text: None):
        pass
    (path,) = pending(home)
    path.chmod(0o666)
    with pytest.raises(UsageError, match="writable by other users"):
        restore_board(board, pytest.fail)


def test_damaged_pending_commands_are_removed(home):
    notes: list[str] = []
    board = make_board(after=(FAIL,))
    with prepare_board(board, lambda text: None):
        pass
    (path,) = pending(home)
    path.write_text('{"schema": 1}')
    restore_board(board, notes.append)
    assert "are lost" in notes[0] and pending(home) == []


def test_board_without_measure_commands_needs_no_home(monkeypatch):
    monkeypatch.setattr("hil.controller.devices.measuring.measure_commands.get_user_folder", lambda: None)
    with prepare_board(make_board(), pytest.fail):
        pass
    restore_board(make_board(), pytest.fail)
    with pytest.raises(UsageError, match="cannot store"), prepare_board(make_board(FAIL), pytest.fail):
        pass


def test_load_board_reads_measure_commands(tmp_path):
    path = tmp_path / "b.toml"
    path.write_text('[measure]\nbefore = ["./fix.sh fast", { board = ["a", "b c"] }]\nafter = [{ command = ["c"] }]')
    (tmp_path / "fix.sh").write_text("one")
    board = load_board(str(path)).config
    assert board.measure.before == (Command((str(tmp_path / "fix.sh"), "fast")), BoardCommand(("a", "b c")))
    assert board.measure.after == (Command(("c",)),)
    assert board.asks == ("[measure] before", "[measure] after")
    digest = read_board(path).digest
    (tmp_path / "fix.sh").write_text("two")  # the content of a program needs trust as well
    assert digest and read_board(path).digest != digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("before = 'a'", "before must be a list"),
        ("after = [1]", "after 1 is unknown"),
        ("before = [{ command = { url = 'http://x' } }]", "is unknown"),
        ("timeout_s = 0", "timeout_s must be a number of seconds"),
        ("during = []", "unknown key 'during'"),
    ],
)
def test_load_board_rejects_invalid_measure_table(tmp_path, text, message):
    path = tmp_path / "b.toml"
    path.write_text(f"[measure]\n{text}")
    with pytest.raises(UsageError, match=message):
        load_board(str(path))
