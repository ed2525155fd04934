"""What goes wrong with a compiler in a process of its own, as the errors of compiling."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hil.controller.storage.isolated import IsolatedCrash, IsolatedFailure, IsolatedTimeout
from hil.errors import CompileCrashed, CompileFailed, StageTimeout


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
