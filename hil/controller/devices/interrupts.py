"""Ctrl-C during a call of gRPC: it ends the call, and KeyboardInterrupt is raised when the call has ended.

Python raises KeyboardInterrupt between any two steps of the main thread. gRPC is not made for that: it may leave a lock
held, or end the thread that serves all calls of a channel. Then closing the channel, or Python's end, never returns.
"""

from __future__ import annotations

# signal's own functions make enums of handlers, by way of exceptions; typeshed does not know the module below them.
import _signal  # type: ignore[import-not-found]
import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import grpc


class InterruptibleChannel:
    """A channel whose calls end by Ctrl-C. It makes what ``grpc.Channel`` makes, and nothing else."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    def __getattr__(self, kind: str) -> Callable[..., _Method]:
        make = getattr(self._channel, kind)
        return lambda *arguments, **settings: _Method(make(*arguments, **settings), kind.endswith("_unary"))


class _Method:
    """A method: called, it is a call that has ended, or a stream of replies; ``future`` begins one that goes on."""

    def __init__(self, method: Any, is_unary: bool) -> None:
        self._method = method
        self._is_unary = is_unary

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        if not self._is_unary:
            return _Call(self._method, arguments, settings)
        return self.future(*arguments, **settings).result()

    def future(self, *arguments: Any, **settings: Any) -> _Call:
        return _Call(self._method.future, arguments, settings)


class _Call:
    """A call that goes on. What is not here is the call's own (``code``, ``details``)."""

    def __init__(self, begin: Callable[..., Any], arguments: Any, settings: Any) -> None:
        with _Interrupts() as interrupts:
            self._call = begin(*arguments, **settings)
            interrupts.end(self._call)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with _Interrupts() as interrupts:
            interrupts.end(self._call)
            return next(self._call)

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


class _Interrupts:
    """Ctrl-C in this block is raised when the block has ended.

    Only where it would be raised in the block otherwise: in the main thread, under Python's own handler.
    """

    def __init__(self) -> None:
        self._call: Any = None
        self._came = self._waits = False

    def end(self, call: Any) -> None:
        """From now on Ctrl-C cancels a call; one that came before this does now."""
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
            # The main thread may hold the call's lock just now.
            _thread.start_new_thread(self._call.cancel, ())
