"""What people do without an agent: scp and ssh for every test, each on a connection of its own or through a master.

The commands are OpenSSH's with its own defaults, ciphers and key exchange too, but for the board's key and ours.
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
from hil.controller.devices.deploy.wheels import iree_tool
from hil.controller.storage.cache import Cache
from tools.virtual_board import VirtualBoard

FOLDER = "/tmp/rival"
RUNNER = f"{FOLDER}/iree-run-module"
GCM = ("-c", "aes128-gcm@openssh.com")


class Rival:
    """OpenSSH's commands to a board; iree-run-module is put there first."""

    def __init__(self, board: VirtualBoard, scratch: Path) -> None:
        self._options = board.ssh()[1:-1]
        self.address = board.address
        self._scratch = scratch
        self._socket = scratch / "master"
        self.ssh("mkdir", "-p", FOLDER)
        runner = iree_tool("iree-run-module", board.arch, cache=Cache(), board=board.name)
        self.scp([str(runner)], f"{self.address}:{RUNNER}")
        self.ssh("chmod", "+x", RUNNER)

    def ssh(self, *words: str, through: Sequence[str] = ()) -> None:
        """A command on the board; ``through`` are options, a master's for one."""
        self._do(["ssh", "-T", *through, *self._options, self.address, *words])

    def scp(self, sources: Sequence[str], target: str, through: Sequence[str] = ()) -> None:
        """Copy files."""
        self._do(["scp", "-q", *through, *self._options, *sources, target])

    @contextlib.contextmanager
    def master(self, *options: str) -> Iterator[tuple[str, ...]]:
        """An open master connection; gives the options that lead others through it."""
        path = ("-o", f"ControlPath={self._socket}")
        opening = ["ssh", "-MNf", *path, "-o", "ControlMaster=yes", "-o", "ControlPersist=10s"]
        self._do([*opening, *options, *self._options, self.address])
        try:
            yield ("-o", "ControlMaster=no", *path)
        finally:
            self._do(["ssh", "-O", "exit", *path, *self._options, self.address])

    def plain(self, layers: Sequence[Layer]) -> float:
        """Three connections a test: the files there, the run, the output back."""
        start = time.perf_counter()
        for layer in layers:
            self.scp([str(layer.program), str(layer.x)], f"{self.address}:{FOLDER}/")
            self._run(FOLDER, layer)
            self._fetch(FOLDER, layer)
        return time.perf_counter() - start

    def master_a_test(self, layers: Sequence[Layer]) -> float:
        """A master opened and closed for every test, and a process for each file: ten processes a test."""
        start = time.perf_counter()
        for layer in layers:
            with self.master() as through:
                self._through(layer, through)
        return time.perf_counter() - start

    def master_kept(self, layers: Sequence[Layer]) -> float:
        """The same through one master that stays open."""
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
        # A master goes on in the background: it must not keep pipes of ours open.
        ended = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if ended.returncode:
            sys.exit(f"{command} failed with exit code {ended.returncode}")


class BareTunnel:
    """A plain socket through an ``ssh -L`` of its own to a process on the board that takes and gives bytes."""

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
        """Seconds until all bytes lie in the far process's memory."""
        start = time.perf_counter()
        self._socket.sendall(ORDER.pack(b"s", view.nbytes))
        self._socket.sendall(view)
        receive_into(self._socket, self._answer)
        return time.perf_counter() - start

    def back(self, view: memoryview) -> float:
        """Seconds until all bytes lie in this process's memory."""
        start = time.perf_counter()
        self._socket.sendall(ORDER.pack(b"r", view.nbytes))
        receive_into(self._socket, view)
        return time.perf_counter() - start

    def close(self) -> None:
        """End the tunnel and, with its only client, the far process."""
        self._socket.close()
        self._peer.wait(10)
        self._tunnel.terminate()
        self._tunnel.wait()
