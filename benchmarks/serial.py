"""Measure the serial line of a microcontroller, at the speed of a real line.

The line is a pseudo-terminal of 921,600 baud: 92,160 bytes a second in each direction. A program that doubles a tensor
of 128 KiB measures the transfer, to an emulated Cortex-M4:

- the bytes on the line, relative to the bytes of the tensor. The rows "bytes ..." are those of a line without a speed,
  so they do not depend on the load. On a busy machine, hil repeats requests to the emulated board, whose answers are
  late. A note reports these bytes.
- the share of the line's capacity: the time of the tensor's bytes at 10 bits each, relative to the measured time. It
  depends on the load, and on QEMU, which transfers each byte separately. The row "without an emulator" is the client
  with a board of Python code that answers at once. The row "the line alone" has neither client nor board, so the ratio
  to it depends less on the load.

The overhead of a case is the time of a call with 16 bytes in and out, without the time of its bytes on the line and of
the program. After --limit seconds, each part ends with the rounds that it has.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks import common
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import ProgramHandle
from hil.core.files import digest_file
from hil.formats.firmware import DESCRIPTION
from hil.mcu.client import SerialClient
from hil.mcu.frames import DATA_BYTES, SerialFrame, decode_frame, encode_frame
from hil.mcu.messages import HELLO, HELLO_ANSWER, OUTPUTS, READ, READ_REQUEST, VERSION, WRITE, WRITE_HEADER
from hil.mcu.streams import DescriptorStream, open_stream
from tools.virtual_board.microcontroller import MicrocontrollerBoard, start_microcontroller
from tools.virtual_board.serial_bridge import SerialBridge

BAUD = 921_600
BYTE_S = 10 / BAUD
LARGE, SMALL = 32_768, 4  # float32
SIZE = 4 * LARGE


@dataclass(frozen=True)
class Transfer:
    """Seconds of a call without the program's run, and bytes on the line in each direction."""

    seconds: float
    sent: int
    received: int


class Progress:
    """Progress on stderr, and the end of a part of the benchmark."""

    def __init__(self, limit_s: float) -> None:
        self._begin = time.monotonic()
        self._limit_s = limit_s
        self.notes: list[str] = []

    def iter_rounds(self, part: str, rounds: int) -> Iterator[int]:
        """Yield the numbers of the rounds, from 0 for the warm-up. After the time limit, end after the first round."""
        for turn in range(rounds + 1):
            if turn > 1 and time.monotonic() - self._begin > self._limit_s:
                self.notes.append(f"{part}: {turn - 1} of {rounds} rounds in the time limit of {self._limit_s:g} s")
                return
            yield turn
            name = f"round {turn} of {rounds}" if turn else "warm-up"
            print(f"{time.monotonic() - self._begin:6.1f} s  {part}: {name}", file=sys.stderr, flush=True)


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, rounds=3, calls=20, limit=180)
    progress = Progress(asked.limit)
    with tempfile.TemporaryDirectory() as scratch:
        alone_s = _measure_line(Path(scratch), asked.rounds, progress)
        ideal_s = _measure_client(Path(scratch), asked.rounds, progress)
        board = start_microcontroller(Path(scratch) / "m4", "cortex-m4", baud=BAUD)
        try:
            arguments = ["--config", str(board.config), "--address", board.address]
            with common.session("hil.mcu", arguments) as (client, _, folder):
                transfers = _measure_transfer(client, board, folder, asked.rounds, progress)
                overhead_ms = _measure_overhead(client, board, folder, asked.rounds, asked.calls, progress)
        finally:
            board.down()
    rows = [
        *_count_bytes(),
        _make_share("128 KiB to a board and back, without an emulator", ideal_s, ">= 0.9"),
        common.Row("the same", ideal_s, "s", "the line alone", alone_s, alone_s / ideal_s, ">= 0.9"),
        _make_share("128 KiB to the emulated board and back", statistics.median(one.seconds for one in transfers)),
        _make_share("128 KiB to and from the line alone", alone_s),
        common.Row("overhead of a case, without the line's time", overhead_ms, "ms"),
    ]
    progress.notes.append(_describe_repeats(transfers))
    common.show("serial", rows, progress.notes, as_json=asked.json)


def _make_share(case: str, seconds: float, bar: str = "") -> common.Row:
    """Return a row with the share of the line's capacity."""
    ideal = 2 * SIZE * BYTE_S
    return common.Row(case, seconds, "s", "10 bits for each byte", ideal, ideal / seconds, bar)


def _count_bytes() -> list[common.Row]:
    """Return rows with the bytes on a line without a speed, so that no answer is late."""
    board, own = socket.socketpair()
    threading.Thread(target=_answer_at_once, args=(board,), daemon=True).start()
    client = SerialClient(DescriptorStream(own.fileno(), contextlib.closing(own)), 300)
    with contextlib.closing(client), contextlib.closing(board):
        client.greet(60)
        before = replace(client.statistics)
        data = np.random.default_rng(0).bytes(SIZE)
        client.write_inputs(data)
        if client.read(OUTPUTS, SIZE) != data:
            raise RuntimeError("the line changed the data")
        sent = client.statistics.sent_bytes - before.sent_bytes
        received = client.statistics.received_bytes - before.received_bytes
        return [
            common.Row(f"bytes {name} the board", size, "bytes", "the tensor", SIZE, SIZE / size, ">= 0.9")
            for name, size in (("to", sent), ("from", received))
        ]


def _describe_repeats(transfers: Sequence[Transfer]) -> str:
    """Return a note with the bytes on the line to the emulated board."""
    sizes = ", ".join(f"{one.sent:,} to and {one.received:,} from the board" for one in transfers)
    return f"bytes of each round with the emulated board: {sizes}"


@contextlib.contextmanager
def _opening_line(folder: Path, serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the path of a paced pseudo-terminal. Its other end is served in a thread."""
    board, peer = socket.socketpair()
    bridge = SerialBridge(folder / "line", BAUD)
    bridge.attach(peer)
    threading.Thread(target=serve, args=(board,), daemon=True).start()
    try:
        yield str(folder / "line")
    finally:
        board.close()
        bridge.close()


def _measure_line(folder: Path, rounds: int, progress: Progress) -> float:
    """Return the seconds of 128 KiB in each direction on the line, without a client and a board."""
    data = np.random.default_rng(0).bytes(SIZE)

    def answer(board: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while received := _receive(board.fileno(), SIZE):
                board.sendall(received)

    taken = []
    with _opening_line(folder, answer) as path:
        terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
        tty.setraw(terminal)
        try:
            for turn in progress.iter_rounds("the line alone", rounds):
                begin = time.perf_counter()
                view = memoryview(data)
                while view:
                    view = view[os.write(terminal, view) :]
                if _receive(terminal, SIZE) != data:
                    raise RuntimeError("the line changed the data")
                if turn:
                    taken.append(time.perf_counter() - begin)
        finally:
            os.close(terminal)
    return statistics.median(taken)


def _receive(descriptor: int, size: int) -> bytes:
    """Return the next bytes, or fewer at the end of the line."""
    data = b""
    while len(data) < size:
        if not select.select([descriptor], [], [], 60)[0]:
            raise TimeoutError("the line sends no bytes")
        part = os.read(descriptor, size - len(data))
        if not part:
            break
        data += part
    return data


def _measure_client(folder: Path, rounds: int, progress: Progress) -> float:
    """Return the seconds of 128 KiB in each direction, to a board that answers at once."""
    data = np.random.default_rng(0).bytes(SIZE)
    taken = []
    with _opening_line(folder, _answer_at_once) as path:
        client = SerialClient(open_stream(f"serial:{path}", BAUD), BAUD)
        try:
            client.greet(60)
            for turn in progress.iter_rounds("without an emulator", rounds):
                begin = time.perf_counter()
                client.write_inputs(data)
                if client.read(OUTPUTS, SIZE) != data:
                    raise RuntimeError("the line changed the data")
                if turn:
                    taken.append(time.perf_counter() - begin)
        finally:
            client.close()
    return statistics.median(taken)


def _answer_at_once(board: socket.socket) -> None:
    """Answer requests as the firmware does, from a memory that is input and output."""
    memory, received = bytearray(SIZE), b""
    while data := board.recv(1 << 16):
        *parts, received = (received + data).split(b"\0")
        for frame in filter(None, map(decode_frame, filter(None, parts))):
            body = bytes(4)
            if frame.kind == HELLO:
                body = HELLO_ANSWER.pack(VERSION, DATA_BYTES, bytes(32), 1000, 0, 0, 2, 0)
            if frame.kind == WRITE:
                (start,) = WRITE_HEADER.unpack_from(frame.body)
                memory[start : start + len(frame.body) - WRITE_HEADER.size] = frame.body[WRITE_HEADER.size :]
            if frame.kind == READ:
                _, start, size = READ_REQUEST.unpack(frame.body)
                body += memory[start : start + size]
            board.sendall(encode_frame(SerialFrame(frame.kind, frame.sequence, body)))


def _measure_transfer(
    client: AgentClient, board: MicrocontrollerBoard, folder: Path, rounds: int, progress: Progress
) -> list[Transfer]:
    """Return the transfers of calls with 128 KiB in and out."""
    x = np.random.default_rng(0).random(LARGE, dtype=np.float32)
    found = []
    with _loading(client, board, folder / "large", LARGE) as program:
        for turn in progress.iter_rounds("128 KiB", rounds):
            before = board.status()
            seconds, program_s = _call(client, program, x)
            after = board.status()
            if turn:
                sent, received = (after[way] - before[way] for way in ("down", "up"))
                found.append(Transfer(seconds - program_s, sent, received))
    return found


def _measure_overhead(
    client: AgentClient, board: MicrocontrollerBoard, folder: Path, rounds: int, calls: int, progress: Progress
) -> float:
    """Return the milliseconds of a call with 16 bytes in and out."""
    x = np.arange(SMALL, dtype=np.float32)
    medians = []
    with _loading(client, board, folder / "small", SMALL) as program:
        for turn in progress.iter_rounds("16 bytes", rounds):
            found = []
            for _ in range(calls):
                before = board.status()
                seconds, program_s = _call(client, program, x)
                after = board.status()
                on_line = sum(after[way] - before[way] for way in ("up", "down")) * BYTE_S
                found.append(seconds - program_s - on_line)
            if turn:
                medians.append(statistics.median(found))
    return statistics.median(medians) * 1e3


@contextlib.contextmanager
def _loading(client: AgentClient, board: MicrocontrollerBoard, folder: Path, count: int) -> Iterator[ProgramHandle]:
    """Load y = x + x, and unload it at the end: the board runs one program at a time."""
    program = _load(client, board, folder, count)
    try:
        yield program
    finally:
        client.unload(program.program_id)


def _call(client: AgentClient, program: ProgramHandle, x: np.ndarray) -> tuple[float, float]:
    """Return the seconds of a call, and of the program on the board."""
    begin = time.perf_counter()
    done = client.invoke(program.program_id, {program.inputs[0].name: x})
    seconds = time.perf_counter() - begin
    assert np.array_equal(next(iter(done.outputs.values())), x + x)
    return seconds, sum(end - start for start, end in done.iterations_ns) / 1e9


def _load(client: AgentClient, board: MicrocontrollerBoard, folder: Path, count: int) -> ProgramHandle:
    """Compile y = x + x for the board, and load it."""
    folder.mkdir()
    value = (TensorProto.FLOAT, [count])
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "twice",
        [helper.make_tensor_value_info("x", *value)],
        [helper.make_tensor_value_info("y", *value)],
    )
    model, program = folder / "twice.onnx", folder / "program"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), model)
    program.mkdir()
    words = ["compile", str(model), "--board", str(board.config), "-o", str(program / DESCRIPTION)]
    subprocess.run([sys.executable, "-m", "hil.controller.cli.main", *words], check=True, stdout=sys.stderr)
    files = {path.name: (path, digest_file(path)) for path in program.iterdir()}
    digests = {name: digest for name, (_, digest) in files.items()}
    paths = {digest: path for path, digest in files.values()}
    client.put({digest: (paths[digest], have) for digest, have in client.missing([*paths]).items()})
    return client.load(digests, DESCRIPTION, runtime="mcu", device="", function="", timeout=300)


if __name__ == "__main__":
    main()
