"""Read a gRPC stream without waiting forever for a lost reply.

gRPC (1.85) can end a call with a status without completing the pending read. For example, a server may stop while a
call begins. ``next`` on such a stream never returns, even if the call is cancelled. Therefore a thread reads, and the
caller stops waiting once the call has ended.
"""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Any

import grpc

_LOOK_S = 0.2
# A reply in transit at the end of the call arrives within this time.
_LOST_S = 2.0
# Maximum number of queued replies. gRPC's flow control holds back the rest.
_AHEAD = 2


class StreamReader:
    """Replies of a stream.

    Args:
        call: The gRPC call: an iterator, which is also the error that the iterator raises on failure.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._replies: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(_AHEAD)
        self._end: BaseException | None = None
        released = threading.Event()
        arguments = (call, self._replies, released)
        threading.Thread(target=_read, args=arguments, daemon=True, name="hil-replies").start()
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

    def _take(self) -> tuple[Any, BaseException | None]:
        lost_s = 0.0
        while lost_s < _LOST_S:
            try:
                return self._replies.get(timeout=_LOOK_S)
            except queue.Empty:
                lost_s += 0.0 if self._call.is_active() else _LOOK_S
        return None, StopIteration() if self._call.code() is grpc.StatusCode.OK else self._call


def _release(call: Any, released: threading.Event) -> None:
    released.set()
    call.cancel()


def _read(call: Any, replies: queue.Queue[tuple[Any, BaseException | None]], released: threading.Event) -> None:
    end: BaseException | None = None
    while end is None:
        reply = None
        try:
            reply = next(call)
        except Exception as error:
            end = error
        while not released.is_set():
            try:
                replies.put((reply, end), timeout=_LOOK_S)
                break
            except queue.Full:
                pass
        else:
            return
