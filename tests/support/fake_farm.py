"""Gateway of a farm in this process, with real leases and tunnels, but without a database and hosts.

The boards are agents that a test started. Methods of the gateway simulate failures.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from hil import errors
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.farm.client.machine import get_machine_id
from hil.controller.farm.messages import BoardCard, Grant, Submission
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.rpc import (
    LEASE_KEY,
    LEASE_SECRET_KEY,
    decode_submission,
    encode_card,
    encode_grant,
    encode_json,
    iter_methods,
)
from hil.protocol import grpc_calls, wire, wire_errors
from hil.protocol.v1 import farm_pb2 as pb
from support.agents import start_process, stop_process
from support.fake_farm_client import job

CONFIG = """
[board]
hw_type = "sim"
[devices]
iree = "local-task"
onnxruntime = "CPUExecutionProvider"
[compile_flags]
iree = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu",
        "--iree-llvmcpu-target-cpu=host"]
[simulator]
"""


@dataclass
class Lease:
    number: int
    order: Submission
    board: str = ""
    fence: int = 0
    over: str = ""
    beats: int = 0
    resumed: int = 0
    key: str = "secret"
    # Cause of the end: the holder closed the stream, or another event.
    given_back: bool = False
    # The holder knows that the lease has ended.
    told: bool = False


@dataclass
class Board:
    card: BoardCard
    agent: str
    fence: int = 0
    lease: Lease | None = None
    dials: int = 0
    direct: bool = True


@dataclass
class FakeFarm:
    """Gateway. ``cut`` breaks all streams, like a gateway that crashes."""

    path: Path
    boards: dict[str, Board] = field(default_factory=dict)
    leases: list[Lease] = field(default_factory=list)
    max_boards: int = 100

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self.generation = 0
        self.start()

    def start(self) -> None:
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(64), options=grpc_calls.GRPC_OPTIONS)
        table = {}
        for name, _, kind, asked, _ in iter_methods("Farm"):
            if serve := getattr(self, name.lower(), None):
                make = getattr(grpc, f"{kind}_rpc_method_handler")
                table[name] = make(serve, asked.FromString, lambda sent: sent.SerializeToString())
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"{wire.PACKAGE}.Farm", table),))
        self.server.add_insecure_port(f"unix:{self.path}")
        self.server.start()

    @property
    def address(self) -> FarmAddress:
        return FarmAddress((f"unix:{self.path}",), "token")

    @property
    def environment(self) -> dict[str, str]:
        return {"HIL_FARM": f"unix:{self.path}", "HIL_FARM_TOKEN": "token"}

    def add(self, name: str, agent: str, config: str = CONFIG, *, direct: bool = True) -> Board:
        card = BoardCard(
            name, "lab1", "host-a", {}, config, "sim", direct=agent if direct else "", machine=get_machine_id()
        )
        with self.changed:
            self.boards[name] = Board(card, agent, fence=_fence_of(agent), direct=direct)
            self.changed.notify_all()
        return self.boards[name]

    def remove(self, name: str, why: str) -> None:
        """Remove a board, and end the lease on it."""
        self.end(name, why)
        with self.changed:
            del self.boards[name]

    def end(self, name: str, why: str) -> None:
        """End the lease on a board."""
        with self.changed:
            board = self.boards[name]
            if board.lease:
                board.lease.over, board.lease = why, None
            self.changed.notify_all()

    def cut(self) -> None:
        """Break all streams. The leases remain."""
        with self.changed:
            self.generation += 1
            self.changed.notify_all()

    def stop(self) -> None:
        self.cut()
        self.server.stop(0).wait()

    def is_free(self) -> bool:
        return all(board.lease is None for board in self.boards.values())

    def _take(self, lease: Lease) -> bool:
        named = re.search(r'name="?([^",)]+)', lease.order.selector)
        used = sum(board.lease is not None for board in self.boards.values())
        for name, board in self.boards.items():
            if board.lease is None and (not named or named[1] == name) and used < self.max_boards:
                board.fence += 1
                lease.board, lease.fence, board.lease = name, board.fence, lease
                return True
        return False

    def lease(self, requests: Iterator[pb.LeaseRequest], context: grpc.ServicerContext) -> Iterator[pb.LeaseReply]:
        first, generation = next(requests), self.generation
        resumed = first.WhichOneof("kind") == "resume"
        if resumed:
            lease = self.leases[first.resume.lease - 1]
            assert first.resume.key == lease.key
            lease.resumed += 1
        else:
            order = decode_submission(first.open)
            if order.selector == "impossible":
                _abort(context, errors.FarmError("no board of the farm matches impossible", hint="the nearest: sim-1"))
            with self.changed:
                known = [one for one in self.leases if one.order.key == order.key]
                lease = known[0] if known else Lease(len(self.leases) + 1, order)
                self.leases += [] if known else [lease]
        ended = threading.Event()

        def listen() -> None:
            with contextlib.suppress(Exception):
                for _ in requests:
                    lease.beats += 1
                # If we break a stream, its requests end too.
                lease.given_back = generation == self.generation and context.is_active()
            with self.changed:
                ended.set()
                self.changed.notify_all()

        threading.Thread(target=listen, daemon=True).start()
        told = granted = False
        while generation == self.generation:
            with self.changed:
                if lease.given_back and not lease.over:
                    for board in self.boards.values():
                        board.lease = None if board.lease is lease else board.lease
                    lease.over = "released"
                    self.changed.notify_all()
                    return
                has = bool(lease.board) or self._take(lease)
            if lease.over:
                yield pb.LeaseReply(over=lease.over)
                lease.told = True
                return
            if has and not granted:
                granted = True
                yield pb.LeaseReply(granted=self._granted(lease))
            elif not has and not told:
                told = True
                yield pb.LeaseReply(waiting=pb.JobStatus(**self._job(lease)))
            with self.changed:
                self.changed.wait(0.1)
            if ended.is_set() and not lease.given_back:
                return
        context.abort(grpc.StatusCode.UNAVAILABLE, "this gateway dies")

    def _job(self, lease: Lease) -> dict[str, Any]:
        priority = lease.order.priority.value
        return {"name": str(lease.number), "submission": lease.number, "state": "queued", "priority": priority}

    def ask(self, request: pb.AskRequest, context: grpc.ServicerContext) -> pb.Answer:
        """Return the queue, with three jobs of another user before the lease."""
        assert request.WhichOneof("question") == "jobs" and list(request.jobs.state) == ["queued"]
        others = [job("1", submission=0) for _ in range(3)]
        queued = [job(**self._job(lease)) for lease in self.leases if not lease.board and not lease.over]
        return pb.Answer(answer=encode_json([*others, *queued, job("1000")]))

    def _granted(self, lease: Lease) -> pb.LeaseGranted:
        spec = lease.order.specs[0]
        grant = Grant(lease.number, str(lease.number), lease.number, lease.board, lease.fence, 6, 60, 1, spec)
        card = self.boards[lease.board].card
        return pb.LeaseGranted(grant=encode_grant(grant), card=encode_card(card), key=lease.key)

    def dial(self, pieces: Iterator[pb.Piece], context: grpc.ServicerContext) -> Iterator[pb.Piece]:
        said = dict(context.invocation_metadata())
        lease = self.leases[int(said[LEASE_KEY]) - 1]
        if lease.over or said[LEASE_SECRET_KEY] != lease.key:
            _abort(context, errors.FarmError("the lease has ended"))
        board, generation = self.boards[lease.board], self.generation
        board.dials += 1
        with socket.socket(socket.AF_UNIX) as far:
            far.connect(board.agent.removeprefix("unix:"))

            def send() -> None:
                with contextlib.suppress(Exception):
                    for piece in pieces:
                        far.sendall(piece.data)
                    far.shutdown(socket.SHUT_WR)

            def watch() -> None:
                while generation == self.generation and not lease.over and context.is_active():
                    time.sleep(0.02)
                with contextlib.suppress(OSError):
                    far.shutdown(socket.SHUT_RDWR)

            for work in (send, watch):
                threading.Thread(target=work, daemon=True).start()
            while data := far.recv(1 << 20):
                yield pb.Piece(data=data)


def _abort(context: grpc.ServicerContext, error: errors.HilError) -> None:
    context.set_trailing_metadata(((wire_errors.ERROR_KEY, wire_errors.to_message(error).SerializeToString()),))
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, error.message)


@pytest.fixture
def fake_farm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeFarm]:
    farm = FakeFarm(tmp_path / "gateway.sock")
    for name, value in farm.environment.items():
        monkeypatch.setenv(name, value)
    yield farm
    farm.stop()


def _fence_of(agent: str) -> int:
    """Return the highest fence that an agent has accepted, possibly in an earlier test."""
    if not Path(agent.removeprefix("unix:")).exists():
        return 0
    client = AgentClient(AgentEndpoint(agent), "agent")
    try:
        return client.describe(60).fence
    finally:
        client.close()


@pytest.fixture(scope="session")
def farm_agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Three simulators that many tests share."""
    folder = tmp_path_factory.mktemp("agents")
    started = [start_process("hil.sim", f"unix:{folder}/{n}.sock", folder / f"store-{n}") for n in range(3)]
    yield [address for _, address in started]
    for process, _ in started:
        stop_process(process)


def start_hil(environment: dict[str, str], folder: Path, *args: object) -> subprocess.Popen[str]:
    """Start `hil ARGS...`."""
    command = [sys.executable, "-m", "hil.controller.cli.main", *map(str, args)]
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
