"""Files of jobs on a host: fetched once from the farm's store, kept while there is room, laid out for each job."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hil.controller.farm.client import FarmClient
from hil.controller.farm.packing import inside
from hil.controller.farm.words import Spec
from hil.core.digest import algorithm_of, check, digest_file
from hil.errors import FarmError, UsageError

_MOST_BYTES = 8 << 30
_TRIES = 3


class Files:
    """What a host fetched from the farm's store; its workers share it.

    Args:
        folder: where.
        most_bytes: those that were used least lately go when there are more.
    """

    def __init__(self, folder: Path, most_bytes: int = _MOST_BYTES) -> None:
        self._folder = folder
        self._most = most_bytes

    def lay_out(self, spec: Spec, folder: Path, client: FarmClient) -> None:
        """Put a job's files into its folder.

        Raises:
            FarmError: the store lacks one.
            UsageError: a path leads elsewhere, or a digest is none.
        """
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
