"""An agent's Unix socket is looked at before anybody waits for it."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import pytest
from support.waiting import allowed_s

from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint
from hil.controller.devices.choosing.board_resolver import choose
from hil.controller.devices.links import agent
from hil.core.boards import load_board
from hil.errors import BoardUnreachable, UsageError


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(address: str, why: str) -> None:
    with pytest.raises(BoardUnreachable, match=f"no agent responds at {re.escape(address)}: {why}") as caught:
        agent.connect(address, load_board("generic").config)
    assert f"--listen {address}" in caught.value.hint and caught.value.board == address


def test_connect_reports_missing_socket(nowhere: Path) -> None:
    refused("unix:nowhere.sock", "socket not found")
    refused(f"unix:{nowhere}/deep/nowhere.sock", "socket not found")


def test_connect_reports_stale_socket(nowhere: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("left.sock")
    refused("unix:left.sock", "Connection refused")


def test_connect_rejects_file_and_too_long_path(nowhere: Path) -> None:
    Path("file").write_text("")
    refused("unix:file", "Connection refused")
    refused(f"unix:{'long' * 50}.sock", "AF_UNIX path too long")


def test_connect_accepts_busy_server(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_PROBE_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as waiting:
        server.bind("busy.sock")
        server.listen(0)
        waiting.connect("busy.sock")
        assert agent.connect("unix:busy.sock", load_board("generic").config).target.address == "unix:busy.sock"


def test_connect_reports_closed_port_quickly() -> None:
    began = time.monotonic()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        refused(f"127.0.0.1:{port}", "Connection refused")
        refused(f"localhost:{port}", "Connection refused")
    refused("no-such-host.invalid:80", "host not found")
    assert time.monotonic() - began < allowed_s(8)  # gRPC would try for 10 s each


def test_connect_accepts_slow_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    assert agent.connect("10.0.0.1:7701", load_board("generic").config).target.address == "10.0.0.1:7701"


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1:0"])
def test_connect_rejects_invalid_port(address: str) -> None:
    with pytest.raises(UsageError, match="invalid agent address"):
        agent.connect(address, load_board("generic").config)


def test_connect_rejects_unreadable_token_file(nowhere: Path) -> None:
    (nowhere / "token").write_bytes(b"\xff\xfe")
    (nowhere / "b.toml").write_text('[connection]\ntoken_file = "token"\n')
    with pytest.raises(UsageError, match=r"cannot read the token file"):
        agent.connect("127.0.0.1:1", load_board(str(nowhere / "b.toml")).config)


def test_connect_rejects_unknown_user_in_path(nowhere: Path) -> None:
    (nowhere / "b.toml").write_text('[connection]\ntoken_file = "~nobody-of-that-name/token"\n')
    with pytest.raises(UsageError, match="unknown user in path"):
        agent.connect("127.0.0.1:1", load_board(str(nowhere / "b.toml")).config)
    with pytest.raises(UsageError, match="unknown user in path"):
        choose("root@host", identity=Path("~nobody-of-that-name/key"))


def test_client_refuses_cleartext_token_to_remote_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_AGENT_TOKEN", "secret")
    monkeypatch.setattr(agent, "_check", lambda address, board: None)
    link = agent.connect("192.0.2.7:7700", load_board("generic").config)
    with pytest.raises(UsageError, match=r"cannot send the token to 192\.0\.2\.7:7700 without TLS") as caught:
        AgentClient(link.target, "generic")
    assert "[connection] ca" in caught.value.hint


@pytest.mark.parametrize("files", [{"cert": "c.pem"}, {"key": "c.key"}, {"cert": "c.pem", "key": "c.key"}])
def test_client_rejects_incomplete_tls_config(files: dict[str, str], tmp_path: Path) -> None:
    target = AgentEndpoint("127.0.0.1:7700", **{name: tmp_path / file for name, file in files.items()})
    with pytest.raises(UsageError, match="TLS"):
        AgentClient(target, "bench")
