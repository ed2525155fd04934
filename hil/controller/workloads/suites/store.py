"""Directory of a suite run: ``suite.json``, ``results.jsonl`` with a line per finished case, ``cases/<id>/``."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shlex
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from hil.controller.records.base import read_record
from hil.controller.records.suite import CaseRecord, SuiteDocument, SuiteRecord, make_case_record
from hil.controller.storage.line_file import read_lines, remove_incomplete_line
from hil.controller.storage.paths import path_exists
from hil.controller.storage.runs import (
    convert_write_errors,
    lock_folder,
    make_safe_name,
    seal,
    store_tensors,
    write_file,
    write_json,
)
from hil.controller.storage.session_folders import SUITES
from hil.core import own_version
from hil.core.bounded_json import parse_json
from hil.core.files import suggest_path
from hil.core.installed import get_version
from hil.core.tensors import Array
from hil.errors import UsageError

_PACKAGES = ("onnx", "onnxruntime", "iree-base-compiler", "iree-base-runtime", "numpy")
# Packages in hil's extras, listed if installed.
_FRAMEWORKS = ("torch", "executorch", "torchvision", "torchaudio", "tensorflow", "tensorflow-cpu", "ai-edge-litert")


def collect_versions() -> dict[str, str]:
    """Return the tools' versions, and a host description."""
    return {
        "hil": own_version(),
        "python": platform.python_version(),
        **{name: get_version(name) for name in _PACKAGES},
        **list_installed(_FRAMEWORKS),
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
    }


def list_installed(packages: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of the installed packages among ``packages``."""
    found = {}
    for name in packages:
        try:
            found[name] = get_version(name)
        except PackageNotFoundError:
            continue
    return found


HEAD = "suite.json"
LINES = "results.jsonl"


class SuiteDirectory:
    """Directory for the files of a suite's cases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get_case_folder(self, case_id: str) -> Path:
        """Return the directory of a case."""
        return self.folder / "cases" / case_id

    def to(self, folder: Path) -> str:
        """Return a relative link to a directory.

        The link remains valid if the run and the directory are moved together.
        """
        return Path(os.path.relpath(folder.absolute(), self.folder.absolute())).as_posix()

    def save_tensors(self, case_id: str, kind: str, tensors: Mapping[str, Array]) -> list[Path]:
        """Write tensors of a case as .npy files in ``cases/<id>/<kind>``. Return the files, in order."""
        folder = self.folder / "cases"
        return [folder / entry.file for entry in store_tensors(folder, case_id, kind, tensors)]


class SuiteRun(SuiteDirectory):
    """A suite run in a directory. ``head`` is the content of suite.json; :meth:`save` writes it.

    Only one process at a time may write (:meth:`lock_for_writing`).
    """

    def __init__(self, folder: Path, head: SuiteRecord) -> None:
        super().__init__(folder)
        self.head = head

    @classmethod
    def create(cls, folder: Path, head: SuiteRecord) -> SuiteRun:
        """Create a run. Raises UsageError if the directory already contains a run."""
        if (folder / HEAD).exists():
            raise UsageError(
                f"{folder} already contains a suite run",
                hint=f"resume the run with --resume {shlex.quote(str(folder))}, or choose a different --out",
            )
        with convert_write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / LINES).touch()
            seal(folder, head.request)
        run = cls(folder, head)
        run.save()
        return run

    @classmethod
    def open(cls, folder: Path) -> SuiteRun:
        """Open a stored run. Raises UsageError if the run is missing or the head is unreadable."""
        if not path_exists(folder / HEAD):
            raise UsageError(
                f"{folder} is not a suite run: {HEAD} not found",
                hint=f"{suggest_path(folder)}give the directory of a suite run: --out, or the path that hil suite run "
                "printed",
            )
        return cls(folder, read_record(folder / HEAD, SuiteRecord))

    def save(self, **changes: Any) -> None:
        """Change fields of the head, and write suite.json atomically."""
        self.head = self.head.replace(**changes)
        write_json(self.folder / HEAD, self.head.to_json())

    def to_document(self) -> SuiteDocument:
        """Return the run with its cases."""
        return SuiteDocument(**asdict(self.head), folder=str(self.folder), cases=self.read_records())

    @contextlib.contextmanager
    def lock_for_writing(self) -> Iterator[None]:
        """Lock the run for writing. Remove an incomplete line that a killed writer left.

        Raises UsageError if a different process has the lock.
        """
        with lock_folder(self.folder):
            with convert_write_errors(self.folder):
                remove_incomplete_line(self.folder / LINES)
            yield

    def append(self, record: CaseRecord) -> None:
        """Append a case's record. After the return the record survives a crash of this process."""
        with convert_write_errors(self.folder), (self.folder / LINES).open("ab") as file:
            file.write(_encode_record(record))

    def read_records(self) -> list[CaseRecord]:
        """Return the records of the finished cases, in the suite's order."""
        return self.read()[0]

    def read(self) -> tuple[list[CaseRecord], int]:
        """Return the records and the number of damaged lines. Cases on damaged lines run again."""
        found: dict[str, CaseRecord] = {}
        damaged = 0
        for line in read_lines(self.folder / LINES):
            try:
                record = make_case_record(parse_json(line))
            except (ValueError, UsageError):
                damaged += 1
            else:
                found[record.id] = record
        order = {case_id: number for number, case_id in enumerate(self.head.ids)}
        return sorted(found.values(), key=lambda record: order.get(record.id, len(order))), damaged

    def drop_stale(self, content: Mapping[str, str]) -> list[str]:
        """Remove the records of cases with changed content. Return their IDs."""
        records = self.read_records()
        stale = [record.id for record in records if record.content != content.get(record.id)]
        if stale:
            kept = b"".join(_encode_record(record) for record in records if record.id not in stale)
            write_file(self.folder / LINES, kept)
        return stale


def name_suite_run(head: SuiteRecord) -> str:
    """Return the ID of a suite run in the history. pytest uses a directory, and therefore an ID, many times."""
    return f"{head.id}-{head.started:.0f}" if head.command.startswith("pytest") else head.id


def _encode_record(record: CaseRecord) -> bytes:
    return json.dumps(record.to_json(), allow_nan=False).encode() + b"\n"


def choose_default_folder(title: str, flow: str) -> Path:
    """Return the default name of a new run directory."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return SUITES / f"{stamp}-{make_safe_name(title)}-{make_safe_name(flow)}-{os.urandom(2).hex()}"
