from __future__ import annotations

import os

import pytest

from hil.controller.farm.host.host import _own_name, serve
from hil.controller.farm.paths import FarmAddress
from hil.errors import UsageError

FARM = FarmAddress(("unix:g",), "t")


def test_a_host_has_a_name_that_no_other_folder_has_and_keeps_it(tmp_path):
    name = _own_name(tmp_path / "one")
    assert name.startswith(f"{os.uname().nodename}-") and _own_name(tmp_path / "one") == name
    assert len({_own_name(tmp_path / str(number)) for number in range(20)}) > 15
    assert [path.name for path in (tmp_path / "one" / "hosts").iterdir()] == ["mark"]


def test_a_host_without_boards_is_none(tmp_path, monkeypatch):
    monkeypatch.setenv("HIL_BOARDS", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("hil.controller.farm.host.inventory.known_boards", dict)
    with pytest.raises(UsageError, match="no boards here"):
        serve(FARM, tmp_path, name="lab", say=print)


@pytest.mark.parametrize("board", ["nothing", "generic"])
def test_a_board_that_cannot_be_served_is_bad_usage_before_anything_starts(board, tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with pytest.raises(UsageError):
        serve(FARM, tmp_path / "home", name="lab", boards=[board], say=print)
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("name", ["..", "a/b", "../lab"])
def test_a_host_whose_name_could_be_a_path_is_none(name, tmp_path):
    with pytest.raises(UsageError, match="cannot be a name"):
        serve(FARM, tmp_path, name=name, simulators=1, say=print)
    assert not list(tmp_path.iterdir())
