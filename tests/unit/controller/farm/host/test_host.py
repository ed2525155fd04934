from __future__ import annotations

import os

import pytest

from hil.controller.farm.host.host import _make_host_name, serve
from hil.controller.farm.paths import FarmAddress
from hil.errors import UsageError

FARM = FarmAddress(("unix:g",), "t")


def test_host_name_differs_by_directory_and_persists(tmp_path):
    name = _make_host_name(tmp_path / "one")
    assert name.startswith(f"{os.uname().nodename}-") and _make_host_name(tmp_path / "one") == name
    assert len({_make_host_name(tmp_path / str(number)) for number in range(20)}) > 15
    assert [path.name for path in (tmp_path / "one" / "hosts").iterdir()] == ["mark"]


def test_serve_rejects_host_without_boards(tmp_path, monkeypatch):
    monkeypatch.setenv("HIL_BOARDS", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("hil.controller.farm.host.inventory.list_boards", dict)
    with pytest.raises(UsageError, match="no boards found"):
        serve(FARM, tmp_path, name="lab", say=print)


@pytest.mark.parametrize("board", ["nothing", "generic"])
def test_serve_rejects_unusable_board_before_starting(board, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with pytest.raises(UsageError):
        serve(FARM, tmp_path / "home", name="lab", boards=[board], say=print)
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("name", ["..", "a/b", "../lab"])
def test_serve_rejects_host_name_with_path_characters(name, tmp_path):
    with pytest.raises(UsageError, match="invalid farm name"):
        serve(FARM, tmp_path, name=name, simulators=1, say=print)
    assert not list(tmp_path.iterdir())
