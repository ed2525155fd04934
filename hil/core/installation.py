"""The installed package: its version, and the command that runs one of its modules in another process."""

from __future__ import annotations

import functools
import sys
from importlib.metadata import PackageNotFoundError, version

# For Python 3.10, which has no -P, and imports what runs a module with the working directory on the path already.
_START = (
    "import sys; sys.path.remove(''); import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *words: str) -> list[str]:
    """``python -m MODULE WORDS``, which takes no module from the folder that it is called in.

    Args:
        module: of an installed package.
        words: its arguments.
    """
    start = ["-P", "-m"] if sys.version_info >= (3, 11) else ["-c", _START]
    return [sys.executable, *start, module, *words]


@functools.cache
def own_version() -> str:
    """The version of hil as the installed package states it; ``0+source`` where none is installed."""
    try:
        return version("hil")
    except PackageNotFoundError:
        return "0+source"
