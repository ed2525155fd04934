"""An agent's Unix socket is looked at before anybody waits for it."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

import pytest

from hil.controller.devices.board_client import Target
from hil.controller.devices.board_resolver import choose
from hil.controller.devices.client import AgentClient
from hil.controller.devices.links import agent
from hil.core.boards import load_board
from hil.errors import BoardUnreachable, UsageError


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(address: str, why: str) -> None:
    with pytest.raises(BoardUnreachable, match=f"no agent answers at {re.escape(address)}: {why}") as caught:
        agent.connect(address, load_board("generic"))
    assert f"--listen {address}" in caught.value.hint and caught.value.board == address


def test_a_socket_that_is_not_there(nowhere: Path) -> None:
    refused("unix:nowhere.sock", "there is no such socket")
    refused(f"unix:{nowhere}/deep/nowhere.sock", "there is no such socket")


def test_a_socket_that_nobody_serves_any_more(nowhere: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind("left.sock")
    refused("unix:left.sock", "Connection refused")


def test_what_is_no_socket(nowhere: Path) -> None:
    Path("file").write_text("")
    refused("unix:file", "Connection refused")
    refused(f"unix:{'long' * 50}.sock", "AF_UNIX path too long")


def test_a_server_that_is_too_busy_to_accept_is_there(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "_PROBE_S", 0.1)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as waiting:
        server.bind("busy.sock")
        server.listen(0)
        waiting.connect("busy.sock")
        assert agent.connect("unix:busy.sock", load_board("generic")).target.address == "unix:busy.sock"


def test_a_port_where_nobody_listens_is_told_at_once() -> None:
    began = time.monotonic()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        refused(f"127.0.0.1:{port}", "Connection refused")
        refused(f"localhost:{port}", "Connection refused")
    refused("no-such-host.invalid:80", "there is no such host")
    assert time.monotonic() - began < 8  # gRPC would try for 10 s each


def test_a_port_that_does_not_answer_yet_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    assert agent.connect("10.0.0.1:7701", load_board("generic")).target.address == "10.0.0.1:7701"


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1:0"])
def test_a_port_that_there_is_not_is_no_address(address: str) -> None:
    with pytest.raises(UsageError, match="is no address of an agent"):
        agent.connect(address, load_board("generic"))


def test_a_token_file_that_holds_no_text_is_the_users_mistake(nowhere: Path) -> None:
    (nowhere / "token").write_bytes(b"\xff\xfe")
    (nowhere / "b.toml").write_text('[connection]\ntoken_file = "token"\n')
    with pytest.raises(UsageError, match=r"token file .* cannot be read"):
        agent.connect("127.0.0.1:1", load_board(str(nowhere / "b.toml")))


def test_a_file_of_a_user_that_there_is_not_is_the_users_mistake(nowhere: Path) -> None:
    (nowhere / "b.toml").write_text('[connection]\ntoken_file = "~nobody-of-that-name/token"\n')
    with pytest.raises(UsageError, match="a user that there is not"):
        agent.connect("127.0.0.1:1", load_board(str(nowhere / "b.toml")))
    with pytest.raises(UsageError, match="a user that there is not"):
        choose("root@host", identity=Path("~nobody-of-that-name/key"))


def test_a_token_is_not_sent_to_another_machine_in_the_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIL_AGENT_TOKEN", "secret")
    monkeypatch.setattr(agent, "_check", lambda address, board: None)
    link = agent.connect("192.0.2.7:7700", load_board("generic"))
    with pytest.raises(UsageError, match=r"sent to 192\.0\.2\.7:7700 in the clear") as caught:
        AgentClient(link.target, "generic")
    assert "ca in the config" in caught.value.hint


@pytest.mark.parametrize("files", [{"cert": "c.pem"}, {"key": "c.key"}, {"cert": "c.pem", "key": "c.key"}])
def test_half_of_tls_in_a_config_is_refused(files: dict[str, str], tmp_path: Path) -> None:
    target = Target("127.0.0.1:7700", **{name: tmp_path / file for name, file in files.items()})
    with pytest.raises(UsageError, match="TLS"):
        AgentClient(target, "bench")
