from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hil.controller.farm.host.inventory import format_public_config, format_sim_config, lease_config
from hil.core.board_config import BoardConfig, Labgrid, MeasureCommands, Power
from hil.core.boards import load_board
from hil.core.meter_config import MeterConfig

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
    return load_board(str(path)).config


@pytest.fixture
def config(tmp_path: Path) -> BoardConfig:
    (tmp_path / "rack3.toml").write_text(FULL)
    return load_board(str(tmp_path / "rack3.toml")).config


@pytest.mark.parametrize("address", ["unix:/run/agent.sock", ""])
def test_lease_config_changes_only_connection_and_fence(address, config):
    config = replace(config, labgrid=Labgrid("rack3"), measure=MeasureCommands(timeout_s=5.0))
    config = replace(config, meter=MeterConfig(kind="command", command=("stream",)))
    there = lease_config(config, address, 12, "lease 4")
    connection = replace(config.connection, address=address or "root@192.0.2.7:2222", fence=12, lease="lease 4")
    assert there == replace(config, connection=connection, power=Power(), labgrid=Labgrid(), measure=MeasureCommands())
    assert there.path == config.path, "files that it names are relative to it"


def test_public_text_omits_address_keys_and_power(config, tmp_path):
    text = format_public_config(config)
    shown = written(text, tmp_path)
    assert not any(word in text for word in ("192.0.2.7", "token", "usbrelay", "pw@pdu", ".ssh"))
    assert (shown.name, shown.hw_type, shown.devices, shown.labels) == ("rack3", "rpi5", config.devices, config.labels)


def test_sim_text_sets_name_and_address_of_simulator(tmp_path):
    kind = load_board("sim-f16").config
    there = written(format_sim_config(kind, "lab-sim-3", "unix:/s/3.sock"), tmp_path)
    assert (there.name, there.hw_type, there.connection.address) == ("lab-sim-3", kind.hw_type, "unix:/s/3.sock")
    assert there.simulator == kind.simulator and there.labels == kind.labels and not there.is_simulator
