"""Times of a GPU's clock on the host's clock."""

from __future__ import annotations

import numpy as np

from hil.controller.analysis.profile.runtimes.device_events import NO_TILE_TIME, DeviceEvents


def correlation(tick: int, host: int, device: int = 0) -> dict:
    return {
        "physical_device_ordinal": device,
        "device_tick": tick,
        "host_time_begin_ns": host - 10,
        "host_time_end_ns": host + 10,
    }


def dispatch(start: int, end: int, device: int = 0, **more: object) -> dict:
    return {
        **{"valid": True, "physical_device_ordinal": device, "queue_ordinal": 1, "submission_id": 3},
        **{"command_index": 2, "workgroup_count": [4, 2, 1], "key": "conv", "start_tick": start, "end_tick": end},
        **more,
    }


def test_dispatches_get_host_times_by_fitted_clock():
    names: dict[str, int] = {}
    events = DeviceEvents(names)
    # A tick takes 40 ns.
    for tick in (1000, 2000, 4000):
        events.add_correlation(correlation(tick, 10**15 + 40 * tick))
    assert events.add_dispatch(dispatch(1500, 1600))
    (row,) = events.build_rows()
    assert (row["start"], row["duration"]) == (10**15 + 60_000, 4000)
    assert (row["tiles"], row["tile_time"], row["submission"], row["command"]) == (8, NO_TILE_TIME, 3, 2)
    assert {names_of: index for names_of, index in names.items()} == {"dispatch": row["op"], "conv": row["key"]}


def test_fit_uses_all_samples():
    events = DeviceEvents({})
    noise = [0, 300, -300, 200, -200, 0]
    for number, error in enumerate(noise):
        events.add_correlation(correlation(number * 10**6, number * 10**6 + error))
    events.add_dispatch(dispatch(2_500_000, 2_600_000))
    (row,) = events.build_rows()
    assert abs(int(row["start"]) - 2_500_000) < 200


def test_devices_have_separate_clocks():
    events = DeviceEvents({})
    for tick in (0, 100):
        events.add_correlation(correlation(tick, 1000 + tick))
        events.add_correlation(correlation(tick, 5000 + 2 * tick, device=1))
    events.add_dispatch(dispatch(50, 60))
    events.add_dispatch(dispatch(50, 60, device=1))
    rows = events.build_rows()
    assert rows["start"].tolist() == [1050, 5100]
    assert rows["duration"].tolist() == [10, 20]


def test_events_without_clock_are_omitted():
    events = DeviceEvents({})
    events.add_correlation(correlation(5, 1000))
    assert events.add_dispatch(dispatch(1, 2))
    assert len(events) == 1
    assert not len(events.build_rows())


def test_invalid_event_is_rejected():
    events = DeviceEvents({})
    assert not events.add_dispatch(dispatch(1, 2, valid=False))
    assert not events.add_dispatch(dispatch(9, 2))
    assert np.array_equal(events.build_rows(), events.build_rows())
    assert len(events) == 0
