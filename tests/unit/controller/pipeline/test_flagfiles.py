"""Flag files of IREE's tools, read and written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hil.controller.pipeline.settings.flagfiles import (
    FlagFile,
    choose_tool_tolerance,
    parse_flagfile,
    read_flagfile,
    write_flagfile,
)
from hil.controller.pipeline.settings.options import Job
from hil.errors import UsageError


def test_flagfile_round_trips(tmp_path):
    flags = FlagFile(
        modules=(tmp_path / "m.vmfb",),
        function="main",
        inputs=(f"@{tmp_path}/x.npy", f"2xi32=@{tmp_path}/y.bin", "4xf32=1 2 3 4"),
        expected=(f"@{tmp_path}/out.npy",),
        parameters=(tmp_path / "w.irpa",),
        device="local-sync",
        rtol=1e-4,
        atols={"float32": 1e-3, "bfloat16": 0.0},
    )
    write_flagfile(tmp_path / "new" / "flagfile", flags)
    assert parse_flagfile(tmp_path / "new" / "flagfile") == flags
    assert "--expected_bf16_threshold=0.0" in (tmp_path / "new" / "flagfile").read_text()
    with pytest.raises(UsageError, match="expected a single line"):
        write_flagfile(tmp_path / "flagfile", FlagFile(function="a\n--module=b"))


def job(path: Path, text: str, *later: str, **given: object) -> Job:
    path.write_text(text)
    return read_flagfile(Job(flagfile=path, **given), later)


def test_later_flags_and_options_override_flagfile(tmp_path):
    text = "# of mine\n--module=m.vmfb\n--function=f\n\n--input=@x.npy\n--device=hip\n--function=g\n--output=@y.npy\n"
    found = job(tmp_path / "flagfile", text)
    assert (found.models, found.function, found.inputs) == ((tmp_path / "m.vmfb",), "g", (f"@{tmp_path}/x.npy",))
    assert found.flagfile is None and found.rtol is None
    found = job(tmp_path / "flagfile", text, "--module=/other.vmfb", "--input=1xf32=2", "--expected_rtol=0.1")
    assert (found.models, found.function, found.inputs) == ((Path("/other.vmfb"),), "g", ("1xf32=2",))
    assert found.rtol == 0.1
    found = job(tmp_path / "flagfile", text, "--expected_rtol=0.1", function="h", rtol=0.2, models=(Path("a.onnx"),))
    assert (found.models, found.function, found.rtol) == ((Path("a.onnx"),), "h", 0.2)


@pytest.mark.parametrize(
    ("line", "option", "device"),
    [
        ("--device=vulkan\n", "", "vulkan"),
        ("--device=cuda://GPU-1\n", "", "cuda://GPU-1"),
        ("--device=vulkan\n", "local-sync", "local-sync"),
        ("--device=local-sync\n", "", ""),
        ("", "", ""),
    ],
)
def test_flagfile_selects_gpu(tmp_path, line, option, device):
    (tmp_path / "flagfile").write_text(f"--module=m.vmfb\n{line}")
    assert read_flagfile(Job(flagfile=tmp_path / "flagfile", device=option)).device == device


def test_integers_stay_exact_with_tolerance(tmp_path):
    loose = "--module=m.vmfb\n--expected_rtol=0.001\n--expected_output=1xi32=2000000\n"
    assert (job(tmp_path / "flagfile", loose).rtol, job(tmp_path / "flagfile", loose, rtol=0.5).rtol) == (None, 0.5)
    mixed = job(tmp_path / "flagfile", f"{loose}--expected_output=1xf32=3\n")
    assert mixed.rtol is not None and mixed.atol is not None
    assert mixed.atol + mixed.rtol * 2000000 < 1
    assert job(tmp_path / "flagfile", "--expected_rtol=0.001\n--expected_output=1xf32=3\n").rtol == 0.001


@pytest.mark.parametrize(
    ("text", "later", "said"),
    [
        ("--nothing=1", (), "flagfile:1: unknown flag --nothing"),
        ("module=m", (), "invalid flag 'module=m': expected --flag=value"),
        ("--print", (), "invalid flag '--print': expected --flag=value"),
        ("--expected_rtol=wide", (), "invalid --expected_rtol=wide: expected a number"),
        ("--equality_mode=some", (), "approximate, exact"),
        ("--module=a.vmfb\n--module=b.vmfb", (), "2 linked modules"),
        ("", ("--task_topology_mode=x",), "unsupported flag --task_topology_mode"),
        ("--parameters=model=w.irpa", (), "unsupported --parameters in"),
        ("", ("--device=cuda",), "unsupported flag --device"),
        ("", ("--benchmark_min_time=1s",), "unsupported flag --benchmark_min_time"),
        ("", ("--itertions=3",), "unknown flag --itertions"),
    ],
)
def test_flagfile_rejects_unsupported_flags(tmp_path, text, later, said):
    with pytest.raises(UsageError, match=said):
        job(tmp_path / "flagfile", text, *later)


def test_flagfile_rejects_missing_file(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        parse_flagfile(tmp_path / "none")


ONE, TINY, WHOLE = np.ones(2, np.float32), np.full(2, 1e-6, np.float32), np.array([7, 2_000_000])


@pytest.mark.parametrize(
    ("rtol", "atols", "expected", "found"),
    [
        (None, {}, [ONE], (1e-5, 1e-4)),
        (None, {}, [ONE.astype(np.float16)], (1e-5, 1e-3)),
        (0.1, {"float32": 0.2}, [ONE], (0.1, 0.2)),
        (None, {"float16": 0.2}, [ONE], (1e-5, 1e-4)),
        (None, {"float16": 0.2, "float32": 0.3}, [ONE, ONE.astype(np.float16)], (1e-5, 0.2)),
        # Bit by bit.
        (0.1, {}, [ONE.astype(np.complex64)], (0.0, 0.0)),
        (0.1, {"float32": 0.2}, [WHOLE], (None, None)),
        # The tool's tolerance would accept wrong values here, so hil's defaults apply.
        (None, {}, [80 * TINY], (None, None)),
        (None, {}, [np.array([1, 1.00005], np.float32)], (None, None)),
        (None, {}, [np.array([1, 1.00005], np.float32), WHOLE], (None, None)),
        (None, {}, [ONE, TINY], (None, None)),
        (0.1, {}, [TINY], (0.1, None)),
        (None, {"float32": 1e-9}, [TINY], (1e-5, 1e-9)),
        (None, {}, [np.zeros(3, np.float32)], (1e-5, 1e-4)),
    ],
)
def test_tool_tolerance_matches_iree_tools(rtol, atols, expected, found):
    assert choose_tool_tolerance(rtol, atols, expected) == found


def test_tool_tolerance_preserves_integers_exact():
    rtol, atol = choose_tool_tolerance(None, {}, [ONE, WHOLE])
    assert rtol is not None and atol == 1e-4
    assert atol + rtol * 2_000_000 < 1


def test_flagfile_records_expected_element_types(tmp_path):
    np.save(tmp_path / "y.npy", np.zeros(2, np.int64))
    lines = ["// a comment", "--print_statistics", "--task_topology_group_count=1", "--equality_mode=exact"]
    lines += ["--module=m.vmfb", "--expected_output=@y.npy", "--expected_output=2xf32=1 2"]
    more = ["--expected_output=(ignored)", "--expected_output=3"]
    found = job(tmp_path / "flagfile", "\n".join([*lines, *more]))
    assert found.element_types == ("si64", "f32", "", "")
    assert (found.rtol, found.atol) == (0.0, 0.0)
    assert job(tmp_path / "flagfile", "\n".join(lines), expected=("4xf32=1",)).element_types == ()
