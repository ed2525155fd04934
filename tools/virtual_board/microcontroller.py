"""Emulated microcontrollers: QEMU's machines with a serial line, as boards that run until they are stopped."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hil.core.chips import CHIPS
from hil.core.processes import make_module_command, wait_or_kill
from hil.errors import BoardError, BoardLost, UsageError, did_you_mean
from tools.virtual_board.microcontroller_control import ask
from tools.virtual_board.places import make_private
from tools.virtual_board.serial_bridge import LineFaults, SerialBridge

# Chip of hil -> program and arguments. QEMU's clock counts instructions, so that ticks are repeatable.
MACHINES = {
    "mps3-an547": ("qemu-system-arm", "-M", "mps3-an547"),
    "mps2-an386": ("qemu-system-arm", "-M", "mps2-an386"),
    "riscv32-virt": ("qemu-system-riscv32", "-M", "virt", "-bios", "none", "-m", "16M"),
}
# Names of cores, as users know them.
ALIASES = {CHIPS[name].core.name: name for name in MACHINES}
ICOUNT_SHIFT = 5
PACKAGES = {"qemu-system-arm": "qemu-system-arm", "qemu-system-riscv32": "qemu-system-misc"}
_START_SECONDS = 90.0  # on a busy machine
_REST_SECONDS = 1.0
# File with the settings, which marks the directory of an emulated microcontroller.
FILE = "microcontroller.json"


def find_chip(name: str) -> str:
    """Return the chip for its name, or for the name of a core. Raises UsageError for an unknown chip."""
    chip = ALIASES.get(name, name)
    if chip not in MACHINES:
        known = (*MACHINES, *ALIASES)
        raise UsageError(f"unknown chip {name!r}", hint=f"{did_you_mean(name, known)}emulated: {', '.join(known)}")
    return chip


def find_machine(chip: str) -> tuple[str, ...]:
    """Return QEMU's command for a chip.

    Raises:
        UsageError: the chip is unknown, or QEMU is not installed.
    """
    program, *arguments = MACHINES[find_chip(chip)]
    found = shutil.which(program)
    if found is None:
        raise UsageError(f"{program} not found", hint=f"apt-get install {PACKAGES[program]}")
    return (found, *arguments)


class MicrocontrollerBoard:
    """Running emulated microcontroller, by its directory."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None = None) -> None:
        self.folder = folder
        self._process = process

    @property
    def config(self) -> Path:
        """Board config."""
        return self.folder / f"{self.folder.name}.toml"

    @property
    def address(self) -> str:
        """Address of the serial line."""
        return f"serial:{self.folder / 'tty'}"

    @property
    def settings(self) -> dict[str, Any]:
        """Settings with which the board was created: chip, baud, seed, lifeline."""
        found: dict[str, Any] = json.loads((self.folder / FILE).read_text())
        return found

    def ask(self, verb: str, value: str = "") -> Any:
        """Send a request: flash FILE, reset, kill, power_on, freeze, thaw, cut, restore, faults TEXT, status, down.

        Raises:
            BoardLost: the board does not run.
            BoardError: the board reports an error.
        """
        try:
            return ask(str(self.folder), verb, value)
        except OSError as error:
            raise BoardLost(f"virtual board not running: {error.strerror or error}", board=self.folder.name) from None
        except ValueError as error:
            raise BoardError(str(error), board=self.folder.name) from None

    def status(self) -> dict[str, Any]:
        """Return ``power`` ("on" or "off"), ``cable`` ("up" or "down"), ``flashed`` and the bytes on the line.

        Raises:
            BoardLost: the board does not run.
        """
        answer: dict[str, Any] = self.ask("status")
        return answer

    def down(self) -> None:
        """End the board and remove all files. Repeated calls are allowed."""
        with contextlib.suppress(BoardError):
            self.ask("down")
        if self._process is not None:
            if self._process.stdin is not None:
                self._process.stdin.close()
            wait_or_kill(self._process, _START_SECONDS)
        shutil.rmtree(self.folder, ignore_errors=True)


def start_microcontroller(
    folder: Path, chip: str, *, baud: int = 0, seed: int = 0, lifeline: bool = True
) -> MicrocontrollerBoard:
    """Start an emulated microcontroller without firmware.

    Args:
        folder: directory for this board only, which is removed when the board ends.
        baud: speed of the serial line; 0: as fast as possible.
        seed: seed of the line's faults.
        lifeline: True if the board ends when this process ends.

    Raises:
        UsageError: the chip is unknown, or QEMU is not installed.
        BoardError: the board did not start.
    """
    find_machine(chip)
    name = find_chip(chip)
    make_private(folder)
    (folder / FILE).write_text(json.dumps({"chip": name, "baud": baud, "seed": seed, "lifeline": lifeline}))
    control = Path(__file__).with_name("microcontroller_control.py")
    flash = [sys.executable, str(control), str(folder), "flash", "{elf}"]
    board = MicrocontrollerBoard(folder)
    board.config.write_text(
        f'[board]\ndescription = "QEMU {name}"\nicount_shift = {ICOUNT_SHIFT}\n\n'
        f"[connection]\naddress = {json.dumps(board.address)}\n\n"
        f"[mcu]\nchip = {json.dumps(name)}\nflash = {json.dumps(flash)}\n"
        f"reset = {json.dumps([*flash[:3], 'reset'])}\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            make_module_command("tools.virtual_board.microcontroller", str(folder)),
            stdin=subprocess.PIPE if lifeline else subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until = time.monotonic() + _START_SECONDS
    while not (folder / "control").exists():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            process.wait()
            text = (folder / "log").read_text(errors="replace")
            shutil.rmtree(folder, ignore_errors=True)
            raise BoardError("the virtual board did not start", board=folder.name, detail=text)
        time.sleep(0.01)
    return MicrocontrollerBoard(folder, process if lifeline else None)


class _Emulator:
    """QEMU with the board's firmware, connected to the serial line."""

    def __init__(self, folder: Path) -> None:
        settings = json.loads((folder / FILE).read_text())
        self._folder = folder
        self._command = find_machine(settings["chip"])
        self._elf = ""
        self._flashed = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._state_lock = threading.Lock()
        self._is_frozen = self._is_resting = self._is_connected = False
        self.line = SerialBridge(folder / "tty", settings["baud"], settings["seed"], wake=self._wake)
        threading.Thread(target=self._rest, daemon=True).start()

    def flash(self, path: str) -> None:
        """Store the firmware, and restart with it."""
        shutil.copyfile(path, self._folder / "flash.elf.new")
        (self._folder / "flash.elf.new").replace(self._folder / "flash.elf")
        self._elf = str(self._folder / "flash.elf")
        self._flashed += 1
        self.reset("")

    def reset(self, _: str) -> None:
        """Restart the firmware."""
        self.kill("")
        if not self._elf:
            return
        place = "qemu.sock"  # relative, because socket paths must be short
        Path(place).unlink(missing_ok=True)
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *self._command,
                    *("-kernel", self._elf, "-display", "none", "-monitor", "none"),
                    *("-serial", f"unix:{place},server=on,wait=on", "-icount", f"shift={ICOUNT_SHIFT}"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until = time.monotonic() + _START_SECONDS
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(place)
                break
            except OSError:
                connection.close()
                if self._process.poll() is not None or time.monotonic() > until:
                    text = (self._folder / "log").read_text(errors="replace").strip()
                    raise RuntimeError(f"QEMU did not start: {text[-300:]}") from None
                time.sleep(0.01)
        self.line.attach(connection)
        self._is_connected = True

    def kill(self, _: str) -> None:
        """Cut the power."""
        self.line.attach(None)
        with self._state_lock:
            if self._process is not None:
                self._process.kill()
                self._process.wait()
            self._process = None
            self._is_frozen = self._is_resting = self._is_connected = False

    def power_on(self, _: str) -> None:
        """Start the firmware, unless it runs."""
        if self._process is None or self._process.poll() is not None:
            self.reset("")

    def freeze(self, _: str) -> None:
        """Stop the CPU."""
        with self._state_lock:
            self._is_frozen, self._is_resting = True, False
            self._signal(signal.SIGSTOP)

    def thaw(self, _: str) -> None:
        """Continue the CPU."""
        with self._state_lock:
            self._is_frozen = self._is_resting = False
            self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _rest(self) -> None:
        """Stop the emulator while it waits for requests: the firmware polls its UART, which occupies a host's core."""
        while True:
            time.sleep(_REST_SECONDS)
            with self._state_lock:
                is_running = self._is_connected and not self._is_frozen and not self._is_resting
                if is_running and self.line.is_answered(_REST_SECONDS):
                    self._is_resting = True
                    self._signal(signal.SIGSTOP)

    def _wake(self) -> None:
        with self._state_lock:
            if self._is_resting:
                self._is_resting = False
                self._signal(signal.SIGCONT)

    def cut(self, _: str) -> None:
        """Cut the serial line."""
        self.line.is_cut = True

    def restore(self, _: str) -> None:
        """Repair the serial line."""
        self.line.is_cut = False

    def faults(self, text: str) -> None:
        """Set the faults of the line."""
        self.line.faults = LineFaults.parse(text)

    def status(self, _: str) -> dict[str, Any]:
        """Return the state."""
        power = "on" if self._process is not None and self._process.poll() is None else "off"
        cable = "down" if self.line.is_cut else "up"
        return {"power": power, "cable": cable, "flashed": self._flashed, **self.line.counts}


_VERBS = ("flash", "reset", "kill", "power_on", "freeze", "thaw", "cut", "restore", "faults", "status")


def serve(folder: Path) -> None:
    """Serve requests until ``down``, SIGTERM, or the end of standard input."""
    emulator = _Emulator(folder)
    lock = threading.Lock()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            verb, value = json.loads(self.rfile.readline(1 << 16))
            if verb == "down":
                self.wfile.write(b'{"answer": null}\n')
                threading.Thread(target=server.shutdown).start()
                return
            try:
                if verb not in _VERBS:
                    raise UsageError(f"unknown request {verb!r}")
                with lock:
                    answer = {"answer": getattr(emulator, verb)(value)}
            except (OSError, RuntimeError, UsageError) as error:
                answer = {"error": str(error)}
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True

    os.chdir(folder)
    server = Server("control.new", Handler)
    Path("control.new").replace("control")
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    if json.loads((folder / FILE).read_text())["lifeline"]:

        def wait_for_end() -> None:
            sys.stdin.buffer.read()
            server.shutdown()

        threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        server.serve_forever()
    finally:
        emulator.kill("")
        emulator.line.close()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
