"""Hosts of a farm as processes with simulated boards. The test runs the gateway."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.host.inventory import make_socket_folder
from hil.controller.farm.messages import JobSpec, Submission
from hil.controller.records.lab.farm import JobDetails
from support.farm_chaos_checks import read_journal
from support.gateways import Running
from support.sshd import started_with
from support.waiting import eventually


class Host:
    """Process of `hil farm host`."""

    def __init__(self, farm: Running, token: str, home: Path, name: str, words: Sequence[str]) -> None:
        self.home, self.name, self.words = home, name, list(words)
        self.environment = {
            **os.environ,
            "HIL_FARM": farm.address,
            "HIL_FARM_TOKEN": token,
            "HIL_FARM_HOME": str(home),
            "HIL_TEST_HOST": f"{home}/{name}",
            "XDG_CACHE_HOME": str(home / "cache"),
        }
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        command = [sys.executable, "-m", "hil", "farm", "host", "--name", self.name, *self.words]
        with (self.home / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stderr=log)

    @property
    def said(self) -> str:
        return (self.home / f"{self.name}.log").read_text(errors="replace")

    def processes(self) -> list[int]:
        """Return all processes that the host started, including the host."""
        return started_with(f"HIL_TEST_HOST={self.home}/{self.name}")

    def worker(self, board: str) -> int:
        """Return the worker process of a board."""
        return self._child(board)

    def agent(self, board: str) -> int:
        """Return the agent process of a simulated board."""
        return self._child(f"simulator {board}")

    def uplink(self) -> int:
        """Return the process with the host's connection to the farm."""
        return self._child("uplink")

    def _child(self, name: str) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (found,) = (pid for pid in children if Path(f"/proc/{pid}/comm").read_text().strip() == name[-15:])
        return int(found)

    def address(self, board: str) -> str:
        """Return the address of a simulated board's agent."""
        return f"unix:{make_socket_folder(self.home / 'hosts' / self.name)}/{board.rpartition('-')[2]}.sock"

    def journal(self, board: str) -> list[dict[str, Any]]:
        return read_journal(self.home / "hosts" / self.name / "boards" / board / "store")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(how)
        self.process.wait(30)
        eventually(lambda: not self.processes())


@contextlib.contextmanager
def running_host(farm: Running, token: str, name: str, *words: str) -> Iterator[Host]:
    """Run a host with a separate home directory. No process or file of the host remains."""
    with tempfile.TemporaryDirectory(prefix="hil-host-") as home:
        host = Host(farm, token, Path(home), name, words)
        host.start()
        try:
            yield host
        finally:
            host.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                host.process.wait(60)
            # The processes that the host prepared end when they detect the end of the host.
            deadline = time.monotonic() + 60
            while (left := host.processes()) and time.monotonic() < deadline:
                time.sleep(0.05)
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            host.process.wait(60)
        assert not left, host.said


def submit(farm: FarmClient, *specs: JobSpec, **settings: Any) -> list[str]:
    return farm.submit(Submission("a test", specs, **settings))[1]


def job_of(farm: FarmClient, name: str) -> JobDetails:
    found: JobDetails = farm.ask("job", name=name)
    return found


def result_of(farm: FarmClient, name: str) -> dict[str, Any]:
    """Return the result of a job. Wait until the job has ended."""
    eventually(
        lambda: job_of(farm, name).state in ("done", "cancelled"), f"job {name} has no end: {job_of(farm, name)}"
    )
    (found,) = farm.ask("result", name=name)
    return {**found.to_json(), **job_of(farm, name).to_json()}


def states(farm: FarmClient) -> dict[str, str]:
    return {board.name: board.state for board in farm.ask("boards")}


def owners_at_once(journal: Sequence[dict[str, Any]]) -> int:
    """Return the maximum number of simultaneous leases of the board in its journal."""
    open_now: Counter[int] = Counter()
    most = 0
    for line in journal:
        _, _, edge = line["what"].rpartition(" ")
        if edge == "started":
            open_now.clear()  # all programs of a killed agent have ended
        else:
            open_now[line["fence"]] += 1 if edge in ("opened", "begins") else -1
            most = max(most, sum(count > 0 for count in open_now.values()))
    return most
