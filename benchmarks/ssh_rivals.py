"""Run tests without an agent: scp and ssh for each test, with separate connections or through a master connection.

The commands use OpenSSH's defaults, also for ciphers and key exchange. Only the keys are set.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.bare_peer import ORDER, receive_into
from benchmarks.common import HERE
from benchmarks.ssh_layers import DEVICE, Layer
from hil.controller.devices.deploy.wheels import fetch_iree_tool
from hil.controller.storage.cache import Cache
from tools.virtual_board import VirtualBoard

FOLDER = "/tmp/rival"
RUNNER = f"{FOLDER}/iree-run-module"
GCM = ("-c", "aes128-gcm@openssh.com")


class Rival:
    """OpenSSH's commands for a board. iree-run-module is copied to the board first."""

    def __init__(self, board: VirtualBoard, scratch: Path) -> None:
        self._options = board.ssh()[1:-1]
        self.address = board.address
        self._scratch = scratch
        self._socket = scratch / "master"
        self.ssh("mkdir", "-p", FOLDER)
        runner = fetch_iree_tool("iree-run-module", board.arch, cache=Cache(), board=board.name)
        self.scp([str(runner)], f"{self.address}:{RUNNER}")
        self.ssh("chmod", "+x", RUNNER)

    def ssh(self, *words: str, through: Sequence[str] = ()) -> None:
        """Run a command on the board. ``through`` are additional options, such as those of a master connection."""
        self._do(["ssh", "-T", *through, *self._options, self.address, *words])

    def scp(self, sources: Sequence[str], target: str, through: Sequence[str] = ()) -> None:
        """Copy files."""
        self._do(["scp", "-q", *through, *self._options, *sources, target])

    @contextlib.contextmanager
    def master(self, *options: str) -> Iterator[tuple[str, ...]]:
        """Open a master connection. Yield the options with which other commands use it."""
        path = ("-o", f"ControlPath={self._socket}")
        opening = ["ssh", "-MNf", *path, "-o", "ControlMaster=yes", "-o", "ControlPersist=10s"]
        self._do([*opening, *options, *self._options, self.address])
        try:
            yield ("-o", "ControlMaster=no", *path)
        finally:
            self._do(["ssh", "-O", "exit", *path, *self._options, self.address])

    def plain(self, layers: Sequence[Layer]) -> float:
        """Use three connections per test: copy the files, run, copy the output back."""
        start = time.perf_counter()
        for layer in layers:
            self.scp([str(layer.program), str(layer.x)], f"{self.address}:{FOLDER}/")
            self._run(FOLDER, layer)
            self._fetch(FOLDER, layer)
        return time.perf_counter() - start

    def master_a_test(self, layers: Sequence[Layer]) -> float:
        """Open and close a master for each test, with a process for each file: ten processes per test."""
        start = time.perf_counter()
        for layer in layers:
            with self.master() as through:
                self._through(layer, through)
        return time.perf_counter() - start

    def master_kept(self, layers: Sequence[Layer]) -> float:
        """Use one master that stays open for all tests."""
        start = time.perf_counter()
        with self.master() as through:
            for layer in layers:
                self._through(layer, through)
        return time.perf_counter() - start

    def _through(self, layer: Layer, through: tuple[str, ...]) -> None:
        folder = f"{FOLDER}/{layer.folder.name}"
        self.ssh("mkdir", "-p", folder, through=through)
        for file in (layer.program, layer.x):
            self.scp([str(file)], f"{self.address}:{folder}/", through)
        self._run(folder, layer, through)
        self._fetch(folder, layer, through)

    def _run(self, folder: str, layer: Layer, through: tuple[str, ...] = ()) -> None:
        flags = [f"--module={folder}/{layer.program.name}", "--function=main", f"--device={DEVICE}"]
        self.ssh(RUNNER, *flags, f"--input=@{folder}/x.npy", f"--output=@{folder}/y.npy", through=through)

    def _fetch(self, folder: str, layer: Layer, through: tuple[str, ...] = ()) -> None:
        fetched = self._scratch / "y.npy"
        self.scp([f"{self.address}:{folder}/y.npy"], str(fetched), through)
        layer.check(np.load(fetched))
        fetched.unlink()

    @staticmethod
    def _do(command: Sequence[str]) -> None:
        # A master continues in the background, so it must not inherit our pipes.
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if ended.returncode:
            sys.exit(f"{command} failed with exit code {ended.returncode}")


class BareTunnel:
    """Plain socket through a separate ``ssh -L`` to a process on the board that transfers bytes."""

    def __init__(self, board: VirtualBoard, scratch: Path, size: int) -> None:
        far, near = f"{FOLDER}/peer.sock", scratch / "peer.sock"
        source = (HERE / "ssh_peer.py").read_text()
        self._peer = subprocess.Popen(
            [*board.ssh(), "python3", "-u", "-", far, str(size)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._peer.stdin and self._peer.stdout
        self._peer.stdin.write(source)
        self._peer.stdin.close()
        self._peer.stdout.readline()
        forward = board.ssh("-N", "-T", *GCM, "-o", "ExitOnForwardFailure=yes", "-L", f"{near}:{far}")
        self._tunnel = subprocess.Popen(forward, stdin=subprocess.DEVNULL)
        while not near.exists():
            if self._tunnel.poll() is not None:
                sys.exit(f"ssh -L failed with exit code {self._tunnel.returncode}")
            time.sleep(0.01)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(near))
        self._answer = memoryview(bytearray(1))

    def there(self, view: memoryview) -> float:
        """Return the seconds until all bytes are in the memory of the process on the board."""
        start = time.perf_counter()
        self._socket.sendall(ORDER.pack(b"s", view.nbytes))
        self._socket.sendall(view)
        receive_into(self._socket, self._answer)
        return time.perf_counter() - start

    def back(self, view: memoryview) -> float:
        """Return the seconds until all bytes are in the memory of this process."""
        start = time.perf_counter()
        self._socket.sendall(ORDER.pack(b"r", view.nbytes))
        receive_into(self._socket, view)
        return time.perf_counter() - start

    def close(self) -> None:
        """End the tunnel. The process on the board then ends, because it has no other client."""
        self._socket.close()
        self._peer.wait(10)
        self._tunnel.terminate()
        self._tunnel.wait()
