"""The agent: its four services, the two ways by which they are called, its life from start to stop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from hil.agent import machine, runtimes
from hil.agent.admission import Admission, Room
from hil.agent.data_server import DataServer
from hil.agent.grpc_on_demand import GrpcOnDemand
from hil.agent.machine import Counters
from hil.agent.programs import Policy, Programs
from hil.agent.session import CallContext, Journal, Session, Sessions
from hil.agent.store import BlobStore, StoreLock
from hil.agent.supervisor import Supervisor
from hil.core import clock, own_version
from hil.core.digest import Hasher
from hil.errors import BoardBusy, HilError, SessionEnded, UsageError
from hil.protocol import wire
from hil.protocol.data_connection import data_path
from hil.protocol.listening import check_listen, check_tls_files
from hil.protocol.v1 import agent_pb2 as pb

if TYPE_CHECKING:
    from hil.agent.grpc_server import GrpcServer

MAX_WAITING = 8
MAX_DIGESTS = 20_000
MIN_PERIOD_MS = 10
MAX_PERIOD_MS = 60_000
_NOTICE_S = 0.5
_SHORT = 200
_UNREAD = 16


@dataclass(frozen=True)
class AgentConfig:
    """How an agent runs."""

    listen: str  # ``unix:PATH`` or ``HOST:PORT`` (port 0: any free one)
    store: Path  # folder of blobs, programs, the fence and the journal
    name: str = ""
    build: str = ""  # what was deployed, for Describe
    quota_bytes: int = 0  # most that blobs may take; 0 is no limit
    memory_limit: int = 0  # most that a program may take, in bytes; 0 is the machine's own
    token: str = ""
    # tls_key, tls_cert: the server's, PEM files; needed beyond loopback.
    tls_key: Path | None = None
    tls_cert: Path | None = None
    tls_client_ca: Path | None = None  # with it, clients must show a certificate of this authority (mutual TLS)
    # with them, only programs of bundles that one of these ed25519 keys has signed are loaded.
    trusted_keys: tuple[bytes, ...] = ()
    runtimes: dict[str, str] = field(default_factory=runtimes.known)  # name -> ``module:Class``
    runtime_options: dict[str, Any] = field(default_factory=dict)  # handed to every runtime in its worker
    simulated: list[str] = field(default_factory=list)  # what of this board is simulated, for Describe
    make_store: Callable[[Path, int], BlobStore] = BlobStore
    # this process has one thread and the runtimes imported: their fork servers are forked from it.
    fork_ahead: bool = False


class Agent:
    """A running agent. ``address`` is where it really listens."""

    def __init__(self, config: AgentConfig) -> None:
        check_listen(
            config.listen,
            protected=bool(config.tls_key and config.tls_cert and config.token),
            needs="TLS and a token",
            hint="--tls-cert, --tls-key and --token-file",
        )
        check_tls_files(
            cert=config.tls_cert,
            key=config.tls_key,
            ca=config.tls_client_ca,
            ca_needs_cert=True,
            listens=[config.listen],
        )
        self._supervisor = Supervisor(config.runtimes, config.runtime_options, config.memory_limit)
        # Before anything in the store is touched: it may be another agent's.
        self._store_lock = StoreLock(config.store)
        try:
            if config.fork_ahead:
                # Before the store is made: with a simulator's come its clock and threads.
                self._supervisor.fork_ahead()
            self._serve(config)
        except BaseException:
            self._supervisor.close()
            self._store_lock.release()
            raise

    def _serve(self, config: AgentConfig) -> None:
        try:
            store = config.make_store(config.store, config.quota_bytes)
        except OSError as error:
            raise UsageError(f"the store {config.store} cannot be used: {error.strerror}") from error
        self._sessions = Sessions(config.store / "fence", self._session_over, Journal(config.store / "journal.jsonl"))
        policy = Policy(config.trusted_keys) if config.trusted_keys else None
        self._programs = Programs(store, self._supervisor, self._sessions, config.memory_limit, policy)
        admission = Admission(self._sessions)
        servicers = {
            "Board": BoardService(config, self._supervisor, self._sessions, self._programs),
            "Sessions": SessionService(self._sessions, admission.goodbyes),
            "Blobs": BlobService(store, self._sessions),
            "Programs": ProgramService(self._programs, self._sessions),
        }
        self._grpc: GrpcServer | GrpcOnDemand
        self._data: DataServer | None = None

        def start_grpc(listen: str) -> GrpcServer:
            from hil.agent.grpc_server import GrpcServer

            files = {"cert": config.tls_cert, "key": config.tls_key, "client_ca": config.tls_client_ca}
            return GrpcServer(listen, admission, servicers, config.token, **files)

        if path := data_path(config.listen):
            self._grpc = GrpcOnDemand(config.listen.removeprefix("unix:"), admission.silent, start_grpc)
            self.address = config.listen
            try:
                self._data = DataServer(path, admission, servicers, config.token)
                return
            except OSError as error:
                # On a path that is too long everything goes over gRPC. Callers would take what is there for ours.
                if os.path.lexists(path):
                    raise UsageError(
                        f"cannot listen on unix:{path}: {error.strerror or error}",
                        hint="something is in its place: remove it, or listen elsewhere",
                    ) from error
            finally:
                if self._data is None:
                    self._grpc.close()
        self._grpc = start_grpc(config.listen)
        self.address = self._grpc.address

    def idle_s(self) -> float:
        """For how many seconds no session has been open."""
        return self._sessions.idle_s()

    def rest(self) -> None:
        """End what is kept ready for the next program, while nobody has the device."""
        self._sessions.while_free(self._supervisor.rest)
        # What importing and past work have left free is given back, where the C library can.
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    def stop(self) -> None:
        """Stop serving and end every worker."""
        self._supervisor.retire()
        self._grpc.close()
        self._programs.unload_all(SessionEnded("the agent was stopped"))
        if self._data:
            self._data.close()
        self._supervisor.close()
        self._store_lock.release()

    def _session_over(self) -> None:
        if self._programs.unload_all(SessionEnded("the session that ran this program has ended")):
            self._programs.stand_by()


class BoardService:
    """Describe, Clock, Logs, Counters."""

    def __init__(self, config: AgentConfig, supervisor: Supervisor, sessions: Sessions, programs: Programs) -> None:
        self._config = config
        self._name = config.name or os.uname().nodename
        self._supervisor = supervisor
        self._sessions = sessions
        self._programs = programs
        self._lock = threading.Lock()
        self._describing = futures.Future[dict[str, dict[str, Any]]]()
        self._describing.set_result({})

    def Describe(self, request: pb.DescribeRequest, context: CallContext) -> pb.DescribeReply:
        """Who the board is."""
        keys = ("version", "devices", "error", "profile_tool")
        runtimes = [
            pb.Runtime(name=name, **{key: described[key] for key in keys if key in described})
            for name, described in sorted(self._runtimes(context).items())
        ]
        current = self._sessions.current
        return pb.DescribeReply(
            board_id=f"{machine.board_id()}/{self._name}",
            name=self._name,
            agent_version=own_version(),
            protocol=wire.PROTOCOL,
            machine=machine.machine(),
            runtimes=runtimes,
            clock_ns=clock.now_ns(),
            wall_ns=time.time_ns(),
            fence=self._sessions.fence,
            holder=_holder(current) if current else None,
            memory_limit_bytes=self._config.memory_limit,
            readings=machine.readings(),
            simulated=self._config.simulated,
            build=self._config.build,
        )

    def _runtimes(self, context: CallContext) -> dict[str, dict[str, Any]]:
        """What there is to run programs with. Finding out may take long, and whoever does not wait may go."""
        with self._lock:
            if self._describing.done():
                self._describing = futures.Future()
                threading.Thread(target=_describe, args=(self._supervisor, self._describing), daemon=True).start()
            found = self._describing
        while context.is_active():
            with contextlib.suppress(futures.TimeoutError):
                return found.result(_NOTICE_S)
        raise SessionEnded("whoever asked is gone")

    def Clock(self, requests: Iterator[Any], context: CallContext) -> Iterator[pb.ClockPong]:
        """Answer each ping with the clock."""
        for _ in requests:
            yield pb.ClockPong(clock_ns=clock.now_ns())

    def Logs(self, request: pb.LogsRequest, context: CallContext) -> Iterator[pb.LogLine]:
        """Lines of the workers' stderr, or a long error."""
        session = self._sessions.of_call(context)
        if request.error:
            yield from (pb.LogLine(text=piece) for piece in wire.KEPT_ERRORS.pieces(request.error))
            return
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

    def Counters(self, request: pb.CountersRequest, context: CallContext) -> Iterator[pb.CounterSample]:
        """Look at the board again and again."""
        session = self._sessions.of_call(context)
        if not MIN_PERIOD_MS <= request.period_ms <= MAX_PERIOD_MS:
            raise UsageError(f"a period of counters is {MIN_PERIOD_MS} to {MAX_PERIOD_MS} ms")
        with Counters(self._programs.worker_pids) as counters:
            due = time.monotonic()
            while self._sessions.current is session and context.is_active():
                if time.monotonic() >= due:
                    yield counters.look()
                    # A board that cannot keep up leaves looks out; it never makes up for them.
                    due = max(due + request.period_ms / 1000, time.monotonic())
                # Not longer than this after its session or its caller does it end, however rarely it looks.
                time.sleep(min(max(due - time.monotonic(), 0.0), _NOTICE_S))


_Replies: TypeAlias = "queue.SimpleQueue[pb.HoldReply | HilError | None]"


class SessionService:
    """Hold: one stream is one session.

    Args:
        goodbyes: takes the streams of sessions that are over, and ends those that do not end by themselves.
    """

    def __init__(self, sessions: Sessions, goodbyes: Room) -> None:
        self._sessions = sessions
        self._goodbyes = goodbyes
        self._waiting = threading.Semaphore(MAX_WAITING)

    def Hold(self, requests: Iterator[Any], context: CallContext) -> Iterator[pb.HoldReply]:
        """Open, keep alive, end."""
        first = next(iter(requests), None)
        if first is None or first.WhichOneof("kind") != "open":
            raise UsageError("the first message of Hold must open a session")
        replies: _Replies = queue.SimpleQueue()
        leaving = threading.Event()

        def on_end(reason: str) -> None:
            try:
                self._goodbyes.enter(context)
                leaving.set()
            except BoardBusy:
                context.cancel()
            replies.put(pb.HoldReply(over=pb.SessionOver(reason=reason)))
            replies.put(None)

        session = yield from self._opened(first.open, context, on_end)
        listener = threading.Thread(target=self._listen, args=(requests, session, replies), daemon=True)
        listener.start()
        try:
            opened = pb.SessionOpened(token=session.token, fence=session.fence, ttl_s=session.ttl_s)
            yield pb.HoldReply(opened=opened)
            while (reply := replies.get()) is not None:
                if isinstance(reply, HilError):
                    raise reply
                yield reply
        finally:
            self._sessions.end(session, "its owner left")
            if leaving.is_set():
                self._goodbyes.leave(context)

    def _opened(self, wanted: pb.SessionOpen, context: CallContext, on_end: Any) -> Any:
        """Wait for the device, telling who has it; returns the session."""
        if not wanted.wait_s >= 0:
            raise UsageError(f"nobody can wait {wanted.wait_s:g} s for a board")
        deadline = time.monotonic() + wanted.wait_s
        owner, purpose = wanted.owner[:_SHORT] or "somebody", wanted.purpose[:_SHORT]

        def opened() -> Session | None:
            return self._sessions.open(owner, purpose, wanted.ttl_s or 10.0, wanted.fence, on_end)

        # Whoever takes the device does not wait for it, and is in nobody's way.
        if session := opened():
            return session
        if not self._waiting.acquire(blocking=False):
            raise BoardBusy(f"{MAX_WAITING} others are waiting for this board already", hint="try again later")
        try:
            while context.is_active():
                if session := opened():
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

    def _listen(self, requests: Iterator[Any], session: Session, replies: _Replies) -> None:
        try:
            for _ in requests:
                session.heard_at = time.monotonic()
                # Whoever does not read the answers gets no more of them.
                if replies.qsize() < _UNREAD:
                    replies.put(pb.HoldReply(alive=pb.KeepAlive()))
        except HilError as error:
            replies.put(error)
        except Exception:
            pass  # the stream broke: the session ends as if it had been closed
        self._sessions.end(session, "its owner left")


class BlobService:
    """Missing, Put, Get."""

    def __init__(self, store: BlobStore, sessions: Sessions) -> None:
        self._store = store
        self._sessions = sessions

    def Missing(self, request: pb.MissingRequest, context: CallContext) -> pb.MissingReply:
        """Which blobs are not here."""
        self._sessions.of_call(context)
        if len(request.digests) > MAX_DIGESTS:
            raise UsageError(f"{len(request.digests)} digests are asked for at once, and {MAX_DIGESTS} are the most")
        absent = [wanted for wanted in dict.fromkeys(request.digests) if not self._store.has(wanted)]
        missing = [pb.MissingBlob(digest=one, have_bytes=self._store.partial_size(one)) for one in absent]
        return pb.MissingReply(missing=missing)

    def Put(self, requests: Iterator[Any], context: CallContext) -> Iterator[pb.PutReply]:
        """Store blobs."""
        session = self._sessions.of_call(context)
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
                        self._sessions.heard(session)
                        upload.write(data)
                    upload.finish()
            yield pb.PutReply(digest=start.digest)

    def Get(self, request: pb.GetRequest, context: CallContext) -> Iterator[pb.GetReply | memoryview]:
        """Read a blob."""
        session = self._sessions.of_call(context)
        path = self._store.path(request.digest)
        size = path.stat().st_size
        yield pb.GetReply(start=pb.GetStart(size=size))
        with path.open("rb") as file:
            file.seek(min(request.offset, size))
            while piece := file.read(wire.CHUNK):
                self._sessions.require(session)
                yield memoryview(piece)


class ProgramService:
    """Load, Invoke, Unload."""

    def __init__(self, programs: Programs, sessions: Sessions) -> None:
        self._programs = programs
        self._sessions = sessions

    def Load(self, request: pb.LoadRequest, context: CallContext) -> pb.LoadReply:
        """Load a program."""
        return self._programs.load(self._sessions.of_call(context), request)

    def Invoke(self, requests: Iterator[Any], context: CallContext) -> Iterator[pb.InvokeReply | memoryview]:
        """Run programs, one call after another."""
        session = self._sessions.of_call(context)
        for message in requests:
            if not isinstance(message, pb.InvokeRequest) or message.WhichOneof("kind") != "start":
                raise UsageError("a call begins with an InvokeStart")
            with self._programs.called(session, message.start, context.is_active) as loaded:
                incoming = self._programs.incoming(loaded, message.start)
                while incoming.wants_data:
                    data = next(requests, None)
                    if not isinstance(data, memoryview):
                        raise UsageError("the streamed data of the inputs is missing")
                    self._sessions.heard(session)
                    incoming.add(data)
                if incoming.streamed:
                    check = next(requests, None)
                    if not isinstance(check, pb.InvokeRequest) or check.WhichOneof("kind") != "digests":
                        raise UsageError("the digests of the streamed inputs are missing")
                    incoming.verify(list(check.digests.digests))
                reply, streams, ended = self._programs.invoke(loaded, incoming, message.start)
                try:
                    yield reply
                finally:
                    ended()
                hashers = [Hasher() for _ in streams]
                for stream, hasher in zip(streams, hashers, strict=True):
                    for piece in wire.pieces(stream):
                        # What is sent, and not the memory again: a program that still writes there would make it
                        # look as if it had been damaged on its way.
                        data = memoryview(bytes(piece))
                        yield data
                        hasher.update(data)  # while the caller reads it
                if streams:
                    yield pb.InvokeReply(digests=pb.Digests(digests=[hasher.digest() for hasher in hashers]))

    def Unload(self, request: pb.UnloadRequest, context: CallContext) -> pb.UnloadReply:
        """End a program."""
        self._programs.unload(self._sessions.of_call(context), request.program_id)
        return pb.UnloadReply()


def _describe(supervisor: Supervisor, asked: futures.Future[dict[str, dict[str, Any]]]) -> None:
    try:
        asked.set_result(supervisor.describe())
    except BaseException as error:
        asked.set_exception(error)


def _skip(requests: Iterator[Any], size: int) -> None:
    while size > 0 and isinstance(data := next(requests, None), memoryview) and data.nbytes:
        size -= data.nbytes


def _holder(session: Session) -> pb.Holder:
    held = time.monotonic() - session.opened_at
    return pb.Holder(owner=session.owner, purpose=session.purpose, fence=session.fence, held_s=held)
