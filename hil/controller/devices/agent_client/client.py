"""Client for the agent's protocol.

Multiple threads may run programs at the same time, each over a separate stream. All other calls must be in a single
thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from hil import errors
from hil.controller.devices.agent_client import answers
from hil.controller.devices.agent_client.call import Call, CallFailed
from hil.controller.devices.agent_client.connection import AgentConnection
from hil.controller.devices.agent_client.session_streams import STALL_SECONDS, InvokeStream, receive, transfer_limit_s
from hil.controller.devices.board_client import AgentEndpoint, BoardClient, Invocation, ProfilePass, ProgramHandle
from hil.core import clock, digest, tensors
from hil.core.bounded_json import parse_json
from hil.core.digest import StreamHasher
from hil.core.files import open_file
from hil.core.repetition import Answer, Repetition
from hil.core.results import Artifact
from hil.core.steps import StepsPlan
from hil.core.tensors import Array
from hil.core.timeline import Span
from hil.protocol import wire, wire_steps
from hil.protocol.v1 import agent_pb2 as pb

_CALL_SECONDS = 60.0
# Seconds to wait for the response after a request's timeout. After this time, hil considers the agent lost.
_GRACE_SECONDS = 15.0
# Write speed of the slowest supported disk.
_MIN_DISK_BYTES_PER_SECOND = 2_000_000
# Fields of Describe that change while the board runs, as in pb.State.
_STATE = ("clock_ns", "wall_ns", "readings")
_INT64 = range(-(1 << 63), 1 << 63)
Progress = Callable[[int], None]


class AgentClient(AgentConnection, BoardClient):
    """Client for a board's agent."""

    def __init__(self, target: AgentEndpoint, board: str, *, over: Callable[[], str] = lambda: "") -> None:
        super().__init__(target, board, over=over)
        self._unloading: Call | None = None  # pending Unload call
        self._outputs: dict[str, tuple[str, ...]] = {}
        self.payload_bytes_sent = 0
        self.counts_instructions = True

    def info(self) -> dict[str, Any]:
        """Return the response of Describe as JSON. Raises the errors of :meth:`describe`."""
        return MessageToDict(self.describe(), preserving_proto_field_name=True)

    def state(self) -> dict[str, Any]:
        """Return clock and readings of the board."""
        return {name: value for name, value in self.info().items() if name in _STATE}

    def pings(self, count: int = 8) -> list[clock.Ping]:
        """Ping the board's clock."""
        with self._translate_errors():
            return self._ping_clock(count, _CALL_SECONDS)

    def missing(self, digests: Collection[str], /) -> dict[str, int]:
        """Return the blobs that the board lacks, each with the bytes that an earlier upload left on the board."""
        with self._translate_errors():
            reply = self._call_unary("Missing", pb.MissingRequest(digests=list(digests)), _CALL_SECONDS)
            return answers.read_missing_blobs(reply, digests)

    def put(self, blobs: Mapping[str, tuple[Path, int]], progress: Progress | None = None) -> None:
        """Send blobs, which the board verifies.

        If the link breaks, the board retains the received part for the next attempt.
        """

        sizes = {name: path.stat().st_size for name, (path, _) in blobs.items()}
        # Allow time for the disk: a send blocks until the board has written the earlier chunks.
        stall_s = STALL_SECONDS + sum(sizes.values()) / _MIN_DISK_BYTES_PER_SECOND

        with self._translate_errors():
            for name, (_, offset) in blobs.items():
                answers.check_offset(offset, sizes[name])
            deadline = time.monotonic() + stall_s + transfer_limit_s(sum(sizes.values()))
            with self._guard_call("Put", stall_s) as (call, guard):
                for name, (path, offset) in blobs.items():
                    call.send(pb.PutRequest(start=pb.PutStart(digest=name, size=sizes[name], offset=offset)))
                    for piece in _iter_pieces(path, offset):
                        self.payload_bytes_sent += len(piece)
                        guard.set_timeout(min(stall_s, deadline - time.monotonic()))
                        call.send(piece)
                        self._restart_silence()
                        if progress:
                            progress(len(piece))
                call.end()
                guard.set_timeout(stall_s)
                answers.check_stored(iter(call.receive, None), list(blobs))

    def get(self, name: str) -> memoryview:
        """Read a blob from the board and verify it. Raises BoardLost on a digest mismatch."""
        with self._translate_errors(), self._guard_call("Get", STALL_SECONDS) as (call, guard):
            call.send(pb.GetRequest(digest=name))
            size = answers.read_blob_size(call.receive())
            deadline = time.monotonic() + transfer_limit_s(size)
            view = memoryview(answers.allocate_buffer(size).data)
            found = receive(
                call, view, StreamHasher(digest.get_algorithm(name)), guard, deadline, self._restart_silence
            )
            if call.receive() is not None:
                raise answers.make_protocol_error("the agent sent more data than it announced")
        if found != name:
            raise errors.BoardLost(f"downloaded data does not match {name}", board=self.board)
        return view

    def load_program(
        self, artifact: Artifact, *, device: str, timeout: float, instructions: bool = False
    ) -> ProgramHandle:
        """Load an artifact that was sent. Raises the errors of :meth:`load`."""
        how: dict[str, Any] = {"runtime": artifact.runtime, "device": device, "function": artifact.function}
        return self.load(artifact.digests, artifact.main, **how, timeout=timeout, instructions=instructions)

    def load(
        self,
        files: Mapping[str, str],
        main: str,
        *,
        runtime: str,
        device: str,
        function: str,
        timeout: float,
        instructions: bool = False,
    ) -> ProgramHandle:
        """Load a program from blobs on the board.

        Args:
            files: name -> digest.
            instructions: Count the instructions of all iterations.
        """
        request = pb.LoadRequest(
            files=[pb.ProgramFile(name=name, digest=value) for name, value in files.items()],
            main=main,
            runtime=runtime,
            device=device,
            function=function,
            timeout_s=timeout,
            instructions=instructions,
        )
        self._wait_unloaded()
        with self._translate_errors("load"):
            reply = self._call_unary("Load", request, timeout + _GRACE_SECONDS)
            answers.check_loaded(reply)
            inputs, outputs = (answers.parse_specs(getattr(reply, what), what) for what in ("inputs", "outputs"))
        self._outputs[reply.program_id] = tuple(spec.name for spec in outputs)
        return ProgramHandle(reply.program_id, reply.function, inputs, outputs, reply.load_ns, reply.worker_pid, device)

    def unload(self, program_id: str) -> None:
        """Start to unload a program. The next call waits until the agent has unloaded it."""
        self._wait_unloaded()
        self._outputs.pop(program_id, None)
        # A lost board has no programs, and the next call reports the loss.
        with self._translate_errors(), contextlib.suppress(CallFailed):
            self._unloading = self._send_request("Unload", pb.UnloadRequest(program_id=program_id))

    def _wait_unloaded(self) -> None:
        unloading, self._unloading = self._unloading, None
        if unloading is not None:
            wrong = contextlib.suppress(CallFailed, errors.ProtocolBroken)
            with wrong, self._watch_call(unloading, _CALL_SECONDS):
                unloading.receive()
            unloading.cancel()

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
        steps: StepsPlan | None = None,
    ) -> Invocation:
        """Run a program and fetch the last outputs.

        Large outputs are written to the arrays in ``into`` with the same name.
        """
        start = pb.InvokeStart(
            program_id=program_id, warmup=warmup, iterations=iterations, timeout_s=timeout, state=state
        )
        names = self._outputs.get(program_id)
        if steps is not None:
            start.steps.CopyFrom(wire_steps.encode_steps(steps))
            names = None
        call = self._call(start, inputs, into or {}, names, most_bytes)
        if call.repetition is None or call.repetition.is_stable:
            return call
        names = names if steps is None else tuple(call.outputs)
        return replace(call, repetition=self._fetch_recalled(program_id, call.repetition, names, most_bytes))

    def _fetch_recalled(
        self, program_id: str, repetition: Repetition, names: Sequence[str] | None, most_bytes: int | None = None
    ) -> Repetition:
        """Fetch outputs of differing runs that the board has stored and that were not fetched yet.

        All fetched outputs together have the size limit of a single call. Outputs beyond the limit are not fetched.
        """
        sizes = [_count_bytes(answer) for answer in repetition.answers]
        left = answers.max_output_bytes() - sum(sizes)
        largest = max(most_bytes or 1, *sizes)

        def fetch_answer(number: int, answer: Answer) -> Answer:
            nonlocal left
            if answer.outputs is not None or not answer.is_kept or left < largest:
                return answer
            start = pb.InvokeStart(program_id=program_id, recall=number, timeout_s=_CALL_SECONDS)
            most = left if most_bytes is None else most_bytes
            answer = replace(answer, outputs=self._call(start, {}, {}, names, most).outputs)
            left -= _count_bytes(answer)
            return answer

        return replace(
            repetition,
            answers=tuple(fetch_answer(number, answer) for number, answer in enumerate(repetition.answers, 1)),
        )

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
        """Run a program under the runtime's profiler."""
        start = pb.InvokeStart(
            program_id=program_id,
            warmup=warmup,
            iterations=iterations,
            timeout_s=timeout,
            profile=pb.ProfilePass(tool=tool),
        )
        call = self._call(start, inputs, {}, None, None)
        assert call.board_ns is not None
        with self._translate_errors("run"):
            answers.check_files(call.outputs)
        files = {name: memoryview(array.data) for name, array in call.outputs.items()}
        names = self._outputs.get(program_id)
        repetition = call.repetition and self._fetch_recalled(program_id, call.repetition, names)
        return ProfilePass(
            files=files,
            clock_pairs=_parse_clock_pairs(bytes(files.pop(clock.CLOCK_FILE, b'{"pairs": []}'))),
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
            dtype = tensors.get_dtype_name(array.dtype)
            message, streamed = wire.encode_tensor(name, dtype, array.shape, data, min(left, wire.INLINE_SENT))
            start.inputs.append(message)
            if streamed:
                streams.append(data)
            else:
                left -= data.nbytes
        with self._translate_errors("run"):
            stream = self._invokes.get(thread)
            if stream is None or stream.broken:
                stream = self._invokes[thread] = InvokeStream(self._begin("Invoke"), self._restart_silence)
                stream.fallback = self._calls.fallback
            most = answers.max_output_bytes() if most_bytes is None else most_bytes
            done = stream.call(start, streams, into, start.timeout_s + _GRACE_SECONDS, names, most)
        if not stream.fallback:
            return done
        note = f"the run used gRPC, which is slower, because the agent's data connection failed: {stream.fallback}"
        return replace(done, notes=(*done.notes, note))

    def counters(self, period_s: float) -> Call:
        """Return a stream of the board's counters: a ``pb.CounterSample`` per period, until cancelled.

        Reading the stream raises CallFailed without effect on the run.
        """
        return self._stream("Counters", pb.CountersRequest(period_ms=round(period_s * 1000)))

    def open_power(self, kind: str, path: str, channel: int, rate_hz: float) -> tuple[Call, Any]:
        """Return a stream of samples of a sensor on the board, and the first message: see :class:`BoardClient`."""
        request = pb.PowerRequest(kind=kind, path=path, channel=channel, rate_hz=rate_hz)
        with self._translate_errors():
            call = self._send_request("Power", request)
            with self._watch_call(call, _CALL_SECONDS):
                return call, answers.require_reply(call.receive())

    def follow_logs(self) -> Call:
        """Return a live stream of the workers' stderr. Reading the stream raises CallFailed."""
        return self._stream("Logs", pb.LogsRequest(follow=True))

    def _stream(self, method: str, request: Any) -> Call:
        with self._translate_errors():
            return self._send_request(method, request)

    def logs(self, program_id: str = "") -> list[str]:
        """Return the workers' stderr so far, cut after ``LOG_CHARACTERS`` or ``LOG_LINES``."""
        lines: list[str] = []
        left = answers.LOG_CHARACTERS
        with self._translate_errors(), self._guard_call("Logs", _CALL_SECONDS) as (call, _):
            call.send(pb.LogsRequest(program_id=program_id))
            for line in iter(call.receive, None):
                left -= len(line.text) + 1
                if left < 0 or len(lines) >= answers.LOG_LINES:
                    return [*lines, "... further lines omitted"]
                lines.append(line.text)
        return lines


def _count_bytes(answer: Answer) -> int:
    return sum(array.nbytes for array in (answer.outputs or {}).values())


def _iter_pieces(path: Path, offset: int) -> Iterator[memoryview]:
    """Yield a file's content from an offset. Each piece is valid until the next is requested."""
    room = memoryview(bytearray(wire.CHUNK))
    with open_file(path) as file:
        file.seek(offset)
        while count := file.readinto(room):
            yield room[:count]


def _parse_clock_pairs(content: bytes) -> tuple[tuple[int, int], ...]:
    try:
        pairs = tuple((int(file_ns), int(board_ns)) for file_ns, board_ns in parse_json(content)["pairs"])
        if not all(time_ns in _INT64 for pair in pairs for time_ns in pair):
            raise ValueError("clock value out of range")
        return pairs
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise errors.RunFailed(f"cannot read the profile's {clock.CLOCK_FILE}: {error}") from error
