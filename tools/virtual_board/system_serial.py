"""Run commands as root over the serial line of an emulated virtual board.

The line is independent of the board's network and sshd, like a real board's debug port.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
import uuid
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path


def run(line: Path, argv: Sequence[str], *, stdin: str = "", timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a command on the board. Commands run one at a time. Wait if the board is booting.

    Args:
        line: the line's socket, :attr:`tools.virtual_board.system.Machine.serial`.
        argv: the command, without a shell.
        stdin: the command's input.
        timeout: seconds until the command is killed.

    Raises:
        OSError: the board's power is off.
        subprocess.TimeoutExpired: the command timed out, or the board hangs.
    """
    ends = time.monotonic() + timeout
    number = uuid.uuid4().hex
    given = stdin.encode(errors="surrogateescape")
    command = b64encode(shlex.join(argv).encode(errors="surrogateescape")).decode()
    words = f"{number} {max(1, round(timeout))} {command} {len(given)}\n"
    with socket.socket(socket.AF_UNIX) as port:
        try:
            port.settimeout(timeout)
            port.connect(str(line))
            port.sendall(words.encode() + given)
            answer = _read_answer(port, number, ends)
        except TimeoutError:
            raise subprocess.TimeoutExpired(list(argv), timeout) from None
    return subprocess.CompletedProcess(list(argv), int(answer[1]), _decode_word(answer[2]), _decode_word(answer[3]))


def _read_answer(port: socket.socket, number: str, ends: float) -> list[str]:
    """Return the words of the response with this number. Ignore late responses to earlier commands."""
    received = b""
    while True:
        *lines, received = received.split(b"\n")
        for line in lines:
            words = line.decode().split(" ")
            if words[0].endswith(number):
                return words
        port.settimeout(max(0.001, ends - time.monotonic()))
        piece = port.recv(1 << 16)
        if not piece:
            raise ConnectionResetError("the board's power was cut")
        received += piece


def _decode_word(word: str) -> str:
    return b64decode(word).decode(errors="surrogateescape")
