"""Fuzzers of the frames on data connections and uplinks: each end, by whoever is at the other one.

An input is a byte that chooses the call, and the bytes that the other side sends. Nothing more comes after them, so no
input has to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
from google.protobuf.message import Message
from support import lying_agent

from fuzzing import mutate
from fuzzing.engine import Attempt, Broken, Fuzzer, Tried
from hil.core.steps import StepRule, StepsPlan
from hil.errors import BoardError, FarmError, HilError, StageError
from hil.protocol import wire_errors
from hil.protocol.data_connection import CALL, DATA, END, HEADER, MESSAGE, METHODS, READY, Frames
from hil.protocol.v1 import agent_pb2 as pb
from hil.protocol.v1 import farm_pb2

_MOST_BYTES = 1 << 16
_KINDS = (0, CALL, READY, MESSAGE, DATA, END, 6, 255)
SESSION = "SESSION".ljust(43, "_")
DIGEST = lying_agent.DIGEST


def frame(kind: int, content: Message | bytes = b"") -> bytes:
    """Return a frame's bytes."""
    data = content if isinstance(content, bytes) else content.SerializeToString()
    return HEADER.pack(kind, len(data)) + data


def _split(data: bytes) -> list[tuple[int, bytes]]:
    """Return the frames of a stream, the last perhaps cut."""
    frames, at = [], 0
    while at + HEADER.size <= len(data):
        kind, size = HEADER.unpack_from(data, at)
        frames.append((kind, data[at + HEADER.size : at + HEADER.size + size]))
        at += HEADER.size + size
    return frames


def _changer(kinds: Callable[[int, int], type[Message] | None], calls: int) -> Callable[[bytes, Random], bytes]:
    """Return what changes an input: a frame, its size, its message, or bytes.

    Args:
        kinds: the message of a call's frame: by the call, and the frame's kind.
        calls: how many calls a first byte can mean.
    """

    def change(data: bytes, rng: Random) -> bytes:
        call, frames = data[:1] or b"\0", _split(data[1:])
        what = rng.randrange(10)
        if what == 0 or not frames:
            return mutate.havoc(data, rng)[:_MOST_BYTES]
        at = rng.randrange(len(frames))
        kind, content = frames[at]
        if what == 1:
            call = bytes([rng.randrange(calls)])
        elif what == 2:
            frames[at] = (rng.choice(_KINDS), content)
        elif what == 3:
            frames[at:at] = [frames[at]] * rng.choice((1, 2, 40))
        elif what == 4 and len(frames) > 1:
            del frames[at]
        elif what == 5:
            rng.shuffle(frames)
        elif what == 6:  # a size that is not the content's
            head = b"".join(frame(*one) for one in frames[:at])
            size = rng.choice(mutate.INTEGERS) % (1 << 32)
            return (call + head + struct.pack("<BI", kind, size) + content)[:_MOST_BYTES]
        elif (message := kinds(call[0] % calls, kind)) is not None and rng.random() < 0.9:
            frames[at] = (kind, mutate.of_message(message)(content, rng))
        else:
            frames[at] = (kind, mutate.havoc(content, rng))
        return (call + b"".join(frame(*one) for one in frames))[:_MOST_BYTES]

    return change


@contextlib.contextmanager
def _said(data: bytes) -> Iterator[tuple[socket.socket, socket.socket]]:
    """A pair of sockets: the near one's peer has sent all that it ever will."""
    near, far = socket.socketpair()
    with near, far:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        far.sendall(data)
        far.shutdown(socket.SHUT_WR)
        yield near, far


# ---- the agent's end

_NAMES = sorted(METHODS)


def _agent_seeds() -> list[bytes]:
    def call(method: str, *frames: bytes, token: str = "") -> bytes:
        return b"\0" + frame(CALL, pb.DataCall(method=method, session=token)) + b"".join(frames)

    blob = b"hello"
    start = frame(MESSAGE, pb.PutRequest(start=pb.PutStart(digest="blake3:" + "0" * 64, size=5)))
    ping = frame(MESSAGE, pb.ClockPing())
    tensor = pb.Tensor(name="x", dtype="float32", shape=[4], streamed=16)
    run = frame(MESSAGE, pb.InvokeRequest(start=pb.InvokeStart(program_id="p", inputs=[tensor], iterations=1)))
    hold = pb.HoldRequest(open=pb.SessionOpen(owner="x", purpose="y", ttl_s=5))
    missing = frame(MESSAGE, pb.MissingRequest(digests=["blake3:" + "0" * 64]))
    return [
        call("Describe", frame(MESSAGE, pb.DescribeRequest())),
        call("Clock", ping * 3, frame(END)) + call("Clock", ping, frame(END))[1:],
        call("Hold", frame(MESSAGE, hold), frame(MESSAGE, pb.HoldRequest(keep_alive=pb.KeepAlive()))),
        call("Put", start, frame(DATA, blob), frame(END), token=SESSION),
        call("Missing", missing, token=SESSION) + call("Missing", missing, token=SESSION)[1:],
        call("Get", frame(MESSAGE, pb.GetRequest(digest="blake3:" + "0" * 64, offset=1)), token=SESSION),
        call("Invoke", run, frame(DATA, bytes(16)), frame(END), token=SESSION),
        call("Unload", frame(MESSAGE, pb.UnloadRequest(program_id="p")), token="another"),
    ]


def _agent_kinds(_: int, kind: int) -> type[Message] | None:
    return {CALL: pb.DataCall, MESSAGE: pb.InvokeRequest}.get(kind)


class _Everything:
    """Services that read all that a caller says, and answer with an empty message."""

    def __getattr__(self, name: str) -> Callable[[Any, Any], Any]:
        method = METHODS[name]

        def behave(sent: Any, context: Any) -> Any:
            for _ in sent if method.streams_requests else [sent]:
                pass
            return iter([method.reply()]) if method.streams_replies else method.reply()

        return behave


@contextlib.contextmanager
def _agent(folder: Path) -> Iterator[Attempt]:
    """An agent's data connections with its own blobs."""
    from hil.agent.admission import Admission
    from hil.agent.calls import Calls
    from hil.agent.data_server import DataServer
    from hil.agent.server import BlobService
    from hil.agent.session import Journal, Sessions
    from hil.agent.store import BlobStore

    sessions = Sessions(folder / "fence", lambda: None, Journal(folder / "journal"))
    session = sessions.open("fuzz", "", 1e9, 0, lambda reason: None)
    assert session is not None
    rest = _Everything()
    services = {"Board": rest, "Sessions": rest, "Programs": rest}
    services["Blobs"] = BlobService(BlobStore(folder / "store"), sessions)  # type: ignore[assignment]
    server = DataServer(f"{folder}/fuzz.data", Calls(Admission(sessions), services, ""))

    def attempt(data: bytes) -> Tried:
        with _said(data[1:].replace(SESSION.encode(), session.token.encode().ljust(43))) as (near, far):
            server._serve(near)
            with contextlib.suppress(OSError):
                near.close()
            answered = b"".join(iter(lambda: far.recv(1 << 20), b""))
        kinds = []
        for kind, content in _split(answered):
            error = wire_errors.decode_error(content) if kind == END else None
            if isinstance(error, BoardError) and error.message.startswith("the agent failed"):
                raise Broken(f"it failed: {error.message}\n{error.detail}")
            kinds.append(f"{kind} {type(error).__name__ if error else ''} {error.message[:25] if error else ''}")
        return Tried(len(_split(data[1:])), tuple(sorted(set(kinds))) or ("nothing",))

    with contextlib.closing(server):
        yield attempt


# ---- the controller's end

_X = np.arange(4, dtype=np.float32)
_PLAN = StepsPlan(((0, StepRule.TOKENS),), ((1, 1),), 0, 3, shapes=((4,),))
_CALLS: list[tuple[str, Callable[[Any, Path], object]]] = [
    ("Describe", lambda client, path: client.describe(0.0)),
    ("Clock", lambda client, path: client.pings(1)),
    ("Hold", lambda client, path: client.open_session("fuzz", wait_s=0.0, on_wait=lambda text: None)),
    ("Missing", lambda client, path: client.missing([DIGEST])),
    ("Put", lambda client, path: client.put({DIGEST: (path, 2)})),
    ("Get", lambda client, path: client.get(DIGEST)),
    (
        "Load",
        lambda client, path: client.load(
            {"m": DIGEST}, "m", runtime="onnxruntime", device="", function="", timeout=1.0
        ),
    ),
    ("Invoke", lambda client, path: client.invoke("p", {"x": _X}, iterations=2, timeout=1.0, most_bytes=1 << 20)),
    ("Logs", lambda client, path: client.logs()),
    ("Counters", lambda client, path: list(client.counters(1.0))),
    ("Power", lambda client, path: list(client.open_power("hwmon", "/sys/x", 1, 100.0)[0])),
    ("Unload", lambda client, path: (client.unload("p"), client._wait_unloaded())),
    (
        "Invoke",
        lambda client, path: client.invoke("p", {"x": _X}, timeout=1.0, most_bytes=1 << 20, steps=_PLAN),
    ),
]


def _controller_seeds() -> list[bytes]:
    found = []
    for number, (name, _) in enumerate(_CALLS):
        frames = [frame(READY)]
        for reply in lying_agent.HONEST[name]:
            data = getattr(reply, "data", b"") if name in ("Get", "Invoke") else b""
            frames.append(frame(DATA, data) if data else frame(MESSAGE, reply))
        found.append(bytes([number]) + b"".join(frames) + frame(END))
        error = pb.Error(kind="RunCrashed", message="it died", hint="h", detail="d")
        found.append(bytes([number]) + frame(READY) + frame(END, error))
    return found


def _controller_kinds(call: int, kind: int) -> type[Message] | None:
    return {MESSAGE: METHODS[_CALLS[call][0]].reply, END: pb.Error}.get(kind)


@contextlib.contextmanager
def _controller(folder: Path) -> Iterator[Attempt]:
    """A client, each of whose calls gets the input as its agent's answer."""
    from hil.controller.devices.agent_client.call import Call, CallFailed
    from hil.controller.devices.agent_client.client import AgentClient
    from hil.controller.devices.agent_client.data_stream import DataStream, NoDataConnection
    from hil.controller.devices.board_client import AgentEndpoint

    blob = folder / "blob"
    blob.write_bytes(lying_agent.PROGRAM)

    def attempt(data: bytes) -> Tried:
        name, work = _CALLS[(data[0] if data else 0) % len(_CALLS)]
        kind = "answered"
        with _said(data[1:]) as (near, _):
            frames = Frames(near)
            begun: list[str] = []

            def begin(method: str, session: str = "", *, within_s: float = 5.0, waits: bool = False) -> Call:
                begun.append(method)
                if len(begun) > 1:
                    raise CallFailed("CANCELLED", "one call is all")
                called = pb.DataCall(method=method, session=session)
                try:
                    return Call(METHODS[method], DataStream(frames, called, 5.0, lambda connection: None))
                except NoDataConnection as error:
                    raise CallFailed("CANCELLED", str(error)) from error

            client = AgentClient(AgentEndpoint("unix:/nowhere"), "fuzz")
            cancelled = frames.cancel
            client._calls = SimpleNamespace(  # type: ignore[assignment]
                begin=begin, close=cancelled, cancel=lambda _: cancelled(), is_answered=lambda _: False, fallback=""
            )
            try:
                work(client, blob)
            except CallFailed as error:
                if name not in ("Counters", "Power"):  # whose reader knows it
                    raise Broken(f"CallFailed of {name}: {error}") from error
                kind = "failed"
            except (BoardError, StageError) as error:
                str(error).encode()
                kind = f"{type(error).__name__} {error.message[:40]}"
            finally:
                client.close()
        return Tried(len(_split(data[1:])), (f"{name} {kind}",))

    yield attempt


# ---- uplinks

_REPORT = farm_pb2.ReportRequest(lease=1, worker="w")


def _uplink_seeds() -> list[bytes]:
    grant = farm_pb2.Grant(lease=3, spec=farm_pb2.JobSpec(kind="run", options=farm_pb2.Json(text=b'{"a": 1}')))
    said = [
        farm_pb2.ToBoard(standing=farm_pb2.Standing(owner=True, beat_s=1.5)),
        farm_pb2.ToBoard(grant=grant),
        farm_pb2.ToBoard(beat=farm_pb2.Beat()),
        farm_pb2.ToBoard(ended=farm_pb2.Ended(lease=3, reason="x")),
        farm_pb2.ToBoard(dial=farm_pb2.DialIn(lease=3, id="x")),
    ]
    error = wire_errors.to_message(FarmError("no")).SerializeToString()
    ready = frame(READY, b"unix:gateway")
    asked = frame(CALL, b"Report") + frame(MESSAGE, _REPORT) + frame(END)
    return [
        b"\0" + ready + b"".join(frame(MESSAGE, one) for one in said) + frame(END),
        b"\0" + ready + frame(END, error),
        b"\1" + ready + frame(MESSAGE, farm_pb2.ReportReply()) + frame(END),
        b"\2" + asked,
        b"\2" + frame(CALL, b"Attend") + frame(MESSAGE, b"x") * 5,
    ]


def _uplink_kinds(call: int, kind: int) -> type[Message] | None:
    if kind == END:
        return pb.Error
    if kind != MESSAGE:
        return None
    return (farm_pb2.ToBoard, farm_pb2.ReportReply, farm_pb2.ReportRequest)[call]


class _Listener:
    """What a worker does with what the farm says, as far as reading goes."""

    def get_card(self) -> Any: ...

    def list_leases(self) -> list[int]:
        return []

    def queue_grant(self, grant: Any) -> None:
        str(grant)

    def cancel_lease(self, lease: int, reason: str) -> None:
        str(reason)

    def open_dial(self, dial: Any, gateway: str) -> None:
        str(gateway)

    def print_message(self, text: str) -> None:
        text.encode()


class _Connected(socket.socket):
    """A socket whose other end is known already."""

    def connect(self, address: Any) -> None: ...


class _Writer:
    """Takes what an uplink sends to a worker."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None: ...

    def close(self) -> None: ...


class _GatewayCall:
    """A call of gRPC that takes everything and then ends well."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...

    def cancel(self) -> None: ...

    async def write(self, message: bytes) -> None: ...

    async def done_writing(self) -> None: ...

    async def __aiter__(self) -> Any:
        yield b"reply"


@contextlib.contextmanager
def _uplink(folder: Path) -> Iterator[Attempt]:
    """A worker's end of an uplink, and the uplink's own."""
    from hil.controller.farm.host.gateway_link import uplink_call
    from hil.controller.farm.host.gateway_link.gateway_stream import GatewayStream
    from hil.controller.farm.host.gateway_link.uplink import Uplink, _Link
    from hil.controller.farm.paths import FarmAddress

    loop = asyncio.new_event_loop()
    channel: Any = SimpleNamespace(stream_stream=lambda path: lambda **_: _GatewayCall())
    uplink = Uplink(FarmAddress(("unix:/nowhere",), "token"))

    @contextlib.asynccontextmanager
    async def linked() -> Any:
        yield _Link(channel, "unix:gateway")

    uplink._use_link = linked  # type: ignore[method-assign]
    stream = GatewayStream(folder / "uplink", "w", _Listener())

    async def serve(data: bytes) -> bytes:
        reader, writer = asyncio.StreamReader(), _Writer()
        reader.feed_data(data)
        reader.feed_eof()
        await uplink._serve_call(reader, writer)  # type: ignore[arg-type]
        return bytes(writer.data)

    def worker(near: socket.socket, method: str) -> list[str]:
        connected = _Connected(fileno=near.detach())
        uplink_call.socket = SimpleNamespace(socket=lambda _: connected, AF_UNIX=socket.AF_UNIX)  # type: ignore
        call = uplink_call.UplinkCall(folder / "uplink", method)
        with contextlib.closing(call):
            kinds = []
            for message in call.iter_replies():
                if method == "Attend":
                    stream._dispatch_message(message, call.gateway)
                kinds.append(message.WhichOneof("kind") if method == "Attend" else "reply")
            return sorted({str(kind) for kind in kinds})

    def attempt(data: bytes) -> Tried:
        call = (data[0] if data else 0) % 3
        try:
            if call == 2:
                frames = _split(loop.run_until_complete(serve(data[1:])))
                kinds = [f"sends {kind}" for kind, _ in frames]
            else:
                with _said(data[1:]) as (near, _):
                    kinds = worker(near, ("Attend", "Report")[call])
        except HilError as error:
            str(error).encode()
            kinds = [f"{type(error).__name__} {error.message[:40]}"]
        return Tried(len(_split(data[1:])), tuple(sorted(set(kinds))) or ("nothing",))

    try:
        yield attempt
    finally:
        loop.close()
        uplink_call.socket = socket  # type: ignore[attr-defined]


def _frames_fuzzer(
    name: str,
    about: str,
    opened: Any,
    seeds: Callable[[], Sequence[bytes]],
    kinds: Callable[[int, int], type[Message] | None],
    calls: int,
) -> Fuzzer:
    return Fuzzer(name, about, opened, seeds, _changer(kinds, calls), (), limit_s=30.0, limit_mib=128)


FUZZERS = [
    _frames_fuzzer("data-agent", "an agent, by its data connections", _agent, _agent_seeds, _agent_kinds, 1),
    _frames_fuzzer(
        "data-controller",
        "a controller, by an agent's data connections",
        _controller,
        _controller_seeds,
        _controller_kinds,
        len(_CALLS),
    ),
    _frames_fuzzer("uplink", "a host's uplink, by gateway and workers", _uplink, _uplink_seeds, _uplink_kinds, 3),
]
