"""Relay to the agent's socket, for boards with an sshd that does not forward Unix sockets.

The board runs this source from stdin, with the standard library only. After the source, stdin contains the order as one
JSON line. Without a ``token``, the relay carries one connection over stdin and stdout, after a ``ready`` line on
stdout. With a token, the relay listens on a loopback port until stdin ends, and prints the port as the first line. Each
connection to this port must begin with the token. The token is part of the order, because other users can read command
lines.
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
# Exit code if no process listens on the agent's socket.
NO_AGENT = 69
TOKEN_SECONDS = 10.0
AGAIN_SECONDS = 0.05


def connect_agent(path: str) -> socket.socket:
    """Connect to the agent."""
    far = socket.socket(socket.AF_UNIX)
    far.connect(path)
    return far


def copy(read: Callable[[int], bytes], write: Callable[[bytes], object]) -> None:
    """Copy until the end of the data, or until one side disconnects."""
    with contextlib.suppress(OSError):
        while data := read(PIECE):
            write(data)


def close_sending_side(sock: socket.socket) -> None:
    """Close the sending side of a socket."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def relay_stdio(stdin: Any, far: socket.socket) -> None:
    """Relay stdin and stdout."""

    def copy_to_agent() -> None:
        copy(stdin.read1, far.sendall)
        close_sending_side(far)

    def write(data: bytes) -> None:
        left = memoryview(data)
        while left:
            left = left[os.write(1, left) :]

    write(b"ready\n")
    threading.Thread(target=copy_to_agent, daemon=True).start()
    copy(far.recv, write)


def relay_port(stdin: Any, path: str, token: bytes) -> None:
    """Relay connections that present the token, until stdin ends."""
    listener = socket.create_server(("127.0.0.1", 0))
    os.write(1, b"%d\n" % listener.getsockname()[1])

    def serve(near: socket.socket) -> None:
        with near:
            near.settimeout(TOKEN_SECONDS)
            shown = b""
            with contextlib.suppress(OSError):
                while len(shown) < len(token) and (data := near.recv(len(token) - len(shown))):
                    shown += data
            if not hmac.compare_digest(shown, token):
                return
            near.settimeout(None)
            near.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError), connect_agent(path) as far:

                def copy_back() -> None:
                    copy(far.recv, near.sendall)
                    close_sending_side(near)

                returning = threading.Thread(target=copy_back, daemon=True)
                returning.start()
                copy(near.recv, far.sendall)
                close_sending_side(far)
                returning.join()

    def accept() -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                # Retry: for example, all file descriptors may be in use.
                time.sleep(AGAIN_SECONDS)
                continue
            threading.Thread(target=serve, args=(near,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    while stdin.read1(PIECE):
        pass


def main(stdin: Any) -> None:
    """Execute the order from stdin."""
    order = json.loads(stdin.readline())
    try:
        far = connect_agent(order["socket"])
    except OSError as error:
        print(f"the agent's socket: {error.strerror}", file=sys.stderr)
        sys.exit(NO_AGENT)
    if order["token"]:
        far.close()
        relay_port(stdin, order["socket"], order["token"].encode())
    else:
        relay_stdio(stdin, far)
    os._exit(0)  # do not wait for blocked threads


if __name__ == "__main__":
    main(sys.stdin.buffer)
