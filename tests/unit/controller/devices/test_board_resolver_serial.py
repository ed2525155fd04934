"""Addresses of serial lines select the board config with this line."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.devices.choosing.board_resolver import choose, open_link
from hil.errors import BoardUnreachable, UsageError

CONFIG = """
[connection]
address = "serial:{device}"
[mcu]
chip = "mps2-an386"
"""


@pytest.fixture
def boards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory of board configs with the board `m4` at the device `tty0`, an invalid config, and another board."""
    folder = tmp_path / "boards"
    folder.mkdir()
    (folder / "m4.toml").write_text(CONFIG.format(device=tmp_path / "tty0"))
    (folder / "invalid.toml").write_text("[mcu]\nchip = 5\n")
    (folder / "other.toml").write_text("[connection]\naddress = 'ssh:pi'\n")
    monkeypatch.setenv("HIL_BOARDS", str(folder))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return folder


def test_address_selects_the_config_with_this_line(boards: Path, tmp_path: Path) -> None:
    (tmp_path / "by-id").symlink_to(tmp_path / "tty0")
    for name in ("tty0", "by-id"):
        choice = choose(f"serial:{tmp_path}/{name}")
        assert (choice.config.name, choice.target) == ("m4", f"serial:{tmp_path}/{name}")


def test_type_selects_the_config_of_another_line(boards: Path, tmp_path: Path) -> None:
    choice = choose(f"serial:{tmp_path}/tty1", "m4")
    assert (choice.config.name, choice.target) == ("m4", f"serial:{tmp_path}/tty1")


def test_several_configs_of_a_line_are_an_error(boards: Path, tmp_path: Path) -> None:
    (boards / "spare.toml").write_text(CONFIG.format(device=tmp_path / "tty0"))
    with pytest.raises(UsageError, match="several board configs have the address") as caught:
        choose(f"serial:{tmp_path}/tty0")
    assert "--runtime-hw-type" in caught.value.hint


def test_line_without_config_names_the_known_configs(boards: Path) -> None:
    with pytest.raises(UsageError, match="the chip at serial:/dev/null is unknown") as caught:
        open_link(choose("serial:/dev/null"))
    assert "(known: m4)" in caught.value.hint


def test_missing_device_is_reported_before_the_agent_starts(boards: Path, tmp_path: Path) -> None:
    with pytest.raises(BoardUnreachable, match="tty0 not found: No such file or directory"):
        open_link(choose("m4"))
