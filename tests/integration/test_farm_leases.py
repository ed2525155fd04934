"""Leases of a real farm of three simulators that `hil farm up` starts, and what becomes of them when something dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.commands import Ended
from support.models import DIGITS
from support.plugin_runs import Project
from support.running_farms import HIL, TERMS, RunningFarm, running_farm

import hil as library
from hil.controller.farm.client import lease_session as holdings
from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.client.lease_session import LeaseSession, lease_order
from hil.controller.farm.paths import choose_farm_address
from hil.controller.records.lab.farm import FarmBoard, FarmJob
from hil.controller.records.suite import CaseRecord
from hil.controller.workloads.suites.job import run_suite
from hil.controller.workloads.suites.request import SuiteRequest
from hil.errors import FarmError, FarmUnreachable

pytestmark = pytest.mark.timeout(300)
MODEL = DIGITS / "digits_cnn.onnx"
HOLDER_S = 8.0


class Farm:
    """A farm on this machine, as its users see it."""

    def __init__(self, running: RunningFarm) -> None:
        self.running = running

    def jobs(self) -> list[FarmJob]:
        """Its jobs; a gateway that was killed is waited for."""

        def ask() -> list[list[FarmJob]]:
            with contextlib.suppress(FarmUnreachable), FarmClient(choose_farm_address()) as farm:
                return [farm.ask("jobs")]
            return []

        return self.running.eventually(ask)[0]

    def until(self, condition: Callable[[list[FarmJob]], object]) -> list[FarmJob]:
        """Wait until the jobs are so."""
        return self.running.eventually(lambda: jobs if condition(jobs := self.jobs()) else None)

    def kill_gateway(self) -> None:
        """-9; it is started again."""
        for pid in self.running.processes():
            with contextlib.suppress(OSError):
                if b"gateway" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
                    return
        raise AssertionError("there is no gateway")


@pytest.fixture(scope="module")
def real_farm() -> Iterator[Farm]:
    pytest.importorskip("procrastinate", reason="needs the extra `farm`")
    farms = running_farm("--sim", "3", environment=os.environ, start=False)
    with farms as running, pytest.MonkeyPatch.context() as patch:
        (running.home / "farm.toml").write_text(f"{TERMS}holder_s = {HOLDER_S}\n")
        running.up()
        patch.setenv("HIL_FARM_HOME", str(running.home))
        yield Farm(running)


def idle(jobs: list[FarmJob]) -> bool:
    return not any(job.state in ("queued", "running") for job in jobs)


def test_run_suite_and_pytest_lease_farm_boards(
    real_farm: Farm, hil: Callable[..., Ended], tmp_path: Path, environment: dict[str, str]
) -> None:
    ended = hil("run", MODEL, "--board", "farm:simulated", "--json")
    assert ended.code == 0, ended.err
    names = {board.name for board in _boards()}
    assert ended.document["board"]["name"] in names
    assert ended.document["board"]["info"]["lease"].startswith("job ")
    refused = hil("run", MODEL, "--board", "farm:chip=a53")
    assert refused.code == 4
    assert "nearest: " in refused.out + refused.err
    wrong = hil("run", MODEL, "--board", "farm:chip=")
    assert wrong.code == 2, wrong.err
    words = ["--flow", "onnxruntime", "--filter", "digits_cnn_l*", "--board", "farm:", "-j", 3]
    suite = hil("suite", "run", MODEL.parent, *words, "--json")
    assert suite.code == 0, suite.err
    assert {case["board"] for case in suite.document["cases"]} <= names
    project = Project(tmp_path / "project", environment).set_up("digits_cnn", ini="hil_flow = onnxruntime")
    run = project.test("-n", 3, "--board", "farm:", "--runtime-hw-type", "sim")
    assert run.code == 0, run.out
    assert {told["hil_board"] for told in run.properties.values()} <= names
    assert idle(real_farm.jobs())
    assert {job.reason for job in real_farm.jobs()} == {"released"}


@pytest.mark.slow
def test_lease_ends_at_time_limit(real_farm: Farm, hil: Callable[..., Ended]) -> None:
    begin = time.monotonic()
    ended = hil("farm", "lease", "--for", "15s", "--", "sleep", "600")
    assert ended.code == 4
    assert "the lease ended: time limit reached" in ended.err
    assert time.monotonic() - begin < 120


def test_farm_frees_board_of_killed_holder(real_farm: Farm, environment: dict[str, str], tmp_path: Path) -> None:
    script = "import time, hil; board = hil.connect('farm:'); print(board.name, flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, cwd=tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline()
    assert not idle(real_farm.jobs())
    process.kill()
    process.communicate()
    begin = time.monotonic()
    jobs = real_farm.until(idle)
    assert time.monotonic() - begin < HOLDER_S + 30
    assert jobs[-1].reason == f"no heartbeat from the lease holder for {HOLDER_S:g} s"


@pytest.mark.slow
def test_woken_holder_cannot_use_board_after_lease(
    real_farm: Farm, environment: dict[str, str], tmp_path: Path
) -> None:
    where = f'farm:name="{_boards()[0].name}"'
    script = (
        "import hil, sys\n"
        f"with hil.connect({where!r}) as board:\n"
        "    print(board.name, flush=True); sys.stdin.readline()\n"
        f"    case = hil.run({str(MODEL)!r}, board, runtime='onnxruntime')\n"
        "    print(case.outcome.value, case.error)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    process.send_signal(signal.SIGSTOP)
    try:
        real_farm.until(idle)
        with library.connect(where) as board:
            assert board.name == name
            process.send_signal(signal.SIGCONT)
            out, _ = process.communicate("go\n", timeout=60)
            assert out.startswith("BOARD_LOST")
            assert "the lease ended: no heartbeat from the lease holder" in out
            assert library.run(MODEL, board, runtime="onnxruntime")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("tunnel", [False, True])
def test_lease_survives_gateway_kill(real_farm: Farm, monkeypatch: pytest.MonkeyPatch, tunnel: bool) -> None:
    if tunnel:
        monkeypatch.setattr(holdings, "get_machine_id", lambda: "another machine")
    with library.connect("farm:") as board:
        lease = board.info["lease"]
        assert library.run(MODEL, board, runtime="onnxruntime")
        real_farm.kill_gateway()
        again = library.run(MODEL, board, runtime="onnxruntime")
        # Through the farm that run may be lost, as with any link; on the same machine nothing is noticed.
        assert again or tunnel
        time.sleep(HOLDER_S + 1)
        [running] = [job for job in real_farm.jobs() if job.state == "running"]
        assert f"job {running['name']}," in lease
        if not tunnel:
            assert library.run(MODEL, board, runtime="onnxruntime")
    assert idle(real_farm.jobs())


@pytest.mark.slow
def test_lease_command_continues_after_gateway_kill(
    real_farm: Farm, environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "go.sh").write_text(f"echo $HIL_BOARD; read line; exec {' '.join(HIL)} run {MODEL} --json\n")
    process = subprocess.Popen(
        [*HIL, "farm", "lease", "--", "sh", str(tmp_path / "go.sh")],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    config = Path(process.stdout.readline().strip())
    assert "fence = " in config.read_text()
    real_farm.kill_gateway()
    time.sleep(HOLDER_S + 2)
    out, _ = process.communicate("go\n", timeout=60)
    assert process.returncode == 0
    assert json.loads(out)["board"]["name"] == config.stem
    assert not config.exists()
    assert idle(real_farm.jobs())


class Progress:
    """Kills the gateway once, when a suite has come so far."""

    def __init__(self, farm: Farm) -> None:
        self._farm = farm
        self.ended = 0
        self.notes: list[str] = []

    def begin(self, total: int, done: object) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(time.monotonic(), text)

    def interrupt(self, command: str) -> None:
        self.note(command)

    def end(self, record: CaseRecord) -> None:
        self.ended += 1
        if self.ended == 5:
            self._farm.kill_gateway()


@pytest.mark.slow
def test_tunneled_suite_continues_after_gateway_kill(
    real_farm: Farm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(holdings, "get_machine_id", lambda: "another machine")
    request = SuiteRequest(str(MODEL.parent), "onnxruntime", ("farm:",), filters=("digits_cnn_l*", "*int8*"), jobs=2)
    screen = Progress(real_farm)
    run = run_suite(request, out=tmp_path / "out", screen=screen)
    assert run.head.exit_code == 0, screen.notes
    assert {record.outcome for record in run.read_records()} <= {"PASS", "XFAIL"}
    assert screen.ended == len(run.head.ids) > 10
    assert set(run.head.boards) <= {board.name for board in _boards()}
    # What could not be told to a gateway that was away ends by itself.
    real_farm.until(idle)


def test_admin_cancels_lease(real_farm: Farm) -> None:
    with LeaseSession(choose_farm_address(), lease_order("", "a test")) as holding:
        assert holding.wait(30)
        with FarmClient(choose_farm_address()) as farm:
            farm.do("cancel", name=holding.held.grant.job)
        assert "cancelled" in holding.ended(60)
        with pytest.raises(FarmError, match="cancelled"):
            holding.wait(0)


def _boards() -> list[FarmBoard]:
    with FarmClient(choose_farm_address()) as farm:
        return farm.ask("boards")
