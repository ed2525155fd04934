"""Run the user's command of --bisect with the shell."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hil.controller.storage.runs import convert_write_errors
from hil.controller.storage.screen.texts import line
from hil.core.files import read_end
from hil.core.processes import exit_text, signal_group

_LOG_BYTES = 2000
# Environment variables to remove: with them, git in a worktree would change another tree. See `git rev-parse
# --local-env-vars`.
_LOCAL = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY")


def make_environment() -> dict[str, str]:
    """Return this process's environment, without the variables that select a git repository."""
    return {name: value for name, value in os.environ.items() if name not in _LOCAL}


def run_command(
    command: str, folder: Path, variables: Mapping[str, str], *, title: str, timeout_s: float, log: Path
) -> str:
    """Run a command with the user's shell in a directory. Return the reason for a failure, or "".

    Args:
        variables: environment variables to add.
        title: the command in the reason, such as "the build".
        log: file for the output.
    """
    with convert_write_errors(log.parent), log.open("wb") as file:
        process = subprocess.Popen(
            command,
            shell=True,
            cwd=folder,
            env={**make_environment(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return f"{title} exceeded {timeout_s:g} s and was stopped; see {log}"
        finally:
            # Kill the whole group: a command may leave processes, and Ctrl-C does not reach another session.
            signal_group(process.pid)
            process.wait()
    if not code:
        return ""
    lines = read_end(log, _LOG_BYTES).strip().splitlines()
    last = f": {line(lines[-1])}" if lines else ""
    return f"{title} {exit_text(code)}{last}; see {log}"
