"""The two streams that a session keeps open: one that holds the device, one that calls go over."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from google.protobuf.json_format import MessageToDict

from hil import clock, errors, wire
from hil.behind import StreamHasher
from hil.placement import Part, Placement
from hil.proto.v1 import agent_pb2 as pb
from hil.tensors import Array


@dataclass(frozen=True)
class Invocation:
    """One call's answer. Stamps are of the board's clock, seconds of the host's.

    Attributes:
        outputs: name -> tensor.
        iterations_ns: start and end of each.
        warmup_ns: how long the warm-up took.
        host_ns: from sending to the last byte received, host clock.
        board_ns: from the last input byte to the outputs being ready to send.
        peak_memory_bytes: the worker's.
        cpu_ns: what the worker's threads together computed during the iterations, 0 where nothing is known of that.
        send_s: until the answer began.
        fetch_s: for the outputs.
        state: what Describe says of what changes, where it was asked for.
        placement: where the program ran; None where the board does not tell, or has told before.
    """

    outputs: dict[str, Array]
    iterations_ns: tuple[tuple[int, int], ...]
    warmup_ns: int
    host_ns: tuple[int, int]
    board_ns: tuple[int, int]
    peak_memory_bytes: int
    cpu_ns: int
    send_s: float
    fetch_s: float
    state: dict[str, Any] = field(default_factory=dict)
    placement: Placement | None = None

    @property
    def busy_ns(self) -> int:
        """The board's own part: the wall time less that is what moving the tensors cost."""
        return self.board_ns[1] - self.board_ns[0]


class Hold:
    """The session's stream: opened, kept alive by a thread, ended by close."""

    def __init__(
        self, stub: Any, metadata: list[tuple[str, str]], opening: pb.SessionOpen, on_wait: Callable[[str], None]
    ) -> None:
        self.over = ""
        self._said: queue.SimpleQueue[pb.HoldRequest | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._said.put(pb.HoldRequest(open=opening))
        self._replies = stub.Hold(iter(self._said.get, None), metadata=metadata)
        try:
            for reply in self._replies:
                if reply.WhichOneof("kind") == "opened":
                    break
                holder = reply.waiting.holder
                on_wait(f"{holder.owner} has the board ({holder.purpose}) for {holder.held_s:.0f} s")
            else:
                raise errors.BoardLost("the board closed the session at once")
        except BaseException:
            self._said.put(None)
            self._replies.cancel()
            raise
        self.token, self.fence = reply.opened.token, reply.opened.fence
        for work in (self._keep_alive, self._listen):
            threading.Thread(target=work, args=(reply.opened.ttl_s,), daemon=True, name="hil-session").start()

    def _keep_alive(self, ttl_s: float) -> None:
        while not self._closed.wait(ttl_s / 4):
            self._said.put(pb.HoldRequest(keep_alive=pb.KeepAlive()))

    def _listen(self, _: float) -> None:
        try:
            for reply in self._replies:
                if reply.WhichOneof("kind") == "over":
                    self.over = reply.over.reason
        except grpc.RpcError:
            pass  # the next call on the session says that the board is gone
        self._closed.set()

    def close(self) -> None:
        """End the session and wait for the board to know."""
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
        self._deadline = float("inf")
        self._replies = stub.Invoke(self._messages(), metadata=metadata)
        threading.Thread(target=self._watch, daemon=True, name="hil-invoke-limit").start()

    def call(
        self, start: pb.InvokeStart, streams: list[memoryview], into: Mapping[str, Array], limit_s: float
    ) -> Invocation:
        """One call: the inputs' data goes after the start message, large outputs go ``into`` arrays where they fit.

        Raises:
            BoardLost: the stream ended, or what came was damaged.
            grpc.RpcError: as the agent or the link ended it; after ``limit_s`` seconds the call is cancelled.
        """
        self._deadline = time.monotonic() + limit_s
        begin = clock.now_ns()
        try:
            self._asked.put((pb.InvokeRequest(start=start), streams))
            done = next(self._replies).done
            answered = clock.now_ns()
            outputs = self._outputs(done, into)
        except BaseException as error:
            self.close()
            if isinstance(error, StopIteration):
                raise errors.BoardLost("the board ended the call without an answer") from error
            raise
        finally:
            self._deadline = float("inf")
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
        self._asked.put(None)
        self._replies.cancel()

    def _outputs(self, done: pb.InvokeDone, into: Mapping[str, Array]) -> dict[str, Array]:
        outputs: dict[str, Array] = {}
        computed: list[str] = []
        for tensor in done.outputs:
            buffer = None
            if tensor.WhichOneof("payload") == "streamed":
                buffer, value = self._stream(tensor, into.get(tensor.name))
                computed.append(value)
            outputs[tensor.name] = wire.tensor_from_message(tensor, buffer)
        if computed and list(next(self._replies).digests.digests) != computed:
            raise errors.BoardLost("the outputs were damaged on their way from the board")
        return outputs

    def _stream(self, tensor: pb.Tensor, given: Array | None) -> tuple[Any, str]:
        """Receive a tensor's bytes into a given array or a new one; returns them and their digest."""
        size = tensor.streamed
        fits = given is not None and given.nbytes == size and given.flags.c_contiguous and given.flags.writeable
        target = given.reshape(-1).view(np.uint8) if fits and given is not None else np.empty(size, np.uint8)
        view = memoryview(target.data)
        hasher = StreamHasher()
        at = 0
        while at < size:
            data = next(self._replies)
            if not isinstance(data, memoryview) or at + data.nbytes > size:
                raise errors.BoardLost("the board sent outputs other than it announced")
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
                yield from wire.data_messages(stream)
            if streams:
                yield pb.InvokeRequest(digests=pb.Digests(digests=[hasher.digest() for hasher in hashers]))

    def _watch(self) -> None:
        while not self.broken:
            if time.monotonic() > self._deadline:
                self._replies.cancel()
                return
            time.sleep(0.25)


def _placement(message: pb.Placement) -> Placement:
    return tuple(Part(part.device, part.nodes, tuple(part.names), part.elsewhere) for part in message.parts)
