"""Measure the serial line of an emulated microcontroller, at the speed of a real line.

The board is a Cortex-M4 at 921,600 baud: 92,160 bytes a second in each direction. A program that doubles a tensor of
128 KiB measures the transfer:

- the bytes on the line, relative to the bytes of the tensor. They do not depend on the load of this machine, unless hil
  repeats a request, because an answer is late.
- the share of the line's capacity: the time of the tensor's bytes at 10 bits each, relative to the measured time. It
  depends on the load, because QEMU transfers each byte separately. The row "the line alone" has the same bytes on the
  same paced pseudo-terminal, without a board.

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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks import common
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import ProgramHandle
from hil.core.files import digest_file
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
        board = start_microcontroller(Path(scratch) / "m4", "cortex-m4", baud=BAUD)
        try:
            arguments = ["--config", str(board.config), "--address", board.address]
            with common.session("hil.mcu", arguments) as (client, _, folder):
                rows = [
                    *_measure_transfer(client, board, folder, asked.rounds, alone_s, progress),
                    _measure_overhead(client, board, folder, asked.rounds, asked.calls, progress),
                ]
        finally:
            board.down()
    common.show("serial", rows, progress.notes, as_json=asked.json)


def _measure_line(folder: Path, rounds: int, progress: Progress) -> float:
    """Return the seconds of 128 KiB in each direction on the paced pseudo-terminal, without a board."""
    board, peer = socket.socketpair()
    bridge = SerialBridge(folder / "line", BAUD)
    bridge.attach(peer)
    terminal = os.open(folder / "line", os.O_RDWR | os.O_NOCTTY)
    tty.setraw(terminal)
    data = np.random.default_rng(0).bytes(SIZE)

    def answer() -> None:
        with contextlib.suppress(OSError):
            while received := _receive(board.fileno(), SIZE):
                board.sendall(received)

    threading.Thread(target=answer, daemon=True).start()
    taken = []
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
        board.close()
        bridge.close()
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


def _measure_transfer(
    client: AgentClient, board: MicrocontrollerBoard, folder: Path, rounds: int, alone_s: float, progress: Progress
) -> list[common.Row]:
    """Return rows for a call with 128 KiB in and out."""
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
    ideal = 2 * SIZE * BYTE_S
    rows = []
    for name, counts in (("to", [one.sent for one in found]), ("from", [one.received for one in found])):
        # A round on a busy machine may contain repeated requests.
        size = min(counts)
        rows.append(
            common.Row(f"bytes {name} the board", size, "bytes", "the tensor", SIZE, SIZE / size, ">= 0.9")
        )
        if max(counts) > size:
            progress.notes.append(
                f"bytes {name} the board: up to {max(counts):,} in a round, because requests were repeated"
            )
    taken_s = statistics.median(one.seconds for one in found)
    case = "128 KiB to the board and back"
    rows.append(common.Row(case, taken_s, "s", "10 bits for each byte", ideal, ideal / taken_s, ">= 0.9"))
    rows.append(common.Row(case, taken_s, "s", "the line alone", alone_s, alone_s / taken_s))
    return rows


def _measure_overhead(
    client: AgentClient, board: MicrocontrollerBoard, folder: Path, rounds: int, calls: int, progress: Progress
) -> common.Row:
    """Return a row for calls with 16 bytes in and out."""
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
    return common.Row("overhead of a case, without the line's time", statistics.median(medians) * 1e3, "ms")


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
    words = ["compile", str(model), "--board", str(board.config), "-o", str(program / "twice.json")]
    subprocess.run([sys.executable, "-m", "hil.controller.cli.main", *words], check=True, stdout=sys.stderr)
    files = {path.name: (path, digest_file(path)) for path in program.iterdir()}
    digests = {name: digest for name, (_, digest) in files.items()}
    paths = {digest: path for path, digest in files.values()}
    client.put({digest: (paths[digest], have) for digest, have in client.missing([*paths]).items()})
    return client.load(digests, "twice.json", runtime="mcu", device="", function="", timeout=300)


if __name__ == "__main__":
    main()
