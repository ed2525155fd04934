"""Map an OSError to a board's disk problem, with a hint."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path

from hil.errors import BoardUnfit

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FAILING = frozenset({errno.EIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.EUCLEAN, errno.EBADMSG})
_DENIED = frozenset({errno.EACCES, errno.EPERM})
FAULTS = FULL | _FAILING | {errno.EROFS}
"""Errors that any file on a disk may cause, regardless of name and permissions."""


def make_disk_error(error: OSError, folder: Path, *, is_here: bool = True) -> BoardUnfit:
    """Return the error for a board that cannot use a directory for hil's data.

    Args:
        folder: hil's directory, or a file in it.
        is_here: True if this machine is the board, so that its disk can be checked.
    """
    reason, hint = _explain(error, is_here and _is_out_of_inodes(folder))
    return BoardUnfit(f"the board cannot use {folder}: {reason}", hint=hint)


def _explain(error: OSError, lacks_inodes: bool) -> tuple[str, str]:
    """Return the cause and a hint."""
    if error.errno == errno.EDQUOT:
        return "disk quota exceeded", "raise the quota of hil's user on the board, or remove files"
    if error.errno == errno.ENOSPC:
        what = "has no free inodes" if lacks_inodes else "is full"
        return f"the disk {what}", "remove files on the board, or use a directory on a different disk"
    if error.errno == errno.EROFS:
        hint = "check `dmesg` on the board: Linux makes a failing disk read-only; repair or replace it, then remount it"
        return "the file system is read-only", hint
    if error.errno in _FAILING:
        return f"disk error ({error.strerror})", "check `dmesg` on the board; repair or replace the disk"
    if error.errno in _DENIED:
        return (
            error.strerror or "permission denied",
            "grant hil's user on the board write permission for this directory",
        )
    return error.strerror or str(error), "check that the directory on the board is writable"


def _is_out_of_inodes(folder: Path) -> bool:
    try:
        found = os.statvfs(folder if folder.is_dir() else folder.parent)
    except OSError:
        return False
    return bool(found.f_files and not found.f_favail)


def find_noexec_folder(folders: Iterable[str]) -> str:
    """Return the first directory on a noexec file system; "" if all allow execution."""
    for folder in folders:
        with contextlib.suppress(OSError):
            if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
                return folder
    return ""


def make_noexec_error(folder: str) -> BoardUnfit:
    """Return the error for a board that cannot run programs from hil's directory."""
    return BoardUnfit(
        f"the board cannot run programs from {folder}: the file system is mounted noexec",
        hint="remount the file system with exec, or set a different directory: [connection] folder in the config",
    )
