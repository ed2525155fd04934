"""An agent at a Unix socket imports gRPC on the first gRPC call."""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.agents import start_process, stop_process
from support.over_grpc import Stub
from support.waiting import eventually

from hil.agent.admission import Room
from hil.agent.grpc_on_demand import GrpcOnDemand
from hil.agent.grpc_server import GrpcServer
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.core.digest import digest_of
from hil.protocol import wire
from hil.protocol.v1 import agent_pb2 as pb


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    process, address = start_process("hil.agent", f"unix:{tmp_path}/a.sock", tmp_path / "store")
    yield process, address
    stop_process(process)


def has_grpc(process: subprocess.Popen[bytes]) -> bool:
    return "cygrpc" in Path(f"/proc/{process.pid}/maps").read_text()


@contextlib.contextmanager
def calling(address: str) -> Iterator[Stub]:
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield Stub(channel)


def test_agent_loads_grpc_only_on_first_use(agent):
    process, address = agent
    client = AgentClient(AgentEndpoint(address), "test")
    client.describe()
    client.open_session("test", on_wait=print)
    client.close()
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(address.removeprefix("unix:"))  # only checks for a listener
    assert not has_grpc(process)
    with calling(address) as stub:
        assert stub.Describe(pb.DescribeRequest(), timeout=60).protocol == wire.PROTOCOL
    assert has_grpc(process)


def test_agent_serves_concurrent_first_grpc_calls(agent):
    _, address = agent

    def ask(_: int) -> str:
        with calling(address) as stub:
            return stub.Describe(pb.DescribeRequest(), timeout=60).board_id

    with ThreadPoolExecutor(12) as pool:
        assert len(set(pool.map(ask, range(12)))) == 1


def test_first_and_later_connections_share_agent(agent):
    process, address = agent
    with calling(address) as first, calling(address) as later:
        said: queue.SimpleQueue[pb.HoldRequest | None] = queue.SimpleQueue()
        said.put(pb.HoldRequest(open=pb.SessionOpen(owner="first", ttl_s=60)))
        held = first.Hold(iter(said.get, None))
        token = next(held).opened.token
        assert later.Describe(pb.DescribeRequest(), timeout=60).holder.owner == "first"
        # Send much data both ways, over a forwarded and a direct connection.
        content = np.random.default_rng(0).bytes(5 << 20)
        metadata = [(wire.SESSION_KEY, token)]
        for stub in (first, later):
            put_and_get(stub, content[1:] if stub is first else content, metadata)
        said.put(None)
        assert next(held).over.reason
    stop_process(process)
    assert not list(Path(address.removeprefix("unix:")).parent.glob("a.sock*"))


def put_and_get(stub: Stub, content: bytes, metadata: list[tuple[str, str]]) -> None:
    name = digest_of(content)

    def pieces() -> Iterator[object]:
        yield pb.PutRequest(start=pb.PutStart(digest=name, size=len(content)))
        yield from wire.split_pieces(memoryview(content))

    assert [reply.digest for reply in stub.Put(pieces(), metadata=metadata, timeout=60)] == [name]
    start, *data = stub.Get(pb.GetRequest(digest=name), metadata=metadata, timeout=60)
    assert start.start.size == len(content) and b"".join(data) == content


def test_agent_exits_despite_silent_connection(agent):
    process, address = agent
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(address.removeprefix("unix:"))
        process.terminate()
        eventually(lambda: process.poll() is not None, 10)
    assert process.returncode == 0


def test_agent_accepts_percent_sign_in_socket_path(tmp_path):
    process, address = start_process("hil.agent", f"unix:{tmp_path}/x%41y.sock", tmp_path / "store")
    with calling(address.replace("%", "%25")) as stub:
        assert stub.Describe(pb.DescribeRequest(), timeout=60).protocol == wire.PROTOCOL
    assert Path(address.removeprefix("unix:")).is_socket()
    stop_process(process)


def test_grpc_on_demand_checks_token(tmp_path):
    (tmp_path / "token").write_text("secret")
    more = ("--token-file", str(tmp_path / "token"))
    process, address = start_process("hil.agent", f"unix:{tmp_path}/a.sock", tmp_path / "store", *more)
    with calling(address) as stub:
        with pytest.raises(grpc.RpcError) as refused:
            stub.Describe(pb.DescribeRequest(), timeout=60)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        given = [("authorization", "Bearer secret")]
        assert stub.Describe(pb.DescribeRequest(), metadata=given, timeout=60).protocol == wire.PROTOCOL
    stop_process(process)


def test_grpc_startup_failure_prints_single_error(tmp_path, capsys):
    started: list[str] = []

    def start(listen: str) -> GrpcServer:
        started.append(listen)
        raise RuntimeError("the generated code is of another version")

    path = str(tmp_path / "a.sock")
    door = GrpcOnDemand(path, Room(16, threading.Event()), start)
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.settimeout(60)
            caller.connect(path)
            caller.sendall(b"PRI")
            with contextlib.suppress(ConnectionResetError):
                assert caller.recv(1) == b""
    door.close()
    assert started == [f"unix:{path}.grpc"]
    assert capsys.readouterr().err.count("cannot serve gRPC") == 1
