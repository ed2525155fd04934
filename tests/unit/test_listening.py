"""Addresses to listen on: what is none is refused, and what cannot be had is told in one way, by hil alone."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from hil.errors import UsageError
from hil.listening import check_listen, host_port, listen_on


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
