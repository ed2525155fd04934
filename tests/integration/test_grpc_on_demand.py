"""An agent at a Unix socket imports and serves gRPC once somebody speaks it, and then as if it had always done so."""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from support.agents import start_process, stop_process
from support.waiting import eventually

from hil.controller.devices.board_client import Target
from hil.controller.devices.client import AgentClient
from hil.core.digest import digest_of
from hil.protocol import grpc_calls, wire
from hil.protocol.v1 import agent_pb2 as pb


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    process, address = start_process("hil.agent", f"unix:{tmp_path}/a.sock", tmp_path / "store")
    yield process, address
    stop_process(process)


def has_grpc(process: subprocess.Popen[bytes]) -> bool:
    return "cygrpc" in Path(f"/proc/{process.pid}/maps").read_text()


@contextlib.contextmanager
def calling(address: str) -> Iterator[grpc_calls.Stub]:
    with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield grpc_calls.Stub(channel)


def test_it_has_no_grpc_until_somebody_speaks_it(agent):
    process, address = agent
    client = AgentClient(Target(address), "test")
    client.describe()
    client.open_session("test", on_wait=print)
    client.close()
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(address.removeprefix("unix:"))  # only looks whether anybody listens
    assert not has_grpc(process)
    with calling(address) as stub:
        assert stub.Describe(pb.DescribeRequest(), timeout=60).protocol == wire.PROTOCOL
    assert has_grpc(process)


def test_all_who_come_first_at_once_are_served(agent):
    _, address = agent

    def ask(_: int) -> str:
        with calling(address) as stub:
            return stub.Describe(pb.DescribeRequest(), timeout=60).board_id

    with ThreadPoolExecutor(12) as pool:
        assert len(set(pool.map(ask, range(12)))) == 1


def test_who_came_first_and_who_comes_later_share_one_agent(agent):
    process, address = agent
    with calling(address) as first, calling(address) as later:
        said: queue.SimpleQueue[pb.HoldRequest | None] = queue.SimpleQueue()
        said.put(pb.HoldRequest(open=pb.SessionOpen(owner="first", ttl_s=60)))
        held = first.Hold(iter(said.get, None))
        token = next(held).opened.token
        assert later.Describe(pb.DescribeRequest(), timeout=60).holder.owner == "first"
        # Much data both ways, over the connection that is led there and over one that goes there by itself.
        content = np.random.default_rng(0).bytes(5 << 20)
        metadata = [(wire.SESSION_KEY, token)]
        for stub in (first, later):
            put_and_get(stub, content[1:] if stub is first else content, metadata)
        said.put(None)
        assert next(held).over.reason
    stop_process(process)
    assert not list(Path(address.removeprefix("unix:")).parent.glob("a.sock*"))


def put_and_get(stub: grpc_calls.Stub, content: bytes, metadata: list[tuple[str, str]]) -> None:
    name = digest_of(content)

    def pieces() -> Iterator[object]:
        yield pb.PutRequest(start=pb.PutStart(digest=name, size=len(content)))
        yield from wire.pieces(memoryview(content))

    assert [reply.digest for reply in stub.Put(pieces(), metadata=metadata, timeout=60)] == [name]
    start, *data = stub.Get(pb.GetRequest(digest=name), metadata=metadata, timeout=60)
    assert start.start.size == len(content) and b"".join(data) == content


def test_an_agent_that_ends_does_not_wait_for_who_says_nothing(agent):
    process, address = agent
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(address.removeprefix("unix:"))
        process.terminate()
        eventually(lambda: process.poll() is not None, 10)
    assert process.returncode == 0
