"""Diagnose a failed iree-compile: find the phase and pass, and store the IR and a script that reproduces the failure.

A crashed compiler cannot be inspected. So hil compiles the model again with MLIR's crash reproducer, within time and
size limits. The first compilation runs without the reproducer, because hil measures its time. The script needs only
IREE's tools.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hil.controller.backends.compilers.iree_program import ELIDED, PACKAGE, Source, check_target, find_errors, prepare
from hil.controller.models.compiling import (
    IREE_PHASES,
    PARAMETERS,
    PHASE,
    Work,
    call_isolated,
    describe_death,
    find_native_compiler,
)
from hil.controller.storage.cache import META, Cache
from hil.controller.storage.paths import is_file
from hil.controller.storage.runs import convert_write_errors
from hil.core.files import copy_file, read_file
from hil.core.installed import get_version
from hil.errors import CompileCrashed, CompileFailed, HilError, StageError, StageTimeout

SCRIPT, PASS, IR = "reproduce.sh", "reproducer.mlir", "phases"
_FOUND = "found.json"
_LOG = "diagnosis.log"
# Time limits in seconds. The second compilation may take this long plus three times the first's duration. If the first
# compilation timed out, the second may take only this long, because both hang in the same pass.
_TIME_SECONDS = 60.0
_OPT_SECONDS = 20.0
_KILL_SECONDS = 10.0
# Size limits of an IR file, and of a module that is dumped with all constants.
_IR_BYTES = 256 << 20
_WHOLE_BYTES = 4 << 20
# Larger modules are not copied; the script refers to the original file.
_COPIED_BYTES = 256 << 20
# Example of passes: [`Outer` on 'builtin.module' operation, `Inner` on 'func.func' operation: @main]
_FAILED_IN = re.compile(r"Pipeline failed while executing (?P<passes>.*): reproducer generated at")
_PASS_ON = re.compile(r"`(?P<name>[^`]+)` on '(?P<kind>[^']+)' operation(?:: (?P<symbol>@\"[^\"]*\"|@[^\s,\]]+))?")
_DUMPED = re.compile(r"\.(?P<number>\d+)\.(?P<phase>[\w-]+)\.mlir$")
_UNKNOWN_FLAG = re.compile(r"Unknown command line argument '(?P<flag>[^'=]+)")
# Increase this when the stored files change. Cached entries become stale.
_VERSION = 1


@dataclass(frozen=True)
class Found:
    """Diagnosis of a failure."""

    phase: str  # one of :data:`IREE_PHASES`, ``import`` or ``read``; "" if the second compilation succeeded
    in_pass: str = ""  # the pass and its operation; "" outside of passes
    notes: Sequence[str] = ()  # further remarks, one per line


def keep_failure(error: StageError, source: Source, key: str, seconds: float, folder: Path | None, work: Work) -> None:
    """Store files that reproduce a failure, and add the phase and pass to the error.

    Args:
        key: The program's cache key, from which the key of the cached diagnosis is derived.
        seconds: Duration of the failed compilation.
        folder: Destination directory. None stores the files only in the cache.
    """
    hangs = isinstance(error, StageTimeout)
    limit = _TIME_SECONDS if hangs else _TIME_SECONDS + 3 * seconds
    limit = min(limit, work["timeout"] or limit)

    def make(place: Path) -> None:
        arguments = {"source": vars(source), "folder": str(place), "title": _line(error.message), "limit": limit}
        arguments |= {"hangs": hangs, "died": isinstance(error, CompileCrashed)}
        whole = limit + _KILL_SECONDS + 2 * _OPT_SECONDS + _TIME_SECONDS
        call_isolated(diagnose, arguments, {"isolated": work["isolated"], "timeout": whole, "log": place / _LOG})

    try:
        entry, _ = work["cache"].get_or_make(
            Cache.key("failure", program=key, outcome=error.outcome, version=_VERSION),
            {"model": Path(source.model).stem, "what": error.message[:200]},
            make,
            work["recompute"],
        )
        found = Found(**json.loads(read_file(entry / _FOUND)))
        if folder is not None:
            with convert_write_errors(folder):
                # Remove files of an earlier failure.
                shutil.rmtree(folder / IR, ignore_errors=True)
                (folder / PASS).unlink(missing_ok=True)
                shutil.copytree(entry, folder, ignore=shutil.ignore_patterns(META, _FOUND), dirs_exist_ok=True)
    except HilError as failed:
        error.detail = f"unknown compiler phase: {failed.message}\n{error.detail}"
        return
    if found.in_pass and not isinstance(error, CompileFailed):
        error.args = (f"{error.message}, in {found.in_pass} of the phase {found.phase}", *error.args[1:])
    told = {PHASE: found.phase, "pass: ": found.in_pass}
    lines = [f"{name}{text}" for name, text in told.items() if text]
    first, _, rest = error.detail.partition("\n")
    error.detail = "\n".join([*lines, *found.notes, rest if first.startswith(PHASE) else error.detail])
    script = f"reproduce it: sh {shlex.quote(str((folder or entry) / SCRIPT))}"
    error.hint = "; ".join(filter(None, (script, error.hint)))


def diagnose(source: Mapping[str, Any], folder: str, title: str, limit: float, hangs: bool, died: bool) -> None:
    """Compile the model a second time and write the diagnosis to a directory. Runs in an isolated process.

    Args:
        source: The fields of a :class:`Source`.
        title: The error message of the first compilation.
        limit: Seconds for compiling. After that, SIGABRT makes the compiler report the active pass.
        hangs: Whether the first compilation timed out.
        died: Whether the first compilation crashed. If ``hangs`` is also false, the compiler rejected the model.
    """
    own, place = Source(**source), Path(folder)
    failure = _Failure(place, title, tuple(_copy_flag_files(own.flags, place)), limit, hangs, died)
    try:
        module = prepare(own, place, place, None)
    except CompileFailed as error:
        found = failure.diagnose_import(own, error)
    else:
        found = failure.diagnose_module(module)
    for name in (PARAMETERS, _LOG):
        (place / name).unlink(missing_ok=True)
    (place / _FOUND).write_text(json.dumps(asdict(found)))


@dataclass(frozen=True)
class _Failure:
    folder: Path
    title: str
    flags: Sequence[str]
    limit: float
    hangs: bool
    died: bool

    def diagnose_import(self, source: Source, error: CompileFailed) -> Found:
        """Diagnose a model that the ONNX importer rejected."""
        from hil.controller.backends.compilers.onnx_to_mlir import save_prepared

        save_prepared(Path(source.model), source.dims, self.folder / "model.onnx")
        found = Found("import", notes=[f"iree-import-onnx: {error.message}"])
        self._write_script(found, "iree-import-onnx model.onnx -o model.mlir")
        return found

    def diagnose_module(self, module: Path) -> Found:
        """Diagnose a failure of iree-compile."""
        name = f"model{module.suffix}"
        size = module.stat().st_size
        if module.parent == self.folder:
            module.rename(self.folder / name)
        elif size <= _COPIED_BYTES:
            copy_file(module, self.folder / name)
        else:
            name = str(module)
        words = [name, "-o", "/dev/null", *self.flags]
        more = [f"--dump-compilation-phases-to={IR}", f"--mlir-pass-pipeline-crash-reproducer={PASS}"]
        more += ["--mlir-pass-pipeline-local-reproducer", "--mlir-disable-threading"]
        code, printed = self._run("iree-compile", [*words, *more, *(ELIDED if size > _WHOLE_BYTES else ())], self.limit)
        found = self._locate_failure(code, printed)
        again = self._pass_alone(printed) if (self.folder / PASS).exists() else ""
        if found.in_pass and not again:
            found = Found(
                found.phase, found.in_pass, [*found.notes, f"{PASS} does not reproduce the failure in iree-opt"]
            )
        self._write_script(found, shlex.join(["iree-compile", *words]), again)
        return found

    def _locate_failure(self, code: int | None, printed: str) -> Found:
        """Determine phase and pass from the output of the second compilation.

        An exit code of None means that hil stopped the compiler.
        """
        dumped = {int(match["number"]): match["phase"] for match in map(_DUMPED.search, self._list_dumped()) if match}
        last = dumped[max(dumped)] if dumped else ""
        failed = _FAILED_IN.search(printed)
        passes = list(_PASS_ON.finditer(failed["passes"])) if failed else []
        notes = []
        if code is None:
            notes.append(f"a second compilation with one thread was still running after {self.limit:g} s")
        elif not code:
            try:
                check_target(printed)
            except CompileFailed:
                return Found("")
            return Found("", notes=["a second compilation with one thread succeeded"])
        if last in IREE_PHASES[:-1]:
            phase = IREE_PHASES[IREE_PHASES.index(last) + 1]
        else:
            phase = "input" if passes or code is None else "read"
        inner = passes[-1] if passes else None
        where = f"{inner['name']} on {' '.join(filter(None, (inner['kind'], inner['symbol'])))}" if inner else ""
        return Found(phase, where, notes)

    def _list_dumped(self) -> Iterator[str]:
        return (path.name for path in (self.folder / IR).glob("*.mlir"))

    def _pass_alone(self, printed: str) -> str:
        """Return an iree-opt command that reproduces the failure with the failing pass only; "" if no command does."""
        words = ["--run-reproducer", PASS, "-o", "/dev/null"]
        flags: Sequence[str] = ()
        limit = min(_OPT_SECONDS, self.limit)
        # Try without flags first: the file contains the pipeline's options. But the failure may depend on flags that
        # both tools have.
        for more in ((), self.flags):
            code, said = self._run("iree-opt", [*words, *(flags := more)], limit)
            if unknown := {match["flag"] for match in _UNKNOWN_FLAG.finditer(said)}:
                flags = [flag for flag in flags if flag.split("=")[0] not in unknown]
                code, said = self._run("iree-opt", [*words, *flags], limit)
            if self._is_same(code, said, printed):
                return shlex.join(["iree-opt", *words, *flags])
        return ""

    def _is_same(self, code: int | None, said: str, printed: str) -> bool:
        if self.hangs:
            return code is None
        if self.died:
            return code is not None and describe_death(code) in self.title
        return bool(code) and not set(_extract_errors(said)).isdisjoint(_extract_errors(printed))

    def _run(self, tool: str, words: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Run an IREE tool in the directory. Return the exit code (None after a timeout) and the output."""
        command = [str(find_native_compiler().with_name(tool)), *words]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        # Disable symbolizing, which takes seconds: the first compilation's log already has a stack trace.
        quick = os.environ | {"LLVM_DISABLE_SYMBOLIZATION": "1"}
        process = subprocess.Popen(command, cwd=self.folder, env=quick, **pipes)
        # The process may have exited already.
        with contextlib.suppress(ProcessLookupError, AttributeError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_IR_BYTES, _IR_BYTES))
        code: int | None = None
        try:
            printed, _ = process.communicate(timeout=limit)
            code = process.returncode
        except subprocess.TimeoutExpired:
            # On SIGABRT, as on a crash, MLIR reports the pass and writes the pass's input.
            process.send_signal(signal.SIGABRT)
            try:
                printed, _ = process.communicate(timeout=_KILL_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                printed, _ = process.communicate()
        return code, printed.decode(errors="replace")

    def _write_script(self, found: Found, command: str, of_pass: str = "") -> None:
        lines = ["#!/bin/sh", f"# {self.title}"]
        if found.in_pass:
            lines.append(f"# Failing pass: {_line(found.in_pass)}, phase {found.phase}")
        package = f"{PACKAGE}=={get_version(PACKAGE)}"
        lines.append(f"# Uses the tools of {package} (pip). Tools on the PATH take precedence.")
        lines.append('cd "$(dirname "$0")" || exit 2')
        places = (Path(sys.executable).parent, find_native_compiler().parent)
        lines.append(f'PATH="$PATH":{":".join(shlex.quote(str(place)) for place in places)}')
        if of_pass:
            lines.append(f"# `sh {SCRIPT} pass` runs only the failing pass, on the stored input.")
            lines.append(f'[ "$1" != pass ] || exec {of_pass}')
        lines.append(f"exec {command}")
        script = self.folder / SCRIPT
        script.write_text("\n".join([*lines, ""]))
        script.chmod(0o755)


def _copy_flag_files(flags: Sequence[str], folder: Path) -> Iterator[str]:
    """Copy the files that flags refer to, and yield the flags with the copies' names."""
    for number, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if equals and is_file(value):
            copy = f"flag-{number}{Path(value).suffix}"
            copy_file(value, folder / copy)
            flag = f"{name}={copy}"
        yield flag


def _extract_errors(printed: str) -> Iterator[str]:
    """Extract the error texts from a tool's output, without their locations."""
    return (text.partition(" at '")[0] for text in find_errors(printed))


def _line(text: str) -> str:
    return " ".join(text.split())
