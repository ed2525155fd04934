"""hil's directory on a board: its place, owner and removal."""

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
from hil.errors import BoardBusy, BoardError, BoardUnfit, StorageError


@pytest.mark.parametrize(
    ("folder", "reason"),
    [("/proc/hil", "is unusable"), ("a:b", "path list"), ("deep/" * 22, "maximum length")],
)
def test_deploy_rejects_unusable_directory(shell: Any, small: Small, folder: str, reason: str):
    with pytest.raises(BoardUnfit) as caught:
        put(shell, small(), folder=folder)

    assert reason in caught.value.message
    assert "folder" in caught.value.hint


def test_deploy_checks_free_space_before_sending(shell: Any, small: Small, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ensure, "_MARGIN_BYTES", 1 << 60)

    with pytest.raises(BoardUnfit, match="MB are free"):
        put(shell, small())

    assert not (shell.home / ".hil" / "packages").exists()


@pytest.mark.ci
@pytest.mark.parametrize("folder", ["", "elsewhere/hil", "~/at home", "{home}/absolute/"])
def test_deploy_uses_default_or_configured_directory(shell: Any, small: Small, folder: str):
    chosen = folder.format(home=shell.home)

    place = put(shell, small(), folder=chosen)

    assert Path(place.folder) == shell.home / (chosen.removeprefix("~/") or ".hil")
    assert accepts(place)
    assert put(shell, small(), folder=chosen).pushed_bytes == 0
    probe.clean(shell, chosen)
    assert not Path(place.folder).exists()


def test_deploy_and_clean_refuse_directory_with_user_files(shell: Any, small: Small):
    (shell.home / "store").mkdir()
    (shell.home / "store" / "thesis.txt").write_text("years of work")

    with pytest.raises(BoardError, match="does not belong to hil"):
        put(shell, small(), folder="~/")
    with pytest.raises(BoardError, match="cannot remove all of"):
        probe.clean(shell, "~/")

    assert (shell.home / "store" / "thesis.txt").exists()


def test_clean_deletes_agentless_files(shell: Any):
    for name in ("programs", "runs"):
        (shell.home / ".hil" / "command" / name).mkdir(parents=True)

    assert probe.clean(shell, "").used_bytes

    assert list(shell.home.iterdir()) == []


def test_clean_preserves_user_files(shell: Any, small: Small):
    place = put(shell, small())
    (Path(place.folder) / "thesis.txt").write_text("years of work")

    with pytest.raises(BoardError, match="cannot remove all of") as caught:
        probe.clean(shell, "")

    assert "thesis.txt" in caught.value.detail
    assert [path.name for path in Path(place.folder).iterdir()] == ["thesis.txt"]
    (Path(place.folder) / "thesis.txt").unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_deploy_rejects_directory_of_other_user(shell: Any, small: Small):
    place = put(shell, small())
    probe.stop(shell, "")
    os.chown(place.folder, 12345, 12345)

    with pytest.raises(BoardError, match="belongs to a different user"):
        put(shell, small())

    os.chown(place.folder, 0, 0)


@pytest.mark.ci
def test_deploy_recreates_cleaned_directory(shell: Any, small: Small):
    place = put(shell, small())
    was = ensure.ask(shell, "probe", "", "other", board="here").installed
    assert was is not None
    probe.clean(shell, "")

    assert install(shell, place.folder, was, [])["status"] == "missing"

    assert not Path(place.folder).exists()
    assert accepts(put(shell, small()))


@pytest.mark.slow
def test_clean_waits_for_running_deploy(shell: Any, small: Small, monkeypatch: pytest.MonkeyPatch):
    place = put(shell, small())
    with Path(place.folder, "run", "deploy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BoardBusy, match="a deploy to the board is already in progress") as caught:
            probe.clean(shell, "")
        assert caught.value.hint and accepts(place)
        assert probe.clean(shell, "", force=True).used_bytes

    assert not Path(place.folder).exists()


@pytest.mark.ci
def test_deploy_ignores_timestamps_from_the_future(shell: Any, small: Small):
    for text in ("first", "second"):
        put(shell, small(text))
    agents = Path(probe.read_status(shell, "").folder, "agents")
    for path in agents.iterdir():
        os.utime(path, (4e9, 4e9))

    place = put(shell, small("third"))

    assert probe.read_status(shell, "").build == place.build
    assert put(shell, small("third")) == AgentPlace(place.socket, place.folder, place.build, place.python, 0)


def test_deploy_without_local_space_raises_storage_error(shell: Any, small: Small, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", "/proc")

    with pytest.raises(StorageError, match="on this machine"):
        put(shell, small())


def test_probe_rejects_login_without_shell(shell: Any, tmp_path: Path):
    nothing = tmp_path / "bin"
    nothing.mkdir()
    (nothing / "sh").write_text(f"#!{sys.executable}\nraise SystemExit('This account is not available.')\n")
    (nothing / "sh").chmod(0o700)
    shell.path = str(nothing)

    for ask in (probe.read_status, probe.read_logs):
        with pytest.raises(BoardError, match="unexpected response") as caught:
            ask(shell, "")
        assert "POSIX sh" in caught.value.hint and "not available" in caught.value.detail


def test_reset_fence_reports_cause_of_failure():
    answer = b"folder\t/root/.hil\nleft\t/root/.hil/store/fence\tRead-only file system\n"
    board: Any = SimpleNamespace(address="board", run=lambda *_, **__: Done((), 0, answer, ""))
    with pytest.raises(BoardError, match=r"cannot remove .*fence: Read-only") as told:
        probe.ask(board, "reset_fence", "")
    assert not told.value.hint


def test_probe_separates_empty_from_missing_directory():
    assert probe.parse("folder\t/root/.hil\nused\t0\n").used_bytes == 0
    assert probe.parse("folder\t/root/.hil\n").used_bytes is None


@pytest.mark.ci
@pytest.mark.skipif(os.getuid() != 0, reason="mounts need root")
@pytest.mark.parametrize(("options", "reason"), [("noexec", "noexec"), ("ro", "Read-only file system")])
def test_deploy_names_remounted_directory(shells: Any, small: Small, options: str, reason: str):
    shell = shells()
    place = put(shell, small())
    probe.stop(shell, "")
    with pytest.raises(BoardUnfit, match=reason) as caught:
        put(shells(mounted=options), small())
    assert place.folder in caught.value.message and "[connection] folder" in caught.value.hint
    assert put(shell, small()).pushed_bytes == 0
