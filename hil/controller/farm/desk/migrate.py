"""The database's schema, made or brought up to date: procrastinate's own and ours, each from numbered files.

Which files were done is noted in ``hil.migrations``, each in the transaction that does it. So it can be cut off at
any moment and goes on the next time.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

from hil.controller.farm.desk.database import Tx, connect, seam
from hil.errors import FarmError

# Any number that nobody else takes; who has its lock migrates.
_LOCK = 0x68696C01

_NOTES = """
create schema if not exists hil;
create table if not exists hil.migrations (
    part text not null, name text not null, at timestamptz not null default now(), primary key (part, name)
);
"""


@dataclass(frozen=True)
class Part:
    """One part's schema.

    Attributes:
        name: whose.
        steps: SQL by name, from the first to the last.
        whole: SQL that does what all of them do, for a new database; "" where there is none.
        sign: a table that is there only where some of it is done.
    """

    name: str
    steps: dict[str, str]
    whole: str = ""
    sign: str = ""


async def migrate(url: str, parts: tuple[Part, ...] | None = None) -> list[str]:
    """Bring a database's schema up to date; returns the names of what was done. One at a time does it.

    Args:
        url: the database's.
        parts: what there is to do; None is all that this program knows.

    Raises:
        FarmError: the database is newer than this program, or is used for something else.
        DatabaseAway: it does not answer.
    """
    parts = shipped() if parts is None else parts
    done: list[str] = []
    with seam():
        async with await connect(url) as connection:
            await connection.execute("set lock_timeout = '60s'")
            await connection.execute("select pg_advisory_lock(%s)", [_LOCK])
            await connection.execute(_NOTES)
            # First all is looked at, then something is done.
            plans = [(part, await _plan(connection, part)) for part in parts]
            for part, steps in plans:
                for names, sql in steps:
                    async with connection.transaction():
                        await connection.execute(sql)
                        await connection.cursor().executemany(
                            "insert into hil.migrations (part, name) values (%s, %s)",
                            [(part.name, name) for name in names],
                        )
                    done += names
    return done


async def _plan(connection: Tx, part: Part) -> list[tuple[list[str], str]]:
    """What is still to do: SQL, and the steps that are done with it."""
    asked = await connection.execute("select name from hil.migrations where part = %s", [part.name])
    noted = {row["name"] for row in await asked.fetchall()}
    if unknown := sorted(noted - part.steps.keys()):
        raise FarmError(
            f"the farm's database is newer than this program: it has {part.name}'s {unknown[-1]}",
            hint="install the hil that its other gateways have: pip install --upgrade 'hil[farm]'",
        )
    if not noted and part.sign:
        asked = await connection.execute("select to_regclass(%s) is not null as used", [part.sign])
        row = await asked.fetchone()
        if row is not None and row["used"]:
            raise FarmError(
                f"the database has {part.name}'s tables, but no farm made them", hint="give the farm one of its own"
            )
    if not noted and part.whole:
        return [(list(part.steps), part.whole)]
    return [([name], sql) for name, sql in part.steps.items() if name not in noted]


def shipped() -> tuple[Part, ...]:
    """All that this program knows."""
    theirs = resources.files("procrastinate") / "sql"
    ours = _read("hil.controller.farm", "schema")
    return (
        Part(
            "procrastinate",
            _read("procrastinate", "sql", "migrations"),
            whole=(theirs / "schema.sql").read_text("utf-8"),
            sign="procrastinate_jobs",
        ),
        Part("hil", ours, sign="hil.jobs"),
    )


def _read(package: str, *folders: str) -> dict[str, str]:
    """The SQL files of a folder by name, in order."""
    folder = resources.files(package).joinpath(*folders)
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".sql")), key=lambda file: file.name)
    return {file.name.removesuffix(".sql"): file.read_text("utf-8") for file in files}
