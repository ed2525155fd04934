"""Test how a worker handles a grant, with a fake board and a fake gateway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.farm.host import lease_runner
from hil.controller.farm.host.jobs import job_transfer
from hil.controller.farm.host.lease_runner import Attempt, LeaseRunner
from hil.controller.farm.messages import BoardCard, Grant, JobResult, JobSpec, Kind
from hil.controller.farm.paths import FarmAddress
from hil.core.board_config import Command, Power, Recover
from hil.core.board_parser import parse_board
from hil.core.boards import load_board
from hil.errors import BoardBusy, BoardLost, BoardUnfit, FarmUnreachable, HilError, UsageError

GRANT = Grant(5, "17", 17, "rpi5", 3, 6.0, 60.0, 1, JobSpec(Kind.RUN))


class BoardConnection:
    """Board that is available or raises an error."""

    def __init__(self, folder: Path, error: HilError | None = None, target: AgentEndpoint | None = None) -> None:
        self.site, self.post = (
            SimpleNamespace(files=folder / "files", sockets=folder, farm=FarmAddress(("unix:g",), "t")),
            SimpleNamespace(name="rpi5", folder=folder),
        )
        self.error, self.target = error, target
        self.shown = BoardCard("rpi5", labels={"kernel": "6.1"})
        self.config = SimpleNamespace(runtime="onnxruntime")
        self.holder, self.taken, self.released = 0, 0, 0
        self.brought = ""

    def read_stack(self) -> None:
        self.shown = self.shown.replace(config=f"{self.shown.config}stack\n")

    def deploy_runtime(self, runtime: str, say: Callable[[str], None]) -> None:
        self.brought = runtime

    def read_card(self) -> BoardCard:
        return self.shown

    def take(self, grant: Grant) -> None:
        if self.error:
            raise self.error
        self.taken = grant.fence

    def release(self) -> None:
        self.released += 1

    def choice(self, grant: Grant) -> str:
        return f"fence {grant.fence}"

    def is_held(self, fence: int) -> bool:
        return self.holder == fence

    def say(self, text: str) -> None:
        pass


class GatewayStream:
    """Record all messages."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def report_start(self, lease: int, direct: str) -> None:
        self.told.append(f"started {lease} {direct}")

    def send_card(self) -> None:
        self.told.append("present")

    def queue_output(self, lease: int, text: str) -> None:
        self.told.append(text)


def passed(attempt: Attempt) -> JobResult:
    return JobResult(0, "PASS")


@pytest.fixture
def do() -> Callable[..., tuple[JobResult, list[str]]]:
    """Run a grant; return its result and the messages sent to the farm."""

    def run(way: Any, use: Callable[[Attempt], JobResult] = passed, grant: Grant = GRANT):
        made, attendance = LeaseRunner(way, lambda: None, 1, use), GatewayStream()
        return made.do(grant, attendance), attendance.told

    return run


def test_runner_takes_board_by_fence_before_job_starts(do, tmp_path):
    way = BoardConnection(tmp_path)
    seen: list[str] = []
    result, told = do(way, lambda self: (seen.append(self.board), passed(self))[1])
    assert (way.taken, seen, told, way.released) == (3, ["fence 3"], ["started 5 "], 1)
    assert (result.exit_code, list(result.timings)) == (0, ["open"])
    assert 0 < result.board_ns[0] < result.board_ns[1] and not list((tmp_path).glob("job*"))


@pytest.mark.parametrize("error", [BoardBusy("fence 3 is too old"), UsageError("the token file cannot be read")])
def test_unavailable_board_ends_job_as_infrastructure_failure(error, do, tmp_path):
    result, told = do(BoardConnection(tmp_path, error))
    assert (result.exit_code, result.infrastructure, told) == (4, True, []) and error.message in result.reason


def test_job_usage_error_ends_job_as_user_failure(do, tmp_path):
    def wrong(attempt: Attempt) -> JobResult:
        raise UsageError("no such runtime")

    result, _ = do(BoardConnection(tmp_path), wrong)
    assert (result.exit_code, result.infrastructure) == (2, False)


def test_runner_presents_board_after_labels_change(do, tmp_path):
    way = BoardConnection(tmp_path)

    def look(grant: Grant) -> None:
        way.shown = way.shown.replace(labels={"kernel": "6.6"})

    way.take = look
    assert do(way)[1] == ["present", "started 5 "]


@pytest.mark.parametrize(("kind", "reads"), [(Kind.HEALTH, True), (Kind.RUN, False)])
def test_check_reads_stack_before_start(do, tmp_path, kind: Kind, reads: bool) -> None:
    way = BoardConnection(tmp_path)
    way.config = load_board("generic").config
    told = do(way, grant=replace(GRANT, spec=JobSpec(kind)))[1]
    assert told == (["present"] if reads else []) + ["started 5 "]


def test_runner_brings_runtime_of_job(do, tmp_path):
    way = BoardConnection(tmp_path)
    assert do(way, grant=replace(GRANT, spec=JobSpec(Kind.RUN, {"needs": "tflite"})))[0].exit_code == 0
    assert way.brought == "tflite"


@pytest.mark.parametrize("target", [None, AgentEndpoint("lab:7700", token="secret")], ids=["no agent", "a token"])
def test_lease_fails_when_agent_excludes_other_clients(target, do, tmp_path):
    result, _ = do(BoardConnection(tmp_path, target=target), grant=replace(GRANT, spec=JobSpec(Kind.LEASE)))
    assert (result.exit_code, result.infrastructure) == (2, False) and "rpi5 cannot be leased" in result.reason


@pytest.mark.parametrize(("held_by", "clear"), [(0, True), (3, False), (4, True)])
def test_clear_away_fails_while_job_occupies_board(held_by, clear, tmp_path, monkeypatch):
    monkeypatch.setattr(lease_runner, "_FREE_SECONDS", 0.1)
    way: Any = BoardConnection(tmp_path)
    way.holder = held_by
    assert LeaseRunner(way, lambda: None, 1, passed).clear_away(3) is clear


def test_farm_call_retries_unreachable_gateway(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(job_transfer, "time", SimpleNamespace(sleep=slept.append))
    answers: list[Any] = [FarmUnreachable(), FarmUnreachable(), "there"]

    def call() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    assert job_transfer.retry_until_reachable(call) == "there" and slept == [job_transfer.AGAIN_SECONDS] * 2


def test_lease_serves_connections_before_reporting_start(tmp_path):
    made: Any = LeaseRunner(BoardConnection(tmp_path, target=AgentEndpoint("unix:/a.sock")), lambda: None, 1, passed)
    attendance: Any = GatewayStream()
    attendance.report_start = lambda lease, direct: attendance.told.append((made.serving.lease, direct))
    result = made.do(replace(GRANT, spec=JobSpec(Kind.LEASE), timeout_s=0.05), attendance)
    assert (attendance.told, result.reason, made.serving) == (
        ["present", (5, f"unix:{tmp_path}/lease-5.sock")],
        "time limit reached",
        None,
    )


def test_command_gets_config_of_leased_board(do, tmp_path):
    way: Any = BoardConnection(tmp_path, target=AgentEndpoint("unix:/a.sock"))
    way.config = replace(load_board("generic").config, power=Power({"cycle": Command(("true",))}))
    way.post.config = tmp_path / "own.toml"
    seen: dict[str, Any] = {}

    def look(attempt: Attempt) -> JobResult:
        assert attempt.config is not None
        seen["config"] = parse_board(attempt.config.read_text(), attempt.config)
        return JobResult(0, "PASS")

    result, _ = do(way, look, replace(GRANT, spec=JobSpec(Kind.COMMAND)))
    assert result.exit_code == 0, result.reason
    connection = seen["config"].connection
    assert (connection.address, connection.fence) == (f"unix:{tmp_path}/lease-5.sock", 3)
    assert not seen["config"].power.hooks and way.released >= 1 and not (tmp_path / "job").exists()


def test_command_on_board_without_agent_gets_own_config(do, tmp_path):
    way: Any = BoardConnection(tmp_path)
    way.config, way.post.config = load_board("generic").config, tmp_path / "own.toml"
    seen: list[Path | None] = []
    do(
        way,
        lambda attempt: (seen.append(attempt.config), passed(attempt))[1],
        replace(GRANT, spec=JobSpec(Kind.COMMAND)),
    )
    assert seen == [tmp_path / "own.toml"]


class StuckBoard(BoardConnection):
    """Board whose checks fail until enough recovery steps ran; each step appends a line to a file."""

    def __init__(self, folder: Path, needed: int, *steps: Command) -> None:
        super().__init__(folder)
        self.config: Any = replace(load_board("generic").config, recover=Recover(steps, 5.0))
        self.site.folder = folder
        self.needed, self.done, self.hung_up = needed, folder / "done", 0

    def hang_up(self) -> None:
        self.hung_up += 1

    def check(self, attempt: Attempt) -> JobResult:
        done = len(self.done.read_text().splitlines()) if self.done.exists() else 0
        return JobResult(0, "PASS") if done >= self.needed else JobResult(3, "TIMEOUT", "small test model: TIMEOUT")


@pytest.mark.parametrize(
    ("needed", "code", "done", "reason"),
    [
        (0, 0, 0, ""),
        (1, 0, 1, "recovered by `sh -c"),
        (2, 0, 2, "recovered by `sh -c"),
        (3, 3, 2, "small test model: TIMEOUT; tried `sh -c"),
    ],
)
def test_health_check_stops_recovery_when_board_works(
    do, tmp_path: Path, needed: int, code: int, done: int, reason: str
) -> None:
    step = Command(("sh", "-c", f"echo x >> {tmp_path}/done"))
    way = StuckBoard(tmp_path, needed, step, step)
    result, told = do(way, way.check, replace(GRANT, spec=JobSpec(Kind.HEALTH)))
    assert result.exit_code == code and result.reason.startswith(reason)
    assert way.hung_up == done == sum("does not work" in line for line in told)


def test_board_in_use_runs_without_recovery_steps(do, tmp_path: Path) -> None:
    way = StuckBoard(tmp_path, 1, Command(("sh", "-c", f"echo x >> {tmp_path}/done")))
    busy = JobResult(4, "BOARD_BUSY", "in use by bob", infrastructure=True)
    result, _ = do(way, lambda attempt: busy, replace(GRANT, spec=JobSpec(Kind.HEALTH)))
    assert (result.outcome, result.reason) == ("BOARD_BUSY", "in use by bob") and not way.done.exists()


def test_job_failure_runs_without_recovery_steps(do, tmp_path: Path) -> None:
    way = StuckBoard(tmp_path, 1, Command(("sh", "-c", f"echo x >> {tmp_path}/done")))
    result, _ = do(way, way.check)
    assert result.outcome == "TIMEOUT" and not way.done.exists()


@pytest.mark.parametrize(
    ("check", "kind"),
    [
        (JobResult(0, "PASS"), type(None)),
        (JobResult(3, "TIMEOUT", "it hangs"), BoardUnfit),
        (JobResult(4, "BOARD_UNREACHABLE", "no answer"), BoardLost),
    ],
)
def test_fault_of_check_separates_unfit_from_lost_board(check: JobResult, kind: type) -> None:
    assert type(lease_runner.make_check_error(check)) is kind
