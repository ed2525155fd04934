"""Serial devices that cannot be opened, or whose board does not answer, have typed errors with hints."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import termios
import threading
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hil.core import serial_device
from hil.core.serial_device import check_serial_device, is_same_line
from hil.errors import BoardBusy, BoardLost, BoardUnreachable, UsageError
from hil.formats.firmware import DESCRIPTION, Firmware, write_firmware
from hil.mcu import streams
from hil.mcu.runtime import McuRuntime
from hil.mcu.streams import open_stream

BAUD = 115_200


@pytest.fixture
def terminal() -> Iterator[tuple[int, str]]:
    """Yield the other end and the path of a pseudo-terminal."""
    master, slave = os.openpty()
    tty.setraw(slave)
    try:
        yield master, os.ttyname(slave)
    finally:
        os.close(master)
        os.close(slave)


def test_bytes_pass_through_a_terminal(terminal: tuple[int, str]) -> None:
    pytest.importorskip("serial")
    master, path = terminal
    with contextlib.closing(open_stream(f"serial:{path}", BAUD)) as stream:
        stream.write(b"request")
        assert os.read(master, 100) == b"request"
        os.write(master, b"answer")
        assert stream.read(5.0) == b"answer"


@pytest.mark.parametrize(
    ("place", "error", "message"),
    [
        ("ttyACM0", UsageError, "'ttyACM0' is not a serial device"),
        ("unix:board.sock", UsageError, "'unix:board.sock' is not a serial device"),
        ("/dev/ttyNONE", BoardUnreachable, "serial device /dev/ttyNONE not found: No such file"),
        ("unix:/nowhere/board.sock", BoardUnreachable, "serial device /nowhere/board.sock not found"),
        ("/etc/hostname", UsageError, "/etc/hostname is not a serial device"),
        ("unix:/etc/hostname", UsageError, "/etc/hostname is not a socket"),
        ("/dev/null", BoardUnreachable, "cannot open the serial line /dev/null: Inappropriate ioctl for device"),
    ],
)
def test_wrong_device_is_a_typed_error_with_a_hint(place: str, error: type, message: str) -> None:
    pytest.importorskip("serial")
    with pytest.raises(error) as caught:
        open_stream(f"serial:{place}", BAUD)
    assert caught.value.message.startswith(message)
    assert caught.value.hint


def test_refused_socket_is_unreachable(tmp_path: Path) -> None:
    place = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.bind(str(place))
    with pytest.raises(BoardUnreachable, match="Connection refused"):
        open_stream(f"serial:unix:{place}", BAUD)


def test_missing_permission_names_the_group(terminal: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = terminal
    monkeypatch.setattr(serial_device.os, "access", lambda *_: False)
    Path(path).chmod(0o660)
    os.chown(path, -1, os.getgid() or 20)  # only root may choose any group
    with pytest.raises(BoardUnreachable, match=f"no permission to open {path}") as caught:
        check_serial_device(path)
    assert "sudo usermod -aG" in caught.value.hint
    Path(path).chmod(0o600)
    with pytest.raises(BoardUnreachable) as caught:
        check_serial_device(path)
    assert "add a udev rule" in caught.value.hint


def test_device_of_another_process_is_busy(terminal: tuple[int, str]) -> None:
    pytest.importorskip("serial")
    _, path = terminal
    with Path(path).open("rb", buffering=0) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(BoardBusy, match=f"another process uses the serial line {path}") as caught:
            open_stream(f"serial:{path}", BAUD)
    assert caught.value.hint


def test_refused_process_leaves_speed_and_bytes_of_the_line(
    terminal: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("serial")
    monkeypatch.setattr(streams, "_LOCK_SECONDS", 0.0)
    master, path = terminal
    with contextlib.closing(open_stream(f"serial:{path}", BAUD)) as stream:
        before = termios.tcgetattr(master)
        os.write(master, b"answer")
        with pytest.raises(BoardBusy):
            open_stream(f"serial:{path}", 9600)
        assert (stream.read(5.0), termios.tcgetattr(master)) == (b"answer", before)
    with contextlib.closing(open_stream(f"serial:{path}", 9600)):
        pass


def test_unsupported_speed_is_a_usage_error(terminal: tuple[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    serial = pytest.importorskip("serial")

    def refuse(*words: Any, **options: Any) -> None:
        raise ValueError("Invalid baud rate: 5")

    monkeypatch.setattr(serial, "Serial", refuse)
    with pytest.raises(UsageError, match=f"{terminal[1]} does not support 5 baud"):
        open_stream(f"serial:{terminal[1]}", 5)


def test_paths_of_one_device_are_the_same_line(tmp_path: Path) -> None:
    (tmp_path / "by-id").symlink_to("/dev/null")
    assert is_same_line(f"serial:{tmp_path}/by-id", "serial:/dev/null")
    assert not is_same_line(f"serial:{tmp_path}/by-id", "serial:/dev/zero")
    assert not is_same_line("/dev/null", "serial:/dev/null")


@pytest.mark.parametrize(
    ("sends", "message", "hint"),
    [
        (b"", "the microcontroller does not answer on the serial line", "check the cable"),
        (b"\x80\xf8\x00\xff", "the microcontroller sends bytes, but no valid frame", "[mcu] baud"),
    ],
)
def test_board_without_flash_command_explains_silence_and_wrong_speed(
    sends: bytes, message: str, hint: str, terminal: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("serial")
    monkeypatch.setattr("hil.mcu.client._DAMAGED_GREET_S", 0.5)
    master, path = terminal
    write_firmware(Firmware("mps2-an386", "00" * 32, 0, 1000, 0, 0, (), (), (), ()), tmp_path / DESCRIPTION)
    settings = {
        **{"address": f"serial:{path}", "chip": {"chip": "mps2-an386"}, "flash": (), "reset": ()},
        **{"boot_s": 1.0, "watchdog_s": 1.0},
    }

    def answer() -> None:
        with contextlib.suppress(OSError):
            while os.read(master, 1000):
                os.write(master, sends)

    threading.Thread(target=answer, daemon=True).start()
    with pytest.raises(BoardLost) as caught:
        McuRuntime({"mcu": settings}).load(tmp_path, DESCRIPTION, "", "")
    assert caught.value.message.startswith(message)
    assert hint in caught.value.hint
    assert "its config has no [mcu] flash" in caught.value.hint
