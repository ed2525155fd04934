"""Agents of different logins on one machine share its claim: one session at a time."""

from __future__ import annotations

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.waiting import allowed_s

from hil.agent.board_claim import BoardClaim, Holder
from hil.agent.session import Journal, Session, Sessions
from hil.errors import BoardError

ME = getpass.getuser()
HOLD = """
import sys, time
from hil.agent.board_claim import BoardClaim
claim = BoardClaim(sys.argv[1])
assert claim.take("alice@laptop", "hil run")
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def name(tmp_path: Path) -> str:
    """Return a machine name unique to the test."""
    return f"{os.getpid()}-{tmp_path.name}"


@pytest.fixture
def claims(name: str) -> Iterator[tuple[BoardClaim, BoardClaim]]:
    pair = BoardClaim(name), BoardClaim(name)
    yield pair
    for one in pair:
        one.release()


def test_board_claim_excludes_a_second_agent(claims: tuple[BoardClaim, BoardClaim]) -> None:
    first, second = claims
    assert first.take("alice@laptop", "hil run") and not second.take("bob@desk", "hil bench")
    assert first.find_other_holder() is None
    holder = second.find_other_holder()
    assert holder and holder.owner == f"alice@laptop, logged in as {ME},"
    assert holder.purpose == "hil run" and 0 <= holder.held_s < 60
    first.release()
    assert (
        second.find_other_holder() is None
        and second.take("bob@desk", "hil bench")
        and not first.take("alice@laptop", "")
    )


def test_board_claim_reports_new_owner_after_renewal(claims: tuple[BoardClaim, BoardClaim]) -> None:
    first, second = claims
    assert first.take("alice", "hil run") and first.take("carol", "farm job 7")
    holder = second.find_other_holder()
    assert holder and holder.owner.startswith("carol,") and holder.purpose == "farm job 7"


def test_board_claim_ignores_claims_with_other_names(name: str) -> None:
    first, second = BoardClaim(name), BoardClaim(f"{name}-other")
    assert first.take("alice", "") and second.take("bob", "")
    first.release()
    second.release()


def test_board_claim_wait_returns_after_release(claims: tuple[BoardClaim, BoardClaim]) -> None:
    first, second = claims
    assert first.take("alice", "")
    threading.Timer(0.2, first.release).start()
    started = time.monotonic()
    second.wait_free(30.0)
    assert 0.1 < time.monotonic() - started < allowed_s(20)
    assert second.take("bob", "")


def test_board_claim_wait_times_out(claims: tuple[BoardClaim, BoardClaim]) -> None:
    first, second = claims
    assert first.take("alice", "")
    started = time.monotonic()
    second.wait_free(0.2)
    assert 0.1 < time.monotonic() - started < allowed_s(20)


def test_board_claim_ends_with_killed_process(name: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, name], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"held\n"
    claim = BoardClaim(name)
    assert not claim.take("bob", "")
    process.send_signal(signal.SIGKILL)
    claim.wait_free(30.0)
    process.wait()
    process.stdout.close()
    assert claim.take("bob", "")
    claim.release()


@pytest.fixture
def squatter(name: str) -> Iterator[socket.socket]:
    """Return a socket with the claim's name whose process is not an agent."""
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"\0hil-board-{name}")
        yield one


def test_board_claim_reports_silent_process_by_pid(squatter: socket.socket, name: str) -> None:
    squatter.listen()
    claim = BoardClaim(name)
    assert not claim.take("bob", "")
    holder = claim.find_other_holder()
    assert holder and holder.owner == f"process {os.getpid()} of user {ME}"


@pytest.mark.parametrize(
    "answer",
    [
        *(b"", b"HTTP/1.1 400\r\n", b"[]", b"7", b'{"owner": "x"}', b"[" * 4000, b"\xff\xfe"),
        *(json.dumps({"owner": "x", "purpose": "y", "held_s": held}).encode() for held in (-1, "nan", None, 10**3000)),
    ],
)
def test_board_claim_ignores_invalid_holder_message(squatter: socket.socket, name: str, answer: bytes) -> None:
    squatter.listen()

    def serve() -> None:
        link, _ = squatter.accept()
        with link:
            link.sendall(answer)

    server = threading.Thread(target=serve)
    server.start()
    holder = BoardClaim(name).find_other_holder()
    server.join()
    assert holder == Holder(f"process {os.getpid()} of user {ME}", "", 0.0)


def test_board_claim_wait_pauses_after_hang_up(squatter: socket.socket, name: str) -> None:
    squatter.listen()

    def serve() -> None:
        squatter.accept()[0].close()

    server = threading.Thread(target=serve)
    server.start()
    started = time.monotonic()
    BoardClaim(name).wait_free(10.0)
    server.join()
    assert 0.05 < time.monotonic() - started < allowed_s(8)


def test_board_claim_escapes_owner_text(squatter: socket.socket, name: str) -> None:
    squatter.listen()

    def serve() -> None:
        link, _ = squatter.accept()
        with link:
            link.sendall(json.dumps({"owner": "\x1b[31m" + "x" * 900, "purpose": "y", "held_s": 1}).encode())

    server = threading.Thread(target=serve)
    server.start()
    holder = BoardClaim(name).find_other_holder()
    server.join()
    assert holder and "\x1b" not in holder.owner and len(holder.owner) < 400


def test_board_claim_ignores_socket_without_listener(squatter: socket.socket, name: str) -> None:
    claim = BoardClaim(name)
    assert not claim.take("bob", "") and claim.find_other_holder() is None
    started = time.monotonic()
    claim.wait_free(0.1)
    assert 0.05 < time.monotonic() - started < allowed_s(20)


class Agent:
    """The sessions of an agent."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir()
        self.claim = BoardClaim(name)
        self.sessions = Sessions(folder / "fence", lambda: None, Journal(folder / "journal"), self.claim)

    def open(self, owner: str, fence: int = 0) -> Session | None:
        return self.sessions.open(owner, "a test", 60.0, fence, lambda reason: None)

    def end(self) -> None:
        if session := self.sessions.current:
            self.sessions.end(session, "over")


@pytest.fixture
def agents(tmp_path: Path, name: str) -> Iterator[tuple[Agent, Agent]]:
    pair = Agent(tmp_path / "alice", name), Agent(tmp_path / "bob", name)
    yield pair
    for one in pair:
        one.end()


def test_sessions_open_waits_for_other_login(agents: tuple[Agent, Agent]) -> None:
    alice, bob = agents
    assert alice.open("alice")
    assert bob.open("bob") is None and bob.open("farm", fence=9) is None
    assert bob.sessions.fence == 0
    holder = bob.sessions.get_holder()
    assert holder and holder.owner.startswith("alice,") and holder.fence == 0
    alice.end()
    bob.sessions.wait_free(30.0)
    assert bob.open("bob") and alice.open("alice") is None


def test_sessions_takeover_retains_board_claim(agents: tuple[Agent, Agent]) -> None:
    alice, bob = agents
    assert alice.open("alice") and alice.open("farm", fence=9)
    holder = bob.sessions.get_holder()
    assert bob.open("bob") is None and holder and holder.owner.startswith("farm,")


def test_sessions_release_claim_when_open_fails(agents: tuple[Agent, Agent], tmp_path: Path) -> None:
    alice, bob = agents
    (tmp_path / "alice").rename(tmp_path / "gone")
    with pytest.raises(BoardError):
        alice.open("alice")
    assert bob.open("bob")
