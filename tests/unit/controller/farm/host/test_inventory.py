from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.farm.host.inventory import HostInfo, find_boards, make_simulators, sockets_for
from hil.controller.farm.paths import FarmAddress
from hil.errors import UsageError


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostInfo:
    configs = tmp_path / "configs"
    configs.mkdir()
    for name, text in {
        "rpi5": '[board]\n[connection]\naddress = "root@rpi5"\n',
        "grid": '[board]\n[labgrid]\nplace = "p"\n',
        "kind": "[board]\n",
    }.items():
        (configs / f"{name}.toml").write_text(text)
    monkeypatch.setenv("HIL_BOARDS", str(configs))
    monkeypatch.chdir(tmp_path)
    return HostInfo("lab1", "berlin", FarmAddress(("unix:g",), "t"), tmp_path / "host", tmp_path / "s")


def test_every_board_here_that_can_be_reached_is_served_where_none_is_named(site):
    assert [post.name for post in find_boards(site, ())] == ["grid", "rpi5"]


def test_of_those_that_are_named_each_is_served(site):
    assert [post.name for post in find_boards(site, ["rpi5", str(Path("configs/grid.toml"))])] == ["rpi5", "grid"]


@pytest.mark.parametrize(
    ("named", "why"),
    [(["kind"], "no address"), (["rpi5", "rpi5"], "two boards are called rpi5"), (["nothing"], "unknown board")],
)
def test_what_cannot_be_served_is_bad_usage(site, named, why):
    with pytest.raises(UsageError, match=why):
        find_boards(site, named)


@pytest.mark.parametrize("name", ["../x", "..", "-x", "a/b", "x" * 61])
def test_a_name_that_could_be_a_path_is_none(name, site, tmp_path):
    (tmp_path / "odd.toml").write_text(f'[board]\nname = "{name}"\n[connection]\naddress = "root@x"\n')
    with pytest.raises(UsageError, match="cannot be a name"):
        find_boards(site, [str(tmp_path / "odd.toml")])


def test_simulated_boards_are_called_after_their_host_and_keep_their_faults(site):
    posts = make_simulators(site, 2, ["pace:seconds=1"])
    assert [post.name for post in posts] == ["lab1-sim-1", "lab1-sim-2"]
    assert [post.load().connection.address for post in posts] == [f"unix:{site.sockets}/{n}.sock" for n in (1, 2)]
    assert posts[1].simulator[-2:] == ("--fault", "pace:seconds=1")
    assert make_simulators(site, 2, ()) != posts and make_simulators(site, 1, ["pace:seconds=1"]) == posts[:1]


def test_a_hosts_sockets_are_always_in_the_same_folder_which_is_its_users_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = sockets_for(tmp_path / "one")
    assert place == sockets_for(tmp_path / "one") != sockets_for(tmp_path / "two")
    assert place.stat().st_mode & 0o777 == 0o700
    place.rmdir()
    for planted in (tmp_path, tmp_path / "nothing"):
        place.symlink_to(planted)
        with pytest.raises(UsageError, match="another user"):
            sockets_for(tmp_path / "one")
        place.unlink()
    place.touch()
    with pytest.raises(UsageError, match="another user"):
        sockets_for(tmp_path / "one")
