"""Sessions and forwards of an ssh master, with a fake control socket."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hil.controller.devices.ssh.openssh import mux
from hil.controller.devices.ssh.transport import SessionRefused

HELLO = struct.pack(">II", 1, 4)
Serve = Callable[[socket.socket], None]


def send(link: socket.socket, *numbers: int, tail: bytes = b"") -> None:
    body = struct.pack(f">{len(numbers)}I", *numbers) + tail
    link.sendall(struct.pack(">I", len(body)) + body)


def receive(link: socket.socket) -> bytes:
    (size,) = struct.unpack(">I", link.recv(4, socket.MSG_WAITALL))
    return link.recv(size, socket.MSG_WAITALL)


def text(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Callable[[Serve], Path]]:
    """Return a function that serves connections one by one after the hello exchange."""
    path = tmp_path / "ctl"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        threads: list[threading.Thread] = []

        def start(serve: Serve) -> Path:
            def work() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        link = listener.accept()[0]
                        with link:
                            assert receive(link) == HELLO
                            send(link, 1, 4)
                            serve(link)

            threads.append(threading.Thread(target=work, daemon=True))
            threads[-1].start()
            return path

        yield start
        listener.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(10)


def test_session_passes_descriptors_and_returns_exit_code(master: Callable[[Serve], Path]) -> None:
    asked: list[bytes] = []

    def serve(link: socket.socket) -> None:
        asked.append(receive(link))
        stdin, stdout, stderr = (socket.recv_fds(link, 1, 1)[1][0] for _ in range(3))
        send(link, 0x80000006, 0, 7)
        data = b"".join(iter(lambda: os.read(stdin, 100), b""))
        os.write(stdout, data.upper())
        os.write(stderr, b"words")
        for one in (stdin, stdout, stderr):
            os.close(one)
        send(link, 0x80000004, 7, 3)

    session = mux.open_session(master(serve), "sh -s", 10)
    session.settimeout(10)
    session.sendall(b"abc")
    session.shutdown_write()
    assert session.recv(100) == b"ABC" and session.recv(100) == b""
    assert session.recv_stderr(100) == b"words"
    assert session.wait(10) == 3
    session.close()
    assert asked[0].startswith(struct.pack(">II", 0x10000002, 0)) and text(b"sh -s") in asked[0]


def test_refused_session_error_has_reason(master: Callable[[Serve], Path]) -> None:
    def serve(link: socket.socket) -> None:
        receive(link)
        for _ in range(3):
            os.close(socket.recv_fds(link, 1, 1)[1][0])
        send(link, 0x80000003, 0, tail=text(b"Session open refused by peer"))

    with pytest.raises(SessionRefused, match="refused by peer"):
        mux.open_session(master(serve), "sh -s", 10)


def test_session_without_exit_code_raises_eof(master: Callable[[Serve], Path]) -> None:
    def serve(link: socket.socket) -> None:
        receive(link)
        for _ in range(3):
            os.close(socket.recv_fds(link, 1, 1)[1][0])
        send(link, 0x80000006, 0, 7)

    session = mux.open_session(master(serve), "sh -s", 10)
    with pytest.raises(EOFError):
        session.wait(10)
    session.close()


def test_silent_master_raises_timeout(master: Callable[[Serve], Path]) -> None:
    over = threading.Event()
    path = master(lambda link: over.wait(10) and None)
    with pytest.raises(TimeoutError):
        mux.open_session(path, "sh -s", 0.2)
    over.set()


@pytest.mark.parametrize(
    ("remote", "ends"), [("/far", text(b"/far") + b"\xff\xff\xff\xfe"), (80, text(b"127.0.0.1") + b"\0\0\0P")]
)
def test_forward_opens_and_closes(
    master: Callable[[Serve], Path], tmp_path: Path, remote: str | int, ends: bytes
) -> None:
    asked: list[bytes] = []

    def serve(link: socket.socket) -> None:
        asked.append(receive(link))
        send(link, 0x80000001, 0)

    close = mux.open_forward(master(serve), tmp_path / "near", remote)
    close()
    assert [one[:4] for one in asked] == [b"\x10\0\0\x06", b"\x10\0\0\x07"]
    assert asked[0].endswith(ends) and asked[0][4:] == asked[1][4:]


def test_denied_forward_raises_error(master: Callable[[Serve], Path], tmp_path: Path) -> None:
    def serve(link: socket.socket) -> None:
        receive(link)
        send(link, 0x80000002, 0, tail=text(b"not allowed"))

    with pytest.raises(OSError, match="not allowed"):
        mux.open_forward(master(serve), tmp_path / "near", "/far")


def test_check_of_missing_master_raises_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        mux.check(tmp_path / "none")
