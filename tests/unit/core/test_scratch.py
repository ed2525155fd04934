"""Temporary directories of killed and running processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hil.core import scratch
from hil.errors import StorageError

OTHER = """
import sys, time
from hil.core.scratch import make_temporary_folder
with make_temporary_folder("hil-test-") as folder:
    open(folder + "/left", "w").write("x" * 1000)
    print(folder, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the user's hil directory inside a temporary directory of the test."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / f"hil-{os.geteuid()}"


@pytest.fixture
def other(base: Path) -> Iterator[Callable[[], tuple[subprocess.Popen[str], Path]]]:
    """Return a function that starts a process with a temporary directory."""
    running = []

    def start() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen([sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=-1, text=True)
        running.append(process)
        return process, Path(process.stdout.readline().strip())

    yield start
    for process in running:
        process.kill()
        process.communicate()


def test_scratch_removes_directories_of_killed_processes(base, other) -> None:
    (killed, left), (_, kept) = other(), other()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert (left / "left").exists() and left.is_relative_to(base)
    ended, mine = other()
    assert not left.parent.exists()
    assert (kept / "left").exists() and (mine / "left").exists()
    ended.communicate("go on\n")
    assert not mine.parent.exists()


def test_scratch_removes_directory_at_process_exit(base, other) -> None:
    process, mine = other()
    process.communicate("end\n")
    assert not mine.exists()
    assert list(base.iterdir()) == []


def test_scratch_retains_directories_of_concurrent_starts(base, other) -> None:
    killed, _ = other()
    killed.kill()
    killed.wait()
    starting = [subprocess.Popen([sys.executable, "-c", OTHER], stdin=-1, stdout=-1, text=True) for _ in range(6)]
    folders = [Path(one.stdout.readline().strip()) for one in starting]
    assert all((folder / "left").exists() for folder in folders)
    assert len(list(base.iterdir())) == 6
    for one in starting:
        one.communicate("end\n")


def test_scratch_ignores_links_and_files_of_other_users(base, tmp_path, monkeypatch) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    base.mkdir()
    (base / "link").symlink_to(precious)
    dead = base / "dead"
    dead.mkdir()
    (dead / "link").symlink_to(precious)
    os.mkfifo(base / "fifo")
    theirs = base / "theirs"
    theirs.mkdir()
    real = scratch._is_ours
    monkeypatch.setattr(scratch, "_is_ours", lambda found: found != theirs and real(found))
    with scratch.make_temporary_folder("hil-test-") as folder:
        assert Path(folder).is_relative_to(base)
    assert (precious / "file").exists() and (base / "link").is_symlink() and theirs.is_dir()
    assert not dead.exists()


@pytest.mark.parametrize("plant", ["link", "file"])
def test_scratch_avoids_name_taken_by_other_user(base, tmp_path, plant) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    base.symlink_to(elsewhere) if plant == "link" else None
    if plant == "file":
        # Looks like a directory of another user.
        base.mkdir()
        uid = os.geteuid()
        if uid != 0:
            pytest.skip("only root gives a folder away")
        os.chown(base, 12345, 12345)
    with scratch.make_temporary_folder("hil-test-") as folder:
        assert not Path(folder).resolve().is_relative_to(elsewhere.resolve())
        assert not Path(folder).is_relative_to(base)
    assert list(elsewhere.iterdir()) == []


def test_scratch_recreates_removed_directory(base) -> None:
    import shutil

    first = scratch.place()
    shutil.rmtree(first)
    second = scratch.place()
    assert second.is_dir() and second.is_relative_to(base)
    assert second.stat().st_mode & 0o777 == 0o700


def test_scratch_creates_separate_directory_after_fork(base) -> None:
    mine = scratch.place()
    child = os.fork()
    if not child:
        os._exit(0 if scratch.place() != mine and mine.is_dir() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert mine.is_dir()


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ELOOP, errno.ENAMETOOLONG]
)
def test_scratch_reports_disk_errors_as_storage_error(base, monkeypatch, number) -> None:
    told = pytest.raises(StorageError, match=r"cannot write to .*: " + os.strerror(number))
    with told, scratch.make_temporary_folder("hil-test-") as folder:
        raise OSError(number, os.strerror(number), f"{folder}/program")

    def full(*_: object, **__: object) -> str:
        raise OSError(number, os.strerror(number))

    scratch.place()
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    for make in (
        lambda: scratch.make_folder("hil-test-"),
        lambda: scratch.make_temporary_folder("hil-test-").__enter__(),
    ):
        with pytest.raises(StorageError, match="free disk space"):
            make()


def deep(folder: Path, levels: int) -> None:
    """Create nested directories deeper than any path can express."""
    folder.mkdir()
    at = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
        os.mkdir("folder", dir_fd=at)
        below = os.open("folder", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def test_remove_tree_removes_deep_tree_without_following_links(tmp_path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    left = tmp_path / "left"
    deep(left, 1200)
    (left / "folder" / "link").symlink_to(precious)
    (left / "folder" / "folder" / "closed").mkdir(mode=0)
    (left / "link").symlink_to(precious)
    scratch.remove_tree(left)
    assert not left.exists()
    assert (precious / "file").exists()
    (tmp_path / "link").symlink_to(precious)
    for other in (tmp_path / "link", tmp_path / "nothing", precious / "file"):
        scratch.remove_tree(other)
    assert (precious / "file").exists()


def test_scratch_passes_unrelated_errors_through(base) -> None:
    with pytest.raises(FileNotFoundError), scratch.make_temporary_folder("hil-test-") as folder:
        (Path(folder) / "nothing").read_text()


def test_scratch_for_sockets_has_short_path(base, tmp_path, monkeypatch) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made = scratch.make_folder("hil-test-", for_sockets=True)
    try:
        assert len(str(made)) < 80
        assert not made.is_relative_to(long)
    finally:
        made.rmdir()


def test_remove_tree_handles_links_pipes_and_deep_nesting(tmp_path: Path, monkeypatch):
    kept, folder = tmp_path / "kept", tmp_path / "folder"
    kept.mkdir()
    (kept / "file").write_text("mine")
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "a" / "file").write_text("x")
    (folder / "a" / "b" / "link").symlink_to(kept)
    (folder / "link").symlink_to(kept / "file")
    (folder / "gone").symlink_to("nowhere")
    os.mkfifo(folder / "a" / "fifo")
    (folder / "a" / "b").chmod(0)
    monkeypatch.chdir(folder / "a")
    for _ in range(2000):
        Path("d").mkdir()
        os.chdir("d")
    monkeypatch.undo()
    try:
        scratch.remove_tree(folder)
        assert not folder.exists()
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True)  # too deep for pytest to remove
    assert (kept / "file").read_text() == "mine"


def test_remove_tree_ignores_missing_directory(tmp_path: Path):
    scratch.remove_tree(tmp_path / "none")


@pytest.mark.parametrize("planted", ["file", "link to nothing", "link to a file"])
def test_scratch_avoids_planted_file_or_link(base: Path, planted: str) -> None:
    other = base.parent / "other"
    if planted == "file":
        base.write_text("theirs")
    else:
        base.symlink_to(other)
    if planted == "link to a file":
        other.write_text("theirs")
    made = scratch.Scratch(base).place()
    assert made.is_dir() and made.parent == base.parent and made.stat().st_mode & 0o777 == 0o700
    assert other.exists() == (planted == "link to a file")
