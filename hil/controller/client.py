"""The agent's protocol as calls: the seam where gRPC's errors become hil's, once.

A client belongs to one thread at a time; its keep-alive runs in a thread of its own.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tenacity

from hil import clock, digest, errors, tensors, wire
from hil.behind import StreamHasher
from hil.controller.streams import Hold, Invocation, InvokeStream
from hil.proto.v1 import agent_pb2 as pb
from hil.tensors import Array, TensorSpec

TTL_S = 15.0
_CONNECT_S = 10.0
_CALL_S = 60.0
# Past an order's own limit the agent should have answered; then the agent itself is given up.
_GRACE_S = 15.0
Progress = Callable[[int], None]


@dataclass(frozen=True)
class Target:
    """Where an agent is reached.

    Attributes:
        address: ``unix:PATH`` or ``HOST:PORT``.
        token: presented to the agent, "" for none.
        ca, cert, key: PEM files; with ``ca`` the connection is TLS, with all three mutual TLS.
    """

    address: str
    token: str = ""
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


@dataclass(frozen=True)
class Loaded:
    """A program that is loaded on the board."""

    program_id: str
    function: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    load_ns: int
    worker_pid: int


class AgentClient:
    """A connection to one agent and the session on it."""

    def __init__(self, target: Target, board: str) -> None:
        self.board = board
        self._target = target
        self._channel = _channel(target)
        self._stub = wire.Stub(self._channel)
        self._metadata: list[tuple[str, str]] = [("authorization", f"Bearer {target.token}")] if target.token else []
        self._hold: Hold | None = None
        self._invoke: InvokeStream | None = None
        self.payload_bytes_sent = 0

    def describe(self, timeout: float = _CONNECT_S) -> pb.DescribeReply:
        """Who the board is; waits for the connection at most ``timeout`` seconds.

        Raises:
            BoardUnreachable: nobody answers there.
        """
        deadline = time.monotonic() + timeout

        # A connection may be lost just when it is made (a board that comes back): connecting is tried again.
        @tenacity.retry(
            retry=tenacity.retry_if_exception(_was_cut),
            stop=tenacity.stop_after_delay(timeout),
            wait=tenacity.wait_fixed(0.1),
            reraise=True,
        )
        def ask() -> pb.DescribeReply:
            left = max(deadline - time.monotonic(), 0.1)
            reply: pb.DescribeReply = self._stub.Describe(
                pb.DescribeRequest(), timeout=left, metadata=self._metadata, wait_for_ready=True
            )
            return reply

        try:
            reply = ask()
        except grpc.RpcError as error:
            lost = self._translated(error)
            if type(lost) is errors.BoardLost:
                raise errors.BoardUnreachable(
                    f"no agent answers at {self._target.address}: {error.details()}",
                    board=self.board,
                    hint="is the agent running there? start one with: python -m hil.agent --listen ... --store ...",
                ) from error
            raise lost from error
        if reply.protocol != wire.PROTOCOL:
            raise errors.BoardError(
                f"the agent speaks protocol {reply.protocol}, this hil {wire.PROTOCOL}",
                board=self.board,
                hint="put the same version of hil on both sides",
            )
        return reply

    def open_session(
        self,
        purpose: str,
        *,
        fence: int = 0,
        wait_s: float = 60.0,
        ttl_s: float = TTL_S,
        on_wait: Callable[[str], None],
    ) -> int:
        """Take the device; returns the session's fence. ``on_wait`` is told who has it meanwhile.

        Raises:
            BoardBusy: it was not free in time.
        """
        opening = pb.SessionOpen(owner=_me(), purpose=purpose, ttl_s=ttl_s, fence=fence, wait_s=wait_s)
        with self._seam():
            self._hold = Hold(self._stub, self._metadata, opening, on_wait)
        given: int = self._hold.fence
        return given

    def close_session(self) -> None:
        """Give the device back."""
        if self._invoke:
            self._invoke.close()
            self._invoke = None
        if self._hold:
            self._hold.close()
            self._hold = None

    def close(self) -> None:
        """End session and connection."""
        self.close_session()
        self._channel.close()

    def pings(self, count: int = 8) -> list[clock.Ping]:
        """Ping the board's clock."""
        asked: queue.SimpleQueue[pb.ClockPing | None] = queue.SimpleQueue()
        taken = []
        with self._seam():
            replies = self._stub.Clock(iter(asked.get, None), timeout=_CALL_S, metadata=self._metadata)
            for _ in range(count):
                sent = clock.now_ns()
                asked.put(pb.ClockPing())
                board_ns = next(replies).clock_ns
                taken.append(clock.Ping(sent, board_ns, clock.now_ns()))
            asked.put(None)
            next(replies, None)
        return taken

    def missing(self, digests: Sequence[str]) -> dict[str, int]:
        """The blobs that the board lacks, each with how many of its bytes an earlier upload left there."""
        with self._seam():
            reply = self._stub.Missing(pb.MissingRequest(digests=digests), timeout=_CALL_S, metadata=self._token())
        return {blob.digest: blob.have_bytes for blob in reply.missing}

    def put(self, blobs: Mapping[str, tuple[Path, int]], progress: Progress | None = None) -> None:
        """Send blobs: digest -> (file, offset to go on from). The board verifies each.

        Raises:
            LoadFailed: the board has no room.
            BoardLost: the link broke; what came is kept there for the next try.
        """

        def messages() -> Iterator[Any]:
            for name, (path, offset) in blobs.items():
                size = path.stat().st_size
                yield pb.PutRequest(start=pb.PutStart(digest=name, size=size, offset=offset))
                with path.open("rb") as file:
                    file.seek(offset)
                    while piece := file.read(wire.CHUNK):
                        # Counted first: a broken link ends this generator where it yields, sent or not.
                        self.payload_bytes_sent += len(piece)
                        yield from wire.data_messages(memoryview(piece))
                        if progress:
                            progress(len(piece))

        with self._seam():
            for _ in self._stub.Put(messages(), metadata=self._token()):
                pass

    def get(self, name: str) -> memoryview:
        """Read a blob from the board and verify it.

        Raises:
            BoardLost: what came is not what the digest says.
        """
        hasher = StreamHasher(digest.algorithm_of(name))
        at = 0
        with self._seam():
            replies = self._stub.Get(pb.GetRequest(digest=name), metadata=self._token())
            view = memoryview(np.empty(next(replies).start.size, np.uint8).data)
            for data in replies:
                view[at : at + data.nbytes] = data
                hasher.update(view[at : at + data.nbytes])
                at += data.nbytes
        if at != view.nbytes or hasher.digest() != name:
            raise errors.BoardLost(f"what the board sent is not {name}", board=self.board)
        return view

    def load(
        self, files: Mapping[str, str], main: str, *, runtime: str, device: str, function: str, timeout: float
    ) -> Loaded:
        """Load a program whose blobs the board has: name -> digest.

        Raises:
            LoadFailed, RunCrashed, StageTimeout: as the board says.
        """
        request = pb.LoadRequest(
            files=[pb.ProgramFile(name=name, digest=value) for name, value in files.items()],
            main=main,
            runtime=runtime,
            device=device,
            function=function,
            timeout_s=timeout,
        )
        with self._seam("load"):
            reply = self._stub.Load(request, timeout=timeout + _GRACE_S, metadata=self._token())
        inputs = tuple(wire.spec_from_message(spec) for spec in reply.inputs)
        outputs = tuple(wire.spec_from_message(spec) for spec in reply.outputs)
        return Loaded(reply.program_id, reply.function, inputs, outputs, reply.load_ns, reply.worker_pid)

    def unload(self, program_id: str) -> None:
        """End a program."""
        with self._seam():
            self._stub.Unload(pb.UnloadRequest(program_id=program_id), timeout=_CALL_S, metadata=self._token())

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
    ) -> Invocation:
        """Run a program once warm, ``iterations`` times, and fetch the last outputs.

        Args:
            program_id: of :meth:`load`.
            inputs: name -> tensor, in the program's order.
            warmup: untimed runs before.
            iterations: timed runs.
            timeout: seconds for warm-up and iterations together.
            into: arrays that large outputs are written into (by output name), where they fit.
            state: have the board say how it is after the run, too.

        Raises:
            UsageError: the program does not take these inputs.
            RunFailed, RunCrashed, StageTimeout: as the board says.
            BoardLost, SessionEnded: the board or the session went away; the run may have happened.
        """
        if self._invoke is None or self._invoke.broken:
            self._invoke = InvokeStream(self._stub, self._token())
        start = pb.InvokeStart(
            program_id=program_id, warmup=warmup, iterations=iterations, timeout_s=timeout, state=state
        )
        streams: list[memoryview] = []
        for name, array in inputs.items():
            data = tensors.to_bytes(array)
            message, streamed = wire.tensor_to_message(name, tensors.dtype_name(array.dtype), array.shape, data)
            start.inputs.append(message)
            if streamed:
                streams.append(data)
        with self._seam("run"):
            return self._invoke.call(start, streams, into or {}, timeout + _GRACE_S)

    def logs(self, program_id: str = "") -> list[str]:
        """What workers wrote to stderr so far."""
        with self._seam():
            request = pb.LogsRequest(program_id=program_id)
            return [line.text for line in self._stub.Logs(request, timeout=_CALL_S, metadata=self._token())]

    def _token(self) -> list[tuple[str, str]]:
        return [*self._metadata, (wire.SESSION_KEY, self._hold.token if self._hold else "")]

    @contextlib.contextmanager
    def _seam(self, stage: str = "") -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise self._translated(error).located(stage=stage, board=self.board) from error
        except errors.HilError as error:
            raise error.located(stage=stage, board=self.board) from error.__cause__

    def _translated(self, error: grpc.RpcError) -> errors.HilError:
        """The hil error that a gRPC error stands for: the far side's own where it sent one."""
        trailing: dict[str, Any] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]
        if wire.ERROR_KEY in trailing:
            said = pb.Error.FromString(trailing[wire.ERROR_KEY])
            found = wire.error_from_parts(said.kind, said.message, said.hint, said.detail)
            if isinstance(found, errors.SessionEnded) and self._hold and self._hold.over:
                found = errors.SessionEnded(f"the session was ended: {self._hold.over}")
            return found.located(board=self.board)
        code = error.code()
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return errors.BoardError(
                f"the agent refused us: {error.details()}",
                board=self.board,
                hint="its token belongs in the file that token_file in the config's [connection] names, or in "
                "HIL_AGENT_TOKEN",
            )
        if code is grpc.StatusCode.UNIMPLEMENTED:
            return errors.BoardError("what answers there is no agent of hil", board=self.board)
        if self._hold and self._hold.over:
            return errors.SessionEnded(f"the session was ended: {self._hold.over}", board=self.board)
        how = "did not answer in time" if code is grpc.StatusCode.DEADLINE_EXCEEDED else "stopped answering"
        return errors.BoardLost(f"the board {how}", board=self.board, detail=f"{code.name}: {error.details()}")


def _was_cut(error: BaseException) -> bool:
    return isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE


def _channel(target: Target) -> grpc.Channel:
    # A pool of its own, or a new client of an address shares the dying connection of an older one.
    options = [*wire.GRPC_OPTIONS, ("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    if target.ca is None:
        return grpc.insecure_channel(target.address, options)
    try:
        key = target.key.read_bytes() if target.key else None
        certificate = target.cert.read_bytes() if target.cert else None
        credentials = grpc.ssl_channel_credentials(target.ca.read_bytes(), key, certificate)
    except OSError as error:
        raise errors.UsageError(f"a TLS file cannot be read: {error}") from error
    return grpc.secure_channel(target.address, credentials, options)


def _me() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
