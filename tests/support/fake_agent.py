"""Agent of hil.v1 in this process. Blobs are in memory, programs add 1, and tests can request failures."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from hil.core import clock
from hil.core.digest import StreamHasher, digest_of
from hil.core.files import digest_file
from hil.core.results import Artifact
from hil.errors import BlobDamaged, BoardBusy, LoadFailed, SessionEnded
from hil.protocol import grpc_calls, wire
from hil.protocol.v1 import agent_pb2 as pb
from support.over_grpc import serve_all

RUNTIME = "onnxruntime"


@dataclass
class FakeAgent:
    """Context manager. A program takes ``x`` and returns ``y = x + 1``, float32 of any length.

    Attributes:
        socket: listening address.
        build: build ID in Describe.
        readings: counters of the board, in Describe and after each run.
        profile_tool: missing profiling tool of the runtime.
        blobs: digest -> content.
        partial: digest -> received bytes of an interrupted upload.
        offsets: offsets at which uploads resumed, in order.
        calls: names of the called methods, in order.
        cut_at: number of uploaded bytes after which the agent stops, once; 0 is never.
        damaged: blobs that are damaged when a program is loaded, and are then deleted.
        end_in_run: reason for which the session ends during the next run; "" is never.
        spoil_outputs: whether the bytes of an output change during the transfer.
        pace_s: time for each piece of a blob or an output.
    """

    socket: Path
    build: str = ""
    readings: dict[str, float] = field(default_factory=dict)
    profile_tool: str = ""
    blobs: dict[str, bytes] = field(default_factory=dict)
    partial: dict[str, bytes] = field(default_factory=dict)
    offsets: list[int] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    cut_at: int = 0
    damaged: list[str] = field(default_factory=list)
    end_in_run: str = ""
    spoil_outputs: bool = False
    pace_s: float = 0.0
    protocol: int = wire.PROTOCOL

    def __enter__(self) -> FakeAgent:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    def start(self) -> None:
        """Start the server. The state of earlier sessions is lost."""
        self.session = ""
        self.programs: dict[str, str] = {}
        self._replies: queue.SimpleQueue[pb.HoldReply | None] = queue.SimpleQueue()
        self.socket.unlink(missing_ok=True)
        self._server = grpc.server(
            futures.ThreadPoolExecutor(32),
            interceptors=[serve_all(dict.fromkeys(wire.SERVICES, self))],
            options=grpc_calls.GRPC_OPTIONS,
        )
        self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        """Stop the server."""
        self._replies.put(None)
        self._server.stop(0).wait()

    def end_session(self, reason: str) -> None:
        """End the active session."""
        self.session = ""
        self._replies.put(pb.HoldReply(over=pb.SessionOver(reason=reason)))
        self._replies.put(None)

    # ---- the board

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeReply:
        self.calls.append("Describe")
        return pb.DescribeReply(
            board_id="b",
            name="fake",
            agent_version="1",
            protocol=self.protocol,
            machine=pb.Machine(hostname="fake", system="Linux", arch="x86_64", boot_id="first"),
            runtimes=[pb.Runtime(name=RUNTIME, version="9.9", profile_tool=self.profile_tool)],
            clock_ns=clock.get_time_ns(),
            readings=self._readings(),
            build=self.build,
        )

    def _readings(self) -> list[pb.Reading]:
        return [pb.Reading(name=name, value=value) for name, value in self.readings.items()]

    def Clock(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[pb.ClockPong]:
        for _ in requests:
            yield pb.ClockPong(clock_ns=clock.get_time_ns())

    def Logs(self, request: pb.LogsRequest, context: grpc.ServicerContext) -> Iterator[pb.LogLine]:
        self._check(context, "Logs")
        yield pb.LogLine(text="a line")

    def Counters(self, request: pb.CountersRequest, context: grpc.ServicerContext) -> Iterator[pb.CounterSample]:
        yield pb.CounterSample(clock_ns=1)

    # ---- sessions

    def Hold(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[pb.HoldReply]:
        self.calls.append("Hold")
        opening = next(requests).open
        if self.session:
            yield pb.HoldReply(waiting=pb.SessionWaiting(holder=pb.Holder(owner="somebody", purpose="tests")))
            raise BoardBusy("somebody has the device (tests)")
        token = self.session = secrets.token_hex(8)
        self.programs.clear()
        replies = self._replies = queue.SimpleQueue()
        yield pb.HoldReply(opened=pb.SessionOpened(token=token, fence=opening.fence or 1, ttl_s=opening.ttl_s))

        def listen() -> None:
            try:
                for _ in requests:
                    pass
            except Exception:
                pass  # The connection was lost.
            replies.put(None)

        threading.Thread(target=listen, daemon=True).start()
        while (reply := replies.get()) is not None:
            yield reply
        if self.session == token:
            self.session = ""

    def _check(self, context: grpc.ServicerContext, method: str) -> None:
        self.calls.append(method)
        if dict(context.invocation_metadata()).get(wire.SESSION_KEY) != self.session or not self.session:
            raise SessionEnded("this session is over")

    # ---- blobs

    def Missing(self, request: pb.MissingRequest, context: grpc.ServicerContext) -> pb.MissingReply:
        self._check(context, "Missing")
        absent = [name for name in request.digests if name not in self.blobs]
        return pb.MissingReply(
            missing=[pb.MissingBlob(digest=name, have_bytes=len(self.partial.get(name, b""))) for name in absent]
        )

    def Put(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[pb.PutReply]:
        self._check(context, "Put")
        for message in requests:
            start = message.start
            self.offsets.append(start.offset)
            came = bytearray(self.partial.pop(start.digest, b"")[: start.offset])
            while len(came) < start.size:
                came += next(requests)
                time.sleep(self.pace_s)
                if self.cut_at and len(came) >= self.cut_at:
                    self.cut_at, self.partial[start.digest] = 0, bytes(came)
                    self._server.stop(0)
                    while context.is_active():
                        time.sleep(0.001)
                    return
            if digest_of(bytes(came)) != start.digest:
                raise BlobDamaged(f"what came is not {start.digest}")
            self.blobs[start.digest] = bytes(came)
            yield pb.PutReply(digest=start.digest)

    def Get(self, request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        self._check(context, "Get")
        yield pb.GetReply(start=pb.GetStart(size=len(self.blobs[request.digest])))
        yield from self._paced(memoryview(self.blobs[request.digest]))

    def _paced(self, data: memoryview) -> Iterator[Any]:
        for message in wire.split_pieces(data):
            time.sleep(self.pace_s)
            yield message

    # ---- programs

    def Load(self, request: pb.LoadRequest, context: grpc.ServicerContext) -> pb.LoadReply:
        self._check(context, "Load")
        for file in request.files:
            if file.digest in self.damaged:
                self.damaged.remove(file.digest)
                self.blobs.pop(file.digest, None)
                raise BlobDamaged(f"blob {file.digest} was altered")
            if file.digest not in self.blobs:
                raise LoadFailed(f"there is no blob {file.digest}")
        program_id = secrets.token_hex(4)
        self.programs[program_id] = request.main
        specs = [[pb.TensorSpec(name=name, dtype="float32", dims=[pb.Dim(symbol="n")])] for name in "xy"]
        return pb.LoadReply(
            program_id=program_id, device=request.device, function="main", inputs=specs[0], outputs=specs[1]
        )

    def Invoke(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for message in requests:
            self._check(context, "Invoke")
            start = message.start
            if start.program_id not in self.programs:
                raise LoadFailed("no such program is loaded in this session")
            if self.end_in_run:
                self.end_session(self.end_in_run)
                self.end_in_run = ""
                raise SessionEnded("this session is over")
            if start.HasField("profile"):
                content = pb.Tensor(name="clock.json", dtype="uint8", shape=[13], inline=b'{"pairs": []}')
                yield pb.InvokeReply(done=pb.InvokeDone(outputs=[content], received_ns=1, ready_ns=2))
                continue
            yield from self._run(start, self._input(start.inputs[0], requests))

    def _input(self, tensor: pb.Tensor, requests: Iterator[Any]) -> np.ndarray:
        if tensor.WhichOneof("payload") == "inline":
            return np.frombuffer(tensor.inline, np.float32)
        came = bytearray()
        while len(came) < tensor.streamed:
            came += next(requests)
        hasher = StreamHasher()
        hasher.update(memoryview(came))
        assert list(next(requests).digests.digests) == [hasher.digest()]
        return np.frombuffer(bytes(came), np.float32)

    def _run(self, start: pb.InvokeStart, x: np.ndarray) -> Iterator[Any]:
        data = memoryview((x + 1).tobytes())
        output, streamed = wire.encode_tensor("y", "float32", x.shape, data, wire.INLINE_MAX)
        now = clock.get_time_ns()
        state = pb.State(clock_ns=now, readings=self._readings()) if start.state else None
        done = pb.InvokeDone(
            outputs=[output],
            start_ns=[now] * start.iterations,
            end_ns=[now + 1000] * start.iterations,
            received_ns=now,
            ready_ns=now + 2000,
            peak_memory_bytes=1 << 20,
            state=state,
            placement=pb.Placement(parts=[pb.Part(device="CPUExecutionProvider", nodes=1)]),
        )
        yield pb.InvokeReply(done=done)
        if streamed:
            hasher = StreamHasher()
            hasher.update(data)
            if self.spoil_outputs:
                data = memoryview(bytes(data[:-1]) + b"\xff")
            yield from self._paced(data)
            yield pb.InvokeReply(digests=pb.Digests(digests=[hasher.digest()]))

    def Unload(self, request: pb.UnloadRequest, context: grpc.ServicerContext) -> pb.UnloadReply:
        self._check(context, "Unload")
        self.programs.pop(request.program_id, None)
        return pb.UnloadReply()


def program(path: Path, size: int = 1000) -> Artifact:
    """Return a program with this number of bytes, for a fake agent."""
    path.write_bytes(np.random.default_rng(size).bytes(size))
    return Artifact(RUNTIME, path.name, {path.name: path}, {path.name: digest_file(path)}, "main", "none")
