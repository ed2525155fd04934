"""Files over SSH, to a board with SFTP and to one without."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.sshd import IS_ROOT, running_sshd

from hil.controller.devices.ssh.shell import Shell
from hil.errors import BoardError, StorageError

pytestmark = pytest.mark.daily


@pytest.fixture(params=["sftp", "cat"])
def any_shell(request: pytest.FixtureRequest, log_in: Callable[..., Shell], tmp_path: Path) -> Iterator[Shell]:
    """A shell on a server with SFTP, and on one without."""
    if request.param == "sftp":
        yield log_in()
        return
    with running_sshd(tmp_path / "plain", sftp=False) as server:
        yield log_in(server=server)


def test_a_file_goes_there_and_back(any_shell: Shell, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "data").write_bytes(os.urandom(3_000_001))
    (there / "a file").write_text("was here before")
    pieces: list[int] = []
    any_shell.put(tmp_path / "data", f"{there}/a file", mode=0o750, progress=pieces.append)
    any_shell.get(f"{there}/a file", tmp_path / "back", 3_000_001)
    assert (tmp_path / "back").read_bytes() == (tmp_path / "data").read_bytes()
    assert sum(pieces) == 3_000_001
    assert stat.S_IMODE((there / "a file").stat().st_mode) == 0o750
    assert [path.name for path in there.iterdir()] == ["a file"]


def test_an_empty_file(any_shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    any_shell.put(tmp_path / "data", f"{tmp_path}/there")
    any_shell.get(f"{tmp_path}/there", tmp_path / "back", 0)
    assert (tmp_path / "back").read_bytes() == b""
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == 0o600


def test_a_folder_that_is_not_there(any_shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    with pytest.raises(BoardError, match=r"cannot write /nowhere/x: .*(No such file|nonexistent)"):
        any_shell.put(tmp_path / "data", "/nowhere/x")
    with pytest.raises(BoardError, match=r"cannot read /nowhere/x: .*No such file"):
        any_shell.get("/nowhere/x", tmp_path / "back", 1)
    assert not list(tmp_path.glob("back*"))


def test_a_folder_here_that_cannot_be_written_is_not_the_boards_fault(any_shell: Shell, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write .*/nowhere/back: No such file"):
        any_shell.get("/etc/passwd", tmp_path / "nowhere" / "back", 1 << 20)


@pytest.mark.skipif(not IS_ROOT, reason="only root's sshd has a small disk of its own mounted")
def test_a_full_disk_is_told_and_nothing_half_is_left(any_shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(8 << 20))
    with pytest.raises(BoardError, match=r"cannot write /run/full: .*(disk full|No space left)"):
        any_shell.put(tmp_path / "data", "/run/full")
    assert any_shell.run(["find", "/run", "-type", "f"]).text == ""
