"""`hil cache`: list and clean the cache of compiled programs and reference results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from hil.controller.cli.commands import group
from hil.controller.cli.options import json_option
from hil.controller.cli.screen import answer

_SHOWN = 20


@group(epilog="Example: hil cache gc --max-mb 500")
def cache() -> None:
    """List and clean the cache of compiled programs and reference results."""


@cache.command(epilog="Example: hil cache ls --all")
@click.option("--all", "every", is_flag=True, help="List all entries, not only the most recently used.")
@json_option
def ls(every: bool, as_json: bool) -> None:
    """List the entries, most recently used first, and the total of each kind."""
    from hil.controller.storage.cache import Cache

    held = Cache()
    entries = held.ls()
    if as_json:
        from hil.controller.records.commands.stored import CacheEntry, CacheList

        found = [CacheEntry(**{**vars(entry), "path": str(entry.path), "kind": entry.kind}) for entry in entries]
        answer(True, CacheList(root=str(held.root), entries=found))
        return
    shown = entries if every else entries[:_SHOWN]
    for entry in shown:
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.last_used))
        key = entry.key[len(entry.kind) + 1 :][:8]
        click.echo(f"{entry.kind:12} {key}  {entry.size:>13,} bytes  {used}  {_describe_entry(entry.meta)}".rstrip())
    if len(shown) < len(entries):
        click.echo(f"... {_count(len(entries) - len(shown))} more: hil cache ls --all")
    kinds: dict[str, list[int]] = {}
    for entry in entries:
        kinds.setdefault(entry.kind, []).append(entry.size)
    for kind, sizes in sorted(kinds.items(), key=lambda pair: -sum(pair[1])):
        click.echo(f"{kind:12} {_count(len(sizes))}, {sum(sizes):,} bytes")
    click.echo(f"{_count(len(entries))}, {sum(entry.size for entry in entries):,} bytes in {held.root}")


def _describe_entry(meta: Mapping[str, Any]) -> str:
    """Describe an entry: the model, then other short values."""
    notes = [value for name, value in meta.items() if name != "model" and isinstance(value, str) and value]
    return "  ".join([*([str(meta["model"])] if meta.get("model") else []), ", ".join(notes)]).strip()


@cache.command(epilog="Example: hil cache gc --max-mb 500 --older-than 30")
@click.option(
    "--max-mb", type=click.IntRange(min=0), help="Delete least recently used entries until the cache is this small."
)
@click.option("--older-than", type=float, metavar="DAYS", help="Delete entries not used for this many days.")
@json_option
def gc(max_mb: int | None, older_than: float | None, as_json: bool) -> None:
    """Delete cache entries; without options, delete all entries. Entries in use by running commands stay."""
    from hil.controller.records.commands.stored import DeletedEntries
    from hil.controller.storage.cache import Cache

    limit = 0 if max_mb is None and older_than is None else None if max_mb is None else max_mb << 20
    age = None if older_than is None else older_than * 86400
    held = Cache()
    gone = held.gc(max_bytes=limit, max_age=age)
    freed = sum(entry.size for entry in gone)
    in_use = held.list_in_use() & {entry.key for entry in held.ls()}
    answer(
        as_json,
        DeletedEntries(dropped=[entry.key for entry in gone], freed_bytes=freed),
        f"deleted {_count(len(gone))}, {freed:,} bytes",
        *([f"in use by running commands, not deleted: {_count(len(in_use))}"] if in_use else ()),
    )


def _count(number: int) -> str:
    return f"{number} entr{'y' if number == 1 else 'ies'}"
