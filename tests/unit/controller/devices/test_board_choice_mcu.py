"""Runtimes and devices of a microcontroller."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.devices.board_choice import BoardChoice, fill_target, refuse_missing_device, use_device
from hil.controller.pipeline.settings.options import Options
from hil.controller.pipeline.stages import check_options
from hil.core.board_config import BoardConfig
from hil.core.board_parser import parse_board
from hil.errors import BoardUnfit, UsageError

INFO = {"machine": {"arch": "armv7e-m"}, "runtimes": [{"name": "mcu", "version": "1", "devices": ["cpu"]}]}
TEXT = '[connection]\naddress = "serial:/dev/ttyACM0"\n[mcu]\nchip = "mps2-an386"\n'


def make_config() -> BoardConfig:
    return parse_board(TEXT, Path("/m4.toml"))


@pytest.mark.parametrize("device", ["cpu", "vulkan"])
def test_device_keeps_the_chip(device):
    config = make_config()
    used = use_device(BoardChoice(config), "", device).config
    assert used.compile_flags == config.compile_flags


def test_unknown_device_is_refused_with_the_devices():
    config = use_device(BoardChoice(make_config()), "", "vulkan").config
    with pytest.raises(BoardUnfit, match="no device 'vulkan'") as refused:
        refuse_missing_device(config, "", INFO, "m4")
    assert refused.value.hint == "devices found: cpu"
    refuse_missing_device(use_device(BoardChoice(make_config()), "", "cpu").config, "", INFO, "m4")


def test_other_runtime_is_refused():
    with pytest.raises(UsageError, match="has only the runtime mcu, not iree"):
        check_options(Options(runtime="iree"), BoardChoice(make_config()))
    # The config of a board that a farm chooses is unknown before the connection.
    with pytest.raises(UsageError, match="has only the runtime mcu, not iree"):
        fill_target(BoardConfig("m4", "m4"), "iree", INFO)
