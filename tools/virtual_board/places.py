"""Where virtual boards keep what they need: the lab's state, and the cache of packages and root file systems."""

from __future__ import annotations

import os
from pathlib import Path

from hil.errors import StorageError


def state_folder() -> Path:
    """The lab's folder: ``$HIL_VIRTUAL_LAB``, or else one below ``$XDG_RUNTIME_DIR`` or the user's state folder."""
    if chosen := os.environ.get("HIL_VIRTUAL_LAB"):
        return Path(chosen).absolute()
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "hil" / "virtual-lab"
    import platformdirs

    return Path(platformdirs.user_state_dir("hil", appauthor=False)) / "virtual-lab"


def cache_folder() -> Path:
    """The cache that all labs of a user share: ``hil/virtual-board`` in the user's cache folder."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("hil", appauthor=False)) / "virtual-board"


def made(folder: Path) -> Path:
    """The folder, made if it is not there, for nobody else to read.

    Raises:
        StorageError: it cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"cannot make the folder {folder}: {error.strerror}") from None
    return folder
