from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import DIGITS
from support.profiles import Profiled, profile_iree

from hil.controller.analysis.profile.runtimes.iree_profile import (
    EVENT,
    EVENTS,
    SETUP,
    IreeEvents,
    assign_by_repetition,
    find_submissions,
    map_rows,
    number_events,
    number_within_iterations,
    read_ireeprof,
)
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolation.isolated import Isolated
from hil.errors import RunFailed, StageTimeout

RUNS = 5
# IREE writes this number for an unknown value.
NONE = 0xFFFFFFFF

DISPATCH, ALLOCA = 0, 1


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory, isolated: Isolated) -> Profiled:
    folder = tmp_path_factory.mktemp("digits")
    settings = {
        "cache": Cache(folder / "cache"),
        "isolated": isolated,
        "recompute": False,
        "timeout": 120.0,
        "log": folder / "log",
    }
    return profile_iree(DIGITS / "digits_cnn.onnx", folder, settings, runs=RUNS)


@pytest.fixture
def read(digits: Profiled, isolated: Isolated, tmp_path: Path) -> Iterator[Any]:
    def read(path: Path = digits.profile, **options: Any) -> IreeEvents:
        folder = tmp_path / "events"
        folder.mkdir(exist_ok=True)
        given = {"isolated": isolated, "timeout": 60.0, "log": tmp_path / "log", **options}
        return read_ireeprof(path, folder=folder, **given)

    yield read


@pytest.mark.ci
def test_events_repeat_dispatches_in_program_order(read: Any) -> None:
    events = read(iterations=RUNS)
    assert events.iterations == RUNS
    assert not events.notes
    submitted, which = events.group_submissions()
    assert which == [0] * RUNS
    (dispatches,) = [keys for keys in submitted[0] if keys]
    assert len(dispatches) == 6
    assert dispatches[1].endswith("conv_16x8x8x3x3_f32")
    assert dispatches[-1].endswith("matmul_1x10x128_f32")


def test_events_are_sorted_and_carry_driver_fields(read: Any) -> None:
    events = list(read(iterations=RUNS).events())
    starts = [event.start_ns for event in events]
    assert starts == sorted(starts)
    assert Counter(event.op for event in events)["dispatch"] == 6 * RUNS
    for event in events:
        assert event.duration_ns >= 0
        if event.op != "dispatch":
            assert event.key == ""
            assert event.ordinal is event.tiles is None
            continue
        assert event.tiles is not None
        assert event.tiles > 0
        assert event.tile_time_ns is not None
        assert event.tile_time_ns > 0
    allocated = {event.bytes for event in events if event.op == "alloca"}
    assert 10 * 4 in allocated  # the logits


def test_dispatches_lie_within_execution_of_submission(read: Any) -> None:
    events = list(read(iterations=RUNS).events())
    executed = {(event.iteration, event.submission): event for event in events if event.op == "execute"}
    assert len(executed) == RUNS
    for event in events:
        if event.op == "dispatch":
            around = executed[event.iteration, event.submission]
            assert around.start_ns <= event.start_ns
            assert event.start_ns + event.duration_ns <= around.start_ns + around.duration_ns


def test_warmup_events_get_iteration_minus_1(read: Any) -> None:
    events = read(warmup=2, iterations=RUNS - 2)
    assert events.iterations == RUNS - 2
    runs = Counter(event.iteration for event in events.events() if event.op == "execute")
    assert runs == {-1: 2, 0: 1, 1: 1, 2: 1}
    executed = [event.iteration for event in events.events() if event.op == "execute"]
    assert executed == [-1, -1, 0, 1, 2], "in the order of their start"


def test_event_times_map_to_other_clock(read: Any) -> None:
    own = list(read(iterations=RUNS).events())
    first, last = own[0].start_ns, own[-1].start_ns
    twice_as_fast = [(first, 1_000), (last, 1_000 + 2 * (last - first))]
    other = list(read(iterations=RUNS, clock=twice_as_fast).events())
    for before, after in zip(own, other, strict=True):
        assert after.start_ns == 1_000 + 2 * (before.start_ns - first)
        assert after.duration_ns == 2 * before.duration_ns


def test_memory_samples_follow_each_change(read: Any) -> None:
    samples = list(read(iterations=RUNS).iter_memory())
    assert [sample.at_ns for sample in samples] == sorted(sample.at_ns for sample in samples)
    assert {sample.unit for sample in samples} == {"bytes"}
    values = [sample.value for sample in samples]
    assert max(values) >= 6848  # the values between the layers
    assert values[-1] < max(values)


@pytest.mark.parametrize("keep", [0, 40, 4000, -3])
def test_read_rejects_truncated_profile(read: Any, digits: Profiled, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.ireeprof"
    cut.write_bytes(digits.profile.read_bytes()[:keep])
    with pytest.raises(RunFailed, match=r"cut\.ireeprof cannot be read"):
        read(cut)


def test_read_rejects_other_file_format(read: Any) -> None:
    with pytest.raises(RunFailed, match="invalid IREE HAL profile file magic"):
        read(DIGITS / "digits_cnn.onnx")


def test_read_rejects_missing_profile(read: Any, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"profile none\.ireeprof not found"):
        read(tmp_path / "none.ireeprof")


def test_read_times_out(read: Any) -> None:
    # A fresh process cannot finish before the time limit is checked.
    with Isolated(1) as fresh, pytest.raises(StageTimeout, match="profile timed out after"):
        read(isolated=fresh, timeout=1e-6)


@pytest.mark.ci
def test_driver_without_commands_gives_same_dispatches(
    digits: Profiled, read: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    own = read(iterations=RUNS).group_submissions()
    folder = tmp_path / "sync"
    folder.mkdir()
    sync = profile_iree(digits.model.path, folder, settings, device="local-sync", runs=RUNS)
    events = read(sync.profile, iterations=RUNS)
    assert (map_rows(events.folder / EVENTS, EVENT)["command"] == NONE).all()
    other = events.group_submissions()
    assert [keys for keys in other[0][0] if keys] == [keys for keys in own[0][0] if keys]


def rows(*events: tuple[int, int, int, int]) -> np.ndarray:
    """Events of (op, submission, command, start)."""
    made = np.zeros(len(events), EVENT)
    for row, (op, submission, command, start) in zip(made, events, strict=True):
        row["op"], row["submission"], row["command"], row["start"] = op, submission, command, start
    return made


@pytest.mark.parametrize(
    ("commands", "expected"),
    [
        ([4, 2, 9], [1, 0, 2]),  # concurrent: the first event is not the first command
        ([NONE, NONE, NONE], [0, 1, 2]),
    ],
)
def test_ordinals_follow_command_or_event_order(commands: list[int], expected: list[int]) -> None:
    events = rows((ALLOCA, 7, NONE, 0), *((DISPATCH, 7, command, 1) for command in commands))
    assert number_events(events, DISPATCH).tolist() == [-1, *expected]


def test_equal_submissions_have_same_kind() -> None:
    same = [(ALLOCA, 0, NONE, 5), (DISPATCH, 1, 2, 9), (DISPATCH, 1, 4, 8), (ALLOCA, 2, NONE, 20), (DISPATCH, 3, 2, 30)]
    events = rows(*same, (DISPATCH, 3, 4, 31))
    numbers, kinds = find_submissions(events, number_events(events, DISPATCH))
    assert numbers.tolist() == [0, 1, 1, 2, 3, 3]
    assert kinds[0] == kinds[2]
    assert kinds[1] == kinds[3]
    assert kinds[0] != kinds[1]


def test_dispatch_order_changes_submission_kind() -> None:
    events = rows((DISPATCH, 0, 1, 0), (DISPATCH, 0, 2, 1), (DISPATCH, 1, 1, 2), (DISPATCH, 1, 2, 3))
    events["key"] = [10, 11, 11, 10]
    kinds = find_submissions(events, number_events(events, DISPATCH))[1]
    assert kinds[0] != kinds[1]


def test_within_counts_submissions_per_iteration() -> None:
    assert number_within_iterations(np.array([-1, -1, 0, 0, 0, 1, 1, 1])).tolist() == [0, 1, 0, 1, 2, 0, 1, 2]


def test_mapped_rows_accepts_empty_file(tmp_path: Path) -> None:
    (tmp_path / "events.bin").write_bytes(b"")
    assert len(map_rows(tmp_path / "events.bin", EVENT)) == 0


def told(kinds: str, iterations: int | None) -> tuple[str, str]:
    found, doubt = assign_by_repetition(np.array([ord(kind) for kind in kinds]), iterations)
    return "".join("-" if number == SETUP else str(number) for number in found), doubt


@pytest.mark.parametrize(
    ("kinds", "iterations", "expected"),
    [
        ("abab", 2, "0011"),
        ("aaaa", 2, "0011"),  # a loop of two turns, twice
        ("aaaa", 4, "0123"),
        ("xyabcabcabc", 3, "--000111222"),  # events before the repeated sequence are initialization
        ("xabbabbabb", 3, "-000111222"),
        ("abcabcab", 2, "--000111"),
        ("abc", 1, "000"),
        ("", 3, ""),
    ],
)
def test_runs_are_equal_sequences_at_end(kinds: str, iterations: int, expected: str) -> None:
    assert told(kinds, iterations)[0] == expected


def test_runs_of_known_count_are_certain() -> None:
    assert told("xabab", 2)[1] == ""


def test_runs_of_unknown_count_use_shortest_repetition() -> None:
    found, doubt = told("abbabbabb", None)
    assert found == "000111222"
    assert "repeated operations suggest 3" in doubt
    assert told("abc", None)[0] == "000"


def test_unequal_runs_are_split_by_count_with_note() -> None:
    found, doubt = told("abcabd", 2)
    assert found == "000111"
    assert "divides the submissions equally" in doubt


def test_inseparable_runs_become_single_run_with_note() -> None:
    found, doubt = told("abcde", 2)
    assert found == "00000"
    assert "cannot separate 2 runs" in doubt


def test_runs_are_found_in_linear_time() -> None:
    kinds = np.arange(200_000)
    found, doubt = assign_by_repetition(kinds, 7)
    assert doubt
    assert found.max() == 0
