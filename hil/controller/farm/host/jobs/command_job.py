"""Run a user's command on the board's host, with the board leased.

The command runs as the host's user, so the farm runs it only for users with the right, on hosts that allow commands.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from hil.controller.farm.command_options import check_command, check_executables, check_patterns
from hil.controller.farm.host.jobs.job_transfer import FileCache, retry_until_reachable, upload_folder
from hil.controller.farm.host.lease_runner import REASON, Attempt
from hil.controller.farm.messages import JobResult
from hil.controller.farm.rpc import is_job_path
from hil.core.files import resolve_within
from hil.core.processes import exit_text, signal_group, wait_or_kill
from hil.core.results import Outcome
from hil.errors import EXIT_OK, HilError, UsageError

OUTPUT, KEPT = "output.log", "files"
_MAX_FILES, _MAX_BYTES = 10_000, 8 << 30
# Limits of the stored output file, and of the output that the farm shows live. The rate, in bytes per second, is below
# the size of the messages that the gateway accepts.
_MAX_OUTPUT, _MAX_SHOWN, _SHOWN_RATE = 64 << 20, 16 << 20, 3 << 20
_PIECE, _MAX_LINE = 32 << 10, 8 << 10
_LOOK_SECONDS, _END_SECONDS = 0.2, 3.0
# Largest size of a pipe without privileges.
_MAX_PIPE = 1 << 20
# Variables with secrets or settings of the host.
_PRIVATE = ("HIL_FARM", "HIL_FARM_TOKEN", "HIL_FARM_CA", "HIL_FARM_DB", "HIL_FARM_HOME", "HIL_WEB_TOKEN", "HIL_BOARD")


def run_command_job(attempt: Attempt) -> JobResult:
    """Run a command in the job's directory, and upload its output and the chosen files.

    Raises UsageError if the host does not allow commands, or the job is invalid.
    """
    if not attempt.site.allow_commands:
        raise UsageError("this host does not allow commands", hint="start it with hil farm host --allow-commands")
    spec, farm = attempt.grant.spec, attempt.farm
    command, patterns = check_command(spec.options.get("command")), check_patterns(spec.options.get("keep", []))
    programs = check_executables(spec.options.get("executable", []), spec.files)
    work, out = attempt.folder / "work", attempt.folder / "out"
    work.mkdir(parents=True)
    out.mkdir()
    with attempt.measure_step("fetch"):
        retry_until_reachable(lambda: FileCache(attempt.site.files).lay_out(spec, work, farm()))
    for name in programs:
        (work / name).chmod(0o700)
    with attempt.measure_step("run"), (out / OUTPUT).open("wb") as log:
        code = _run_command(command, work, _make_environment(attempt), log, attempt)
    with attempt.measure_step("upload"):
        if problem := _keep_files(work, out / KEPT, patterns):
            attempt.print(problem)
        stored = retry_until_reachable(lambda: upload_folder(out, farm()))
    reason = "" if code == EXIT_OK else f"the command {exit_text(code)}"
    outcome = Outcome.PASS if code == EXIT_OK else Outcome.FAIL
    return JobResult(
        code if code >= 0 else 128 - code,
        outcome.value,
        "; ".join(filter(None, (reason, problem)))[:REASON],
        files=dict(stored),
    )


def _make_environment(attempt: Attempt) -> Mapping[str, str]:
    """Return the command's environment, with the board and without the host's secrets."""
    grant = attempt.grant
    configs = [attempt.config, *attempt.other_configs]
    kept = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
    programs = str(Path(sys.executable).parent)
    return {
        **kept,
        "PATH": os.pathsep.join(filter(None, (kept.get("PATH", ""), programs))),
        "HIL_BOARD": str(attempt.config),
        "HIL_BOARD_NAME": grant.board,
        "HIL_BOARDS": os.pathsep.join(map(str, configs)),
        "HIL_BOARD_NAMES": " ".join([grant.board, *(one.card.name for one in grant.more)]),
        "HIL_BOARD_ADDRESS": attempt.address,
        "HIL_FARM_JOB": grant.job,
        "HIL_FARM_USER": grant.user,
        "HIL_FARM_ATTEMPT": str(grant.attempt),
    }


def _run_command(
    command: Sequence[str], work: Path, environment: Mapping[str, str], log: BinaryIO, attempt: Attempt
) -> int:
    """Run a command, and show and store its output. Return the exit code, negative for a signal.

    A cancelled job interrupts this function, which then ends all processes of the command.
    """
    if shutil.which(command[0], path=environment["PATH"]) is None and "/" not in command[0]:
        raise UsageError(f"program {command[0][:100]!r} not found on the board's host")
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=work,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"the command cannot be started: {error}") from error
    try:
        _forward_output(process, log, attempt)
        return process.wait()
    finally:
        # Background processes of the command must not use the board after the job.
        signal_group(process.pid, signal.SIGTERM if process.poll() is None else signal.SIGKILL)
        wait_or_kill(process, _END_SECONDS, group=True)
        signal_group(process.pid)
        if process.stdout is not None:
            process.stdout.close()


def _forward_output(process: subprocess.Popen[bytes], log: BinaryIO, attempt: Attempt) -> None:
    """Show and store the output up to the end of the command. Background processes may keep the output open."""
    assert process.stdout is not None
    pending, stored, shown = b"", 0, 0
    for piece in _iter_output(process):
        if stored < _MAX_OUTPUT:
            log.write(piece[: _MAX_OUTPUT - stored])
            stored += len(piece)
        if shown >= _MAX_SHOWN:
            continue
        pending += piece
        whole, _, rest = pending.rpartition(b"\n")
        if len(rest) > _MAX_LINE:
            whole, rest = pending, b""
        if whole:
            attempt.print(whole.decode(errors="replace"))
            shown += len(whole)
            time.sleep(len(whole) / _SHOWN_RATE)
        pending = rest
        if shown >= _MAX_SHOWN:
            attempt.print(f"[output limit exceeded; {OUTPUT} has up to {_MAX_OUTPUT >> 20} MiB]")
    if pending and shown < _MAX_SHOWN:
        attempt.print(pending.decode(errors="replace"))


def _iter_output(process: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Yield the output. After the end of the command, yield only what the pipe may already contain."""
    assert process.stdout is not None
    stream, rest = process.stdout.fileno(), _MAX_PIPE
    while rest > 0:
        ended = process.poll() is not None
        ready, _, _ = select.select([stream], [], [], 0 if ended else _LOOK_SECONDS)
        if ready:
            if not (piece := os.read(stream, _PIECE)):
                return
            if ended:
                rest -= len(piece)
            yield piece
        elif ended:
            return


def _keep_files(work: Path, target: Path, patterns: Sequence[str]) -> str:
    """Move the files that match a pattern to the target directory. Return problems as text; "" without a problem."""
    count = size = skipped = 0
    for path in _find_files(work, patterns):
        place = target / path.relative_to(work)
        if not is_job_path(str(place.relative_to(target.parent))):
            skipped += 1
            continue
        count, size = count + 1, size + path.stat().st_size
        if count > _MAX_FILES or size > _MAX_BYTES:
            return f"kept only {count - 1} files: the limit is {_MAX_FILES} files and {_MAX_BYTES >> 30} GiB"
        place.parent.mkdir(parents=True, exist_ok=True)
        path.rename(place)
    return f"{skipped} files have too long or invalid names and were not kept" if skipped else ""


def _find_files(work: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the regular files in the job's directory that match a pattern, or that are in a matching directory."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        for match in sorted(work.glob(pattern)):
            for path in sorted(match.rglob("*")) if match.is_dir() and not match.is_symlink() else [match]:
                with suppress(HilError, OSError):
                    if path.is_file() and not path.is_symlink() and resolve_within(work, path):
                        found[path] = None
    return list(found)
