"""Silent or flooding agents, with the controller in a separate process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest
from support.agents import start_process, stop_process
from support.lying_agent import HONEST, Lie, LyingAgent
from support.slow import slow_except
from support.waiting import allowed_s

from hil.controller.devices.agent_client.call import CallFailed
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.errors import BoardError
from hil.protocol.v1 import agent_pb2 as pb

MIB = 1 << 20
# In addition to the memory of a connected, idle controller.
MOST_MIB = 220
_CONTROLLER = """
import sys, tempfile, pathlib
sys.path.insert(0, sys.argv[1])
from support.lying_agent import artifact, impatient, use
with tempfile.TemporaryDirectory() as folder, impatient(8.0):
    print(use(sys.argv[2], artifact(pathlib.Path(folder))))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print("peak", status["VmHWM"].split()[0])
"""


def controlled(address: str) -> tuple[str, int]:
    """Run all calls of a run against an agent; return the controller's output and peak memory in MiB."""
    tests = str(Path(__file__).parents[1])
    ended = subprocess.run(
        [sys.executable, "-c", _CONTROLLER, tests, address], capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "Traceback" not in ended.stderr
    words, _, peak = ended.stdout.rpartition("peak ")
    return words, int(peak) >> 10


def huge(size: int) -> bytes:
    return b"x" * size


FLOODS = ["Describe", "Describe, of many readings", "Logs", "Counters", "Invoke", "Invoke, streamed", "Get", "Load"]


def flood(which: str) -> Lie:
    """Return a flood of data; built on demand because it takes much memory."""
    return {
        "Describe": Lie((pb.DescribeReply(name="x" * (300 * MIB)).SerializeToString(),)),
        "Describe, of many readings": Lie(
            (
                pb.DescribeReply(
                    protocol=1, machine=pb.Machine(arch="x"), readings=[pb.Reading(name="a", value=1)] * 2_000_000
                ).SerializeToString(),
            )
        ),
        "Logs": Lie((pb.LogLine(text="x" * MIB).SerializeToString(),), endless=True),
        "Counters": Lie(
            (pb.CounterSample(readings=[pb.Reading(name="a" * 50, value=1)] * 900).SerializeToString(),), endless=True
        ),
        "Invoke": Lie(
            (
                pb.InvokeReply(
                    done=pb.InvokeDone(
                        outputs=[pb.Tensor(name="y", dtype="uint8", shape=[300 * MIB], inline=huge(300 * MIB))],
                        start_ns=[1, 2],
                        end_ns=[2, 3],
                    )
                ).SerializeToString(),
            )
        ),
        "Invoke, streamed": Lie(
            (
                pb.InvokeReply(
                    done=pb.InvokeDone(
                        outputs=[
                            pb.Tensor(name="y", dtype="float32", shape=[1 << 28], streamed=1 << 30),
                            HONEST["Invoke"][0].done.outputs[1],
                        ],
                        start_ns=[1, 2],
                        end_ns=[2, 3],
                    )
                ).SerializeToString(),
                pb.InvokeReply(data=huge(MIB)).SerializeToString(),
            ),
            endless=True,
        ),
        "Get": Lie(
            (
                pb.GetReply(start=pb.GetStart(size=10)).SerializeToString(),
                pb.GetReply(data=huge(MIB)).SerializeToString(),
            ),
            endless=True,
        ),
        "Load": Lie((pb.LoadReply(program_id="p" * (300 * MIB)).SerializeToString(),)),
    }[which]


@pytest.fixture(scope="module")
def usual_mib(tmp_path_factory: pytest.TempPathFactory) -> int:
    """Return the controller's memory with an honest agent."""
    with LyingAgent(f"unix:{tmp_path_factory.mktemp('true')}/a.sock") as agent:
        words, peak = controlled(agent.address)
    assert words.strip() == "[]"
    return peak


# Run two kinds of flood on every change; each takes seconds of CPU time.
@pytest.mark.slow
@pytest.mark.parametrize(
    "which",
    [pytest.param(one, marks=[pytest.mark.slow] * (one not in ("Describe", "Invoke, streamed"))) for one in FLOODS],
)
def test_flood_from_agent_uses_little_memory(which: str, tmp_path: Path, usual_mib: int) -> None:
    with LyingAgent(f"unix:{tmp_path}/a.sock", {which.partition(",")[0]: flood(which)}) as agent:
        _, peak = controlled(agent.address)
    assert peak - usual_mib < MOST_MIB


def _calls(client: AgentClient, folder: Path) -> dict[str, object]:
    digest = "blake3:" + "0" * 64
    (folder / "blob").write_bytes(os.urandom(4 * MIB))
    return {
        "put": lambda: client.put({digest: (folder / "blob", 0)}),
        "invoke": lambda: client.invoke("p", {}, timeout=60),
    }


@pytest.mark.slow
@pytest.mark.parametrize("end", [None, "close"])
def test_open_call_ends_with_frozen_agent_or_connection(end: str | None, tmp_path: Path) -> None:
    process, address = start_process("hil.agent", f"unix:{tmp_path}/a.sock", tmp_path / "store")
    client = AgentClient(AgentEndpoint(address), "frozen")
    try:
        client.describe()
        client.open_session("test", on_wait=print)
        call = client._begin("Put")
        os.kill(process.pid, signal.SIGSTOP)
        start = time.monotonic()
        if end:
            threading.Timer(0.5, client.close).start()
        with pytest.raises(CallFailed):
            call.receive()
        assert time.monotonic() - start < (5 if end else 15 + 5)
    finally:
        client.close()
        os.kill(process.pid, signal.SIGCONT)
        stop_process(process)


@pytest.mark.parametrize(("call", "listen"), slow_except([("put", "unix:{}/a.sock"), ("invoke", "127.0.0.1:0")], 1))
def test_client_detects_frozen_agent_within_15_s(call: str, listen: str, tmp_path: Path) -> None:
    process, address = start_process("hil.agent", listen.format(tmp_path), tmp_path / "store")
    client = AgentClient(AgentEndpoint(address), "frozen")
    try:
        client.describe()
        client.open_session("test", on_wait=print)
        os.kill(process.pid, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(BoardError):
            _calls(client, tmp_path)[call]()
        assert time.monotonic() - start < allowed_s(15 + 5)
    finally:
        client.close()
        os.kill(process.pid, signal.SIGCONT)
        stop_process(process)


@pytest.mark.slow
def test_describe_detects_frozen_agent(tmp_path: Path) -> None:
    process, address = start_process("hil.agent", f"unix:{tmp_path}/a.sock", tmp_path / "store")
    client = AgentClient(AgentEndpoint(address), "frozen")
    try:
        client.describe()
        os.kill(process.pid, signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(BoardError):
            client.describe()
        assert time.monotonic() - start < allowed_s(15 + 5)
    finally:
        client.close()
        os.kill(process.pid, signal.SIGCONT)
        stop_process(process)


@pytest.mark.slow
def test_open_session_gives_up_on_silent_agent(tmp_path: Path) -> None:
    """The agent keeps the connection and answers gRPC pings, but sends no message."""
    with LyingAgent(f"unix:{tmp_path}/a.sock", {"Hold": Lie(silent=True)}) as agent:
        client = AgentClient(AgentEndpoint(agent.address), "silent")
        start = time.monotonic()
        with pytest.raises(BoardError, match="did not respond for 15 s"):
            client.open_session("test", wait_s=600, on_wait=print)
        assert time.monotonic() - start < allowed_s(15 + 5)
        client.close()


@pytest.mark.slow
def test_open_session_timeout_limits_endless_waiting(tmp_path: Path) -> None:
    waiting = Lie((HONEST["Hold"][0].SerializeToString(),), endless=True)
    with LyingAgent(f"unix:{tmp_path}/a.sock", {"Hold": waiting}) as agent:
        client = AgentClient(AgentEndpoint(agent.address), "waiting")
        start = time.monotonic()
        with pytest.raises(BoardError, match="has used the board for"):
            client.open_session("test", wait_s=0.5, on_wait=lambda text: None)
        assert time.monotonic() - start < allowed_s(15.5 + 5)
        client.close()


def test_undecodable_error_becomes_board_error(tmp_path: Path) -> None:
    lie = Lie(status=grpc.StatusCode.INTERNAL, error=b"\x0a\x02\xff\xfe")
    with LyingAgent(f"unix:{tmp_path}/a.sock", {"Describe": lie}) as agent:
        client = AgentClient(AgentEndpoint(agent.address), "liar")
        with pytest.raises(BoardError):
            client.describe()
        client.close()
