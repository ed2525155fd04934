"""The serial line of emulated microcontrollers while a program runs, and boards that are only an address."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import Ended
from support.microcontrollers import EACH_CHIP, Microcontrollers
from support.models import DIGITS
from support.planted_firmware import build_firmware

from hil.controller.storage.cache import choose_default_root
from hil.core.board_parser import read_config
from hil.core.chips import Chip, parse_chip
from hil.mcu.client import SerialClient
from hil.mcu.frames import SerialFrame
from hil.mcu.line import FramedLine
from hil.mcu.messages import (
    OK,
    OUTPUTS,
    READ,
    READ_REQUEST,
    RUN,
    RUN_REQUEST,
    WRITE,
    WRITE_HEADER,
    parse_result,
    parse_status,
)
from hil.mcu.streams import open_stream
from tools.virtual_board.microcontroller import MicrocontrollerBoard

MODEL = DIGITS / "digits_cnn.onnx"
# A run that ends when the firmware has received 600 bytes during it.
WAIT_FOR_BYTES = "uint32_t before = hil_received; while (hil_received - before < 600) {} return 0;"
# The first number of the test's requests. The client's numbers are below.
FIRST = 1 << 31
ZEROS_CRC = 0x2144DF1C


def flash(board: MicrocontrollerBoard, body: str, folder: Path, **changed: str) -> Chip:
    """Flash firmware whose dispatch has the given body."""
    config = read_config(board.config).mcu
    assert config is not None
    chip = parse_chip({**config.values, **changed})
    build_firmware(chip, body, folder, choose_default_root() / "zig")
    board.ask("flash", str(folder / "firmware.elf"))
    return chip


def receive(line: FramedLine, count: int) -> list[SerialFrame]:
    """Return a number of frames."""
    frames: list[SerialFrame] = []
    until = time.monotonic() + 60
    while len(frames) < count:
        frame = line.receive(1.0)
        assert time.monotonic() < until, frames
        frames += [frame] if frame else []
    return frames


@pytest.mark.parametrize("chip", EACH_CHIP)
@pytest.mark.timeout(600)
def test_requests_that_arrive_during_a_run_are_answered_after_it(
    chip: str, start_chip: Microcontrollers, tmp_path: Path
) -> None:
    board = start_chip(chip)
    made = flash(board, WAIT_FOR_BYTES, tmp_path)
    client = SerialClient(stream := open_stream(board.address, made.baud), made.baud)
    try:
        bad_frames = client.greet(60.0).bad_frames
        client.write_inputs(bytes(4))
        line = FramedLine(stream)
        line.send(SerialFrame(RUN, FIRST, RUN_REQUEST.pack(ZEROS_CRC, 0)))
        # The longest request comes last, when the run may be over.
        reads = range(FIRST + 1, FIRST + 41)
        for number in reads:
            line.send(SerialFrame(READ, number, READ_REQUEST.pack(OUTPUTS, 0, 4)))
        line.send(SerialFrame(WRITE, reads.stop, WRITE_HEADER.pack(0) + bytes(4)))
        answers = receive(line, len(reads) + 2)
        assert [one.sequence for one in answers] == [FIRST, *reads, reads.stop]
        assert parse_result(answers[0].body).status == OK
        assert {parse_status(one.body) for one in answers[1:]} == {OK}
        assert client.greet(60.0).bad_frames == bad_frames
    finally:
        client.close()


def test_address_runs_with_the_config_of_this_line(
    hil: Callable[..., Ended], start_chip: Microcontrollers, tmp_path: Path, environment: dict[str, str]
) -> None:
    board = start_chip("cortex-m4")
    environment["HIL_BOARDS"] = str(tmp_path)
    (tmp_path / "bench.toml").write_text(board.config.read_text())
    ended = hil("run", MODEL, "--board", board.address, "--json")
    assert ended.case["outcome"] == "PASS", ended.out + ended.err


@pytest.mark.slow
def test_missing_device_is_unreachable(hil: Callable[..., Ended], start_chip: Microcontrollers, tmp_path: Path) -> None:
    lines = start_chip("cortex-m4").config.read_text().splitlines()
    config = tmp_path / "m4.toml"
    config.write_text("\n".join(line for line in lines if not line.startswith(("flash", "reset"))))
    ended = hil("run", MODEL, "--board", "serial:/dev/ttyNONE", "--runtime-hw-type", config, "--json")
    assert ended.case["outcome"] == "BOARD_UNREACHABLE", ended.out
    assert "serial device /dev/ttyNONE not found" in ended.case["reason"]
