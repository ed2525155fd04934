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

from hil.agent.session import MOST_FENCE, MOST_JUMP, Journal, Session, Sessions
from hil.errors import BoardBusy, BoardError, SessionEnded, UsageError


class Opened:
    """Sessions of an agent whose programs are a list."""

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


def test_whoever_asks_for_no_fence_waits_for_its_turn_and_gets_the_next(agent):
    first = agent.open("first")
    assert first.fence == 1 and agent.open("second") is None
    agent.end(first)
    assert agent.open("second").fence == 2


def test_a_higher_fence_ends_the_open_session_and_all_that_it_held(agent):
    old = agent.open("old")
    new = agent.open("new", fence=40)
    assert (agent.sessions.current, agent.freed, agent.reasons) == (new, 1, ["new took the device with fence 40"])
    with pytest.raises(SessionEnded):
        agent.sessions.check(old.token)
    assert agent.sessions.check(new.token) is new


def test_the_highest_fence_again_waits_while_a_session_is_open_and_comes_in_where_none_is(agent):
    first = agent.open("lease", fence=7)
    assert agent.open("lease", fence=7) is None and agent.sessions.current is first
    agent.end(first)
    assert agent.open("lease", fence=7).fence == 7


def test_what_is_done_while_nobody_has_the_device_is_done_before_anybody_gets_it(agent):
    did: list[str] = []
    held = agent.open("first")
    agent.sessions.while_free(lambda: did.append("too early"))
    agent.end(held)
    with ThreadPoolExecutor() as threads:

        def work() -> None:
            opening = threads.submit(agent.open, "second")
            time.sleep(0.2)
            did.append(f"opened: {opening.done()}")

        agent.sessions.while_free(work)
    assert did == ["opened: False"]
    assert agent.sessions.current.owner == "second"


@pytest.mark.parametrize("is_open", [True, False])
def test_a_fence_below_the_highest_is_refused_whether_or_not_the_board_is_free(agent, is_open):
    session = agent.open("lease", fence=7)
    if not is_open:
        agent.end(session)
    with pytest.raises(BoardBusy, match="fence 6 is too old: the board has seen 7"):
        agent.open("late", fence=6)
    assert agent.sessions.current is (session if is_open else None)


def test_a_fence_that_was_passed_by_somebody_without_one_is_too_low(agent):
    agent.end(agent.open("lease", fence=7))
    agent.end(agent.open("by hand"))
    with pytest.raises(BoardBusy, match="seen 8"):
        agent.open("lease", fence=7)


def test_the_fence_outlives_the_agent(agent, tmp_path):
    agent.open("lease", fence=7)
    again = Opened(tmp_path)
    assert again.sessions.fence == 7
    with pytest.raises(BoardBusy):
        again.open("late", fence=6)


def test_of_many_with_the_same_fence_one_at_a_time_has_the_board(agent):
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


def test_a_session_that_nothing_is_heard_of_ends(agent):
    agent.open("silent", ttl_s=0.5)
    agent.sessions.wait_free(30)
    assert agent.sessions.current is None and "nothing was heard" in agent.reasons[0]


def test_the_journal_tells_who_had_the_board_and_when(agent):
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


@pytest.mark.parametrize("fence", [2**64 - 1, 2**63, 2**62, MOST_JUMP + 8])
def test_a_fence_that_no_farm_gives_is_refused_and_changes_nothing(agent, tmp_path, fence):
    agent.end(agent.open("lease", fence=7))
    with pytest.raises(UsageError, match="no fence that a farm gives: the board has seen 7"):
        agent.open("attacker", fence=fence)
    assert agent.sessions.fence == 7 and (tmp_path / "fence").read_text() == "7"
    assert agent.open("next").fence == 8


def test_a_board_set_up_anew_takes_the_fence_of_a_farm_that_has_counted_for_years(agent):
    assert agent.open("lease", fence=5_000_000).fence == 5_000_000
    assert agent.open("another farm", fence=5_000_001).fence == 5_000_001


def test_fences_are_never_counted_beyond_their_end(agent, tmp_path):
    (tmp_path / "fence").write_text(str(MOST_FENCE))
    full = Opened(tmp_path)
    for fence in (0, MOST_FENCE + 1):
        with pytest.raises((BoardError, UsageError)) as refused:
            full.open("next", fence=fence)
        assert str(MOST_FENCE) in str(refused.value)
    with pytest.raises(BoardError, match="reset-fence"):
        full.open("next")


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 8, b"-1", b"x", b"1.5", "²".encode(), b"9" * 90, str(2**64 - 1).encode(), None]
)
def test_a_damaged_fence_is_told_and_never_begun_anew(tmp_path, content):
    if content is None:
        (tmp_path / "fence").mkdir()  # it cannot be read
    else:
        (tmp_path / "fence").write_bytes(content)
    damaged = Opened(tmp_path)
    for call in (lambda: damaged.sessions.fence, lambda: damaged.open("a"), lambda: damaged.open("a", fence=9)):
        with pytest.raises(BoardError, match=r"fence .*(damaged|cannot be read)[^$]*reset-fence") as told:
            call()
        assert not isinstance(told.value, BoardBusy)
    assert damaged.sessions.current is None


def test_a_disk_without_room_keeps_nobody_out_who_has_had_the_board_before(agent, tmp_path, monkeypatch):
    """The fence still fits into the place of the one before; a first one is refused, and the board stays free."""

    def full(path, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(BoardError, match=r"cannot keep .*No space left on device"):
        agent.open("first")
    assert agent.sessions.current is None and agent.sessions.fence == 0
    (tmp_path / "fence").write_text("9")
    again = Opened(tmp_path)
    assert again.open("next").fence == 10
    assert again.open("a lease", fence=2000).fence == 2000
    assert Opened(tmp_path).sessions.fence == 2000
