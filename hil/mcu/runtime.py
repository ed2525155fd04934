"""Runtime that flashes firmware to a microcontroller and runs it over the serial line."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hil.agent.runtimes import Check
from hil.core.bounded_command import run_bounded
from hil.core.clock import get_time_ns
from hil.core.results import Part, Placement
from hil.core.tensors import Array, count_bytes, from_bytes, to_bytes
from hil.errors import (
    BoardError,
    BoardLost,
    BoardUnfit,
    BoardUnreachable,
    ErrorCode,
    LoadFailed,
    ProtocolBroken,
    RunCrashed,
    RunFailed,
)
from hil.formats.firmware import ELF, FLAT, Firmware, read_firmware
from hil.formats.operations import Operation, write_operations
from hil.mcu.client import SerialClient
from hil.mcu.faults import explain_fault
from hil.mcu.messages import BAD_INPUTS, BAD_REQUEST, OK, OUTPUTS, TICKS, BoardRestarted, Hello
from hil.mcu.settings import ChipSettings
from hil.mcu.streams import open_stream

_DEVICE = "cpu"
_FLASH_SECONDS = 300.0
_GREET_SECONDS = 0.5
_SHOWN_LINES = 20
# A program may write into its inputs. The board then rejects the next run, and the inputs are written again.
_MAX_WRITES = 2


class McuRuntime:
    """Runtime for firmware of :mod:`hil.controller.backends.compilers.firmware`.

    Args:
        options: ``mcu`` has the fields of :class:`ChipSettings`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self._settings = ChipSettings.of(options["mcu"])

    @staticmethod
    def describe() -> dict[str, Any]:
        """Return the version of the protocol. The board is not contacted: it may have no firmware yet."""
        return {"version": "1", "devices": [_DEVICE]}

    def prepare(self, device: str) -> None:
        """Do nothing: the line is opened when a program is loaded."""

    def load(self, folder: Path, main: str, device: str, function: str) -> FirmwareProgram:
        """Flash the firmware unless the board has it, and greet the board."""
        if device not in ("", _DEVICE):
            raise LoadFailed(f"a microcontroller has no device {device!r}", hint=f"its only device is {_DEVICE}")
        settings, firmware = self._settings, read_firmware(folder / main)
        if firmware.chip != settings.chip.name:
            raise LoadFailed(
                f"the firmware is for {firmware.chip}, the board has {settings.chip.name}", code=ErrorCode.WRONG_TARGET
            )
        client, hello, silence = self._try_greet()
        if hello is None or (hello.digest.hex(), hello.image_crc) != (firmware.digest, firmware.image_crc):
            if client is not None:
                client.close()
            self._flash(folder, silence)
            client = SerialClient(self._open(), settings.chip.baud)
            hello = client.greet(settings.boot_s)
        assert client is not None
        if hello.digest.hex() != firmware.digest:
            client.close()
            raise LoadFailed(
                "the board runs other firmware after flashing", hint="check [mcu] flash in the board's config"
            )
        if hello.image_crc != firmware.image_crc:
            client.close()
            raise BoardUnfit(
                "the flash memory differs from the firmware", hint="check the flash memory and [mcu] flash"
            )
        return FirmwareProgram(client, firmware, settings)

    def _open(self) -> Any:
        """Open the line. A USB device needs some time to appear after flashing."""
        until = time.monotonic() + self._settings.boot_s
        while True:
            try:
                return open_stream(self._settings.address, self._settings.chip.baud)
            except BoardUnreachable:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    def _try_greet(self) -> tuple[SerialClient | None, Hello | None, BoardError | None]:
        """Return the client and the state of the board, or why it does not answer. Reset a silent board once."""
        settings = self._settings
        silence: BoardError | None = None
        for command in ((), settings.reset):
            if command:
                _run_command(command, "resetting the board")
            try:
                client = SerialClient(open_stream(settings.address, settings.chip.baud), settings.chip.baud)
            except BoardUnreachable as error:
                if not settings.flash:
                    raise
                return None, None, error
            try:
                return client, client.greet(_GREET_SECONDS), None
            except (BoardLost, ProtocolBroken) as error:
                client.close()
                silence = error
            if not settings.reset:
                break
        return None, None, silence

    def _flash(self, folder: Path, silence: BoardError | None) -> None:
        """Flash the firmware. Without a flash command, raise the error of a board that does not answer."""
        settings = self._settings
        if not settings.flash:
            if silence is not None:
                silence.hint = f"{silence.hint}; hil cannot flash the board, because its config has no [mcu] flash"
                raise silence
            raise LoadFailed(
                "the board has other firmware, and its config has no flash command",
                hint='set [mcu] flash = ["openocd", ..., "{elf}"] in the board\'s config',
            )
        words = [
            word.replace("{elf}", str(folder / ELF)).replace("{bin}", str(folder / FLAT)) for word in settings.flash
        ]
        _run_command(words, "flashing the firmware")


def _run_command(command: Sequence[str], what: str) -> None:
    """Run a command of the board's config. Raises BoardUnfit with the end of the output."""
    try:
        done = run_bounded(command, _FLASH_SECONDS)
    except FileNotFoundError as error:
        raise BoardUnfit(f"{what} failed: command {command[0]} not found") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BoardUnfit(f"{what} failed: {error}") from error
    lines = done.text.splitlines()[-_SHOWN_LINES:]
    if done.code:
        said = [line.strip() for line in lines if line.strip()]
        last = said[-1][:300] if said else f"exit code {done.code}"
        detail = "" if said in ([], [last]) else "\n".join(lines)  # the message is enough
        raise BoardUnfit(f"{what} failed: {last}", detail=detail)


class FirmwareProgram:
    """Program on a microcontroller."""

    function = ""

    def __init__(self, client: SerialClient, firmware: Firmware, settings: ChipSettings) -> None:
        self._client, self._firmware, self._settings = client, firmware, settings
        self.inputs, self.outputs = firmware.inputs, firmware.outputs
        self._data, self._crc = b"", 0
        self._ticks = 0
        self._outputs_crc = 0
        self._placed = (Part(_DEVICE),)

    def bind(self, inputs: list[Array]) -> None:
        """Write the inputs to the board."""
        self._data = b"".join(bytes(to_bytes(array)) for array in inputs)
        self._crc = zlib.crc32(self._data)
        self._write()

    def _write(self) -> None:
        try:
            self._client.write_inputs(self._data)
        except BoardRestarted as restarted:
            raise self._report_restart("while hil wrote the inputs") from restarted

    def run(self) -> None:
        """Run the program once and wait for the end."""
        for attempt in range(_MAX_WRITES):
            try:
                result = self._client.run(self._crc, self._settings.watchdog_s)
            except BoardRestarted as restarted:
                raise self._explain(restarted.hello) from restarted
            if result.status != BAD_INPUTS or attempt + 1 == _MAX_WRITES:
                break
            self._write()
        if result.status == BAD_INPUTS:
            raise BoardUnfit("the inputs in the board's memory differ from the inputs that hil wrote")
        if result.status == BAD_REQUEST:
            raise ProtocolBroken("the board rejected the request to run")
        if result.status != OK:
            step = self._firmware.steps[result.step].name if result.step < len(self._firmware.steps) else ""
            raise RunFailed(f"the dispatch {step or result.step} returned {result.code}")
        self._ticks, self._outputs_crc = result.ticks, result.outputs_crc

    def fetch(self) -> list[Array]:
        """Read the outputs, and compare them with the board's checksum."""
        shapes = [tuple(dim for dim in spec.shape if isinstance(dim, int)) for spec in self.outputs]
        sizes = [count_bytes(spec.dtype, shape) for spec, shape in zip(self.outputs, shapes, strict=True)]
        try:
            data = self._client.read(OUTPUTS, sum(sizes))
        except BoardRestarted as restarted:
            raise self._report_restart("while hil read the outputs") from restarted
        if zlib.crc32(data) != self._outputs_crc:
            raise BoardUnfit("the outputs changed between the run and the transfer")
        arrays, start = [], 0
        for spec, shape, size in zip(self.outputs, shapes, sizes, strict=True):
            arrays.append(from_bytes(data[start : start + size], spec.dtype, shape))
            start += size
        return arrays

    def close(self) -> None:
        """Close the serial line."""
        self._client.close()

    def placement(self) -> Placement:
        """Return the CPU of the microcontroller."""
        return self._placed

    def get_peak_memory(self) -> int:
        """Return the RAM of the firmware, with the stack. The firmware allocates nothing after the start."""
        return self._firmware.ram_bytes

    def get_run_ns(self) -> int:
        """Return the duration of the last run on the chip's tick counter."""
        return self._ticks * 1_000_000_000 // self._firmware.tick_hz

    def profile(self, warmup: int, iterations: int, folder: Path, tool: Path | None, check: Check) -> list[Path]:
        """Run the program and write the ticks of each dispatch, also converted to the host's clock.

        The end of a run on the host's clock is the time at which the response arrived.
        """
        found: list[Operation] = []
        count = len(self._firmware.steps)
        for number in range(warmup + iterations):
            self.run()
            end_ns = get_time_ns()
            check(self.fetch())
            try:
                ticks = np.frombuffer(self._client.read(TICKS, 4 * count), "<u4")
            except BoardRestarted as restarted:
                raise self._report_restart("while hil read the ticks") from restarted
            counts = ticks.tolist()
            ends = [end * 1_000_000_000 // self._firmware.tick_hz for end in itertools.accumulate(counts)]
            start_ns = end_ns - (ends[-1] if ends else 0)
            for step, begin, until, counted in zip(self._firmware.steps, [0, *ends], ends, counts, strict=False):
                found.append(
                    Operation(
                        step.name or step.kind,
                        number,
                        start_ns + begin,
                        start_ns + until,
                        step.nodes,
                        is_overhead=step.kind != "dispatch",
                        ticks=counted,
                    )
                )
        return [write_operations(found, folder)]

    def _greet(self) -> None:
        """Greet the board after a restart. Until then, it answers every request with a message about the restart."""
        self._client.greet(self._settings.boot_s)

    def _report_restart(self, when: str) -> BoardLost:
        with contextlib.suppress(BoardLost, ProtocolBroken):
            self._greet()
        return BoardLost(f"the microcontroller restarted {when}", hint="check the power supply and the reset line")

    def _explain(self, hello: Hello) -> RunCrashed | BoardLost:
        if not hello.fault_kind:
            return self._report_restart("during the run")
        self._greet()
        message, detail = explain_fault(self._client.read_fault(), self._firmware, self._settings.chip)
        return RunCrashed(message, detail=detail)
