"""A real labgrid in a separate environment, because its pytest plugin would interfere with the tests."""

from __future__ import annotations

import contextlib
import http.server
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from filelock import FileLock

from support.sshd import LOOPBACK, free_port
from support.waiting import eventually

LABGRID = "labgrid==26.*"


@pytest.fixture(scope="session")
def labgrid_bin() -> Path:
    """Return the directory of labgrid's programs.

    uv installs them once. Skips without uv or without a package index.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hil" / "tests"
    place = cache / "labgrid-26"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not (place / "ready").exists():
            beside = Path(sys.executable).with_name("uv")
            uv = str(beside) if beside.exists() else shutil.which("uv")
            if uv is None:
                pytest.skip("no uv, to install labgrid with")
            made = subprocess.run([uv, "venv", "-q", "--clear", "--python", sys.executable, str(place)])
            install = [uv, "pip", "install", "-q", "--python", str(place / "bin/python"), LABGRID]
            if made.returncode or subprocess.run(install).returncode:
                pytest.skip(f"{LABGRID} cannot be installed here")
            (place / "ready").touch()
    return place / "bin"


@dataclass
class Labgrid:
    """Running coordinator with its exporters and its command line."""

    bin: Path
    folder: Path
    address: str = field(default_factory=lambda: f"{LOOPBACK}:{free_port()}")
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start_coordinator(self) -> None:
        self._start("coordinator", str(self.bin / "labgrid-coordinator"), "-l", self.address)
        eventually(lambda: "Coordinator ready" in self._log("coordinator"))

    def export(self, name: str, resources: str) -> None:
        """Start an exporter with resources (YAML)."""
        (self.folder / f"{name}.yaml").write_text(resources)
        program = str(self.bin / "labgrid-exporter")
        self._start(name, program, "-c", self.address, "-n", name, str(self.folder / f"{name}.yaml"))
        eventually(lambda: "connected to coordinator" in self._log(name))

    def client(self, *words: str, user: str = "admin") -> str:
        environment = {**os.environ, "LG_COORDINATOR": self.address, "LG_USERNAME": user}
        done = subprocess.run(
            [str(self.bin / "labgrid-client"), *words], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def place(self, name: str, match: str) -> None:
        """Create a place with all resources in the group of an exporter."""
        self.client("-p", name, "create")
        self.client("-p", name, "add-match", match)
        # The coordinator receives the resources a moment after the exporter has connected.
        eventually(lambda: "Matching resource" in self.client("-p", name, "show"), f"nothing matches {match}")

    def restart_coordinator(self) -> None:
        """Restart the coordinator and the exporters as systemd does.

        The coordinator stores places with a delay, and forgets their owners. Exporters end with the coordinator.
        """
        stored = self.folder / "places.yaml"
        places = self.client("places").split()
        eventually(lambda: stored.exists() and all(name in stored.read_text() for name in places))
        self.stop("coordinator")
        exporters = list(self.processes)
        for name in exporters:
            eventually(lambda name=name: self.processes[name].poll() is not None, f"the exporter {name} still runs")
            self.stop(name)
        self.start_coordinator()
        for name in exporters:
            self.export(name, (self.folder / f"{name}.yaml").read_text())

    def stop(self, name: str) -> None:
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )

    def _log(self, name: str) -> str:
        assert self.processes[name].poll() is None, (self.folder / f"{name}.log").read_text()
        return (self.folder / f"{name}.log").read_text()


@contextlib.contextmanager
def running_labgrid(bin: Path, folder: Path) -> Iterator[Labgrid]:
    lab = Labgrid(bin, folder)
    try:
        lab.start_coordinator()
        yield lab
    finally:
        for name in list(lab.processes):
            lab.stop(name)


class Outlet:
    """Switched outlet for labgrid's `rest` power driver. It records the requests in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        outlet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                outlet.told.append(self.rfile.read(int(self.headers["content-length"])).decode())
                self.do_GET()

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write((outlet.told or ["1"])[-1].encode())

            def log_message(self, *words: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self.url = f"http://{LOOPBACK}:{self._server.server_address[1]}/{{index}}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
