"""gRPC channel whose calls never hang: neither after Ctrl-C nor after a lost reply.

Python raises KeyboardInterrupt between any two steps of the main thread, which gRPC does not support. The exception may
leave a lock held, or end the thread that serves all calls of a channel. Then closing the channel or exiting Python
hangs. Ctrl-C therefore cancels the call, and KeyboardInterrupt is raised after the call has ended.
"""

from __future__ import annotations

# The functions in ``signal`` convert handlers to enums, with exceptions inside, so use the C module. typeshed does not
# know ``_signal``.
import _signal  # type: ignore[import-not-found]
import _thread
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import grpc

from hil.protocol import grpc_calls

_LOOK_SECONDS = 0.2
# Time in seconds for a reply in transit to arrive after the call has ended.
_LOST_SECONDS = 2.0
# Maximum queued replies. gRPC's flow control delays further replies.
_AHEAD = 2


class ChannelClosed(grpc.RpcError):
    """A call was made on a channel that this process has closed. gRPC itself raises ValueError."""

    def code(self) -> grpc.StatusCode:
        """Return the status for a call that was not sent."""
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        """Return the reason."""
        return "the connection is closed"


class InterruptibleChannel:
    """gRPC channel whose calls Ctrl-C cancels. It supports only the factory methods of ``grpc.Channel``."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self.is_closed = False

    def __getattr__(self, kind: str) -> Callable[..., _Method]:
        make = getattr(self._channel, kind)
        return lambda *arguments, **settings: _Method(self, make(*arguments, **settings), kind.endswith("_unary"))

    def close(self) -> None:
        """Cancel all calls and disconnect. Later calls raise ChannelClosed."""
        self.is_closed = True
        grpc_calls.close_channel(self._channel)


class _Method:
    """Method of a stub. Calling it returns the result of a unary call or a stream; ``future`` begins a call."""

    def __init__(self, channel: InterruptibleChannel, method: Any, is_unary: bool) -> None:
        self._channel = channel
        self._method = method
        self._is_unary = is_unary

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        if not self._is_unary:
            return self._begin(self._method, arguments, settings)
        return self.future(*arguments, **settings).result()

    def future(self, *arguments: Any, **settings: Any) -> _Call:
        return self._begin(self._method.future, arguments, settings)

    def _begin(self, begin: Callable[..., Any], arguments: Any, settings: Any) -> _Call:
        try:
            return _Call(begin, arguments, settings)
        except ValueError as error:
            if self._channel.is_closed:
                raise ChannelClosed from error
            raise


class _Call:
    """Open call. Other attributes, such as ``code`` and ``details``, are those of the gRPC call."""

    def __init__(self, begin: Callable[..., Any], arguments: Any, settings: Any) -> None:
        self._reader: StreamReader | None = None
        with _Interrupts() as interrupts:
            self._call = begin(*arguments, **settings)
            interrupts.end(self._call)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with _Interrupts() as interrupts:
            interrupts.end(self._call)
            self._reader = self._reader or StreamReader(self._call)
            return self._reader.read()

    def is_readable(self) -> bool:
        with _Interrupts():
            self._reader = self._reader or StreamReader(self._call)
            return self._reader.is_ready()

    def result(self, timeout: float | None = None) -> Any:
        with _Interrupts() as interrupts:
            interrupts.end(self._call)
            return self._call.result(timeout)

    def is_active(self) -> bool:
        with _Interrupts():
            return bool(self._call.is_active())

    def cancel(self) -> None:
        with _Interrupts():
            self._call.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


class StreamReader:
    """Replies of a stream, which a thread reads.

    gRPC (1.85) can end a call with a status without completing the pending read. For example, a server may stop while
    a call begins. ``next`` on such a stream never returns, even if the call is cancelled.

    Args:
        call: The gRPC call object. It is an iterator. If the call fails, the iterator raises this same object as the
            exception.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._replies: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(_AHEAD)
        self._end: BaseException | None = None
        released = threading.Event()
        arguments = (call, self._replies, released)
        threading.Thread(target=_read_replies, args=arguments, daemon=True, name="hil-replies").start()
        # Cancel the stream when its reader is garbage collected, as gRPC does.
        self._release = weakref.finalize(self, _release, call, released)
        self._release.atexit = False

    def read(self) -> Any:
        """Return the next reply. Raises StopIteration or the gRPC error at the end and on every later read."""
        if self._end is None:
            reply, self._end = self._take()
            if self._end is None:
                return reply
        raise self._end

    def is_ready(self) -> bool:
        """Return whether a reply or the end has arrived."""
        return not self._replies.empty()

    def _take(self) -> tuple[Any, BaseException | None]:
        lost_s = 0.0
        while lost_s < _LOST_SECONDS:
            try:
                return self._replies.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                lost_s += 0.0 if self._call.is_active() else _LOOK_SECONDS
        return None, StopIteration() if self._call.code() is grpc.StatusCode.OK else self._call


def _release(call: Any, released: threading.Event) -> None:
    released.set()
    call.cancel()


def _read_replies(call: Any, replies: queue.Queue[tuple[Any, BaseException | None]], released: threading.Event) -> None:
    end: BaseException | None = None
    while end is None:
        reply = None
        try:
            reply = next(call)
        except Exception as error:
            end = error
        while not released.is_set():
            try:
                replies.put((reply, end), timeout=_LOOK_SECONDS)
                break
            except queue.Full:
                pass
        else:
            return


class _Interrupts:
    """Defer Ctrl-C to the end of the block.

    Takes effect only in the main thread with Python's default handler.
    """

    def __init__(self) -> None:
        self._call: Any = None
        self._came = self._waits = False

    def end(self, call: Any) -> None:
        """Cancel ``call`` on Ctrl-C, or at once if Ctrl-C was already pressed."""
        self._call = call
        if self._came:
            call.cancel()

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._waits = _signal.getsignal(signal.SIGINT) is signal.default_int_handler
            if self._waits:
                _signal.signal(signal.SIGINT, self._remember)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._waits:
            _signal.signal(signal.SIGINT, signal.default_int_handler)
            if self._came:
                raise KeyboardInterrupt from None

    def _remember(self, number: int, frame: object) -> None:
        self._came = True
        if self._call is not None:
            # Cancel in a new thread, because the interrupted main thread may have the call's lock.
            _thread.start_new_thread(self._call.cancel, ())
