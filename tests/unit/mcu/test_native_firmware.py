"""The firmware's protocol, with the firmware built for this machine."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hil.controller.backends.compilers.firmware.linking import SOURCES
from hil.controller.backends.compilers.firmware.schedule import Buffer, BufferRange, CopyStep, Schedule
from hil.controller.backends.compilers.firmware.source import write_model
from hil.core.tensors import TensorSpec
from hil.mcu.client import SerialClient
from hil.mcu.frames import SerialFrame
from hil.mcu.line import FramedLine
from hil.mcu.messages import OK, OUTPUTS, READ, READ_REQUEST, RUN, RUN_REQUEST, BoardRestarted

pytestmark = pytest.mark.slow  # compiles C

SIZE, STEPS = 3000, 200
BAUD = 20_000  # of the emulated UART, which waits for each byte
IRQ = "-DHIL_UART_IRQ=1"


class PipeStream:
    """Line to a process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def read(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            return b""
        return os.read(self._process.stdout.fileno(), 1 << 16)

    def write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that builds firmware with macros. The firmware copies its input to its output many times."""
    ziglang = pytest.importorskip("ziglang")
    cache = tmp_path_factory.mktemp("zig")
    spec = TensorSpec("x", "uint8", (SIZE,))
    spans = [BufferRange(Buffer(kind, SIZE), 0, SIZE) for kind in ("input", "transient")]
    steps = [CopyStep(spans[1], spans[0])] * STEPS
    schedule = Schedule([spans[0]], [spans[1]], [], [*steps], ((spec,), (spec,)), arena=SIZE)
    names = ("main.c", "frames.c", "program.c")
    files = [*(SOURCES / name for name in names), Path(__file__).with_name("native_board.c")]
    places = {"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)}

    def make(*macros: str) -> Path:
        folder = tmp_path_factory.mktemp("firmware")
        (folder / "model.c").write_text(write_model(schedule, bytes(range(32)), ""))
        command = [Path(ziglang.__file__).with_name("zig"), "cc", "-O1", "-DHIL_TICK_HZ=1000000000u", *macros]
        command += [f"-I{SOURCES}", *files, folder / "model.c", "-o", folder / "board"]
        subprocess.run(command, check=True, env={**os.environ, **places})
        return folder / "board"

    return make


@pytest.fixture(scope="module")
def program(build: Callable[..., Path]) -> Path:
    """Firmware with the receive interrupt."""
    return build(IRQ)


@contextlib.contextmanager
def start(program: Path, **environment: str) -> Iterator[PipeStream]:
    """Start firmware, and yield its line."""
    process = subprocess.Popen(
        [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env={**os.environ, **environment}
    )
    with contextlib.closing(process.stdin), contextlib.closing(process.stdout):  # type: ignore[type-var]
        yield PipeStream(process)
    process.wait(60)


@pytest.fixture
def stream(program: Path) -> Iterator[PipeStream]:
    with start(program) as opened:
        yield opened


@pytest.mark.parametrize(("macros", "is_complete"), [([IRQ], True), ([], False)], ids=["interrupt", "polling"])
def test_uart_without_buffer_needs_the_receive_interrupt(
    macros: list[str], is_complete: bool, build: Callable[..., Path]
) -> None:
    with start(build(*macros), SLOW="1") as stream:
        client = SerialClient(stream, BAUD)
        client.greet(60.0)
        client.write_inputs(bytes(SIZE))
        line = FramedLine(stream)
        line.send(SerialFrame(RUN, 1 << 31, RUN_REQUEST.pack(zlib.crc32(bytes(SIZE)), 0)))
        for number in range(20):
            line.send(SerialFrame(READ, (1 << 31) + 1 + number, READ_REQUEST.pack(OUTPUTS, 0, 100)))
        # The time for an answer grows while the firmware runs.
        hello = client.greet(60.0)
    assert (hello.bad_frames == 0) == is_complete


def test_firmware_runs_program(stream: PipeStream) -> None:
    client = SerialClient(stream, BAUD)
    hello = client.greet(60.0)
    assert (hello.digest, hello.image_crc) == (bytes(range(32)), zlib.crc32(bytes([1, 2, 3, 4])))
    data = os.urandom(SIZE)
    client.write_inputs(data)
    result = client.run(zlib.crc32(data), 60.0)
    assert (result.status, result.outputs_crc) == (OK, zlib.crc32(data))
    assert client.read(OUTPUTS, SIZE) == data


def test_firmware_reports_restart_until_host_greets(stream: PipeStream) -> None:
    client = SerialClient(stream, BAUD)
    client.greet(60.0)
    client.restart()
    lost = b""
    while not lost.endswith(b"\0"):  # the message about the restart
        lost += (data := stream.read(60.0))
        assert data
    for _ in range(2):
        with pytest.raises(BoardRestarted):
            client.run(0, 60.0)
    client.greet(60.0)
    client.write_inputs(bytes(SIZE))
    assert client.run(zlib.crc32(bytes(SIZE)), 60.0).status == OK
