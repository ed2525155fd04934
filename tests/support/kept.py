"""Simulators that commands of a test reuse, as commands of a user do. They end with the test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import tempfile
from collections.abc import Iterator, MutableMapping
from pathlib import Path


def process_at(path: Path | str) -> int:
    """Return the ID of the process that listens on a Unix socket."""
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(str(path).removeprefix("unix:"))
        return int(struct.unpack("3i", asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


@contextlib.contextmanager
def keeping_simulators(environment: MutableMapping[str, str]) -> Iterator[Path]:
    """Make the commands of an environment reuse simulators. Return the directory of the simulators."""
    with tempfile.TemporaryDirectory(prefix="kept-", ignore_cleanup_errors=True) as folder:
        environment["TMPDIR"] = folder
        environment.pop("HIL_SIMULATOR", None)
        kept = Path(folder) / f"hil-sim-{os.geteuid()}"
        try:
            yield kept
        finally:
            for one in kept.glob("*/sim.sock"):
                with contextlib.suppress(OSError):
                    os.kill(process_at(one), signal.SIGKILL)
