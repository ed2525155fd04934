"""Redirect files of other tools to hil's cache.

Without the redirection, these tools write to the user's home directory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from hil.controller.storage.cache import choose_default_root

_MATPLOTLIB = "MPLCONFIGDIR"
# Variable -> directory of the tool in hil's cache.
_DIRECTORIES = {_MATPLOTLIB: "matplotlib", "ZIG_GLOBAL_CACHE_DIR": "zig", "KERAS_HOME": "keras"}
# Variable -> the user's settings file of the tool. If this file exists, hil does not set the variable.
_SETTINGS = {"KERAS_HOME": ".keras/keras.json"}


def make_tool_environment() -> dict[str, str]:
    """Return the environment variables for processes of these tools, except variables that the user configured."""
    root = choose_default_root().absolute()
    return {
        variable: str(root / name)
        for variable, name in _DIRECTORIES.items()
        if not os.environ.get(variable) and not _has_settings(variable)
    }


@contextlib.contextmanager
def set_matplotlib_directory() -> Iterator[None]:
    """Set matplotlib's directory during its import.

    matplotlib remembers the directory, and other processes do not inherit it.
    """
    directory = make_tool_environment().get(_MATPLOTLIB)
    if directory is None:
        yield
        return
    os.environ[_MATPLOTLIB] = directory
    try:
        yield
    finally:
        del os.environ[_MATPLOTLIB]


def _has_settings(variable: str) -> bool:
    with contextlib.suppress(RuntimeError, OSError):  # without a home directory
        return variable in _SETTINGS and (Path.home() / _SETTINGS[variable]).exists()
    return False
