"""Calls of gRPC as inputs: a line of JSON for each, so that inputs can be joined, and read by people.

``{"call": "Programs.Invoke", "token": "session", "messages": ["BASE64", ...]}`` is a call, ``{"http2": "BASE64"}``
bytes that are sent to the server's socket as they are. What changes from run to run has a name of the same length:
PROGRAM___...
"""

from __future__ import annotations

import base64
import contextlib
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from fuzzing import mutate
from fuzzing.engine import Broken
from hil.protocol import grpc_calls

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
_MOST_LINES, _MOST_MESSAGES = 12, 400
_READ_S = 0.05


class Method:
    """A method of a service, by its descriptor."""

    def __init__(self, service: str, descriptor: Any) -> None:
        self.name = f"{service.rpartition('.')[2]}.{descriptor.name}"
        self.path = f"/{service}/{descriptor.name}"
        self.asks: type[Message] = GetMessageClass(descriptor.input_type)
        self.streams = bool(descriptor.client_streaming)


def methods_of(file: Any, services: Iterable[str]) -> dict[str, Method]:
    """The methods of some services of a .proto file, by ``Service.Method``."""
    found = [
        Method(file.services_by_name[service].full_name, one)
        for service in services
        for one in file.services_by_name[service].methods
    ]
    return {one.name: one for one in found}


def line(call: str, *messages: Message, token: str = "session", seconds: float = 0.2) -> bytes:
    """A call as a line, which is given up after so many seconds."""
    texts = [base64.b64encode(one.SerializeToString()).decode() for one in messages]
    return json.dumps({"call": call, "token": token, "messages": texts, "seconds": seconds}).encode() + b"\n"


def garbage(data: bytes) -> bytes:
    """Bytes for the socket as a line."""
    return json.dumps({"http2": base64.b64encode(data).decode()}).encode() + b"\n"


GARBAGE = (
    garbage(PREFACE + _SETTINGS),
    garbage(PREFACE + _SETTINGS + b"\0\0\4\1\4\0\0\0\1\x82\x86\x84\x41" + b"\0\0\4\3\0\0\0\0\1\0\0\0\x08" * 20),
    garbage(PREFACE + b"\0\x40\0\0\1\0\0\0\3" + b"a" * 400 + b"\xff\xff\xff\x01\x05\0\0\0\5"),
    garbage(PREFACE + _SETTINGS + b"\0\0\x08\x06\0\0\0\0\0" + bytes(8) + b"\0\0\4\x08\0\0\0\0\0\x7f\xff\xff\xff" * 3),
    garbage(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
)


def entries(data: bytes, methods: Mapping[str, Method]) -> list[dict[str, Any]]:
    """The lines of an input that say what they should; inputs are cut and joined anywhere."""
    found = []
    for text in data.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            one = json.loads(text)
            if "http2" in one:
                base64.b64decode(one["http2"])
                found.append({"http2": one["http2"]})
            elif one["call"] in methods and isinstance(one["messages"], list):
                [base64.b64decode(message) for message in one["messages"]]
                found.append({"seconds": 1.0, "token": "none", **one})
    return found


class Changer:
    """Makes other inputs of an input of these lines.

    Args:
        methods: what may be called.
        tokens: what a call may say of who calls.
    """

    def __init__(self, methods: Mapping[str, Method], tokens: Sequence[str]) -> None:
        self._methods, self._tokens = methods, tokens

    def __call__(self, data: bytes, rng: Random) -> bytes:
        lines = entries(data, self._methods)[-_MOST_LINES:]
        for _ in range(rng.randrange(1, 4)):
            what = rng.randrange(6)
            if what == 0 or not lines:
                lines.insert(rng.randrange(len(lines) + 1), self._new(rng))
            elif what == 1 and len(lines) > 1:
                del lines[rng.randrange(len(lines))]
            elif what == 2:
                lines.append(rng.choice(lines))
            else:
                at = rng.randrange(len(lines))
                lines[at] = self._changed(dict(lines[at]), rng)
        return b"".join(json.dumps(one).encode() + b"\n" for one in lines[:_MOST_LINES])

    def _new(self, rng: Random) -> dict[str, Any]:
        if rng.random() < 0.1:
            return dict(json.loads(rng.choice(GARBAGE)))
        method = self._methods[rng.choice(list(self._methods))]
        texts = []
        for _ in range(rng.randrange(1, 4) if method.streams else 1):
            held = method.asks()
            mutate.message(held, rng, times=rng.randrange(1, 8))
            texts.append(base64.b64encode(held.SerializePartialToString()).decode())
        seconds = rng.choice((0.1, 0.1, 0.5, 2.0))
        return {"call": method.name, "token": rng.choice(self._tokens), "messages": texts, "seconds": seconds}

    def _changed(self, entry: dict[str, Any], rng: Random) -> dict[str, Any]:
        if "http2" in entry:
            raw = base64.b64decode(entry["http2"])
            head = PREFACE if raw.startswith(PREFACE) and rng.random() < 0.9 else b""
            changed = head + mutate.havoc(raw.removeprefix(head), rng)[:20_000]
            return {"http2": base64.b64encode(changed).decode()}
        method, texts = self._methods[entry["call"]], list(entry["messages"])
        what = rng.randrange(8)
        if what == 0:
            entry["token"] = rng.choice(self._tokens)
        elif what == 1 and method.streams and texts:
            texts[rng.randrange(len(texts)) :] *= rng.choice((2, 3, 40))
        elif what == 2 and len(texts) > 1:
            del texts[rng.randrange(len(texts))]
        elif what == 3 and len(texts) > 1:
            rng.shuffle(texts)
        elif texts:
            at = rng.randrange(len(texts))
            raw = mutate.of_message(method.asks)(base64.b64decode(texts[at]), rng)
            texts[at] = base64.b64encode(raw[:100_000]).decode()
        entry["messages"] = texts[:_MOST_MESSAGES]
        return entry


class Server:
    """Sends the calls of an input, all at once, and waits until they are answered.

    Args:
        address: ``unix:PATH``.
        methods: what may be called.
        names: what stands for what in messages, of the same length.
    """

    def __init__(self, address: str, methods: Mapping[str, Method], names: Mapping[str, str]) -> None:
        self._address, self._methods = address, methods
        self.names = dict(names)
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        self.channel = grpc.insecure_channel(address, options)
        self.kinds: set[str] = set()
        self.sent = 0

    def send(self, data: bytes, metadata: Mapping[str, list[tuple[str, str]]]) -> None:
        """Send an input's calls.

        Args:
            data: the input.
            metadata: of each kind of token.

        Raises:
            Broken: a call failed as none may.
        """
        self.kinds, under_way = set(), []
        for entry in entries(data, self._methods):
            if "http2" in entry:
                self._throw(base64.b64decode(entry["http2"]))
            else:
                under_way.append((entry["call"], self._begin(entry, metadata)))
        for name, call in under_way:
            self._end(name, call)

    def _begin(self, entry: dict[str, Any], metadata: Mapping[str, list[tuple[str, str]]]) -> Any:
        method = self._methods[entry["call"]]
        given = metadata.get(str(entry["token"]), [("authorization", f"Bearer {entry['token']}")])
        if not all(value.isascii() and value.isprintable() for _, value in given):
            given = []

        def messages() -> Iterable[bytes]:
            for text in entry["messages"]:
                self.sent += 1
                yield self._named(base64.b64decode(text))

        stream = self.channel.stream_stream(method.path)
        # One message more than a method takes is a fault too.
        return stream(iter(messages()), timeout=_seconds(entry["seconds"]), metadata=given)

    def _end(self, name: str, call: Any) -> None:
        try:
            for number, _ in enumerate(call):
                if number > 50:
                    call.cancel()
            self.kinds.add(f"{name} answered")
        except grpc.RpcError as error:
            self._look(name, error)
        except ValueError as error:  # gRPC's of metadata that it does not take
            self.kinds.add(f"{name} {error}")

    def _look(self, name: str, error: Any) -> None:
        found = grpc_calls.decode_error(error)
        code = error.code().name
        kind = type(found).__name__ if found else ""
        self.kinds.add(f"{name} {code} {kind} {found.message[:15] if found else ''}")
        if code == "UNKNOWN" or kind == "BoardLost":
            raise Broken(f"{name} failed: {code}: {error.details()}\n{found and found.detail}")

    def _named(self, raw: bytes) -> bytes:
        for name, value in self.names.items():
            raw = raw.replace(name.encode(), value.encode())
        return raw

    def _throw(self, data: bytes) -> None:
        self.sent += 1
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(_READ_S)
            sock.connect(self._address.removeprefix("unix:"))
            sock.sendall(data)
            self.kinds.add(f"http2 {len(sock.recv(1 << 16)) > 0}")


def _seconds(given: object) -> float:
    return min(max(given, 0.01), 5.0) if isinstance(given, (int, float)) else 1.0
