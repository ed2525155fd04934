"""Process of a simulator. The socket, blob store and log are in a given directory."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from hil.controller.devices.links.agent import probe
from hil.core.board_config import BoardConfig
from hil.core.files import read_end
from hil.core.processes import make_module_command
from hil.errors import BoardUnfit, BoardUnreachable, StorageError, UsageError

# Timeout in seconds. A start takes a second, but on a busy machine up to a minute.
_START_SECONDS = 90.0
_LOOK_SECONDS = 0.01
SIMULATOR = "hil.sim"
# Exit code -> error type. A simulator uses this machine's disk, so a disk error becomes a StorageError.
_REFUSALS: dict[int | None, type[UsageError]] = {UsageError.exit_code: UsageError, BoardUnfit.exit_code: StorageError}


def get_address(folder: Path) -> str:
    """Return the address of a directory's simulator."""
    return f"unix:{folder}/sim.sock"


def log_of(folder: Path) -> Path:
    """Return the log file of a directory's simulator."""
    return folder / "log"


def start(
    config: BoardConfig, folder: Path, *more: str, stdin: int, cwd: Path | None = None, module: str = SIMULATOR
) -> subprocess.Popen[bytes]:
    """Start a simulator for a board config and wait until it listens.

    Args:
        more: Further arguments of the command.
        module: The module that the command runs.

    Raises:
        UsageError: The simulator rejects the arguments.
        StorageError: The directory is on a full, read-only or failing disk.
        BoardUnreachable: The simulator exited or did not listen in time.
    """
    command = make_module_command(module, "--config", str(config.path.absolute()), *more)
    command += ["--listen", get_address(folder), "--store", str(folder / "store")]
    with log_of(folder).open("wb") as log:
        # A separate process session, so that the controller handles Ctrl-C of the terminal.
        process = subprocess.Popen(
            command, stdin=stdin, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=cwd
        )
    try:
        _wait(process, config, folder, module)
    except BaseException:
        process.kill()
        process.wait()
        if process.stdin:
            process.stdin.close()
        raise
    return process


def _wait(process: subprocess.Popen[bytes], config: BoardConfig, folder: Path, module: str) -> None:
    until = time.monotonic() + _START_SECONDS
    while not is_served(folder):
        code = process.poll()
        if code is not None or time.monotonic() > until:
            printed = read_end(log_of(folder)).strip()
            if (kind := _REFUSALS.get(code)) is not None:
                message, _, hint = printed.removeprefix(f"{module}: ").partition("\n  hint: ")
                raise kind(message, hint=hint)
            detail = printed or f"it did not accept connections within {_START_SECONDS:g} s"
            raise BoardUnreachable(
                "the simulator did not start" if module == SIMULATOR else "the board's agent did not start",
                board=config.name,
                detail=detail,
                hint="check the load and the free memory of this machine",
            )
        time.sleep(_LOOK_SECONDS)


def is_served(folder: Path) -> bool:
    """Return whether a simulator listens in the directory."""
    try:
        probe(get_address(folder))
    except OSError:
        return False
    return True
