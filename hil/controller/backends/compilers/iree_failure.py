"""What a failing iree-compile leaves behind: the phase and the pass it was in, its IR so far, and what shows it again.

The model is compiled a second time for that, with MLIR's crash reproducer on, within limits of time and size: the first
compilation is timed, and a compiler that died has nothing left to say. What is kept needs IREE's own tools alone.
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

from hil.controller.backends.compilers.iree_program import ELIDED, PACKAGE, Source, check_target, errors_in, prepare
from hil.controller.models.compiling import (
    IREE_PHASES,
    PARAMETERS,
    PHASE,
    Work,
    call_isolated,
    death_text,
    native_compiler,
)
from hil.controller.storage.cache import META, Cache
from hil.controller.storage.paths import is_file
from hil.controller.storage.runs import storing
from hil.core.installed import version
from hil.errors import CompileCrashed, CompileFailed, HilError, StageError, StageTimeout

SCRIPT, PASS, IR = "reproduce.sh", "reproducer.mlir", "phases"
_FOUND = "found.json"
_LOG = "diagnosis.log"
# So many seconds the second compilation has, and three times what the first took until it failed; of one that hung
# these alone: where it is then it was before.
_TIME_S = 60.0
_OPT_S = 20.0
_KILL_S = 10.0
# Of a file of IR; and of a module whose IR is written with all its constants.
_IR_BYTES = 256 << 20
_WHOLE_BYTES = 4 << 20
# A larger module stays where it is.
_COPIED_BYTES = 256 << 20
# [`Outer` on 'builtin.module' operation, `Inner` on 'func.func' operation: @main]
_FAILED_IN = re.compile(r"Pipeline failed while executing (?P<passes>.*): reproducer generated at")
_PASS_ON = re.compile(r"`(?P<name>[^`]+)` on '(?P<kind>[^']+)' operation(?:: (?P<symbol>@\"[^\"]*\"|@[^\s,\]]+))?")
_DUMPED = re.compile(r"\.(?P<number>\d+)\.(?P<phase>[\w-]+)\.mlir$")
_UNKNOWN_FLAG = re.compile(r"Unknown command line argument '(?P<flag>[^'=]+)")
# Raise this when what is kept changes: older ones in the cache are then not used.
_VERSION = 1


@dataclass(frozen=True)
class Found:
    """What is known of a failure."""

    phase: str  # of :data:`IREE_PHASES`, or ``import`` or ``read``; "" where the second compilation did not fail
    in_pass: str = ""  # the pass, and the operation that it ran on; "" where it was in none
    notes: Sequence[str] = ()  # what else there is to say, a line each


def keep_failure(error: StageError, source: Source, key: str, seconds: float, folder: Path | None, work: Work) -> None:
    """Keep what shows a failure again in a folder, and tell in the error what the compiler was doing.

    Args:
        key: the program's in the cache, which keeps what is found of its failure too.
        seconds: how long compiling took until it failed.
        folder: None keeps it in the cache alone.
    """
    hangs = isinstance(error, StageTimeout)
    limit = _TIME_S if hangs else _TIME_S + 3 * seconds
    limit = min(limit, work["timeout"] or limit)

    def make(place: Path) -> None:
        arguments = {"source": vars(source), "folder": str(place), "title": _line(error.message), "limit": limit}
        arguments |= {"hangs": hangs, "died": isinstance(error, CompileCrashed)}
        whole = limit + _KILL_S + 2 * _OPT_S + _TIME_S
        call_isolated(diagnose, arguments, {"isolated": work["isolated"], "timeout": whole, "log": place / _LOG})

    try:
        entry, _ = work["cache"].get_or_make(
            Cache.key("failure", program=key, outcome=error.outcome, version=_VERSION),
            {"model": Path(source.model).stem, "what": error.message[:200]},
            make,
            work["recompute"],
        )
        found = Found(**json.loads((entry / _FOUND).read_bytes()))
        if folder is not None:
            with storing(folder):
                # What an earlier failure left.
                shutil.rmtree(folder / IR, ignore_errors=True)
                (folder / PASS).unlink(missing_ok=True)
                shutil.copytree(entry, folder, ignore=shutil.ignore_patterns(META, _FOUND), dirs_exist_ok=True)
    except HilError as failed:
        error.detail = f"what the compiler was doing is not known: {failed.message}\n{error.detail}"
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
    """Compile again, and write what is found to a folder; called in an isolated process.

    Args:
        source: the fields of a :class:`Source`.
        title: how the first compilation ended.
        limit: seconds for compiling; then the compiler is told to stop and say where it is.
        hangs, died: how the first compilation ended; else the model was refused.
    """
    own, place = Source(**source), Path(folder)
    failure = _Failure(place, title, tuple(_with_files(own.flags, place)), limit, hangs, died)
    try:
        module = prepare(own, place, place, None)
    except CompileFailed as error:
        found = failure.of_import(own, error)
    else:
        found = failure.of_module(module)
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

    def of_import(self, source: Source, error: CompileFailed) -> Found:
        """The ONNX importer refused the model."""
        from hil.controller.backends.compilers.onnx_to_mlir import save_prepared

        save_prepared(Path(source.model), source.dims, self.folder / "model.onnx")
        found = Found("import", notes=[f"iree-import-onnx: {error.message}"])
        self._write_script(found, "iree-import-onnx model.onnx -o model.mlir")
        return found

    def of_module(self, module: Path) -> Found:
        """The compiler failed."""
        name = f"model{module.suffix}"
        size = module.stat().st_size
        if module.parent == self.folder:
            module.rename(self.folder / name)
        elif size <= _COPIED_BYTES:
            shutil.copyfile(module, self.folder / name)
        else:
            name = str(module)
        words = [name, "-o", "/dev/null", *self.flags]
        more = [f"--dump-compilation-phases-to={IR}", f"--mlir-pass-pipeline-crash-reproducer={PASS}"]
        more += ["--mlir-pass-pipeline-local-reproducer", "--mlir-disable-threading"]
        code, printed = self._run("iree-compile", [*words, *more, *(ELIDED if size > _WHOLE_BYTES else ())], self.limit)
        found = self._found(code, printed)
        again = self._pass_alone(printed) if (self.folder / PASS).exists() else ""
        if found.in_pass and not again:
            found = Found(found.phase, found.in_pass, [*found.notes, f"{PASS} alone does not show it in iree-opt"])
        self._write_script(found, shlex.join(["iree-compile", *words]), again)
        return found

    def _found(self, code: int | None, printed: str) -> Found:
        """What the second compilation tells; its exit code is None where it was stopped."""
        dumped = {int(match["number"]): match["phase"] for match in map(_DUMPED.search, self._dumped()) if match}
        last = dumped[max(dumped)] if dumped else ""
        failed = _FAILED_IN.search(printed)
        passes = list(_PASS_ON.finditer(failed["passes"])) if failed else []
        notes = []
        if code is None:
            notes.append(f"compiled once more by one thread, it was there after {self.limit:g} s")
        elif not code:
            try:
                check_target(printed)
            except CompileFailed:
                return Found("")
            return Found("", notes=["compiled once more, by one thread, it did not fail"])
        if last in IREE_PHASES[:-1]:
            phase = IREE_PHASES[IREE_PHASES.index(last) + 1]
        else:
            phase = "input" if passes or code is None else "read"
        inner = passes[-1] if passes else None
        where = f"{inner['name']} on {' '.join(filter(None, (inner['kind'], inner['symbol'])))}" if inner else ""
        return Found(phase, where, notes)

    def _dumped(self) -> Iterator[str]:
        return (path.name for path in (self.folder / IR).glob("*.mlir"))

    def _pass_alone(self, printed: str) -> str:
        """The command of iree-opt that shows the failure by the one pass; "" where it does not."""
        words = ["--run-reproducer", PASS, "-o", "/dev/null"]
        flags: Sequence[str] = ()
        limit = min(_OPT_S, self.limit)
        # The pipeline has its options in the file; what else the failure depends on is in flags that both tools have.
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
            return code is not None and death_text(code) in self.title
        return bool(code) and not set(_texts(said)).isdisjoint(_texts(printed))

    def _run(self, tool: str, words: Sequence[str], limit: float) -> tuple[int | None, str]:
        """Run a tool of IREE's in the folder; its exit code, None where it was stopped, and what it printed."""
        command = [str(native_compiler().with_name(tool)), *words]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        # The first compilation's log has a stack trace, whose names take seconds to find.
        quick = os.environ | {"LLVM_DISABLE_SYMBOLIZATION": "1"}
        process = subprocess.Popen(command, cwd=self.folder, env=quick, **pipes)
        # It may be over already.
        with contextlib.suppress(ProcessLookupError, AttributeError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_IR_BYTES, _IR_BYTES))
        code: int | None = None
        try:
            printed, _ = process.communicate(timeout=limit)
            code = process.returncode
        except subprocess.TimeoutExpired:
            # As after a crash MLIR then tells the pass and writes what it was given.
            process.send_signal(signal.SIGABRT)
            try:
                printed, _ = process.communicate(timeout=_KILL_S)
            except subprocess.TimeoutExpired:
                process.kill()
                printed, _ = process.communicate()
        return code, printed.decode(errors="replace")

    def _write_script(self, found: Found, command: str, of_pass: str = "") -> None:
        lines = ["#!/bin/sh", f"# {self.title}"]
        if found.in_pass:
            lines.append(f"# The pass was {_line(found.in_pass)}, of the phase {found.phase}.")
        package = f"{PACKAGE}=={version(PACKAGE)}"
        lines.append(f"# The tools are those of {package}, by pip; others on the PATH go first.")
        lines.append('cd "$(dirname "$0")" || exit 2')
        places = (Path(sys.executable).parent, native_compiler().parent)
        lines.append(f'PATH="$PATH":{":".join(shlex.quote(str(place)) for place in places)}')
        if of_pass:
            lines.append(f"# `sh {SCRIPT} pass` runs the pass alone, on what it was given.")
            lines.append(f'[ "$1" != pass ] || exec {of_pass}')
        lines.append(f"exec {command}")
        script = self.folder / SCRIPT
        script.write_text("\n".join([*lines, ""]))
        script.chmod(0o755)


def _with_files(flags: Sequence[str], folder: Path) -> Iterator[str]:
    """The flags, with copies of the files that they name."""
    for number, flag in enumerate(flags):
        name, equals, value = flag.partition("=")
        if equals and is_file(value):
            copy = f"flag-{number}{Path(value).suffix}"
            shutil.copyfile(value, folder / copy)
            flag = f"{name}={copy}"
        yield flag


def _texts(printed: str) -> Iterator[str]:
    """The errors in what a tool printed, without the places where they are."""
    return (text.partition(" at '")[0] for text in errors_in(printed))


def _line(text: str) -> str:
    return " ".join(text.split())
