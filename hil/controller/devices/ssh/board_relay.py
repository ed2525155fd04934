"""What runs on a board whose sshd forwards no Unix sockets: carries connections to the agent's socket.

Its text comes over stdin, and after it one JSON line, the order; only the standard library is there. Without a
``token`` it carries one connection, which goes on over stdin and, after a line that says ``ready``, stdout. With one it
listens on a loopback port, which is its first line, until stdin ends: a connection there must begin with the token,
which no command line ever shows.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PIECE = 1 << 18
TOKEN_S = 10.0
AGAIN_S = 0.05


def connected(path: str) -> socket.socket:
    """A connection to the agent."""
    far = socket.socket(socket.AF_UNIX)
    far.connect(path)
    return far


def copy(read: Callable[[int], bytes], write: Callable[[bytes], object]) -> None:
    """Copy until the end, or until one side is gone."""
    with contextlib.suppress(OSError):
        while data := read(PIECE):
            write(data)


def half_close(sock: socket.socket) -> None:
    """Tell the other side that nothing more comes."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def by_stdio(stdin: Any, far: socket.socket) -> None:
    """Carry stdin and stdout."""

    def forth() -> None:
        copy(stdin.read1, far.sendall)
        half_close(far)

    def write(data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(1, left) :]

    write(b"ready\n")
    threading.Thread(target=forth, daemon=True).start()
    copy(far.recv, write)


def by_port(stdin: Any, path: str, token: bytes) -> None:
    """Carry whoever shows the token, until stdin ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    os.write(1, b"%d\n" % listener.getsockname()[1])

    def serve(near: socket.socket) -> None:
        with near:
            near.settimeout(TOKEN_S)
            shown = b""
            with contextlib.suppress(OSError):
                while len(shown) < len(token) and (data := near.recv(len(token) - len(shown))):
                    shown += data
            if not hmac.compare_digest(shown, token):
                return
            near.settimeout(None)
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError), connected(path) as far:

                def back() -> None:
                    copy(far.recv, near.sendall)
                    half_close(near)

                returning = threading.Thread(target=back, daemon=True)
                returning.start()
                copy(near.recv, far.sendall)
                half_close(far)
                returning.join()

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                # There is no descriptor left, say: who connects waits until there is.
                time.sleep(AGAIN_S)
                continue
            threading.Thread(target=serve, args=(near,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    while stdin.read1(PIECE):
        pass


def main(stdin: Any) -> None:
    """Do what the order says."""
    order = json.loads(stdin.readline())
    try:
        far = connected(order["socket"])
    except OSError as error:
        sys.exit(f"the agent's socket: {error.strerror}")
    if order["token"]:
        far.close()
        by_port(stdin, order["socket"], order["token"].encode())
    else:
        by_stdio(stdin, far)
    os._exit(0)  # threads that wait for the other side wait in vain


if __name__ == "__main__":
    main(sys.stdin.buffer)
