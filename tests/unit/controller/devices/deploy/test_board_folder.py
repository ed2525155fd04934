"""hil's folder on a board: where it is, whose it is, and how it goes."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.deploying import Small, accepts, put

from hil.controller.devices.deploy import ensure, probe
from hil.controller.devices.deploy.ensure import AgentPlace, install
from hil.controller.devices.ssh.shell import Done
from hil.errors import BoardBusy, BoardError, StorageError


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("/proc/hil", "cannot be used"), ("a:b", "path list"), ("deep/" * 22, "too long")],
)
def test_a_folder_that_will_not_do_is_told(shell: Any, small: Small, folder: str, reason: str):
    with pytest.raises(BoardError) as caught:
        put(shell, small(), folder=folder)

    assert reason in caught.value.message
    assert "folder" in caught.value.hint


def test_a_disk_without_room_is_told_before_anything_is_sent(shell: Any, small: Small, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ensure, "_MARGIN_BYTES", 1 << 60)

    with pytest.raises(BoardError, match="MB left"):
        put(shell, small())

    assert not (shell.home / ".hil" / "packages").exists()


@pytest.mark.parametrize("folder", ["", "elsewhere/hil", "~/at home", "{home}/absolute/"])
def test_the_folder_is_the_logins_own_or_where_it_is_said(shell: Any, small: Small, folder: str):
    chosen = folder.format(home=shell.home)

    place = put(shell, small(), folder=chosen)

    assert Path(place.folder) == shell.home / (chosen.removeprefix("~/") or ".hil")
    assert accepts(place)
    assert put(shell, small(), folder=chosen).pushed_bytes == 0
    probe.clean(shell, chosen)
    assert not Path(place.folder).exists()


def test_a_folder_of_somebodys_own_is_neither_used_nor_removed(shell: Any, small: Small):
    (shell.home / "store").mkdir()
    (shell.home / "store" / "thesis.txt").write_text("years of work")

    with pytest.raises(BoardError, match="none of hil's"):
        put(shell, small(), folder="~/")
    with pytest.raises(BoardError, match="could be removed"):
        probe.clean(shell, "~/")

    assert (shell.home / "store" / "thesis.txt").exists()


def test_what_a_board_without_an_agent_kept_is_removed_too(shell: Any):
    for name in ("programs", "runs"):
        (shell.home / ".hil" / "command" / name).mkdir(parents=True)

    assert probe.clean(shell, "").used_bytes

    assert list(shell.home.iterdir()) == []


def test_cleaning_keeps_what_is_none_of_hils(shell: Any, small: Small):
    place = put(shell, small())
    (Path(place.folder) / "thesis.txt").write_text("years of work")

    with pytest.raises(BoardError, match="could be removed") as caught:
        probe.clean(shell, "")

    assert "thesis.txt" in caught.value.detail
    assert [path.name for path in Path(place.folder).iterdir()] == ["thesis.txt"]
    (Path(place.folder) / "thesis.txt").unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_of_another_user_is_not_used(shell: Any, small: Small):
    place = put(shell, small())
    probe.stop(shell, "")
    os.chown(place.folder, 12345, 12345)

    with pytest.raises(BoardError, match="belongs to another user"):
        put(shell, small())

    os.chown(place.folder, 0, 0)


def test_a_folder_that_was_cleaned_meanwhile_is_begun_anew(shell: Any, small: Small):
    place = put(shell, small())
    was = ensure.ask(shell, "probe", "", "other", board="here").installed
    assert was is not None
    probe.clean(shell, "")

    assert install(shell, place.folder, was, [])["status"] == "missing"

    assert not Path(place.folder).exists()
    assert accepts(put(shell, small()))


@pytest.mark.slow
def test_cleaning_does_not_come_between_a_deploy(shell: Any, small: Small, monkeypatch: pytest.MonkeyPatch):
    place = put(shell, small())
    with Path(place.folder, "run", "deploy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BoardBusy, match="puts an agent on the board") as caught:
            probe.clean(shell, "")
        assert caught.value.hint and accepts(place)
        assert probe.clean(shell, "", force=True).used_bytes

    assert not Path(place.folder).exists()


def test_a_clock_that_was_ahead_does_not_hide_the_newest_agent(shell: Any, small: Small):
    for text in ("first", "second"):
        put(shell, small(text))
    agents = Path(probe.status(shell, "").folder, "agents")
    for path in agents.iterdir():
        os.utime(path, (4e9, 4e9))

    place = put(shell, small("third"))

    assert probe.status(shell, "").build == place.build
    assert put(shell, small("third")) == AgentPlace(place.socket, place.folder, place.build, place.python, 0)


def test_no_room_on_this_machine_is_not_the_boards_fault(shell: Any, small: Small, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", "/proc")

    with pytest.raises(StorageError, match="on this machine"):
        put(shell, small())


def test_a_login_without_a_shell_is_told_so(shell: Any, tmp_path: Path):
    nothing = tmp_path / "bin"
    nothing.mkdir()
    (nothing / "sh").write_text(f"#!{sys.executable}\nraise SystemExit('This account is not available.')\n")
    (nothing / "sh").chmod(0o700)
    shell.path = str(nothing)

    for ask in (probe.status, probe.logs):
        with pytest.raises(BoardError, match="would") as caught:
            ask(shell, "")
        assert "POSIX sh" in caught.value.hint and "not available" in caught.value.detail


def test_a_count_of_fences_that_cannot_be_removed_is_told_with_the_reason():
    answer = b"folder\t/root/.hil\nleft\t/root/.hil/store/fence\tRead-only file system\n"
    board: Any = SimpleNamespace(address="board", run=lambda *_, **__: Done((), 0, answer, ""))
    with pytest.raises(BoardError, match="fence could not be removed: Read-only") as told:
        probe.ask(board, "reset_fence", "")
    assert not told.value.hint


def test_a_folder_that_takes_no_room_is_told_from_one_that_is_not_there():
    assert probe.parse("folder\t/root/.hil\nused\t0\n").used_bytes == 0
    assert probe.parse("folder\t/root/.hil\n").used_bytes is None
