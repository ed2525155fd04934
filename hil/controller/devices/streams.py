"""The two streams that a session keeps open: one that holds the device, one that calls go over."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from google.protobuf.json_format import MessageToDict

from hil import errors
from hil.controller.devices import answers
from hil.controller.devices.board_client import Invocation
from hil.controller.devices.guard import Guard
from hil.core import clock
from hil.core.digest import StreamHasher
from hil.core.results import Part, Placement
from hil.core.tensors import Array
from hil.protocol import wire
from hil.protocol.v1 import agent_pb2 as pb

# An agent answers every keep-alive, and tells each second that somebody waits: after so long it is gone, or hangs.
SILENCE_S = 15.0
_ALIVE_S = 3.75
# The two streams of a session may bring the news of its end in either order.
_REASON_S = 1.0
# Data that goes on moves so much each time: a chunk of 1 MiB, or the whole of a shorter message.
STALL_S = 60.0
_SLOWEST_BYTES_S = 10_000


class Hold:
    """The session's stream: opened, kept alive by a thread, ended by close.

    Args:
        stub: the agent's methods.
        metadata: of the call.
        opening: the session that is asked for.
        on_wait: told who has the board meanwhile.
        on_silence: called when an agent that had opened the session is heard no more.

    Attributes:
        over: why the session was ended, "" while it was not.
        silent: whether the agent is heard no more.
        token, fence: the session's.
    """

    def __init__(
        self,
        stub: Any,
        metadata: list[tuple[str, str]],
        opening: pb.SessionOpen,
        on_wait: Callable[[str], None],
        on_silence: Callable[[], object],
    ) -> None:
        self.over = self.token = ""
        self._on_silence = on_silence
        self._said: queue.SimpleQueue[pb.HoldRequest | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._said.put(pb.HoldRequest(open=opening))
        self._replies = stub.Hold(iter(self._said.get, None), metadata=metadata)
        self._guard = Guard(self._silence)
        try:
            opened = self._opened(opening, on_wait)
        except BaseException:
            self._guard.close()
            self._said.put(None)
            self._replies.cancel()
            raise
        self.token, self.fence = opened.token, opened.fence
        for work in (self._keep_alive, self._listen):
            threading.Thread(target=work, args=(opened.ttl_s,), daemon=True, name="hil-session").start()

    @property
    def silent(self) -> bool:
        """Whether the agent is heard no more."""
        return self._guard.expired

    def _opened(self, opening: pb.SessionOpen, on_wait: Callable[[str], None]) -> pb.SessionOpened:
        """Wait for the device, as long as was said, and as the agent tells that it is there."""
        deadline = time.monotonic() + max(opening.wait_s, 0.0) + SILENCE_S
        self._guard.within(SILENCE_S)
        try:
            for reply in self._replies:
                kind = reply.WhichOneof("kind")
                if kind == "opened":
                    answers.check_opened(reply.opened, opening.fence)
                    self._guard.within(SILENCE_S)
                    return reply.opened  # type: ignore[no-any-return]
                if kind != "waiting":
                    raise answers.broken("a session begins with something else than that it is open")
                told = answers.waiting_text(reply.waiting)
                if time.monotonic() > deadline:
                    raise errors.BoardBusy(told, hint="wait longer with --wait")
                on_wait(told)
                self._guard.within(SILENCE_S)
        except grpc.RpcError as error:
            if self.silent:
                raise errors.BoardLost(f"the agent says nothing for {SILENCE_S:g} s") from error
            raise
        raise errors.BoardLost("the board closed the session at once")

    def wait_over(self) -> None:
        """Wait until :attr:`over` is known, once the agent has said on another stream that the session was ended."""
        self._closed.wait(_REASON_S)

    def _silence(self) -> None:
        self._replies.cancel()
        if self.token:
            self._on_silence()

    def _keep_alive(self, ttl_s: float) -> None:
        while not self._closed.wait(max(min(ttl_s / 4, _ALIVE_S), 0.1)):
            self._said.put(pb.HoldRequest(keep_alive=pb.KeepAlive()))

    def _listen(self, _: float) -> None:
        try:
            for reply in self._replies:
                self._guard.within(SILENCE_S)
                if reply.WhichOneof("kind") == "over":
                    self.over = reply.over.reason
        except grpc.RpcError:
            pass  # the next call on the session says that the board is gone
        self._guard.close()
        self._closed.set()

    def close(self) -> None:
        """End the session and wait for the board to know."""
        self._guard.close()
        self._closed.set()
        self._said.put(None)
        deadline = time.monotonic() + 2.0
        while self._replies.is_active() and time.monotonic() < deadline:
            time.sleep(0.002)
        self._replies.cancel()


class InvokeStream:
    """The stream that calls go over, one after another."""

    def __init__(self, stub: Any, metadata: list[tuple[str, str]]) -> None:
        self.broken = False
        self._asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._limit_s = STALL_S
        self._guard = Guard(lambda: self._replies.cancel())
        self._replies = stub.Invoke(self._messages(), metadata=metadata)

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
            start: what is called.
            streams: the data of the inputs that are streamed.
            into: output name -> array.
            limit_s: seconds from the last byte sent to the answer.
            names: of the program's outputs; None where they are not known.
            most: the most bytes that the outputs may take.

        Raises:
            ProtocolBroken: the answer makes no sense.
            BoardLost: the stream ended, what came was damaged, or nothing came in time.
            grpc.RpcError: as the agent or the link ended it.
        """
        self._limit_s = limit_s
        begin = clock.now_ns()
        try:
            self._guard.within(limit_s if not streams else STALL_S)
            self._asked.put((pb.InvokeRequest(start=start), streams))
            iterations = 0 if start.HasField("profile") else start.iterations
            done = answers.call_of(next(self._replies), iterations, names, most)
            answered = clock.now_ns()
            outputs = self._outputs(done, into)
        except BaseException as error:
            self.close()
            if isinstance(error, StopIteration):
                raise errors.BoardLost("the board ended the call without an answer") from error
            if isinstance(error, grpc.RpcError) and self._guard.expired:
                raise errors.BoardLost("the board did not answer in time") from error
            raise
        finally:
            self._guard.rest()
        end = clock.now_ns()
        busy = done.ready_ns - done.received_ns
        return Invocation(
            outputs,
            tuple(zip(done.start_ns, done.end_ns, strict=True)),
            done.warmup_ns,
            (begin, end),
            (done.received_ns, done.ready_ns),
            done.peak_memory_bytes,
            done.cpu_ns,
            max(answered - begin - busy, 0) / 1e9,
            (end - answered) / 1e9,
            MessageToDict(done.state, preserving_proto_field_name=True) if done.HasField("state") else {},
            _placement(done.placement) if done.HasField("placement") else None,
        )

    def close(self) -> None:
        """No more calls."""
        self.broken = True
        self._guard.close()
        self._asked.put(None)
        self._replies.cancel()

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
            answers.check_digests(next(self._replies), computed)
        return outputs

    def _stream(self, tensor: pb.Tensor, given: Array | None, deadline: float) -> tuple[Any, str]:
        """Receive a tensor's bytes into a given array or a new one; returns them and their digest."""
        size = tensor.streamed
        fits = given is not None and given.nbytes == size and given.flags.c_contiguous and given.flags.writeable
        target = given.reshape(-1).view(np.uint8) if fits and given is not None else answers.room_for(size)
        view = memoryview(target.data)
        hasher = StreamHasher()
        at = 0
        while at < size:
            self._guard.within(min(STALL_S, deadline - time.monotonic()))
            data = answers.data_of(next(self._replies), size - at)
            view[at : at + data.nbytes] = data
            hasher.update(view[at : at + data.nbytes])
            at += data.nbytes
        return view, hasher.digest()

    def _messages(self) -> Iterator[Any]:
        while (asked := self._asked.get()) is not None:
            start, streams = asked
            yield start
            hashers = [StreamHasher() for _ in streams]
            for stream, hasher in zip(streams, hashers, strict=True):
                hasher.update(stream)
                for message in wire.data_messages(stream):
                    self._guard.within(STALL_S)
                    yield message
            if streams:
                self._guard.within(self._limit_s)
                yield pb.InvokeRequest(digests=pb.Digests(digests=[hasher.digest() for hasher in hashers]))


def _placement(message: pb.Placement) -> Placement:
    return tuple(Part(part.device, part.nodes, tuple(part.names), part.elsewhere) for part in message.parts)
