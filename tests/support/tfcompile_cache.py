"""`hil` for tests of tfcompile, with time for the first program of all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.commands import Ended

# The first program of all, on a busy machine.
TIMEOUT_S = 1500


def run_hil(*args: object, cwd: Path, env: dict[str, str]) -> Ended:
    """Run `hil ARGS...` in a folder."""
    command = [sys.executable, "-m", "hil.controller.cli.main", *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "Traceback" not in done.stderr, done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)
