"""Fuzzers of microcontrollers: answers of a board on the serial line, descriptions of firmware, and ELF files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from fuzzing import mutate
from fuzzing.engine import Attempt, Broken, Fuzzer, Tried
from fuzzing.files import reader
from hil.errors import BoardError, LoadFailed, ProtocolBroken
from hil.formats.elf32 import Elf32
from hil.formats.firmware import Firmware, read_firmware
from hil.mcu.client import SerialClient
from hil.mcu.frames import SerialFrame, decode_frame, encode_frame
from hil.mcu.messages import HELLO, OUTPUTS, READ, RUN, WRITE, BoardRestarted

_MAX_BYTES = 1 << 14
_INPUTS, _OUTPUTS = bytes(range(200)) * 12, 1500


class _Line:
    """Line to a board that answers each request with the next parts of the input.

    A part is a byte with the kind, a byte with the distance to the request's number, a byte with the size in units of
    8 bytes, and the body. The kind 255 sends the body without a frame.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._sequence = 0
        self.frames = 0

    def write(self, data: bytes) -> None:
        for part in filter(None, data.split(b"\0")):
            frame = decode_frame(part)
            if frame is None:
                raise Broken("the client sent a damaged frame")
            self._sequence = frame.sequence

    def read(self, timeout_s: float) -> bytes:
        if len(self._data) < 3:
            raise ConnectionResetError("the input ends")
        kind, distance, size = self._data[:3]
        body, self._data = self._data[3 : 3 + 8 * size], self._data[3 + 8 * size :]
        self.frames += 1
        if kind == 255:
            return body
        return encode_frame(SerialFrame(kind, max(0, self._sequence - distance), body))

    def close(self) -> None:
        """Do nothing."""


def _talk(data: bytes) -> Tried:
    """Run a program on a board that answers with the input."""
    line = _Line(data)
    client = SerialClient(line, 1_000_000)
    reached: list[str] = []
    try:
        client.greet(0.0)
        reached.append("greeted")
        client.write_inputs(_INPUTS)
        reached.append("written")
        client.run(7, 1.0)
        reached.append("run")
        if len(client.read(OUTPUTS, _OUTPUTS)) != _OUTPUTS:
            raise Broken("the client returned a different number of bytes than requested")
        client.read_fault()
        reached.append("read")
    except BoardRestarted:
        reached.append("restarted")
    return Tried(messages=line.frames, kinds=(*reached, str(bool(client.statistics.bad_frames))))


@contextlib.contextmanager
def _open_line(folder: Path) -> Iterator[Attempt]:
    yield _talk


def _part(kind: int, distance: int, body: bytes) -> bytes:
    body = body.ljust(-(-len(body) // 8) * 8, b"\0")
    return bytes((kind, distance, len(body) // 8)) + body


def _seed_line() -> list[bytes]:
    hello = (1).to_bytes(2, "little") + (1024).to_bytes(2, "little") + bytes(32) + (1000).to_bytes(4, "little")
    greeting = _part(HELLO, 0, hello + bytes(8) + (2).to_bytes(4, "little") + bytes(4))
    # The window has two requests: the distances are those of the answers to the older and the newer one.
    written = _part(WRITE, 1, bytes(8)) + _part(WRITE, 1, bytes(8)) + _part(WRITE, 0, bytes(8))
    ran = _part(RUN, 0, bytes(24))
    read = _part(READ, 1, bytes(1028)) + _part(READ, 0, bytes(480))
    raw = _part(255, 0, encode_frame(SerialFrame(HELLO, 0, hello + bytes(16))))
    return [greeting + written + ran + read, greeting + raw, greeting + written + raw, b""]


def _change_line(data: bytes, rng: Random) -> bytes:
    return mutate.havoc(data, rng)[:_MAX_BYTES]


def _seed_descriptions() -> list[bytes]:
    spec = {"name": "x", "dtype": "float32", "shape": [1, 4]}
    values = {
        **{"chip": "mps2-an386", "digest": "ab" * 32, "image_crc": 1, "tick_hz": 1, "flash_bytes": 1, "ram_bytes": 1},
        **{"inputs": [spec], "outputs": [spec]},
        "steps": [{"name": "conv", "kind": "dispatch", "nodes": ["Conv_0"]}],
        "symbols": [{"address": 256, "size": 16, "name": "main"}, {"address": 512, "size": 0, "name": "end"}],
    }
    return [json.dumps(values).encode()]


def _read_description(path: Path) -> Tried:
    firmware: Firmware = read_firmware(path)
    for address in (0, 256, 1 << 40):
        firmware.find_symbol(address)
    return Tried(kinds=(str(len(firmware.steps)), str(len(firmware.symbols)), str(len(firmware.inputs))))


def _read_elf(path: Path) -> Tried:
    try:
        elf = Elf32(path.read_bytes())
        start, image = elf.make_image()
        symbols = len(list(elf.iter_symbols()))
    except ValueError as error:
        return Tried(kinds=(str(error),))
    return Tried(kinds=(str(start), str(len(image)), str(symbols)))


def _seed_elf() -> list[bytes]:
    from support.elf_files import make_elf

    return [make_elf()]


FUZZERS = (
    Fuzzer(
        "serial-line",
        "the client of a microcontroller: answers and damaged bytes",
        _open_line,
        _seed_line,
        _change_line,
        allowed=(BoardError, ProtocolBroken),
    ),
    Fuzzer(
        "firmware",
        "descriptions of firmware: firmware.json",
        reader("firmware.json", _read_description),
        _seed_descriptions,
        mutate.json_bytes,
        allowed=(LoadFailed,),
    ),
    Fuzzer("elf32", "ELF files of firmware", reader("firmware.elf", _read_elf), _seed_elf, mutate.havoc),
)
