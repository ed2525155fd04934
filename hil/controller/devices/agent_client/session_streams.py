"""Streams of a session: Hold reserves the device, Invoke runs programs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict

from hil import errors
from hil.controller.devices.agent_client import answers
from hil.controller.devices.agent_client.call import Call, CallFailed
from hil.controller.devices.board_client import Invocation
from hil.controller.devices.guard import Guard
from hil.core import clock
from hil.core.digest import Hasher, StreamHasher
from hil.core.tensors import Array
from hil.protocol import wire
from hil.protocol.v1 import agent_pb2 as pb

# After this many silent seconds, the agent has ended or hangs: it acknowledges keep-alives, and reports to waiting
# clients every second.
SILENCE_SECONDS = 15.0
_ALIVE_SECONDS = 3.75
# Seconds to wait for the reason on the session's stream, because another stream may report the end of the session
# first.
_REASON_SECONDS = 1.0
# Shortest time between two reports of a busy board.
_REPORT_SECONDS = 0.5
# Seconds to wait for the agent to end a session.
_END_SECONDS = 2.0
# When a session ends, the agent ends its calls with an error within this many seconds.
_GOODBYE_SECONDS = 3.0
# Time limit for each step of a transfer: a chunk of 1 MiB, or a whole shorter message.
STALL_SECONDS = 60.0
# Slowest supported link in bytes per second, for messages and for bulk data. The limit for bulk data is higher, because
# an agent may announce a wrong size and then send slowly.
_SLOWEST_BYTES_S, _SLOWEST_BULK_BYTES_S = 10_000, 1_000_000
_BULK_BYTES = 64 << 20


def transfer_limit_s(size: int) -> float:
    """Return the time limit in seconds for transferring ``size`` bytes over a link."""
    bulk = max(size - _BULK_BYTES, 0)
    return STALL_SECONDS + (size - bulk) / _SLOWEST_BYTES_S + bulk / _SLOWEST_BULK_BYTES_S


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
        self._guard = Guard(self._handle_silence)
        try:
            opened = self._wait_for_opening(opening, on_wait)
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

    def _wait_for_opening(self, opening: pb.SessionOpen, on_wait: Callable[[str], None]) -> pb.SessionOpened:
        """Wait for the device while the agent responds, at most for the ``wait_s`` of the request."""
        deadline = time.monotonic() + max(opening.wait_s, 0.0) + SILENCE_SECONDS
        # An agent reports every second. Limit the messages of a faster agent, which would flood the terminal.
        next_report = 0.0
        self._guard.set_timeout(SILENCE_SECONDS)
        try:
            self._call.send(pb.HoldRequest(open=opening))
            while (reply := self._call.receive()) is not None:
                kind = reply.WhichOneof("kind")
                if kind == "opened":
                    answers.check_opened(reply.opened, opening.fence)
                    self._guard.set_timeout(SILENCE_SECONDS)
                    given: pb.SessionOpened = reply.opened
                    return given
                if kind != "waiting":
                    raise answers.make_protocol_error("unexpected message before the session opened")
                text = answers.describe_holder(reply.waiting)
                if time.monotonic() > deadline:
                    raise errors.BoardBusy(text, hint="increase --wait")
                if time.monotonic() >= next_report:
                    next_report = time.monotonic() + _REPORT_SECONDS
                    on_wait(text)
                self._guard.set_timeout(SILENCE_SECONDS)
        except CallFailed as error:
            if self.silent:
                raise errors.BoardLost(f"the agent did not respond for {SILENCE_SECONDS:g} s") from error
            raise
        raise errors.BoardLost("the board closed the new session immediately")

    def wait_over(self) -> None:
        """Wait for the reason in :attr:`over`. Call this after a different stream reported the end of the session."""
        self._closed.wait(_REASON_SECONDS)

    def _handle_silence(self) -> None:
        self._call.cancel()
        if self.token:
            self._on_silence()

    def restart_silence(self) -> None:
        """Restart the silence timeout after data on another stream of the connection."""
        self._guard.restart_timeout()

    def _keep_alive(self, ttl_s: float) -> None:
        # Ignore errors, because the listener ends the session if the call has failed.
        with contextlib.suppress(CallFailed, errors.ProtocolBroken):
            while not self._closed.wait(max(min(ttl_s / 4, _ALIVE_SECONDS), 0.1)):
                with self._sending:
                    self._call.send(pb.HoldRequest(keep_alive=pb.KeepAlive()))

    def _listen(self, _: float) -> None:
        try:
            while (reply := self._call.receive()) is not None:
                self._guard.set_timeout(SILENCE_SECONDS)
                if reply.WhichOneof("kind") == "over":
                    self.over = reply.over.reason
        except (CallFailed, errors.ProtocolBroken):
            pass  # the next call of the session reports the loss
        self._guard.close()
        self._closed.set()
        if not self._closing.wait(_GOODBYE_SECONDS):
            self._on_end(self.token)

    def close(self) -> None:
        """End the session and wait for the agent to confirm it."""
        self._closing.set()
        self._guard.close()
        self._closed.set()
        # Wait only for a limited time, because an agent that does not read may block the sending thread.
        if self._sending.acquire(timeout=_END_SECONDS):
            ending = Guard(self._call.cancel)
            ending.set_timeout(_END_SECONDS)
            with contextlib.suppress(CallFailed, errors.ProtocolBroken):
                self._call.end()
            ending.close()
            self._sending.release()
            self._listener.join(_END_SECONDS)
        self._call.cancel()


class InvokeStream:
    """Stream for consecutive calls of programs.

    Args:
        call: The Invoke call.
        heard: Called after each transfer of data, in either direction.

    Attributes:
        fallback: ``fallback`` of :class:`AgentCalls` for this call.
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
        begin = clock.get_time_ns()
        try:
            self._guard.set_timeout(STALL_SECONDS if streams else limit_s)
            self._call.send(pb.InvokeRequest(start=start))
            if streams:
                self._send(streams)
                self._guard.set_timeout(limit_s)
            iterations = 0 if start.HasField("profile") or start.recall else start.iterations
            done = answers.call_of(self._read_answer(), iterations, names, most)
            answered = clock.get_time_ns()
            outputs = self._read_outputs(done, into)
        except BaseException as error:
            self.close()
            if isinstance(error, CallFailed) and self._guard.expired:
                raise errors.BoardLost("the board did not respond in time") from error
            raise
        finally:
            self._guard.set_timeout(float("inf"))
        end = clock.get_time_ns()
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
            answers.parse_placement(done),
            answers.parse_repetition(done, start, outputs),
            calls=answers.parse_calls(done, start),
            instructions=answers.instructions_of(done, iterations),
            peak_device_memory_bytes=done.peak_device_memory_bytes,
            link_ns=max(answered - begin - (done.ready_ns - done.received_ns), 0),
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
            for piece in wire.split_pieces(stream):
                self._guard.set_timeout(min(STALL_SECONDS, deadline - time.monotonic()))
                self._call.send(piece)
                self._heard()
                hasher.update(piece)  # hash while the agent reads
        self._call.send(pb.InvokeRequest(digests=pb.Digests(digests=[hasher.digest() for hasher in hashers])))

    def _read_answer(self) -> Any:
        """Return the next message. Raises ProtocolBroken at the end of the stream."""
        if (message := self._call.receive()) is None:
            raise errors.BoardLost("the board ended the call without a response")
        return message

    def _read_outputs(self, done: pb.InvokeDone, into: Mapping[str, Array]) -> dict[str, Array]:
        outputs: dict[str, Array] = {}
        computed: list[str] = []
        deadline = time.monotonic() + transfer_limit_s(sum(tensor.streamed for tensor in done.outputs))
        for tensor in done.outputs:
            buffer = None
            if tensor.WhichOneof("payload") == "streamed":
                buffer, value = self._stream(tensor, into.get(tensor.name), deadline)
                computed.append(value)
            outputs[tensor.name] = answers.parse_output(tensor, buffer)
        if computed:
            self._guard.set_timeout(STALL_SECONDS)
            answers.check_digests(self._read_answer(), computed)
        return outputs

    def _stream(self, tensor: pb.Tensor, given: Array | None, deadline: float) -> tuple[Any, str]:
        """Receive a tensor's bytes into a given array or a new array. Return the bytes and their digest."""
        size = tensor.streamed
        fits = given is not None and given.nbytes == size and given.flags.c_contiguous and given.flags.writeable
        target = given.reshape(-1).view(np.uint8) if fits and given is not None else answers.allocate_buffer(size)
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
        guard.set_timeout(min(STALL_SECONDS, deadline - time.monotonic()))
        count = call.receive_into(view[at:])
        heard()
        hasher.update(view[at : at + count])
        at += count
    return hasher.digest()
