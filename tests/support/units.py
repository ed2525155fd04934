"""Run systemd's service units without systemd: their command, environment files and directory, on a machine."""

from __future__ import annotations

import itertools
import re
import shlex
import signal
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from support.machines import Machine
from support.waiting import eventually

# Environment of a service of the user root, as systemd sets it.
_SYSTEM_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
    "USER": "root",
    "LOGNAME": "root",
    "HOME": "/srv/root",
    "SHELL": "/bin/sh",
}
_UNITS = "/etc/systemd/system"
# Stay in this session, so that the process writes its own id. The file names the main process, as systemd knows it.
_START = 'echo $$ > "$1"; cd "$2"; shift 2; exec "$@"'
_numbers = itertools.count()


@dataclass
class Unit:
    """Settings of a service unit that this module uses."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)  # environment files; a leading `-` allows a missing file
    folder: str = "/"
    stop_s: float = 90.0


def read_unit(text: str) -> Unit:
    """Read the section [Service] of a unit. Raises AssertionError for a setting that would change the meaning."""
    unit, section = Unit([]), ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        if section != "Service" or "=" not in line:
            continue
        name, _, value = line.partition("=")
        if name == "ExecStart":
            unit.command = [word.replace("$$", "$") for word in _split(value)]
        elif name == "Environment":
            unit.environment |= dict(word.split("=", 1) for word in _split(value))
        elif name == "EnvironmentFile":
            unit.files.append(value)
        elif name == "WorkingDirectory":
            unit.folder = value.replace("%%", "%")
        elif name == "TimeoutStopSec":
            unit.stop_s = float(value)
        else:
            assert not name.startswith("Exec"), f"not supported: {line}"
    assert unit.command, text
    return unit


def read_environment(text: str) -> dict[str, str]:
    """Return the variables of an environment file."""
    lines = [line for line in text.splitlines() if line.strip() and not re.match(r"\s*[#;]", line)]
    return {name.strip(): "".join(shlex.split(value)) for name, _, value in (line.partition("=") for line in lines)}


class Service:
    """Service of a machine."""

    def __init__(self, machine: Machine, name: str) -> None:
        self.name, self._machine = name, machine
        self._unit = read_unit(machine.path(f"{_UNITS}/{name}").read_text())
        self._log = machine.path(f"/srv/{name}.log")
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = Path()
        self._is_stopped = True

    def log(self) -> str:
        """Return the end of the service's messages."""
        return self._log.read_text(errors="replace")[-6000:] if self._log.exists() else ""

    def start(self) -> None:
        """Start the service. The environment files may have changed since the last start."""
        assert not self.is_running
        self._pid = Path(f"/srv/pid-{next(_numbers)}")
        command = ["sh", "-c", _START, "sh", str(self._pid), self._unit.folder, *self._unit.command]
        self._process = self._machine.start(command, self._log, self._read_environment())
        self._is_stopped = False
        eventually(lambda: self._read_pid() or not self.is_running, self.log)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def has_failed(self) -> bool:
        """True if the service ended by itself."""
        return not self._is_stopped and not self.is_running

    def stop(self) -> int:
        """Stop the service as systemd does with KillMode=mixed. Return the exit code."""
        assert self._process is not None and self.is_running, self.log()
        self._is_stopped = True
        self._machine.run("kill", f"-{signal.SIGTERM.value}", str(self._read_pid()))
        return self._process.wait(self._unit.stop_s)

    def run(self) -> None:
        """Run a service of type oneshot to its end. Raises AssertionError if it fails."""
        self._machine.run(*self._unit.command, environment=self._read_environment())

    def _read_environment(self) -> dict[str, str]:
        environment = {**_SYSTEM_ENVIRONMENT, **self._unit.environment}
        for name in self._unit.files:
            path = self._machine.path(name.removeprefix("-"))
            if path.exists() or not name.startswith("-"):
                environment |= read_environment(path.read_text())
        return environment

    def _read_pid(self) -> int:
        path = self._machine.path(self._pid)
        return int(path.read_text() or 0) if path.exists() else 0


def _split(value: str) -> list[str]:
    return [word.replace("%%", "%") for word in shlex.split(value)]
