"""Call a compiler in a process of its own: what it is told, where IREE's is, and the errors of compiling."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated, IsolatedCrash, IsolatedFailure, IsolatedTimeout
from hil.errors import CompileCrashed, CompileFailed, StageTimeout, UsageError


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


@contextlib.contextmanager
def compiling(
    what: str = "compiling", *, died: str = "the compiler died", failed: str = "the model cannot be compiled"
) -> Iterator[None]:
    """Name the errors of a call of an isolated compiler.

    Args:
        what: is done, for the message of a time limit: "compiling gave no result within 60 s".
        died: how that of a crash begins.
        failed: how that of any other error begins.

    Raises:
        StageTimeout, CompileCrashed, CompileFailed: ``detail`` is the compiler's own words.
    """
    try:
        yield
    except IsolatedTimeout as error:
        raise StageTimeout(f"{what} {error.message}", stage="compile", detail=error.detail) from error
    except IsolatedCrash as error:
        raise CompileCrashed(f"{died}: {error.message}", detail=error.detail) from error
    except IsolatedFailure as error:
        raise CompileFailed(f"{failed}: {error.message}", detail=error.detail) from error


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
