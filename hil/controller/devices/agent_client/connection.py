"""Connection to an agent, with a session and two streams: Hold reserves the device, Invoke runs programs.

All errors of calls become hil errors here.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict

from hil import errors
from hil.controller.devices.agent_client import answers
from hil.controller.devices.agent_client.call import Call, CallFailed
from hil.controller.devices.agent_client.calls import OPEN_S, AgentCalls
from hil.controller.devices.board_client import AgentEndpoint, Invocation
from hil.controller.devices.guard import Guard
from hil.core import clock
from hil.core.digest import Hasher, StreamHasher
from hil.core.results import Part
from hil.core.tensors import Array
from hil.protocol import versions, wire, wire_errors
from hil.protocol.v1 import agent_pb2 as pb

# The agent acknowledges keep-alives and reports every second to waiting clients. After this silence it is gone or
# hangs.
SILENCE_S = 15.0
# gRPC's text for a call that a busy server refused: HTTP/2's REFUSED_STREAM (RFC 9113, 8.7).
_REFUSED = "RST_STREAM with error code 7"
_LATER = "retry in a moment"
_ALIVE_S = 3.75
# The two streams of a session may report the end in either order.
_REASON_S = 1.0
# Shortest time between two reports of a busy board.
_REPORT_S = 0.5
# How long closing a session waits for the agent to process it.
_END_S = 2.0
# After ending a session, the agent ends the calls within this time, each with an error.
_GOODBYE_S = 3.0
# Time limit for each step of a transfer: a chunk of 1 MiB, or a whole shorter message.
STALL_S = 60.0
# Slowest supported link. Bulk data must be faster, because the agent may announce a false size.
_SLOWEST_BYTES_S, _SLOWEST_BULK_BYTES_S = 10_000, 1_000_000
_BULK_BYTES = 64 << 20


def transfer_limit_s(size: int) -> float:
    """Return the time limit in seconds for transferring ``size`` bytes over a link."""
    bulk = max(size - _BULK_BYTES, 0)
    return STALL_S + (size - bulk) / _SLOWEST_BYTES_S + bulk / _SLOWEST_BULK_BYTES_S


class Hold:
    """Stream that reserves the device for a session. A thread sends keep-alives until :meth:`close`.

    Args:
        call: The Hold call.
        on_wait: Called with the current holder while waiting for the device.
        on_silence: Called when the agent stops responding.
        on_end: Called with the session's token if the stream ends without :meth:`close`. The agent also ends the
            session's other calls, but the clients of these calls might not be notified.
    """

    def __init__(
        self,
        call: Call,
        opening: pb.SessionOpen,
        on_wait: Callable[[str], None],
        on_silence: Callable[[], object],
        on_end: Callable[[str], object],
    ) -> None:
        self.over = self.token = ""  # ``over``: why the session was ended; "" while it is open
        self._on_silence, self._on_end = on_silence, on_end
        self._call = call
        self._sending = threading.Lock()
        self._closed, self._closing = threading.Event(), threading.Event()
        self._guard = Guard(self._silence)
        try:
            opened = self._opened(opening, on_wait)
        except BaseException:
            self._guard.close()
            self._call.cancel()
            raise
        self.token, self.fence = opened.token, opened.fence
        threads = [
            threading.Thread(target=work, args=(opened.ttl_s,), daemon=True, name="hil-session")
            for work in (self._keep_alive, self._listen)
        ]
        for thread in threads:
            thread.start()
        self._listener = threads[1]

    @property
    def silent(self) -> bool:
        """Whether the agent stopped responding."""
        return self._guard.expired

    @property
    def ended(self) -> bool:
        """Whether the session is known to be over."""
        return self._closed.is_set()

    def _opened(self, opening: pb.SessionOpen, on_wait: Callable[[str], None]) -> pb.SessionOpened:
        """Wait for the device, at most ``wait_s`` of the request, and only while the agent responds."""
        deadline = time.monotonic() + max(opening.wait_s, 0.0) + SILENCE_S
        # An agent reports every second. More messages would only flood the terminal.
        next_report = 0.0
        self._guard.within(SILENCE_S)
        try:
            self._call.send(pb.HoldRequest(open=opening))
            while (reply := self._call.receive()) is not None:
                kind = reply.WhichOneof("kind")
                if kind == "opened":
                    answers.check_opened(reply.opened, opening.fence)
                    self._guard.within(SILENCE_S)
                    given: pb.SessionOpened = reply.opened
                    return given
                if kind != "waiting":
                    raise answers.broken("unexpected message before the session opened")
                text = answers.waiting_text(reply.waiting)
                if time.monotonic() > deadline:
                    raise errors.BoardBusy(text, hint="raise --wait")
                if time.monotonic() >= next_report:
                    next_report = time.monotonic() + _REPORT_S
                    on_wait(text)
                self._guard.within(SILENCE_S)
        except CallFailed as error:
            if self.silent:
                raise errors.BoardLost(f"the agent did not respond for {SILENCE_S:g} s") from error
            raise
        raise errors.BoardLost("the board closed the new session immediately")

    def wait_over(self) -> None:
        """Wait until :attr:`over` is known, after another stream reported the end of the session."""
        self._closed.wait(_REASON_S)

    def _silence(self) -> None:
        self._call.cancel()
        if self.token:
            self._on_silence()

    def heard(self) -> None:
        """Restart the silence timeout after data on another stream of the connection."""
        self._guard.heard()

    def _keep_alive(self, ttl_s: float) -> None:
        # The listener ends the session after the call has failed.
        with contextlib.suppress(CallFailed, errors.ProtocolBroken):
            while not self._closed.wait(max(min(ttl_s / 4, _ALIVE_S), 0.1)):
                with self._sending:
                    self._call.send(pb.HoldRequest(keep_alive=pb.KeepAlive()))

    def _listen(self, _: float) -> None:
        try:
            while (reply := self._call.receive()) is not None:
                self._guard.within(SILENCE_S)
                if reply.WhichOneof("kind") == "over":
                    self.over = reply.over.reason
        except (CallFailed, errors.ProtocolBroken):
            pass  # the next call of the session reports the loss
        self._guard.close()
        self._closed.set()
        if not self._closing.wait(_GOODBYE_S):
            self._on_end(self.token)

    def close(self) -> None:
        """End the session and wait for the agent to confirm it."""
        self._closing.set()
        self._guard.close()
        self._closed.set()
        # An agent that does not read may block the sending thread.
        if self._sending.acquire(timeout=_END_S):
            ending = Guard(self._call.cancel)
            ending.within(_END_S)
            with contextlib.suppress(CallFailed, errors.ProtocolBroken):
                self._call.end()
            ending.close()
            self._sending.release()
            self._listener.join(_END_S)
        self._call.cancel()


class InvokeStream:
    """Stream for consecutive calls of programs.

    Args:
        call: The Invoke call.
        heard: Called on every sign of life.

    Attributes:
        fallback: Same as in :class:`AgentCalls`, for this call.
    """

    def __init__(self, call: Call, heard: Callable[[], None]) -> None:
        self.broken = False
        self.fallback = ""
        self._call = call
        self._heard = heard
        self._guard = Guard(call.cancel)

    def call(
        self,
        start: pb.InvokeStart,
        streams: list[memoryview],
        into: Mapping[str, Array],
        limit_s: float,
        names: Sequence[str] | None,
        most: int,
    ) -> Invocation:
        """Make one call. Input data follows the start message. Large outputs are received ``into`` matching arrays.

        Args:
            limit_s: Seconds from the last byte sent to the response.
            names: Output names of the program; None if unknown.
            most: Maximum total size of the outputs in bytes.
        """
        begin = clock.now_ns()
        try:
            self._guard.within(STALL_S if streams else limit_s)
            self._call.send(pb.InvokeRequest(start=start))
            if streams:
                self._send(streams)
                self._guard.within(limit_s)
            iterations = 0 if start.HasField("profile") or start.recall else start.iterations
            done = answers.call_of(self._answer(), iterations, names, most)
            answered = clock.now_ns()
            outputs = self._outputs(done, into)
        except BaseException as error:
            self.close()
            if isinstance(error, CallFailed) and self._guard.expired:
                raise errors.BoardLost("the board did not respond in time") from error
            raise
        finally:
            self._guard.within(float("inf"))
        end = clock.now_ns()
        return Invocation(
            outputs,
            tuple(zip(done.start_ns, done.end_ns, strict=True)),
            done.warmup_ns,
            (begin, end),
            (done.received_ns, done.ready_ns),
            done.peak_memory_bytes,
            done.cpu_ns,
            (end - answered) / 1e9,
            MessageToDict(done.state, preserving_proto_field_name=True) if done.HasField("state") else {},
            tuple(Part(part.device, part.nodes, tuple(part.names), part.elsewhere) for part in done.placement.parts)
            if done.HasField("placement")
            else None,
            answers.repetition_of(done, start, outputs),
        )

    def close(self) -> None:
        """Cancel the stream."""
        self.broken = True
        self._guard.close()
        self._call.cancel()

    def _send(self, streams: list[memoryview]) -> None:
        """Send the data of the inputs, then their digests."""
        hashers = [Hasher() for _ in streams]
        deadline = time.monotonic() + transfer_limit_s(sum(stream.nbytes for stream in streams))
        for stream, hasher in zip(streams, hashers, strict=True):
            for piece in wire.pieces(stream):
                self._guard.within(min(STALL_S, deadline - time.monotonic()))
                self._call.send(piece)
                self._heard()
                hasher.update(piece)  # hash while the agent reads
        self._call.send(pb.InvokeRequest(digests=pb.Digests(digests=[hasher.digest() for hasher in hashers])))

    def _answer(self) -> Any:
        """Return the next message, which is required."""
        if (message := self._call.receive()) is None:
            raise errors.BoardLost("the board ended the call without a response")
        return message

    def _outputs(self, done: pb.InvokeDone, into: Mapping[str, Array]) -> dict[str, Array]:
        outputs: dict[str, Array] = {}
        computed: list[str] = []
        deadline = time.monotonic() + transfer_limit_s(sum(tensor.streamed for tensor in done.outputs))
        for tensor in done.outputs:
            buffer = None
            if tensor.WhichOneof("payload") == "streamed":
                buffer, value = self._stream(tensor, into.get(tensor.name), deadline)
                computed.append(value)
            outputs[tensor.name] = answers.output_of(tensor, buffer)
        if computed:
            self._guard.within(STALL_S)
            answers.check_digests(self._answer(), computed)
        return outputs

    def _stream(self, tensor: pb.Tensor, given: Array | None, deadline: float) -> tuple[Any, str]:
        """Receive a tensor's bytes into a given array or a new array. Return the bytes and their digest."""
        size = tensor.streamed
        fits = given is not None and given.nbytes == size and given.flags.c_contiguous and given.flags.writeable
        target = given.reshape(-1).view(np.uint8) if fits and given is not None else answers.room_for(size)
        view = memoryview(target.data)
        return view, receive(self._call, view, StreamHasher(), self._guard, deadline, self._heard)


def receive(
    call: Call,
    view: memoryview,
    hasher: StreamHasher,
    guard: Guard,
    deadline: float,
    heard: Callable[[], None],
) -> str:
    """Fill ``view`` with data until ``deadline`` (monotonic clock). Return the digest."""
    at = 0
    while at < view.nbytes:
        guard.within(min(STALL_S, deadline - time.monotonic()))
        count = call.receive_into(view[at:])
        heard()
        hasher.update(view[at : at + count])
        at += count
    return hasher.digest()


TTL_S = 15.0
_CONNECT_S = 10.0
# A live agent may take longer to describe itself: it imports the runtimes first.
_ANSWER_S = 60.0
_WHOLE_S = 10.0
# How long a busy agent takes to accept a call.
_PRESENCE_S = 2.0
_LOOK_S = 5.0
_FREE = ("Describe", "Clock")  # methods that need no session


class AgentConnection:
    """Connection to one agent and the session on it. ``over``: see :class:`Link`."""

    def __init__(self, target: AgentEndpoint, board: str, *, over: Callable[[], str] = lambda: "") -> None:
        self.board = board
        self._lease_over = over
        self._target = target
        self._calls = AgentCalls(target)
        self._closed = False
        self._hold: Hold | None = None
        self._invokes: dict[int, InvokeStream] = {}

    def describe(self, timeout: float = _CONNECT_S) -> pb.DescribeReply:
        """Return the board's description.

        Waits at most ``timeout`` seconds for the connection. Raises BoardUnreachable after the timeout.
        """
        try:
            try:
                reply = self._ask(timeout)
            except CallFailed as error:
                if error.code != "DEADLINE_EXCEEDED" or not self._calls.is_answered(_PRESENCE_S):
                    raise
                reply = self._ask_again(timeout)
        except CallFailed as error:
            lost = self._translated(error)
            if type(lost) is errors.BoardLost:
                raise errors.BoardUnreachable(
                    f"no agent responds at {self._target.address}: {error.text}",
                    board=self.board,
                    hint="start an agent on the board: python -m hil.agent --listen ... --store ...",
                ) from error
            raise lost from error
        with self._seam():
            reply = answers.given(reply)
        versions.check_agent(reply.protocol, reply.agent_version, self.board)
        with self._seam():
            answers.check_description(reply)
        described: pb.DescribeReply = reply
        return described

    def _ask(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout

        def ask() -> Any:
            left = max(deadline - time.monotonic(), 0.1)
            with self._guarded("Describe", left, waits=True) as (call, _):
                call.send(pb.DescribeRequest())
                return call.receive()

        try:
            return ask()
        except CallFailed as error:
            if not _was_cut(error):
                raise
        import tenacity

        # A new connection may be lost at once while the board starts, so retry.
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_was_cut),
            stop=tenacity.stop_after_delay(max(deadline - time.monotonic(), 0.0)),
            wait=tenacity.wait_fixed(0.1),
            reraise=True,
        )
        return retrying(ask)

    def _ask_again(self, waited: float) -> Any:
        """Retry Describe while the agent replies to Clock calls. Such an agent is busy and does not hang."""
        over = threading.Event()

        def watch() -> None:
            patience = max(SILENCE_S - waited, _LOOK_S)
            try:
                while not over.is_set():
                    self._pings(1, patience)
                    patience = SILENCE_S
                    over.wait(_LOOK_S)
            except (CallFailed, errors.ProtocolBroken):
                call.cancel()

        with self._guarded("Describe", _ANSWER_S) as (call, _):
            threading.Thread(target=watch, daemon=True, name="hil-watch").start()
            try:
                call.send(pb.DescribeRequest())
                return call.receive()
            finally:
                over.set()

    def _pings(self, count: int, limit_s: float) -> list[clock.Ping]:
        """Ping the board's clock. Raises CallFailed."""
        taken = []
        with self._guarded("Clock", limit_s) as (call, _):
            for _ in range(count):
                sent = clock.now_ns()
                call.send(pb.ClockPing())
                if (pong := call.receive()) is None:
                    raise answers.broken("a response to a clock request is missing")
                taken.append(clock.Ping(sent, pong.clock_ns, clock.now_ns()))
            call.end()
            call.receive()
        return taken

    def open_session(
        self,
        purpose: str,
        *,
        fence: int = 0,
        wait_s: float = 60.0,
        ttl_s: float = TTL_S,
        on_wait: Callable[[str], None],
    ) -> int:
        """Reserve the device unless this client already holds the device: a client may be handed over with a session.

        Returns the session's fence. ``on_wait`` receives the current holder while waiting. Raises BoardBusy after
        ``wait_s`` seconds.
        """
        if (hold := self._hold) is not None and (not self.has_session or fence not in (0, hold.fence)):
            self.close_session()
            if hold.silent:  # the silence ended all calls
                self._calls = AgentCalls(self._target)
        with self._seam():
            if self._hold is None:
                opening = pb.SessionOpen(owner=_me(), purpose=purpose, ttl_s=ttl_s, fence=fence, wait_s=wait_s)
                calls = self._calls
                self._hold = Hold(calls.begin("Hold"), opening, on_wait, calls.close, calls.cancel)
        given: int = self._hold.fence
        return given

    @property
    def has_session(self) -> bool:
        """Whether this client is known to hold the device."""
        return self._hold is not None and not self._hold.ended and not self._hold.silent

    def close_session(self) -> None:
        """Release the device."""
        for stream in list(self._invokes.values()):
            stream.close()
        self._invokes.clear()
        if self._hold:
            self._hold.close()
            self._hold = None

    def close(self) -> None:
        """Close the session and the connection."""
        self.close_session()
        self._closed = True
        self._calls.close()

    def _heard(self) -> None:
        """Note a sign of life on another stream. Replies on the session's stream may be delayed behind bulk data."""
        if self._hold:
            self._hold.heard()

    @contextlib.contextmanager
    def _seam(self, stage: str = "") -> Iterator[None]:
        if self._closed:
            raise errors.BoardLost("the connection was closed", stage=stage, board=self.board)
        if self._hold and self._hold.silent:
            raise self._silent().located(stage=stage)
        try:
            yield
        except CallFailed as error:
            raise self._translated(error, stage).located(stage=stage, board=self.board) from error
        except errors.HilError as error:
            raise error.located(stage=stage, board=self.board) from error.__cause__

    @contextlib.contextmanager
    def _guarded(self, method: str, limit_s: float, *, waits: bool = False) -> Iterator[tuple[Call, Guard]]:
        """Begin a call under a guard, and cancel the call at the end of the block.

        Args:
            limit_s: Initial limit in seconds until the next progress, including the time to accept the call.
            waits: See :meth:`AgentCalls.begin`.
        """
        until = time.monotonic() + limit_s
        call = self._begin(method, limit_s, waits=waits)
        with self._watched(call, max(until - time.monotonic(), 0.0)) as guard:
            try:
                yield call, guard
            finally:
                call.cancel()

    @contextlib.contextmanager
    def _watched(self, call: Call, limit_s: float) -> Iterator[Guard]:
        """Guard an open call: it must progress within ``limit_s``, then within the limits set on the guard."""
        guard = Guard(call.cancel)
        guard.within(limit_s)
        try:
            yield guard
        except CallFailed as error:
            if guard.expired:
                raise CallFailed("DEADLINE_EXCEEDED", "timed out waiting for a response") from error
            raise
        finally:
            guard.close()

    def _begin(self, method: str, limit_s: float = OPEN_S, *, waits: bool = False) -> Call:
        """Begin a call, with the session's token if the method needs a session."""
        token = "" if method in _FREE or self._hold is None else self._hold.token
        return self._calls.begin(method, token, within_s=min(limit_s, OPEN_S), waits=waits)

    def _asked(self, method: str, request: Any) -> Call:
        """Begin a call and send the only message. The caller waits for the response."""
        call = self._begin(method)
        with self._watched(call, STALL_S):
            call.send(request)
        return call

    def _answered(self, method: str, request: Any, limit_s: float) -> Any:
        """Make a call with one message and return the response, which must arrive within ``limit_s``."""
        with self._guarded(method, limit_s) as (call, _):
            call.send(request)
            return answers.given(call.receive())

    def _silent(self) -> errors.HilError:
        detail = f"no data from the agent for {SILENCE_S:g} s"
        return errors.BoardLost("the board stopped responding", board=self.board, detail=detail)

    def _translated(self, error: CallFailed, stage: str = "") -> errors.HilError:
        """Translate a failed call to a hil error. Uses the remote side's typed error if present."""
        if found := wire_errors.from_bytes(error.error, among=wire_errors.AGENT_KINDS, whole=self._whole):
            if isinstance(found, errors.UsageError) and not self._target.faults:
                # hil checked the user's input before, so a usage error from the agent is not the user's error.
                kind = {"load": errors.LoadFailed, "run": errors.RunFailed}.get(stage, errors.ProtocolBroken)
                found = found.as_kind(kind)
            if isinstance(found, errors.SessionEnded):
                if self._hold:
                    self._hold.wait_over()
                found = self._ended() or found
            elif isinstance(found, errors.BoardBusy) and (why := self._lease_over()):
                found = errors.SessionEnded(f"the lease ended: {why}")
            return found.located(board=self.board)
        if error.code == "UNAUTHENTICATED":
            return errors.BoardRefused(f"the agent refused the connection: {error.text}", board=self.board)
        if error.code == "UNIMPLEMENTED":
            return errors.BoardError(f"the server at {self._target.address} is not a hil agent", board=self.board)
        if self._hold and self._hold.silent:
            return self._silent()
        if error.code == "UNAVAILABLE" and _REFUSED in error.text:
            return errors.BoardBusy("the agent has reached the limit of active calls", board=self.board, hint=_LATER)
        if (ended := self._ended()) is not None:
            return ended.located(board=self.board)
        how = "did not respond in time" if error.code == "DEADLINE_EXCEEDED" else "stopped responding"
        return errors.BoardLost(f"the board {how}", board=self.board, detail=f"{error.code}: {error.text}")

    def _whole(self, log: str) -> str:
        """Return the full text of a truncated error, or "" if the agent does not respond."""
        pieces: list[str] = []
        failed = contextlib.suppress(CallFailed, errors.ProtocolBroken)
        with failed, self._guarded("Logs", _WHOLE_S) as (call, _):
            call.send(pb.LogsRequest(error=log))
            while (line := call.receive()) is not None and sum(map(len, pieces)) <= wire_errors.WHOLE_MAX:
                pieces.append(line.text)
        return "".join(pieces)[: wire_errors.WHOLE_MAX]

    def _ended(self) -> errors.SessionEnded | None:
        """Return the error for an ended session or lease, with the reason.

        Return None if neither the session nor the lease is known to have ended.
        """
        if why := self._lease_over():
            return errors.SessionEnded(f"the lease ended: {why}")
        if self._hold and self._hold.over:
            return errors.SessionEnded(f"the session was ended: {self._hold.over}")
        return None


def _was_cut(error: BaseException) -> bool:
    return isinstance(error, CallFailed) and error.code == "UNAVAILABLE"


def _me() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
