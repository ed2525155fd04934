from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hil.agent.session import MAX_FENCE, MAX_FENCE_JUMP, Journal, Session, Sessions
from hil.errors import BoardBusy, BoardError, BoardUnfit, SessionEnded, UsageError


class Opened:
    """Sessions of an agent that counts how often programs are unloaded."""

    def __init__(self, folder: Path) -> None:
        self.journal = folder / "journal.jsonl"
        self.freed = 0
        self.reasons: list[str] = []
        self.sessions = Sessions(folder / "fence", self._free, Journal(self.journal))

    def open(self, owner: str, fence: int = 0, ttl_s: float = 60.0) -> Session | None:
        return self.sessions.open(owner, "a test", ttl_s, fence, self.reasons.append)

    def end(self, session: Session | None) -> None:
        assert session is not None
        self.sessions.end(session, "its owner left")

    def _free(self) -> None:
        self.freed += 1

    @property
    def noted(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.journal.read_text().splitlines()]


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Opened]:
    yield Opened(tmp_path)


def test_sessions_without_fence_wait_and_get_next_fence(agent):
    first = agent.open("first")
    assert first.fence == 1 and agent.open("second") is None
    agent.end(first)
    assert agent.open("second").fence == 2


def test_sessions_higher_fence_ends_open_session(agent):
    old = agent.open("old")
    new = agent.open("new", fence=40)
    assert (agent.sessions.current, agent.freed, agent.reasons) == (new, 1, ["new took over the board with fence 40"])
    with pytest.raises(SessionEnded):
        agent.sessions.check(old.token)
    assert agent.sessions.check(new.token) is new


def test_sessions_equal_fence_waits_while_session_open(agent):
    first = agent.open("lease", fence=7)
    assert agent.open("lease", fence=7) is None and agent.sessions.current is first
    agent.end(first)
    assert agent.open("lease", fence=7).fence == 7


def test_sessions_while_free_delays_next_session(agent):
    did: list[str] = []
    held = agent.open("first")
    agent.sessions.run_while_free(lambda: did.append("too early"))
    agent.end(held)
    with ThreadPoolExecutor() as threads:

        def work() -> None:
            opening = threads.submit(agent.open, "second")
            time.sleep(0.2)
            did.append(f"opened: {opening.done()}")

        agent.sessions.run_while_free(work)
    assert did == ["opened: False"]
    assert agent.sessions.current.owner == "second"


@pytest.mark.parametrize("is_open", [True, False])
def test_sessions_reject_fence_below_highest(agent, is_open):
    session = agent.open("lease", fence=7)
    if not is_open:
        agent.end(session)
    with pytest.raises(BoardBusy, match="stale fence 6: the board has already accepted fence 7"):
        agent.open("late", fence=6)
    assert agent.sessions.current is (session if is_open else None)


def test_sessions_reject_fence_passed_by_unfenced_session(agent):
    agent.end(agent.open("lease", fence=7))
    agent.end(agent.open("by hand"))
    with pytest.raises(BoardBusy, match="accepted fence 8"):
        agent.open("lease", fence=7)


def test_sessions_fence_survives_agent_restart(agent, tmp_path):
    agent.open("lease", fence=7)
    again = Opened(tmp_path)
    assert again.sessions.fence == 7
    with pytest.raises(BoardBusy):
        again.open("late", fence=6)


def test_sessions_with_equal_fence_run_serially(agent):
    having: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        for _ in range(20):
            while (session := agent.open(f"worker {number}", fence=9)) is None:
                agent.sessions.wait_free(1.0)
            having.append(number)
            most.append(len(having))
            having.remove(number)
            agent.end(session)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(most) == 80 and set(most) == {1}


def test_sessions_end_after_ttl_without_client(agent):
    agent.open("silent", ttl_s=0.5)
    agent.sessions.wait_free(30)
    assert agent.sessions.current is None and "no message for" in agent.reasons[0]


def test_sessions_journal_records_owners_and_times(agent):
    before = time.time_ns()
    agent.end(agent.open("anna", fence=3))
    agent.open("bert")
    started, opened, ended, next_one = agent.noted
    assert started["what"] == "agent started"
    assert opened["what"] == "session opened" and opened["owner"] == "anna" and opened["purpose"] == "a test"
    assert ended["what"] == "session ended" and ended["reason"] == "its owner left"
    assert [one["fence"] for one in (opened, ended, next_one)] == [3, 3, 4]
    assert opened["at_ns"] <= ended["at_ns"] <= next_one["at_ns"]
    assert before <= opened["wall_ns"] <= time.time_ns()


@pytest.mark.parametrize("fence", [2**64 - 1, 2**63, 2**62, MAX_FENCE_JUMP + 8])
def test_sessions_reject_implausible_fence_without_change(agent, tmp_path, fence):
    agent.end(agent.open("lease", fence=7))
    with pytest.raises(UsageError, match=r"invalid fence .*: the board is at fence 7 and accepts at most \d+"):
        agent.open("attacker", fence=fence)
    assert agent.sessions.fence == 7 and (tmp_path / "fence").read_text() == "7"
    assert agent.open("next").fence == 8


def test_sessions_accept_high_fence_on_new_board(agent):
    assert agent.open("lease", fence=5_000_000).fence == 5_000_000
    assert agent.open("another farm", fence=5_000_001).fence == 5_000_001


def test_sessions_reject_fence_above_maximum(agent, tmp_path):
    (tmp_path / "fence").write_text(str(MAX_FENCE))
    full = Opened(tmp_path)
    for fence in (0, MAX_FENCE + 1):
        with pytest.raises((BoardError, UsageError)) as refused:
            full.open("next", fence=fence)
        assert str(MAX_FENCE) in str(refused.value)
    with pytest.raises(BoardError, match="reset-fence"):
        full.open("next")


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 8, b"-1", b"x", b"1.5", "²".encode(), b"9" * 90, str(2**64 - 1).encode(), None]
)
def test_sessions_report_damaged_fence_file(tmp_path, content):
    if content is None:
        (tmp_path / "fence").mkdir()  # unreadable
    else:
        (tmp_path / "fence").write_bytes(content)
    damaged = Opened(tmp_path)
    for call in (lambda: damaged.sessions.fence, lambda: damaged.open("a"), lambda: damaged.open("a", fence=9)):
        with pytest.raises(BoardError, match=r"fence .*(corrupt|unreadable)[^$]*reset-fence") as told:
            call()
        assert not isinstance(told.value, BoardBusy)
    assert damaged.sessions.current is None


def test_sessions_overwrite_fence_on_full_disk(agent, tmp_path, monkeypatch):
    """On a full disk a new fence replaces the previous one. A first fence fails, and the board stays free."""

    def full(path, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(BoardUnfit, match=r"cannot use .*fence: the disk is full"):
        agent.open("first")
    assert agent.sessions.current is None and agent.sessions.fence == 0
    (tmp_path / "fence").write_text("9")
    again = Opened(tmp_path)
    assert again.open("next").fence == 10
    assert again.open("a lease", fence=2000).fence == 2000
    assert Opened(tmp_path).sessions.fence == 2000
