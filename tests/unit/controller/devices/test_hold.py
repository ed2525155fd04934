"""Session streams with an agent that ends them or stops reading."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from support.waiting import allowed_s

from hil.controller.devices.agent_client import session_streams
from hil.controller.devices.agent_client.call import CallFailed
from hil.controller.devices.agent_client.session_streams import Hold
from hil.protocol.v1 import agent_pb2 as pb

OPENED = pb.HoldReply(opened=pb.SessionOpened(token="t", fence=4, ttl_s=0.4))


class HoldCall:
    """A call of Hold: it opens the session, then stays silent until it is ended or cancelled."""

    def __init__(self, *, blocks: bool = False) -> None:
        self.over, self.cancelled, self.blocked = threading.Event(), threading.Event(), threading.Event()
        self._blocks, self._first = blocks, True

    def send(self, message: Any) -> None:
        if self._blocks and message.WhichOneof("kind") == "keep_alive":
            self._block()

    def end(self) -> None:
        if self._blocks:
            self._block()
        self.over.set()

    def _block(self) -> None:
        """Block like a socket whose peer stops reading."""
        self.blocked.set()
        self.cancelled.wait()
        raise CallFailed("UNAVAILABLE", "the data connection broke")

    def receive(self) -> Any:
        if self._first:
            self._first = False
            return OPENED
        self.over.wait()
        return None

    def cancel(self) -> None:
        self.cancelled.set()
        self.over.set()


def opened(call: HoldCall, on_end: Any = lambda token: None) -> Hold:
    return Hold(call, pb.SessionOpen(), print, lambda: None, on_end)


def test_waiting_reports_are_short_and_not_repeated():
    holder = pb.Holder(owner="o" * 70_000, purpose="p" * 70_000, held_s=3)
    replies = iter([*[pb.HoldReply(waiting=pb.SessionWaiting(holder=holder))] * 5000, OPENED])
    call = HoldCall()
    receive, call.receive = call.receive, lambda: next(replies, None) or receive()
    reports: list[str] = []
    began = time.monotonic()
    hold = Hold(call, pb.SessionOpen(), reports.append, lambda: None, lambda token: None)
    assert 1 <= len(reports) <= 1 + (time.monotonic() - began) / session_streams._REPORT_SECONDS
    assert all(len(text) < 500 for text in reports)
    hold.close()


@pytest.mark.parametrize("waits_for", ["nothing", "keep-alive"])
def test_close_returns_if_agent_stops_reading(waits_for, monkeypatch):
    monkeypatch.setattr(session_streams, "_END_SECONDS", 0.3)
    call = HoldCall(blocks=True)
    hold = opened(call)
    if waits_for == "keep-alive":
        assert call.blocked.wait(60)
    began = time.monotonic()
    closing = threading.Thread(target=hold.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert call.cancelled.is_set()
    assert time.monotonic() - began < allowed_s(10)


def test_session_ended_by_agent_ends_other_calls(monkeypatch):
    monkeypatch.setattr(session_streams, "_GOODBYE_SECONDS", 0.1)
    ended: list[str] = []
    told = threading.Event()
    call = HoldCall()
    hold = opened(call, lambda token: (ended.append(token), told.set()))
    call.over.set()
    assert told.wait(60)
    assert ended == ["t"]
    hold.close()


def test_session_closed_locally_ends_without_callback(monkeypatch):
    monkeypatch.setattr(session_streams, "_GOODBYE_SECONDS", 0.1)
    ended: list[str] = []
    call = HoldCall()
    opened(call, ended.append).close()
    time.sleep(0.3)
    assert not ended
