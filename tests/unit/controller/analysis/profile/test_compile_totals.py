"""Totals of a compilation profile: phases, passes without nested passes, estimated operations."""

from __future__ import annotations

from pathlib import Path

import pytest

from hil.controller.analysis.profile.compilation.compile_totals import CompileStep, is_compile_profile, read_compilation
from hil.errors import UsageError

PASSES = """phase,depth,pass,wall_ms
Input,0,Input,10
Input,1,Import Pipeline,8
Input,2,Canonicalizer,3
Input,2,CSE,2
Input,1,CSE,1
Codegen,0,Codegen,30
Codegen,1,CSE,4
Codegen,3,Deep,5
Codegen,2,Inner,3
"""
DISPATCHES = """dispatch,onnx_nodes,share_estimate,time_us_estimate,flops_estimate,bytes_estimate,bound_estimate
d0,conv1;relu1,0.25,10,100,200,memory
d1,,0.75,30,300,,
d2,pool1,,,,,
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "passes.csv").write_text(PASSES)
    (tmp_path / "dispatches.csv").write_text(DISPATCHES)
    (tmp_path / "executables.csv").write_text("executable,bytes\ne0,1000\ne1,24\n")
    return tmp_path


def test_read_compilation_sums_phases_passes_and_operations(folder):
    found = read_compilation(folder)
    assert is_compile_profile(folder) and not is_compile_profile(folder / "none")
    assert found.seconds == pytest.approx(0.04)
    assert [(one.name, one.share) for one in found.phases] == [("Input", 0.25), ("Codegen", 0.75)]
    # "Import Pipeline" only runs other passes; the two CSE runs (2 ms and 1 ms) are merged per phase.
    assert [(one.phase, one.name, round(one.seconds * 1e3, 9), one.runs) for one in found.passes] == [
        ("Codegen", "Deep", 5, 1),
        ("Input", "Canonicalizer", 3, 1),
        ("Input", "CSE", 3, 2),
        ("Codegen", "Inner", 3, 1),
        ("Codegen", "CSE", 1, 1),
    ]
    assert [(one.name, one.share, one.bytes, one.bound) for one in found.operations] == [
        ("d1", 0.75, None, ""),
        ("conv1, relu1", 0.25, 200, "memory"),
    ]
    assert (found.dispatches, found.program_bytes) == (3, 1024)
    assert isinstance(found.phases[0], CompileStep)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("passes.csv", "phase,pass\na,b\n"),
        ("passes.csv", "phase,depth,pass,wall_ms\na,x,b,1\n"),
        ("passes.csv", "phase,depth,pass,wall_ms\na\n"),
        ("dispatches.csv", "dispatch,share_estimate\nd,much\n"),
        ("executables.csv", "bytes\n-\n"),
    ],
)
def test_read_compilation_rejects_damaged_table(folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(UsageError, match="cannot be read"):
        read_compilation(folder)


def test_read_compilation_rejects_missing_table(folder):
    (folder / "executables.csv").unlink()
    with pytest.raises(UsageError, match=r"executables.csv cannot be read"):
        read_compilation(folder)
