"""Models into programs that a runtime can load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hil.controller.models.compiling import CompileOrder, compiling
from hil.controller.models.conversions import can_convert, convert
from hil.controller.storage.packages import pick, registered
from hil.core.digest import algorithm_of, digest_file
from hil.core.field_types import check_fields
from hil.core.guarded import guard, package_of, shown
from hil.core.named import later
from hil.core.results import Artifact, Model
from hil.core.runtimes import NO_COMPILER, RUNTIMES
from hil.errors import CompileCrashed, CompileFailed, NotRun, StageTimeout, UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack


_GROUP = "hil.compilers"
# The compilers whose IR can be seen pass by pass.
_WITH_PASSES = ("iree", "tfcompile")


class Compiler(Protocol):
    """Makes a program of a model; the arguments and errors are those of :func:`compile_model`."""

    def __call__(self, model: Model, **order: Unpack[CompileOrder]) -> Artifact:
        """Compile."""


def compilers() -> dict[str, Compiler]:
    """Every compiler by name: the built-in ones and those of the entry point group ``hil.compilers``."""
    built_in: dict[str, Compiler] = {NO_COMPILER: take_as_it_is}
    built_in |= {info.compiler: later(info.compile) for info in RUNTIMES.values() if info.compile}
    return registered(_GROUP, built_in)


def compile_model(model: Model, *, compiler: str, **order: Unpack[CompileOrder]) -> Artifact:
    """Make a program of a model, or take the one made before.

    Args:
        compiler: ``iree``, ``none``, or the name of one that a package registered.
        order: ``runtime``, which will load the program; ``flags``, the compiler's own, those of the target included;
            ``debug_ir``, a folder for the compiler's intermediate forms (the cache is not asked then), or None;
            ``debug_ir_passes``, whether those after each pass go there too; ``failure``, a folder for what shows a
            failure again, or None, which is the cache alone (without it nothing is kept); and how the work is done: see
            :class:`hil.controller.models.compiling.Work`.

    Raises:
        UsageError: no such compiler, or one that has nothing to do with this model or runtime.
        CompileFailed: the compiler refused the model.
        CompileCrashed: the compiler died.
        StageTimeout: it took too long.
        StorageError: the program cannot be kept.
    """
    found = pick("compiler", compilers(), compiler)
    if order.get("debug_ir_passes") and compiler not in _WITH_PASSES:
        raise UsageError(
            f"--debug-ir-passes: the compiler {compiler} does not show its passes",
            hint=f"those of {', '.join(_WITH_PASSES)} can be seen; --debug-ir alone keeps what there is",
        )
    with guard(
        "compiler", _GROUP, compiler, CompileFailed, CompileFailed, CompileCrashed, StageTimeout, NotRun, UsageError
    ):
        with compiling():
            made = found(model, **order)
        if package_of(_GROUP, compiler):
            _check_artifact(made)
    return made


def _check_artifact(made: object) -> None:
    """Raise TypeError or ValueError for what a compiler of a package may not return."""
    if not isinstance(made, Artifact):
        raise TypeError(f"it returned {shown(made)}: expected a hil.plugins.Artifact")
    check_fields(made)
    if made.main not in made.files:
        raise ValueError(f"main of its artifact is {made.main!r}, which is none of its files")
    for name, path in made.files.items():
        if not path.is_file():
            raise ValueError(f"{name} of its artifact is missing: {path}")
        if name not in made.digests:
            raise ValueError(f"{name} of its artifact has no digest")
        algorithm_of(made.digests[name])


def take_as_it_is(model: Model, **order: Unpack[CompileOrder]) -> Artifact:
    """The model's files as a program, untouched where the runtime takes its format, else converted to one it takes.

    Raises:
        UsageError: the runtime does not load this format, nor anything that it can be converted into.
        CompileFailed, CompileCrashed, StageTimeout: it cannot be converted.
    """
    runtime = order["runtime"]
    info = RUNTIMES.get(runtime)
    wanted = info.loads if info and info.loads else model.format
    by = ""
    if can_convert(model.format, wanted):
        model, by = convert(model, wanted, order)
    if model.format != wanted:
        raise UsageError(
            f"the runtime {runtime} cannot load {model.path.name}: it takes .{wanted} files",
            hint="--runtime iree compiles it" if runtime == "onnxruntime" else "choose another --runtime",
        )
    return Artifact(
        runtime=runtime,
        main=next(name for name, path in model.files.items() if path == model.path),
        files=model.files,
        digests={name: digest_file(path) for name, path in model.files.items()},
        function=model.function,
        compiler=by or "none",
        inputs=model.inputs,
        outputs=model.outputs,
    )
