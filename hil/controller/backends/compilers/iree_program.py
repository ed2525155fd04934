"""Compile ONNX and MLIR with iree-compile in an isolated process. Programs are cached by content, version and flags."""

from __future__ import annotations

import functools
import json
import mmap
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hil.controller.models.compiling import (
    LOG,
    PARAMETERS,
    Work,
    call_isolated,
    compile_cached,
    convert_compiler_errors,
    describe_death,
    find_native_compiler,
    report_phase,
    run_logged,
)
from hil.controller.models.importers.mlir import declare, format_declaration, iter_functions, parse
from hil.controller.storage.cache import META, Cache, read_digests
from hil.controller.storage.paths import is_file
from hil.controller.storage.sources.own_code import ONNX_REWRITING, digest_code
from hil.controller.storage.sources.packages import require_version
from hil.core.files import copy_file, digest_file, open_file, read_file, read_text
from hil.core.installed import get_version
from hil.core.narrow_integers import NARROW_FLAG, is_narrowed, narrow_specs
from hil.core.results import Artifact, Model
from hil.core.scratch import make_temporary_folder
from hil.errors import CompileCrashed, CompileFailed, LoadFailed, StorageError, UsageError, did_you_mean
from hil.formats.iree_values import parse_type

_ERROR = re.compile(r"(?:^|\s)error: (?P<what>.*)")
# Target of an executable, with all attributes. The group is its name.
_EXECUTABLE_TARGET = re.compile(r'#hal\.executable\.target<("[\w-]+").*', re.DOTALL)
_PLACE = re.compile(r"loc\(\"(?P<name>[^\"]*)\"\): ")
_ONNX_OP = re.compile(r"\"?onnx\.(?P<name>\w+)\"?")
# Name of an operator without a torch-mlir operation: `"torch.operator"(%0) <{name = "torch.aten.median.dim"}>`.
_TORCH_OP = re.compile(r"<\{name = \"(?P<name>torch\.[\w.]+)\"\}>")
_WRONG_FLAG = re.compile(r"^iree-compile: (?P<what>Unknown command line argument '[^']*'|for the -.*)", re.M)
# Warnings of iree-compile that it compiles for a CPU that was not requested.
_IGNORED = re.compile(
    r"^(?P<what>'(?P<name>[^']*)' is not a recognized (?:processor|feature) for this target) \(ignoring \w+\)"
    r"|^(?P<host>If either CPU or CPU-features is `host`.*)",
    re.M,
)
_ACCEPTED = re.compile(r"^List of accepted CPUs: (?P<names>.*)", re.M)
_SHOWN_ERRORS = 3
# Flags that omit long constants, so that the IR of each pass is readable.
ELIDED = ("--mlir-elide-elementsattrs-if-larger=64", "--mlir-elide-resource-strings-if-larger=64")
# Output of LLVM after a crash: the reason, and the active pass.
_FATAL = re.compile(r"^LLVM ERROR: (?P<what>.*)|(?P<claim>Assertion `.*' failed)", re.M)
_LLVM_PASS = re.compile(r"^\d+\.\s+(?P<what>Running pass .*)", re.M)
MAIN = "main.vmfb"
PACKAGE = "iree-base-compiler"
# hil's own flag for the intermediate format of models from other frameworks.
VIA = "--via="
# Key in a program's cache metadata: name of the function in the program, if it differs from the name in the model.
FUNCTION = "function"
# By default, IREE narrows float64 to float32, but a test must keep the model's dtypes. Do not set this flag for models
# without float64: IREE lowers some float32 operators through float64 and then cannot compile them.
KEEP_FLOAT64 = "--iree-input-demote-f64-to-f32=false"
# Increase this when the set of rejected models, or the conversion to MLIR, changes outside the files in _TO_MLIR.
# Cached programs become stale.
_VERSION = 5
_TO_MLIR = (*ONNX_REWRITING, "controller/backends/compilers/onnx_to_mlir.py")


@dataclass(frozen=True)
class CompileSettings:
    """Settings for compiling a model."""

    key: str  # the program's cache key
    flags: tuple[str, ...]  # flags of iree-compile, including hil's defaults
    compiler: str
    meta: Mapping[str, Any]

    @property
    def shared_key(self) -> str:
        """Cache key of a program in a shared file: see :attr:`hil.controller.storage.cache.Cache.shared`."""
        return Cache.key("artifact", shared=self.key)


@dataclass(frozen=True)
class Source:
    """Inputs of a compilation, as JSON values for an isolated process."""

    model: str  # the model file
    format: str
    dims: Mapping[str, int]
    declaration: str | None  # the function's signature to store in the program (ONNX), or None
    parameters: str | None  # an archive of the model's large weights (MLIR), or None
    flags: Sequence[str]  # flags of iree-compile


def describe_source(model: Model, flags: Sequence[str]) -> Source:
    """Return the inputs of a compilation: the model, and the flags of :class:`CompileSettings`."""
    return Source(
        str(model.path.absolute()),
        model.format,
        dict(model.dims),
        own_declaration(model, model.function, flags),
        str(model.files[PARAMETERS].absolute()) if PARAMETERS in model.files else None,
        list(flags),
    )


def compile_program(
    model: Model, flags: Sequence[str], debug_ir: Path | None, work: Work, *, debug_ir_passes: bool = False
) -> Artifact:
    """Compile ONNX or MLIR to a .vmfb file, with large weights in an .irpa file.

    Args:
        debug_ir: A directory for intermediate representations. If set, the cache is not read.
        debug_ir_passes: Whether to write the IR after each pass.

    Raises:
        UsageError: the compiler is not installed, a flag is unknown, or the directory cannot be created.
        CompileFailed, CompileCrashed, StageTimeout, StorageError: as for every compiler.
    """
    cache = work["cache"]
    recipe = choose_settings(model, flags, work["isolated"].folders)

    def make(folder: Path) -> None:
        arguments = {
            "source": vars(describe_source(model, recipe.flags)),
            "folder": str(folder.absolute()),
            "debug_ir": str(debug_ir.absolute()) if debug_ir else None,
            "debug_ir_passes": debug_ir_passes,
            "log": str(work["log"].absolute()),
        }
        call_isolated(build, arguments, work)

    key = recipe.key if debug_ir is not None else cache.shared.get(recipe.key, recipe.key)
    entry, how = compile_cached(key, recipe.meta, work, debug_ir, make, convert_compiler_errors())
    digests = {name: digest for name, digest in read_digests(entry).items() if name != LOG}
    meta = json.loads(read_file(entry / META))["meta"]
    return Artifact(
        runtime="iree",
        main=MAIN,
        files={name: entry / name for name in digests},
        digests=digests,
        function=meta.get(FUNCTION, model.function),
        compiler=recipe.compiler,
        flags=recipe.flags,
        inputs=model.inputs,
        outputs=model.outputs,
        **how,
    )


def choose_settings(model: Model, flags: Sequence[str], folders: Sequence[str] = ()) -> CompileSettings:
    """Return the settings for compiling a model with flags.

    Args:
        folders: directories from which the compiler's processes import first.

    Raises:
        UsageError: the compiler is not installed.
    """
    compiler_version = require_version(PACKAGE, folders=folders)
    flags = [flag for flag in flags if not flag.startswith(VIA)]
    is_given = KEEP_FLOAT64.split("=", 1)[0] in {flag.split("=", 1)[0] for flag in flags}
    all_flags = (*([KEEP_FLOAT64] if model.has_float64 and not is_given else []), *flags)
    # A flag's value may be a file; then the key includes the content. The value may also be any text, such as a long
    # list of CPU features.
    values = [flag.split("=", 1)[1] for flag in all_flags if "=" in flag]
    parts: dict[str, Any] = {
        "model": model.digest,
        "format": model.format,
        "function": model.function,
        "dims": dict(model.dims),
        "compiler": compiler_version,
        "onnx": get_version("onnx") if model.format == "onnx" else "",
        "flags": list(all_flags),
        "files": [digest_file(Path(value)) for value in values if is_file(value)],
        "host": identify_host_cpu() if any(flag.endswith("=host") for flag in all_flags) else "",
        "version": _VERSION,
        "code": digest_code(*_TO_MLIR) if model.format == "onnx" else "",
    }
    if is_narrowed(all_flags):
        parts["narrow"] = digest_code("controller/backends/compilers/iree_integers.py")
    compiler = f"iree {compiler_version}"
    meta = {"model": model.name, "compiler": compiler, "flags": list(all_flags)}
    return CompileSettings(Cache.key("artifact", **parts), all_flags, compiler, meta)


@functools.cache
def identify_host_cpu() -> str:
    """Return a text that identifies this machine's CPU for the compiler: model and features."""
    parts = [platform.machine(), platform.system()]
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        parts.append(platform.processor())  # slow: starts a process, which takes ten times as long as reading the file
    else:
        wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
        lines = read_text(cpuinfo, errors="replace").splitlines()
        parts += sorted({line for line in lines if line.startswith(wanted)})
    return "\n".join(parts)


def own_declaration(model: Model, function: str, flags: Sequence[str]) -> str | None:
    """Return a declaration of an ONNX model's signature, or None for other models.

    This is necessary because IREE's ONNX importer drops the signature.

    Args:
        function: The function's name in the program.
        flags: Flags of iree-compile.
    """
    if model.format != "onnx" or model.inputs is None or model.outputs is None:
        return None
    narrow = narrow_specs if is_narrowed(flags) else tuple
    return format_declaration(function, narrow(model.inputs), narrow(model.outputs))


def build(source: Mapping[str, Any], folder: str, debug_ir: str | None, debug_ir_passes: bool, log: str) -> None:
    """Write main.vmfb, and params.irpa for large weights, to a directory. Runs in an isolated process.

    Args:
        source: The fields of a :class:`Source`.
        debug_ir: A directory for the imported module and the intermediate representations as text; or None.
    """
    own = Source(**source)
    flags = list(own.flags)
    with make_temporary_folder("hil-compile-") as scratch:
        module = prepare(own, Path(scratch), Path(folder), Path(debug_ir) / "imported.mlir" if debug_ir else None)
        if debug_ir:
            flags += [f"--dump-compilation-phases-to={debug_ir}/phases"]
            flags += [f"--iree-hal-dump-executable-files-to={debug_ir}/executables"]
        if debug_ir and debug_ir_passes:
            flags += ["--mlir-print-ir-after-all", f"--mlir-print-ir-tree-dir={debug_ir}/passes", *ELIDED]
        report_phase("iree-compile")
        code, printed = run_compiler(module, Path(folder) / MAIN, flags, Path(scratch), Path(log))
    check_target(printed)
    if code:
        fail(code, printed)


def prepare(source: Source, scratch: Path, folder: Path, text: Path | None) -> Path:
    """Return the module file for iree-compile: an imported ONNX model, or MLIR with declarations.

    Returns the given MLIR file if the file needs no change.

    Args:
        scratch: Directory for the module.
        folder: Directory for params.irpa, the large weights.
        text: File for the module as text, or None.

    Raises:
        CompileFailed: the ONNX model uses features that IREE's importer does not support.
    """
    if source.parameters:
        copy_file(source.parameters, folder / PARAMETERS)
    if source.format != "onnx":
        if text is not None:
            text.write_text(parse(source.model).operation.get_asm(enable_debug_info=True))
        return _declare_module(Path(source.model), scratch, narrow=is_narrowed(source.flags))
    from hil.controller.backends.compilers.onnx_to_mlir import convert

    report_phase("import")
    module = scratch / "model.mlirbc"
    narrow = is_narrowed(source.flags)
    convert(Path(source.model), source.dims, source.declaration, module, folder / PARAMETERS, text, narrow=narrow)
    return module


def run_compiler(source: Path, out: Path, flags: Sequence[str], folder: Path, log: Path) -> tuple[int, str]:
    """Run iree-compile in a directory. Return its exit code (negative: a signal) and the output written to the log."""
    return run_logged([str(find_native_compiler()), str(source), "-o", str(out), *flags], log, folder)


def check_target(printed: str) -> None:
    """Raise CompileFailed if iree-compile ignored a part of the target and therefore compiled for another CPU."""
    found = {match["what"] or match["host"]: match["name"] for match in _IGNORED.finditer(printed)}
    if not found:
        return
    accepted = _ACCEPTED.search(printed)
    meant = did_you_mean(next(iter(found.values())) or "", accepted["names"].split(", ")) if accepted else ""
    raise CompileFailed(
        f"iree-compile: {'; '.join(list(found)[:_SHOWN_ERRORS])}",
        hint=f"{meant}see the board's compile flags and --compile-flag",
        detail="\n".join(dict.fromkeys(line[:400] for line in printed.splitlines()[:60])),
    )


def fail(code: int, printed: str) -> None:
    """Raise the error for a non-zero exit code of iree-compile.

    Raises:
        StorageError: the disk is full.
        UsageError: unknown flag.
        CompileFailed: the compiler rejected the model.
        CompileCrashed: the compiler crashed.
    """
    lines = [line[:400] for line in printed.splitlines()]
    tail = "\n".join(lines[-40:])
    if "No space left on device" in printed:
        raise StorageError(
            "no space left on disk while compiling", hint="free disk space with `hil cache gc`", detail=tail
        )
    if usage := _WRONG_FLAG.search(printed):
        raise UsageError(
            f"iree-compile: {usage['what'].strip()}", hint="see the board's compile flags and --compile-flag"
        )
    errors = find_errors(printed)
    if code < 0 or (code > 1 and not errors):
        inside = [f"LLVM: {match['what']}" for match in _LLVM_PASS.finditer(printed)]
        why = _FATAL.search(printed)
        raise CompileCrashed(
            f"iree-compile died {describe_death(code)}" + (f": {(why['what'] or why['claim'])[:300]}" if why else ""),
            detail="\n".join([*inside[:_SHOWN_ERRORS], tail]),
            hint="compiler bug: the log contains a stack trace, and --debug-ir DIR stores the intermediate code",
        )
    raise CompileFailed(
        "iree-compile rejected the model: " + ("; ".join(errors) or f"exit code {code}"),
        hint=explain_vulkan_failure(printed),
        detail="\n".join(lines[:60]),
    )


def explain_vulkan_failure(printed: str) -> str:
    """Return a hint if the model needs a type that a Vulkan target does not have; otherwise ""."""
    if '"vulkan-spirv"' not in printed:
        return ""
    if any("i64" in line for line in printed.splitlines() if "error: " in line):
        return (
            "IREE cannot compile these 64-bit integers for Vulkan; if all values fit into 32 bits, use "
            f"--compile-flag={NARROW_FLAG}"
        )
    return "a Vulkan program has only the types that the device reports, with float32 and int32 (docs/gpu.md)"


def find_errors(printed: str) -> list[str]:
    """Return the first few compiler errors, with the ONNX operator and node of each."""
    lines = printed.splitlines()
    found: list[str] = []
    for number, line in enumerate(lines):
        match = _ERROR.search(line)
        if not match:
            continue
        # Example: `loc("fc1"): failed to legalize operation 'torch.operator' ...: %0 = "torch.operator"(...)`
        text = _PLACE.sub("", match["what"].strip()).split(": %", 1)[0]
        text = _EXECUTABLE_TARGET.sub(r"\1", text)[:300]
        near = "\n".join(lines[number : number + 4])
        if (operator := _ONNX_OP.search(near)) and operator["name"] not in text:
            text += f" (onnx.{operator['name']})"
        if operator := _TORCH_OP.search(near):
            text += f" ({operator['name']})"
        if (place := _PLACE.search(line)) and place["name"]:
            text += f" at {place['name']!r}"
        if text not in found:
            found.append(text)
    return found[:_SHOWN_ERRORS]


def _declare_module(source: Path, scratch: Path, *, narrow: bool) -> Path:
    """Return an MLIR file with declarations, and with int32 inputs and outputs if ``narrow``.

    Returns ``source`` if the file needs no change.
    """
    if narrow:
        from hil.controller.backends.compilers.iree_integers import narrow_functions

        module = parse(str(source))
        narrow_functions(module)
        source = scratch / "narrow.mlirbc"
        with source.open("wb") as file:
            module.operation.write_bytecode(file)
    return _add_declarations(source, scratch / "declared.mlirbc")


def _add_declarations(source: Path, out: Path) -> Path:
    """Add missing declarations to a module and write it as bytecode.

    Returns the file with the declarations: ``out``, or ``source`` if no declaration is missing.
    """
    # Do not parse modules without torch types.
    with open_file(source) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data.find(b"torch") < 0:
            return source
    module, found = parse(str(source)), source
    for name, (inputs, outputs), operation in iter_functions(module):
        if "iree.reflection" in operation.attributes or "!torch." not in str(operation.attributes["function_type"]):
            continue
        if all(_is_known(kind) for _, kind in (*inputs, *outputs)):
            takes, gives = (", ".join(f"%{value}: {kind}" for value, kind in side) for side in (inputs, outputs))
            declare(operation, f"sync func @{name}({takes}) -> ({gives})")
            found = out
    if found == out:
        with out.open("wb") as written:
            module.operation.write_bytecode(written)
    return found


def _is_known(kind: str) -> bool:
    try:
        parse_type("", kind)
    except LoadFailed:
        return False
    return True
