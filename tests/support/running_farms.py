"""Farms as a user runs them: `hil farm up` in a separate home directory, and commands for this farm."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from support.commands import Ended, run_hil
from support.schemas import check_document
from support.waiting import eventually

# Long enough that a process that stops for a few seconds on a busy machine loses nothing.
TERMS = "[terms]\nbeat_s = 0.3\nlease_s = 15\nowner_s = 15\nquarantine_s = 2\n"
HIL = (sys.executable, "-m", "hil.controller.cli.main")


class RunningFarm:
    """Running farm.

    Attributes:
        home: its HIL_FARM_HOME, removed at the end.
        environment: environment of commands.
        process: `hil farm up`.
    """

    def __init__(self, home: Path, words: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self.home, self._words = home, words
        self.environment = {**environment, "HIL_FARM_HOME": str(home)}
        for name in ("HIL_FARM", "HIL_FARM_TOKEN", "HIL_FARM_CA", "HIL_FARM_DB", "HIL_BOARD"):
            self.environment.pop(name, None)
        self.process: subprocess.Popen[bytes]

    def up(self, within_s: float = 180.0) -> None:
        """Start the farm, and wait until it has checked its boards."""
        self.start()
        self.eventually(self._is_ready, within_s)

    def start(self) -> None:
        with (self.home / "said").open("ab") as said:
            command = [*HIL, "farm", "up", *self._words]
            self.process = subprocess.Popen(command, env=self.environment, stderr=said, stdin=subprocess.DEVNULL)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.said()
        sheet = self.sheet()
        return bool(sheet and sheet["pid"] == self.process.pid and sheet["ready"])

    def sheet(self) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.home / "up.json").read_text())
        return None

    def said(self) -> str:
        """Return the farm's output, and the ends of its logs."""
        logs = [path.read_text(errors="replace")[-3000:] for path in (self.home / "logs").glob("*.log")]
        return "\n".join([(self.home / "said").read_text(errors="replace"), *logs])

    def eventually(self, what: Callable[[], object], within_s: float = 120.0) -> Any:
        """Return the first true result of a function."""
        return eventually(what, self.said, within_s, every_s=0.05)

    def hil(self, *args: object, timeout: float = 240.0, cwd: Path | None = None) -> Ended:
        """Run `hil ARGS...` for this farm."""
        ended = run_hil([*map(str, args)], self.environment, cwd or self.home, timeout)
        if "--json" in args and args[0] == "farm":
            check(args, ended.document)
        return ended

    def boards(self) -> dict[str, str]:
        """Return the state of each board by name."""
        return {board["name"]: board["state"] for board in self.hil("farm", "boards", "--json").document["boards"]}

    def processes(self) -> list[int]:
        """Return all processes of the farm: those with its home directory in their environment, or as working
        directory.
        """
        found = []
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdecimal() and int(path.name) != os.getpid():
                    mine = f"HIL_FARM_HOME={self.home}\0".encode() in (path / "environ").read_bytes() + b"\0"
                    below = os.readlink(path / "cwd").startswith(str(self.home))  # noqa: PTH115 - /proc's links
                    zombie = (path / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
                    found += [int(path.name)] * ((mine or below) and not zombie)
        return found

    def stop(self, how: signal.Signals = signal.SIGINT, within_s: float = 60.0) -> int:
        """Stop the farm, and wait for its end. Return the exit code."""
        self.process.send_signal(how)
        return self.process.wait(within_s)

    def end(self) -> None:
        """Kill all processes of the farm that remain."""
        if hasattr(self, "process") and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(AttributeError):
            self.process.wait(60)
        shutil.rmtree(self.home, ignore_errors=True)


def check(args: tuple[object, ...], document: Any) -> None:
    """Validate the output of `hil ARGS... --json`."""
    command = " ".join(map(str, args[: 3 if args[1] == "token" else 2]))
    if "error" in document:
        check_document(document, "error", "run")
    else:
        check_document(document, command, "farm")


@contextlib.contextmanager
def running_farm(*words: str, environment: Mapping[str, str], start: bool = True) -> Iterator[RunningFarm]:
    """Farm of a single test.

    Args:
        words: options of `hil farm up`.
        environment: environment of the farm and of the commands for it.
        start: start it now, and wait for its boards.
    """
    # Short enough for a socket. Pytest's own directories are too long.
    farm = RunningFarm(Path(tempfile.mkdtemp(prefix="hil-farm-")), words, environment)
    (farm.home / "farm.toml").write_text(TERMS)
    try:
        if start:
            farm.up()
        yield farm
    finally:
        farm.end()
