"""Stored peaks of boards, and the choice of peaks for a profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.made_profiles import profile, row
from support.rooflines import make_peaks
from support.schemas import check_document

from hil.controller.analysis.profile.store import write_profile
from hil.controller.analysis.roofline.peak_store import (
    find_peaks,
    keep_peaks,
    list_differences,
    list_peaks,
    read_peaks,
    store_peaks,
)
from hil.controller.analysis.roofline.profile_files import WORK_FILE
from hil.controller.analysis.roofline.report import build_report
from hil.controller.records.measurements.roofline import ModelWork, OperatorWork, PeakReport
from hil.controller.records.stack import StackPart
from hil.controller.storage.runs import write_json
from hil.core.timeline import Profile
from hil.errors import UsageError

RUNTIME = "iree 3.13.0 local-task"


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def made(**more) -> Profile:
    return profile(**{"runtime": RUNTIME, **more})


def save_profile(folder: Path, **more) -> Path:
    rows = [row("mm", 0, 40_000, flops=1_000_000, bytes=1000, shapes="4x4xf32 -> 4x4xf32")]
    write_profile(replace(profile(rows), **{"runtime": RUNTIME, **more}), folder)
    return folder


def test_stored_peaks_are_listed_newest_first() -> None:
    old = store_peaks(make_peaks())
    new = store_peaks(make_peaks(f32=200e9, created=1_796_000_100.0))
    again = store_peaks(make_peaks(f32=300e9, created=1_796_000_100.0))
    assert [one.compute["f32"].rate for one in list_peaks("sim")] == [200e9, 300e9, 100e9]
    assert read_peaks(new).compute["f32"].rate == 200e9
    assert len({old, new, again}) == 3
    assert list_peaks("other") == []
    report = PeakReport(board="sim", peaks=list_peaks("sim"), file=str(new))
    check_document({"schema": 1, **report.to_json()}, "board peak")


def test_damaged_file_is_skipped_in_the_list() -> None:
    path = store_peaks(make_peaks())
    (path.parent / "20990101-000000.json").write_text("{")
    assert len(list_peaks("sim")) == 1


def test_peaks_of_the_same_version_come_before_newer_ones_of_another() -> None:
    store_peaks(make_peaks())
    store_peaks(make_peaks(f32=200e9, runtime_version="3.14.0", created=1_796_000_100.0))
    store_peaks(make_peaks(f32=300e9, device="vulkan", created=1_796_000_200.0))
    same, similar = find_peaks(made()), find_peaks(made(runtime="iree 3.15.0 local-task"))
    assert same is not None
    assert similar is not None
    assert (same.compute["f32"].rate, similar.compute["f32"].rate) == (100e9, 200e9)
    assert find_peaks(made(runtime="onnxruntime 1.31.1 CPUExecutionProvider")) is None
    assert list_differences(same, made()) == []
    assert list_differences(similar, made(runtime="iree 3.15.0 local-task")) == [
        "the peaks were measured with iree 3.14.0, the profile with iree 3.15.0 local-task"
    ]


def test_peaks_with_the_same_flags_come_before_newer_ones() -> None:
    slow = ["--target=host", "--iree-opt-level=O0"]
    store_peaks(make_peaks(flags=["--target=host"]))
    store_peaks(make_peaks(f32=20e9, flags=slow, created=1_796_000_100.0))
    found = [find_peaks(made(flags=flags)) for flags in (["--target=host"], slow, ["--target=generic"])]
    assert [one and one.compute["f32"].rate for one in found] == [100e9, 20e9, 20e9]
    assert found[2] is not None
    assert list_differences(found[2], made(flags=slow)) == []
    assert list_differences(found[2], made()) == []
    assert list_differences(found[2], made(flags=["--target=generic"])) == [
        "only the peaks used the compiler flags --target=host --iree-opt-level=O0",
        "only the profile used the compiler flags --target=generic",
    ]


def test_other_stack_is_reported() -> None:
    part = StackPart(name="kernel", version="6.1", source="agent")
    other = StackPart(name="usb", version="a", source="agent")
    peaks = make_peaks(stack=[part, other])
    assert list_differences(peaks, made(stack={"kernel": "6.2", "usb": "b"})) == [
        "kernel of the peaks: 6.1, of the profile: 6.2"
    ]


def test_data_sheet_is_used_only_without_measured_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "board_configs").mkdir()
    (tmp_path / "board_configs" / "kit.toml").write_text("[peak]\nf32_gflops = 50\nmemory_gb_s = 5\n")
    monkeypatch.chdir(tmp_path)
    sheet = find_peaks(made(board="kit"))
    assert sheet is not None
    assert (sheet.source, sheet.compute["f32"].rate, sheet.memory and sheet.memory.rate) == ("data sheet", 50e9, 5e9)
    report = build_report(save_profile(tmp_path / "p", board="kit"), by="op", keep=True)
    assert report.whole.shortest_ns == 20_000
    assert "the peaks are values of a data sheet in the board's config: no program reaches them" in report.warnings
    assert not (tmp_path / "p" / "peaks.json").exists()
    store_peaks(make_peaks(board="kit"))
    measured = find_peaks(made(board="kit"))
    assert measured is not None
    assert measured.source == "measured"


def test_report_keeps_the_peaks_with_the_profile(tmp_path: Path) -> None:
    folder = save_profile(tmp_path / "p")
    missing = build_report(folder, by="op")
    assert missing.peaks is None
    assert "no peaks of board sim: measure them with hil board peak sim" in missing.warnings
    store_peaks(make_peaks())
    assert build_report(folder, by="op", keep=True).whole.attained == 0.25
    store_peaks(make_peaks(f32=200e9, created=1_796_000_100.0))
    assert build_report(folder, by="op").whole.attained == 0.25
    assert build_report(folder, by="op", peaks="latest", keep=True).whole.attained == 0.125
    assert build_report(folder, by="op").whole.attained == 0.125


def test_report_accepts_an_id_a_file_or_a_board_config(tmp_path: Path) -> None:
    folder = save_profile(tmp_path / "p")
    path = store_peaks(make_peaks())
    sheet = tmp_path / "kit.toml"
    sheet.write_text("[peak]\nf32_gflops = 50\nmemory_gb_s = 5\n")
    assert build_report(folder, by="op", peaks=path.stem).whole.attained == 0.25
    assert build_report(folder, by="op", peaks=str(path)).whole.attained == 0.25
    assert build_report(folder, by="op", peaks=str(sheet)).whole.attained == 0.5


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("20990101-000000", "unknown peaks '20990101-000000' of board sim"),
        ("latest", "no peaks of board sim with iree"),
        ("missing.json", "cannot read missing.json"),
        ("empty.toml", r"empty.toml has no table \[peak\]"),
    ],
)
def test_unknown_peaks_are_refused(wanted: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.toml").write_text("")
    with pytest.raises(UsageError, match=message):
        build_report(save_profile(tmp_path / "p"), by="op", peaks=wanted)


def test_peaks_per_instruction_are_not_compared_with_times(tmp_path: Path) -> None:
    folder = save_profile(tmp_path / "p")
    keep_peaks(make_peaks(clock="instructions", memory=None), folder)
    report = build_report(folder, by="op")
    assert report.whole.attained is None
    assert "the peaks are per instruction, but the profile has times: they cannot be compared" in report.warnings


def test_damaged_peaks_of_a_profile_are_refused(tmp_path: Path) -> None:
    folder = save_profile(tmp_path / "p")
    keep_peaks(make_peaks(), folder)
    (folder / "peaks.json").write_text('{"schema": 1}')
    with pytest.raises(UsageError, match=r"peaks\.json"):
        build_report(folder, by="op")


def test_profile_without_operations_says_where_its_work_is_from(tmp_path: Path) -> None:
    folder = save_profile(tmp_path / "p", rows=())
    operator = OperatorWork(name="a", op_type="CONV_2D", flops=1000, bytes=100)
    work = ModelWork(
        model="m", function="", flops=1000, bytes=100, model_bytes=100, operators=[operator], not_counted={}
    )
    write_json(folder / WORK_FILE, work.to_json(), option="")
    report = build_report(folder, by="op")
    assert report.whole.flops == 1000
    assert "the runtime does not profile operations: the work is that of the model's operators" in report.warnings


@pytest.mark.parametrize("rate", [1e-300, 1e300, 0.0, -1.0])
def test_peaks_beyond_all_boards_are_refused(rate: float, tmp_path: Path) -> None:
    folder = save_profile(tmp_path / "p")
    keep_peaks(make_peaks(memory=rate), folder)
    with pytest.raises(UsageError, match=r"peaks\.json"):
        build_report(folder, by="op")
