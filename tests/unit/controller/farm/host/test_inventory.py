from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.devices.power_control.provisioned_image import parse_image
from hil.controller.farm.client.lease_session import make_leased_config
from hil.controller.farm.host.inventory import (
    HostInfo,
    find_boards,
    format_leased_config,
    format_public_config,
    format_public_console,
    make_meter_card,
    make_simulators,
    make_socket_folder,
)
from hil.controller.farm.messages import BoardCard, Grant, JobSpec, Kind, MeterCard
from hil.controller.farm.paths import FarmAddress
from hil.controller.records.lab.board_image import ProvisionedImage
from hil.core.board_parser import parse_board, read_config
from hil.core.config_files import parse_toml
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
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return HostInfo("lab1", "berlin", FarmAddress(("unix:g",), "t"), tmp_path / "host", tmp_path / "s")


def test_find_boards_defaults_to_all_reachable_boards(site):
    assert [post.name for post in find_boards(site, ())] == ["grid", "rpi5"]


def test_find_boards_returns_named_boards_in_order(site):
    assert [post.name for post in find_boards(site, ["rpi5", str(Path("configs/grid.toml"))])] == ["rpi5", "grid"]


@pytest.mark.parametrize(
    ("named", "why"),
    [(["kind"], "without an address"), (["rpi5", "rpi5"], "duplicate board name rpi5"), (["nothing"], "unknown board")],
)
def test_find_boards_rejects_unusable_names(site, named, why):
    with pytest.raises(UsageError, match=why):
        find_boards(site, named)


def test_simulator_config_starts_simulator_and_keeps_console(site, tmp_path):
    path = tmp_path / "laptop.toml"
    path.write_text('[board]\nhw_type = "laptop"\n[simulator]\n[console]\ncommand = ["sh", "console.sh"]\n')
    (post,) = find_boards(site, [str(path)], ["pace:seconds=1"])
    config = post.load()
    assert (post.name, post.simulator[-2:], config.path) == ("laptop", ("--fault", "pace:seconds=1"), path)
    assert config.connection.address == post.simulator[1] == f"unix:{site.sockets}/board-0.sock"
    assert config.console.command == ("sh", "console.sh") and not config.is_simulator


def test_shipped_simulator_needs_number(site):
    with pytest.raises(UsageError, match="without an address") as caught:
        find_boards(site, ["sim"])
    assert "--sim N" in caught.value.hint


@pytest.mark.parametrize("name", ["../x", "..", "-x", "a/b", "x" * 61])
def test_find_boards_rejects_board_name_with_path_characters(name, site, tmp_path):
    (tmp_path / "odd.toml").write_text(f'[board]\nname = "{name}"\n[connection]\naddress = "root@x"\n')
    with pytest.raises(UsageError, match="invalid farm name"):
        find_boards(site, [str(tmp_path / "odd.toml")])


def test_simulators_use_host_name_and_keep_faults(site):
    posts = make_simulators(site, 2, ["pace:seconds=1"])
    assert [post.name for post in posts] == ["lab1-sim-1", "lab1-sim-2"]
    assert [post.load().connection.address for post in posts] == [f"unix:{site.sockets}/{n}.sock" for n in (1, 2)]
    assert posts[1].simulator[-2:] == ("--fault", "pace:seconds=1")
    assert make_simulators(site, 2, ()) != posts and make_simulators(site, 1, ["pace:seconds=1"]) == posts[:1]


def test_sockets_directory_persists_and_rejects_other_users(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    place = make_socket_folder(tmp_path / "one")
    assert place == make_socket_folder(tmp_path / "one") != make_socket_folder(tmp_path / "two")
    assert place.stat().st_mode & 0o777 == 0o700
    place.rmdir()
    for planted in (tmp_path, tmp_path / "nothing"):
        place.symlink_to(planted)
        with pytest.raises(UsageError, match="belongs to a different user"):
            make_socket_folder(tmp_path / "one")
        place.unlink()
    place.touch()
    with pytest.raises(UsageError, match="belongs to a different user"):
        make_socket_folder(tmp_path / "one")


def test_leased_config_keeps_console_without_provision(tmp_path: Path):
    path = tmp_path / "b.toml"
    path.write_text(
        '[connection]\naddress = "unix:a"\n[console]\ncommand = ["./console.sh", "x"]\nboot = "login:"\n'
        '[[console.patterns]]\nname = "npu"\npattern = "npu: fault"\n[provision]\ncommand = ["flash", "{image}"]\n'
    )
    config = read_config(path)
    leased = parse_board(format_leased_config(config, "unix:b", 3, ""), tmp_path / "elsewhere" / "b.toml")
    assert leased.console == config.console
    assert leased.console.command[0] == str(tmp_path / "console.sh")
    assert leased.provision.command == ()
    assert "console" not in format_public_config(config)


@pytest.mark.parametrize(
    ("meter", "card"),
    [
        ('kind = "command"\ncommand = ["./meter.sh", "--secret"]\nidle_s = 2\n', MeterCard(kind="command")),
        ('kind = "hwmon"\npath = "/sys/h"\nwhere = "host"\n', MeterCard(kind="hwmon")),
        ('kind = "simulated"\n[meter.options]\nidle_w = 1.5\n', MeterCard(kind="simulated")),
        (
            'kind = "hwmon"\npath = "/sys/h*"\nchannel = 2\nrate_hz = 50\n',
            MeterCard(kind="hwmon", on_board=True, path="/sys/h*", channel=2, rate_hz=50.0, idle_s=1.0),
        ),
    ],
)
def test_meter_is_complete_for_jobs_and_without_commands_for_users(tmp_path: Path, meter: str, card: MeterCard):
    path = tmp_path / "b.toml"
    path.write_text(f'[connection]\naddress = "unix:a"\n[meter]\n{meter}')
    config = read_config(path)
    leased = parse_board(format_leased_config(config, "unix:b", 3, ""), tmp_path / "elsewhere" / "b.toml")
    assert leased.meter == config.meter
    assert "meter" not in format_public_config(config)
    assert make_meter_card(config) == card


def test_leased_configs_contain_image_of_board(tmp_path: Path):
    image = ProvisionedImage(file="card.img", sha256="ab" * 32, time_s=5.0)
    path = tmp_path / "b.toml"
    path.write_text('[connection]\naddress = "unix:a"\n')
    grant = Grant(5, "17", 17, "b", 12, 6, 60, 1, JobSpec(Kind.COMMAND))
    for text in (
        format_leased_config(read_config(path), "unix:b", 3, "", image),
        make_leased_config(BoardCard("b", image=image), grant, "unix:b"),
    ):
        assert parse_image(parse_board(text, path).connection.image) == image
    assert (
        parse_image(parse_board(format_leased_config(read_config(path), "unix:b", 3, ""), path).connection.image)
        is None
    )
    assert parse_image("[1") is None


def test_public_console_contains_only_patterns(tmp_path: Path):
    path = tmp_path / "b.toml"
    path.write_text(
        '[connection]\naddress = "unix:a"\n[console]\ncommand = ["./secret.sh"]\n'
        '[[console.patterns]]\nname = "npu"\npattern = "npu: fault"\n'
    )
    text = format_public_console(read_config(path))
    assert parse_toml(text, path) == {"patterns": [{"name": "npu", "pattern": "npu: fault"}]}
    path.write_text('[connection]\naddress = "unix:a"\n[console]\nfarm = "c"\n')
    assert format_public_console(read_config(path)) == ""


def test_public_config_omits_measure_commands(tmp_path: Path):
    path = tmp_path / "b.toml"
    path.write_text('[connection]\naddress = "unix:a"\n[measure]\nbefore = ["./secret-fan.sh"]\n')
    config = read_config(path)
    assert config.measure.before
    assert "measure" not in format_public_config(config)


def test_public_config_contains_no_commands_of_stack(tmp_path: Path):
    path = tmp_path / "b.toml"
    path.write_text(
        '[connection]\naddress = "unix:a"\n[stack]\ndriver = "1.0"\nfw = ["cat", "v"]\nid = { command = ["./id.sh"] }\n'
    )
    config = read_config(path)
    shown = parse_board(format_public_config(config), path)
    assert {name: one.text for name, one in shown.stack.items()} == {"driver": "1.0"}
    leased = parse_board(format_leased_config(config, "unix:b", 3, ""), tmp_path / "elsewhere" / "b.toml")
    assert leased.stack == config.stack
    assert leased.stack["id"].command == (str(tmp_path / "id.sh"),)


def test_public_config_contains_versions_instead_of_commands(tmp_path: Path) -> None:
    path = tmp_path / "pi.toml"
    text = '[board]\n[stack]\ncarrier = "rev B"\ndriver = ["modinfo", "npu"]\nfirmware = {command = ["./fw.sh"]}\n'
    config = parse_board(text, path)
    public = format_public_config(config, {"driver": "1.3", "carrier": "rev C", "other": "2"})
    assert {name: one.text for name, one in parse_board(public, path).stack.items()} == {
        "carrier": "rev B",
        "driver": "1.3",
    }
    long = parse_board(format_public_config(config, {"driver": "x" * 2000}), path).stack["driver"].text
    assert len(long) == 300
