"""Run `hil web` in a separate process, and measure responses, memory and CPU time."""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_PATIENCE_S = 600
# Text on all pages during the first indexing.
READING = b"Indexing: "


class Server:
    """Server and the processes that it started."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process = process
        parts = urlsplit(address)
        self.address = f"{parts.scheme}://{parts.netloc}/"
        self._connection = http.client.HTTPConnection(parts.netloc, timeout=120)
        # With a farm, each page needs the token in the address.
        token = parse_qs(parts.query).get("token", [""])[0]
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def get(self, path: str) -> tuple[float, int, bytes]:
        """Request a page over a persistent connection.

        Return the seconds for the whole response, the status and the body.
        """
        for _ in range(2):
            start = time.perf_counter()
            try:
                self._connection.request("GET", path, headers=self._headers)
                answer = self._connection.getresponse()
                break
            except (http.client.RemoteDisconnected, BrokenPipeError):
                self._connection.close()  # the server closed the idle connection
            except ConnectionRefusedError:
                self._connection.close()
                raise
        body = answer.read()
        return time.perf_counter() - start, answer.status, body

    def processes(self) -> list[int]:
        """Return the process ids of the server and all processes that it started."""
        found = [self._process.pid]
        for one in found:
            for task in Path(f"/proc/{one}/task").glob("*"):
                with contextlib.suppress(OSError):
                    found += map(int, (task / "children").read_text().split())
        return found

    def cpu_s(self) -> float:
        """Return the CPU seconds of all processes."""
        total = 0
        for one in self.processes():
            for task in Path(f"/proc/{one}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):
                    total += int(task.read_text().split()[0])
        return total / 1e9

    def peak_bytes(self) -> int:
        """Return the sum of the peak resident memory of all processes."""
        total = 0
        for one in self.processes():
            with contextlib.suppress(OSError):
                found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{one}/status").read_text())
                total += int(found[1]) * 1024 if found else 0
        return total

    def wait_read(self) -> float:
        """Return the seconds until everything is indexed."""
        start = time.perf_counter()
        while READING in self.get("/?model=none")[2]:
            assert time.perf_counter() - start < _PATIENCE_S, "index not ready in time"
            time.sleep(0.1)
        return time.perf_counter() - start


@contextlib.contextmanager
def serving(command: list[str], *, quiet: bool = False, **environment: str) -> Iterator[Server]:
    """Start a server that prints its address on the first line. End it with the context."""
    said = subprocess.DEVNULL if quiet else None
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=said, text=True, env={**os.environ, **environment}
    )
    try:
        assert process.stdout
        address = process.stdout.readline().strip()
        assert address.startswith("http://"), f"{command} did not start"
        yield Server(process, address)
    finally:
        process.terminate()
        process.wait(30)


def hil_web(root: Path, cache: Path, *words: str) -> contextlib.AbstractContextManager[Server]:
    """Start `hil web` for a directory, with the index below ``cache``. ``words`` are further arguments."""
    command = [sys.executable, "-u", "-m", "hil", "web", "--runs", str(root), "--port", "0", *words]
    return serving(command, XDG_CACHE_HOME=str(cache))
