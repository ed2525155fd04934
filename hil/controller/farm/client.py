"""A farm's gateway as calls: for commands, for links, for the hosts of boards. Errors of gRPC become hil's here."""

from __future__ import annotations

import contextlib
import copy
import re
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
from hil.controller.devices.interrupts import InterruptibleChannel
from hil.controller.farm.messages import Submission
from hil.controller.farm.paths import FarmAddress, check_way
from hil.controller.farm.rpc import FarmStub, json_of, submission_message
from hil.core.digest import digest_file
from hil.core.files import replacing
from hil.core.scratch import new_folder
from hil.errors import HilError
from hil.protocol import grpc_calls, wire
from hil.protocol.listening import grpc_address, host_port
from hil.protocol.local_socket import LocalSocket, NotCarried
from hil.protocol.v1 import farm_pb2 as pb

T = TypeVar("T")
M = TypeVar("M", pb.AskRequest, pb.DoRequest)

CONNECT_S = 5.0
_CALL_S = 60.0
# A gateway whose connection lives says something on its streams every 5 s; one that does not hangs. A store of files
# may take longer over one of them.
SILENT_S, _SILENT_FILE_S = 15.0, 120.0
_WATCH_S = 0.5
# A farm that is away is called again after so long.
AGAIN_S = 0.5
# A gateway that is restarted, or a database that is, is back by then.
_PATIENCE_S = 30.0


class FarmClient:
    """A connection to a farm. A context manager.

    Args:
        patience_s: for so long a gateway that is away is tried again, where that can do no harm.
        call_s: so long a call may take that is no stream.

    Raises:
        FarmUnreachable: no gateway answers.
        UsageError: the token would be sent to another machine in the clear.
    """

    def __init__(self, address: FarmAddress, *, patience_s: float = _PATIENCE_S, call_s: float = _CALL_S) -> None:
        self.address = address
        self._patience_s, self._call_s = patience_s, call_s
        self._channel: grpc.Channel | None = None
        self.gateway = ""
        self.stub: FarmStub  # the calls themselves, for streams; their errors are gRPC's: see `seam`
        self.connect()

    def connect(self) -> None:
        """Connect to the first gateway that answers. Where that was done before: anew, and the old streams end.

        Raises:
            FarmUnreachable: no gateway answers.
        """
        self.close()
        for gateway in gateways_that_listen(self.address):
            channel = open_channel(gateway, self.address.ca)
            try:
                grpc.channel_ready_future(channel).result(CONNECT_S)
            except grpc.FutureTimeoutError:
                grpc_calls.close_channel(channel)
                continue
            self._channel, self.gateway = channel, gateway
            self.stub = FarmStub(InterruptibleChannel(channel))
            return
        raise nobody_answers(self.address)

    @property
    def metadata(self) -> list[tuple[str, str]]:
        """What each call says of who makes it."""
        return self.address.metadata

    def close(self) -> None:
        """End the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            grpc_calls.close_channel(channel)

    def as_bearer(self, token: str) -> FarmClient:
        """The same connection with another's token: not to be closed, it ends with this one."""
        other = copy.copy(self)
        other.address = replace(self.address, token=token)
        return other

    def __enter__(self) -> FarmClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def submit(self, submission: Submission, *, trace: str = "") -> tuple[int, list[str]]:
        """Queue an order's jobs, once however often it is sent; returns the submission's number and the jobs' names.

        Raises:
            NoSuchBoard: no board of the farm can ever match.
            UsageError: the selector cannot be read, or the order is none.
            AccessRefused: the token does not let us.
        """
        reply = self._repeat("Submit", pb.SubmitRequest(submission=submission_message(submission), trace=trace))
        return reply.submission, list(reply.jobs)

    def ask(self, what: str, **arguments: Any) -> Any:
        """Read something (see ``Ask`` in the protocol); a gateway that is away is waited for."""
        return json_of(self._repeat("Ask", _filled(pb.AskRequest, what, arguments)).answer)

    def do(self, action: str, **arguments: Any) -> Any:
        """Change something (see ``Do`` in the protocol). Sent once: never repeated."""
        with seam():
            return json_of(self._call("Do", _filled(pb.DoRequest, action, arguments)).answer)

    def follow(self, jobs: Iterable[str], *, logs: bool = False) -> Iterator[pb.FollowReply]:
        """What happens to jobs until all have ended; goes on where it was when a gateway went away."""
        names, after = list(jobs), 0

        def begin() -> tuple[Any, Generator[Any, None, None], Any]:
            request = pb.FollowRequest(jobs=names, logs=logs, after=after)
            stream = self.stub.Follow(request, metadata=self.metadata)
            replies = heard(stream, SILENT_S)
            return stream, replies, next(replies, None)

        while True:
            stream, replies, reply = self._patiently(begin)
            try:
                while reply is not None:
                    kind = reply.WhichOneof("kind")
                    if kind == "log":
                        after = max(after, reply.log.number)
                    if kind:  # else it only says that it is there
                        yield reply
                    reply = next(replies, None)
                return
            except grpc.RpcError as error:
                if not is_away(error):
                    raise translated(error) from error
            finally:
                stream.cancel()
                replies.close()

    def upload(self, files: dict[str, Path]) -> int:
        """Send the files that the store lacks: digest -> file; returns the bytes sent. Idempotent, so it is repeated.

        Raises:
            UsageError: a file has changed since its digest was taken.
        """
        sent = 0

        def pieces(lacking: list[str]) -> Iterator[pb.FilePiece]:
            nonlocal sent
            for name in lacking:
                yield pb.FilePiece(start=pb.FileStart(digest=name, size=files[name].stat().st_size))
                with files[name].open("rb") as file:
                    while data := file.read(wire.CHUNK):
                        sent += len(data)
                        yield pb.FilePiece(data=data)

        def once() -> None:
            if lacking := list(self._call("Lacks", pb.LacksRequest(digests=list(files))).digests):
                # A blocking call would never return if the link were cut during the upload.
                upload = self.stub.Upload.future(pieces(lacking), metadata=self.metadata)
                try:
                    with _watched(upload, _SILENT_FILE_S, lambda: sent):
                        upload.result()
                except grpc.FutureCancelledError as error:
                    raise errors.FarmUnreachable(
                        f"the farm takes no more of the upload: nothing moved for {_SILENT_FILE_S:g} s"
                    ) from error

        self._patiently(once)
        return sent

    def download(self, digest: str, to: Path) -> None:
        """Fetch a file of the store, verified; it appears whole or not at all.

        Raises:
            FarmError: the store has it no more, or what came is not it.
        """
        to.parent.mkdir(parents=True, exist_ok=True)
        with replacing(to) as part:

            def once() -> None:
                with part.open("wb") as file:
                    stream = self.stub.Download(pb.DownloadRequest(digest=digest), metadata=self.metadata)
                    for piece in heard(stream, _SILENT_FILE_S):
                        file.write(piece.data)

            self._patiently(once)
            if digest_file(part, digest.partition(":")[0]) != digest:
                raise errors.FarmError(f"what the farm's store sent is not {digest}", hint="is its file damaged?")

    def _call(self, method: str, request: object) -> Any:
        return getattr(self.stub, method)(request, timeout=self._call_s, metadata=self.metadata)

    def _repeat(self, method: str, request: object) -> Any:
        return self._patiently(lambda: self._call(method, request))

    def _patiently(self, call: Callable[[], T]) -> T:
        """A call that may be repeated: a gateway that is away is tried again, and then any other one."""

        def reconnect(state: tenacity.RetryCallState) -> None:
            with contextlib.suppress(errors.FarmUnreachable):
                self.connect()

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(is_away),
            stop=tenacity.stop_after_delay(self._patience_s),
            wait=tenacity.wait_random_exponential(0.1, max=2),
            before_sleep=reconnect,
            reraise=True,
        )
        with seam():
            return retrying(call)


def _filled(kind: type[M], what: str, arguments: Mapping[str, Any]) -> M:
    """The message of a question or an action."""
    try:
        return kind(**{what: arguments})
    except (TypeError, ValueError) as error:
        raise errors.UsageError(f"{what!r} cannot be asked with that: {error}") from error


def gateways_that_listen(address: FarmAddress) -> Iterator[str]:
    """The gateways at which somebody listens, each looked at when it is asked for; UsageError as of check_way."""
    for gateway in address.gateways:
        check_way(gateway, address.ca)
        if _listens(gateway):
            yield gateway


def nobody_answers(address: FarmAddress) -> errors.FarmUnreachable:
    """What is said where no gateway of a farm answers."""
    return errors.FarmUnreachable(
        f"no gateway of the farm answers at {', '.join(address.gateways)}",
        hint="is it running? `hil farm up` starts one on this machine; with TLS, HIL_FARM_CA names its authority",
    )


def open_channel(gateway: str, ca: Path | None, api: Any = grpc) -> Any:
    """A channel to a gateway, of ``grpc`` or ``grpc.aio``; UsageError where there must be none: see check_way."""
    check_way(gateway, ca)
    options = [*grpc_calls.GRPC_OPTIONS, ("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)]
    if ca is None or gateway.startswith("unix:"):
        return api.insecure_channel(grpc_address(gateway), options)
    try:
        return api.secure_channel(gateway, grpc.ssl_channel_credentials(ca.read_bytes()), options)
    except OSError as error:
        raise errors.UsageError(f"the farm's authority {ca} cannot be read: {error}") from error


def heard(stream: Any, limit_s: float) -> Generator[Any, None, None]:
    """The replies of a stream; one that says nothing for so long is cancelled, which its reader is told."""
    count = 0
    with _watched(stream, limit_s, lambda: count):
        for reply in stream:
            count += 1
            yield reply


@contextlib.contextmanager
def _watched(call: Any, limit_s: float, progress: Callable[[], int]) -> Iterator[None]:
    """Cancel a call that makes no progress for so long."""
    over = threading.Event()

    def watch() -> None:
        last, due = progress(), time.monotonic() + limit_s
        while not over.wait(_WATCH_S):
            if (now := progress()) != last:
                last, due = now, time.monotonic() + limit_s
            elif time.monotonic() > due:
                call.cancel()

    threading.Thread(target=watch, daemon=True, name="farm-watch").start()
    try:
        yield
    finally:
        over.set()


def _listens(gateway: str) -> bool:
    """Whether anybody listens at an address: gRPC would find out only by trying for as long as it may."""
    try:
        if gateway.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(CONNECT_S)
                probe.connect(gateway.removeprefix("unix:"))
        else:
            socket.create_connection(host_port(gateway, what="gateway's address"), CONNECT_S).close()
    except OSError:
        return False
    return True


def is_away(error: BaseException) -> bool:
    """Whether an error says that the gateway, or the database behind it, is away for now."""
    # ValueError: the channel was closed while no gateway answered.
    if isinstance(error, ValueError) and {"closed", "channel"} <= set(re.findall(r"\w+", str(error).lower())):
        return True
    away = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return isinstance(error, (grpc.Call, grpc.aio.AioRpcError)) and error.code() in away


@contextlib.contextmanager
def seam() -> Iterator[None]:
    """gRPC's errors leave it as hil's."""
    try:
        yield
    except grpc.RpcError as error:
        raise translated(error) from error
    except ValueError as error:
        if not is_away(error):
            raise
        raise errors.FarmUnreachable("no gateway of the farm answers any more") from error


def translated(error: grpc.RpcError) -> errors.HilError:
    """The hil error that a gRPC error of a gateway stands for: the far side's own where it sent one."""
    code = error.code()
    if reported := grpc_calls.typed_error(error):
        if is_away(error):
            return errors.FarmUnreachable(reported.message, hint=reported.hint, detail=reported.detail)
        return reported
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return errors.AccessRefused(
            f"the farm refused us: {error.details()}", hint="HIL_FARM_TOKEN must be a token that is still good"
        )
    if is_away(error) or code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.FarmUnreachable(f"the farm does not answer: {error.details()}")
    return errors.FarmError(f"the farm failed: {code.name}: {error.details()}")


Dial = Callable[[Iterator[pb.Piece]], Any]

# What is left of a socket's path (at most 104 bytes on macOS) for the folder's parent.
_LONGEST_FOLDER = 60


class FarmTunnel:
    """A Unix socket that leads to the agent of a leased board, until it is closed; ``dial`` opens a stream for each
    connection.
    """

    def __init__(self, dial: Dial) -> None:
        self._dial = dial
        self._folder = new_folder("hil-farm-", for_sockets=True)
        path = self._folder / "agent.sock"
        self.address = f"unix:{path}"  # in a folder that nobody else can see into
        self._socket = LocalSocket(path, self._carry, "hil-farm-tunnel")

    def log(self) -> str:
        """Why connections were not carried."""
        return self._socket.log()

    def close(self) -> None:
        """End it and all that it carries. Closing it again does nothing."""
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _carry(self, near: socket.socket) -> None:
        try:
            pass_on(self._dial(pieces_from(near)), near)
        except (grpc.RpcError, HilError) as error:
            raise NotCarried(str(error.details() if isinstance(error, grpc.Call) else error)) from error


def pieces_from(near: socket.socket) -> Iterator[pb.Piece]:
    """What comes from a socket, until its other end sends no more."""
    with contextlib.suppress(OSError):
        while data := near.recv(wire.CHUNK):
            yield pb.Piece(data=data)


def pass_on(far: Any, near: socket.socket) -> None:
    """Send a socket what comes from a stream of the farm's, until that ends; then both are at their end."""
    try:
        for piece in far:
            if piece.data:
                near.sendall(piece.data)
            else:  # nothing more comes from there
                with contextlib.suppress(OSError):  # whoever is here has gone first
                    near.shutdown(socket.SHUT_WR)
    finally:
        far.cancel()
        # The thread that reads from it must not be left there.
        with contextlib.suppress(OSError):
            near.shutdown(socket.SHUT_RDWR)
