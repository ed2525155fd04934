"""Flag files of IREE's tools, read and written."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.flagfiles import FlagFile, parse_flagfile, read_flagfile, write_flagfile
from hil.controller.jobs import Job
from hil.errors import UsageError


def test_what_is_written_is_read_again(tmp_path):
    flags = FlagFile(
        modules=(tmp_path / "m.vmfb",),
        function="main",
        inputs=(f"@{tmp_path}/x.npy", f"2xi32=@{tmp_path}/y.bin", "4xf32=1 2 3 4"),
        expected=(f"@{tmp_path}/out.npy",),
        parameters=(tmp_path / "w.irpa",),
        device="local-sync",
        rtol=1e-4,
        atol=0.0,
    )
    write_flagfile(tmp_path / "new" / "flagfile", flags)
    assert parse_flagfile(tmp_path / "new" / "flagfile") == flags
    assert "--expected_bf16_threshold=0.0" in (tmp_path / "new" / "flagfile").read_text()
    with pytest.raises(UsageError, match="more than one line"):
        write_flagfile(tmp_path / "flagfile", FlagFile(function="a\n--module=b"))


def job(path: Path, text: str, *later: str, **given: object) -> Job:
    path.write_text(text)
    return read_flagfile(Job(flagfile=path, **given), later)


def test_later_flags_take_the_place_of_the_files_and_options_that_of_both(tmp_path):
    text = "# of mine\n--module=m.vmfb\n--function=f\n\n--input=@x.npy\n--device=hip\n--function=g\n--output=@y.npy\n"
    found = job(tmp_path / "flagfile", text)
    assert (found.models, found.function, found.inputs) == ((tmp_path / "m.vmfb",), "g", (f"@{tmp_path}/x.npy",))
    assert found.flagfile is None and found.rtol is None
    found = job(tmp_path / "flagfile", text, "--module=/other.vmfb", "--input=1xf32=2", "--expected_rtol=0.1")
    assert (found.models, found.function, found.inputs) == ((Path("/other.vmfb"),), "g", ("1xf32=2",))
    assert found.rtol == 0.1
    found = job(tmp_path / "flagfile", text, "--expected_rtol=0.1", function="h", rtol=0.2, models=(Path("a.onnx"),))
    assert (found.models, found.function, found.rtol) == ((Path("a.onnx"),), "h", 0.2)


def test_integers_stay_exact_beside_a_tolerance_as_the_tools_have_it(tmp_path):
    loose = "--module=m.vmfb\n--expected_rtol=0.001\n--expected_output=1xi32=2000000\n"
    assert (job(tmp_path / "flagfile", loose).rtol, job(tmp_path / "flagfile", loose, rtol=0.5).rtol) == (None, 0.5)
    mixed = job(tmp_path / "flagfile", f"{loose}--expected_output=1xf32=3\n")
    assert mixed.rtol is not None and mixed.atol is not None
    assert mixed.atol + mixed.rtol * 2000000 < 1
    assert job(tmp_path / "flagfile", "--expected_rtol=0.001\n--expected_output=1xf32=3\n").rtol == 0.001


@pytest.mark.parametrize(
    ("text", "later", "said"),
    [
        ("--nothing=1", (), "flagfile:1: hil does not know --nothing"),
        ("module=m", (), "is not --flag=value"),
        ("--print", (), "is not --flag=value"),
        ("--expected_rtol=wide", (), "is no number"),
        ("--expected_f16_threshold=1\n--expected_f32_threshold=2", (), "one absolute tolerance"),
        ("--parameters=model=w.irpa", (), "files of parameters"),
        ("", ("--device=cuda",), "--device is none of hil's flags"),
        ("", ("--benchmark_min_time=1s",), "--benchmark_min_time is none"),
        ("", ("--itertions=3",), "hil does not know --itertions"),
    ],
)
def test_what_hil_cannot_honour_is_refused(tmp_path, text, later, said):
    with pytest.raises(UsageError, match=said):
        job(tmp_path / "flagfile", text, *later)


def test_a_flag_file_that_is_missing_is_told(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        parse_flagfile(tmp_path / "none")
