"""Measure the serial line of an emulated microcontroller, at the speed of a real line.

The board is a Cortex-M4 at 921,600 baud: 92,160 bytes a second in each direction. A program that copies a tensor
measures the transfer; the rival is the line itself, which needs 10 bits for each byte of the tensor. The overhead of a
case is the time of a call with 16 bytes in and out, without the time of its bytes on the line and of the program.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks import common
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import ProgramHandle
from hil.core.files import digest_file
from tools.virtual_board.microcontroller import MicrocontrollerBoard, start_microcontroller

BAUD = 921_600
BYTE_S = 10 / BAUD
LARGE, SMALL = 32_768, 4  # float32


def main() -> None:
    """Measure and print."""
    asked = common.options(__doc__, rounds=3, calls=20)
    with tempfile.TemporaryDirectory() as scratch:
        board = start_microcontroller(Path(scratch) / "m4", "cortex-m4", baud=BAUD)
        try:
            arguments = ["--config", str(board.config), "--address", board.address]
            with common.session("hil.mcu", arguments) as (client, _, folder):
                rows = [
                    *_measure_transfer(client, board, folder, asked.rounds),
                    _measure_overhead(client, board, folder, asked.rounds, asked.calls),
                ]
        finally:
            board.down()
    notes = ["a ratio is the time of the tensor's bytes at 10 bits each, divided by the measured time"]
    common.show("serial", rows, notes, as_json=asked.json)


def _measure_transfer(client: AgentClient, board: MicrocontrollerBoard, folder: Path, rounds: int) -> list[common.Row]:
    """Return rows for a call with 128 KiB in and out."""
    program = _load(client, board, folder / "large", LARGE)
    x = np.random.default_rng(0).random(LARGE, dtype=np.float32)
    taken, sent, received = [], [], []
    for turn in range(rounds + 1):
        before = board.status()
        seconds, program_s = _call(client, program, x)
        after = board.status()
        if turn:
            taken.append(seconds - program_s)
            sent.append(after["down"] - before["down"])
            received.append(after["up"] - before["up"])
    ideal = 2 * x.nbytes * BYTE_S
    ratio = statistics.median(ideal / one for one in taken)
    case = "128 KiB to the board and back"
    rows = [common.Row(case, statistics.median(taken), "s", "the line", ideal, ratio, ">= 0.9")]
    for way, counted in (("to", sent), ("from", received)):
        size = statistics.median(counted)
        rows.append(
            common.Row(f"bytes {way} the board", size, "bytes", "the tensor", x.nbytes, x.nbytes / size, ">= 0.9")
        )
    return rows


def _measure_overhead(
    client: AgentClient, board: MicrocontrollerBoard, folder: Path, rounds: int, calls: int
) -> common.Row:
    """Return a row for calls with 16 bytes in and out."""
    program = _load(client, board, folder / "small", SMALL)
    x = np.arange(SMALL, dtype=np.float32)
    medians = []
    for turn in range(rounds + 1):
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
