"""`hil` for tests of tfcompile, with a longer timeout for the first program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.commands import Ended

# Timeout for the first program, on a busy machine.
TIMEOUT_S = 1500


def run_hil(*args: object, cwd: Path, env: dict[str, str]) -> Ended:
    """Run `hil ARGS...` in a directory."""
    command = [sys.executable, "-m", "hil.controller.cli.main", *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "Traceback" not in done.stderr, done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)
