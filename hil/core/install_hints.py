"""Commands that install the extras of hil, for hints."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def make_install_command(extra: str, root: Path = _ROOT) -> str:
    """Return the command that installs an extra: from the checkout of hil, or from an index or wheel.

    Args:
        root: directory that contains the package ``hil``.
    """
    if not (root / "pyproject.toml").is_file():
        return f"pip install 'hil[{extra}]'"
    constraints = shlex.quote(str(root / "constraints.txt"))
    return f"{shlex.quote(sys.executable)} -m pip install -c {constraints} -e {shlex.quote(f'{root}[{extra}]')}"
