from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models import DIGITS
from support.profiles import Profiled, profile_iree

from hil.controller.analysis.profile.iree_events import IreeEvents, read_ireeprof
from hil.controller.storage.cache import Cache
from hil.controller.storage.isolated import Isolated
from hil.errors import RunFailed, StageTimeout

RUNS = 5


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


def test_every_run_has_the_same_dispatches_in_the_order_of_the_program(read: Any) -> None:
    events = read(iterations=RUNS)
    assert events.iterations == RUNS
    assert not events.notes
    submitted, which = events.submitted()
    assert which == [0] * RUNS
    (dispatches,) = [keys for keys in submitted[0] if keys]
    assert len(dispatches) == 6
    assert dispatches[1].endswith("conv_16x8x8x3x3_f32")
    assert dispatches[-1].endswith("matmul_1x10x128_f32")


def test_events_come_in_the_order_of_their_start_with_what_the_driver_tells(read: Any) -> None:
    events = list(read(iterations=RUNS).events())
    starts = [event.start_ns for event in events]
    assert starts == sorted(starts)
    assert Counter(event.op for event in events)["dispatch"] == 6 * RUNS
    for event in events:
        assert event.duration_ns >= 0
        if event.op != "dispatch":
            assert event.key == ""
            assert event.place is event.tiles is event.function is None
            continue
        assert event.command is not None
        assert event.tiles == event.workgroups[0] * event.workgroups[1] * event.workgroups[2]
        assert event.tile_time_ns is not None
        assert event.tile_time_ns > 0
    allocated = {event.bytes for event in events if event.op == "alloca"}
    assert 10 * 4 in allocated  # the logits


def test_dispatches_lie_within_the_execution_of_their_submission(read: Any) -> None:
    events = list(read(iterations=RUNS).events())
    executed = {(event.iteration, event.submission): event for event in events if event.op == "execute"}
    assert len(executed) == RUNS
    for event in events:
        if event.op == "dispatch":
            around = executed[event.iteration, event.submission]
            assert around.start_ns <= event.start_ns
            assert event.start_ns + event.duration_ns <= around.start_ns + around.duration_ns


def test_warm_up_belongs_to_no_iteration(read: Any) -> None:
    events = read(warmup=2, iterations=RUNS - 2)
    assert events.iterations == RUNS - 2
    runs = Counter(event.iteration for event in events.events() if event.op == "execute")
    assert runs == {-1: 2, 0: 1, 1: 1, 2: 1}
    executed = [event.iteration for event in events.events() if event.op == "execute"]
    assert executed == [-1, -1, 0, 1, 2], "in the order of their start"


def test_times_are_mapped_to_another_clock(read: Any) -> None:
    own = list(read(iterations=RUNS).events())
    first, last = own[0].start_ns, own[-1].start_ns
    twice_as_fast = [(first, 1_000), (last, 1_000 + 2 * (last - first))]
    other = list(read(iterations=RUNS, clock=twice_as_fast).events())
    for before, after in zip(own, other, strict=True):
        assert after.start_ns == 1_000 + 2 * (before.start_ns - first)
        assert after.duration_ns == 2 * before.duration_ns


def test_memory_is_told_at_every_change_and_given_back_at_the_end(read: Any) -> None:
    samples = list(read(iterations=RUNS).memory())
    assert [sample.at_ns for sample in samples] == sorted(sample.at_ns for sample in samples)
    assert {sample.unit for sample in samples} == {"bytes"}
    values = [sample.value for sample in samples]
    assert max(values) >= 6848  # the values between the layers
    assert values[-1] < max(values)


@pytest.mark.parametrize("keep", [0, 40, 4000, -3])
def test_a_profile_that_is_cut_off_is_told(read: Any, digits: Profiled, tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.ireeprof"
    cut.write_bytes(digits.profile.read_bytes()[:keep])
    with pytest.raises(RunFailed, match=r"cut\.ireeprof cannot be read"):
        read(cut)


def test_another_kind_of_file_is_told(read: Any) -> None:
    with pytest.raises(RunFailed, match="invalid IREE HAL profile file magic"):
        read(DIGITS / "digits_cnn.onnx")


def test_a_missing_profile_is_told(read: Any, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"no profile none\.ireeprof"):
        read(tmp_path / "none.ireeprof")


def test_reading_ends_at_the_time_limit(read: Any) -> None:
    # A process that has yet to start cannot have done it while this one was not looking.
    with Isolated(1) as fresh, pytest.raises(StageTimeout, match="profile gave no result within"):
        read(isolated=fresh, timeout=1e-6)


def test_a_driver_that_tells_no_commands_gives_the_same_dispatches(
    digits: Profiled, read: Any, settings: dict[str, Any], tmp_path: Path
) -> None:
    own = read(iterations=RUNS).submitted()
    folder = tmp_path / "sync"
    folder.mkdir()
    sync = profile_iree(digits.model.path, folder, settings, device="local-sync", runs=RUNS)
    events = read(sync.profile, iterations=RUNS)
    assert all(event.command is None for event in events.events())
    other = events.submitted()
    assert [keys for keys in other[0][0] if keys] == [keys for keys in own[0][0] if keys]
