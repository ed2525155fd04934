"""Syntax trees of hil's modules, for tests of the code itself."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

HIL = Path(__file__).parents[2] / "hil"


def iter_trees(pattern: str, more: Iterable[Path] = ()) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path below hil/ and the tree of each module that contains a regular expression.

    Parsing all modules takes several seconds, so a test parses only those that it can find something in.

    Args:
        more: further files, which are named by their file name.
    """
    wanted = re.compile(pattern)
    files = [(path.relative_to(HIL).as_posix(), path) for path in sorted(HIL.rglob("*.py"))]
    for name, path in (*files, *((path.name, path) for path in more)):
        text = path.read_text("utf-8")
        if wanted.search(text):
            yield name, parse_source(text)


def parse_source(text: str) -> ast.Module:
    """Parse a module. The garbage collector is paused, because it takes half of the time for thousands of nodes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(text)
    finally:
        if was_enabled:
            gc.enable()
