"""Test the board state machine: every state with every event."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hil.controller.farm.messages import BoardState
from hil.controller.farm.scheduler.health import Event, EventKind, apply_event
from hil.controller.farm.settings import FarmSettings

TERMS = FarmSettings(quarantine_s=30, quarantine_most_s=200)
ONLINE, SUSPECT, QUARANTINED, OFFLINE = (
    BoardState.ONLINE,
    BoardState.SUSPECT,
    BoardState.QUARANTINED,
    BoardState.OFFLINE,
)
STATES = (ONLINE, SUSPECT, QUARANTINED, OFFLINE)


@pytest.mark.parametrize(
    ("what", "becomes"),
    [
        (EventKind.LOST, {state: (OFFLINE, None) for state in STATES}),
        (
            EventKind.HEALTHY,
            {ONLINE: (ONLINE, None), SUSPECT: (ONLINE, None), QUARANTINED: (ONLINE, None), OFFLINE: (OFFLINE, None)},
        ),
        (
            EventKind.UNHEALTHY,
            {
                ONLINE: (QUARANTINED, 30),
                SUSPECT: (QUARANTINED, 30),
                QUARANTINED: (QUARANTINED, 30),
                OFFLINE: (OFFLINE, None),
            },
        ),
        (
            EventKind.BUSY,
            {
                ONLINE: (QUARANTINED, 30),
                SUSPECT: (QUARANTINED, 30),
                QUARANTINED: (QUARANTINED, 30),
                OFFLINE: (OFFLINE, None),
            },
        ),
        (
            EventKind.CHECK_LOST,
            {
                ONLINE: (SUSPECT, 0),
                SUSPECT: (SUSPECT, 0),
                QUARANTINED: (QUARANTINED, 30),
                OFFLINE: (OFFLINE, None),
            },
        ),
        (
            EventKind.INFRASTRUCTURE,
            {
                ONLINE: (SUSPECT, 0),
                SUSPECT: (SUSPECT, 0),
                QUARANTINED: (QUARANTINED, None),
                OFFLINE: (OFFLINE, None),
            },
        ),
        (
            EventKind.UNCHECKED,
            {
                ONLINE: (SUSPECT, 0),
                SUSPECT: (SUSPECT, 0),
                QUARANTINED: (QUARANTINED, None),
                OFFLINE: (OFFLINE, None),
            },
        ),
        (
            EventKind.RETRY,
            {ONLINE: (SUSPECT, 0), SUSPECT: (SUSPECT, 0), QUARANTINED: (SUSPECT, 0), OFFLINE: (OFFLINE, None)},
        ),
        (
            EventKind.ATTENDED,
            {
                ONLINE: (ONLINE, None),
                SUSPECT: (SUSPECT, None),
                QUARANTINED: (QUARANTINED, None),
                OFFLINE: (SUSPECT, 0),
            },
        ),
    ],
    ids=lambda one: one.value if isinstance(one, EventKind) else "",
)
@pytest.mark.parametrize("state", STATES)
def test_health_state_changes_for_each_event(
    what: EventKind, becomes: dict[BoardState, tuple[BoardState, float | None]], state: BoardState
):
    change = apply_event(state, 0, Event(what), TERMS)
    assert (change.state, change.check_in_s) == becomes[state]


def test_recently_healthy_board_returns_online():
    back = apply_event(OFFLINE, 0, Event(EventKind.ATTENDED, checked=True))
    assert (back.state, back.failures, back.reason) == (ONLINE, 0, "the host is back")
    assert apply_event(OFFLINE, 0, Event(EventKind.ATTENDED, checked=False)).state is SUSPECT
    failed = apply_event(OFFLINE, 2, Event(EventKind.ATTENDED, checked=True))
    assert (failed.state, failed.failures, failed.check_in_s) == (SUSPECT, 2, 0)


def test_quarantine_doubles_to_maximum_and_resets_when_healthy():
    state, failures, waits = SUSPECT, 0, []
    for _ in range(6):
        change = apply_event(state, failures, Event(EventKind.UNHEALTHY, "no answer"), TERMS)
        state, failures = change.state, change.failures
        waits.append(change.check_in_s)
    assert waits == [30, 60, 120, 200, 200, 200]
    assert change.reason == "health check failed 6 times in a row: no answer"
    healthy = apply_event(state, failures, Event(EventKind.HEALTHY), TERMS)
    assert (healthy.state, healthy.failures) == (ONLINE, 0)
    assert apply_event(healthy.state, healthy.failures, Event(EventKind.UNHEALTHY), TERMS).check_in_s == 30


def test_failure_count_appears_in_reason_from_second_failure():
    assert apply_event(SUSPECT, 0, Event(EventKind.UNHEALTHY, "no answer")).reason == "health check failed: no answer"
    assert (
        apply_event(SUSPECT, 1, Event(EventKind.UNHEALTHY, "mute")).reason
        == "health check failed 2 times in a row: mute"
    )


def test_failing_board_stays_scheduled_for_checks():
    assert apply_event(QUARANTINED, 10**6, Event(EventKind.UNHEALTHY), TERMS).check_in_s == 200


def test_quarantine_length_survives_host_restart():
    offline = apply_event(QUARANTINED, 3, Event(EventKind.LOST), TERMS)
    back = apply_event(offline.state, offline.failures, Event(EventKind.ATTENDED, checked=True), TERMS)
    assert back.state is SUSPECT
    assert apply_event(back.state, back.failures, Event(EventKind.UNHEALTHY), TERMS).check_in_s == 200


@pytest.mark.parametrize("what", [EventKind.LOST, EventKind.HEALTHY, EventKind.UNHEALTHY, EventKind.INFRASTRUCTURE])
def test_state_change_reports_given_reason(what: EventKind):
    assert "the cable was cut" in apply_event(ONLINE, 0, Event(what, "the cable was cut")).reason


@given(
    st.sampled_from(STATES),
    st.lists(st.builds(Event, st.sampled_from(EventKind), st.sampled_from(["", "why"]), st.booleans())),
)
def test_only_passed_check_brings_board_online(state: BoardState, events: list[Event]):
    failures = 0
    for event in events:
        change = apply_event(state, failures, event, TERMS)
        if change.state is ONLINE and state is not ONLINE:
            assert event.what is EventKind.HEALTHY or (
                event.what is EventKind.ATTENDED and event.checked and not failures
            )
        if change.state is not state:
            assert change.reason
        if change.state is SUSPECT and state is not SUSPECT:
            assert change.check_in_s == 0
        assert change.failures >= 0
        assert change.doubted is (change.check_in_s is not None)
        state, failures = change.state, change.failures


def test_repeated_lost_checks_quarantine_board():
    state, failures, seen = SUSPECT, 0, []
    for _ in range(5):
        change = apply_event(state, failures, Event(EventKind.CHECK_LOST, "nothing was heard of it"), TERMS)
        state, failures = change.state, change.failures
        seen.append((state, failures, change.check_in_s))
    lost = [(SUSPECT, 1, 0), (SUSPECT, 2, 0)]
    assert seen == [*lost, (QUARANTINED, 3, 120), (QUARANTINED, 4, 200), (QUARANTINED, 5, 200)]
    assert apply_event(SUSPECT, 2, Event(EventKind.HEALTHY)).failures == 0


@pytest.mark.parametrize("state", [SUSPECT, QUARANTINED])
def test_board_in_use_is_checked_at_constant_intervals(state: BoardState) -> None:
    for failures in (0, 5):
        change = apply_event(state, failures, Event(EventKind.BUSY, "in use by bob"), TERMS)
        assert (change.state, change.failures, change.check_in_s) == (QUARANTINED, failures, TERMS.quarantine_s)
        assert change.reason == "in use by bob"
