"""The IREE compiler, run in a process of its own and cached by content, version and flags."""

from __future__ import annotations

import functools
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from hil.controller.backends.compilers.iree_build import MAIN, PARAMETERS, build
from hil.controller.backends.compilers.iree_takes import VIA, as_iree_takes
from hil.controller.backends.compilers.none import take_as_it_is
from hil.controller.models.compiling import compiling
from hil.controller.storage.cache import META, Cache, digests_in
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.packages import version
from hil.controller.storage.paths import is_file
from hil.core.digest import digest_file
from hil.core.results import Artifact, Model
from hil.errors import CompileFailed, UsageError

LOG = "compile.log"
# In the cache's note of a program: what it calls the model's function, where that is not the model's own name for it.
FUNCTION = "function"
# IREE narrows float64 to float32 unless told not to; a test of a model keeps the model's own dtypes.
_DEFAULT_FLAGS = {"--iree-input-demote-f64-to-f32": "false"}
# Raise this when the way to MLIR, or what is refused, changes: older programs in the cache are then not used.
_VERSION = 3


@dataclass(frozen=True)
class Recipe:
    """How a model is compiled.

    Attributes:
        key: the program's, in the cache.
        flags: of iree-compile, hil's defaults included.
        compiler: its name and version.
        meta: what the cache notes of the program.
    """

    key: str
    flags: tuple[str, ...]
    compiler: str
    meta: Mapping[str, Any]

    @property
    def shared_key(self) -> str:
        """The key for the program among others in one file: see :attr:`hil.controller.storage.cache.Cache.shared`."""
        return Cache.key("artifact", shared=self.key)


def compile_iree(
    model: Model,
    *,
    runtime: str,
    flags: Sequence[str],
    cache: Cache,
    isolated: Isolated,
    recompute: bool,
    debug_ir: Path | None,
    timeout: float | None,
    log: Path,
) -> Artifact:
    """Compile a model (ONNX, MLIR, or what converts to MLIR) to a .vmfb, with large weights beside it in an .irpa file.

    Arguments and errors are those of :func:`hil.controller.backends.compilers.compile_model`.
    """
    if model.format == "vmfb":
        return take_as_it_is(
            model,
            runtime=runtime,
            flags=flags,
            cache=cache,
            isolated=isolated,
            recompute=recompute,
            debug_ir=debug_ir,
            timeout=timeout,
            log=log,
        )
    if runtime != "iree":
        raise UsageError(f"the iree compiler makes programs for the runtime iree, not for {runtime}")
    taken = as_iree_takes(model, flags, cache=cache, isolated=isolated, recompute=recompute, timeout=timeout, log=log)
    model, by = taken.model, taken.by
    recipe = recipe_of(model, taken.flags)
    if debug_ir is not None:
        try:
            debug_ir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{debug_ir} cannot be made: {error.strerror}", hint="--debug-ir names a folder"
            ) from error

    def make(folder: Path) -> None:
        start = log.stat().st_size if log.exists() else 0
        with compiling():
            isolated.call(
                build,
                {
                    "model": str(model.path.absolute()),
                    "format": model.format,
                    "dims": dict(model.dims),
                    "declaration": declaration_of(model, model.function),
                    "flags": [*recipe.flags, *_dump_flags(debug_ir)],
                    "parameters": str(model.files[PARAMETERS].absolute()) if PARAMETERS in model.files else None,
                    "folder": str(folder.absolute()),
                    "debug_ir": str(debug_ir.absolute()) if debug_ir else None,
                    "log": str(log.absolute()),
                },
                timeout=timeout,
                log=log,
            )
        with log.open("rb") as file:
            file.seek(start)
            (folder / LOG).write_bytes(file.read())

    began = time.monotonic()
    key = recipe.key if debug_ir is not None else cache.shared.get(recipe.key, recipe.key)
    try:
        entry, cached = cache.get_or_make(key, recipe.meta, make, recompute or debug_ir is not None)
    except CompileFailed as error:
        error.hint = error.hint or taken.hint
        raise
    digests = {name: digest for name, digest in digests_in(entry).items() if name != LOG}
    return Artifact(
        runtime="iree",
        main=MAIN,
        files={name: entry / name for name in digests},
        digests=digests,
        function=_meta_of(entry).get(FUNCTION, model.function),
        compiler=" after ".join(filter(None, (recipe.compiler, by))),
        flags=(*taken.way, *recipe.flags),
        inputs=model.inputs,
        outputs=model.outputs,
        cached=cached,
        seconds=0.0 if cached else time.monotonic() - began,
        log=entry / LOG,
    )


def recipe_of(model: Model, flags: Sequence[str]) -> Recipe:
    """How a model is compiled with these flags.

    Raises:
        UsageError: the compiler is not installed.
    """
    compiler_version = compiler_version_or_fail()
    flags = [flag for flag in flags if not flag.startswith(VIA)]
    given = {flag.split("=", 1)[0] for flag in flags}
    all_flags = (*(f"{name}={value}" for name, value in _DEFAULT_FLAGS.items() if name not in given), *flags)
    parts: dict[str, Any] = {
        "model": model.digest,
        "format": model.format,
        "function": model.function,
        "dims": dict(model.dims),
        "compiler": compiler_version,
        "onnx": version("onnx") if model.format == "onnx" else "",
        "flags": list(all_flags),
        "files": [digest_file(path) for path in _files_in(all_flags)],
        "host": host_cpu() if any(flag.endswith("=host") for flag in all_flags) else "",
        "version": _VERSION,
    }
    compiler = f"iree {compiler_version}"
    meta = {"model": model.name, "compiler": compiler, "flags": list(all_flags)}
    return Recipe(Cache.key("artifact", **parts), all_flags, compiler, meta)


def compiler_version_or_fail() -> str:
    """The version of the installed IREE compiler.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return version("iree-base-compiler")
    except PackageNotFoundError as error:
        raise UsageError("the IREE compiler is not installed", hint="pip install iree-base-compiler") from error


@functools.cache
def host_cpu() -> str:
    """What tells this machine's CPU from another for the compiler: its model and its features."""
    parts = [platform.machine(), platform.processor(), platform.system()]
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
        lines = cpuinfo.read_text(errors="replace").splitlines()
        parts += sorted({line for line in lines if line.startswith(wanted)})
    return "\n".join(parts)


def _meta_of(entry: Path) -> dict[str, Any]:
    meta: dict[str, Any] = json.loads((entry / META).read_bytes())["meta"]
    return meta


def _files_in(flags: Sequence[str]) -> list[Path]:
    """Files that flags name: what is in them decides what the compiler makes."""
    values = [flag.split("=", 1)[1] for flag in flags if "=" in flag]
    # A value may be anything, such as a long list of CPU features.
    return [Path(value) for value in values if is_file(value)]


def _dump_flags(debug_ir: Path | None) -> list[str]:
    if debug_ir is None:
        return []
    folder = debug_ir.absolute()
    return [
        f"--dump-compilation-phases-to={folder / 'phases'}",
        f"--iree-hal-dump-executable-files-to={folder / 'executables'}",
    ]


def declaration_of(model: Model, function: str) -> str | None:
    """The signature that IREE's own ONNX path would lose: names, and which integers have no sign.

    Args:
        model: an ONNX model; of others there is none to be had.
        function: what the program calls the model's function.

    Raises:
        CompileFailed: MLIR has no type for a value of the model.
    """
    from hil.formats.iree_values import declaration

    if model.format != "onnx" or model.inputs is None or model.outputs is None:
        return None
    try:
        return declaration(function, model.inputs, model.outputs)
    except UsageError as error:  # strings, and dtypes that MLIR has no name for
        raise CompileFailed(f"IREE cannot take this model: {error.message}") from error
