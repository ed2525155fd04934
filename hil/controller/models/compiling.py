"""Run compilers in isolated processes: settings, IREE's binary, and errors of the compiler."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated, IsolatedFunction, convert_errors
from hil.controller.storage.sources.packages import find_package_folder
from hil.core.files import open_file
from hil.core.processes import get_signal_name
from hil.errors import CompileCrashed, CompileFailed, StageError, UsageError

LOG = "compile.log"
# File with large weights, next to a program or module, and the weights' scope in programs.
PARAMETERS = "params.irpa"
PARAMETER_SCOPE = "model"
# If the weights have at least this size, they go into a separate file. protobuf and the compiler are limited to 2 GB,
# and compiling 1 GB of constants needs several GB of memory.
EXTERNAL_FROM_BYTES = 256 << 20
# Tensors with fewer elements stay in the program, because the compiler uses the values of shapes, indices and scales.
EXTERNAL_FROM_ELEMENTS = 1 << 16
# IREE 3.13's phases, in order: the values of --compile-to.
IREE_PHASES = (
    "start input abi preprocessing global-optimization dispatch-creation flow stream executable-sources "
    "executable-configurations executable-targets hal vm end"
).split()


class IsolatedCall(TypedDict):
    """Settings of an isolated call: process pool, timeout in seconds (or None), and log file for the output."""

    isolated: Isolated
    timeout: float | None
    log: Path


class CachedCall(IsolatedCall):
    """Settings of a call with a cached result."""

    cache: Cache


class Work(CachedCall):
    """Settings of a cached call. ``recompute`` ignores an existing cache entry."""

    recompute: bool


class _Order(Work):
    runtime: str
    flags: Sequence[str]
    debug_ir: Path | None


class CompileOrder(_Order, total=False):
    """Arguments of a compiler, except the model: see :func:`hil.controller.backends.compilers.compile_model`."""

    debug_ir_passes: bool
    failure: Path | None


def call_isolated(function: IsolatedFunction, arguments: Mapping[str, Any], how: IsolatedCall) -> Any:
    """Call a function in an isolated process.

    Raises the errors of :meth:`hil.controller.storage.isolation.isolated.Isolated.call`.

    The error's detail starts with the last phase that the function reported (:func:`report_phase`).
    """
    log = how["log"]
    start = log.stat().st_size if log.exists() else 0
    try:
        return how["isolated"].call(function, arguments, timeout=how["timeout"], log=log)
    except StageError as error:
        if phase := _read_last_phase(log, start):
            error.detail = f"{PHASE}{phase}\n{error.detail}"
        raise


# Prefix of lines that report a phase, in the log and in an error's detail.
_MARK = "hil: begins "
PHASE = "phase: "
_PHASE_WITHIN = 1 << 20


def report_phase(phase: str) -> None:
    """Report in the log that a phase starts.

    After a crash or a hang of the isolated function, only the log shows the active phase.
    """
    print(f"{_MARK}{phase}", flush=True)


def _read_last_phase(log: Path, start: int) -> str:
    try:
        with open_file(log) as file:
            file.seek(max(start, log.stat().st_size - _PHASE_WITHIN))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.removeprefix(_MARK) for line in reversed(lines) if line.startswith(_MARK)), "")


def convert_compiler_errors(
    what: str = "compiling", *, died: str = "the compiler crashed", failed: str = "cannot compile the model"
) -> contextlib.AbstractContextManager[None]:
    """Convert the errors of an isolated compiler call, like :func:`convert_errors`."""
    return convert_errors("compile", what, CompileFailed, failed, crash=CompileCrashed, died=died)


def compile_cached(
    key: str,
    meta: Mapping[str, Any],
    work: Work,
    debug_ir: Path | None,
    build: Callable[[Path], None],
    errors: contextlib.AbstractContextManager[None],
) -> tuple[Path, dict[str, Any]]:
    """Build a program or take it from the cache, and return the program's directory.

    The file :data:`LOG` has the output.

    Args:
        key: cache key.
        meta: cache entry metadata.
        work: execution settings.
        debug_ir: directory of ``--debug-ir``, created if missing; forces a build.
        build: builds the program in a directory.
        errors: see :func:`convert_compiler_errors`.

    Returns:
        The directory; and ``cached``, ``seconds`` and ``log`` of an :class:`hil.core.results.Artifact`.

    Raises:
        UsageError: creating the directory of ``--debug-ir`` failed.
    """
    if debug_ir is not None:
        with convert_debug_folder_errors(debug_ir):
            debug_ir.mkdir(parents=True, exist_ok=True)
    log = work["log"]

    def make(folder: Path) -> None:
        start = log.stat().st_size if log.exists() else 0
        with errors:
            build(folder)
        with open_file(log) as file:
            file.seek(start)
            (folder / LOG).write_bytes(file.read())

    began = time.monotonic()
    entry, cached = work["cache"].get_or_make(key, meta, make, work["recompute"] or debug_ir is not None)
    return entry, {"cached": cached, "seconds": 0.0 if cached else time.monotonic() - began, "log": entry / LOG}


@contextlib.contextmanager
def convert_debug_folder_errors(folder: Path) -> Iterator[None]:
    """Raise UsageError if creating the directory of ``--debug-ir`` fails."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot create {folder}: {error.strerror}", hint="pass a writable directory to --debug-ir"
        ) from error


def find_native_compiler() -> Path:
    """Return the compiler's native binary. pip's launcher script would take 0.3 s longer."""
    with contextlib.suppress(UsageError):
        binary = find_package_folder("iree.compiler") / "_mlir_libs" / "iree-compile"
        if binary.is_file():
            return binary
    if found := shutil.which("iree-compile"):
        return Path(found)
    raise UsageError("iree-compile not found", hint="pip install iree-base-compiler")


def run_logged(
    command: Sequence[str], log: Path, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a command with output to a log. Return the exit code (negative for a signal) and the output.

    Args:
        command: command and arguments.
        log: the log, which is this process's output.
        folder: working directory.
        environment: environment variables to add to the variables of this process.
    """
    print("$", *command, flush=True)
    start = log.stat().st_size
    env = {**os.environ, **(environment or {})}
    code = subprocess.run(command, stdin=subprocess.DEVNULL, cwd=folder, env=env, check=False).returncode
    with open_file(log) as file:
        file.seek(start)
        return code, file.read().decode(errors="replace")


def describe_death(code: int) -> str:
    """Describe how a process ended: ``of SIGSEGV``, ``with exit code 3``."""
    return f"of {get_signal_name(-code)}" if code < 0 else f"with exit code {code}"


def write_parameters(file: Path, weights: Iterable[tuple[str, Any]]) -> None:
    """Write an archive of large weights, given as names and bytes."""
    from iree import runtime

    index = runtime.ParameterIndex()
    for name, data in weights:
        index.add_buffer(name, data)
    index.create_archive_file(str(file))
