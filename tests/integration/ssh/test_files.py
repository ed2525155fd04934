"""Files over SSH."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from support.sshd import BOTH, IS_ROOT

from hil.controller.devices.ssh.shell import Shell
from hil.errors import BoardError, StorageError

pytestmark = [pytest.mark.daily, pytest.mark.parametrize(*BOTH, indirect=True)]


def test_file_transfer_preserves_content_and_mode(shell: Shell, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (tmp_path / "data").write_bytes(os.urandom(3_000_001))
    (there / "a file").write_text("was here before")
    pieces: list[int] = []
    shell.put(tmp_path / "data", f"{there}/a file", mode=0o750, progress=pieces.append)
    shell.get(f"{there}/a file", tmp_path / "back", 3_000_001)
    assert (tmp_path / "back").read_bytes() == (tmp_path / "data").read_bytes()
    assert sum(pieces) == 3_000_001
    assert stat.S_IMODE((there / "a file").stat().st_mode) == 0o750
    assert [path.name for path in there.iterdir()] == ["a file"]


def test_file_transfer_supports_empty_file(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "data").touch()
    shell.put(tmp_path / "data", f"{tmp_path}/there")
    shell.get(f"{tmp_path}/there", tmp_path / "back", 0)
    assert (tmp_path / "back").read_bytes() == b""
    assert stat.S_IMODE((tmp_path / "there").stat().st_mode) == 0o600


def test_file_transfer_reports_missing_remote_directory(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    with pytest.raises(BoardError, match=r"cannot write /nowhere/x: .*(No such file|nonexistent)"):
        shell.put(tmp_path / "data", "/nowhere/x")
    with pytest.raises(BoardError, match=r"cannot read /nowhere/x: .*No such file"):
        shell.get("/nowhere/x", tmp_path / "back", 1)
    assert not list(tmp_path.glob("back*"))


def test_unwritable_local_directory_raises_storage_error(shell: Shell, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write .*/nowhere/back: No such file"):
        shell.get("/etc/passwd", tmp_path / "nowhere" / "back", 1 << 20)


@pytest.mark.skipif(not IS_ROOT, reason="only root's sshd has a small disk of its own mounted")
def test_full_disk_raises_error_and_removes_partial_file(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(8 << 20))
    with pytest.raises(BoardError, match=r"cannot write /run/full: .*(disk full|No space left)"):
        shell.put(tmp_path / "data", "/run/full")
    assert shell.run(["find", "/run", "-type", "f"]).text == ""
