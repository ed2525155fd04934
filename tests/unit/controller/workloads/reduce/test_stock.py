"""Commands that reproduce a failure without hil."""

from __future__ import annotations

import subprocess
import time

import pytest

from hil.controller.workloads.reduce.stock import IreeSource, make_iree_script, make_onnxruntime_script, run_script
from hil.core.results import Outcome
from tests.support.waiting import eventually


def test_hanging_script_is_killed_with_its_children(tmp_path):
    (tmp_path / "x.sh").write_text("echo begun\nsleep 987.25\necho ended\n")
    start = time.monotonic()
    assert run_script(str(tmp_path), "sh x.sh", limit=0.5) == {"code": None, "printed": "begun"}
    assert time.monotonic() - start < 20
    # A killed process ends only when the kernel schedules it again.
    eventually(lambda: not list_processes("sleep 987.25"), "the child ends", within_s=30)


def list_processes(text):
    listed = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if text in line and not line.startswith("Z")]


def test_script_returns_code_and_last_lines(tmp_path):
    (tmp_path / "x.sh").write_text("for n in $(seq 100); do echo $n; done; exit 3\n")
    done = run_script(str(tmp_path), "sh x.sh", limit=60)
    assert done["code"] == 3 and done["printed"].split() == [str(number) for number in range(61, 101)]


@pytest.mark.parametrize(
    ("rtol", "atol", "text"), [(0.0, 0.0, "wanted, 0.0, 0.0)"), (None, None, "wanted, 0.001, 1e-05)")]
)
def test_onnxruntime_script_has_tolerances(rtol, atol, text):
    assert text in make_onnxruntime_script(["i.npy"], ["e.npy"], rtol, atol).text


def test_iree_script_has_given_tolerances():
    given = make_iree_script(Outcome.FAIL, IreeSource("model.onnx", ""), (), "", ["i.npy"], ["e.npy"], 0.0, 0.25).text
    assert "--expected_rtol=0 " in given and "--expected_f32_threshold=0.25 " in given
    default = make_iree_script(
        Outcome.FAIL, IreeSource("model.onnx", ""), (), "", ["i.npy"], ["e.npy"], None, None
    ).text
    assert "rtol" not in default and "threshold" not in default


def test_iree_script_imports_only_onnx():
    onnx, mlir = (
        make_iree_script(Outcome.RUN_CRASH, IreeSource(file, "main"), (), "", [], [], None, None).text
        for file in ("model.onnx", "model.mlir")
    )
    assert "iree-import-onnx model.onnx -o model.mlir" in onnx and "--function=main_graph" in onnx
    assert "iree-import-onnx" not in mlir and "--function=main\n" in mlir
