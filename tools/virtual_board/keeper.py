"""The process that keeps one virtual board: in namespaces of its own, it holds the board's disk, network and power.

It is the first process of its process namespace, so that when it ends, however it ends, the kernel ends the board, its
mounts and its network with it. It ends when told to, or when whoever started it does.
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
# An ELF file of 64 bits, little endian, for AArch64, whatever the bytes that say nothing about that. F: the emulator is
# opened now, and so found from inside any root.
_AARCH64 = (
    r":hil-aarch64:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff:{emulator}:F"
)
_OFF = "the virtual board is off"


class Keeper:
    """One board: everything that can be done to it from outside.

    Args:
        folder: the board's folder.
        plan: what the board is.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder = folder
        self._plan = plan
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._bridge = "hub"
        self._cable = "up"

    def set_up(self) -> None:
        """Make the disk and the network, and switch the board on."""
        plan = self._plan
        if plan.emulator:
            _register(plan.emulator)
        root = self._make_root()
        kind: Callable[[Plan, Path, Path], Body] = WholeMachine if plan.system else Namespaces
        self._body = kind(plan, root, self._folder)
        _bridge("hub", "uplink")
        if plan.netem:
            taps = [netem.open_tap(name) for name in ("near", "far")]
            _ip("link set near master hub up")
            _bridge("shelf", "far")
            self._bridge = "shelf"
            quality = netem.parse(plan.netem)
            threading.Thread(target=netem.forward, args=(*taps, quality), daemon=True).start()
        self.power_on()

    def _make_root(self) -> Path:
        """The shared root file system, with a layer over it that takes what is written."""
        plan = self._plan
        layers = self._folder / "layers"
        layers.mkdir()
        _sh("mount", "-t", "tmpfs", "-o", f"size={plan.disk_mb}m,mode=0755", "disk", str(layers))
        upper, work, root = (layers / name for name in ("upper", "work", "root"))
        for place in (upper, work, root):
            place.mkdir()
        stacked = f"lowerdir={plan.rootfs},upperdir={upper},workdir={work},userxattr"
        _sh("mount", "-t", "overlay", "-o", stacked, "disk", str(root))
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
        """A board that restarts itself (``reboot``) is booted again; after anything else it stays off."""
        code = live.wait()
        with self._lock:
            if self._live is live:
                self._live = None
                _unplug()
                if code == -signal.SIGHUP:
                    self.power_on()

    def kill(self) -> None:
        """Cut the power. Nothing says goodbye: the cable goes first, so that no closing of a connection gets out."""
        with self._lock:
            live, self._live = self._live, None
            if live is not None:
                _unplug()
                self._body.kill(live)

    def reboot(self) -> None:
        """Cut the power and give it again at once."""
        with self._lock:
            self.kill()
            self.power_on()

    def cut(self) -> None:
        """Pull the network cable."""
        self._set_cable("down")

    def restore(self) -> None:
        """Plug the network cable in again."""
        self._set_cable("up")

    def _set_cable(self, state: str) -> None:
        with self._lock:
            self._cable = state
            if self._live is not None:
                _ip(f"link set port {state}")

    def freeze(self) -> None:
        """Stop every process on the board; its kernel still acknowledges what is sent to it."""
        live = self._running()
        stopped: set[int] = set()
        while new := self._body.processes(live) - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new

    def thaw(self) -> None:
        """Let the board's processes go on."""
        _signal(self._body.processes(self._running()), signal.SIGCONT)

    def _running(self) -> Live:
        live = self._live
        if live is None:
            raise ProcessLookupError(_OFF)
        return live

    def run(self, argv: list[str], stdin: str | None, timeout: float) -> dict[str, Any]:
        """Run a command on the board, as root and not through its network."""
        done = self._body.run(self._running(), argv, stdin, timeout)
        return {"code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}

    def status(self) -> dict[str, str]:
        """How the board is."""
        with self._lock:
            return {"power": "off" if self._live is None else "on", "cable": self._cable}

    def down(self) -> None:
        """End the board, this process and the board's folder."""
        subprocess.run(["umount", "--lazy", "layers"], stderr=subprocess.DEVNULL)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)

    def serve(self) -> None:
        """Answer requests, one a connection, until told to end."""
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
                    answer = {"error": _words(error)}
                self.wfile.write(json.dumps(answer).encode())

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        with Server("control", Handler) as server:
            server.serve_forever()


def _register(emulator: str) -> None:
    """Have the kernel run programs for AArch64 with this emulator, in these namespaces only."""
    try:
        _sh("mount", "-t", "binfmt_misc", "binfmt_misc", str(_BINFMT))
    except subprocess.CalledProcessError as error:
        raise UsageError(
            "an emulated board needs a binfmt_misc of its own, and this kernel gives none",
            hint="Linux 6.7 and newer do; boards of this machine's own architecture need none",
            detail=error.stderr,
        ) from None
    (_BINFMT / "register").write_text(_AARCH64.format(emulator=emulator))


def _signal(processes: set[int], number: signal.Signals) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue


def _unplug() -> None:
    subprocess.run(["ip", "link", "delete", "port"], stderr=subprocess.DEVNULL)


def _bridge(name: str, port: str) -> None:
    _ip(f"link add name {name} type bridge")
    _ip(f"link set {name} up")
    _ip(f"link set {port} master {name} up")


def _ip(words: str) -> None:
    _sh("ip", *words.split())


def _sh(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, text=True)


def _words(error: Exception) -> str:
    said = getattr(error, "stderr", "") or getattr(error, "detail", "")
    return f"{error}\n{said}".strip()


def _end_with_lifeline(keeper: Keeper) -> None:
    sys.stdin.read()
    keeper.down()


def main() -> None:
    """Keep the board of the folder that the command line names."""
    folder = Path(sys.argv[1])
    # Its control socket is named relative to here: the name of a socket has to be short.
    os.chdir(folder)
    # What came before this was started anew with root's powers here, and so lost this.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    plan = Plan.read(folder)
    keeper = Keeper(folder, plan)
    if plan.lifeline:
        threading.Thread(target=_end_with_lifeline, args=(keeper,), daemon=True).start()
    try:
        keeper.set_up()
    except (OSError, subprocess.SubprocessError, HilError) as error:
        sys.exit(_words(error))
    keeper.serve()


if __name__ == "__main__":
    main()
