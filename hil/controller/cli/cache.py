"""`hil cache`: compiled programs and reference results."""

from __future__ import annotations

import time
from dataclasses import asdict

import click

from hil.controller.cli.options import json_option


@click.group(epilog="Example: hil cache gc --max-mb 500")
def cache() -> None:
    """List and clean the cache of compiled programs and reference results."""


@cache.command(epilog="Example: hil cache ls --json")
@json_option
def ls(as_json: bool) -> None:
    """List the entries, the one used last first."""
    from hil.controller.cache import Cache
    from hil.controller.cli.screen import print_json

    held = Cache()
    entries = held.ls()
    if as_json:
        rows = [{**asdict(entry), "kind": entry.kind} for entry in entries]
        print_json({"schema": 1, "root": str(held.root), "entries": rows})
        return
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.last_used))
        model = entry.meta.get("model", "")
        click.echo(f"{entry.kind:10} {entry.key[len(entry.kind) + 1 :][:8]}  {entry.size:>13,} bytes  {used}  {model}")
    click.echo(f"{_count(len(entries))}, {sum(entry.size for entry in entries):,} bytes in {held.root}")


@cache.command(epilog="Example: hil cache gc --max-mb 500 --older-than 30")
@click.option("--max-mb", type=click.IntRange(min=0), help="Drop the least recently used until so much is left.")
@click.option("--older-than", type=float, metavar="DAYS", help="Drop what was not used for so long.")
@json_option
def gc(max_mb: int | None, older_than: float | None, as_json: bool) -> None:
    """Drop entries; without options everything. What a run that is under way uses stays."""
    from hil.controller.cache import Cache
    from hil.controller.cli.screen import print_json

    limit = 0 if max_mb is None and older_than is None else None if max_mb is None else max_mb << 20
    age = None if older_than is None else older_than * 86400
    held = Cache()
    gone = held.gc(max_bytes=limit, max_age=age)
    freed = sum(entry.size for entry in gone)
    if as_json:
        print_json({"schema": 1, "dropped": [entry.key for entry in gone], "freed_bytes": freed})
    else:
        click.echo(f"dropped {_count(len(gone))}, {freed:,} bytes")
        if in_use := held.in_use() & {entry.key for entry in held.ls()}:
            click.echo(f"kept what runs that are under way use: {_count(len(in_use))}")


def _count(number: int) -> str:
    return f"{number} entr{'y' if number == 1 else 'ies'}"
