"""What happens in the isolated process: ONNX into MLIR, then iree-compile. Nothing here is called by the controller."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hil.controller.models.compiling import native_compiler
from hil.core.processes import signal_name
from hil.core.scratch import temporary_folder
from hil.errors import CompileCrashed, CompileFailed, StorageError, UsageError, did_you_mean

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
MAIN = "main.vmfb"
PARAMETERS = "params.irpa"


def build(
    model: str,
    format: str,
    dims: Mapping[str, int],
    declaration: str | None,
    flags: Sequence[str],
    parameters: str | None,
    folder: str,
    debug_ir: str | None,
    log: str,
) -> None:
    """Write main.vmfb, and params.irpa for large weights, into a folder.

    Args:
        model: the ONNX or MLIR file.
        format: ``onnx`` or ``mlir``.
        dims: sizes of symbolic dimensions (ONNX).
        declaration: the function's signature to store in the program (ONNX), or None.
        flags: for iree-compile.
        parameters: an archive of large weights that came with the model (MLIR), or None.
        folder: an empty one.
        debug_ir: where the imported module is written as text, or None.
        log: the file that standard error goes to.

    Raises:
        UsageError: the compiler knows no such flag.
        CompileFailed: the model cannot be imported or was refused, or the target names a CPU or a feature that there is
            not.
        CompileCrashed: iree-compile died.
    """
    from hil.controller.backends.compilers.torch_declarations import declare

    with temporary_folder("hil-compile-") as scratch:
        source = Path(model)
        if parameters:
            shutil.copyfile(parameters, Path(folder) / PARAMETERS)
        if format == "onnx":
            from hil.controller.backends.compilers.onnx_to_mlir import convert

            source = Path(scratch) / "model.mlirbc"
            text = Path(debug_ir) / "imported.mlir" if debug_ir else None
            convert(Path(model), dims, declaration, source, Path(folder) / PARAMETERS, text)
        else:
            source = declare(source, Path(scratch) / "declared.mlirbc")
        code, said = run_compiler(source, Path(folder) / MAIN, flags, Path(scratch), Path(log))
    check_target(said)
    if code:
        fail(code, said)


def run_compiler(source: Path, out: Path, flags: Sequence[str], folder: Path, log: Path) -> tuple[int, str]:
    """Run iree-compile in a folder; its exit code (negative: a signal) and what it printed to the log."""
    command = [str(native_compiler()), str(source), "-o", str(out), *flags]
    print("$", *command, flush=True)
    start = log.stat().st_size
    code = subprocess.run(command, stdin=subprocess.DEVNULL, cwd=folder, check=False).returncode
    with log.open("rb") as file:
        file.seek(start)
        return code, file.read().decode(errors="replace")


def check_target(said: str) -> None:
    """Refuse a target that iree-compile did not know: it warns, leaves that part out and compiles for another CPU.

    Args:
        said: what the compiler printed.

    Raises:
        CompileFailed: there was such a warning.
    """
    found = {match["what"] or match["host"]: match["name"] for match in _IGNORED.finditer(said)}
    if not found:
        return
    accepted = _ACCEPTED.search(said)
    meant = did_you_mean(next(iter(found.values())) or "", accepted["names"].split(", ")) if accepted else ""
    raise CompileFailed(
        f"iree-compile: {'; '.join(list(found)[:_SHOWN_ERRORS])}",
        hint=f"{meant}see the board's compile flags and --compile-flag",
        detail="\n".join(dict.fromkeys(line[:400] for line in said.splitlines()[:60])),
    )


def fail(code: int, said: str) -> None:
    """Raise the error that iree-compile ended with.

    Args:
        code: its exit code, not 0.
        said: what it printed.

    Raises:
        StorageError: the disk is full.
        UsageError: it knows no such flag.
        CompileFailed: it refused the model.
        CompileCrashed: it died.
    """
    tail = "\n".join(line[:400] for line in said.splitlines()[-40:])
    if "No space left on device" in said:
        raise StorageError("no space left on the disk while compiling", hint="`hil cache gc` makes room", detail=tail)
    if usage := _WRONG_FLAG.search(said):
        raise UsageError(
            f"iree-compile: {usage['what'].strip()}", hint="see the board's compile flags and --compile-flag"
        )
    errors = _errors(said)
    if code < 0 or (code > 1 and not errors):
        died = f"of {signal_name(-code)}" if code < 0 else f"with exit code {code}"
        raise CompileCrashed(
            f"iree-compile died {died}",
            detail=tail,
            hint="this is a bug of the compiler: its log has a stack trace, and --debug-ir DIR what it worked on",
        )
    raise CompileFailed(
        "iree-compile refused the model: " + ("; ".join(errors) or f"exit code {code}"),
        detail="\n".join(line[:400] for line in said.splitlines()[:60]),
    )


def _errors(said: str) -> list[str]:
    """The compiler's first few errors, each with the ONNX operator and the node that it is about."""
    lines = said.splitlines()
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
