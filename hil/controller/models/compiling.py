"""Call a compiler in a process of its own: where IREE's is, and the errors of compiling."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

from hil.controller.storage.isolated import IsolatedCrash, IsolatedFailure, IsolatedTimeout
from hil.errors import CompileCrashed, CompileFailed, StageTimeout, UsageError


@contextlib.contextmanager
def compiling(
    what: str = "compiling", *, died: str = "the compiler died", failed: str = "the model cannot be compiled"
) -> Iterator[None]:
    """Around a call of an isolated compiler.

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
