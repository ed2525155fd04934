"""Agent that sends chosen replies, the wrong replies that it can send, and a controller that uses the agent."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

from hil import errors
from hil.controller.devices import guard
from hil.controller.devices.agent_client import client, connection, session_streams
from hil.controller.devices.board import Board
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.devices.choosing.board_factory import connect_board
from hil.controller.devices.metering.board_meter import BoardMeter
from hil.core.board_config import BoardConfig, Connection
from hil.core.digest import digest_of
from hil.core.meter_config import MeterConfig
from hil.core.results import Artifact
from hil.core.tensors import TensorSpec
from hil.protocol import grpc_calls, wire, wire_errors
from hil.protocol.v1 import agent_pb2 as pb

PROGRAM = b"a program"
DIGEST = digest_of(PROGRAM)
X = np.arange(4, dtype=np.float32)
Z = np.arange(16, dtype=np.float32)

_SPECS = [
    pb.TensorSpec(name=name, dtype="float32", dims=[pb.Dim(size=size)])
    for name, size in (("x", 4), ("y", 4), ("z", 16))
]
_READINGS = [
    pb.Reading(name="cpu0 frequency", value=1400, unit="MHz"),
    pb.Reading(name="cpu0 governor", text="performance"),
    pb.Reading(name="throttle events", value=1),
]
_DONE = pb.InvokeDone(
    outputs=[
        pb.Tensor(name="y", dtype="float32", shape=[4], inline=X.tobytes()),
        pb.Tensor(name="z", dtype="float32", shape=[16], streamed=Z.nbytes),
    ],
    start_ns=[10, 20],
    end_ns=[15, 25],
    received_ns=5,
    ready_ns=30,
    peak_memory_bytes=1 << 20,
    placement=pb.Placement(parts=[pb.Part(device="CPUExecutionProvider", nodes=2, names=["a", "b"])]),
    state=pb.State(clock_ns=40, wall_ns=50, readings=_READINGS),
)
HONEST: dict[str, list[Message]] = {
    "Describe": [
        pb.DescribeReply(
            board_id="b",
            name="liar",
            agent_version="1",
            protocol=wire.PROTOCOL,
            machine=pb.Machine(hostname="h", system="Linux", arch="x86_64", cores=2, memory_bytes=1 << 30, boot_id="b"),
            runtimes=[pb.Runtime(name="onnxruntime", version="1", devices=["cpu"])],
            clock_ns=1,
            wall_ns=2,
            fence=3,
            readings=_READINGS,
            meters=["hwmon", "rapl"],
        )
    ],
    "Clock": [pb.ClockPong(clock_ns=1000)],
    "Logs": [pb.LogLine(clock_ns=1, text="a line"), pb.LogLine(clock_ns=2, text="another")],
    "Counters": [pb.CounterSample(clock_ns=1, readings=_READINGS[:1])],
    "Power": [pb.PowerSamples(clock_ns=[1, 2], values=[3.0, 4.0]), pb.PowerSamples(clock_ns=[3], values=[5.0], lost=1)],
    "Hold": [pb.HoldReply(waiting=pb.SessionWaiting(holder=pb.Holder(owner="o", purpose="p", held_s=1))),
             pb.HoldReply(opened=pb.SessionOpened(token="t", fence=4, ttl_s=5))],
    "Missing": [pb.MissingReply(missing=[pb.MissingBlob(digest=DIGEST, have_bytes=2)])],
    "Put": [pb.PutReply(digest=DIGEST)],
    "Get": [pb.GetReply(start=pb.GetStart(size=len(PROGRAM))), pb.GetReply(data=PROGRAM)],
    "Load": [pb.LoadReply(program_id="p", device="cpu", function="main", inputs=_SPECS[:1], outputs=_SPECS[1:])],
    "Invoke": [
        pb.InvokeReply(done=_DONE),
        pb.InvokeReply(data=Z.tobytes()),
        pb.InvokeReply(digests=pb.Digests(digests=[digest_of(Z.tobytes())])),
    ],
    "Unload": [pb.UnloadReply()],
}  # fmt: skip
# Replies of a profile pass, which is also an Invoke call.
_PROFILED = pb.InvokeReply(
    done=pb.InvokeDone(outputs=[pb.Tensor(name="clock.json", dtype="uint8", shape=[13], inline=b'{"pairs": []}')])
)
_REPLY = {
    method.name: method.output_type
    for service in wire.SERVICES
    for method in pb.DESCRIPTOR.services_by_name[service].methods
}


@dataclass(frozen=True)
class Lie:
    """Wrong reply of a method.

    Attributes:
        replies: messages as bytes, in order.
        status: status of the call; OK, or an error.
        error: bytes of the error's message, in the trailing metadata; None omits it.
        endless: whether the agent repeats the last reply forever.
        silent: whether the agent sends nothing more, and keeps the call open.
    """

    replies: tuple[bytes, ...] = ()
    status: grpc.StatusCode = grpc.StatusCode.OK
    error: bytes | None = None
    endless: bool = False
    silent: bool = False


@dataclass
class LyingAgent:
    """Agent in this process; a context manager.

    Attributes:
        address: listening address.
        lies: method -> wrong reply. The other methods reply correctly.
    """

    address: str
    lies: Mapping[str, Lie] = field(default_factory=dict)

    def __enter__(self) -> LyingAgent:
        self._over = threading.Event()
        options = [*grpc_calls.GRPC_OPTIONS, ("grpc.max_metadata_size", 1 << 20)]
        self._server = grpc.server(futures.ThreadPoolExecutor(64), handlers=[_Handler(self)], options=options)
        self._server.add_insecure_port(self.address)
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._server.stop(0).wait()

    def answer(self, method: str, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        lie = self.lies.get(method)
        if lie is None:
            yield from self._truth(method, requests)
            return
        first = next(requests, None)
        if first is None:
            return
        yield from lie.replies
        while lie.endless and context.is_active():
            yield lie.replies[-1]
        while lie.silent and context.is_active() and not self._over.wait(0.02):
            pass
        if lie.status is not grpc.StatusCode.OK:
            if lie.error is not None:
                context.set_trailing_metadata(((wire_errors.ERROR_KEY, lie.error),))
            context.abort(lie.status, "it says so")
        if method in ("Hold", "Invoke"):
            for _ in requests:
                pass

    def _truth(self, method: str, requests: Iterator[bytes]) -> Iterator[bytes]:
        replies = [reply.SerializeToString() for reply in HONEST[method]]
        if method in ("Invoke", "Clock"):
            for request in requests:
                started = pb.InvokeRequest.FromString(request) if method == "Invoke" else None
                if started is not None and started.start.HasField("profile"):
                    yield _PROFILED.SerializeToString()
                else:
                    yield from replies
            return
        if method == "Hold":
            next(requests, None)
            yield from replies
            for _ in requests:
                yield pb.HoldReply(alive=pb.KeepAlive()).SerializeToString()
            return
        for _ in requests:
            pass
        yield from replies


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, agent: LyingAgent) -> None:
        self._agent = agent

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        method = details.method.rpartition("/")[2]
        return grpc.stream_stream_rpc_method_handler(
            lambda requests, context: self._agent.answer(method, requests, context)
        )


# ---- lies


_TEXTS = st.one_of(
    st.sampled_from(["", "\x1b[2J", "../../x", "/etc/passwd", "float32", "string", "int4", "²", "9" * 600, "x" * 5000]),
    st.sampled_from(["onnxruntime", "p", "UsageError", "StorageError", "RunCrashed", "HilError", "located", DIGEST]),
    st.text(max_size=20),
)
_EDGES = (0, 1, 2, 4, 16, 2**31 - 1, 2**31, 2**40, 2**62)
_DOUBLES = st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, 1e-300, 1e300]))
_BITS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}


def _scalar(of: FieldDescriptor) -> st.SearchStrategy[Any]:
    if of.type in _BITS:
        least, most = _BITS[of.type]
        edges = [edge for edge in (*_EDGES, -1, least, most) if least <= edge <= most]
        return st.one_of(st.sampled_from(edges), st.integers(least, most))
    if of.type == FieldDescriptor.TYPE_STRING:
        return _TEXTS
    if of.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=80)
    return st.booleans() if of.type == FieldDescriptor.TYPE_BOOL else _DOUBLES


@st.composite
def messages(draw: Any, descriptor: Descriptor, depth: int = 3) -> Message:
    """Generate any message of a type, from its descriptor."""
    made = GetMessageClass(descriptor)()
    for one in descriptor.fields:
        if draw(st.booleans()):
            _put(draw, made, one, depth)
    return made


def _put(draw: Any, holder: Message, of: FieldDescriptor, depth: int) -> None:
    """Set a field to a different value."""
    holder.ClearField(of.name)
    values = messages(of.message_type, depth - 1) if of.message_type else _scalar(of)
    if of.message_type and depth == 0:
        return
    if of.is_repeated:
        given = draw(st.lists(values, max_size=3)) * draw(st.sampled_from([1, 1, 1, 2, 70, 2000]))
        getattr(holder, of.name).extend(given)
    elif of.message_type:
        getattr(holder, of.name).CopyFrom(draw(values))
    else:
        setattr(holder, of.name, draw(values))


@st.composite
def changed(draw: Any, message: Message) -> Message:
    """Change one or two fields of a correct message, at any depth."""
    made = type(message)()
    made.CopyFrom(message)
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        holder = made
        while inner := [
            one
            for of, value in holder.ListFields()
            if of.message_type
            for one in (value if of.is_repeated else [value])
        ]:
            if draw(st.booleans()):
                break
            holder = draw(st.sampled_from(inner))
        fields = list(holder.DESCRIPTOR.fields)
        if fields:
            _put(draw, holder, draw(st.sampled_from(fields)), 2)
    return made


@st.composite
def _raw(draw: Any, method: str) -> bytes:
    """Generate a reply of a method as bytes: a different message, a changed message, or no message at all."""
    truth = draw(st.sampled_from(HONEST[method]))
    how = draw(st.sampled_from(["changed"] * 6 + ["any"] * 3 + ["cut", "bytes", "text"]))
    if how == "changed":
        return draw(changed(truth)).SerializeToString()
    if how == "any":
        return draw(messages(_REPLY[method])).SerializeToString()
    said = truth.SerializeToString()
    if how == "cut":
        return said[: draw(st.integers(0, max(len(said) - 1, 0)))]
    if how == "text":
        return said.replace(b"float32", b"float\xff\xfe").replace(b"p", b"\xff")
    return draw(st.binary(max_size=60))


@st.composite
def lies_of(draw: Any, method: str) -> Lie:
    """Generate a wrong reply of a method."""
    replies = [message.SerializeToString() for message in HONEST[method]]
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        at = draw(st.integers(0, len(replies)))
        how = draw(st.sampled_from(["replace", "replace", "replace", "insert", "delete", "again"]))
        if how == "replace" and at < len(replies):
            replies[at] = draw(_raw(method))
        elif how == "insert":
            replies.insert(at, draw(_raw(method)))
        elif how == "delete":
            del replies[at : at + 1]
        elif how == "again":
            replies = replies * draw(st.sampled_from([2, 30]))
    ends = [grpc.StatusCode.OK] * 12 + [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]
    status = draw(st.sampled_from(ends))
    error = None
    if status is not grpc.StatusCode.OK:
        said = draw(messages(pb.Error.DESCRIPTOR)).SerializeToString()
        error = draw(st.sampled_from([None, said, said, b"\xff" * 20, b"\x0a\x02\xff\xfe"]))
    return Lie(tuple(replies), status, error, silent=draw(st.integers(0, 40)) == 40)


many_lies = st.lists(st.sampled_from(sorted(HONEST)), min_size=1, max_size=3, unique=True).flatmap(
    lambda methods: st.fixed_dictionaries({method: lies_of(method) for method in methods})
)
"""Lies of one to three methods, by method."""


# ---- whom it lies to


@contextmanager
def impatient(seconds: float = 1.0) -> Iterator[None]:
    """Controller with short timeouts, so that tests of silence are short."""
    changes = [
        (session_streams, "SILENCE_SECONDS"), (session_streams, "STALL_SECONDS"),
        (client, "STALL_SECONDS"), (client, "_CALL_SECONDS"), (client, "_GRACE_SECONDS"),
        (connection, "SILENCE_SECONDS"), (connection, "STALL_SECONDS"),
        (connection, "_ANSWER_SECONDS"), (connection, "_LOOK_SECONDS"),
    ]  # fmt: skip
    before = [(module, name, getattr(module, name)) for module, name in changes]
    patience, tick = connection.AgentConnection.describe.__defaults__, guard._TICK_SECONDS
    try:
        for module, name in changes:
            setattr(module, name, seconds)
        connection.AgentConnection.describe.__defaults__ = (seconds,)
        guard._TICK_SECONDS = 0.05
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
        connection.AgentConnection.describe.__defaults__ = patience
        guard._TICK_SECONDS = tick


def artifact(folder: Path) -> Artifact:
    """Return the program that the agent claims to run."""
    path = folder / "program.onnx"
    path.write_bytes(PROGRAM)
    specs = [TensorSpec(name, "float32", (size,)) for name, size in (("x", 4), ("y", 4), ("z", 16))]
    return Artifact(
        "onnxruntime",
        path.name,
        {path.name: path},
        {path.name: DIGEST},
        "main",
        "none",
        inputs=(specs[0],),
        outputs=tuple(specs[1:]),
    )


def use(address: str, program: Artifact) -> list[str]:
    """Make all calls of a run, as far as possible. Return one text per error.

    Raises:
        AssertionError: an agent must not be able to cause one of the errors.
    """
    told: list[str] = []
    meter = MeterConfig(kind="hwmon", path="/sys/x")
    config = BoardConfig("liar", "liar", runtime="onnxruntime", connection=Connection(address=address), meter=meter)
    try:
        board = connect_board(BoardChoice(config, address, runtime="onnxruntime", purpose="a test", wait_s=0.5))
    except errors.HilError as error:
        return [told_of(error)]
    with board:
        for step in (
            lambda: board.client.get(DIGEST) if board.take() is None else None,
            lambda: _run(board, program),
            lambda: _read_power(board),
            lambda: board.client.logs(),
            lambda: board.clock_fit(),
        ):
            try:
                step()
            except errors.HilError as error:
                told.append(told_of(error))
    return told


def _run(board: Board, program: Artifact) -> None:
    board.push(program)
    with board.load(program, timeout=0.5) as loaded:
        with board.watch_counters(0.01) as watch:
            result, _ = loaded.run({"x": X}, iterations=2, timeout=0.5)
        json.dumps([dict(result.provenance), board.info, result.device_ns, [vars(one) for one in watch.samples]])
        assert list(result.outputs) == ["y", "z"]
        # An output that does not match the model is not an error in this function. The comparison detects it.
        assert sum(array.nbytes for array in result.outputs.values()) < 1 << 26
        taken = loaded.profile({"x": X}, iterations=1, timeout=0.5)
        assert all("/" not in name for name in taken.files)
        loaded.log()


def _read_power(board: Board) -> None:
    meter = BoardMeter(board)
    try:
        meter.start()
    finally:
        meter.stop()
    found = meter.read()
    json.dumps([found.times_ns.tolist(), found.watts.tolist(), found.lost, found.problem], allow_nan=False)


def told_of(error: errors.HilError) -> str:
    """Return the text of an error. Assert that an agent may cause such an error."""
    assert not isinstance(error, errors.UsageError), repr(error)
    assert isinstance(error, (errors.StageError, errors.BoardError)), repr(error)
    assert error.exit_code in (errors.EXIT_STAGE, errors.EXIT_BOARD)
    return f"{type(error).__name__}: {error}"


def attack(
    address: str, agent: LyingAgent, program: Artifact, lies: Mapping[str, Lie], limit_s: float
) -> Sequence[str]:
    """Run a controller with a wrong reply of the agent. Return the errors of the controller.

    Raises:
        AssertionError: the call took too long, or the agent caused an error that it must not cause.
    """
    agent.lies = lies
    start = time.monotonic()
    told = use(address, program)
    assert time.monotonic() - start < limit_s, f"the controller took {time.monotonic() - start:.0f} s"
    return told
