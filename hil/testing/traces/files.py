"""Files that another process may read or write at the same time, as pytest's parallel workers do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hil.controller.storage.runs import storing


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that whoever opens it finds the old or the new one, and never half of it.

    Raises:
        StorageError: it cannot be written.
    """
    with storing(path, ""):
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        part = Path(name)
        try:
            with os.fdopen(number, "wb") as file:
                file.write(data)
            part.chmod(0o644)
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
