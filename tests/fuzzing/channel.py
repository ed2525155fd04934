"""The fuzzer of the worker's channel: what a program that has taken over its worker may say to the agent."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from fuzzing import mutate
from fuzzing.engine import Attempt, Broken, Fuzzer, Tried
from hil.agent import answers, forks, ipc
from hil.core.processes import ExitStatus
from hil.errors import BoardError, HilError, StageError, UsageError

_FRAME = struct.Struct("<I")
_LIMIT_S, _LISTEN_S = 0.2, 0.1
_LEAKED_MOST = 300
_OPS = ("prepare", "open", "load", "invoke", "profile", "generate")
_SPEC = {"name": "x", "dtype": "float32", "shape": [4, "n", None]}
_ANSWERS: list[Any] = [
    {"ok": {}},
    {"ok": {}},
    {"ok": {"inputs": [_SPEC], "outputs": [_SPEC], "function": "main", "load_ns": 5}},
    {
        "ok": {
            "outputs": [{"name": "y", "dtype": "float32", "shape": [4], "at": 0, "bytes": 16}],
            "placement": [{"device": "cpu", "nodes": 2, "names": ["a"], "elsewhere": False}],
        }
    },
    {"error": ["RunFailed", "it failed", "a hint", "a detail", "wrong-target"]},
]


def _framed(value: Any, numbers: Sequence[int] = ()) -> bytes:
    body = ipc.join_message(numbers, ipc.encode(value))
    return _FRAME.pack(len(body)) + body


def _seeds() -> list[bytes]:
    ready, signature, failed = (_framed(_ANSWERS[number]) for number in (0, 1, 3))
    ran = _framed(_ANSWERS[2], (0, 3, 1000, 1, 2))
    generated = _framed(_ANSWERS[3], (0, 3, 1000, 1, 2, 4, 10, 20, 1, 20, 25))
    return [
        ready + signature + ran,
        ready + signature + failed,
        ready + failed,
        failed,
        ready + signature + ran * 3,
        ready + signature + ran * 3 + generated,
    ]


def _frames(data: bytes) -> list[bytes]:
    frames, at = [], 0
    while at + _FRAME.size <= len(data):
        (size,) = _FRAME.unpack_from(data, at)
        frames.append(data[at + _FRAME.size : at + _FRAME.size + size])
        at += _FRAME.size + size
    return frames


def _change(data: bytes, rng: Random) -> bytes:
    """Change a message and the length before it, or bytes."""
    frames = _frames(data)
    if not frames or rng.random() < 0.15:
        return mutate.havoc(data, rng)
    number = rng.randrange(len(frames))
    numbers, text = _parted(frames[number])
    if numbers and rng.random() < 0.3:
        numbers = mutate.havoc(numbers, rng)
    else:
        text = mutate.json_bytes(text, rng)
    frames[number] = (numbers + text)[: 1 << 20]
    return b"".join(_FRAME.pack(len(frame)) + frame for frame in frames)


def _parted(body: bytes) -> tuple[bytes, bytes]:
    """What stands before a message's JSON, and the JSON."""
    try:
        text, _ = ipc.split(body, len(body))
    except ipc.Garbled:
        text = body
    return body[: len(body) - len(text)], text


def _read(data: bytes) -> list[str]:
    """Each message of an input as an answer and as a fork server's news; returns what it was taken for."""
    kinds = []
    for number, body in enumerate(_frames(data)):
        op = _OPS[number % len(_OPS)]
        try:
            kinds.append(f"{op} {type(answers.read(body, op, 1)).__name__}")
        except HilError as error:
            str(error).encode()
            kinds.append(f"{op} {type(error).__name__} {error.message[:40]}")
        try:
            forks.read_news(body)
        except ipc.Garbled as error:
            kinds.append(f"news {str(error)[:30]}")
    return kinds


class _Forks:
    """In place of the fork server: the worker's descriptors go to this process."""

    def __init__(self) -> None:
        self.fds: list[int] = []
        self.on_exit: Callable[[ExitStatus], None] = lambda code: None

    def fork(self, fds: list[int], on_exit: Callable[[ExitStatus], None], **_: Any) -> int:
        self.fds, self.on_exit = [os.dup(fd) for fd in fds], on_exit
        return 1 << 30  # the number of no process


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[Attempt]:
    """Programs of an agent, whose workers say what the input is."""
    from hil.agent.programs import Programs
    from hil.agent.session import Journal, Sessions
    from hil.agent.store import BlobStore
    from hil.agent.supervisor import LogBook, WorkerProcess
    from hil.core.digest import digest_of
    from hil.protocol.v1 import agent_pb2 as pb

    store = BlobStore(folder / "store")
    journal = Journal(folder / "journal")
    sessions = Sessions(folder / "fence", lambda: None, journal)
    digest = digest_of(b"x")
    with store.upload(digest, 1, 0) as upload:
        upload.write(memoryview(b"x"))
        upload.finish()
    hands, logs = _Forks(), LogBook()

    class Hostile:
        """In place of the supervisor."""

        def __init__(self) -> None:
            self.logs = logs

        def take(self, runtime: str, device: str, instructions: bool = False) -> WorkerProcess:
            worker = WorkerProcess(hands, logs)  # type: ignore[arg-type]
            threading.Thread(target=_say, args=(hands.fds, self.data, hands.on_exit), daemon=True).start()
            return worker

        def has(self, runtime: str, device: str) -> bool:
            return True

        def check_device(self, runtime: str, device: str) -> None:
            return None

        def refill(self, runtime: str, device: str) -> None:
            pass

        data = b""

    hostile = Hostile()
    programs = Programs(store, hostile, sessions, 1 << 28)  # type: ignore[arg-type]
    session = sessions.open("x", "y", 3600.0, 0, lambda reason: None)
    assert session is not None
    load = pb.LoadRequest(files=[pb.ProgramFile(name="m", digest=digest)], main="m", runtime="x", timeout_s=_LIMIT_S)
    start = pb.InvokeStart(iterations=1, timeout_s=_LIMIT_S)

    before = _count_descriptors()

    def attempt(data: bytes) -> Tried:
        hostile.data = data
        kinds = _read(data)
        try:
            reply = programs.load(session, load)
            kinds.append("loaded")
            start.program_id = reply.program_id
            with programs.lock_program(session, start, lambda: True) as loaded:
                reply, _, ended = programs.invoke(loaded, programs.reserve_inputs(loaded, start), start)
                ended()
            reply.SerializeToString()
            kinds.append("ran")
        except (StageError, BoardError, UsageError) as error:
            str(error).encode()
            kinds.append(f"{type(error).__name__} {str(error)[:30]}")
        finally:
            programs.unload(session, start.program_id)
        if (leaked := _count_descriptors() - before) > _LEAKED_MOST:
            raise Broken(f"{leaked} descriptors are left open")
        return Tried(2 * len(_frames(data)) + 1, tuple(kinds))

    yield attempt


def _count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def _say(fds: list[int], data: bytes, on_exit: Callable[[ExitStatus], None]) -> None:
    """Say all of it, as far as anybody listens, and die."""
    with contextlib.suppress(OSError):
        os.ftruncate(fds[2], 1 << 16)  # what it says of its outputs may be there
    with contextlib.suppress(OSError), socket.socket(fileno=fds[0]) as sock:
        sock.settimeout(_LISTEN_S)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    for fd in fds[1:]:
        os.close(fd)
    on_exit(ExitStatus(-11))


FUZZER = Fuzzer("channel", "what a hostile worker says to the agent", _opened, _seeds, _change, ())
