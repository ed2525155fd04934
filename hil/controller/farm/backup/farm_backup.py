"""Write a backup of a farm while jobs run.

The database's dump shows the state at one moment. Files never change after their upload, and `hil farm gc` waits, so
the files of this moment are copied afterwards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import Any

import psycopg
from psycopg.rows import dict_row

from hil.controller.farm.backup.archive import DATABASE, ArchiveWriter, DigestDiffers, name_home, name_stored
from hil.controller.farm.backup.postgres_tools import dump_database
from hil.controller.farm.database.database import BACKUP_LOCK, choose_parameters, convert_outages
from hil.controller.farm.database.embedded_database import EmbeddedDatabase
from hil.controller.farm.gateway.artifacts import ArtifactStore
from hil.controller.farm.local.local_farm import DATABASE as DATABASE_FOLDER
from hil.controller.farm.paths import is_there
from hil.controller.records.lab.farm_backup import BACKUP_FORMAT, BackupManifest
from hil.core import own_version
from hil.core.files import FileReader, replace_file
from hil.core.scratch import make_temporary_folder
from hil.core.storage_errors import convert_os_errors
from hil.core.text import TextSink
from hil.errors import FarmError, StorageError, UsageError

SETTINGS, HISTORY = "farm.toml", "history"
_PIECE = 1 << 20
_MANY_FILES = 10_000
_COUNTS = """
    select current_setting('server_version_num')::int as postgres, now() as at,
        (select count(*) from hil.jobs where kind <> 'health') as jobs,
        (select count(*) from hil.boards where not forgotten) as boards,
        (select count(*) from hil.tokens where revoked_at is null) as tokens
"""
# Patterns of pg_dump for schemas and tables of other applications in the same database.
_FOREIGN = """
    select '--exclude-schema=' || quote_ident(nspname) as option from pg_namespace
        where nspname !~ '^pg_' and nspname not in ('public', 'information_schema', 'hil', 'hil_history')
    union all
    select '--exclude-table=public.' || quote_ident(relname) from pg_class
        where relnamespace = to_regnamespace('public') and relkind in ('r', 'p', 'v', 'm', 'f', 'S')
            and relname !~ '^procrastinate_'
"""
_STORED = """
    with used as (
        select value as digest from hil.jobs, jsonb_each_text(spec -> 'files')
        union select value from hil.results, jsonb_each_text(result -> 'files')
    )
    select digest, size, exists (select from used where used.digest = artifact.digest) as used
    from hil.artifacts as artifact order by digest
"""


@dataclass(frozen=True)
class FarmPlace:
    """Place of a farm's data."""

    home: Path
    url: str  # PostgreSQL URL; "" for the embedded database in the home directory
    artifacts: str  # directory or URL of the files

    @property
    def embedded(self) -> EmbeddedDatabase:
        """The embedded database."""
        return EmbeddedDatabase(self.home / DATABASE_FOLDER)


@dataclass(frozen=True)
class FinishedBackup:
    """Backup that was written."""

    manifest: BackupManifest
    size: int  # size of the archive in bytes
    missing: list[str]  # digests of files that jobs use, but that the store lacks or has with another content


@contextlib.contextmanager
def open_database(place: FarmPlace) -> Iterator[str]:
    """Yield the URL of a farm's database. Starts the embedded server if it does not run.

    Raises UsageError if the home directory has no farm.
    """
    if place.url:
        yield place.url
        return
    database = place.embedded
    if is_there(place.home / DATABASE_FOLDER) and database.is_reachable():
        yield database.url
    elif database.has_data():
        with database:
            yield database.url
    else:
        raise UsageError(
            f"no farm in {place.home}",
            hint="set HIL_FARM_HOME to the farm's directory, or --db to the URL of its database",
        )


@contextlib.contextmanager
def connect_database(url: str) -> Iterator[psycopg.Connection[dict[str, Any]]]:
    """Yield a connection whose transactions may be idle for any time.

    Converts outages to DatabaseAway, and other errors of the database to FarmError.
    """
    with convert_outages(), _convert_database_errors():
        connection = psycopg.connect(url, autocommit=True, row_factory=dict_row, **choose_parameters(url))
        with contextlib.closing(connection):
            connection.execute("set idle_in_transaction_session_timeout = 0")
            yield connection


def write_backup(place: FarmPlace, path: Path, say: TextSink) -> FinishedBackup:
    """Write a farm's backup to a new file, atomically and readable only by the owner.

    Raises:
        UsageError: there is no farm, or the programs of PostgreSQL are too old.
        FarmError: the database cannot be dumped.
        StorageError: the file cannot be written.
    """
    as_storage_errors = convert_os_errors(f"cannot write {path}", "use a directory with enough space")
    with open_database(place) as url, connect_database(url) as connection, as_storage_errors:
        connection.execute("select pg_advisory_lock_shared(%s)", [BACKUP_LOCK])
        connection.execute("begin isolation level repeatable read read only")
        [found] = connection.execute("select to_regclass('hil.migrations') is not null as has").fetchall()
        if not found["has"]:
            raise UsageError("the database has no farm", hint="start the farm with hil farm up, or check --db")
        [snapshot] = connection.execute("select pg_export_snapshot() as id").fetchall()
        [counts] = connection.execute(_COUNTS).fetchall()
        with replace_file(path) as temporary, make_temporary_folder("hil-backup-") as scratch:
            dump = Path(scratch) / DATABASE
            excluded = [row["option"] for row in connection.execute(_FOREIGN)]
            dump_database(url, counts["postgres"], snapshot["id"], dump, excluded)
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                writer = ArchiveWriter(file)
                digest = _add_file(writer, DATABASE, dump)
                say(f"database  {dump.stat().st_size:,} bytes")
                files, size, missing = _add_stored(writer, ArtifactStore(place.artifacts), connection, say)
                _add_home(writer, place.home)
                manifest = writer.finish(
                    BackupManifest(
                        format=BACKUP_FORMAT,
                        hil=own_version(),
                        created=_format_time(counts["at"]),
                        postgres=counts["postgres"],
                        migrations=_read_migrations(connection),
                        jobs=counts["jobs"],
                        boards=counts["boards"],
                        tokens=counts["tokens"],
                        files=files,
                        bytes=size,
                        dump=digest,
                        content="",
                    )
                )
                file.flush()
                os.fsync(file.fileno())
                written = file.tell()
    return FinishedBackup(manifest, written, missing)


def _read_migrations(connection: psycopg.Connection[dict[str, Any]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in connection.execute("select part, name from hil.migrations order by part, name"):
        found.setdefault(row["part"], []).append(row["name"])
    return found


def _format_time(at: datetime) -> str:
    return at.astimezone(timezone.utc).isoformat(timespec="seconds")


def _add_stored(
    writer: ArchiveWriter, store: ArtifactStore, connection: psycopg.Connection[dict[str, Any]], say: TextSink
) -> tuple[int, int, list[str]]:
    """Add the files of the farm's store. Return their number, their size, and the digests of missing files in use."""
    count = size = 0
    missing: list[str] = []
    for row in connection.execute(_STORED):
        try:
            writer.add(name_stored(row["digest"]), row["size"], store.read(row["digest"]), row["digest"])
        except (DigestDiffers, FarmError):
            missing += [row["digest"]] * row["used"]
            continue
        count, size = count + 1, size + row["size"]
        if count % _MANY_FILES == 0:
            say(f"files     {count:,} files, {size:,} bytes")
    say(f"files     {count:,} files, {size:,} bytes")
    return count, size, missing


def _add_home(writer: ArchiveWriter, home: Path) -> None:
    """Add the settings, and the programs of the farm's history."""
    for path in (home / SETTINGS, *sorted((home / HISTORY).rglob("*"))):
        # The gateway may delete a program in the meantime.
        with contextlib.suppress(FileNotFoundError, DigestDiffers):
            if path.is_file() and not path.is_symlink():
                _add_file(writer, name_home(PurePosixPath(path.relative_to(home))), path)


def _add_file(writer: ArchiveWriter, name: str, path: Path) -> str:
    with FileReader(path) as reader:
        starts = range(0, reader.size, _PIECE)
        pieces = (bytes(reader.read(start, min(_PIECE, reader.size - start))) for start in starts)
        return writer.add(name, reader.size, pieces)


@contextlib.contextmanager
def _convert_database_errors() -> Iterator[None]:
    try:
        yield
    except psycopg.Error as error:
        if isinstance(error, psycopg.OperationalError):
            raise
        raise FarmError(f"the database cannot be read: {str(error).strip()}") from error


def check_target(path: Path, *, force: bool) -> None:
    """Raise UsageError unless a backup may be written to a path."""
    if not path.parent.is_dir():
        raise StorageError(f"{path.parent} is not a directory", hint="create the directory first")
    if path.is_dir() or (path.exists() and not path.is_file()):
        raise UsageError(f"{path} is not a regular file", hint="specify a new file: hil farm backup farm.tar")
    if path.exists() and not force:
        raise UsageError(f"{path} already exists", hint="specify a new file, or use --force to replace it")
