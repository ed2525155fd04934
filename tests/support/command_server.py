"""Run `hil` commands through a fork server: a command costs a fork instead of half a second of imports."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_START_S = 60.0
# Python reads these variables when it starts, so a forked child would ignore them.
_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "TZ")


@dataclass(frozen=True)
class Finished:
    """Result of a command: its exit code (None after a timeout) and its output."""

    code: int | None
    out: str
    err: str


class CommandServer:
    """Process that forks a child for each command. Several threads can call it at the same time.

    Attributes:
        environment: variables of the server. Commands with different values of variables that Python reads at its start
            must run in a new process.
    """

    def __init__(self, folder: Path, prefix: Sequence[str] = ()) -> None:
        """Start the server. ``prefix`` is the start of its command line, such as nsenter and its options."""
        self._address = folder / "commands.sock"
        self.environment = dict(os.environ)
        command = [*prefix, sys.executable, str(Path(__file__).with_name("fork_server.py")), str(self._address)]
        # A test may have set variables of its farm. At its end, the farm kills all processes with these variables.
        own = {name: value for name, value in self.environment.items() if not name.startswith("HIL_")}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=REPOSITORY, env=own)

    def can_run(self, environment: Mapping[str, str]) -> bool:
        """Return whether a child of the server has the effects of an environment."""
        names = {name for name in {*environment, *self.environment} if name.startswith(_AT_START)}
        return all(environment.get(name) == self.environment.get(name) for name in names)

    def run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path,
        timeout: float,
        stdin: Path = Path(os.devnull),
    ) -> Finished:
        """Run a program, or this checkout's hil if the first argument is ``hil``."""
        with tempfile.TemporaryDirectory(prefix="command-") as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            streams = [str(stdin), str(out), str(err)]
            order = {"argv": argv, "env": dict(env), "cwd": str(cwd), "streams": streams, "timeout": timeout}
            with self._connect() as connection:
                connection.sendall(json.dumps(order).encode() + b"\n")
                answer = connection.makefile("r").readline()
            assert answer, "the fork server ended"
            return Finished(json.loads(answer)["code"], *(path.read_text(errors="replace") for path in (out, err)))

    def _connect(self) -> socket.socket:
        end = time.monotonic() + _START_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self._address))
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                assert self._process.poll() is None and time.monotonic() < end, "the fork server did not start"
                time.sleep(0.01)
            else:
                return connection

    def close(self) -> None:
        """Stop the server."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(_START_S)
