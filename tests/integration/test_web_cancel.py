"""`hil web` cancels the work of disconnected clients, and exits within a second during any work."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from support.waiting import eventually
from support.web import serving, write_run

from hil.controller.web.access import connections
from hil.controller.web.access.connections import EXIT_S, MAX_WORKING
from hil.controller.web.access.peers import Peer

# Inspecting every element takes minutes.
ELEMENTS = 8 << 30
# Under load all steps are slower, and the work is slower still.
SLACK_S = 20.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with tensors too large to read quickly."""
    files = {kind: [{"name": "y", "file": f"{kind}.npy", "dtype": "float32"}] for kind in ("outputs", "references")}
    case = {
        "name": "model",
        "outputs": files["outputs"],
        "references": [{"source": "cpu", "outputs": files["references"]}],
    }
    folder = write_run(tmp_path / "runs", "one", [case])
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({ELEMENTS},), }}"
    for kind in files:
        with (folder / f"{kind}.npy").open("wb") as file:
            file.write(b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + head.ljust(117).encode() + b"\n")
            file.truncate(128 + 4 * ELEMENTS)
    return tmp_path / "runs"


def ask(address: str, number: int) -> socket.socket:
    """Request part of the tensor page and never read the response."""
    where = urlsplit(address)
    peer = socket.create_connection((where.hostname, where.port), timeout=60)
    path = f"/tensors?id=one&case=model&kind=outputs&output=y&now=all&rtol=0.{number}"
    head = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    peer.sendall(head.encode())
    return peer


@contextmanager
def many(address: str) -> Iterator[list[socket.socket]]:
    """Open as many requests as the server handles concurrently."""
    peers = [ask(address, number) for number in range(1, MAX_WORKING + 1)]
    try:
        time.sleep(1)  # until the server handles them
        yield peers
    finally:
        for peer in peers:
            peer.close()


def test_abandoned_requests_do_not_block_server(root: Path) -> None:
    with serving(root) as address:
        for _ in range(2):
            with many(address) as peers:
                for peer in peers:  # none has finished
                    peer.settimeout(0.01)
                    with pytest.raises(TimeoutError):
                        peer.recv(1)
            begun = time.monotonic()
            assert urlopen(f"{address}/", timeout=60).status == 200
            assert time.monotonic() - begun < SLACK_S


def test_busy_client_leaves_threads_for_other_clients(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each loopback address counts as a client.
    monkeypatch.setattr(connections, "find_peer", lambda connection, client, server: Peer("", client[0]))
    with serving(root) as address, many(address) as peers:
        where = urlsplit(address)
        with socket.create_connection((where.hostname, where.port), 60, source_address=("127.0.0.2", 0)) as other:
            other.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert other.recv(12) == b"HTTP/1.1 200"
        for peer in peers:  # none has finished
            peer.settimeout(0.01)
            with pytest.raises(TimeoutError):
                peer.recv(1)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_busy_server(root: Path, tmp_path: Path, number: signal.Signals) -> None:
    words = [sys.executable, "-m", "hil", "web", "--runs", str(root), "--port", "0"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        address = process.stdout.readline().strip().rstrip("/")
        eventually(lambda: "one" in urlopen(f"{address}/", timeout=60).read().decode())
        children = re.findall(r"\d+", Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())
        with many(address), urlopen(f"{address}/events", timeout=60):
            begun = time.monotonic()
            process.send_signal(number)
            process.wait(60)
            took = time.monotonic() - begun
        assert "Traceback" not in process.stderr.read()
    assert took < EXIT_S + SLACK_S
    assert process.returncode in (128 + number, -number)
    eventually(lambda: not any(Path(f"/proc/{child}").exists() for child in children))
