"""Dump and restore a database with PostgreSQL's programs.

The programs must be at least as new as the server. hil prefers those of the embedded server.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from psycopg.conninfo import conninfo_to_dict

from hil.controller.farm.database.embedded_database import find_binaries
from hil.core.install_hints import make_install_command
from hil.core.scratch import make_temporary_folder
from hil.errors import FarmError, UsageError

_SYSTEM = Path("/usr/lib/postgresql")
_DETAIL_LINES = 8
_SERVICE = "hil_farm"
# Line of `pg_restore --list` for an object of a farm: `DUMP-ID; OID OID KIND SCHEMA NAME OWNER`.
_FARM_ENTRY = re.compile(
    rb"\d+; \d+ \d+ [A-Z][A-Z ]* (?:hil |hil_history |- (?:SCHEMA )?(?:hil|hil_history) "
    rb"|public (?:[A-Z][A-Z ]* )?procrastinate_)"
)
# Releases of PostgreSQL before this one do not have the setting.
_TIMEOUT_SETTING, _TIMEOUT_SINCE = b"SET transaction_timeout", 170000
# Remove the tables of a farm, of its history and of procrastinate. The restored dump creates them again, in the same
# transaction.
_CLEAR = """
set client_min_messages = warning;
drop schema if exists hil cascade;
drop schema if exists hil_history cascade;
do $clear$
declare statement text;
begin
    for statement in
        select format('drop table if exists public.%I cascade', relname) from pg_class
            where relnamespace = 'public'::regnamespace and relkind in ('r', 'p') and relname ~ '^procrastinate_'
        union all
        select format('drop function if exists %s cascade', oid::regprocedure) from pg_proc
            where pronamespace = 'public'::regnamespace and proname ~ '^procrastinate_'
        union all
        select format('drop type if exists public.%I cascade', typname) from pg_type
            where typnamespace = 'public'::regnamespace and typname ~ '^procrastinate_'
                and (typtype = 'e' or exists (select from pg_class where oid = typrelid and relkind = 'c'))
    loop
        execute statement;
    end loop;
end
$clear$;
"""


def find_programs(server: int) -> Path:
    """Return a directory with pg_dump, pg_restore and psql for a server version, such as 180000.

    Raises UsageError if all installed programs are older than the server.
    """
    found: list[str] = []
    for folder in _list_candidates():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            asked = subprocess.run(
                [folder / "pg_dump", "--version"], capture_output=True, text=True, check=True, timeout=30
            )
            version = re.search(r"(\d+)(\.\d+)*", asked.stdout)
            if version and int(version[1]) >= server // 10000:
                return folder
            found += [version[1]] if version else []
    have = f"; found {', '.join(found)}" if found else ""
    raise UsageError(
        f"missing pg_dump of PostgreSQL {server // 10000} or newer{have}",
        hint=f"{make_install_command('farm')}, or install postgresql-client-{server // 10000}",
    )


def _list_candidates() -> list[Path]:
    folders = []
    with contextlib.suppress(UsageError):
        folders.append(find_binaries())
    folders += sorted(_SYSTEM.glob("*/bin"), key=lambda one: one.parent.name.zfill(4), reverse=True)
    if on_path := shutil.which("pg_dump"):
        folders.append(Path(on_path).parent)
    return folders


def dump_database(url: str, server: int, snapshot: str, target: Path, excluded: Sequence[str] = ()) -> None:
    """Write a database's dump to a file.

    Args:
        snapshot: exported snapshot of an open transaction, which determines the content.
        excluded: options of pg_dump that exclude schemas and tables of other applications.

    Raises FarmError if the dump fails.
    """
    options = ["--format=custom", "--no-owner", "--no-privileges", f"--snapshot={snapshot}", f"--file={target}"]
    options += ["--no-blobs", *excluded]
    with _make_environment(url) as environment:
        _finish(_start([str(find_programs(server) / "pg_dump"), *options], environment), "dumped")


def restore_database(url: str, server: int, dump: Path, after: str) -> None:
    """Replace the farm's tables in a database by those of a dump, in a single transaction.

    Args:
        after: SQL to run at the end of the transaction.

    Raises FarmError if the dump cannot be restored. The database is then unchanged.
    """
    programs = find_programs(server)
    restore = [str(programs / "pg_restore"), "--no-owner", "--no-privileges", "--file=-"]
    load = [str(programs / "psql"), "-X", "-q", "-v", "ON_ERROR_STOP=1", "--single-transaction", "--file=-"]
    with _make_environment(url) as environment, make_temporary_folder("hil-restore-") as scratch:
        entries = Path(scratch) / "entries"
        entries.write_bytes(_list_farm_entries(programs, dump, environment))
        script = [*restore, f"--use-list={entries}", str(dump)]
        reading = _start(script, environment, stdout=subprocess.PIPE)
        loading = _start(load, environment, stdin=subprocess.PIPE)
        assert reading.stdout is not None and loading.stdin is not None
        try:
            loading.stdin.write(_CLEAR.encode())
            _copy_script(reading.stdout, loading.stdin, server)
            # psql commits at the end of its input, so end it before if the script is incomplete.
            if reading.wait():
                loading.kill()
            loading.stdin.write(after.encode())
            loading.stdin.close()
        except BrokenPipeError:  # psql stopped at an error
            reading.kill()
            with contextlib.suppress(BrokenPipeError):
                loading.stdin.close()
        except BaseException:
            reading.kill()
            loading.kill()
            raise
        if reading.wait() != -signal.SIGKILL:
            _finish(reading, "restored")
        _finish(loading, "restored")


def _list_farm_entries(programs: Path, dump: Path, environment: dict[str, str]) -> bytes:
    """Return the lines of a dump's table of contents that belong to a farm.

    A dump can also have functions and types of other applications, and the extensions of the database.
    """
    listing = _start([str(programs / "pg_restore"), "--list", str(dump)], environment, stdout=subprocess.PIPE)
    assert listing.stdout is not None
    lines = listing.stdout.read().splitlines(keepends=True)
    _finish(listing, "restored")
    return b"".join(line for line in lines if _FARM_ENTRY.match(line))


def _copy_script(source: IO[bytes], target: IO[bytes], server: int) -> None:
    """Copy a script, without settings that an older server does not have. The settings are before the first table."""
    for line in source:
        if not (server < _TIMEOUT_SINCE and line.startswith(_TIMEOUT_SETTING)):
            target.write(line)
        if line.startswith(b"CREATE "):
            break
    shutil.copyfileobj(source, target)


def _start(
    command: list[str],
    environment: dict[str, str],
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, env=environment, cwd="/")
    except OSError as error:
        raise FarmError(f"cannot start {command[0]}: {error.strerror}") from error


def _finish(process: subprocess.Popen[bytes], done: str) -> None:
    """Wait for a program. Raises FarmError with the end of its messages if it failed."""
    assert process.stderr is not None
    try:
        said = process.stderr.read()
        code = process.wait()
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    if code:
        tail = "\n".join(said.decode(errors="replace").strip().splitlines()[-_DETAIL_LINES:])
        name = Path(str(process.args[0])).name  # type: ignore[index]
        raise FarmError(f"the database cannot be {done}: {name} failed with exit code {code}", detail=tail)


@contextlib.contextmanager
def _make_environment(url: str) -> Iterator[dict[str, str]]:
    """Yield an environment that selects a database.

    The parameters are in a private file, because the process list shows command lines, which may contain a password.
    """
    parameters = {name: str(value) for name, value in conninfo_to_dict(url).items() if value is not None}
    if any("\n" in value for value in parameters.values()):
        raise UsageError("invalid database URL: a value contains a line break")
    with make_temporary_folder("hil-farm-") as at:
        service = Path(at) / "service"
        lines = [f"[{_SERVICE}]", *(f"{name}={value}" for name, value in parameters.items()), ""]
        service.touch(0o600)
        service.write_text("\n".join(lines))
        # Values of the service have precedence over other variables, such as PGPASSWORD.
        yield {**os.environ, "PGSERVICEFILE": str(service), "PGSERVICE": _SERVICE}
