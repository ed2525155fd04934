"""Runtimes: what loads and runs a program inside a worker process.

A runtime is a class with the methods of :class:`Runtime`. Those that come with hil are in :mod:`hil.core.runtimes`;
others register under the entry-point group ``hil.runtimes``. A class is named as ``module:Class`` and imported where
workers come from, so the agent itself never loads a vendor's library. (A farm's simulated boards are forked from a
host that has hil's own imported, once a child of it could import them.)
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from hil.core.clock import CLOCK_FILE, now_ns
from hil.core.installed import points
from hil.core.processes import signal_name
from hil.core.runtimes import RUNTIMES
from hil.core.tensors import Array, TensorSpec
from hil.errors import RunFailed

RUNTIME_GROUP = "hil.runtimes"
# Called with the outputs of a run.
Check: TypeAlias = Callable[[Sequence[Array]], None]


class Program(Protocol):
    """A loaded program.

    One that can be profiled has one more method::

        def profile(self, warmup: int, iterations: int, folder: Path, tool: Path | None, check: Check) -> list[Path]

    It runs what is bound ``warmup`` and then ``iterations`` times under the runtime's profiler, writes into ``folder``
    and returns the files, among them one of :class:`hil.agent.runtimes.ClockPairs`; ``tool`` is the command that its
    ``describe`` asked for. It calls ``check`` with the outputs of every run, as ``fetch`` returns them. A program whose
    profiler gives out no outputs never does: it has ``profile_has_outputs = False``, and hil reports that they were not
    checked. It raises :class:`hil.errors.RunFailed` where that fails, and the program itself can be run on.

    Every run starts from the state after loading and from the inputs that were bound. One that keeps state from run to
    run, or copies of its inputs that a run may change, has one more method, which puts both back. It is called before
    each run, outside the timed part. (What a program writes into the arrays of ``bind``, hil puts back itself.) ::

        def renew(self) -> None

    One that knows which device, provider or delegate runs its nodes has another::

        def placement(self) -> hil.core.results.Placement | None

    It is called after runs, outside of what is timed, and tells of the last one; None is "not known". It returns the
    same tuple as long as nothing has changed. Parts are marked ``elsewhere`` that are not on the device which was given
    to :meth:`Runtime.load`, or on the default one where none was.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    function: str

    def bind(self, inputs: list[Array]) -> None:
        """Take the inputs of the runs that follow (views of shared memory, valid until the next bind).

        The same list as the last time holds the same arrays, whose content may be another.
        """

    def run(self) -> None:
        """Run once and wait until the device is done. The timed part: nothing else belongs in here."""

    def fetch(self) -> list[Array]:
        """The outputs of the last run, in order, valid until the next run. Called after every run."""


class Runtime(Protocol):
    """A way to run programs. Made in the worker, after the fork.

    One whose library takes long to import, or to be used for the first time, and can be forked once it is, has a static
    method ``preload()`` that does that: called before workers are forked, so that none of them has to. It must leave no
    thread that a worker needs.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        """Opens no device: a worker may be made, and wait, while nobody has the board.

        Each class has its own: Python 3.10 lets none inherit it from a Protocol.
        """

    @staticmethod
    def describe() -> dict[str, Any]:
        """``{"version": ..., "devices": [default first, ...]}``.

        With ``"profile_tool"``, the name of a command, where profiling needs one that is not here.
        """

    def prepare(self, device: str) -> None:
        """Open the device, if that takes long: nothing by default. An unknown one is an error of the load.

        Called before the first load: as soon as the device is known, which may be with that load.
        """

    def load(self, folder: Path, main: str, device: str, function: str) -> Program:
        """Load a program from its folder.

        Raises:
            LoadFailed: the program, the device or the function is none that this runtime takes.
        """


def known() -> dict[str, str]:
    """Return name -> ``module:Class`` of every runtime that hil or another package brings, installed or not."""
    found = {name: info.agent for name, info in RUNTIMES.items()}
    for entry in points(RUNTIME_GROUP):
        found[entry.name] = entry.value
    return found


def lacking(name: str) -> str:
    """Return the package that a runtime needs and that is not installed here; "" if it may work. Import nothing."""
    package = RUNTIMES[name].package if name in RUNTIMES else ""
    try:
        return package if package and importlib.util.find_spec(package) is None else ""
    except ModuleNotFoundError:
        return package  # not even the package that it is a part of


def is_described_apart(name: str) -> bool:
    """Whether a runtime is here, and asked what it is in a process of its own: one is started before any program."""
    return not (name in RUNTIMES and RUNTIMES[name].light) and not lacking(name)


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
    log = folder / "stderr"
    try:
        with log.open("wb") as stderr:
            done = subprocess.run(argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr)
    except OSError as error:
        raise RunFailed(
            f"the profiling command {name} cannot be started: {error.strerror}",
            hint="it is missing, or a library that it needs is, or it is of another CPU",
        ) from error
    if done.returncode < 0:
        ended = f"was killed by {signal_name(-done.returncode)}"
    elif done.returncode:
        ended = f"failed with exit code {done.returncode}"
    elif not wanted.is_file() or not wanted.stat().st_size:
        ended = "wrote nothing"
    else:
        return
    lines = log.read_text(errors="replace").splitlines()[-_DETAIL_LINES:]
    raise RunFailed(f"the profiling command {name} {ended}", detail="\n".join(lines))
