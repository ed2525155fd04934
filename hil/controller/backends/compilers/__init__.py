"""Models into programs that a runtime can load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hil.controller.models.compiling import CompileOrder
from hil.controller.storage.packages import pick, registered
from hil.core.results import Artifact, Model
from hil.core.runtimes import NO_COMPILER, RUNTIMES, resolve

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Compiler(Protocol):
    """Makes a program of a model; the arguments and errors are those of :func:`compile_model`."""

    def __call__(self, model: Model, **order: Unpack[CompileOrder]) -> Artifact:
        """Compile."""


def compilers() -> dict[str, Compiler]:
    """Every compiler by name: the built-in ones and those of the entry point group ``hil.compilers``."""
    from hil.controller.backends.compilers.none import take_as_it_is

    built_in: dict[str, Compiler] = {NO_COMPILER: take_as_it_is}
    built_in |= {info.compiler: resolve(info.compile) for info in RUNTIMES.values() if info.compile}
    return registered("hil.compilers", built_in)


def compile_model(model: Model, *, compiler: str, **order: Unpack[CompileOrder]) -> Artifact:
    """Make a program of a model, or take the one made before.

    Args:
        compiler: ``iree``, ``none``, or the name of one that a package registered.
        order: ``runtime``, which will load the program; ``flags``, the compiler's own, those of the target included;
            ``debug_ir``, a folder for the compiler's intermediate forms (the cache is not asked then), or None; and
            how the work is done: see :class:`hil.controller.models.compiling.Work`.

    Raises:
        UsageError: no such compiler, or one that has nothing to do with this model or runtime.
        CompileFailed: the compiler refused the model.
        CompileCrashed: the compiler died.
        StageTimeout: it took too long.
        StorageError: the program cannot be kept.
    """
    return pick("compiler", compilers(), compiler)(model, **order)
