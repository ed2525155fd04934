"""Test the directory of a farm."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from hil.controller.farm.local.local_farm import UpOptions, ask, need_packages, prepare_home, write_atomically
from hil.controller.farm.paths import read_sheet
from hil.core.install_hints import make_install_command
from hil.errors import FarmUnreachable, StorageError, UsageError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_prepare_home_creates_private_directory(tmp_path: Path) -> None:
    prepare_home(tmp_path / "new/home")
    assert mode(tmp_path / "new/home") == 0o700
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o755)
    prepare_home(there)
    assert mode(there) == 0o755
    assert (there / "logs").is_dir()


def test_prepare_home_rejects_unusable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        prepare_home(tmp_path / "file/home")
    with pytest.raises(UsageError, match="path exceeds the maximum length") as refused:
        prepare_home(tmp_path / ("x" * 120))
    assert "HIL_FARM_HOME" in refused.value.hint


def test_up_passes_options_to_host() -> None:
    options = UpOptions(sims=2, boards=("pi",), site="lab", allow_commands=True)
    words = options.list_host_arguments()
    assert words == ["--sim", "2", "--site", "lab", "--allow-commands", "--board", "pi"]
    assert UpOptions().list_host_arguments() == []


def test_need_packages_names_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("procrastinate", reason="needs the extra `farm`")
    need_packages()
    monkeypatch.setitem(sys.modules, "procrastinate", None)
    with pytest.raises(UsageError, match="missing packages for running a farm: procrastinate") as refused:
        need_packages()
    assert make_install_command("farm") in refused.value.hint


def test_write_whole_replaces_file_with_given_mode(tmp_path: Path) -> None:
    path = tmp_path / "token"
    for text in ("first", "second"):
        write_atomically(path, text, 0o600)
        assert (path.read_text(), mode(path)) == (text, 0o600)
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StorageError, match="cannot be written"):
        write_atomically(tmp_path / "gone/token", "x")


@pytest.mark.parametrize("text", [None, "", "{"])
def test_stopped_farm_has_empty_sheet(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "up.json").write_text(text)
    assert read_sheet(tmp_path) is None
    with pytest.raises(FarmUnreachable):
        ask(tmp_path, "boards")
