"""What profiling passes of all runtimes share: the clocks that are read beside them, and commands that do them."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from hil.core.clock import CLOCK_FILE, now_ns
from hil.core.processes import signal_name
from hil.errors import RunFailed

_LOOKS = 5
_DETAIL_LINES = 40


class ClockPairs:
    """A profiler's clock beside the board's.

    Args:
        profilers_ns: reads the clock that the profiler's files are timed by, in nanoseconds.
    """

    def __init__(self, profilers_ns: Callable[[], int]) -> None:
        self._profilers_ns = profilers_ns
        self._pairs: list[tuple[int, int]] = []

    def look(self) -> None:
        """Read both now: the profiler's between two readings of the board's, as close as a few tries bring them."""
        looks = [(now_ns(), self._profilers_ns(), now_ns()) for _ in range(_LOOKS)]
        before, profilers, after = min(looks, key=lambda look: look[2] - look[0])
        self._pairs.append((profilers, (before + after) // 2))

    def write(self, folder: Path) -> Path:
        """The file that tells them, beside the profile's own."""
        path = folder / CLOCK_FILE
        path.write_text(json.dumps({"pairs": self._pairs}))
        return path


def run_command(argv: Sequence[str], folder: Path, wanted: Path) -> None:
    """Run a profiling command in a folder, in this process's group: it ends with the worker.

    Args:
        folder: where it runs, and where what it says is kept meanwhile.
        wanted: the file that it is to write.

    Raises:
        RunFailed: it is missing, died, failed, or wrote nothing.
    """
    name = Path(argv[0]).name
    said = folder / "stderr"
    try:
        with said.open("wb") as stderr:
            done = subprocess.run(argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr)
    except OSError as error:
        raise RunFailed(
            f"the profiling command {name} cannot be started: {error.strerror}",
            hint="it is missing, or a library that it needs is, or it is of another CPU",
        ) from error
    lines = said.read_text(errors="replace").splitlines()[-_DETAIL_LINES:]
    if done.returncode < 0:
        raise RunFailed(
            f"the profiling command {name} was killed by {signal_name(-done.returncode)}", detail="\n".join(lines)
        )
    if done.returncode:
        raise RunFailed(
            f"the profiling command {name} failed with exit code {done.returncode}", detail="\n".join(lines)
        )
    if not wanted.is_file() or not wanted.stat().st_size:
        raise RunFailed(f"the profiling command {name} wrote nothing", detail="\n".join(lines))


def executable(tool: Path, folder: Path, name: str) -> Path:
    """A copy of a tool, out of the store, that can be called.

    Args:
        tool: the file, which may not be executable.
    """
    copy = folder / name
    shutil.copyfile(tool, copy)
    copy.chmod(0o700)
    return copy
