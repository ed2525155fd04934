"""Simulators that keep running after the command that started them, so that the next command starts faster.

A simulator is reused only for the same user, board config, hil code, packages, environment and limits. A simulator
serves one command at a time, which locks the simulator's directory. Concurrent commands use or start other simulators.
After an idle timeout, the simulator first takes the lock, so that no command can use it, and then exits.
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

from hil.controller.devices.agent_client.calls import AgentCalls
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.links import simulator_process
from hil.core.board_config import BoardConfig
from hil.core.digest import digest_of
from hil.core.files import read_file
from hil.core.processes import signal_group
from hil.core.scratch import make_lasting_folder, remove_tree

IDLE_SECONDS = 300
# Maximum reusable simulators per kind. Further concurrent commands start temporary simulators.
_MAX_SIMULATORS = 4
_ANSWER_SECONDS = 5.0
PACKAGE = Path(__file__).parents[3]
# Parts of hil that a simulator does not import.
_NOT_ITS_CODE = ("controller", "testing", "__pycache__")
# Environment variables that differ between terminals, shells and tests and do not affect a simulator.
_OF_THE_CALLER = frozenset(
    "COLORTERM COLUMNS DBUS_SESSION_BUS_ADDRESS DISPLAY HOME INVOCATION_ID JOURNAL_STREAM LINES LS_COLORS MAIL "
    "OLDPWD OPENBLAS_THREAD_TIMEOUT PS1 PWD PYTEST_CURRENT_TEST SHLVL SSH_AUTH_SOCK SSH_CLIENT SSH_CONNECTION "
    "SSH_TTY STY TERM TERM_PROGRAM TERM_PROGRAM_VERSION TERM_SESSION_ID TMUX TMUX_PANE WAYLAND_DISPLAY WINDOWID "
    "XDG_SESSION_ID _".split()
)


@dataclass(frozen=True)
class Loan:
    """Simulator reserved for this process, until :meth:`give_back`."""

    folder: Path
    lock: int
    begins: int  # byte offset in the log at which this loan begins

    def read_output(self) -> str:
        """Return the simulator's output since the start of this loan, after earlier lines about a missing sandbox."""
        printed = read_file(simulator_process.log_of(self.folder))
        before = [line for line in printed[: self.begins].splitlines() if line.startswith(b"not sandboxed: ")]
        return b"\n".join([*before, printed[self.begins :]]).decode(errors="replace")

    def give_back(self) -> None:
        """Release the simulator for the next command."""
        os.close(self.lock)


def borrow_simulator(config: BoardConfig) -> Loan | None:
    """Reserve a running simulator for a board config, or start a reusable simulator.

    Returns None if all reusable simulators are in use, or if reuse is not possible on this machine.

    Raises:
        BoardUnreachable: The simulator does not start.
    """
    # Do not reuse simulators with a relative path, which the simulator would resolve to another directory.
    paths = [Path(part) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if sys.platform != "linux" or not all(path.is_absolute() for path in paths):
        return None
    base = make_lasting_folder("sim")
    if base is None:
        return None
    kind = _digest_kind(config)
    for number in range(_MAX_SIMULATORS):
        folder = base / f"{kind}-{number}"
        lock = _lock(folder)
        if lock is None:
            continue
        try:
            if not _is_responding(folder):
                _sweep(base, folder)
                _start(config, folder)
            return Loan(folder, lock, simulator_process.log_of(folder).stat().st_size)
        except BaseException:
            os.close(lock)
            raise
    return None


def _start(config: BoardConfig, folder: Path) -> None:
    process = simulator_process.start(
        config, folder, "--idle-exit", str(IDLE_SECONDS), "--kept", stdin=subprocess.DEVNULL, cwd=folder
    )
    process.returncode = 0  # the simulator outlives this process, so suppress Popen's wait and warning


def _lock(folder: Path) -> int | None:
    """Create a directory and lock it. Return None if another process has the lock."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), folder.stat()):  # the directory was not removed meanwhile
            return lock
    os.close(lock)
    return None


def _is_responding(folder: Path) -> bool:
    """Return whether the directory's simulator responds. Kill a hanging simulator."""
    if not simulator_process.is_served(folder):
        return False
    address = simulator_process.get_address(folder)
    with contextlib.closing(AgentCalls(AgentEndpoint(address))) as calls:
        if calls.is_answered(_ANSWER_SECONDS):
            return True
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asked:
        asked.connect(address.removeprefix("unix:"))
        credentials = asked.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if (pid := struct.unpack("3i", credentials)[0]) > 1:
            signal_group(pid)
    return False


def _sweep(base: Path, mine: Path) -> None:
    """Remove directories of crashed simulators. This process has locked ``mine``, which is emptied but not removed."""
    for folder in base.iterdir():
        if folder == mine:
            for left in folder.iterdir():
                left.unlink() if not left.is_dir() or left.is_symlink() else remove_tree(left)
        elif (lock := _lock(folder)) is not None:
            if not simulator_process.is_served(folder):
                remove_tree(folder)
            os.close(lock)


def _digest_kind(config: BoardConfig) -> str:
    """Return a short digest of everything that must match to reuse a simulator."""
    environment = sorted((name, value) for name, value in os.environ.items() if name not in _OF_THE_CALLER)
    code = sorted(_iter_files(PACKAGE))
    packages = [(path, Path(path).stat().st_mtime_ns) for path in sys.path if path.endswith("-packages")]
    own = Path("/proc/self")
    where = [*map(str, map(Path.readlink, sorted(own.joinpath("ns").iterdir()))), own.joinpath("cgroup").read_text()]
    share = sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0), own.joinpath("limits").read_text()
    program = sys.executable, str(config.path.absolute()), read_file(config.path)
    told = (program, environment, code, packages, where, share)
    return digest_of(repr(told).encode()).partition(":")[2][:16]


def _iter_files(folder: Path) -> Iterator[tuple[str, int, int]]:
    top = str(folder)
    for place, folders, files in os.walk(top):  # a third of the time of Path.rglob
        folders[:] = set(folders).difference(_NOT_ITS_CODE if place == top else ("__pycache__",))
        for name in files:
            if name.endswith(".py"):
                seen = os.stat(path := f"{place}/{name}")  # noqa: PTH116 - hundreds of them
                yield path, seen.st_mtime_ns, seen.st_size
