"""Tunnels over a fake transport."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from hil.controller.devices.ssh.address import parse_address
from hil.controller.devices.ssh.shell import Shell
from hil.controller.devices.ssh.tunnel import open_tunnel
from hil.protocol.local_socket import MAX_PATH_LENGTH


@pytest.mark.parametrize(("longer", "sockets"), [(0, 2), (1, 1)])
def test_tunnel_forwards_data_socket_if_path_fits(longer: int, sockets: int) -> None:
    transport = Mock(user="root", port=22, fingerprint="SHA256:abc")
    folder = "d" * (MAX_PATH_LENGTH - len("/agent.sock.data/") + 1 + longer)
    with_path = f"/{folder[1:]}/agent.sock"
    tunnel = open_tunnel(Shell(transport, parse_address("root@board"), "b"), with_path)
    try:
        remotes = [call.args[1] for call in transport.forward.call_args_list]
        assert remotes == [with_path, f"{with_path}.data"][:sockets]
    finally:
        tunnel.close()
    assert not Path(tunnel.address.removeprefix("unix:")).parent.exists()
