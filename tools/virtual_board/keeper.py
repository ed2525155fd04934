"""Keeper process of a virtual board. It runs in separate namespaces and owns the board's disk, network and power.

The keeper is the first process of a PID namespace. When the keeper ends for any reason, the kernel removes the board,
the mounts and the network. The keeper ends on request, or when the process that started it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hil.errors import HilError, UsageError
from tools.virtual_board import netem
from tools.virtual_board.bodies import Body, Live, Namespaces, WholeMachine
from tools.virtual_board.plan import Plan

_PR_SET_PDEATHSIG = 1
_BINFMT = Path("/proc/sys/fs/binfmt_misc")
# Pattern for 64-bit little-endian ELF files for AArch64. Flag F opens the emulator immediately, so that it works inside
# any root.
_AARCH64 = (
    r":hil-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:{emulator}:F"
)
_OFF = "the virtual board is off"


class Keeper:
    """Operations on a board from outside.

    Args:
        folder: the board's directory.
        plan: the board's settings.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._bridge = "hub"
        self._cable = "up"

    def set_up(self) -> None:
        """Create the disk and the network, and switch the board on."""
        plan = self._plan
        if plan.emulator:
            _register(plan.emulator)
        root = self._make_root()
        kind: Callable[[Plan, Path, Path], Body] = WholeMachine if plan.system else Namespaces
        self._body = kind(plan, root, self._folder)
        _add_bridge("hub", "uplink")
        if plan.netem:
            taps = [netem.open_tap(name) for name in ("near", "far")]
            _run_ip("link set near master hub up")
            _add_bridge("shelf", "far")
            self._bridge = "shelf"
            quality = netem.parse(plan.netem)
            threading.Thread(target=netem.forward, args=(*taps, quality), daemon=True).start()
        self.power_on()

    def _make_root(self) -> Path:
        """Mount the shared root file system with a writable overlay."""
        plan = self._plan
        layers = self._folder / "layers"
        layers.mkdir()
        _run_command("mount", "-t", "tmpfs", "-o", f"size={plan.disk_mb}m,mode=0755", "disk", str(layers))
        upper, work, root = (layers / name for name in ("upper", "work", "root"))
        for place in (upper, work, root):
            place.mkdir()
        stacked = f"lowerdir={plan.rootfs},upperdir={upper},workdir={work},userxattr"
        _run_command("mount", "-t", "overlay", "-o", stacked, "disk", str(root))
        for path, (text, mode, owner) in plan.files.items():
            (root / path).write_text(text)
            (root / path).chmod(mode)
            os.chown(root / path, owner, owner)
        return root

    def power_on(self) -> None:
        """Boot the board, if it is off."""
        with self._lock:
            if self._live is None:
                self._live = self._body.boot(self._bridge, self._cable)
                threading.Thread(target=self._watch, args=(self._live,), daemon=True).start()

    def _watch(self, live: Live) -> None:
        """Wait until the board ends. Boot it again after ``reboot`` on the board; otherwise it stays off."""
        code = live.wait()
        with self._lock:
            if self._live is live:
                self._live = None
                _remove_port()
                if code == -signal.SIGHUP:
                    self.power_on()

    def kill(self) -> None:
        """Cut the power. Remove the cable first, so that the board cannot close connections."""
        with self._lock:
            live, self._live = self._live, None
            if live is not None:
                _remove_port()
                self._body.kill(live)

    def reboot(self) -> None:
        """Cut the power and restore it at once."""
        with self._lock:
            self.kill()
            self.power_on()

    def cut(self) -> None:
        """Disconnect the network cable."""
        self._set_cable("down")

    def restore(self) -> None:
        """Reconnect the network cable."""
        self._set_cable("up")

    def _set_cable(self, state: str) -> None:
        with self._lock:
            self._cable = state
            if self._live is not None:
                _run_ip(f"link set port {state}")

    def freeze(self) -> None:
        """Stop all processes on the board. The kernel still acknowledges packets."""
        live = self._require_running()
        stopped: set[int] = set()
        while new := self._body.processes(live) - stopped:
            _send_signal(new, signal.SIGSTOP)
            stopped |= new

    def thaw(self) -> None:
        """Resume the board's processes."""
        _send_signal(self._body.processes(self._require_running()), signal.SIGCONT)

    def _require_running(self) -> Live:
        live = self._live
        if live is None:
            raise ProcessLookupError(_OFF)
        return live

    def run(self, argv: list[str], stdin: str | None, timeout: float) -> dict[str, Any]:
        """Run a command on the board as root, without the network."""
        done = self._body.run(self._require_running(), argv, stdin, timeout)
        return {"code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}

    def status(self) -> dict[str, str]:
        """Return the state of power and cable."""
        with self._lock:
            return {"power": "off" if self._live is None else "on", "cable": self._cable}

    def down(self) -> None:
        """End the board and this process, and remove the board's directory."""
        subprocess.run(["umount", "--lazy", "layers"], stderr=subprocess.DEVNULL)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)

    def serve(self) -> None:
        """Serve requests, one per connection, until ``down`` is called."""
        verbs: dict[str, Callable[..., Any]] = {
            verb.__name__: verb
            for verb in (
                self.power_on, self.kill, self.reboot, self.cut, self.restore, self.freeze, self.thaw, self.run,
                self.status, self.down,
            )
        }  # fmt: skip

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                verb, arguments = json.loads(self.rfile.readline())
                try:
                    answer = {"answer": verbs[verb](**arguments)}
                except (OSError, subprocess.SubprocessError) as error:
                    answer = {"error": _format_error(error)}
                self.wfile.write(json.dumps(answer).encode())

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        with Server("control", Handler) as server:
            server.serve_forever()


def _register(emulator: str) -> None:
    """Register this emulator for AArch64 programs with the kernel, in these namespaces only."""
    try:
        _run_command("mount", "-t", "binfmt_misc", "binfmt_misc", str(_BINFMT))
    except subprocess.CalledProcessError as error:
        raise UsageError(
            "an emulated board requires a private binfmt_misc: unsupported by this kernel",
            hint="use Linux 6.7 or newer, or a board with this machine's architecture",
            detail=error.stderr,
        ) from None
    (_BINFMT / "register").write_text(_AARCH64.format(emulator=emulator))


def _send_signal(processes: set[int], number: signal.Signals) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def _remove_port() -> None:
    subprocess.run(["ip", "link", "delete", "port"], stderr=subprocess.DEVNULL)


def _add_bridge(name: str, port: str) -> None:
    _run_ip(f"link add name {name} type bridge")
    _run_ip(f"link set {name} up")
    _run_ip(f"link set {port} master {name} up")


def _run_ip(words: str) -> None:
    _run_command("ip", *words.split())


def _run_command(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True)


def _format_error(error: Exception) -> str:
    said = getattr(error, "stderr", "") or getattr(error, "detail", "")
    return f"{error}\n{said}".strip()


def _end_with_lifeline(keeper: Keeper) -> None:
    sys.stdin.read()
    keeper.down()


def main() -> None:
    """Run the keeper for the board directory on the command line."""
    folder = Path(sys.argv[1])
    # Use a relative path for the control socket, because socket paths must be short.
    os.chdir(folder)
    # The exec with root's capabilities has cleared this setting of the parent, so set it again.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    plan = Plan.read(folder)
    keeper = Keeper(folder, plan)
    if plan.lifeline:
        threading.Thread(target=_end_with_lifeline, args=(keeper,), daemon=True).start()
    try:
        keeper.set_up()
    except (OSError, subprocess.SubprocessError, HilError) as error:
        sys.exit(_format_error(error))
    keeper.serve()


if __name__ == "__main__":
    main()
