"""The fuzzer of the controller: an agent that answers each call with what nobody would.

An input is a line of JSON a method: ``{"call": "Load", "messages": ["BASE64", ...], "end": "close"}``; a method that
has none answers as an honest agent does.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from support import lying_agent

from fuzzing import mutate
from fuzzing.engine import Attempt, Fuzzer, Tried
from hil.protocol import wire
from hil.protocol.v1 import agent_pb2 as pb

# How a call ends; "silent" and "endless" cost the controller's whole patience each time.
_ENDS = ("close",) * 8 + ("error",) * 4 + ("silent", "endless")
_PATIENCE_S, _LIMIT_S = 0.5, 60.0
_MOST_BYTES, _MOST_MESSAGES = 1 << 17, 300
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
    lines = [_line(name, messages) for name, messages in lying_agent.HONEST.items()]
    return [*lines, b"".join(lines), *(_line(name, [error], "error") for name in lying_agent.HONEST)]


def _entries(data: bytes) -> dict[str, dict[str, Any]]:
    """The lines that say what they should, by method; inputs are cut and joined anywhere."""
    found = {}
    for text in data.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            one = json.loads(text)
            if one["call"] in lying_agent.HONEST and isinstance(one["messages"], list):
                [base64.b64decode(message) for message in one["messages"]]
                found[one["call"]] = {"end": "close", **one}
    return found


def _change(data: bytes, rng: Random) -> bytes:
    held = _entries(data)
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice([*held, rng.choice(list(lying_agent.HONEST))])
        entry = held.get(name) or json.loads(_line(name, lying_agent.HONEST[name]))
        texts, what = list(entry["messages"]), rng.randrange(8)
        if what == 0:
            entry["end"] = rng.choice(_ENDS)
        elif what == 1:
            texts *= rng.choice((2, 3, 100))
        elif what == 2 and texts:
            del texts[rng.randrange(len(texts))]
        elif texts:
            at = rng.randrange(len(texts))
            kind = pb.Error if entry["end"] == "error" else _REPLIES[name]
            raw = mutate.of_message(kind)(base64.b64decode(texts[at]), rng)
            texts[at] = base64.b64encode(raw[:_MOST_BYTES]).decode()
        held[name] = {"call": name, "messages": texts[:_MOST_MESSAGES], "end": entry["end"]}
    return b"".join(json.dumps(one).encode() + b"\n" for one in held.values())


def _lie(entry: dict[str, Any]) -> lying_agent.Lie:
    raw, end = tuple(base64.b64decode(one) for one in entry["messages"]), entry["end"]
    if end == "error":
        return lying_agent.Lie((), grpc.StatusCode.INTERNAL, b"".join(raw))
    return lying_agent.Lie(raw, endless=end == "endless" and bool(raw), silent=end == "silent")


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[Attempt]:
    program = lying_agent.artifact(folder)
    address = f"unix:{folder}/liar.sock"
    with lying_agent.LyingAgent(address) as agent, lying_agent.impatient(_PATIENCE_S):

        def attempt(data: bytes) -> Tried:
            lies = {name: _lie(entry) for name, entry in _entries(data).items()}
            told = lying_agent.attack(address, agent, program, lies, _LIMIT_S)
            said = sum(len(lie.replies) + 1 for lie in lies.values()) + len(lying_agent.HONEST) - len(lies)
            return Tried(said, tuple(sorted({re.sub(r"\d+", "", text)[:100] for text in told})))

        yield attempt


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
