"""Commands: `hil board peak`, `hil profile roofline` and `hil profile work`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.models import DIGITS
from support.rooflines import make_peaks
from support.schemas import check_document
from support.shown_profile import example

from hil.controller.analysis.profile.store import write_profile
from hil.controller.analysis.roofline.peak_store import store_peaks
from hil.controller.cli.board.peak import measure_peak
from hil.controller.cli.stored.profile import profile as command
from hil.controller.devices.board_choice import BoardChoice
from hil.controller.records.measurements.roofline import BoardPeaks
from hil.controller.workloads.board_peaks.job import PeakJob
from hil.errors import UsageError


@pytest.fixture(autouse=True)
def _own_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "140")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = example(iterations=30, timed_runs=30)
    write_profile(replace(made, runtime="iree 3.13.0 local-task"), tmp_path / "p")
    return tmp_path / "p"


def test_roofline_prints_whole_model_and_operations(folder: Path) -> None:
    store_peaks(make_peaks(f32=4e9, memory=1e9))
    text = CliRunner().invoke(command, ["roofline", str(folder)], catch_exceptions=False).output
    assert "f32  4 Gop/s  spread 1.0%  with matmul f32, 256 x 256" in text
    assert "work       150 kop and 12 kB per iteration, 12.5 op/byte" in text
    # 37.5 us at the peaks in a timed run of 80 us
    assert "46.9% (99%: 46.9% to 46.9%) of the roofline: 37.5 us at the peaks, mainly limited by arithmetic" in text
    assert "the profiler adds 25% to a run" in text
    row = next(line for line in text.splitlines() if line.startswith("matmul_0"))
    assert row.split() == "matmul_0 60 us 60.0% 120 kop 6 kB 20 2 Gop/s compute 50.0% 50% to 50%".split()


def test_roofline_document_matches_schema(folder: Path) -> None:
    store_peaks(make_peaks(f32=4e9, memory=1e9))
    answer = CliRunner().invoke(command, ["roofline", str(folder), "--json", "--top", "1"], catch_exceptions=False)
    document = json.loads(answer.output)
    check_document(document, "profile roofline")
    assert (document["groups"], len(document["rows"])) == (3, 1)
    assert document["peaks"]["compute"]["f32"]["rate"] == 4e9


def test_roofline_without_peaks_says_how_to_measure_them(folder: Path) -> None:
    text = CliRunner().invoke(command, ["roofline", str(folder)], catch_exceptions=False).output
    assert "no peaks of board sim: measure them with hil board peak sim" in text
    assert "of the roofline" not in text


def test_roofline_draws_a_picture(folder: Path, tmp_path: Path) -> None:
    store_peaks(make_peaks(f32=4e9, memory=1e9))
    plot = tmp_path / "roofline.svg"
    CliRunner().invoke(command, ["roofline", str(folder), "--plot", str(plot)], catch_exceptions=False)
    assert plot.read_text().startswith("<?xml")


def test_roofline_refuses_a_picture_without_points(tmp_path: Path) -> None:
    write_profile(replace(example(), rows=()), tmp_path / "p")
    arguments = ["roofline", str(tmp_path / "p"), "--plot", str(tmp_path / "a.svg")]
    with pytest.raises(UsageError, match="has no points to draw"):
        CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_work_prints_counts_of_a_model() -> None:
    text = CliRunner().invoke(command, ["work", str(DIGITS / "digits_cnn.onnx")], catch_exceptions=False).output
    assert "171,530 operations" in text
    assert "24,656 bytes of inputs, weights and outputs" in text
    row = next(line for line in text.splitlines() if line.startswith("conv2"))
    assert row.split() == "conv2 Conv 147 kop 21.6 kB 6.82".split()


def test_stored_peaks_are_listed_without_a_board() -> None:
    store_peaks(make_peaks())
    text = CliRunner().invoke(measure_peak, ["sim", "--stored"], catch_exceptions=False).output
    assert "with iree 3.13.0 local-task" in text
    assert "ridge   10 op/byte for f32" in text
    answer = CliRunner().invoke(measure_peak, ["sim", "--stored", "--json"], catch_exceptions=False)
    check_document(json.loads(answer.output), "board peak")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sim", "--stored"], "no stored peaks of board sim"),
        (["sim", "--runtime", "tflite"], "cannot create the programs of the measurement for runtime 'tflite'"),
        (["sim", "--memory", "0"], "invalid --memory 0: expected 1 to 65536 MiB"),
        (["sim", "--min-time", "0"], "invalid --min-time 0: expected more than 0 seconds"),
    ],
)
def test_invalid_measurements_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CliRunner().invoke(measure_peak, arguments, catch_exceptions=False)


def test_measurement_uses_the_given_board_and_type(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def measure(request: PeakJob, choice: BoardChoice, screen: object) -> tuple[BoardPeaks, Path]:
        requests.append((request, choice.name))
        return make_peaks(), Path("stored.json")

    monkeypatch.setattr("hil.controller.workloads.board_peaks.job.measure_board", measure)
    arguments = ["unix:/tmp/x.sock", "--runtime-hw-type", "sim-f16", "--runtime", "onnxruntime", "--dtype", "f16"]
    answer = CliRunner().invoke(measure_peak, arguments, catch_exceptions=False)
    (request, name), job = requests[0], requests[0][0].job
    assert (job.board, job.hw_type, job.runtime) == ("unix:/tmp/x.sock", "sim-f16", "onnxruntime")
    assert (request.dtypes, name) == (("f16",), "unix:/tmp/x.sock")
    assert "stored in stored.json" in answer.output
