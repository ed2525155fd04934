"""The text of a file of expected failures, entry by entry, so that one can change while all around stays to the letter.

A TOML library would do for the whole file, but takes the comment above an entry for the end of the entry before.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hil.controller.workloads.suites.expected_file import Expectation, parse
from hil.errors import UsageError

if TYPE_CHECKING:
    from tomlkit.items import Array, Table

_HEADER = re.compile(r"\s*\[\[\s*(\w+)\s*\]\]")
_WIDEST = 100  # of a list in one line


@dataclass(frozen=True)
class Block:
    """An entry's text.

    Attributes:
        table: ``compile`` or ``run``.
        body: the comment right above it, its header and its keys.
        tail: blank lines and comments that follow, up to the next block.
        new: whether it was not in the file, so that empty lines are to set it off.
    """

    table: str
    body: str
    tail: str = ""
    new: bool = False


def split(text: str, path: Path) -> tuple[str, list[Block]]:
    """What stands before the first entry, and the entries in the file's order. Put together again they are the text.

    Raises:
        UsageError: entries are written in another way than under headers of their own.
    """
    lines = text.splitlines(keepends=True)
    headers = [(number, found[1]) for number, line in enumerate(lines) if (found := _HEADER.match(line))]
    starts = [_with_comment(lines, number) for number, _ in headers]
    blocks = []
    for start, stop, (_, table) in zip(starts, [*starts[1:], len(lines)][: len(starts)], headers, strict=True):
        end = stop
        while not lines[end - 1].strip() or lines[end - 1].lstrip().startswith("#"):
            end -= 1
        blocks.append(Block(table, "".join(lines[start:end]), "".join(lines[end:stop])))
    _check(text, path, blocks)
    return "".join(lines[: starts[0]] if starts else lines), blocks


def _with_comment(lines: Sequence[str], number: int) -> int:
    while number and lines[number - 1].lstrip().startswith("#"):
        number -= 1
    return number


def _check(text: str, path: Path, blocks: Sequence[Block]) -> None:
    """A header may stand in a text of several lines, and entries may be inline tables: then no line tells them."""
    try:
        apart = [entry for block in blocks for entry in parse(block.body, path)]
    except UsageError:
        apart = []
    numbered = [replace(entry, number=0) for entry in parse(text, path)]
    if [replace(entry, number=0) for entry in sorted(apart, key=lambda entry: entry.table)] != numbered:
        raise UsageError(
            f"{path} is written in a way that cannot be rewritten",
            hint="begin each entry with a line of its own, [[compile]] or [[run]], and let no text look like one",
        )


def join(head: str, blocks: Sequence[Block]) -> str:
    """The text of a file."""
    text, last_new = head, False
    for block in blocks:
        if text and not text.endswith("\n"):
            text += "\n"
        if text and not text.endswith("\n\n") and (block.new or last_new):
            text += "\n"
        text, last_new = text + block.body + block.tail, block.new
    return f"{text.rstrip()}\n" if text.strip() else ""


def edited(block: Block, entry: Expectation) -> Block:
    """A block with an entry's cases and exceptions in place of its own; whatever else it holds stays."""
    import tomlkit

    document = tomlkit.parse(block.body)
    row = document[block.table][0]
    _set(row, "cases", entry.cases)
    _set(row, "except", entry.without)
    return replace(block, body=tomlkit.dumps(document))


def new_block(entry: Expectation) -> Block:
    """A block for an entry."""
    import tomlkit

    row = tomlkit.table()
    _set(row, "cases", entry.cases)
    _set(row, "except", entry.without)
    for key, value in (("outcome", entry.outcomes), ("reason", (entry.reason,)), ("flow", entry.flow)):
        row.add(key, value[0] if len(value) == 1 else list(value))
    if entry.board:
        row.add("board", entry.board[0])
    tables = tomlkit.aot()
    tables.append(row)
    document = tomlkit.document()
    document.add(entry.table, tables)
    return Block(entry.table, tomlkit.dumps(document), new=True)


def _set(row: Table, key: str, wanted: Sequence[str]) -> None:
    import tomlkit
    from tomlkit.items import Array

    if not wanted:
        row.pop(key, None)
        return
    there = row.get(key)
    if isinstance(there, Array):
        _change(there, wanted)
    elif wanted == ([there] if there else ()):
        return
    else:
        there = row[key] = tomlkit.item(wanted[0] if len(wanted) == 1 else list(wanted))
    if isinstance(there, Array) and "\n" not in there.as_string() and len(there.as_string()) + len(key) > _WIDEST:
        there.multiline(True)


def _change(there: Array, wanted: Sequence[str]) -> None:
    """One by one, so that the comments beside the others stay."""
    for one in [one for one in there if one not in wanted]:
        there.remove(one)
    for place, one in enumerate(wanted):
        if place == len(there) or there[place] != one:
            there.insert(place, one)
