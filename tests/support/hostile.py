"""Agent whose runtime runs hostile programs: `python tests/support/hostile.py --listen ... --store ...`.

The only file of a program contains the name of a function below. A run calls this function in the worker.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from hil.agent import ipc
from hil.core.tensors import TensorSpec
from hil.errors import LoadFailed, RunFailed

OUTPUTS = (TensorSpec("y", "float32", (1 << 20,)),)
FOREVER = 3600.0
OPENED = 0.0  # time at which the device was opened, on the monotonic clock


class Runtime:
    """Runtime with one listed device, ``here``. It also opens ``secret``, which it does not list."""

    def __init__(self, options: dict[str, Any]) -> None:
        pass

    @staticmethod
    def describe() -> dict[str, Any]:
        return {"version": "1", "devices": ["here"]}

    def prepare(self, device: str) -> None:
        global OPENED
        OPENED = time.monotonic()

    def load(self, folder: Path, main: str, device: str, function: str) -> Program:
        if device not in ("", "here", "secret"):
            raise LoadFailed(f"there is no device {device!r}")
        os.chdir(folder)
        attack, _, argument = (folder / main).read_text().partition(" ")
        if attack == "at_load":
            globals()[argument.split()[0]](argument.partition(" ")[2])
        return Program(attack, argument)


class Program:
    inputs = ()
    outputs = OUTPUTS
    function = "main"

    def __init__(self, attack: str, argument: str) -> None:
        self._attack = attack
        self._argument = argument

    def bind(self, inputs: list[Any]) -> None:
        pass

    def run(self) -> None:
        globals()[self._attack](self._argument)

    def fetch(self) -> list[Any]:
        return [np.ones(1 << 20, np.float32)]


def behave(_: str) -> None:
    """Do nothing harmful."""


def tell_opened(_: str) -> None:
    """Report when the device was opened."""
    raise RunFailed(str(OPENED))


def at_load(_: str) -> None:
    """Do nothing: the attack runs while the program is loaded."""


def truncate(_: str) -> None:
    """Truncate the shared memory repeatedly, also while the agent reads it."""

    def cut() -> None:
        while True:
            for fd in _fds("memfd:hil"):
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, 0)

    threading.Thread(target=cut, daemon=True).start()


def waver(_: str) -> None:
    """Write to the outputs without end."""

    def write() -> None:
        time.sleep(0.2)  # until the outputs exist
        for fd in _fds("memfd:hil"):
            if size := os.fstat(fd).st_size:
                memory = np.frombuffer(mmap.mmap(fd, size), np.uint32)
                while True:
                    memory += 1

    threading.Thread(target=write, daemon=True).start()


def litter(_: str) -> None:
    """Create thousands of nested directories in the program's directory, and a directory that nobody can read."""
    Path("closed/inner").mkdir(parents=True)
    Path("closed").chmod(0)
    for _number in range(3000):
        Path("d").mkdir()
        os.chdir("d")


def drip(_: str) -> None:
    """Send a reply that never ends, one byte at a time."""
    channel = _channel()
    channel.send(struct.pack("<I", 1000))
    while True:
        channel.send(b" ")
        time.sleep(0.1)


def send(what: str) -> None:
    """Send bytes as the reply: the given JSON, the reply of a run with numbers, or a flood."""
    body = what.encode()
    if what.startswith("ran "):
        body = ipc.join_message((0, 0, 0, 1, 2), ipc.encode({"ok": json.loads(what.removeprefix("ran "))}))
    match what:
        case "deep":
            body = b"[" * 100_000
        case "many":
            body = b"[" + b"{}," * 1_300_000 + b"{}]"
        case "no-utf8":
            body = b'{"ok": "\xff\xfe"}'
        case "surrogate":
            body = json.dumps({"ok": {"inputs": [], "outputs": [], "function": "\ud800", "load_ns": 1}}).encode()
        case "cut numbers":
            body = ipc.join_message((0, 0, 0, 1, 2), ipc.encode({"ok": {"outputs": []}}))[:20]
        case "many numbers":
            body = ipc.join_message(range(500_000), ipc.encode({"ok": {"outputs": []}}))
        case "digits":
            body = b'{"ok": ' + b"9" * 100_000 + b"}"
    channel = _channel()
    channel.sendall(struct.pack("<I", len(body)) + body)
    time.sleep(FOREVER)


def flood(_: str) -> None:
    """Announce 4 GiB, and send this data."""
    channel = _channel()
    channel.sendall(struct.pack("<I", 0xFFFFFFFF))
    while True:
        channel.sendall(b"[" * (1 << 20))


def say(what: str) -> None:
    """Write a line to stderr."""
    os.write(2, what.encode() + b"\n")


def shout(what: str) -> None:
    """Write to stderr without end: a single line, or empty lines."""
    piece = b"x" * (1 << 16) if what == "line" else b"\n" * (1 << 16)
    while True:
        os.write(2, piece)


def offspring(text: str) -> None:
    """Leave processes behind. Each has a separate session, and its parent is not a process of the agent."""
    folder, count = text.rsplit(" ", 1)
    for number in range(int(count)):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
                for fd in range(3):
                    os.close(fd)
                (Path(folder) / f"{number}.new").write_text(str(os.getpid()))
                (Path(folder) / f"{number}.new").rename(Path(folder) / str(number))
                time.sleep(FOREVER)
            os._exit(0)
        os.wait()


def offspring_and_die(text: str) -> None:
    """Leave processes behind, then crash."""
    offspring(text)
    os.kill(os.getpid(), signal.SIGKILL)


def limits(_: str) -> None:
    """Report the limits of this process."""
    names = ("CORE", "NOFILE", "FSIZE", "NPROC", "DATA")
    told = {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] for name in names}
    told["oom"] = int(Path("/proc/self/oom_score_adj").read_text())
    told["user"] = os.getuid()
    raise RunFailed(json.dumps(told))


def gobble(megabytes: str) -> None:
    """Allocate memory."""
    np.ones(int(megabytes) << 17, np.float64)


def reach(pid: str) -> None:
    """Report which kinds of access to another process are possible: signals, tracing, memory."""
    told = {}
    for way, reach_out in {
        "signal": lambda: os.kill(int(pid), 0),
        "limit": lambda: resource.prlimit(int(pid), resource.RLIMIT_CPU, resource.getrlimit(resource.RLIMIT_CPU)),
    }.items():
        try:
            reach_out()
            told[way] = True
        except PermissionError:
            told[way] = False
    told["trace"] = ctypes.CDLL(None).ptrace(16, int(pid), 0, 0) == 0  # PTRACE_ATTACH
    try:
        Path(f"/proc/{pid}/mem").open("rb").close()
        told["memory"] = True
    except OSError:
        told["memory"] = False
    raise RunFailed(json.dumps(told))


def report(kind: str) -> None:
    """Raise an error of a kind that programs must not raise."""
    _channel().sendall(_framed(json.dumps({"error": [kind, "so it says", "", "", ""]}).encode()))
    time.sleep(FOREVER)


def _framed(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


def _channel() -> socket.socket:
    return socket.socket(fileno=os.dup(_fds("socket:")[0]))


def _fds(what: str) -> list[int]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if what in str(link.readlink()):
                found.append(int(link.name))
        except OSError:
            pass
    return found


def main() -> None:
    """Serve as an agent."""
    from hil.agent.__main__ import make_parser, read_config, serve
    from hil.agent.server import Agent, AgentConfig

    arguments = make_parser("hostile", "").parse_args()
    # The fork server's process imports this module.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    agent = Agent(AgentConfig(**read_config(arguments), runtimes={"hostile": "support.hostile:Runtime"}))
    serve(agent, agent.address, lifeline=arguments.lifeline)


if __name__ == "__main__":
    sys.exit(main())
