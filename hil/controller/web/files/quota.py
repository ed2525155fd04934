"""Count the disk space for files before they are written, including the space for their index entries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Free space to leave on a disk.
LEAVE_FREE = 1 << 30
# ext4 has one inode per 16 KiB. Each file or directory counts at least that, so the limit on bytes also limits the
# number of inodes.
INODE_BYTES = 16 << 10
LEAVE_INODES = LEAVE_FREE // INODE_BYTES
# Space for a name in a session: the directory entry, and the index entries for a session or profile with this name.
NAME_BYTES = 4 << 10
# The index needs up to 7.7 bytes per byte of a record (measured), and a row for each change of a case.
INDEX_FACTOR = 12
_RECORDS = (".json", ".jsonl")
_BLOCK = 4096


def count_bytes(size: int) -> int:
    """Return the counted bytes of a file or directory: blocks and inode."""
    return max(INODE_BYTES, -(-size // _BLOCK) * _BLOCK)


def count_name_bytes(name: str, size: int) -> int:
    """Return the counted bytes of a file name: the directory entry, and the index entries for a record."""
    return NAME_BYTES + (INDEX_FACTOR * size if name.endswith(_RECORDS) else 0)


def count_tree(folder: Path, own: str) -> int:
    """Return the counted bytes of a directory tree. Hard links to the same file count once.

    Args:
        own: internal subdirectory. The subdirectory has no sessions, so names in the subdirectory do not count.
    """
    total, seen = 0, set[int]()
    for entry, is_own in _walk_entries(folder, own):
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:  # deleted in the meantime
            continue
        is_folder = entry.is_dir(follow_symlinks=False)
        if not is_own:
            total += count_name_bytes(entry.name, 0 if is_folder else found.st_size)
        if found.st_nlink > 1 and not is_folder:
            if found.st_ino in seen:
                continue
            seen.add(found.st_ino)
        total += max(count_bytes(found.st_size), found.st_blocks * 512)
    return total


def _walk_entries(folder: Path, own: str) -> Iterator[tuple[os.DirEntry[str], bool]]:
    waiting = [(str(folder), False)]
    while waiting:
        place, is_own = waiting.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    inner = is_own or (place == str(folder) and entry.name == own)
                    yield entry, inner
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, inner))
        except OSError:  # deleted in the meantime
            continue


def has_room(place: Path, more: int) -> bool:
    """Return True if a disk has room for ``more`` counted bytes and still keeps :data:`LEAVE_FREE`.

    Args:
        place: a directory on the disk, which need not exist yet.
    """
    while not place.exists() and place != place.parent:
        place = place.parent
    found = os.statvfs(place)
    # Some file systems allocate inodes on demand and report 0.
    inodes = found.f_favail if found.f_files else LEAVE_INODES + more
    free = found.f_bavail * found.f_frsize
    return free >= LEAVE_FREE + more and inodes >= LEAVE_INODES + more // INODE_BYTES
