"""The agent: its four services, its two transports, and the start and stop."""

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
from hil.agent.board_claim import BoardClaim, Holder
from hil.agent.calls import Calls
from hil.agent.data_server import DataServer
from hil.agent.grpc_on_demand import GrpcOnDemand
from hil.agent.machine import Counters
from hil.agent.power import list_meters, stream_power
from hil.agent.programs import Policy, Programs
from hil.agent.session import CallContext, Journal, Session, Sessions
from hil.agent.stack import collect_stack
from hil.agent.store import BlobStore, Quota
from hil.agent.store_lock import StoreLock, store_error
from hil.agent.supervisor import Supervisor
from hil.core import clock, own_version
from hil.core.digest import Hasher
from hil.core.files import open_file
from hil.errors import BoardBusy, BoardUnfit, HilError, SessionEnded, UsageError
from hil.protocol import wire
from hil.protocol.data_connection import get_data_path
from hil.protocol.listening import check_listen, check_tls_files, refuse_if_served
from hil.protocol.v1 import agent_pb2 as pb
from hil.protocol.wire_errors import WORKER_KINDS

if TYPE_CHECKING:
    from hil.agent.grpc_server import GrpcServer

MAX_WAITING = 8
MAX_DIGESTS = 20_000
MIN_PERIOD_MS = 10
MAX_PERIOD_MS = 60_000
_NOTICE_SECONDS = 0.5
_SHORT = 200
_UNREAD = 16


@dataclass(frozen=True)
class AgentConfig:
    """Settings of an agent."""

    listen: str  # ``unix:PATH`` or ``HOST:PORT`` (port 0 selects a free port)
    store: Path  # directory of blobs, programs, the fence and the journal
    name: str = ""
    build: str = ""  # build id of the deployment, for Describe
    quota: Quota = field(default_factory=Quota)  # size above which the store evicts blobs
    memory_limit: int = 0  # maximum memory of a program in bytes; 0 means the machine's memory
    token: str = ""
    # Server certificate and key, PEM files; required for addresses other than loopback.
    tls_key: Path | None = None
    tls_cert: Path | None = None
    tls_client_ca: Path | None = None  # require clients to present a certificate of this authority (mutual TLS)
    # If set, load only programs from bundles that one of these ed25519 keys has signed.
    trusted_keys: tuple[bytes, ...] = ()
    runtimes: dict[str, str] = field(default_factory=runtimes.list_runtimes)  # name -> ``module:Class``
    runtime_options: dict[str, Any] = field(default_factory=dict)  # passed to every runtime
    simulated: list[str] = field(default_factory=list)  # simulated parts of this board, for Describe
    make_store: Callable[[Path, Quota], BlobStore] = BlobStore
    claim_board: bool = False  # make agents of other logins wait while a session is open
    claim_name: str = ""  # name of the claimed device; "" claims the machine
    # Description of the board, if it is not the machine of this process.
    machine: pb.Machine | None = None
    worker_kinds: frozenset[type[HilError]] = WORKER_KINDS  # error classes that workers may report
    # Fork the fork servers from this process, which must be single-threaded and have imported the runtimes.
    fork_ahead: bool = False


class Agent:
    """Running agent. ``address`` is the actual listening address."""

    def __init__(self, config: AgentConfig) -> None:
        check_listen(
            config.listen,
            protected=bool(config.tls_key and config.tls_cert and config.token),
            needs="TLS and a token",
            hint="set --tls-cert, --tls-key and --token-file",
        )
        check_tls_files(
            cert=config.tls_cert,
            key=config.tls_key,
            ca=config.tls_client_ca,
            ca_needs_cert=True,
            listens=[config.listen],
        )
        self._supervisor = Supervisor(config.runtimes, config.runtime_options, config.memory_limit, config.worker_kinds)
        # Lock the store before the first change: a different agent may use the directory.
        self._store_lock = StoreLock(config.store)
        try:
            if config.fork_ahead:
                # Fork before creating the store: creating a simulator's store starts a clock and threads.
                self._supervisor.fork_ahead()
            self._serve(config)
        except BaseException:
            self._supervisor.close()
            self._store_lock.release()
            raise

    def _serve(self, config: AgentConfig) -> None:
        try:
            store = config.make_store(config.store, config.quota)
        except OSError as error:
            raise store_error(error, config.store) from error
        journal = Journal(config.store / "journal.jsonl")
        claim = BoardClaim(config.claim_name) if config.claim_board else None
        self._sessions = Sessions(config.store / "fence", self._end_session, journal, claim)
        policy = Policy(config.trusted_keys) if config.trusted_keys else None
        self._programs = Programs(store, self._supervisor, self._sessions, config.memory_limit, policy)
        admission = Admission(self._sessions)
        servicers: dict[str, object] = {
            "Board": BoardService(config, self._supervisor, self._sessions, self._programs, store),
            "Sessions": SessionService(self._sessions, admission.goodbyes),
            "Blobs": BlobService(store, self._sessions),
            "Programs": ProgramService(self._programs, self._sessions),
        }
        calls = Calls(admission, servicers, config.token)
        self._grpc: GrpcServer | GrpcOnDemand
        self._data: DataServer | None = None

        def start_grpc(listen: str) -> GrpcServer:
            from hil.agent.grpc_server import GrpcServer

            files = {"cert": config.tls_cert, "key": config.tls_key, "client_ca": config.tls_client_ca}
            return GrpcServer(listen, calls, **files)

        if path := get_data_path(config.listen):
            listen = config.listen.removeprefix("unix:")
            refuse_if_served(listen)
            # Start the data socket first: a client that finds the agent's socket looks for the data socket.
            try:
                self._data = DataServer(path, calls)
            except OSError as error:
                # If the path is too long for a socket, use only gRPC. Clients would mistake an existing file for the
                # data socket.
                if os.path.lexists(path):
                    raise UsageError(
                        f"cannot listen on unix:{path}: {error.strerror or error}",
                        hint="a file exists at this path: remove it, or use a different address",
                    ) from error
            if self._data is not None:
                try:
                    self._grpc = GrpcOnDemand(listen, admission.silent, start_grpc)
                except BaseException:
                    self._data.close()
                    raise
                self.address = config.listen
                return
        self._grpc = start_grpc(config.listen)
        self.address = self._grpc.address

    def get_idle_seconds(self) -> float:
        """Return the number of seconds without an open session."""
        return self._sessions.get_idle_seconds()

    def stop_spares(self) -> None:
        """Stop spare workers and fork servers while no session is open."""
        self._sessions.run_while_free(self._supervisor.stop_spares)
        # Return freed memory to the system, if the C library supports it.
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    def stop(self) -> None:
        """Stop serving and stop all workers."""
        self._supervisor.retire()
        self._grpc.close()
        self._programs.unload_all(SessionEnded("the agent was stopped"))
        if self._data:
            self._data.close()
        self._supervisor.close()
        self._store_lock.release()

    def _end_session(self) -> None:
        if self._programs.unload_all(SessionEnded("the session that ran this program has ended")):
            self._programs.prepare_next_session()


class BoardService:
    """Board service: Describe, Clock, Logs, Counters, Power."""

    def __init__(
        self, config: AgentConfig, supervisor: Supervisor, sessions: Sessions, programs: Programs, store: BlobStore
    ) -> None:
        self._config, self._store = config, store
        self._name = config.name or os.uname().nodename
        self._supervisor = supervisor
        self._sessions = sessions
        self._programs = programs
        self._lock = threading.Lock()
        self._describing = futures.Future[dict[str, dict[str, Any]]]()
        self._describing.set_result({})

    def Describe(self, request: pb.DescribeRequest, context: CallContext) -> pb.DescribeReply:
        """Return the board's description."""
        keys = ("version", "devices", "error", "profile_tool", "device_details")
        runtimes = [
            pb.Runtime(name=name, **{key: described[key] for key in keys if key in described})
            for name, described in sorted(self._describe_runtimes(context).items())
        ]
        holder = self._sessions.get_holder()
        return pb.DescribeReply(
            board_id=f"{machine.get_board_id()}/{self._name}",
            name=self._name,
            agent_version=own_version(),
            protocol=wire.PROTOCOL,
            machine=self._config.machine or machine.describe_machine(),
            runtimes=runtimes,
            clock_ns=clock.get_time_ns(),
            wall_ns=time.time_ns(),
            fence=self._sessions.fence,
            holder=_make_holder_message(holder) if holder else None,
            memory_limit_bytes=self._config.memory_limit,
            readings=[] if self._config.machine else machine.collect_readings(),
            simulated=self._config.simulated,
            build=self._config.build,
            store_room_bytes=self._store.count_free_bytes(),
            stack=() if self._config.machine else collect_stack(),
            # The sensors of this machine do not measure another machine.
            meters=() if self._config.machine else list_meters(),
        )

    def _describe_runtimes(self, context: CallContext) -> dict[str, dict[str, Any]]:
        """Return the description of each runtime.

        The descriptions may be slow, so stop waiting when the client disconnects.
        """
        with self._lock:
            if self._describing.done():
                self._describing = futures.Future()
                threading.Thread(target=_describe, args=(self._supervisor, self._describing), daemon=True).start()
            found = self._describing
        while context.is_active():
            with contextlib.suppress(futures.TimeoutError):
                return found.result(_NOTICE_SECONDS)
        raise SessionEnded("the caller disconnected")

    def Clock(self, requests: Iterator[Any], context: CallContext) -> Iterator[pb.ClockPong]:
        """Respond to each ping with the clock."""
        for _ in requests:
            yield pb.ClockPong(clock_ns=clock.get_time_ns())

    def Logs(self, request: pb.LogsRequest, context: CallContext) -> Iterator[pb.LogLine]:
        """Yield lines of the workers' stderr.

        If the request contains the id of a long error, yield that error's text instead.
        """
        session = self._sessions.find_session(context)
        if request.error:
            yield from (pb.LogLine(text=piece) for piece in wire.KEPT_ERRORS.iter_pieces(request.error))
            return
        number = 0
        while context.is_active():
            self._sessions.require(session)
            lines = self._supervisor.logs.wait_for_lines(number, wait_s=1.0 if request.follow else 0.0)
            number = lines[-1][0] if lines else number
            for _, stamp, program_id, text in lines:
                if request.program_id in ("", program_id):
                    yield pb.LogLine(clock_ns=stamp, program_id=program_id, text=text)
            if not request.follow:
                return

    def Counters(self, request: pb.CountersRequest, context: CallContext) -> Iterator[pb.CounterSample]:
        """Yield counter samples periodically."""
        session = self._sessions.find_session(context)
        if not MIN_PERIOD_MS <= request.period_ms <= MAX_PERIOD_MS:
            raise UsageError(f"the counter period must be {MIN_PERIOD_MS} to {MAX_PERIOD_MS} ms")
        with Counters(self._programs.list_worker_pids) as counters:
            due = time.monotonic()
            while self._sessions.current is session and context.is_active():
                if time.monotonic() >= due:
                    yield counters.read_counters()
                    # A board that cannot keep up skips samples instead of catching up.
                    due = max(due + request.period_ms / 1000, time.monotonic())
                # Notice within this time that the session or the call has ended, even with a long period.
                time.sleep(min(max(due - time.monotonic(), 0.0), _NOTICE_SECONDS))

    def Power(self, request: pb.PowerRequest, context: CallContext) -> Iterator[pb.PowerSamples]:
        """Yield samples of a power sensor."""
        session = self._sessions.find_session(context)
        if self._config.machine:
            raise BoardUnfit("the board has no sensors that its agent can read")
        yield from stream_power(request, lambda: self._sessions.current is session and context.is_active())


_Replies: TypeAlias = "queue.SimpleQueue[pb.HoldReply | HilError | None]"


class SessionService:
    """Session service. A Hold stream represents a session.

    Args:
        sessions: sessions of the agent.
        goodbyes: admits the streams of ended sessions, and cancels streams that clients do not close.
    """

    def __init__(self, sessions: Sessions, goodbyes: Room) -> None:
        self._sessions = sessions
        self._goodbyes = goodbyes
        self._waiting = threading.Semaphore(MAX_WAITING)

    def Hold(self, requests: Iterator[Any], context: CallContext) -> Iterator[pb.HoldReply]:
        """Open a session, keep it alive, and end it with the stream."""
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

        session = yield from self._open_session(first.open, context, on_end)
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
            self._sessions.end(session, "the owner disconnected")
            if leaving.is_set():
                self._goodbyes.leave(context)

    def _open_session(self, wanted: pb.SessionOpen, context: CallContext, on_end: Any) -> Any:
        """Open a session. While the device is in use, tell the client who uses it. Return the session."""
        if not wanted.wait_s >= 0:
            raise UsageError(f"invalid waiting time for a board: {wanted.wait_s:g} s")
        deadline = time.monotonic() + wanted.wait_s
        owner, purpose = wanted.owner[:_SHORT] or "somebody", wanted.purpose[:_SHORT]

        def try_open() -> Session | None:
            return self._sessions.open(owner, purpose, wanted.ttl_s or 10.0, wanted.fence, on_end)

        # A client that gets the device immediately does not use a waiting slot.
        if session := try_open():
            return session
        if not self._waiting.acquire(blocking=False):
            raise BoardBusy(f"{MAX_WAITING} callers are already waiting for this board", hint="retry later")
        try:
            while context.is_active():
                if session := try_open():
                    return session
                late = time.monotonic() >= deadline
                holder = self._sessions.get_holder()
                if late and not holder and (session := try_open()):
                    return session
                if late:
                    holder = holder or Holder("an unresponsive process", "", 0.0)
                    raise BoardBusy(
                        f"{holder.owner} is using the board ({holder.purpose or 'no purpose given'})",
                        hint="wait longer with --wait",
                    )
                if holder:
                    yield pb.HoldReply(waiting=pb.SessionWaiting(holder=_make_holder_message(holder)))
                self._sessions.wait_free(min(1.0, max(deadline - time.monotonic(), 0.01)))
        finally:
            self._waiting.release()
        raise SessionEnded("the caller of the session disconnected")

    def _listen(self, requests: Iterator[Any], session: Session, replies: _Replies) -> None:
        try:
            for _ in requests:
                session.heard_at = time.monotonic()
                # Do not queue more replies for a client that does not read them.
                if replies.qsize() < _UNREAD:
                    replies.put(pb.HoldReply(alive=pb.KeepAlive()))
        except HilError as error:
            replies.put(error)
        except Exception:
            pass  # the stream broke: end the session as after a normal close
        self._sessions.end(session, "the owner disconnected")


class BlobService:
    """Blob service: Missing, Put, Get."""

    def __init__(self, store: BlobStore, sessions: Sessions) -> None:
        self._store = store
        self._sessions = sessions

    def Missing(self, request: pb.MissingRequest, context: CallContext) -> pb.MissingReply:
        """Return the digests of missing blobs, with the number of bytes that were already uploaded."""
        self._sessions.find_session(context)
        if len(request.digests) > MAX_DIGESTS:
            raise UsageError(f"the request contains {len(request.digests)} digests, maximum {MAX_DIGESTS}")
        self._store.hold(request.digests)
        absent = [wanted for wanted in dict.fromkeys(request.digests) if not self._store.has(wanted)]
        missing = [pb.MissingBlob(digest=one, have_bytes=self._store.get_partial_size(one)) for one in absent]
        return pb.MissingReply(missing=missing)

    def Put(self, requests: Iterator[Any], context: CallContext) -> Iterator[pb.PutReply]:
        """Store uploaded blobs."""
        session = self._sessions.find_session(context)
        for message in requests:
            self._sessions.require(session)
            if not isinstance(message, pb.PutRequest) or message.WhichOneof("kind") != "start":
                raise UsageError("a blob upload must begin with a PutStart message")
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
                        self._sessions.record_message(session)
                        upload.write(data)
                    upload.finish()
            yield pb.PutReply(digest=start.digest)

    def Get(self, request: pb.GetRequest, context: CallContext) -> Iterator[pb.GetReply | memoryview]:
        """Stream a blob's content."""
        session = self._sessions.find_session(context)
        path = self._store.path(request.digest)
        size = path.stat().st_size
        yield pb.GetReply(start=pb.GetStart(size=size))
        with open_file(path) as file:
            file.seek(min(request.offset, size))
            while piece := file.read(wire.CHUNK):
                self._sessions.require(session)
                yield memoryview(piece)


class ProgramService:
    """Program service: Load, Invoke, Unload."""

    def __init__(self, programs: Programs, sessions: Sessions) -> None:
        self._programs = programs
        self._sessions = sessions

    def Load(self, request: pb.LoadRequest, context: CallContext) -> pb.LoadReply:
        """Load a program."""
        return self._programs.load(self._sessions.find_session(context), request)

    def Invoke(self, requests: Iterator[Any], context: CallContext) -> Iterator[pb.InvokeReply | memoryview]:
        """Run programs, in the order of the calls."""
        session = self._sessions.find_session(context)
        for message in requests:
            if not isinstance(message, pb.InvokeRequest) or message.WhichOneof("kind") != "start":
                raise UsageError("a call must begin with an InvokeStart")
            with self._programs.lock_program(session, message.start, context.is_active) as loaded:
                incoming = self._programs.reserve_inputs(loaded, message.start)
                while incoming.wants_data:
                    data = next(requests, None)
                    if not isinstance(data, memoryview):
                        raise UsageError("the streamed data of an input is missing")
                    self._sessions.record_message(session)
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
                    for piece in wire.split_pieces(stream):
                        # Hash the sent bytes instead of the shared memory, which a running program may still modify.
                        data = memoryview(bytes(piece))
                        yield data
                        hasher.update(data)  # hash while the client reads the data
                if streams:
                    yield pb.InvokeReply(digests=pb.Digests(digests=[hasher.digest() for hasher in hashers]))

    def Unload(self, request: pb.UnloadRequest, context: CallContext) -> pb.UnloadReply:
        """Unload a program."""
        self._programs.unload(self._sessions.find_session(context), request.program_id)
        return pb.UnloadReply()


def _describe(supervisor: Supervisor, asked: futures.Future[dict[str, dict[str, Any]]]) -> None:
    try:
        asked.set_result(supervisor.describe())
    except BaseException as error:
        asked.set_exception(error)


def _skip(requests: Iterator[Any], size: int) -> None:
    while size > 0 and isinstance(data := next(requests, None), memoryview) and data.nbytes:
        size -= data.nbytes


def _make_holder_message(holder: Holder) -> pb.Holder:
    return pb.Holder(owner=holder.owner, purpose=holder.purpose, fence=holder.fence, held_s=holder.held_s)
