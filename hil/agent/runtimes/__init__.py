"""Runtimes load and run programs inside a worker process.

A runtime is a class with the methods of :class:`Runtime`. hil's runtimes are listed in :mod:`hil.core.runtimes`;
plugins register theirs under the entry-point group ``hil.runtimes``. A class is named as ``module:Class`` and imported
in the fork server, so the agent never loads a vendor's library. There is one exception: a farm's host imports hil's
runtimes before it forks simulated boards. The host first tests each import in a child process.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from hil.core.clock import CLOCK_FILE, get_time_ns
from hil.core.files import read_end
from hil.core.processes import get_signal_name
from hil.core.runtimes import list_known_runtimes
from hil.core.tensors import Array, TensorSpec
from hil.errors import RunFailed

# Called with the outputs of a run.
Check: TypeAlias = Callable[[Sequence[Array]], None]


class Program(Protocol):
    """Loaded program. The protocol has these optional methods:

    **Profiling**::

        def profile(self, warmup: int, iterations: int, folder: Path, tool: Path | None, check: Check) -> list[Path]

    Run the program ``warmup`` and then ``iterations`` times with the bound inputs, under the runtime's profiler. Write
    files into ``folder`` and return them, including one from :class:`hil.agent.runtimes.ClockPairs`. ``tool`` is the
    command that ``describe`` requested. Call ``check`` with the outputs of every run, in the form that ``fetch``
    returns. If the profiler does not provide outputs, set ``profile_has_outputs = False`` and never call ``check``; hil
    then reports that the outputs were not checked. Raise :class:`hil.errors.RunFailed` on failure. The program must
    remain usable after a failure.

    **State**::

        def renew(self) -> None

    Every run must start from the state after loading and from the bound inputs. A program needs this method if it has
    state, or copies of its inputs that a run may change. ``renew`` restores the state and the copies. hil calls
    ``renew`` before each run, outside the timed section. hil itself restores the arrays passed to ``bind``.

    **Steps**::

        def step(self, inputs: Sequence[Any]) -> Sequence[Any]
        def to_array(self, place: int, value: Any) -> Array

    ``step`` runs the program once, and waits until the device has finished. An input is an array or a value that an
    earlier step returned; such a value is passed at most once, so the program may overwrite it. ``to_array`` converts
    the value of output ``place``; the array is valid until the next step. hil uses these methods to generate tokens
    without copying the cache. Without them, hil uses ``bind``, ``run`` and ``fetch``.

    **Functions**::

        def open_function(self, name: str) -> Program

    Return another function of the same program, which shares its state. ``step`` of one function takes values that
    ``step`` of the other returned. hil calls this again after ``renew``, and uses it for decoders with separate
    functions for prompts.

    **Instructions**::

        def count_instructions(self) -> int

    Return the instructions of the last run, counted by the device or by its simulator. hil calls this after timed
    iterations, if the user requests counts. Without this method, hil counts the instructions of the worker's process.

    **Device time**::

        def get_run_ns(self) -> int

    Return the duration of the last run in nanoseconds, measured by the device. hil calls this after each run and
    reports this time. Without this method, hil measures the time of ``run`` on the machine of the agent.

    **Peak memory**::

        def get_peak_memory(self) -> int

    Return the peak main memory of the program in bytes, or 0 if unknown. Only programs that do not run in the worker's
    process need this, for example on a microcontroller. hil calls this after runs, outside the timed section. Without
    this method, hil reports the peak resident memory of the worker's process.

    **Device memory**::

        def get_peak_device_memory(self) -> int | None

    Return the peak memory of the device in bytes, as the runtime reports it for this process; None if unknown. hil
    calls this after runs, outside the timed section. If the runtime does not report it, hil reads the statistics of
    the kernel's GPU driver.

    **Placement**::

        def placement(self) -> hil.core.results.Placement | None

    Report which device, provider or delegate ran the nodes of the last run, or None if unknown. hil calls this after
    runs, outside the timed section. Return the same tuple until the placement changes. Mark parts as ``elsewhere`` if
    they did not run on the device given to :meth:`Runtime.load` (or on the default device if none was
    given).
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    function: str

    def bind(self, inputs: list[Array]) -> None:
        """Set the inputs of the following runs. The inputs are views of shared memory, valid until the next bind.

        If hil passes the same list twice, the list contains the same arrays, possibly with new content.
        """

    def run(self) -> None:
        """Run the program and wait until the device has finished. This is the timed section: do nothing else here."""

    def fetch(self) -> list[Array]:
        """Return the outputs of the last run, in order, valid until the next run. hil calls this after every run."""


class Runtime(Protocol):
    """Interface for running programs. An instance is created in the worker, after the fork.

    If importing or initializing the library is slow, and the library supports a fork after that, add a static method
    ``preload()``. ``preload()`` runs before workers are forked, so that workers inherit the initialized library.
    ``preload()`` must not leave threads behind that a worker needs.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        """Create the runtime without opening a device: a worker may wait while a different session has the board.

        Each class must define ``__init__``: Python 3.10 cannot inherit it from a Protocol.
        """

    @staticmethod
    def describe() -> dict[str, Any]:
        """Return ``{"version": ..., "devices": [default first, ...]}``.

        Add ``"device_details"``, a list of dictionaries with the keys of the protocol's message ``RuntimeDevice``, if
        the runtime reports more about its devices than their names.

        Add ``"profile_tool"``, the name of a command, if profiling needs a command that is not installed here.
        """

    def prepare(self, device: str) -> None:
        """Open the device, if opening is slow.

        The default does nothing. Ignore an unknown device here: ``load`` reports it.

        hil calls this before the first load, as soon as the device is known.
        """

    def load(self, folder: Path, main: str, device: str, function: str) -> Program:
        """Load a program from a directory.

        Raises:
            LoadFailed: the program, device or function is unsupported.
        """


def list_runtimes() -> dict[str, str]:
    """Return name -> ``module:Class`` of all runtimes of hil and of plugins, installed or not."""
    return {name: info.agent for name, info in list_known_runtimes().items() if info.agent}


def lacking(name: str) -> str:
    """Return the missing package of a runtime, or "" if the runtime may work. Imports nothing."""
    info = list_known_runtimes().get(name)
    package = info.package if info else ""
    try:
        return package if package and importlib.util.find_spec(package) is None else ""
    except ModuleNotFoundError:
        return package  # the parent package is missing


def is_described_apart(name: str) -> bool:
    """Return True if a runtime is installed and a separate process must describe it."""
    info = list_known_runtimes().get(name)
    return not (info and info.light) and not lacking(name)


_LOOKS = 5
_DETAIL_LINES = 40


class ClockPairs:
    """Pairs of readings: the profiler's clock and the board's clock at the same moment.

    Args:
        profilers_ns: returns the clock of the profiler's files, in nanoseconds.
    """

    def __init__(self, profilers_ns: Callable[[], int]) -> None:
        self._profilers_ns = profilers_ns
        self._pairs: list[tuple[int, int]] = []

    def read_clocks(self) -> None:
        """Read both clocks.

        Each try reads the profiler's clock between two readings of the board's clock. Of five tries, the method stores
        the try with the shortest time between these two readings.
        """
        looks = [(get_time_ns(), self._profilers_ns(), get_time_ns()) for _ in range(_LOOKS)]
        before, profilers, after = min(looks, key=lambda look: look[2] - look[0])
        self._pairs.append((profilers, (before + after) // 2))

    def write(self, folder: Path) -> Path:
        """Write the pairs to a file in the profile's directory. Return its path."""
        path = folder / CLOCK_FILE
        path.write_text(json.dumps({"pairs": self._pairs}))
        return path


def run_command(argv: Sequence[str], folder: Path, wanted: Path) -> None:
    """Run a profiling command in this process's group, so that it ends with the worker.

    Args:
        argv: command and arguments.
        folder: working directory, also for the log of the command's output.
        wanted: file that the command must write.

    Raises:
        RunFailed: the command is missing, crashed, failed, or wrote nothing.
    """
    name = Path(argv[0]).name
    log = folder / "stderr"
    try:
        with log.open("wb") as stderr:
            done = subprocess.run(argv, cwd=folder, stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr)
    except OSError as error:
        raise RunFailed(
            f"cannot start the profiling command {name}: {error.strerror}",
            hint="the command or a required library is missing, or it was built for a different CPU",
        ) from error
    if done.returncode < 0:
        ended = f"was killed by {get_signal_name(-done.returncode)}"
    elif done.returncode:
        ended = f"failed with exit code {done.returncode}"
    elif not wanted.is_file() or not wanted.stat().st_size:
        ended = "wrote nothing"
    else:
        return
    lines = read_end(log).splitlines()[-_DETAIL_LINES:]
    raise RunFailed(f"the profiling command {name} {ended}", detail="\n".join(lines))
