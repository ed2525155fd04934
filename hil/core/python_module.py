"""The command that runs a Python module in a process of its own, with nothing of the working directory on its path."""

from __future__ import annotations

import sys

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
