"""The four services, thin over store, sessions and programs."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import grpc

from hil import clock, wire
from hil.agent import machine
from hil.agent.counters import Counters
from hil.agent.programs import Programs
from hil.agent.session import Session, Sessions
from hil.agent.store import BlobStore
from hil.agent.supervisor import Supervisor
from hil.behind import StreamHasher
from hil.errors import BoardBusy, SessionEnded, UsageError
from hil.proto.v1 import agent_pb2 as pb

MAX_WAITING = 8
MIN_PERIOD_MS = 10
MAX_PERIOD_MS = 60_000
_NOTICE_S = 0.5
_SHORT = 200


@functools.cache
def agent_version() -> str:
    """The installed hil's version."""
    try:
        return version("hil")
    except PackageNotFoundError:
        return "0+source"


class BoardService:
    """Describe, Clock, Logs, Counters."""

    def __init__(
        self,
        name: str,
        supervisor: Supervisor,
        sessions: Sessions,
        programs: Programs,
        memory_limit: int,
        simulated: list[str],
        build: str,
    ) -> None:
        self._name = name
        self._build = build
        self._supervisor = supervisor
        self._sessions = sessions
        self._programs = programs
        self._memory_limit = memory_limit
        self._simulated = simulated

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeReply:
        """Who the board is."""
        runtimes = [
            pb.Runtime(
                name=name,
                version=said.get("version", ""),
                devices=said.get("devices", ()),
                error=said.get("error", ""),
                profile_tool=said.get("profile_tool", ""),
            )
            for name, said in sorted(self._supervisor.describe().items())
        ]
        current = self._sessions.current
        return pb.DescribeReply(
            board_id=f"{machine.board_id()}/{self._name}",
            name=self._name,
            agent_version=agent_version(),
            protocol=wire.PROTOCOL,
            machine=machine.machine(),
            runtimes=runtimes,
            clock_ns=clock.now_ns(),
            wall_ns=time.time_ns(),
            fence=self._sessions.fence,
            holder=_holder(current) if current else None,
            memory_limit_bytes=self._memory_limit,
            readings=machine.readings(),
            simulated=self._simulated,
            build=self._build,
        )

    def Clock(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[pb.ClockPong]:
        """Answer each ping with the clock."""
        for _ in requests:
            yield pb.ClockPong(clock_ns=clock.now_ns())

    def Logs(self, request: pb.LogsRequest, context: grpc.ServicerContext) -> Iterator[pb.LogLine]:
        """Lines of the workers' stderr, or a long error, which needs no session: nobody else knows its name."""
        if request.error:
            for piece in wire.KEPT_ERRORS.pieces(request.error):
                yield pb.LogLine(text=piece)
            return
        session = _session(self._sessions, context)
        number = 0
        while context.is_active():
            self._sessions.require(session)
            lines = self._supervisor.logs.after(number, wait_s=1.0 if request.follow else 0.0)
            number = lines[-1][0] if lines else number
            for _, stamp, program_id, text in lines:
                if request.program_id in ("", program_id):
                    yield pb.LogLine(clock_ns=stamp, program_id=program_id, text=text)
            if not request.follow:
                return

    def Counters(self, request: pb.CountersRequest, context: grpc.ServicerContext) -> Iterator[pb.CounterSample]:
        """Look at the board again and again."""
        session = _session(self._sessions, context)
        if not MIN_PERIOD_MS <= request.period_ms <= MAX_PERIOD_MS:
            raise UsageError(f"a period of counters is {MIN_PERIOD_MS} to {MAX_PERIOD_MS} ms")
        ended = threading.Event()
        if not context.add_callback(ended.set):
            return
        with Counters(self._programs.worker_pids) as counters:
            due = time.monotonic()
            while self._sessions.current is session and not ended.is_set():
                if time.monotonic() >= due:
                    yield counters.look()
                    # A board that cannot keep up leaves looks out; it never makes up for them.
                    due = max(due + request.period_ms / 1000, time.monotonic())
                # Not longer than this after its session does it end, however rarely it looks.
                ended.wait(min(max(due - time.monotonic(), 0.0), _NOTICE_S))


class SessionService:
    """Hold: one stream is one session."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._waiting = threading.Semaphore(MAX_WAITING)

    def Hold(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[pb.HoldReply]:
        """Open, keep alive, end."""
        first = next(iter(requests), None)
        if first is None or first.WhichOneof("kind") != "open":
            raise UsageError("the first message of Hold must open a session")
        said: queue.SimpleQueue[pb.HoldReply | None] = queue.SimpleQueue()

        def on_end(reason: str) -> None:
            said.put(pb.HoldReply(over=pb.SessionOver(reason=reason)))
            said.put(None)

        session = yield from self._opened(first.open, context, on_end)
        listener = threading.Thread(target=self._listen, args=(requests, session, said), daemon=True)
        listener.start()
        try:
            opened = pb.SessionOpened(token=session.token, fence=session.fence, ttl_s=session.ttl_s)
            yield pb.HoldReply(opened=opened)
            while (reply := said.get()) is not None:
                yield reply
        finally:
            self._sessions.end(session, "its owner left")

    def _opened(self, wanted: pb.SessionOpen, context: grpc.ServicerContext, on_end: Any) -> Any:
        """Wait for the device, telling who has it; returns the session."""
        deadline = time.monotonic() + max(wanted.wait_s, 0.0)
        owner, purpose = wanted.owner[:_SHORT] or "somebody", wanted.purpose[:_SHORT]
        if not self._waiting.acquire(blocking=False):
            raise BoardBusy(f"{MAX_WAITING} others are waiting for this board already", hint="try again later")
        try:
            while context.is_active():
                session = self._sessions.open(owner, purpose, wanted.ttl_s or 10.0, wanted.fence, on_end)
                if session:
                    return session
                current = self._sessions.current
                if current and time.monotonic() >= deadline:
                    raise BoardBusy(
                        f"{current.owner} has the board ({current.purpose or 'no purpose given'})",
                        hint="wait longer with --wait",
                    )
                if current:
                    yield pb.HoldReply(waiting=pb.SessionWaiting(holder=_holder(current)))
                self._sessions.wait_free(min(1.0, max(deadline - time.monotonic(), 0.01)))
        finally:
            self._waiting.release()
        raise SessionEnded("whoever asked for the session is gone")

    def _listen(self, requests: Iterator[Any], session: Session, said: queue.SimpleQueue[pb.HoldReply | None]) -> None:
        try:
            for _ in requests:
                session.heard_at = time.monotonic()
                said.put(pb.HoldReply(alive=pb.KeepAlive()))
        except Exception:
            pass  # the stream broke: the session ends as if it had been closed
        self._sessions.end(session, "its owner left")


class BlobService:
    """Missing, Put, Get."""

    def __init__(self, store: BlobStore, sessions: Sessions) -> None:
        self._store = store
        self._sessions = sessions

    def Missing(self, request: pb.MissingRequest, context: grpc.ServicerContext) -> pb.MissingReply:
        """Which blobs are not here."""
        _session(self._sessions, context)
        absent = [wanted for wanted in dict.fromkeys(request.digests) if not self._store.has(wanted)]
        missing = [pb.MissingBlob(digest=one, have_bytes=self._store.partial_size(one)) for one in absent]
        return pb.MissingReply(missing=missing)

    def Put(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[pb.PutReply]:
        """Store blobs."""
        session = _session(self._sessions, context)
        for message in requests:
            self._sessions.require(session)
            if not isinstance(message, pb.PutRequest) or message.WhichOneof("kind") != "start":
                raise UsageError("a blob begins with a PutStart")
            start = message.start
            if self._store.has(start.digest):
                _skip(requests, start.size - start.offset)
            else:
                with self._store.upload(start.digest, start.size, start.offset) as upload:
                    while upload.missing:
                        data = next(requests, None)
                        if data is None:
                            return
                        if not isinstance(data, memoryview) or not data.nbytes:
                            raise UsageError(f"{upload.missing} bytes of {start.digest} are missing")
                        self._sessions.require(session)
                        upload.write(data)
                    upload.finish()
            yield pb.PutReply(digest=start.digest)

    def Get(self, request: pb.GetRequest, context: grpc.ServicerContext) -> Iterator[pb.GetReply | bytes]:
        """Read a blob."""
        session = _session(self._sessions, context)
        path = self._store.path(request.digest)
        size = path.stat().st_size
        yield pb.GetReply(start=pb.GetStart(size=size))
        with path.open("rb") as file:
            file.seek(min(request.offset, size))
            while piece := file.read(wire.CHUNK):
                self._sessions.require(session)
                yield from wire.data_messages(memoryview(piece))


class ProgramService:
    """Load, Invoke, Unload."""

    def __init__(self, programs: Programs, sessions: Sessions) -> None:
        self._programs = programs
        self._sessions = sessions

    def Load(self, request: pb.LoadRequest, context: grpc.ServicerContext) -> pb.LoadReply:
        """Load a program."""
        return self._programs.load(_session(self._sessions, context), request)

    def Invoke(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[pb.InvokeReply | bytes]:
        """Run programs, one call after another."""
        session = _session(self._sessions, context)
        for message in requests:
            if not isinstance(message, pb.InvokeRequest) or message.WhichOneof("kind") != "start":
                raise UsageError("a call begins with an InvokeStart")
            with self._programs.called(session, message.start) as loaded:
                incoming = self._programs.incoming(loaded, message.start)
                while incoming.wants_data:
                    data = next(requests, None)
                    if not isinstance(data, memoryview):
                        raise UsageError("the streamed data of the inputs is missing")
                    incoming.add(data)
                if incoming.streamed:
                    check = next(requests, None)
                    if not isinstance(check, pb.InvokeRequest) or check.WhichOneof("kind") != "digests":
                        raise UsageError("the digests of the streamed inputs are missing")
                    incoming.verify(list(check.digests.digests))
                done, streams = self._programs.invoke(loaded, incoming, message.start)
                yield pb.InvokeReply(done=done)
                hashers = [StreamHasher() for _ in streams]
                for stream, hasher in zip(streams, hashers, strict=True):
                    hasher.update(stream)
                    yield from wire.data_messages(stream)
                if streams:
                    yield pb.InvokeReply(digests=pb.Digests(digests=[hasher.digest() for hasher in hashers]))

    def Unload(self, request: pb.UnloadRequest, context: grpc.ServicerContext) -> pb.UnloadReply:
        """End a program."""
        self._programs.unload(_session(self._sessions, context), request.program_id)
        return pb.UnloadReply()


def _session(sessions: Sessions, context: grpc.ServicerContext) -> Session:
    metadata = dict(context.invocation_metadata())
    return sessions.check(str(metadata.get(wire.SESSION_KEY, "")))


def _skip(requests: Iterator[Any], size: int) -> None:
    while size > 0 and isinstance(data := next(requests, None), memoryview) and data.nbytes:
        size -= data.nbytes


def _holder(session: Session) -> pb.Holder:
    held = time.monotonic() - session.opened_at
    return pb.Holder(owner=session.owner, purpose=session.purpose, fence=session.fence, held_s=held)
