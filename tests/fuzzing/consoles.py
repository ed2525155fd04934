"""Fuzzers of a board's console: bytes from a board or a telnet server, and the files with the latest lines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from random import Random

from fuzzing import mutate
from fuzzing.engine import Attempt, Broken, Fuzzer, Tried
from hil.controller.devices.console.lines import MAX_LINE_BYTES, ConsoleLine, LineSplitter
from hil.controller.devices.console.recording import ConsoleRecording
from hil.controller.devices.console.spool import Spool, encode_entry, make_entry
from hil.controller.devices.console.telnet import TelnetFilter
from hil.core.text import escape_controls

_MAX_BYTES = 1 << 16
_WORDS = [
    *(b"\x1b[", b"\x1b]0;", b"\x1bP", b"\x1b\\", b"\x07", b"\x9b", b"\xc2\x9b", b"\r\n", b"\r", b"\n"),
    *(b"\xff\xfb\x01", b"\xff\xfa", b"\xff\xf0", b"\xff\xff", b"\xff\xfd\x1f", b"\xe2\x80\xae", b"\xed\xa0\x80"),
    *(b"Kernel panic - not syncing", b"watchdog", b"mmc0: ", b"x" * 5000),
]


def _change(data: bytes, rng: Random) -> bytes:
    if rng.random() < 0.5:
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice(_WORDS) + data[at:]
    return mutate.havoc(data, rng)[:_MAX_BYTES]


def _read_stream(data: bytes) -> Tried:
    """Read bytes in chunks, as plain text or with telnet's commands. The first two bytes choose how."""
    is_telnet, size, stream = data[:1] > b"\x7f", max(data[1] if len(data) > 1 else 1, 1), data[2:]
    splitter, telnet, recording = LineSplitter(), TelnetFilter(), ConsoleRecording()
    texts: list[str] = []
    answered = 0
    for at in range(0, len(stream), size):
        chunk = stream[at : at + size]
        if is_telnet:
            chunk, answer = telnet.receive(chunk)
            answered += len(answer)
        texts += splitter.feed(chunk)
    texts += splitter.flush()
    if answered > 3 * len(stream):
        raise Broken(f"telnet answered {answered} bytes to {len(stream)}")
    for text in texts:
        if escape_controls(text) != text or "\n" in text:
            raise Broken(f"control characters in {text!r}")
        # An escaped byte has four characters.
        if not 0 < len(text) <= 6 * MAX_LINE_BYTES:
            raise Broken(f"a line has {len(text)} characters")
    recording.add([ConsoleLine(1, 1.0, text) for text in texts])
    quotes = {quote.pattern for quote in recording.find_quotes()}
    return Tried(1, (f"telnet {is_telnet}", f"answers {bool(answered)}", *sorted(quotes)))


@contextlib.contextmanager
def _open_stream(folder: Path) -> Iterator[Attempt]:
    yield _read_stream


@contextlib.contextmanager
def _open_spool(folder: Path) -> Iterator[Attempt]:
    spool = Spool(folder / "spool")

    def read(data: bytes) -> Tried:
        (spool.folder / "lines.jsonl").write_bytes(data)
        lines = spool.read_since(0)
        for line in lines:
            encode_entry(make_entry(line))
        follower = spool.follow()
        try:
            with (spool.folder / "lines.jsonl").open("ab") as file:
                file.write(data)
            follower.read_new()
        finally:
            follower.close()
        return Tried(1, (str(min(len(lines), 3)), *{line.kind for line in lines}))

    yield read


_LINES = b"".join(encode_entry(make_entry(ConsoleLine(at, 1.5, f"line {at}"))) for at in range(3))
FUZZERS = (
    Fuzzer(
        "console",
        "the reader of a board's console, plain and with telnet",
        _open_stream,
        lambda: [
            b"\x00\x10U-Boot 2026.01\r\n\x1b[1mboot\x1b[0m\r\nlogin: ",
            b"\xff\x07\xff\xfb\x01\xff\xfb\x03text\xff\xff\r\0\r\n\xff\xfa\x18\x01\xff\xf0Kernel panic - not syncing\n",
        ],
        _change,
        limit_mib=64,
    ),
    Fuzzer(
        "console-lines",
        "the file with the latest lines of a console",
        _open_spool,
        lambda: [_LINES],
        mutate.havoc,
        limit_mib=64,
    ),
)
