"""One attempt at a job: its files laid out, the library called as the commands call it, what came of it stored."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import filelock

from hil.controller.farm.client import AGAIN_S, FarmClient
from hil.controller.farm.host.lease_runner import REASON, Attempt
from hil.controller.farm.job_files import inside, job_of, key_of, request_of
from hil.controller.farm.messages import JobResult, JobSpec, Kind
from hil.controller.storage.isolated import Isolated
from hil.controller.storage.origin import coming_from
from hil.controller.storage.runs import GO_ON
from hil.core.digest import algorithm_of, check, digest_file
from hil.core.files import write_atomic
from hil.core.results import Outcome, exit_code_of
from hil.core.runtimes import RUNTIMES
from hil.core.text import jsonable
from hil.errors import EXIT_BOARD, FarmError, FarmUnreachable, UsageError

T = TypeVar("T")


@dataclass
class LineProgress:
    """Progress of a run or a suite, as lines."""

    print: Callable[[str], None]
    case_ended: Callable[[str, str, str], None] = lambda name, outcome, reason: None

    def begin(self, name: Any, stages: Any) -> None:
        """A case, or the suite, has begun."""
        if isinstance(name, int):
            self.print(f"{name} cases")

    def stage(self, name: str, number: int, text: str) -> None:
        """A case has come to a stage."""
        self.print(f"{name}: {text}")

    def end(self, name: Any, outcome: str = "", reason: str = "") -> None:
        """A case is over."""
        if isinstance(name, str):
            self.case_ended(name, outcome, reason)
        else:
            self.print(f"{name.id}: {name.outcome}")
            self.case_ended(name.id, name.outcome, name.message)

    def note(self, text: str) -> None:
        """Something a person should know; how to go on with it is for where it runs, not for who submitted it."""
        if not text.startswith(GO_ON):
            self.print(text)


def use_board(attempt: Attempt) -> JobResult:
    """Do the job, and store what it wrote; a farm that is away for now is waited for."""
    spec, timed, farm = attempt.grant.spec, attempt.timed, attempt.farm
    if spec.kind is Kind.HEALTH:
        return check_health(attempt)
    work, out = attempt.folder / "files", attempt.folder / "out"
    work.mkdir(parents=True)
    with timed("fetch"):
        _heard(lambda: Files(attempt.site.files).lay_out(spec, work, farm()))
    origin = spec.options.get("origin")
    with timed("run"), coming_from(origin if isinstance(origin, dict) else {}):
        record, place = _call(attempt, work, out)
    with timed("upload"):
        stored = _heard(lambda: upload_folder(place, farm()))
    for case in record["cases"] if spec.kind is not Kind.SUITE else ():
        attempt.print(f"{case['name']}: {case['outcome']} {case.get('reason') or ''}".strip())
    return _result(record, stored)


def _call(attempt: Attempt, work: Path, out: Path) -> tuple[dict[str, Any], Path]:
    """Run what the job asks for; its record, and the folder that holds it."""
    options, progress = attempt.grant.spec.options, LineProgress(attempt.print, attempt.case_ended)
    if attempt.grant.spec.kind is Kind.SUITE:
        from hil.controller.workloads.suites.job import run_suite

        request = replace(request_of(options, work), boards=(attempt.board.name,), hw_type="", ssh={})
        suite = run_suite(request, out=out, screen=progress, isolated=attempt.isolated, choices=[attempt.board])
        cases = [record.to_json() for record in suite.records()]
        return {**suite.head, "folder": str(suite.folder), "cases": cases}, suite.folder
    job = replace(job_of(options, work), board=attempt.board.name, out=out)
    if attempt.grant.spec.kind is Kind.BUNDLE:
        from hil.controller.workloads.bundles.run import run_bundle

        methods, key = tuple(options.get("methods", ())), key_of(options, work)
        record = run_bundle(job, methods, key, screen=progress, isolated=attempt.isolated, choice=attempt.board)
    else:
        from hil.controller.workloads.run_job import run_job

        record = run_job(job, screen=progress, isolated=attempt.isolated, choice=attempt.board)
    if not record["folder"]:  # the board let nobody in, and nothing was kept
        out.mkdir(exist_ok=True)
    return record, Path(record["folder"] or out)


def _heard(call: Callable[[], T]) -> T:
    """What a call to the farm returns, as soon as it is there again; the lease's end ends that, as it ends all."""
    while True:
        try:
            return call()
        except FarmUnreachable:
            time.sleep(AGAIN_S)  # where no gateway listens, a call fails at once


def _result(record: Mapping[str, Any], stored: Mapping[str, str]) -> JobResult:
    cases: Sequence[Mapping[str, Any]] = record["cases"]
    code = int(record["exit_code"])
    worst: Mapping[str, Any] = next((one for one in cases if exit_code_of([Outcome(one["outcome"])]) == code), {})
    reason = ""
    if worst and code:
        reason = f"{worst.get('name') or worst.get('id')}: {worst.get('reason') or worst.get('message')}"
    outcome, broken = str(worst.get("outcome", "")), code == EXIT_BOARD
    return JobResult(code, outcome, reason[:REASON], infrastructure=broken, record=jsonable(record), files=stored)


_MODEL = "tiny.onnx"
_MAKE_S = 60.0


def check_health(attempt: Attempt) -> JobResult:
    """Do a health job on a board that answers: if hil has a program for its runtime, run it; the answer must be right.

    The program stays in the host's folder.
    """
    from hil.controller.pipeline.options import Job
    from hil.controller.workloads.run_job import run_job

    runtime, board = attempt.runtime, attempt.board
    if runtime not in RUNTIMES or not RUNTIMES[runtime].from_onnx:
        return JobResult(0, "PASS", f"it answers; there is no program of hil's to try on {runtime}")
    model = _model(attempt.site.folder, attempt.isolated, attempt.folder)
    job = Job((model,), board=board.name, out=attempt.folder / "out")
    record = run_job(job, screen=LineProgress(attempt.print), isolated=attempt.isolated, choice=board)
    (case,) = record["cases"]
    reason = "" if record["exit_code"] == 0 else f"a tiny model: {case['outcome']}: {case['reason']}"
    return JobResult(int(record["exit_code"]), case["outcome"], reason, record=jsonable(record))


def write_model(folder: str) -> str:
    """Write the model; in a worker of its own, so that what makes it is not kept in this process."""
    from hil.controller.workloads.board_checks import tiny_model

    return str(tiny_model(Path(folder)))


def _model(kept: Path, isolated: Isolated, folder: Path) -> Path:
    path = kept / _MODEL
    if path.exists():
        return path
    # All boards of a host are checked as it starts: one makes it, the others wait, though not for one that cannot.
    lock = filelock.FileLock(kept / f"{_MODEL}.lock")
    with contextlib.suppress(filelock.Timeout):
        lock.acquire(timeout=_MAKE_S)
    try:
        if not path.exists():
            made = isolated.call(write_model, {"folder": str(folder)}, timeout=_MAKE_S, log=folder / "log")
            write_atomic(path, Path(made).read_bytes())
    finally:
        lock.release()
    return path


_MOST_BYTES = 8 << 30
_TRIES = 3


class Files:
    """What a host fetched from the farm's store, kept while there is room; its workers share it."""

    def __init__(self, folder: Path, most_bytes: int = _MOST_BYTES) -> None:
        self._folder = folder
        self._most = most_bytes

    def lay_out(self, spec: JobSpec, folder: Path, client: FarmClient) -> None:
        """Put a job's files into its folder."""
        fetched = False
        for name, digest in spec.files.items():
            target = inside(folder, name)
            try:
                fetched = self._put(digest, target, client) or fetched
            except (FileExistsError, NotADirectoryError, IsADirectoryError, ValueError) as error:
                raise UsageError(f"the job's file {name!r} cannot lie where it should: {error}") from error
        if fetched:
            self.tidy()

    def _put(self, digest: str, target: Path, client: FarmClient) -> bool:
        """Put one file there; whether it had to be fetched."""
        target.parent.mkdir(parents=True, exist_ok=True)
        kept = self._folder / check(digest).replace(":", "-")
        for number in range(_TRIES):
            try:
                shutil.copyfile(kept, target)
                # A machine that lost its power may have kept less than it had written.
                if digest_file(target, algorithm_of(digest)) == digest:
                    os.utime(kept)
                    return number > 0
            except FileNotFoundError:
                pass  # never fetched, or another worker tidied it away
            client.download(digest, kept)
        raise FarmError(f"there is no room for {digest} on the board's host", hint=f"see {self._folder}")

    def tidy(self) -> None:
        """Delete what was used least lately, where it is too much altogether."""
        found = []
        for path in self._folder.glob("*"):
            with contextlib.suppress(OSError):
                seen = path.stat()
                found.append((seen.st_mtime, seen.st_size, path))
        left = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if left <= self._most:
                return
            path.unlink(missing_ok=True)
            left -= size


def upload_folder(folder: Path, client: FarmClient) -> Mapping[str, str]:
    """Send all files of a folder to the store; path below it -> digest."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    paths = {str(path.relative_to(folder)): path for path in found}
    digests = {name: digest_file(path) for name, path in paths.items()}
    client.upload({digest: paths[name] for name, digest in digests.items()})
    return digests
