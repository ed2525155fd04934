"""Fetch the programs of a finished job from the farm's file store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from hil.controller.farm.gateway.artifacts import ArtifactStore
from hil.controller.farm.job_files import PROGRAMS
from hil.controller.records.base import make_record
from hil.controller.records.measurements.history import StoredProgram
from hil.controller.storage.history.programs import RECORD, ProgramSource, check_record
from hil.core.bounded_json import parse_json
from hil.core.files import resolve_within
from hil.core.storage_errors import make_full_disk_error
from hil.errors import HilError, StorageError, UsageError

# Limits for all records of a job, and for a record. A host may send any files.
_MAX_BYTES, _MAX_RECORD_VALUES = 64 << 20, 100_000


class JobPrograms:
    """Programs that a host uploaded with a job's result.

    Args:
        files: files of the result: path -> digest.
        skipped: list for the reasons why programs are left out.
    """

    def __init__(self, artifacts: ArtifactStore, files: Mapping[str, str], skipped: list[str]) -> None:
        self._artifacts = artifacts
        self._files = files
        self._skipped = skipped

    def list_records(self) -> dict[str, StoredProgram]:
        """Return the records of the programs by digest, without those that are invalid or deleted.

        Raises StorageError if the store does not respond.
        """
        found = {}
        left = _MAX_BYTES
        for path, digest in self._files.items():
            parts = PurePosixPath(path).parts
            if len(parts) == 3 and parts[0] == PROGRAMS and parts[2] == RECORD:
                try:
                    record, size = self._read_record(digest, left)
                    left -= size
                    found[record.digest] = record
                except StorageError:
                    raise
                except HilError as error:
                    self._skipped.append(f"program {parts[1][:80]}: {error.message}")
        return found

    def fetch(self, records: Mapping[str, StoredProgram], folder: Path, quota: int) -> Iterator[ProgramSource]:
        """Yield the programs. The files of a program are in a subdirectory of ``folder`` up to the next program.

        Args:
            quota: maximum size of all programs in bytes.

        Raises:
            StorageError: the store does not respond, or the directory cannot be written.
        """
        left = quota
        for number, record in enumerate(records.values()):
            place = folder / str(number)
            try:
                left -= self._fetch_files(record, place, left)
            except StorageError:
                raise
            except HilError as error:
                self._skipped.append(f"program {record.digest}: {error.message}")
            except OSError as error:  # a host may send any file name
                if full := make_full_disk_error(error):
                    raise full from error
                self._skipped.append(f"program {record.digest}: {error.strerror}")
            else:
                yield ProgramSource(record, place)
            shutil.rmtree(place, ignore_errors=True)

    def _read_record(self, digest: str, most: int) -> tuple[StoredProgram, int]:
        """Return a record and the size."""
        if (size := self._artifacts.size(digest)) > most:
            raise UsageError(f"the records of the job's programs exceed {_MAX_BYTES} bytes")
        try:
            document = parse_json(b"".join(self._artifacts.read(digest)), _MAX_RECORD_VALUES)
        except ValueError as error:
            raise UsageError(f"invalid {RECORD}: {error}") from error
        record = make_record(document, StoredProgram)
        check_record(record)
        return record, size

    def _fetch_files(self, record: StoredProgram, folder: Path, most: int) -> int:
        """Copy the files of a program to a directory. Return their size."""
        # A host may send a wrong size in the record.
        size = sum(self._artifacts.size(digest) for digest in record.files.values())
        if size > most:
            raise UsageError(f"the programs of the job exceed the quota: {size} bytes, {most} left")
        for name, digest in record.files.items():
            target = resolve_within(folder, folder / name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                file.writelines(self._artifacts.read(digest))
        return size
