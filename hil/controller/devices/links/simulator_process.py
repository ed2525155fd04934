"""A simulator's process: it listens in a folder that it is given, and keeps its blobs and its log there."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from hil.controller.devices.links.agent import probe
from hil.core.board_config import BoardConfig
from hil.core.processes import module_command
from hil.errors import BoardUnreachable, UsageError

_START_S = 30.0
_LOOK_S = 0.01


def address_in(folder: Path) -> str:
    """Where the simulator of a folder listens."""
    return f"unix:{folder}/sim.sock"


def log_of(folder: Path) -> Path:
    """The file that the simulator of a folder prints to."""
    return folder / "log"


def start(
    config: BoardConfig, folder: Path, *more: str, stdin: int, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a simulator for a board config; returns once it listens.

    Args:
        more: further arguments of `python -m hil.sim`.

    Raises:
        UsageError: it refuses its arguments.
        BoardUnreachable: it ended, or did not listen in time.
    """
    command = module_command("hil.sim", "--config", str(config.path.absolute()), *more)
    command += ["--listen", address_in(folder), "--store", str(folder / "store")]
    with log_of(folder).open("wb") as log:
        # A session of its own: Ctrl-C in the terminal is the controller's to handle.
        process = subprocess.Popen(
            command, stdin=stdin, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, cwd=cwd
        )
    try:
        _wait(process, config, folder)
    except BaseException:
        process.kill()
        process.wait()
        if process.stdin:
            process.stdin.close()
        raise
    return process


def _wait(process: subprocess.Popen[bytes], config: BoardConfig, folder: Path) -> None:
    until = time.monotonic() + _START_S
    while not is_served(folder):
        code = process.poll()
        if code is not None or time.monotonic() > until:
            printed = log_of(folder).read_text(errors="replace").strip()
            if code == UsageError.exit_code:
                message, _, hint = printed.removeprefix("hil.sim: ").partition("\n  hint: ")
                raise UsageError(message, hint=hint)
            detail = printed or f"it did not serve within {_START_S:g} s"
            raise BoardUnreachable("the simulator did not start", board=config.name, detail=detail)
        time.sleep(_LOOK_S)


def is_served(folder: Path) -> bool:
    """Whether somebody listens there."""
    try:
        probe(address_in(folder))
    except OSError:
        return False
    return True
