"""Return directories of virtual boards: the lab's state, and the cache for packages and root file systems."""

from __future__ import annotations

import os
from pathlib import Path

from hil.errors import StorageError


def state_folder() -> Path:
    """Return the lab's directory.

    This is ``$HIL_VIRTUAL_LAB``, or a subdirectory of ``$XDG_RUNTIME_DIR`` or of the user's state directory.
    """
    if chosen := os.environ.get("HIL_VIRTUAL_LAB"):
        return Path(chosen).absolute()
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "hil" / "virtual-lab"
    import platformdirs

    return Path(platformdirs.user_state_dir("hil", appauthor=False)) / "virtual-lab"


def cache_folder() -> Path:
    """Return the cache that all labs of a user share: ``hil/virtual-board`` in the user's cache directory."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("hil", appauthor=False)) / "virtual-board"


def make_private(folder: Path) -> Path:
    """Create a directory that only the user can read, unless it exists. Return the path.

    Raises:
        StorageError: the directory cannot be created.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot create the directory {folder}: {error.strerror}") from None
    return folder
