"""Test that the table of added flags in docs/compiling.md equals the flags in the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
# All packages that make programs or compute answers. Profilers only inspect them.
ROOMS = ("agent", "core", "formats", "controller/backends", "controller/models", "controller/analysis/layers")
FLAG = re.compile(r"(?:--(?:iree|mlir|dump|xla|run-reproducer|compile-to)[\w-]*|session\.\w+$)")
# Flags that hints and messages mention, or that hil looks for.
NOT_ADDED = {"--iree-opt-level", "--iree-input-demote-i64-to-i32"}


def flags_in_code() -> Iterator[str]:
    for room in ROOMS:
        for file in (ROOT / "hil" / room).rglob("*.py"):
            texts = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
            words = (word for text in texts if isinstance(text, str) for word in text.split())
            yield from (match[0] for word in words if (match := FLAG.match(word)))


def flags_in_docs() -> Iterator[str]:
    section = (ROOT / "docs/compiling.md").read_text().split("### Flags that hil adds\n")[1].split("\n#")[0]
    for row in (line for line in section.splitlines() if line.startswith("| ")):
        yield from (match[0] for name in re.findall(r"`([^`]+)`", row.split("|")[2]) if (match := FLAG.match(name)))


def test_docs_list_every_flag_added_by_hil() -> None:
    in_docs, in_code = set(flags_in_docs()), set(flags_in_code()) - NOT_ADDED
    assert in_code - in_docs == set()
    assert in_docs - in_code == set()
