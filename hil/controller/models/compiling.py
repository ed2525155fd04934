"""Call a compiler in a process of its own: what it is told, where IREE's is, and the errors of compiling."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated, IsolatedFunction, naming_errors
from hil.errors import CompileCrashed, CompileFailed, UsageError


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


class CompileOrder(Work):
    """What a compiler is told beside the model: see :func:`hil.controller.backends.compilers.compile_model`."""

    runtime: str
    flags: Sequence[str]
    debug_ir: Path | None


def work_of(order: CompileOrder) -> Work:
    """The part of an order that conversions take."""
    return {
        "cache": order["cache"],
        "isolated": order["isolated"],
        "recompute": order["recompute"],
        "timeout": order["timeout"],
        "log": order["log"],
    }


def call_isolated(function: IsolatedFunction, arguments: Mapping[str, Any], how: IsolatedCall) -> Any:
    """Call a function in a process of its own; errors as of :meth:`hil.controller.storage.isolated.Isolated.call`."""
    return how["isolated"].call(function, arguments, timeout=how["timeout"], log=how["log"])


def compiling(
    what: str = "compiling", *, died: str = "the compiler died", failed: str = "the model cannot be compiled"
) -> contextlib.AbstractContextManager[None]:
    """Name the errors of a call of an isolated compiler: :func:`hil.controller.storage.isolated.naming_errors`."""
    return naming_errors("compile", what, CompileFailed, failed, crash=CompileCrashed, died=died)


def native_compiler() -> Path:
    """The compiler's native binary; the launcher script that pip makes costs 0.3 s more."""
    spec = importlib.util.find_spec("iree.compiler")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(place) / "_mlir_libs" / "iree-compile"
        if binary.is_file():
            return binary
    if found := shutil.which("iree-compile"):
        return Path(found)
    raise UsageError("there is no iree-compile", hint="pip install iree-base-compiler")


@contextlib.contextmanager
def keeping_log(log: Path, kept: Path) -> Iterator[None]:
    """Copy what is appended to a log meanwhile to a file of its own; nothing where an error is raised."""
    start = log.stat().st_size if log.exists() else 0
    yield
    with log.open("rb") as file:
        file.seek(start)
        kept.write_bytes(file.read())


def make_debug_folder(debug_ir: Path | None) -> None:
    """Make the folder of ``--debug-ir``, if there is one.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        if debug_ir is not None:
            debug_ir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{debug_ir} cannot be made: {error.strerror}", hint="--debug-ir names a folder") from error


def run_logged(command: Sequence[str], log: Path, folder: Path | None = None) -> tuple[int, str]:
    """Run a command whose output goes to a log; its exit code (negative: a signal) and what it printed."""
    print("$", *command, flush=True)
    start = log.stat().st_size
    code = subprocess.run(command, stdin=subprocess.DEVNULL, cwd=folder, check=False).returncode
    with log.open("rb") as file:
        file.seek(start)
        return code, file.read().decode(errors="replace")
