"""The fuzzer of the agent: a real one, a session, a loaded program, and calls that nobody of good will would make."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from support.over_grpc import metadata_of

from fuzzing.calls import GARBAGE, Changer, Server, line, methods_of
from fuzzing.engine import Attempt, Broken, Fuzzer, Tried
from hil.core.steps import PromptFunction, StepRule, StepsPlan
from hil.protocol import wire, wire_steps
from hil.protocol.v1 import agent_pb2 as pb

METHODS = methods_of(pb.DESCRIPTOR, wire.SERVICES)
PROGRAM = "PROGRAM".ljust(32, "_")
DIGEST = "DIGEST".ljust(71, "_")
_TOKENS = ("session", "none", "x", "0" * 32)
_ANSWER_S, _OPEN_S = 30.0, 60.0
_CHECK_EVERY = 40
# What an agent may need beyond what it needed at first; the processes are those that its programs run in.
_MOST_MIB, _MOST_THREADS, _MOST_FILES, _MOST_PROCESSES = 400, 200, 600, 30


def seeds() -> list[bytes]:
    """What a controller says."""
    vector = np.ones(4, np.float32)
    tensors = [pb.Tensor(name=name, dtype="float32", shape=[4], inline=vector.tobytes()) for name in ("a", "b")]
    streamed = [pb.Tensor(name=name, dtype="float32", shape=[4], streamed=16) for name in ("a", "b")]
    start = pb.InvokeStart(program_id=PROGRAM, inputs=tensors, iterations=1, timeout_s=5)
    ids = [
        pb.Tensor(name=name, dtype="int64", shape=[len(one)], inline=np.array(one, np.int64).tobytes())
        for name, one in (("prompt", [1, 4, 2]), ("forced", [3, 0]), ("other_prompt", []))
    ]
    steps = wire_steps.encode_steps(
        StepsPlan(
            ((0, StepRule.TOKENS),),
            ((1, 0),),
            0,
            3,
            chunk=1,
            stop=(9,),
            bound=8,
            shapes=((1,),),
            prompts=(PromptFunction("f", (0, 1), (0,)),),
        )
    )
    generate = pb.InvokeStart(program_id=PROGRAM, inputs=ids, warmup=1, iterations=1, timeout_s=5, steps=steps)
    files = [pb.ProgramFile(name="add.onnx", digest=DIGEST)]
    put = pb.PutStart(digest="blake3:" + "0" * 64, size=10)
    return [
        line("Board.Describe", pb.DescribeRequest()),
        line("Board.Clock", *[pb.ClockPing()] * 200),
        line("Board.Logs", pb.LogsRequest(follow=True)),
        line("Board.Counters", pb.CountersRequest(period_ms=10)),
        line("Board.Power", pb.PowerRequest(kind="hwmon", path="/sys/class/hwmon/hwmon0", channel=1, rate_hz=100)),
        line(
            "Sessions.Hold",
            pb.HoldRequest(open=pb.SessionOpen(owner="x", purpose="y", ttl_s=5)),
            *[pb.HoldRequest(keep_alive=pb.KeepAlive())] * 200,
        ),
        line("Blobs.Missing", pb.MissingRequest(digests=[DIGEST, put.digest])),
        line("Blobs.Put", pb.PutRequest(start=put), *[pb.PutRequest(data=b"x")] * 10),
        line(
            "Blobs.Put", *[pb.PutRequest(start=pb.PutStart(digest=DIGEST, size=5)), pb.PutRequest(data=b"12345")] * 100
        ),
        line("Blobs.Get", pb.GetRequest(digest=DIGEST, offset=3)),
        line(
            "Programs.Load",
            pb.LoadRequest(files=files, main="add.onnx", runtime="onnxruntime", timeout_s=5),
            seconds=3.0,
        ),
        line("Programs.Invoke", *[pb.InvokeRequest(start=start)] * 100, seconds=3.0),
        line("Programs.Invoke", *[pb.InvokeRequest(start=generate)] * 10, seconds=3.0),
        line(
            "Programs.Invoke",
            pb.InvokeRequest(start=pb.InvokeStart(program_id=PROGRAM, inputs=streamed, iterations=2)),
            pb.InvokeRequest(data=vector.tobytes()),
            pb.InvokeRequest(data=vector.tobytes()),
            pb.InvokeRequest(digests=pb.Digests(digests=["blake3:" + "1" * 64] * 2)),
        ),
        line("Programs.Unload", pb.UnloadRequest(program_id="x")),
        *GARBAGE,
    ]


class Victim:
    """A real agent, and one who may use it."""

    def __init__(self, folder: Path) -> None:
        from support.agents import program, start_process

        self.folder = folder
        store = folder / f"store-{time.monotonic_ns()}"
        self._process, self.address = start_process(
            "hil.agent", f"unix:{folder}/{time.monotonic_ns() % 10**9}.sock", store
        )
        self._add = program("onnxruntime", _model(folder))
        self._client: Any = None
        self._open()
        self.server = Server(self.address, METHODS, {})
        self._load()
        self._base_mib = _rss_mib(self._process.pid)

    def _open(self) -> None:
        from hil.controller.devices.agent_client.client import AgentClient
        from hil.controller.devices.board_client import AgentEndpoint

        if self._client is not None:
            self._client.close()
        self._client = AgentClient(AgentEndpoint(self.address), "fuzz")
        fence = self._client.describe(_ANSWER_S).fence + 1
        self._client.open_session("fuzz", fence=fence, wait_s=_OPEN_S, ttl_s=60.0, on_wait=lambda _: None)

    def _load(self) -> None:
        self._add.push(self._client)
        self.program = self._add.load(self._client).program_id
        self.server.names = {PROGRAM: self.program, DIGEST: next(iter(self._add.digests.values()))}

    def metadata(self) -> dict[str, list[tuple[str, str]]]:
        """What a caller of each kind says of itself."""
        return {"session": metadata_of(self._client), "none": []}

    def refresh(self) -> None:
        """See that it lives and stays within bounds.

        Raises:
            Broken: it does not.
        """
        if self._process.poll() is not None:
            raise Broken(f"the agent ended with {self._process.returncode}")
        grown = _rss_mib(self._process.pid) - self._base_mib
        threads, files = (len(os.listdir(f"/proc/{self._process.pid}/{what}")) for what in ("task", "fd"))  # noqa: PTH208
        processes = len(_children(self._process.pid))
        found = {
            "MiB more": (grown, _MOST_MIB),
            "threads": (threads, _MOST_THREADS),
            "files": (files, _MOST_FILES),
            "processes": (processes, _MOST_PROCESSES),
        }
        for what, (count, most) in found.items():
            if count > most:
                raise Broken(f"the agent has {what}: {count}, and {most} are allowed")

    def use(self) -> None:
        """Run a program as anybody does.

        Raises:
            Broken: it does not answer, or wrongly.
        """
        a = np.arange(4, dtype=np.float32)
        try:
            self._open()
            self._load()
            found = self._client.invoke(self.program, {"a": a, "b": a}).outputs["sum"]
        except Exception as error:
            raise Broken(f"after it an ordinary run fails: {type(error).__name__}: {error}") from error
        if not np.array_equal(found, a + a):
            raise Broken(f"after it an ordinary run answers {found}")

    def close(self) -> None:
        """End it."""
        self.server.channel.close()
        with contextlib.suppress(Exception):
            self._client.close()
        for pid in [*_children(self._process.pid), self._process.pid]:
            with contextlib.suppress(OSError):
                os.kill(pid, 9)
        with self._process:  # which closes its pipes, and waits
            pass


def _model(folder: Path) -> Path:
    import onnx
    from onnx import TensorProto, helper

    path = folder / "add.onnx"
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in ("a", "b", "sum")]
    graph = helper.make_graph([helper.make_node("Add", ["a", "b"], ["sum"])], "add", values[:2], values[2:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def _rss_mib(pid: int) -> int:
    with contextlib.suppress(OSError):
        for text in Path(f"/proc/{pid}/status").read_text().splitlines():
            if text.startswith("VmRSS:"):
                return int(text.split()[1]) // 1024
    return 0


def _children(pid: int) -> list[int]:
    """A process's own processes, and theirs."""
    found = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += [int(child), *_children(int(child))]
    return found


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[Attempt]:
    victim = Victim(folder)
    count = 0

    def attempt(data: bytes) -> Tried:
        nonlocal victim, count
        count += 1
        server = victim.server
        server.sent = 0
        try:
            server.send(data, victim.metadata())
            victim.refresh()
            if count % _CHECK_EVERY == 0:
                victim.use()
        except Broken:
            victim.close()
            victim = Victim(folder)
            raise
        return Tried(server.sent, tuple(sorted(server.kinds)))

    try:
        yield attempt
        victim.use()
    finally:
        victim.close()


FUZZER = Fuzzer(
    "agent",
    "an agent, by its calls and its socket",
    _opened,
    seeds,
    Changer(METHODS, _TOKENS),
    (),
    limit_s=240.0,
    limit_mib=1024,
    address_mib=0,
    history=_CHECK_EVERY + 1,
)
