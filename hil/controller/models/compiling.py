"""Call a compiler in a process of its own: what it is told, where IREE's is, and the errors of compiling."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated, naming_errors
from hil.errors import CompileCrashed, CompileFailed, UsageError


class Work(TypedDict):
    """How a result is made that the cache may hold already.

    ``cache`` keeps it, by content and versions; ``isolated`` has the processes in which it is made, for what makes it
    may crash; ``recompute`` makes it though the cache has it; ``timeout`` is seconds, or None; what is printed
    meanwhile is appended to ``log``.
    """

    cache: Cache
    isolated: Isolated
    recompute: bool
    timeout: float | None
    log: Path


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


def compiling(
    what: str = "compiling", *, died: str = "the compiler died", failed: str = "the model cannot be compiled"
) -> contextlib.AbstractContextManager[None]:
    """Name the errors of a call of an isolated compiler: :func:`hil.controller.storage.isolated.naming_errors`."""
    return naming_errors("compile", what, crash=CompileCrashed, died=died, failure=CompileFailed, failed=failed)


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
