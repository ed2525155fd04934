"""Read consoles over every link, share them between readers, and reconnect."""

from __future__ import annotations

import os
import pty
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.waiting import eventually

from hil.controller.devices.console import reader as reader_module
from hil.controller.devices.console.lines import ConsoleLine
from hil.controller.devices.console.reader import ConsoleReader
from hil.controller.devices.console.spool import MAX_FILE_BYTES, find_spool
from hil.controller.devices.console.viewing import read_stored_lines
from hil.core.board_config import BoardConfig
from hil.core.console_config import ConsoleConfig
from hil.core.install_hints import make_install_command
from hil.errors import BoardBusy, BoardUnreachable, StorageError, UsageError

Open = Callable[..., ConsoleReader]


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def open_reader() -> Iterator[Open]:
    opened: list[ConsoleReader] = []

    def open_one(console: ConsoleConfig, **how: object) -> ConsoleReader:
        opened.append(ConsoleReader(BoardConfig("b", "b", console=console), **how))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


def texts(reader: ConsoleReader) -> list[str]:
    return [line.text for line in reader.get_lines()]


def shell(script: str) -> ConsoleConfig:
    return ConsoleConfig(command=("sh", "-c", script))


def serve(handle: Callable[[socket.socket], None]) -> tuple[str, socket.socket]:
    """Return the address of a server that handles its connections one by one."""
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                handle(connection)

    threading.Thread(target=accept, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}", server


def test_command_console_reads_lines_and_prompts(open_reader):
    found = open_reader(shell("echo one; echo two >&2; printf 'login: '; cat >/dev/null"))
    eventually(lambda: texts(found) == ["one", "two", "login:"])


def test_command_console_is_stopped_with_its_children(open_reader, tmp_path):
    pids = tmp_path / "pids"
    found = open_reader(shell(f"sleep 1000 & echo $! $$ > {pids}; trap '' TERM; echo up; wait"))
    eventually(lambda: texts(found) == ["up"])
    found.close()
    for pid in map(int, pids.read_text().split()):
        eventually(lambda pid=pid: not _is_running(pid))


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_command_that_succeeds_is_not_repeated(open_reader):
    found = open_reader(shell("echo once"))
    eventually(lambda: len(texts(found)) == 2)
    assert texts(found) == ["once", "the console's command ended"]


def test_failed_command_is_restarted(open_reader, monkeypatch):
    monkeypatch.setattr(reader_module, "_FIRST_PAUSE_SECONDS", 0.01)
    found = open_reader(shell("echo again; exit 1"))
    eventually(lambda: texts(found).count("again") >= 2)
    assert "connection to console sh lost; reconnecting" in texts(found)


def test_missing_command_is_usage_error(open_reader):
    with pytest.raises(UsageError, match="cannot start the console command"):
        open_reader(ConsoleConfig(command=("no-such-program",)))


def test_tcp_console_reconnects(open_reader, monkeypatch):
    monkeypatch.setattr(reader_module, "_FIRST_PAUSE_SECONDS", 0.01)
    address, server = serve(lambda connection: connection.sendall(b"hello\r\n"))
    with server:
        found = open_reader(ConsoleConfig(address=f"tcp://{address}"))
        eventually(lambda: texts(found).count("hello") >= 2)
    assert f"connected to console tcp://{address}" in texts(found)


def test_telnet_console_negotiates_and_writes(open_reader):
    received = bytearray()

    def handle(connection: socket.socket) -> None:
        connection.sendall(b"\xff\xfb\x01login: ")
        while data := connection.recv(100):
            received.extend(data)

    address, server = serve(handle)
    with server:
        found = open_reader(ConsoleConfig(address=f"telnet://{address}"))
        eventually(lambda: texts(found) == ["login:"])
        found.write(b"ro\xffot\r")
        eventually(lambda: bytes(received) == b"\xff\xfd\x01ro\xff\xffot\r")


def test_unreachable_console_raises_or_retries(open_reader):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(BoardUnreachable, match=f"cannot open console {address}"):
        open_reader(ConsoleConfig(address=address), retries=False)
    found = open_reader(ConsoleConfig(address=address))
    assert not found.is_open
    eventually(lambda: any("Connection refused; retrying" in text for text in texts(found)))
    with pytest.raises(BoardUnreachable, match="not connected"):
        found.write(b"x")


def test_serial_console_reads_and_writes(open_reader):
    pytest.importorskip("serial")
    board, port = pty.openpty()
    name = os.ttyname(port)
    found = open_reader(ConsoleConfig(serial=name, baud=9600))
    os.write(board, b"U-Boot 2026.01\r\n")
    eventually(lambda: texts(found) == ["U-Boot 2026.01"])
    found.write(b"boot\r")
    assert os.read(board, 100) == b"boot\r"
    found.close()
    os.close(board)
    os.close(port)


def test_locked_serial_port_is_busy(open_reader, monkeypatch):
    serial = pytest.importorskip("serial")
    board, port = pty.openpty()
    with serial.Serial(os.ttyname(port), exclusive=True), pytest.raises(BoardBusy, match="another program uses serial"):
        open_reader(ConsoleConfig(serial=os.ttyname(port)), retries=False)
    os.close(board)
    os.close(port)


def test_missing_serial_port_is_unreachable(open_reader):
    pytest.importorskip("serial")
    with pytest.raises(BoardUnreachable, match=r"cannot open console /dev/no-such-port: No such file"):
        open_reader(ConsoleConfig(serial="/dev/no-such-port"), retries=False)


def test_serial_console_without_pyserial_is_usage_error(open_reader, monkeypatch):
    monkeypatch.setitem(sys.modules, "serial", None)
    with pytest.raises(UsageError, match="need the package pyserial") as found:
        open_reader(ConsoleConfig(serial="/dev/ttyUSB0"))
    assert found.value.hint == make_install_command("console")


def test_second_reader_gets_lines_of_first_and_takes_over(open_reader, tmp_path):
    log = tmp_path / "log"
    log.write_text("")
    console = ConsoleConfig(command=("tail", "-n", "0", "-F", str(log)))
    first = open_reader(console)
    second = open_reader(console)
    with pytest.raises(BoardBusy, match="another hil process reads the console"):
        open_reader(console, exclusive=True)

    def append(text: str) -> None:
        with log.open("a") as file:
            file.write(f"{text}\n")

    eventually(lambda: append("shared") or "shared" in texts(second))
    assert "shared" in texts(first)
    first.close()
    eventually(lambda: append("later") or "later" in texts(second))
    assert "later" not in texts(first)


def test_spool_keeps_latest_lines(open_reader):
    console = shell("echo kept")
    found = open_reader(console)
    eventually(lambda: len(texts(found)) == 2)
    spool = find_spool(console)
    assert [line.text for line in spool.read_since(0)] == texts(found)
    assert spool.read_since(time.time() + 60) == []
    line = ConsoleLine(1, 2.0, "x" * 1000)
    for _ in range(3):
        spool.append([line] * (MAX_FILE_BYTES // 1500))
    assert sum(path.stat().st_size for path in spool.folder.iterdir()) < 2 * MAX_FILE_BYTES
    assert spool.read_since(0)[-1] == line


def test_spool_that_others_may_write_is_not_used(open_reader):
    console = shell("echo own")
    folder = find_spool(console).folder
    (folder / "lines.jsonl").write_text('{"host_ns": 1, "time_s": 1.0, "text": "forged"}\n')
    folder.chmod(0o777)
    with pytest.raises(StorageError, match="other users may write"):
        find_spool(console)
    found = open_reader(console)
    eventually(lambda: "own" in texts(found))
    assert read_stored_lines(BoardConfig("x", "x", console=console), 0) == []


def test_follower_reads_new_file_after_rotation():
    spool = find_spool(shell("true"))
    spool.append([ConsoleLine(1, 1.0, "old")])
    follower = spool.follow()
    spool.append([ConsoleLine(2, 2.0, "new")])
    assert [line.text for line in follower.read_new()] == ["new"]
    (spool.folder / "lines.jsonl").replace(spool.folder / "lines-1.jsonl")
    spool.append([ConsoleLine(3, 3.0, "rotated")])
    assert [line.text for line in follower.read_new()] == ["rotated"]
    follower.close()


def test_wait_for_finds_only_later_lines(open_reader):
    found = open_reader(shell("echo login:; read line; echo login: again; cat"))
    assert found.wait_for("login:", 0, 60).text == "login:"
    position = found.position
    assert found.wait_for("login:", position, 0.05) is None
    found.write(b"\n")
    assert found.wait_for("login:", position, 60).text == "login: again"


def test_fast_console_loses_lines_with_a_note(open_reader, monkeypatch):
    monkeypatch.setattr(reader_module, "MAX_BYTES_PER_SECOND", 10_000)
    found = open_reader(shell("yes"))
    eventually(lambda: any("output lost" in text for text in texts(found)))
