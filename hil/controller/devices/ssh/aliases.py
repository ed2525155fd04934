"""Host names in the user's ssh config."""

from __future__ import annotations

import glob
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from hil.core.files import read_text
from hil.errors import HilError

# Maximum depth of Include, as in ssh.
_DEEPEST = 16
_WILDCARDS = set("*?!")
_LINE = re.compile(r"\s*(?P<keyword>host|include)(?:\s*=\s*|\s+)(?P<words>.*)", re.IGNORECASE)


def list_aliases() -> list[str]:
    """Return the names in ``Host`` lines of ``~/.ssh/config`` and the included files, without patterns.

    Unreadable files and invalid lines have no names: ssh reports them.
    """
    try:
        folder = Path.home() / ".ssh"
    except RuntimeError:  # no home directory
        return []
    names = _iter_names(folder / "config", folder, 0)
    # Names that begin with a dash would be options of ssh.
    return list(dict.fromkeys(name for name in names if not _WILDCARDS & set(name) and not name.startswith("-")))


def _iter_names(path: Path, folder: Path, depth: int) -> Iterator[str]:
    """Yield the words of ``Host`` lines. Relative paths in ``Include`` are relative to ``folder``."""
    try:
        lines = read_text(path, errors="replace").splitlines()
    except (OSError, HilError):
        return
    for line in lines:
        if not (found := _LINE.match(line)):
            continue
        try:
            words = shlex.split(found["words"], comments=True)
        except ValueError:
            continue
        if found["keyword"].lower() == "host":
            yield from words
        elif depth < _DEEPEST:
            for word in words:
                pattern = str(folder / os.path.expanduser(word))  # noqa: PTH111 (the user may not exist)
                for name in sorted(glob.glob(pattern)):  # noqa: PTH207 (absolute patterns)
                    yield from _iter_names(Path(name), folder, depth + 1)
