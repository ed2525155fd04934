"""Simulators that outlive the command that started them: the next command need not wait for one to start.

Each is kept for whoever asks for exactly the same: the same user, board config, code of hil's, packages, environment
and limits. It serves one command at a time, which holds the lock on its folder; another takes, or starts, another. One
that nobody has used for a while ends: it takes the lock itself, so that nobody comes in meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hil.controller.devices.board_client import Target
from hil.controller.devices.calls import Calls
from hil.controller.devices.links import simulator_process
from hil.core.board_config import BoardConfig
from hil.core.digest import digest_of
from hil.core.processes import signal_group
from hil.core.scratch import lasting_folder, remove_tree

KEPT_S = 300
# At most so many of a kind at a time; more commands at once have one of their own each.
_MOST = 4
_ANSWER_S = 5.0
PACKAGE = Path(__file__).parents[3]
# Of hil, what no simulator imports.
_NOT_ITS_CODE = ("controller", "testing", "__pycache__")
# What differs from one terminal, shell or test to the next, and says nothing to a simulator.
_OF_THE_CALLER = frozenset(
    "_ COLORTERM COLUMNS DBUS_SESSION_BUS_ADDRESS DISPLAY INVOCATION_ID JOURNAL_STREAM LINES LS_COLORS MAIL OLDPWD "
    "OPENBLAS_THREAD_TIMEOUT PS1 PWD PYTEST_CURRENT_TEST SHLVL SSH_AUTH_SOCK SSH_CLIENT SSH_CONNECTION SSH_TTY STY "
    "TERM TERM_PROGRAM TERM_PROGRAM_VERSION TERM_SESSION_ID TMUX TMUX_PANE WAYLAND_DISPLAY WINDOWID "
    "XDG_SESSION_ID".split()
)


@dataclass(frozen=True)
class Loan:
    """A simulator that is ours until it is given back."""

    folder: Path
    lock: int
    begins: int  # where in its log our time begins, in bytes

    def printed(self) -> str:
        """What it has printed in our time, and why there is no sandbox."""
        printed = simulator_process.log_of(self.folder).read_bytes()
        before = [line for line in printed[: self.begins].splitlines() if line.startswith(b"not sandboxed: ")]
        return b"\n".join([*before, printed[self.begins :]]).decode(errors="replace")

    def give_back(self) -> None:
        """Leave it to the next command."""
        os.close(self.lock)


def borrow(config: BoardConfig) -> Loan | None:
    """Take a kept simulator for a board config, or start one to be kept.

    None where there are as many in use as are kept, or where none can be.

    Raises:
        BoardUnreachable: it does not start.
    """
    # A relative path would mean another folder where it stands.
    paths = [Path(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if sys.platform != "linux" or not all(path.is_absolute() for path in paths):
        return None
    base = lasting_folder("sim")
    if base is None:
        return None
    kind = _kind(config)
    for number in range(_MOST):
        folder = base / f"{kind}-{number}"
        lock = _lock(folder)
        if lock is None:
            continue
        try:
            if not _answers(folder):
                _sweep(base, folder)
                _start(config, folder)
            return Loan(folder, lock, simulator_process.log_of(folder).stat().st_size)
        except BaseException:
            os.close(lock)
            raise
    return None


def _start(config: BoardConfig, folder: Path) -> None:
    process = simulator_process.start(
        config, folder, "--idle-exit", str(KEPT_S), "--kept", stdin=subprocess.DEVNULL, cwd=folder
    )
    process.returncode = 0  # it outlives us: nobody is to wait for it


def _lock(folder: Path) -> int | None:
    """The lock on a folder, which is made; None where somebody has it."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), folder.stat()):  # and nobody removed it meanwhile
            return lock
    os.close(lock)
    return None


def _answers(folder: Path) -> bool:
    """Whether its simulator is there and well; one that hangs is killed."""
    if not simulator_process.is_served(folder):
        return False
    address = simulator_process.address_in(folder)
    with contextlib.closing(Calls(Target(address))) as calls:
        if calls.is_answered(_ANSWER_S):
            return True
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asked:
        asked.connect(address.removeprefix("unix:"))
        credentials = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if (pid := struct.unpack("3i", credentials)[0]) > 1:
            signal_group(pid)
    return False


def _sweep(base: Path, mine: Path) -> None:
    """Remove what those left that ended otherwise than by themselves; ``mine``, which is locked, is only emptied."""
    for folder in base.iterdir():
        if folder == mine:
            for left in folder.iterdir():
                left.unlink() if not left.is_dir() or left.is_symlink() else remove_tree(left)
        elif (lock := _lock(folder)) is not None:
            if not simulator_process.is_served(folder):
                remove_tree(folder)
            os.close(lock)


def _kind(config: BoardConfig) -> str:
    """What a simulator must have been started with to be the same as one that is started now, as a short name."""
    environment = sorted((name, value) for name, value in os.environ.items() if name not in _OF_THE_CALLER)
    code = sorted(_files(PACKAGE))
    packages = [(path, Path(path).stat().st_mtime_ns) for path in sys.path if path.endswith("-packages")]
    own = Path("/proc/self")
    where = [*map(str, map(Path.readlink, sorted(own.joinpath("ns").iterdir()))), own.joinpath("cgroup").read_text()]
    share = sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0), own.joinpath("limits").read_text()
    program = sys.executable, str(config.path.absolute()), config.path.read_bytes()
    told = (program, environment, code, packages, where, share)
    return digest_of(repr(told).encode()).partition(":")[2][:16]


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    for part in folder.iterdir():
        if part.name not in _NOT_ITS_CODE:
            for file in part.rglob("*.py") if part.is_dir() else [part]:
                seen = file.stat()
                yield str(file), seen.st_mtime_ns, seen.st_size
