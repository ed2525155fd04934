from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hil.controller.farm.host.inventory import lease_text, public_text, sim_text
from hil.core.board_config import BoardConfig, Power
from hil.core.boards import known_boards, load_board

FULL = """
[board]
hw_type = "rpi5"
description = "on the bench"
runtime = "onnxruntime"
[devices]
onnxruntime = "CPUExecutionProvider"
[compile_flags]
iree = ["--iree-hal-target-device=local", "--a b"]
[labels]
chip = "a76"
mem = 8
near = ["door", "window"]
[connection]
address = "root@192.0.2.7:2222"
token_file = "keys/token"
identity = "~/.ssh/lab"
known_hosts = "hosts"
accept_new_host_key = true
folder = "/opt/hil"
[runtime]
file = "bin/run-it"
flags = ["--device={device}", "{inputs}"]
[power]
reset = ["usbrelay", "A 1=1"]
off = { url = "http://user:pw@pdu/3/off", headers = { X = "1" }, body = "now" }
on = { url = "http://pdu/3/on", method = "PUT" }
delay = 3.5
boot_s = 40
"""


def written(text: str, folder: Path) -> BoardConfig:
    path = folder / "elsewhere" / "board.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return load_board(str(path))


@pytest.fixture
def config(tmp_path: Path) -> BoardConfig:
    (tmp_path / "rack3.toml").write_text(FULL)
    return load_board(str(tmp_path / "rack3.toml"))


def test_the_board_of_a_lease_is_the_board_itself_with_another_way_to_it(config, tmp_path):
    there = written(lease_text(config, "unix:/run/agent.sock", 12), tmp_path)
    connection = replace(
        config.connection,
        address="unix:/run/agent.sock",
        fence=12,
        token_file=str(tmp_path / "keys/token"),
        identity=str(Path("~/.ssh/lab").expanduser()),
        known_hosts=str(tmp_path / "hosts"),
    )
    command = replace(config.command, file=str(tmp_path / "bin/run-it"))
    assert there == replace(config, connection=connection, command=command, power=Power(), path=there.path)


def test_without_another_way_it_keeps_its_own(config, tmp_path):
    there = written(lease_text(config, "", 3), tmp_path)
    assert (there.connection.address, there.connection.fence) == ("root@192.0.2.7:2222", 3)


@pytest.mark.parametrize("name", sorted(known_boards()))
def test_every_config_that_comes_with_hil_can_be_leased(name, tmp_path):
    config = load_board(name)
    there = written(lease_text(config, "unix:/a.sock", 5), tmp_path)
    connection = replace(config.connection, address="unix:/a.sock", fence=5)
    assert there == replace(config, connection=connection, power=Power(), path=there.path)


def test_others_are_shown_no_way_to_the_board_no_keys_and_no_power(config, tmp_path):
    text = public_text(config)
    shown = written(text, tmp_path)
    assert not any(word in text for word in ("192.0.2.7", "token", "usbrelay", "pw@pdu", ".ssh"))
    assert (shown.name, shown.hw_type, shown.devices, shown.labels) == ("rack3", "rpi5", config.devices, config.labels)


def test_a_simulated_board_has_a_name_and_an_address_of_its_own(tmp_path):
    kind = load_board("sim-f16")
    there = written(sim_text(kind, "lab-sim-3", "unix:/s/3.sock"), tmp_path)
    assert (there.name, there.hw_type, there.connection.address) == ("lab-sim-3", kind.hw_type, "unix:/s/3.sock")
    assert there.simulator == kind.simulator and there.labels == kind.labels and not there.is_simulator
