"""Addresses to listen on: what is none is refused, and what cannot be had is told in one way, by hil alone."""

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
from hil.protocol.listening import check_listen, check_tls_files, check_token_way, host_port, is_served, listen_on


@pytest.mark.parametrize(
    ("text", "found"),
    [("127.0.0.1:0", ("127.0.0.1", 0)), ("localhost:65535", ("localhost", 65535)), ("[::1]:7070", ("::1", 7070))],
)
def test_host_and_port(text, found):
    assert host_port(text) == found


@pytest.mark.parametrize("text", ["", "localhost", "localhost:", "localhost:x", "h:-1", "h:٣", "h:65536", "h:80000"])
def test_what_has_no_port_is_no_address(text):
    with pytest.raises(UsageError, match="is no address to listen on"):
        host_port(text)
    with pytest.raises(UsageError):
        check_listen(text, protected=True, needs="", hint="")


def test_a_port_in_use_is_told(capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match="Address already in use") as caught:
            listen_on(grpc.server(None), address)
    assert "another port" in caught.value.hint
    assert capfd.readouterr().err == "", "gRPC's own words"


@pytest.mark.parametrize("module", ["hil.sim", "hil.agent"])
@pytest.mark.parametrize("more", [[], ["--fault", "slow"]])
def test_what_serves_boards_says_one_thing_and_ends(tmp_path: Path, module, more):
    if more and module == "hil.agent":
        more = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 80000):
            command = [sys.executable, "-m", module, "--listen", f"127.0.0.1:{port}", "--store", str(tmp_path), *more]
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 2, done
            assert len(done.stderr.splitlines()) == 2 and done.stderr.startswith(f"{module}: "), done.stderr
            assert done.stdout == "", json.dumps(done.stdout)


REMOTE = ["192.0.2.7:7070", "lab:7070", "0.0.0.0:7070", "[2001:db8::1]:7070", ":7070", "dns:///127.0.0.1:7070"]
LOCAL = ["unix:/a.sock", "localhost:7070", "127.0.0.1:7070", "127.9.9.9:7070", "[::1]:7070"]


@pytest.mark.parametrize("address", REMOTE)
def test_a_token_leaves_this_machine_only_encrypted(address):
    check_token_way(address, encrypted=True, hint="")
    with pytest.raises(UsageError, match="in the clear") as caught:
        check_token_way(address, encrypted=False, hint="ca = ...")
    assert caught.value.hint == "ca = ..."


@pytest.mark.parametrize("address", LOCAL)
def test_on_this_machine_a_token_needs_no_encryption(address):
    check_token_way(address, encrypted=False, hint="")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"cert": "c", "key": ""}, "without its key"),
        ({"cert": "", "key": "k"}, "without its certificate"),
        ({"cert": "", "key": "", "ca": "a", "ca_needs_cert": True}, "that is no TLS"),
        ({"cert": "c", "key": "k"}, "that is no TLS"),
    ],
)
def test_half_of_tls_is_none_and_is_refused(given, why):
    with pytest.raises(UsageError, match=why):
        check_tls_files(**given)


def test_tls_of_unix_sockets_alone_would_be_none_and_is_refused():
    tls = {"cert": "c", "key": "k", "ca_needs_cert": True}
    with pytest.raises(UsageError, match="TLS is for ports"):
        check_tls_files(**tls, listens=("unix:/a", "unix:/b"))
    check_tls_files(**tls, listens=("unix:/a", "0.0.0.0:0"))
    check_tls_files(cert=None, key=None, listens=("unix:/a",))


@pytest.mark.parametrize("given", [{}, {"ca": "a"}, {"ca": "a", "cert": "c", "key": "k"}])
def test_whole_tls_of_a_client_is_taken_or_none(given):
    check_tls_files(**{"cert": None, "key": None, **given})


@pytest.mark.parametrize("given", [["--tls-cert", "x.pem"], ["--tls-key", "x.key"], ["--tls-client-ca", "ca.pem"]])
def test_an_agent_with_half_of_tls_does_not_serve_in_the_clear(given, tmp_path):
    command = [sys.executable, "-m", "hil.agent", "--listen", "127.0.0.1:0", "--store", str(tmp_path / "s"), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "TLS" in done.stderr and "Traceback" not in done.stderr


def test_a_socket_is_served_by_who_listens_though_it_accepts_nobody(tmp_path: Path):
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
