"""Transfer of a job's files between the farm's store and the board's host."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hil.controller.farm.client.client import AGAIN_SECONDS, FarmClient
from hil.controller.farm.job_files import resolve_inside
from hil.controller.farm.messages import JobSpec
from hil.core.digest import check, get_algorithm
from hil.core.files import copy_file, digest_file
from hil.errors import FarmError, FarmUnreachable, UsageError

T = TypeVar("T")


def retry_until_reachable(call: Callable[[], T]) -> T:
    """Retry a farm call while all gateways are unavailable. The end of the lease interrupts the retries."""
    while True:
        try:
            return call()
        except FarmUnreachable:
            time.sleep(AGAIN_SECONDS)  # without a listening gateway, calls fail immediately


_MAX_BYTES = 8 << 30
_TRIES = 3


class FileCache:
    """Size-limited cache of files from the farm's store, shared by a host's workers."""

    def __init__(self, folder: Path, most_bytes: int = _MAX_BYTES) -> None:
        self._folder = folder
        self._most = most_bytes

    def lay_out(self, spec: JobSpec, folder: Path, client: FarmClient) -> None:
        """Copy a job's files to the job directory."""
        fetched = False
        for name, digest in spec.files.items():
            target = resolve_inside(folder, name)
            try:
                fetched = self._put_file(digest, target, client) or fetched
            except (FileExistsError, NotADirectoryError, IsADirectoryError, ValueError) as error:
                raise UsageError(f"cannot create the job's file {name!r}: {error}") from error
        if fetched:
            self.evict_files()

    def fetch(self, digest: str, target: Path, client: FarmClient) -> None:
        """Copy a file of the farm's store. Raises FarmError if the store does not have the file."""
        if self._put_file(digest, target, client):
            self.evict_files()

    def _put_file(self, digest: str, target: Path, client: FarmClient) -> bool:
        """Copy a file. Returns True if the file was downloaded."""
        target.parent.mkdir(parents=True, exist_ok=True)
        kept = self._folder / check(digest).replace(":", "-")
        for number in range(_TRIES):
            try:
                copy_file(kept, target)
                # After a power failure, the cached file may be incomplete.
                if digest_file(target, get_algorithm(digest)) == digest:
                    os.utime(kept)
                    return number > 0
            except FileNotFoundError:
                pass  # not cached, or evicted by a concurrent worker
            client.download(digest, kept)
        raise FarmError(f"not enough space for {digest} on the board's host", hint=f"see {self._folder}")

    def evict_files(self) -> None:
        """Evict the least recently used files above the size limit."""
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


def upload_folder(folder: Path, client: FarmClient) -> dict[str, str]:
    """Upload all files of a directory. Returns path below the directory -> digest."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    paths = {str(path.relative_to(folder)): path for path in found}
    digests = {name: digest_file(path) for name, path in paths.items()}
    client.upload({digest: paths[name] for name, digest in digests.items()})
    return digests
