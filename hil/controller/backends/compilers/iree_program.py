"""Programs by iree-compile, of ONNX and MLIR: run in a process of its own, and cached by content, version and flags."""

from __future__ import annotations

import functools
import json
import mmap
import platform
import re
import shutil
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
    compiling,
    death_text,
    entering,
    native_compiler,
    run_logged,
)
from hil.controller.models.importers.mlir import declaration_of, declare, functions_in, parse
from hil.controller.storage.cache import META, Cache, digests_in
from hil.controller.storage.own_code import ONNX_REWRITING, code_digest
from hil.controller.storage.packages import needed_version
from hil.controller.storage.paths import is_file
from hil.core.digest import digest_file
from hil.core.installed import version
from hil.core.results import Artifact, Model
from hil.core.scratch import temporary_folder
from hil.errors import CompileCrashed, CompileFailed, LoadFailed, StorageError, UsageError, did_you_mean
from hil.formats.iree_values import parse_type

_ERROR = re.compile(r"(?:^|\s)error: (?P<what>.*)")
_PLACE = re.compile(r"loc\(\"(?P<name>[^\"]*)\"\): ")
_ONNX_OP = re.compile(r"\"?onnx\.(?P<name>\w+)\"?")
# `"torch.operator"(%0) <{name = "torch.aten.median.dim"}>`: what torch-mlir has no operation for.
_TORCH_OP = re.compile(r"<\{name = \"(?P<name>torch\.[\w.]+)\"\}>")
_WRONG_FLAG = re.compile(r"^iree-compile: (?P<what>Unknown command line argument '[^']*'|for the -.*)", re.M)
# What iree-compile only warns of before it compiles for some other CPU.
_IGNORED = re.compile(
    r"^(?P<what>'(?P<name>[^']*)' is not a recognized (?:processor|feature) for this target) \(ignoring \w+\)"
    r"|^(?P<host>If either CPU or CPU-features is `host`.*)",
    re.M,
)
_ACCEPTED = re.compile(r"^List of accepted CPUs: (?P<names>.*)", re.M)
_SHOWN_ERRORS = 3
# So that the text of every pass stays readable: constants longer than that are left out.
ELIDED = ("--mlir-elide-elementsattrs-if-larger=64", "--mlir-elide-resource-strings-if-larger=64")
# What LLVM says when it dies: why, and what it was doing.
_FATAL = re.compile(r"^LLVM ERROR: (?P<what>.*)|(?P<claim>Assertion `.*' failed)", re.M)
_LLVM_PASS = re.compile(r"^\d+\.\s+(?P<what>Running pass .*)", re.M)
MAIN = "main.vmfb"
PACKAGE = "iree-base-compiler"
# The format that a model of another framework is converted to first; no flag of iree-compile.
VIA = "--via="
# In the cache's note of a program: what it calls the model's function, where that is not the model's own name for it.
FUNCTION = "function"
# IREE narrows float64 to float32 by default; a test of a model keeps the model's dtypes. Models without float64 do not
# get the flag: IREE lowers some of their float32 operators through float64, and then cannot compile that.
KEEP_FLOAT64 = "--iree-input-demote-f64-to-f32=false"
# Raise this when what is refused, or the way to MLIR outside of these files, changes: older programs in the cache are
# then not used.
_VERSION = 5
_TO_MLIR = (*ONNX_REWRITING, "controller/backends/compilers/onnx_to_mlir.py")


@dataclass(frozen=True)
class Recipe:
    """How a model is compiled."""

    key: str  # the program's, in the cache
    flags: tuple[str, ...]  # of iree-compile, hil's defaults included
    compiler: str
    meta: Mapping[str, Any]

    @property
    def shared_key(self) -> str:
        """The key for the program among others in one file: see :attr:`hil.controller.storage.cache.Cache.shared`."""
        return Cache.key("artifact", shared=self.key)


@dataclass(frozen=True)
class Source:
    """What a program is to be made of, in words that an isolated process can be told."""

    model: str  # the file
    format: str
    dims: Mapping[str, int]
    declaration: str | None  # the function's signature to store in the program (ONNX), or None
    parameters: str | None  # an archive of large weights that came with the model (MLIR), or None
    flags: Sequence[str]  # of iree-compile


def source_of(model: Model, flags: Sequence[str]) -> Source:
    """What the program of a model is made of, with the flags of its :class:`Recipe`."""
    return Source(
        str(model.path.absolute()),
        model.format,
        dict(model.dims),
        own_declaration(model, model.function),
        str(model.files[PARAMETERS].absolute()) if PARAMETERS in model.files else None,
        list(flags),
    )


def compile_program(
    model: Model, flags: Sequence[str], debug_ir: Path | None, work: Work, *, debug_ir_passes: bool = False
) -> Artifact:
    """Compile ONNX or MLIR to a .vmfb, with large weights beside it in an .irpa file.

    Args:
        debug_ir: a folder for what the compiler works on; the cache is not asked then.
        debug_ir_passes: whether the IR after every pass goes there as well.

    Raises:
        UsageError: the compiler is not installed, knows no such flag, or the folder cannot be made.
        CompileFailed, CompileCrashed, StageTimeout, StorageError: as for every compiler.
    """
    cache = work["cache"]
    recipe = recipe_of(model, flags)

    def make(folder: Path) -> None:
        arguments = {
            "source": vars(source_of(model, recipe.flags)),
            "folder": str(folder.absolute()),
            "debug_ir": str(debug_ir.absolute()) if debug_ir else None,
            "debug_ir_passes": debug_ir_passes,
            "log": str(work["log"].absolute()),
        }
        call_isolated(build, arguments, work)

    key = recipe.key if debug_ir is not None else cache.shared.get(recipe.key, recipe.key)
    entry, how = compile_cached(key, recipe.meta, work, debug_ir, make, compiling())
    digests = {name: digest for name, digest in digests_in(entry).items() if name != LOG}
    meta = json.loads((entry / META).read_bytes())["meta"]
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


def recipe_of(model: Model, flags: Sequence[str]) -> Recipe:
    """How a model is compiled with these flags. Raises UsageError: the compiler is not installed."""
    compiler_version = needed_version(PACKAGE)
    flags = [flag for flag in flags if not flag.startswith(VIA)]
    is_given = KEEP_FLOAT64.split("=", 1)[0] in {flag.split("=", 1)[0] for flag in flags}
    all_flags = (*([KEEP_FLOAT64] if model.has_float64 and not is_given else []), *flags)
    # A value may be anything, such as a long list of CPU features; what is in a file decides what the compiler makes.
    values = [flag.split("=", 1)[1] for flag in all_flags if "=" in flag]
    parts: dict[str, Any] = {
        "model": model.digest,
        "format": model.format,
        "function": model.function,
        "dims": dict(model.dims),
        "compiler": compiler_version,
        "onnx": version("onnx") if model.format == "onnx" else "",
        "flags": list(all_flags),
        "files": [digest_file(Path(value)) for value in values if is_file(value)],
        "host": host_cpu() if any(flag.endswith("=host") for flag in all_flags) else "",
        "version": _VERSION,
        "code": code_digest(*_TO_MLIR) if model.format == "onnx" else "",
    }
    compiler = f"iree {compiler_version}"
    meta = {"model": model.name, "compiler": compiler, "flags": list(all_flags)}
    return Recipe(Cache.key("artifact", **parts), all_flags, compiler, meta)


@functools.cache
def host_cpu() -> str:
    """What tells this machine's CPU from another for the compiler: its model and its features."""
    parts = [platform.machine(), platform.system()]
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        parts.append(platform.processor())  # asks a process, which takes as long as reading the file ten times
    else:
        wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
        lines = cpuinfo.read_text(errors="replace").splitlines()
        parts += sorted({line for line in lines if line.startswith(wanted)})
    return "\n".join(parts)


def own_declaration(model: Model, function: str) -> str | None:
    """An ONNX model's signature, which IREE would lose, for a program that calls its function so; None for others."""
    if model.format != "onnx" or model.inputs is None or model.outputs is None:
        return None
    return declaration_of(function, model.inputs, model.outputs)


def build(source: Mapping[str, Any], folder: str, debug_ir: str | None, debug_ir_passes: bool, log: str) -> None:
    """Write main.vmfb, and params.irpa for large weights, into a folder; called in an isolated process.

    Args:
        source: the fields of a :class:`Source`.
        debug_ir: where the imported module, and what the compiler works on, are written as text; or None.
    """
    own = Source(**source)
    flags = list(own.flags)
    with temporary_folder("hil-compile-") as scratch:
        module = prepare(own, Path(scratch), Path(folder), Path(debug_ir) / "imported.mlir" if debug_ir else None)
        if debug_ir:
            flags += [f"--dump-compilation-phases-to={debug_ir}/phases"]
            flags += [f"--iree-hal-dump-executable-files-to={debug_ir}/executables"]
        if debug_ir and debug_ir_passes:
            flags += ["--mlir-print-ir-after-all", f"--mlir-print-ir-tree-dir={debug_ir}/passes", *ELIDED]
        entering("iree-compile")
        code, printed = run_compiler(module, Path(folder) / MAIN, flags, Path(scratch), Path(log))
    check_target(printed)
    if code:
        fail(code, printed)


def prepare(source: Source, scratch: Path, folder: Path, text: Path | None) -> Path:
    """The module that iree-compile reads: ONNX imported, MLIR with declarations; the given file where nothing is to do.

    Args:
        scratch: where it is written.
        folder: where params.irpa is written, for large weights.
        text: where it is written as text as well; or None.

    Raises:
        CompileFailed: an ONNX model uses what IREE's importer does not know.
    """
    if source.parameters:
        shutil.copyfile(source.parameters, folder / PARAMETERS)
    if source.format != "onnx":
        if text is not None:
            text.write_text(parse(source.model).operation.get_asm(enable_debug_info=True))
        return _declared(Path(source.model), scratch / "declared.mlirbc")
    from hil.controller.backends.compilers.onnx_to_mlir import convert

    entering("import")
    module = scratch / "model.mlirbc"
    convert(Path(source.model), source.dims, source.declaration, module, folder / PARAMETERS, text)
    return module


def run_compiler(source: Path, out: Path, flags: Sequence[str], folder: Path, log: Path) -> tuple[int, str]:
    """Run iree-compile in a folder; its exit code (negative: a signal) and what it printed to the log."""
    return run_logged([str(native_compiler()), str(source), "-o", str(out), *flags], log, folder)


def check_target(printed: str) -> None:
    """Raise CompileFailed where iree-compile warned of a target: it leaves that part out, compiling for another CPU."""
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
    """Raise the error that iree-compile ended with, by its exit code, which is not 0.

    Raises:
        StorageError: the disk is full.
        UsageError: it knows no such flag.
        CompileFailed, CompileCrashed: it refused the model, or died.
    """
    lines = [line[:400] for line in printed.splitlines()]
    tail = "\n".join(lines[-40:])
    if "No space left on device" in printed:
        raise StorageError("no space left on the disk while compiling", hint="`hil cache gc` makes room", detail=tail)
    if usage := _WRONG_FLAG.search(printed):
        raise UsageError(
            f"iree-compile: {usage['what'].strip()}", hint="see the board's compile flags and --compile-flag"
        )
    errors = errors_in(printed)
    if code < 0 or (code > 1 and not errors):
        inside = [f"LLVM: {match['what']}" for match in _LLVM_PASS.finditer(printed)]
        why = _FATAL.search(printed)
        raise CompileCrashed(
            f"iree-compile died {death_text(code)}" + (f": {(why['what'] or why['claim'])[:300]}" if why else ""),
            detail="\n".join([*inside[:_SHOWN_ERRORS], tail]),
            hint="this is a bug of the compiler: its log has a stack trace, and --debug-ir DIR what it worked on",
        )
    raise CompileFailed(
        "iree-compile refused the model: " + ("; ".join(errors) or f"exit code {code}"), detail="\n".join(lines[:60])
    )


def errors_in(printed: str) -> list[str]:
    """The compiler's first few errors, each with the ONNX operator and the node that it is about."""
    lines = printed.splitlines()
    found: list[str] = []
    for number, line in enumerate(lines):
        match = _ERROR.search(line)
        if not match:
            continue
        # `loc("fc1"): failed to legalize operation 'torch.operator' ...: %0 = "torch.operator"(...)`
        text = _PLACE.sub("", match["what"].strip()).split(": %", 1)[0][:300]
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


def _declared(source: Path, out: Path) -> Path:
    """Write a module with declarations as bytecode; the file that has them, which is ``source`` where it needs none."""
    # Whoever has no such types need not be read and written for it.
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data.find(b"torch") < 0:
            return source
    module, found = parse(str(source)), source
    for name, (inputs, outputs), operation in functions_in(module):
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
