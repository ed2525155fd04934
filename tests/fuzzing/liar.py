"""The fuzzer of the controller: an agent that answers each call with what nobody would.

An input is a line of JSON a method: ``{"call": "Programs.Load", "messages": [answers], "end": "close"}``; a method that
has none answers as an honest agent does.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from random import Random
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from fuzzing import mutate
from fuzzing.engine import Attempt, Broken, Fuzzer, Tried
from hil import wire, wire_errors
from hil.errors import BoardError, StageError
from hil.proto.v1 import agent_pb2 as pb

_ENDS = ("close", "close", "close", "error", "silent")
_SILENT_S, _LIMIT_S = 2.0, 60.0
_PROGRAM_S = 0.5
_DATA = b"12345"


def _honest() -> dict[str, list[Message]]:
    specs = [pb.TensorSpec(name=name, dtype="float32", dims=[pb.Dim(size=4)]) for name in ("x", "y")]
    output = pb.Tensor(name="y", dtype="float32", shape=[4], inline=bytes(16))
    machine = pb.Machine(hostname="h", system="Linux", arch="x86_64", cores=2, memory_bytes=1 << 30, boot_id="b")
    runtime = pb.Runtime(name="onnxruntime", version="1", devices=["cpu"])
    done = pb.InvokeDone(
        outputs=[output],
        start_ns=[1],
        end_ns=[2],
        received_ns=1,
        ready_ns=3,
        peak_memory_bytes=5,
        placement=pb.Placement(parts=[pb.Part(device="cpu", nodes=1)]),
        state=pb.State(clock_ns=1),
    )
    return {
        "Describe": [
            pb.DescribeReply(
                board_id="b",
                name="n",
                agent_version="1",
                protocol=wire.PROTOCOL,
                machine=machine,
                runtimes=[runtime],
                clock_ns=1,
                wall_ns=1,
                fence=3,
            )
        ],
        "Clock": [pb.ClockPong(clock_ns=number) for number in range(9)],
        "Logs": [pb.LogLine(clock_ns=1, text="a line")],
        "Counters": [pb.CounterSample(clock_ns=1, readings=[pb.Reading(name="t", value=1, unit="degC")])],
        "Hold": [pb.HoldReply(opened=pb.SessionOpened(token="t", fence=4, ttl_s=5))],
        "Missing": [pb.MissingReply(missing=[pb.MissingBlob(digest="blake3:" + "0" * 64, have_bytes=2)])],
        "Put": [pb.PutReply(digest="blake3:" + "0" * 64)],
        "Get": [pb.GetReply(start=pb.GetStart(size=len(_DATA))), pb.GetReply(data=_DATA)],
        "Load": [pb.LoadReply(program_id="p", device="cpu", function="main", inputs=specs[:1], outputs=specs[1:])],
        "Invoke": [pb.InvokeReply(done=done)],
        "Unload": [pb.UnloadReply()],
    }


_STREAMED = [
    pb.InvokeReply(
        done=pb.InvokeDone(
            outputs=[pb.Tensor(name="y", dtype="float32", shape=[4], streamed=16)], start_ns=[1], end_ns=[2]
        )
    ),
    pb.InvokeReply(data=bytes(16)),
    pb.InvokeReply(digests=pb.Digests(digests=["blake3:" + "0" * 64])),
]
_REPLIES = {
    method.name: GetMessageClass(method.output_type)
    for service in wire.SERVICES
    for method in pb.DESCRIPTOR.services_by_name[service].methods
}


def _line(call: str, messages: list[Message], end: str = "close") -> bytes:
    texts = [base64.b64encode(one.SerializeToString()).decode() for one in messages]
    return json.dumps({"call": call, "messages": texts, "end": end}).encode() + b"\n"


def _seeds() -> list[bytes]:
    error = pb.Error(kind="RunCrashed", message="it died", hint="h", detail="d")
    lines = [_line(name, messages) for name, messages in _honest().items()]
    return [*lines, b"".join(lines), _line("Invoke", _STREAMED), *(_line(name, [error], "error") for name in _REPLIES)]


def _entries(data: bytes) -> dict[str, dict[str, Any]]:
    found = {}
    for text in data.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            one = json.loads(text)
            if one["call"] in _REPLIES and isinstance(one["messages"], list):
                [base64.b64decode(message) for message in one["messages"]]
                found[one["call"]] = {"end": "close", **one}
    return found


def _change(data: bytes, rng: Random) -> bytes:
    held = _entries(data)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice([*held, rng.choice(list(_REPLIES))])
        entry = held.get(name) or json.loads(_line(name, _honest()[name]))
        texts, what = list(entry["messages"]), rng.randrange(8)
        if what == 0:
            entry["end"] = rng.choice(_ENDS)
        elif what == 1 and texts:
            texts *= rng.choice((2, 3, 100))
        elif what == 2 and texts:
            del texts[rng.randrange(len(texts))]
        elif texts:
            at = rng.randrange(len(texts))
            kind = pb.Error if entry["end"] == "error" else _REPLIES[name]
            raw = mutate.of_message(kind)(base64.b64decode(texts[at]), rng)
            texts[at] = base64.b64encode(raw[: 1 << 17]).decode()
        held[name] = {"call": name, "messages": texts[:300], "end": entry["end"]}
    return b"".join(json.dumps(one).encode() + b"\n" for one in held.values())


class _Liar(grpc.GenericRpcHandler):
    """Answers what it is told to."""

    def __init__(self) -> None:
        self._honest = {name: [one.SerializeToString() for one in messages] for name, messages in _honest().items()}
        self.told: dict[str, dict[str, Any]] = {}
        self.sent = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        name = details.method.rpartition("/")[2]
        entry = self.told.get(name)
        answers, end = self._honest.get(name, []), "hold" if name in ("Hold", "Invoke") else "close"
        if entry:
            answers, end = [base64.b64decode(one) for one in entry["messages"]], entry["end"]

        def answer(requests: Any, context: grpc.ServicerContext) -> Iterator[bytes]:
            next(requests, None)
            if end == "error":
                self.sent += 1
                context.set_trailing_metadata(((wire_errors.ERROR_KEY, b"".join(answers)[:8000]),))
                context.abort(grpc.StatusCode.INTERNAL, "it says")
            for one in answers:
                self.sent += 1
                yield one
            if end == "hold":
                for _ in requests:
                    yield from answers if name == "Invoke" else ()
            elif end == "silent":
                over = time.monotonic() + _SILENT_S
                while context.is_active() and time.monotonic() < over:
                    time.sleep(0.02)

        return grpc.stream_stream_rpc_method_handler(answer)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[Attempt]:
    liar = _Liar()
    server = grpc.server(futures.ThreadPoolExecutor(64), handlers=[liar], options=list(wire.GRPC_OPTIONS))
    address = f"unix:{folder}/liar.sock"
    server.add_insecure_port(address)
    server.start()
    blob = folder / "blob"
    blob.write_bytes(_DATA)

    def attempt(data: bytes) -> Tried:
        liar.told, liar.sent = _entries(data), 0
        began = time.monotonic()
        kinds = _talk(address, blob)
        if time.monotonic() - began > _LIMIT_S:
            raise Broken(f"the controller took {time.monotonic() - began:.0f} s")
        return Tried(liar.sent, tuple(kinds))

    try:
        yield attempt
    finally:
        server.stop(0)


def _talk(address: str, blob: Path) -> list[str]:
    """Everything that a run asks of an agent, each whether or not what came before went well."""
    from google.protobuf.json_format import MessageToDict

    from hil.boards import BoardConfig
    from hil.controller.choice import with_target
    from hil.controller.client import AgentClient, Target
    from hil.digest import digest_of

    client = AgentClient(Target(address), "liar")
    x = {"x": np.zeros(4, np.float32)}
    digest = digest_of(_DATA)

    def described() -> None:
        info = MessageToDict(client.describe(5.0), preserving_proto_field_name=True)
        with_target(BoardConfig("liar", "liar"), "onnxruntime", info.get("machine", {}))

    def ran() -> None:
        loaded = client.load({"m": digest}, "m", runtime="onnxruntime", device="", function="", timeout=_PROGRAM_S)
        str([*loaded.inputs, *loaded.outputs])
        client.invoke(loaded.program_id, x, timeout=_PROGRAM_S, state=True)
        client.profile(loaded.program_id, x, timeout=_PROGRAM_S)
        client.unload(loaded.program_id)

    steps = [
        described,
        lambda: client.open_session("fuzz", wait_s=1.0, on_wait=str.encode),
        lambda: client.pings(4),
        lambda: client.missing([digest]),
        lambda: client.put({digest: (blob, 0)}),
        lambda: client.get(digest),
        ran,
        lambda: [line.encode() for line in client.logs()],
    ]
    kinds = []
    try:
        for number, step in enumerate(steps):
            try:
                step()
                kinds.append(f"{number}")
            except (BoardError, StageError) as error:
                str(error).encode()
                kinds.append(f"{number} {type(error).__name__} {str(error)[:25]}")
    finally:
        client.close()
    return kinds


FUZZER = Fuzzer(
    "liar",
    "a controller, by an agent that lies",
    _opened,
    _seeds,
    _change,
    (),
    limit_s=300.0,
    limit_mib=512,
    address_mib=0,
)
