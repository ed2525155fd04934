"""The addresses an agent accepts, and its clients' authentication."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from hil import errors
from hil.agent.server import Agent, AgentConfig
from hil.controller.devices.agent_client.client import AgentClient
from hil.controller.devices.board_client import AgentEndpoint


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    """Create a CA, a server certificate and a client certificate for localhost with openssl."""
    folder = tmp_path_factory.mktemp("pki")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    (folder / "ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name in ("server", "client"):
        openssl(
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.csr",
            "-subj",
            f"/CN={name}",
        )
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-out", f"{name}.pem", "-extfile", "ext")  # fmt: skip
    return folder


def start(tmp_path, listen: str, **settings) -> Agent:
    return Agent(AgentConfig(listen, tmp_path / "store", **settings))


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:5000", "example.org:80"])
def test_agent_requires_tls_and_token_beyond_loopback(tmp_path, listen, pki):
    for settings in ({}, {"token": "t"}, {"tls_key": pki / "server.key", "tls_cert": pki / "server.pem"}):
        with pytest.raises(errors.UsageError, match="needs TLS and a token"):
            start(tmp_path, listen, **settings)


@pytest.mark.parametrize("listen", ["", "nonsense", "unix:", "127.0.0.1:", "127.0.0.1:x", "unix:/no/such/folder/s"])
def test_agent_rejects_invalid_listen_address(tmp_path, listen):
    with pytest.raises(errors.UsageError):
        start(tmp_path, listen)


def test_agent_rejects_tls_on_unix_socket(tmp_path, pki):
    with pytest.raises(errors.UsageError, match="TLS is not supported on Unix sockets"):
        start(tmp_path, f"unix:{tmp_path}/a.sock", tls_key=pki / "server.key", tls_cert=pki / "server.pem")


@pytest.mark.parametrize("name", ["a.sock", "a.sock.data"])
def test_agent_leaves_regular_file_at_socket_path(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(errors.UsageError, match="not a socket"):
        start(tmp_path, f"unix:{tmp_path}/a.sock")
    assert (tmp_path / name).read_text() == "precious"
    assert [path.name for path in tmp_path.glob("a.sock*")] == [name]


def test_agent_rejects_certificate_without_key_on_unix_socket(tmp_path, pki):
    with pytest.raises(errors.UsageError, match="without a key"):
        start(tmp_path, f"unix:{tmp_path}/a.sock", tls_cert=pki / "server.pem")


def test_agent_creates_unix_socket_and_store_private_to_owner(tmp_path):
    agent = start(tmp_path, f"unix:{tmp_path}/s.sock")
    try:
        assert (tmp_path / "s.sock").stat().st_mode & 0o077 == 0
        assert (tmp_path / "store").stat().st_mode & 0o077 == 0
    finally:
        agent.stop()


def test_agent_requires_token_and_tls_from_clients(tmp_path, pki):
    agent = start(tmp_path, "0.0.0.0:0", token="secret", tls_key=pki / "server.key", tls_cert=pki / "server.pem")
    address = f"localhost:{agent.address.rpartition(':')[2]}"
    clients = [
        AgentClient(AgentEndpoint(address, token, pki / "ca.pem"), "tls") for token in ("secret", "wrong", "")
    ] + [AgentClient(AgentEndpoint(address), "plain")]
    try:
        assert clients[0].describe().machine.arch
        for refused, why in zip(clients[1:3], ("token mismatch", "none was sent"), strict=True):
            with pytest.raises(errors.BoardError, match=why) as caught:
                refused.describe()
            assert "HIL_AGENT_TOKEN" in caught.value.hint
        with pytest.raises(errors.BoardUnreachable):
            clients[3].describe(timeout=2)
    finally:
        for client in clients:
            client.close()
        agent.stop()


@pytest.mark.ci
def test_agent_with_mutual_tls_requires_client_certificate(tmp_path, pki):
    tls = {"tls_key": pki / "server.key", "tls_cert": pki / "server.pem", "tls_client_ca": pki / "ca.pem"}
    agent = start(tmp_path, "127.0.0.1:0", token="secret", **tls)
    address = f"localhost:{agent.address.rpartition(':')[2]}"
    known = AgentClient(
        AgentEndpoint(address, "secret", pki / "ca.pem", pki / "client.pem", pki / "client.key"), "mutual"
    )
    unknown = AgentClient(AgentEndpoint(address, "secret", pki / "ca.pem"), "mutual")
    try:
        assert known.describe().machine.arch
        with pytest.raises(errors.BoardUnreachable):
            unknown.describe(timeout=2)
    finally:
        known.close()
        unknown.close()
        agent.stop()


def test_agent_refuses_active_socket_and_replaces_stale_socket(tmp_path):
    listen = f"unix:{tmp_path}/s.sock"
    first = start(tmp_path / "first", listen)
    try:
        with pytest.raises(errors.UsageError, match="is already in use"):
            start(tmp_path / "second", listen)
        client = AgentClient(AgentEndpoint(listen), "first")
        assert client.describe().machine.arch
        client.close()
    finally:
        first.stop()
    for name in ("s.sock", "s.sock.data"):  # as a killed agent leaves them
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(tmp_path / name))
    start(tmp_path / "third", listen).stop()


@pytest.mark.parametrize("module", ["hil.agent", "hil.sim"])
def test_agent_cli_help_and_errors_show_invoked_command(module):
    helped = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True)
    assert helped.stdout.startswith(f"usage: python -m {module} [-h]")
    wrong = subprocess.run([sys.executable, "-m", module, "--listen"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2 and f"python -m {module}: error:" in wrong.stderr
