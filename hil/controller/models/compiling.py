"""Call a compiler in a process of its own: what it is told, where IREE's is, and the errors of compiling."""

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
from hil.controller.storage.isolated import Isolated, IsolatedFunction, naming_errors
from hil.controller.storage.packages import package_folder
from hil.core.processes import signal_name
from hil.errors import CompileCrashed, CompileFailed, StageError, UsageError

LOG = "compile.log"
# A file of large weights beside a program or module, and what programs call it.
PARAMETERS = "params.irpa"
PARAMETER_SCOPE = "model"
# Weights beyond this go into a file of their own: protobuf and the compiler both end at 2 GB, and
# compiling a program around a gigabyte of constants takes several times its memory.
EXTERNAL_FROM_BYTES = 256 << 20
# Of those, tensors below this stay in the program: shapes, indices, scales, whose values the compiler wants to see.
EXTERNAL_FROM_ELEMENTS = 1 << 16
# The phases of IREE 3.13, in order: the values of --compile-to.
IREE_PHASES = (
    "start input abi preprocessing global-optimization dispatch-creation flow stream executable-sources "
    "executable-configurations executable-targets hal vm end"
).split()


class IsolatedCall(TypedDict):
    """Where what may crash is called, for how many seconds (or None), and the log that gets what it prints."""

    isolated: Isolated
    timeout: float | None
    log: Path


class CachedCall(IsolatedCall):
    """How a result is made that the cache may hold already, by content and versions."""

    cache: Cache


class Work(CachedCall):
    """The same, where ``recompute`` makes the result though the cache has it."""

    recompute: bool


class _Order(Work):
    runtime: str
    flags: Sequence[str]
    debug_ir: Path | None


class CompileOrder(_Order, total=False):
    """What a compiler is told beside the model: see :func:`hil.controller.backends.compilers.compile_model`."""

    debug_ir_passes: bool
    failure: Path | None


def call_isolated(function: IsolatedFunction, arguments: Mapping[str, Any], how: IsolatedCall) -> Any:
    """Call a function in a process of its own; errors as of :meth:`hil.controller.storage.isolated.Isolated.call`.

    Their detail begins with the phase that the function entered last, if it told of any (:func:`entering`).
    """
    log = how["log"]
    start = log.stat().st_size if log.exists() else 0
    try:
        return how["isolated"].call(function, arguments, timeout=how["timeout"], log=log)
    except StageError as error:
        if phase := _last_phase(log, start):
            error.detail = f"{PHASE}{phase}\n{error.detail}"
        raise


# How a line of the log begins that tells of a phase, and the line of an error's detail that does.
_MARK = "hil: begins "
PHASE = "phase: "
_PHASE_WITHIN = 1 << 20


def entering(phase: str) -> None:
    """Say in the log which phase of its work an isolated function begins: one that dies or hangs cannot tell."""
    print(f"{_MARK}{phase}", flush=True)


def _last_phase(log: Path, start: int) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - _PHASE_WITHIN))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.removeprefix(_MARK) for line in reversed(lines) if line.startswith(_MARK)), "")


def compiling(
    what: str = "compiling", *, died: str = "the compiler died", failed: str = "the model cannot be compiled"
) -> contextlib.AbstractContextManager[None]:
    """Name the errors of a call of an isolated compiler: :func:`hil.controller.storage.isolated.naming_errors`."""
    return naming_errors("compile", what, CompileFailed, failed, crash=CompileCrashed, died=died)


def compile_cached(
    key: str,
    meta: Mapping[str, Any],
    work: Work,
    debug_ir: Path | None,
    build: Callable[[Path], None],
    errors: contextlib.AbstractContextManager[None],
) -> tuple[Path, dict[str, Any]]:
    """The folder of a program, made by ``build`` or from the cache, with what was logged meanwhile in :data:`LOG`.

    Args:
        debug_ir: the folder of ``--debug-ir``, which is made; the cache is not asked then.
        errors: see :func:`compiling`.

    Returns:
        The folder; and ``cached``, ``seconds`` and ``log`` of an :class:`hil.core.results.Artifact`.

    Raises:
        UsageError: the folder of ``--debug-ir`` cannot be made.
    """
    if debug_ir is not None:
        with making_debug_folder(debug_ir):
            debug_ir.mkdir(parents=True, exist_ok=True)
    log = work["log"]

    def make(folder: Path) -> None:
        start = log.stat().st_size if log.exists() else 0
        with errors:
            build(folder)
        with log.open("rb") as file:
            file.seek(start)
            (folder / LOG).write_bytes(file.read())

    began = time.monotonic()
    entry, cached = work["cache"].get_or_make(key, meta, make, work["recompute"] or debug_ir is not None)
    return entry, {"cached": cached, "seconds": 0.0 if cached else time.monotonic() - began, "log": entry / LOG}


@contextlib.contextmanager
def making_debug_folder(folder: Path) -> Iterator[None]:
    """Tell of the folder of ``--debug-ir`` that it cannot be made. Raises UsageError: it cannot."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {error.strerror}", hint="--debug-ir names a folder") from error


def native_compiler() -> Path:
    """The compiler's native binary; the launcher script that pip makes costs 0.3 s more."""
    with contextlib.suppress(UsageError):
        binary = package_folder("iree.compiler") / "_mlir_libs" / "iree-compile"
        if binary.is_file():
            return binary
    if found := shutil.which("iree-compile"):
        return Path(found)
    raise UsageError("there is no iree-compile", hint="pip install iree-base-compiler")


def run_logged(
    command: Sequence[str], log: Path, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Run a command whose output goes to a log; its exit code (negative: a signal) and what it printed.

    Args:
        environment: variables beside those of this process.
    """
    print("$", *command, flush=True)
    start = log.stat().st_size
    env = {**os.environ, **(environment or {})}
    code = subprocess.run(command, stdin=subprocess.DEVNULL, cwd=folder, env=env, check=False).returncode
    with log.open("rb") as file:
        file.seek(start)
        return code, file.read().decode(errors="replace")


def death_text(code: int) -> str:
    """How a process died, by its exit code: ``of SIGSEGV``, ``with exit code 3``."""
    return f"of {signal_name(-code)}" if code < 0 else f"with exit code {code}"


def write_parameters(file: Path, weights: Iterable[tuple[str, Any]]) -> None:
    """Write an archive of large weights: names and bytes."""
    from iree import runtime

    index = runtime.ParameterIndex()
    for name, data in weights:
        index.add_buffer(name, data)
    index.create_archive_file(str(file))
