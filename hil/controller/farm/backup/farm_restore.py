"""Restore a farm from a backup.

The whole archive is verified first. A restored embedded database replaces the old one only when it is complete, and a
database on a server changes in a single transaction. Files of the store have their digest as name, so existing files
stay valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import filelock
import psycopg

from hil.controller.farm.backup.archive import DATABASE, iter_entries, verify_archive
from hil.controller.farm.backup.farm_backup import HISTORY, SETTINGS, FarmPlace, connect_database
from hil.controller.farm.backup.postgres_tools import restore_database
from hil.controller.farm.database.database import Database, list_shipped_schemas, migrate
from hil.controller.farm.database.embedded_database import EmbeddedDatabase
from hil.controller.farm.gateway.artifacts import ArtifactStore
from hil.controller.farm.leasing import boards
from hil.controller.farm.leasing.lease_queue import LeaseQueue
from hil.controller.farm.local.local_farm import DATABASE as DATABASE_FOLDER
from hil.controller.farm.local.local_farm import LOCK, prepare_home
from hil.controller.farm.paths import is_there
from hil.controller.farm.settings import FarmSettings
from hil.controller.records.lab.farm_backup import BackupManifest
from hil.core.files import digest_file, open_file, resolve_within
from hil.core.scratch import remove_tree
from hil.core.storage_errors import convert_os_errors
from hil.core.text import TextSink
from hil.errors import FarmError, UnreadableFile, UsageError

# A gateway writes a heartbeat every five seconds.
_ACTIVE = "select name from hil.gateways where seen_at > clock_timestamp() - interval '20 s' order by name limit 1"
# `hil farm up` creates the first token.
_CONTENT = """
    select (select count(*) from hil.submissions) as submissions, (select count(*) from hil.boards) as boards,
        (select count(*) from hil.tokens where note <> 'hil farm up') as tokens
"""
# Gateways of the backup no longer run. Clients and hosts may know jobs, leases and events from after the backup, so do
# not use their numbers again: a client would show the result of another job, and a host ignores leases that it had.
_NUMBERED = ("submissions", "leases", "logs", "events", "reservations")
_SKIPPED_NUMBERS = 100_000
_AFTER = "delete from hil.gateways;\n" + "".join(
    f"select setval(name::regclass, nextval(name::regclass) + {_SKIPPED_NUMBERS})"
    f" from pg_get_serial_sequence('hil.{table}', 'id') as name"
    f" where to_regclass('hil.{table}') is not null;\n"
    for table in _NUMBERED
)
_INTERRUPTED = "the farm was restored from a backup"
# Keep rows of the replaced farm's files, so that `hil farm gc` deletes the files.
_KEEP_ROW = "insert into hil.artifacts (digest, size) values (%s, %s) on conflict do nothing"


@dataclass(frozen=True)
class _Target:
    """Farm to replace: counts of its content, and the files (digest and size)."""

    content: dict[str, int]
    files: list[tuple[str, int]]


def restore_farm(place: FarmPlace, path: Path, say: TextSink, *, force: bool, dry_run: bool) -> BackupManifest:
    """Replace a farm by the content of a backup, and return the backup's manifest.

    Args:
        force: replace a farm that has jobs, boards or tokens.
        dry_run: only verify the backup and the target.

    Raises:
        UsageError: the file is no valid backup, or the farm is not empty.
        FarmError: the farm runs, or the database cannot be restored.
        StorageError: the home directory cannot be written.
    """
    try:
        manifest = verify_archive(path)
    except UnreadableFile:
        raise
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    _check_migrations(path, manifest)
    say(f"verified  {path}, made at {manifest.created} by hil {manifest.hil}")
    # Do not create the directory of a new farm in a dry run.
    lock = _lock_home(place.home) if is_there(place.home) or not dry_run else contextlib.nullcontext()
    with lock, convert_os_errors(f"cannot write {place.home}", "use a directory with enough space"):
        target = _inspect_target(place)
        if target.content and not force:
            has = ", ".join(f"{count} {name}" for name, count in target.content.items())
            raise UsageError(
                f"the farm in {place.home} is not empty: {has}",
                hint="back it up, then use --force to replace it; or set HIL_FARM_HOME to a new directory",
            )
        if not dry_run:
            _replace_farm(place, path, manifest, target, say)
    return manifest


def _check_migrations(path: Path, manifest: BackupManifest) -> None:
    """Raise UsageError if a newer hil made the backup."""
    known = {part.name: part.steps for part in list_shipped_schemas()}
    for part, names in manifest.migrations.items():
        if unknown := [name for name in names if name not in known.get(part, {})]:
            raise UsageError(
                f"{path} was made by a newer hil ({manifest.hil}): unknown {part} migration {unknown[-1][:80]}",
                hint="update hil: pip install --upgrade 'hil[farm]'",
            )


@contextlib.contextmanager
def _lock_home(home: Path) -> Iterator[None]:
    """Keep `hil farm up` from starting. Raises FarmError if the farm runs."""
    prepare_home(home)
    lock = filelock.FileLock(home / LOCK, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise FarmError(f"the farm in {home} is running", hint="stop it first: hil farm down") from None
    try:
        yield
    finally:
        lock.release()


def _inspect_target(place: FarmPlace) -> _Target:
    """Return the content of the existing farm. Raises FarmError if one of its gateways runs."""
    if place.url:
        return _inspect_database(place.url)
    database = place.embedded
    if not database.has_data():
        return _Target({}, [])
    with database:
        return _inspect_database(database.url)


def _inspect_database(url: str) -> _Target:
    with connect_database(url) as connection:
        [found] = connection.execute("select to_regclass('hil.migrations') is not null as has").fetchall()
        if not found["has"]:
            return _Target({}, [])
        with contextlib.suppress(psycopg.errors.UndefinedTable):  # a farm of an early release
            if running := connection.execute(_ACTIVE).fetchall():
                raise FarmError(
                    f"a gateway of the farm is running: {running[0]['name']}", hint="stop all gateways first"
                )
        [content] = connection.execute(_CONTENT).fetchall()
        files = connection.execute("select digest, size from hil.artifacts").fetchall()
        return _Target(
            {name: count for name, count in content.items() if count}, [(one["digest"], one["size"]) for one in files]
        )


def _replace_farm(place: FarmPlace, path: Path, manifest: BackupManifest, target: _Target, say: TextSink) -> None:
    """Restore the files, then the settings and the database. After an error, the old ones are in place."""
    work = place.home / f"restore-{secrets.token_hex(4)}"
    work.mkdir(mode=0o700)
    try:
        _extract(path, manifest, ArtifactStore(place.artifacts), work)
        say(f"files     {manifest.files:,} files, {manifest.bytes:,} bytes")
        if not place.url:
            with EmbeddedDatabase(work / "home" / DATABASE_FOLDER) as new:
                _load_dump(new.url, work / DATABASE, manifest, target)
                asyncio.run(_requeue_running(new.url))
        with contextlib.ExitStack() as undo:
            for name in (SETTINGS, HISTORY, DATABASE_FOLDER):
                if (work / "home" / name).exists():
                    _swap(work / "home" / name, place.home / name, work / f"old-{name}", undo)
            if place.url:
                _load_dump(place.url, work / DATABASE, manifest, target)
            undo.pop_all()
        if place.url:
            asyncio.run(_requeue_running(place.url))
        say(f"database  {manifest.jobs:,} jobs, {manifest.boards:,} boards, {manifest.tokens:,} tokens")
    finally:
        remove_tree(work)


def _extract(path: Path, manifest: BackupManifest, store: ArtifactStore, work: Path) -> None:
    """Extract the dump and the home directory's files, and add files to the store. Checks digests again."""
    with open_file(path) as file:
        for entry in iter_entries(file, path):
            if digest := entry.stored_digest:
                with store.receive(digest, entry.size) as incoming:
                    for piece in entry.pieces:
                        incoming.add(piece)
                    incoming.finish()
            elif entry.name == DATABASE:
                _write(work / DATABASE, entry.pieces)
            elif entry.home_path is not None:
                _write(_locate(work / "home", entry.home_path), entry.pieces)
    if digest_file(work / DATABASE) != manifest.dump:
        raise UsageError(f"{path} changed while hil read it", hint="retry with a file that no program writes")


def _locate(folder: Path, inside: PurePosixPath) -> Path:
    """Return the path of a file below a directory. Raises UsageError for a file that no farm has."""
    if str(inside) != SETTINGS and inside.parts[0] != HISTORY:
        raise UsageError(f"unexpected file in the backup: {str(inside)[:100]}")
    return resolve_within(folder, folder / inside)


def _write(target: Path, pieces: Iterator[bytes]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with target.open("xb") as file:
        file.writelines(pieces)


def _load_dump(url: str, dump: Path, manifest: BackupManifest, target: _Target) -> None:
    with connect_database(url) as connection:
        [server] = connection.execute("select current_setting('server_version_num')::int as number").fetchall()
        restore_database(url, server["number"], dump, _AFTER)
        with connection.transaction():
            connection.cursor().executemany(_KEEP_ROW, target.files)


async def _requeue_running(url: str) -> None:
    """Requeue the jobs that ran at the time of the backup. Boards are offline until their hosts connect.

    The farm does not repeat a command, because the command may have changed something.
    """
    await migrate(url)
    database = await Database.open(url)
    try:
        async with database.transaction() as tx:
            await boards.detach_all(tx, LeaseQueue(database), _INTERRUPTED, FarmSettings())
    finally:
        await database.close()


def _swap(new: Path, old: Path, aside: Path, undo: contextlib.ExitStack) -> None:
    """Put a new file or directory in the place of an old one, which moves aside. Add the reverse to ``undo``."""
    if old.exists():
        old.rename(aside)
        undo.callback(aside.rename, old)
    new.rename(old)
    undo.callback(old.rename, new)
