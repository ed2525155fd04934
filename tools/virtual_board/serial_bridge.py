"""Serial line between a pseudo-terminal and an emulator, with the speed and the faults of a real line."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import threading
import time
import tty
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from hil.errors import UsageError

_CHUNK = 4096
# With a speed, bytes are sent in portions of this time.
_PORTION_S = 0.002
_BLOCK = 64
_DELAY_S = 0.1
_BITS = 10  # start bit, eight data bits, stop bit


@dataclass(frozen=True)
class LineFaults:
    """Faults of the line, each with a probability per block of 64 bytes."""

    loss: float = 0.0  # the block is lost
    flip: float = 0.0  # a bit of the block changes
    repeat: float = 0.0  # the block arrives twice
    delay: float = 0.0  # the block arrives 0.1 s later

    @classmethod
    def parse(cls, text: str) -> LineFaults:
        """Parse ``loss=0.01,flip=0.001``. Raises UsageError for an unknown fault or an invalid probability."""
        values: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in {one.name for one in fields(cls)}:
                raise UsageError(f"unknown line fault {name!r}", hint="faults: loss, flip, repeat, delay")
            try:
                values[name] = float(value)
            except ValueError:
                raise UsageError(f"invalid probability {value!r} of {name}") from None
            if not 0 <= values[name] <= 1:
                raise UsageError(f"the probability of {name} must be from 0 to 1")
        return cls(**values)


class LineDamage:
    """Damage to the bytes of one direction.

    Blocks are counted along the line. So the probabilities do not depend on the portions in which bytes arrive, which
    are single bytes on an idle machine and long chunks on a busy one.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._block = bytearray()  # bytes of the current block that arrived
        self._passed = 0  # bytes of the current block
        self._is_lost = self._is_repeated = False
        self._flipped = -1  # place of a changed bit in the block

    def apply(self, data: bytes, faults: LineFaults, wait: Callable[[float], None] = time.sleep) -> bytes:
        """Return what arrives of the next bytes."""
        if faults == LineFaults():
            self._passed = 0
            return data
        out = bytearray()
        for byte in data:
            if not self._passed:
                self._choose(faults, wait)
            if self._flipped == 8 * self._passed + (bit := self._flipped % 8):
                byte ^= 1 << bit
            self._passed += 1
            self._block.append(byte)
            if not self._is_lost:
                out.append(byte)
            if self._passed == _BLOCK:
                if self._is_repeated and not self._is_lost:
                    out += self._block
                self._passed = 0
        return bytes(out)

    def _choose(self, faults: LineFaults, wait: Callable[[float], None]) -> None:
        """Choose the faults of the next block."""
        self._block.clear()
        if self._random.random() < faults.delay:
            wait(_DELAY_S)
        self._is_lost = self._random.random() < faults.loss
        self._flipped = self._random.randrange(8 * _BLOCK) if self._random.random() < faults.flip else -1
        self._is_repeated = self._random.random() < faults.repeat


class SerialBridge:
    """Pseudo-terminal that is connected to the emulator's socket while the emulator runs.

    Args:
        link: symbolic link to the terminal.
        baud: speed in both directions; 0: as fast as possible.
        seed: seed of the faults.
        wake: called before the emulator gets data.
    """

    def __init__(self, link: Path, baud: int = 0, seed: int = 0, *, wake: Callable[[], None] = lambda: None) -> None:
        self._wake = wake
        self._last = ("down", time.monotonic())
        self._master, self._slave = os.openpty()
        tty.setraw(self._slave)
        link.unlink(missing_ok=True)
        link.symlink_to(os.ttyname(self._slave))
        self._rate = baud / _BITS
        self._damage = {way: LineDamage(f"{seed} {way}") for way in ("down", "up")}
        self.faults = LineFaults()
        self.is_cut = False
        self.counts = {"up": 0, "down": 0}  # bytes from and to the emulator
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()
        self._ended = False
        for source in ("down", "up"):
            threading.Thread(target=self._forward, args=(source,), daemon=True).start()

    def attach(self, connection: socket.socket | None) -> None:
        """Connect the terminal to an emulator, or to nothing."""
        with self._lock:
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)
                self._connection.close()
            self._connection = connection

    def is_answered(self, seconds: float) -> bool:
        """Return whether the last data came from the emulator, and nothing followed for some time."""
        way, when = self._last
        return way == "up" and time.monotonic() > when + seconds

    def close(self) -> None:
        """End the line."""
        self._ended = True
        self.attach(None)

    def _forward(self, way: str) -> None:
        debt_s = 0.0
        portion = max(1, int(self._rate * _PORTION_S)) if self._rate else _CHUNK
        while not self._ended:
            connection = self._connection
            source = self._master if way == "down" else connection.fileno() if connection else -1
            if source < 0:
                time.sleep(0.01)
                continue
            begun = time.monotonic()
            try:
                if not select.select([source], [], [], 0.1)[0]:
                    debt_s = 0.0
                    continue
                data = os.read(source, portion)
            except (OSError, ValueError):
                time.sleep(0.01)
                continue
            if not data:
                time.sleep(0.01)
                continue
            self.counts[way] += len(data)
            self._last = (way, time.monotonic())
            if way == "down":
                self._wake()
            data = b"" if self.is_cut else self._damage[way].apply(data, self.faults)
            with contextlib.suppress(OSError):
                if way == "up":
                    _write_all(self._master, data)
                elif self._connection is not None:
                    self._connection.sendall(data)
            if self._rate:
                debt_s += portion / self._rate if len(data) >= portion else len(data) / self._rate
                debt_s -= time.monotonic() - begun
                if debt_s > 0:
                    before = time.monotonic()
                    time.sleep(debt_s)
                    debt_s -= time.monotonic() - before
                debt_s = max(debt_s, -_PORTION_S)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
