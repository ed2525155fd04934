"""The agent's protocol as the calls of a board.

Programs may be run from several threads at a time, each with a stream of its own; all else is for one thread.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from hil import errors
from hil.controller.devices import answers
from hil.controller.devices.board_client import BoardClient, Invocation, Loaded, ProfilePass, Target
from hil.controller.devices.call import Call, CallFailed, Replies
from hil.controller.devices.connection import STALL_S, AgentConnection, InvokeStream, receive
from hil.core import clock, digest, tensors
from hil.core.digest import StreamHasher
from hil.core.repetition import Answer, Repetition
from hil.core.results import Artifact
from hil.core.tensors import Array
from hil.core.timeline import Span
from hil.protocol import wire
from hil.protocol.v1 import agent_pb2 as pb

_CALL_S = 60.0
# Past an order's own limit the agent should have answered; then the agent itself is given up.
_GRACE_S = 15.0
# The slowest link, and the slowest disk of a board, that are worth waiting for.
_SLOWEST_LINK_BYTES_S, _SLOWEST_DISK_BYTES_S = 10_000, 2_000_000
_INT64 = range(-(1 << 63), 1 << 63)
Progress = Callable[[int], None]


class AgentClient(AgentConnection, BoardClient):
    """The calls that an agent answers."""

    def __init__(self, target: Target, board: str, *, over: Callable[[], str] = lambda: "") -> None:
        super().__init__(target, board, over=over)
        self._unloading: Call | None = None  # of a program that ends, until the agent has said so
        self._outputs: dict[str, tuple[str, ...]] = {}
        self.payload_bytes_sent = 0

    def info(self) -> dict[str, Any]:
        """What Describe says, as JSON; raises as :meth:`describe`."""
        return MessageToDict(self.describe(), preserving_proto_field_name=True)

    def pings(self, count: int = 8) -> list[clock.Ping]:
        """Ping the board's clock."""
        with self._seam():
            return self._pings(count, _CALL_S)

    def missing(self, digests: Collection[str], /) -> dict[str, int]:
        """The blobs that the board lacks, each with how many of its bytes an earlier upload left there."""
        with self._seam():
            reply = self._answered("Missing", pb.MissingRequest(digests=list(digests)), _CALL_S)
            return answers.missing_blobs(reply, digests)

    def put(self, blobs: Mapping[str, tuple[Path, int]], progress: Progress | None = None) -> None:
        """Send blobs, which the board verifies; where the link breaks, what came is kept there for the next try."""

        sizes = {name: path.stat().st_size for name, (path, _) in blobs.items()}
        # Whole chunks go on, or wait until the board's disk has what came before.
        stall_s = STALL_S + sum(sizes.values()) / _SLOWEST_DISK_BYTES_S

        with self._seam():
            for name, (_, offset) in blobs.items():
                answers.check_offset(offset, sizes[name])
            call = self._begin("Put")
            with self._guarded(call, stall_s) as guard:
                for name, (path, offset) in blobs.items():
                    call.send(pb.PutRequest(start=pb.PutStart(digest=name, size=sizes[name], offset=offset)))
                    for piece in _pieces(path, offset):
                        self.payload_bytes_sent += len(piece)
                        guard.within(stall_s)
                        call.send(piece)
                        self._heard()
                        if progress:
                            progress(len(piece))
                call.end()
                guard.within(stall_s)
                answers.check_stored(iter(call.receive, None), list(blobs))

    def get(self, name: str) -> memoryview:
        """Read a blob from the board and verify it: BoardLost where it is not what the digest says."""
        with self._seam(), self._guarded(call := self._begin("Get"), STALL_S) as guard:
            call.send(pb.GetRequest(digest=name))
            size = answers.blob_size(call.receive())
            deadline = time.monotonic() + STALL_S + size / _SLOWEST_LINK_BYTES_S
            view = memoryview(answers.room_for(size).data)
            found = receive(call, view, StreamHasher(digest.algorithm_of(name)), guard, deadline, self._heard)
            if call.receive() is not None:
                raise answers.broken("it sent more data than it announced")
        if found != name:
            raise errors.BoardLost(f"what the board sent is not {name}", board=self.board)
        return view

    def load_program(self, artifact: Artifact, *, device: str, timeout: float) -> Loaded:
        """Load an artifact whose files the board has; raises as :meth:`load`."""
        how: dict[str, Any] = {"runtime": artifact.runtime, "device": device, "function": artifact.function}
        return self.load(artifact.digests, artifact.main, **how, timeout=timeout)

    def load(
        self, files: Mapping[str, str], main: str, *, runtime: str, device: str, function: str, timeout: float
    ) -> Loaded:
        """Load a program whose blobs the board has: name -> digest."""
        request = pb.LoadRequest(
            files=[pb.ProgramFile(name=name, digest=value) for name, value in files.items()],
            main=main,
            runtime=runtime,
            device=device,
            function=function,
            timeout_s=timeout,
        )
        self._wait_unloaded()
        with self._seam("load"):
            reply = self._answered("Load", request, timeout + _GRACE_S)
            answers.check_loaded(reply)
            inputs, outputs = (answers.specs_of(getattr(reply, what), what) for what in ("inputs", "outputs"))
        self._outputs[reply.program_id] = tuple(spec.name for spec in outputs)
        return Loaded(reply.program_id, reply.function, inputs, outputs, reply.load_ns, reply.worker_pid, device)

    def unload(self, program_id: str) -> None:
        """End a program. Only that the agent takes the call on is waited for here; the next one waits for its end."""
        self._wait_unloaded()
        self._outputs.pop(program_id, None)
        # A board that is gone has no programs, and the next call will tell.
        with self._seam(), contextlib.suppress(CallFailed):
            call = self._begin("Unload")
            call.send(pb.UnloadRequest(program_id=program_id))
            self._unloading = call

    def _wait_unloaded(self) -> None:
        unloading, self._unloading = self._unloading, None
        if unloading is not None:
            wrong = contextlib.suppress(CallFailed, errors.ProtocolBroken)
            with wrong, self._guarded(unloading, _CALL_S):
                unloading.receive()

    def invoke(
        self,
        program_id: str,
        inputs: Mapping[str, Array],
        *,
        warmup: int = 0,
        iterations: int = 1,
        timeout: float = 60.0,
        into: Mapping[str, Array] | None = None,
        state: bool = False,
        most_bytes: int | None = None,
    ) -> Invocation:
        """Run a program warm, and fetch the last outputs, large ones ``into`` arrays (by name), where they fit."""
        start = pb.InvokeStart(
            program_id=program_id, warmup=warmup, iterations=iterations, timeout_s=timeout, state=state
        )
        names = self._outputs.get(program_id)
        call = self._call(start, inputs, into or {}, names, most_bytes)
        if call.repetition is None or call.repetition.is_stable:
            return call
        return replace(call, repetition=self._recalled(program_id, call.repetition, names, most_bytes))

    def _recalled(
        self, program_id: str, repetition: Repetition, names: Sequence[str] | None, most_bytes: int | None = None
    ) -> Repetition:
        """Fetch the outputs of the distinct answers that the board has kept and that are not here yet."""

        def fetched(number: int, answer: Answer) -> Answer:
            if answer.outputs is not None or not answer.is_kept:
                return answer
            start = pb.InvokeStart(program_id=program_id, recall=number, timeout_s=_CALL_S)
            return replace(answer, outputs=self._call(start, {}, {}, names, most_bytes).outputs)

        answers = tuple(fetched(number, answer) for number, answer in enumerate(repetition.answers, 1))
        return replace(repetition, answers=answers)

    def profile(
        self,
        program_id: str,
        inputs: Mapping[str, Array],
        *,
        tool: str = "",
        warmup: int = 0,
        iterations: int = 1,
        timeout: float = 60.0,
    ) -> ProfilePass:
        """Run a program under its runtime's profiler."""
        start = pb.InvokeStart(
            program_id=program_id,
            warmup=warmup,
            iterations=iterations,
            timeout_s=timeout,
            profile=pb.ProfilePass(tool=tool),
        )
        call = self._call(start, inputs, {}, None, None)
        assert call.board_ns is not None
        with self._seam("run"):
            answers.check_files(call.outputs)
        files = {name: memoryview(array.data) for name, array in call.outputs.items()}
        names = self._outputs.get(program_id)
        repetition = call.repetition and self._recalled(program_id, call.repetition, names)
        return ProfilePass(
            files=files,
            clock_pairs=_clock_pairs(bytes(files.pop(clock.CLOCK_FILE, b'{"pairs": []}'))),
            host=Span("profile", *call.host_ns),
            board=Span("profile", *call.board_ns),
            warmup=warmup,
            iterations=iterations,
            repetition=repetition,
        )

    def _call(
        self,
        start: pb.InvokeStart,
        inputs: Mapping[str, Array],
        into: Mapping[str, Array],
        names: Sequence[str] | None,
        most_bytes: int | None,
    ) -> Invocation:
        self._wait_unloaded()
        thread = threading.get_ident()
        streams: list[memoryview] = []
        left = wire.INLINE_TOTAL
        for name, array in inputs.items():
            data = tensors.to_bytes(array)
            dtype = tensors.dtype_name(array.dtype)
            message, streamed = wire.tensor_to_message(name, dtype, array.shape, data, min(left, wire.INLINE_SENT))
            start.inputs.append(message)
            if streamed:
                streams.append(data)
            else:
                left -= data.nbytes
        with self._seam("run"):
            stream = self._invokes.get(thread)
            if stream is None or stream.broken:
                stream = self._invokes[thread] = InvokeStream(self._begin("Invoke"), self._heard)
            most = answers.most_bytes() if most_bytes is None else most_bytes
            return stream.call(start, streams, into, start.timeout_s + _GRACE_S, names, most)

    def counters(self, period_s: float) -> Replies:
        """The board's counters, a ``pb.CounterSample`` each period, until the stream is cancelled.

        Reading it raises CallFailed: whoever does is beside the run, never part of it.
        """
        return self._stream("Counters", pb.CountersRequest(period_ms=round(period_s * 1000)))

    def follow_logs(self) -> Replies:
        """What workers write to stderr, as it comes; reading it raises CallFailed."""
        return self._stream("Logs", pb.LogsRequest(follow=True))

    def _stream(self, method: str, request: Any) -> Replies:
        with self._seam():
            call = self._begin(method)
            call.send(request)
            return Replies(call)

    def logs(self, program_id: str = "") -> list[str]:
        """What workers wrote to stderr so far; of very much of it, the beginning."""
        lines: list[str] = []
        left = answers.LOG_CHARACTERS
        with self._seam(), self._guarded(call := self._begin("Logs"), _CALL_S):
            call.send(pb.LogsRequest(program_id=program_id))
            for line in iter(call.receive, None):
                left -= len(line.text) + 1
                if left < 0 or len(lines) >= answers.LOG_LINES:
                    return [*lines, "... and more, which was left out"]
                lines.append(line.text)
        return lines


def _pieces(path: Path, offset: int) -> Iterator[memoryview]:
    """A file's content from an offset on, in pieces of which each is there until the next is asked for."""
    room = memoryview(bytearray(wire.CHUNK))
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while count := file.readinto(room):
            yield room[:count]


def _clock_pairs(content: bytes) -> tuple[tuple[int, int], ...]:
    try:
        pairs = tuple((int(file_ns), int(board_ns)) for file_ns, board_ns in json.loads(content)["pairs"])
        if not all(time_ns in _INT64 for pair in pairs for time_ns in pair):
            raise ValueError("a time that no clock has")
        return pairs
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise errors.RunFailed(f"the profile's {clock.CLOCK_FILE} cannot be read: {error}") from error
