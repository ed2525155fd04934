"""Compile models to programs that a runtime can load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hil.controller.models.compiling import CompileOrder, convert_compiler_errors
from hil.controller.models.conversions import can_convert, convert
from hil.controller.storage.sources.packages import load_registered, pick
from hil.core.digest import get_algorithm
from hil.core.field_types import check_fields
from hil.core.files import digest_file
from hil.core.guarded import find_package, format_value, guard
from hil.core.named import defer_import
from hil.core.results import Artifact, Model
from hil.core.runtimes import COMPILER_GROUP, NO_COMPILER, RUNTIMES, list_known_runtimes
from hil.errors import CompileCrashed, CompileFailed, NotRun, StageTimeout, UsageError

if TYPE_CHECKING:
    from typing_extensions import Unpack


# Compilers that can write their IR after each pass.
_WITH_PASSES = ("iree", "tfcompile")


class Compiler(Protocol):
    """Callable that compiles a model. :func:`compile_model` documents the arguments and errors."""

    def __call__(self, model: Model, **order: Unpack[CompileOrder]) -> Artifact:
        """Compile the model."""


def load_compilers() -> dict[str, Compiler]:
    """Return all compilers by name: built-in compilers and the entry points of the group ``hil.compilers``."""
    built_in: dict[str, Compiler] = {NO_COMPILER: take_as_it_is}
    built_in |= {info.compiler: defer_import(info.compile) for info in RUNTIMES.values() if info.compile}
    return load_registered(COMPILER_GROUP, built_in)


def compile_model(model: Model, *, compiler: str, **order: Unpack[CompileOrder]) -> Artifact:
    """Compile a model, or return the cached program.

    Args:
        compiler: ``iree``, ``none``, or the name of a compiler from an installed package.
        order: Keyword arguments for the compiler:

            ``runtime``: the runtime that will load the program.
            ``flags``: compiler flags, including the flags of the target.
            ``debug_ir``: a directory for intermediate representations, or None. If set, the cache is not read.
            ``debug_ir_passes``: whether to write the IR after each pass.
            ``failure``: a directory for files that reproduce a failure. None writes them only to the cache.
            Without this key, no files are written.

            The other keys are documented in :class:`hil.controller.models.compiling.Work`.

    Raises:
        UsageError: unknown compiler, or the compiler does not support this model or runtime.
        CompileFailed: the compiler rejected the model.
        CompileCrashed: the compiler crashed.
        StageTimeout: compilation timed out.
        StorageError: the program cannot be stored.
    """
    found = pick("compiler", load_compilers(), compiler)
    if order.get("debug_ir_passes") and compiler not in _WITH_PASSES:
        raise UsageError(
            f"the compiler {compiler} does not support --debug-ir-passes",
            hint=f"compilers that support it: {', '.join(_WITH_PASSES)}; --debug-ir alone stores the available IR",
        )
    with guard(
        *("compiler", COMPILER_GROUP, compiler, CompileFailed),
        *(CompileFailed, CompileCrashed, StageTimeout, NotRun, UsageError),
    ):
        with convert_compiler_errors():
            made = found(model, **order)
        if find_package(COMPILER_GROUP, compiler):
            check_artifact(made)
    return made


def check_artifact(made: object) -> None:
    """Raise TypeError or ValueError if a package's compiler returned an invalid artifact."""
    if not isinstance(made, Artifact):
        raise TypeError(f"expected a hil.plugins.Artifact, got {format_value(made)}")
    check_fields(made)
    if made.main not in made.files:
        raise ValueError(f"invalid artifact: main {made.main!r} is not in files")
    for name, path in made.files.items():
        if not path.is_file():
            raise ValueError(f"invalid artifact: file {name} not found: {path}")
        if name not in made.digests:
            raise ValueError(f"invalid artifact: missing digest of {name}")
        get_algorithm(made.digests[name])


def take_as_it_is(model: Model, **order: Unpack[CompileOrder]) -> Artifact:
    """Return the model's files as the program. If the runtime needs another format, convert them.

    Raises:
        UsageError: the runtime loads neither this format nor a format to which hil can convert the model.
        CompileFailed, CompileCrashed, StageTimeout: conversion failed.
    """
    runtime = order["runtime"]
    info = list_known_runtimes().get(runtime)
    wanted = info.loads if info and info.loads else model.format
    by = ""
    if can_convert(model.format, wanted):
        model, by = convert(model, wanted, order)
    if model.format != wanted:
        raise UsageError(
            f"the runtime {runtime} cannot load {model.path.name}: expected a .{wanted} file",
            hint="compile the model with --runtime iree" if runtime == "onnxruntime" else "use a different --runtime",
            option="--runtime",
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
