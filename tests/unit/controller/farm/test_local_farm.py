"""A farm's folder."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from hil.controller.farm.local_farm import ask, need_packages, prepare_home, sheet_of, write_whole
from hil.errors import FarmUnreachable, StorageError, UsageError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_its_owner_s_alone_and_one_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    prepare_home(tmp_path / "new/home")
    assert mode(tmp_path / "new/home") == 0o700
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o755)
    prepare_home(there)
    assert mode(there) == 0o755
    assert (there / "logs").is_dir()


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        prepare_home(tmp_path / "file/home")
    with pytest.raises(UsageError, match="too long a path") as refused:
        prepare_home(tmp_path / ("x" * 120))
    assert "HIL_FARM_HOME" in refused.value.hint


def test_who_runs_a_farm_without_its_packages_is_told_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("procrastinate", reason="needs the extra `farm`")
    need_packages()
    monkeypatch.setitem(sys.modules, "procrastinate", None)
    with pytest.raises(UsageError, match="needs procrastinate") as refused:
        need_packages()
    assert "hil[farm]" in refused.value.hint


def test_a_file_appears_whole_and_is_no_more_readable_than_it_should(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for text in ("first", "second"):
        write_whole(path, text, 0o600)
        assert (path.read_text(), mode(path)) == (text, 0o600)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StorageError, match="cannot be written"):
        write_whole(tmp_path / "gone/token", "x")


@pytest.mark.parametrize("text", [None, "", "{"])
def test_a_farm_that_is_not_up_says_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "up.json").write_text(text)
    assert sheet_of(tmp_path) is None
    with pytest.raises(FarmUnreachable):
        ask(tmp_path, "boards")
