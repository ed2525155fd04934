"""Read and repair files with one result per line. Results are appended, so a killed process loses no earlier result.

After a kill or on a full disk, the last line may be incomplete. Readers ignore such a line. A writer removes it before
the next line.
"""

from __future__ import annotations

import os
from pathlib import Path

from hil.core.files import MAX_FILE_BYTES, read_file


def read_lines(path: Path, most: int = MAX_FILE_BYTES) -> list[bytes]:
    """Return the complete lines without line feeds; [] if the file is missing. Raises OSError and UsageError."""
    return read_file(path, most).split(b"\n")[:-1] if path.exists() else []


def remove_incomplete_line(path: Path, most: int = MAX_FILE_BYTES) -> None:
    """Remove the part of a file after the last line feed. Raises OSError and UsageError."""
    if path.exists() and (half := read_file(path, most).rpartition(b"\n")[2]):
        os.truncate(path, path.stat().st_size - len(half))
