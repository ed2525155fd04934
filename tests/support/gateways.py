"""Gateway of the farm in this process, and workers without a real board."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hil.controller.farm.client.client import FarmClient
from hil.controller.farm.gateway.server import Gateway, GatewayConfig, run_gateway
from hil.controller.farm.messages import BoardCard, Grant, JobResult, JobSpec, Kind, Role, Submission
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.rpc import decode_grant, encode_card, encode_result
from hil.controller.farm.settings import FarmSettings
from hil.controller.farm.store.access import add_token
from hil.protocol.v1 import farm_pb2 as pb
from support import farm_rows
from support.waiting import eventually

WAIT_S = 90.0
# Boards are healthy unless a test changes this.
QUICK = FarmSettings(beat_s=0.2)


class Running:
    """Gateway that serves in a separate thread."""

    def __init__(self, config: GatewayConfig) -> None:
        self.config = config
        self.gateway: Gateway | None = None
        self._there = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()
        assert self._there.wait(WAIT_S)
        if self._error is not None:
            self._thread.join()
            raise self._error

    @property
    def address(self) -> str:
        assert self.gateway is not None
        return self.gateway.addresses[0]

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def client(self, token: str, **settings: Any) -> FarmClient:
        return FarmClient(FarmAddress((self.address,), token), **settings)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())  # It also ends the calls that its clients left open.
        except BaseException as error:
            self._error = error
            self._there.set()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        async with run_gateway(self.config) as self.gateway:
            self._there.set()
            await self._over.wait()


@contextlib.contextmanager
def running_gateway(db: str, folder: Path, **settings: Any) -> Iterator[Running]:
    given = {"listen": (f"unix:{folder}/gateway.sock",), "artifacts": str(folder / "artifacts"), "settings": QUICK}
    running = Running(GatewayConfig(db=db, **{**given, **settings}))
    try:
        yield running
    finally:
        running.stop()


@contextlib.contextmanager
def gateway_process(db: str, folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Start a gateway process and return it with its first message. Its log is in the file `log`."""
    environment = {**os.environ, "HIL_FARM_DB": db, "HIL_FARM_HOME": str(folder)}
    command = [sys.executable, "-m", "hil", "farm", "gateway", *options]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def rows(db: str, query: str, *values: Any) -> list[dict[str, Any]]:
    return farm_rows.with_tx(db, lambda tx: farm_rows.rows(tx, query, *values))


def token_of(db: str, user: str, role: Role = Role.ADMIN, **settings: Any) -> str:
    return farm_rows.with_tx(db, lambda tx: add_token(tx, user, role, **settings))


def simple_order(**settings: Any) -> Submission:
    return Submission(**{"title": "digits", "specs": (JobSpec(Kind.RUN),), **settings})


def report(farm: FarmClient, lease: int, worker: str, result: JobResult, fence: int = 0) -> pb.ReportReply:
    """Report the end of a job. Retry while the gateway is not available."""
    request = pb.ReportRequest(lease=lease, worker=worker, result=encode_result(result), fence=fence)
    return farm._call_with_retry("Report", request)


class BareBoard:
    """Worker without a board. It reports the board as healthy, and handles other grants as the test defines."""

    def __init__(self, farm: FarmClient, name: str, *, worker: str = "", beats: bool = True, **card: Any) -> None:
        self.farm, self.name, self.worker = farm, name, worker or f"worker-{name}"
        self.card = BoardCard(name=name, site="lab", host=card.pop("host", "host"), **card)
        self.grants: queue.Queue[Grant] = queue.Queue()
        self.heard: list[pb.ToBoard] = []
        self.held: set[int] = set()
        self._had: set[int] = set()
        self.error: Exception | None = None
        self._asked: queue.Queue[pb.FromBoard | None] = queue.Queue()
        self._over = threading.Event()
        self.hello()
        self._stream = farm.stub.Attend(iter(self._asked.get, None), metadata=farm.metadata)
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            *([threading.Thread(target=self._beat, daemon=True)] if beats else []),
        ]
        for thread in self._threads:
            thread.start()

    def hello(self) -> None:
        hello = pb.Hello(card=encode_card(self.card), worker=self.worker, leases=sorted(self.held))
        self.print_message(hello=hello)

    def print_message(self, **message: Any) -> None:
        self._asked.put(pb.FromBoard(**message))

    def start(self, grant: Grant, direct: str = "") -> None:
        self.print_message(started=pb.Started(lease=grant.lease, direct=direct))

    def print(self, grant: Grant, text: str) -> None:
        self.print_message(printed=pb.Printed(lease=grant.lease, text=text))

    def report(self, grant: Grant, result: JobResult | None = None) -> pb.ReportReply:
        said = result or JobResult(0, "PASS")
        reply = report(self.farm, grant.lease, self.worker, said, grant.fence)
        self.held.discard(grant.lease)
        return reply

    def send_grant(self) -> Grant:
        return self.grants.get(timeout=WAIT_S)

    def told(self, kind: str) -> list[Any]:
        return [getattr(one, kind) for one in self.heard if one.WhichOneof("kind") == kind]

    def online(self) -> BareBoard:
        eventually(lambda: [one for one in self.farm.ask("boards") if one.name == self.name and one.state == "online"])
        return self

    def leave(self) -> None:
        """Close the stream, which gives up the board."""
        self._end(lambda: self._asked.put(None))

    def cut(self) -> None:
        """Break the stream, like a failed connection."""
        self._end(self._stream.cancel)

    def _end(self, how: Callable[[], Any]) -> None:
        if not self._over.is_set():
            self._over.set()
            how()
            for thread in self._threads:
                thread.join(WAIT_S)
            self._asked.put(None)

    def _beat(self) -> None:
        while not self._over.wait(0.2):
            self.print_message(beat=pb.BoardBeat(leases=sorted(self.held)))

    def _read(self) -> None:
        try:
            for message in self._stream:
                self.heard.append(message)
                if message.WhichOneof("kind") == "grant":
                    grant = decode_grant(message.grant)
                    # A slow gateway may send a grant again before it receives the reply.
                    if grant.lease in self._had:
                        continue
                    self._had.add(grant.lease)
                    self.held.add(grant.lease)
                    if grant.spec.kind is Kind.HEALTH:
                        self.start(grant)
                        self.report(grant)
                    else:
                        self.grants.put(grant)
        except Exception as error:
            self.error = error
