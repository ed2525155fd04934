"""Arguments and config file for ssh."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hil.controller.devices.ssh.openssh import client
from hil.core.board_config import Connection
from hil.errors import UsageError


def test_config_file_preserves_bytes_of_paths(tmp_path: Path) -> None:
    known = os.fsdecode(b"/tmp/\xff")
    config = client._write_config(tmp_path, Connection(known_hosts=known), {}, is_interactive=False, can_answer=False)
    assert b'GlobalKnownHostsFile "/tmp/\xff" ' in config.read_bytes()


@pytest.mark.parametrize("name", ["identity", "known_hosts"])
def test_path_with_variable_raises_usage_error(name: str) -> None:
    with pytest.raises(UsageError, match=r"ssh cannot read the path '/\$\{X\}/k'"):
        client._build_options(Path("/s"), Connection(**{name: "/${X}/k"}))
