"""Host side of `hil farm console`: send the lines of a board's console to users, and input of the lease holder to it.

A connection consists of JSON lines in both directions. The user first sends the time of the first wanted line, and then
input. The host sends lines as :class:`ConsoleEntry`, or an error before it ends the connection.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from hil.controller.devices.agent_client.interruptible_channel import InterruptibleChannel
from hil.controller.devices.console.lines import ConsoleLine
from hil.controller.devices.console.reader import ConsoleReader
from hil.controller.devices.console.spool import encode_entry, make_entry
from hil.controller.devices.console.viewing import encode_input, read_stored_lines
from hil.controller.farm.client.client import open_channel
from hil.controller.farm.client.machine import get_machine_id
from hil.controller.farm.paths import FarmAddress
from hil.controller.farm.rpc import DIAL_KEY, FarmStub
from hil.core import clock
from hil.core.board_config import BoardConfig
from hil.core.bounded_json import parse_json
from hil.core.text import TextSink
from hil.errors import HilError, UsageError
from hil.protocol import grpc_calls
from hil.protocol.v1 import farm_pb2 as pb

_POLL_SECONDS = 0.2
# Time for the user's request, and for the start of the console before the first input.
_FIRST_SECONDS = 10.0
# Maximum users at the same time, and lines that wait for a slow user.
MAX_USERS = 16
_MAX_WAITING = 20_000
# Maximum bytes of a request or a line of input.
_MAX_INPUT = 1 << 16


@dataclass(frozen=True)
class _ConsoleRequest:
    """First message of a user.

    Attributes:
        since_s: time of the first wanted line, in seconds since the epoch; None for new lines only.
        follows: False for the stored lines only.
        wants_clock: True to send this host's clock when the console is open.
    """

    since_s: float | None
    follows: bool
    wants_clock: bool = False


class ConsoleEndpoint:
    """Console of a board for users of the farm. The first user opens the console, and the last one closes it.

    Args:
        get_config: returns the board's config.
        say: receives notes for the operator of the host.
    """

    def __init__(self, get_config: Callable[[], BoardConfig], farm: FarmAddress, say: TextSink) -> None:
        self._get_config, self._farm, self._say = get_config, farm, say
        self._lock = threading.Lock()
        self._reader: ConsoleReader | None = None
        self._is_open = threading.Event()
        self._users: list[queue.Queue[ConsoleLine]] = []
        self._calls: set[Any] = set()
        self._is_closed = threading.Event()

    def open_dial(self, dial: pb.DialIn, gateway: str, may_write: Callable[[], bool]) -> None:
        """Serve a user in a separate thread.

        Args:
            gateway: address to connect to if the dial does not contain one.
            may_write: returns True while the user leases the board.
        """
        arguments = (dial, gateway, may_write)
        threading.Thread(target=self._serve_user, args=arguments, daemon=True, name="farm-console").start()

    def close(self) -> None:
        """End all connections, and close the console."""
        self._is_closed.set()
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.cancel()

    def _serve_user(self, dial: pb.DialIn, gateway: str, may_write: Callable[[], bool]) -> None:
        try:
            channel = open_channel(dial.gateway or gateway, self._farm.ca)
        except HilError as error:
            return self._say(f"console connection failed: {error}")
        ended = threading.Event()
        asked: queue.SimpleQueue[_ConsoleRequest] = queue.SimpleQueue()
        try:
            metadata = [*self._farm.metadata, (DIAL_KEY, dial.id)]
            pieces = self._iter_pieces(asked, ended)
            call = FarmStub(InterruptibleChannel(channel)).Accept(pieces, metadata=metadata)
            with self._lock:
                self._calls.add(call)
            try:
                self._read_input(call, asked, may_write)
            finally:
                ended.set()
                call.cancel()
                with self._lock:
                    self._calls.discard(call)
        except grpc.RpcError:
            pass  # the user or the gateway closed the connection
        finally:
            ended.set()
            grpc_calls.close_channel(channel)

    def _read_input(self, call: Any, asked: queue.SimpleQueue[_ConsoleRequest], may_write: Callable[[], bool]) -> None:
        """Read the user's request and input until the user ends the connection."""
        rest, is_first = b"", True
        for piece in call:
            if not piece.data or len(rest) > _MAX_INPUT:
                return
            *lines, rest = (rest + piece.data).split(b"\n")
            for line in lines:
                try:
                    request = parse_json(line)
                    if is_first:
                        since_s = request["since_s"]
                        # Absent in requests of older clients.
                        follows = request.get("follow", True) is not False
                        wants_clock = request.get("clock") is True
                        asked.put(_ConsoleRequest(None if since_s is None else float(since_s), follows, wants_clock))
                        is_first = False
                    elif may_write():
                        self._write_input(str(request["input"]))
                except (ValueError, KeyError, TypeError, OverflowError):
                    return

    def _write_input(self, text: str) -> None:
        self._is_open.wait(_FIRST_SECONDS)  # the first input may arrive before the console is open
        reader = self._reader
        if reader is not None:
            try:
                reader.write(encode_input(self._get_config(), text))
            except HilError as error:
                self._say(f"console input failed: {error.message}")

    def _iter_pieces(self, asked: queue.SimpleQueue[_ConsoleRequest], ended: threading.Event) -> Iterator[pb.Piece]:
        """Yield the lines for a user. Yield an error if the console cannot be read."""
        try:
            request = asked.get(timeout=_FIRST_SECONDS)
            since_s = request.since_s
            if not request.follows:
                _check_console(config := self._get_config())
                yield from _encode_pieces(read_stored_lines(config, since_s or 0.0))
                yield pb.Piece(data=json.dumps({"end": True}).encode() + b"\n")
                return
            with self._open_lines() as lines:
                if request.wants_clock:
                    yield _encode_clock()
                known: list[ConsoleLine] = [] if since_s is None else read_stored_lines(self._get_config(), since_s)
                yield from _encode_pieces(known)
                recent = set(known[-200:])
                while not (ended.is_set() or self._is_closed.is_set()):
                    new = [line for line in _take_lines(lines) if line not in recent]
                    yield from _encode_pieces(new)
        except queue.Empty:
            return
        except HilError as error:
            text = json.dumps({"error": error.message, "hint": error.hint})
            yield pb.Piece(data=text.encode() + b"\n")

    @contextlib.contextmanager
    def _open_lines(self) -> Iterator[queue.Queue[ConsoleLine]]:
        """Open the console for a user, unless it is open. Yield the queue of new lines."""
        lines: queue.Queue[ConsoleLine] = queue.Queue(_MAX_WAITING)
        with self._lock:
            config = self._get_config()
            _check_console(config)
            if len(self._users) >= MAX_USERS:
                raise UsageError(f"{MAX_USERS} users already read the console of {config.name}")
            # Before the reader starts, so that this user gets the first line.
            self._users.append(lines)
            try:
                if self._reader is None:
                    self._reader = ConsoleReader(config, self._add_lines)
                    self._is_open.set()
            except BaseException:
                self._users.remove(lines)
                raise
        try:
            yield lines
        finally:
            with self._lock:
                self._users.remove(lines)
                if not self._users and self._reader is not None:
                    # A new user waits until the console is closed: a serial port has one reader.
                    self._is_open.clear()
                    self._reader.close()
                    self._reader = None

    def _add_lines(self, found: Sequence[ConsoleLine]) -> None:
        for lines in list(self._users):
            with contextlib.suppress(queue.Full):  # a slow user loses lines
                for line in found:
                    lines.put_nowait(line)


def _check_console(config: BoardConfig) -> None:
    """Raise UsageError if a board has no console."""
    if not config.console.is_local:
        raise UsageError(
            f"{config.name} has no console on its host",
            hint="add [console] with serial, command, address or labgrid to its config on the host",
        )


def _take_lines(lines: queue.Queue[ConsoleLine]) -> list[ConsoleLine]:
    """Return the waiting lines, after a short wait for the first one."""
    found: list[ConsoleLine] = []
    with contextlib.suppress(queue.Empty):
        found.append(lines.get(timeout=_POLL_SECONDS))
        while len(found) < 1000:
            found.append(lines.get_nowait())
    return found


def _encode_clock() -> pb.Piece:
    """Return the time now on this host's clock, which the lines refer to."""
    return pb.Piece(data=json.dumps({"clock_ns": clock.get_time_ns(), "machine": get_machine_id()}).encode() + b"\n")


def _encode_pieces(lines: Sequence[ConsoleLine]) -> Iterator[pb.Piece]:
    for at in range(0, len(lines), 100):
        yield pb.Piece(data=b"".join(encode_entry(make_entry(line)) for line in lines[at : at + 100]))
