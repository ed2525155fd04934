"""The firmware's protocol, with the firmware built for this machine."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from hil.controller.backends.compilers.firmware.linking import SOURCES
from hil.controller.backends.compilers.firmware.schedule import Buffer, BufferRange, CopyStep, Schedule
from hil.controller.backends.compilers.firmware.source import write_model
from hil.core.tensors import TensorSpec
from hil.mcu.client import SerialClient
from hil.mcu.messages import OK, OUTPUTS, BoardRestarted

pytestmark = pytest.mark.slow  # compiles C

SIZE = 3000


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
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Firmware that copies its input to its output."""
    ziglang = pytest.importorskip("ziglang")
    folder = tmp_path_factory.mktemp("firmware")
    spec = TensorSpec("x", "uint8", (SIZE,))
    spans = [BufferRange(Buffer(kind, SIZE), 0, SIZE) for kind in ("input", "transient")]
    schedule = Schedule([spans[0]], [spans[1]], [], [CopyStep(spans[1], spans[0])], ((spec,), (spec,)), arena=SIZE)
    (folder / "model.c").write_text(write_model(schedule, bytes(range(32)), ""))
    files = [
        *(SOURCES / name for name in ("main.c", "frames.c", "program.c")),
        Path(__file__).with_name("native_board.c"),
    ]
    zig = Path(ziglang.__file__).with_name("zig")
    command = [zig, "cc", "-O1", "-DHIL_TICK_HZ=1000000000u", f"-I{SOURCES}", *files, folder / "model.c"]
    places = {"ZIG_GLOBAL_CACHE_DIR": str(folder / "cache"), "ZIG_LOCAL_CACHE_DIR": str(folder / "cache")}
    subprocess.run([*command, "-o", folder / "board"], check=True, env={**os.environ, **places})
    return folder / "board"


@pytest.fixture
def stream(program: Path) -> Iterator[PipeStream]:
    process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    with contextlib.closing(process.stdin), contextlib.closing(process.stdout):  # type: ignore[type-var]
        yield PipeStream(process)
    process.wait(60)


def test_firmware_runs_program(stream: PipeStream) -> None:
    client = SerialClient(stream, 1_000_000)
    hello = client.greet(60.0)
    assert (hello.digest, hello.image_crc) == (bytes(range(32)), zlib.crc32(bytes([1, 2, 3, 4])))
    data = os.urandom(SIZE)
    client.write_inputs(data)
    result = client.run(zlib.crc32(data), 60.0)
    assert (result.status, result.outputs_crc) == (OK, zlib.crc32(data))
    assert client.read(OUTPUTS, SIZE) == data


def test_firmware_reports_restart_until_host_greets(stream: PipeStream) -> None:
    client = SerialClient(stream, 1_000_000)
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
