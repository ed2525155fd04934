"""Test events of hosts and gateways that connect, disconnect and fail."""

from __future__ import annotations

from support.farm_desks import Desk

from hil.controller.farm.store import presence


def test_events_record_lost_and_returning_host(desk: Desk) -> None:
    desk.online("a", "b", host="lab-1")
    desk.online("c", host="lab-2")
    assert desk.events(host="lab-1") == [("host.new", "")]
    desk.silence("a")
    desk.tick()
    assert desk.events(host="lab-1") == [("host.new", "")]
    desk.silence("b")
    desk.tick()
    assert desk.events(host="lab-1")[1:] == [("host.lost", "no heartbeat for 500 s; boards offline: 2")]
    desk.attend("a", host="lab-1")
    desk.attend("b", host="lab-1")
    assert [what for what, _ in desk.events(host="lab-1")] == ["host.new", "host.lost", "host.back"]
    assert [what for what, _ in desk.events(host="lab-2")] == ["host.new"]


def test_events_record_stopped_host_but_not_worker_restart(desk: Desk) -> None:
    desk.online("a", "b", host="lab-1")
    desk.attend("a", "a new worker", host="lab-1")
    desk.leave("b")
    assert [what for what, _ in desk.events(host="lab-1")] == ["host.new"]
    desk.leave("a", "a new worker")
    assert desk.events(host="lab-1")[1:] == [("host.stopped", "shut down; boards offline: 2")]


def test_events_omit_standby_host(desk: Desk) -> None:
    desk.online("a", host="lab-1")
    desk.attend("a", "another", host="lab-2")
    assert desk.events(host="lab-2") == []


def test_events_record_stopped_and_failed_gateway(desk: Desk) -> None:
    desk.do(presence.record_gateway_start, "lab :7070")
    desk.do(presence.record_gateway_stop, "lab :7070")
    desk.do(presence.record_gateway_start, "lab :7070")
    desk.do(presence.record_gateway_start, "lab :7070")
    assert desk.events(host="lab :7070") == [
        ("gateway.started", ""),
        ("gateway.stopped", ""),
        ("gateway.started", ""),
        ("gateway.restarted", "after a failure"),
    ]


def test_events_record_lost_and_returning_gateway(desk: Desk) -> None:
    for name in ("one", "two"):
        desk.do(presence.record_gateway_start, name)
    desk.rows("update hil.gateways set seen_at = now() - interval '21 s'")
    desk.do(presence.record_gateway_tick, "one", may_miss=False)
    assert [what for what, _ in desk.events()] == ["gateway.started"] * 2
    desk.do(presence.record_gateway_tick, "one", may_miss=True)
    desk.do(presence.record_gateway_tick, "one", may_miss=True)
    desk.do(presence.record_gateway_tick, "two", may_miss=True)
    assert desk.events()[2:] == [("gateway.lost", "no heartbeat for 21 s"), ("gateway.back", "")]
