"""Listen addresses: invalid addresses are rejected, and hil reports unavailable ones in its format."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from hil.errors import UsageError
from hil.protocol.listening import (
    check_listen,
    check_tls_files,
    check_token_transport,
    is_served,
    listen_on,
    parse_host_port,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), ("localhost:65535", ("localhost", 65535)), ("[::1]:7070", ("::1", 7070))],
)
def test_host_port_splits_address(text, found):
    assert parse_host_port(text) == found


@pytest.mark.parametrize("text", ["", "localhost", "localhost:", "localhost:x", "h:-1", "h:٣", "h:65536", "h:80000"])
def test_host_port_rejects_address_without_port(text):
    with pytest.raises(UsageError, match="invalid listen address"):
        parse_host_port(text)
    with pytest.raises(UsageError):
        check_listen(text, protected=True, needs="", hint="")


def test_listen_on_reports_port_in_use(capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match="Address already in use") as caught:
            listen_on(grpc.server(None), address)
    assert "a different port" in caught.value.hint
    assert capfd.readouterr().err == "", "gRPC's own words"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("module", "more"), [("hil.agent", []), ("hil.sim", []), ("hil.sim", ["--fault", "slow"])], ids=str
)
def test_agent_and_simulator_exit_with_clear_listen_error(tmp_path: Path, module, more):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = taken.getsockname()[1]
        for port, text in ((used, "Address already in use"), (80000, "65535")):
            command = [sys.executable, "-m", module, "--listen", f"127.0.0.1:{port}", "--store", str(tmp_path), *more]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 2, done
            error, hint = done.stderr.splitlines()
            assert error.startswith(f"{module}: ") and text in error, done.stderr
            assert hint.startswith("  hint: "), done.stderr
            assert done.stdout == "", json.dumps(done.stdout)


REMOTE = ["192.0.2.7:7070", "lab:7070", "0.0.0.0:7070", "[2001:db8::1]:7070", ":7070", "dns:///127.0.0.1:7070"]
LOCAL = ["unix:/a.sock", "localhost:7070", "127.0.0.1:7070", "127.9.9.9:7070", "[::1]:7070"]


@pytest.mark.parametrize("address", REMOTE)
def test_token_to_remote_address_requires_encryption(address):
    check_token_transport(address, encrypted=True, hint="")
    with pytest.raises(UsageError, match="without TLS") as caught:
        check_token_transport(address, encrypted=False, hint="ca = ...")
    assert caught.value.hint == "ca = ..."


@pytest.mark.parametrize("address", LOCAL)
def test_token_to_local_address_needs_only_plain_connection(address):
    check_token_transport(address, encrypted=False, hint="")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"cert": "c", "key": ""}, "without a key"),
        ({"cert": "", "key": "k"}, "without a certificate"),
        ({"cert": "", "key": "", "ca": "a", "ca_needs_cert": True}, "needs a server certificate"),
        ({"cert": "c", "key": "k"}, "requires the CA"),
    ],
)
def test_check_tls_files_rejects_incomplete_tls(given, why):
    with pytest.raises(UsageError, match=why):
        check_tls_files(**given)


def test_check_tls_files_rejects_tls_for_only_unix_sockets():
    tls = {"cert": "c", "key": "k", "ca_needs_cert": True}
    with pytest.raises(UsageError, match="TLS is not supported on Unix sockets"):
        check_tls_files(**tls, listens=("unix:/a", "unix:/b"))
    check_tls_files(**tls, listens=("unix:/a", "0.0.0.0:0"))
    check_tls_files(cert=None, key=None, listens=("unix:/a",))


@pytest.mark.parametrize("given", [{}, {"ca": "a"}, {"ca": "a", "cert": "c", "key": "k"}])
def test_check_tls_files_accepts_complete_client_tls(given):
    check_tls_files(**{"cert": None, "key": None, **given})


@pytest.mark.parametrize("given", [["--tls-cert", "x.pem"], ["--tls-key", "x.key"], ["--tls-client-ca", "ca.pem"]])
def test_agent_refuses_incomplete_tls_options(given, tmp_path):
    command = [sys.executable, "-m", "hil.agent", "--listen", "127.0.0.1:0", "--store", str(tmp_path / "s"), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "TLS" in done.stderr and "Traceback" not in done.stderr


def test_socket_probe_detects_listener_with_full_backlog(tmp_path: Path):
    path = str(tmp_path / "s")
    assert not is_served(path)
    with contextlib.ExitStack() as kept:
        listening = kept.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(path)
        assert not is_served(path)
        listening.listen(0)
        for _ in range(3):
            assert is_served(path)
            waiting = kept.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(path)
    assert not is_served(path)
