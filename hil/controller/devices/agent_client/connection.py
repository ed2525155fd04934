"""Connection to an agent: its description, the session on it, and guarded calls.

All errors of calls become hil errors here.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from hil import errors
from hil.controller.devices.agent_client import answers
from hil.controller.devices.agent_client.call import Call, CallFailed
from hil.controller.devices.agent_client.calls import OPEN_SECONDS, AgentCalls
from hil.controller.devices.agent_client.session_streams import SILENCE_SECONDS, STALL_SECONDS, Hold, InvokeStream
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.guard import Guard
from hil.core import clock
from hil.protocol import versions, wire_errors
from hil.protocol.v1 import agent_pb2 as pb

TTL_SECONDS = 15.0
_CONNECT_SECONDS = 10.0
# Timeout in seconds for the description of a busy agent. The agent may still be importing the runtimes.
_ANSWER_SECONDS = 60.0
_FULL_ERROR_SECONDS = 10.0
# Timeout in seconds for a busy agent to accept a call.
_PRESENCE_SECONDS = 2.0
_LOOK_SECONDS = 5.0
# gRPC's text for a call that a busy server refused: HTTP/2's REFUSED_STREAM (RFC 9113, 8.7).
_REFUSED = "RST_STREAM with error code 7"
_LATER = "retry in a moment"
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

    def describe(self, timeout: float = _CONNECT_SECONDS) -> pb.DescribeReply:
        """Return the board's description.

        Waits at most ``timeout`` seconds for the connection. Raises BoardUnreachable after the timeout.
        """
        try:
            try:
                reply = self._ask(timeout)
            except CallFailed as error:
                if error.code != "DEADLINE_EXCEEDED" or not self._calls.is_answered(_PRESENCE_SECONDS):
                    raise
                reply = self._ask_again(timeout)
        except CallFailed as error:
            lost = self._translate_error(error)
            if type(lost) is errors.BoardLost:
                raise errors.BoardUnreachable(
                    f"no agent responds at {self._target.address}: {error.text}",
                    board=self.board,
                    hint="start an agent on the board: python -m hil.agent --listen ... --store ...",
                ) from error
            raise lost from error
        with self._translate_errors():
            reply = answers.require_reply(reply)
        versions.check_agent(reply.protocol, reply.agent_version, self.board)
        with self._translate_errors():
            answers.check_description(reply)
        described: pb.DescribeReply = reply
        return described

    def _ask(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout

        def ask() -> Any:
            left = max(deadline - time.monotonic(), 0.1)
            with self._guard_call("Describe", left, waits=True) as (call, _):
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
            patience = max(SILENCE_SECONDS - waited, _LOOK_SECONDS)
            try:
                while not over.is_set():
                    self._ping_clock(1, patience)
                    patience = SILENCE_SECONDS
                    over.wait(_LOOK_SECONDS)
            except (CallFailed, errors.ProtocolBroken):
                call.cancel()

        with self._guard_call("Describe", _ANSWER_SECONDS) as (call, _):
            threading.Thread(target=watch, daemon=True, name="hil-watch").start()
            try:
                call.send(pb.DescribeRequest())
                return call.receive()
            finally:
                over.set()

    def _ping_clock(self, count: int, limit_s: float) -> list[clock.Ping]:
        """Ping the board's clock. Raises CallFailed."""
        taken = []
        with self._guard_call("Clock", limit_s) as (call, _):
            for _ in range(count):
                sent = clock.get_time_ns()
                call.send(pb.ClockPing())
                if (pong := call.receive()) is None:
                    raise answers.make_protocol_error("a response to a clock request is missing")
                taken.append(clock.Ping(sent, pong.clock_ns, clock.get_time_ns()))
            call.end()
            call.receive()
        return taken

    def open_session(
        self,
        purpose: str,
        *,
        fence: int = 0,
        wait_s: float = 60.0,
        ttl_s: float = TTL_SECONDS,
        on_wait: Callable[[str], None],
    ) -> int:
        """Reserve the device.

        Does nothing if this client already has a session, because a client can be passed on with a session.

        Returns the session's fence. ``on_wait`` receives the current holder while waiting. Raises BoardBusy after
        ``wait_s`` seconds.
        """
        if (hold := self._hold) is not None and (not self.has_session or fence not in (0, hold.fence)):
            self.close_session()
            if hold.silent:  # the silence ended all calls
                self._calls = AgentCalls(self._target)
        with self._translate_errors():
            if self._hold is None:
                opening = pb.SessionOpen(owner=_name_user(), purpose=purpose, ttl_s=ttl_s, fence=fence, wait_s=wait_s)
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

    def _restart_silence(self) -> None:
        """Restart the silence timeout after data on another stream: bulk data may delay the session's replies."""
        if self._hold:
            self._hold.restart_silence()

    @contextlib.contextmanager
    def _translate_errors(self, stage: str = "") -> Iterator[None]:
        if self._closed:
            raise errors.BoardLost("the connection was closed", stage=stage, board=self.board)
        if self._hold and self._hold.silent:
            raise self._make_silence_error().locate(stage=stage)
        try:
            yield
        except CallFailed as error:
            raise self._translate_error(error, stage).locate(stage=stage, board=self.board) from error
        except errors.HilError as error:
            raise error.locate(stage=stage, board=self.board) from error.__cause__

    @contextlib.contextmanager
    def _guard_call(self, method: str, limit_s: float, *, waits: bool = False) -> Iterator[tuple[Call, Guard]]:
        """Begin a call under a guard, and cancel the call at the end of the block.

        Args:
            limit_s: Initial limit in seconds until the next progress, including the time to accept the call.
            waits: See :meth:`AgentCalls.begin`.
        """
        until = time.monotonic() + limit_s
        call = self._begin(method, limit_s, waits=waits)
        with self._watch_call(call, max(until - time.monotonic(), 0.0)) as guard:
            try:
                yield call, guard
            finally:
                call.cancel()

    @contextlib.contextmanager
    def _watch_call(self, call: Call, limit_s: float) -> Iterator[Guard]:
        """Guard an open call: it must progress within ``limit_s``, then within the limits set on the guard."""
        guard = Guard(call.cancel)
        guard.set_timeout(limit_s)
        try:
            yield guard
        except CallFailed as error:
            if guard.expired:
                raise CallFailed("DEADLINE_EXCEEDED", "timed out waiting for a response") from error
            raise
        finally:
            guard.close()

    def _begin(self, method: str, limit_s: float = OPEN_SECONDS, *, waits: bool = False) -> Call:
        """Begin a call, with the session's token if the method needs a session."""
        token = "" if method in _FREE or self._hold is None else self._hold.token
        return self._calls.begin(method, token, within_s=min(limit_s, OPEN_SECONDS), waits=waits)

    def _send_request(self, method: str, request: Any) -> Call:
        """Begin a call and send the only message. The caller waits for the response."""
        call = self._begin(method)
        with self._watch_call(call, STALL_SECONDS):
            call.send(request)
        return call

    def _call_unary(self, method: str, request: Any, limit_s: float) -> Any:
        """Make a call with one message and return the response, which must arrive within ``limit_s``."""
        with self._guard_call(method, limit_s) as (call, _):
            call.send(request)
            return answers.require_reply(call.receive())

    def _make_silence_error(self) -> errors.HilError:
        detail = f"no data from the agent for {SILENCE_SECONDS:g} s"
        return errors.BoardLost("the board stopped responding", board=self.board, detail=detail)

    def _translate_error(self, error: CallFailed, stage: str = "") -> errors.HilError:
        """Translate a failed call to a hil error. Uses the remote side's typed error if present."""
        if found := wire_errors.decode_error(error.error, among=wire_errors.AGENT_KINDS, whole=self._fetch_full_error):
            if isinstance(found, errors.UsageError) and not self._target.faults:
                # hil has already checked the user's input, so a usage error from the agent is not the user's fault.
                kind = {"load": errors.LoadFailed, "run": errors.RunFailed}.get(stage, errors.ProtocolBroken)
                found = found.as_kind(kind)
            if isinstance(found, errors.SessionEnded):
                if self._hold:
                    self._hold.wait_over()
                found = self._find_end_error() or found
            elif isinstance(found, errors.BoardBusy) and (why := self._lease_over()):
                found = errors.SessionEnded(f"the lease ended: {why}")
            return found.locate(board=self.board)
        if error.code == "UNAUTHENTICATED":
            return errors.BoardRefused(f"the agent refused the connection: {error.text}", board=self.board)
        if error.code == "UNIMPLEMENTED":
            return errors.BoardError(f"the server at {self._target.address} is not a hil agent", board=self.board)
        if self._hold and self._hold.silent:
            return self._make_silence_error()
        if error.code == "UNAVAILABLE" and _REFUSED in error.text:
            return errors.BoardBusy("the agent has reached the limit of active calls", board=self.board, hint=_LATER)
        if (ended := self._find_end_error()) is not None:
            return ended.locate(board=self.board)
        how = "did not respond in time" if error.code == "DEADLINE_EXCEEDED" else "stopped responding"
        return errors.BoardLost(f"the board {how}", board=self.board, detail=f"{error.code}: {error.text}")

    def _fetch_full_error(self, log: str) -> str:
        """Return the full text of a truncated error, or "" if the agent does not respond."""
        pieces: list[str] = []
        failed = contextlib.suppress(CallFailed, errors.ProtocolBroken)
        with failed, self._guard_call("Logs", _FULL_ERROR_SECONDS) as (call, _):
            call.send(pb.LogsRequest(error=log))
            while (line := call.receive()) is not None and sum(map(len, pieces)) <= wire_errors.WHOLE_MAX:
                pieces.append(line.text)
        return "".join(pieces)[: wire_errors.WHOLE_MAX]

    def _find_end_error(self) -> errors.SessionEnded | None:
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


def _name_user() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
