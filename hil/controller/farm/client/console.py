"""Read a board's console through the farm, and send input while the user leases the board."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import msgspec

from hil.controller.devices.console.lines import MAX_LINE_BYTES, ConsoleLine
from hil.controller.farm.client.client import FarmClient, convert_grpc_errors
from hil.controller.farm.client.host_clock import HostClock
from hil.controller.farm.client.machine import get_machine_id
from hil.controller.farm.messages import GrantedLease
from hil.controller.farm.rpc import CONSOLE_KEY, LEASE_KEY, LEASE_SECRET_KEY
from hil.controller.records.console import ConsoleEntry
from hil.core.bounded_json import parse_json
from hil.core.text import escape_controls
from hil.errors import FarmError, UsageError
from hil.protocol.v1 import farm_pb2 as pb

# A host splits lines at 4 KiB, which JSON can escape to six times the size.
_MAX_LINE = 1 << 16
# Maximum seconds without a stored line, and for all stored lines.
_STORED_SECONDS, _MAX_STORED_SECONDS = 10.0, 300.0
_decoder = msgspec.json.Decoder(ConsoleEntry)


class FarmConsole:
    """Connection to the console of a farm's board.

    Args:
        since_s: time of the first wanted line, in seconds since the epoch; None for new lines only.
        held: the user's lease of the board, for :meth:`send_line`.
        follows: False for the stored lines only. The host does not open the console.
        host_clock: converts the lines' times to the clock of this machine; None keeps the times of the host.
    """

    def __init__(
        self,
        farm: FarmClient,
        board: str,
        since_s: float | None,
        seconds: float | None,
        held: GrantedLease | None,
        *,
        follows: bool = True,
        host_clock: HostClock | None = None,
    ) -> None:
        # A host of an older release continues after the stored lines.
        self._seconds = seconds if follows else _STORED_SECONDS
        self._farm, self._board, self._held, self._follows = farm, board, held, follows
        self._outgoing: queue.SimpleQueue[dict[str, object] | None] = queue.SimpleQueue()
        self._outgoing.put({"since_s": since_s, "follow": follows, "clock": host_clock is not None})
        self._host_clock = host_clock
        self._is_ended = threading.Event()
        self._call: Any = None
        self._timer: threading.Timer | None = None

    def send_line(self, text: str) -> None:
        """Send a line of input to the board. The host ignores it without a lease."""
        self._outgoing.put({"input": text})

    def iter_lines(self) -> Iterator[ConsoleLine]:
        """Yield the lines, for the given number of seconds, or until the user stops.

        Raises:
            UsageError: the board does not exist or has no console.
            AccessRefused: the token does not allow this.
            FarmError, FarmUnreachable: the connection ended.
        """
        metadata = [*self._farm.metadata, (CONSOLE_KEY, self._board)]
        if self._held is not None:
            metadata += [(LEASE_KEY, str(self._held.grant.lease)), (LEASE_SECRET_KEY, self._held.key)]
        with convert_grpc_errors():
            self._call = call = self._farm.stub.Dial(self._iter_pieces(), metadata=metadata)
        if self._is_ended.is_set():
            call.cancel()
        self._restart_timer()
        if not self._follows:
            call = self._iter_stored_pieces(call)
        try:
            with convert_grpc_errors():
                is_complete = yield from _parse_pieces(call, self._board, self._host_clock)
            if is_complete:
                return
        except FarmError:
            if not self._is_ended.is_set():
                raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._outgoing.put(None)
            self._call.cancel()
        if not self._is_ended.is_set():
            raise FarmError(f"the host ended the console of {self._board}")

    def _restart_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._seconds is not None:
            self._timer = threading.Timer(self._seconds, self.stop)
            self._timer.daemon = True
            self._timer.start()

    def _iter_stored_pieces(self, call: Iterator[pb.Piece]) -> Iterator[pb.Piece]:
        """Yield the pieces of the stored lines. Raise FarmError if a host with a busy console does not end them."""
        deadline = time.monotonic() + _MAX_STORED_SECONDS
        for piece in call:
            self._restart_timer()
            if time.monotonic() > deadline:
                raise FarmError(
                    f"the host did not end the stored lines of {self._board} within {_MAX_STORED_SECONDS:g} s",
                    hint="update hil on the host, or use --seconds S instead of --no-follow",
                )
            yield piece

    def stop(self) -> None:
        """End :meth:`iter_lines`. May be called from any thread."""
        self._is_ended.set()
        if (call := self._call) is not None:
            with contextlib.suppress(Exception):
                call.cancel()

    def _iter_pieces(self) -> Iterator[pb.Piece]:
        for request in iter(self._outgoing.get, None):
            yield pb.Piece(data=json.dumps(request).encode() + b"\n")


def _parse_pieces(call: object, board: str, host_clock: HostClock | None = None) -> Generator[ConsoleLine, None, bool]:
    """Yield the lines of a stream. The host is not trusted: ignore invalid lines, and escape control characters.

    Returns True if the host has sent all stored lines.
    """
    rest = b""
    for piece in call:  # type: ignore[attr-defined]
        *lines, rest = (rest + piece.data).split(b"\n")
        rest = rest if len(rest) <= _MAX_LINE else b""
        for data in lines:
            try:
                found = _decoder.decode(data)
            except (msgspec.DecodeError, UnicodeError, RecursionError):
                if _parse_report(data, board, host_clock):
                    return True
                continue
            host_ns = found.host_ns if host_clock is None else host_clock.convert(found.host_ns)
            text = escape_controls(found.text[:MAX_LINE_BYTES].replace("\n", " "))
            yield ConsoleLine(host_ns, found.time_s, text, found.kind)
    return False


def _parse_report(data: bytes, board: str, host_clock: HostClock | None) -> bool:
    """Read a message that is not a line: an error, the host's clock, or the end of the stored lines.

    Returns True at the end of the stored lines. Raises UsageError if the host sent an error.
    """
    with contextlib.suppress(ValueError, AttributeError):
        found = parse_json(data)
        if text := found.get("error"):
            raise UsageError(str(text)[:500], board=board, hint=str(found.get("hint", ""))[:500])
        if host_clock is not None and isinstance(now := found.get("clock_ns"), int):
            host_clock.start(now, is_same_machine=found.get("machine") == get_machine_id())
        return found.get("end") is True
    return False
