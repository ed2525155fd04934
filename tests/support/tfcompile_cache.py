"""`hil` for tests of tfcompile: what no test changes, XLA's runtime and Zig's libraries, is made once for all."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from hil.controller.storage.cache import default_root
from support.commands import Ended

# The first program of all, on a busy machine.
TIMEOUT_S = 1500


def keep_what_does_not_change(environment: dict[str, str], cache: Path) -> dict[str, str]:
    """The environment of a command whose cache takes these parts from the user's own cache.

    Args:
        environment: of the command.
        cache: the folder that is its HIL_CACHE_DIR.
    """
    kept = {name: default_root() / name for name in ("tfcompile-runtime", "zig")}
    for folder in kept.values():
        folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (cache / "tfcompile-runtime").symlink_to(kept["tfcompile-runtime"])
    return {**environment, "ZIG_GLOBAL_CACHE_DIR": str(kept["zig"])}


def run_hil(*args: object, cwd: Path, env: dict[str, str]) -> Ended:
    """Run `hil ARGS...` in a folder."""
    command = [sys.executable, "-m", "hil.controller.cli.main", *map(str, args)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert "Traceback" not in done.stderr, done.stderr
    return Ended(done.returncode, done.stdout, done.stderr)
