"""A connection to an agent, its session, and the session's two streams: one holds the device, calls go over the other.

Here the errors of calls become hil's, once.
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
from hil.controller.devices import answers
from hil.controller.devices.board_client import Invocation, Target
from hil.controller.devices.call import Call, CallFailed
from hil.controller.devices.calls import Calls
from hil.controller.devices.guard import Guard
from hil.core import clock
from hil.core.digest import Hasher, StreamHasher
from hil.core.results import Part
from hil.core.tensors import Array
from hil.protocol import wire, wire_errors
from hil.protocol.v1 import agent_pb2 as pb

# An agent answers every keep-alive, and tells each second that somebody waits: after so long it is gone, or hangs.
SILENCE_S = 15.0
# What gRPC says of a call that its server did not take on, having too many: HTTP/2's REFUSED_STREAM (RFC 9113, 8.7).
_REFUSED = "RST_STREAM with error code 7"
_LATER = "try again in a moment"
_ALIVE_S = 3.75
# The two streams of a session may bring the news of its end in either order.
_REASON_S = 1.0
# For so long a session that is closed waits for the agent to know.
_END_S = 2.0
# Data that goes on moves so much each time: a chunk of 1 MiB, or the whole of a shorter message.
STALL_S = 60.0
_SLOWEST_BYTES_S = 10_000


class Hold:
    """The session's stream: opened, kept alive by a thread, ended by close.

    Args:
        call: of Hold.
        on_wait: told who has the device meanwhile.
        on_silence: called when the agent is heard no more.
    """

    def __init__(
        self, call: Call, opening: pb.SessionOpen, on_wait: Callable[[str], None], on_silence: Callable[[], object]
    ) -> None:
        self.over = self.token = ""  # ``over``: why the session was ended, "" while it was not
        self._on_silence = on_silence
        self._call = call
        self._sending = threading.Lock()
        self._closed = threading.Event()
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
        """Whether the agent is heard no more."""
        return self._guard.expired

    @property
    def ended(self) -> bool:
        """Whether the session is over, as far as we have heard."""
        return self._closed.is_set()

    def _opened(self, opening: pb.SessionOpen, on_wait: Callable[[str], None]) -> pb.SessionOpened:
        """Wait for the device, as long as was said, and as the agent tells that it is there."""
        deadline = time.monotonic() + max(opening.wait_s, 0.0) + SILENCE_S
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
                    raise answers.broken("a session begins with something else than that it is open")
                text = answers.waiting_text(reply.waiting)
                if time.monotonic() > deadline:
                    raise errors.BoardBusy(text, hint="wait longer with --wait")
                on_wait(text)
                self._guard.within(SILENCE_S)
        except CallFailed as error:
            if self.silent:
                raise errors.BoardLost(f"the agent says nothing for {SILENCE_S:g} s") from error
            raise
        raise errors.BoardLost("the board closed the session at once")

    def wait_over(self) -> None:
        """Wait until :attr:`over` is known, once the agent has said on another stream that the session was ended."""
        self._closed.wait(_REASON_S)

    def _silence(self) -> None:
        self._call.cancel()
        if self.token:
            self._on_silence()

    def heard(self) -> None:
        """Note that another stream of the same connection brought something."""
        self._guard.heard()

    def _keep_alive(self, ttl_s: float) -> None:
        # Once the call has failed its listener ends the session.
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
            pass  # the next call on the session says that the board is gone
        self._guard.close()
        self._closed.set()

    def close(self) -> None:
        """End the session and wait for the board to know."""
        self._guard.close()
        self._closed.set()
        with self._sending, contextlib.suppress(CallFailed, errors.ProtocolBroken):
            self._call.end()
        self._listener.join(_END_S)
        self._call.cancel()


class InvokeStream:
    """The stream that calls of programs go over, one after another.

    Args:
        call: of Invoke.
        heard: told of each sign of life.
    """

    def __init__(self, call: Call, heard: Callable[[], None]) -> None:
        self.broken = False
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
        """One call: the inputs' data goes after the start message, large outputs go ``into`` arrays where they fit.

        Args:
            limit_s: seconds from the last byte sent to the answer.
            names: of the program's outputs; None where they are not known.
            most: the most bytes that the outputs may take.
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
                raise errors.BoardLost("the board did not answer in time") from error
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
        """No more calls."""
        self.broken = True
        self._guard.close()
        self._call.cancel()

    def _send(self, streams: list[memoryview]) -> None:
        """Send the inputs' data, and its digests after it."""
        hashers = [Hasher() for _ in streams]
        for stream, hasher in zip(streams, hashers, strict=True):
            for piece in wire.pieces(stream):
                self._guard.within(STALL_S)
                self._call.send(piece)
                self._heard()
                hasher.update(piece)  # while the agent reads it
        self._call.send(pb.InvokeRequest(digests=pb.Digests(digests=[hasher.digest() for hasher in hashers])))

    def _answer(self) -> Any:
        """The next message, which has to come."""
        if (message := self._call.receive()) is None:
            raise errors.BoardLost("the board ended the call without an answer")
        return message

    def _outputs(self, done: pb.InvokeDone, into: Mapping[str, Array]) -> dict[str, Array]:
        outputs: dict[str, Array] = {}
        computed: list[str] = []
        deadline = time.monotonic() + STALL_S + sum(tensor.streamed for tensor in done.outputs) / _SLOWEST_BYTES_S
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
        """Receive a tensor's bytes into a given array or a new one; returns them and their digest."""
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
    """Receive as much data as there is room for, until the monotonic clock's ``deadline``; returns its digest."""
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
# An agent that is there may take longer to say what it is: at first it imports its runtimes.
_ANSWER_S = 60.0
_WHOLE_S = 10.0
# What an agent that is busy takes to take a call on.
_PRESENCE_S = 2.0
_LOOK_S = 5.0


class AgentConnection:
    """A connection to one agent and the session on it. ``over``: as of a :class:`Link`."""

    def __init__(self, target: Target, board: str, *, over: Callable[[], str] = lambda: "") -> None:
        self.board = board
        self._lease_over = over
        self._target = target
        self._calls = Calls(target)
        self._closed = False
        self._hold: Hold | None = None
        self._invokes: dict[int, InvokeStream] = {}

    def describe(self, timeout: float = _CONNECT_S) -> pb.DescribeReply:
        """Who the board is; waits for the connection at most ``timeout`` seconds (BoardUnreachable)."""
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
                    f"no agent answers at {self._target.address}: {error.text}",
                    board=self.board,
                    hint="is the agent running there? start one with: python -m hil.agent --listen ... --store ...",
                ) from error
            raise lost from error
        with self._seam():
            reply = answers.given(reply)
        if reply.protocol != wire.PROTOCOL:
            raise errors.BoardError(
                f"the agent speaks protocol {reply.protocol}, this hil {wire.PROTOCOL}",
                board=self.board,
                hint="put the same version of hil on both sides",
            )
        with self._seam():
            answers.check_description(reply)
        described: pb.DescribeReply = reply
        return described

    def _ask(self, timeout: float) -> Any:
        deadline = time.monotonic() + timeout

        def ask() -> Any:
            left = max(deadline - time.monotonic(), 0.1)
            with self._guarded(call := self._calls.begin("Describe", within_s=left, waits=True), left):
                call.send(pb.DescribeRequest())
                return call.receive()

        try:
            return ask()
        except CallFailed as error:
            if not _was_cut(error):
                raise
        import tenacity

        # A connection may be lost just when it is made (a board that comes back): connecting is tried again.
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_was_cut),
            stop=tenacity.stop_after_delay(max(deadline - time.monotonic(), 0.0)),
            wait=tenacity.wait_fixed(0.1),
            reraise=True,
        )
        return retrying(ask)

    def _ask_again(self, waited: float) -> Any:
        """Ask an agent that is busy, for as long as it tells the time meanwhile: one that hangs does not."""
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

        with self._guarded(call := self._calls.begin("Describe"), _ANSWER_S):
            threading.Thread(target=watch, daemon=True, name="hil-watch").start()
            try:
                call.send(pb.DescribeRequest())
                return call.receive()
            finally:
                over.set()

    def _pings(self, count: int, limit_s: float) -> list[clock.Ping]:
        """Ping the board's clock. Raises CallFailed."""
        taken = []
        with self._guarded(call := self._calls.begin("Clock", within_s=limit_s), limit_s):
            for _ in range(count):
                sent = clock.now_ns()
                call.send(pb.ClockPing())
                if (pong := call.receive()) is None:
                    raise answers.broken("it tells the time less often than it was asked")
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
        """Take the device, unless we have it: a client may be handed over with its session.

        Returns the session's fence. ``on_wait`` is told who has the device meanwhile (BoardBusy).
        """
        if (hold := self._hold) is not None and (not self.has_session or fence not in (0, hold.fence)):
            self.close_session()
            if hold.silent:  # our calls ended with it
                self._calls = Calls(self._target)
        with self._seam():
            if self._hold is None:
                opening = pb.SessionOpen(owner=_me(), purpose=purpose, ttl_s=ttl_s, fence=fence, wait_s=wait_s)
                self._hold = Hold(self._calls.begin("Hold"), opening, on_wait, self._calls.close)
        given: int = self._hold.fence
        return given

    @property
    def has_session(self) -> bool:
        """Whether the device is ours, as far as we have heard."""
        return self._hold is not None and not self._hold.ended and not self._hold.silent

    def close_session(self) -> None:
        """Give the device back."""
        for stream in list(self._invokes.values()):
            stream.close()
        self._invokes.clear()
        if self._hold:
            self._hold.close()
            self._hold = None

    def close(self) -> None:
        """End session and connection."""
        self.close_session()
        self._closed = True
        self._calls.close()

    def _heard(self) -> None:
        """Note a sign of life on another stream than the session's own, whose answers may be behind a lot of data."""
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

    def _begin(self, method: str) -> Call:
        """Begin a call of the session."""
        return self._calls.begin(method, self._hold.token if self._hold else "")

    @contextlib.contextmanager
    def _guarded(self, call: Call, limit_s: float) -> Iterator[Guard]:
        """Have the other side of a call go on within ``limit_s``, and then as the guard is told; ends the call."""
        guard = Guard(call.cancel)
        guard.within(limit_s)
        try:
            yield guard
        except CallFailed as error:
            if guard.expired:
                raise CallFailed("DEADLINE_EXCEEDED", "no answer came in time") from error
            raise
        finally:
            guard.close()
            call.cancel()

    def _answered(self, method: str, request: Any, limit_s: float) -> Any:
        """The answer to a call of one message, which has to come within ``limit_s``."""
        call = self._begin(method)
        with self._guarded(call, limit_s):
            call.send(request)
            return answers.given(call.receive())

    def _silent(self) -> errors.HilError:
        detail = f"nothing was heard from its agent for {SILENCE_S:g} s"
        return errors.BoardLost("the board stopped answering", board=self.board, detail=detail)

    def _translated(self, error: CallFailed, stage: str = "") -> errors.HilError:
        """The hil error that a failed call stands for: the far side's own where it sent one."""
        if found := wire_errors.from_bytes(error.error, among=wire_errors.AGENT_KINDS, whole=self._whole):
            if isinstance(found, errors.UsageError) and not self._target.faults:
                # The user's words were checked before, so what an agent calls bad usage is not the user's.
                kind = {"load": errors.LoadFailed, "run": errors.RunFailed}.get(stage, errors.ProtocolBroken)
                found = kind(found.message, hint=found.hint, detail=found.detail)
            if isinstance(found, errors.SessionEnded):
                if self._hold:
                    self._hold.wait_over()
                found = self._ended() or found
            elif isinstance(found, errors.BoardBusy) and (why := self._lease_over()):
                found = errors.SessionEnded(f"the lease ended: {why}")
            return found.located(board=self.board)
        if error.code == "UNAUTHENTICATED":
            return errors.BoardRefused(f"the agent refused us: {error.text}", board=self.board)
        if error.code == "UNIMPLEMENTED":
            return errors.BoardError("what answers there is no agent of hil", board=self.board)
        if self._hold and self._hold.silent:
            return self._silent()
        if error.code == "RESOURCE_EXHAUSTED" or (error.code == "INTERNAL" and "deserializ" in error.text):
            return answers.broken(f"it is too large, or no message of the protocol ({error.text})")
        if error.code == "UNAVAILABLE" and _REFUSED in error.text:
            return errors.BoardBusy("the agent is busy with too many calls", board=self.board, hint=_LATER)
        if (ended := self._ended()) is not None:
            return ended.located(board=self.board)
        how = "did not answer in time" if error.code == "DEADLINE_EXCEEDED" else "stopped answering"
        return errors.BoardLost(f"the board {how}", board=self.board, detail=f"{error.code}: {error.text}")

    def _whole(self, log: str) -> str:
        """All of an error that was cut; "" where the agent cannot be asked for it."""
        pieces: list[str] = []
        failed = contextlib.suppress(CallFailed, errors.ProtocolBroken)
        with failed, self._guarded(call := self._begin("Logs"), _WHOLE_S):
            call.send(pb.LogsRequest(error=log))
            while (line := call.receive()) is not None and sum(map(len, pieces)) <= wire_errors.WHOLE_MAX:
                pieces.append(line.text)
        return "".join(pieces)[: wire_errors.WHOLE_MAX]

    def _ended(self) -> errors.SessionEnded | None:
        """The error of a session that somebody ended, with the reason; None where nobody did, as far as is known."""
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
