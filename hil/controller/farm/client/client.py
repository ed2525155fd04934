"""Client for a farm's gateway, used by commands, links and hosts. Converts gRPC errors to hil errors."""

from __future__ import annotations

import contextlib
import copy
import shutil
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import tenacity

from hil import errors
from hil.controller.devices.agent_client.interruptible_channel import ChannelClosed, InterruptibleChannel
from hil.controller.farm.client.answers import check_status, make_answer_error, parse_answer
from hil.controller.farm.messages import Submission, parse_job
from hil.controller.farm.paths import FarmAddress, check_address, may_return
from hil.controller.farm.rpc import FarmStub, encode_submission
from hil.core.files import copy_file, digest_file, open_file, read_file, replace_file
from hil.core.scratch import make_folder
from hil.core.text import TextSink
from hil.errors import HilError
from hil.protocol import grpc_calls, wire
from hil.protocol.listening import escape_grpc_address, parse_host_port
from hil.protocol.local_socket import LocalSocket, NotCarried
from hil.protocol.v1 import farm_pb2 as pb

T = TypeVar("T")
M = TypeVar("M", pb.AskRequest, pb.DoRequest)

CONNECT_SECONDS = 5.0
_CALL_SECONDS = 60.0
# A live gateway sends a message on each stream every 5 s; after this long without a message, hil treats the stream as
# hung. A file transfer may pause for longer.
SILENT_S, _SILENT_FILE_S = 15.0, 120.0
_WATCH_SECONDS = 0.5
# Largest response of a gateway: `farm status --json` returns all rows of a farm.
_MAX_REPLY = 256 << 20
_MAX_RECEIVE = "grpc.max_receive_message_length"
# Delay in seconds between attempts to reach an unavailable farm.
AGAIN_SECONDS = 0.5
# Retry for this many seconds. A restarted gateway or database is usually reachable again within this time.
_PATIENCE_SECONDS = 30.0
# Seconds. A stream that lasts at least _STEADY_S resets the reconnect delay. After a shorter stream, the delay doubles,
# up to _MAX_PAUSE_S.
_STEADY_S, _MAX_PAUSE_S = 5.0, 2.0
# A command that finds no gateway waits this many seconds for a gateway to restart.
RESTART_SECONDS = 10.0


class FarmClient:
    """Connection to a farm. A context manager that closes the connection.

    Args:
        patience_s: retry idempotent calls for this long while the gateway is unavailable.
        call_s: timeout of a unary call.
        restart_s: wait this long for the first gateway, unless the farm is local and not running.
        say: called with a line of text when the client waits for a gateway.

    Raises:
        FarmUnreachable: no gateway is reachable.
        UsageError: the token would be sent unencrypted to another machine.
    """

    def __init__(
        self,
        address: FarmAddress,
        *,
        patience_s: float = _PATIENCE_SECONDS,
        call_s: float = _CALL_SECONDS,
        restart_s: float = 0.0,
        say: TextSink = lambda text: None,
    ) -> None:
        self.address = address
        self._patience_s, self._call_s, self._say = patience_s, call_s, say
        self._channel: InterruptibleChannel | None = None
        self.gateway = ""
        self.stub: FarmStub  # for streams; raises gRPC errors, which `seam` converts
        self._connect_within(restart_s)

    def connect(self) -> None:
        """Connect to the first reachable gateway. Reconnecting closes the old channel and all streams.

        Raises:
            FarmUnreachable: no gateway is reachable.
        """
        self.close()
        for gateway in iter_listening_gateways(self.address):
            channel = open_channel(gateway, self.address.ca)
            try:
                grpc.channel_ready_future(channel).result(CONNECT_SECONDS)
            except grpc.FutureTimeoutError:
                grpc_calls.close_channel(channel)
                continue
            self._channel, self.gateway = InterruptibleChannel(channel), gateway
            self.stub = FarmStub(self._channel)
            return
        raise make_unreachable_error(self.address)

    def _connect_within(self, seconds: float) -> None:
        """Connect, and retry for ``seconds`` while a gateway restarts. Raises the errors of :meth:`connect`."""
        deadline, is_reported = time.monotonic() + seconds, False
        while True:
            try:
                return self.connect()
            except errors.FarmUnreachable:
                if time.monotonic() >= deadline or not may_return(self.address):
                    raise
            if not is_reported:
                self._say(f"no farm gateway responds; waiting up to {seconds:g} s for a restart")
                is_reported = True
            time.sleep(AGAIN_SECONDS)

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """gRPC metadata for every call: token and hil version."""
        return self.address.metadata

    def close(self) -> None:
        """Close the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def with_token(self, token: str) -> FarmClient:
        """Return a client with another token on the same connection. Close only the original client."""
        other = copy.copy(self)
        other.address = replace(self.address, token=token, token_source=None)
        return other

    def __enter__(self) -> FarmClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, submission: Submission, *, trace: str = "") -> tuple[int, list[str]]:
        """Queue the jobs of a submission. Retries with the same key queue the submission only once.

        Returns:
            The submission's number and the job names.

        Raises:
            NoSuchBoard: no board of the farm can ever match.
            UsageError: the selector or the submission is invalid.
            AccessRefused: the token lacks permission.
        """
        reply = self._call_with_retry("Submit", pb.SubmitRequest(submission=encode_submission(submission), trace=trace))
        return reply.submission, list(reply.jobs)

    def ask(self, what: str, **arguments: Any) -> Any:
        """Run a query (see ``Ask`` in the protocol), with retries while the gateway is unavailable.

        Returns:
            The type of the query in :data:`hil.controller.records.lab.farm.ANSWERS`.
        """
        return parse_answer(self._call_with_retry("Ask", _build_request(pb.AskRequest, what, arguments)).answer, what)

    def do(self, action: str, *, limit_s: float | None = None, **arguments: Any) -> Any:
        """Run an action (see ``Do`` in the protocol).

        Args:
            limit_s: timeout in place of the client's timeout.

        The client sends the action once and never retries. Returns the same types as :meth:`ask`.
        """
        with convert_grpc_errors():
            return parse_answer(
                self._call_gateway("Do", _build_request(pb.DoRequest, action, arguments), limit_s).answer, action
            )

    def follow(self, jobs: Iterable[str], *, logs: bool = False) -> Iterator[pb.FollowReply]:
        """Yield job events while any job is active. If the gateway is lost, resume after the last received log line.

        Raises:
            UsageError: a job name is invalid, or the job does not exist.
            FarmUnreachable: the stream broke repeatedly, for longer than ``patience_s``.
            FarmError: the gateway sent an event of another job.
        """
        names, after = list(jobs), 0
        requested = {parse_job(name) for name in names}
        pause, deadline = 0.0, 0.0

        def begin() -> tuple[Any, Generator[Any, None, None], Any]:
            request = pb.FollowRequest(jobs=names, logs=logs, after=after)
            stream = self.stub.Follow(request, metadata=self.metadata)
            replies = iter_with_timeout(stream, SILENT_S)
            return stream, replies, next(replies, None)

        while True:
            stream, replies, reply = self._retry_while_away(begin)
            began = time.monotonic()
            try:
                while reply is not None:
                    kind = reply.WhichOneof("kind")
                    if kind == "log":
                        after = max(after, reply.log.number)
                    if kind:  # otherwise a keepalive
                        check_status(reply, requested)
                        yield reply
                    reply = next(replies, None)
                return
            except grpc.RpcError as error:
                now = time.monotonic()
                if not pause or now - began >= _STEADY_S:
                    pause, deadline = AGAIN_SECONDS / 2, now + self._patience_s
                if not is_away(error) or now > deadline:
                    raise translate_grpc_error(error) from error
            finally:
                stream.cancel()
                replies.close()
            pause = min(2 * pause, _MAX_PAUSE_S)
            time.sleep(pause)

    def upload(self, files: dict[str, Path]) -> int:
        """Upload the files that the store lacks. An upload is idempotent, so the client retries it.

        Args:
            files: digest -> file.

        Returns:
            The number of bytes sent.

        Raises:
            UsageError: a file has changed since the digest was computed.
        """
        sent = 0

        def iter_pieces(lacking: list[str]) -> Iterator[pb.FilePiece]:
            nonlocal sent
            for name in lacking:
                yield pb.FilePiece(start=pb.FileStart(digest=name, size=files[name].stat().st_size))
                with open_file(files[name]) as file:
                    while data := file.read(wire.CHUNK):
                        sent += len(data)
                        yield pb.FilePiece(data=data)

        def upload_once() -> None:
            if lacking := list(self._call_gateway("Lacks", pb.LacksRequest(digests=list(files))).digests):
                # A blocking call would never return if the connection broke during the upload.
                upload = self.stub.Upload.future(iter_pieces(lacking), metadata=self.metadata)
                try:
                    with _cancel_when_stalled(upload, _SILENT_FILE_S, lambda: sent):
                        upload.result()
                except grpc.FutureCancelledError as error:
                    raise errors.FarmUnreachable(
                        f"upload stalled: the farm accepted no data for {_SILENT_FILE_S:g} s"
                    ) from error

        self._retry_while_away(upload_once)
        return sent

    def download(
        self, digest: str, to: Path, *others: Path, on_bytes: Callable[[int], None] = lambda count: None
    ) -> None:
        """Download a file of the store to one or more paths. Verifies the digest and writes atomically.

        Args:
            on_bytes: called with the size of every chunk before the write. An exception ends the download.

        Raises:
            FarmError: the store no longer has the file, or the received data does not match the digest.
        """
        to.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(to) as part:

            def download_once() -> None:
                with part.open("wb") as file:
                    stream = self.stub.Download(pb.DownloadRequest(digest=digest), metadata=self.metadata)
                    for piece in iter_with_timeout(stream, _SILENT_FILE_S):
                        on_bytes(len(piece.data))
                        file.write(piece.data)

            self._retry_while_away(download_once)
            if digest_file(part, digest.partition(":")[0]) != digest:
                raise errors.FarmError(
                    f"digest mismatch in a file from the farm's store: expected {digest}",
                    hint="the stored file may be corrupt",
                )
        for other in others:
            other.parent.mkdir(parents=True, exist_ok=True)
            copy_file(to, other)

    def _call_gateway(self, method: str, request: object, limit_s: float | None = None) -> Any:
        return getattr(self.stub, method)(request, timeout=limit_s or self._call_s, metadata=self.metadata)

    def _call_with_retry(self, method: str, request: object) -> Any:
        return self._retry_while_away(lambda: self._call_gateway(method, request))

    def _retry_while_away(self, call: Callable[[], T]) -> T:
        """Run an idempotent call. While the gateway is unavailable, reconnect to any gateway and retry."""

        def reconnect(state: tenacity.RetryCallState) -> None:
            if state.attempt_number == 1 and self._patience_s >= RESTART_SECONDS:
                self._say(f"the farm does not respond; retrying for up to {self._patience_s:g} s")
            with contextlib.suppress(errors.FarmUnreachable):
                self.connect()

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_away),
            stop=tenacity.stop_after_delay(self._patience_s),
            wait=tenacity.wait_random_exponential(0.1, max=2),
            before_sleep=reconnect,
            reraise=True,
        )
        with convert_grpc_errors():
            return retrying(call)


@contextlib.contextmanager
def convert_answer_errors() -> Iterator[None]:
    """Convert errors of parsing a gateway's response to FarmError."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise make_answer_error(error) from error


def _build_request(kind: type[M], what: str, arguments: Mapping[str, Any]) -> M:
    """Return the request message of a query or an action."""
    try:
        return kind(**{what: arguments})
    except (TypeError, ValueError) as error:
        raise errors.UsageError(f"invalid arguments for {what!r}: {error}") from error


def iter_listening_gateways(address: FarmAddress) -> Iterator[str]:
    """Probe the gateways in turn and yield those that accept connections.

    Raises the UsageError of :func:`.check_address`.
    """
    for gateway in address.gateways:
        check_address(gateway, address.ca)
        if _accepts_connections(gateway):
            yield gateway


def make_unreachable_error(address: FarmAddress) -> errors.FarmUnreachable:
    """Return the error for a farm without a reachable gateway."""
    return errors.FarmUnreachable(
        f"no farm gateway responds at {', '.join(address.gateways)}",
        hint="start a local farm with `hil farm up`; for TLS, set HIL_FARM_CA to the gateway's CA file",
    )


def open_channel(gateway: str, ca: Path | None, api: Any = grpc) -> Any:
    """Return a channel of ``grpc`` or ``grpc.aio`` to a gateway. Raises the UsageError of :func:`.check_address`."""
    check_address(gateway, ca)
    options = [
        *(option for option in grpc_calls.GRPC_OPTIONS if option[0] != _MAX_RECEIVE),
        (_MAX_RECEIVE, _MAX_REPLY),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if ca is None or gateway.startswith("unix:"):
        return api.insecure_channel(escape_grpc_address(gateway), options)
    try:
        return api.secure_channel(gateway, grpc.ssl_channel_credentials(read_file(ca)), options)
    except OSError as error:
        raise errors.UsageError(f"cannot read the farm's CA file {ca}: {error}") from error


def iter_with_timeout(stream: Any, limit_s: float) -> Generator[Any, None, None]:
    """Yield the replies of a stream. Cancel the stream after ``limit_s`` seconds without a reply."""
    count = 0
    with _cancel_when_stalled(stream, limit_s, lambda: count):
        for reply in stream:
            count += 1
            yield reply


@contextlib.contextmanager
def _cancel_when_stalled(call: Any, limit_s: float, progress: Callable[[], int]) -> Iterator[None]:
    """Cancel a call after ``limit_s`` seconds without progress."""
    over = threading.Event()

    def watch() -> None:
        last, due = progress(), time.monotonic() + limit_s
        while not over.wait(_WATCH_SECONDS):
            if (now := progress()) != last:
                last, due = now, time.monotonic() + limit_s
            elif time.monotonic() > due:
                call.cancel()

    threading.Thread(target=watch, daemon=True, name="farm-watch").start()
    try:
        yield
    finally:
        over.set()


def _accepts_connections(gateway: str) -> bool:
    """Return True if an address accepts connections. gRPC itself only fails after the connection timeout."""
    try:
        if gateway.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(CONNECT_SECONDS)
                probe.connect(gateway.removeprefix("unix:"))
        else:
            socket.create_connection(parse_host_port(gateway, what="gateway address"), CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def make_boards_mismatch() -> errors.VersionMismatch:
    """Return the error for a gateway that grants fewer boards than requested."""
    return errors.VersionMismatch(
        "the gateway is older and does not support several boards", hint="update the gateway, or use one board"
    )


def is_away(error: BaseException) -> bool:
    """Return True for an error of a temporarily unavailable gateway or database."""
    away = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return isinstance(error, (grpc.Call, grpc.aio.AioRpcError, ChannelClosed)) and error.code() in away


@contextlib.contextmanager
def convert_grpc_errors() -> Iterator[None]:
    """Convert gRPC errors to hil errors."""
    try:
        yield
    except grpc.RpcError as error:
        raise translate_grpc_error(error) from error


def translate_grpc_error(error: grpc.RpcError) -> errors.HilError:
    """Convert a gateway's gRPC error to the typed error that the gateway sent, or to an error for the gRPC status."""
    code = error.code()
    if reported := grpc_calls.decode_error(error):
        if is_away(error):
            return errors.FarmUnreachable(reported.message, hint=reported.hint, detail=reported.detail)
        return reported
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return errors.AccessRefused(
            f"authentication with the farm failed: {error.details()}", hint="set HIL_FARM_TOKEN to a valid token"
        )
    if is_away(error) or code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.FarmUnreachable(f"the farm does not respond: {error.details()}")
    return errors.FarmError(f"the farm call failed: {code.name}: {error.details()}")


Dial = Callable[[Iterator[pb.Piece]], Any]

# Maximum length of the parent directory in bytes. A socket path has at most 104 bytes on macOS.
_MAX_FOLDER_LENGTH = 60


class FarmTunnel:
    """Unix socket that forwards to the agent of a leased board.

    Args:
        dial: opens a gRPC stream for every connection.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._folder = make_folder("hil-farm-", for_sockets=True)
        path = self._folder / "agent.sock"
        self.address = f"unix:{path}"  # in a directory that only this user can read
        self._socket = LocalSocket(path, self._forward_connection, "hil-farm-tunnel")

    def log(self) -> str:
        """Return the reasons for failed connections."""
        return self._socket.log()

    def close(self) -> None:
        """Close the socket and all connections. Idempotent."""
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _forward_connection(self, near: socket.socket) -> None:
        try:
            pass_on(self._dial(iter_pieces(near)), near)
        except HilError as error:
            raise NotCarried(str(error)) from error
        except grpc.RpcError as error:
            details = getattr(error, "details", None)
            raise NotCarried(str(details() if details else error)) from error


def iter_pieces(near: socket.socket) -> Iterator[pb.Piece]:
    """Yield the data received from a socket up to end of file."""
    with contextlib.suppress(OSError):
        while data := near.recv(wire.CHUNK):
            yield pb.Piece(data=data)


def pass_on(far: Any, near: socket.socket) -> None:
    """Copy a farm stream to a socket, then shut down the stream and the socket."""
    try:
        for piece in far:
            if piece.data:
                near.sendall(piece.data)
            else:  # empty piece: end of data
                with contextlib.suppress(OSError):  # the local peer has already closed
                    near.shutdown(socket.SHUT_WR)
    finally:
        far.cancel()
        # Unblock the thread that reads from the socket.
        with contextlib.suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)
