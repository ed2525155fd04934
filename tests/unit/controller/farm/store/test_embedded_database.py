"""Test the embedded database: it starts after any crash, serves one program, and leaves no processes."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.waiting import eventually

from hil.controller.farm.database import embedded_database as module
from hil.controller.farm.database.embedded_database import EmbeddedDatabase, find_binaries
from hil.core.install_hints import make_install_command
from hil.errors import FarmError, StorageError, UsageError

pytestmark = [pytest.mark.ci, pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")]

STARTER = """
import sys, time
from pathlib import Path
from hil.controller.farm.database.embedded_database import EmbeddedDatabase
database = EmbeddedDatabase(Path(sys.argv[1]), settings={"fsync": "off"})
print(database.start(), flush=True)
time.sleep(600)
"""


def fast(folder: Path, **options: Any) -> EmbeddedDatabase:
    """Return a database without fsync; these tests do not crash the machine."""
    return EmbeddedDatabase(folder, settings={"fsync": "off"}, **options)


def ask(url: str, query: str) -> object:
    with psycopg.connect(url, autocommit=True) as connection:
        found = connection.execute(query)
        return found.fetchone()[0] if found.description else None


def processes(folder: Path) -> list[int]:
    """Return the processes that run in a database's directory or were started with it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            where, command = str((process / "cwd").readlink()), (process / "cmdline").read_bytes()
        except OSError:
            continue
        if where.startswith(str(folder)) or (str(folder).encode() in command and b"postgres" in command):
            found.append(int(process.name))
    return found


def kill(database: EmbeddedDatabase) -> None:
    """Kill the server process. Its children end by themselves or at the next start."""
    assert database.pid is not None
    os.kill(database.pid, signal.SIGKILL)
    eventually(lambda: not database.is_alive())


@pytest.fixture
def database(tmp_path: Path) -> Iterator[EmbeddedDatabase]:
    made = fast(tmp_path / "db", patience_s=0.2)
    made.start()
    ask(made.url, "create table kept (n int)")
    ask(made.url, "insert into kept values (7)")
    yield made
    made.stop()
    eventually(lambda: not processes(tmp_path))


def test_embedded_saves_data_and_ends_processes_on_stop(database: EmbeddedDatabase) -> None:
    assert database.is_alive()
    database.stop()
    assert not database.is_alive()
    assert processes(database.folder) == []
    assert ask(database.start(), "select n from kept") == 7
    assert database.start() == database.url  # a second start has no effect


def test_embedded_restricts_access_to_owner(database: EmbeddedDatabase) -> None:
    folder = database.folder / "data"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / ".s.PGSQL.5432").stat().st_mode) == 0o700
    assert ask(database.url, "show listen_addresses") == ""


def test_embedded_restarts_after_kill(database: EmbeddedDatabase) -> None:
    kill(database)
    assert ask(database.start(), "select n from kept") == 7


def test_embedded_restarts_without_socket_of_live_process(database: EmbeddedDatabase) -> None:
    """Simulate the moment after a kill, before the process has ended."""
    (database.folder / "data" / ".s.PGSQL.5432").unlink()
    assert database.is_alive()
    assert ask(database.start(), "select n from kept") == 7


def test_embedded_recovers_after_child_process_dies(database: EmbeddedDatabase) -> None:
    children = Path(f"/proc/{database.pid}/task/{database.pid}/children").read_text().split()
    with contextlib.closing(psycopg.connect(database.url)) as witness:
        os.kill(int(children[0]), signal.SIGKILL)
        with pytest.raises(psycopg.OperationalError):  # the server ends all other connections
            while True:
                witness.execute("select 1")
    deadline = time.monotonic() + 20
    while True:
        try:
            assert ask(database.url, "select n from kept") == 7
            return
        except psycopg.OperationalError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_embedded_releases_lock_after_restart_and_stop(database: EmbeddedDatabase) -> None:
    kill(database)
    database.start()
    database.stop()
    with fast(database.folder, patience_s=0.1) as other:
        assert ask(other.url, "select n from kept") == 7


def test_embedded_restarts_after_machine_crash(database: EmbeddedDatabase) -> None:
    """Kill all processes and reuse the number in postmaster.pid for another process."""
    for pid in processes(database.folder):
        with contextlib.suppress(ProcessLookupError):  # it ended with its postmaster
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: not processes(database.folder))
    pid_file = database.folder / "data" / "postmaster.pid"
    pid_file.write_text(pid_file.read_text().replace(str(database.pid), str(os.getpid()), 1))
    assert ask(database.start(), "select n from kept") == 7


@pytest.mark.parametrize("after_s", [0.15, 0.25, 0.35, 0.5])
def test_embedded_starts_after_kill_during_creation(tmp_path: Path, after_s: float) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE)
    eventually((tmp_path / "lock").exists, every_s=0.01)
    time.sleep(after_s)
    starter.kill()
    starter.communicate()
    with fast(tmp_path) as database:
        assert ask(database.url, "select count(*) > 0 from pg_class") is True
    eventually(lambda: not processes(tmp_path))


def test_embedded_restarts_immediately_after_killed_starter(tmp_path: Path) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    url = starter.stdout.readline().strip()
    ask(url, "create table kept as select 7 as n")
    # An open transaction must not block the shutdown.
    with contextlib.closing(psycopg.connect(url)) as connection:
        connection.execute("select n from kept for update")
        starter.kill()
        starter.communicate()
        with fast(tmp_path) as database:
            assert ask(database.url, "select n from kept") == 7
    eventually(lambda: not processes(tmp_path))


def test_embedded_ends_with_killed_starter(tmp_path: Path) -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    starter.stdout.readline()
    assert processes(tmp_path)
    starter.kill()
    starter.communicate()
    eventually(lambda: not processes(tmp_path))


def test_embedded_outlives_starting_thread(tmp_path: Path) -> None:
    database = fast(tmp_path)
    asker = threading.Thread(target=database.start)
    asker.start()
    asker.join()
    try:
        time.sleep(0.3)
        assert ask(database.url, "select 1") == 1
    finally:
        database.stop()


def test_embedded_rejects_second_starter(database: EmbeddedDatabase) -> None:
    other = fast(database.folder, patience_s=0.1)
    with pytest.raises(FarmError, match="is already in use") as caught:
        other.start()
    assert "hil farm down" in caught.value.hint
    other.stop()
    assert ask(database.url, "select n from kept") == 7


def test_embedded_second_starter_waits_for_first(database: EmbeddedDatabase) -> None:
    other = fast(database.folder, patience_s=60)
    waiting = threading.Thread(target=other.start)
    waiting.start()
    database.stop()
    waiting.join()
    try:
        assert ask(other.url, "select n from kept") == 7
    finally:
        other.stop()


def test_embedded_uses_short_socket_path_for_long_directory(tmp_path: Path) -> None:
    folder = tmp_path / ("deep" * 20) / "er"
    with fast(folder) as database:
        assert ask(database.url, "select 1") == 1
        sockets = Path(database.url.partition("?host=")[2].replace("%2F", "/"))
        assert sockets.parent == Path(tempfile.gettempdir())
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o700
    assert not sockets.exists()
    sockets.symlink_to(tmp_path)
    try:
        with pytest.raises(StorageError, match="is not a private directory"):
            fast(folder).start()
    finally:
        sockets.unlink()


def test_embedded_start_leaves_unrelated_processes_running(database: EmbeddedDatabase) -> None:
    data = database.folder / "data"
    looking = subprocess.Popen(["sleep", "60"], cwd=data)
    try:
        kill(database)
        database.start()
        assert looking.poll() is None
    finally:
        looking.kill()
        looking.wait()


def test_embedded_starts_in_symlinked_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with fast(tmp_path / "link" / "db") as database:
        kill(database)
        database.start()
        assert ask(database.url, "select 1") == 1
    eventually(lambda: not processes(tmp_path))


def test_embedded_preserves_parent_directory_mode(tmp_path: Path) -> None:
    parent = tmp_path / "private"
    parent.mkdir(mode=0o700)
    with fast(parent / "db") as database:
        assert ask(database.url, "select 1") == 1
    assert stat.S_IMODE(parent.stat().st_mode) == 0o700


@pytest.fixture
def no_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent root from creating namespaces, as in most containers."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    launcher = tmp_path / "unprivileged.py"
    text = module._LAUNCHER.read_text()
    launcher.write_text(text.replace("_CLONE_NEWUSER = 0x10000000", "_CLONE_NEWUSER = 0x1"))
    assert launcher.read_text() != text
    monkeypatch.setattr(module, "_LAUNCHER", launcher)


@pytest.mark.parametrize("name", ["db", "deep" * 30])
def test_embedded_runs_as_unprivileged_user_without_namespaces(no_namespaces: None, name: str) -> None:
    with tempfile.TemporaryDirectory() as open_folder:
        Path(open_folder).chmod(0o755)
        folder = Path(open_folder) / name
        for _ in range(2):
            with fast(folder) as database:
                assert database.pid is not None
                assert Path(f"/proc/{database.pid}").stat().st_uid == pwd.getpwnam("nobody").pw_uid
                assert ask(database.url, "select 1") == 1
        assert (folder / "data").stat().st_uid == pwd.getpwnam("nobody").pw_uid


def test_embedded_suggests_fix_in_closed_directory_as_root(tmp_path: Path, no_namespaces: None) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(FarmError, match="cannot be created") as caught:
        fast(tmp_path / "db").start()
    assert "cannot run as root" in caught.value.hint and "--db" in caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="whoever runs all these tests is not root")
def test_embedded_runs_as_calling_user_without_root(tmp_path: Path) -> None:
    code = STARTER.replace("time.sleep(600)", "database.stop()")
    command = ["unshare", "--user", sys.executable, "-c", code, str(tmp_path)]
    if subprocess.run(["unshare", "--user", "true"]).returncode != 0:
        pytest.skip("the system lets nobody be somebody else")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("postgresql://")
    eventually(lambda: not processes(tmp_path))


def test_embedded_rejects_data_of_other_version(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "PG_VERSION").write_text("9\n")
    with pytest.raises(FarmError, match="was created by PostgreSQL 9") as caught:
        fast(tmp_path).start()
    assert "pg_dump" in caught.value.hint


def test_embedded_reports_server_start_failure(tmp_path: Path) -> None:
    database = EmbeddedDatabase(tmp_path, settings={"shared_buffers": "much", "fsync": "off"})
    with pytest.raises(FarmError, match="failed to start") as caught:
        database.start()
    assert "shared_buffers" in caught.value.detail
    assert not database.is_alive() and processes(tmp_path) == []
    with fast(tmp_path, patience_s=0.1) as other:  # the directory is unlocked again
        assert other.is_alive()


def test_embedded_reports_directory_creation_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        fast(tmp_path / "file" / "db").start()


def test_embedded_reports_unwritable_log(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        fast(tmp_path).start()
    (tmp_path / "log").rmdir()
    with fast(tmp_path, patience_s=0.1) as database:
        assert database.is_alive()


def test_embedded_names_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="missing database") as caught:
        find_binaries()
    assert make_install_command("farm") in caught.value.hint
