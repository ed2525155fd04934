"""What a command and its processes do to the machine: addresses that they connect to, and files that they create."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hil.core.processes import make_module_command
from support.sshd import started_with
from support.waiting import allowed_s

_STRACE = ["strace", "-f", "-qq", "-y", "-s", "4096", "--seccomp-bpf"]
_CALLS = "connect,sendto,sendmsg,sendmmsg,open,openat,creat"
_DOMAIN = re.compile(r"sa_family=AF_(?P<family>INET6?|UNIX)\b(?P<address>[^}]*)")
_LOOPBACK = re.compile(r'inet_addr\("127\.|inet_pton\(AF_INET6, "(?:::1|::ffff:127\.[\d.]+)"')
_DNS = re.compile(r"sin6?_port=htons\(53\)")
_SOCKET = re.compile(r'sun_path=@?"(?P<path>[^"]*)"')
_CREATED = re.compile(r"(?:O_CREAT\b|creat\().* = \d+<(?P<path>[^>]*)>$")
# glibc asks this daemon for names of users. Where the daemon does not run, a host's name is a question to port 53.
_NAMES = "/var/run/nscd/socket"
_TIMEOUT_S = 300


@dataclass(frozen=True)
class SideEffects:
    """What a sequence of commands did, apart from hil's own files and sockets."""

    connections: tuple[str, ...]
    files: tuple[str, ...]


@functools.cache
def _can_trace() -> bool:
    if not shutil.which("strace"):
        return False
    command = [*_STRACE, "-e", "trace=connect", "true"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def side_effects(*commands: Sequence[object], cwd: Path) -> SideEffects:
    """Run commands in ``cwd`` as a new user: an empty home and no variables. Skips the test without strace.

    Args:
        commands: arguments of ``hil``, or a command whose first argument is a path.
    """
    if not _can_trace():
        pytest.skip("needs strace and the right to trace a process")
    # Short, for sockets in it.
    with tempfile.TemporaryDirectory(prefix="home-", dir="/tmp") as folder:
        home, scratch, trace = (Path(folder) / name for name in ("home", "tmp", "trace"))
        home.mkdir()
        scratch.mkdir()
        environment = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(home),
            "TMPDIR": str(scratch),
            "HIL_SIMULATOR": "fresh",
        }
        # One script, because strace waits for the processes that a command leaves behind.
        script = "set -e\n" + "".join(f"{shlex.join(_command(one))}\n" for one in commands)
        try:
            ended = subprocess.run(
                [*_STRACE, "-e", f"trace={_CALLS}", "-o", str(trace), "sh", "-c", script],
                cwd=cwd,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=allowed_s(_TIMEOUT_S),
                check=False,
            )
        finally:
            for pid in started_with(f"HOME={home}"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert ended.returncode == 0, ended.stdout
        lines = trace.read_text(errors="replace").splitlines()
        own = (home, scratch, cwd)
        connections, files = list(_connections(lines, own)), list(_created(lines, own))
        files += _left_in_home(home)
        files += [str(path) for path in scratch.iterdir() if path.name != f"hil-{os.geteuid()}"]
    return SideEffects(tuple(connections), tuple(files))


def _command(given: Sequence[object]) -> list[str]:
    arguments = [str(one) for one in given]
    return arguments if isinstance(given[0], Path) else make_module_command("hil.controller.cli.main", *arguments)


def _connections(lines: Sequence[str], own: Sequence[Path]) -> Iterator[str]:
    """Select calls that reach another machine, ask for a host's name, or use another program's socket."""
    for line in lines:
        if not (found := _DOMAIN.search(line)):
            continue
        if found["family"] == "UNIX":
            path = _SOCKET.search(line)
            is_allowed = path is not None and (path["path"] == _NAMES or _is_inside(path["path"], own))
        else:
            is_allowed = bool(_LOOPBACK.search(line)) and not _DNS.search(line)
        if not is_allowed:
            yield line


def _created(lines: Sequence[str], own: Sequence[Path]) -> Iterator[str]:
    """Select files that were created outside of the directories of the test."""
    for line in lines:
        if found := _CREATED.search(line):
            path = found["path"]
            is_bytecode = "__pycache__" in path
            if not (is_bytecode or path.startswith(("/dev/", "/proc/", "pipe:")) or _is_inside(path, own)):
                yield path


def _is_inside(path: str, folders: Sequence[Path]) -> bool:
    # A socket's path may be relative, or lead through a descriptor of its directory.
    return not path.startswith("/") or path.startswith(("/proc/", *(f"{folder}/" for folder in folders)))


def _left_in_home(home: Path) -> Iterator[str]:
    """Select what is in the home, apart from hil's own directories."""
    own = [home / ".cache/hil", home / ".config/hil", home / ".local/share/hil"]
    for path in home.rglob("*"):
        if not any(path == one or one in path.parents or path in one.parents for one in own):
            yield str(path)


PYTHON = Path(sys.executable)
