"""A call over gRPC, whose errors become :class:`CallFailed`: here, and nowhere else of what calls an agent."""

from __future__ import annotations

import collections
import contextlib
import queue
from collections.abc import Iterator
from typing import Any

import grpc

from hil import errors
from hil.controller.devices import answers
from hil.controller.devices.board_client import Target
from hil.controller.devices.call import Call, CallFailed
from hil.controller.devices.interrupts import InterruptibleChannel
from hil.protocol import data_connection, grpc_calls, wire
from hil.protocol.listening import check_tls_files, check_token_way, grpc_address

_LOOK_S = 0.2
# A call that is sent data keeps so many messages waiting.
_AHEAD = 2


class GrpcCall:
    """A call over gRPC.

    Args:
        called: the stub's method.
        method: what it takes, and answers with.
        settings: the call's own, such as its metadata.
    """

    def __init__(self, called: Any, method: data_connection.Method, **settings: Any) -> None:
        self._streams_replies, self._settings = method.streams_replies, settings
        # A call with one answer is begun and not waited for, until that is asked for.
        self._called = called if method.streams_replies else called.future
        self._asked: queue.Queue[Any] | None = queue.Queue(_AHEAD) if method.streams_requests else None
        self._replies: Any = None
        if self._asked is not None:
            self._begin(iter(self._asked.get, None))

    def send(self, message: Any) -> None:
        """Send a message, or data."""
        if self._asked is None:
            self._begin(message)
        else:
            # Data is copied now: gRPC takes it later, and its caller may have something else there then.
            self._put(self._asked, grpc_calls.encode(message) if isinstance(message, memoryview) else message)

    def end(self) -> None:
        """Send no more."""
        if self._asked is not None:
            self._put(self._asked, None)

    def receive(self) -> Any:
        """The next message; None where no more comes."""
        with _told():
            return next(self._replies, None) if self._streams_replies else self._replies.result()

    def receive_into(self, view: memoryview) -> int:
        """Receive the next data into a view; how many bytes came."""
        data = answers.data_of(self.receive(), view.nbytes)
        view[: data.nbytes] = data
        return data.nbytes

    def cancel(self) -> None:
        """End the call, and whoever waits in it."""
        if self._asked is not None:
            with contextlib.suppress(queue.Full):
                self._asked.put_nowait(None)
        if self._replies is not None:
            self._replies.cancel()

    def _begin(self, asked: Any) -> None:
        with _told():
            self._replies = self._called(asked, **self._settings)

    def _put(self, asked: queue.Queue[Any], message: Any) -> None:
        while True:
            try:
                asked.put(message, timeout=_LOOK_S)
                return
            except queue.Full:
                # Nobody takes it any more once the call has ended, which its replies then say.
                if not self._replies.is_active():
                    with _told():
                        collections.deque(self._replies, maxlen=0)
                    raise answers.broken("it ended the call before all was sent") from None


class GrpcCalls:
    """The calls of one agent over gRPC. Raises as :func:`agent_channel`."""

    def __init__(self, target: Target) -> None:
        self._channel = agent_channel(target)
        self._stub = grpc_calls.Stub(InterruptibleChannel(self._channel))
        self._metadata = [("authorization", f"Bearer {target.token}")] if target.token else []

    def begin(self, method: str, session: str, *, waits: bool) -> Call:
        """Begin a call.

        Args:
            session: the token of the session that it belongs to; "" where it belongs to none.
            waits: for the connection, which otherwise has to be there.
        """
        metadata = [*self._metadata, *([(wire.SESSION_KEY, session)] if session else [])]
        named = data_connection.METHODS[method]
        return GrpcCall(getattr(self._stub, method), named, metadata=metadata, wait_for_ready=waits)

    def is_answered(self, within_s: float) -> bool:
        """Whether an agent is at the other end, though it may be busy; one that hangs does not get so far."""
        ready = grpc.channel_ready_future(self._channel)
        try:
            ready.result(within_s)
        except grpc.FutureTimeoutError:
            return False
        finally:
            ready.cancel()
        return True

    def close(self) -> None:
        """End all calls, and disconnect."""
        grpc_calls.close_channel(self._channel)


def agent_channel(target: Target) -> grpc.Channel:
    """Open a channel to an agent; nothing is sent before the first call.

    Raises UsageError: a TLS file cannot be read, half of TLS was given, or the token would go in the clear.
    """
    check_tls_files(cert=target.cert, key=target.key, ca=target.ca)
    if target.token:
        hint = "ca in the config's [connection] names the authority of the agent's certificate"
        check_token_way(target.address, encrypted=target.ca is not None, hint=hint)
    # A pool of its own, or a new client of an address shares the dying connection of an older one.
    options = [
        *grpc_calls.GRPC_OPTIONS,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.service_config", answers.service_config()),
    ]
    if target.ca is None:
        return grpc.insecure_channel(grpc_address(target.address), options)
    try:
        key = target.key.read_bytes() if target.key else None
        certificate = target.cert.read_bytes() if target.cert else None
        credentials = grpc.ssl_channel_credentials(target.ca.read_bytes(), key, certificate)
    except OSError as error:
        raise errors.UsageError(f"a TLS file cannot be read: {error}") from error
    return grpc.secure_channel(target.address, credentials, options)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except grpc.FutureCancelledError as error:
        raise CallFailed("CANCELLED", "the call was ended here") from error
    except grpc.RpcError as error:
        code, text = error.code(), error.details()
        raise CallFailed(code.name, text or "", grpc_calls.error_of(error)) from error
    except ValueError as error:  # the channel is closed
        raise CallFailed("CANCELLED", str(error)) from error
