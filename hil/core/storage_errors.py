"""Report errors from a failing directory as StorageError."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from hil.core.disk_faults import FULL
from hil.errors import StorageError, UnreadableFile

_FULL = FULL | {errno.EROFS}
# Errors from a file descriptor have no file name.
_FAILING = {errno.EIO, errno.ESTALE}


@contextlib.contextmanager
def convert_os_errors(text: str, hint: str, *, stage: str = "", only_below: Path | None = None) -> Iterator[None]:
    """Raise StorageError for an OSError.

    Args:
        text: failed operation for the message: ``cannot write to PLACE``.
        hint: suggested fix.
        only_below: for a block that also runs other code. Convert only errors from a full or failing disk, and
            errors that name a file below this directory.

    Raises:
        StorageError: a file operation failed.
    """
    try:
        yield
    except UnreadableFile:
        raise
    except OSError as error:
        if only_below is not None and not _is_of(error, only_below):
            raise
        raise StorageError(f"{text}: {error.strerror or error}", stage=stage, hint=hint) from error


def make_full_disk_error(error: BaseException | None) -> StorageError | None:
    """Return the StorageError for an error from a full or read-only disk, or None for any other error."""
    if not isinstance(error, OSError) or error.errno not in _FULL:
        return None
    place = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else "a file"
    return StorageError(
        f"cannot write {place}: {error.strerror or error}",
        hint="free disk space, or set HIL_CACHE_DIR and TMPDIR to writable directories on a different disk",
    )


def _is_of(error: OSError, place: Path) -> bool:
    """Return True if the directory itself causes the error. A missing file in an existing directory returns False."""
    if error.errno in _FULL:
        return True
    if error.errno == errno.ENOENT and place.is_dir():
        return False
    names = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, (str, bytes))]
    return any(Path(name).is_relative_to(place) for name in names) if names else error.errno in _FAILING
